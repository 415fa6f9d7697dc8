"""Makes a call: connects, sends while it receives, and reports how the call ended."""

from __future__ import annotations

import math
import os
from contextlib import AsyncExitStack, aclosing
from socket import gaierror
from typing import Any, final

import trio

from gateway import client
from gateway.addresses import UNIX
from gateway.cli.call.plan import Call, CallWire, Kind
from gateway.cli.call.report import Report
from gateway.client import UpgradeRefused
from gateway.client.answers import Answer, BrokenOff, CallAnswer, EventsAnswer, PiecesAnswer, Refused, words_of
from gateway.client.conversations import Client, Conversation, SocketConversation
from gateway.errors import TransportLost
from gateway.net.transport import Transport
from protocols import v2
from protocols.aws import invoke
from protocols.aws.bidi import Completion
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import Headers, Opcode
from protocols.grpc.status import StatusCode

COMPLETE, FAILED, UNUSABLE, CUT_OFF, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 4, 130
"""Exit statuses; 2 is an invalid command line, or a file that cannot be read or written."""
_CONNECT = 10.0
_GOODBYE = 1.0


def run(call: Call, report: Report) -> int:
    """Makes the call and returns its exit status. Ctrl-C abandons the call, which cancels the model."""
    try:
        return trio.run(perform, call, report)
    except KeyboardInterrupt:
        return report.end("left", INTERRUPTED)
    except BaseExceptionGroup as group:
        if group.split(KeyboardInterrupt)[0] is not None:
            return report.end("left", INTERRUPTED)
        error, rest = group.split(OSError)
        if error is None or rest is not None:
            raise
        if isinstance(first := _first(error), BrokenPipeError):
            try:
                raise first from None  # the reader of the output has left; click handles that
            finally:
                del first
        return report.end(
            "failed", UNUSABLE, f"{getattr(first, 'filename', None) or 'a file'}: {getattr(first, 'strerror', first)}"
        )
    finally:
        report.close()


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


async def perform(call: Call, report: Report) -> int:
    """Makes the call inside a Trio run, and returns its exit status. If it is cancelled, the connection is closed."""
    with trio.move_on_after(call.timeout) as scope:
        return await _perform(call, report)
    assert scope.cancelled_caught
    return report.end("timeout", CUT_OFF, f"not over after {call.timeout:g} s (--timeout)")


async def _perform(call: Call, report: Report) -> int:
    server = call.server
    async with AsyncExitStack() as stack:
        try:
            with trio.fail_after(_CONNECT):
                transport = await stack.enter_async_context(client.connect(server.host, server.port, tls=server.tls))
        except (OSError, TransportLost, trio.TooSlowError) as e:
            reason = f"no answer within {_CONNECT:g} s" if isinstance(e, trio.TooSlowError) else _reason(e)
            return report.end("unreachable", UNREACHABLE, f"cannot connect to {_said(call)}: {reason}")
        if server.tls is not None and server.http2 and transport.alpn != "h2":
            return report.end("unreachable", UNREACHABLE, f"{_said(call)} does not speak HTTP/2 over TLS")
        try:
            if call.wire is CallWire.WEBSOCKET:
                return await _over_websocket(call, report, transport)
            return await _over_http(call, report, transport)
        except UpgradeRefused as e:
            report.head(e.status)
            return report.end("refused", FAILED, f"{e.status}: {words_of(e.body)}")
        except TransportLost as e:
            return report.end("cut off", CUT_OFF, f"cut off: {e}")
        except (RemoteProtocolError, v2.V2Error) as e:
            return report.end("cut off", CUT_OFF, f"cut off, or no answer of this wire: {e}")


def _said(call: Call) -> str:
    if call.server.host.startswith(UNIX):
        return call.server.host
    return f"{'https' if call.server.tls else 'http'}://{call.server.authority.decode()}"


def _reason(error: BaseException) -> str:
    """The reason of the last address that was tried."""
    cause = _first(error.__cause__) if isinstance(error, OSError) and error.__cause__ is not None else error
    if isinstance(cause, OSError) and cause.errno and not isinstance(cause, gaierror):
        return os.strerror(cause.errno)  # Trio's text repeats the address
    return str(getattr(cause, "strerror", None) or cause)


# ---- HTTP ----


async def _over_http(call: Call, report: Report, transport: Transport) -> int:
    server = call.server
    peer = client.http2(transport) if server.http2 else client.http1(transport)
    scheme = b"https" if server.tls else b"http"
    asking = Client(peer, authority=server.authority, scheme=scheme, prefix=server.prefix)
    conversation = asking.about(call.question)
    answer = await _answer(call, conversation, report)
    if call.instead is not None and conversation.said and _code_of(answer) is StatusCode.UNIMPLEMENTED:
        answer = await _answer(call, asking.about(call.instead), report)
    report.grpc_status = _code_of(answer)
    try:
        answer.check()
    except Refused as e:
        return report.end("refused", FAILED, str(e))
    except BrokenOff as e:
        return report.end("model-error", FAILED, str(e))
    return report.end("complete", COMPLETE)


def _code_of(answer: Answer) -> StatusCode | None:
    return answer.code if isinstance(answer, CallAnswer) else None


async def _answer(call: Call, conversation: Conversation, report: Report) -> Answer:
    """Sends and receives at the same time; returns the answer once it is over. An error of receiving is raised alone, once
    both have ended."""
    items = _Items(call, conversation.answer, report)
    wrong: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_say, call, conversation)
        try:
            while not conversation.answer.over:
                await conversation.step()
                items.take()
        except (TransportLost, RemoteProtocolError, v2.V2Error) as e:
            wrong = e
        nursery.cancel_scope.cancel()
    report.received = conversation.answer.received
    if wrong is not None:
        try:
            raise wrong
        finally:
            wrong = None
    return conversation.answer


