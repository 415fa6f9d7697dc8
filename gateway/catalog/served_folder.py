"""The one folder that is served from the start, that of `repository.model` or SageMaker's own, found and read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from gateway.catalog.folder import FILES, ModelFolder, find_folder, read_folder
from gateway.config import Config, ModelConfig
from gateway.config.environment import MODEL_FOLDER, OPTIONS, in_our_words
from gateway.config.problem import ConfigError, FolderMissing
from gateway.config.properties import FILE as PROPERTIES
from gateway.config.properties import text_options
from gateway.config.text import Key
from gateway.errors import GatewayError, NotFound


def served_folder(config: Config, *, alone: bool) -> str:
    """The folder of `repository.model`, else SageMaker's where a model is in it, no other is configured and none is to
    come; empty where there is none. `alone` says that a program has none of its own either."""
    if config.repository.model:
        return config.repository.model
    if config.models or not alone or config.sagemaker.multi_model:
        return ""
    return str(MODEL_FOLDER) if any((MODEL_FOLDER / name).exists() for name in FILES) else ""


def read_served_folder(config: Config, path: str) -> ModelFolder:
    """What is in it; no code of it runs. ConfigError for one that cannot be served: nobody wants a container that serves
    something else then."""
    chosen = config.repository
    try:
        folder = find_folder(path, chosen.roots)
        return read_folder(folder, code=chosen.code, defaults=ModelConfig(factory="", process=chosen.process))
    except NotFound as e:
        raise FolderMissing(e.message) from None
    except GatewayError as e:
        raise ConfigError(e.message) from None


def folder_settings(config: Config) -> Iterator[tuple[Key, Any, str]]:
    """What the files of the folder's model say in the place of the configuration, each with the file that does: below the
    model's name, and of the form of its answers below `lmi` there."""
    path = served_folder(config, alone=True)
    if not path:
        return
    folder, name = read_served_folder(config, path), ("models", config.repository.model_name)
    for key, file in folder.given.items():
        unsaid = config.repository.process if key == "process" else getattr(ModelConfig(factory=""), key)
        for path_of, said in _leaves((*name, key), getattr(folder.config, key), unsaid):
            yield path_of, said, str(folder.place.at(file))
    text = text_options(config.lmi, folder.options)
    for option in in_our_words(folder.options):
        setting = OPTIONS[option][-1]
        yield (*name, "lmi", setting), getattr(text, setting), str(folder.place.at(PROPERTIES))


def _leaves(key: Key, value: Any, unsaid: Any) -> Iterator[tuple[Key, Any]]:
    """The value, or each of a section that is not what it would be if nobody had said it."""
    if not is_dataclass(value):
        yield key, value
        return
    for field in fields(value):
        if (said := getattr(value, field.name)) != getattr(unsaid, field.name):
            yield (*key, field.name), said
