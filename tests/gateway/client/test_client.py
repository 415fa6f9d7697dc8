"""The Trio client: answers whole and as they come, what they say went wrong, and what it leaves behind when it is cancelled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from gateway import client
from gateway.client import BrokenOff, Client, Refused, generate, grpc_infer, infer, invoke, lmi, open_client
from gateway.client.connection import http1
from gateway.config import Config, LimitsConfig, ListenConfig, TLSConfig
from gateway.errors import TransportLost
from gateway.gateway import Gateway
from gateway.net import development_certificate
from gateway.net.tls_context import client_context
from gateway.testing import MemoryGateway, memory_gateway
from models.adapt import spec_of
from models.errors import ModelError
from models.library.echo import Echo
from models.library.tensors import identity
from models.messages import InferRequest, InferResponse, Part, Prompt, Tensor
from models.session import Session
from protocols.errors import LocalProtocolError
from protocols.events import Data, End, Head, Request, Reset
from protocols.grpc.status import StatusCode

WIRES = pytest.mark.parametrize("wire", ["http1", "http2"])
SMALL = 4096


async def words(prompt: Prompt) -> AsyncIterator[str]:
    """The prompt's words, one a second; `fail` fails."""
    for word in prompt.text.split():
        if word == "fail":
            raise ModelError("the word said fail", code="SaidFail")
        yield word + " "
        await trio.sleep(1)


async def counting(request: InferRequest) -> AsyncIterator[dict[str, Any]]:
    """Counts to x, one a second; fails behind 3."""
    for number in range(1, int(request["x"].item()) + 1):
        if number > 3:
            raise ModelError("no more fingers", status=409)
        yield {"y": np.array([number])}
        await trio.sleep(1)


async def busy(session: Session[Part, Part]) -> None:
    """Refuses at once."""
    raise ModelError("not today", status=503)


MODELS = [
    words, identity, spec_of(Echo(), "echo"), spec_of(busy, "busy"), spec_of(counting, "counting", decoupled=True),
]  # fmt: skip


def of(memory: MemoryGateway, wire: str) -> Client:
    return Client(getattr(memory, wire)())


@WIRES
async def test_a_call_returns_what_is_a_success(wire: str, autojump_clock: Any) -> None:
    async with memory_gateway(MODELS, check=True) as memory:
        calls = of(memory, wire)
        assert (await calls.call(lmi("one two", "words"))).text == "one two "
        (reply,) = (await calls.call(infer({"INPUT0": np.ones(3)}, "identity"))).messages
        assert reply["OUTPUT0"].array.tolist() == [1, 1, 1]
        answer = await calls.generate({"text_input": "one"}, "words")
        assert answer.messages[0]["text_output"] == "one "
        assert (await calls.infer({"INPUT0": np.ones(1)}, "identity", parameters={"priority": 1})).complete


async def test_a_call_of_grpc_is_a_success_or_says_why_not() -> None:
    async with memory_gateway(MODELS, check=True) as memory:
        calls = of(memory, "http2")
        for stream in (False, True):
            (reply,) = (await calls.call(grpc_infer({"INPUT0": np.ones(3)}, "identity", stream=stream))).messages
            assert reply["OUTPUT0"].elements.tolist() == [1, 1, 1]
        with pytest.raises(Refused, match="NOT_FOUND: unknown model 'nobody'"):
            await calls.call(grpc_infer({"INPUT0": np.ones(3)}, "nobody"))
        with pytest.raises(BrokenOff, match="unknown model 'nobody'"):
            await calls.call(grpc_infer({"INPUT0": np.ones(3)}, "nobody", stream=True))
        async with calls.stream(grpc_infer({"INPUT0": np.ones(2)}, "identity", stream=True)) as replies:
            assert [reply["OUTPUT0"].elements.tolist() async for reply in replies] == [[1, 1]]


def to(number: int) -> dict[str, Any]:
    return {"x": np.array([number])}


