"""Clients behind trusted proxies: PROXY headers of connections on every wire, forwarded fields of requests, and those not
believed."""

from __future__ import annotations

import json
import logging
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import IPv6Address
from typing import Any, final

import msgspec
import pytest
import trio
import trio.testing
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway import client
from gateway.asgi import ASGIApp
from gateway.config import Config, LimitsConfig, ListenConfig, TLSConfig
from gateway.config.problem import ConfigError
from gateway.gateway import Gateway
from gateway.net.proxies import TrustedProxies
from gateway.net.tls_context import client_context
from gateway.net.tls_transport import TLSTransport
from gateway.net.transport import MemoryTransport, Transport, memory_pair
from gateway.operator.views import view_of_stream
from gateway.testing import memory_gateway
from models.messages import Family
from models.session import Session
from models.spec import ModelSpec
from protocols.events import Frame, Opcode
from protocols.proxy import SIGNATURE_2

PROXY, CLIENT = "10.0.0.1:4711", "203.0.113.7:56324"
V1 = b"PROXY TCP4 203.0.113.7 192.0.2.1 56324 443\r\n"
V2 = (
    SIGNATURE_2
    + struct.pack("!BBH", 0x21, 0x11, 12 + 6)
    + bytes([203, 0, 113, 7, 192, 0, 2, 1, 220, 4, 1, 187])
    + b"\x01\0\x03abc"
)
LOCAL = SIGNATURE_2 + struct.pack("!BBH", 0x20, 0, 0)
GET = b"GET /v2 HTTP/1.1\r\nHost: x\r\n"


async def echo(session: Session[Any, Any]) -> None:
    async for message in session:
        await session.send(message)


@asynccontextmanager
async def loaded() -> AsyncIterator[Any]:
    yield echo


@final
@dataclass
class House:
    """A gateway, and connections of peers with an address."""

    gateway: Gateway
    nursery: trio.Nursery

    def connect(self, peer: str = PROXY, tls: ssl.SSLContext | None = None) -> MemoryTransport:
        ours, theirs = memory_pair()
        theirs.peer = peer
        self.nursery.start_soon(self.gateway.acceptor.serve_transport, theirs, tls)
        return ours


@asynccontextmanager
async def proxied(*trusted: str, spans: TracerProvider | None = None, **limits: Any) -> AsyncIterator[House]:
    config = Config(
        listen=ListenConfig(trusted_proxies=trusted or ("10.0.0.0/8", "fd00::/8")), limits=LimitsConfig(**limits)
    )
    models = [ModelSpec(name="echo", family=Family.PARTS, load=loaded)]
    with trio.fail_after(600):
        async with (
            memory_gateway(models, config, check=True, tracer_provider=spans) as memory,
            trio.open_nursery() as nursery,
        ):
            yield House(memory.gateway, nursery)


class Calls:
    """Connections of a peer, and what the log says of them."""

    def __init__(self, house: House, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, "gateway")
        self._records, self.connect = caplog.records, house.connect

    async def peer_of(self, pieces: list[bytes], peer: str = PROXY) -> str:
        """The client that the access line names, if these bytes come in these pieces."""
        transport = self.connect(peer)
        await send(transport, *pieces)
        answer = await everything(transport)
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        return self.peers()[-1]

    def peers(self) -> list[str]:
        return [record.__dict__["peer"] for record in self._records if record.message == "exchange"]

    def reasons(self) -> list[tuple[str, str, str]]:
        said = [record for record in self._records if record.message == "connection not established"]
        return [(record.levelname, record.__dict__["peer"], record.__dict__["reason"]) for record in said]


async def send(transport: Transport, *pieces: bytes) -> None:
    for piece in pieces:
        left = memoryview(piece)
        while left:
            n = transport.try_send([left])
            left = left[n:]
            if not n:
                await transport.wait_writable()
        await trio.testing.wait_all_tasks_blocked()


async def everything(transport: Transport) -> bytes:
    came, buffer = b"", memoryview(bytearray(65536))
    while (n := transport.try_receive_into(buffer)) != 0:
        if n is None:
            await transport.wait_readable()
        else:
            came += bytes(buffer[:n])
    transport.close()
    return came


# ---- PROXY headers ----


