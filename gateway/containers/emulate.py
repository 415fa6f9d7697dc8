"""Emulates SageMaker's front on this machine, in front of a user's container."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, final

from gateway.addresses import UNIX, Host, places_of, url_host
from gateway.config import Config
from gateway.config.agreement import is_local
from gateway.config.load import Resolved
from gateway.config.problem import ConfigError
from gateway.containers.model import ContainerLimits, container_spec
from models.spec import ModelSpec
from protocols.aws import bidi

CLEAR_PORT = 8090
"""The default port without TLS: 8080 is the container's own."""


class Listening(Protocol):
    """The open ports of a server; 0: not open."""

    @property
    def addresses(self) -> tuple[str, ...]: ...
    @property
    def port(self) -> int: ...
    @property
    def tls_port(self) -> int: ...


@final
class Emulation:
    """An emulated endpoint: the configuration, the model that stands for the container, and the advice for clients."""

    def __init__(
        self,
        resolved: Resolved,
        container: str,
        endpoint: str,
        *,
        path: str = "",
        ca: str = "",
        models: str = "",
        limits: ContainerLimits,
    ) -> None:
        """ConfigError for an invalid URL of the container, or a name of the endpoint that no client can send."""
        config = resolved.config
        if "listen.port" not in resolved.sources:
            config = replace(config, listen=replace(config.listen, port=CLEAR_PORT))
        if not any(key.startswith("tls.") for key in resolved.sources if key != "tls.dev_dir"):
            config = replace(config, tls=replace(config.tls, dev=True))  # the AWS SDK speaks HTTP/2 over TLS alone
        self.config: Config = config
        hosts = [place.name for place in places_of(config.listen.host) if isinstance(place, Host)]
        # `localhost` is a name of the development certificate
        near = [name for name in hosts if name in ("0.0.0.0", "::") or is_local(name)]
        self._name = "localhost" if near or not hosts else url_host(hosts[0])
        try:
            bidi.validate_request(endpoint, {})
        except bidi.BidiInputError as e:
            raise ConfigError(f"--endpoint: {e}") from None
        if path:
            container = f"{container.rstrip('/')}/{path.lstrip('/')}"
        self.container, self.endpoint = container, endpoint
        try:
            spec = container_spec(container, name=endpoint, limits=limits, ca=ca, models=models)
        except ValueError as e:
            raise ConfigError(f"--container: {e}") from None
        self.models: Sequence[ModelSpec] = [spec]

    def advice(self, listening: Listening, certificate: str) -> str:
        """Returns the text for the user: the settings of each client. `certificate` is the file of the CA that clients must
        trust."""
        trust = f", and SSL_CERT_FILE={certificate} in its environment" if certificate else ""
        lines = [f"Endpoint {self.endpoint!r} is the container at {self.container}."]
        if listening.tls_port:
            lines.append(f"AWS SDK (bidirectional): endpoint_uri https://{self._name}:{listening.tls_port}{trust}.")
        if listening.port:
            lines.append(f"boto3 and the AWS CLI: endpoint_url http://{self._name}:{listening.port}.")
        for path in [url.removeprefix(UNIX) for url in listening.addresses if url.startswith(UNIX)]:
            lines.append(f"curl: --unix-socket {path}.")
        if self.config.sagemaker.sigv4.credentials:
            lines.append(f"Credentials must be those of {self.config.sagemaker.sigv4.credentials}.")
        else:
            lines.append("Any region and any credentials will do.")
        return "\n".join(lines)

    def told(self, listening: Listening, certificate: str) -> str:
        """Returns the same for a program, as one line of JSON. A URL is empty if its port is not open."""
        facts = {
            "endpoint": self.endpoint,
            "container": self.container,
            "url": f"http://{self._name}:{listening.port}" if listening.port else "",
            "tls_url": f"https://{self._name}:{listening.tls_port}" if listening.tls_port else "",
            "ca": certificate,
            "credentials": self.config.sagemaker.sigv4.credentials,
        }
        return json.dumps(facts)
