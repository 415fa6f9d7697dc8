"""The messages between a parent and its fronts, and the frames and packets that carry them.

There are two sockets. A stream carries frames: a length (u32, big-endian) and a MessagePack array. A packet socket carries
connections one way and acknowledgements the other. Bytes from a front are not trusted: if they do not decode, the front is
killed.
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
"""The most bytes of a frame."""
AT_ONCE = 64
"""The most connections in one packet. The kernel's own limit is 253 (SCM_MAX_FD)."""
PACKET = 4096
"""The most bytes of a packet."""


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """One message, as an array of its tag and its fields."""


@final
class SharedBegin(msgspec.Struct, frozen=True, array_like=True):
    """A model in processes of the parent, and its latest load."""

    name: str
    load: int
    fields: dict[str, Any]
    """The fields of the spec that its code declares (`described_fields`)."""
    instances: int
    """The number of processes."""
    shared_memory: int
    """Bytes of shared memory in each direction; 0: none."""
    input_formatter: bool = False
    """True if the model has an input formatter in its processes."""
    output_formatter: bool = False
    """True if the model has an output formatter in its processes."""


@final
class Begin(_Message, frozen=True, tag=0):
    """The parent's first message. The packet socket comes with it."""

    number: int
    """The number of the front, from 0."""
    processes: int
    """The number of fronts."""
    ports: Ports
    file: str | None
    overrides: dict[str, str]
    flags: dict[str, str]
    """`file`, `overrides` and `flags`: the command line, as `gateway.config.load.resolve` takes it."""
    sources: tuple[str, ...] = ()
    """Files of Python code whose models are served too; only fronts import them."""
    first: bool = False
    """True for the front that prints on a terminal what is served."""
    shared: list[SharedBegin] = []
    """The models whose processes the parent owns."""


@final
class Command(_Message, frozen=True, tag=1):
    """Asks the front to do or to answer something."""

    number: int
    what: str
    argument: Any = None


@final
class FrontHello(_Message, frozen=True, tag=2):
    """The front's first message."""

    version: str


@final
class FrontListens(_Message, frozen=True, tag=3):
    """The front serves connections, whether its models are loaded or not."""


@final
class Serving(_Message, frozen=True, tag=4):
    """The first load of each model has ended."""

    models: list[str]
    """The names of the models in service."""


@final
class CannotServe(_Message, frozen=True, tag=5):
    """The front cannot serve, and ends."""

    text: str
    """The reason."""
    configuration: bool
    """True if the reason is an error of the configuration."""


@final
class GivenUp(_Message, frozen=True, tag=6):
    """The front drains by itself, because a required model was given up. The parent then drains all fronts."""


@final
class Reply(_Message, frozen=True, tag=7):
    """The answer to a `Command`: a value or an error."""

    number: int
    """The number of the command."""
    value: Any = None
    error: str = ""
    status: int = 0
    code: str = ""


@final
class Over(_Message, frozen=True, tag=8):
    """The front has drained. It sends nothing after this."""

    report: DrainReport
    metrics: list[Family]
    stats: StatsView | None = None
    """The front's last figures; None if there is no operator plane and no port for metrics."""


@final
class SharedNews(_Message, frozen=True, tag=9):
    """The parent's news of a model's processes."""

    news: ModelNews


@final
class KillWanted(_Message, frozen=True, tag=10):
    """Asks the parent to kill a shared process, with a reason."""

    id: int
    why: str


@final
class LetGo(_Message, frozen=True, tag=11):
    """Tells the parent that the front's link to a shared process has ended."""

    id: int


@final
class FrontState(_Message, frozen=True, tag=12):
    """The present readiness of the front: sent before it listens, and with each change. A model takes calls only after the
    parent has answered, so that no front refuses a client that another has served."""

    number: int
    """The number of this message among those of the front, from 1."""
    unready: tuple[str, ...]
    """The reasons why the front is not ready; empty if it is."""
    missed: frozenset[str]
    """The models that do not answer there now. If the front is ready, only those that are being loaded: it goes on without
    one that is not required and was given up."""


@final
class Heard(_Message, frozen=True, tag=13):
    """The parent's answer to a `FrontState`, sent after it has decided which fronts get connections from now on."""

    number: int
    """The number of the latest `FrontState`."""


Message: TypeAlias = (
    Begin | Command | FrontHello | FrontListens | Serving | CannotServe | GivenUp | Reply | Over
    | SharedNews | KillWanted | LetGo | FrontState | Heard
)  # fmt: skip
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Message)


def frame_of(message: Message) -> bytes:
    """Encodes a message as a frame. ValueError if it is too large."""
    data = _encoder.encode(message)
    if len(data) > LARGEST:
        raise ValueError(f"a message of {len(data)} bytes; {LARGEST} are allowed")
    return _LENGTH.pack(len(data)) + data


@final
class ControlFrames:
    """Splits received bytes into messages."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Takes bytes, and yields the messages that are complete. ValueError for an invalid frame."""
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
    """A connection that is handed to a front. Its socket comes with the packet."""

    number: int
    tls: bool
    """True if it is served with TLS."""


@final
class LinkWanted(_Message, frozen=True, tag=1):
    """Asks the parent for a link to a shared process. The link's descriptors come with the packet."""

    id: int


@final
class Taken(_Message, frozen=True, tag=0):
    """A front's acknowledgement of connections."""

    numbers: list[int]
    """The connections that it has taken."""
    lacking: list[int]
    """The connections that it could not take, because it had no descriptors left or no longer accepts."""
    open: int
    """The number of its open connections."""


_packets = msgspec.msgpack.Decoder(list[Handed])
_from_front: msgspec.msgpack.Decoder[Taken | LinkWanted] = msgspec.msgpack.Decoder(Taken | LinkWanted)


def packet_of(said: list[Handed] | Taken | LinkWanted) -> bytes:
    """Encodes a packet."""
    return _encoder.encode(said)


def handed_of(packet: bytes) -> list[Handed]:
    """Reads the connections in a packet of the parent. ValueError if it is invalid."""
    return _packets.decode(packet)


def said_of(packet: bytes) -> Taken | LinkWanted:
    """Reads a packet of a front. ValueError if it is neither an acknowledgement nor a request for a link."""
    return _from_front.decode(packet)
