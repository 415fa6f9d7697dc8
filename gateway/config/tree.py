"""The tree of settings with their defaults, frozen, the same for a TOML file, the environment and flags."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, final

from msgspec import Meta

from gateway.config.machine import usable_memory

KiB, MiB, GiB = 1024, 1024**2, 1024**3

# ---- kinds of values ----


class Unit(enum.Enum):
    """The kind of a setting's value, which decides how it may be written."""

    TEXT = "text"
    FLAG = "flag"
    CHOICE = "choice"
    COUNT = "count"
    NUMBER = "number"
    BYTES = "bytes"
    SECONDS = "seconds"
    PATHS = "paths"
    TEXTS = "texts"
    ADDRESSES = "addresses"
    NETWORKS = "networks"
    COUNTS = "counts"
    TENSORS = "tensors"
    VARIABLES = "variables"
    TABLE = "table"


def matching(pattern: str, wanted: str, **more: Any) -> Meta:
    """The rule of a text: the pattern that the whole text matches, and in words what it allows."""
    # Not Meta's own pattern: it is searched for, and msgspec 0.22 breaks on one beside a list in a union.
    return Meta(extra={"pattern": pattern, "wanted": wanted, **more})


# Kinds that end in OrOff allow 0. The setting says what 0 turns off.
Bytes: TypeAlias = Annotated[int, Meta(ge=1, extra={"unit": Unit.BYTES})]
BytesOrOff: TypeAlias = Annotated[int, Meta(ge=0, extra={"unit": Unit.BYTES})]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, extra={"unit": Unit.SECONDS})]
SecondsOrOff: TypeAlias = Annotated[float, Meta(ge=0, extra={"unit": Unit.SECONDS})]
Count: TypeAlias = Annotated[int, Meta(ge=1)]
CountOrOff: TypeAlias = Annotated[int, Meta(ge=0)]
Percent: TypeAlias = Annotated[int, Meta(ge=1, le=100)]
Rate: TypeAlias = Annotated[float, Meta(ge=0, extra={"unit": Unit.NUMBER})]
Weight: TypeAlias = Annotated[float, Meta(ge=0, extra={"unit": Unit.NUMBER})]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1, extra={"unit": Unit.NUMBER})]
Port: TypeAlias = Annotated[int, Meta(ge=-1, le=65535)]
Int31: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]

Counts: TypeAlias = Annotated[tuple[Count, ...], Meta(extra={"unit": Unit.COUNTS})]
Paths: TypeAlias = Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(extra={"unit": Unit.PATHS})]
Texts: TypeAlias = Annotated[tuple[str, ...], Meta(extra={"unit": Unit.TEXTS})]
Networks: TypeAlias = Annotated[tuple[str, ...], Meta(extra={"unit": Unit.NETWORKS})]
HostNames: TypeAlias = Annotated[
    tuple[str, ...],
    matching(
        r"(?!-)[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]",
        'a list of host names and addresses without a port, such as ["models.example", "[::1]"]',
        unit=Unit.TEXTS,
    ),
]
Origins: TypeAlias = Annotated[
    tuple[str, ...],
    matching(
        # as browsers send them: of ASCII alone
        r"\*|[A-Za-z][A-Za-z0-9+.-]*://[!$-&(-+\-.0->A-\[\]-~]+",
        'a list of origins, such as ["https://app.example", "http://localhost:3000"], or ["*"]',
        unit=Unit.TEXTS,
    ),
]
OpenRoutes: TypeAlias = Annotated[
    tuple[str, ...],
    matching(r"model-ready|metadata", 'a list of "model-ready" and "metadata"', unit=Unit.TEXTS),
]

Subprotocols: TypeAlias = Annotated[
    tuple[str, ...],
    matching(
        r"(?!everywire\.key\.)[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}",
        'a list of subprotocols, such as ["audio.v1"], each 1 to 128 letters, digits and !#$%&\'*+.^_`|~-, none beginning '
        "with everywire.key.",
        unit=Unit.TEXTS,
    ),
]

ServedNames: TypeAlias = Annotated[
    tuple[str, ...],
    matching(
        r"[^\x00-\x1f\x7f-\x9f]{1,256}",
        'a list of names, such as ["org/llama-3.1:8b", "gpt-4o"], each 1 to 256 printable characters',
        unit=Unit.TEXTS,
    ),
]

Devices: TypeAlias = Annotated[
    tuple[str, ...],
    matching(r"[!-~]([ -~]*[!-~])?", 'a list of devices, none of them empty, such as ["0", "1"]', unit=Unit.TEXTS),
]

# Names of this prefix are reserved: the gateway alone sets them for its processes.
_VARIABLE = r"(?!EVERYWIRE_)[A-Za-z_][A-Za-z0-9_]*"
_VARIABLE_WANTED = "letters, digits and '_', beginning with neither a digit nor EVERYWIRE_"
VariableName: TypeAlias = Annotated[str, matching(_VARIABLE, _VARIABLE_WANTED)]
Variables: TypeAlias = Annotated[dict[str, str], matching(_VARIABLE, _VARIABLE_WANTED, unit=Unit.VARIABLES)]

FileMode: TypeAlias = Annotated[str, matching(r"0?[0-7]{3}", 'three octal digits, such as "660"')]
BearerToken: TypeAlias = Annotated[str, matching(r"([!-~]{16,})?", "16 or more visible ASCII characters, or empty")]
FieldName: TypeAlias = Annotated[str, matching(r"[!#$%&'*+.^_`|~0-9A-Za-z-]*", "the name of a header field, or empty")]
# Braces are a pattern's, where the path stands in a route.
WebSocketPath: TypeAlias = Annotated[str, matching(r"/[!-z|~]*", "a path that begins with /, without { and }")]
Upgrades: TypeAlias = Annotated[
    Literal["outside-v1", "all", "none"] | bool, Meta(extra={"unit": Unit.CHOICE, "was_flag": True})
]
"""The paths at which WebSockets reach a model. It was a flag: true is "outside-v1", false "none"."""
Version: TypeAlias = Annotated[str, matching(r"[A-Za-z0-9._-]{1,64}", "1 to 64 letters, digits, '.', '_' and '-'")]
Factory: TypeAlias = Annotated[
    str,
    matching(
        r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*|[^\W\d]\w*",
        '"module:attribute", or the name of a library model',
    ),
]

