"""The HTTP/1.1 transport machine, either role: framing, order and reuse of one connection (RFC 9112)."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Sequence
from typing import final

from msgspec.structs import replace

from protocols.date_field import DateField
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import (
    NEED_DATA,
    PAUSED,
    Buffer,
    ConnectionEnd,
    Data,
    End,
    Event,
    Headers,
    Request,
    Response,
    Signal,
)
from protocols.http1.body import LARGE, Chunks, Input
from protocols.http1.head import (
    Outgoing,
    RequestHead,
    is_authority,
    is_protocol,
    plain_head,
    read_request,
    read_response,
    request_line,
    status_line,
    write_fields,
    write_trailers,
)
from protocols.http1.limits import HTTP1Limits
from protocols.http1.output import PIECE_SIZES, Output, bytes_view
from protocols.roles import Role

__all__ = ["HTTP1Connection", "HTTP1Limits"]

# A client that repeats itself sends the same head again and again; up to this size the last one is not read twice.
_REMEMBERED = 1024
_BODY_METHODS = (b"POST", b"PUT", b"PATCH")
_DEFAULT_LIMITS = HTTP1Limits()
_CONNECTION_END = ConnectionEnd()
_NO_DATE = DateField()


class _Reading(enum.Enum):
    """What the next received byte is."""

    HEAD = enum.auto()
    LENGTH = enum.auto()
    CHUNKED = enum.auto()
    UNTIL_EOF = enum.auto()
    END = enum.auto()  # no byte any more: End is due
    DONE = enum.auto()  # the peer's message is given out; nothing of the next may be read yet
    SWITCHED = enum.auto()  # another protocol's
    OVER = enum.auto()  # nobody's: the connection is not read any more


class _Writing(enum.Enum):
    """What may be sent next."""

    WAITING = enum.auto()  # a server without a request
    HEAD = enum.auto()
    LENGTH = enum.auto()
    CHUNKED = enum.auto()
    UNTIL_CLOSE = enum.auto()
    DONE = enum.auto()


# What is asked for with each event: a member of an enum is slow to look up, in Python 3.11 as slow as a call.
_READ_HEAD, _READ_LENGTH, _READ_END, _READ_DONE = _Reading.HEAD, _Reading.LENGTH, _Reading.END, _Reading.DONE
_READ_OVER = _Reading.OVER
_WRITE_WAITING, _WRITE_HEAD, _WRITE_DONE = _Writing.WAITING, _Writing.HEAD, _Writing.DONE
_WRITE_LENGTH, _WRITE_CHUNKED, _WRITE_UNTIL_CLOSE = _Writing.LENGTH, _Writing.CHUNKED, _Writing.UNTIL_CLOSE


@final
class HTTP1Connection(Output):
    """One HTTP/1.1 connection as seen by a server or a client, without any input or output of its own.

    Feed what was received, pull events until NEED_DATA or PAUSED, send events, and write what `data_to_send` gives.
    Streams are numbered from 1, one for each request; one is under way at a time. A server reads the next request
    when its answer to this one and this one's body are complete; a client may send the next one then.

    `next_event` raises RemoteProtocolError for whatever breaks RFC 9112 or a limit, with the status to answer with
    (502 in the client's role, where there is nobody to answer), and raises the same error ever after. A server may
    still answer: `stream` says which stream such an answer belongs to, also where no Request was given out for it.
    """

    __slots__ = (
        "_chunks", "_client", "_closing", "_continue_due", "_date", "_earlier", "_eof", "_error", "_head_request", "_http10",
        "_known", "_landed", "_limits", "_reading", "_rest", "_retired", "_scheme",
        "_to_send", "_told", "_upgrade", "_usual", "_whole", "_writing", "input", "landing", "must_close", "unconsumed",
    )  # fmt: skip

    def __init__(
        self,
        role: Role,
        limits: HTTP1Limits = _DEFAULT_LIMITS,
        *,
        scheme: bytes = b"http",
        date: DateField = _NO_DATE,
    ) -> None:
        """`scheme` is what the transport is, and what the requests received then say. `date` is what a server's final
        heads say."""
        super().__init__()
        self._client = role is Role.CLIENT
        self._limits = limits
        self._scheme = scheme
        self._date = date
        self._error: RemoteProtocolError | None = None
        self._retired = False
        self.must_close = False
        """The connection carries no message after the one under way: one side said close, the peer speaks HTTP/1.0
        without keep-alive, a body ends with the connection, was not read to its end, or broke the protocol."""
        self._closing = False  # the next head we write says close

        self.input = Input()
        """What was received and not looked at: a driver may ask how much."""
        self._eof = False
        self._reading = _Reading.DONE if self._client else _Reading.HEAD
        self._known: tuple[bytes, RequestHead] | None = None  # the head of the last request
        self._whole: tuple[bytes, int, Request] | None = None  # the same, with the bytes of all of it, for `receive_whole`
        self._rest = 0  # what is left of the declared length, not given out
        self._chunks: Chunks | None = None
        self.landing: memoryview | None = None
        """Where a body lands: what `get_buffer` gives a part of."""
        self._landed = self._told = 0  # bytes in it, and how many of them were given out
        self.unconsumed = 0
        """Body bytes given out and not credited yet, of all streams."""
        self._earlier: dict[int, int] = {}  # those of the streams before the one under way

        # the request under way, as far as its answer depends on it
        self._head_request = False
        self._http10 = False
        self._continue_due = False
        self._upgrade = b""
        self._usual = False  # HTTP/1.1 that stays open, to be answered with a body

        self._writing = _Writing.HEAD if self._client else _Writing.WAITING
        self._to_send = 0  # what is left of the declared length, not sent

    # -- receiving -------------------------------------------------------------------------------------------------

    @property
    def unread(self) -> int:
        """Bytes received and not given out as events yet, landed ones included."""
        return self.input.unread + self._landed - self._told

    def receive_data(self, data: Buffer) -> None:
        """Stores a copy of what is worth keeping; the memory may be reused at once. After an error, or when the
        connection cannot carry another message, nothing is."""
        if self._retired or self._eof:
            raise LocalProtocolError("data after the end of the connection" if self._eof else "data for a retired machine")
        if self.landing is not None:
            data = self._land(self.landing, bytes_view(memoryview(data)))
        if self._reading is not _READ_OVER:
            self.input.feed(data)

    def receive_eof(self) -> None:
        """The peer closed its side. `next_event` first gives out what came before."""
        self._eof = True

    def close(self) -> None:
        """The transport is gone: gives up what is held for it, in both directions, the memory of a landing body
        included. Nothing more may be received or sent."""
        self._eof = True
        self._close_reading()
        self._clear_output()

    def next_event(self) -> Event | Signal:
        """One event, NEED_DATA, or PAUSED: a pipelined request is here whose turn has not come. After the peer's end
        it is ConnectionEnd, again and again. Raises RemoteProtocolError, then always one that says the same."""
        reading = self._reading
        event: Event | Signal | None = None
        try:
            if reading is _READ_LENGTH:
                event = self._read_length() if self.landing is None else self._read_landed(self.landing)
            elif reading is _READ_END:
                event = End(stream=self.stream)
                self._end_reading()
            elif reading is _READ_HEAD:
                event = self._read_response() if self._client else self._read_request()
            elif reading is not _READ_DONE:
                event = self._read_other(reading)
            if event is not None:
                return event
            return self._starved() if self._eof or self.input.data else NEED_DATA
        except RemoteProtocolError as error:
            if self._error is None:
                self._fail(error)
            raise

    def receive_whole(self, data: memoryview) -> tuple[Request, bytes] | None:
        """Exactly as `receive_data`; and it returns the request and its whole body where these bytes are just that, the turn
        is theirs, and the connection repeats itself: the head is, byte for byte, that of the request before, declares a body
        below 16 KiB or none, and expects and upgrades nothing. It is then as if `next_event` had given the Request, a Data
        unless the body is empty, and the End, and the Data had been credited; but the Request is the very object that came
        first, and `stream` says which this one is. None where anything is otherwise: then `next_event` goes on."""
        whole = self._whole
        # a head that is due, where nothing is unread, begins with these bytes; and a machine that reads heads is in use
        if whole is not None and self._reading is _READ_HEAD and not self.input.unread and not self._eof:
            head, size, request = whole
            if len(data) == size and (text := data.tobytes()).startswith(head):
                self.input.blank_line = False
                # what else depends on the head is as the request before has left it, for it had the same
                if self.unconsumed:
                    self._next_stream()
                else:
                    self.stream += 1
                self._reading, self._writing = _READ_DONE, _WRITE_HEAD
                return request, text[len(head) :]
        self.receive_data(data)
        return None

    def _read_other(self, reading: _Reading) -> Event | None:
        if self._error is not None:
            raise self._error.again()
        if self._retired:
            raise LocalProtocolError("events from a retired machine")
        if reading is _Reading.CHUNKED:
            return self._read_chunked()
        return self._read_until_eof() if reading is _Reading.UNTIL_EOF else None

    def _starved(self) -> Event | Signal:
        """What to say when the bytes at hand make no event."""
        reading = self._reading
        between = reading in (_Reading.DONE, _Reading.SWITCHED, _Reading.OVER)
        if between and self.input.data:
            if self._client and reading is _Reading.DONE:
                raise RemoteProtocolError("bytes that no request asked for")  # RFC 9112 section 9.2
            return PAUSED
        if not self._eof:
            return NEED_DATA
        if between or (reading is _Reading.HEAD and not self._client and not self.input.unread):
            return _CONNECTION_END
        if reading is _Reading.UNTIL_EOF:  # RFC 9112 section 6.3, rule 8
            self._end_reading()
            return End(stream=self.stream)
        raise RemoteProtocolError("the connection ended in the middle of a message")  # RFC 9112 section 8

    def _fail(self, error: RemoteProtocolError) -> None:
        if self._client:
            error.status = 502
        if self._writing is _Writing.WAITING:  # a head that was none is answered all the same
            self._next_stream()
            self._writing = _Writing.HEAD
            self._head_request = False
            self._http10 = True  # for all we know
            self._upgrade = b""
        self._error = error.again()
        self._close_reading()

    def _close_reading(self) -> None:
        self.must_close = True
        self._reading = _Reading.OVER
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
            head = known[1]
        else:
            limits = self._limits
            text = source.head(limits.head, limits.request_line, blank_line=True)
            if text is None:
                return None
            head = read_request(text, max_fields=limits.fields, scheme=self._scheme)
            self._remember(text, head)
        request, length, chunked, keep_alive, http10, is_head = head
        self._next_stream()
        self._writing = _WRITE_HEAD
        self._head_request, self._http10, self.must_close = is_head, http10, not keep_alive
        self._usual = keep_alive and not is_head and not http10
        self._continue_due = request.expects_continue
        self._upgrade = request.upgrade
        self._start_body(length, chunked)
        return replace(request, stream=self.stream)

    def _remember(self, text: bytes, head: RequestHead) -> None:
        known = len(text) <= _REMEMBERED
        request = head.event
        whole = known and head.length < LARGE and not (head.chunked or request.expects_continue or request.upgrade)
        self._known = (text, head) if known else None
        self._whole = (text, len(text) + head.length, request) if whole else None

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
            self._reading = _Reading.SWITCHED
            self._writing = _Writing.DONE
        elif status >= 200:
            self.must_close |= not parsed.keep_alive
            # RFC 9112 section 6.3, rules 1 and 8
            if self._head_request or status in (204, 304):
                self._reading = _Reading.END
            elif parsed.chunked or parsed.length is not None:
                self._start_body(parsed.length or 0, parsed.chunked)
            else:
                self._reading = _Reading.UNTIL_EOF
                self.must_close = True
        return Response(stream=self.stream, status=status, headers=parsed.headers)

    # -- bodies ----------------------------------------------------------------------------------------------------

    def _start_body(self, length: int, chunked: bool) -> None:
        self._rest = length
        if chunked:
            self._chunks = Chunks(self.input, self._limits)
            self._reading = _Reading.CHUNKED
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
        """The peer's message is given out, or is with the event that is about to be."""
        self._reading, self._chunks = _READ_DONE, None
        if self._writing is _WRITE_DONE:
            self._turn()

    def _skip_body(self) -> None:
        """Our answer is complete and its request is not given out to its end: what is here of it is dropped."""
        self._rest -= self._landed - self._told
        self._end_landing()
        if self._chunks is not None:
            with contextlib.suppress(RemoteProtocolError):  # then it has no end that can be found
                while (piece := self._chunks.read()) is not None:
                    if isinstance(piece, tuple):
                        self._reading, self._chunks = _READ_DONE, None
                        break
            return
        while self._rest and (piece := self.input.take(self._rest)) is not None:
            self._rest -= len(piece)
        if not self._rest:
            self._reading = _READ_DONE

    # -- landing ---------------------------------------------------------------------------------------------------

    def land(self, stream: int, buffer: memoryview) -> int:
        """Lets the rest of this stream's body, which has a declared length, be received into `buffer`: writable,
        contiguous, and no smaller than that rest. What is already here is copied to its start; returns how many bytes
        that were. They, and what `buffer_updated` adds, come out of `next_event` as Data that views this memory.
        """
        if stream != self.stream or self.landing is not None or self._reading not in (_Reading.LENGTH, _Reading.END):
            raise LocalProtocolError(
                f"land: stream {stream} has no body of known length under way, or one that lands already"
            )
        if self._reading is _Reading.END:
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
        """Where to receive into: the part of a landing body that is not here yet. None when nothing lands."""
        landing = self.landing
        return None if landing is None or self._landed == len(landing) else landing[self._landed :]

    def buffer_updated(self, n: int) -> None:
        """n bytes were received into what `get_buffer` gave."""
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
        """The consumer took n bytes of this stream's body. HTTP/1.1 has no window to give back; the count is what a
        driver decides by whether to read on. Raises LocalProtocolError beyond what was given out."""
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
        """Of the unconsumed bytes those of this stream."""
        return self.unconsumed - sum(self._earlier.values()) if stream == self.stream else self._earlier.get(stream, 0)

    # -- sending ---------------------------------------------------------------------------------------------------

    def send(self, event: Request | Response | Data | End) -> None:
        """Queues an event. Raises LocalProtocolError, and queues nothing, for one that is out of order, breaks its own
        declared length, or holds fields that cannot be written.

        A Data is written by reference where it is large: its memory must stay as it is until it is sent. A Response
        that is complete before its request is ends the reuse of the connection, unless the rest of the request is here.
        """
        if self._retired:
            raise LocalProtocolError("send: this machine is retired")
        if type(event) is Data:
            self.send_data(event.stream, event.buffers)
        elif type(event) is Request:
            self._send_request(event)
        elif event.stream != self.stream:
            raise self._other_stream(event.stream)
        elif type(event) is Response:
            self._send_response(event.status, event.headers)
        else:
            self._send_end(event.trailers)

    def send_piece(self, stream: int, piece: bytes) -> None:
        """Exactly as a Data sent with this buffer alone; where it begins `pieces`, the next ones may be put in there."""
        if len(piece) in PIECE_SIZES and self._writing is _WRITE_CHUNKED and stream == self.stream:
            self.pieces.append(piece)
        else:
            self.send_data(stream, (piece,))

    def send_data(self, stream: int, buffers: Sequence[Buffer]) -> None:
        """Exactly as a Data sent, which it spares the caller to make."""
        if stream != self.stream:
            raise self._other_stream(stream)
        size = 0
        for buffer in buffers:
            if type(buffer) is memoryview and bytes_view(buffer) is not buffer:
                self.send_data(stream, [bytes_view(b) if type(b) is memoryview else b for b in buffers])
                return
            size += len(buffer)
        writing = self._writing
        if writing is _WRITE_CHUNKED:
            if self.pieces:
                self._frame_pieces()
            if size >= LARGE:
                self._put_all((b"%x\r\n" % size, *buffers, b"\r\n"))
            elif size:  # RFC 9112 section 7.1: an empty chunk would be the last
                self._put(b"".join((b"%x\r\n" % size, *buffers, b"\r\n")))
            return
        if writing is _WRITE_LENGTH:
            if size > self._to_send:
                raise LocalProtocolError(f"send: {size} bytes of body, the head leaves {self._to_send}")
            self._to_send -= size
        elif writing is not _WRITE_UNTIL_CLOSE:
            raise LocalProtocolError("send: a body needs a head first, and has one end")
        self._put_all(buffers)

    def respond(
        self,
        stream: int,
        status: int,
        headers: Headers,
        buffers: Sequence[Buffer] = (),
        fresh: Headers = (),
        length: int | None = None,
    ) -> bytes | None:
        """A whole answer: exactly as a Response with `headers`, a content-length of `length` bytes and then `fresh`, a Data
        with `buffers` where there are any, and an End, sent one after the other. Where there is no `length`, one of the
        fields says it. Raises LocalProtocolError as they do; what went before the one that is refused is queued then.

        Returns the bytes of a small one where they are all there is to send. Who sends them to the end, and not what
        `data_to_send` gives, confirms them with `answer_sent`; who does not need not care.

        It costs least where `headers` is a tuple that is given again and again, and `fresh` has what differs each time:
        such a tuple is checked and written once, and kept, so it should say nothing private."""
        if stream != self.stream:
            raise self._other_stream(stream)
        # the request is given out whole, and neither it nor we have anything to say about the connection
        if self._usual and self._reading is _READ_DONE and self._writing is _WRITE_HEAD and not self._closing:
            alone = buffers[0] if len(buffers) == 1 and type(buffers[0]) is bytes else None
            if alone is not None:
                size = len(alone)
            else:
                size = 0
                for buffer in buffers:
                    if type(buffer) is memoryview:
                        size += buffer.nbytes if buffer.c_contiguous else LARGE  # which is not for here
                    else:
                        size += len(buffer)
            head = plain_head(status, headers, fresh, length, size, self._date.end) if size < LARGE else None
            if head is not None:
                self._reading, self._writing = _READ_HEAD, _WRITE_WAITING
                answer = b"".join((head, *buffers)) if alone is None else head + alone
                if self.queued or self.pieces or self._ends:
                    self._put_behind(answer)
                    return None
                self._buffers.append(answer)
                self.queued = self._answer = len(answer)
                self._answer_stream = stream
                return answer
        if self._retired:
            raise LocalProtocolError("send: this machine is retired")
        declared = () if length is None else ((b"content-length", b"%d" % length),)
        self._send_response(status, [*headers, *declared, *fresh])
        if buffers:
            self.send_data(stream, buffers)
        self._send_end()
        return None

    def _other_stream(self, stream: int) -> LocalProtocolError:
        return LocalProtocolError(f"send: stream {stream} is not under way, {self.stream} is")

    def close_after_response(self) -> None:
        """The next head sent, that of the answer under way if it is not out yet, says `connection: close`."""
        self._closing = True

    def room(self, stream: int) -> int:
        """`send_buffer` less the bytes queued and not written, of all streams: they share the queue. Negative where a
        larger message was admitted whole; nothing enforces it here."""
        if self.pieces:
            self._frame_pieces()
        return self._limits.send_buffer - self.queued

    def _send_response(self, status: int, headers: Headers) -> None:
        if self._client or self._writing is not _Writing.HEAD or not 100 <= status <= 599:
            raise LocalProtocolError(f"send: no response head with status {status} may be sent here")
        fields = write_fields(headers)
        if status < 200:
            self._send_interim(status, fields)
            return
        length = fields.length
        until_close = chunked = False
        if status == 204 and length is not None:  # RFC 9110 section 8.6
            raise LocalProtocolError("content-length: not with status 204")
        if self._head_request or status in (204, 304):
            length = 0  # of what is sent
        elif length is None:
            until_close, chunked = self._http10, not self._http10
        unmet = self._continue_due and self._reading not in (_Reading.END, _Reading.DONE)
        asked = fields.connection
        # a client that was not told to continue may send its body or not: nobody could tell what comes next
        if until_close or unmet or self._closing or b"close" in asked:
            self.must_close = True
        self._closing = False
        self._to_send = length or 0
        self._writing = _Writing.CHUNKED if chunked else _Writing.UNTIL_CLOSE if until_close else _Writing.LENGTH
        self._put(
            b"%b%b%b%b%b\r\n"
            % (
                status_line(status),
                fields.block,
                b"" if b"date" in fields.special else self._date.line,
                self._connection_fields(asked, fields.upgrade),
                b"transfer-encoding: chunked\r\n" if chunked else b"",
            )
        )

    def _send_interim(self, status: int, fields: Outgoing) -> None:
        if self._http10:  # RFC 9110 section 15.2
            raise LocalProtocolError(f"send: an HTTP/1.0 client knows no status {status}")
        if b"content-length" in fields.special:  # RFC 9110 section 8.6
            raise LocalProtocolError(f"content-length: not with status {status}")
        self._continue_due &= status != 100
        own = b""
        if status == 101:
            if not self._upgrade:
                raise LocalProtocolError("send: status 101 for a request that asks for no upgrade")
            own = b"connection: upgrade\r\nupgrade: %b\r\n" % (fields.upgrade or self._upgrade)
            self._reading, self._writing = _Reading.SWITCHED, _Writing.DONE
        self._put(b"%b%b%b\r\n" % (status_line(status), fields.block, own))

    def _connection_fields(self, asked: list[bytes], upgrade: bytes) -> bytes:
        """Our own word on the connection, with what else the caller lists there."""
        if not (asked or upgrade or self.must_close or self._http10):
            return b""
        tokens = [token for token in asked if token not in (b"close", b"keep-alive", b"upgrade")]
        if upgrade:
            tokens.append(b"upgrade")
        if self.must_close:
            tokens.append(b"close")
        elif self._http10:
            tokens.append(b"keep-alive")
        lines = b"connection: %b\r\n" % b", ".join(tokens) if tokens else b""
        return lines + b"upgrade: %b\r\n" % upgrade if upgrade else lines

    def _send_request(self, event: Request) -> None:
        if not self._client or self._writing is not _Writing.HEAD:
            raise LocalProtocolError("send: no request may be sent here")
        if self.must_close or self._eof or self.input.unread:
            raise LocalProtocolError("send: this connection takes no further request")
        if event.stream != self.stream + 1:
            raise LocalProtocolError(f"send: expected stream {self.stream + 1}, got {event.stream}")
        line = request_line(event.method, event.target)
        if not is_authority(event.authority):
            raise LocalProtocolError(f"authority: expected a host and perhaps a port, got {event.authority[:40]!r}")
        fields = write_fields(event.headers)
        length, own = fields.length, b""
        if event.content_length is not None:
            if length is None:
                length, own = event.content_length, b"content-length: %d\r\n" % event.content_length
            if length != event.content_length or not 0 <= length < 2**63:
                raise LocalProtocolError(
                    f"content-length: {length} in the headers, content_length is {event.content_length}"
                )
        chunked = length is None and event.method in _BODY_METHODS
        if chunked:
            own = b"transfer-encoding: chunked\r\n"
        if event.expects_continue and b"expect" not in fields.special:
            own += b"expect: 100-continue\r\n"
        upgrade = event.upgrade or fields.upgrade.lower()
        if upgrade and not is_protocol(upgrade):
            raise LocalProtocolError(f"upgrade: expected one protocol, got {upgrade[:40]!r}")
        asked = fields.connection
        self.must_close = self._closing or b"close" in asked
        self._closing = False
        self._upgrade = upgrade
        self._head_request = event.method == b"HEAD"
        self._to_send = length or 0
        self._writing = _Writing.CHUNKED if chunked else _Writing.LENGTH
        self._reading = _Reading.HEAD
        self._next_stream()
        connection = self._connection_fields(asked, self._upgrade)
        self._put(b"%bhost: %b\r\n%b%b%b\r\n" % (line, event.authority, fields.block, connection, own))

    def _send_end(self, trailers: Headers = ()) -> None:
        if self._writing is _WRITE_CHUNKED:
            if self.pieces:
                self._frame_pieces()
            self._put(b"0\r\n%b\r\n" % (write_trailers(trailers) if trailers else b""))
        elif self._writing is not _WRITE_LENGTH and self._writing is not _WRITE_UNTIL_CLOSE:
            raise LocalProtocolError("send: nothing is under way that could end")
        elif self._to_send:
            raise LocalProtocolError(f"send: the body ends {self._to_send} bytes short of its content-length")
        elif trailers:
            raise LocalProtocolError("send: trailers need a chunked body")
        self._writing = _Writing.DONE
        self._put_end()
        self._turn()

    # -- the connection --------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """No message is under way, nothing is unread, nothing is queued."""
        at_rest = self._writing is _Writing.HEAD if self._client else self._reading is _Reading.HEAD
        return at_rest and not self.input.unread and not self.queued

    def switch(self) -> bytes:
        """After a 101, sent or received, what was received for the other protocol. The machine only gives out what it
        still has to send then."""
        if self._reading is not _Reading.SWITCHED or self._retired:
            raise LocalProtocolError("switch: no 101 was sent or received")
        self._retired = True
        return self.input.clear()

    def _turn(self) -> None:
        """One of the two messages is complete. When both are, the connection turns to the next or is over."""
        if self._writing is not _Writing.DONE or self._reading is _Reading.OVER:
            return
        if self._reading is not _Reading.DONE:
            if self._client:
                return
            self._skip_body()
        if self.must_close or self._reading is not _Reading.DONE:
            self._close_reading()
        elif self._client:
            self._writing = _Writing.HEAD
        else:
            self._reading, self._writing = _Reading.HEAD, _Writing.WAITING
