"""Finds a folder that holds a model, reads its model.toml, and makes a ModelSpec of it."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import logging
import os
import re
import stat
import sys
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, final
from urllib.parse import unquote, urlsplit

from gateway.catalog.factories import LIBRARY, FactoryRaised, OptionMisfit, load_spec, served_spec
from gateway.catalog.process_model import discard, process_spec, started_spec
from gateway.config import ModelConfig, ProcessConfig
from gateway.config.load import model_values
from gateway.config.problem import ConfigError
from gateway.config.properties import FILE as PROPERTIES
from gateway.config.properties import ServingProperties, read_properties
from gateway.config.text import read_toml, show, text_without_secrets
from gateway.errors import BadModel, BadRequest, Conflict, GatewayError, InsufficientStorage, LoadFailed, NotFound
from gateway.instances.instance import InstanceEnded, RaisedThere
from gateway.instances.messages import Folder
from models.errors import ModelExit, is_failure, is_out_of_memory
from models.formatters import is_marked, marked
from models.spec import ModelSpec
from protocols.floods import TOML_BYTES

log = logging.getLogger("gateway.model_folder")

TOML, CODE = "model.toml", "model.py"
FILES = (TOML, CODE, PROPERTIES)
"""The files that describe a model in its folder."""
_PROPERTIES_BYTES = 64 * 1024
_ENTRIES = 100_000
_SHOWN = 200
_LONGEST_TEXT = 16 * 1024  # longer than any path, so that none is cut before it is found
_LIBRARY = "models.library"
_FACTORY_WANTED = f'the name of a library model, or "{_LIBRARY}.module:attribute"'
_FACTORY = re.compile(r"models\.library\.([a-z]\w*)((?:\.[a-z]\w*)*):([A-Za-z]\w*)((?:\.[A-Za-z]\w*)*)")


@final
@dataclass(frozen=True, slots=True)
class Place:
    """A path, and the name that errors give it. `str` returns that name, so that an error shows no path that its reader did
    not supply."""

    path: str
    """Absolute, without symbolic links."""
    shown: str

    def __str__(self) -> str:
        return _said(self.shown)

    def at(self, path: str) -> Place:
        """Returns the place of a path inside this one, absolute or relative to it."""
        file = os.path.join(self.path, path)
        return Place(file, os.path.join(self.shown, os.path.relpath(file, self.path)))

    def retold(self, text: str) -> str:
        """Replaces the path in the text of other code, plain or as Python quotes it, by the name for errors."""
        for path in {self.path, repr(self.path)[1:-1]}:
            text = re.sub(rf"(?<![\w.-]){re.escape(path)}(?![\w-]|\.\w)", lambda _: self.shown, text)
        return text


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A model's folder as read, before any code of the model has run."""

    place: Place
    config: ModelConfig
    """The defaults with what the folder's files set; `factory` is empty if the model is in model.py."""
    given: Mapping[str, str]
    """The keys that the folder's files set, as model.toml names them, each with the name of its file."""
    options: Mapping[str, str]
    """The options of serving.properties, in lower case."""
    code: bool
    """True if there is a model.py."""
    size: int
    """Bytes of all regular files, each counted once."""
    stamp: int
    """The result of `stamp_of` for the folder."""

    @property
    def path(self) -> str:
        """Absolute, without symbolic links."""
        return self.place.path

    @property
    def source(self) -> Place:
        """The file that defines the model."""
        return self.place.at(TOML if self.config.factory else CODE)

    @property
    def need(self) -> int:
        """Bytes to reserve before the model is loaded: the declared `memory`, or else 1.2 times the size of the files (DJL's
        rule)."""
        return self.config.memory or self.size * 6 // 5


# ---- finding the folder ----


def find_folder(url: str, roots: Iterable[str], *, shown: str = "") -> str:
    """Returns the folder that `url` names, with all symbolic links followed. `url` is an absolute path, or file:// and an
    absolute path. Errors name `shown` in its place if the caller's client did not supply the url.

    BadRequest if the folder is not under one of the roots, whose own links are followed too. The error does not reveal
    what exists outside them. Under a root: NotFound if nothing is there, BadRequest if it is not a folder.
    """
    path = _local_path(url, shown)
    said = _asked(path, shown)
    real = os.path.realpath(path)
    if not under(real, roots):
        raise BadRequest(f"{said} is not under one of the folders that models are loaded from (repository.roots)")
    try:
        kind = os.stat(real).st_mode
    except OSError:
        raise NotFound(f"{said}: there is no such folder") from None
    if stat.S_ISDIR(kind):
        return real
    if path.endswith((".tar.gz", ".tgz", ".tar", ".zip")):
        raise BadRequest(f"{said} is an archive: it must be unpacked, and the folder named")
    raise BadRequest(f"{said} is not a folder")


