"""The cost of spans: the extra bytecodes of a request and a token, with a provider that drops its spans.

`python -m benchmarks.spans` (Python 3.12 or newer). Bytecodes do not depend on the machine or its load. Client and server
are in one process and in memory: only differences mean something, and those of a token vary by about ten.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import trio
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler
from trio.testing import MockClock

from gateway.client.questions import Question, infer, lmi
from gateway.testing import memory_gateway
from models.adapt import spec_of
from models.messages import InferRequest, InferResponse, Prompt, Tensor, Token
from models.session import Session

REQUESTS, TOKENS = 64, 256
WAYS: dict[str, Callable[[], TracerProvider | None]] = {
    "off": lambda: None,
    "not sampled": lambda: provider(ALWAYS_OFF),
    "on": lambda: provider(ALWAYS_ON),
}


def provider(sampler: Sampler) -> TracerProvider:
    made = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    made.add_span_processor(SpanProcessor())
    return made


async def double(session: Session[InferRequest, InferResponse]) -> None:
    async for request in session:
        await session.send(InferResponse(outputs=(Tensor(name="y", data=2 * request["x"]),)))


async def tokens(session: Session[Prompt, Token]) -> None:
    """Streams tokens from a session."""
    async for prompt in session:
        for number in range(prompt.parameters.max_new_tokens):
            await session.send(Token(text="a ", id=number))


async def generated(prompt: Prompt) -> Any:
    """Streams the tokens of `tokens` as a generator."""
    for number in range(prompt.parameters.max_new_tokens):
        yield Token(text="a ", id=number)


async def executed(way: str, question: Question, times: int) -> int:
    """Counts the bytecodes of `times` calls on one connection, after as many calls that fill the caches."""
    count = 0

    def one(code: object, offset: int) -> None:
        nonlocal count
        count += 1

    async with memory_gateway(
        [spec_of(double, "double"), spec_of(tokens, "tokens"), spec_of(generated, "generated")], tracer_provider=WAYS[way]()
    ) as memory:
        client = memory.client()
        for _ in range(times):
            await client.ask(question)
        watch = sys.monitoring
        watch.use_tool_id(watch.PROFILER_ID, "spans")
        watch.register_callback(watch.PROFILER_ID, watch.events.INSTRUCTION, one)
        watch.set_events(watch.PROFILER_ID, watch.events.INSTRUCTION)
        try:
            for _ in range(times):
                answer = await client.ask(question)
                assert answer.complete, answer.error
        finally:
            watch.set_events(watch.PROFILER_ID, 0)
            watch.free_tool_id(watch.PROFILER_ID)
    return count


def count(way: str, question: Question, times: int) -> int:
    """Counts with a clock that stands still: turns that end by time would differ from run to run."""
    return trio.run(executed, way, question, times, clock=MockClock(autojump_threshold=0))


def main() -> None:
    parent = (b"traceparent", b"00-%032x-%016x-01" % (1, 1))
    unary = infer({"x": np.ones(1, np.float32)}, "double")
    questions = {
        "v2 infer": unary,
        "v2 infer, with a traceparent": Question(
            path=unary.path, answer=unary.answer, headers=(*unary.headers, parent), body=unary.body
        ),
        "a stream of one token": lmi("x", "tokens", stream=True, max_new_tokens=1),
    }
    for name, question in questions.items():
        off = count("off", question, REQUESTS)
        for way in ("not sampled", "on"):
            more = (count(way, question, REQUESTS) - off) / REQUESTS
            print(f"{name}, {way}: {more:+.0f} bytecodes a request beside {off / REQUESTS:.0f}")
    for model in ("tokens", "generated"):
        for way in ("not sampled", "on"):
            short, long = (
                [count(w, lmi("x", model, stream=True, max_new_tokens=n), 4) for w in ("off", way)] for n in (1, TOKENS)
            )
            more = ((long[1] - long[0]) - (short[1] - short[0])) / 4 / (TOKENS - 1)
            print(f"{model}, {way}: {more:+.1f} bytecodes a token")


if __name__ == "__main__":
    main()
