"""What can be set, and the default of each: one frozen tree, the same for a TOML file, the environment and flags."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, final

from msgspec import Meta

from gateway.config.machine import usable_memory

KiB, MiB, GiB = 1024, 1024**2, 1024**3

# ---- what a value may be ----


class Unit(enum.Enum):
    """What a setting's value is, and so how it may be written."""

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
    """Of a text: the pattern that the whole of it matches, and in words what that allows."""
    # Not Meta's own pattern: it is searched for, and msgspec 0.22 breaks on one beside a list in a union.
    return Meta(extra={"pattern": pattern, "wanted": wanted, **more})


# What ends in OrOff may be 0, which is what its setting says: without a bound, never, none.
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

Devices: TypeAlias = Annotated[
    tuple[str, ...],
    matching(r"[!-~]([ -~]*[!-~])?", 'a list of devices, none of them empty, such as ["0", "1"]', unit=Unit.TEXTS),
]

# Names of this prefix are the gateway's own: it alone says which of them its processes get.
_VARIABLE = r"(?!EVERYWIRE_)[A-Za-z_][A-Za-z0-9_]*"
_VARIABLE_WANTED = "letters, digits and '_', beginning with neither a digit nor EVERYWIRE_"
VariableName: TypeAlias = Annotated[str, matching(_VARIABLE, _VARIABLE_WANTED)]
Variables: TypeAlias = Annotated[dict[str, str], matching(_VARIABLE, _VARIABLE_WANTED, unit=Unit.VARIABLES)]

