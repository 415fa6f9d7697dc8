"""The client has ended its input, and its container still has something to say: every shape of container, every pause."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from gateway.client import Peer
from gateway.config import BidiConfig, Config
from gateway.containers.connection import ContainerLimits
from gateway.containers.model import container_spec
from gateway.errors import BadRequest
from gateway.net.transport import Transport
from gateway.testing import MemoryGateway, memory_gateway
from models.errors import ModelError
from models.messages import Family, Part, PartKind, Prompt
from models.session import Session
from models.spec import Model, ModelSpec
from protocols.events import Close, ConnectionEnd, Data, End, Frame, Head, Opcode, Ping, Request, Response
from protocols.http1.connection import HTTP1Connection
from protocols.roles import Role
from protocols.websocket.connection import WebSocketConnection
from protocols.websocket.handshake import END_OF_INPUT, accept_headers, request_headers
from tests.gateway.containers.containers import Client, Containers, Script, Serve, binary, containers, part, text, websocket
from tests.gateway.promises import bridge_to

PAUSES = [0.5, 1.5, 10.0, 59.0, 100.0, 1700.0]
"""Seconds before an answer; the last one is just below what a session may last."""
FOREVER = math.inf


async def events(peer: Peer) -> Any:
    """The container's next event that is no Ping, as its library has it: Pings and Close are answered by themselves."""
    while isinstance(event := await peer.next_event(), Ping):
        await peer.flush()
    await peer.flush()
    return event


async def failure(found: Containers, client: Client) -> ModelError:
    with pytest.raises(ModelError) as raised:
        await found.call(client)
    assert found.all_closed
    return raised.value


# -- containers that close their sessions themselves -----------------------------------------------------------------


def closing(*pauses: float, close: Close | None = None) -> Script:
    """Takes one message and answers it in as many parts as there are pauses, each after one; then says Close."""

    async def script(peer: Peer) -> None:
        assert isinstance(await events(peer), Frame)
        for number, pause in enumerate(pauses):
            await pausing(peer, pause)
            await peer.send(text(b"%d" % number))
        await peer.send(close or Close())
        assert isinstance(await events(peer), Close | ConnectionEnd)

    return script


async def pausing(peer: Peer, seconds: float) -> None:
    """Thinks, while the library answers Pings. A Close that comes meanwhile is answered by the library too, and then
    nothing can be sent: the answer is lost."""
    with trio.move_on_after(seconds):
        while True:
            event = await peer.next_event()
            await peer.flush()
            if isinstance(event, Close | ConnectionEnd):
                raise trio.BrokenResourceError("the session is closed")


@pytest.mark.parametrize("pause", PAUSES)
async def test_an_answer_arrives_whatever_time_it_takes(pause: float, autojump_clock: MockClock) -> None:
    client = Client(part(b"question"))
    async with containers(websocket(closing(pause)), quiet=FOREVER) as found:
        await found.call(client)
    assert [p.data for p in client.sent] == [b"0"]
    assert trio.current_time() == pytest.approx(pause)


@pytest.mark.parametrize("pause", PAUSES)
async def test_an_answer_in_parts_arrives_whatever_pauses_are_between_them(pause: float, autojump_clock: MockClock) -> None:
    client = Client(part(b"question"))
    async with containers(websocket(closing(0.1, pause, 0.1, pause)), quiet=FOREVER) as found:
        await found.call(client)
    assert [p.data for p in client.sent] == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("pause", [0.5, 100.0])
@pytest.mark.parametrize("code", [1001, 1011, 4000])
async def test_a_close_that_tells_of_a_failure_is_one_after_every_part(
    pause: float, code: int, autojump_clock: MockClock
) -> None:
    client = Client(part(b"question"))
    script = closing(0.1, pause, close=Close(code=code, reason="no more"))
    async with containers(websocket(script), quiet=FOREVER) as found:
        error = await failure(found, client)
    assert (error.code, error.message) == (str(code), "no more")
    assert [p.data for p in client.sent] == [b"0", b"1"]


