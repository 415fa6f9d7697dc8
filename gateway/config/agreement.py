"""Checks that the values of a configuration, each valid alone, agree with one another."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import TypeAlias

from gateway.addresses import Host, Passed, Place, UnixSocket, places_of
from gateway.config.problem import Problem
from gateway.config.text import Key, dotted, show
from gateway.config.tree import Config, OperatorConfig, ProcessConfig

Where: TypeAlias = Callable[[str], str]
"""The text for a key in an error: the key, and its source."""


def open_ports(config: Config) -> dict[str, int]:
    """The port of each socket that will listen, by its setting; 0 is one that the kernel chooses."""
    listen = config.listen
    if not any(isinstance(place, Host) for place in places_of(listen.host)):
        return {}
    ports = {"listen.port": listen.port, "listen.bidi_port": listen.bidi_port, "listen.grpc_port": listen.grpc_port}
    if config.tls.dev or config.tls.cert:
        ports["listen.tls_port"] = listen.tls_port
    return {key: port for key, port in ports.items() if port != -1}


def has_plane(operator: OperatorConfig) -> bool:
    """True if there is an operator plane: at a port, or at sockets that have none."""
    return operator.port >= 0 or any(not isinstance(place, Host) for place in places_of(operator.host))


def in_clear(config: Config) -> list[str]:
    """The settings by which something listens without TLS."""
    beside = any(isinstance(place, UnixSocket | Passed) and not place.tls for place in places_of(config.listen.host))
    return [key for key in open_ports(config) if key != "listen.tls_port"] + ["listen.host"] * beside


def contradictions(config: Config, where: Where) -> Iterator[Problem]:
    """Each pair of values that contradict one another. Looks at links in the file system, and reads no file."""
    yield from _wrong_tls(config, where)
    yield from _wrong_ports(config, where)
    yield from shared_sockets(config, where)
    yield from exposed_plane(config, where)
    for lower, low, upper, high in _ordered(config):
        if low > high:
            yield Problem(key=lower, text=f"{where(lower)} is {low}, more than {where(upper)}, which is {high}")
    yield from _wrong_endpoints(config, where)
    yield from unsupported_processes(config, where)
    yield from _divided(config, where)
    yield from _shared_names(config, where)
    if config.metrics.emf and config.log.format == "text":
        text = f"{where('metrics.emf')} is set and {where('log.format')} is 'text': CloudWatch reads metrics in JSON alone"
        yield Problem(key="metrics.emf", text=text, suggestion="log.format")
    if config.repository.model and (name := config.repository.model_name) in config.models:
        factory = dotted(("models", name, "factory"))
        yield Problem(
            key="repository.model_name",
            text=f"{where('repository.model_name')} and {where(factory)} are models of one name: choose another",
        )
    for key, path in _rooted(config):
        if not _under(path, config.repository.roots):
            text = f"{where(key)}: {show(path)} is neither one of {where('repository.roots')} nor under one"
            yield Problem(key=key, text=text)


def _wrong_tls(config: Config, where: Where) -> Iterator[Problem]:
    tls = config.tls
    if (tls.cert == "") != (tls.key == ""):
        present, absent = ("tls.cert", "tls.key") if tls.cert else ("tls.key", "tls.cert")
        text = f"{where(present)} is set and {absent} is not: a certificate needs its key"
        yield Problem(key=present, text=text, suggestion=absent)
    if tls.dev and tls.cert:
        text = f"{where('tls.dev')} and {where('tls.cert')} are both set: choose one certificate"
        yield Problem(key="tls.dev", text=text)
    if tls.client_ca and not (tls.cert or tls.key or tls.dev):
        text = f"{where('tls.client_ca')} is set and TLS is off: no client would be asked for a certificate"
        yield Problem(key="tls.client_ca", text=text, suggestion="tls.cert")
    yield from missing_tls(config, where)


def missing_tls(config: Config, where: Where = str) -> Iterator[Problem]:
    """A problem if a socket is to have TLS, and no certificate is set."""
    secure = [place for place in places_of(config.listen.host) if not isinstance(place, Host) and place.tls]
    if secure and not (config.tls.cert or config.tls.dev):
        text = f"{where('listen.host')} has a socket with TLS, and TLS is off: set tls.cert, or leave +tls out"
        yield Problem(key="listen.host", text=text, suggestion="tls.cert")


def _wrong_ports(config: Config, where: Where) -> Iterator[Problem]:
    ports = open_ports(config)
    if not ports and all(isinstance(place, Host) for place in places_of(config.listen.host)):
        text = f"{where('listen.port')} is -1 and no other port is opened either: nothing would be served"
        yield Problem(key="listen.port", text=text)
    if any(isinstance(place, Host) for place in places_of(config.operator.host)):
        ports["operator.port"] = config.operator.port
    ports["metrics.port"] = config.metrics.port
    for (one, port), (other, same) in combinations(ports.items(), 2):
        if port == same > 0:
            text = f"{where(one)} and {where(other)} are both {port}: each needs a port of its own"
            yield Problem(key=one, text=text)


def shared_sockets(config: Config, where: Where = str) -> Iterator[Problem]:
    """A problem if one socket is listened on twice: which listener gets a client, with or without TLS, for models or for the
    operator plane, would be chance."""
    hosts = {"listen.host": config.listen.host, "operator.host": config.operator.host}
    said = [(key, text) for key, texts in hosts.items() for text in ([texts] if isinstance(texts, str) else texts)]
    for (one, text), (other, same) in combinations(said, 2):
        if _is_one_socket(*places_of([text, same])):
            text = f"{where(one)} has {show(text)} and {where(other)} has {show(same)}, the same socket: each needs its own"
            yield Problem(key=one, text=text)


def _is_one_socket(one: Place, other: Place) -> bool:
    match one, other:
        case UnixSocket(path), UnixSocket(same):
            return os.path.abspath(path) == os.path.abspath(same)
        case Passed(name), Passed(same):
            return name == same or not (name and same)
        case _:
            return False


def exposed_plane(config: Config, where: Where = str) -> Iterator[Problem]:
    """A problem if everyone on a network could manage the models, and no setting permits that."""
    plane = config.operator
    if has_plane(plane) and not (is_local(plane.host) or plane.token or plane.token_file or plane.open):
        text = (
            f"{where('operator.host')} is {show(plane.host)}, which others can reach, and no token is demanded: set "
            "operator.token or operator.token_file, or operator.open = true where whoever reaches it may manage it"
        )
        yield Problem(key="operator.host", text=text, suggestion="operator.token_file")


def is_local(said: str | tuple[str, ...]) -> bool:
    """True if only this machine can reach these addresses. Unknown for sockets of systemd: False."""
    return all(
        isinstance(place, UnixSocket) or (isinstance(place, Host) and _is_loopback(place.name)) for place in places_of(said)
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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


def _wrong_endpoints(config: Config, where: Where) -> Iterator[Problem]:
    for name, endpoint in config.endpoints.items():
        key = dotted(("endpoints", name))
        if endpoint.models and endpoint.variants:
            first = dotted(("endpoints", name, "variants", next(iter(endpoint.variants)), "model"))
            text = f"{where(f'{key}.models')} and {where(first)} are both set: choose a folder or variants"
            yield Problem(key=f"{key}.models", text=text)
        if not endpoint.models and not endpoint.variants:
            text = f"{where(key)} has neither variants nor models: no call of it would reach a model"
            yield Problem(key=key, text=text)
        if endpoint.variants and not any(variant.weight for variant in endpoint.variants.values()):
            text = f"{where(key)}: the weight of each variant is 0: a call that names none would reach no model"
            yield Problem(key=key, text=text)


def unsupported_processes(config: Config, where: Where = str) -> Iterator[Problem]:
    """A problem for each model that is to run in processes of its own on another system than Linux. The gateway does not run
    it in its own process instead: the operator would rely on a separation that is not there."""
    for key in _of_models(config):
        if not _has_processes():
            text = f"{where(key)}: processes need Linux; leave it out"
            yield Problem(key=key, text=text, expected="Linux", got=sys.platform)


def several_processes(config: Config, where: Where = str) -> Iterator[Problem]:
    """A problem if a program that serves in its own process is to have several: only `everywire serve` starts them."""
    if (n := config.listen.processes) != 1:
        text = f"{where('listen.processes')} is {n}, and this program serves in its own process: only `everywire` has more"
        yield Problem(key="listen.processes", text=text, expected="1", got=str(n))


def _divided(config: Config, where: Where) -> Iterator[Problem]:
    """A problem for each setting that would mean something else in each of several processes."""
    n, key = config.listen.processes, "listen.processes"
    if n == 1:
        return
    if not _has_processes():
        text = f"{where(key)} is {n}: several processes need Linux"
        yield Problem(key=key, text=text, expected="1", got=str(n))
    each = "each process would have models of its own, and a client's next request may reach another one"
    apart = [
        ("sagemaker.multi_model", "true", config.sagemaker.multi_model),
        ("v2.model_control", "true", config.v2.model_control),
        *(
            (dotted(("endpoints", name, "models")), show(endpoint.models), bool(endpoint.models))
            for name, endpoint in config.endpoints.items()
        ),
    ]
    for other, value, is_set in apart:
        if is_set:
            text = f"{where(key)} = {n} and {where(other)} = {value} contradict each other: {each}"
            yield Problem(key=key, text=text, suggestion=other)
    if config.repository.process.wanted:
        other = "repository.process"
        text = (
            f"{where(key)} = {n} and {where(other)} contradict each other: processes of the models of folders are "
            "not shared; configure them as models.NAME with a process"
        )
        yield Problem(key=key, text=text, suggestion=other)


def _shared_names(config: Config, where: Where) -> Iterator[Problem]:
    """A problem for each served name that the configuration gives to two models, or that is the name of another one."""
    owners: dict[str, str] = {}
    for name, model in config.models.items():
        key = dotted(("models", name, "served_names"))
        for served in model.served_names or ():
            if served != name and served in config.models:
                other = dotted(("models", served))
                text = f"{where(key)} has {show(served)}, which is the name of another model, {other}: choose another"
                yield Problem(key=key, text=text, got=served)
            elif (owner := owners.setdefault(served, name)) != name:
                other = dotted(("models", owner, "served_names"))
                text = f"{where(other)} and {where(key)} both have {show(served)}: only one model can be called so"
                yield Problem(key=key, text=text, got=served)


def _of_models(config: Config) -> Iterator[str]:
    """The sections by which models run in processes of their own."""
    sections: list[tuple[Key, ProcessConfig]] = [(("repository", "process"), config.repository.process)]
    sections += [(("models", name, "process"), model.process) for name, model in config.models.items()]
    for path, process in sections:
        if process.wanted:
            yield dotted(path)


def _has_processes() -> bool:
    return sys.platform == "linux"


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
