"""The bytes below every wire: try to receive, try to send, and the two waits between tries."""

from __future__ import annotations

import fcntl
import select
import socket
import termios
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol, final

import trio

from gateway.addresses import peer_of
from gateway.doorbell import Doorbell
from gateway.errors import TransportLost
from protocols.events import Buffer

_IOV_MAX = 512
_NOTSENT_LOWAT: int = getattr(socket, "TCP_NOTSENT_LOWAT", 0)
# A send of at least _BULK bytes raises the bound on unsent bytes to _BULK, until one is below _SMALL: the whole answer is
# there already, and the kernel then wakes the writer a sixth as often as with the bound for streams.
_BULK, _SMALL = 1024 * 1024, 16 * 1024
_GOODBYE = 1.0  # seconds for the end of a stream, such as TLS's close_notify


class Transport(Protocol):
    """A byte stream. Callers try to receive or send first, and wait only when it would block.

    One task receives and one task sends. The `try_` calls never wait. Every failure of the connection is TransportLost.
    `close` may be called at any time and any number of times, also by a cancelled task. A task that waits then returns,
    or gets TransportLost.
    """

    peer: str
    alpn: str
    short_is_dry: bool
    """True if a receive that did not fill its buffer took everything that had arrived."""
    behind: bool
    """True if the last receive returned None although more had arrived: it had done enough for one turn."""

    @property
    def pending(self) -> bool:
        """True while accepted bytes have not reached the kernel. `wait_writable`, then `try_send(())`, moves them on."""
        ...

    def try_receive_into(self, buffer: memoryview) -> int | None:
        """Receives into the buffer, which must have room for at least one byte. Returns the number of bytes; 0 at the peer's
        end of stream, each time; None if it would block."""
        ...

    def try_send(self, buffers: Sequence[Buffer]) -> int:
        """Takes bytes from the front of the buffers. Returns their number; 0 if it would block. The buffers must have at
        least one byte, unless there are no buffers."""
        ...

    def unsent(self) -> tuple[int, int] | None:
        """Returns the bytes that the kernel holds and the peer has not acknowledged, and the most that it holds. None if
        unknown."""
        ...

    async def wait_readable(self) -> None: ...

    async def wait_writable(self) -> None: ...

    def hung_up(self) -> bool:
        """True if the peer has closed or reset the connection. Reads nothing of the bytes sent before."""
        ...

    def receivable(self) -> bool:
        """True if something of the peer has arrived and is not received yet: bytes, its end, an error. Reads none of it."""
        ...

    def send_eof(self) -> None:
        """Ends our direction in order, if the transport can."""
        ...

    def close(self) -> None: ...


