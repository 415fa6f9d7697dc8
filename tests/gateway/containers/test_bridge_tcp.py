"""The bridge over loopback: real sockets, TLS, and a container written with another library."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio_websocket
from trio.testing import wait_all_tasks_blocked

from gateway.client import Peer
from gateway.config import TLSConfig
from gateway.config.problem import ConfigError
from gateway.containers.connection import Container, ContainerLimits, container_address, dialler
from gateway.containers.model import Bridge, container_spec
from gateway.errors import TransportLost
from gateway.net.tls_context import development_certificate, server_context
from gateway.net.tls_transport import TLSTransport
from gateway.net.transport import SocketTransport
from models.errors import ModelError
from models.messages import Part, PartKind
from models.session import Call, Session
from protocols.events import Frame, Opcode
from tests.gateway.containers.containers import Client, Serve, echo, http, part, told, websocket

UTF8, BINARY = PartKind.UTF8, PartKind.BINARY
OK = http((200, [(b"content-length", b"0")], []))


async def serving(nursery: trio.Nursery, *serve: Serve, tls: ssl.SSLContext | None = None) -> int:
    """A container on a port of its own, which does another thing with each connection, and the last again and again."""
    left = list(serve)

    async def handle(stream: trio.SocketStream) -> None:
        act = left.pop(0) if len(left) > 1 else left[0]
        transport: Any = SocketTransport(socket.socket(fileno=stream.socket.detach()))
        try:
            with suppress(TransportLost):
                if tls is not None:
                    transport = TLSTransport(transport, tls)
                    await transport.handshake()
                await act(transport)
        finally:
            transport.close()

    listeners = await nursery.start(partial(trio.serve_tcp, handle, 0, host="127.0.0.1"))
    return int(listeners[0].socket.getsockname()[1])


async def call(url: str, client: Client, *, ca: str = "", limits: ContainerLimits | None = None, **how: Any) -> None:
    """One session with the container there, whose health nobody asks for."""
    address, limits = container_address(url), limits or ContainerLimits(half_close_quiet=0)
    with trio.fail_after(60):
        await Bridge(Container(address, limits, dialler(address, limits, ca=ca)))(Session(client, Call(**how)))


class Steady(Client):
    """A client that ends its input when it has as many answers as it has sent parts."""

    def __init__(self, *parts: Part, room: float = float("inf")) -> None:
        super().__init__(*parts, ended=False, room=room)
        self._expected = len(parts)

    async def send(self, message: Any, /) -> None:
        await super().send(message)
        if len(self.sent) == self._expected:
            self.end()


async def test_a_model_at_an_address_loads_and_passes_parts_both_ways() -> None:
    client = Client(part(b"\xe2", kind=UTF8, last=False), part(b"\x82\xac", kind=UTF8), part(bytes(1_000_000)))
    expected = [(p.data, p.kind, p.last) for p in client._inbox]
    async with trio.open_nursery() as nursery:
        port = await serving(nursery, OK, websocket(echo))
        limits = ContainerLimits(half_close_quiet=0, health_interval=0)
        async with container_spec(f"ws://127.0.0.1:{port}", name="m", limits=limits).load() as model:
            await model(Session(client, Call()))
        nursery.cancel_scope.cancel()
    assert told(client) == expected


async def test_both_sockets_push_back() -> None:
    """A container that echoes, and a client that stands still: the client's own parts are not taken any more."""
    client = Steady(*(part(bytes(100_000)) for _ in range(1000)), room=1)
    async with trio.open_nursery() as nursery:
        port = await serving(nursery, websocket(echo))
        async with trio.open_nursery() as session:
            session.start_soon(call, f"ws://127.0.0.1:{port}", client)
            await wait_all_tasks_blocked(0.1)
            assert client.untaken > 500
            client.read()
        nursery.cancel_scope.cancel()
    assert (len(client.sent), client.untaken) == (1000, 0)


async def test_a_port_where_nobody_listens_is_said_with_the_systems_reason() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(ModelError) as raised:
            await call(f"ws://127.0.0.1:{port}", Client())
    assert raised.value.message == f"cannot connect to the container at 127.0.0.1:{port}: Connection refused"
    assert (raised.value.code, raised.value.status) == ("HandshakeFailed", 502)


async def test_a_killed_container_is_a_broken_stream() -> None:
    async def script(peer: Peer) -> None:
        await peer.send(Frame(opcode=Opcode.TEXT, fin=True, data=b"a"))
        await peer.next_event()

    client = Client(part(b"x"), ended=False)
    async with trio.open_nursery() as nursery:
        port = await serving(nursery, websocket(script))
        with pytest.raises(ModelError) as raised:
            await call(f"ws://127.0.0.1:{port}", client)
        nursery.cancel_scope.cancel()
    assert raised.value.code == "StreamBroken"
    assert [p.data for p in client.sent] == [b"a"]