_HOST = r"(?!(?:unix|systemd)(?:\+tls)?(?::|$))[^\s/\[\],\"']+"
Hosts: TypeAlias = Annotated[
    str | tuple[str, ...],
    matching(_HOST, 'an address or a host name ("0.0.0.0" for every IPv4 address, "::" for IPv6 too)', unit=Unit.ADDRESSES),
]
_PLACES = 'an address or a host name ("0.0.0.0" for every IPv4 address, "::" for IPv6 too), unix:/PATH or systemd:NAME'
Addresses: TypeAlias = Annotated[
    str | tuple[str, ...], matching(rf"{_HOST}|unix:/[^\0]+|systemd(:[!-9;-~]+)?", _PLACES, unit=Unit.ADDRESSES)
]
AddressesWithTLS: TypeAlias = Annotated[
    str | tuple[str, ...],
    matching(rf"{_HOST}|unix(\+tls)?:/[^\0]+|systemd(\+tls)?(:[!-9;-~]+)?", _PLACES, unit=Unit.ADDRESSES),
]

_MODEL = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_MODEL_WANTED = "1 to 128 letters, digits, '.', '_' and '-', beginning with a letter, a digit or '_'"
# EndpointName and VariantName of the SageMaker API.
_SAGEMAKER = r"(?!.{64})[a-zA-Z0-9](-*[a-zA-Z0-9])*"
_SAGEMAKER_WANTED = "1 to 63 letters, digits and '-', neither beginning nor ending with '-'"
# A kind of name that is the key of a table has the thing it names, with an article, and its placeholder in texts.
ModelName: TypeAlias = Annotated[str, matching(_MODEL, _MODEL_WANTED, of="a model", placeholder="NAME")]
ModelReference: TypeAlias = Annotated[str, matching(_MODEL, "the name of a model")]
EndpointName: TypeAlias = Annotated[str, matching(_SAGEMAKER, _SAGEMAKER_WANTED, of="an endpoint", placeholder="NAME")]
VariantName: TypeAlias = Annotated[str, matching(_SAGEMAKER, _SAGEMAKER_WANTED, of="a variant", placeholder="VARIANT")]


# ---- the settings ----


