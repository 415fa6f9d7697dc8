"""A container behind the server that is attacked: it answers GET /ping as it should, and all else as its attack says.

`python -m tests.attacks.behind NAME PORT`, as the harness starts it.
"""

from __future__ import annotations

import random
import socket
import sys
import threading
from contextlib import suppress

from tests.attacks.attack import Behind, attacks

_WELL = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_HEAD = 64 * 1024


def _answer(sock: socket.socket, behind: Behind, seed: int) -> None:
    """One connection, until the server ends it."""
    with sock, suppress(OSError):
        sock.settimeout(30.0)
        head = b""
        while b"\r\n\r\n" not in head and len(head) < _HEAD:
            if not (data := sock.recv(_HEAD)):
                return
            head += data
        if head.startswith(b"GET /ping "):
            sock.sendall(_WELL)
            return
        for piece in behind(random.Random(seed), head):
            sock.sendall(piece)


def main() -> None:
    behind = attacks()[sys.argv[1]].behind
    assert behind is not None
    with socket.create_server(("127.0.0.1", int(sys.argv[2])), backlog=512) as listener:
        print("ready", flush=True)
        number = 0
        while True:
            sock, _ = listener.accept()
            number += 1
            threading.Thread(target=_answer, args=(sock, behind, number), daemon=True).start()


if __name__ == "__main__":
    main()
