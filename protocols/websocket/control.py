"""Control frames of a WebSocket, which wsproto reads and writes one by one, and the codes that a Close may have."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from typing import Protocol, TypeAlias, final

from wsproto import connection, events, frame_protocol
from wsproto.frame_protocol import LOCAL_ONLY_CLOSE_REASONS, CloseReason

from protocols.errors import LocalProtocolError
from protocols.events import Close, Ping, Pong
from protocols.roles import Role
from protocols.websocket.frames import MASKED, mask

ControlFrame: TypeAlias = Ping | Pong | Close

_BAD_GATEWAY = 1014
"""A code of IANA's registry that wsproto's list lacks: it would take such a Close for a violation."""
_LISTED = CloseReason.TRY_AGAIN_LATER.value
"""The code that wsproto reads in its place. The two differ in their last byte alone, also if they are masked."""
_PROTOCOL_CODES = frozenset(CloseReason) - frozenset(LOCAL_ONLY_CLOSE_REASONS) | {_BAD_GATEWAY}


class Violation(Exception):
    """The peer broke a rule of RFC 6455 or a limit. It has the close code and its reason."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@final
class Control:
    """Reads and writes control frames with wsproto's connection, by its documented API alone.

    A control frame depends on earlier ones only in ways that the machine itself tracks: whether our Close is sent and the
    peer's has come. So any connection of wsproto will do for each frame. An idle WebSocket then holds no object of wsproto,
    and one Control serves all WebSockets, in any thread.

    A connection of wsproto holds a generator that holds the connection. Pings and Pongs leave it as it was, so it serves
    again. After anything else its generator is run to its end: otherwise each would stay until the garbage collector runs.
    """

    __slots__ = ("_idle", "_type")

    def __init__(self, role: Role) -> None:
        server = role is Role.SERVER
        self._type = connection.ConnectionType.SERVER if server else connection.ConnectionType.CLIENT
        self._idle: list[connection.Connection] = []

    def read(self, data: bytes) -> ControlFrame | None:
        """The control frame in `data`, or None if the frame is incomplete. Raises Violation as soon as one is certain, also
        for a data frame with a wrong header."""
        reader, found = self._taken(), None
        try:
            reader.receive_data(data)
            found = _first(reader)
            return found
        finally:
            self._give_back(reader, type(found) in _WITHOUT_EFFECT and len(data) == _size(data))

    def write(self, event: ControlFrame) -> bytes:
        """The bytes of a control frame. In a client's, wsproto chose the masking key."""
        match event:
            case Ping(data=data):
                theirs: events.Event = events.Ping(payload=bytes(data))
            case Pong(data=data):
                theirs = events.Pong(payload=bytes(data))
            case Close(code=code, reason=reason):
                no_code = frame_protocol.CloseReason.NO_STATUS_RCVD
                theirs = events.CloseConnection(code=no_code if code is None else code, reason=reason or None)
        writer, written = self._taken(), None
        try:
            written = bytes(writer.send(theirs))
            return written
        finally:
            self._give_back(writer, written is not None and type(event) in _WITHOUT_EFFECT)

    def _taken(self) -> connection.Connection:
        try:
            return self._idle.pop()
        except IndexError:
            return connection.Connection(self._type)

    def _give_back(self, theirs: connection.Connection, as_it_was: bool) -> None:
        if as_it_was:
            self._idle.append(theirs)
        else:
            theirs.receive_data(_BROKEN)
            for _ in theirs.events():
                pass


_WITHOUT_EFFECT = (Ping, Pong)
_BROKEN = bytes(256)
"""Ends any control frame that has begun, and is no frame that may follow."""


def _size(data: bytes) -> int:
    """The length of the control frame that begins so."""
    return 2 + (4 if data[1] & MASKED else 0) + (data[1] & 0x7F)


def _first(reader: connection.Connection) -> ControlFrame | None:
    """The control frame that wsproto has read. Raises Violation."""
    for event in reader.events():
        match event:
            case events.Ping(payload=payload):
                return Ping(data=bytes(payload))
            case events.Pong(payload=payload):
                return Pong(data=bytes(payload))
            case events.CloseConnection(code=code, reason=reason):
                # wsproto reports a violation as a Close too, but leaves its state unchanged.
                if reader.state is connection.ConnectionState.OPEN:
                    raise Violation(int(code), reason or "")
                return close_event(code, reason or "")
    return None


