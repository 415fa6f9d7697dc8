"""SageMaker's bidirectional stream in JSON, as the beta document has it: events with JSON payloads, and literal objects."""

from __future__ import annotations

import re
from binascii import b2a_base64
from collections.abc import Mapping
from itertools import islice
from typing import Any, Final, final

import msgspec
import numpy as np

from protocols.aws.bidi_head import (
    END,
    JSON_CONTENT_TYPE,
    AtEnd,
    Completion,
    DataType,
    Form,
    PayloadPart,
    failure_body,
    read_flags,
    shown,
)
from protocols.aws.eventstream import LARGE, MAX_PAYLOAD, NeedData, encode_block, encode_headers
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import Buffer, Signal
from protocols.json import strict
from protocols.json.strict import JSONError

MAX_DEPTH: Final = 64
"""The deepest nesting of objects and arrays, counted from the object that holds PayloadPart."""
HEADROOM: Final = 64 * 2**10
"""The most bytes that an object may have beside the base64 of its part: names, padding, unknown members. They cost a scan
and a parse; base64 costs only a decode."""
MAX_VALUES: Final = 2048
"""The most objects and arrays in one object, including itself and nested ones: each costs a step of the scan."""
_SHORT = 200
"""Strings up to this length are scanned together with their surroundings, and count as bytes beside the base64."""
LONG: Final = 256 * 2**10
"""Larger messages are work that other tasks should not wait for."""


# ---- reading an object


class _Part(msgspec.Struct, rename={"data": "Bytes", "kind": "DataType", "state": "CompletionState"}, gc=False):
    # Typed, so that msgspec decodes the base64 without a string in between.
    data: bytes | None = None
    kind: str | None = None
    state: str | None = None
    status: str | None = msgspec.field(default=None, name="CompletionStatus")
    padding: str | None = msgspec.field(default=None, name="P")


class _Event(_Part, gc=False):
    part: _Part | None = msgspec.field(default=None, name="PayloadPart")


class _Literal(msgspec.Struct, gc=False):
    part: _Part | None = msgspec.field(default=None, name="PayloadPart")


_EVENT_DECODER = msgspec.json.Decoder(_Event)
_LITERAL_DECODER = msgspec.json.Decoder(_Literal)
_BASE64_DECODER = msgspec.json.Decoder(bytes)
_STEP = 128 * 2**10  # bytes of a string that are searched or decoded in one step: some 0.1 ms
_BASE64_RULE = "base64 has the standard alphabet, padding, and no white space"
_BOM = b"\xef\xbb\xbf"
_COLON = re.compile(b":")


def read_json_event(payload: Buffer, given: Mapping[str, object], content_type: str) -> PayloadPart:
    """The part in the payload of a JSON event: `{"Bytes": "<base64>", ...}`, or that object as the member PayloadPart of
    another. `given` has DataType, CompletionState and CompletionStatus from the event's headers; a member that is there too
    must be equal. RemoteProtocolError for anything else, and for more than 64 KiB beside the base64, which is checked before
    anything is parsed."""
    what = "payload of a JSON event"
    if payload[:3] == _BOM:
        payload = payload[3:]
    data: Buffer | None = None
    wrapped = False
    if len(payload) > 2 * MAX_VALUES:  # a shorter one cannot exceed a bound
        payload, data, wrapped = _without_base64(payload, what)
    event: _Event = _decode(_EVENT_DECODER, payload, what)
    members = _count(event.data, event.kind, event.state, event.status, event.padding, event.part)
    part = event.part or event
    _check_rest(payload, members + _members(event.part), what)
    if data is not None and wrapped is not (part is event.part):
        raise _too_much(what)  # the Bytes were beside the PayloadPart
    return _part(part, given, content_type, data)


def _without_base64(text: Buffer, what: str) -> tuple[Buffer, Buffer | None, bool]:
    """A long text with an empty string in place of its long Bytes; the removed string; and True if that is a
    PayloadPart's."""
    space = _SPACE.match(text)
    assert space is not None
    at = space.end()
    scan = _Scan(what, bare=True)
    if text[at : at + 1] != b"{" or not scan.find_end(text, at):
        raise RemoteProtocolError(f"{what} is not JSON: no object, or one without its end")
    if len(text) - scan.free > HEADROOM:
        raise _too_much(what)  # including the white space around it
    rest, data = scan.split(memoryview(text), at, len(text))
    return rest, data, scan.wrapped


def read_literal(text: Buffer) -> PayloadPart:
    """The part in `{"PayloadPart": {"Bytes": "<base64>", ...}}`. RemoteProtocolError for anything else."""
    return _read_literal(text, None)


