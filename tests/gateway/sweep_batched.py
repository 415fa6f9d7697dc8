"""The sweep's stories of batches: clients whose rows are in one call of a model, and whose sequences are in one step."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, final

import numpy as np
import numpy.typing as npt
import trio

from gateway.client import Peer, questions
from gateway.testing.stories.talk import Talk
from models.adapt import adapt
from models.messages import Family, FinishReason, InferRequest, InferResponse, Prompt, Tensor, Token
from models.rolling import Advanced, rolling
from models.session import Session
from models.spec import Batching, Model, ModelSpec
from tests.gateway.sweep_scenarios import (
    _STREAM,
    VICTIM,
    HTTP2Line,
    Scenario,
    Stage,
    ask,
    complete,
    double,
    generate,
    in_pieces,
    over_http1,
    over_http2,
    tensor_of,
)

Served = Callable[[Stage], Callable[[str], ModelSpec]]

# -- rows in one call ------------------------------------------------------------------------------------------------


@final
class _Rows:
    """Records whose rows a call has. Once the victim's rows were bad, they stay bad."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._bad = stage, False

    @contextmanager
    def called(self, x: npt.NDArray[np.int32]) -> Iterator[None]:
        by_first = {sum(name.encode()): talk for name, talk in self._stage.talks.items()}
        talks = [by_first[int(row[0])] for row in x]
        with ExitStack() as calls:
            for talk in talks:
                calls.enter_context(self._stage.call(talk.query[1:]))
            try:
                self._points(talks)
                yield
                self._points(talks)
            except Exception:
                for talk in talks:
                    talk.calls += len(talks) > 1  # each is called again, alone
                raise
            for talk, row in zip(talks, x, strict=True):
                talk.take(row.tobytes())
                talk.say((row + row).tobytes())

    def _points(self, talks: Sequence[Talk]) -> None:
        for talk in talks:
            if talk.name == VICTIM and self._bad and self._stage.raise_at > 0:
                raise ValueError("bad rows are bad again")
            try:
                self._stage.point(talk)
            except Exception:
                self._bad = True
                raise


def _tasks(rows: _Rows) -> Model:
    async def model(session: Session[InferRequest, InferResponse]) -> None:
        x = (await session.receive())["x"]
        with rows.called(x):
            await trio.sleep(0.0011)
        await session.send(InferResponse(outputs=[Tensor(name="y", data=x + x)]))

    return model


def _threads(rows: _Rows) -> Model:
    def model(x: npt.NDArray[np.int32]) -> dict[str, npt.NDArray[np.int32]]:
        with rows.called(x):
            return {"y": x + x}

    return adapt(model)[0]


def _joined(kind: Callable[[_Rows], Model]) -> Served:
    """Two clients' rows go together, as soon as there are two; one alone waits a little."""

    def served(stage: Stage) -> Callable[[str], ModelSpec]:
        rows = _Rows(stage)

        @asynccontextmanager
        async def load() -> AsyncIterator[Model]:
            yield kind(rows)

        batching = Batching(max_delay=0.003, preferred=(2,))
        return lambda name: ModelSpec(name=name, family=Family.TENSOR, load=load, max_batch_size=8, batching=batching)

    return served


async def _infer(where: Peer | HTTP2Line, talk: Talk, **how: Any) -> None:
    x = tensor_of(talk, 300)[np.newaxis]
    question = questions.infer({"x": x}, talk.model)
    await ask(where, talk, question, in_pieces(talk, question.body or b"", 3, x.tobytes()), **how)


# -- sequences in one step -------------------------------------------------------------------------------------------


@final
class _Sequence:
    def __init__(self, talk: Talk, prompt: Prompt) -> None:
        self.talk, self.begun, self.made = talk, False, 0
        self.wanted = prompt.parameters.max_new_tokens
        self.prompt_tokens = self.pending = 5


@final
class _Steps:
    """Numbers its tokens, and remembers them: it cannot know which of them were sent. A talk's call is from the first of its
    prompt that is taken to the close."""

    def __init__(self, stage: Stage, size: int) -> None:
        self._stage, self._size = stage, size

    def open(self, prompt: Prompt) -> list[_Sequence]:
        talk = self._stage.talks[prompt.text]
        self._stage.point(talk)
        return [_Sequence(talk, prompt)]

    def prefill(self, sequence: _Sequence, at_most: int) -> None:
        talk = sequence.talk
        if not sequence.begun:
            sequence.begun = True
            talk.begun += 1
            talk.take(talk.name.encode())
        self._stage.point(talk)
        sequence.pending -= min(at_most, 2)

    def step(self, sequences: Sequence[_Sequence]) -> list[Advanced]:
        return [self._next(sequence) for sequence in sequences]

    def _next(self, sequence: _Sequence) -> Advanced:
        talk = sequence.talk
        try:
            self._stage.point(talk)
        except Exception as e:
            return e
        text, number = f" {sequence.made}".ljust(self._size, "_"), sequence.made
        talk.say(text.encode())
        sequence.made += 1
        finish = FinishReason.LENGTH if sequence.made == sequence.wanted else None
        return Token(text=text, id=number, finish=finish)

    def close(self, sequence: _Sequence) -> None:
        sequence.talk.over += sequence.begun


def _stepped(*, blocking: bool, size: int = 40) -> Served:
    def served(stage: Stage) -> Callable[[str], ModelSpec]:
        @asynccontextmanager
        async def load() -> AsyncIterator[Model]:
            async with rolling(_Steps(stage, size), blocking=blocking, prefill_budget=4, ahead=2) as batch:
                yield batch

        return lambda name: ModelSpec(name=name, family=Family.TEXT, load=load)

    return served


# -- scenarios: all of a story are called by one model -----------------------------------------------------------------

_HTTP1: dict[str, Any] = {"other": "m", "memory": 2 * (4096 + 2048 + 1600)}
_HTTP2: dict[str, Any] = {"other": "m", "memory": 2 * (_STREAM + 2 * 1600)}
_ROWED: dict[str, Any] = {"family": Family.TENSOR, "model": double}
_LINES: dict[str, Any] = {"family": Family.TEXT, "model": generate}

BATCHED: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        over_http1("batched", _infer, served=_joined(_tasks), **_HTTP1, **_ROWED),
        over_http1("batched-threads", _infer, served=_joined(_threads), **_HTTP1, **_ROWED),
        over_http2("batched-h2", _infer, served=_joined(_tasks), **_HTTP2, **_ROWED),
        over_http1("rolling", complete, served=_stepped(blocking=False), **_HTTP1, **_LINES),
        over_http1("rolling-threads", complete, served=_stepped(blocking=True), **_HTTP1, **_LINES),
        over_http2("rolling-h2", complete, served=_stepped(blocking=False), **_HTTP2, **_LINES),
        # `ahead`: words of 400 bytes in the send buffer, the pipe, the client's read, and two ahead of its session
        over_http1(
            "rolling-slow", partial(complete, tokens=12), served=_stepped(blocking=False, size=400), pace=0.001, ahead=8,
            **_HTTP1, **_LINES,
        ),
    )
}  # fmt: skip