@pytest.mark.parametrize("pause", [0.5, 100.0])
async def test_a_container_that_dies_while_it_thinks_is_a_broken_stream(pause: float, autojump_clock: MockClock) -> None:
    async def dies(peer: Peer) -> None:
        await events(peer)
        await peer.send(text(b"hm"))
        await pausing(peer, pause)

    client = Client(part(b"question"))
    async with containers(websocket(dies), quiet=FOREVER) as found:
        error = await failure(found, client)
    assert error.code == "StreamBroken"
    assert [p.data for p in client.sent] == [b"hm"]


async def test_a_container_that_has_answered_before_the_input_ended_and_closes_is_complete(
    autojump_clock: MockClock,
) -> None:
    client = Client(part(b"question"), ended=False)
    async with containers(websocket(closing(0.1)), quiet=FOREVER) as found, trio.open_nursery() as nursery:
        nursery.start_soon(found.call, client)
        await trio.sleep(1)
        client.end()
    assert [p.data for p in client.sent] == [b"0"]


@pytest.mark.parametrize("ended", [False, True])
async def test_a_close_in_the_middle_of_a_message_is_no_good_end(ended: bool) -> None:
    async def half(peer: Peer) -> None:
        await events(peer)
        await peer.send(text(b"ha", fin=False), Close())
        await peer.next_event()

    client = Client(part(b"question"), ended=ended)
    async with containers(websocket(half), quiet=FOREVER) as found:
        error = await failure(found, client)
    assert error.message == "the container at container:8080 closed the session in the middle of a message"
    assert [(p.data, p.last) for p in client.sent] == [(b"ha", False)]


# -- containers that name an end of their input ----------------------------------------------------------------------


def told(name: bytes | None, pause: float, heard: list[bytes]) -> Serve:
    """A container that answers each message after a pause, until it is told of the end: by the text that it names, or by
    the one that it was offered."""

    async def serve(transport: Transport) -> None:
        peer = Peer(transport, HTTP1Connection(Role.SERVER))
        request = await peer.next_event()
        assert isinstance(request, Request)
        end = name or dict(request.head.headers)[END_OF_INPUT]
        headers = [*accept_headers(request.head), (END_OF_INPUT, end)]
        await peer.send(Response(stream=1, status=101, headers=headers))
        assert isinstance(peer.machine, HTTP1Connection)
        machine = WebSocketConnection(Role.SERVER)
        machine.receive_data(peer.machine.switch())
        peer, left = Peer(transport, machine), []
        while isinstance(event := await events(peer), Frame):
            left.append(bytes(event.data))
            if event.data == end:
                break
        heard.extend(left)
        for message in left[:-1]:
            await pausing(peer, pause)
            await peer.send(text(message.upper()))
        await peer.send(Close())
        await peer.next_event()

    return serve


@pytest.mark.parametrize("name", [None, b"CloseStream", b'{"type": "end"}'])
@pytest.mark.parametrize("pause", PAUSES)
async def test_a_container_that_names_an_end_of_input_is_told_and_answers_in_its_time(
    name: bytes | None, pause: float, autojump_clock: MockClock
) -> None:
    client, heard = Client(part(b"a"), part(b"b")), list[bytes]()
    async with containers(told(name, pause, heard), quiet=FOREVER) as found:
        await found.call(client)
    assert [p.data for p in client.sent] == [b"A", b"B"]
    assert heard[:2] == [b"a", b"b"]
    assert len(heard) == 3
    assert trio.current_time() == pytest.approx(2 * pause)


async def test_the_end_of_input_waits_for_no_silence_and_sends_no_close(autojump_clock: MockClock) -> None:
    """`half_close_quiet` is for containers that name no end."""
    client, heard = Client(part(b"a")), list[bytes]()
    async with containers(told(b"bye", 30, heard), quiet=1) as found:
        await found.call(client)
    assert [p.data for p in client.sent] == [b"A"]
    assert heard == [b"a", b"bye"]


