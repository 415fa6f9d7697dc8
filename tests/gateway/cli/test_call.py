"""`everywire call`: every wire to a gateway in memory, what is printed and kept, and the exit status of every end."""

from __future__ import annotations

import io
import json
import signal
import socket
import subprocess
import sys
import threading
import wave
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import numpy as np
import pytest
import trio
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization
from trio.testing import MockClock

from gateway import client
from gateway.cli.call.plan import CallOptions, CallWire, plan
from gateway.cli.call.report import Report
from gateway.cli.call.run import perform
from gateway.cli.main import _WIRES, program
from gateway.client.answers import words_of
from gateway.config import Config, ListenConfig, LMIConfig, TLSConfig
from gateway.gateway import Gateway
from gateway.net.transport import Transport
from gateway.testing import MemoryGateway, memory_gateway
from models.adapt import spec_of
from models.errors import ModelError
from models.library.echo import Echo
from models.library.speech import SpeechSegmenter
from models.library.tensors import add_sub, identity
from models.messages import InferRequest, Part, PartKind, Prompt, Token
from models.session import Session
from tests.gateway.net.authority import Authority

SPEECH = Path(str(files("models.library") / "data" / "speech.wav"))
TEXT_TAKERS = "lmi, openai, generate, invoke, stream, container, bidi, websocket"
TEXT_WIRES = ["lmi", "openai", "generate", "invoke", "stream", "bidi", "websocket", "container"]


