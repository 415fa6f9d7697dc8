"""From `module:attribute` and the configuration to a ModelSpec; and the library models by name."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, final

import trio

from gateway.catalog.process_model import loadable, process_spec
from gateway.catalog.warmup import read_warmup
from gateway.config import BatchingConfig, Config, ModelConfig, RestartConfig
from gateway.config.fields import said_of
from gateway.config.problem import ConfigError
from gateway.config.text import text_without_secrets
from models.adapt import adapt, is_loader, made_declared, made_family, partial_loader, spec_of
from models.blocking import run_step
from models.errors import is_failure
from models.spec import Batching, Model, ModelSpec, Restart, RestartPolicy, TensorSpec


@final
class FactoryRaised(TypeError):
    """A factory raised when it was called to see what it makes."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"calling it raised {_told(error)}")
        self.error = error


DescribesProcesses: TypeAlias = Callable[[str, ModelConfig, float], ModelSpec]
"""Gives the spec of a model that runs in processes, as its code says it: by its name, its configuration, and the seconds
that sessions have to end in a process of it that is to end."""


def load_spec(
    name: str, config: ModelConfig, *, patience: float = 60.0, processes: DescribesProcesses = process_spec
) -> ModelSpec:
    """The spec of a configured model: what the configuration does not set is the spec's own. `patience`: seconds that
    sessions have to end in a process of the model that is to end. `processes` describes those that run in some. ConfigError
    says which module or attribute is missing, or why it is no model.

    A name without a module is one of `LIBRARY`. The attribute may be what `models.adapt.spec_of` takes, or a factory of it:
    a class, or a function that can be called with the options alone. A factory runs in a thread, in the worker, anew at each
    start.
    """
    config = library_model(config)
    try:
        own = (
            processes(name, config, patience)
            if config.process.wanted
            else _spec(name, _attribute(name, config.factory), config.options)
        )
    except (TypeError, ValueError) as e:
        raise _not_served(name, config, e) from e
    return served_spec(name, config, own)


def library_model(config: ModelConfig) -> ModelConfig:
    """The configuration of a model that names one of the library, with what that is made by; else the same."""
    known = LIBRARY.get(config.factory)
    if known is None:
        return config
    return replace(config, factory=known.factory, capacity=known.capacity if config.capacity is None else config.capacity)


def _not_served(name: str, config: ModelConfig, error: Exception) -> ConfigError:
    return ConfigError(f"models.{name}: {config.factory}: {text_without_secrets(str(error))}")


def served_spec(name: str, config: ModelConfig, spec: ModelSpec) -> ModelSpec:
    """A spec as its code says it, with what the configuration sets. ConfigError says what does not fit together."""
    # numbers and texts hold as they are; the rest is made into what the spec has for it
    said: dict[str, Any] = {
        field: value for field, value in said_of(ModelSpec, config).items() if isinstance(value, str | int | float)
    }
    try:
        for side, tensors in (("inputs", config.inputs), ("outputs", config.outputs)):
            if tensors is not None:
                said[side] = tuple([TensorSpec(**asdict(tensor)) for tensor in tensors])
        for side in ("inputs", "outputs"):
            _check_names(side, getattr(spec, side), said.get(side))
        said["batching"] = _batching(spec.batching, config.batching)
        said["restart"] = _restart(spec.restart, config.restart)
        spec = replace(spec, **said)
        if config.warmup is not None:
            spec = replace(spec, warmup=read_warmup(spec, config.warmup))
        return loadable(spec)
    except (TypeError, ValueError) as e:
        raise _not_served(name, config, e) from e


def made_spec(name: str, factory: str, options: dict[str, Any]) -> ModelSpec:
    """The spec of what a factory makes, as its code says it. ConfigError as `load_spec`."""
    try:
        return _spec(name, _attribute(name, factory), options)
    except (TypeError, ValueError) as e:
        raise ConfigError(f"models.{name}: {factory}: {text_without_secrets(str(e))}") from e


def _restart(own: RestartPolicy, config: RestartConfig) -> RestartPolicy:
    """When a model is loaded again."""
    said = said_of(RestartPolicy, config)
    policy = replace(own, **said | {"kind": Restart(said.get("kind", own.kind))})
    if "backoff" in said and policy.backoff > policy.backoff_max:
        raise ValueError(f"restart.backoff is {policy.backoff:g}, more than restart.backoff_max, {policy.backoff_max:g}")
    return policy


def _batching(own: Batching | None, config: BatchingConfig) -> Batching | None:
    """How a model's requests are batched, where they are."""
    said = said_of(Batching, config)
    wanted = own is not None or bool(said) if config.enabled is None else config.enabled
    return replace(own or Batching(), **said) if wanted else None


def _check_names(side: str, own: Sequence[TensorSpec] | None, said: Sequence[TensorSpec] | None) -> None:
    """ValueError where the configuration declares tensors of other names than those that the code has."""
    if own is None or said is None:
        return
    names, known = [tensor.name for tensor in said], [tensor.name for tensor in own]
    if not {tensor.name for tensor in own if not tensor.optional} <= set(names) <= set(known):
        has, given = ", ".join(known)[:200] or "none", ", ".join(names)[:200] or "none"
        raise ValueError(f"{side}: the names must be those that the model's code has, {has}, got {given}")


