"""Whether the values of a configuration, each right alone, agree with one another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import TypeAlias

from gateway.config import Config
from gateway.settings_schema import ConfigError
from gateway.settings_text import dotted, show

Where: TypeAlias = Callable[[str], str]
"""The text for a key in an error: the key, and where it was set."""


def open_ports(config: Config) -> dict[str, int]:
    """The port of each socket that will listen, by its setting; 0 is one that the kernel chooses."""
    listen = config.listen
    ports = {"listen.port": listen.port, "listen.bidi_port": listen.bidi_port}
    if config.tls.dev or config.tls.cert:
        ports["listen.tls_port"] = listen.tls_port
    return {key: port for key, port in ports.items() if port != -1}


def agree(config: Config, where: Where) -> None:
    """Raises ConfigError where two values contradict one another. Looks at links in the file system, and reads no file."""
    _check_tls(config, where)
    _check_ports(config, where)
    for lower, low, upper, high in _ordered(config):
        if low > high:
            raise ConfigError(f"{where(lower)} is {low}, more than {where(upper)}, which is {high}")
    _check_endpoints(config, where)
    if config.repository.model and (name := config.repository.model_name) in config.models:
        factory = dotted(("models", name, "factory"))
        raise ConfigError(f"{where('repository.model_name')} and {where(factory)} are models of one name: choose another")
    for key, path in _rooted(config):
        if not _under(path, config.repository.roots):
            raise ConfigError(f"{where(key)}: {show(path)} is neither one of {where('repository.roots')} nor under one")


def _check_tls(config: Config, where: Where) -> None:
    tls = config.tls
    if (tls.cert == "") != (tls.key == ""):
        present, absent = ("tls.cert", "tls.key") if tls.cert else ("tls.key", "tls.cert")
        raise ConfigError(f"{where(present)} is set and {absent} is not: a certificate needs its key")
    if tls.dev and tls.cert:
        raise ConfigError(f"{where('tls.dev')} and {where('tls.cert')} are both set: choose one certificate")


def _check_ports(config: Config, where: Where) -> None:
    ports = open_ports(config)
    if not ports:
        raise ConfigError(f"{where('listen.port')} is -1 and no other port is opened either: nothing would be served")
    for (one, port), (other, same) in combinations(ports.items(), 2):
        if port == same > 0:
            raise ConfigError(f"{where(one)} and {where(other)} are both {port}: each needs a port of its own")


def _ordered(config: Config) -> Iterator[tuple[str, float, str, float]]:
    http2, limits = config.http2, config.limits
    yield "http2.initial_window", http2.initial_window, "http2.max_window", http2.max_window
    yield (
        "limits.send_buffer", limits.send_buffer, "limits.connection_send_buffer", limits.connection_send_buffer,
    )  # fmt: skip
    for name, model in config.models.items():
        restart = dotted(("models", name, "restart"))
        if (low := model.restart.backoff) is not None and (high := model.restart.backoff_max) is not None:
            yield f"{restart}.backoff", low, f"{restart}.backoff_max", high


def _check_endpoints(config: Config, where: Where) -> None:
    for name, endpoint in config.endpoints.items():
        key = dotted(("endpoints", name))
        if endpoint.models and endpoint.variants:
            first = dotted(("endpoints", name, "variants", next(iter(endpoint.variants)), "model"))
            raise ConfigError(f"{where(f'{key}.models')} and {where(first)} are both set: choose a folder or variants")
        if not endpoint.models and not endpoint.variants:
            raise ConfigError(f"{where(key)} has neither variants nor models: no call of it would reach a model")
        if endpoint.variants and not any(variant.weight for variant in endpoint.variants.values()):
            raise ConfigError(f"{where(key)}: the weight of each variant is 0: a call that names none would reach no model")


def _rooted(config: Config) -> Iterator[tuple[str, str]]:
    """The folders that must be under `repository.roots`, with their settings."""
    if config.repository.model:
        yield "repository.model", config.repository.model
    for path in config.repository.code:
        yield "repository.code", path
    for name, endpoint in config.endpoints.items():
        if endpoint.models:
            yield dotted(("endpoints", name, "models")), endpoint.models


def _under(path: str, roots: tuple[str, ...]) -> bool:
    # links are followed on both sides, as they are when a model is loaded
    real = os.path.realpath(path)
    return any(os.path.commonpath([real, root]) == root for root in map(os.path.realpath, roots))
