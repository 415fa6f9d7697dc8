"""Real clients that call as much as they may: no defence ends one. `python -m tests.attacks.legal [CLIENT...] [--calls 10000]`.

Between client and server stands a relay that reads what the server says on each connection of HTTP/2: a GOAWAY with another
code than NO_ERROR is a failure, whatever the client makes of it. Each client is a program of its own.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import final

from benchmarks import requests
from benchmarks.accounting import allow_descriptors
from benchmarks.servers import ROOT
from tests.attacks.attack import Attack
from tests.attacks.ears import HTTP2Ear
from tests.attacks.served import Served, events, serving, tracebacks

_BODY = requests.infer_json(16).partition(b"\r\n\r\n")[2].decode()
_PATH = requests.INFER.decode()
_PATIENCE = 1200.0
_DEFENCES = ("everywire_floods_total", 'everywire_ended_connections_total{reason="flood"', "everywire_party_refusals_total")


@final
class Relay:
    """Hands on what comes between clients and a server, and hears what the server says on each connection."""

    def __init__(self, port: int) -> None:
        self._port, self._listener = port, socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = int(self._listener.getsockname()[1])
        self.ears: list[HTTP2Ear] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def goodbyes(self) -> Counter[str]:
        """The last words of all connections that had any."""
        return Counter(f"{ear.last} {ear.said}".strip() for ear in self.ears if ear.last)

    @property
    def resets(self) -> int:
        """Streams that the server has reset."""
        return sum(count for ear in self.ears for what, count in ear.counts.items() if what.startswith("rst"))

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server, ear = socket.create_connection(("127.0.0.1", self._port)), HTTP2Ear()
                self.ears.append(ear)
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._carry_both, args=(client, server, ear), daemon=True).start()

    def _carry_both(self, client: socket.socket, server: socket.socket, ear: HTTP2Ear) -> None:
        with client, server:
            back = threading.Thread(target=self._carry, args=(server, client, ear.take), daemon=True)
            back.start()
            self._carry(client, server, None)
            back.join()

    def _carry(self, come: socket.socket, go: socket.socket, hears: Callable[[bytes], None] | None) -> None:
        with suppress(OSError):
            while data := come.recv(1 << 16):
                if hears is not None:
                    hears(data)
                go.sendall(data)
        with suppress(OSError):
            go.shutdown(socket.SHUT_WR)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A real client: the program that it is, and what it needs."""

    name: str
    what: str
    command: Callable[[str, int, Path], list[str]]
    """Makes the command line from the server's address, the number of calls, and a folder for files."""
    present: Callable[[], bool]
    tls: bool = False
    """It comes over TLS, where nothing can be heard between: its own failures and the server's counters tell."""
    calls: Callable[[str], int]
    """The successful calls, by the program's output."""


def _httpx(url: str, calls: int, folder: Path) -> list[str]:
    program = f"""
import asyncio, httpx
async def main():
    done = 0
    async with httpx.AsyncClient(http1=False, http2=True, timeout=600, limits=httpx.Limits(max_connections=4)) as client:
        async def some(number):
            nonlocal done
            for _ in range(number):
                answer = await client.post({url + _PATH!r}, content={_BODY!r}, headers={{"content-type": "application/json"}})
                done += answer.status_code == 200
        await asyncio.gather(*(some({calls} // 50) for _ in range(50)))
    print(done)
asyncio.run(main())
"""
    return [sys.executable, "-c", program]


def _curl(url: str, calls: int, folder: Path) -> list[str]:
    # over TLS: with prior knowledge curl 7.88 fails at the second stream of a connection, with exit status 16, whatever serves
    one = f'url = "{url}{_PATH}"\ndata = "{_BODY.replace(chr(34), chr(92) + chr(34))}"\nheader = "content-type: application/json"\n'
    one += 'output = "/dev/null"\nwrite-out = "%{http_code}\\n"\nhttp2\ninsecure\n'
    (folder / "curl").write_text("next\n".join([one] * calls))
    return ["curl", "-sS", "--parallel", "--parallel-max", "100", "--config", str(folder / "curl")]


def _node(url: str, calls: int, folder: Path) -> list[str]:
    program = f"""
const http2 = require("http2");
const sessions = 10, each = {calls} / sessions;
let done = 0, open = sessions;
for (let s = 0; s < sessions; s++) {{
  const session = http2.connect({url!r});
  session.on("error", (error) => console.error(error));
  let begun = 0, over = 0;
  const ask = () => {{
    if (begun++ >= each) return;
    const call = session.request({{":method": "POST", ":path": {_PATH!r}, "content-type": "application/json"}});
    call.on("response", (fields) => {{ if (fields[":status"] === 200) done++; }});
    call.on("error", (error) => console.error(error));
    call.on("data", () => {{}});
    call.on("close", () => {{
      over++;
      if (over % 100 === 0) session.ping(() => {{}});
      if (over >= each) {{ session.close(); if (--open === 0) console.log(done); }} else ask();
    }});
    call.end({_BODY!r});
  }};
  for (let i = 0; i < Math.min(50, each); i++) ask();
}}
"""
    return ["node", "-e", program]