async def test_the_one_message_of_a_call_of_grpc_may_be_taken_as_it_comes() -> None:
    async with memory_gateway(MODELS, check=True) as memory:
        async with of(memory, "http2").stream(grpc_infer({"INPUT0": np.ones(2)}, "identity")) as replies:
            assert [reply["OUTPUT0"].elements.tolist() async for reply in replies] == [[1, 1]]
        assert replies.answer.complete


async def test_what_grpc_says_went_wrong_has_its_code(autojump_clock: Any) -> None:
    strict = (("triton_grpc_error", "true"),)
    async with memory_gateway(MODELS, check=True) as memory:
        calls = of(memory, "http2")
        with pytest.raises(Refused, match=r"^UNIMPLEMENTED: .* call ModelStreamInfer") as refused:
            await calls.call(grpc_infer(to(1), "counting"))
        assert refused.value.answer.code is StatusCode.UNIMPLEMENTED
        for metadata, said, code in (
            ((), "no more fingers", StatusCode.OK),
            (strict, "FAILED_PRECONDITION: no more fingers", StatusCode.FAILED_PRECONDITION),
        ):
            async with calls.stream(grpc_infer(to(5), "counting", stream=True, metadata=metadata)) as replies:
                for number in (1, 2, 3):
                    assert (await anext(replies))["y"].elements.item() == number
                with pytest.raises(BrokenOff) as broken:
                    await anext(replies)
            assert (str(broken.value), broken.value.answer.code) == (said, code)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_server_holds_the_deadline_that_a_call_of_grpc_has_told_it(stream: bool, autojump_clock: Any) -> None:
    async def stuck(request: InferRequest) -> dict[str, Any]:
        await trio.sleep_forever()
        raise AssertionError

    async with memory_gateway([stuck], check=True) as memory:
        calls = of(memory, "http2")
        answer = await calls.grpc_infer(to(1), "stuck", stream=stream, timeout=2.5)
        assert trio.current_time() == pytest.approx(2.5, abs=0.1)
        assert answer.code is StatusCode.DEADLINE_EXCEEDED
        with pytest.raises(Refused, match=r"^DEADLINE_EXCEEDED: "):
            answer.check()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_of_grpc_that_is_cancelled_resets_its_stream_and_the_connection_goes_on(
    stream: bool, autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep = trio.Event()

    async def sleeper(request: InferRequest) -> dict[str, Any]:
        asleep.set()
        await trio.sleep_forever()
        raise AssertionError

    async with memory_gateway([sleeper, identity], check=True) as memory:
        calls = of(memory, "http2")
        said: list[Any] = []
        send = calls.peer.machine.send
        monkeypatch.setattr(calls.peer.machine, "send", lambda event: (said.append(event), send(event)))
        with trio.move_on_after(2) as patience:
            await calls.call(grpc_infer(to(1), "sleeper", stream=stream))
        assert patience.cancelled_caught
        assert asleep.is_set()
        assert [event.code for event in said if isinstance(event, Reset)] == [8]  # CANCEL
        await trio.testing.wait_all_tasks_blocked()
        assert memory.gateway.counts().exchanges == 0
        assert memory.gateway.counts().endings == {"cancelled-by-client": 1}
        assert (await calls.call(grpc_infer({"INPUT0": np.ones(1)}, "identity"))).complete
        assert memory.gateway.counts().connections == 1


async def test_what_a_question_of_grpc_says_reaches_the_model_in_either_form() -> None:
    heard = []

    async def hearing(session: Session[InferRequest, InferResponse]) -> None:
        request = await session.receive()
        heard.append((request.id, dict(request.parameters), session.call.headers["x-tenant"]))
        await session.send(InferResponse(outputs=[Tensor(name="y", datatype="INT64", data=request["x"])]))

    async with memory_gateway([hearing], check=True) as memory:
        for typed in (False, True):
            answer = await of(memory, "http2").grpc_infer(
                to(7), "hearing", typed=typed, id="seven", parameters={"loud": True}, metadata=[("x-tenant", "blue")]
            )
            (reply,) = answer.check().messages
            assert (reply.id, reply["y"].elements.tolist()) == ("seven", [7])
    assert heard == [("seven", {"loud": True}, "blue")] * 2


async def test_grpc_over_http1_is_refused_before_anything_is_sent() -> None:
    async with memory_gateway(MODELS, check=True) as memory:
        calls = of(memory, "http1")
        with pytest.raises(LocalProtocolError, match="needs HTTP/2: connect with prior_knowledge=True"):
            await calls.call(grpc_infer(to(1), "identity"))
        assert (await calls.call(lmi("one", "words"))).text == "one "


@WIRES
async def test_a_stream_is_iterated_over_and_keeps_nothing(wire: str, autojump_clock: Any) -> None:
    async with memory_gateway(MODELS, check=True) as memory:
        calls = of(memory, wire)
        for _ in range(2):
            async with calls.stream(lmi("one two three", "words", stream=True)) as tokens:
                said = []
                async for token in tokens:
                    said.append(token)
                    assert len(tokens.answer.messages) <= 1
            assert said == ["one ", "two ", "three "]
            assert tokens.answer.complete


@WIRES
async def test_what_an_answer_says_went_wrong_is_raised_as_what_it_is(wire: str, autojump_clock: Any) -> None:
    async with memory_gateway(MODELS, check=True) as memory:
        calls = of(memory, wire)
        with pytest.raises(Refused, match=r"^404: .*nobody") as refused:
            await calls.call(lmi("x", "nobody"))
        assert (refused.value.status, refused.value.retry_after) == (404, None)
        with pytest.raises(Refused) as refused:
            await calls.call(invoke("busy", b"x"))
        assert "not today" in refused.value.message
        async with calls.stream(lmi("one fail", "words", stream=True)) as tokens:
            assert await anext(tokens) == "one "
            with pytest.raises(BrokenOff, match="the word said fail") as broken:
                await anext(tokens)
        assert broken.value.answer.status == 200
        assert (await calls.call(lmi("one", "words"))).text == "one "


async def test_a_refusal_says_when_to_try_again(autojump_clock: Any) -> None:
    config = Config(limits=LimitsConfig(total_bytes=1024 * 1024, memory_refuse=1))
    async with memory_gateway(MODELS, config) as memory:
        assert memory.gateway.budget.try_reserve(100 * 1024)
        with pytest.raises(Refused) as refused:
            await of(memory, "http1").call(lmi("x", "words"))
        assert refused.value.status == 503
        assert refused.value.retry_after in (1.0, 2.0)  # a second, and chance adds up to a quarter of it
        memory.gateway.budget.release(100 * 1024)


@WIRES
async def test_a_refusal_is_heard_while_the_body_is_sent(wire: str, autojump_clock: Any) -> None:
    config = Config(limits=LimitsConfig(text_json=SMALL))
    async with memory_gateway(MODELS, config, capacity=SMALL, check=True) as memory:
        with pytest.raises(Refused, match="413"):
            await of(memory, wire).call(generate({"text_input": "x" * 10_000_000}, "words"))


@WIRES
async def test_a_connection_that_the_server_has_ended_is_lost_and_no_mistake_of_the_caller(
    wire: str, autojump_clock: Any
) -> None:
    async with memory_gateway(MODELS, check=True) as memory:
        calls = of(memory, wire)
        assert (await calls.call(lmi("one", "words"))).text == "one "
        memory.gateway.begin_drain(0)
        await memory.gateway.reported()
        for _ in range(2):
            with pytest.raises(TransportLost):
                await calls.call(lmi("one", "words"))
            with pytest.raises(TransportLost):
                await calls.lmi("one", "words")


@WIRES
async def test_a_deadline_stops_the_model(wire: str, autojump_clock: Any) -> None:
    async with memory_gateway(MODELS, check=True) as memory:
        calls = of(memory, wire)
        with pytest.raises(trio.TooSlowError), trio.fail_after(1.5):
            await calls.call(lmi("one two three", "words"))
        assert trio.current_time() < 2
        await trio.testing.wait_all_tasks_blocked()
        assert memory.gateway.counts().endings == {"cancelled-by-client": 1}
        if wire == "http2":
            assert (await calls.call(lmi("one", "words"))).text == "one "


class CancelAt(trio.abc.Instrument):
    """Cancels a scope at the n-th step that any task takes in it."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.counting = False
        self.scope = trio.CancelScope()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.counting:
            self.step -= 1
            if self.step == 0:
                self.scope.cancel()


@WIRES
@pytest.mark.parametrize("stream", [True, False])
def test_cancelled_at_any_step_it_leaves_nothing_and_over_http2_the_connection_goes_on(wire: str, stream: bool) -> None:
    async def story(at: CancelAt) -> bool:
        async with memory_gateway(MODELS, capacity=SMALL, check=True) as memory:
            calls = of(memory, wire)
            at.counting = True
            body = {"text_input": "one two" + " " * 6 * SMALL}
            with at.scope:
                if stream:
                    async with calls.stream(generate(body, "words", stream=True)) as answers:
                        async for _ in answers:
                            pass
                else:
                    await calls.call(generate(body, "words"))
            at.counting = False
            await trio.testing.wait_all_tasks_blocked()
            assert memory.gateway.counts().exchanges == 0
            if wire == "http2":
                with trio.fail_after(60):
                    assert (await calls.call(lmi("one", "words"))).text == "one "
        return at.step <= 0

    step = 1
    while trio.run(
        partial(story, at := CancelAt(step)), clock=trio.testing.MockClock(autojump_threshold=0), instruments=[at]
    ):
        step += 1
    assert step > 20


async def test_at_a_url_it_connects_with_tls_and_below_a_path(tmp_path: Path) -> None:
    made = development_certificate.ensure(tmp_path, now=datetime.now(UTC))
    tls = TLSConfig(cert=str(made.cert), key=str(made.key))
    gateway = Gateway(Config(listen=ListenConfig(host="127.0.0.1", port=0, tls_port=0), tls=tls), MODELS)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(gateway.serve)
            plain, secure = f"http://127.0.0.1:{gateway.port}", f"https://localhost:{gateway.tls_port}"
            trusting = client_context(made.ca)
            for url, options in ((plain, {}), (plain + "/", {"prior_knowledge": True}), (secure, {"tls": trusting})):
                async with open_client(url, **options) as calls:
                    assert (await calls.call(invoke("echo", b"bytes"))).messages == [b"bytes"]
                    if url != plain:
                        conversation = await calls.bidi("echo")
                        await conversation.send(b"part")
                        assert await conversation.receive() == b"part"
            # the part of the path that is the mount, and the question's
            async with open_client(plain + "/endpoints") as calls:
                answer = await calls.call(
                    client.Question(path="/echo/invocations", body=b"x", answer=invoke("echo", b"").answer)
                )
                assert answer.messages == [b"x"]
            with pytest.raises(TransportLost, match="CERTIFICATE_VERIFY_FAILED"):
                async with open_client(secure):
                    pass
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "url", ["localhost:8080", "ftp://localhost", "http://", "http://user:word@host", "http://host/?x=1"]
)
async def test_what_is_no_url_of_a_server_is_said(url: str) -> None:
    with pytest.raises(ValueError, match="http://HOST"):
        async with open_client(url):
            pass


class Endless:
    """A transport on which an answer comes without a pause."""

    peer, alpn, pending, short_is_dry, behind = "test", "", False, True, False

    def __init__(self, head: bytes, piece: bytes) -> None:
        self._next, self._piece = head, piece

    def try_receive_into(self, buffer: memoryview) -> int:
        data, self._next = self._next, self._piece
        buffer[: len(data)] = data
        return len(data)

    def try_send(self, buffers: Any) -> int:
        return sum(map(len, buffers))


async def test_a_server_that_sends_without_a_pause_lets_others_run() -> None:
    transport: Any = Endless(b"HTTP/1.1 200 OK\r\n\r\n", b"a" * 1000)
    peer = http1(transport)
    await peer.send(Request(stream=1, head=Head(method=b"GET", target=b"/", authority=b"x")), End(stream=1))
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def leave() -> None:
                scope.cancel()

            nursery.start_soon(leave)
            for _ in range(1000):
                if isinstance(event := await peer.next_event(), Data):
                    peer.credit(event)
    assert scope.cancelled_caught
