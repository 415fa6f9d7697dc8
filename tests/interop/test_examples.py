"""Each program of examples/ as a user starts it, with clients of others; SIGTERM and Ctrl-C let what runs come to its end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import pytest
import trio
import trio_websocket

from gateway.net import development_certificate

ROOT = Path(__file__).parents[2]
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
LONG = 2**20
"""Bytes of each word as it is sent: all of them, twice, are more than kernels hold, so that an answer ends when it is read."""
SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
LIVE = "drained: {'complete': 1}\n"
"""The program's output if one stream was live and came to its end."""


BUSY = {"event loop blocked\n", "event loop runs again\n"}
"""The program's warnings if the machine is busy."""


def lines(said: IO[str]) -> Iterator[str]:
    """The lines of a program, as they come, without those of a busy machine."""
    return (line for line in iter(said.readline, "") if line not in BUSY)


class Program:
    """An example that runs, and the first line that it said."""

    def __init__(self, process: subprocess.Popen[str], line: str) -> None:
        self.process, self.line = process, line
        self.ports = [int(port) for port in re.findall(r":(\d+)\b", line)]

    def ends(self, number: int) -> str:
        """Sends the signal; returns the output after it, once the program has ended with 0."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self, code: int = 0) -> str:
        assert self.process.stdout is not None
        said = "".join(lines(self.process.stdout))
        assert self.process.wait(120) == code, said
        return said


@contextmanager
def running(name: str, *arguments: object) -> Iterator[Program]:
    """The example with these arguments, until the end of the block."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EVERYWIRE_")} | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)],
        env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    with process.stdout:
        try:
            line = next(lines(process.stdout), "")
            assert line.startswith("listening on "), line + process.stdout.read()
            yield Program(process, line)
        finally:
            process.kill()
            process.wait()


@contextmanager
def streaming(curl: str, url: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """curl, when the first word of its answer has come. The rest of it stays where it is until it is read."""
    command = [curl, "-sSN", "--max-time", "120", *options, url, "-d", "@-"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout:
        try:
            with process.stdin as asked:
                json.dump({"inputs": " ".join(word.ljust(LONG, ".") for word in WORDS), "stream": True}, asked)
            assert json.loads(process.stdout.readline())["token"]["text"].startswith("one.")
            yield process
        finally:
            process.kill()
            process.wait()


def rest(client: subprocess.Popen[str]) -> list[str]:
    """The words of an answer that came to its end."""
    assert client.stdout is not None
    *_, last = client.stdout
    assert client.wait(120) == 0
    words = json.loads(last)["generated_text"].split()
    assert [len(word) for word in words] == [LONG] * len(words)
    return [word.rstrip(".") for word in words]


def got(curl: str, url: str, *options: str) -> object:
    """The JSON that a GET is answered with."""
    command = [curl, "-sS", "--max-time", "120", *options, url]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=150).stdout)


def ask(status: socket.socket, question: str) -> dict[str, object]:
    """One line to the status service, and its answer."""
    status.sendall(question.encode() + b"\n")
    line = b""
    while not line.endswith(b"\n"):
        piece = status.recv(65536)
        assert piece, "the status service has ended"
        line += piece
    answer: dict[str, object] = json.loads(line)
    return answer


@SIGNALS
def test_beside_a_service_both_answer_and_end_together(curl: str, number: int) -> None:
    with running("beside_a_service.py", 0, 0) as program:
        port, status_port = program.ports
        with socket.create_connection(("127.0.0.1", status_port), 120) as status:
            assert ask(status, "models") == {"speak": "ready"}
            assert "ask for" in str(ask(status, "what")["error"])
            with streaming(curl, f"http://127.0.0.1:{port}/invocations") as client:
                assert ask(status, "counts")["exchanges"] == 1
                program.process.send_signal(number)
                while not ask(status, "counts")["draining"]:
                    pass
                assert rest(client) == WORDS
            assert program.ended() == LIVE
            assert status.recv(1) == b""


def test_beside_a_service_a_client_of_it_that_leaves_or_says_nonsense_ends_nothing(curl: str) -> None:
    with running("beside_a_service.py", 0, 0) as program:
        port, status_port = program.ports
        with socket.create_connection(("127.0.0.1", status_port), 120) as rude:
            rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # its end is a reset
            rude.sendall(b"models\n" * 100)
        with socket.create_connection(("127.0.0.1", status_port), 120) as long:
            long.sendall(bytes(1001))
            assert long.recv(1) == b""
        with streaming(curl, f"http://127.0.0.1:{port}/invocations") as client:
            assert rest(client) == WORDS
        assert program.ends(signal.SIGTERM) == "drained: {}\n"


