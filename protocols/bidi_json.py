"""SageMaker's bidirectional stream in JSON, as the beta document has it: events with JSON payloads, and literal objects."""

from __future__ import annotations

import re
from binascii import b2a_base64
from collections.abc import Mapping
from itertools import islice
from typing import Any, Final, final

import msgspec

from protocols import strict_json
from protocols.bidi_head import JSON_CONTENT_TYPE, Form, failure_body
from protocols.bidi_parts import END, AtEnd, Completion, DataType, PayloadPart, read_flags, shown
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import Buffer, Signal
from protocols.eventstream import LARGE, MAX_PAYLOAD, NeedData, encode_block, encode_headers
from protocols.strict_json import JSONError

MAX_DEPTH: Final = 64
"""Objects and arrays within one another, counted from the one that holds PayloadPart."""
HEADROOM: Final = 64 * 2**10
"""What a literal object may have beside the base64 of its largest part: names, padding, members that we do not know."""


# ---- reading an object


class _Part(msgspec.Struct, rename={"data": "Bytes", "kind": "DataType", "state": "CompletionState"}, gc=False):
    # Typed, so that the base64 goes from the text into the part without a string between.
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
_BOM = b"\xef\xbb\xbf"
_COLON = re.compile(b":")


def read_json_event(payload: Buffer, given: Mapping[str, object], content_type: str) -> PayloadPart:
    """The part in the payload of a JSON event: `{"Bytes": "<base64>", ...}`, or that as the member PayloadPart of an
    object. `given` are DataType, CompletionState and CompletionStatus as the event's headers have them; a member that is
    there too must say the same. RemoteProtocolError for anything else."""
    what = "payload of a JSON event"
    if payload[:3] == _BOM:
        payload = payload[3:]
    event: _Event = _decode(_EVENT_DECODER, payload, what)
    members = _count(event.data, event.kind, event.state, event.status, event.padding, event.part)
    part = event.part or event
    _check_rest(payload, members + _members(event.part), what)
    return _part(part, given, content_type)


def read_literal(text: Buffer) -> PayloadPart:
    """The part in `{"PayloadPart": {"Bytes": "<base64>", ...}}`. RemoteProtocolError for anything else."""
    what = "literal object"
    literal: _Literal = _decode(_LITERAL_DECODER, text, what)
    _check_rest(text, _count(literal.part) + _members(literal.part), what)
    if not literal.part:
        raise RemoteProtocolError("a literal object must have the member PayloadPart, an object")
    return _part(literal.part, {}, "")


def _decode(decoder: msgspec.json.Decoder[Any], text: Buffer, what: str) -> Any:  # what the decoder is for
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        rule = "; base64 has the standard alphabet, padding, and no white space" if "base64" in str(error) else ""
        raise RemoteProtocolError(f"{what}: {error}{rule}") from None
    except UnicodeDecodeError:
        raise RemoteProtocolError(f"{what} is not UTF-8") from None
    except RecursionError:
        raise RemoteProtocolError(f"{what} is nested deeper than {MAX_DEPTH} arrays and objects") from None
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"{what} is not JSON: {error}") from None


def _check_rest(text: Buffer, members: int, what: str) -> None:
    """Members that we do not know, which the typed decoder has skipped, must be good JSON too, and none may be there
    twice. A text with no more colons than members were found has neither; that of most clients is such a one."""
    if sum(1 for _ in islice(_COLON.finditer(text), members + 1)) == members:
        return
    try:
        strict_json.loads(text, depth=MAX_DEPTH, what=what, duplicates=False)
    except JSONError as error:
        raise RemoteProtocolError(error.message) from None


def _members(part: _Part | None) -> int:
    return _count(part.data, part.kind, part.state, part.status, part.padding) if part else 0


def _count(*members: object) -> int:
    return len(members) - members.count(None)


def _part(part: _Part, given: Mapping[str, object], content_type: str) -> PayloadPart:
    if part.data is None:
        raise RemoteProtocolError("PayloadPart must have Bytes, a base64 string")
    data_type, completion = read_flags(
        _merged("DataType", part.kind, given),
        _merged("CompletionState", part.state, given),
        _merged("CompletionStatus", part.status, given),
    )
    return PayloadPart(data=part.data, data_type=data_type, completion=completion, content_type=content_type)


def _merged(name: str, member: str | None, given: Mapping[str, object]) -> object:
    header = given.get(name)
    if member is None:
        return header
    if header is not None and header != member:
        raise RemoteProtocolError(f"{name} is {shown(header)} in the headers and {shown(member)} in the payload")
    return member


