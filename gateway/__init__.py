"""Composes protocols and models: listeners, exchanges, dialects, workers.

The names in this module are stable. The reference lists the other stable modules.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.asgi import ASGIApp
    from gateway.cli.start.program import run
    from gateway.config import (
        AccessConfig,
        AdmissionConfig,
        BatchingConfig,
        BidiConfig,
        Config,
        DrainConfig,
        EndpointConfig,
        HTTP2Config,
        LimitsConfig,
        ListenConfig,
        LMIConfig,
        LogConfig,
        MetricsConfig,
        ModelConfig,
        OpenAIConfig,
        OperatorConfig,
        ProcessConfig,
        RepositoryConfig,
        RestartConfig,
        SageMakerConfig,
        SigV4Config,
        TensorConfig,
        TLSConfig,
        TracingConfig,
        V2Config,
        VariantConfig,
        WebSocketConfig,
    )
    from gateway.config.problem import ConfigError
    from gateway.errors import Ending, Refusal, TransportLost
    from gateway.gateway import Gateway

__all__ = [
    "ASGIApp", "AccessConfig", "AdmissionConfig", "BatchingConfig", "BidiConfig", "Config", "ConfigError",
    "DrainConfig", "Ending", "EndpointConfig", "Gateway", "HTTP2Config", "LMIConfig", "LimitsConfig", "ListenConfig",
    "LogConfig", "MetricsConfig", "ModelConfig", "OpenAIConfig", "OperatorConfig", "ProcessConfig", "Refusal",
    "RepositoryConfig", "RestartConfig", "SageMakerConfig", "SigV4Config", "TLSConfig", "TensorConfig", "TracingConfig",
    "TransportLost", "V2Config", "VariantConfig", "WebSocketConfig", "run",
]  # fmt: skip


_HOMES = {
    "gateway.asgi": ("ASGIApp",),
    "gateway.cli.start.program": ("run",),
    "gateway.config": (
        "AccessConfig", "AdmissionConfig", "BatchingConfig", "BidiConfig", "Config", "DrainConfig",
        "EndpointConfig", "HTTP2Config", "LMIConfig", "LimitsConfig", "ListenConfig", "LogConfig",
        "MetricsConfig", "ModelConfig", "OpenAIConfig", "OperatorConfig", "ProcessConfig", "RepositoryConfig",
        "RestartConfig", "SageMakerConfig", "SigV4Config", "TLSConfig", "TensorConfig", "TracingConfig", "V2Config",
        "VariantConfig", "WebSocketConfig",
    ),
    "gateway.config.problem": ("ConfigError",),
    "gateway.errors": ("Ending", "Refusal", "TransportLost"),
    "gateway.gateway": ("Gateway",),
}  # fmt: skip


def __getattr__(name: str) -> object:
    """Imports a name from its module on first use: `import gateway` alone imports no other module."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