class ControlReader(Protocol):
    """Reads control frames with wsproto, one by one."""

    def read(self, data: bytes) -> ControlFrame | None: ...


def read_control(reader: ControlReader, data: bytes) -> ControlFrame | None:
    """The control frame in `data`, as `Control.read`. wsproto decides all but the code that its list lacks."""
    start = 6 if data[1] & MASKED else 2
    code = mask(data[start : start + 2], data[2:6]) if start == 6 else data[2:4]
    if data[0] & 0x0F != frame_protocol.Opcode.CLOSE or code != _BAD_GATEWAY.to_bytes(2, "big"):
        return reader.read(data)
    event = reader.read(data[: start + 1] + bytes((data[start + 1] ^ _BAD_GATEWAY ^ _LISTED,)) + data[start + 2 :])
    return Close(code=_BAD_GATEWAY, reason=event.reason) if isinstance(event, Close) else event


def close_event(code: int, reason: str) -> Close:
    """The Close event for a received Close, as wsproto reports it."""
    no_code = code == frame_protocol.CloseReason.NO_STATUS_RCVD
    return Close(code=None if no_code else int(code), reason=reason)


def checked_close(event: Close) -> Close:
    """The Close to send, checked here: wsproto would silently send 1000 in place of a code that is not allowed."""
    if event.code is None:
        if event.reason:
            raise LocalProtocolError("Close: a reason needs a code")
        return event
    if not 3000 <= event.code <= 4999 and event.code not in _PROTOCOL_CODES:
        raise LocalProtocolError(f"Close: code {event.code} may not be sent (RFC 6455 section 7.4)")
    # A lone surrogate, as in an exception's text about a file name, cannot be encoded as UTF-8.
    return Close(code=event.code, reason=event.reason.encode("utf-8", "replace").decode())


def rekeyed(frame: bytes, key: bytes) -> bytes:
    """A client's frame with this key in place of wsproto's: all randomness here comes from the caller."""
    start = {126: 8, 127: 14}.get(frame[1] & 0x7F, 6)
    return frame[: start - 4] + key + mask(mask(frame[start:], frame[start - 4 : start]), key)


def keeps_to_itself() -> bool:
    """True if wsproto's connection behaves as `Control` requires: complete after one control frame whatever came before,
    with violations that can be told from Closes. It tries the examples of RFC 6455 section 5.7 and some Closes."""
    try:
        for role, key in ((Role.SERVER, b"\x37\xfa\x21\x3d"), (Role.CLIENT, b"")):
            control, flag = Control(role), 0x80 if key else 0
            hello = b"\x7f\x9f\x4d\x51\x58" if key else b"Hello"
            close = bytes((0x88, flag | 2)) + key + (b"\x34\x12" if key else b"\x03\xe8")
            pong = bytes((0x8A, flag | 5)) + key + hello
            if control.read(pong[:-1]) is not None or control.read(pong) != Pong(data=b"Hello"):
                return False
            if control.read(close) != Close(code=1000) or control.read(bytes((0x88, flag)) + key) != Close(code=None):
                return False
            written = control.write(Ping(data=b"Hello"))
            if written[:2] != bytes((0x89, 5 | flag ^ 0x80)) or len(written) != (7 if key else 11):
                return False
            try:
                control.read(bytes((0x88, flag | 1)) + key + b"?")
            except Violation as violation:
                if violation.code != frame_protocol.CloseReason.PROTOCOL_ERROR:
                    return False
            else:
                return False
    except (AttributeError, TypeError, ValueError, Violation):
        return False
    return True


@cache
def control_frames() -> Mapping[Role, Control]:
    """The Control of each role. Empty, after a warning, if wsproto does not behave as the payload path requires."""
    if keeps_to_itself():
        return {role: Control(role) for role in Role}
    warnings.warn(
        "wsproto's connection is not what the payload path needs: every frame goes through wsproto, which is slow",
        RuntimeWarning,
        stacklevel=3,
    )
    return {}


control_frames()  # the warning comes at import, and not at the first connection
