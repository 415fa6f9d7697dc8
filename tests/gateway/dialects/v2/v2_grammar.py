"""The grammar of v2 requests against the codec, a gateway in memory over HTTP/1.1 and HTTP/2, and a server process.

    python -m tests.gateway.dialects.v2.v2_grammar --bodies 100000 --seed 7
    python -m tests.gateway.dialects.v2.v2_grammar --seed 7 --body 4711 --level server

The answer to a valid request must be what the identity model makes of it; any other request must get a refusal that names
the mistake. One connection takes all of them, so that each also shows that the one before left it usable.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import random
import socket
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, final

import trio

from gateway.client import Peer
from gateway.config import Config
from gateway.errors import TransportLost
from gateway.testing import MemoryGateway, memory_gateway
from protocols.events import Data, End, Head, Request
from protocols.http1.connection import HTTP1Connection
from tests.interop.served_grammar import declared
from tests.interop.servers import serving
from tests.protocols.v2.grammar.v2_grammar import CHOICES, Case, Choices, Model, Refusal, models, one_of
from tests.protocols.v2.grammar.v2_mutations import KINDS, case_of
from tests.protocols.v2.grammar.v2_oracle import IHCL, Wrong, check
from tests.protocols.v2.grammar.v2_ways import CodecServer

PATIENCE = 120.0
"""Seconds after which a request without an answer counts as one that hangs."""
MODELS = 40
_MODEL_CHOICES = 6000

Answered: TypeAlias = tuple[int, Mapping[bytes, bytes], bytes]


@final
@dataclass(frozen=True, slots=True)
class Sending:
    """A case as HTTP carries it: the path, the fields without the body's length, the body in pieces of a chunked upload
    or whole, and the case with what is due now."""

    case: Case
    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    pieces: tuple[bytes, ...]
    chunked: bool

    @property
    def may_close(self) -> bool:
        """True if the head is refused while much of the body is on the way: HTTP/1.1 must then close."""
        return self.case.kind in (*BY_THE_HEAD, "noise") and sum(map(len, self.pieces)) > 16_384


def table(seed: int) -> list[Model]:
    """The models of a seed."""
    return models(Choices(random.Random(f"models {seed}").randbytes(_MODEL_CHOICES)), MODELS)


def choices_of(seed: int, body: int) -> Choices:
    """The choices that the body of this number is made of."""
    return Choices(random.Random(f"{seed} {body}").randbytes(CHOICES))


def tensors_of(model: Model) -> str:
    """The model's declarations as JSON, for `declared`."""
    said = asdict(model)
    return json.dumps({key: said[key] for key in ("inputs", "outputs", "max_batch_size")}).replace("\x7f", "\\u007f")


# The HTTP request around a body

BY_THE_HEAD = ("a header that is no number", "two headers that differ", "another model", "an unknown coding")
TYPES = (
    b"application/json",
    b"application/octet-stream",
    b"application/x-www-form-urlencoded",
    b"text/plain",
    b"nonsense",
    b"",
)
ACCEPTED = (b"gzip", b"deflate", b"gzip, deflate", b"identity", b"gzip;q=0, deflate;q=0.5", b"*", b"br", b"", b"gzip;q=x")
CODING = ("content-encoding", "Content-Encoding", "gzip", "deflate")
"""The words that name a coding in a refusal."""
DECODERS: Mapping[bytes, Callable[[bytes], bytes]] = {b"gzip": gzip.decompress, b"deflate": zlib.decompress}


def sending_of(c: Choices, case: Case) -> Sending:
    """The case in one of HTTP's forms; some of them are a fault of their own."""
    body, headers = case.wire.body, [(IHCL, length) for length in case.wire.lengths]
    path = f"/v2/models/{case.model.name}{c.of(('', '', '/versions/1'))}/infer"
    if c.chance(60):
        headers.append((b"content-type", c.of(TYPES)))
    if c.chance(20):
        headers.append((b"accept-encoding", c.of(ACCEPTED)))
    if c.chance(3):
        case, path = _misdirected(c, case, path)
    elif c.chance(20):
        case, body = _coded(c, case, body, headers)
    chunked = c.chance(15)
    return Sending(case, path, tuple(headers), tuple(_pieces(c, body)) if chunked else (body,), chunked)


def _misdirected(c: Choices, case: Case, path: str) -> tuple[Case, str]:
    name = case.model.name
    wrong, word = c.of(((f"/v2/models/{name}x/infer", f"{name}x"), (f"/v2/models/{name}/versions/77/infer", "77")))
    return replace(case, due=Refusal((word,), 404), kind="another model"), wrong


