"""The machines whose states are drawn, with the inputs and the names of the states of each."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpack import Encoder

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from gateway.core.exchange import Exchange  # noqa: E402
from gateway.errors import DeadlineExceeded, Ending  # noqa: E402
from protocols.aws import bidi, eventstream  # noqa: E402
from protocols.errors import LocalProtocolError, RemoteProtocolError  # noqa: E402
from protocols.events import (  # noqa: E402
    TURN,
    Close,
    ConnectionEnd,
    Data,
    End,
    Frame,
    GoAway,
    Head,
    Headers,
    Opcode,
    Ping,
    Request,
    Reset,
    Response,
    Signal,
)
from protocols.http1.connection import HTTP1Connection  # noqa: E402
from protocols.http2.connection import HTTP2Connection  # noqa: E402
from protocols.http2.frames import PREFACE, Kind, goaway, rst_stream  # noqa: E402
from protocols.roles import Role  # noqa: E402
from protocols.websocket.connection import WebSocketConnection  # noqa: E402
from protocols.websocket.frames import OPENING  # noqa: E402
from scripts.explored import Input, NotNow, View, Who  # noqa: E402

BROKEN = "meaningless bytes"
PEER, WE, BOTH = (Who.PEER,), (Who.WE,), (Who.WE, Who.PEER)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine with all inputs to try on it."""

    name: str
    title: str
    source: str
    about: str
    make: Callable[[], Any]
    inputs: Sequence[Input[Any]]
    key: Callable[[Any], Hashable]
    views: Sequence[View[Any]]


def _peer(name: str, do: Callable[[Any], None]) -> Input[Any]:
    return Input(name=name, who=Who.PEER, do=do)


def _we(name: str, do: Callable[[Any], None]) -> Input[Any]:
    return Input(name=name, who=Who.WE, do=do)


def _else(name: str, do: Callable[[Any], None]) -> Input[Any]:
    return Input(name=name, who=Who.TIME, do=do)


def _settle(machine: Any) -> None:
    """Writes the waiting bytes, takes the events and credits their data, as a driver does."""
    try:
        while (event := machine.next_event()) is TURN or not isinstance(event, Signal | ConnectionEnd):
            if isinstance(event, Data):
                machine.credit(event.stream, event.nbytes)
            elif isinstance(event, Frame):
                machine.credit(len(event.data))
    finally:
        while machine.data_to_send(65536):
            machine.data_sent()


def _send(event: Callable[[Any], Any]) -> Callable[[Any], None]:
    def do(machine: Any) -> None:
        machine.send(event(machine))
        _settle_ours(machine)

    return do


def _settle_ours(machine: Any) -> None:
    """Settles after an input of the machine's own side. A mistake of the peer that shows only now is not due to the
    input."""
    with suppress(RemoteProtocolError):
        _settle(machine)


def _received(data: bytes, when: Callable[[Any], bool] = lambda _: True) -> Callable[[Any], None]:
    def do(machine: Any) -> None:
        if machine._error is not None or not when(machine):
            raise NotNow
        try:
            machine.receive_data(data)
        except LocalProtocolError:
            raise NotNow from None  # after the end of the connection
        _settle(machine)

    return do


def _eof(machine: Any) -> None:
    if machine._eof or machine._error is not None:
        raise NotNow
    machine.receive_eof()
    _settle(machine)


# -- HTTP/1.1 ------------------------------------------------------------------------------------------------------------


def _reading(machine: HTTP1Connection) -> str:
    return machine._reading.name


def _writing(machine: HTTP1Connection) -> str:
    return machine._writing.name


def _http1_key(machine: HTTP1Connection) -> Hashable:
    return (
        machine._reading, machine._writing, machine.must_close, machine._eof, machine._error is None, machine._continue_due,
        machine._upgrade, machine._http10, machine._head_request, machine._rest, machine._to_send, machine._retired,
        machine.input.unread, machine.stream == 0,
    )  # fmt: skip


