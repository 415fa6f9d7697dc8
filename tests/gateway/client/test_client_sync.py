"""The client for programs without an event loop: a gateway on loopback in another thread, and what its models hear."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from gateway.client import BrokenOff, Refused, generate, grpc_infer, infer, invoke, lmi, openai
from gateway.client.portal import _Run
from gateway.client.sync import Client, Closed, Duplex
from gateway.config import Config, DrainConfig, ListenConfig, TLSConfig
from gateway.errors import TransportLost
from gateway.gateway import Gateway
from gateway.net import development_certificate
from gateway.net.tls_context import client_context
from models.adapt import spec_of
from models.errors import ModelError
from models.library.tensors import identity
from models.messages import Family, InferRequest, Part, Prompt, Token
from models.session import Session

ROOT = Path(__file__).parents[3]


class Models:
    """The models, and what they have heard; `left` is set when one is cancelled."""

    def __init__(self) -> None:
        self.begun, self.left = threading.Event(), threading.Event()
        self.told = 0

    async def words(self, prompt: Prompt) -> AsyncIterator[str]:
        """The prompt's words; `fail` fails, `wait` waits for ever, and `interrupt` presses Ctrl-C before it does."""
        try:
            for word in prompt.text.split():
                self.begun.set()
                if word == "fail":
                    raise ModelError("the word said fail", code="SaidFail")
                if word == "interrupt":
                    os.kill(os.getpid(), signal.SIGINT)
                if word in ("wait", "interrupt"):
                    await trio.sleep_forever()
                yield word + " "
        except trio.Cancelled:
            self.left.set()
            raise

    async def stuck(self, request: InferRequest) -> dict[str, Any]:
        """Waits for ever."""
        try:
            self.begun.set()
            await trio.sleep_forever()
        except trio.Cancelled:
            self.left.set()
            raise

    async def endless(self, prompt: Prompt) -> AsyncIterator[Token]:
        """Tokens of a kilobyte for ever."""
        try:
            while True:
                yield Token(text="x" * 1000, id=self.told)
                self.told += 1
        except (trio.Cancelled, GeneratorExit):
            self.left.set()
            raise

    async def echo(self, session: Session[Part, Part]) -> None:
        """Parts come back."""
        try:
            async for part in session:
                await session.send(part)
        except trio.Cancelled:
            self.left.set()
            raise

    async def flood(self, session: Session[Part, Part]) -> None:
        """Parts of 64 KiB for ever; takes none."""
        try:
            while True:
                await session.send(Part(data=bytes(65536)))
                self.told += 1
        except trio.Cancelled:
            self.left.set()
            raise


class Served:
    """A gateway that serves in a thread, and its models."""

    def __init__(self, config: Config) -> None:
        self.models = models = Models()
        specs = [spec_of(models.words, "words"), spec_of(models.endless, "endless"), spec_of(identity, "identity")]
        specs += [spec_of(models.stuck, "stuck")]
        specs += [spec_of(getattr(models, name), name, family=Family.PARTS) for name in ("echo", "flood")]
        self.gateway = Gateway(config, specs)
        self._up, self._stop = threading.Event(), trio.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._serve,))
        self._thread.start()
        assert self._up.wait(60)

    async def _serve(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as nursery:
            await nursery.start(self.gateway.serve)
            self._up.set()
            await self._stop.wait()
            nursery.cancel_scope.cancel()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    def stop(self) -> None:
        """All at once."""
        if self._thread.is_alive():
            self._token.run_sync_soon(self._stop.set)
            self._thread.join(60)
            assert not self._thread.is_alive()


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served(Config(listen=ListenConfig(host="127.0.0.1", port=0), drain=DrainConfig(timeout=0.1)))
    yield served
    served.stop()
    counts = served.gateway.counts()
    assert (counts.connections, counts.exchanges, counts.bytes_reserved, counts.slots_in_use) == (0, 0, 0, 0)


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.url, timeout=60) as client:
        yield client


def send_for_ever(duplex: Duplex) -> None:
    while True:
        duplex.send(bytes(65536))


