"""Makes a ModelSpec from `module:attribute` and the configuration; and the library models by name."""

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
from gateway.config.text import dotted, text_without_secrets
from models.adapt import adapt, is_loader, made_declared, made_family, partial_loader, spec_of
from models.blocking import run_step
from models.errors import is_failure
from models.spec import Batching, Model, ModelSpec, Restart, RestartPolicy, TensorSpec
from models.tracebacks.frames import author_frame


@final
class FactoryRaised(TypeError):
    """A factory raised when it was called to see what it makes."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"calling it raised {_told(error)}")
        self.error = error


@final
class OptionMisfit(TypeError):
    """A class, a factory or a loader cannot be called with the options of its model. The text says how to give those that
    are missing, and names the others."""

    def __init__(self, said: str, section: str, signature: inspect.Signature, options: dict[str, Any]) -> None:
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        takes = {own.name: own for own in signature.parameters.values() if own.kind in by_name}
        missing = [own for own, parameter in takes.items() if parameter.default is parameter.empty and own not in options]
        others = ", ".join(own for own in takes if own not in missing)
        file = f"options = {{{', '.join(f'{own} = VALUE' for own in missing)}}}"
        sets = " ".join(f"--set {section}.options.{own}=VALUE" for own in missing)
        rest = f". Other options: {others}" if others else ""
        self.for_folder = f"{said}. Give {file}{rest}" if missing else f"{said}. Its options: {others or 'none'}"
        """The text for the author of a model folder."""
        super().__init__(
            f"{said}. Give {sets}, or in a file below [{section}]: {file}{rest}" if missing else self.for_folder
        )


DescribesProcesses: TypeAlias = Callable[[str, ModelConfig, float], ModelSpec]
"""Returns the spec that a model's code declares, for a model that runs in processes. Its arguments are the name, the
configuration, and the seconds that sessions have to end in a process that is replaced."""


def load_spec(
    name: str, config: ModelConfig, *, patience: float = 60.0, processes: DescribesProcesses = process_spec
) -> ModelSpec:
    """Returns the spec of a configured model. The configuration overrides what the model's code declares.

    `config.factory` is `module:attribute`, or a name in `LIBRARY`. The attribute is anything that `models.adapt.spec_of`
    takes, or a factory of that: a class, or a function that needs no argument but the options. The worker calls a factory
    in a thread, at each start. Only a factory whose annotations do not give the model's family is called here, once.

    `patience`: seconds that sessions have to end in a process that is replaced. `processes` returns the specs of models that
    run in processes. ConfigError says which module or attribute is missing, or why it is not a model.
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
    """Replaces the name of a library model by its factory and its default capacity; other configurations are unchanged."""
    known = LIBRARY.get(config.factory)
    if known is None:
        return config
    return replace(config, factory=known.factory, capacity=known.capacity if config.capacity is None else config.capacity)


def _not_served(name: str, config: ModelConfig, error: Exception) -> ConfigError:
    return ConfigError(f"models.{name}: {config.factory}: {text_without_secrets(str(error))}")


def served_spec(name: str, config: ModelConfig, spec: ModelSpec) -> ModelSpec:
    """Returns the spec of a model's code with what the configuration sets. ConfigError says what does not fit together."""
    # numbers and texts are taken as they are; the code below converts the rest to the types of the spec
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
        for field in ("served_names", "subprotocols"):
            if (names := getattr(config, field)) is not None:
                said[field] = names
        if config.features is not None:
            said["features"] = frozenset(config.features)
        spec = replace(spec, **said)
        if config.warmup is not None:
            spec = replace(spec, warmup=read_warmup(spec, config.warmup))
        return loadable(spec)
    except (TypeError, ValueError) as e:
        raise _not_served(name, config, e) from e


def made_spec(name: str, factory: str, options: dict[str, Any]) -> ModelSpec:
    """Returns the spec that the code of a factory declares. ConfigError as for `load_spec`."""
    try:
        return _spec(name, _attribute(name, factory), options)
    except (TypeError, ValueError) as e:
        raise ConfigError(f"models.{name}: {factory}: {text_without_secrets(str(e))}") from e