def under(path: str, roots: Iterable[str]) -> bool:
    """True if a path without links is one of the roots, or inside one."""
    return any(_inside(path, os.path.realpath(root)) for root in roots)


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _asked(url: str, shown: str) -> str:
    return f"model {show(shown)}" if shown else f"url {_said(url)}"


def _local_path(url: str, shown: str) -> str:
    path, said = url, _asked(url, shown)
    if url[:5].lower() == "file:":
        try:
            parts = urlsplit(url)
        except ValueError:
            raise BadRequest(f"{said} is not a URL") from None
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise BadRequest(f"{said} must be file:// and an absolute path of this machine, and nothing else")
        path = unquote(parts.path, errors="surrogateescape")
    if not path.startswith("/"):
        raise BadRequest(f"url must be an absolute path, or file:// and an absolute path, not {_said(url)}")
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise BadRequest(f"{said} is not a path: it is not UTF-8") from None
    if "\0" in path:
        raise BadRequest(f"{said} is not a path: it contains a zero byte")
    return path


# ---- reading the folder ----


def read_folder(path: str, *, code: Iterable[str], defaults: ModelConfig, shown: str = "") -> ModelFolder:
    """Reads a folder that `find_folder` has found: model.toml, serving.properties, and the sizes of the files; no code runs.

    With model.toml alone, the model is one of the library. With model.py, the model is what that file defines, and
    model.toml only sets how it is served. If model.toml also names a library model, model.py holds only formatters for it.
    model.py is allowed only below the folders in `code`. serving.properties sets what model.toml does not, and the form of
    the answers. BadModel names the file and the key of a mistake; it shows the folder as `shown`, by default the path.
    Blocks.
    """
    place = Place(path, shown or path)
    size, stamp = _size(place), stamp_of(path)
    file, source = place.at(TOML), place.at(CODE)
    has_code = os.path.lexists(source.path)
    values = _read_toml(file) if os.path.lexists(file.path) else None
    if values is None and not has_code:
        alone = os.path.lexists(place.at(PROPERTIES).path)
        why = f"{PROPERTIES} says how a model is served, but not which model" if alone else "it is not a model's folder"
        raise BadModel(f"{place} holds neither {TOML} nor {CODE}: {why}")
    values = values or {}
    config = replace(defaults, factory="")
    if has_code:
        if not under(path, code):
            raise BadModel(f"{source} is code, and runs only below the folders of repository.code")
        _regular(source)
    if "factory" in values:
        config = _library_config(file, values["factory"], defaults)
    elif not has_code:
        raise BadModel(f"{file}: factory is missing: the name of a library model, such as {_listed(LIBRARY)}")
    properties = _read_properties(place.at(PROPERTIES))
    given = {**dict.fromkeys(properties.served, PROPERTIES), **dict.fromkeys(values, TOML)}
    values = {**properties.served, **values}
    served = {k: v for k, v in values.items() if k != "factory"}
    if "process" in served:
        served["process"] = _process(file, config.process, served["process"], code=under(path, code))
    return ModelFolder(
        place=place,
        config=replace(config, **served),
        given=given,
        options=properties.options,
        code=has_code,
        size=size,
        stamp=stamp,
    )


def _process(file: Place, defaults: ProcessConfig, said: Mapping[str, Any], *, code: bool) -> ProcessConfig:
    for key in ("environment", "python"):
        if key in said and not code:
            raise BadModel(f"{file}: process.{key} can be set only below the folders of repository.code")
    return replace(defaults, **said)


def has_changed(folder: ModelFolder) -> bool:
    """True if a file of the folder has changed, appeared or disappeared since it was read. Blocks."""
    return stamp_of(folder.path) != folder.stamp


def changed(name: str, place: object) -> Conflict:
    """Returns the error for the client that asked for a load of a folder that others change meanwhile."""
    return Conflict(f"model {show(name)} cannot be loaded: {place} has changed while it was read; load it again")


def stamp_of(path: str) -> int:
    """Returns a number that changes when a file of the folder changes, appears or disappears. It means nothing to another
    process. Blocks."""
    found = []
    for at, _, files in os.walk(path):
        if os.path.basename(at) == "__pycache__":
            continue
        for name in files:
            with suppress(OSError):  # a dangling link, or a file deleted meanwhile
                file = os.stat(os.path.join(at, name))
                found.append((at, name, file.st_ino, file.st_size, file.st_mtime_ns))
    return hash(frozenset(found))


