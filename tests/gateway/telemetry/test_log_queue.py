"""The log never keeps its server waiting: its reader may stop, and unwritten records are counted and said."""

from __future__ import annotations

import fcntl
import gc
import io
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import tracemalloc
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from gateway.telemetry import log_queue
from gateway.telemetry.log_queue import QueuedHandler
from gateway.telemetry.logging_setup import JSONFormatter, speaking_for_python
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
SETPIPE_SZ = 1031  # F_SETPIPE_SZ, which Python 3.11 knows on Linux alone
SMALL = 4096
PATIENCE = 30.0

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the size of a pipe is set")


@contextmanager
def logger(stream: IO[str]) -> Iterator[logging.Logger]:
    """A log that goes to the stream and nowhere else."""
    log, handler = logging.Logger("someone"), QueuedHandler(stream)
    handler.setFormatter(JSONFormatter())
    log.addHandler(handler)
    try:
        yield log
    finally:
        handler.close()


@contextmanager
def pipe() -> Iterator[tuple[IO[bytes], IO[str]]]:
    """A pipe with room for very little, which nobody reads yet."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, SETPIPE_SZ, SMALL)
    with os.fdopen(reading, "rb") as source, os.fdopen(writing, "w", encoding="utf-8") as sink:
        yield source, sink


def test_who_logs_goes_on_while_nobody_reads_and_the_next_line_says_how_many_were_dropped() -> None:
    with pipe() as (source, sink), logger(sink) as log:
        before, sent = log_queue.dropped(), log_queue.RECORDS + 3000
        for n in range(sent):
            log.info("line", extra={"n": n})
        lost = log_queue.dropped() - before
        assert 3000 - 200 < lost <= 3000  # those that the thread has in hand, and in the pipe, leave room
        lines = [json.loads(source.readline()) for _ in range(sent - lost + 1)]
        assert [line["n"] for line in lines[:-1]] == list(range(sent - lost))
        assert (lines[-1]["event"], lines[-1]["count"], lines[-1]["level"]) == ("log records dropped", lost, "warning")
        log.info("here again")
        assert json.loads(source.readline())["event"] == "here again"


def test_the_queue_is_bounded_in_bytes_too() -> None:
    with pipe() as (source, sink), logger(sink) as log:
        before, size = log_queue.dropped(), 1024 * 1024
        for _ in range(20):
            log.info("x" * size)
        assert 20 - 8 - 1 <= log_queue.dropped() - before <= 20 - 7
        thread = threading.Thread(target=source.read)
        thread.start()  # or the end would wait for its second
        log.handlers[0].close()
        sink.close()
        thread.join()


def test_many_that_wait_take_little_more_than_their_text() -> None:
    with pipe() as (source, sink), logger(sink) as log:
        tracemalloc.start()
        try:
            for n in range(4000):
                log.info("exchange", extra={f"field-{at}": f"{n} of an access line" for at in range(20)})
            waiting, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        text: list[bytes] = []
        thread = threading.Thread(target=lambda: text.append(source.read()))
        thread.start()
        log.handlers[0].close()
        sink.close()
        thread.join()
    assert text[0].count(b"\n") == 4000
    assert waiting < 2 * len(text[0])


def test_what_may_change_or_hold_memory_is_rendered_when_it_is_logged() -> None:
    class Large:
        """A large object in an exception's frame, as a refused body is."""

    def refuse() -> weakref.ref[Large]:
        held = Large()
        try:
            raise ValueError("too large")
        except ValueError:
            log.exception("refused")
        return weakref.ref(held)

    gc.disable()
    try:
        with pipe() as (source, sink), logger(sink) as log:
            log.info("x" * 2 * SMALL)  # the thread is busy from here on
            models, bytes_ = ["one"], bytearray(b"first")
            log.info("serving", extra={"models": models})
            log.info("%s and %s", models, bytes_)
            models.append("two")
            bytes_[:] = b"other"
            assert refuse()() is None
            source.readline()
            served, said, refused = (json.loads(source.readline()) for _ in range(3))
    finally:
        gc.enable()
    assert served["models"] == ["one"]
    assert said["event"] == "['one'] and bytearray(b'first')"
    assert "ValueError: too large" in refused["exc_info"]