def test_each_question_has_its_whole_answer(client: Client) -> None:
    assert client.call(lmi("one two", "words")).text == "one two "
    assert (
        client.call(openai("one two", "words")).text == "user: one two assistant: " or client.call(openai("x", "words")).text
    )
    for binary in (True, False):
        (reply,) = client.call(infer({"INPUT0": np.arange(3, dtype=np.float32)}, "identity", binary=binary)).messages
        assert reply["OUTPUT0"].array.tolist() == [0, 1, 2]
    assert client.call(generate({"text_input": "one two"}, "words")).messages[0]["text_output"] == "one two "
    assert client.call(invoke("echo", b"bytes", "image/png")).messages == [b"bytes"]


def test_a_stream_is_its_messages_and_the_loop_ends_with_the_answer(client: Client) -> None:
    stream = client.stream(lmi("one two three", "words", stream=True))
    assert list(stream) == ["one ", "two ", "three "]
    assert (stream.answer.status, stream.answer.complete) == (200, True)
    assert list(stream) == []
    assert "one two" in "".join(client.stream(openai("one two", "words", stream=True)))
    (reply,) = client.stream(infer({"INPUT0": np.ones(2)}, "identity", stream=True))
    assert reply["OUTPUT0"].array.tolist() == [1, 1]
    assert [m["text_output"] for m in client.stream(generate({"text_input": "a b"}, "words", stream=True))][:2] == [
        "a ",
        "b ",
    ]


def test_calls_one_after_the_other_share_a_connection(served: Served, client: Client) -> None:
    for _ in range(5):
        client.call(lmi("one", "words"))
        list(client.stream(lmi("one", "words", stream=True)))
    assert served.gateway.counts().connections == 1


def test_grpc_has_a_connection_of_http2_which_all_other_calls_may_use_too(served: Served, client: Client) -> None:
    x = {"INPUT0": np.arange(3, dtype=np.float32)}
    client.call(lmi("one", "words"))
    for _ in range(3):
        for stream in (False, True):
            (reply,) = client.call(grpc_infer(x, "identity", stream=stream)).messages
            assert reply["OUTPUT0"].elements.tolist() == [0, 1, 2]
            (reply,) = client.stream(grpc_infer(x, "identity", stream=stream))
            assert reply["OUTPUT0"].elements.tolist() == [0, 1, 2]
        client.call(lmi("one", "words"))
    assert served.gateway.counts().connections == 2


def test_grpc_says_its_status_and_its_words(client: Client) -> None:
    x = {"INPUT0": np.ones(1)}
    with pytest.raises(Refused, match=r"^NOT_FOUND: unknown model 'nobody'"):
        client.call(grpc_infer(x, "nobody"))
    with pytest.raises(BrokenOff, match=r"^unknown model 'nobody'"):
        list(client.stream(grpc_infer(x, "nobody", stream=True)))
    with pytest.raises(Refused, match=r"^DEADLINE_EXCEEDED: "):
        client.call(grpc_infer(x, "stuck", timeout=0.1))
    assert client.call(lmi("one", "words")).text == "one "


def test_a_call_of_grpc_that_is_left_cancels_its_model(served: Served, client: Client) -> None:
    client.timeout = 0.2
    while not served.models.begun.is_set():  # which may take longer to begin than that
        with pytest.raises(TimeoutError):
            client.call(grpc_infer({"INPUT0": np.ones(1)}, "stuck"))
    assert served.models.left.wait(60)


def test_threads_call_at_once_each_over_its_own_connection(served: Served, client: Client) -> None:
    together = threading.Barrier(8)

    def call(number: int) -> list[str]:
        together.wait(60)
        with client.stream(lmi(f"{number} wait", "words", stream=True)) as stream:
            first = next(stream)
            together.wait(60)  # all eight are under way
        return [first, *(client.call(lmi(f"{number} {n}", "words")).text for n in range(5))]

    with ThreadPoolExecutor(8) as pool:
        for number, said in enumerate(pool.map(call, range(8))):
            assert said == [f"{number} ", *(f"{number} {n} " for n in range(5))]


