"""Listening sockets: what an accepted connection inherits."""

from __future__ import annotations

import socket

import pytest
import trio

from gateway.listeners import Listener


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="this system names the options otherwise")
@pytest.mark.parametrize(("keepalive", "said"), [(60.0, (1, 60, 15, 4)), (0.2, (1, 1, 15, 4)), (0.0, (0,))])
async def test_the_kernel_asks_whether_a_silent_client_is_still_there(keepalive: float, said: tuple[int, ...]) -> None:
    listener = Listener("127.0.0.1", 0, backlog=1, keepalive=keepalive)
    accepted: list[socket.socket] = []
    with socket.create_connection(("127.0.0.1", listener.port)):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listener.accept, accepted.append, lambda: not accepted)
            with trio.fail_after(60):
                while not accepted:
                    await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        listener.close()
        (sock,) = accepted
        with sock:
            options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE)]
            if keepalive:
                options += [(socket.IPPROTO_TCP, o) for o in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)]
            assert tuple(sock.getsockopt(*option) for option in options) == said