def _awaits_head(machine: HTTP1Connection) -> bool:
    return machine._reading.name == "HEAD" and not machine._eof


def _in_body(kind: str) -> Callable[[Any], bool]:
    return lambda machine: machine._reading.name == kind and not machine._eof


def _last_of_length(machine: HTTP1Connection) -> None:
    if not _in_body("LENGTH")(machine):
        raise NotNow
    _received(b"x" * machine._rest)(machine)


def _switch(machine: HTTP1Connection) -> None:
    machine.switch()


def _data1(machine: Any) -> Data:
    return Data(stream=machine.stream, buffers=(b"x" * (machine._to_send or 1),))


_HTTP1_READING = {
    "HEAD": "the next bytes are a head",
    "LENGTH": "they are a body of declared length",
    "CHUNKED": "they are a body in chunks",
    "UNTIL_EOF": "they are a body that ends with the connection",
    "DONE": "the message is given out to its end; what follows waits until the turn of its stream has come",
    "SWITCHED": "they are another protocol's",
    "OVER": "they are dropped: the connection is not read any more",
}
_HTTP1_WRITING = {
    "WAITING": "nothing: there is no request to answer",
    "HEAD": "a head; a server may send interim ones before it",
    "LENGTH": "Data, up to the length that the head declares, then End",
    "CHUNKED": "Data, each as a chunk, then End",
    "UNTIL_CLOSE": "Data, then End, which closes the connection",
    "DONE": "nothing: our message is complete",
}