def test_a_refusal_and_an_answer_that_breaks_off_are_errors_of_their_own(client: Client) -> None:
    with pytest.raises(Refused, match=r"404: .*nobody") as refused:
        client.call(lmi("x", "nobody"))
    assert refused.value.status == 404
    with pytest.raises(Refused):
        next(client.stream(lmi("x", "nobody", stream=True)))
    stream = client.stream(lmi("one fail", "words", stream=True))
    assert next(stream) == "one "
    with pytest.raises(BrokenOff, match="the word said fail"):
        next(stream)
    assert client.call(lmi("one", "words")).text == "one "


def test_a_large_body_that_is_refused_is_heard_while_it_is_sent(client: Client) -> None:
    with pytest.raises((Refused, TransportLost)):
        client.call(invoke("nobody", bytes(20 * 1024 * 1024)))
    assert client.call(lmi("one", "words")).text == "one "


def test_nobody_there_is_an_oserror_and_no_url_a_valueerror(served: Served) -> None:
    served.stop()
    with Client(served.url) as client, pytest.raises(OSError, match="connect"):
        client.call(lmi("x"))
    with Client("localhost:80") as client, pytest.raises(ValueError, match="http://HOST"):
        client.call(lmi("x"))


def test_a_server_that_goes_away_is_a_lost_transport(served: Served, client: Client) -> None:
    stream = client.stream(lmi("one wait", "words", stream=True))
    duplex = client.bidirectional("echo")
    assert next(stream) == "one "
    served.stop()
    with pytest.raises((TransportLost, BrokenOff)):
        next(stream)
    with pytest.raises((TransportLost, BrokenOff)):
        duplex.receive()
    with pytest.raises(TransportLost):
        send_for_ever(duplex)


def test_a_call_that_takes_too_long_is_left(served: Served, client: Client) -> None:
    client.timeout = 0.2
    while not served.models.begun.is_set():  # which may take longer to begin than that
        with pytest.raises(TimeoutError, match=r"0\.2 s"):
            client.call(lmi("wait", "words"))
    assert served.models.left.wait(60)


def test_a_message_that_takes_too_long_may_be_waited_for_again(served: Served, client: Client) -> None:
    stream = client.stream(lmi("one wait", "words", stream=True))
    assert next(stream) == "one "
    stream.timeout = 0.1
    for _ in range(2):
        with pytest.raises(TimeoutError):
            next(stream)
    assert not served.models.left.is_set()


def closed(served: Served, client: Client) -> None:
    with client.stream(lmi("one wait", "words", stream=True)) as stream:
        next(stream)


def forgotten(served: Served, client: Client) -> None:
    for token in client.stream(lmi("one wait", "words", stream=True)):
        assert token == "one "
        break
    gc.collect()


def forgotten_with_its_client(served: Served, _: Client) -> None:
    next(Client(served.url).stream(lmi("one wait", "words", stream=True)))
    gc.collect()


def ended_with_its_client(served: Served, _: Client) -> None:
    with Client(served.url) as client:
        stream = client.stream(lmi("one wait", "words", stream=True))
        next(stream)
    with pytest.raises(Closed):
        next(stream)


def forgotten_in_both_directions(served: Served, client: Client) -> None:
    client.bidirectional("flood").receive()
    gc.collect()


@pytest.mark.parametrize(
    "way", [closed, forgotten, forgotten_with_its_client, ended_with_its_client, forgotten_in_both_directions]
)
def test_a_stream_that_is_not_exhausted_stops_its_model(
    served: Served, client: Client, way: Callable[[Served, Client], None]
) -> None:
    way(served, client)
    assert served.models.left.wait(60)


@pytest.mark.parametrize("stream", [False, True])
def test_ctrl_c_stops_the_call_and_its_model(served: Served, client: Client, stream: bool) -> None:
    question = lmi("interrupt", "words", stream=stream)
    with pytest.raises(KeyboardInterrupt):
        _ = list(client.stream(question)) if stream else client.call(question)
    assert served.models.left.wait(60)
    assert client.call(lmi("one", "words")).text == "one "


