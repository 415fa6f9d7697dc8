"""The receiving side of an HTTP/1.1 connection: makes requests or answers from bytes, and decides which side is next.

`next_event` has one quick way. If a request repeats the head of the one before, and is whole and alone in the input, it
comes together with its body. That saves 1.1 us of 2.7 us for each request of a client that repeats itself, and two events
for its driver.
"""

from __future__ import annotations

import contextlib
import enum

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import (
    NEED_DATA,
    PAUSED,
    Buffer,
    ConnectionEnd,
    Data,
    End,
    Event,
    Head,
    Request,
    Response,
    Signal,
)
from protocols.http1.body import LARGE, Chunks, Input
from protocols.http1.head import RequestHead, read_request, read_response
from protocols.http1.limits import HTTP1Limits
from protocols.http1.output import Output, bytes_view
from protocols.roles import Role

# A client often sends the same head again and again. Up to this size the last one is kept, and not parsed twice.
_REMEMBERED = 1024
_SKIPPED = 64  # pieces of a chunked body that nobody wants: some 0.1 ms
_CONNECTION_END = ConnectionEnd()


class Reading(enum.Enum):
    """The meaning of the next received byte."""

    HEAD = enum.auto()
    LENGTH = enum.auto()
    CHUNKED = enum.auto()
    UNTIL_EOF = enum.auto()
    END = enum.auto()  # no byte is left: End must be given out
    DONE = enum.auto()  # the peer's message is given out; the next one may not be read yet
    SWITCHED = enum.auto()  # the byte belongs to another protocol
    OVER = enum.auto()  # the connection is not read any more


class Writing(enum.Enum):
    """The message part that may be sent next."""

    WAITING = enum.auto()  # a server without a request
    HEAD = enum.auto()
    LENGTH = enum.auto()
    CHUNKED = enum.auto()
    UNTIL_CLOSE = enum.auto()
    DONE = enum.auto()


# Used for each event: the lookup of an enum member is slow, in Python 3.11 as slow as a call.
READ_HEAD, READ_DONE = Reading.HEAD, Reading.DONE
_READ_LENGTH, _READ_END, _READ_OVER = Reading.LENGTH, Reading.END, Reading.OVER
WRITE_WAITING, WRITE_HEAD = Writing.WAITING, Writing.HEAD
_WRITE_DONE = Writing.DONE


