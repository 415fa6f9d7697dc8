"""SageMaker's front on this machine, before a user's own container."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from gateway.bridge import ContainerLimits, container_spec
from gateway.config import Config
from gateway.settings import ConfigError, Resolved
from models.spec import ModelSpec

CLEAR_PORT = 8090
"""In clear, where nothing else is said: 8080 is the container's own."""
CAPACITY = 1000
"""Sessions at once: the container is the one to refuse more."""


@final
class Emulation:
    """What is served for a container: the configuration, the model that stands for it, and how clients reach it."""

    def __init__(
        self, resolved: Resolved, container: str, endpoint: str, *, path: str = "", ca: str = "", limits: ContainerLimits
    ) -> None:
        """ConfigError for a container that no URL names."""
        config = resolved.config
        if "listen.port" not in resolved.sources:
            config = replace(config, listen=replace(config.listen, port=CLEAR_PORT))
        if not any(key.startswith("tls.") for key in resolved.sources):
            config = replace(config, tls=replace(config.tls, dev=True))  # the AWS SDK speaks HTTP/2 over TLS alone
        self.config: Config = config
        self.container, self.endpoint = container, endpoint
        if path:
            container = f"{container.rstrip('/')}/{path.lstrip('/')}"
        try:
            spec = container_spec(container, name=endpoint, limits=limits, ca=ca)
        except ValueError as e:
            raise ConfigError(f"--container: {e}") from None
        self.models: Sequence[ModelSpec] = [replace(spec, capacity=CAPACITY)]

    def advice(self, certificate: str) -> str:
        """For whoever started it: what to tell the clients. `certificate` is the file of the CA that they must trust."""
        listen = self.config.listen
        trust = f", and SSL_CERT_FILE={certificate} in its environment" if certificate else ""
        lines = [f"Endpoint {self.endpoint!r} is the container at {self.container}."]
        if listen.tls_port > 0:
            lines.append(f"AWS SDK (bidirectional): endpoint_uri https://localhost:{listen.tls_port}{trust}.")
        if listen.port > 0:
            lines.append(f"boto3 and the AWS CLI: endpoint_url http://localhost:{listen.port}.")
        lines.append("Any region and any credentials will do, unless sagemaker.sigv4.credentials names the right ones.")
        return "\n".join(lines)