def test_the_end_waits_a_second_for_who_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    wait = threading.Event.wait

    def waited(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout == log_queue.PATIENCE:
            asked.append(timeout)
            return False
        return wait(event, timeout)

    with pipe() as (source, sink):
        log, handler = logging.Logger("someone"), QueuedHandler(sink)
        log.addHandler(handler)
        log.info("x" * 2 * SMALL)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Event, "wait", waited)
            handler.flush()  # as the server's end, then logging's
            handler.flush()
            handler.close()
            handler.close()
            handler.flush()
        assert asked == [1.0]
        log.info("nobody writes this")
        assert source.readline() == b"x" * 2 * SMALL + b"\n"
        handler._thread.join(PATIENCE)


def test_a_record_that_cannot_be_formatted_says_so_and_the_thread_goes_on() -> None:
    with pipe() as (source, sink), logger(sink) as log:
        log.info("%d", "no number")
        log.info("next")
        lines = [json.loads(source.readline()) for _ in range(2)]
    assert [line["event"] for line in lines] == ["a log record cannot be formatted", "next"]
    assert (lines[0]["level"], lines[0]["record"]) == ("info", "'%d'")


def test_a_reader_that_is_gone_costs_lines_and_nothing_else() -> None:
    with pipe() as (source, sink), logger(sink) as log:
        before = log_queue.dropped()
        source.close()
        log.info("one")
        log.handlers[0].flush()
        assert log_queue.dropped() >= before + 1


def test_a_reader_that_is_gone_is_not_told_how_much_it_misses() -> None:
    class Gone(io.StringIO):
        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            raise BrokenPipeError

    stream = Gone()
    with logger(stream) as log:
        log.warning("nobody reads this")
        handler = log.handlers[0]
        assert isinstance(handler, QueuedHandler)
        for _ in range(100):  # turns of the thread; the number of dropped records would be dropped itself, and so on
            turned = threading.Event()
            handler._queue.put((turned, 0))
            turned.wait()
        assert stream.writes == 1


@pytest.mark.programs
def test_a_forked_child_writes_its_lines_itself() -> None:
    with pipe() as (source, sink), logger(sink) as log:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads is the story here
            child = os.fork()
        if not child:
            log.info("from the child")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        log.info("from the parent")
        assert [json.loads(source.readline())["event"] for _ in range(2)] == ["from the child", "from the parent"]


def test_what_python_would_write_itself_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Careless:
        def __del__(self) -> None:
            raise ValueError("in a finalizer")

    def fail() -> None:
        raise ValueError("in a thread")

    with speaking_for_python():
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("a model's own", stacklevel=1)
        del (careless := [Careless()])[:]
        thread = threading.Thread(target=fail, name="of a model")
        thread.start()
        thread.join()
    said = [(record.name, record.getMessage(), str(record.exc_info and record.exc_info[1])) for record in caplog.records]
    assert said[0][0] == "py.warnings"
    assert "a model's own" in said[0][1]
    assert said[1:] == [
        ("gateway", "exception ignored", "in a finalizer"),
        ("gateway", "a thread has ended with an exception", "in a thread"),
    ]
    assert careless == []


@pytest.mark.programs
def test_a_process_without_standard_error_logs_to_nobody() -> None:
    code = (
        "import logging, sys\nfrom gateway.config import LogConfig\nfrom gateway.telemetry.logging_setup import configure, flush\n"
        "assert sys.stderr is None\nconfigure(LogConfig())\nlogging.getLogger('gateway').error('lost')\nflush()\nprint('on')"
    )
    command = ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, code]
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=PATIENCE, check=False)
    assert (ran.returncode, ran.stdout) == (0, b"on\n")


# -- a server of its own -----------------------------------------------------------------------------------------------


