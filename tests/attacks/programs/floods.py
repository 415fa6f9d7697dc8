"""Floods of what costs their sender little, one for each row of `docs/reference/floods.md`, and what begins and never comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from hpack import Encoder

from benchmarks import requests
from benchmarks.load.connections import frame
from tests.attacks.attack import attack
from tests.attacks.attacker import Attacker
from tests.attacks.ears import HTTP2Ear, WebSocketEar

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
OPENING = PREFACE + frame(4, 0, 0, b"") + frame(4, 1, 0, b"")
PING = frame(6, 0, 0, bytes(8))
_END_STREAM, _END_HEADERS = 1, 4
_ALWAYS = ("flood-reset", "flood-websocket-ping")
"""The others are nightly."""
_SOON = ("http2.floods.reset_burst=40",)
"""A lower burst: a loaded machine cannot make the default of 200 streams in a second."""
_PATIENCE = 4.0  # seconds more for a verdict on a loaded machine; who was ended is over before
_AT_ONCE = 64  # frames, or groups of them, in one piece


def block(*more: tuple[str, str], path: str = "/endpoints/echo/invocations-bidirectional-stream") -> bytes:
    """A header block that depends on none before it: the same for each stream."""
    fields = [(":method", "POST"), (":scheme", "http"), (":authority", "127.0.0.1"), (":path", path), *more]
    return Encoder().encode([(name, value, True) for name, value in fields])


@final
class Flood:
    """The same frames for ever: `make` is told a number and gives one group of them."""

    def __init__(
        self, make: Callable[[int], bytes], *, opening: bytes = OPENING, frames: int = 1, at_once: int = _AT_ONCE
    ) -> None:
        self.opening, self._make, self._frames = opening, make, frames
        self._number, self._at_once = 0, at_once

    def more(self) -> tuple[bytes, int]:
        numbers = range(self._number, self._number + self._at_once)
        self._number = numbers.stop
        return b"".join(map(self._make, numbers)), self._at_once * self._frames


def flood(
    name: str, kind: str, *, frames: int = 1, settings: tuple[str, ...] = (), lines: int = 20, opening: bytes = OPENING
) -> Any:
    """An attack on a few connections, each of which must be told to calm down: none comes again."""

    def made(make: Callable[[Attacker], Callable[[int], bytes]]) -> Any:
        def run(attacker: Attacker) -> None:
            connections = attacker.random.randint(1, 2)
            attacker.until += _PATIENCE
            attacker.pour(
                lambda: Flood(make(attacker), opening=opening, frames=frames), HTTP2Ear, connections=connections, again=False
            )

        run.__doc__ = make.__doc__
        attack(
            name, ends="goaway 11", counters=(f'everywire_floods_total{{kind="{kind}",wire="http/2"}}',), events=("flood",),
            settings=settings, lines=lines, nightly=name not in _ALWAYS,
        )(run)  # fmt: skip
        return make

    return made


def stream_of(number: int) -> int:
    return 2 * number + 1


@flood("flood-reset", "reset", frames=2, lines=3000, settings=_SOON)
def resets(attacker: Attacker) -> Callable[[int], bytes]:
    """Rapid reset: a request and its cancel, again and again."""
    head = block()
    return lambda n: frame(1, _END_HEADERS, stream_of(n), head) + frame(3, 0, stream_of(n), (8).to_bytes(4, "big"))


@flood("flood-broken-streams", "reset", frames=2, lines=3000, settings=_SOON)
def made_you_reset(attacker: Attacker) -> Callable[[int], bytes]:
    """MadeYouReset: a request, and a WINDOW_UPDATE that overflows its window, so that the server resets it."""
    head = block()
    return lambda n: frame(1, _END_HEADERS, stream_of(n), head) + frame(8, 0, stream_of(n), (2**31 - 1).to_bytes(4, "big"))


@flood("flood-data-after-the-end", "reset", frames=2, lines=3000, settings=_SOON)
def data_after_the_end(attacker: Attacker) -> Callable[[int], bytes]:
    """A whole request, and DATA behind its END_STREAM."""
    head = block()
    return lambda n: frame(1, _END_HEADERS | _END_STREAM, stream_of(n), head) + frame(0, 0, stream_of(n), b"more")


@flood("flood-malformed-heads", "reset", settings=_SOON)
def malformed_heads(attacker: Attacker) -> Callable[[int], bytes]:
    """Heads with a field name in capitals, each of which is a stream error."""
    head = block(("Upper", "x"))
    return lambda n: frame(1, _END_HEADERS | _END_STREAM, stream_of(n), head)


@flood("flood-refused-heads", "reset", settings=_SOON)
def refused_heads(attacker: Attacker) -> Callable[[int], bytes]:
    """Heads with more fields than the limit, each of which is answered with 431."""
    head = block(*[("x", "y")] * 101)
    return lambda n: frame(1, _END_HEADERS | _END_STREAM, stream_of(n), head)


@flood("flood-streams", "refused", settings=("http2.streams=100",), lines=3000)
def beyond_the_limit(attacker: Attacker) -> Callable[[int], bytes]:
    """Streams beyond the number that may be open, as fast as they are refused."""
    head = block()
    return lambda n: frame(1, _END_HEADERS, stream_of(n), head)


@flood("flood-ping", "ping")
def pings(attacker: Attacker) -> Callable[[int], bytes]:
    """PINGs, each of which wants an answer."""
    return lambda n: PING


@flood("flood-settings", "settings")
def settings_frames(attacker: Attacker) -> Callable[[int], bytes]:
    """SETTINGS that change the window of every stream, each of which wants an acknowledgement."""
    return lambda n: frame(4, 0, 0, b"\0\4" + (65_535 + n % 2).to_bytes(4, "big"))


@flood("flood-empty-data", "empty", frames=10, lines=3000)
def empty_data(attacker: Attacker) -> Callable[[int], bytes]:
    """DATA without payload, on as many streams as may be open."""
    head, n_in_a_row = block(), attacker.random.randint(2, 9)

    def make(n: int) -> bytes:
        begin = frame(1, _END_HEADERS, stream_of(n), head) if n < 500 else b""
        return begin + frame(0, 0, stream_of(n % 500), b"") * n_in_a_row

    return make


@flood("flood-padding", "empty")
def padding(attacker: Attacker) -> Callable[[int], bytes]:
    """DATA that is nothing but padding, on one stream."""
    size, head = attacker.random.randint(1, 200), block()
    return lambda n: (
        (frame(1, _END_HEADERS, 1, head) if not n else b"") + frame(0, 8, 1, bytes((size,)) + bytes(size)) * (n < 5000)
    )


@flood("flood-window-updates", "window")
def window_updates(attacker: Attacker) -> Callable[[int], bytes]:
    """WINDOW_UPDATEs of one byte."""
    return lambda n: frame(8, 0, 0, (1).to_bytes(4, "big"))


@flood("flood-priority", "priority")
def priorities(attacker: Attacker) -> Callable[[int], bytes]:
    """PRIORITY, PRIORITY_UPDATE and frames of unknown types."""
    kinds = attacker.random.sample([2, 0x10, 0xA, 0xC, 0xBE], 3)
    return lambda n: frame(kind := kinds[n % 3], 0, stream_of(n) if kind == 2 else 0, bytes(5))


@flood("flood-acknowledgements", "priority")
def acknowledgements(attacker: Attacker) -> Callable[[int], bytes]:
    """Acknowledgements of SETTINGS and of PINGs that were never sent."""
    return lambda n: frame(4, 1, 0, b"") if n % 2 else frame(6, 1, 0, bytes(8))


@flood("flood-waste", "waste")
def waste(attacker: Attacker) -> Callable[[int], bytes]:
    """Large frames of an unknown type, whose bytes alone are too many."""
    size = attacker.random.randint(12_000, 16_384)
    return lambda n: frame(0xBE, 0, 0, bytes(size))


@final
class Cramped(HTTP2Ear):
    """A reader that opens its window by one byte for each byte that came."""

    opening = PREFACE + frame(4, 0, 0, b"\0\4" + bytes(4)) + frame(4, 1, 0, b"")

    def __init__(self) -> None:
        super().__init__()
        body = b'{"inputs": "x", "parameters": {"max_new_tokens": 20000}, "stream": true}'
        head = block(("content-type", "application/json"), ("content-length", str(len(body))), path="/predictions/tokens")
        self.opening = Cramped.opening + frame(1, _END_HEADERS, 1, head) + frame(0, _END_STREAM, 1, body)
        self._heard = 0
        self._given = 0

    def take(self, data: bytes) -> None:
        super().take(data)
        self._heard += 1

    def more(self) -> tuple[bytes, int]:
        if self._given > self._heard + 1:
            return b"", 0
        self._given += 1
        return self.replies() + frame(8, 0, 1, (1).to_bytes(4, "big")), 1


@attack(
    "flood-cramped", ends="goaway 11", counters=('everywire_floods_total{kind="cramped",wire="http/2"}',), events=("flood",),
    settings=("http2.floods.cramped_burst=20", "http2.floods.cramped_rate=1"), nightly=True,
)  # fmt: skip
def cramped(attacker: Attacker) -> None:
    """A window that is opened byte by byte, so that each of them leaves in a frame of its own."""
    attacker.until += _PATIENCE
    attacker.pour(Cramped, connections=attacker.random.randint(1, 4), again=False)


@attack(
    "flood-unread", ends="goaway 11|reset|fin", counters=("everywire_ended_connections_total",), settings=("limits.write_stall=0.2",),
    nightly=True,
)  # fmt: skip
def unread(attacker: Attacker) -> None:
    """PINGs whose answers are not read."""
    attacker.until += _PATIENCE
    attacker.pour(lambda: Flood(lambda n: PING), HTTP2Ear, connections=3, again=False, reads=False)


# -- messages that begin and do not come


def begun(name: str, written: Callable[[], bytes], *, drip: Callable[[int], bytes] = lambda n: b"") -> Callable[[Any], Any]:
    """An attack by what is begun on a hundred connections, and goes on as slowly as can be."""

    def made(about: Callable[[], None]) -> Any:
        def run(attacker: Attacker) -> None:
            attacker.until += _PATIENCE
            attacker.pour(
                lambda: Flood(drip, opening=written(), at_once=1), HTTP2Ear, connections=100, again=False, every=0.3
            )

        run.__doc__ = about.__doc__
        attack(
            name, ends="goaway 11", settings=("limits.head_timeout=0.3", "limits.body_silence=0.3"), lines=400,
            counters=("everywire_ended_connections_total",), nightly=name not in _ALWAYS,
        )(run)  # fmt: skip
        return about

    return made


@begun("slow-continuations", lambda: OPENING + frame(1, 0, 1, b"\x83"), drip=lambda n: frame(9, 0, 1, b"") if n < 8 else b"")
def continuations() -> None:
    """A header block in frames that come one by one and never end it."""


@begun("slow-frame-head", lambda: OPENING + PING[:1], drip=lambda n: b"\0" if n < 6 else b"")
def frame_heads() -> None:
    """A frame whose first nine bytes come one by one."""


@begun("slow-settings", lambda: PREFACE)
def no_settings() -> None:
    """A preface, and no SETTINGS."""


# -- WebSockets


def masked(first: int, payload: bytes = b"") -> bytes:
    return bytes((first, 0x80 | len(payload))) + bytes(4) + payload


def _socket_flood(name: str, kind: str) -> Any:
    def made(make: Callable[[Attacker], Callable[[int], bytes]]) -> Any:
        def run(attacker: Attacker) -> None:
            attacker.until += _PATIENCE
            attacker.pour(
                lambda: Flood(make(attacker), opening=requests.upgrade()), WebSocketEar,
                connections=attacker.random.randint(1, 2), again=False,
            )  # fmt: skip

        run.__doc__ = make.__doc__
        attack(
            name,
            ends="close 1008",
            counters=(f'everywire_floods_total{{kind="{kind}",wire="websocket"}}',),
            events=("flood",),
            nightly=name not in _ALWAYS,
        )(run)
        return make

    return made


@_socket_flood("flood-websocket-ping", "control")
def socket_pings(attacker: Attacker) -> Callable[[int], bytes]:
    """WebSocket Pings, each of which wants its Pong."""
    payload = bytes(attacker.random.randint(0, 125))
    return lambda n: masked(0x89, payload)


@_socket_flood("flood-websocket-pong", "control")
def socket_pongs(attacker: Attacker) -> Callable[[int], bytes]:
    """WebSocket Pongs that answer nothing."""
    return lambda n: masked(0x8A)


@_socket_flood("flood-websocket-hollow", "hollow")
def socket_hollow(attacker: Attacker) -> Callable[[int], bytes]:
    """Frames of one message without payload and without end."""
    return lambda n: masked(0x00 if n else 0x02)


@_socket_flood("flood-websocket-tiny", "hollow")
def socket_tiny(attacker: Attacker) -> Callable[[int], bytes]:
    """Frames of one message with a few bytes each, and without end."""
    payload = bytes(attacker.random.randint(1, 15))
    return lambda n: masked(0x00 if n else 0x02, payload)