def _read_literal(text: Buffer, data: Buffer | None) -> PayloadPart:
    what = "literal object"
    literal: _Literal = _decode(_LITERAL_DECODER, text, what)
    _check_rest(text, _count(literal.part) + _members(literal.part), what)
    if not literal.part:
        raise RemoteProtocolError("a literal object must have the member PayloadPart, an object")
    return _part(literal.part, {}, "", data)


def _decode(decoder: msgspec.json.Decoder[Any], text: Buffer, what: str) -> Any:  # Any: the type of the decoder
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        rule = f"; {_BASE64_RULE}" if "base64" in str(error) else ""
        raise RemoteProtocolError(f"{what}: {strict.fault_of(text, error)}{rule}") from None
    except UnicodeDecodeError:
        raise RemoteProtocolError(f"{what} is not UTF-8") from None
    except RecursionError:
        raise RemoteProtocolError(f"{what} is nested deeper than {MAX_DEPTH} arrays and objects") from None
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"{what} is not JSON: {strict.fault_of(text, error)}") from None


def _check_rest(text: Buffer, members: int, what: str) -> None:
    """Checks members that the typed decoder has skipped: they must be valid JSON and not duplicates. A text with no more
    colons than known members has neither problem; most clients send such texts."""
    if sum(1 for _ in islice(_COLON.finditer(text), members + 1)) == members:
        return
    try:
        strict.loads(text, depth=MAX_DEPTH, what=what, duplicates=False, floats=False)
    except JSONError as error:
        raise RemoteProtocolError(error.message) from None


def _members(part: _Part | None) -> int:
    return _count(part.data, part.kind, part.state, part.status, part.padding) if part else 0


def _count(*members: object) -> int:
    return len(members) - members.count(None)


def _part(part: _Part, given: Mapping[str, object], content_type: str, data: Buffer | None) -> PayloadPart:
    """`data` is the string of Bytes that was cut out of the text, with its quotes; None if none was."""
    if part.data is None:
        raise RemoteProtocolError("PayloadPart must have Bytes, a base64 string")
    data_type, completion = read_flags(
        _merged("DataType", part.kind, given),
        _merged("CompletionState", part.state, given),
        _merged("CompletionStatus", part.status, given),
    )
    decoded = part.data if data is None else _decode_base64(data)
    return PayloadPart(data=decoded, data_type=data_type, completion=completion, content_type=content_type)


def _merged(name: str, member: str | None, given: Mapping[str, object]) -> object:
    header = given.get(name)
    if member is None:
        return header
    if header is not None and header != member:
        raise RemoteProtocolError(f"{name} is {shown(header)} in the headers and {shown(member)} in the payload")
    return member


