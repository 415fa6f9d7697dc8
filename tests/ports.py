"""Ports for servers whose port must be known before they start."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
_chance = random.SystemRandom()


def free_port() -> int:
    """Returns a port of the loopback interface on which no TCP server listens. The kernel does not give it to others,
    because it is below the kernel's range. No other test takes it: a UDP socket marks it until this process ends."""
    end = int(_GIVEN.read_text().split()[0]) if _GIVEN.exists() else 32768
    while True:
        port = _chance.randrange(10_000, end)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mark:
            try:
                mark.bind(("127.0.0.1", port))
                socket.create_server(("127.0.0.1", port)).close()
            except OSError:
                continue
            mark.detach()
            return port