@final
class SocketTransport:
    """A connected TCP or Unix socket. The transport owns it, and makes it non-blocking."""

    __slots__ = ("_bulk", "_closed", "_sock", "_unsent", "alpn", "closed", "peer", "pending")
    short_is_dry = True  # epoll(7), question 9
    behind = False

    def __init__(self, sock: socket.socket, *, unsent: int = 0) -> None:
        """`unsent`: the most bytes that the kernel buffers unsent (TCP_NOTSENT_LOWAT), if the system can; 0: the system's
        default."""
        self.closed: Callable[[], None] | None = None
        """Called once, when the transport is closed."""
        sock.setblocking(False)
        self._sock = sock
        self._unsent, self._bulk = 0, False
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if unsent and _NOTSENT_LOWAT:
                self._unsent = unsent
                self._bound(unsent)
        self._closed = False
        self.peer = peer_of(sock)
        self.alpn = ""
        self.pending = False

    def local_port(self) -> int:
        """Returns the port of this end; 0 if it has none, as a Unix socket, or is gone."""
        try:
            address = self._sock.getsockname()
        except OSError:
            return 0
        return address[1] if isinstance(address, tuple) else 0

    def try_receive_into(self, buffer: memoryview) -> int | None:
        try:
            return self._sock.recv_into(buffer)
        except BlockingIOError:
            return None
        except OSError as e:
            raise _lost(e) from e

    def try_send(self, buffers: Sequence[Buffer]) -> int:
        if not buffers:
            return 0
        try:
            data = buffers[0]
            size = len(data) if len(buffers) == 1 else sum(map(len, buffers))
            if size >= _BULK:
                if not self._bulk and self._unsent:
                    self._bulk = True
                    self._bound(max(_BULK, self._unsent))
            elif self._bulk and size < _SMALL:
                self._bulk = False
                self._bound(self._unsent)
            if len(buffers) == 1:
                return self._sock.send(data)
            return self._sock.sendmsg(buffers[:_IOV_MAX])
        except BlockingIOError:
            return 0
        except OSError as e:
            raise _lost(e) from e

    def _bound(self, unsent: int) -> None:
        self._sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, unsent)

    async def wait_readable(self) -> None:
        await self._wait(trio.lowlevel.wait_readable)

    async def wait_writable(self) -> None:
        await self._wait(trio.lowlevel.wait_writable)

    async def _wait(self, wait: Callable[[socket.socket], Awaitable[None]]) -> None:
        if self._closed:  # Trio would register descriptor -1, and every later wait for it would fail as busy
            raise TransportLost("closed")
        try:
            await wait(self._sock)
        except trio.ClosedResourceError as e:
            raise TransportLost("closed") from e
        except OSError as e:
            raise _lost(e) from e

    def unsent(self) -> tuple[int, int] | None:
        try:
            taken = array("i", [0])
            fcntl.ioctl(self._sock, termios.TIOCOUTQ, taken)
            return taken[0], self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        except OSError:
            return None

    def hung_up(self) -> bool:
        return self._closed or self._polled(select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0))

    def receivable(self) -> bool:
        return self._closed or self._polled(select.POLLIN)

    def _polled(self, mask: int) -> bool:
        poll = select.poll()
        poll.register(self._sock, mask)
        return bool(poll.poll(0))

    def fileno(self) -> int:
        return self._sock.fileno()

    def send_eof(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the connection is gone already, which ends the stream too

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()
            if self.closed is not None:
                self.closed()


def _lost(error: OSError) -> TransportLost:
    return TransportLost(str(error), left=isinstance(error, ConnectionError))


def arrived_at(transport: Transport) -> int:
    """Returns the port at which a client has reached us without TLS; 0 if there is none."""
    return transport.local_port() if isinstance(transport, SocketTransport) else 0


@final
class MemoryTransport:
    """One end of an in-memory connection with a bounded buffer in each direction; see `memory_pair`."""

    short_is_dry = behind = False

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._inbox: deque[bytes] = deque()
        self._held = 0
        self._eof = self._reset = self._closed = False
        self._readable, self._writable = Doorbell(), Doorbell()
        self._other: MemoryTransport
        self.peer, self.alpn, self.pending = "memory", "", False

    def try_receive_into(self, buffer: memoryview) -> int | None:
        if self._closed or self._reset:
            raise TransportLost("reset" if self._reset else "closed", left=self._reset)
        if not self._inbox:
            return 0 if self._eof else None
        piece = self._inbox.popleft()
        n = min(len(piece), len(buffer))
        buffer[:n] = piece[:n]
        if n < len(piece):
            self._inbox.appendleft(piece[n:])
        self._held -= n
        self._other._writable.ring()
        return n

    def try_send(self, buffers: Sequence[Buffer]) -> int:
        if self._other._eof or self._reset:
            raise TransportLost("our direction is closed", left=self._reset)
        if self._other._closed:
            raise TransportLost("the peer is gone", left=True)
        data = b"".join(front(buffers, self._other._capacity - self._other._held))
        if data:
            self._other._inbox.append(data)
            self._other._held += len(data)
            self._other._readable.ring()
        return len(data)

    async def wait_readable(self) -> None:
        while not (self._inbox or self._eof or self._reset or self._closed):
            await self._readable.wait()

    async def wait_writable(self) -> None:
        other = self._other
        while not (other._eof or other._reset or other._closed) and other._held >= other._capacity:
            await self._writable.wait()

    def unsent(self) -> None:
        return None

    def hung_up(self) -> bool:
        return self._eof or self._reset or self._closed

    def receivable(self) -> bool:
        return bool(self._inbox) or self.hung_up()

    @property
    def deserted(self) -> bool:
        """True if the other end is closed."""
        return self._other._closed

    def send_eof(self) -> None:
        self._other._eof = True
        self._other._readable.ring()

    def reset(self) -> None:
        """Ends both directions at once and discards the bytes under way, as a TCP RST does."""
        for end in (self, self._other):
            end._reset = True
            end._inbox.clear()
            end._held = 0
            end._readable.ring()
            end._writable.ring()

    def close(self) -> None:
        self.send_eof()
        self._closed = True
        for bell in (self._readable, self._writable, self._other._writable):
            bell.ring()


def memory_pair(capacity: int = 65536) -> tuple[MemoryTransport, MemoryTransport]:
    """Makes two connected ends. Each direction holds at most `capacity` bytes, like a kernel's socket buffers."""
    a, b = MemoryTransport(capacity), MemoryTransport(capacity)
    a._other, b._other = b, a
    return a, b


@final
class StreamTransport:
    """Any trio Stream as a transport, for embedders with their own listener. It costs one copy for each direction.

    The waits receive and send on the stream itself, so they may only be cancelled when the connection ends. The peer's
    end is seen only after all bytes before it are read. `send_eof` does nothing: a Stream cannot end its direction without
    waiting. If the stream breaks while bytes are being sent, the reader sees an end, and the sender gets TransportLost.
    """

    short_is_dry = True
    behind = False

    def __init__(self, stream: trio.abc.Stream, *, chunk: int = 65536) -> None:
        self._stream = stream
        self._chunk = chunk
        self._received: bytes | bytearray | None = None
        self._unsent = b""
        self._closed = False
        self._waits: set[trio.CancelScope] = set()
        self.peer, self.alpn = _peer_of(stream), ""

    @property
    def pending(self) -> bool:
        return bool(self._unsent)

    def try_receive_into(self, buffer: memoryview) -> int | None:
        if self._closed:
            raise TransportLost("closed")
        data = self._received
        if data is None:
            return None
        n = min(len(data), len(buffer))
        buffer[:n] = data[:n]
        if data:
            self._received = data[n:] or None
        return n

    def try_send(self, buffers: Sequence[Buffer]) -> int:
        if self._closed:
            raise TransportLost("closed")
        if self._unsent or not buffers:
            return 0
        self._unsent = b"".join(front(buffers, self._chunk))
        return len(self._unsent)

    async def wait_readable(self) -> None:
        if self._received is None:
            with self._until_closed():
                try:
                    self._received = await self._stream.receive_some(self._chunk)
                except trio.BrokenResourceError:
                    if not self._unsent:
                        raise
                    # A peer with its whole answer may leave, without a close_notify, before `send_all` returns. To the
                    # reader this is an end; only the send can tell whether the peer took the answer.
                    self._received = b""

    async def wait_writable(self) -> None:
        if self._unsent:
            with self._until_closed():
                await self._stream.send_all(self._unsent)
            self._unsent = b""

    @contextmanager
    def _until_closed(self) -> Iterator[None]:
        if self._closed:
            raise TransportLost("closed")
        with trio.CancelScope() as scope:
            self._waits.add(scope)
            try:
                yield
            except (trio.BrokenResourceError, trio.ClosedResourceError) as e:
                raise TransportLost(str(e), left=isinstance(e, trio.BrokenResourceError)) from e
            finally:
                self._waits.remove(scope)
        if scope.cancelled_caught:
            raise TransportLost("closed")

    def unsent(self) -> None:
        return None

    def hung_up(self) -> bool:
        return self._closed or self._received == b""

    def receivable(self) -> bool:
        return self._closed or self._received is not None

    def send_eof(self) -> None:
        return

    def close(self) -> None:
        self._closed = True
        for scope in self._waits:
            scope.cancel()

    async def aclose(self) -> None:
        """Closes the stream itself. A close that waits, such as TLS's close_notify, has 1 second; if this is cancelled, the
        stream is closed at once. `Gateway.serve_stream` calls it when the connection is over."""
        with trio.move_on_after(_GOODBYE), suppress(trio.BrokenResourceError):
            await self._stream.aclose()


def _peer_of(stream: trio.abc.Stream) -> str:
    """Returns the address of a socket's peer, also below TLS; "stream" if there is no socket."""
    while isinstance(stream, trio.SSLStream):
        stream = stream.transport_stream
    return peer_of(stream.socket) if isinstance(stream, trio.SocketStream) else "stream"


def front(buffers: Sequence[Buffer], n: int) -> list[Buffer]:
    """Returns the first n bytes of the buffers, without a copy."""
    pieces: list[Buffer] = []
    for buffer in buffers:
        if n <= 0:
            break
        pieces.append(memoryview(buffer)[:n] if len(buffer) > n else buffer)
        n -= len(buffer)
    return pieces