@contextmanager
def serving(code: str = "pass") -> Iterator[tuple[subprocess.Popen[bytes], int, IO[bytes]]]:
    """A gateway whose standard error is a small pipe, of which only the lines until it serves have been read. Its
    queue is a short one."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, SETPIPE_SZ, SMALL)
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", f"import gateway.telemetry.log_queue\ngateway.telemetry.log_queue.RECORDS = 256\n{code}\nfrom gateway.cli.main import program\nprogram(prog_name='everywire')",
         "--port", str(port), "--log-format", "json", "--set", "log.access=all", "--model", "identity=models.library.tensors:identity"],
        cwd=ROOT, stdin=subprocess.DEVNULL, stderr=writing,
    )  # fmt: skip
    os.close(writing)
    with os.fdopen(reading, "rb", buffering=0) as log:
        try:
            events: list[dict[str, Any]] = []
            while not events or events[-1]["event"] != "serving":
                line = b""
                while not line.endswith(b"\n"):
                    assert select.select([log], [], [], PATIENCE)[0]
                    byte = log.read(1)
                    assert byte
                    line += byte
                events.append(json.loads(line))
            yield process, port, log
        finally:
            process.kill()
            process.wait()


def ask(port: int, times: int) -> None:
    """Sends `times` requests on one connection, 100 at once, and reads their answers."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as sock, sock.makefile("rb") as answers:
        for _ in range(times // 100):
            sock.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
            for _ in range(100):
                assert answers.readline().startswith(b"HTTP/1.1 200")
                length = 0
                while (line := answers.readline()) != b"\r\n":
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                answers.read(length)


@pytest.mark.programs
def test_a_server_whose_log_nobody_reads_answers_drains_and_ends() -> None:
    with serving() as (process, port, _):
        ask(port, 1000)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


@pytest.mark.programs
def test_a_reader_that_comes_back_learns_how_many_lines_it_has_missed() -> None:
    with serving() as (process, port, log):
        ask(port, 1000)
        data = b""
        while b"log records dropped" not in data:
            assert select.select([log], [], [], PATIENCE)[0]
            data += log.read(65536)
        process.send_signal(signal.SIGTERM)
        while piece := log.read(65536):
            data += piece
        assert process.wait(PATIENCE) == 0
    events = [json.loads(line) for line in data.splitlines()]
    told = [event["event"] for event in events]
    lost = sum(event["count"] for event in events if event["event"] == "log records dropped")
    assert lost > 0
    assert told.count("exchange") + lost == 1000
    assert told[-4:] == ["signal", "draining", "drained", "drain report"]


@pytest.mark.programs
def test_a_server_that_crashes_ends_though_nobody_reads_its_last_words() -> None:
    code = (
        "def tick(self, now): raise AssertionError('the last words')\n"
        "from gateway.core.memory import BodyPool\nBodyPool.tick = tick\n"
    )
    with serving(code) as (process, port, _):
        ask(port, 100)
        assert process.wait(PATIENCE) == 1


def test_lines_of_several_writers_to_one_pipe_are_whole() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as source, os.fdopen(writing, "w", encoding="utf-8") as sink:
        handlers = [QueuedHandler(sink, shared=True) for _ in range(2)]
        logs = []
        for n, handler in enumerate(handlers):
            handler.setFormatter(JSONFormatter())
            logs.append(logging.Logger(f"writer {n}"))
            logs[-1].addHandler(handler)
        for n in range(300):
            for log in logs:
                log.info("x" * (n % 50) * 20)
        lines = []
        while len(lines) < 600:
            lines.append(json.loads(source.readline()))
        assert {line["logger"] for line in lines} == {"writer 0", "writer 1"}
        for handler in handlers:
            handler.close()


def test_what_is_written_at_once_is_no_more_than_a_pipe_takes_whole() -> None:
    lines = ["a" * 1500 + "\n", "b" * 1500 + "\n", "c" * 1500 + "\n", "d" * 9000 + "\n", "e\n"]
    together = list(log_queue._atomic(lines))
    assert ["".join(some)[0] + str(len(some)) for some in together] == ["a2", "c1", "d1", "e1"]
    assert [line for some in together for line in some] == lines