@pytest.mark.parametrize("begun", [True, False])
def test_ctrl_c_before_the_call_is_waited_for_stops_it_as_well(
    served: Served, client: Client, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    soon, interruptions = _Run.soon, iter([KeyboardInterrupt])

    def interrupted(run: _Run, function: Callable[[], object]) -> None:
        interruption = next(interruptions, None)
        if interruption is None or begun:
            soon(run, function)
        if interruption is not None:
            assert not begun or served.models.begun.wait(60)
            raise interruption

    monkeypatch.setattr(_Run, "soon", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.call(lmi("wait", "words"))
    assert served.models.left.wait(60) if begun else not served.models.begun.is_set()
    assert client.call(lmi("one", "words")).text == "one "


def test_closing_ends_what_other_threads_wait_for(served: Served) -> None:
    client = Client(served.url)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.call, lmi("wait", "words"))
        assert served.models.begun.wait(60)
        client.close()
        with pytest.raises(Closed):
            waiting.result(60)
    client.close()
    assert served.models.left.wait(60)
    with pytest.raises(Closed):
        client.call(lmi("one", "words"))


def test_a_loop_that_stands_still_stops_its_model(served: Served, client: Client) -> None:
    stream = client.stream(lmi("x", "endless", stream=True, max_new_tokens=65536))
    for _ in range(3):
        next(stream)
    before = -1
    while before != served.models.told:
        before = served.models.told
        client.call(lmi("one", "words"))
    assert before < 20_000  # as many as the kernel and the buffers hold, of all tokens


def test_parts_go_both_ways_from_one_thread_and_from_two(client: Client) -> None:
    with client.bidirectional("echo") as duplex:
        for number in range(50):
            duplex.send(b"%d" % number)
            assert duplex.receive() == b"%d" % number
        with ThreadPoolExecutor(1) as pool:

            def send() -> None:
                for number in range(2000):
                    duplex.send(b"%d" % number * 100)
                duplex.end()

            sent = pool.submit(send)
            assert list(duplex) == [b"%d" % number * 100 for number in range(2000)]
            sent.result(60)
        assert duplex.receive() is None
        with pytest.raises(TransportLost):
            duplex.send(b"more")


def test_what_nobody_receives_stops_its_model_and_who_sends_is_not_heard(served: Served, client: Client) -> None:
    with client.bidirectional("flood") as duplex:
        duplex.timeout = 1
        with pytest.raises(TimeoutError):
            send_for_ever(duplex)
        duplex.timeout = 60
        assert served.models.told < 200
        assert duplex.receive() == bytes(65536)


def test_over_tls_it_trusts_whom_it_is_told_to(tmp_path: Path) -> None:
    made = development_certificate.ensure(tmp_path, now=datetime.now(UTC))
    tls = TLSConfig(cert=str(made.cert), key=str(made.key))
    served = Served(Config(listen=ListenConfig(host="127.0.0.1", port=-1, tls_port=0), tls=tls))
    try:
        url = f"https://localhost:{served.gateway.tls_port}"
        with Client(url, tls=client_context(made.ca)) as client:
            assert client.call(lmi("one", "words")).text == "one "
            with client.bidirectional("echo") as duplex:
                duplex.send(b"one")
                assert duplex.receive() == b"one"
        with Client(url) as client, pytest.raises(TransportLost, match="CERTIFICATE_VERIFY_FAILED"):
            client.call(lmi("one", "words"))
    finally:
        served.stop()


async def test_in_a_task_of_trios_it_says_which_client_to_use() -> None:
    with Client("http://localhost:1") as client, pytest.raises(RuntimeError, match="open_client"):
        client.call(lmi("x"))


@pytest.mark.programs
def test_a_program_that_forgets_everything_ends(served: Served) -> None:
    program = f"""if True:
        from gateway.client import lmi
        from gateway.client.sync import Client
        client = Client({served.url!r})
        stream = client.stream(lmi("one wait", "words", stream=True))
        print(next(stream))
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "one \n", "")
    assert served.models.left.wait(60)