def _restart(own: RestartPolicy, config: RestartConfig) -> RestartPolicy:
    """Returns the code's restart policy with what the configuration sets."""
    said = said_of(RestartPolicy, config)
    policy = replace(own, **said | {"kind": Restart(said.get("kind", own.kind))})
    if "backoff" in said and policy.backoff > policy.backoff_max:
        raise ValueError(f"restart.backoff is {policy.backoff:g}, more than restart.backoff_max, {policy.backoff_max:g}")
    return policy


def _batching(own: Batching | None, config: BatchingConfig) -> Batching | None:
    """Returns the code's batching with what the configuration sets; None if requests are not batched."""
    said = said_of(Batching, config)
    wanted = own is not None or bool(said) if config.enabled is None else config.enabled
    return replace(own or Batching(), **said) if wanted else None


def _check_names(side: str, own: Sequence[TensorSpec] | None, said: Sequence[TensorSpec] | None) -> None:
    """Raises ValueError if the configuration declares tensors that the code does not, or leaves out a required one."""
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
        _check_options(name, thing, options)
        return spec_of(partial_loader(thing, options), name) if options else spec_of(thing, name)
    if not options and not inspect.isclass(thing) and not _gives_spec(thing) and _needs_arguments(thing):
        return spec_of(thing, name)
    _check_options(name, thing, options)
    make = partial(thing, **options)
    family = made_family(thing)
    if family is None:  # its annotations do not give the family, so the model that it makes must
        try:
            made = make()
        except ConfigError as e:  # from a factory of this project: the text says what is wrong with an option
            raise TypeError(str(e)) from None
        except BaseException as e:  # the user's own code, which may raise anything, and may want to leave
            if not is_failure(e):
                raise
            raise FactoryRaised(e) from e
        try:
            return spec_of(made, name)
        except TypeError as e:
            # a function that needs no argument counts as a factory, even if its author meant it as a model
            said = str(e) if inspect.isclass(thing) else f"it was called to make a model, for it needs no argument: {e}"
            raise TypeError(said) from None

    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        # a separate limiter, so that a factory that does not return takes no thread from other models
        yield adapt(await run_step(make, limiter=trio.CapacityLimiter(1)), family=family)[0]

    return ModelSpec(name=name, family=family, load=load, **made_declared(thing, family))


def _check_options(name: str, thing: Any, options: dict[str, Any]) -> None:
    """Raises TypeError if a class, a factory or a loader cannot be called with these options."""
    signature = inspect.signature(thing)
    try:
        signature.bind(**options)
    except TypeError as e:
        raise OptionMisfit(str(e), dotted(("models", name)), signature, options) from None


def _gives_spec(thing: Any) -> bool:
    """True if the function is annotated to return a ModelSpec, so that it is a factory even without the options it needs."""
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
    """Imports a module by name, also from the working directory. If that fails, it raises a ConfigError that begins with
    `setting`."""
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
    """Returns the error in one line: its type, its text, and the place that raised it."""
    text = text_without_secrets(f"{type(error).__name__}: {' '.join(str(error).split())}")[:300]
    if isinstance(error, SyntaxError):
        return text  # which has the place already
    place = author_frame(error) or traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({place.filename}, line {place.lineno})"


def configured_specs(config: Config, processes: DescribesProcesses = process_spec) -> list[ModelSpec]:
    """Returns the specs of all configured models. `processes` returns those of models that run in processes."""
    patience = config.repository.unload_timeout
    return [load_spec(name, model, patience=patience, processes=processes) for name, model in config.models.items()]


LIBRARY: Mapping[str, ModelConfig] = {
    "echo": ModelConfig(factory="models.library.echo:Echo", capacity=4096),
    "identity": ModelConfig(factory="models.library.tensors:identity", capacity=4096),
    "add_sub": ModelConfig(factory="models.library.tensors:add_sub", capacity=4096),
    "lm": ModelConfig(factory="models.library.lm:LanguageModel.load", capacity=256),
    "speech": ModelConfig(factory="models.library.speech:SpeechSegmenter", capacity=1024),
}
"""The models that come with the gateway. It serves them if no model is configured."""


def library_specs() -> list[ModelSpec]:
    """Returns the specs of the library models."""
    return [load_spec(name, config) for name, config in LIBRARY.items()]