def _coded(c: Choices, case: Case, body: bytes, headers: list[tuple[bytes, bytes]]) -> tuple[Case, bytes]:
    """The body with a content coding; a damaged one is due a refusal that names it, whatever else the case has."""
    name = c.of((b"gzip", b"deflate", b"GZIP", b"x-gzip", b"identity", b"Deflate"))
    coded = body
    match name.lower():
        case b"gzip" | b"x-gzip":
            coded = gzip.compress(body, c.of((6, 1, 0)), mtime=0)
        case b"deflate":
            coded = zlib.compress(body, c.of((6, 1, 0)))
    headers.append((b"content-encoding", name))
    if case.kind in (*BY_THE_HEAD, "noise") or name == b"identity" or not c.chance(25):
        return case, coded
    if c.chance(25):
        headers[-1] = b"content-encoding", c.of((b"br", b"zstd", b"gzip, br", b"compress", b"gzip;q=1", b"gz ip"))
        return replace(case, due=Refusal((CODING,), 415), kind="an unknown coding"), coded
    damaged = c.of((coded[:-1], coded[: 1 + c.below(len(coded) - 1)], coded[:-1] + bytes([coded[-1] ^ 1]), b"not " + coded))
    return replace(case, due=Refusal((CODING,)), kind="a damaged coding"), damaged