def _size(place: Place) -> int:
    """Returns the bytes of all regular files. BadModel for a link that leads out of the folder: all of a model is inside."""
    path, total, entries = place.path, 0, 0
    counted: set[tuple[int, int]] = set()
    try:
        os.scandir(path).close()
    except OSError as e:
        raise BadModel(f"{place} cannot be read: {e.strerror}") from None
    for at, folders, files in os.walk(path):
        folders[:] = [name for name in folders if name != "__pycache__"]
        entries += len(folders) + len(files)
        if entries > _ENTRIES:
            raise BadModel(f"{place} holds more than {_ENTRIES} files")
        for name in (*folders, *files):
            entry = os.path.join(at, name)
            if os.path.islink(entry) and not _inside(os.path.realpath(entry), path):
                raise BadModel(f"{place.at(entry)} is a link that leads out of the model's folder")
        for name in files:
            try:
                found = os.stat(os.path.join(at, name))
            except OSError:
                continue  # a dangling link, or a file deleted meanwhile
            if stat.S_ISREG(found.st_mode) and (found.st_dev, found.st_ino) not in counted:
                counted.add((found.st_dev, found.st_ino))
                total += found.st_size
    return total


def _regular(file: Place) -> None:
    """Raises BadModel unless the file is a regular one: reading a pipe or a device might block, or never end."""
    try:
        if stat.S_ISREG(os.stat(file.path).st_mode):
            return
    except OSError as e:
        raise BadModel(f"{file} cannot be read: {e.strerror}") from None
    raise BadModel(f"{file} is not a regular file")


def _read(file: Place, most: int, said: str) -> bytes:
    _regular(file)
    try:
        with open(file.path, "rb") as opened:
            data = opened.read(most + 1)
    except OSError as e:
        raise BadModel(f"{file} cannot be read: {e.strerror}") from None
    if len(data) > most:
        raise BadModel(f"{file} is larger than {said}")
    return data


def _read_properties(file: Place) -> ServingProperties:
    """Reads serving.properties; a missing file counts as an empty one."""
    data = _read(file, _PROPERTIES_BYTES, "64 KiB") if os.path.lexists(file.path) else b""
    try:
        said = read_properties(data)
    except (ConfigError, ValueError) as e:
        raise BadModel(f"{file}: {e}") from None
    if said.ignored:  # without their values: some are secrets
        keys = _listed(show(key, quoted=False) for key in said.ignored)
        log.debug("keys that do nothing here", extra={"file": str(file), "keys": keys})
    return said


def _read_toml(file: Place) -> dict[str, Any]:
    """Reads the values of model.toml and checks each by itself."""
    try:
        table = read_toml(_read(file, TOML_BYTES, f"{TOML_BYTES // 1024} KiB").decode())
    except UnicodeDecodeError as e:
        raise BadModel(f"{file} is not UTF-8 text (at byte {e.start})") from None
    except ValueError as e:
        raise BadModel(f"{file} is not TOML: {str(e)[:_SHOWN]}") from None
    factory = table.pop("factory", None)
    if not isinstance(factory, str | None):
        raise BadModel(f"{file}: factory must be {_FACTORY_WANTED}, not {show(factory)}")
    try:
        values = model_values(table, str(file))
    except ConfigError as e:
        raise BadModel(str(e)) from None
    return values if factory is None else {**values, "factory": factory}


# ---- making the spec ----


def make_spec(folder: ModelFolder, name: str, module: str, patience: float = 60.0) -> ModelSpec:
    """Returns the ModelSpec of a folder's model. Blocks for as long as the model's code does.

    model.py runs as the module `module`, which must be a unique name; `forget` undoes that. If the model runs in processes,
    model.py runs in one of them; `patience` is that of `load_spec`. BadModel if the folder defines no model, LoadFailed if
    its code raises, InsufficientStorage if it runs out of memory."""
    factory = folder.config.factory
    if folder.config.process.wanted:
        with _told_as_folder(folder, name):
            return _served(folder, name, process_spec(name, folder.config, patience, _for_process(folder)))
    try:
        thing = _library_thing(folder, factory) if factory else None
        defined = _run(folder, module) if folder.code else None
        formatters = _formatters(folder, defined) if defined is not None else {}
        if not factory:
            assert defined is not None
            attribute = _model_of(folder, defined)
            thing, factory = getattr(defined, attribute), f"{module}:{attribute}"
        options = _with_files(folder, thing)
        config = replace(folder.config, factory=factory, options=options)
        if isinstance(thing, ModelSpec):  # its own values are the defaults, not those of the repository
            said = {key: getattr(config, key) for key in folder.given if key not in ("factory", "options")}
            config = ModelConfig(factory=factory, options=options, **said)
        spec = load_spec(name, config)
    except GatewayError:
        raise
    except ConfigError as e:
        if isinstance(e.__cause__, FactoryRaised):
            raise load_error(e.__cause__.error, name, folder) from None
        raise _bad_model(folder, name, factory, e) from None
    except BaseException as e:  # the model's own code, which may raise anything, even SystemExit
        if not is_failure(e):
            raise
        raise load_error(e, name, folder) from None
    return replace(spec, options={**spec.options, **folder.options}, **formatters)


