"""The sweep's stories of batches: clients whose rows are in one call of a model, and whose sequences are in one step."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any, final

import numpy as np
import numpy.typing as npt
import trio

from gateway import client
from models.adapt import adapt
from models.messages import Family, FinishReason, InferRequest, InferResponse, Prompt, Tensor, Token
from models.rolling import Advanced, rolling
from models.session import Session
from models.spec import Batching, Model, ModelSpec
from protocols import v2
from protocols.events import Headers
from tests.gateway.sweep_scenarios import (
    _JSON,
    _STREAM,
    COMPANION,
    FRESH,
    NEIGHBOUR,
    NEXT,
    VICTIM,
    HTTP2Line,
    LinesParser,
    Scenario,
    Stage,
    Talk,
    TensorParser,
    _line,
    _together,
    double,
    generate,
    generate_over_http1,
    on_stream,
    over_http1,
    pieces_of,
)

Served = Callable[[Stage], Callable[[str], ModelSpec]]

# -- rows in one call ------------------------------------------------------------------------------------------------


@final
class _Rows:
    """What is remembered of a call: whose rows it has. The victim's are bad for good once they were."""

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
                talk.taken.append(row.tobytes())
                talk.said.append((row + row).tobytes())

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
    def model(x: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        with rows.called(x):
            return x + x

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


def _row(talk: Talk, elements: int) -> tuple[bytes, bytes, Headers]:
    x = np.arange(elements, dtype=np.int32)[np.newaxis] + sum(talk.name.encode())
    headers, buffers = v2.encode_infer_request([v2.V2Tensor(name="x", datatype="INT32", array=x)], binary_data_output=True)
    return b"".join(buffers), x.tobytes(), [h for h in headers if h[0] != b"content-length"]


async def _infer_over_http1(stage: Stage, talk: Talk, *, pace: float = 0.0) -> None:
    body, row, headers = _row(talk, 300)
    peer = client.http1(stage.connect(talk.line))
    path, content = f"/v2/models/{talk.model}/infer{talk.query}", pieces_of(talk, body, row, 3)
    await over_http1(peer, 1, talk, path, headers, content, TensorParser(talk), length=len(body), pace=pace)
    peer.close()


async def _infer_over_http2(line: HTTP2Line, talk: Talk, *, pace: float = 0.0) -> None:
    body, row, headers = _row(talk, 300)
    path, content = f"/v2/models/{talk.model}/infer{talk.query}", pieces_of(talk, body, row, 3)
    await on_stream(line, talk, path, headers, content, TensorParser(talk), length=len(body), pace=pace)


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
            talk.taken.append(talk.name.encode())
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
        talk.said.append(text.encode())
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


async def _generate_over_http2(line: HTTP2Line, talk: Talk, *, tokens: int = 6, pace: float = 0.0) -> None:
    asked = {"inputs": talk.name, "parameters": {"max_new_tokens": tokens}, "stream": True}
    body, path = json.dumps(asked).encode(), f"/predictions/{talk.model}{talk.query}"
    content = pieces_of(talk, body, talk.name.encode(), 1)
    await on_stream(line, talk, path, _JSON, content, LinesParser(talk), length=len(body), pace=pace)


# -- scenarios: all of a story are called by one model -----------------------------------------------------------------


def _http1(name: str, family: Family, served: Served, ask: Any, *, pace: float = 0.0004, **more: Any) -> Scenario:
    async def play(stage: Stage) -> None:
        victim, neighbour = stage.talk(VICTIM), stage.talk(NEIGHBOUR)
        await _together(ask(stage, victim, pace=pace), ask(stage, neighbour))

    async def again(stage: Stage) -> None:
        await ask(stage, stage.talk(FRESH))

    more = {"memory": 2 * (4096 + 2048 + 1600), "buffer": 600, **more}
    return _scenario(name, "http/1.1", family, served, play, again, **more)


def _http2(name: str, family: Family, served: Served, ask: Any, **more: Any) -> Scenario:
    async def play(stage: Stage) -> None:
        victim, companion = stage.talk(VICTIM), stage.talk(COMPANION, VICTIM)
        async with _line(stage, VICTIM) as line:
            await _together(ask(line, victim, pace=0.0004), ask(line, companion))
            if line.machine.can_open:
                await ask(line, stage.talk(NEXT, VICTIM))

    async def again(stage: Stage) -> None:
        async with _line(stage, FRESH) as line:
            await ask(line, stage.talk(FRESH))

    return _scenario(name, "http/2", family, served, play, again, memory=2 * (_STREAM + 2 * 1600), **more)


def _scenario(name: str, wire: str, family: Family, served: Served, play: Any, again: Any, **more: Any) -> Scenario:
    model = double if family is Family.TENSOR else generate
    return Scenario(name=name, wire=wire, model=model, family=family, play=play, again=again, served=served, **more)


async def _long_lines(stage: Stage, talk: Talk, *, pace: float = 0.0) -> None:
    await generate_over_http1(stage, talk, tokens=12, pace=pace)


BATCHED: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        _http1("batched", Family.TENSOR, _joined(_tasks), _infer_over_http1),
        _http1("batched-threads", Family.TENSOR, _joined(_threads), _infer_over_http1),
        _http2("batched-h2", Family.TENSOR, _joined(_tasks), _infer_over_http2),
        _http1("rolling", Family.TEXT, _stepped(blocking=False), generate_over_http1),
        _http1("rolling-threads", Family.TEXT, _stepped(blocking=True), generate_over_http1),
        _http2("rolling-h2", Family.TEXT, _stepped(blocking=False), _generate_over_http2),
        # what a word of 400 bytes may wait in: the send buffer, the pipe, the client's read, and two ahead of its session
        _http1("rolling-slow", Family.TEXT, _stepped(blocking=False, size=400), _long_lines, pace=0.001, ahead=8),
    )
}