def _spec(name: str, thing: Any, options: dict[str, Any]) -> ModelSpec:
    if isinstance(thing, ModelSpec):
        if options:
            raise TypeError("a ModelSpec takes no options")
        return spec_of(thing, name)
    if is_loader(thing):
        _check_options(thing, options)
        return spec_of(partial_loader(thing, options), name) if options else spec_of(thing, name)
    if not options and not inspect.isclass(thing) and not _gives_spec(thing) and _needs_arguments(thing):
        return spec_of(thing, name)
    _check_options(thing, options)
    make = partial(thing, **options)
    family = made_family(thing)
    if family is None:  # its annotations do not say: the product must
        try:
            made = make()
        except ConfigError as e:  # one of ours: it says what is wrong with an option
            raise TypeError(str(e)) from None
        except BaseException as e:  # the user's own code, which may raise anything, and may want to leave
            if not is_failure(e):
                raise
            raise FactoryRaised(e) from e
        try:
            return spec_of(made, name)
        except TypeError as e:
            # a function that needs no more arguments is a factory, whatever it was meant to be
            said = str(e) if inspect.isclass(thing) else f"it was called to make a model, for it needs no argument: {e}"
            raise TypeError(said) from None

    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        # a limiter of its own: a factory that does not return keeps no thread from anybody else
        yield adapt(await run_step(make, limiter=trio.CapacityLimiter(1)), family=family)[0]

    return ModelSpec(name=name, family=family, load=load, **made_declared(thing, family))


def _check_options(thing: Any, options: dict[str, Any]) -> None:
    """TypeError where a class, a factory or a loader cannot be called with these options."""
    signature = inspect.signature(thing)
    try:
        signature.bind(**options)
    except TypeError as e:
        given = ", ".join(options) or "none"
        raise TypeError(f"{e}: its parameters are {str(signature)[:200]}, its options are {given[:200]}") from None


def _gives_spec(thing: Any) -> bool:
    """Whether its annotation says that it is a factory, also where the options that it needs are missing."""
    return inspect.isroutine(thing) and inspect.signature(thing).return_annotation in (ModelSpec, ModelSpec.__name__)


def _needs_arguments(thing: Any) -> bool:
    try:
        inspect.signature(thing).bind()
    except TypeError:
        return True
    return False


def _attribute(name: str, path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    if not attribute:
        raise ConfigError(
            f"models.{name}.factory must be module:attribute, or the name of a library model, of which there are "
            f"{', '.join(LIBRARY)}; got {path!r}"
        )
    thing: Any = imported(module_name, f"models.{name}.factory")
    for part in attribute.split("."):
        try:
            thing = getattr(thing, part)
        except AttributeError:
            own = [
                n for n, v in getattr(thing, "__dict__", {}).items() if getattr(v, "__module__", module_name) == module_name
            ]
            there = ", ".join(n for n in own if not n.startswith("_"))[:200]
            has = f"; it has: {there}" if there else ""
            raise ConfigError(f"models.{name}.factory: {module_name!r} has no {attribute!r}{has}") from None
    return thing


def imported(module_name: str, setting: str) -> ModuleType:
    """The module of that name, which may be a file of the working directory. ConfigError, which begins with `setting`, where
    it cannot be imported."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        where = f" in {Path.cwd()} or among the installed packages" if e.name == module_name else ""
        raise ConfigError(f"{setting}: cannot import {module_name!r}: {e}{where}") from e
    except BaseException as e:  # the user's own code, which may raise anything, and may want to leave
        if not is_failure(e):
            raise
        raise ConfigError(f"{setting}: cannot import {module_name!r}: {_told(e)}") from e


def _told(error: BaseException) -> str:
    """The error in one line: its type, its text, and where it was raised."""
    text = text_without_secrets(f"{type(error).__name__}: {' '.join(str(error).split())}")[:300]
    if isinstance(error, SyntaxError):
        return text  # its text has the place
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({last.filename}, line {last.lineno})"


def configured_specs(config: Config, processes: DescribesProcesses = process_spec) -> list[ModelSpec]:
    """The specs of all models that the configuration names. `processes` describes those that run in some."""
    patience = config.repository.unload_timeout
    return [load_spec(name, model, patience=patience, processes=processes) for name, model in config.models.items()]


LIBRARY: Mapping[str, ModelConfig] = {
    "echo": ModelConfig(factory="models.library.echo:Echo", capacity=4096),
    "identity": ModelConfig(factory="models.library.tensors:identity", capacity=4096),
    "add_sub": ModelConfig(factory="models.library.tensors:add_sub", capacity=4096),
    "lm": ModelConfig(factory="models.library.lm:LanguageModel.load", capacity=256),
    "speech": ModelConfig(factory="models.library.speech:SpeechSegmenter", capacity=1024),
}
"""The models that come with the gateway, served where none is configured."""


def library_specs() -> list[ModelSpec]:
    """The specs of the library models."""
    return [load_spec(name, config) for name, config in LIBRARY.items()]
