"""Finds and reads the one folder that is served from the start: that of `repository.model`, or SageMaker's own."""

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
    """Returns the folder of `repository.model`; otherwise SageMaker's, if it contains a model, no other model is configured,
    and the endpoint is not a multi-model one; otherwise an empty text. `alone`: the program serves no model of its own
    either."""
    if config.repository.model:
        return config.repository.model
    if config.models or not alone or config.sagemaker.multi_model:
        return ""
    return str(MODEL_FOLDER) if any((MODEL_FOLDER / name).exists() for name in FILES) else ""


def read_served_folder(config: Config, path: str) -> ModelFolder:
    """Reads the served folder; none of its code runs. ConfigError if it cannot be served, so that a container does not start
    with other models in its place."""
    chosen = config.repository
    try:
        folder = find_folder(path, chosen.roots)
        return read_folder(folder, code=chosen.code, defaults=ModelConfig(factory="", process=chosen.process))
    except NotFound as e:
        raise FolderMissing(e.message) from None
    except GatewayError as e:
        raise ConfigError(e.message) from None


def folder_settings(config: Config) -> Iterator[tuple[Key, Any, str]]:
    """Yields the settings that the files of the served folder set: the key, the value and the file of each. Keys begin with
    `models` and the model's name; those for the form of its answers go on with `lmi`."""
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
    """Yields a value, or, of a section, each value that differs from the one in `unsaid`."""
    if not is_dataclass(value):
        yield key, value
        return
    for field in fields(value):
        if (said := getattr(value, field.name)) != getattr(unsaid, field.name):
            yield (*key, field.name), said
