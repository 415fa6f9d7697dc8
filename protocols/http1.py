"""The HTTP/1.1 transport machine, either role: framing, order and reuse of one connection (RFC 9112)."""

from __future__ import annotations

import contextlib
import enum
from typing import final

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import NEED_DATA, PAUSED, Buffer, ConnectionEnd, Data, End, Event, Request, Response, Sent, Signal
from protocols.http1_chunks import Chunks
from protocols.http1_head import (
    Outgoing,
    RequestHead,
    is_authority,
    is_protocol,
    read_request,
    read_response,
    request_line,
    status_line,
    write_fields,
    write_trailers,
)
from protocols.http1_input import LARGE, Input
from protocols.http1_limits import HTTP1Limits
from protocols.http1_output import Output, bytes_view
from protocols.roles import Role

__all__ = ["HTTP1Connection", "HTTP1Limits"]

# A client that repeats itself sends the same head again and again; up to this size the last one is not read twice.
_REMEMBERED = 1024
_BODY_METHODS = (b"POST", b"PUT", b"PATCH")
_DEFAULT_LIMITS = HTTP1Limits()
_CONNECTION_END = ConnectionEnd()


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


@final
class HTTP1Connection:
    """One HTTP/1.1 connection as seen by a server or a client, without any input or output of its own.

    Feed what was received, pull events until NEED_DATA or PAUSED, send events, and write what `data_to_send` gives.
    Streams are numbered from 1, one for each request; one is under way at a time. A server reads the next request
    when its answer to this one and this one's body are complete; a client may send the next one then.

    `next_event` raises RemoteProtocolError for whatever breaks RFC 9112 or a limit, with the status to answer with
    (502 in the client's role, where there is nobody to answer), and raises the same error ever after. A server may
    still answer: `stream` says which stream such an answer belongs to, also where no Request was given out for it.
    """

    __slots__ = (
        "_chunks", "_client", "_closing", "_continue_due", "_eof", "_error", "_head_request", "_http10", "_input",
        "_known", "_landed", "_landing", "_ledger", "_limits", "_must_close", "_output", "_reading", "_rest", "_retired",
        "_scheme", "_to_send", "_told", "_upgrade", "_writing", "stream",
    )  # fmt: skip

    def __init__(self, role: Role, limits: HTTP1Limits = _DEFAULT_LIMITS, *, scheme: bytes = b"http") -> None:
        """`scheme` is what the transport is, and what the requests received then say."""
        self._client = role is Role.CLIENT
        self._limits = limits
        self._scheme = scheme
        self.stream = 0
        """The stream under way, or the last one; 0 before the first."""
        self._error: RemoteProtocolError | None = None
        self._retired = False
        self._must_close = False
        self._closing = False  # the next head we write says close

        self._input = Input()
        self._eof = False
        self._reading = _Reading.DONE if self._client else _Reading.HEAD
        self._known: tuple[bytes, RequestHead] | None = None
        self._rest = 0  # what is left of the declared length, not given out
        self._chunks: Chunks | None = None
        self._landing: memoryview | None = None
        self._landed = self._told = 0  # bytes in it, and how many of them were given out
        self._ledger: dict[int, int] = {}

        # the request under way, as far as its answer depends on it
        self._head_request = False
        self._http10 = False
        self._continue_due = False
        self._upgrade = b""

        self._output = Output()
        self._writing = _Writing.HEAD if self._client else _Writing.WAITING
        self._to_send = 0  # what is left of the declared length, not sent

    # -- receiving -------------------------------------------------------------------------------------------------

    @property
    def unread(self) -> int:
        """Bytes received and not given out as events yet, landed ones included."""
        return self._input.unread + self._landed - self._told

    def receive_data(self, data: Buffer) -> None:
        """Stores a copy of what is worth keeping; the memory may be reused at once. After an error, or when the
        connection cannot carry another message, nothing is."""
        if self._retired or self._eof:
            raise LocalProtocolError("data after the end of the connection" if self._eof else "data for a retired machine")
        if self._landing is not None:
            data = self._land(self._landing, bytes_view(memoryview(data)))
        if self._reading is not _Reading.OVER:
            self._input.feed(data)

    def receive_eof(self) -> None:
        """The peer closed its side. `next_event` first gives out what came before."""
        self._eof = True

    def close(self) -> None:
        """The transport is gone: gives up what is held for it, in both directions, the memory of a landing body
        included. Nothing more may be received or sent."""
        self._eof = True
        self._close_reading()
        self._output.clear()

    def next_event(self) -> Event | Signal:
        """One event, NEED_DATA, or PAUSED: a pipelined request is here whose turn has not come. After the peer's end
        it is ConnectionEnd, again and again. Raises RemoteProtocolError, then always the same one."""
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._retired:
            raise LocalProtocolError("events from a retired machine")
        try:
            event = self._pull()
        except RemoteProtocolError as error:
            self._fail(error)
            raise
        if type(event) is Data:
            stream = self.stream
            self._ledger[stream] = self._ledger.get(stream, 0) + len(event.buffers[0])
        elif type(event) is End:
            self._turn()
        return event

    def _pull(self) -> Event | Signal:
        event: Event | None = None
        match self._reading:
            case _Reading.HEAD:
                event = self._read_response() if self._client else self._read_request()
            case _Reading.LENGTH:
                event = self._read_length() if self._landing is None else self._read_landed(self._landing)
            case _Reading.END:
                self._reading = _Reading.DONE
                return End(stream=self.stream)
            case _Reading.CHUNKED:
                event = self._read_chunked()
            case _Reading.UNTIL_EOF:
                event = self._read_until_eof()
        return self._starved() if event is None else event

    def _starved(self) -> Event | Signal:
        """What to say when the bytes at hand make no event."""
        reading = self._reading
        between = reading in (_Reading.DONE, _Reading.SWITCHED, _Reading.OVER)
        if between and self._input.unread:
            if self._client and reading is _Reading.DONE:
                raise RemoteProtocolError("bytes that no request asked for")  # RFC 9112 section 9.2
            return PAUSED
        if not self._eof:
            return NEED_DATA
        if between or (reading is _Reading.HEAD and not self._client and not self._input.unread):
            return _CONNECTION_END
        if reading is _Reading.UNTIL_EOF:  # RFC 9112 section 6.3, rule 8
            self._reading = _Reading.DONE
            return End(stream=self.stream)
        raise RemoteProtocolError("the connection ended in the middle of a message")  # RFC 9112 section 8

    def _fail(self, error: RemoteProtocolError) -> None:
        if self._client:
            error.status = 502
        if self._writing is _Writing.WAITING:  # a head that was none is answered all the same
            self.stream += 1
            self._writing = _Writing.HEAD
            self._head_request = False
            self._http10 = True  # for all we know
            self._upgrade = b""
        self._error = error
        self._close_reading()

    def _close_reading(self) -> None:
        self._must_close = True
        self._reading = _Reading.OVER
        self._input.clear()
        self._end_landing()

    # -- heads -----------------------------------------------------------------------------------------------------

    def _read_request(self) -> Request | None:
        known, limits = self._known, self._limits
        if known is not None and self._input.accept(known[0]):
            parsed = known[1]
        else:
            head = self._input.head(limits.head, limits.request_line, blank_line=True)
            if head is None:
                return None
            parsed = read_request(head, max_fields=limits.fields)
            self._known = (head, parsed) if len(head) <= _REMEMBERED else None
        self.stream += 1
        self._writing = _Writing.HEAD
        self._head_request = parsed.method == b"HEAD"
        self._http10 = parsed.version == b"1.0"
        self._continue_due = parsed.expects_continue
        self._upgrade = parsed.upgrade
        self._must_close = not parsed.keep_alive
        self._start_body(parsed.length or 0, parsed.chunked)
        return Request(
            stream=self.stream,
            method=parsed.method,
            target=parsed.target,
            headers=parsed.headers,
            authority=parsed.authority,
            scheme=self._scheme,
            version=parsed.version,
            content_length=parsed.length,
            expects_continue=parsed.expects_continue,
            upgrade=parsed.upgrade,
        )

    def _read_response(self) -> Response | None:
        limits = self._limits
        head = self._input.head(limits.head, limits.head, blank_line=False)
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
            self._must_close |= not parsed.keep_alive
            # RFC 9112 section 6.3, rules 1 and 8
            if self._head_request or status in (204, 304):
                self._reading = _Reading.END
            elif parsed.chunked or parsed.length is not None:
                self._start_body(parsed.length or 0, parsed.chunked)
            else:
                self._reading = _Reading.UNTIL_EOF
                self._must_close = True
        return Response(stream=self.stream, status=status, headers=parsed.headers)

    # -- bodies ----------------------------------------------------------------------------------------------------

    def _start_body(self, length: int, chunked: bool) -> None:
        self._rest = length
        if chunked:
            self._chunks = Chunks(self._input, self._limits)
            self._reading = _Reading.CHUNKED
        else:
            self._reading = _Reading.LENGTH if length else _Reading.END

    def _read_until_eof(self) -> Data | None:
        piece = self._input.take(self._input.unread)
        return None if piece is None else Data(stream=self.stream, buffers=(piece,))

    def _read_length(self) -> Data | None:
        piece = self._input.take(self._rest)
        if piece is None:
            return None
        self._rest -= len(piece)
        if not self._rest:
            self._reading = _Reading.END
        return Data(stream=self.stream, buffers=(piece,))

    def _read_chunked(self) -> Data | End | None:
        assert self._chunks is not None
        piece = self._chunks.read()
        if piece is None:
            return None
        if not isinstance(piece, tuple):
            return Data(stream=self.stream, buffers=(piece,))
        self._reading, self._chunks = _Reading.DONE, None
        return End(stream=self.stream, trailers=piece)

    def _read_landed(self, landing: memoryview) -> Data | None:
        if self._told == self._landed:
            return None
        piece = landing[self._told : self._landed]
        self._rest -= len(piece)
        self._told = self._landed
        if not self._rest:
            self._reading = _Reading.END
            self._end_landing()
        return Data(stream=self.stream, buffers=(piece,))

    def _skip_body(self) -> None:
        """Our answer is complete and its request is not given out to its end: what is here of it is dropped."""
        self._rest -= self._landed - self._told
        self._end_landing()
        if self._reading is _Reading.LENGTH and not self._rest:
            self._reading = _Reading.DONE
        with contextlib.suppress(RemoteProtocolError):  # then it has no end that can be found
            while self._reading is not _Reading.DONE and type(self._pull()) is not Signal:
                pass

    # -- landing ---------------------------------------------------------------------------------------------------

    def land(self, stream: int, buffer: memoryview) -> int:
        """Lets the rest of this stream's body, which has a declared length, be received into `buffer`: writable,
        contiguous, and no smaller than that rest. What is already here is copied to its start; returns how many bytes
        that were. They, and what `buffer_updated` adds, come out of `next_event` as Data that views this memory.
        """
        if stream != self.stream or self._landing is not None or self._reading not in (_Reading.LENGTH, _Reading.END):
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
        while (piece := self._input.take(self._rest - n)) is not None:
            view[n : n + len(piece)] = piece
            n += len(piece)
        self._landing, self._landed, self._told = view, n, 0
        return n

    def get_buffer(self) -> memoryview | None:
        """Where to receive into: the part of a landing body that is not here yet. None when nothing lands."""
        landing = self._landing
        return None if landing is None or self._landed == len(landing) else landing[self._landed :]

    def buffer_updated(self, n: int) -> None:
        """n bytes were received into what `get_buffer` gave."""
        if self._landing is None or not 0 < n <= len(self._landing) - self._landed:
            raise LocalProtocolError(f"buffer_updated: {n} bytes do not fit what get_buffer gave")
        self._landed += n

    def _land(self, landing: memoryview, data: memoryview) -> memoryview:
        n = min(len(landing) - self._landed, len(data))
        landing[self._landed : self._landed + n] = data[:n]
        self._landed += n
        return data[n:]

    def _end_landing(self) -> None:
        self._landing = None
        self._landed = self._told = 0

    # -- the ledger of what was given out --------------------------------------------------------------------------

    @property
    def unconsumed(self) -> int:
        """Body bytes given out as Data and not credited yet."""
        return sum(self._ledger.values())

    def credit(self, stream: int, n: int) -> None:
        """The consumer took n bytes of this stream's body. HTTP/1.1 has no window to give back; the count is what a
        driver decides by whether to read on. Raises LocalProtocolError beyond what was given out."""
        given = self._ledger.get(stream, 0)
        if not 0 <= n <= given:
            raise LocalProtocolError(f"credit: {n} bytes for stream {stream}, which has {given} outstanding")
        if n == given:
            self._ledger.pop(stream, None)
        else:
            self._ledger[stream] = given - n

    # -- sending ---------------------------------------------------------------------------------------------------

    def send(self, event: Request | Response | Data | End) -> None:
        """Queues an event. Raises LocalProtocolError, and queues nothing, for one that is out of order, breaks its own
        declared length, or holds fields that cannot be written.

        A Data is written by reference where it is large: its memory must stay as it is until it is sent. A Response
        that is complete before its request is ends the reuse of the connection, unless the rest of the request is here.
        """
        if self._retired:
            raise LocalProtocolError("send: this machine is retired")
        if type(event) is Request:
            self._send_request(event)
        elif event.stream != self.stream:
            raise LocalProtocolError(f"send: stream {event.stream} is not under way, {self.stream} is")
        elif type(event) is Data:
            self._send_data(event)
        elif type(event) is Response:
            self._send_response(event)
        else:
            self._send_end(event)

    def close_after_response(self) -> None:
        """The next head sent, that of the answer under way if it is not out yet, says `connection: close`."""
        self._closing = True

    def room(self, stream: int) -> int:
        """`send_buffer` less the bytes queued and not written, of all streams: they share the queue. Negative where a
        larger message was admitted whole; nothing enforces it here."""
        return self._limits.send_buffer - self._output.queued

    def _send_response(self, event: Response) -> None:
        status = event.status
        if self._client or self._writing is not _Writing.HEAD or not 100 <= status <= 599:
            raise LocalProtocolError(f"send: no response head with status {status} may be sent here")
        fields = write_fields(event.headers)
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
            self._must_close = True
        self._closing = False
        self._to_send = length or 0
        self._writing = _Writing.CHUNKED if chunked else _Writing.UNTIL_CLOSE if until_close else _Writing.LENGTH
        self._output.put(
            b"%b%b%b%b\r\n"
            % (
                status_line(status),
                fields.block,
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
        self._output.put(b"%b%b%b\r\n" % (status_line(status), fields.block, own))

    def _connection_fields(self, asked: list[bytes], upgrade: bytes) -> bytes:
        """Our own word on the connection, with what else the caller lists there."""
        if not (asked or upgrade or self._must_close or self._http10):
            return b""
        tokens = [token for token in asked if token not in (b"close", b"keep-alive", b"upgrade")]
        if upgrade:
            tokens.append(b"upgrade")
        if self._must_close:
            tokens.append(b"close")
        elif self._http10:
            tokens.append(b"keep-alive")
        lines = b"connection: %b\r\n" % b", ".join(tokens) if tokens else b""
        return lines + b"upgrade: %b\r\n" % upgrade if upgrade else lines

    def _send_request(self, event: Request) -> None:
        if not self._client or self._writing is not _Writing.HEAD:
            raise LocalProtocolError("send: no request may be sent here")
        if self._must_close or self._eof or self._input.unread:
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
        self._must_close = self._closing or b"close" in asked
        self._closing = False
        self._upgrade = upgrade
        self._head_request = event.method == b"HEAD"
        self._to_send = length or 0
        self._writing = _Writing.CHUNKED if chunked else _Writing.LENGTH
        self._reading = _Reading.HEAD
        self.stream += 1
        connection = self._connection_fields(asked, self._upgrade)
        self._output.put(b"%bhost: %b\r\n%b%b%b\r\n" % (line, event.authority, fields.block, connection, own))

    def _send_data(self, event: Data) -> None:
        buffers = [buffer for given in event.buffers if (buffer := _flat(given))]
        size = sum(map(len, buffers))
        writing = self._writing
        if writing is _Writing.LENGTH:
            if size > self._to_send:
                raise LocalProtocolError(f"send: {size} bytes of body, the head leaves {self._to_send}")
            self._to_send -= size
        elif writing is not _Writing.CHUNKED and writing is not _Writing.UNTIL_CLOSE:
            raise LocalProtocolError("send: a body needs a head first, and has one end")
        if not size:
            return  # RFC 9112 section 7.1: an empty chunk would be the last
        if writing is _Writing.CHUNKED:
            head = b"%x\r\n" % size
            if size < LARGE:
                self._output.put(b"".join((head, *buffers, b"\r\n")))
                return
            buffers = [head, *buffers, b"\r\n"]
        for buffer in buffers:
            self._output.put(buffer)

    def _send_end(self, event: End) -> None:
        if self._writing is _Writing.CHUNKED:
            last = b"0\r\n%b\r\n" % (write_trailers(event.trailers) if event.trailers else b"")
            self._output.put(last)
        elif self._writing is not _Writing.LENGTH and self._writing is not _Writing.UNTIL_CLOSE:
            raise LocalProtocolError("send: nothing is under way that could end")
        elif self._to_send:
            raise LocalProtocolError(f"send: the body ends {self._to_send} bytes short of its content-length")
        elif event.trailers:
            raise LocalProtocolError("send: trailers need a chunked body")
        self._writing = _Writing.DONE
        self._output.end(self.stream)
        self._turn()

    # -- output ----------------------------------------------------------------------------------------------------

    def data_to_send(self, at_most: int) -> list[Buffer]:
        """The next buffers to write, about `at_most` bytes: small ones are joined and never cut. [] when there are
        none. What it gave must be confirmed with `data_sent` before it may be called again."""
        return self._output.take(at_most)

    def data_sent(self) -> Sent:
        """What `data_to_send` gave is with the kernel. Call it also when that was []: an End that adds no bytes of its
        own (declared length, or a body that ends with the connection) after all others were written shows only here."""
        return self._output.confirm(self.stream)

    # -- the connection --------------------------------------------------------------------------------------------

    @property
    def must_close(self) -> bool:
        """The connection carries no message after the one under way: one side said close, the peer speaks HTTP/1.0
        without keep-alive, a body ends with the connection, was not read to its end, or broke the protocol."""
        return self._must_close

    @property
    def idle(self) -> bool:
        """No message is under way, nothing is unread, nothing is queued."""
        at_rest = self._writing is _Writing.HEAD if self._client else self._reading is _Reading.HEAD
        return at_rest and not self._input.unread and not self._output.queued

    def switch(self) -> bytes:
        """After a 101, sent or received, what was received for the other protocol. The machine only gives out what it
        still has to send then."""
        if self._reading is not _Reading.SWITCHED or self._retired:
            raise LocalProtocolError("switch: no 101 was sent or received")
        self._retired = True
        return self._input.clear()

    def _turn(self) -> None:
        """One of the two messages is complete. When both are, the connection turns to the next or is over."""
        if self._writing is not _Writing.DONE or self._reading is _Reading.OVER:
            return
        if self._reading is not _Reading.DONE:
            if self._client:
                return
            self._skip_body()
        if self._must_close or self._reading is not _Reading.DONE:
            self._close_reading()
        elif self._client:
            self._writing = _Writing.HEAD
        else:
            self._reading, self._writing = _Reading.HEAD, _Writing.WAITING


def _flat(buffer: Buffer) -> Buffer:
    """The same memory, with a len() that counts bytes."""
    return bytes_view(buffer) if type(buffer) is memoryview else buffer
