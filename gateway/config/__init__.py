"""The configuration: every setting, and how it is read, checked and shown. May import the ground alone."""

from gateway.config.tree import (
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
    SSEConfig,
    TensorConfig,
    TLSConfig,
    TracingConfig,
    V2Config,
    VariantConfig,
    WebSocketConfig,
)

__all__ = [
    "AccessConfig", "AdmissionConfig", "BatchingConfig", "BidiConfig", "Config", "DrainConfig", "EndpointConfig",
    "HTTP2Config", "LMIConfig", "LimitsConfig", "ListenConfig", "LogConfig", "MetricsConfig", "ModelConfig",
    "OpenAIConfig", "OperatorConfig", "ProcessConfig", "RepositoryConfig", "RestartConfig", "SSEConfig", "SageMakerConfig",
    "SigV4Config", "TLSConfig", "TensorConfig", "TracingConfig", "V2Config", "VariantConfig", "WebSocketConfig",
]  # fmt: skip