@SIGNALS
@pytest.mark.parametrize("http", ["--http1.1", "--http2-prior-knowledge"])
def test_under_starlette_its_routes_and_the_gateways_answer_and_a_drain_lets_a_stream_end(
    curl: str, number: int, http: str
) -> None:
    with running("under_starlette.py", 0) as program:
        (port,) = program.ports
        url = f"http://127.0.0.1:{port}"
        index = subprocess.run([curl, "-sS", http, url + "/"], capture_output=True, text=True, check=True, timeout=120)
        assert json.loads(index.stdout) == {"speak": "/inference/v2/models/speak", "echo": "/inference/v2/models/echo"}
        metadata = url + json.loads(index.stdout)["speak"]
        about = subprocess.run([curl, "-sS", http, metadata], capture_output=True, text=True, check=True, timeout=120)
        assert json.loads(about.stdout)["name"] == "speak"
        with streaming(curl, url + "/inference/invocations", http) as client:
            program.process.send_signal(number)
            assert rest(client) == WORDS
        assert program.ended() == LIVE


async def test_under_starlette_its_websockets_and_the_gateways_answer_and_a_drain_closes_them() -> None:
    with running("under_starlette.py", 0) as program, trio.fail_after(120):
        url = f"ws://127.0.0.1:{program.ports[0]}"
        async with trio_websocket.open_websocket_url(url + "/shout") as theirs:
            await theirs.send_message("hello")
            assert await theirs.get_message() == "HELLO"
        async with trio_websocket.open_websocket_url(
            url + "/inference/models/echo/invocations-bidirectional-stream"
        ) as ours:
            for message in ("hello", b"\0\xff"):
                await ours.send_message(message)
                assert await ours.get_message() == message
            program.process.send_signal(signal.SIGTERM)
            # nobody waits for a session without an end; two of one number at once would be one
            program.process.send_signal(signal.SIGINT)
            with pytest.raises(trio_websocket.ConnectionClosed) as closed:
                await ours.get_message()
            assert closed.value.reason is not None
            assert closed.value.reason.code in (1001, 1012)
            await ours._stream.aclose()  # which trio-websocket 0.12 leaves to the collector where the server has closed
        assert await trio.to_thread.run_sync(program.ended) == "drained: {'drained': 1}\n"


@SIGNALS
def test_under_fastapi_its_routes_of_both_kinds_and_the_gateways_answer_and_a_drain_lets_a_stream_end(
    curl: str, needs: Callable[[str, str], Any], number: int
) -> None:
    needs("fastapi", "fastapi")
    with running("under_fastapi.py", 0) as program:
        url = f"http://127.0.0.1:{program.ports[0]}"
        assert got(curl, url + "/known") == {"speak": "ready"}
        assert got(curl, url + "/square?number=12") == 144
        with streaming(curl, url + "/inference/invocations") as client:
            program.process.send_signal(number)
            assert rest(client) == WORDS
        assert program.ended() == LIVE


@SIGNALS
def test_beside_asyncio_the_model_asks_its_engine_and_a_drain_lets_a_stream_end(curl: str, number: int) -> None:
    with running("beside_asyncio.py", 0, 0) as program:
        port, status_port = program.ports
        with socket.create_connection(("127.0.0.1", status_port), 120) as status:
            with streaming(curl, f"http://127.0.0.1:{port}/invocations") as client:
                program.process.send_signal(number)
                assert rest(client) == WORDS
            status.sendall(b"said\n")
            assert status.recv(100) in (b"8 words\n", b"")  # it ends with the gateway
        assert program.ended() == LIVE


def test_beside_asyncio_a_client_that_leaves_cancels_what_the_engine_is_asked(curl: str) -> None:
    with running("beside_asyncio.py", 0, 0) as program:
        port, status_port = program.ports
        with socket.create_connection(("127.0.0.1", status_port), 120) as status:
            for _ in range(3):
                with streaming(curl, f"http://127.0.0.1:{port}/invocations") as client:
                    client.kill()
            with streaming(curl, f"http://127.0.0.1:{port}/invocations") as client:
                assert rest(client) == WORDS
            status.sendall(b"said\n")
            said = int(status.recv(100).split()[0])
            assert 8 + 3 <= said < 8 + 3 * 8  # not all words to those that left
        assert program.ends(signal.SIGTERM) == "drained: {}\n"