# ---- the literal form, the way in

# From where a value is looked through up to the next byte that needs a look: a bracket, or the quote of a string that
# is long, has an escape or is not all there yet.
_PLAIN = re.compile(rb'(?:[^"{}\[\]]++|"[^"\\]{0,200}+")*+')
_SPACE = re.compile(rb"[ \t\n\r]*+")


@final
class LiteralDecoder:
    """Reads the body of a request in the literal form: a run of `{"PayloadPart": {...}}` objects with white space
    between them or none, in pieces cut anywhere. Other members of either object are ignored, null is unset, a byte order
    mark before the first object is skipped. The input's end is the body's.

    Feed `receive_data`, pull `next_part` until NEED_DATA, feed again; END comes after `receive_eof`. RemoteProtocolError
    is final: bytes fed afterwards are dropped and every pull raises it again.

    `max_part` bounds the bytes of a part. Its object may have their base64 and 64 KiB more, and is refused above that
    before it is decoded; each byte is looked at once, in whatever pieces it comes.
    """

    __slots__ = (
        "_at",
        "_buffer",
        "_depth",
        "_eof",
        "_error",
        "_in_string",
        "_max_object",
        "_max_part",
        "_pos",
        "_started",
        "need",
    )

    form: Final = Form.LITERAL

    def __init__(self, max_part: int = MAX_PAYLOAD) -> None:
        self._max_part = max_part
        self._max_object = (max_part + 2) // 3 * 4 + HEADROOM
        self._buffer: bytes | bytearray = b""
        self._at = 0  # where the object begins that is under way
        self._pos = 0  # up to where it was looked through,
        self._depth = 0  # and what stands open there
        self._in_string = False
        self._started = self._eof = False
        self._error: RemoteProtocolError | None = None
        self.need = 0
        """While an object is under way, whose length nobody knows: the memory it takes if it grows to twice what has
        come of it, or to its bound. Reserve that much before the next `receive_data`. 0 while there is none."""

    @property
    def buffered(self) -> int:
        """Received bytes that the decoder still holds."""
        return len(self._buffer) - self._at

    def receive_data(self, data: Buffer) -> None:
        """Takes bytes; `data` may be reused once this returns. Never raises for what the bytes say."""
        if self._error is not None:
            return
        if not self.buffered:
            self._buffer, self._at, self._pos = bytes(data), 0, 0
            return
        if isinstance(self._buffer, bytes):
            self._buffer = bytearray(memoryview(self._buffer)[self._at :])
            self._at, self._pos = 0, self._pos - self._at
        self._buffer += data

    def receive_eof(self) -> None:
        """No more bytes will come. RemoteProtocolError if an object is known to be cut off; whole ones can still be
        pulled, then END, or the error if what follows them is none."""
        self._eof = True
        if self._depth and self._pos == len(self._buffer):
            raise self._fail(self._truncated())

    def next_part(self) -> PayloadPart | NeedData | AtEnd:
        """The next part; NEED_DATA; or END, again and again."""
        if self._error is not None:
            raise self._error
        try:
            return self._next()
        except RemoteProtocolError as error:
            raise self._fail(error) from None

    def _next(self) -> PayloadPart | NeedData | AtEnd:
        if not self._depth and not self._begin():
            return END if self._eof else Signal.NEED_DATA
        whole = self._find_end()
        size = (self._pos if whole else len(self._buffer)) - self._at
        if size > self._max_object:
            raise RemoteProtocolError(
                f"literal object of more than {self._max_object} bytes: a part has at most {self._max_part}, which are more "
                f"in base64, and its object {HEADROOM} beside them"
            )
        if not whole:
            if self._eof:
                raise self._truncated()
            self.need = min(2 * size, self._max_object)
            return Signal.NEED_DATA
        with memoryview(self._buffer) as view, view[self._at : self._pos] as text:
            part = read_literal(text)
        self._taken()
        if len(part.data) > self._max_part:
            raise RemoteProtocolError(f"PayloadPart with {len(part.data)} Bytes, the limit of a part is {self._max_part}")
        return part

    def _begin(self) -> bool:
        """Whether an object begins, after white space, which is forgotten."""
        if not self._started:
            start = bytes(self._buffer[:3])
            if start != _BOM and _BOM.startswith(start) and not self._eof:
                return False  # so far it is a mark, or nothing
            self._started = True
            self._at = 3 if start == _BOM else 0
        match = _SPACE.match(self._buffer, self._at)
        assert match is not None
        self._at = self._pos = match.end()
        if not self.buffered:
            self._taken()
            return False
        if self._buffer[self._at] != ord("{"):
            got = shown(bytes(self._buffer[self._at : self._at + 16]))
            raise RemoteProtocolError(f"a literal body is a run of JSON objects: '{{' must come next, got {got}")
        return True

    def _find_end(self) -> bool:
        """Looks through what was not looked through yet, up to the object's end. False if that has not come."""
        buffer, pos, depth, in_string = self._buffer, self._pos, self._depth, self._in_string
        end = len(buffer)
        while True:
            if in_string:
                pos, in_string = _leave_string(buffer, pos)
                if in_string:
                    break
            match = _PLAIN.match(buffer, pos)
            assert match is not None
            pos = match.end()
            if pos == end:
                break
            byte = buffer[pos]
            pos += 1
            if byte == ord('"'):
                in_string = True
            elif byte in b"{[":
                depth += 1
                if depth > MAX_DEPTH:
                    raise RemoteProtocolError(f"literal object is nested deeper than {MAX_DEPTH} arrays and objects")
            else:
                depth -= 1
                if not depth:
                    break
        self._pos, self._depth, self._in_string = pos, depth, in_string
        return not depth

    def _taken(self) -> None:
        """What is before `_pos` is done with."""
        if self._pos == len(self._buffer):
            self._buffer, self._pos = b"", 0
        elif isinstance(self._buffer, bytearray):
            del self._buffer[: self._pos]  # moves its start, and what is left only when that is less than half
            self._pos = 0
        self._at = self._pos
        self.need = 0

    def _fail(self, error: RemoteProtocolError) -> RemoteProtocolError:
        self._error = error
        self._buffer, self._at, self._pos, self._depth, self.need = b"", 0, 0, 0, 0
        return error

    def _truncated(self) -> RemoteProtocolError:
        return RemoteProtocolError(f"the body ends inside a literal object, after {self.buffered} bytes of it")