async def test_a_container_that_names_an_end_cannot_be_told_in_the_middle_of_a_message() -> None:
    client = Client(part(b"a", last=False))
    async with containers(told(b"bye", 0.1, []), quiet=FOREVER) as found:
        with pytest.raises(BadRequest, match="the input ended in the middle of a message"):
            await found.call(client)
        assert found.all_closed


@pytest.mark.parametrize("value", [b"", b"caf\xe9", b"x" * 257, b"a\tb"])
async def test_a_name_that_no_text_message_should_have_breaks_the_handshake(value: bytes) -> None:
    async with containers(websocket(closing(), headers=[(END_OF_INPUT, value)]), quiet=FOREVER) as found:
        error = await failure(found, Client(part(b"a")))
    assert (error.code, error.status) == ("HandshakeFailed", 502)
    assert "x-everywire-end-of-input: expected 1 to 256 characters of visible ASCII" in error.message


@asynccontextmanager
async def nobody() -> AsyncIterator[Model]:
    """A loader for a spec that is only asked for its numbers."""
    raise AssertionError("never loaded")
    yield


# -- this gateway as the container -----------------------------------------------------------------------------------


async def parts(session: Session[Part, Part]) -> None:
    """Takes all, thinks, and answers in two parts with a pause between."""
    heard = b"".join([bytes(part.data) async for part in session])
    for half in (heard[: len(heard) // 2], heard[len(heard) // 2 :]):
        await trio.sleep(float(session.call.query.partition("=")[2] or "10"))
        await session.send(Part(data=half.upper(), kind=PartKind.UTF8))


async def words(prompt: Prompt) -> str:
    await trio.sleep(10)
    return prompt.text.upper()


@pytest.mark.parametrize("model", [parts, words])
async def test_this_gateway_behind_its_own_emulator_answers_in_its_time(model: Any, autojump_clock: MockClock) -> None:
    async with memory_gateway([model]) as container:
        far = bridge_to(container, ModelSpec(name="far", family=Family.PARTS, load=nobody))
        async with memory_gateway([far]) as front:
            conversation = await front.client("http2").bidi("far")
            for _ in range(2):
                await conversation.send(b"word", text=True)
            await conversation.end()
            answer = await conversation.rest()
            await front.check_nothing_left()
    assert answer.error == ""
    assert b"".join(answer.messages) == b"WORDWORD"


# -- containers that do neither --------------------------------------------------------------------------------------


async def loops(peer: Peer) -> None:
    """Answers each message at once, and ends when it is closed, as most containers do."""
    while isinstance(event := await events(peer), Frame):
        await peer.send(text(bytes(event.data).upper()))


async def never(peer: Peer) -> None:
    """Answers nothing but Pings."""
    while isinstance(await events(peer), Frame):
        pass


def with_ping(script: Script) -> Serve:
    """A whole container: its /ping answers 200."""

    async def serve(transport: Transport) -> None:
        peer = Peer(transport, HTTP1Connection(Role.SERVER))
        request = await peer.next_event()
        assert isinstance(request, Request)
        if request.head.target == b"/ping":
            await peer.send(Response(stream=1, status=200, headers=[(b"content-length", b"0")]), End(stream=1))
            return
        await peer.send(Response(stream=1, status=101, headers=accept_headers(request.head)))
        assert isinstance(peer.machine, HTTP1Connection)
        machine = WebSocketConnection(Role.SERVER)
        machine.receive_data(peer.machine.switch())
        await script(Peer(transport, machine))

    return serve


@pytest.mark.parametrize(
    ("script", "said", "words"),
    [
        (never, [], "has sent nothing since the client's last part"),
        (loops, [b"A", b"B"], "has not closed the session since the client ended its input"),
    ],
)
@pytest.mark.parametrize(
    ("setting", "limit"),
    [("session_timeout", "the session's 90 s are over"), ("idle_timeout", "no part in either direction for 90 s")],
)
async def test_a_container_that_never_ends_is_an_error_that_names_it_when_the_time_is_over(
    script: Script, said: list[bytes], words: str, setting: str, limit: str, autojump_clock: MockClock
) -> None:
    config = Config(bidi=BidiConfig(**{setting: 90}))
    async with containers(with_ping(script), ContainerLimits(health_interval=0), quiet=FOREVER) as found:
        spec = container_spec("ws://container:8080", name="far", limits=found.container.limits, dial=found.dial)
        async with memory_gateway([spec], config) as front:
            conversation = await front.client("http2").bidi("far")
            await conversation.send(b"a")
            await conversation.send(b"b")
            await conversation.end()
            answer = await conversation.rest()
            await front.check_nothing_left()
    assert [bytes(m) for m in answer.messages] == said
    assert answer.error.startswith(f"{limit} (bidi.{setting}): the container at container:8080 {words}; let it say Close")
    assert "X-Everywire-End-Of-Input" in answer.error
    assert "half_close_quiet" in answer.error


async def test_the_log_says_for_whom_a_session_waits(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway.bridge")
    async with containers(websocket(closing(60.0)), quiet=FOREVER) as found:
        await found.call(Client(part(b"a")), id="r-1")
    (record,) = [r for r in caplog.records if "waiting for its Close" in r.message]
    assert (record.__dict__["container"], record.__dict__["session"]) == ("container:8080", "r-1")


# -- a silence that the operator configured --------------------------------------------------------------------------


async def test_a_silence_that_was_too_short_is_an_error_and_no_good_end(autojump_clock: MockClock) -> None:
    client = Client(part(b"question"))

    async def thinks(peer: Peer) -> None:
        await events(peer)
        await pausing(peer, 10)

    async with containers(websocket(broken_by_close(thinks)), quiet=1) as found:
        error = await failure(found, client)
    assert (error.code, error.status, client.sent) == ("StreamBroken", 504, [])
    assert error.message.startswith("the container at container:8080 sent nothing after the client's last part")
    for remedy in ("1 s (half_close_quiet)", "say Close", "X-Everywire-End-Of-Input", "a longer half_close_quiet"):
        assert remedy in error.message


def broken_by_close(script: Script) -> Script:
    async def run(peer: Peer) -> None:
        with suppress(trio.BrokenResourceError):
            await script(peer)

    return run


async def test_a_silence_that_was_long_enough_is_a_good_end(autojump_clock: MockClock) -> None:
    client = Client(part(b"a"), part(b"b"))
    async with containers(websocket(loops), quiet=1) as found:
        await found.call(client)
    assert [p.data for p in client.sent] == [b"A", b"B"]
    assert trio.current_time() == pytest.approx(1)


async def test_what_was_said_before_the_last_part_is_no_answer_to_it(autojump_clock: MockClock) -> None:
    client = Client(part(b"a"), ended=False)

    async def first_only(peer: Peer) -> None:
        await events(peer)
        await peer.send(text(b"A"))
        await never(peer)

    async def talk() -> None:
        await trio.sleep(1)
        client.feed(part(b"b"))
        client.end()

    async with containers(websocket(first_only), quiet=5) as found, trio.open_nursery() as nursery:
        nursery.start_soon(talk)
        error = await failure(found, client)
    assert "sent nothing after the client's last part" in error.message
    assert [p.data for p in client.sent] == [b"A"]


async def test_a_message_that_our_close_has_cut_is_an_error(autojump_clock: MockClock) -> None:
    async def begins(peer: Peer) -> None:
        await events(peer)
        await peer.send(binary(b"half", fin=False))
        await pausing(peer, 100)

    async with containers(websocket(broken_by_close(begins)), quiet=5) as found:
        error = await failure(found, Client(part(b"a")))
    assert error.message == "the container at container:8080 closed the session in the middle of a message"


async def test_a_client_that_has_said_nothing_is_owed_nothing(autojump_clock: MockClock) -> None:
    async with containers(websocket(never), quiet=1) as found:
        await found.call(Client())


async def test_a_container_that_answers_behind_our_close_is_heard(autojump_clock: MockClock) -> None:
    """Takes a Close in its turn: `half_close_quiet = 0` is for such a container."""
    client = Client(part(b"a"))

    async def in_turn(peer: Peer) -> None:
        await events(peer)
        assert isinstance(await peer.next_event(), Close)
        await trio.sleep(50)
        peer.transport.try_send([b"\x81\x01A"])  # our machine has its Close ready: this goes before it
        await peer.flush()

    async with containers(websocket(in_turn), quiet=0) as found:
        await found.call(client)
    assert [p.data for p in client.sent] == [b"A"]


async def test_a_container_that_answers_no_close_is_named(autojump_clock: MockClock) -> None:
    async def deaf(peer: Peer) -> None:
        await events(peer)
        await trio.sleep_forever()

    async with containers(websocket(deaf), quiet=1) as found:
        error = await failure(found, Client(part(b"a")))
    assert error.message == (
        "the container at container:8080 sent neither frames nor its Close for 60 s after ours (half_close_timeout)"
    )


# -- the container's side, by itself ---------------------------------------------------------------------------------


async def listed(session: Session[Part, Part]) -> None:
    """Says what it was given once there is no more."""
    given = [bytes(part.data).decode() async for part in session]
    with pytest.raises(trio.EndOfChannel):
        await session.receive()  # again and again
    await session.send(Part(data=json.dumps(given).encode(), kind=PartKind.UTF8))


async def test_a_client_that_offers_an_end_of_input_can_end_it_and_hear_the_answer() -> None:
    async with memory_gateway([listed]) as served:
        socket = await served.conversation("listed")
        assert socket.can_end
        await socket.send("one")
        await socket.send(b"two")
        await socket.end()
        assert json.loads(await socket.receive() or b"") == ["one", "two"]
        assert await socket.receive() is None
        assert socket.code == 1000
        await served.check_nothing_left()


async def test_the_text_is_the_end_only_as_a_whole_message_of_text() -> None:
    """The text as bytes, in fragments, or within a longer one is a part like any other."""
    async with memory_gateway([listed]) as served:
        socket = await served.conversation("listed")
        end = socket.peer.end_of_input or b""
        await socket.send(end)
        await socket.peer.send(text(end[:5], fin=False), Frame(opcode=Opcode.CONTINUATION, fin=True, data=end[5:]))
        await socket.send(end.decode() + " ")
        await socket.end()
        given = json.loads(await socket.receive() or b"")
    whole = end.decode()
    assert given == [whole, whole[:5], whole[5:], whole + " "]


async def handshake(served: MemoryGateway, *fields: tuple[bytes, bytes]) -> tuple[Peer, Response]:
    """A client of any library's, and the answer to its handshake."""
    peer = served.http1()
    request = Request(
        stream=1,
        head=Head(
            method=b"GET",
            target=b"/models/listed/invocations-bidirectional-stream",
            authority=b"localhost",
            headers=[*request_headers(bytes(16)), *fields],
        ),
    )
    await peer.send(request, End(stream=1))
    answer = await peer.next_event()
    assert isinstance(answer, Response)
    return peer, answer


async def test_a_client_that_offers_no_end_of_input_is_named_none() -> None:
    async with memory_gateway([listed]) as served:
        _, answer = await handshake(served)
        assert answer.status == 101
        assert END_OF_INPUT not in dict(answer.headers)


@pytest.mark.parametrize("values", [[b"x" * 257], [b"a", b"b"], [b"caf\xe9"]])
async def test_an_offer_that_is_no_text_is_refused_by_name(values: list[bytes]) -> None:
    async with memory_gateway([listed]) as served:
        peer, answer = await handshake(served, *((END_OF_INPUT, value) for value in values))
        assert answer.status == 400
        body = await peer.next_event()
        assert isinstance(body, Data)
        assert bytes(body.buffers[0]).startswith(b"x-everywire-end-of-input: expected")
