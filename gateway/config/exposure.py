"""Checks who may call the server: the proofs that it demands, and the problems and warnings if it demands none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gateway.addresses import Host, places_of
from gateway.config.agreement import Where, in_clear, is_local, open_ports
from gateway.config.environment import sign_of
from gateway.config.problem import Problem
from gateway.config.text import show
from gateway.config.tree import Config


def closes(config: Config) -> bool:
    """True if a request needs a key or, unless `access.unsigned` is true, a signature or a required certificate."""
    if config.access.keys_file:
        return True
    required = config.tls.client_ca and config.tls.client_certificate == "required"
    return bool(required or config.sagemaker.sigv4.credentials) and not config.access.unsigned


UNVERIFIED = "Request signatures are not verified: any client that reaches this port can call the models."


def verifies_nothing(config: Config) -> bool:
    """True if every client that reaches the server can call it, so that UNVERIFIED is said."""
    return not config.sagemaker.sigv4.credentials and not closes(config)


def wrong_access(config: Config, environ: Mapping[str, str], where: Where = str) -> Iterator[Problem]:
    """A problem if everybody on a network could manage the models, or a page of any site could call them, and no setting
    permits that."""
    access = config.access
    if "*" in access.origins and not (access.keys_file or access.public):
        text = (
            f'{where("access.origins")} has "*", and pages of any site could call this server by its users: '
            "set access.keys_file, or access.public = true, or list the origins"
        )
        yield Problem(key="access.origins", text=text, suggestion="access.keys_file")
    offered = {"v2.model_control": config.v2.model_control, "sagemaker.multi_model": config.sagemaker.multi_model}
    managed = [key for key, on in offered.items() if on]
    if managed and is_exposed(config) and not (closes(config) or access.public or sign_of(environ)):
        text = (
            f"{where(managed[0])} is true, and {where('listen.host')} is {show(config.listen.host)}, which others reach: "
            "everybody could load and unload models. Set access.keys_file, or access.public = true where they may"
        )
        yield Problem(key=managed[0], text=text, suggestion="access.keys_file")


def is_exposed(config: Config) -> bool:
    """True if other machines can reach a listener of the server."""
    places = places_of(config.listen.host)
    listens = bool(open_ports(config)) or any(not isinstance(place, Host) for place in places)
    return listens and not is_local(config.listen.host)


def warnings(config: Config, environ: Mapping[str, str]) -> Iterator[tuple[str, dict[str, object]]]:
    """Warnings for the operator at the start, each a line of the log and its fields."""
    tls, access = config.tls, config.access
    if is_exposed(config) and not closes(config) and not access.public and not sign_of(environ):
        hint = "set access.keys_file, or access.public = true where everybody may"
        yield "everybody who reaches this server may call it", {"host": config.listen.host, "hint": hint}
    if config.websocket.any_path is True:
        hint = 'write "outside-v1", which it means now, or "all" for every path, as before'
        yield "websocket.any_path = true leaves the paths of /v1 out", {"setting": "websocket.any_path", "hint": hint}
    metrics = config.metrics
    if metrics.port >= 0 and not (is_local(metrics.host) or metrics.token_file):
        hint = "set metrics.token_file, or let the scraper alone reach it"
        yield "everybody who reaches metrics.port may read the metrics", {"host": metrics.host, "hint": hint}
    if access.unsigned and not access.keys_file:
        verified = {"sagemaker.sigv4.credentials": config.sagemaker.sigv4.credentials, "tls.client_ca": tls.client_ca}
        settings = [key for key, on in verified.items() if on]
        if settings:
            hint = "routes other than /endpoints/, and ports without TLS, are open to everybody"
            yield "access.unsigned admits clients without a signature or certificate", {"settings": settings, "hint": hint}
    if tls.client_ca and not closes(config) and (clear := in_clear(config)):
        hint = "-1 opens no port, and +tls is a socket with TLS" if "listen.host" in clear else "-1 opens none"
        yield "ports without TLS ask for no client certificate", {"settings": clear, "hint": hint}