def _decode_base64(text: Buffer) -> Buffer:
    """The bytes of a base64 string that has its quotes. A long one is decoded in steps, between which other threads can run,
    into one read-only view."""
    size = len(text) - 2
    if size <= LONG:
        return _decode_string(text)
    decoded = np.empty((size + 3) // 4 * 3, np.uint8).data
    end = 0
    for at in range(0, size, _STEP):
        step = bytes(text[at + 1 : min(at + _STEP, size) + 1])
        if b"\\" in step:
            return _decode_string(text)
        piece = _decode_string(b'"%b"' % step)
        if len(piece) != _STEP // 4 * 3 and at + _STEP < size:
            raise _no_base64()  # padding before the end
        decoded[end : end + len(piece)] = piece
        end += len(piece)
    return decoded[:end].toreadonly()


def _decode_string(text: Buffer) -> bytes:
    try:
        return _BASE64_DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _no_base64() from None


def _no_base64() -> RemoteProtocolError:
    return RemoteProtocolError(f"Bytes is no base64 string; {_BASE64_RULE}")


# ---- finding the end of an object, and its Bytes

# From a position inside a value up to the next byte that needs a step: a bracket, or the quote of a string that is long or
# incomplete.
_PLAIN = re.compile(rb'(?:[^"{}\[\]]++|"[^"\\]{0,200}+"|"(?:[^"\\]|\\.){0,100}+")*+', re.DOTALL)
_SPACE = re.compile(rb"[ \t\n\r]*+")
_WHITE = b" \t\n\r"
_QUOTE = re.compile(b'"')
_ESCAPE = re.compile(rb"\\")
_ESCAPES = re.compile(rb'(?:\\.[^"\\]*+)++', re.DOTALL)


@final
class _Scan:
    """Scans one object as its bytes come, each byte once, up to its end or until there is too much beside its base64. It
    knows only brackets and strings; the parser checks that the whole is JSON.

    The base64 is a string of more than 200 bytes named Bytes in PayloadPart or, with `bare`, in the object itself; names
    with escapes do not count. Backslashes in it count as beside it. Only the first such string counts: further ones are
    duplicate members.
    """

    __slots__ = (
        "_bare",
        "_depth",
        "_in_data",
        "_in_part",
        "_in_string",
        "_values",
        "_what",
        "data_at",
        "data_end",
        "free",
        "size",
        "wrapped",
    )

    def __init__(self, what: str, *, bare: bool) -> None:
        self._what, self._bare = what, bare
        self.clear()

    def clear(self) -> None:
        """Starts again, behind the first bracket of an object."""
        self._depth = self._values = self.size = 1  # open brackets, all brackets, and scanned bytes
        self._in_string = self._in_data = self._in_part = False
        self.data_at = self.data_end = 0  # the position of the base64, from the first bracket; 0 if there is none
        self.wrapped = False  # True if the base64 is a PayloadPart's
        self.free = 0  # the bytes of the base64 so far, without backslashes

    def find_end(self, buffer: Buffer, at: int) -> bool:
        """Continues the scan of the object at `at`. True if its end has come. RemoteProtocolError for too much beside the
        base64."""
        pos, end = at + self.size, len(buffer)
        whole = False
        while pos < end and not whole:
            if self._in_string:
                start = pos
                pos, self._in_string = _leave_string(buffer, pos)
                if self._in_data:
                    self._measure(buffer, at, start, pos)
                if pos == start:  # a backslash whose second half has not come
                    break
            else:
                match = _PLAIN.match(buffer, pos, at + HEADROOM + 1 + self.free)
                assert match is not None
                pos = match.end()
                if pos < match.endpos:
                    whole = self._step(buffer, at, pos)
                    pos += 1
            if pos - at - self.free > HEADROOM:
                raise _too_much(self._what)
        self.size = pos - at
        return whole

    def _step(self, buffer: Buffer, at: int, pos: int) -> bool:
        """Takes the bracket or quote at `pos`. True if it is the object's end."""
        byte = buffer[pos]
        if byte == ord('"'):
            self._in_string = True
            if not self.data_at and (self._in_part if self._depth == 2 else self._bare and self._depth == 1):
                self._in_data = _named(buffer, at, pos, b'"Bytes"')
                if self._in_data:
                    self.data_at, self.wrapped = pos + 1 - at, self._depth == 2
        elif byte in b"{[":
            self._depth += 1
            self._values += 1
            if self._values > MAX_VALUES:
                raise RemoteProtocolError(f"{self._what} with more than {MAX_VALUES} arrays and objects")
            if self._depth > MAX_DEPTH:
                raise RemoteProtocolError(f"{self._what} is nested deeper than {MAX_DEPTH} arrays and objects")
            if self._depth == 2:
                self._in_part = _named(buffer, at, pos, b'"PayloadPart"')
        else:
            self._depth -= 1
        return not self._depth

    def _measure(self, buffer: Buffer, at: int, start: int, pos: int) -> None:
        """Counts the part of the base64 that was scanned."""
        end = pos if self._in_string else pos - 1
        self.data_end = end - at
        self.free += end - start
        escape = _ESCAPE.search(buffer, start, end)
        if escape is not None:
            self.free -= bytes(buffer[escape.start() : end]).count(b"\\")
        if not self._in_string:
            self._in_data = False
            if self.data_end - self.data_at <= _SHORT:
                self.data_at = self.data_end = self.free = 0

    def split(self, view: memoryview, at: int, end: int) -> tuple[bytes, Buffer | None]:
        """The bytes of `view` up to `end`, with an empty string in place of the base64 of the object at `at`; and the string
        that was removed, with its quotes, or None if there is none."""
        if not self.data_at:
            return bytes(view[:end]), None
        start, stop = at + self.data_at, at + self.data_end
        return b"".join((view[:start], view[stop:end])), view[start - 1 : stop + 1]


def _named(buffer: Buffer, at: int, pos: int, name: bytes) -> bool:
    """True if the value at `pos`, in an object that begins at `at`, has this name; `name` includes the quotes."""
    pos -= 1
    while buffer[pos] in _WHITE:
        pos -= 1
    if buffer[pos] != ord(":"):
        return False
    pos -= 1
    while buffer[pos] in _WHITE:
        pos -= 1
    start = pos + 1 - len(name)
    return start > at and buffer[start : pos + 1] == name and buffer[start - 1] != ord("\\")


def _leave_string(buffer: Buffer, pos: int) -> tuple[int, bool]:
    """Scans from inside a string. Returns the position behind its end and False, or the position after one step and True."""
    end = min(len(buffer), pos + _STEP)
    quote = _QUOTE.search(buffer, pos, end)
    stop = end if quote is None else quote.start()
    escape = _ESCAPE.search(buffer, pos, stop)
    if escape is None:
        return (stop, True) if quote is None else (stop + 1, False)
    escapes = _ESCAPES.match(buffer, escape.start(), end)
    return (escape.start() if escapes is None else escapes.end()), True


def _too_much(what: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"{what} with more than {HEADROOM} bytes beside the base64 of Bytes")


# ---- input in the literal form


@final
class LiteralDecoder:
    """Reads the body of a request in the literal form: a sequence of `{"PayloadPart": {...}}` objects, with or without white
    space between them, in any pieces. Other members of either object are ignored, null is unset, and a byte order mark
    before the first object is skipped. The body ends with the input.

    Call `receive_data`, then `next_part` until NEED_DATA, and so on. END comes after `receive_eof`. RemoteProtocolError is
    final: later bytes are dropped, and every pull raises it again.

    `max_part` bounds the bytes of a part. Its object may have their base64 and 64 KiB beside it, and is refused as soon as
    it has more of either. Each byte is scanned once, whatever pieces it comes in.
    """

    __slots__ = (
        "_at",
        "_begun",
        "_buffer",
        "_eof",
        "_error",
        "_max_object",
        "_max_part",
        "_scan",
        "_started",
        "_whole",
        "need",
    )

    form: Final = Form.LITERAL

    def __init__(self, max_part: int = MAX_PAYLOAD) -> None:
        self._max_part = max_part
        self._max_object = (max_part + 2) // 3 * 4 + HEADROOM
        self._buffer: bytes | bytearray = b""
        self._at = 0  # the start of the current object
        self._scan = _Scan("literal object", bare=False)
        self._begun = self._whole = False  # True if the object at `_at` has begun; True if it is whole
        self._started = self._eof = False
        self._error: RemoteProtocolError | None = None
        self.need = 0
        """The memory to reserve before the next `receive_data` while an object is incomplete. Its length is unknown, so this
        allows it to double, up to its limit. 0 if no object is incomplete."""

    @property
    def buffered(self) -> int:
        """Received bytes that the decoder still holds."""
        return len(self._buffer) - self._at

    @property
    def work(self) -> int:
        """The bytes that the next `next_part` processes in one step, because an object of more than 256 KiB is whole.
        Otherwise 0. That pull may run in another thread if there is no other pull meanwhile."""
        if self.buffered <= LONG or self._error is not None:
            return 0
        try:
            size = self._scan.size if self._find() else 0
        except RemoteProtocolError as error:
            self._fail(error)  # the pull raises it
            return 0
        return size if size > LONG else 0

    def receive_data(self, data: Buffer) -> None:
        """Takes bytes; the caller may reuse `data` at once. It never raises for their content."""
        if self._error is not None:
            return
        if not self.buffered:
            self._buffer, self._at = bytes(data), 0
            return
        if isinstance(self._buffer, bytes):
            self._buffer = bytearray(memoryview(self._buffer)[self._at :])
            self._at = 0
        self._buffer += data

    def receive_eof(self) -> None:
        """Tells that no more bytes will come. RemoteProtocolError if an object is known to be cut off. Whole objects can
        still be pulled, then END, or an error if the rest is not an object."""
        self._eof = True
        if self._begun and not self._whole and self._scan.size == self.buffered:
            raise self._fail(self._truncated())

    def next_part(self) -> PayloadPart | NeedData | AtEnd:
        """The next part; NEED_DATA; or END, at each call."""
        if self._error is not None:
            raise self._error.again()
        try:
            return self._next()
        except RemoteProtocolError as error:
            raise self._fail(error) from None

    def _next(self) -> PayloadPart | NeedData | AtEnd:
        if not self._find():
            if not self._begun:
                return END if self._eof else Signal.NEED_DATA
            if self._eof:
                raise self._truncated()
            self.need = min(2 * self.buffered, self._max_object)
            return Signal.NEED_DATA
        part = self._read()
        self._taken(self._at + self._scan.size)
        if len(part.data) > self._max_part:
            raise RemoteProtocolError(f"PayloadPart with {len(part.data)} Bytes, the limit of a part is {self._max_part}")
        return part

    def _read(self) -> PayloadPart:
        with memoryview(self._buffer) as view, view[self._at : self._at + self._scan.size] as text:
            if len(text) <= HEADROOM:
                return read_literal(text)
            return _read_literal(*self._scan.split(text, 0, len(text)))

    def _find(self) -> bool:
        """True if a whole object is here. It is scanned as far as it has come."""
        if self._whole or not (self._begun or self._begin()):
            return self._whole
        self._whole = self._scan.find_end(self._buffer, self._at)
        if (self._scan.size if self._whole else self.buffered) > self._max_object:
            raise RemoteProtocolError(
                f"literal object of more than {self._max_object} bytes: a part has at most {self._max_part}, which are more "
                f"in base64, and its object {HEADROOM} beside them"
            )
        return self._whole

    def _begin(self) -> bool:
        """True if an object begins, behind white space, which is dropped."""
        if not self._started:
            start = bytes(self._buffer[:3])
            if start != _BOM and _BOM.startswith(start) and not self._eof:
                return False  # so far it may be a byte order mark, or nothing
            self._started = True
            self._at = 3 if start == _BOM else 0
        match = _SPACE.match(self._buffer, self._at)
        assert match is not None
        self._at = match.end()
        if not self.buffered:
            self._taken(self._at)
            return False
        if self._buffer[self._at] != ord("{"):
            got = shown(bytes(self._buffer[self._at : self._at + 16]))
            raise RemoteProtocolError(f"a literal body is a run of JSON objects: '{{' must come next, got {got}")
        self._begun = True
        return True

    def _taken(self, end: int) -> None:
        """Drops the bytes before `end`."""
        if end == len(self._buffer):
            self._buffer, end = b"", 0
        elif isinstance(self._buffer, bytearray):
            del self._buffer[:end]  # only moves the start; the rest is moved once it is less than half
            end = 0
        self._at, self.need = end, 0
        self._begun = self._whole = False
        self._scan.clear()

    def _fail(self, error: RemoteProtocolError) -> RemoteProtocolError:
        self._error = error.again()
        self._buffer, self._at, self.need = b"", 0, 0
        self._begun = self._whole = False
        return error

    def _truncated(self) -> RemoteProtocolError:
        return RemoteProtocolError(f"the body ends inside a literal object, after {self.buffered} bytes of it")


# ---- output in both forms

_JSON_EVENT_BLOCK = encode_headers(
    {":message-type": "event", ":event-type": "PayloadPart", ":content-type": JSON_CONTENT_TYPE}
)


def encode_json_event(
    data: Buffer,
    data_type: DataType | None = None,
    completion: Completion | None = Completion.COMPLETE,
    padding: str = "",
) -> list[Buffer]:
    """A PayloadPart as an event with a JSON payload, as the buffers to write: for an answer, or for a request, bare or in an
    envelope. A member that is None is left out. `padding` is the member P. LocalProtocolError if the payload exceeds 16 MiB,
    which happens at 12 MiB of data minus the names."""
    return encode_block(_JSON_EVENT_BLOCK, b"".join(_members_of(data, data_type, completion, padding)))


def encode_literal_part(
    data: Buffer,
    data_type: DataType | None = None,
    completion: Completion | None = Completion.COMPLETE,
    padding: str = "",
) -> list[Buffer]:
    """A PayloadPart as a literal object on its own line, as the buffers to write. A member that is None is left out.
    `padding` is the member P. LocalProtocolError for more than 16 MiB of data."""
    size = memoryview(data).nbytes
    if size > MAX_PAYLOAD:
        raise LocalProtocolError(f"a literal PayloadPart has at most {MAX_PAYLOAD} bytes, not {size}")
    buffers: list[Buffer] = [b'{"PayloadPart":', *_members_of(data, data_type, completion, padding), b"}\n"]
    return [b"".join(buffers)] if size < LARGE else buffers


def encode_literal_model_stream_error(message: str, code: str = "") -> list[Buffer]:
    """The last line of an answer, for a fault of the model; as `encode_model_stream_error`."""
    return [b'{"ModelStreamError":', failure_body(message, code), b"}\n"]


def encode_literal_internal_stream_failure(message: str) -> list[Buffer]:
    """The last line of an answer, for a fault of the platform; as `encode_internal_stream_failure`."""
    return [b'{"InternalStreamFailure":', failure_body(message), b"}\n"]


def _members_of(
    data: Buffer, data_type: DataType | None, completion: Completion | None, padding: str
) -> tuple[bytes, bytes, bytes]:
    flags = "" if data_type is None else f',"DataType":"{data_type.value}"'
    if completion is not None:
        flags += f',"CompletionState":"{completion.value}"'
    text = b'"' + flags.encode()
    if padding:
        text += b',"P":' + msgspec.json.encode(padding.encode("utf-8", "replace").decode())
    return b'{"Bytes":"', b2a_base64(data, newline=False), text + b"}"