def _leave_string(buffer: bytes | bytearray, pos: int) -> tuple[int, bool]:
    """From inside a string: where it ends, and False; or from where to look on when more has come, and True."""
    quote = -1
    while True:
        if quote < pos and (quote := buffer.find(b'"', pos)) < 0:
            quote = len(buffer)
        escape = buffer.find(b"\\", pos, quote)
        if escape < 0:
            return (quote + 1, False) if quote < len(buffer) else (quote, True)
        pos = escape + 2
        if pos > len(buffer):
            return escape, True


# ---- both forms, the way out

_JSON_EVENT_BLOCK = encode_headers(
    {":message-type": "event", ":event-type": "PayloadPart", ":content-type": JSON_CONTENT_TYPE}
)


def encode_json_event(
    data: Buffer,
    data_type: DataType | None = None,
    completion: Completion | None = Completion.COMPLETE,
    padding: str = "",
) -> list[Buffer]:
    """A PayloadPart as an event with a JSON payload, as the buffers to write, for an answer or, in an envelope or bare,
    a request. A member that is None is left out; `padding` is the member P. LocalProtocolError if the payload is larger
    than 16 MiB, which is the case from 12 MiB of data on, less the names."""
    return encode_block(_JSON_EVENT_BLOCK, b"".join(_members_of(data, data_type, completion, padding)))


def encode_literal_part(
    data: Buffer,
    data_type: DataType | None = None,
    completion: Completion | None = Completion.COMPLETE,
    padding: str = "",
) -> list[Buffer]:
    """A PayloadPart as a literal object on a line of its own, as the buffers to write. A member that is None is left
    out; `padding` is the member P. LocalProtocolError for more than 16 MiB of data."""
    size = memoryview(data).nbytes
    if size > MAX_PAYLOAD:
        raise LocalProtocolError(f"a literal PayloadPart has at most {MAX_PAYLOAD} bytes, not {size}")
    buffers: list[Buffer] = [b'{"PayloadPart":', *_members_of(data, data_type, completion, padding), b"}\n"]
    return [b"".join(buffers)] if size < LARGE else buffers


def encode_literal_model_stream_error(message: str, code: str = "") -> list[Buffer]:
    """The last line of an answer, for what the model did; as `encode_model_stream_error`."""
    return [b'{"ModelStreamError":', failure_body(message, code), b"}\n"]


def encode_literal_internal_stream_failure(message: str) -> list[Buffer]:
    """The last line of an answer, for what the platform did; as `encode_internal_stream_failure`."""
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