FileMode: TypeAlias = Annotated[str, matching(r"0?[0-7]{3}", 'three octal digits, such as "660"')]
BearerToken: TypeAlias = Annotated[str, matching(r"([!-~]{16,})?", "16 or more visible ASCII characters, or empty")]
FieldName: TypeAlias = Annotated[str, matching(r"[!#$%&'*+.^_`|~0-9A-Za-z-]*", "the name of a header field, or empty")]
# Braces are a pattern's, where the path stands in a route.
WebSocketPath: TypeAlias = Annotated[str, matching(r"/[!-z|~]*", "a path that begins with /, without { and }")]
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
# As the keys of a table, names say what they name, with its article, and what stands for one in a text.
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
    """Where the data plane listens. HTTP/1.1, HTTP/2, gRPC and WebSocket share each port."""

    host: AddressesWithTLS = "127.0.0.1"
    """A name or an address, which has each port below; `unix:/PATH`, a Unix socket; `systemd` or `systemd:NAME`, the sockets
    that systemd passes, or those of that name; `unix+tls:` and `systemd+tls:` are such with TLS. Or a list of them. 0.0.0.0
    is every IPv4 address; :: is every address, of IPv4 too where no IPv4 address is listed."""
    port: Port = 8080
    """In clear; 0 asks the kernel for a free port, the same for each address of `host`; -1 opens none."""
    tls_port: Port = 8443
    """Opened where TLS is on."""
    bidi_port: Port = -1
    """A second port in clear, for containers that are called as in SageMaker's private beta: 8081 there; -1 opens none."""
    grpc_port: Port = -1
    """A port in clear for gRPC's clients: 8001 by Triton's convention; -1 opens none. Each other port serves them too."""
    unix_mode: FileMode = "660"
    """Mode of the Unix sockets that are made: a digit each for owner, group and everyone; 6 lets them connect."""
    trusted_proxies: Networks = ()
    """Addresses and networks whose word on their clients' addresses is taken, and `unix` for every client of a Unix socket:
    a PROXY header, version 1 or 2, is read at the begin of their connections, and `Forwarded` or `X-Forwarded-For` in their
    requests. The log and the console show the address; it opens nothing."""
    backlog: Annotated[int, Meta(ge=1, le=65535)] = 2048
    """Connections that the kernel holds until they are accepted."""
    tcp_keepalive: Annotated[SecondsOrOff, Meta(le=32767)] = 60.0
    """How long nothing may come over a connection until the kernel asks whether its client is still there (TCP keepalive).
    One that answers none of four probes, 15 seconds apart, or has forgotten the connection, is gone. 0: it never asks."""
    processes: Annotated[CountOrOff, Meta(le=256)] = 1
    """Processes that serve these ports, each with all the models; one connection is always one process's. More than one
    have a parent, which accepts and hands the connections over. 0: as many as there are usable cores. `limits.total_bytes`,
    `limits.connections` and `repository.memory` are divided by them. Linux only."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorConfig:
    """The operator plane, on a port of its own: health, what is live, and models loaded, unloaded, reloaded and drained. No
    client of a model needs it."""

    host: Addresses = "127.0.0.1"
    """Addresses as in `listen.host`, without TLS. Beyond loopback and Unix sockets it demands a token, or `open`."""
    port: Port = -1
    """0 asks the kernel for a free port, -1 opens none. One that is taken is tried again; models are served meanwhile."""
    unix_mode: FileMode = "600"
    """Mode of its Unix sockets, as `listen.unix_mode`."""
    token: BearerToken = field(default="", repr=False)
    """What a request has to bring as `Authorization: Bearer TOKEN`, health and the console's page apart: 16 or more visible
    ASCII characters. Best set in the environment: a command line can be read by everyone on the machine."""
    token_file: str = ""
    """A file with more of them, one a line; each one opens. It is read again when it has changed."""
    open: bool = False
    """Whether it may listen beyond loopback without any token."""
    hosts: Texts = ()
    """Names by which requests without a token may call it, in their Host, beside `host`, localhost and every address."""
    tracebacks: bool = True
    """True if the plane tells the tracebacks of what models and the server have raised; else only the log has them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Metrics on a port of their own, for a scraper that has no business with the operator plane: `GET /metrics` and health,
    and nothing that changes anything."""

    host: Hosts = "127.0.0.1"
    """An address or a name, or a list of them. Beyond loopback everybody who reaches it reads the metrics, unless
    `token_file` is set."""
    port: Port = -1
    """0 asks the kernel for a free port, -1 opens none. One that is taken is tried again; models are served meanwhile."""
    token_file: str = ""
    """A file of tokens, one a line: `GET /metrics` then needs one of them as `Authorization: Bearer TOKEN`, health none.
    They open nothing else. It is read again when it has changed."""
    emf: SecondsOrOff = 0.0
    """How often the log has a line in CloudWatch's embedded metric format, whatever `log.level` is: SlotsInUse, Queued,
    LiveStreams, and the Refusals since the last one, in the namespace `everywire`, for the service that
    `tracing.service_name` names. At most once a second. 0: never."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TLSConfig:
    """TLS 1.2 and 1.3, ALPN h2 and http/1.1. On where `cert` is set or `dev` is true."""

    cert: str = ""
    """A PEM file: the server's certificate, then those between it and the root."""
    key: str = ""
    """A PEM file: the private key of that certificate, without a passphrase."""
    dev: bool = False
    """Make a development certificate for localhost, 127.0.0.1 and ::1, signed by a CA of its own."""
    dev_dir: str = ""
    """Where that certificate and `ca.pem` are kept; empty: a folder in the user's cache directory."""
    client_ca: str = ""
    """A PEM file of authorities: clients are asked for a certificate that one of them has signed. Empty: clients are not
    asked for one."""
    client_certificate: Literal["required", "optional"] = "required"
    """Where `client_ca` is set: whether a client that shows none is refused. One that shows a wrong one always is."""
    reload_interval: SecondsOrOff = 10.0
    """How often all these files are looked at: changed ones are served, without a restart, once they have been the same for
    as long. 0: only when SIGHUP, or a program, asks for it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Bounds on what a peer may make the server hold or wait for. Bytes and seconds."""

    request_line: Bytes = 8 * KiB
    """HTTP/1.1; a longer one is answered 414."""
    head: Bytes = 32 * KiB
    """Request line and header fields together; more is answered 431."""
    fields: Count = 100
    """Header fields; more are answered 431."""
    head_timeout: Seconds = 10.0
    """From the first byte of a request to the end of its head. HTTP/2: of a header block, and of the nine bytes before a
    frame; and until the first SETTINGS."""
    tls_handshake_timeout: Seconds = 10.0
    """From the accepted connection to the end of its handshake."""
    body: Annotated[
        int, Meta(ge=1, extra={"unit": Unit.BYTES, "computed": "the smaller of 1 GiB and an eighth of `total_bytes`"})
    ] = -1
    """One request body; more is answered 413, before it is read where its length is declared."""
    total_bytes: Bytes = field(default_factory=_quarter_of_memory)
    """The byte budget: all bodies, what was read ahead and what is larger than a send buffer, together. It is paid as bytes
    arrive: what is only announced takes nothing. The memory is the machine's, or that of the control group, such as a
    container's, where that is less."""
    party_share: Percent = 12
    """Percent of the byte budget that one client may hold while more than half of it is in use: a key, a certificate's
    subject, or else a connection. Who holds as much gets no more, and is refused with 503. 100: as much as there is."""
    body_pool: BytesOrOff = 64 * MiB
    """Memory of bodies that is kept warm to be used again, beside `total_bytes`, for some ten seconds."""
    memory_refuse: Percent = 75
    """Percent of the byte budget in use above which new exchanges are refused with 503."""
    memory_reset: Percent = 90
    """Percent of the byte budget in use above which, of the client that holds most, the exchange that does is ended, one a
    second."""
    json: Bytes = 64 * MiB
    """A JSON body of v2, or the JSON head of a binary one; see `text_json` for others."""
    json_depth: Count = 64
    """Arrays and objects inside one another."""
    json_containers: Count = 100_000
    """Arrays and objects in one JSON text, each of which takes 80 to 200 bytes of memory once it is read; more are answered
    400."""
    json_values: Count = 1_000_000
    """Values in one JSON text, told by its commas and opening brackets; more are answered 400. The numbers of v2's tensors
    do not count: their memory is that of their arrays."""
    text_json: Bytes = 16 * MiB
    """The body of a call of a text model, by LMI, TGI or OpenAI's API, and of generate; a larger one is answered 413."""
    tensors: Count = 256
    """Inputs of one request."""
    tensor_dims: Count = 16
    """Dimensions of one tensor."""
    bytes_elements: Count = 1_000_000
    """Elements of BYTES in the inputs of one request, each of which becomes an object; more are answered 400."""
    body_silence: Seconds = 30.0
    """An upload whose window is open and that sends less than `body_rate` bytes a second over this time ends: a whole body,
    or a message of a stream that has begun and is not whole. So does an HTTP/2 connection on which a frame that has begun
    comes as slowly. What comes between two messages may be as slow as it likes."""
    body_rate: Bytes = 1 * KiB
    """A second; see `body_silence`."""
    chunk_line: Bytes = 256
    """HTTP/1.1: the line that begins a chunk."""
    chunk_extensions: BytesOrOff = 16 * KiB
    """HTTP/1.1: all chunk extensions of one body."""
    trailers: BytesOrOff = 4 * KiB
    """All trailer fields of one message."""
    trailer_fields: CountOrOff = 20
    """Trailer fields of one message."""
    keep_alive: Seconds = 75.0
    """How long a connection without a request stays open; longer than a load balancer's 60 s. HTTP/2: since the last request
    ended or the last whole PING came."""
    connection_age: SecondsOrOff = 0.0
    """How old a connection may be until its client is sent elsewhere, less a share of up to 10 percent that chance takes off
    for each, so that a new server behind the same address gets its part. HTTP/2 and gRPC: GOAWAY; streams that are open go
    on to their end, and no new ones are taken. HTTP/1.1: the next answer says `Connection: close`, and a connection on which
    nothing is asked is closed. A WebSocket is one stream, and is left alone. It is looked at once a second. 0: as old as it
    likes."""
    requests_per_connection: Count = 10_000
    """HTTP/1.1 only."""
    read_ahead: Bytes = 256 * KiB
    """What is read before the model asks, on the wires without a window of their own (HTTP/1.1, WebSocket). A head, a line
    or a frame of less than 64 KiB that has begun is read to its end."""
    send_buffer: Bytes = 64 * KiB
    """Bytes queued for one stream before its model waits."""
    unsent: BytesOrOff = 128 * KiB
    """What the kernel takes of a connection's output ahead of what its peer takes (TCP_NOTSENT_LOWAT); 0: the system's."""
    connection_send_buffer: Bytes = 256 * KiB
    """HTTP/2: bytes queued for all streams of one connection."""
    write_stall: SecondsOrOff = 30.0
    """A peer that takes none of the bytes queued for it for this long ends: its models stop, and where it reads again
    within 5 seconds more it is told why. 0: never."""
    loop_block: SecondsOrOff = 0.5
    """Seconds that one step may keep the event loop from everything else; one that lasts longer is named in the log and in
    metrics. 0: nobody looks."""
    connections: Count = 10_000
    """Open at once. From 90 percent of them on each that arrives closes idle ones, and beyond them it is answered 503."""
    per_peer: CountOrOff = 0
    """Connections of one address, for those without proxies; more are answered 503. 0: as many as it likes."""
    descriptors_reserved: CountOrOff = 64
    """File descriptors kept free of connections: with those that are left, more of them are answered 503."""
    part: Bytes = 16 * MiB
    """One event of an event stream, such as a BiDi payload part."""
    event_headers: Bytes = 128 * KiB
    """All headers of one event."""
    event_fields: Count = 64
    """Headers of one event."""
    max_new_tokens: CountOrOff = 65_536
    """The most tokens that a request may ask for in a sequence of a text; one that asks for more is refused. 0: no
    ceiling."""
    checkpoint_events: Count = 64
    """What one connection may do before the others get their turn; two milliseconds are as much, whatever it did."""
    checkpoint_bytes: Bytes = 64 * KiB
    """As `checkpoint_events`, in bytes."""

    def __post_init__(self) -> None:
        if self.body < 0:
            object.__setattr__(self, "body", max(1, min(1 * GiB, self.total_bytes // 8)))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HTTP2FloodsConfig:
    """How much of what costs a peer little it may send: of each kind a burst, some more a second, and what real work on the
    same connection earns. One that sends more is told ENHANCE_YOUR_CALM, and its connection ends."""

    enabled: bool = True
    """Whether connections end for that."""
    reset_burst: CountOrOff = 200
    """Cancels of streams younger than a second, streams that the peer broke, and heads that are refused as they come."""
    reset_rate: Rate = 33.0
    """A second; see `reset_burst`."""
    refused_burst: CountOrOff = 0
    """Streams beyond `http2.streams`. A burst of 0 is twice `http2.streams`."""
    refused_rate: Rate = 100.0
    """A second; see `refused_burst`."""
    ping_burst: CountOrOff = 200
    """PINGs."""
    ping_rate: Rate = 10.0
    """A second; see `ping_burst`."""
    settings_burst: CountOrOff = 50
    """SETTINGS frames; one that changes the windows of open streams counts 1 more for each 100 of them."""
    settings_rate: Rate = 1.0
    """A second; see `settings_burst`."""
    empty_burst: CountOrOff = 200
    """DATA frames without payload that do not end their stream. Of 11 in a row on one stream the last is one too many,
    whatever this is."""
    empty_rate: Rate = 20.0
    """A second; see `empty_burst`."""
    window_burst: CountOrOff = 500
    """WINDOW_UPDATE frames."""
    window_rate: Rate = 10.0
    """A second; see `window_burst`."""
    priority_burst: CountOrOff = 500
    """PRIORITY, extensions, and other frames that say nothing."""
    priority_rate: Rate = 50.0
    """A second; see `priority_burst`."""
    cramped_burst: CountOrOff = 1000
    """DATA frames of ours that the peer's window makes shorter than 256 bytes."""
    cramped_rate: Rate = 100.0
    """A second; see `cramped_burst`."""
    waste_burst: BytesOrOff = 4 * MiB
    """Bytes of frames that are neither heads nor DATA."""
    waste_rate: BytesOrOff = 16 * KiB
    """A second; see `waste_burst`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HTTP2Config:
    """RFC 9113: what we advertise and bound."""

    streams: Int31 = 1000
    """Open at once on one connection. The AWS SDK opens no second connection: it waits."""
    initial_window: Annotated[BytesOrOff, Meta(le=2**31 - 1)] = 64 * KiB
    """What a stream may send before its model reads."""
    max_window: Annotated[Bytes, Meta(le=2**31 - 1)] = 256 * KiB
    """The largest window that a stream is given; four times that while its body goes straight into one buffer."""
    frame_size: Annotated[int, Meta(ge=2**14, le=2**24 - 1, extra={"unit": Unit.BYTES})] = 16 * KiB
    """The largest frame that is accepted."""
    continuations: CountOrOff = 8
    """CONTINUATION frames of one header block."""
    settings_entries: Count = 32
    """Entries of one SETTINGS frame."""
    ping_life: SecondsOrOff = 3600.0
    """How long PINGs alone keep a connection open, after its last request. Without them it is `limits.keep_alive`; 0: they
    do not."""
    floods: HTTP2FloodsConfig = field(default_factory=HTTP2FloodsConfig)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WebSocketFloodsConfig:
    """How much of what costs a peer little it may send, as `http2.floods`. One that sends more is told Close 1008."""

    enabled: bool = True
    """Whether connections end for that."""
    control_burst: CountOrOff = 100
    """Pings, and Pongs that answer nothing."""
    control_rate: Rate = 10.0
    """A second; see `control_burst`."""
    hollow_burst: CountOrOff = 200
    """Frames without payload that do not end their message. Of 1025 in a row with less than 16 bytes each the last is one
    too many, whatever this is."""
    hollow_rate: Rate = 100.0
    """A second; see `hollow_burst`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WebSocketConfig:
    """RFC 6455 on the container's path."""

    path: WebSocketPath = "/invocations-bidirectional-stream"
    """The path of `bidi.default_model`; `/models/NAME` before it reaches any other model."""
    any_path: bool = True
    """Whether that model answers upgrades at every other path too, as a container must: SageMaker's callers choose it."""
    part: Bytes = 16 * MiB
    """One frame."""
    check_utf8: bool = False
    """True: a text message that is not UTF-8 ends its connection with Close 1007 (RFC 6455 section 8.1). False: its bytes
    pass to the model as they are, as SageMaker does."""
    ping_interval: SecondsOrOff = 20.0
    """How long a peer may be silent before it is sent a Ping; 0: no Pings."""
    ping_timeout: Seconds = 20.0
    """How long it may take to answer."""
    close_timeout: Seconds = 5.0
    """How long it may take to answer a Close."""
    floods: WebSocketFloodsConfig = field(default_factory=WebSocketFloodsConfig)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """What the head of a request may ask of its time and its place in a model's queue, on every wire."""

    timeout_headers: Texts = ("x-request-timeout", "grpc-timeout")
    """Header fields that say how long a call may last; the smallest holds. `grpc-timeout` as gRPC has it, such as 100m; the
    others seconds, such as 1.5, 1500ms or 2s, and milliseconds where the name ends in -ms. Empty: none is looked at."""
    priority_header: FieldName = ""
    """The header field of a call's priority while it waits for a slot: 1 is first and 16 last, 8 is meant without. Empty:
    none. It is believed to whoever sends it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DrainConfig:
    """What SIGTERM means: readiness off, listeners closed after `delay`, live streams until `timeout`, the rest ended."""

    delay: SecondsOrOff = 0.0
    """How long the listeners stay open, so that a load balancer sees that readiness is off."""
    timeout: SecondsOrOff = 30.0
    """How long live streams may go on."""
    report: str = ""
    """A file that the standalone server writes, as one line of JSON, when it has drained: what became of every stream.
    Empty: none; the log has it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LMIConfig:
    """Text generation at /invocations and /predictions/{model}. A model's own serving.properties comes before what is set
    here, and the variables OPTION_* of LMI's containers behind it."""

    default_model: str = ""
    """The model where the request names none; empty: the only model that fits."""
    output_formatter: Literal["", "json", "jsonlines", "sse", "json_chat", "jsonlines_chat"] = ""
    """The form of an answer where the request does not say; empty: what `stream` asks for."""
    tgi_compat: bool = False
    """Whether answers have the form of Hugging Face's TGI: `logprob`, an array around a json answer, SSE for streams."""
    rolling_batch: Literal["auto", "vllm", "lmi-dist", "trtllm", "disable"] = "auto"
    """The engine whose table of parameters holds, with its defaults and ranges; auto is vllm. disable is LMI's dynamic
    batch: `inputs` may be an array, and the answer is a list."""
    enable_streaming: bool = False
    """Whether a dynamic batch is answered with JSON lines as it is generated."""
    do_sample: Literal["0.31", "0.32"] = "0.31"
    """The release of LMI that says what a request without `do_sample` is: always greedy in 0.31; in 0.32 greedy only where
    it has no `temperature` either."""
    unsupported: Literal["ignore", "refuse"] = "ignore"
    """What becomes of a parameter that the model says it does not support: it is passed over, or the request refused."""
    max_text: Bytes = 16 * MiB
    """Text and details that one answer may keep for its end; more is a failure of the generation."""
    max_prompts: Count = 256
    """Prompts in one request of a dynamic batch."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIConfig:
    """Chat and text completions as OpenAI's clients ask for them."""

    default_model: str = ""
    """The model where the request names none; empty: the only model that fits."""
    max_tokens: Int31 = 256
    """The most tokens of an answer where the request does not say."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class V2Config:
    """The Open Inference Protocol at /v2."""

    model_control: bool = False
    """Whether clients may load and unload models and change the log's level: Triton's explicit model control."""
    compression: Annotated[int, Meta(ge=0, le=9)] = 1
    """zlib's level, 1 to 9, of replies whose client accepts gzip or deflate; 0: none is compressed."""
    stream_requests: Count = 64
    """Requests of one ModelStreamInfer call of gRPC that are under way at once. Those behind them are not read yet, so that
    the client's window closes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BidiConfig:
    """SageMaker bidirectional streaming over HTTP/2, and its container side over WebSocket."""

    default_model: str = ""
    """The model behind the container's WebSocket path; an endpoint names its model itself."""
    session_timeout: Seconds = 1800.0
    """How long a session may last."""
    idle_timeout: SecondsOrOff = 0.0
    """How long a session may go without a part in either direction; 0: as long as it lasts."""
    padding: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Parts of an answer carry a random length of padding, up to so many characters, so that an observer of the encrypted
    stream cannot tell how long each token is; 0: none."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SigV4Config:
    """AWS Signature Version 4 on the /endpoints/ routes: request signatures, and that of each event of a stream."""

    credentials: str = ""
    """A file in the form of ~/.aws/credentials: the key of each profile in it may sign. Empty: no signature is looked at."""
    region: str = ""
    """The region that a signature must be for; empty: any."""
    skew: Seconds = 300.0
    """How far a client's clock may be off."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SageMakerConfig:
    """SageMaker's runtime operations at /endpoints/, and its multi-model container API at /models."""

    default_model: str = ""
    """The model of /invocations where the request names none; empty: `lmi.default_model`, else the only one that fits."""
    variant: VariantName = "AllTraffic"
    """The name of the production variant of an endpoint that has no variants configured."""
    invoke_timeout: SecondsOrOff = 0.0
    """How long InvokeEndpoint may take; 60 s in the service; 0: as long as its model may."""
    stream_timeout: SecondsOrOff = 0.0
    """How long InvokeEndpointWithResponseStream may take; 8 minutes in the service; 0: as long as its model may."""
    body: Bytes = 6 * MiB
    """The largest body of InvokeEndpoint and InvokeEndpointWithResponseStream, as the service has it."""
    multi_model: bool = False
    """Serve the multi-model container API: POST, GET and DELETE at /models (SAGEMAKER_MULTI_MODEL)."""
    sigv4: SigV4Config = field(default_factory=SigV4Config)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryConfig:
    """Models that are loaded from folders: one from the start, others while the server runs."""

    model: Annotated[str, matching(r"(/[^\0]*)?", "an absolute path, or empty")] = ""
    """A folder under `roots` whose model the standalone server serves from the start, beside those of the configuration.
    Empty: /opt/ml/model where that holds one and no other model is configured."""
    model_name: ModelName = "model"
    """The name of the model of that folder."""
    roots: Paths = ("/opt/ml/models", "/opt/ml/model")
    """Folders that models may be loaded from; links are followed before a path is compared."""
    code: Paths = ()
    """Roots, and folders under them, whose model.py may run. From elsewhere come only models of the library, by their
    model.toml."""
    memory: Bytes = field(default_factory=_quarter_of_memory)
    """Bytes that all loaded models may need together, those of the configuration by what they declare; a load beyond it is
    answered 507."""
    models: Count = 1000
    """Models loaded at once."""
    unload_timeout: SecondsOrOff = 60.0
    """How long calls that are under way may go on after their model's unload was asked for."""
    process: ProcessConfig = field(default_factory=lambda: ProcessConfig())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class VariantConfig:
    """A production variant: a model, and its share of the endpoint's calls."""

    model: ModelReference
    """The name of the model."""
    weight: Weight = 1.0
    """Its share, beside the weights of the other variants; 0: only where a request names it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """A SageMaker endpoint. Without one of its own, every model is an endpoint by its name, where that is one an endpoint
    can have: letters, digits and hyphens."""

    variants: dict[VariantName, VariantConfig] = field(default_factory=dict)
    """Production variants by their names."""
    models: Annotated[str, matching(r"[^\0]*", "a path")] = ""
    """A folder under `repository.roots`: X-Amzn-SageMaker-Target-Model names a model in it, which is loaded on its first
    use, and unloaded when another needs its memory. Instead of variants."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RestartConfig:
    """OTP's rule: more than `intensity` crashes within `period` seconds and the model, alone, is given up."""

    kind: Literal["permanent", "transient", "temporary"] | None = None
    """When it is loaded again: always; after a crash, but not when its `load()` ended by itself; never. permanent where the
    model does not say."""
    intensity: CountOrOff | None = None
    """Crashes; 3 where the model does not say."""
    period: Seconds | None = None
    """The time in which they are counted; 10 where the model does not say."""
    backoff: SecondsOrOff | None = None
    """The wait before the first restart; it doubles with each crash in the period; 0.1 where the model does not say."""
    backoff_max: SecondsOrOff | None = None
    """The longest wait; 5 where the model does not say."""
    jitter: Share | None = None
    """The share of a wait that chance may take off it, so that models that crashed together are not loaded together; 0.1
    where the model does not say."""
    escalate: bool | None = None
    """Whether the server drains and ends, with exit code 1, when this model is given up, instead of going on without it;
    false where the model does not say."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorConfig:
    """An input or output of a model, as `models.spec.TensorSpec` has it."""

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
    """How a model of tensors is called with rows of several requests at once, at most `max_batch_size` of them."""

    enabled: bool | None = None
    """Whether it is; where nobody says: if the model asks for it, or anything here is set."""
    max_delay: SecondsOrOff | None = None
    """How long the first request of a batch waits for others while the model is idle; 0, which is meant where the model does
    not say: not at all, and a batch is what has queued while the model was busy."""
    preferred: Counts | None = None
    """Numbers of rows that go at once: as soon as the first requests of the queue have together exactly one of these, they
    are a batch, of the largest such number, and what is behind them waits for the next. Others wait for `max_delay`. None
    where the model does not say."""
    pad_rows: bool | None = None
    """Whether a batch is filled up to the next preferred number of rows, with copies of its last row; false where the model
    does not say."""
    instances: Count | None = None
    """Batches that run at once; 1 where the model does not say."""
    retry: bool | None = None
    """Whether the requests of a batch whose call raised are called again, each alone and once; true where the model does
    not say."""
    priority_levels: CountOrOff | None = None
    """Requests may have a parameter `priority` from 1, which goes first, to this; 0, which is meant where the model does not
    say: it is not looked at."""
    default_priority: CountOrOff | None = None
    """That of requests which say none; 0, which is meant where the model does not say: the last."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """Runs a model in processes of its own, apart from the gateway's. This needs Linux."""

    enabled: Annotated[bool, Meta(extra={"computed": "true if anything else here differs from its default"})] | None = None
    """True if the model runs in processes of its own."""
    instances: Annotated[Count, Meta(extra={"computed": "as many as there are `devices`, and 1 without any"})] | None = None
    """How many processes run the model."""
    devices: Devices = ()
    """Devices of the processes, such as GPUs. Each process gets the next one of them, and after the last one the first
    again."""
    device_variable: VariableName = "CUDA_VISIBLE_DEVICES"
    """The environment variable that tells a process its device."""
    cpu_threads: (
        Annotated[Count, Meta(extra={"computed": "the usable CPU cores, divided by `instances`; at least 1"})] | None
    ) = None
    """Threads that numeric libraries may use in one process: OMP_NUM_THREADS, OPENBLAS_NUM_THREADS, MKL_NUM_THREADS and
    NUMEXPR_NUM_THREADS."""
    environment: Variables = field(default_factory=dict, repr=False)
    """Environment variables of each process. They replace those of the same name that the gateway has, or that `devices` and
    `cpu_threads` set."""
    loop: Literal["trio", "asyncio"] = "trio"
    """The event loop that the model's own code is written for."""
    memory_limit: BytesOrOff = 0
    """Bytes of data that one process may allocate (RLIMIT_DATA). Beyond that, an allocation raises MemoryError. 0: no
    limit."""
    shared_memory: Bytes = 1 * GiB
    """Bytes that one process may share with the gateway for tensors and messages of 64 KiB or more, in each direction. Only
    what is used takes memory."""
    python: Annotated[str, matching(r"[^\0]*", "the path of a program, or empty")] = ""
    """The Python interpreter of the processes, which has everywire of this version. Empty: the gateway's own."""
    hang_timeout: SecondsOrOff = 0.0
    """How long the event loop of a process may be blocked until the process is killed. 0: no limit, unless something in the
    process has to stop."""

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
    """One model: where its code is, and how much of it runs at once. A factory that gives a ModelSpec says itself what is
    not set here."""

    factory: Factory
    """`module:attribute`: a function, an async or sync generator, a class with `__call__`, or a ModelSpec; or the name of a
    library model, such as `lm`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for a factory that takes them."""
    version: Version | None = None
    """Its version, as v2 shows it and may ask for it; 1 where the model does not say."""
    required: bool | None = None
    """True: the server is ready only while this model answers; false: it may go on without the model. True
    where the model does not say."""
    memory: BytesOrOff | None = None
    """Bytes that it needs when it is loaded, which count towards `repository.memory`; 0, which is meant where the model does
    not say: undeclared."""
    capacity: Count | None = None
    """Sessions at once; 64 where the model does not say."""
    queue: CountOrOff | None = None
    """Sessions that may wait for a slot; more are refused with 503; 1000 where the model does not say."""
    queue_timeout: SecondsOrOff | None = None
    """How long a session may wait for a slot until it is refused with 503; 60 seconds where the model does not say; 0: as
    long as its own time allows."""
    party_share: Percent | None = None
    """Percent of `capacity`, and of `queue`, that one party may hold, which is a key, the subject of clients' certificates,
    or else a connection: rounded up, and never all where there are two or more. 90 where the model does not say. 100: all,
    for those who are called over one connection of a proxy's."""
    idle_when_wanted: SecondsOrOff | None = None
    """How long a session may wait for its client, without a message in either direction, while others wait for a slot:
    one that has for longer is ended for them. 30 seconds where the model does not say; 0: nobody is."""
    queue_bytes: BytesOrOff | None = None
    """What the bodies of those that wait may hold together; one more is refused with 503; 0, which is meant where the model
    does not say: bounded by `limits.total_bytes` alone."""
    body_bytes: BytesOrOff | None = None
    """What the bodies of the sessions that run may hold together; one whose body does not fit beside them waits as for a
    slot, and one that is larger alone is refused with 413; 0, which is meant where the model does not say: bounded by
    `limits.total_bytes` alone."""
    timeout: SecondsOrOff | None = None
    """Seconds a session may last; 0, which is meant where the model does not say: no limit."""
    load_timeout: Seconds | None = None
    """How long loading may take; 240 where the model does not say."""
    warmup: Texts | None = None
    """Bodies of requests that it answers each time it was loaded, before any client is served; one that fails is a failed
    load. Of a text model a prompt or LMI's JSON, of a tensor model v2's JSON, of a model of parts a text part."""
    inputs: Tensors | None = None
    """What a model of tensors takes, where that is checked and shown by v2: each tensor has a `name`, and may have a
    `datatype`, a `shape` with -1 for any size, `optional = true`, and where requests are batched `pad`."""
    outputs: Tensors | None = None
    """What it gives; an output may have `labels`, and where requests are batched `like`."""
    max_batch_size: CountOrOff | None = None
    """Above 0 each tensor has a leading batch dimension of at most this, which its `shape` leaves out; 0, which is meant
    where the model does not say: shapes are whole."""
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    threads: Count | None = None
    """Blocking steps at once, each in a thread; as `capacity`, at most 64, where the model does not say."""
    step_timeout: SecondsOrOff | None = None
    """How long a blocking step may run before it is stuck: its session ends, and its place is somebody else's until the
    thread returns. Where it is a round of a rolling batch, the model is loaded anew. 0, which is meant where the model does
    not say: no limit. It is looked at once a second; in a process of the model's own, at once."""
    stop_within: SecondsOrOff | None = None
    """How long the model, with its last blocking step, may go on after its session has ended before it is stuck; 0, which is
    meant where the model does not say: no limit. It is looked at once a second; in a process of the model's own, at once,
    where Python code that still runs in a thread is ended by StepCancelled after half of it."""
    stuck_limit: CountOrOff | None = None
    """Sessions that may be stuck at once, each with a place and a thread in addition to `capacity` and `threads`; one more
    is a crash of the model, or the end of the one process of it that has so many; 4 where the model does not say."""
    restart: RestartConfig = field(default_factory=RestartConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Who may call: keys, what stays open without one, the pages of browsers, and the credentials that models may see."""

    keys_file: str = ""
    """A file of keys, one a line: a name, the digest of the key, and what it may. Where it is set, each request needs a key,
    or another way in that is set: a client's certificate, or a signature at /endpoints/. Read again once it has changed."""
    grace: SecondsOrOff = 60.0
    """How long what a key has begun may go on once the key is gone from the file, or over; 0: it ends within a second."""
    open: OpenRoutes = ()
    """What needs no key beside health: `model-ready`, whether a model takes requests; `metadata`, which models there are and
    what they take."""
    unsigned: bool = False
    """Whether signatures (`sagemaker.sigv4`) and certificates (`tls.client_ca`) close nothing but /endpoints/ and the ports
    with TLS: other routes, and ports in clear, are then open to everybody who has no key file in the way."""
    public: bool = False
    """Whether everybody may call what listens beyond this machine, and manage its models where that is offered."""
    origins: Origins = ()
    """Origins of pages that may call from a browser, beside those of this server itself; `*` is any, which needs a key file,
    or `public`. Answers then have the fields of CORS. Empty: no answer has."""
    hosts: HostNames = ()
    """Names and addresses by which requests may call the server, without a port: another Host is answered 421. Empty: it is
    not looked at, but for pages where only this machine can connect, which call it by an address or by localhost."""
    pass_credentials: bool = False
    """Show models of this process the Authorization, X-Amz-Security-Token and Cookie fields of their calls, the WebSocket
    subprotocols that are keys, and the signature of a presigned URL, for models that verify their callers themselves; never
    what has opened the door here. No model sees X-Api-Key or Proxy-Authorization, and no container any of these."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """The structured log: one line an exchange, with its one ending."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severity that is logged."""
    format: Literal["auto", "json", "text"] = "auto"
    """One JSON object a line, or text to read; auto is text on a terminal and JSON elsewhere."""
    access: Literal["all", "limited", "none"] = "limited"
    """Which exchanges have a line: all; limited: of those that were refused, or whose client left, before any model had
    them, 20 at once and 10 a second, and sums of the others; none."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Spans of OpenTelemetry, which needs `everywire[otel]`. Its own environment variables, OTEL_*, say the rest, and hold
    where one says the same. A program that embeds a gateway has a provider of its own: there only `enabled` counts."""

    enabled: bool = False
    """Whether exchanges have spans."""
    service_name: str = "everywire"
    """What the server is called in a trace, where neither OTEL_SERVICE_NAME nor OTEL_RESOURCE_ATTRIBUTES says it."""
    exporter: Literal["otlp", "console"] = "otlp"
    """Where spans go, where OTEL_TRACES_EXPORTER does not say: to a collector by OTLP over HTTP, as OTEL_EXPORTER_OTLP_*
    say; to standard output, to read."""
    flush_timeout: Seconds = 5.0
    """How long the last spans may take to be sent when the server ends."""


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