async def started_model(folder: ModelFolder, name: str, patience: float) -> ModelSpec:
    """Returns the ModelSpec of a folder's model that runs in processes, without blocking the loop. If it is cancelled, no
    process is left."""
    with _told_as_folder(folder, name):
        spec = await started_spec(name, folder.config, patience, _for_process(folder))
        try:
            return _served(folder, name, spec)
        except BaseException:
            discard(spec)
            raise


def _for_process(folder: ModelFolder) -> Folder:
    return Folder(folder.path, folder.place.shown, folder.code, folder.size)


def _served(folder: ModelFolder, name: str, own: ModelSpec) -> ModelSpec:
    """Returns the spec that a process has described, with what the folder sets."""
    try:
        spec = served_spec(name, folder.config, own)
    except ConfigError as e:
        raise _bad_model(folder, name, folder.config.factory, e) from None
    return replace(spec, options={**spec.options, **folder.options})


@contextmanager
def _told_as_folder(folder: ModelFolder, name: str) -> Iterator[None]:
    """Turns a ConfigError of the model's process into LoadFailed."""
    try:
        yield
    except ConfigError as e:
        text = folder.place.retold(str(e).removeprefix(f"models.{name}: "))[:_SHOWN]
        raise LoadFailed(f"model {show(name)} cannot be loaded: {text}") from None


def _bad_model(folder: ModelFolder, name: str, factory: str, error: ConfigError) -> BadModel:
    text = str(error).removeprefix(f"models.{name}: {factory}: ")  # names that mean nothing to the folder's author
    if isinstance(error.__cause__, OptionMisfit):
        text = text_without_secrets(error.__cause__.for_folder)
    return BadModel(f"{folder.source}: {folder.place.retold(text)[:500]}")


def forget(module: str, folder: str = "") -> None:
    """Removes a module of `make_spec`, and those that it imported from its folder, from the interpreter's tables."""
    for name in [n for n in list(sys.modules) if n == module or n.startswith(module + ".")]:
        sys.modules.pop(name, None)
    for path in [p for p in list(sys.path_importer_cache) if folder and _inside(p, folder)]:
        sys.path_importer_cache.pop(path, None)


def load_error(error: BaseException, name: str, folder: ModelFolder) -> GatewayError:
    """Returns the error for the client that asked for a load, from an exception that the model's loading raised."""
    if ran_out(error):
        return no_memory(name, folder)
    if isinstance(error, ModelExit) and error.__cause__ is not None:
        error = error.__cause__
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _inside(frame.filename, folder.path)]
    where = f" ({folder.place.at(own[-1].filename)}, line {own[-1].lineno})" if own else ""
    if isinstance(error, ModuleNotFoundError) and os.path.exists(os.path.join(folder.path, f"{error.name}.py")):
        where += f"; import a file beside {CODE} as: from . import {error.name}"
    elif not own:  # a line of another package would not help the model's author
        where = f", loading {folder.source}"
    text = text_without_secrets(folder.place.retold(_text(error)))[:_SHOWN]
    if not isinstance(error, RaisedThere | InstanceEnded):  # their texts are complete
        text = f"{type(error).__name__}: {text}"
    return LoadFailed(f"model {show(name)} cannot be loaded: {text}{where}")


def no_memory(name: str, folder: ModelFolder) -> InsufficientStorage:
    """Returns the error for the client that asked for a load which ran out of memory."""
    return InsufficientStorage(
        f"model {show(name)} cannot be loaded: {folder.source} ran out of memory; {folder.need} bytes were reserved for it"
    )


def ran_out(error: BaseException | None) -> bool:
    """True if an exception, one of its group, or one of its causes says that memory ran out."""
    while error is not None:
        if is_out_of_memory(error):
            return True
        if isinstance(error, BaseExceptionGroup) and any(ran_out(inner) for inner in error.exceptions):
            return True
        error = error.__cause__
    return False


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_LONGEST_TEXT]
    except Exception:  # the model's own __str__ raised
        return "(its text cannot be read)"


