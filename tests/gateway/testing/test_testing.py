"""A gateway in memory is told what is ready as one with sockets is: the same edges after the same acts."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import termios
from contextlib import closing
from typing import Any

import pytest

from gateway.client import post
from gateway.config import Config, ListenConfig, TLSConfig
from gateway.net.transport import memory_pair
from gateway.testing import MemoryEdges, memory_gateway
from models.adapt import spec_of
from models.library.tensors import identity

pytestmark = pytest.mark.skipif(not hasattr(select, "epoll"), reason="the system has no epoll")

EVERYTHING = (
    select.EPOLLIN | select.EPOLLPRI | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
    if hasattr(select, "epoll")
    else 0
)


SIOCOUTQNSD = 0x894B
"""Asks Linux how much of what is not acknowledged is not even sent."""


def _queued(sock: socket.socket, which: int) -> int:
    (n,) = struct.unpack("i", fcntl.ioctl(sock, which, bytes(4)))
    return int(n)


class Kernel:
    """Two TCP sockets, one of them in an epoll set."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.peer = socket.create_connection(listener.getsockname())
            self.ours, _ = listener.accept()
        for sock in (self.peer, self.ours):
            sock.setblocking(False)
        self.edges = select.epoll()
        self.edges.register(self.ours.fileno(), EVERYTHING)

    def send(self, ours: bool, n: int) -> int:
        try:
            return (self.ours if ours else self.peer).send(bytes(n))
        except BlockingIOError:
            return 0

    def receive(self, ours: bool, n: int) -> int | None:
        try:
            return len((self.ours if ours else self.peer).recv(n))
        except BlockingIOError:
            return None

    def end(self, ours: bool) -> None:
        (self.ours if ours else self.peer).shutdown(socket.SHUT_WR)

    def leave(self, reset: bool) -> None:
        if reset:
            self.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.peer.close()

    def fill(self) -> None:
        """Sends until there is no room, and none comes from bytes on their way. The kernel tells such room as an edge, but
        maybe late."""
        while self.send(True, 65536) or self.edges.poll(0, 8):
            self.settle()

    def settle(self) -> None:
        """Waits until all that either has sent is acknowledged, which the kernel does in its own time and tells as an edge.
        Bytes not sent yet wait for the other's window."""
        for sock in (self.ours, self.peer):
            for _ in range(100_000):
                if sock.fileno() < 0 or _queued(sock, termios.TIOCOUTQ) == _queued(sock, SIOCOUTQNSD):
                    break
                os.sched_yield()

    def close(self) -> None:
        for each in (self.edges, self.ours, self.peer):
            each.close()


class Memory:
    """A memory pair, one end of it among memory's edges."""

    def __init__(self) -> None:
        self.peer, theirs = memory_pair()
        self.edges = MemoryEdges()
        self.ours = self.edges.watchable(theirs)
        self.edges.register(self.ours.fileno(), EVERYTHING)

    def send(self, ours: bool, n: int) -> int:
        return (self.ours if ours else self.peer).try_send([bytes(n)])

    def fill(self) -> None:
        while self.send(True, 65536):
            pass

    def receive(self, ours: bool, n: int) -> int | None:
        return (self.ours if ours else self.peer).try_receive_into(memoryview(bytearray(n)))

    def end(self, ours: bool) -> None:
        (self.ours if ours else self.peer).send_eof()

    def leave(self, reset: bool) -> None:
        if reset:
            self.peer.reset()
        else:
            self.peer.close()

    def close(self) -> None:
        self.ours.close()


def told(pair: Kernel | Memory) -> int:
    """The events that the set reports now."""
    mask = 0
    for number, now in pair.edges.poll(0, 8):
        assert number == pair.ours.fileno()
        mask |= now
    return mask


def act(pair: Kernel | Memory, name: str) -> None:
    match name:
        case "send" | "send more":
            pair.send(False, 1000)
        case "receive a little":
            assert pair.receive(True, 500) == 500
        case "receive":
            assert pair.receive(True, 100_000)
        case "receive in vain":
            assert pair.receive(True, 100) is None
        case "fill":
            pair.fill()
        case "take all":
            while pair.receive(False, 1 << 20):
                pass
        case "end":
            pair.end(True)
        case "the peer ends":
            pair.end(False)
        case "receive the end":
            assert pair.receive(True, 100) == 0
        case "leave" | "reset":
            pair.leave(name == "reset")


@pytest.mark.parametrize(
    "story",
    [
        ["send", "send more", "receive a little", "receive", "receive in vain", "send"],
        ["fill", "send", "receive", "take all", "take all", "fill", "take all"],
        ["the peer ends", "receive the end", "receive the end", "end"],
        ["send", "the peer ends", "receive", "receive the end"],
        ["end", "send", "receive", "the peer ends"],
        ["leave", "receive the end"],
        ["send", "reset"],
        ["end", "reset"],
    ],
    ids="-".join,
)
def test_memory_tells_the_edges_that_the_kernel_tells(story: list[str]) -> None:
    with closing(Kernel()) as kernel, closing(Memory()) as memory:
        assert told(kernel) == told(memory) == select.EPOLLOUT
        for name in story:
            for each in (kernel, memory):
                act(each, name)
            kernel.settle()
            assert told(memory) == told(kernel), name
            assert told(memory) == told(kernel) == 0, "an edge is told once"


def test_a_number_is_given_again_once_its_transport_is_closed() -> None:
    edges = MemoryEdges()
    first, second = (edges.watchable(memory_pair()[1]) for _ in range(2))
    assert (first.fileno(), second.fileno()) == (0, 1)
    first.close()
    assert first.fileno() == -1
    assert edges.watchable(memory_pair()[1]).fileno() == 0


@pytest.mark.parametrize("hub", [True, False])
async def test_a_gateway_in_memory_answers_with_a_hub_and_without_and_never_listens(hub: bool, tmp_path: Any) -> None:
    config = Config(listen=ListenConfig(port=0, tls_port=0), tls=TLSConfig(dev=True, dev_dir=str(tmp_path)))
    async with memory_gateway([spec_of(identity, "identity")], config, hub=hub) as served:
        assert (served.gateway.port, served.gateway.tls_port) == (0, 0)
        assert (served.gateway.acceptor.poller is not None) is hub
        for peer in (served.http1(), served.http2()):
            await peer.send(*post(1, "/v2/models/none/infer", b"{}"))
            status, _headers, _body = await peer.read_answer(1)
            assert status == 404
