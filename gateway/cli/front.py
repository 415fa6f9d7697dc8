"""The program `python -m gateway.cli.front SOCKET PARENT`: one of several processes that serve the same ports."""

from __future__ import annotations

import os
import signal
import socket
import sys

from gateway.instances.spawn import OURS, bind_to_parent


def main() -> int:
    """Serves until the parent has drained this front. Exit status: 0 then, 1 if it cannot serve, 2 if its configuration is
    invalid."""
    descriptor, parent = map(int, sys.argv[1:3])
    bind_to_parent(parent)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.environ.pop(f"{OURS}INSTANCE", None)  # it is not a setting
    control = socket.socket(fileno=descriptor)

    from gateway.cli.fronts import serve_as_front

    return serve_as_front(control)


if __name__ == "__main__":
    sys.exit(main())