def _http1_server() -> Machine:
    text = b" / HTTP/1.1\r\nhost: a\r\n"
    inputs = [
        _peer("request without a body", _received(b"GET" + text + b"\r\n", _awaits_head)),
        _peer("request with a length", _received(b"POST" + text + b"content-length: 2\r\n\r\n", _awaits_head)),
        _peer("request in chunks", _received(b"POST" + text + b"transfer-encoding: chunked\r\n\r\n", _awaits_head)),
        _peer(
            "request to upgrade",
            _received(b"GET" + text + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n", _awaits_head),
        ),
        _peer("request that says close", _received(b"GET" + text + b"connection: close\r\n\r\n", _awaits_head)),
        _peer("request in HTTP/1.0", _received(b"GET / HTTP/1.0\r\n\r\n", _awaits_head)),
        _peer("rest of the body", _last_of_length),
        _peer("last chunk", _received(b"0\r\n\r\n", _in_body("CHUNKED"))),
        _peer(BROKEN, _received(b"\0\r\n\r\n", lambda m: _awaits_head(m) or _in_body("CHUNKED")(m))),
        _peer("end of the connection", _eof),
        _we("Response 100", _send(lambda m: Response(stream=m.stream, status=100))),
        _we("Response 101", _send(lambda m: Response(stream=m.stream, status=101))),
        _we(
            "Response with a length",
            _send(lambda m: Response(stream=m.stream, status=200, headers=[(b"content-length", b"1")])),
        ),
        _we("Response", _send(lambda m: Response(stream=m.stream, status=200))),
        _we("Data", _send(_data1)),
        _we("End", _send(lambda m: End(stream=m.stream))),
        _else("switch", _switch),
    ]
    reading = {name: meaning for name, meaning in _HTTP1_READING.items() if name != "UNTIL_EOF"}
    return Machine(
        name="http1-server", title="HTTP/1.1, a server", source="protocols/http1/connection.py",
        make=lambda: HTTP1Connection(Role.SERVER),
        about="`HTTP1Connection(Role.SERVER)`. Reading and writing have a state each. If both are DONE, the next "
        "request may begin, or the connection is OVER.",
        inputs=inputs, key=_http1_key,
        views=[
            View(name="http1-server-reading", title="Receiving", states=reading, tells=PEER, of=_reading),
            View(name="http1-server-writing", title="Sending", states=_HTTP1_WRITING, tells=WE, of=_writing),
        ],
    )  # fmt: skip


def _http1_request(method: bytes, headers: Headers = (), upgrade: bytes = b"") -> Callable[[Any], None]:
    return _send(
        lambda m: Request(
            stream=m.stream + 1, head=Head(method=method, target=b"/", authority=b"a", headers=headers, upgrade=upgrade)
        )
    )


def _http1_client() -> Machine:
    length, chunks = b"content-length: 2\r\n", b"transfer-encoding: chunked\r\n"
    answer = b"HTTP/1.1 200 OK\r\n"
    inputs = [
        _we("Request without a body", _http1_request(b"GET")),
        _we("Request with a length", _http1_request(b"POST", [(b"content-length", b"1")])),
        _we("Request in chunks", _http1_request(b"POST")),
        _we("Request to upgrade", _http1_request(b"GET", upgrade=b"websocket")),
        _we("Data", _send(_data1)),
        _we("End", _send(lambda m: End(stream=m.stream))),
        _peer("interim response", _received(b"HTTP/1.1 100 Continue\r\n\r\n", _awaits_head)),
        _peer(
            "response 101", _received(b"HTTP/1.1 101 S\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", _awaits_head)
        ),
        _peer("response without a body", _received(answer + b"content-length: 0\r\n\r\n", _awaits_head)),
        _peer("response with a length", _received(answer + length + b"\r\n", _awaits_head)),
        _peer("response in chunks", _received(answer + chunks + b"\r\n", _awaits_head)),
        _peer("response that says close", _received(answer + b"connection: close\r\n" + length + b"\r\n", _awaits_head)),
        _peer("response without a length", _received(answer + b"\r\n", _awaits_head)),
        _peer("rest of the body", _last_of_length),
        _peer("last chunk", _received(b"0\r\n\r\n", _in_body("CHUNKED"))),
        _peer(BROKEN, _received(b"\0\r\n\r\n", lambda m: _awaits_head(m) or _in_body("CHUNKED")(m) or _in_body("DONE")(m))),
        _peer("end of the connection", _eof),
        _else("switch", _switch),
    ]
    writing = {name: meaning for name, meaning in _HTTP1_WRITING.items() if name not in ("WAITING", "UNTIL_CLOSE")}
    writing["HEAD"] = "the head of a request"
    reading = {"DONE": "no request is under way, or its answer is given out to its end"} | {
        name: meaning for name, meaning in _HTTP1_READING.items() if name != "DONE"
    }
    return Machine(
        name="http1-client", title="HTTP/1.1, a client", source="protocols/http1/connection.py",
        make=lambda: HTTP1Connection(Role.CLIENT),
        about="`HTTP1Connection(Role.CLIENT)`. A request may be sent where both are at rest; its answer may come, and end, "
        "before the request is whole.",
        inputs=inputs, key=_http1_key,
        views=[
            View(name="http1-client-reading", title="Receiving", states=reading, tells=PEER, of=_reading),
            View(name="http1-client-writing", title="Sending", states=writing, tells=WE, of=_writing),
        ],
    )  # fmt: skip


# -- HTTP/2 --------------------------------------------------------------------------------------------------------------

_REQUEST = Encoder().encode(
    [(b":method", b"POST"), (b":scheme", b"https"), (b":authority", b"a"), (b":path", b"/")], huffman=False
)
_RESPONSE = Encoder().encode([(b":status", b"200")], huffman=False)
_INTERIM = Encoder().encode([(b":status", b"103")], huffman=False)
_TRAILERS = Encoder().encode([(b"x", b"y")], huffman=False)


def _frame(kind: Kind, stream: int, payload: bytes = b"", *, end: bool = False) -> bytes:
    flags = end | 0x4 * (kind is Kind.HEADERS)
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def _http2(role: Role) -> Callable[[], HTTP2Connection]:
    def make() -> HTTP2Connection:
        machine = HTTP2Connection(role)
        machine.receive_data((PREFACE if role is Role.SERVER else b"") + _frame(Kind.SETTINGS, 0))
        _settle(machine)
        return machine

    return make


def _stream_of(machine: HTTP2Connection) -> str:
    stream = machine._streams.get(1)
    if stream is None or stream.reset:
        opened = machine._highest if machine.role is Role.SERVER else machine.next_stream > 1
        return "closed" if opened or machine.must_close else "idle"
    if stream.lingering:
        return "lingering"
    if stream.ended and not stream.receiving:
        return "closed"
    side = "half closed (local)" if stream.ended else "open" if stream.receiving else "half closed (remote)"
    begun = stream.head_sent if machine.role is Role.SERVER else False
    return f"{side}, answering" if begun else side


def _http2_key(machine: HTTP2Connection) -> Hashable:
    stream = machine._streams.get(1)
    own = stream and (
        stream.receiving, stream.head_sent, stream.ended, stream.lingering, stream.reset, stream.dropped, stream.looks,
        str(stream.library.state_machine.state), stream.expected, stream.id in machine._lingering,
        stream.library.state_machine.headers_received, stream.library.state_machine.trailers_received,
    )  # fmt: skip
    return (
        own, machine._highest, machine.next_stream, machine._error is None, machine._closed, machine._eof,
        machine._peer_leaves, machine._last_sent, machine._goodbye, machine._leaves_with_error, 1 in machine._reset_by_us,
        machine.must_close,
    )  # fmt: skip


def _open(machine: Any) -> bool:
    return not machine._eof and not machine._error and not machine._closed


def _unopened(machine: Any) -> bool:
    return _open(machine) and not machine._highest


def _opened(machine: Any) -> bool:
    return _open(machine) and (machine._highest == 1 if machine.role is Role.SERVER else machine.next_stream > 1)


def _answered_ping(machine: Any) -> None:
    if not _open(machine) or not machine._goodbye:
        raise NotNow
    machine.receive_data(_frame(Kind.PING, 0, machine._goodbye, end=True))
    _settle(machine)


def _tick(machine: HTTP2Connection) -> None:
    if not machine.lingering:
        raise NotNow
    machine.tick()
    _settle_ours(machine)


def _on_stream(data: bytes) -> Callable[[Any], None]:
    """Like `_received`; if the machine resets the stream for it, that was the peer's mistake too."""
    receive = _received(data, _opened)

    def do(machine: HTTP2Connection) -> None:
        before = 1 in machine._reset_by_us
        receive(machine)
        if 1 in machine._reset_by_us and not before:
            raise RemoteProtocolError("an error of the stream")

    return do


_DATA = [
    _peer("DATA", _on_stream(_frame(Kind.DATA, 1, b"x"))),
    _peer("DATA with END_STREAM", _on_stream(_frame(Kind.DATA, 1, b"x", end=True))),
    _peer("trailers", _on_stream(_frame(Kind.HEADERS, 1, _TRAILERS, end=True))),
    _peer("RST_STREAM", _received(rst_stream(1, 8), _opened)),
]
_ANSWER = [
    _we("Data", _send(lambda _: Data(stream=1, buffers=(b"x",)))),
    _we("End", _send(lambda _: End(stream=1))),
    _we("Reset", _send(lambda _: Reset(stream=1, code=8))),
]


def _http2_server_stream() -> Machine:
    states = {
        "idle": "no request has arrived",
        "open": "the request arrives, its answer has no head yet",
        "open, answering": "the request arrives, and the answer leaves",
        "half closed (remote)": "the request is whole, its answer has no head yet",
        "half closed (remote), answering": "the request is whole, and the answer leaves",
        "lingering": "the answer is whole, the request is not; the rest of it is dropped, and nothing is reported",
        "closed": "no more input is expected; unread bytes are still to be credited or dropped",
    }
    inputs = [
        _peer("HEADERS", _received(_frame(Kind.HEADERS, 1, _REQUEST), _unopened)),
        _peer("HEADERS with END_STREAM", _received(_frame(Kind.HEADERS, 1, _REQUEST, end=True), _unopened)),
        *_DATA,
        _we("Response 1xx", _send(lambda _: Response(stream=1, status=103))),
        _we("Response", _send(lambda _: Response(stream=1, status=200))),
        *_ANSWER,
        _else("tick, twice with nothing between", _tick),
    ]
    return Machine(
        name="http2-server-stream", title="HTTP/2, a stream of a server", source="protocols/http2/connection.py",
        make=_http2(Role.SERVER),
        about="`HTTP2Connection(Role.SERVER)`, one stream of it, with the names of RFC 9113 section 5.1. The program takes "
        "all output at once; *lingering* is a server's *half closed (local)* of that section.",
        inputs=inputs, key=_http2_key,
        views=[View(name="http2-server-stream", title="The stream", states=states, tells=BOTH, of=_stream_of)],
    )  # fmt: skip


def _http2_client_stream() -> Machine:
    states = {
        "idle": "no request was sent",
        "open": "the request leaves, the answer may come",
        "half closed (local)": "the request is whole, the answer is not",
        "half closed (remote)": "the answer is whole, the request is not",
        "closed": "no more input is expected; unread bytes are still to be credited or dropped",
    }
    inputs = [
        _we(
            "Request",
            _send(
                lambda m: (
                    Request(stream=m.next_stream, head=Head(method=b"POST", target=b"/", authority=b"a"))
                    if _first(m)
                    else None
                )
            ),
        ),
        *_ANSWER,
        _peer("interim HEADERS", _on_stream(_frame(Kind.HEADERS, 1, _INTERIM))),
        _peer("HEADERS", _on_stream(_frame(Kind.HEADERS, 1, _RESPONSE))),
        _peer("HEADERS with END_STREAM", _on_stream(_frame(Kind.HEADERS, 1, _RESPONSE, end=True))),
        *_DATA,
        _peer("GOAWAY that names a lower stream", _received(goaway(0, 0, b""), _open)),
    ]
    return Machine(
        name="http2-client-stream", title="HTTP/2, a stream of a client", source="protocols/http2/connection.py",
        make=_http2(Role.CLIENT),
        about="`HTTP2Connection(Role.CLIENT)`, one stream of it.",
        inputs=inputs, key=_http2_key,
        views=[View(name="http2-client-stream", title="The stream", states=states, tells=BOTH, of=_stream_of)],
    )  # fmt: skip


def _first(machine: HTTP2Connection) -> bool:
    if machine.next_stream > 1:
        raise NotNow
    return True


def _connection_of(machine: HTTP2Connection) -> str:
    if machine._closed:
        return "closed"
    if machine._error is not None or machine._leaves_with_error:
        return "broken"
    if machine.must_close:
        return "over"
    if machine._refusing:
        return "refusing"
    if machine._peer_leaves or machine._eof:
        return "the peer leaves"
    return "open" if machine._last_sent is None else "leaving"


def _shut(last: bool) -> Callable[[Any], None]:
    def do(machine: HTTP2Connection) -> None:
        if not _open(machine):
            raise NotNow
        machine.shutdown(last)
        _settle_ours(machine)

    return do


def _http2_connection() -> Machine:
    states = {
        "open": "streams come and go",
        "leaving": "the first GOAWAY and one of two PINGs are sent: streams on their way are still accepted",
        "refusing": "the last GOAWAY is sent: newer streams are ignored, and open streams finish",
        "the peer leaves": "its GOAWAY or the end of its connection has come: open streams finish",
        "over": "no stream is open any more: `must_close`",
        "broken": "the peer broke a rule: GOAWAY with the reason, then `must_close`",
        "closed": "`close` was called: the transport is gone",
    }
    inputs = [
        _peer("HEADERS", _received(_frame(Kind.HEADERS, 1, _REQUEST), _unopened)),
        _peer("RST_STREAM", _received(rst_stream(1, 8), _opened)),
        _peer("GOAWAY", _received(goaway(0, 0, b""), _open)),
        _peer("PING answered", _answered_ping),
        _peer(BROKEN, _received(_frame(Kind.PING, 1, b"12345678"), _open)),
        _peer("end of the connection", _eof),
        _we("shutdown", _shut(last=False)),
        _we("shutdown with last", _shut(last=True)),
        _we("GoAway with an error", _send(lambda _: GoAway(code=1, last_stream=0))),
        _we("Response and End", _respond),
        _else("close", lambda m: m.close()),
    ]
    return Machine(
        name="http2-connection", title="HTTP/2, a server's connection", source="protocols/http2/connection.py",
        make=_http2(Role.SERVER),
        about="`HTTP2Connection(Role.SERVER)` as a whole.",
        inputs=inputs, key=_http2_key,
        views=[View(name="http2-connection", title="The connection", states=states, tells=(), of=_connection_of)],
    )  # fmt: skip


def _respond(machine: HTTP2Connection) -> None:
    machine.respond(1, 200, ())
    _settle_ours(machine)


# -- WebSocket -----------------------------------------------------------------------------------------------------------


def _handshake_of(machine: WebSocketConnection) -> str:
    if machine._error is not None:
        return "broken"
    if machine.closed:
        return "closed"
    if machine._eof:
        return "gone"
    return "closing" if machine.close_sent else "open"


def _receiving_of(machine: WebSocketConnection) -> str:
    if machine._error is not None or machine.close_received or machine._eof:
        return "over"
    return "between messages" if machine._legal is OPENING else "inside a message"


def _sending_of(machine: WebSocketConnection) -> str:
    if not machine.is_open:
        return "over"
    return "inside a message" if machine._sending_message else "between messages"


def _websocket() -> Machine:
    def frame(first: int, payload: bytes = b"") -> bytes:
        return bytes([first, 0x80 | len(payload)]) + bytes(4) + payload  # masked, by zeros

    def hears(machine: WebSocketConnection) -> bool:
        return not (machine._eof or machine.close_received or machine._error)

    states = {
        "open": "frames go both ways",
        "closing": "our Close is queued, and nothing may follow it; frames still come",
        "closed": "both sides have sent a Close: the server closes the transport",
        "broken": "the peer broke a rule; a Close with the reason is in the output",
        "gone": "the transport has ended without the peer's Close",
    }
    message = {
        "between messages": "a message may begin",
        "inside a message": "a continuation is due",
        "over": "no more frames",
    }
    inputs = [
        _peer("whole message", _received(frame(0x81, b"x"), hears)),
        _peer("first fragment", _received(frame(0x01, b"x"), hears)),
        _peer("fragment in the middle", _received(frame(0x00, b"x"), hears)),
        _peer("last fragment", _received(frame(0x80, b"x"), hears)),
        _peer("a Ping", _received(frame(0x89), hears)),
        _peer("a Close", _received(frame(0x88, b"\x03\xe8"), hears)),
        _peer(BROKEN, _received(frame(0x83), hears)),
        _peer("end of the connection", _eof),
        _we("Frame, whole", _send(lambda _: Frame(opcode=Opcode.TEXT, fin=True, data=b"x"))),
        _we("Frame, first", _send(lambda _: Frame(opcode=Opcode.TEXT, fin=False, data=b"x"))),
        _we("Frame, in the middle", _send(lambda _: Frame(opcode=Opcode.CONTINUATION, fin=False, data=b"x"))),
        _we("Frame, last", _send(lambda _: Frame(opcode=Opcode.CONTINUATION, fin=True, data=b"x"))),
        _we("Ping", _send(lambda _: Ping())),
        _we("Close", _send(lambda _: Close(code=1000))),
    ]
    return Machine(
        name="websocket", title="WebSocket", source="protocols/websocket/connection.py",
        make=lambda: WebSocketConnection(Role.SERVER),
        about="`WebSocketConnection(Role.SERVER)`; a client's differs only in masks. It has three states at once: "
        "that of the closing handshake, and that of the message in either direction. The machine itself answers Pings and "
        "echoes a Close.",
        inputs=inputs,
        key=lambda m: (m.close_sent, m.close_received, m._eof, m._error is None, m._sending_message, m._legal is OPENING),
        views=[
            View(name="websocket-closing", title="The closing handshake", states=states, tells=(), of=_handshake_of),
            View(name="websocket-receiving", title="Receiving", states=message, tells=PEER, of=_receiving_of),
            View(name="websocket-sending", title="Sending", states=message, tells=WE, of=_sending_of),
        ],
    )  # fmt: skip


# -- event streams -------------------------------------------------------------------------------------------------------

_MESSAGE = eventstream.encode(eventstream.EventMessage(headers={}, payload=b"x"))
_ENVELOPE = b"".join(bytes(b) for b in bidi.encode_request_part(b"x", date_ms=0))
_END = b"".join(bytes(b) for b in bidi.encode_request_end(date_ms=0))
_PART = b"".join(bytes(b) for b in bidi.encode_part(b"x"))
_FAILURE = b"".join(bytes(b) for b in bidi.encode_model_stream_error("it failed"))


def _pulled(data: bytes, pull: str, when: Callable[[Any], bool]) -> Callable[[Any], None]:
    def do(decoder: Any) -> None:
        if decoder._eof or decoder._error is not None or not when(decoder):
            raise NotNow
        decoder.receive_data(data)
        _pull(decoder, pull)

    return do


def _pull(decoder: Any, pull: str) -> None:
    while not isinstance(item := getattr(decoder, pull)(), Signal) and item is not bidi.END:
        pass


def _eof_then(pull: str) -> Callable[[Any], None]:
    def do(decoder: Any) -> None:
        if decoder._eof or decoder._error is not None:
            raise NotNow
        decoder.receive_eof()
        _pull(decoder, pull)

    return do


def _decoder_of(decoder: Any) -> str:
    if decoder._error is not None:
        return "broken"
    if getattr(decoder, "_ended", False) or decoder._eof:
        return "ended"
    return "inside a message" if decoder.buffered else "between messages"


def _whole(decoder: Any) -> bool:
    return not decoder.buffered


def _halves(message: bytes, pull: str) -> list[Input[Any]]:
    cut = len(message) // 2
    return [
        _peer("first half of a message", _pulled(message[:cut], pull, _whole)),
        _peer("the rest of it", _pulled(message[cut:], pull, lambda d: bool(d.buffered))),
        _peer("a damaged message", _pulled(message[:-1] + bytes([message[-1] ^ 1]), pull, _whole)),
    ]


def _decoder(
    name: str, title: str, source: str, about: str, make: Callable[[], Any], pull: str, more: list[Input[Any]], ended: str
) -> Machine:
    states = {
        "between messages": "nothing is buffered",
        "inside a message": "a message has begun; once its length is known, `need` tells it",
        "ended": ended,
        "broken": "every further call raises the same error",
    }
    return Machine(
        name=name, title=title, source=source, about=about, make=make,
        inputs=[*more, _peer("end of the bytes", _eof_then(pull))],
        key=lambda d: (_decoder_of(d), d.buffered, d._eof, getattr(d, "_ended", False)),
        views=[View(name=name, title="The decoder", states=states, tells=PEER, of=_decoder_of)],
    )  # fmt: skip


def _decoders() -> list[Machine]:
    return [
        _decoder(
            "eventstream", "AWS event stream", "protocols/aws/eventstream.py", "`Decoder`: messages of any meaning.",
            eventstream.Decoder, "next_message",
            [_peer("a message", _pulled(_MESSAGE, "next_message", _whole)), *_halves(_MESSAGE, "next_message")],
            "no more bytes come",
        ),
        _decoder(
            "bidi-request", "BiDi, the request's body", "protocols/aws/bidi.py", "`PartDecoder`: what a client sends.",
            bidi.PartDecoder, "next_part",
            [
                _peer("a part", _pulled(_ENVELOPE, "next_part", _whole)),
                *_halves(_ENVELOPE, "next_part"),
                _peer("the empty envelope", _pulled(_END, "next_part", _whole)),
            ],
            "the empty envelope has come, or the end of the bytes; a byte after either is an error",
        ),
        _decoder(
            "bidi-response", "BiDi, the answer's body", "protocols/aws/bidi.py", "`ResponseDecoder`: what a server sends.",
            bidi.ResponseDecoder, "next_event",
            [
                _peer("a part", _pulled(_PART, "next_event", _whole)),
                *_halves(_PART, "next_event"),
                _peer("a failure", _pulled(_FAILURE, "next_event", _whole)),
            ],
            "a failure has come, or the end of the bytes; a byte after either is an error",
        ),
    ]  # fmt: skip


# -- the exchange --------------------------------------------------------------------------------------------------------


class _Silent:
    """A wire, and an owner, that do nothing."""

    name, windowed, exclusive, peer = "http/1.1", False, True, ""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_: {} if name == "fields" else 0.0


def _exchange_of(exchange: Exchange) -> str:
    if exchange.ending is not None:
        return "over" if exchange._returned else "gone" if exchange.gone else "ended"
    if exchange.outbound.finishing is not None:
        return "finishing"
    if exchange.interruption is not None:
        return "interrupted"
    return "answering" if exchange.outbound.status else "working"


def _unless(refused: Callable[[Exchange], bool], do: Callable[[Exchange], None]) -> Callable[[Any], None]:
    def wanted(exchange: Exchange) -> None:
        if refused(exchange):
            raise NotNow
        do(exchange)

    return wanted


def _exchange() -> Machine:
    def make() -> Exchange:
        silent: Any = _Silent()
        return Exchange(silent, silent, Request(stream=1, head=Head(method=b"POST", target=b"/")), "1", 0.0)

    def said(exchange: Exchange) -> bool:
        return exchange.outbound.finishing is not None or exchange.gone or exchange._returned

    states = {
        "working": "the model runs, and no part of the answer is queued",
        "answering": "the head of the answer is queued",
        "interrupted": "the work is cancelled, and the client has still to be told",
        "finishing": "the end of the answer is queued, and the ending is chosen",
        "ended": "the last byte is with the kernel: the chosen ending is final",
        "gone": "the client or the connection has gone, as the ending says; nothing more is sent",
        "over": "it has its ending, its task has returned, and its memory is released",
    }
    interruption = DeadlineExceeded("its time is over")
    inputs = [
        _we("start", _unless(lambda x: said(x) or bool(x.outbound.status), lambda x: x.outbound.start(200, ()))),
        _we("push", _unless(said, lambda x: x.outbound.push(b"x"))),
        _we("finish, respond or abort", _unless(said, lambda x: x.outbound.finish(Ending.COMPLETE))),
        _else(
            "deadline, drain, lost worker",
            _unless(lambda x: x.interruption is not None, lambda x: x.interrupt(interruption)),
        ),
        _peer("leaves, fails or stalls", _unless(lambda x: x.ending is not None, lambda x: x.peer_gone(Ending.CANCELLED))),
        _else(
            "its last byte is written",
            _unless(lambda x: x.outbound.finishing is None or x.ending is not None, lambda x: x.answer_written()),
        ),
        _else(
            "its task returns",
            _unless(lambda x: x._returned or (x.outbound.finishing is None and not x.gone), lambda x: x.work_done()),
        ),
    ]
    return Machine(
        name="exchange", title="An exchange, until its one ending", source="gateway/core/exchange.py",
        make=make,
        about="`Exchange`: a request and its answer on any wire. [How a session ends](endings.md) lists the endings, and "
        "[cancellation](../explanation/cancellation.md) their causes.",
        inputs=inputs,
        key=lambda x: (x.outbound.status, x.outbound.finishing, x.ending, x.interruption is None, x.gone, x._returned),
        views=[View(name="exchange", title="The exchange", states=states, tells=WE, of=_exchange_of)],
    )  # fmt: skip


def machines() -> list[Machine]:
    """All machines, in the order of the page."""
    return [
        _http1_server(), _http1_client(), _http2_server_stream(), _http2_client_stream(), _http2_connection(), _websocket(),
        *_decoders(), _exchange(),
    ]  # fmt: skip