def _quarter_of_memory() -> int:
    return usable_memory() // 4


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ListenConfig:
    """Addresses and ports of the data plane. HTTP/1.1, HTTP/2, gRPC and WebSocket share each port."""

    host: AddressesWithTLS = "127.0.0.1"
    """The places to listen at, one or a list: a host name or an address, which gets each port below; `unix:/PATH`;
    `systemd`, all sockets that systemd passes, or `systemd:NAME`, those of that name. `unix+tls:` and `systemd+tls:` use
    TLS. 0.0.0.0 is every IPv4 address. :: is every IPv6 address, and every IPv4 address if none is listed."""
    port: Port = 8080
    """The port without TLS. 0: a free port, one for all addresses of `host`. -1: none."""
    tls_port: Port = 8443
    """The port with TLS, opened if TLS is on. 0 and -1 as for `port`."""
    bidi_port: Port = -1
    """A second port without TLS, for containers that are called as in SageMaker's private beta, which uses 8081. -1:
    none."""
    grpc_port: Port = -1
    """A port without TLS for gRPC clients; Triton's is 8001. -1: none. The other ports serve gRPC too."""
    unix_mode: FileMode = "660"
    """Mode of the Unix sockets that the gateway makes: one octal digit each for owner, group and others. 6 lets them
    connect."""
    trusted_proxies: Networks = ()
    """Addresses and networks of proxies, and `unix` for all clients of Unix sockets. The gateway takes the client's address
    from their PROXY header (version 1 or 2) at the start of a connection, and from `Forwarded` or `X-Forwarded-For` of a
    request. The log and the console show that address. It grants nothing."""
    backlog: Annotated[int, Meta(ge=1, le=65535)] = 2048
    """Connections that the kernel holds until the gateway accepts them."""
    tcp_keepalive: Annotated[SecondsOrOff, Meta(le=32767)] = 60.0
    """Seconds without a byte after which the kernel asks if the client is still there (TCP keepalive). If four probes, 15
    seconds apart, get no answer, or the client's machine has forgotten the connection, it ends. 0: no probes."""
    processes: Annotated[CountOrOff, Meta(le=256)] = 1
    """Processes that serve these ports, each with all models. A parent process accepts the connections and hands each one to
    one process. 0: as many as there are usable cores. `limits.total_bytes`, `limits.connections` and `repository.memory` are
    divided among them. Linux only."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorConfig:
    """The operator plane: health, live streams, and models to load, unload, reload and drain, on a separate port. Model
    clients never need it."""

    host: Addresses = "127.0.0.1"
    """Places to listen at, as in `listen.host`, without TLS. Other places than loopback and Unix sockets need a token, or
    `open`."""
    port: Port = -1
    """The port of the addresses in `host`; sockets need none. 0: a free port. -1: none. If the port is taken, models are
    served without the plane, and the gateway tries again."""
    unix_mode: FileMode = "600"
    """Mode of its Unix sockets, as `listen.unix_mode`."""
    token: BearerToken = field(default="", repr=False)
    """The token that requests send as `Authorization: Bearer TOKEN`; health and the console's page need none. Set it in the
    environment: every user of the machine can read a command line."""
    token_file: str = ""
    """A file of more tokens, one a line, each of them valid. The gateway reads it again when it changes."""
    open: bool = False
    """True allows it to listen beyond loopback without a token."""
    hosts: Texts = ()
    """Names that the Host field of requests without a token may have, besides `host`, localhost and every address."""
    tracebacks: bool = True
    """True if the plane shows the tracebacks of models and the server. False: only the log has them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """A separate port for metrics: `GET /metrics` and health, for a scraper that may not use the operator plane."""

    host: Hosts = "127.0.0.1"
    """An address or a host name, or a list of them. Beyond loopback, everybody who reaches it can read the metrics, unless
    `token_file` is set."""
    port: Port = -1
    """0: a free port. -1: none. If the port is taken, models are served without it, and the gateway tries again."""
    token_file: str = ""
    """A file of tokens, one a line. If set, `GET /metrics` needs one as `Authorization: Bearer TOKEN`; health needs none.
    They are valid nowhere else. The gateway reads the file again when it changes."""
    emf: SecondsOrOff = 0.0
    """Period of a log line in CloudWatch's embedded metric format, at least 1 second, at any `log.level`. It has SlotsInUse,
    Queued, LiveStreams, and Refusals since the last line, in the namespace `everywire`, for the service
    `tracing.service_name`. 0: no such lines."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TLSConfig:
    """TLS 1.2 and 1.3 with ALPN for h2 and http/1.1. On if `cert` is set or `dev` is true."""

    cert: str = ""
    """A PEM file: the server's certificate, then the certificates between it and the root."""
    key: str = ""
    """A PEM file: the private key of the certificate, without a passphrase."""
    dev: bool = False
    """True makes a development certificate for localhost, 127.0.0.1 and ::1, signed by its own CA."""
    dev_dir: str = ""
    """The folder of that certificate and its `ca.pem`. Empty: a folder in the user's cache directory."""
    client_ca: str = ""
    """A PEM file of authorities. If set, the gateway asks clients for a certificate that one of them has signed."""
    client_certificate: Literal["required", "optional"] = "required"
    """If `client_ca` is set: required refuses clients without a certificate, optional admits them. A wrong certificate is
    always refused."""
    reload_interval: SecondsOrOff = 10.0
    """Period at which the gateway checks these files. It serves a changed file, without a restart, once the file has stayed
    unchanged for one period. 0: only on SIGHUP or a program's request."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Limits on what a peer can make the server hold or wait for."""

    request_line: Bytes = 8 * KiB
    """HTTP/1.1: bytes of the request line. Beyond: 414."""
    head: Bytes = 32 * KiB
    """Bytes of request line and header fields together. Beyond: 431, in gRPC code 8. HTTP/2: above twice as many, the
    connection ends."""
    fields: Count = 100
    """Header fields of a request. Beyond: 431, in gRPC code 8."""
    head_timeout: Seconds = 10.0
    """Time from the first byte of a request to the end of its head. HTTP/2: time for a header block, for the nine bytes that
    begin a frame, and until the first SETTINGS."""
    tls_handshake_timeout: Seconds = 10.0
    """Time from the accepted connection to the end of its TLS handshake."""
    body: Annotated[
        int, Meta(ge=1, extra={"unit": Unit.BYTES, "computed": "the smaller of 1 GiB and an eighth of `total_bytes`"})
    ] = -1
    """Bytes of one request body. Beyond: 413, before the body is read if its length is declared."""
    total_bytes: Bytes = field(default_factory=_quarter_of_memory)
    """The byte budget: bytes of all bodies, of input read ahead, and of messages larger than a send buffer. Bytes count as
    they arrive, not when announced. The default is a quarter of the machine's memory, or of its control group's, such as a
    container's, if less."""
    party_share: Percent = 12
    """Percent of the byte budget that one party may hold while more than half of the budget is in use. A party is a key, a
    certificate's subject, or else a connection. Beyond: 503. 100: no limit."""
    body_pool: BytesOrOff = 64 * MiB
    """Bytes of freed body memory that stay allocated for reuse, for about ten seconds, in addition to `total_bytes`."""
    memory_refuse: Percent = 75
    """Percent of the byte budget in use above which new exchanges are refused with 503."""
    memory_reset: Percent = 90
    """Percent of the byte budget in use above which the gateway ends one exchange a second: the largest of the client that
    holds most."""
    json: Bytes = 64 * MiB
    """Bytes of a v2 JSON body, or of the JSON head of a binary one. Beyond: 413. See `text_json` for other bodies."""
    json_depth: Count = 64
    """Nested arrays and objects in a JSON text. Beyond: 400."""
    json_containers: Count = 100_000
    """Arrays and objects in a JSON text, each of which takes 80 to 200 bytes of memory once parsed. Beyond: 400."""
    json_values: Count = 1_000_000
    """Values in a JSON text, counted by its commas and opening brackets. Beyond: 400. The numbers of v2's tensors do not
    count."""
    text_json: Bytes = 16 * MiB
    """Bytes of the body of a call of a text model: LMI, TGI, OpenAI and generate. Beyond: 413."""
    tensors: Count = 256
    """Inputs of one request. Beyond: 400."""
    tensor_dims: Count = 16
    """Dimensions of one tensor. Beyond: 400."""
    bytes_elements: Count = 1_000_000
    """BYTES elements in the inputs of one request, each of which becomes an object. Beyond: 400."""
    body_silence: Seconds = 30.0
    """Time after which a slow upload ends, if it has sent fewer than `body_rate` bytes a second over that time. An upload is
    a whole body, a message of a stream, or an HTTP/2 frame, once it has begun. The gateway counts only while it lets the
    client send. Pauses between two messages are not limited."""
    body_rate: Bytes = 1 * KiB
    """Bytes a second; see `body_silence`."""
    chunk_line: Bytes = 256
    """HTTP/1.1: bytes of the line that begins a chunk. Beyond: 400."""
    chunk_extensions: BytesOrOff = 16 * KiB
    """HTTP/1.1: bytes of all chunk extensions of one body. Beyond: 400."""
    trailers: BytesOrOff = 4 * KiB
    """Bytes of all trailer fields of one message."""
    trailer_fields: CountOrOff = 20
    """Trailer fields of one message."""
    keep_alive: Seconds = 75.0
    """Time that a connection without a request stays open. The default is longer than the 60 s of common load balancers.
    HTTP/2: since the last request ended or the last whole PING came."""
    connection_age: SecondsOrOff = 0.0
    """Age at which a connection closes gracefully, so that clients move to new servers. Up to 10 percent is taken off at
    random for each connection. HTTP/2 and gRPC: GOAWAY; open streams run to their end. HTTP/1.1: `Connection: close` on the
    next answer; an idle connection closes. WebSockets stay open. Checked once a second. 0: no limit."""
    requests_per_connection: Count = 10_000
    """HTTP/1.1: requests on one connection. The last answer closes it."""
    read_ahead: Bytes = 256 * KiB
    """HTTP/1.1 and WebSocket: bytes that the gateway reads before the model asks for them. A head, line or frame under 64
    KiB that has begun is still read to its end."""
    send_buffer: Bytes = 64 * KiB
    """Bytes queued for one stream before its model waits."""
    unsent: BytesOrOff = 128 * KiB
    """Unsent bytes of one connection that the kernel takes (TCP_NOTSENT_LOWAT). 0: the system's default."""
    connection_send_buffer: Bytes = 256 * KiB
    """HTTP/2: bytes queued for all streams of one connection."""
    write_stall: SecondsOrOff = 30.0
    """Time after which the models of a client that takes none of its queued bytes stop. The client is told why if it reads
    again within 5 more seconds. 0: no limit."""
    loop_block: SecondsOrOff = 0.5
    """Seconds that one step may block the event loop before the log and the metrics name it. 0: not measured."""
    connections: Count = 10_000
    """Open connections. Above 90 percent, each new connection closes idle ones. Beyond: 503."""
    per_peer: CountOrOff = 0
    """Open connections of one address, for servers without proxies. Beyond: 503. 0: no limit."""
    descriptors_reserved: CountOrOff = 64
    """File descriptors that connections leave free. If no more are left, new connections get 503."""
    part: Bytes = 16 * MiB
    """Bytes of one event of an event stream, such as a BiDi payload part."""
    event_headers: Bytes = 128 * KiB
    """Bytes of all headers of one event."""
    event_fields: Count = 64
    """Headers of one event."""
    max_new_tokens: CountOrOff = 262_144
    """Tokens that a request may ask for in one text sequence. A request for more is refused. 0: no limit."""
    checkpoint_events: Count = 64
    """Events of one connection that the gateway handles before other connections get a turn; two milliseconds of work end
    the turn as well."""
    checkpoint_bytes: Bytes = 64 * KiB
    """Bytes of one connection that the gateway handles before other connections get a turn."""

    def __post_init__(self) -> None:
        if self.body < 0:
            object.__setattr__(self, "body", max(1, min(1 * GiB, self.total_bytes // 8)))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HTTP2FloodsConfig:
    """Allowances for frames that cost a peer little and the gateway much: a burst of each kind, and more each second. Real
    work on the same connection earns more. A connection that exceeds one gets ENHANCE_YOUR_CALM and ends."""

    enabled: bool = True
    """False turns these limits off."""
    reset_burst: CountOrOff = 200
    """Cancels of streams younger than a second, streams that the peer broke, and heads that are refused at once."""
    reset_rate: Rate = 33.0
    """More of `reset_burst` a second."""
    refused_burst: CountOrOff = 0
    """Streams beyond `http2.streams`. 0: twice `http2.streams`."""
    refused_rate: Rate = 100.0
    """More of `refused_burst` a second."""
    ping_burst: CountOrOff = 200
    """PINGs."""
    ping_rate: Rate = 10.0
    """More of `ping_burst` a second."""
    settings_burst: CountOrOff = 50
    """SETTINGS frames. A frame that changes the windows of open streams counts 1 more for each 100 of them."""
    settings_rate: Rate = 1.0
    """More of `settings_burst` a second."""
    empty_burst: CountOrOff = 200
    """DATA frames without payload that do not end their stream. More than 10 in a row on one stream are always too many."""
    empty_rate: Rate = 20.0
    """More of `empty_burst` a second."""
    window_burst: CountOrOff = 500
    """WINDOW_UPDATE frames."""
    window_rate: Rate = 10.0
    """More of `window_burst` a second."""
    priority_burst: CountOrOff = 500
    """PRIORITY frames, extension frames, and other frames without effect."""
    priority_rate: Rate = 50.0
    """More of `priority_burst` a second."""
    cramped_burst: CountOrOff = 1000
    """DATA frames of the gateway that the peer's window limits to less than 256 bytes."""
    cramped_rate: Rate = 100.0
    """More of `cramped_burst` a second."""
    waste_burst: BytesOrOff = 4 * MiB
    """Bytes of frames that are neither heads nor DATA."""
    waste_rate: BytesOrOff = 16 * KiB
    """More of `waste_burst` a second."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HTTP2Config:
    """The limits of HTTP/2 (RFC 9113)."""

    streams: Int31 = 1000
    """Open streams of one connection. The AWS SDK opens no second connection: it waits."""
    initial_window: Annotated[BytesOrOff, Meta(le=2**31 - 1)] = 64 * KiB
    """Bytes that a client may send on a stream before its model reads."""
    max_window: Annotated[Bytes, Meta(le=2**31 - 1)] = 256 * KiB
    """The largest window of a stream. It is four times this while the body is read directly into one buffer."""
    frame_size: Annotated[int, Meta(ge=2**14, le=2**24 - 1, extra={"unit": Unit.BYTES})] = 16 * KiB
    """The largest frame that is accepted."""
    continuations: CountOrOff = 8
    """CONTINUATION frames of one header block."""
    settings_entries: Count = 32
    """Entries of one SETTINGS frame."""
    ping_life: SecondsOrOff = 3600.0
    """Time that PINGs alone keep a connection open after its last request. 0: PINGs do not keep it open. Without PINGs,
    `limits.keep_alive` applies."""
    floods: HTTP2FloodsConfig = field(default_factory=HTTP2FloodsConfig)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WebSocketFloodsConfig:
    """Allowances for cheap frames, as `http2.floods`. A connection that exceeds one gets Close 1008."""

    enabled: bool = True
    """False turns these limits off."""
    control_burst: CountOrOff = 100
    """Pings, and Pongs that answer no Ping."""
    control_rate: Rate = 10.0
    """More of `control_burst` a second."""
    hollow_burst: CountOrOff = 200
    """Frames without payload that do not end their message. More than 1,024 frames in a row with less than 16 bytes each are
    always too many."""
    hollow_rate: Rate = 100.0
    """More of `hollow_burst` a second."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WebSocketConfig:
    """WebSockets (RFC 6455) at the container's path."""

    path: WebSocketPath = "/invocations-bidirectional-stream"
    """The path of `bidi.default_model`. Another model's path begins with `/models/NAME`."""
    any_path: Upgrades = "outside-v1"
    """The other paths at which that model answers WebSockets. `outside-v1`: those outside of /v1 and /endpoints/*/openai,
    where OpenAI's clients expect a protocol of their own; a model that the path or a query's `model` names answers itself,
    or the request gets 404. `all`: every path, whatever path and query name, as a container whose callers choose both: the
    default where SAGEMAKER_BIND_TO_PORT is set, and always the rule of `listen.bidi_port`. `none`: no other path. true is
    `outside-v1`, false is `none`."""
    part: Bytes = 16 * MiB
    """Bytes of one frame."""
    check_utf8: bool = False
    """True: a text message that is not UTF-8 ends its connection with Close 1007 (RFC 6455, 8.1). False: its bytes pass to
    the model unchanged, as in SageMaker."""
    ping_interval: SecondsOrOff = 20.0
    """Silence of a peer after which it gets a Ping. 0: no Pings."""
    ping_timeout: Seconds = 20.0
    """Time in which the peer must answer a Ping."""
    close_timeout: Seconds = 5.0
    """Time in which the peer must answer a Close."""
    floods: WebSocketFloodsConfig = field(default_factory=WebSocketFloodsConfig)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SSEConfig:
    """Streams of server-sent events."""

    silence: SecondsOrOff = 15.0
    """Silence of a stream of text, from its slot on, after which a comment leaves, which clients skip. The default is well
    below the 60 s after which many proxies give up. 0: no comments."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """Header fields by which a request on any wire sets its deadline and its priority."""

    timeout_headers: Texts = ("x-request-timeout", "grpc-timeout")
    """Header fields with the time that a call may take; the smallest value counts. `grpc-timeout` has gRPC's form, such as
    100m. Others are seconds, such as 1.5, 1500ms or 2s, or milliseconds if the name ends in -ms. Empty: none."""
    priority_header: FieldName = ""
    """The header field with the priority of a call that waits for a slot, from 1 (first) to 16. The default is 8. Numbers
    out of range count as 8. Empty: none. Every sender is trusted."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DrainConfig:
    """The shutdown that SIGTERM starts: the gateway is no longer ready, closes its listeners after `delay`, and ends streams
    that are still live after `timeout`."""

    delay: SecondsOrOff = 0.0
    """Time that the listeners stay open, so that a load balancer can notice that the gateway is not ready."""
    timeout: SecondsOrOff = 30.0
    """Time that live streams have to end by themselves."""
    report: str = ""
    """A file to which the standalone server writes how each live stream ended, as one line of JSON, after the drain. Empty:
    none. The log has the report in any case."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LMIConfig:
    """Text generation at /invocations and /predictions/{model}. A model's own serving.properties overrides these settings;
    they override the variables OPTION_* of LMI's containers."""

    default_model: str = ""
    """The model of a request that names none. Empty: the only model that fits."""
    output_formatter: Literal["", "json", "jsonlines", "sse", "json_chat", "jsonlines_chat"] = ""
    """The form of an answer if the request does not set it. Empty: as the request's `stream` says."""
    tgi_compat: bool = False
    """True gives answers the form of Hugging Face's TGI: `logprob`, an array around a JSON answer, SSE for streams."""
    rolling_batch: Literal["auto", "vllm", "lmi-dist", "trtllm", "disable"] = "auto"
    """The engine whose parameters, defaults and ranges apply; auto is vllm. disable is LMI's dynamic batch: `inputs` may be
    an array, and the answer is a list."""
    enable_streaming: bool = False
    """True if a dynamic batch is answered with JSON lines while it is generated."""
    do_sample: Literal["0.31", "0.32"] = "0.31"
    """The LMI release whose default for `do_sample` applies. 0.31: greedy. 0.32: greedy if the request has no `temperature`
    either."""
    unsupported: Literal["ignore", "refuse"] = "ignore"
    """Handling of a parameter that the model does not support: ignore it, or refuse the request."""
    max_text: Bytes = 16 * MiB
    """Bytes of text and details that one answer may keep for its end. Beyond, the generation fails."""
    max_prompts: Count = 256
    """Prompts in one request of a dynamic batch."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIConfig:
    """OpenAI's chat and text completions."""

    default_model: str = ""
    """The model of a request that names none. Empty: the only model that fits."""
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Tokens of an answer if the request sets no limit. 0: as many as `limits.max_new_tokens`, the model's own limit and the
    rest of its context allow."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class V2Config:
    """The Open Inference Protocol at /v2."""

    model_control: bool = False
    """True lets clients load and unload models and change the log's level: Triton's explicit model control."""
    compression: Annotated[int, Meta(ge=0, le=9)] = 1
    """Level of zlib, 1 to 9, for replies to clients that accept gzip or deflate. 0: no compression."""
    stream_requests: Count = 64
    """Requests in progress in one gRPC call of ModelStreamInfer. The gateway does not read further ones yet, so the client's
    window closes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BidiConfig:
    """SageMaker bidirectional streaming over HTTP/2, and its container side over WebSocket."""

    default_model: str = ""
    """The model at the container's WebSocket path. An endpoint names its model itself."""
    session_timeout: Seconds = 1800.0
    """Longest duration of a session."""
    idle_timeout: SecondsOrOff = 0.0
    """Time that a session may go without a part in either direction. 0: no limit."""
    padding: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Longest random padding of a part in an answer, in characters, so that an observer of the encrypted stream cannot see
    the length of each token. 0: none."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SigV4Config:
    """AWS Signature Version 4 at /endpoints/: signatures of requests, and of each event of a stream."""

    credentials: str = ""
    """A file in the form of ~/.aws/credentials; the key of each profile may sign. Empty: signatures are not verified."""
    region: str = ""
    """The region that a signature must name. Empty: any."""
    skew: Seconds = 300.0
    """Largest difference between a client's clock and the server's."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SageMakerConfig:
    """SageMaker's runtime operations at /endpoints/, and its multi-model container API at /models."""

    default_model: str = ""
    """The model of a request at /invocations that names none. Empty: `lmi.default_model`, else the only model that fits."""
    variant: VariantName = "AllTraffic"
    """The name of the production variant of an endpoint without configured variants."""
    invoke_timeout: SecondsOrOff = 0.0
    """Longest duration of InvokeEndpoint; 60 s in the service. 0: the model's own limit."""
    stream_timeout: SecondsOrOff = 0.0
    """Longest duration of InvokeEndpointWithResponseStream; 8 minutes in the service. 0: the model's own limit."""
    body: Bytes = 6 * MiB
    """Bytes of a body of InvokeEndpoint and InvokeEndpointWithResponseStream. The default is the service's limit."""
    multi_model: bool = False
    """True serves the multi-model container API: POST, GET and DELETE at /models (SAGEMAKER_MULTI_MODEL)."""
    sigv4: SigV4Config = field(default_factory=SigV4Config)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryConfig:
    """Models that are loaded from folders: one at the start, others while the server runs."""

    model: Annotated[str, matching(r"(/[^\0]*)?", "an absolute path, or empty")] = ""
    """A folder under `roots` whose model the standalone server serves from the start, besides the configured models. Empty:
    /opt/ml/model, if it holds a model and no other model is configured."""
    model_name: ModelName = "model"
    """The name of the model in that folder."""
    roots: Paths = ("/opt/ml/models", "/opt/ml/model")
    """Folders from which models may be loaded. Links are resolved before a path is compared."""
    code: Paths = ()
    """Roots, and folders under them, whose model.py may run. Other folders can only configure models of the library, by a
    model.toml."""
    memory: Bytes = field(default_factory=_quarter_of_memory)
    """Bytes that all loaded models may need together. Configured models count with the `memory` that they declare. Beyond:
    507 for a load."""
    models: Count = 1000
    """Models that may be loaded at once."""
    unload_timeout: SecondsOrOff = 60.0
    """Time that running calls have to end after an unload of their model was requested."""
    process: ProcessConfig = field(default_factory=lambda: ProcessConfig())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class VariantConfig:
    """A production variant: a model, and its share of the endpoint's calls."""

    model: ModelReference
    """The name of the model."""
    weight: Weight = 1.0
    """Its share, relative to the weights of the other variants. 0: only requests that name it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """A SageMaker endpoint. Each model without a configured endpoint is also an endpoint by its own name, if that has only
    letters, digits and hyphens."""

    variants: dict[VariantName, VariantConfig] = field(default_factory=dict)
    """Production variants by their names."""
    models: Annotated[str, matching(r"[^\0]*", "a path")] = ""
    """A folder under `repository.roots`, instead of variants. X-Amzn-SageMaker-Target-Model names a model in it. The model
    is loaded on its first use, and unloaded if another needs its memory."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RestartConfig:
    """Restarts of a crashed model, by OTP's rule: after more than `intensity` crashes within `period` seconds, the gateway
    gives this model up."""

    kind: Literal["permanent", "transient", "temporary"] | None = None
    """permanent: restart after every end. transient: restart after a crash, but not after `load()` has returned. temporary:
    never restart. permanent if the model does not say."""
    intensity: CountOrOff | None = None
    """Crashes within `period` that are tolerated; 3 if the model does not say."""
    period: Seconds | None = None
    """Time over which crashes are counted; 10 if the model does not say."""
    backoff: SecondsOrOff | None = None
    """Wait before the first restart. It doubles with each crash in the period. 0.1 if the model does not say."""
    backoff_max: SecondsOrOff | None = None
    """Longest wait; 5 if the model does not say."""
    jitter: Share | None = None
    """Largest share of a wait that is taken off at random, so that models that crashed together restart apart; 0.1 if the
    model does not say."""
    escalate: bool | None = None
    """True: when this model is given up, the server drains and ends with exit code 1. False: it continues without the model.
    false if the model does not say."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorConfig:
    """An input or output of a model, with the fields of `models.spec.TensorSpec`."""

    name: str
    datatype: str = ""
    shape: tuple[int, ...] | None = None
    optional: bool = False
    labels: tuple[str, ...] = ()
    pad: bool | int | float | str | None = None
    like: str = ""


Tensors: TypeAlias = Annotated[tuple[TensorConfig, ...], Meta(extra={"unit": Unit.TENSORS})]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingConfig:
    """Batches of a tensor model: rows of several requests in one call, at most `max_batch_size`."""

    enabled: bool | None = None
    """True turns batching on. Without a value it is on if the model asks for it, or any other setting here has a value."""
    max_delay: SecondsOrOff | None = None
    """Time that the first request of a batch waits for others while the model is idle. 0 if the model does not say: a batch
    has the requests that queued while the model was busy."""
    preferred: Counts | None = None
    """Numbers of rows that start a batch at once. As soon as the first requests of the queue have exactly such a number of
    rows, they are a batch, of the largest number that fits. Others wait for `max_delay`. None if the model does not say."""
    pad_rows: bool | None = None
    """True fills a batch up to the next preferred number of rows, with copies of its last row; false if the model does not
    say."""
    instances: Count | None = None
    """Batches that run at once; 1 if the model does not say."""
    retry: bool | None = None
    """True: if the call of a batch raises, each of its requests is called again, once and alone; true if the model does not
    say."""
    priority_levels: CountOrOff | None = None
    """Number of priorities: the parameter `priority` of a request is from 1, the first, to this. 0 if the model does not
    say: the parameter is ignored."""
    default_priority: CountOrOff | None = None
    """Priority of requests that have none, or one out of range. 0 if the model does not say: the last."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """Settings that run a model in its own processes, apart from the gateway's. Linux only."""

    enabled: Annotated[bool, Meta(extra={"computed": "true if anything else here differs from its default"})] | None = None
    """True runs the model in its own processes."""
    instances: Annotated[Count, Meta(extra={"computed": "as many as there are `devices`, and 1 without any"})] | None = None
    """Processes that run the model."""
    devices: Devices = ()
    """Devices of the processes, such as GPUs. Each process gets the next device; after the last one, the first again."""
    device_variable: VariableName = "CUDA_VISIBLE_DEVICES"
    """The environment variable that tells a process its device."""
    cpu_threads: (
        Annotated[Count, Meta(extra={"computed": "the usable CPU cores, divided by `instances`; at least 1"})] | None
    ) = None
    """Threads that numeric libraries may use in one process: OMP_NUM_THREADS, OPENBLAS_NUM_THREADS, MKL_NUM_THREADS and
    NUMEXPR_NUM_THREADS."""
    environment: Variables = field(default_factory=dict, repr=False)
    """Environment variables of each process. They replace the gateway's, and those that `devices` and `cpu_threads` set."""
    loop: Literal["trio", "asyncio"] = "trio"
    """The event loop for which the model's code is written."""
    memory_limit: BytesOrOff = 0
    """Bytes of data that one process may allocate (RLIMIT_DATA). Beyond: MemoryError in the process. 0: no limit."""
    shared_memory: Bytes = 1 * GiB
    """Bytes that one process may share with the gateway in each direction, for tensors and messages of 64 KiB or more. Only
    used bytes take memory."""
    python: Annotated[str, matching(r"[^\0]*", "the path of a program, or empty")] = ""
    """The Python interpreter of the processes, with the same version of everywire installed. Empty: the gateway's own."""
    hang_timeout: SecondsOrOff = 0.0
    """Time that the event loop of a process may be blocked before the process is killed. 0: no limit, except while something
    in the process has to stop."""

    @property
    def wanted(self) -> bool:
        """True if the model runs in processes of its own. A value equal to its default asks for nothing."""
        return self != ProcessConfig() if self.enabled is None else self.enabled

    @property
    def count(self) -> int:
        """The number of processes, if the model runs in any."""
        return self.instances or len(self.devices) or 1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model: its code, and how much of it runs at once. If the factory gives a ModelSpec, its values are the defaults.
    Otherwise they are the values that the texts name."""

    factory: Factory
    """`module:attribute`: a function, an async or sync generator, a class with `__call__`, or a ModelSpec. Or the name of a
    library model, such as `lm`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the factory."""
    served_names: ServedNames | None = None
    """Names by which OpenAI's clients may call the model, besides its own. No other model may have one of them. None if the
    model does not say."""
    version: Version | None = None
    """The version that v2 shows and that a v2 request may name; 1 if the model does not say."""
    required: bool | None = None
    """True: the server is ready only while this model answers. False: the server may be ready without it. true if the model
    does not say."""
    memory: BytesOrOff | None = None
    """Bytes that the loaded model needs, which count towards `repository.memory`. 0 if the model does not say:
    undeclared."""
    capacity: Count | None = None
    """Sessions at once; 64 if the model does not say."""
    queue: CountOrOff | None = None
    """Sessions that may wait for a slot. Beyond: 503. 1000 if the model does not say."""
    queue_timeout: SecondsOrOff | None = None
    """Time that a session may wait for a slot. Beyond: 503. 60 seconds if the model does not say. 0: until the session's own
    deadline."""
    party_share: Percent | None = None
    """Percent of `capacity`, and of `queue`, that one party may hold: a key, a certificate's subject, or else a connection.
    It is rounded up, but never to all if there are two or more. 90 if the model does not say. 100: all, for calls over one
    connection of a proxy."""
    idle_when_wanted: SecondsOrOff | None = None
    """Time that a session may wait for its client, without a message in either direction, while others wait for a slot.
    Beyond, the gateway ends it. 30 seconds if the model does not say. 0: no limit."""
    queue_bytes: BytesOrOff | None = None
    """Bytes that the bodies of waiting sessions may hold together. Beyond: 503. 0 if the model does not say: only
    `limits.total_bytes` limits them."""
    body_bytes: BytesOrOff | None = None
    """Bytes that the bodies of running sessions may hold together. A session whose body does not fit waits, as for a slot; a
    body larger than this gets 413. 0 if the model does not say: only `limits.total_bytes` limits them."""
    timeout: SecondsOrOff | None = None
    """Longest duration of a session. 0 if the model does not say: no limit."""
    load_timeout: Seconds | None = None
    """Longest duration of a load; 240 if the model does not say."""
    warmup: Texts | None = None
    """Bodies of requests that the model answers after each load, before it serves clients. If one fails, the load has
    failed. For text models: a prompt or LMI's JSON; for tensor models: v2's JSON; for models of parts: a text part."""
    subprotocols: Subprotocols | None = None
    """Subprotocols of WebSockets that the model speaks. The first that a client offers and that is here is chosen. None if
    the model does not say: none is chosen, and many clients that offer some then end the connection."""
    inputs: Tensors | None = None
    """Inputs of a tensor model, which v2 checks and shows. Each has a `name`, and may have a `datatype`, a `shape` with -1
    for any size, `optional = true`, and `pad` for batches."""
    outputs: Tensors | None = None
    """Outputs of a tensor model. Each may have `labels`, and `like` for batches."""
    features: Texts | None = None
    """Features that requests may ask of the model, in place of those that its code declares. For a text model:
    tools, tool_choice, parallel_tools, json_object, json_schema, regex, choice, grammar, thinking, images, audio, adapters,
    prefill, template. For a tensor model: embedding, ranking, matryoshka. A request that asks for more is refused."""
    context: CountOrOff | None = None
    """Tokens of a prompt and its answer together, for a text model. An answer without a limit ends there at the latest; if
    the model counts the tokens of prompts, every answer does. 0 if the model does not say: unknown."""
    max_batch_size: CountOrOff | None = None
    """Largest leading batch dimension of each tensor, which its `shape` leaves out. 0 if the model does not say: shapes are
    complete."""
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    threads: Count | None = None
    """Blocking steps at once, each in a thread; `capacity`, at most 64, if the model does not say."""
    step_timeout: SecondsOrOff | None = None
    """Time that a blocking step may run before it counts as stuck. Its session then ends, and another may use its place
    until the thread returns. If a round of a rolling batch is stuck, the model is loaded again. Checked once a second; in a
    process of the model, at once. 0 if the model does not say: no limit."""
    stall_timeout: SecondsOrOff | None = None
    """Time for which the model may say nothing while it could. Beyond, its session ends with 504, or with an error in the
    stream. The queue is not counted, nor are waits for the client: in `receive`, and in a `send` while the client does not
    read. Checked once a second, or in sixtieths of this time if those are longer. 600 seconds if the model does not say, and
    speaks text; otherwise 0: no limit."""
    stop_within: SecondsOrOff | None = None
    """Time that the model, with its last blocking step, may continue after its session has ended before it counts as stuck.
    Checked once a second; in a process of the model, at once, where StepCancelled ends Python code in a thread after half of
    it. 0 if the model does not say: no limit."""
    stuck_limit: CountOrOff | None = None
    """Stuck sessions at once, each with a place and a thread in addition to `capacity` and `threads`. One more is a crash of
    the model, or ends the process of the model that has so many. 4 if the model does not say."""
    restart: RestartConfig = field(default_factory=RestartConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Keys, routes that need none, pages of browsers, and credentials that models may see."""

    keys_file: str = ""
    """A file of keys, one a line: a name, the digest of the key, and what it may do. If set, each request needs a key, or
    another proof that is configured: a client certificate, or a signature at /endpoints/. The gateway reads the file again
    when it changes."""
    grace: SecondsOrOff = 60.0
    """Time that exchanges of a key may continue after the key was removed or has expired. 0: they end within a second."""
    open: OpenRoutes = ()
    """Routes that need no key, besides health: `model-ready`, which tells if a model takes requests; `metadata`, which lists
    models and their inputs and outputs."""
    unsigned: bool = False
    """True: signatures (`sagemaker.sigv4`) protect only /endpoints/, and certificates (`tls.client_ca`) only ports with TLS.
    All clients can then use other routes and ports without TLS, unless there is a file of keys."""
    public: bool = False
    """True: everybody may call a server that listens beyond this machine, and manage its models if that is offered."""
    origins: Origins = ()
    """Origins of pages that may call from a browser, besides the server's own; answers then have CORS fields. `*` is any
    origin, and needs `keys_file` or `public`. Empty: no other origin."""
    hosts: HostNames = ()
    """Names and addresses, without a port, that a request's Host may have. Others get 421, except for
    health: probes name an address. Empty: any Host. Only pages that call a server on loopback must use an address or
    localhost."""
    pass_credentials: bool = False
    """True shows models of this process the Authorization, X-Amz-Security-Token and Cookie fields, WebSocket subprotocols
    that are keys, and the signature of a presigned URL, for models that verify callers themselves. A credential that the
    gateway has checked stays hidden. No model sees X-Api-Key or Proxy-Authorization, and no container any of these."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """The structured log: one line for each exchange, with its ending."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severity that is logged."""
    format: Literal["auto", "json", "text"] = "auto"
    """json: one JSON object a line. text: lines for people. auto: text on a terminal, else json."""
    access: Literal["all", "limited", "none"] = "limited"
    """Exchanges that get a line. With limited, exchanges that had no slot of a model get 20 lines at once and 10 a second;
    the rest are summed up. Probes of health get a line with all alone."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Spans of OpenTelemetry, whose packages must be installed. Its environment variables, OTEL_*, have all other settings,
    and override these. A program that embeds a gateway brings its own provider: there only `enabled` counts."""

    enabled: bool = False
    """True gives exchanges spans."""
    service_name: str = "everywire"
    """The server's name in a trace, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES sets it."""
    exporter: Literal["otlp", "console"] = "otlp"
    """The destination of spans, unless OTEL_TRACES_EXPORTER sets it. otlp: a collector, by OTLP over HTTP, as
    OTEL_EXPORTER_OTLP_* say. console: standard output."""
    flush_timeout: Seconds = 5.0
    """Time to send the last spans when the server ends."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration."""

    listen: ListenConfig = field(default_factory=ListenConfig)
    operator: OperatorConfig = field(default_factory=OperatorConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    tls: TLSConfig = field(default_factory=TLSConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    http2: HTTP2Config = field(default_factory=HTTP2Config)
    websocket: WebSocketConfig = field(default_factory=WebSocketConfig)
    sse: SSEConfig = field(default_factory=SSEConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    drain: DrainConfig = field(default_factory=DrainConfig)
    lmi: LMIConfig = field(default_factory=LMIConfig)
    openai: OpenAIConfig = field(default_factory=OpenAIConfig)
    v2: V2Config = field(default_factory=V2Config)
    bidi: BidiConfig = field(default_factory=BidiConfig)
    sagemaker: SageMakerConfig = field(default_factory=SageMakerConfig)
    repository: RepositoryConfig = field(default_factory=RepositoryConfig)
    access: AccessConfig = field(default_factory=AccessConfig)
    log: LogConfig = field(default_factory=LogConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    models: dict[ModelName, ModelConfig] = field(default_factory=dict)
    endpoints: dict[EndpointName, EndpointConfig] = field(default_factory=dict)