@pytest.fixture
def autojump_clock() -> MockClock:
    return MockClock(autojump_threshold=0)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the checkout, whose packages would hide the installed ones."""
    monkeypatch.chdir(tmp_path)


async def words(prompt: Prompt) -> AsyncIterator[Token]:
    for number in range(prompt.parameters.max_new_tokens):
        yield Token(text=f"w{number} ", id=number)


async def speaks(session: Session[Part, Part]) -> None:
    """Text and samples in turns, the last text in two fragments."""
    async for _ in session:
        await session.send(Part(data=b'{"at":0}', kind=PartKind.UTF8))
        await session.send(Part(data=b"\x01\x00\x02\x00"))
        await session.send(Part(data=b'{"at":', kind=PartKind.UTF8, last=False))
        await session.send(Part(data=b"1}", kind=PartKind.UTF8))
        await session.send(Part(data=b"\x03\x00"))


async def failing(prompt: Prompt) -> AsyncIterator[Token]:
    yield Token(text="so far", id=1)
    raise ModelError("the weights are gone")


async def silent(prompt: Prompt) -> AsyncIterator[Token]:
    yield Token(text="then nothing", id=1)
    await trio.sleep_forever()


async def late(prompt: Prompt) -> str:
    await trio.sleep(2)
    return prompt.text


async def halting(prompt: Prompt) -> AsyncIterator[str]:
    yield prompt.text + " "
    await trio.sleep(100)
    yield "again "


class Called:
    """The output, the errors and the exit status of a call."""

    def __init__(self, code: int, out: str, errors: list[str]) -> None:
        self.code, self.out, self.errors = code, out, errors

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


async def made(model: str, *texts: str, url: str = "http://here", stdin: bytes = b"", **options: Any) -> Called:
    reporting = {name: options.pop(name) for name in ("as_json", "out") if name in options}
    printed: list[str] = []
    errors: list[str] = []
    call = plan(CallOptions(model=model, url=url, texts=texts, **options), io.BytesIO(stdin))
    code = await perform(call, Report(printed.append, errors.append, **reporting))
    return Called(code, "".join(printed), errors)


def lead(monkeypatch: pytest.MonkeyPatch, connected: Callable[[], Transport]) -> None:
    """Every call from here on is connected so."""

    @asynccontextmanager
    async def connect(host: str, port: int, *, tls: Any = None) -> AsyncIterator[Transport]:
        transport = connected()
        try:
            yield transport
        finally:
            transport.close()

    monkeypatch.setattr(client, "connect", connect)


@asynccontextmanager
async def serving(monkeypatch: pytest.MonkeyPatch, config: Config | None = None) -> AsyncIterator[MemoryGateway]:
    specs = [
        spec_of(words, "words"), spec_of(failing, "failing"), spec_of(silent, "silent"), spec_of(Echo(), "echo"),
        spec_of(identity, "identity"), spec_of(add_sub, "addsub"), spec_of(SpeechSegmenter(), "speech"),
        spec_of(speaks, "speaks"),
    ]  # fmt: skip
    async with memory_gateway(specs, config, check=True) as served:
        lead(monkeypatch, served.connect)
        yield served


# ---- every wire ----


@pytest.mark.parametrize("http2", [False, True])
@pytest.mark.parametrize("wire", TEXT_WIRES)
async def test_text_over_every_wire(
    wire: str, http2: bool, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    if wire == "websocket" and http2:
        return
    most = "max_tokens=3" if wire == "openai" else "max_new_tokens=3"
    async with serving(monkeypatch):
        called = await made("words", "Say", wire=wire, http2=http2, params=[most])
    assert (called.code, called.errors) == (0, [])
    if wire in ("invoke", "container"):
        assert json.loads(called.out) == {"generated_text": "w0 w1 w2 "}
    elif wire == "stream":
        assert [json.loads(line)["token"]["text"] for line in called.out.splitlines()] == ["w0 ", "w1 ", "w2 "]
    else:
        assert called.out == "w0 w1 w2 \n"


@pytest.mark.parametrize("wire", ["lmi", "openai", "generate"])
async def test_all_at_once(wire: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock) -> None:
    async with serving(monkeypatch):
        called = await made("words", "Say", wire=wire, stream=False, as_json=True)
    assert [event["event"] for event in called.events] == ["head", "token", "end"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_form_of_tgi_is_understood(
    stream: bool, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with serving(monkeypatch, Config(lmi=LMIConfig(tgi_compat=True))):
        called = await made("words", "Say", stream=stream, params=["max_new_tokens=2"])
        failed = await made("failing", "Say", stream=stream)
    assert (called.code, called.out) == (0, "w0 w1 \n")
    assert failed.code == 1
    assert "the weights are gone" in failed.errors[0]


@pytest.mark.parametrize("wire", ["v2", "generate", "grpc", "invoke", "stream", "container"])
@pytest.mark.parametrize("stream", [None, True])
async def test_tensors(
    wire: str, stream: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    np.save(tmp_path / "a.npy", np.array([5, 6], np.int32))
    np.save(tmp_path / "b.npy", np.array([1, 2], np.int32))
    tensors = [f"INPUT0={tmp_path / 'a.npy'}", f"INPUT1={tmp_path / 'b.npy'}"]
    if wire == "stream" and stream is not None:
        return
    async with serving(monkeypatch):
        called = await made("addsub", tensors=tensors, wire=wire, stream=stream)
    assert (called.code, called.errors) == (0, [])
    if wire == "generate":
        assert json.loads(called.out)["OUTPUT0"] == [6, 8]
    else:
        assert called.out == "OUTPUT0 INT32 [2]\n[6 8]\nOUTPUT1 INT32 [2]\n[4 4]\n"


# Files are read in threads, which a clock that jumps would not wait for: those tests have the real one.


@pytest.mark.parametrize("wire", ["invoke", "stream", "bidi", "websocket", "container"])
@pytest.mark.parametrize("source", ["file", "stdin"])
async def test_bytes_come_back_as_they_were(wire: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = np.random.default_rng(1).bytes(1_000_000)
    (tmp_path / "in").write_bytes(content)
    file = str(tmp_path / "in") if source == "file" else "-"
    async with serving(monkeypatch):
        called = await made("echo", file=file, stdin=content, wire=wire, out=tmp_path / "out")
    assert (called.code, called.out) == (0, "")
    assert (tmp_path / "out").read_bytes() == content


async def test_a_wav_is_sent_as_samples_and_kept_as_a_wav(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch):
        heard = await made("speech", wav=SPEECH)
        kept = await made("echo", wav=SPEECH, out=tmp_path / "out.wav")
    assert [json.loads(line)["event"] for line in heard.out.splitlines()][-1] == "end"
    assert kept.code == 0
    with wave.open(str(SPEECH)) as sent, wave.open(str(tmp_path / "out.wav")) as got:
        assert got.getparams()[:4] == (1, 2, 16_000, sent.getnframes())
        assert got.readframes(got.getnframes()) == sent.readframes(sent.getnframes())


@pytest.mark.parametrize("wire", ["bidi", "websocket"])
@pytest.mark.parametrize("name", ["a.wav", "a.pcm", "a.jsonl", "a"])
async def test_a_file_has_the_parts_of_one_kind_and_the_others_are_printed(
    wire: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").write_bytes(b"x")
    out = tmp_path / name
    async with serving(monkeypatch):
        called = await made("speaks", file=str(tmp_path / "in"), wire=wire, out=out)
    assert (called.code, called.errors) == (0, [])
    samples, texts = b"\x01\x00\x02\x00\x03\x00", '{"at":0}{"at":1}'
    if name in ("a.wav", "a.pcm"):
        assert called.out.replace("\n", "") == texts
        if name == "a.wav":
            with wave.open(str(out)) as kept:
                assert kept.readframes(9) == samples
        else:
            assert out.read_bytes() == samples
    else:
        assert out.read_text() == texts
        assert called.out.count("bytes that are no text") == 2


@pytest.mark.parametrize("wire", ["stream", "container", "bidi", "websocket"])
async def test_a_text_goes_to_a_file_of_text_over_every_wire(
    wire: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with serving(monkeypatch):
        called = await made("words", "Say", wire=wire, params=["max_new_tokens=2"], out=tmp_path / "a.txt")
    assert (called.code, called.out, called.errors) == (0, "", [])
    assert "w0 " in (tmp_path / "a.txt").read_text()


async def test_an_answer_without_parts_of_the_files_kind_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch):
        called = await made("speech", wav=SPEECH, wire="bidi", out=tmp_path / "a.wav")
    assert "speech_start" in called.out
    assert called.errors == [f"{tmp_path / 'a.wav'} is not written: no part of the answer is bytes, which that name is for"]
    assert not (tmp_path / "a.wav").exists()


@pytest.mark.parametrize("wire", ["v2", "grpc"])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array([True, False]),
        np.array([1.5, -2.0], ml_dtypes.bfloat16),
        np.array([b"every", b"wire"]),
    ],
    ids=lambda array: str(array.dtype),
)
async def test_an_npy_comes_back_as_it_was(
    array: np.ndarray[Any, Any], wire: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    np.save(tmp_path / "in.npy", array)
    async with serving(monkeypatch):
        called = await made("identity", tensors=[f"INPUT0={tmp_path / 'in.npy'}"], wire=wire, out=tmp_path / "out.npy")
    assert called.code == 0, called.errors
    assert (tmp_path / "out.npy").read_bytes() == (tmp_path / "in.npy").read_bytes()
    assert called.out.endswith(f" in {tmp_path / 'out.npy'}\n")


async def test_each_of_several_outputs_has_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    np.save(tmp_path / "a.npy", np.array([5, 6], np.int32))
    a = tmp_path / "a.npy"
    async with serving(monkeypatch):
        await made("addsub", tensors=[f"INPUT0={a}", f"INPUT1={a}"], out=tmp_path / "out.npy")
    assert np.load(tmp_path / "out.OUTPUT0.npy").tolist() == [10, 12]
    assert np.load(tmp_path / "out.OUTPUT1.npy").tolist() == [0, 0]


# ---- output ----


async def test_text_comes_from_stdin_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch):
        called = await made("echo", "-", stdin="café".encode())
    assert called.out == "café\n"


@pytest.mark.parametrize("wire", ["bidi", "websocket"])
async def test_several_texts_are_messages_of_one_session(
    wire: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with serving(monkeypatch):
        called = await made("words", "one", "two", wire=wire, params=["max_new_tokens=2"], as_json=True)
    assert "".join(event.get("text", "") for event in called.events) == "w0 w1 w0 w1 "


async def test_json_tells_every_item_and_the_end(monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock) -> None:
    async with serving(monkeypatch):
        called = await made("words", "Say", params=["max_new_tokens=2"], as_json=True)
        failed = await made("failing", "Say", as_json=True)
    head, one, two, end = called.events
    assert (head, one, two) == (
        {"event": "head", "status": 200}, {"event": "token", "text": "w0 "}, {"event": "token", "text": "w1 "},
    )  # fmt: skip
    assert (end["event"], end["status"], end["ending"]) == ("end", 200, "complete")
    assert 0 <= end["first_ms"] <= end["total_ms"]
    assert end["bytes"] > 100
    assert "error" not in end
    assert failed.events[-1]["ending"] == "model-error"
    assert failed.events[-1]["error"] == failed.errors[0]


async def test_json_holds_tensors_that_json_has_no_numbers_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    np.save(tmp_path / "in.npy", np.array([[1.5, np.nan], [np.inf, 2]], np.float32))
    async with serving(monkeypatch):
        called = await made("identity", tensors=[f"INPUT0={tmp_path / 'in.npy'}"], as_json=True)
    tensor = called.events[1]
    assert (tensor["datatype"], tensor["shape"], tensor["data"]) == ("FP32", [2, 2], [[1.5, "nan"], ["inf", 2.0]])


async def test_bytes_that_are_no_text_are_counted_and_not_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").write_bytes(b"\xff\x00")
    async with serving(monkeypatch):
        called = await made("echo", file=str(tmp_path / "in"))
    assert called.out == "(2 bytes that are no text; --out FILE.bin keeps them)\n"


async def test_long_arrays_are_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock) -> None:
    np.save(tmp_path / "in.npy", np.arange(1000))
    async with serving(monkeypatch):
        called = await made("identity", tensors=[f"INPUT0={tmp_path / 'in.npy'}"])
    assert called.out == "OUTPUT0 INT64 [1000]\n[  0   1   2 ... 997 998 999]\n"


# ---- every other end ----


@pytest.mark.parametrize("wire", TEXT_WIRES)
async def test_a_model_that_is_not_there(wire: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock) -> None:
    async with serving(monkeypatch):
        called = await made("nobody", "Say", wire=wire)
    assert called.code == 1
    (error,) = called.errors
    assert error.startswith(("404: no model 'nobody'", "404: unknown model 'nobody'", "400: no endpoint 'nobody'"))


@pytest.mark.parametrize("wire", TEXT_WIRES)
async def test_a_model_that_fails(wire: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock) -> None:
    async with serving(monkeypatch):
        called = await made("failing", "Say", wire=wire)
    assert called.code == 1
    assert "the weights are gone" in called.errors[0]
    assert ("so far" in called.out) is (wire not in ("invoke", "container"))


async def test_what_the_model_refuses_is_said_in_its_words(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with serving(monkeypatch):
        called = await made("words", "Say", params=["top_p=2"])
    assert called.errors == ["424: parameters.top_p: expected a number > 0 and <= 1, got 2"]
    assert called.code == 1


@pytest.mark.parametrize("wire", ["lmi", "openai", "bidi", "websocket"])
async def test_a_call_that_is_not_over_in_time_leaves(
    wire: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with serving(monkeypatch) as served:
        called = await made("silent", "Say", wire=wire, timeout=5.0, quiet=60.0)
        await served.check_nothing_left()
    assert (called.code, called.out) == (3, "then nothing\n")
    assert called.errors == ["not over after 5 s (--timeout)"]


@pytest.mark.parametrize("quiet", [None, 0.5])
async def test_a_websocket_of_this_gateways_is_heard_to_its_end_however_long_it_pauses(
    quiet: float | None, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Its server is told that the input has ended, and closes when it has answered: no silence has to be taken for the end."""
    async with memory_gateway([spec_of(late, "late"), spec_of(halting, "halting")]) as served:
        lead(monkeypatch, served.connect)
        for model, said in (("late", "Say\n"), ("halting", "Say again \n")):
            called = await made(model, "Say", wire="websocket", quiet=quiet)
            assert (called.code, called.out, called.errors) == (0, said, [])
        await served.check_nothing_left()


