"""What a parent and its fronts say to each other, and the frames and packets that carry it.

Two sockets: a stream, with frames of a length (u32, big-endian) and a MessagePack array each, and packets, with connections
one way and acknowledgements the other. Bytes from a front are a peer's: what does not decode ends it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, TypeAlias, final

import msgspec

from gateway.catalog.processes.linked import ModelNews
from gateway.fronts.sums import Family
from gateway.operator.stats import StatsView
from gateway.serving.drain import DrainReport
from gateway.serving.ports import Ports

_LENGTH = struct.Struct(">I")
LARGEST = 64 * 1024 * 1024
"""Bytes of a frame, at most."""
AT_ONCE = 64
"""Connections in one packet, at most. The kernel's own limit is 253 (SCM_MAX_FD)."""
PACKET = 4096
"""Bytes of a packet, at most."""


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """One message, as an array of its tag and its fields."""


@final
class SharedBegin(msgspec.Struct, frozen=True, array_like=True):
    """A model in processes that the parent has, and its latest load."""

    name: str
    load: int
    fields: dict[str, Any]
    """The fields that its code sets (`described_fields`)."""
    instances: int
    shared_memory: int
    input_formatter: bool = False
    """True if it has one in its processes."""
    output_formatter: bool = False


@final
class Begin(_Message, frozen=True, tag=0):
    """The parent's first word. The other socket comes with it."""

    number: int
    """From 0."""
    processes: int
    ports: Ports
    file: str | None
    overrides: dict[str, str]
    flags: dict[str, str]
    """The command line, as `gateway.config.load.resolve` takes it."""
    sources: tuple[str, ...] = ()
    """Files of Python code whose models are served too; only fronts import them."""
    first: bool = False
    """True for the one that tells a terminal what is served."""
    shared: list[SharedBegin] = []
    """The models whose processes the parent has."""


@final
class Command(_Message, frozen=True, tag=1):
    """Something is to be told or done."""

    number: int
    what: str
    argument: Any = None


@final
class FrontHello(_Message, frozen=True, tag=2):
    """The front's first word."""

    version: str


@final
class FrontListens(_Message, frozen=True, tag=3):
    """It serves what it is given, models or not."""


@final
class Serving(_Message, frozen=True, tag=4):
    """The first load of each model is decided."""

    models: list[str]
    unready: tuple[str, ...]


@final
class CannotServe(_Message, frozen=True, tag=5):
    """It cannot serve, and ends."""

    text: str
    configuration: bool


@final
class GivenUp(_Message, frozen=True, tag=6):
    """A model was given up without which nothing is to go on: it drains, and so are all others to."""


@final
class Reply(_Message, frozen=True, tag=7):
    """The answer to an `Command`: a value, or what is wrong with it."""

    number: int
    value: Any = None
    error: str = ""
    status: int = 0
    code: str = ""


@final
class Over(_Message, frozen=True, tag=8):
    """It has drained: the last word but the end of its socket."""

    report: DrainReport
    metrics: list[Family]
    stats: StatsView | None = None
    """Its last figures, where there is a plane."""


@final
class SharedNews(_Message, frozen=True, tag=9):
    """The parent's news of a model's processes."""

    news: ModelNews


@final
class KillWanted(_Message, frozen=True, tag=10):
    """The front has a reason why a process is to end."""

    id: int
    why: str


@final
class LetGo(_Message, frozen=True, tag=11):
    """The front has no link to a process any more."""

    id: int


Message: TypeAlias = (
    Begin | Command | FrontHello | FrontListens | Serving | CannotServe | GivenUp | Reply | Over
    | SharedNews | KillWanted | LetGo
)  # fmt: skip
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Message)


def frame_of(message: Message) -> bytes:
    """The message with its length before it. ValueError for one that is too large."""
    data = _encoder.encode(message)
    if len(data) > LARGEST:
        raise ValueError(f"a message of {len(data)} bytes; {LARGEST} are allowed")
    return _LENGTH.pack(len(data)) + data


@final
class ControlFrames:
    """ControlFrames, as they arrive."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete. ValueError for what is none."""
        held = self._held
        held += data
        while len(held) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(held)
            if size > LARGEST:
                raise ValueError(f"a frame of {size} bytes; {LARGEST} are allowed")
            if len(held) < (end := _LENGTH.size + size):
                return
            message = _decoder.decode(memoryview(held)[_LENGTH.size : end])
            del held[:end]
            yield message


# -- packets


@final
class Handed(msgspec.Struct, frozen=True, array_like=True):
    """A connection, whose socket comes with the packet."""

    number: int
    tls: bool


@final
class LinkWanted(_Message, frozen=True, tag=1):
    """A front's link to a process, whose descriptors come with the packet."""

    id: int


@final
class Taken(_Message, frozen=True, tag=0):
    """A front has taken these, had no descriptors for those, and has so many open."""

    numbers: list[int]
    lacking: list[int]
    open: int


_packets = msgspec.msgpack.Decoder(list[Handed])
_from_front: msgspec.msgpack.Decoder[Taken | LinkWanted] = msgspec.msgpack.Decoder(Taken | LinkWanted)


def packet_of(said: list[Handed] | Taken | LinkWanted) -> bytes:
    """A packet."""
    return _encoder.encode(said)


def handed_of(packet: bytes) -> list[Handed]:
    """The connections that a packet of the parent's brings."""
    return _packets.decode(packet)


def said_of(packet: bytes) -> Taken | LinkWanted:
    """Reads a packet of a front's. ValueError if it is neither an acknowledgement nor a request for a link."""
    return _from_front.decode(packet)
