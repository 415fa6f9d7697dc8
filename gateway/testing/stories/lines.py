"""The connections of a simulation, and the calls on them: each keeps to its plan."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, final

import msgspec
import numpy as np
import trio

from gateway import client
from gateway.client import Peer
from gateway.client.answers import Answer
from gateway.client.questions import Question
from gateway.errors import TransportLost
from gateway.net.transport import MemoryTransport
from gateway.testing.network import Link
from gateway.testing.stories.clients import Broken, Hearing, Socket, Streams, ask, read_http1, viewed, write
from gateway.testing.stories.models import CHAT, END, PlannedTalk
from gateway.testing.stories.plan import LinePlan
from gateway.testing.stories.talk import Deceit, Form, Leave, View
from protocols.aws import bidi
from protocols.errors import LocalProtocolError
from protocols.events import Buffer, Close, Frame, Request
from protocols.http1.connection import HTTP1Connection
from protocols.http2.connection import HTTP2Connection
from protocols.websocket.connection import WebSocketConnection


class HeardPieces(Answer):
    """A body whose pieces are heard as they come."""

    def _read(self, data: Buffer) -> None:
        self.messages.append(bytes(data))


@final
class PlannedHearing(Hearing):
    """A client that may hear no more after so many messages."""

    def __init__(self, talk: PlannedTalk, answer: Answer) -> None:
        super().__init__(talk, answer, talk.plan.pace or None)
        self._planned = talk

    async def piece(self, data: Buffer) -> None:
        self._planned.received += 1
        await super().piece(data)
        if self._planned.taken.data:
            await self._enough()

    async def frame(self, frame: Frame) -> None:
        await super().frame(frame)
        await self._enough()

    async def _enough(self) -> None:
        talk = self._planned
        if talk.plan.silent_after is not None and self.count >= talk.plan.silent_after:
            talk.tell(f"{talk.name} is silent")
            await trio.sleep_forever()


@final
class Line:
    """One connection of a client, and the calls on it."""

    def __init__(
        self,
        plan: LinePlan,
        talks: list[PlannedTalk],
        transport: MemoryTransport,
        link: Link | None,
        seed: int,
        survived: Callable[[Line, HTTP2Connection], None],
    ) -> None:
        """`survived` is called with an idle HTTP/2 connection right before its client closes it."""
        self.plan, self.talks, self.link, self._transport, self._survived = plan, talks, link, transport, survived
        self._garbage = random.Random(f"{plan.name} {seed}").randbytes(60)
        self._nursery: trio.Nursery
        self._peer: Peer
        self._streams: Streams
        self._numbers: dict[PlannedTalk, int] = {}
        """The streams of the calls that have begun."""
        self.left = False
        """True once a client has closed or reset the connection, or has sent garbage."""

    @property
    def disturbed(self) -> bool:
        """True if a client or the network has disturbed the whole connection."""
        return self.left or (self.link is not None and self.link.disturbed)

    async def run(self) -> None:
        """Makes all calls of the connection, and then closes it."""
        async with trio.open_nursery() as self._nursery:
            match self.plan.transport:
                case "http1":
                    await self._over_http1()
                case "http2":
                    await self._over_http2()
                case _:
                    await self._over_websocket(self.talks[0])
            for talk in self.talks:
                talk.unopened |= talk.view is View.PENDING
            self._transport.close()
            self._nursery.cancel_scope.cancel()

    # -- all transports ----------------------------------------------------------------------------------------------

    async def _play(self, talk: PlannedTalk, reading: Any, *writing: Any) -> None:
        """Reads while it writes, until the answer is over, the client leaves, or its patience is over."""
        plan = talk.plan
        with trio.move_on_after(plan.patience):
            async with trio.open_nursery() as nursery:
                for write in writing:
                    nursery.start_soon(self._written, write)
                if plan.leave_after is not None:
                    nursery.start_soon(self._end_after, nursery, plan.leave_after)
                if plan.deceit is Deceit.GARBAGE:
                    nursery.start_soon(self._garble, talk)
                talk.view = await viewed(reading, self._unreadable(talk.name))
                nursery.cancel_scope.cancel()
        talk.tell(f"{talk.name} sees {talk.view.value}")
        if talk.view is View.PENDING:
            await self._leave(talk)

    async def _end_after(self, nursery: trio.Nursery, seconds: float) -> None:
        await trio.sleep(seconds)
        nursery.cancel_scope.cancel()

    async def _written(self, write: Callable[[], Any]) -> None:
        try:
            await write()
        except TransportLost:
            return
        except LocalProtocolError:
            return  # the answer is over, or the connection: the reader sees which

    def _unreadable(self, who: str) -> Broken:
        return lambda e: self.talks[0].report(f"2: {who}: the client cannot read what it is sent: {e}")

    async def _garble(self, talk: PlannedTalk) -> None:
        await trio.sleep(talk.plan.pause)
        self.left = True
        for each in self.talks:
            each.garbled = True
        talk.tell(f"{talk.name} garbles")
        with suppress(TransportLost):
            self._transport.try_send([self._garbage])

    async def _leave(self, talk: PlannedTalk) -> None:
        talk.left, talk.gave_up = True, talk.plan.leave_after is None
        how = talk.plan.leave
        talk.tell(f"{talk.name} leaves: {how.value}")
        if how is Leave.STREAM and self.plan.transport == "http1":
            how = Leave.CLOSE
        if self.plan.transport == "http2" and talk.plan.leave_after is None:
            how = Leave.STREAM  # it gave up, and its neighbours did not
        match how:
            case Leave.STREAM:
                self._leave_stream(talk)
                return
            case Leave.RESET:
                self._transport.reset()
            case Leave.HALF:
                self._transport.send_eof()
                with trio.move_on_after(3):
                    if self.plan.transport != "http2":  # there one task reads for all
                        await self._drained()
                    await trio.sleep_forever()
                self._transport.close()
            case Leave.CLOSE:
                self._transport.close()
        self.left = True
        for other in self.talks:
            other.left = True

    def _leave_stream(self, talk: PlannedTalk) -> None:
        machine = self._peer.machine
        with suppress(LocalProtocolError):
            if isinstance(machine, WebSocketConnection):
                if machine.is_open:
                    machine.send(Close())
            elif talk in self._numbers:
                self._streams.reset(self._numbers[talk])
        self._nursery.start_soon(self._flushed)

    async def _flushed(self) -> None:
        with suppress(TransportLost):
            await self._peer.flush()

    async def _drained(self) -> None:
        """Drops all received bytes until the connection ends."""
        buffer = memoryview(bytearray(4096))
        with suppress(TransportLost):
            while (n := self._transport.try_receive_into(buffer)) != 0:
                if n is None:
                    await self._transport.wait_readable()

    # -- HTTP/1.1 ------------------------------------------------------------------------------------------------------

    async def _over_http1(self) -> None:
        self._peer = peer = client.http1(self._transport)
        machine = peer.machine
        assert isinstance(machine, HTTP1Connection)
        for stream, talk in enumerate(self.talks, 1):
            await trio.sleep(talk.plan.start)
            if self.left or (stream > 1 and (not machine.idle or machine.must_close)):
                return
            question = _question(talk)
            reading = partial(read_http1, peer, PlannedHearing(talk, question.answer()))
            await self._play(talk, reading, partial(self._write, talk, stream, question))

    async def _write(self, talk: PlannedTalk, stream: int, question: Question) -> None:
        await self._peer.send(_head(talk, stream, question, expects=True))
        await write(self._peer, stream, partial(_pieces, talk, question))

    # -- HTTP/2 --------------------------------------------------------------------------------------------------------

    async def _over_http2(self) -> None:
        self._streams = Streams(self._transport, self.plan.window, self._unreadable(self.plan.name))
        self._peer, machine = self._streams.peer, self._streams.machine
        self._nursery.start_soon(self._streams.deal)
        async with trio.open_nursery() as nursery:
            for talk in self.talks:
                nursery.start_soon(self._on_stream, talk)
        if not self.left and machine.can_open:
            await trio.sleep(0.001 if self.link is None else 1.0)  # afterwards all other tasks wait
            said = not self._peer._rest  # bytes that wait to be written no longer count in a window
            if said and not self.disturbed and machine.can_open and (self.link is None or self.link.idle):
                self._survived(self, machine)

    async def _on_stream(self, talk: PlannedTalk) -> None:
        await trio.sleep(talk.plan.start)
        peer, machine = self._peer, self._streams.machine
        if self.left or not machine.can_open:
            return
        question = _question(talk)
        stream, inbox = self._streams.open()
        self._numbers[talk] = stream
        try:
            machine.send(_head(talk, stream, question))
        except LocalProtocolError:
            self._streams.forget(stream)
            return

        async def writing() -> None:
            await peer.flush()
            await write(peer, stream, partial(_pieces, talk, question))

        hearing = PlannedHearing(talk, question.answer())
        await self._play(talk, partial(self._streams.read, inbox, hearing), writing)

    # -- WebSocket -----------------------------------------------------------------------------------------------------

    async def _over_websocket(self, talk: PlannedTalk) -> None:
        plan = talk.plan
        await trio.sleep(plan.start)
        model = "nobody" if plan.deceit is Deceit.MODEL else plan.model
        path = ask(Form.SOCKET, model).path + talk.query
        self._peer = client.http1(self._transport)
        began = trio.current_time()
        socket: Socket | None = None
        with trio.move_on_after(min(plan.patience, math.inf if plan.leave_after is None else plan.leave_after)) as scope:
            socket = await Socket.open(talk, self._transport, path)
        if scope.cancelled_caught:
            talk.left = self.left = True
            self._transport.close()
        if socket is None:
            return
        if plan.leave_after is not None:
            talk.plan = replace(plan, leave_after=max(0.0, plan.leave_after - (trio.current_time() - began)))
        self._peer = socket.peer
        reading = partial(socket.read, PlannedHearing(talk, Answer()))
        await self._play(talk, reading, partial(socket.write, talk, _parts(talk), plan.pause))


# -- requests ----------------------------------------------------------------------------------------------------------


def _question(talk: PlannedTalk) -> Question:
    plan = talk.plan
    model = "nobody" if plan.deceit is Deceit.MODEL else plan.model
    body = plan.name.encode().ljust(plan.size, b".")
    question = ask(plan.form, model, text=plan.name, tokens=max(plan.messages, 1), tensor=_array(talk), body=body)
    if plan.form is Form.INVOKE:
        question = replace(question, answer=HeardPieces)
    path = f"{question.path}{talk.query}"
    if plan.form is Form.BIDI:
        query = (bidi.MODEL_QUERY_STRING.encode(), talk.query[1:].encode())
        return replace(question, path=path, headers=(*question.headers, query))
    return replace(question, path=path)


def _array(talk: PlannedTalk) -> Any:
    return np.arange(1 + talk.plan.size, dtype=np.int32) + sum(talk.name.encode())


def _asked(talk: PlannedTalk, question: Question) -> bytes:
    """The request as its model will have it."""
    plan = talk.plan
    match plan.form.kind:
        case "text":
            return plan.name.join(CHAT if plan.form is Form.OPENAI else ("", "")).encode()
        case "tensor":
            return bytes(_array(talk).tobytes())
        case _:
            return question.body or b""


def _head(talk: PlannedTalk, stream: int, question: Question, *, expects: bool = False) -> Request:
    body = None if talk.plan.chunked else question.body
    (request, *_) = client.post(stream, question.path, body, question.headers, declares=question.declares)
    assert isinstance(request, Request)
    head = msgspec.structs.replace(request.head, expects_continue=expects and talk.plan.chunked)
    return Request(stream=stream, head=head)


async def _pieces(talk: PlannedTalk, question: Question) -> AsyncGenerator[bytes, None]:
    """The body, in the client's own time."""
    plan, body = talk.plan, question.body
    if body is None:
        for data, last in _parts(talk):
            if plan.pause:
                await trio.sleep(plan.pause)
            talk.ask(talk.kept(data, last))
            state = bidi.Completion.COMPLETE if last else bidi.Completion.PARTIAL
            event = b"".join(bidi.encode_request_part(data, bidi.DataType.BINARY, state, date_ms=0))
            if plan.deceit is Deceit.BODY:
                event = event[:-1] + bytes((event[-1] ^ 1,))
            half = len(event) // 2
            yield event[:half]
            yield event[half:]
        yield b"".join(bidi.encode_request_end(date_ms=0))
        return
    if plan.deceit is Deceit.BODY and plan.form.kind != "parts":
        body = b"{" * len(body)
    else:
        talk.ask(_asked(talk, question))
    step = max(1, len(body) // 3)
    for at in range(0, len(body), step):
        if plan.pause:
            await trio.sleep(plan.pause)
        yield body[at : at + step]


def _parts(talk: PlannedTalk) -> list[tuple[bytes, bool]]:
    """Returns the parts that a duplex client sends: every third ends a message, the others are continued. The last one is
    END."""
    plan = talk.plan
    parts = [(f"{i:04d}".encode().ljust(plan.size, b"."), i % 3 == 2) for i in range(plan.messages)]
    return [*parts, (END, True)]