def _library_config(file: Place, factory: str, defaults: ModelConfig) -> ModelConfig:
    known = LIBRARY.get(factory)
    if known is not None:
        return replace(defaults, factory=known.factory, options={}, capacity=known.capacity)
    if _FACTORY.fullmatch(factory):
        return replace(defaults, factory=factory, options={})
    near = difflib.get_close_matches(factory.lower(), LIBRARY, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {_listed(LIBRARY)}"
    raise BadModel(f"{file}: factory must be {_FACTORY_WANTED}, not {show(factory)}; {hint}")


def _library_thing(folder: ModelFolder, factory: str) -> Any:
    """Returns the object that a library factory names. BadModel for one that a library module only imports."""
    module_name, _, attribute = factory.partition(":")
    where = f"{folder.source}: factory {show(factory)}"
    try:
        thing: Any = importlib.import_module(module_name)
    except ModuleNotFoundError:
        raise BadModel(f"{where}: there is no module {show(module_name)}") from None
    for part in attribute.split("."):
        thing = getattr(thing, part, None)
        # a package re-exports from its own modules, so their longer names are allowed
        if not f"{getattr(thing, '__module__', None)}.".startswith(f"{module_name}."):
            raise BadModel(f"{where}: {show(module_name)} defines no {show(attribute)}")
    return thing


@final
class _Loader(SourceFileLoader):
    """A loader without __pycache__: another folder may take a folder's place within the resolution of a time stamp."""

    def path_stats(self, path: Any) -> Mapping[str, Any]:
        raise OSError


def _run(folder: ModelFolder, module: str) -> ModuleType:
    """Runs model.py as a package whose other modules are the files beside it."""
    file = os.path.join(folder.path, CODE)
    spec = importlib.util.spec_from_file_location(
        module, file, loader=_Loader(module, file), submodule_search_locations=[folder.path]
    )
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[module] = made
    spec.loader.exec_module(made)
    return made


def _model_of(folder: ModelFolder, module: ModuleType) -> str:
    """Returns the name of the model's attribute: `model`, or else the only public one that model.py defines."""
    if hasattr(module, "model"):
        return "model"
    own = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not is_marked(value)
        and (isinstance(value, ModelSpec) or getattr(value, "__module__", None) == module.__name__)
        and (isinstance(value, ModelSpec) or inspect.isclass(value) or callable(value))
    ]
    if len(own) == 1:
        return own[0]
    there = f"it defines {_listed(own)}" if own else "it defines nothing public"
    raise BadModel(f"{folder.source}: name one function, class or ModelSpec `model`; {there}")


def _formatters(folder: ModelFolder, module: ModuleType) -> dict[str, Any]:
    """Returns the formatters of model.py, by the ModelSpec field that holds each."""
    code = folder.place.at(CODE)
    try:
        reads, writes = marked(vars(module))
    except ValueError as e:
        raise BadModel(f"{code}: {e}") from None
    if folder.config.factory and not (reads or writes):
        raise BadModel(f"{code}: model.toml names a library model (factory), so it may hold only formatters: it has none")
    found = {"input_formatter": reads, "output_formatter": writes}
    return {name: formatter for name, formatter in found.items() if formatter is not None}


def _with_files(folder: ModelFolder, thing: Any) -> dict[str, Any]:
    """Returns the options; each whose parameter is annotated with Path becomes the path of a file in the folder."""
    options = dict(folder.config.options)
    for name in _paths(thing) if options else ():
        value = options.get(name)
        if value is None:
            continue
        key = f"{folder.place.at(TOML)}: options.{name}"
        if not isinstance(value, str) or not value or "\0" in value or value.startswith("/"):
            raise BadModel(f"{key} must be a path in the model's folder, not {show(value)}")
        file = os.path.realpath(os.path.join(folder.path, value))
        if not _inside(file, folder.path) or not os.path.exists(file):
            raise BadModel(f"{key}: there is no {show(value)} in the model's folder")
        if not os.path.isdir(file):
            _regular(folder.place.at(file))
        options[name] = Path(file)
    return options


def _paths(thing: Any) -> list[str]:
    code: Callable[..., Any] = thing.__init__ if inspect.isclass(thing) else inspect.unwrap(thing)
    try:
        hints = typing.get_type_hints(code)
    except (NameError, AttributeError, TypeError):
        return []  # no annotations, or of unknown names: load_spec reports those that matter
    return [name for name, hint in hints.items() if name != "return" and (hint is Path or Path in typing.get_args(hint))]


def _said(path: str) -> str:
    return show(path) if not path.isprintable() else path if len(path) <= _SHOWN else f"{path[:_SHOWN]}..."


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)[:_SHOWN]