async def _say(call: Call, conversation: Conversation) -> None:
    try:
        await conversation.begin()
        if call.question.body is not None:
            return
        async with aclosing(call.pieces()) as pieces:
            async for piece in pieces:
                await conversation.send(piece.data, last=piece.last, text=piece.text)
                await conversation.wait_room()
        await conversation.end()
    except (TransportLost, LocalProtocolError):
        pass  # the server has ended the stream or the connection: the receiver raises the reason


@final
class _Items:
    """Moves the messages of an answer to the report, so that none is kept."""

    def __init__(self, call: Call, answer: Answer, report: Report) -> None:
        self._call, self._answer, self._report = call, answer, report
        self._body: bytearray | None = None
        self._length: int | None = None

    def take(self) -> None:
        """Reports the messages that are new."""
        answer, report = self._answer, self._report
        if answer.status and report.status is None:
            report.head(answer.status)
            if isinstance(answer, PiecesAnswer | EventsAnswer):
                self._length = _binary_json(answer.headers)
                self._body = None if self._length is None else bytearray()
        messages = answer.messages[:]
        answer.messages.clear()
        report.received = answer.received
        states, texts = list[Completion | None](), list[bool]()
        if isinstance(answer, EventsAnswer):
            states, texts = answer.states[:], answer.texts[:]
            answer.states.clear()
            answer.texts.clear()
        for number, message in enumerate(messages):
            whole = not states or states[number] is not Completion.PARTIAL
            self._one(message, whole=whole, text=texts[number] if texts and self._call.wire is CallWire.BIDI else None)
        if answer.over and self._body is not None and not answer.error:
            report.tensors(v2.decode_infer_reply(((v2.IHCL, b"%d" % (self._length or 0)),), self._body))

    def _one(self, message: Any, *, whole: bool, text: bool | None) -> None:
        match message:
            case v2.V2Answer():
                self._report.tensors(message)
            case str():
                self._report.token(message)
            case dict():
                self._report.document(message)
            case _ if self._body is not None:
                self._body += message
            case _:
                parted = self._call.wire is CallWire.BIDI and self._call.kind is not Kind.TEXT
                self._report.part(message, line=parted and whole, text=text)


def _binary_json(headers: Headers) -> int | None:
    """The length in bytes of the JSON in a binary v2 body; None for any other body. For the parts of a response stream, the
    content type is in SageMaker's own field."""
    fields = dict(headers)
    content_type = fields.get(b"x-amzn-sagemaker-content-type") or fields.get(b"content-type", b"")
    try:
        return invoke.json_header_size(content_type.decode("latin-1"))
    except invoke.InvokeInputError as e:
        raise RemoteProtocolError(str(e)) from None


# ---- WebSocket ----


async def _over_websocket(call: Call, report: Report, transport: Transport) -> int:
    server = call.server
    peer = await client.websocket(
        transport, server.prefix + call.question.path, authority=server.authority, headers=call.question.headers
    )
    report.head(101)
    socket = SocketConversation(peer)
    silence = trio.CancelScope()
    wrong: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_talk, call, socket, silence)
        try:
            await _listen(call, report, socket, silence)
        except (TransportLost, RemoteProtocolError) as e:
            wrong = e
        nursery.cancel_scope.cancel()
    if wrong is not None:
        try:
            raise wrong
        finally:
            wrong = None
    if socket.code is None:
        await _goodbye(socket)
        if silence.cancelled_caught:
            said = (
                f"left after {call.quiet:g} s of silence (--quiet): the server has not closed, its answer may not be whole"
            )
            return report.end("timeout", CUT_OFF, said)
        return report.end("complete", COMPLETE)
    said = f"{socket.code}: {socket.reason}" if socket.reason else str(socket.code)
    if socket.code == 1000:
        return report.end("complete", COMPLETE)
    if socket.code == 1001:
        return report.end("cut off", CUT_OFF, f"the server closed, {said}")
    return report.end("model-error", FAILED, f"the server closed, {said}")


async def _listen(call: Call, report: Report, socket: SocketConversation, silence: trio.CancelScope) -> None:
    """Receives until the server closes. If the server names no end of input, returns once it has answered every text, or has
    been silent for `quiet` seconds after the last input."""
    answered, text = 0, False
    with silence:
        while (frame := await socket.receive_frame()) is not None:
            if silence.deadline < math.inf:
                silence.deadline = trio.current_time() + call.quiet
            report.received += len(frame.data)
            text = frame.opcode is Opcode.TEXT or (text and frame.opcode is Opcode.CONTINUATION)
            if frame.data or call.kind is not Kind.TEXT:
                report.part(bytes(frame.data), line=frame.fin and call.kind is not Kind.TEXT, text=text)
                continue
            # An empty frame ends an answer of a text model.
            answered += 1
            if answered == call.texts and not socket.can_end:
                return


async def _talk(call: Call, socket: SocketConversation, silence: trio.CancelScope) -> None:
    begun = False
    try:
        async with aclosing(call.pieces()) as pieces:
            async for piece in pieces:
                opcode = Opcode.CONTINUATION if begun else Opcode.TEXT if piece.text else Opcode.BINARY
                await socket.send_frame(opcode, piece.data, fin=piece.last)
                begun = not piece.last
        if socket.can_end:
            await socket.end()
            return
    except (TransportLost, LocalProtocolError):
        return  # the receiver raises the reason
    silence.deadline = trio.current_time() + call.quiet


async def _goodbye(socket: SocketConversation) -> None:
    with trio.move_on_after(_GOODBYE):
        try:
            await socket.close()
            while await socket.receive_frame() is not None:
                pass
        except (TransportLost, RemoteProtocolError, LocalProtocolError):
            pass