@pytest.mark.parametrize("header", [V1, V2])
@pytest.mark.parametrize("cut", ["together", "apart", "each byte"])
async def test_a_header_names_the_client_of_a_connection(
    header: bytes, cut: str, autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    request = GET + b"Connection: close\r\n\r\n"
    async with proxied() as house:
        calls = Calls(house, caplog)
        pieces = {"together": [header + request], "apart": [header, request]}.get(
            cut, [bytes([b]) for b in header + request]
        )
        assert await calls.peer_of(pieces) == CLIENT


@pytest.mark.parametrize(
    ("header", "peer"),
    [
        (LOCAL, PROXY),
        (b"", PROXY),
        (b"PROXY UNKNOWN ::1 ::1 1 2\r\n", PROXY),
        (b"PROXY TCP6 2001:db8::7 ::1 80 443\r\n", "[2001:db8::7]:80"),
        (b"PROXY TCP6 ::ffff:203.0.113.7 ::1 80 443\r\n", "203.0.113.7:80"),
        (SIGNATURE_2 + struct.pack("!BBH108s108s", 0x21, 0x31, 216, b"/run/theirs", b"/run/its"), "unix:/run/theirs"),
    ],
)
async def test_without_a_client_in_it_the_peer_is_the_proxy_itself(
    header: bytes, peer: str, autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with proxied() as house:
        assert await Calls(house, caplog).peer_of([header + GET + b"Connection: close\r\n\r\n"]) == peer


@pytest.mark.parametrize("peer", ["10.0.0.1:1", "[fd00::1]:1", "unix:/run/served"])
async def test_every_kind_of_peer_can_be_trusted(peer: str, autojump_clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with proxied("10.0.0.0/8", "fd00::1", "unix") as house:
        assert await Calls(house, caplog).peer_of([V1 + GET + b"Connection: close\r\n\r\n"], peer) == CLIENT


async def over_http2(calls: Calls, transport: Transport) -> None:
    peer = client.http2(transport)
    await peer.send(*client.post(1, "/invocations", b"hello", [(b"content-type", b"text/plain")]))
    assert (await peer.read_answer(1))[2] == b"hello"
    peer.close()


async def over_websocket(calls: Calls, transport: Transport) -> None:
    peer = await client.websocket(transport, "/invocations-bidirectional-stream")
    await peer.send(Frame(opcode=Opcode.BINARY, fin=True, data=b"hello"))
    frame = await peer.next_event()
    assert isinstance(frame, Frame)
    assert frame.data == b"hello"
    peer.close()


@pytest.mark.parametrize("over", [over_http2, over_websocket])
@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("cut", ["together", "apart", "each byte"])
async def test_the_header_comes_before_every_wire_and_before_tls(
    over: Callable[[Calls, Transport], Awaitable[None]],
    tls: bool,
    cut: str,
    autojump_clock: Any,
    caplog: pytest.LogCaptureFixture,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async with proxied() as house:
        calls, contexts = Calls(house, caplog), certificates(tmp_path_factory, over) if tls else (None, None)
        transport: Transport = Headed(calls.connect(tls=contexts[0]), V2, cut)
        if contexts[1] is not None:
            secure = TLSTransport(transport, contexts[1], server_side=False, hostname="localhost")
            await secure.handshake()
            transport = secure
        await over(calls, transport)
        await trio.testing.wait_all_tasks_blocked()
        assert calls.peers() == [CLIENT]


def certificates(folders: pytest.TempPathFactory, over: object) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    from gateway.net.tls_context import development_certificate, server_context

    tls = TLSConfig(dev=True, dev_dir=str(folders.getbasetemp() / "proxies"))
    return server_context(tls), client_context(
        development_certificate(tls).ca, alpn=["h2" if over is over_http2 else "http/1.1"]
    )


class Headed:
    """A client's transport, with a header before its first bytes, cut in some way."""

    def __init__(self, below: MemoryTransport, header: bytes, cut: str) -> None:
        self._below, self._header, self._cut = below, header, cut

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    def try_send(self, buffers: Any) -> int:
        header, self._header = self._header, b""
        if header and self._cut == "together":
            data = header + b"".join(buffers)
            assert self._below.try_send([data]) == len(data)
            return len(data) - len(header)
        for piece in [header] if self._cut == "apart" else [bytes([byte]) for byte in header]:
            assert self._below.try_send([piece]) == len(piece)
        return self._below.try_send(buffers)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (
            b"PROXY TCP4 1.1.1.1 2.2.2.2 1 99999\r\n",
            "malformed PROXY header: PROXY header, version 1: a port is from 0 to 65535",
        ),
        (SIGNATURE_2 + b"\x31\x11\0\0", "malformed PROXY header: PROXY header: expected version 2, LOCAL or PROXY"),
        (
            SIGNATURE_2 + b"\x21\x11\xff\xff",
            "malformed PROXY header: PROXY header of 65551 bytes: more than 32768 (limits.head)",
        ),
    ],
)
async def test_a_malformed_header_ends_the_connection_and_is_a_line_of_the_log(
    header: bytes, why: str, autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with proxied() as house:
        calls = Calls(house, caplog)
        transport = calls.connect()
        await send(transport, header + GET + b"\r\n")
        assert await everything(transport) == b""
        ((level, peer, reason),) = calls.reasons()
        assert (level, peer) == ("INFO", PROXY)
        assert reason.startswith(why)
        assert "1.1.1.1" not in reason


@pytest.mark.parametrize("header", [V1, V2])
async def test_who_is_not_listed_is_no_proxy(header: bytes, autojump_clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with proxied() as house:
        calls = Calls(house, caplog)
        transport = calls.connect("192.0.2.9:1")
        await send(transport, header + GET + b"\r\n")
        assert (await everything(transport)).startswith(b"HTTP/1.1 400 ")
        (said,) = [record for record in caplog.records if record.message.startswith("PROXY header refused")]
        assert (said.__dict__["peer"], said.__dict__["setting"]) == ("192.0.2.9:1", "listen.trusted_proxies")
        assert not [record for record in caplog.records if CLIENT in str(record.__dict__)]


async def test_a_header_that_does_not_end_has_the_time_of_a_head(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with proxied(head_timeout=3.0) as house:
        calls, began = Calls(house, caplog), trio.current_time()
        transport = calls.connect()
        await send(transport, V1[:20])
        assert await everything(transport) == b""
        assert trio.current_time() - began == pytest.approx(3.0)
        assert calls.reasons() == [("INFO", PROXY, "the PROXY header took too long (limits.head_timeout)")]


@pytest.mark.parametrize("sent", [b"", LOCAL, V1, V1[:20]])
async def test_a_proxy_that_only_looks_whether_somebody_listens_is_no_trouble(
    sent: bytes, autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with proxied() as house:
        calls = Calls(house, caplog)
        transport = calls.connect()
        await send(transport, sent)
        transport.send_eof()
        assert await everything(transport) == b""
        ((level, _, _),) = calls.reasons()
        assert level == ("INFO" if sent == V1[:20] else "DEBUG")


async def test_what_goes_wrong_later_names_the_client(autojump_clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with proxied() as house:
        transport = Calls(house, caplog).connect()
        await send(transport, V1 + b"garbage\r\n\r\n")
        assert (await everything(transport)).startswith(b"HTTP/1.1 400 ")
        assert [r.__dict__["peer"] for r in caplog.records if r.message == "protocol error"] == [CLIENT]


# ---- fields of a request ----


def forwarded(**fields: str) -> bytes:
    return b"".join(f"{name.replace('_', '-')}: {value}\r\n".encode() for name, value in fields.items())


async def test_each_request_of_a_connection_has_its_own_client(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with proxied() as house:
        calls = Calls(house, caplog)
        transport = calls.connect()
        for fields in (
            forwarded(X_Forwarded_For="6.6.6.6, 203.0.113.7, 10.0.0.9"),
            b"",
            forwarded(Forwarded='for="[2001:db8::7]:80";proto=https'),
            forwarded(X_Forwarded_For="6.6.6.6", Forwarded="for=203.0.113.7"),
            b"X-Forwarded-For: 6.6.6.6\r\nX-Forwarded-For: 198.51.100.1\r\n",
        ):
            await send(transport, GET + fields + b"\r\n")
        transport.send_eof()
        await everything(transport)
        assert calls.peers() == ["203.0.113.7", PROXY, "[2001:db8::7]:80", PROXY, "198.51.100.1"]


async def test_only_a_proxy_that_is_listed_is_believed(autojump_clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    said = forwarded(X_Forwarded_For="203.0.113.7") + b"Connection: close\r\n\r\n"
    async with proxied() as house:
        calls = Calls(house, caplog)
        for peer in ("192.0.2.9:1", "[2001:db8::1]:1", "unix:/run/served", "memory", ""):
            assert await calls.peer_of([GET + said], peer) == peer
        # a proxy of connections before one of requests; and before a client that says what it likes
        nginx, other = (b"PROXY TCP4 %b 192.0.2.1 5 443\r\n" % address for address in (b"10.9.9.9", b"192.0.2.9"))
        assert await calls.peer_of([nginx + GET + said]) == "203.0.113.7"
        assert await calls.peer_of([other + GET + said]) == "192.0.2.9:5"
        unix = SIGNATURE_2 + struct.pack("!BBH108s108s", 0x21, 0x31, 216, b"/run/theirs", b"/run/its")
    async with proxied("10.0.0.0/8", "unix") as house:
        calls = Calls(house, caplog)
        assert await calls.peer_of([GET + said], "unix:/run/served") == "203.0.113.7"
        assert await calls.peer_of([unix + GET + said]) == "unix:/run/theirs"


async def test_a_name_of_any_bytes_is_told_in_characters(autojump_clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A client chooses the name of its Unix socket: a line feed in it must not begin a log line, and JSON must hold it."""
    name = b"/run/\xff\n\x1b[31m"
    unix = SIGNATURE_2 + struct.pack("!BBH", 0x21, 0x31, 216) + name.ljust(108, b"\0") + bytes(108)
    async with proxied() as house:
        calls = Calls(house, caplog)
        said = await calls.peer_of([unix + GET + b"Connection: close\r\n\r\n"])
    assert said == r"unix:/run/\udcff\n\x1b[31m"
    assert json.loads(msgspec.json.encode(said)) == said


async def test_the_console_and_spans_name_the_same_client(autojump_clock: Any) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    fields = [(b"x-forwarded-for", b"203.0.113.7:80")]
    async with proxied(spans=provider) as house:
        peer = client.http2(house.connect())
        await peer.send(*client.post(1, "/endpoints/echo/invocations-response-stream", None, fields))
        await trio.testing.wait_all_tasks_blocked()
        (exchange,) = house.gateway.live
        assert view_of_stream(exchange, 0.0).peer == "203.0.113.7:80"
        peer.close()
        await trio.testing.wait_all_tasks_blocked()
    span = exporter.get_finished_spans()[-1]
    assert span.attributes is not None
    assert (span.attributes["client.address"], span.attributes["client.port"]) == ("203.0.113.7", 80)


@pytest.mark.parametrize(
    ("caller", "peer"),
    [
        (("10.0.0.1", 1), "203.0.113.7"),
        (("fd00::1", 1), "203.0.113.7"),
        (("2001:db8::1", 1), "[2001:db8::1]:1"),
        (None, ""),
        (("\x9b31m", 0), r"\x9b31m:0"),
    ],
)
async def test_as_an_asgi_application_it_believes_the_same(
    caller: tuple[str, int] | None, peer: str, autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.exchange")
    async with proxied() as house:
        received = iter([{"type": "http.request"}])

        async def receive() -> dict[str, Any]:
            for message in received:
                return message
            await trio.sleep_forever()
            raise AssertionError

        async def ignore(message: Any) -> None:
            pass

        scope = {
            "type": "http", "http_version": "1.1", "method": "GET", "path": "/v2", "query_string": b"",
            "headers": [(b"x-forwarded-for", b"203.0.113.7")], "client": caller,
        }  # fmt: skip
        await ASGIApp(house.gateway)(scope, receive, ignore)
    assert [record.__dict__["peer"] for record in caplog.records if record.message == "exchange"] == [peer]


# ---- trusted networks ----


@pytest.mark.parametrize("listed", ["10.0.0.1/8", "example.com", "10.0.0.*", ""])
def test_what_is_no_network_is_refused(listed: str) -> None:
    with pytest.raises(ConfigError, match=r"listen\.trusted_proxies: "):
        Gateway(Config(listen=ListenConfig(trusted_proxies=(listed,))))


def test_a_network_has_its_addresses_and_no_others() -> None:
    proxies = TrustedProxies(["10.0.0.0/8", "192.0.2.1", "fd00::/8"])
    for peer in ("10.255.255.255:1", "192.0.2.1:1", "[fd00::1]:1", "[::ffff:10.0.0.1]:1", "[fd00::1%eth0]:1"):
        assert proxies.includes(peer), peer
    for peer in ("11.0.0.1:1", "192.0.2.2:1", "[::1]:1", "unix:/run/s", "unix:", "memory", "stream", ""):
        assert not proxies.includes(peer), peer
    assert not TrustedProxies(["unix"]).trusts(IPv6Address("::1"))


def test_a_network_of_mapped_addresses_is_that_of_ipv4() -> None:
    proxies = TrustedProxies(["::ffff:10.0.0.0/104", "::ffff:192.0.2.1"])
    for peer in ("10.255.255.255:1", "[::ffff:10.0.0.1]:1", "192.0.2.1:1"):
        assert proxies.includes(peer), peer
    for peer in ("11.0.0.1:1", "192.0.2.2:1", "[::a00:1]:1"):
        assert not proxies.includes(peer), peer