@SIGNALS
def test_under_uvicorn_a_gateway_beside_its_application_is_drained_at_its_end(
    curl: str, needs: Callable[[str, str], Any], number: int
) -> None:
    needs("fastapi", "fastapi")
    needs("uvicorn", "uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with running("under_uvicorn.py", port, 0) as program:
        with streaming(curl, f"http://127.0.0.1:{program.ports[0]}/invocations") as client:
            while (known := got(curl, f"http://127.0.0.1:{port}/known", "--retry", "50", "--retry-all-errors")) is None:
                pass
            assert known == {"speak": "ready"}
            program.process.send_signal(number)
            assert rest(client) == WORDS
        said = program.ended(-signal.SIGTERM if number == signal.SIGTERM else 0)  # uvicorn hands the signal on at its end
        assert said.startswith(LIVE)


@pytest.fixture
def names(tmp_path: Path) -> Path:
    """A folder with the certificate of two names."""
    made = development_certificate.ensure(tmp_path / "made", now=datetime.now(UTC))
    (tmp_path / "names").mkdir()
    for name in ("localhost", "http1.localhost"):
        (tmp_path / "names" / f"{name}.pem").write_bytes(made.cert.read_bytes())
        (tmp_path / "names" / f"{name}-key.pem").write_bytes(made.key.read_bytes())
    (tmp_path / "names" / "ca.pem").write_bytes(made.ca.read_bytes())
    return tmp_path / "names"


@SIGNALS
@pytest.mark.parametrize("http", ["--http1.1", "--http2"])
def test_behind_an_own_tls_listener_a_drain_lets_a_stream_end(curl: str, names: Path, number: int, http: str) -> None:
    with running("own_tls_listener.py", names, 0) as program:
        at = f"localhost:{program.ports[0]}"
        options = ["--cacert", str(names / "ca.pem"), "--resolve", at + ":127.0.0.1", http]
        with streaming(curl, f"https://{at}/invocations", *options) as client:
            program.process.send_signal(number)
            assert rest(client) == WORDS
        assert program.ended() == LIVE


def handshake(port: int, name: str | None, ca: Path) -> ssl.SSLSocket:
    """A connection whose client asks for that name, and offers HTTP/2 and HTTP/1.1."""
    context = ssl.create_default_context(cafile=str(ca))
    context.check_hostname = False
    context.set_alpn_protocols(["h2", "http/1.1"])
    below = socket.create_connection(("127.0.0.1", port), 120)
    try:
        return context.wrap_socket(below, server_hostname=name, suppress_ragged_eofs=False)
    except BaseException:
        below.close()
        raise


def test_an_own_tls_listener_chooses_by_name_and_refuses_who_asks_for_another(names: Path) -> None:
    with running("own_tls_listener.py", names, 0) as program:
        (port,) = program.ports
        ca = names / "ca.pem"
        with handshake(port, "localhost", ca) as tls:
            assert tls.selected_alpn_protocol() == "h2"
        for name in ("elsewhere.example", None):
            with pytest.raises(ssl.SSLError, match=r"(?i)unrecognized.name|eof"):
                handshake(port, name, ca)
        with handshake(port, "http1.localhost", ca) as tls:
            assert tls.selected_alpn_protocol() == "http/1.1"
            tls.sendall(b"GET /ping HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            answer = b""
            while piece := tls.recv(65536):  # to TLS's own end: ssl raises where there is none
                answer += piece
            assert answer.startswith(b"HTTP/1.1 200")
        assert program.ends(signal.SIGTERM) == "drained: {}\n"


def test_an_own_tls_listener_takes_so_many_of_one_address_and_more_when_some_have_left(names: Path) -> None:
    with running("own_tls_listener.py", names, 0) as program, ExitStack() as stack:
        (port,) = program.ports
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 120)) for _ in range(101)]
        assert silent[-1].recv(1) == b""
        for one in silent[:-1]:
            one.close()
        while True:  # until their places are free
            try:
                handshake(port, "localhost", names / "ca.pem").close()
                break
            except (OSError, ssl.SSLError):
                continue
        assert program.ends(signal.SIGTERM) == "drained: {}\n"
