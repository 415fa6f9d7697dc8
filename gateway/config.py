"""What can be set, and the default of each: one frozen tree, the same for a TOML file, the environment and flags."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal, final

KiB, MiB, GiB = 1024, 1024**2, 1024**3


def _quarter_of_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ListenConfig:
    """Where the data plane listens. HTTP/1.1, HTTP/2 and WebSocket share each port."""

    host: str = "127.0.0.1"
    port: int = 8080
    """In clear; 0 asks the kernel for a free port, -1 opens none."""
    tls_port: int = 8443
    """Opened where TLS is on."""
    backlog: int = 2048


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TLSConfig:
    """TLS 1.2 and 1.3, ALPN h2 and http/1.1. On where `cert` is set or `dev` is true."""

    cert: str = ""
    key: str = ""
    dev: bool = False
    """Make a development certificate for localhost, 127.0.0.1 and ::1, signed by a CA of its own."""
    dev_dir: str = ""
    """Where that certificate and `ca.pem` are kept; empty: a folder in the user's cache directory."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Bounds on what a peer may make the server hold or wait for. Bytes and seconds."""

    request_line: int = 8 * KiB
    head: int = 32 * KiB
    fields: int = 100
    head_timeout: float = 10.0
    tls_handshake_timeout: float = 10.0
    body: int = 1 * GiB
    total_bytes: int = field(default_factory=_quarter_of_memory)
    """The byte budget: all bodies, queues and windows together."""
    json: int = 64 * MiB
    json_depth: int = 64
    tensors: int = 256
    tensor_dims: int = 16
    body_silence: float = 30.0
    """A unary upload whose window is open and that sends less than `body_rate` bytes a second over this time ends."""
    body_rate: int = 1 * KiB
    chunk_line: int = 256
    chunk_extensions: int = 16 * KiB
    trailers: int = 4 * KiB
    trailer_fields: int = 20
    keep_alive: float = 75.0
    requests_per_connection: int = 10_000
    """HTTP/1.1 only."""
    read_ahead: int = 256 * KiB
    """What is read before the model asks, on the wires without a window of their own (HTTP/1.1, WebSocket)."""
    send_buffer: int = 64 * KiB
    """Bytes queued for one stream before its model waits."""
    connection_send_buffer: int = 256 * KiB
    write_stall: float = 30.0
    """A peer that takes none of the bytes queued for it for this long ends; 0: never."""
    connections: int = 10_000
    descriptors_reserved: int = 64
    part: int = 16 * MiB
    event_headers: int = 128 * KiB
    event_fields: int = 64
    checkpoint_events: int = 64
    checkpoint_bytes: int = 64 * KiB


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HTTP2Config:
    """RFC 9113: what we advertise and bound. The rates are counted now; acting on the floods comes with them."""

    streams: int = 1000
    initial_window: int = 64 * KiB
    max_window: int = 256 * KiB
    frame_size: int = 16 * KiB
    continuations: int = 8
    settings_entries: int = 32


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WebSocketConfig:
    """RFC 6455 on the container's path."""

    path: str = "/invocations-bidirectional-stream"
    """Further paths: any path the model invocation path rules allow reaches the same model."""
    part: int = 16 * MiB
    ping_interval: float = 20.0
    ping_timeout: float = 20.0
    close_timeout: float = 5.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DrainConfig:
    """What SIGTERM means: readiness off, listeners closed after `delay`, live streams until `timeout`, the rest ended."""

    delay: float = 0.0
    timeout: float = 30.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LMIConfig:
    """Text generation at /invocations and /predictions/{model}."""

    default_model: str = ""
    output_formatter: Literal["", "json", "jsonlines", "sse"] = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class V2Config:
    """The Open Inference Protocol at /v2."""

    default_model: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BidiConfig:
    """SageMaker bidirectional streaming over HTTP/2, and its container side over WebSocket."""

    default_model: str = ""
    """The model behind the container's WebSocket, and behind endpoints that no model is named after."""
    variant: str = "AllTraffic"
    session_timeout: float = 1800.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RestartConfig:
    """OTP's rule: more than `intensity` crashes within `period` seconds and the model, alone, is given up."""

    intensity: int = 3
    period: float = 10.0
    backoff: float = 0.1
    backoff_max: float = 5.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model: where its code is, and how much of it runs at once."""

    factory: str
    """`module:attribute`: a function, an async or sync generator, a class with `__call__`, or a ModelSpec."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for a factory that takes them."""
    capacity: int = 64
    """Sessions at once."""
    queue: int = 1000
    """Sessions that may wait for a slot; more are refused with 503."""
    timeout: float = 0.0
    """Seconds a session may last; 0: no limit."""
    load_timeout: float = 240.0
    restart: RestartConfig = field(default_factory=RestartConfig)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """The structured log: one line an exchange, with its one ending."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "text"] = "json"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration."""

    listen: ListenConfig = field(default_factory=ListenConfig)
    tls: TLSConfig = field(default_factory=TLSConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    http2: HTTP2Config = field(default_factory=HTTP2Config)
    websocket: WebSocketConfig = field(default_factory=WebSocketConfig)
    drain: DrainConfig = field(default_factory=DrainConfig)
    lmi: LMIConfig = field(default_factory=LMIConfig)
    v2: V2Config = field(default_factory=V2Config)
    bidi: BidiConfig = field(default_factory=BidiConfig)
    log: LogConfig = field(default_factory=LogConfig)
    models: dict[str, ModelConfig] = field(default_factory=dict)