def _h2load(url: str, calls: int, folder: Path) -> list[str]:
    (folder / "body").write_text(_BODY)
    connections = min(100, calls // 10)
    header = "content-type: application/json"
    return [
        "h2load",
        "-n",
        str(calls),
        "-c",
        str(connections),
        "-m",
        "100",
        "-d",
        str(folder / "body"),
        "-H",
        header,
        url + _PATH,
    ]


def _last_number(output: str) -> int:
    return int(output.split()[-1])


def _succeeded(output: str) -> int:
    (line,) = (line for line in output.splitlines() if line.startswith("status codes:"))
    return int(line.split()[2])


def _has_http2(curl: str) -> bool:
    return bool(shutil.which(curl)) and b"HTTP2" in subprocess.run([curl, "--version"], capture_output=True).stdout


CLIENTS = {
    client.name: client
    for client in (
        Client(name="httpx", what="50 tasks on one connection", command=_httpx, calls=_last_number,
               present=lambda: bool(find_spec("httpx") and find_spec("h2"))),
        Client(name="curl", what="a hundred calls at once, over TLS", tls=True, command=_curl, present=lambda: _has_http2("curl"),
               calls=lambda output: output.split().count("200")),
        Client(name="node", what="ten sessions of 50 streams", command=_node, calls=_last_number,
               present=lambda: bool(shutil.which("node"))),
        Client(name="h2load", what="a hundred connections of a hundred streams", command=_h2load, calls=_succeeded,
               present=lambda: bool(shutil.which("h2load"))),
    )
}  # fmt: skip


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The results of one client."""

    client: str
    asked: int
    answered: int
    connections: int
    goodbyes: dict[str, int]
    """How the server ended connections, by its last words."""
    resets: int
    floods: float
    """The floods that the server's defences counted."""
    log: tuple[str, ...]
    """Entries that the log should not have."""
    said: str
    """The client's own errors, cut."""

    @property
    def wrong(self) -> list[str]:
        """The failures, in words."""
        said = [f"{self.answered} of {self.asked} calls were answered: {self.said}"] if self.answered != self.asked else []
        bad = {last: count for last, count in self.goodbyes.items() if not last.startswith("goaway 0")}
        said += [f"connections were ended by {bad}"] if bad else []
        said += [f"the defences counted {self.floods:g}"] if self.floods else []
        return said + [f"the log tells {what}" for what in self.log]


@contextmanager
def _served() -> Iterator[tuple[Relay, Served, Callable[[], float], Callable[[], tuple[str, ...]]]]:
    with serving(Attack(name="", what="", run=lambda attacker: None, tls=True)) as served:
        relay = Relay(served.port)

        def floods() -> float:
            return sum(value for sample, value in served.samples().items() if sample.startswith(_DEFENCES))

        def told() -> tuple[str, ...]:
            log = served.log()
            return (*tracebacks(log), *(events(log) & {"flood", "protocol error", "write stalled", "stream stalled"}))

        try:
            yield relay, served, floods, told
        finally:
            relay.close()


def call(client: Client, calls: int) -> Found:
    """Lets it make so many calls to a server of its own."""
    with tempfile.TemporaryDirectory(prefix="everywire-legal-") as folder, _served() as (relay, served, floods, told):
        url = f"https://localhost:{served.tls_port}" if client.tls else f"http://127.0.0.1:{relay.port}"
        command = client.command(url, calls, Path(folder))
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_PATIENCE)
        try:
            answered = client.calls(done.stdout)
        except (ValueError, IndexError):
            answered = 0
        return Found(
            client=client.name, asked=calls, answered=answered, connections=len(relay.ears), goodbyes=dict(relay.goodbyes),
            resets=relay.resets, floods=floods(), log=told(), said=f"{done.stderr[-500:]} {done.stdout[-200:]}".strip(),
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.legal", description=(__doc__ or "").partition(".")[0])
    parser.add_argument("names", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)}; all that are installed")
    parser.add_argument("--calls", type=int, default=10_000, help="of each [10000]")
    given = parser.parse_args()
    allow_descriptors(32768)
    failures: list[str] = []
    for name, client in CLIENTS.items():
        if given.names and name not in given.names:
            continue
        if not client.present():
            print(f"{name}: not installed")
            continue
        found = call(client, given.calls)
        print(f"{name}: {found.answered} of {found.asked} calls, {found.connections} connections, ended by {found.goodbyes}, "
              f"{found.resets} resets", flush=True)  # fmt: skip
        failures += [f"{name}: {what}" for what in found.wrong]
    print("\n".join(failures), file=sys.stderr)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