class MessageReader(Output):
    """The input of a connection and the state of both directions: a complete message in one direction changes what may come,
    or be sent, in the other."""

    __slots__ = (
        "_chunks", "_client", "_continue_due", "_earlier", "_eof", "_error", "_head_request", "_http10", "_known", "_landed",
        "_limits", "_reading", "_rest", "_retired", "_scheme", "_te_trailers", "_told", "_upgrade", "_usual", "_whole",
        "_writing", "input", "landing", "must_close", "unconsumed",
    )  # fmt: skip

    def __init__(self, role: Role, limits: HTTP1Limits, scheme: bytes) -> None:
        super().__init__()
        self._client = role is Role.CLIENT
        self._limits = limits
        self._scheme = scheme
        self._error: RemoteProtocolError | None = None
        self._retired = False
        self.must_close = False
        """True if the connection carries no message after the current one: one side said close, the peer speaks HTTP/1.0
        without keep-alive, or a body ends with the connection, was not read to its end, or broke the protocol."""

        self.input = Input()
        """Input that is not parsed yet: a driver may ask how much."""
        self._eof = False
        self._reading = Reading.DONE if self._client else Reading.HEAD
        self._known: tuple[bytes, RequestHead] | None = None  # the head of the last request
        # the last request's head, its size with the body, and its Head, if the next request may come whole
        self._whole: tuple[bytes, int, Head] | None = None
        self._rest = 0  # bytes of the declared length that are not given out
        self._chunks: Chunks | None = None
        self.landing: memoryview | None = None
        """The buffer that the body is received into; `get_buffer` gives a part of it."""
        self._landed = self._told = 0  # bytes in it, and how many of them were given out
        self.unconsumed = 0
        """Body bytes given out and not credited yet, of all streams."""
        self._earlier: dict[int, int] = {}  # the uncredited bytes of streams before the current one

        # the current request, as far as its answer depends on it
        self._head_request = False
        self._http10 = False
        self._continue_due = False
        self._upgrade = b""
        self._te_trailers = False
        self._usual = False  # HTTP/1.1 that stays open, and whose answer has a body

        self._writing = Writing.HEAD if self._client else Writing.WAITING

    # -- receiving -------------------------------------------------------------------------------------------------

    @property
    def unread(self) -> int:
        """Bytes received and not given out as events, landed ones included."""
        return self.input.unread + self._landed - self._told

    def receive_data(self, data: Buffer) -> None:
        """Stores a copy of the input; the caller may reuse its memory at once. After an error, or if the connection carries
        no further message, nothing is stored."""
        if self._retired or self._eof:
            raise LocalProtocolError("data after the end of the connection" if self._eof else "data for a retired machine")
        if self.landing is not None:
            data = self._land(self.landing, bytes_view(memoryview(data)))
        if self._reading is not _READ_OVER:
            source = self.input
            if source.data:
                source.feed(data)
            else:  # `feed`, without the call: mostly a whole request comes, and nothing is left of the last one
                source.data = chunk = data.tobytes() if type(data) is memoryview else bytes(data)
                source.unread += len(chunk)

    def receive_eof(self) -> None:
        """Tells that the peer closed its side. `next_event` first returns the events of what came before."""
        self._eof = True

    def close(self) -> None:
        """Releases all that is held, in both directions and including the memory of a landing body, because the transport is
        gone. Nothing more may be received or sent."""
        self._eof = True
        self._close_reading()
        self._clear_output()

    def next_event(self) -> Event | Signal:
        """One event, NEED_DATA, or PAUSED if a pipelined request is here that may not be read yet. After the peer's end it
        is ConnectionEnd, at each call. RemoteProtocolError, and an equal one at each later call.

        A Request brings its body if it is whole and alone in one buffer, its head equals that of the request before byte for
        byte, and that head declares a body below 16 KiB or none, and neither expects nor upgrades. It stands for a Request,
        a Data unless the body is empty, and an End, with the Data already credited."""
        reading, whole = self._reading, self._whole
        if whole is not None and reading is READ_HEAD:
            text, size, head = whole
            source = self.input
            data = source.data
            if source.unread == size and len(data) == size and not (source.pos or self._eof) and data.startswith(text):
                source.data, source.unread, source.blank_line = b"", 0, False
                # the fields that depend on the head keep their values: the request before had the same head
                if self.unconsumed:
                    self._next_stream()
                else:
                    self.stream += 1
                self._reading, self._writing = READ_DONE, WRITE_HEAD
                return Request(stream=self.stream, head=head, body=data[len(text) :])
        event: Event | Signal | None = None
        try:
            if reading is _READ_LENGTH:
                event = self._read_length() if self.landing is None else self._read_landed(self.landing)
            elif reading is _READ_END:
                event = End(stream=self.stream)
                self._end_reading()
            elif reading is READ_HEAD:
                event = self._read_response() if self._client else self._read_request()
            elif reading is not READ_DONE:
                event = self._read_other(reading)
            if event is not None:
                return event
            return self._starved() if self._eof or self.input.data else NEED_DATA
        except RemoteProtocolError as error:
            if self._error is None:
                self._fail(error)
            raise

    def _read_other(self, reading: Reading) -> Event | None:
        if self._error is not None:
            raise self._error.again()
        if self._retired:
            raise LocalProtocolError("events from a retired machine")
        if reading is Reading.CHUNKED:
            return self._read_chunked()
        return self._read_until_eof() if reading is Reading.UNTIL_EOF else None

    def _starved(self) -> Event | Signal:
        """The answer if the bytes at hand make no event."""
        reading = self._reading
        between = reading in (Reading.DONE, Reading.SWITCHED, Reading.OVER)
        if between and self.input.data:
            if self._client and reading is Reading.DONE:
                raise RemoteProtocolError("bytes that no request asked for")  # RFC 9112 section 9.2
            return PAUSED
        if not self._eof:
            return NEED_DATA
        if between or (reading is Reading.HEAD and not self._client and not self.input.unread):
            return _CONNECTION_END
        if reading is Reading.UNTIL_EOF:  # RFC 9112 section 6.3, rule 8
            self._end_reading()
            return End(stream=self.stream)
        raise RemoteProtocolError("the connection ended in the middle of a message")  # RFC 9112 section 8

    def _fail(self, error: RemoteProtocolError) -> None:
        if self._client:
            error.status = 502
        if self._writing is Writing.WAITING:  # a malformed head is answered too
            self._next_stream()
            self._writing = Writing.HEAD
            self._head_request = False
            self._http10 = True  # the version is unknown: assume the older one
            self._upgrade = b""
        self._error = error.again()
        self._close_reading()

    def _close_reading(self) -> None:
        self.must_close = True
        self._reading = Reading.OVER
        self.input.clear()
        self._end_landing()

    # -- heads -----------------------------------------------------------------------------------------------------

    def _next_stream(self) -> None:
        if self.unconsumed:
            given = self._outstanding(self.stream)
            if given:
                self._earlier[self.stream] = given
        self.stream += 1

    def _read_request(self) -> Request | None:
        source, known = self.input, self._known
        if not source.data:
            return None
        if known is not None and source.accept(known[0]):
            found = known[1]
        else:
            limits, text = self._limits, None
            try:
                text = source.head(limits.head, limits.request_line, blank_line=True)
                if text is None:
                    return None
                found = read_request(text, max_fields=limits.fields, scheme=self._scheme)
            except RemoteProtocolError as error:
                error.head = text or source.clear()
                raise
            self._remember(text, found)
        head, length, chunked, keep_alive, http10, is_head, self._te_trailers = found
        self._next_stream()
        self._writing = WRITE_HEAD
        self._head_request, self._http10, self.must_close = is_head, http10, not keep_alive
        self._usual = keep_alive and not is_head and not http10
        self._continue_due = head.expects_continue
        self._upgrade = head.upgrade
        self._start_body(length, chunked)
        return Request(stream=self.stream, head=head)

    def _remember(self, text: bytes, found: RequestHead) -> None:
        known, head = len(text) <= _REMEMBERED, found.head
        whole = known and found.length < LARGE and not (found.chunked or head.expects_continue or head.upgrade)
        self._known = (text, found) if known else None
        self._whole = (text, len(text) + found.length, head) if whole else None

    def _read_response(self) -> Response | None:
        limits = self._limits
        head = self.input.head(limits.head, limits.head, blank_line=False)
        if head is None:
            return None
        parsed = read_response(head, max_fields=limits.fields)
        status = parsed.status
        if status == 101:
            if not self._upgrade or parsed.upgrade != self._upgrade:
                raise RemoteProtocolError(f"status 101: expected a switch to {self._upgrade!r}, got {parsed.upgrade[:40]!r}")
            self._reading = Reading.SWITCHED
            self._writing = Writing.DONE
        elif status >= 200:
            self.must_close |= not parsed.keep_alive
            # RFC 9112 section 6.3, rules 1 and 8
            if self._head_request or status in (204, 304):
                self._reading = Reading.END
            elif parsed.chunked or parsed.length is not None:
                self._start_body(parsed.length or 0, parsed.chunked)
            else:
                self._reading = Reading.UNTIL_EOF
                self.must_close = True
        return Response(stream=self.stream, status=status, headers=parsed.headers)

    # -- bodies ----------------------------------------------------------------------------------------------------

    def _start_body(self, length: int, chunked: bool) -> None:
        self._rest = length
        if chunked:
            self._chunks = Chunks(self.input, self._limits)
            self._reading = Reading.CHUNKED
        else:
            self._reading = _READ_LENGTH if length else _READ_END

    def _read_until_eof(self) -> Data | None:
        return self._give(self.input.take(self.input.unread))

    def _read_length(self) -> Data | None:
        piece = self.input.take(self._rest)
        if piece is None:
            return None
        size = len(piece)
        self.unconsumed += size
        self._rest -= size
        if not self._rest:
            self._reading = _READ_END
        return Data(stream=self.stream, buffers=(piece,))

    def _read_chunked(self) -> Data | End | None:
        assert self._chunks is not None
        piece = self._chunks.read()
        if not isinstance(piece, tuple):
            return self._give(piece)
        self._end_reading()
        return End(stream=self.stream, trailers=piece)

    def _read_landed(self, landing: memoryview) -> Data | None:
        if self._told == self._landed:
            return None
        piece = landing[self._told : self._landed]
        self._rest -= len(piece)
        self._told = self._landed
        if not self._rest:
            self._reading = _READ_END
            self._end_landing()
        return self._give(piece)

    def _give(self, piece: Buffer | None) -> Data | None:
        if piece is None:
            return None
        self.unconsumed += len(piece)
        return Data(stream=self.stream, buffers=(piece,))

    def _end_reading(self) -> None:
        """Marks the peer's message as given out, or about to be with this event."""
        self._reading, self._chunks = READ_DONE, None
        if self._writing is _WRITE_DONE:
            self._turn()

    def _skip_body(self) -> None:
        """Drops the input of a request whose answer is complete and whose body is not. A body in many small chunks is not
        read to its end: the connection then goes no further, as if the end had not come."""
        self._rest -= self._landed - self._told
        self._end_landing()
        if self._chunks is not None:
            with contextlib.suppress(RemoteProtocolError):  # then its end cannot be found
                for _ in range(_SKIPPED):
                    piece = self._chunks.read()
                    if piece is None:
                        break
                    if isinstance(piece, tuple):
                        self._reading, self._chunks = READ_DONE, None
                        break
            return
        while self._rest and (piece := self.input.take(self._rest)) is not None:
            self._rest -= len(piece)
        if not self._rest:
            self._reading = READ_DONE

    # -- landing ---------------------------------------------------------------------------------------------------

    def land(self, stream: int, buffer: memoryview) -> int:
        """Receives the rest of this stream's body, which has a declared length, into `buffer`: writable, contiguous, and at
        least as large as that rest. Input that is already here is copied to its start; returns the number of those bytes.
        They, and those of `buffer_updated`, come out of `next_event` as Data that views this memory.
        """
        if stream != self.stream or self.landing is not None or self._reading not in (Reading.LENGTH, Reading.END):
            raise LocalProtocolError(
                f"land: stream {stream} has no body of known length under way, or one that lands already"
            )
        if self._reading is Reading.END:
            return 0
        view = bytes_view(buffer)
        if view.readonly or len(view) < self._rest:
            raise LocalProtocolError(
                f"land: expected {self._rest} writable bytes, got {len(view)}{' read-only' * view.readonly}"
            )
        view = view[: self._rest]
        n = 0
        while n < self._rest and (piece := self.input.take(self._rest - n)) is not None:
            view[n : n + len(piece)] = piece
            n += len(piece)
        self.landing, self._landed, self._told = view, n, 0
        return n

    def get_buffer(self) -> memoryview | None:
        """The memory to receive into: the part of a landing body that is not here yet. None if no body lands."""
        landing = self.landing
        return None if landing is None or self._landed == len(landing) else landing[self._landed :]

    def buffer_updated(self, n: int) -> None:
        """Tells that n bytes were received into the memory of `get_buffer`."""
        if self.landing is None or not 0 < n <= len(self.landing) - self._landed:
            raise LocalProtocolError(f"buffer_updated: {n} bytes do not fit what get_buffer gave")
        self._landed += n

    def _land(self, landing: memoryview, data: memoryview) -> memoryview:
        n = min(len(landing) - self._landed, len(data))
        landing[self._landed : self._landed + n] = data[:n]
        self._landed += n
        return data[n:]

    def _end_landing(self) -> None:
        self.landing = None
        self._landed = self._told = 0

    # -- the ledger of what was given out --------------------------------------------------------------------------

    def credit(self, stream: int, n: int) -> None:
        """Tells that the consumer took n bytes of this stream's body. HTTP/1.1 has no window to open; drivers use the count
        to decide whether to read on. LocalProtocolError if more is credited than was given out."""
        if stream == self.stream and 0 <= n <= self.unconsumed and not self._earlier:
            self.unconsumed -= n
            return
        given = self._outstanding(stream)
        if not 0 <= n <= given:
            raise LocalProtocolError(f"credit: {n} bytes for stream {stream}, which has {given} outstanding")
        self.unconsumed -= n
        if stream in self._earlier:
            self._earlier[stream] = given - n
            if n == given:
                del self._earlier[stream]

    def _outstanding(self, stream: int) -> int:
        """The unconsumed bytes of this stream."""
        return self.unconsumed - sum(self._earlier.values()) if stream == self.stream else self._earlier.get(stream, 0)

    # -- turns ---------------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Called when one of the two messages is complete. If both are, the connection goes on to the next request or is
        over."""
        if self._writing is not Writing.DONE or self._reading is Reading.OVER:
            return
        if self._reading is not Reading.DONE:
            if self._client:
                return
            self._skip_body()
        if self.must_close or self._reading is not Reading.DONE:
            self._close_reading()
        elif self._client:
            self._writing = Writing.HEAD
        else:
            self._reading, self._writing = Reading.HEAD, Writing.WAITING
