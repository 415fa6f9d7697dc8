"""Finds the models in a file of Python code: the objects that can be served without options."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from gateway.catalog.factories import imported
from gateway.config.problem import ConfigError
from models.adapt import is_loader, made_family, spec_of
from models.spec import ModelSpec

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_LISTED = 300  # characters of names in an error


def models_of(file: str) -> list[str]:
    """The `module:attribute` of each model that a file defines, in the file's order. Imports the file, by its path below the
    working directory. ConfigError if it cannot be imported or has no model."""
    name = module_of(file)
    module = imported(name, file)
    if (origin := getattr(module, "__file__", None)) is None or not Path(origin).samefile(file):
        raise ConfigError(f"{file}: Python has another module called {name!r}, {origin or 'built in'}: rename the file")
    found, reason = models_in(module)
    if not found:
        raise ConfigError(f"{file} has no model{reason}")
    return [f"{name}:{attribute}" for attribute in found]


def one_model_of(file: str) -> str:
    """The `module:attribute` of the only model in a file. ConfigError if it has none or several."""
    found = models_of(file)
    if len(found) > 1:
        count = _NUMBERS[len(found)] if len(found) < len(_NUMBERS) else len(found)
        names = ", ".join(factory.partition(":")[2] for factory in found)[:_LISTED]
        raise ConfigError(f"{file} has {count} models: {names}. Name one: --model {found[0]}")
    return found[0]


def module_of(file: str) -> str:
    """The module name of a file below the working directory. ConfigError if it cannot have one."""
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"{file}: no such file")
    try:
        parts = path.resolve().relative_to(Path.cwd().resolve()).with_suffix("").parts
    except ValueError:
        raise ConfigError(f"{file} is not below {Path.cwd()}: start in its folder") from None
    if wrong := [part for part in parts if not part.isidentifier()]:
        raise ConfigError(f"{file}: {wrong[0]!r} cannot be the name of a Python module: rename it")
    return ".".join(parts)


def models_in(module: ModuleType) -> tuple[list[str], str]:
    """The names of the models that a module defines; if there are none, also the reason, as the end of a sentence. Names
    that begin with an underscore and imported objects do not count, nor does a class that has an object among the models. No
    function is called to find out."""
    own = {
        name: thing
        for name, thing in vars(module).items()
        if not name.startswith("_") and (isinstance(thing, ModelSpec) or _home(thing) == module.__name__)
    }
    found, wrong = [], ""
    for name, thing in own.items():
        try:
            served = _is_model(thing)
        except (TypeError, ValueError) as e:
            wrong = wrong or f": {e}"
        else:
            if served:
                found.append(name)
    used = _used_in(own[name] for name in found)
    found = [name for name in found if own[name] not in used]
    return found, wrong or ": it defines no function whose first parameter is annotated, such as prompt: Prompt"


def _used_in(things: Any) -> Sequence[Any]:
    """The classes of the objects among these."""
    return [type(thing) for thing in things if not (inspect.isclass(thing) or inspect.isroutine(thing))]


def _home(thing: Any) -> str:
    return str(getattr(thing, "__module__", ""))


def _is_model(thing: Any) -> bool:
    """True for a model, for a loader, and for a class or factory whose annotations show that it makes a model. TypeError or
    ValueError for an object that was perhaps meant as a model."""
    if isinstance(thing, ModelSpec):
        return True
    if inspect.isclass(thing) or (inspect.isroutine(thing) and not inspect.signature(thing).parameters):
        if is_loader(thing):
            return bool(spec_of(thing))
        return _needs_nothing(thing) and made_family(thing) is not None
    if is_loader(thing):
        return _needs_nothing(thing) and bool(spec_of(thing))
    return callable(thing) and bool(spec_of(thing))


def _needs_nothing(thing: Any) -> bool:
    try:
        inspect.signature(thing).bind()
    except (TypeError, ValueError):
        return False
    return True