async def test_wss_and_https_with_a_ca_file(tmp_path: Path) -> None:
    config = TLSConfig(dev=True, dev_dir=str(tmp_path))
    ca = str(development_certificate(config).ca)
    client, invoked = Client(part(bytes(200_000), kind=UTF8)), Client(part(b"x"))
    answer = http((200, [], [b"one", b"two"]))
    async with trio.open_nursery() as nursery:
        port = await serving(nursery, websocket(echo), answer, tls=server_context(config))
        await call(f"wss://localhost:{port}", client, ca=ca)
        await call(f"https://localhost:{port}", invoked, ca=ca, parameters={"unary": True})
        nursery.cancel_scope.cancel()
    assert told(client) == [(bytes(200_000), UTF8, True)]
    assert b"".join(p.data for p in invoked.sent) == b"onetwo"


async def test_a_certificate_that_the_system_does_not_know_is_no_connection(tmp_path: Path) -> None:
    context = server_context(TLSConfig(dev=True, dev_dir=str(tmp_path)))
    async with trio.open_nursery() as nursery:
        port = await serving(nursery, websocket(echo), tls=context)
        with pytest.raises(ModelError) as raised:
            await call(f"wss://localhost:{port}", Client())
        nursery.cancel_scope.cancel()
    assert "CERTIFICATE_VERIFY_FAILED" in raised.value.message
    assert raised.value.status == 502


@pytest.mark.parametrize(("url", "what"), [("ws", "SocketTransport"), ("wss", "TLSTransport")])
async def test_a_connection_that_cannot_be_made_a_transport_is_closed(
    url: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a socket whose options are refused, for its connection was reset already."""
    made: list[socket.socket] = []

    def refuse(below: Any, *_: Any, **__: Any) -> Any:
        made.append(below if what == "SocketTransport" else below._sock)
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(f"gateway.containers.connection.{what}", refuse)
    async with trio.open_nursery() as nursery:
        port = await serving(nursery, websocket(echo))
        with pytest.raises(ModelError, match="Invalid argument"):
            await call(f"{url}://127.0.0.1:{port}", Client())
        nursery.cancel_scope.cancel()
    assert [sock.fileno() for sock in made] == [-1]


def test_a_ca_file_that_is_none_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="CA"):
        container_spec("wss://localhost:1", name="m", ca=str(tmp_path / "none.pem"))


# -- trio-websocket as the container ---------------------------------------------------------------------------------

Handler = Callable[[trio_websocket.WebSocketConnection], Awaitable[None]]


async def with_trio_websocket(handler: Handler, client: Client, **limits: Any) -> ModelError | None:
    """One session with a container on trio-websocket, and the error that ended it."""

    async def handle(request: trio_websocket.WebSocketRequest) -> None:
        accepted = await request.accept()
        with suppress(trio_websocket.ConnectionClosed):
            await handler(accepted)

    async with trio.open_nursery() as nursery:
        server = await nursery.start(partial(trio_websocket.serve_websocket, handle, "127.0.0.1", 0, ssl_context=None))
        error = None
        try:
            chosen = ContainerLimits(**{"half_close_quiet": 0, **limits})
            await call(f"ws://127.0.0.1:{server.port}", client, limits=chosen, query="a=b")
        except ModelError as e:
            error = e
        nursery.cancel_scope.cancel()
    return error


async def test_a_container_on_trio_websocket_echoes_a_thousand_parts() -> None:
    async def echo_messages(accepted: trio_websocket.WebSocketConnection) -> None:
        while True:
            await accepted.send_message(await accepted.get_message())

    client = Steady(*(part(b"%d" % i, kind=UTF8) for i in range(1000)))
    assert await with_trio_websocket(echo_messages, client) is None
    assert told(client) == [(b"%d" % i, UTF8, True) for i in range(1000)]


async def test_fragments_arrive_as_one_message_in_a_container_that_knows_only_messages() -> None:
    async def two(accepted: trio_websocket.WebSocketConnection) -> None:
        for _ in range(2):
            await accepted.send_message(await accepted.get_message())
        await accepted.aclose()

    texts = part(b"\xe2\x82", kind=UTF8, last=False), part(b"\xac", kind=UTF8)
    client = Client(*texts, part(b"\x00", last=False), part(b"\xff"), ended=False)
    assert await with_trio_websocket(two, client) is None
    assert told(client) == [("€".encode(), UTF8, True), (b"\x00\xff", BINARY, True)]


async def test_a_close_of_trio_websocket_with_a_code_and_a_reason_is_a_model_error() -> None:
    async def refuse(accepted: trio_websocket.WebSocketConnection) -> None:
        await accepted.send_message("sorry")
        await accepted.aclose(code=4321, reason="no GPU")

    client = Client(ended=False)
    error = await with_trio_websocket(refuse, client)
    assert error is not None
    assert (error.message, error.code) == ("no GPU", "4321")
    assert [p.data for p in client.sent] == [b"sorry"]


async def test_a_container_whose_library_answers_close_has_its_say_where_close_waits_for_quiet() -> None:
    async def slow(accepted: trio_websocket.WebSocketConnection) -> None:
        message = await accepted.get_message()
        for _ in range(3):
            for _ in range(100):
                await trio.lowlevel.checkpoint()
            await accepted.send_message(message)

    at_once, quiet = Client(part(b"a", kind=UTF8)), Client(part(b"a", kind=UTF8))
    lost = await with_trio_websocket(slow, at_once)
    assert lost is not None
    assert "sent nothing after the client's last part" in lost.message
    assert await with_trio_websocket(slow, quiet, half_close_quiet=30) is None
    assert not at_once.sent
    assert len(quiet.sent) == 3