@pytest.mark.parametrize(("model", "came"), [("late", ""), ("halting", "Say ")])
async def test_a_websocket_that_is_left_in_its_silence_is_not_called_complete(
    model: str, came: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """The server cannot be told the end of the input, before and after its first words."""
    monkeypatch.setattr("gateway.client.connection.offered_end_of_input", lambda nonce: (b"x-other", b"a"))
    async with memory_gateway([spec_of(late, "late"), spec_of(halting, "halting")]) as served:
        lead(monkeypatch, served.connect)
        called = await made(model, "Say", wire="websocket", quiet=1.0)
        patient = await made(model, "Say", wire="websocket")
    assert (called.code, called.out.rstrip("\n")) == (3, came)
    assert called.errors == ["left after 1 s of silence (--quiet): the server has not closed, its answer may not be whole"]
    assert (patient.code, patient.errors) == (0, [])


@pytest.mark.parametrize("wire", ["lmi", "openai", "generate", "invoke", "stream", "container", "bidi", "websocket"])
async def test_an_answer_that_is_cut_off(wire: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock) -> None:
    async with memory_gateway([spec_of(silent, "silent")]) as served:
        link = served.link()
        lead(monkeypatch, lambda: link.client)
        results: list[Called] = []

        async def calling() -> None:
            results.append(await made("silent", "Say", wire=wire, quiet=60.0))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(calling)
            await trio.sleep(1)  # mocked seconds: everything that will arrive has arrived
            link.server.close()
    assert results[0].code == 3, results[0].errors
    assert results[0].errors[0].startswith("cut off")


async def test_the_rest_of_a_file_is_not_awaited_when_the_server_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").write_bytes(bytes(3_000_000))
    async with serving(monkeypatch):
        for wire in ("bidi", "websocket"):
            called = await made("nobody", file=str(tmp_path / "in"), wire=wire)
            assert called.code == 1


async def test_a_file_is_not_read_ahead_of_a_model_that_does_not_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0

    class Endless(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            nonlocal read
            read += size or 0
            return bytes(size or 0)

    async def deaf(session: Session[Part, Part]) -> None:
        await trio.sleep_forever()

    async with memory_gateway([spec_of(deaf, "deaf")]) as served:
        lead(monkeypatch, served.connect)
        call = plan(CallOptions(model="deaf", url="http://here", file="-", timeout=1.0), Endless())
        assert await perform(call, Report(lambda text: None, lambda line: None)) == 3
    assert 0 < read < 4_000_000


# ---- gRPC ----


async def counting(request: InferRequest) -> AsyncIterator[dict[str, np.ndarray[Any, Any]]]:
    """Counts to x, and fails behind 2."""
    for number in range(1, int(request["x"].item()) + 1):
        if number > 2:
            raise ModelError("the weights are gone")
        yield {"y": np.array([number])}


async def stuck(request: InferRequest) -> dict[str, np.ndarray[Any, Any]]:
    await trio.sleep_forever()
    raise AssertionError


@asynccontextmanager
async def serving_tensors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[MemoryGateway]:
    """Models of tensors, and x.npy beside: 2; three.npy is 3."""
    for name, number in (("x", 2), ("three", 3)):
        np.save(tmp_path / f"{name}.npy", np.array([number]))
    specs = [
        spec_of(counting, "counting", decoupled=True), spec_of(stuck, "stuck"), spec_of(identity, "identity"),
    ]  # fmt: skip
    async with memory_gateway(specs, check=True) as served:
        lead(monkeypatch, served.connect)
        yield served


async def test_a_decoupled_model_is_called_by_the_method_that_it_has_unless_it_is_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with serving_tensors(monkeypatch, tmp_path):
        for stream in (None, True):
            called = await made("counting", tensors=["x=x.npy"], wire="grpc", stream=stream)
            assert (called.code, called.out) == (0, "y INT64 [1]\n[1]\ny INT64 [1]\n[2]\n")
        forbidden = await made("counting", tensors=["x=x.npy"], wire="grpc", stream=False)
    assert forbidden.code == 1
    assert forbidden.errors[0].startswith("UNIMPLEMENTED: model 'counting' gives any number of responses")


async def test_an_error_of_grpc_has_the_name_of_its_status_and_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with serving_tensors(monkeypatch, tmp_path):
        unknown = await made("nobody", tensors=["x=x.npy"], wire="grpc", as_json=True)
        broken = await made("counting", tensors=["x=three.npy"], wire="grpc", as_json=True)
        strict = ["triton_grpc_error:true"]
        ended = await made("counting", tensors=["x=three.npy"], wire="grpc", headers=strict, stream=True, as_json=True)
    assert (unknown.code, unknown.errors) == (1, ["NOT_FOUND: unknown model 'nobody'; there are: counting, identity, stuck"])
    assert [event["event"] for event in unknown.events] == ["head", "end"]
    end = unknown.events[-1]
    assert (end["status"], end["grpc_status"], end["ending"], end["error"]) == (200, 5, "refused", unknown.errors[0])
    for called, status, said in ((broken, 0, "the weights"), (ended, 13, "INTERNAL: the weights")):
        assert (called.code, called.errors) == (1, [f"{said} are gone"])
        assert [event["data"] for event in called.events if event["event"] == "tensor"] == [[1], [2]]
        assert (called.events[-1]["grpc_status"], called.events[-1]["ending"]) == (status, "model-error")


async def test_the_server_is_told_how_long_a_call_of_grpc_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with serving_tensors(monkeypatch, tmp_path):
        late = await made("stuck", tensors=["x=x.npy"], wire="grpc", timeout=5.0)
        given = CallOptions(model="stuck", url="http://here", tensors=["x=x.npy"], wire="grpc", timeout=5.0)
        assert (b"grpc-timeout", b"5S") in plan(given, io.BytesIO()).question.headers
        sooner = await made("stuck", tensors=["x=x.npy"], wire="grpc", timeout=5.0, headers=["grpc-timeout:2S"])
    assert (late.code, late.errors) == (3, ["not over after 5 s (--timeout)"])
    assert (sooner.code, sooner.errors[0].split(":")[0]) == (1, "DEADLINE_EXCEEDED")


async def test_a_call_of_grpc_that_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with serving_tensors(monkeypatch, tmp_path) as served:
        link = served.link()
        lead(monkeypatch, lambda: link.client)
        results: list[Called] = []

        async def calling() -> None:
            results.append(await made("stuck", tensors=["x=x.npy"], wire="grpc"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(calling)
            await trio.sleep(1)  # mocked seconds: the model has begun
            link.server.close()
    assert (results[0].code, results[0].errors[0][:7]) == (3, "cut off")


# ---- the command line ----


def failure(*arguments: str) -> str:
    result = CliRunner().invoke(program, ["call", *arguments])
    assert result.exit_code == 2, result.output
    (line,) = result.output.splitlines()
    return line.removeprefix("Error: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "nothing to send: give a text, - for one from stdin, --file, --wav or --tensor"),
        (("a", "b"), "--wire lmi takes one text, got 2: quote it"),
        (("a", "--file", "b"), "text and --file cannot be sent in one call"),
        (
            ("a", "--wire", "v2"),
            "--wire v2 takes --tensor, not text: for that there are " + TEXT_TAKERS,
        ),
        (
            ("a", "--wire", "grpc", "--param", "n=1"),
            "--wire grpc takes --tensor, not text: for that there are " + TEXT_TAKERS,
        ),
        (
            ("--tensor", "x=x.npy", "--wire", "grpc", "--param", "n=[1]"),
            "--wire grpc: parameter 'n' of the request must be a string, a boolean or a number of 64 bits, got an array of 1",
        ),
        (("a", "--wire", "bidi", "--no-stream"), "--wire bidi always streams: it takes neither --stream nor --no-stream"),
        (("a", "--wire", "websocket", "--http2"), "--wire websocket is over HTTP/1.1: it takes no --http2"),
        (("a", "--param", "top_p"), "--param takes NAME=VALUE, such as max_new_tokens=20, not 'top_p'"),
        (("a", "--param", "stream=true"), "--param stream: --stream or --no-stream says that"),
        (("a", "--param", "model=b", "--wire", "openai"), "--param model: the command line itself says that"),
        (("\udcff",), "the text is not UTF-8: send bytes with --file"),
        (("--file", ".", "--wire", "invoke"), ". cannot be read: Is a directory"),
        (
            ("--wav", "a.wav", "--param", "a=b"),
            "--param has no place in the bytes of --wav: it goes with a text or with --tensor",
        ),
        (("a", "--header", "x y:1"), "--header: 'x y:1' is no field of a header"),
        (("a", "--header", "Host:b"), "--header host: the connection itself says that"),
        (("a", "--url", "ftp://here"), "--url takes http://HOST:PORT, https://HOST:PORT or unix:/PATH, not 'ftp://here'"),
        (("a", "--ca", "ca.pem"), "--ca is for an https:// URL"),
        (("--file", "nothing.bin"), "nothing.bin cannot be read: No such file or directory"),
        (("--wav", "nothing.wav"), "--wav: nothing.wav cannot be read: No such file or directory"),
        (("--tensor", "x"), "--tensor takes NAME=VALUE, such as INPUT0=input0.npy, not 'x'"),
        (("--tensor", "x=no.npy"), "--tensor x: no.npy cannot be read: No such file or directory"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_connected(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.array([1]))
    assert failure("lm", *arguments) == said


def test_a_wav_of_another_form_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cd.wav"
    with wave.open(str(path), "wb") as file:
        file.setparams((2, 2, 44_100, 0, "NONE", ""))
    assert failure("speech", "--wav", str(path)) == (
        f"--wav: expected 16000 Hz, 1 channel, 16 bits; {path} has 44100 Hz, 2, 16: "
        "convert it, or send it with its header by --file"
    )


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert "allow_pickle" in failure("identity", "--tensor", f"x={tmp_path / 'in.npy'}")


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as bound:  # and not listening: nobody else can be there
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        result = CliRunner().invoke(program, ["call", "lm", "Say", "--url", url])
    assert result.exit_code == 4
    assert result.output == f"Error: cannot connect to {url}: Connection refused\n"


def test_the_server_is_the_one_that_this_configuration_would_be() -> None:
    result = CliRunner().invoke(program, ["--port", "1", "call", "lm", "Say"])
    assert "cannot connect to http://127.0.0.1:1:" in result.output
    result = CliRunner().invoke(program, ["--port", "0", "call", "lm", "Say"])
    assert result.exit_code == 2
    assert "--url is missing" in result.output


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b'{"models": ["echo", "lm"]}', ' everywire call lm "Return the". This server has: echo, lm.'),
        (b'{"models": ["shout"]}', ' everywire call shout "Return the". This server has: shout.'),
        (b'{"models": ["a\\u001b", 7]}', " This server has: a\\x1b."),
        (json.dumps({"models": [f"m{n}" for n in range(12)]}).encode(), "m8, m9 and 2 more."),
        (b'{"error": "no such path: /"}', 'Which model? For example: everywire call lm "Return the".'),
        (b"[]", 'Which model? For example: everywire call lm "Return the".'),
        (b"no JSON", 'Which model? For example: everywire call lm "Return the".'),
    ],
)
def test_a_call_without_a_model_is_told_which_there_are(answer: bytes, said: str) -> None:
    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *arguments: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        result = CliRunner().invoke(program, ["call", "--url", f"http://127.0.0.1:{server.server_port}"])
    assert result.exit_code == 2
    assert result.output.startswith("Error: Which model? For example: everywire call ")
    assert result.output.rstrip().endswith(said)


def test_a_call_without_a_model_and_a_server_is_told_an_example() -> None:
    result = CliRunner().invoke(program, ["--port", "1", "call"])
    assert (result.exit_code, result.output) == (2, 'Error: Which model? For example: everywire call lm "Return the".\n')


def test_help_teaches_by_example() -> None:
    result = CliRunner().invoke(program, ["call", "--help"])
    assert result.exit_code == 0
    assert 'everywire call lm "Return the"' in result.output
    assert "Exit status: 0 complete" in result.output
    for wire in _WIRES:
        assert f"\n    {wire} " in result.output
    assert max(map(len, result.output.splitlines())) <= 100


def test_the_wires_of_the_command_are_those_of_the_plan() -> None:
    assert [wire.value for wire in CallWire] == list(_WIRES)


def test_an_error_is_said_without_its_wrapping() -> None:
    assert words_of(b'{"error": "no"}') == "no"
    assert words_of(b'{"error": {"message": "no", "type": "x"}}') == "no"
    assert words_of(b'{"message": "no"}') == "no"
    assert words_of(b'["no"]') == '["no"]'
    assert words_of(b"no") == "no"
    assert words_of(b"") == "no reason given"


class Kept:
    """A model of text that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Prompt] = []

    async def __call__(self, prompt: Prompt) -> AsyncIterator[Token]:
        self.asked.append(prompt)
        yield Token(text="done", id=1)


@pytest.mark.parametrize("wire", ["lmi", "generate", "stream", "bidi", "websocket"])
async def test_parameters_reach_the_model_with_their_types(
    wire: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    model = Kept()
    params = ["top_k=3", "temperature=0.5", "prompt=mine"]
    async with memory_gateway([spec_of(model, "kept")]) as served:
        lead(monkeypatch, served.connect)
        called = await made("kept", "Say", wire=wire, params=params)
    assert called.code == 0, called.errors
    (prompt,) = model.asked
    assert (prompt.text, prompt.parameters.top_k, prompt.parameters.temperature) == ("Say", 3, 0.5)
    assert prompt.parameters.extra["prompt"] == "mine"


async def test_a_stream_of_tensors_that_fails_keeps_what_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    np.save(tmp_path / "x.npy", np.array([3]))
    async with memory_gateway([spec_of(counting, "counting")]) as served:
        lead(monkeypatch, served.connect)
        called = await made("counting", tensors=[f"x={tmp_path / 'x.npy'}"], stream=True, out=tmp_path / "y.npy")
    assert (called.code, called.errors) == (1, ["the weights are gone"])
    assert [np.load(tmp_path / name).tolist() for name in ("y.npy", "y.2.npy")] == [[1], [2]]


# ---- over real sockets ----


@asynccontextmanager
async def listening(config: Config, *specs: Any) -> AsyncIterator[Gateway]:
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            gateway = Gateway(config, specs)
            await nursery.start(gateway.serve)
            yield gateway
            nursery.cancel_scope.cancel()


@pytest.mark.programs
@pytest.mark.parametrize(("out", "status"), [("nowhere/out", 2), ("out", 0)])
async def test_a_file_that_cannot_be_written_is_named(out: str, status: int, tmp_path: Path) -> None:
    async with listening(Config(listen=ListenConfig(port=0)), spec_of(words, "words")) as gateway:
        command = [
            sys.executable,
            "-m",
            "gateway",
            "--port",
            str(gateway.port),
            "call",
            "words",
            "Say",
            "--out",
            str(tmp_path / out),
        ]
        done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    assert done.returncode == status
    assert done.stdout == b""
    assert done.stderr.decode() == (f"Error: {tmp_path / out}: No such file or directory\n" if status else "")


@pytest.mark.programs
async def test_who_prints_to_nobody_leaves(tmp_path: Path) -> None:
    hot = spec_of(endless_words, "hot")
    async with listening(Config(listen=ListenConfig(port=0)), hot) as gateway:
        line = f"{sys.executable} -m gateway --port {gateway.port} call hot Say | head -c 4"
        done = await trio.run_process(line, shell=True, capture_stdout=True, capture_stderr=True)
    assert (done.stdout, done.stderr) == (b"more", b"")


async def endless_words(prompt: Prompt) -> AsyncIterator[Token]:
    while True:
        yield Token(text="more ", id=1)


@pytest.mark.parametrize("wire", ["lmi", "bidi", "websocket"])
async def test_the_development_certificate_is_trusted_on_this_machine(
    wire: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = Config(listen=ListenConfig(port=0, tls_port=0), tls=TLSConfig(dev=True))
    async with listening(config, spec_of(words, "words")) as gateway:
        url = f"https://localhost:{gateway.tls_port}"
        called = await made("words", "Say", url=url, wire=wire, params=["max_new_tokens=1"])
        assert (called.code, called.out) == (0, "w0 \n"), called.errors
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
        strange = await made("words", "Say", url=url, wire=wire)
        assert strange.code == 4
        assert "CERTIFICATE_VERIFY_FAILED" in strange.errors[0]
        ca = tmp_path / "everywire" / "tls" / "ca.pem"
        assert (await made("words", "Say", url=url, wire=wire, ca=ca)).code == 0


async def test_grpc_over_tls_is_http2_by_alpn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    np.save(tmp_path / "x.npy", np.array([7]))
    config = Config(listen=ListenConfig(port=0, tls_port=0), tls=TLSConfig(dev=True))
    async with listening(config, spec_of(identity, "identity")) as gateway:
        url = f"https://localhost:{gateway.tls_port}"
        called = await made("identity", url=url, tensors=["x=x.npy"], wire="grpc")
    assert (called.code, called.out) == (0, "x INT64 [1]\n[7]\n"), called.errors


@pytest.mark.parametrize("wire", ["lmi", "bidi", "websocket"])
async def test_a_server_that_asks_for_a_certificate_is_shown_one(wire: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    server, batch = authority.issue("server"), authority.issue("batch")
    tls = TLSConfig(cert=str(server.cert), key=str(server.key), client_ca=str(authority.file))
    async with listening(Config(listen=ListenConfig(port=0, tls_port=0), tls=tls), spec_of(words, "words")) as gateway:
        url, how = f"https://localhost:{gateway.tls_port}", {"wire": wire, "params": ["max_new_tokens=1"]}
        called = await made("words", "Say", url=url, ca=authority.file, cert=batch.cert, key=batch.key, **how)
        assert (called.code, called.out) == (0, "w0 \n"), called.errors
        refused = await made("words", "Say", url=url, ca=authority.file, **how)
        assert refused.code in (3, 4)
        assert refused.out == ""
        assert "the server requires a client certificate" in refused.errors[0]


def test_a_certificate_that_cannot_be_shown_is_one_line(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    pair, other = authority.issue("batch"), authority.issue("other")
    secret = tmp_path / "secret.pem"
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    how = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, *how))
    missing = tmp_path / "missing.pem"
    for options, message in (
        ({"key": pair.key}, "--key is that of --cert, which is missing"),
        ({"cert": missing}, f"{missing} cannot be read: No such file or directory"),
        ({"cert": pair.cert, "key": missing}, f"{missing} cannot be read: No such file or directory"),
        ({"cert": pair.cert, "key": secret}, f"{secret} is encrypted: give a key without a passphrase"),
        ({"cert": pair.cert, "key": other.key}, "no certificate with its key, in PEM: KEY_VALUES_MISMATCH"),
        ({"cert": pair.key}, f"--cert {pair.key}: no certificate with its key, in PEM: "),
        ({"cert": pair.cert, "url": "http://localhost"}, "--cert is for an https:// URL"),
    ):
        with pytest.raises(click.UsageError) as caught:
            plan(CallOptions(model="m", texts=("x",), **({"url": "https://localhost"} | options)), io.BytesIO())
        assert message in caught.value.format_message()


@pytest.mark.programs
@pytest.mark.parametrize("wire", ["lmi", "bidi", "websocket"])
async def test_ctrl_c_cancels_the_model(wire: str) -> None:
    over = trio.Event()

    async def endless(prompt: Prompt) -> AsyncIterator[Token]:
        try:
            yield Token(text="begun", id=1)
            await trio.sleep_forever()
        finally:
            over.set()

    async with listening(Config(listen=ListenConfig(port=0)), spec_of(endless, "endless")) as gateway:
        url = f"http://127.0.0.1:{gateway.port}"
        command = [sys.executable, "-m", "gateway", "call", "endless", "Say", "--url", url, "--wire", wire, "--quiet", "60"]
        process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stderr is not None
        assert await process.stdout.receive_some(5) == b"begun"
        process.send_signal(signal.SIGINT)
        await over.wait()
        assert await process.wait() == 130
        assert await process.stderr.receive_some() == b""