def _pieces(c: Choices, body: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(body):
        size = c.of((1, 7, 100, 5000, 60000))
        if len(body) - at > 200 * size:
            size = 60000
        yield body[at : at + size]
        at += size


def check_answer(sending: Sending, answered: Answered, *, closes: bool) -> None:
    """As the oracle's check, of what the reply's own coding leaves; and the connection must stay."""
    status, headers, body = answered
    if (length := headers.get(b"content-length")) is not None and int(length) != len(body):
        raise Wrong(f"content-length {length!r} with {len(body)} bytes")
    coding = headers.get(b"content-encoding")
    if coding is not None:
        accepted = dict(sending.headers).get(b"accept-encoding", b"")
        if status != 200 or coding not in accepted or coding + b";q=0," in accepted:
            raise Wrong(f"status {status} with the content coding {coding!r} for {accepted!r}")
        body = DECODERS[coding](body)
    check(sending.case, status, headers, body)
    if closes and not sending.may_close:
        raise Wrong("the connection is to be closed")


# A gateway in memory


class _Errors(logging.Handler):
    """Collects the errors that the gateway logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage() + (f": {record.exc_info[1]!r}" if record.exc_info else ""))


@final
class MemoryServer:
    """Sends cases to a gateway in memory, over one connection of each kind."""

    def __init__(self, served: MemoryGateway, errors: _Errors) -> None:
        self._served, self._errors = served, errors
        self._peers: dict[bool, tuple[Peer, int]] = {}
        self.connections = 0
        """That were made: more than one of a kind where some did not stay usable."""

    async def check(self, sending: Sending, *, http2: bool) -> None:
        """Raises Wrong unless the answer is the one that is due, and soon. The connection is then another one."""
        name = "http2" if http2 else "http1"
        peer, stream = self._peers.pop(http2) if http2 in self._peers else self._connect(http2)
        answered = None
        try:
            with trio.move_on_after(PATIENCE):
                await peer.send(*_events(stream, sending))
                answered = await peer.read_answer(stream)
        except TransportLost as lost:
            raise Wrong(f"{name}: {lost}") from None
        if answered is None:
            raise Wrong(f"{name}: no answer")
        logged, self._errors.told = self._errors.told, []
        if logged:
            raise Wrong(f"{name}: logged {', '.join(logged)[:400]}")
        closes = isinstance(peer.machine, HTTP1Connection) and peer.machine.must_close
        check_answer(sending, answered, closes=closes)
        if closes:
            peer.close()
        else:
            self._peers[http2] = peer, stream + (2 if http2 else 1)

    def _connect(self, http2: bool) -> tuple[Peer, int]:
        self.connections += 1
        return self._served.http2() if http2 else self._served.http1(), 1

    async def check_budget(self) -> None:
        """Raises Wrong unless all memory has been given back."""
        await trio.testing.wait_all_tasks_blocked()
        if used := self._served.gateway.budget.used:
            raise Wrong(f"{used} bytes of the budget are still in use")


def _events(stream: int, sending: Sending) -> Sequence[Any]:
    length = None if sending.chunked else len(sending.pieces[0])
    headers = [*sending.headers, *([] if length is None else [(b"content-length", b"%d" % length)])]
    head = Request(stream=stream, head=Head(method=b"POST", target=sending.path.encode(), authority=b"localhost", headers=headers, content_length=length))  # fmt: skip
    return [head, *(Data(stream=stream, buffers=(piece,)) for piece in sending.pieces if piece), End(stream=stream)]


@asynccontextmanager
async def memory_server(served: Sequence[Model]) -> AsyncIterator[MemoryServer]:
    """A gateway in memory with these models."""
    limits = replace(Config().limits, requests_per_connection=10**9)
    errors = _Errors()
    logging.getLogger().addHandler(errors)
    try:
        specs = [replace(declared(tensors_of(model)), name=model.name) for model in served]
        async with memory_gateway(specs, Config(limits=limits)) as gateway:
            yield MemoryServer(gateway, errors)
    finally:
        logging.getLogger().removeHandler(errors)


# A server process


@final
class ProcessServer:
    """Sends cases to a server over one TCP connection, written and read by hand."""

    def __init__(self, port: int) -> None:
        self._address = "127.0.0.1", port
        self._sock: socket.socket | None = None

    def check(self, sending: Sending) -> None:
        """Raises Wrong unless the answer is the one that is due, and soon. The connection is then another one."""
        sock, self._sock = self._sock or socket.create_connection(self._address), None
        sock.settimeout(PATIENCE)
        try:
            sock.sendall(_written(sending))
            answered = _read(sock)
        except OSError as lost:
            sock.close()
            raise Wrong(f"server: {lost!r}") from None
        closes = b"close" in answered[1].get(b"connection", b"")
        check_answer(sending, answered, closes=closes)
        if closes:
            sock.close()
        else:
            self._sock = sock

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()


def _written(sending: Sending) -> bytes:
    lines = [f"POST {sending.path} HTTP/1.1".encode(), b"host: localhost", *(b"%b: %b" % field for field in sending.headers)]
    if not sending.chunked:
        return b"\r\n".join([*lines, b"content-length: %d" % len(sending.pieces[0]), b"", sending.pieces[0]])
    chunks = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in sending.pieces]
    return b"\r\n".join([*lines, b"transfer-encoding: chunked", b"", b"".join(chunks) + b"0\r\n\r\n"])


def _read(sock: socket.socket) -> Answered:
    text = bytearray()
    while (end := text.find(b"\r\n\r\n")) < 0:
        text += _some(sock)
    first, *lines = bytes(text[:end]).split(b"\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    body = text[end + 4 :]
    while len(body) < int(headers[b"content-length"]):
        body += _some(sock)
    return int(first.split()[1]), headers, bytes(body)


def _some(sock: socket.socket) -> bytes:
    data = sock.recv(1 << 20)
    if not data:
        raise ConnectionError("the server has closed the connection")
    return data


@contextmanager
def process_server(served: Sequence[Model], folder: Path) -> Iterator[ProcessServer]:
    """`python -m gateway` with these models, which must end well."""
    lines = ["limits.requests_per_connection = 1000000000"]
    for model in served:
        options = f"options = {{ tensors = {json.dumps(tensors_of(model))} }}"
        lines.append(f'[models.{model.name}]\nfactory = "served_grammar:declared"\n{options}')
    with serving(folder, "served_grammar.py", lines) as server:
        client = ProcessServer(server.port)
        try:
            yield client
        finally:
            client.close()


# The runner

LEVELS = ("codec", "memory", "server")


async def run(
    seed: int, bodies: Sequence[int], levels: Sequence[str], tell: Callable[[str], None]
) -> tuple[int, Counter[str]]:
    """The failures, and how many there were of each kind of body."""
    served, kinds, failures = table(seed), Counter[str](), 0
    codec = CodecServer()
    async with memory_server(served) as memory:
        with ExitStack() as stack:
            if "server" in levels:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                process = stack.enter_context(process_server(served, folder))
            for number in bodies:
                c = choices_of(seed, number)
                sending = sending_of(c, case := case_of(c, one_of(c, served)))
                kinds[sending.case.kind] += 1
                for level in levels:
                    try:
                        match level:
                            case "codec":
                                codec.check(case)
                            case "memory":
                                await memory.check(sending, http2=number % 2 == 1)
                                if number % 100 == 0:
                                    await memory.check_budget()
                            case _:
                                process.check(sending)
                    except Exception as wrong:
                        failures += 1
                        tell(f"--seed {seed} --body {number} --level {level}: {sending.case.kind}: {wrong!r}")
        await memory.check_budget()
    return failures, kinds


def _command() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gateway.dialects.v2.v2_grammar", description=__doc__)
    parser.add_argument("--bodies", type=int, default=10_000, help="how many, from 0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--body", type=int, help="this one alone, shown")
    parser.add_argument("--level", choices=LEVELS, action="append", help="all, where none is named")
    options = parser.parse_args()
    bodies = range(options.bodies) if options.body is None else [options.body]
    if options.body is not None:
        c = choices_of(options.seed, options.body)
        print(sending := sending_of(c, case_of(c, one_of(c, table(options.seed)))), sending.case.wire.body, sep="\n")
    began = time.perf_counter()
    failures, kinds = trio.run(run, options.seed, bodies, options.level or LEVELS, print)
    seconds = time.perf_counter() - began
    valid, unseen = kinds["valid"], [kind for kind in KINDS if not kinds[kind]]
    print(f"{len(bodies)} bodies, {valid} valid, others of {len(kinds) - 1} kinds; {failures} failures; {seconds:.0f} s")
    if unseen and options.body is None:
        print(f"never made: {', '.join(unseen)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(_command())
