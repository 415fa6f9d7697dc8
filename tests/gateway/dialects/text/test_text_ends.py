"""Texts end at their number of tokens and at their stop sequences, of every shape of model and on every wire."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, final

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import Config, LimitsConfig, LMIConfig, OpenAIConfig
from models.adapt import blocking, spec_of
from models.messages import Family, Finish, FinishReason, Part, Prompt, Token
from models.rolling import Advanced, RollingBatch, rolling
from models.session import Session
from models.spec import ModelSpec
from tests.gateway.dialects.text import text_wires
from tests.gateway.dialects.text.text_wires import SESSIONS, WAYS, Asked, Refused, Told, Way
from tests.gateway.promises import House, serving

WORDS = [f"w{number}" for number in range(100)]
PROMPT = " ".join(WORDS)


def shouted(words: Sequence[str] = WORDS) -> str:
    return "".join(f"{word.upper()} " for word in words)


# -- models; they ignore `max_new_tokens` unless a docstring says otherwise -------------------------------------------------


async def shout(prompt: Prompt) -> AsyncIterator[str]:
    """The model of the README."""
    for word in prompt.text.split():
        yield word.upper() + " "


def generator(prompt: Prompt) -> Iterator[str]:
    for word in prompt.text.split():
        yield word.upper() + " "


@blocking(False)
def quick_generator(prompt: Prompt) -> Iterator[str]:
    yield from generator(prompt)


async def endless(prompt: Prompt) -> AsyncIterator[str]:
    """It never waits for anything but its client."""
    for word in itertools.cycle(prompt.text.split()):
        yield word.upper() + " "


async def session(session: Session[Prompt, Token]) -> None:
    async for prompt in session:
        for word in prompt.text.split():
            await session.send(Token(text=word.upper() + " "))


async def stubborn(session: Session[Prompt, Token]) -> None:
    """Goes on whatever it is told."""
    async for prompt in session:
        for word in itertools.cycle(prompt.text.split()):
            try:
                await session.send(Token(text=word.upper() + " "))
            except Exception:
                continue


async def finishing(session: Session[Prompt, Token | Finish]) -> None:
    """Stops at `max_new_tokens` by itself, then sends a Finish."""
    async for prompt in session:
        for word in prompt.text.split()[: prompt.parameters.max_new_tokens]:
            await session.send(Token(text=word.upper() + " "))
        await session.send(Finish(reason=FinishReason.EOS_TOKEN))


async def late(session: Session[Prompt, Token | Finish]) -> None:
    """Ends its answer itself, after more words than `max_new_tokens`."""
    async for prompt in session:
        for word in prompt.text.split():
            await session.send(Token(text=word.upper() + " "))
        await session.send(Finish(reason=FinishReason.STOP_SEQUENCE))


async def hanging(session: Session[Prompt, Token]) -> None:
    """It waits for something else when it has said enough."""
    async for prompt in session:
        words = prompt.text.split()[: prompt.parameters.max_new_tokens]
        for word in words:
            await session.send(Token(text=word.upper() + " "))
        if len(words) == prompt.parameters.max_new_tokens:
            await trio.sleep_forever()


async def nested(session: Session[Prompt, Token]) -> None:
    """It speaks from a task of its own."""
    async with trio.open_nursery() as nursery:
        async for prompt in session:
            for word in prompt.text.split():
                nursery.start_soon(trio.sleep_forever)
                await session.send(Token(text=word.upper() + " "))
        nursery.cancel_scope.cancel()


async def parts(session: Session[Part, Part]) -> None:
    async for part in session:
        for word in bytes(part.data).decode().split():
            await session.send(Part(data=f"{word.upper()} ".encode()))


@final
class Speech:
    """A sequence of a rolling batch."""

    prompt_tokens, pending = 1, 0

    def __init__(self, prompt: Prompt, number: int) -> None:
        self.words, self.number = iter(prompt.text.split()), number


@final
class Speaks:
    """A step model."""

    def open(self, prompt: Prompt) -> list[Speech]:
        return [Speech(prompt, number) for number in range(prompt.parameters.n)]

    def prefill(self, sequence: Speech, at_most: int) -> None:
        raise AssertionError("nothing is pending")

    def step(self, sequences: Sequence[Speech]) -> list[Advanced]:
        return [self._next(one) for one in sequences]

    def _next(self, one: Speech) -> Advanced:
        word = next(one.words, None)
        if word is None:
            return Finish(reason=FinishReason.EOS_TOKEN, sequence=one.number)
        return Token(text=word.upper() + " ", sequence=one.number)

    def close(self, sequence: Speech) -> None:
        pass


@asynccontextmanager
async def rolls() -> AsyncIterator[RollingBatch[Speech]]:
    async with rolling(Speaks(), blocking=False) as batch:
        yield batch


def function(prompt: Prompt) -> str:
    return shouted(prompt.text.split())


async def coroutine(prompt: Prompt) -> str:
    return shouted(prompt.text.split())


SHAPES: dict[str, Callable[..., Any]] = {
    "async generator": shout,
    "generator": generator,
    "quick generator": quick_generator,
    "endless generator": endless,
    "session": session,
    "stubborn session": stubborn,
    "Finish after the last": finishing,
    "late Finish": late,
    "waits after the last": hanging,
    "tasks of its own": nested,
    "parts": parts,
    "rolling batch": rolls,
    "function": function,
    "async function": coroutine,
}
ONE_TOKEN = ("function", "async function")
ENDLESS = ("endless generator", "stubborn session")


def each(shapes: Iterable[str]) -> list[tuple[str, str]]:
    """Every wire with each of these shapes. A model of parts is shown as one of text where a wire has no parts of its own."""
    shown = [wire for wire, way in WAYS.items() if way.path.startswith(("/predictions", "/v1", "/v2"))]
    return [(wire, shape) for wire in WAYS for shape in shapes if shape != "parts" or wire in shown]


def spec_for(shape: str, way: Way) -> ModelSpec:
    model = SHAPES[shape]
    return replace(spec_of(model, "m", family=Family.PARTS if model is parts else Family.TEXT), **way.spec)


def config_for(way: Way, **limits: Any) -> Config:
    return Config(lmi=LMIConfig(**way.lmi), limits=LimitsConfig(**limits), openai=OpenAIConfig(max_tokens=256))


@asynccontextmanager
async def served(shape: str, way: Way, **limits: Any) -> AsyncIterator[House]:
    async with serving(spec_for(shape, way), config=config_for(way, **limits)) as house:
        yield house


async def over(house: House) -> None:
    """The answer has its ending, and nothing of its model runs in a thread any more."""
    with trio.fail_after(20):
        while house.gateway.counts().slots_in_use:
            await trio.lowlevel.checkpoint()
    await house.still()


async def asked(shape: str, wire: str, request: Asked, kind: str = "") -> Told:
    way = WAYS[wire]
    async with served(shape, way) as house:
        told = await way.ask(house, way.path, kind or way.kinds[0], request)
        await over(house)
        assert house.endings == {way.ending: 1}
        return told


def check(told: Told, words: Sequence[str], reason: str) -> None:
    assert told.text == shouted(words)
    if told.pieces is not None:
        assert list(told.pieces) == [f"{word.upper()} " for word in words]
    if told.reason is not None:
        assert told.reason == reason
    if told.tokens is not None:
        assert told.tokens == len(words)


# -- the number of tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [2, pytest.param(None, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(("wire", "shape"), each(SHAPES))
async def test_a_model_that_gives_more_than_was_asked_for_is_stopped_there_and_the_answer_is_complete(
    wire: str, shape: str, most: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    way = WAYS[wire]
    caplog.set_level(logging.INFO)
    for kind in way.kinds:
        told = await asked(shape, wire, Asked(PROMPT, most), kind)
        if shape in ONE_TOKEN:
            assert told.text == shouted()
            continue
        count = way.default if most is None else most
        words = list(itertools.islice(itertools.cycle(WORDS), count)) if shape in ENDLESS else WORDS[:count]
        check(told, words, "length" if len(words) == count else "stop" if shape == "late Finish" and wire in LMI else "end")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


LMI = [name for name, way in WAYS.items() if way.default == 30]


KINDS_OF_TOKEN = {
    "plain": Token(text="p"),
    "special": Token(text="", special=True),
    "first": Token(text="?", data="é".encode()[:1]),
    "second": Token(text="?", data="é".encode()[1:]),
}


@pytest.mark.parametrize(
    "kinds",
    ["plain plain special plain plain", "special plain plain plain", "plain plain plain first second plain plain"],
)
@pytest.mark.parametrize("wire", WAYS)
async def test_a_token_of_whatever_kind_counts_as_one(wire: str, kinds: str) -> None:
    async def endless(prompt: Prompt) -> AsyncIterator[Token]:
        for kind in itertools.cycle(kinds.split()):
            yield KINDS_OF_TOKEN[kind]

    way = WAYS[wire]
    async with serving(spec_of(endless, "m", **way.spec), config=config_for(way)) as house:
        for most in range(1, 9):
            sent = [KINDS_OF_TOKEN[kind] for kind in itertools.islice(itertools.cycle(kinds.split()), most)]
            text = b"".join(token.data or token.text.encode() for token in sent).decode(errors="replace")
            told = await way.ask(house, way.path, way.kinds[0], Asked("x", most))
            assert (told.text, told.reason, told.tokens) == (text, told.reason and "length", told.tokens and most)
        await over(house)
        assert house.endings == {way.ending: 8}


@pytest.mark.parametrize("wire", [wire for wire in WAYS if wire not in SESSIONS])
async def test_the_ledger_says_who_stopped_the_model(wire: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway.exchange")
    await asked("endless generator", wire, Asked(PROMPT, 3))
    await asked("async generator", wire, Asked("a b", 3))
    stopped = [getattr(record, "stopped_by", "") for record in caplog.records if record.name == "gateway.exchange"]
    assert stopped == ["gateway", ""]


@pytest.mark.parametrize("wire", ["lmi-json", "chat", "completions"])
@pytest.mark.parametrize("order", ["in turn", "one after another"])
async def test_each_of_several_sequences_ends_at_its_number_of_tokens(wire: str, order: str) -> None:
    async def several(session: Session[Prompt, Any]) -> None:
        async for prompt in session:
            n, most = prompt.parameters.n, prompt.parameters.max_new_tokens
            turns = [(number, word) for word in WORDS for number in range(n)]
            if order == "one after another":  # such a model ends each itself, as others are still to come
                turns = [(number, word) for number in range(n) for word in WORDS[:most]]
            for number, word in turns:
                await session.send(Token(text=f"{word}/{number} ", sequence=number))

    way = WAYS[wire]
    async with serving(
        spec_of(several, "m", family=Family.TEXT, parameters=frozenset({"n"}), **way.spec), config=config_for(way)
    ) as house:
        line = {"inputs": "x", "parameters": {"n": 3, "max_new_tokens": 2}}
        chat = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "n": 3, "max_tokens": 2}
        _, _, body = await house.ask(way.path, json.dumps(line if wire == "lmi-json" else chat).encode())
        answer = json.loads(body)
        if wire == "lmi-json":
            every = [answer, *answer["details"]["best_of_sequences"]]
            texts = [one["generated_text"] for one in every]
        else:
            texts = [one.get("text") or one["message"]["content"] for one in answer["choices"]]
        assert texts == [f"w0/{number} w1/{number} " for number in range(3)]
        await over(house)
        assert house.endings == {way.ending: 1}


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, GeneratorExit])
@pytest.mark.parametrize("wire", WAYS)
async def test_what_a_model_raises_when_it_was_stopped_is_not_its_answers(
    wire: str, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    async def untidy(session: Session[Prompt, Token]) -> None:
        async for prompt in session:
            try:
                for word in prompt.text.split():
                    await session.send(Token(text=word.upper() + " "))
                    await trio.lowlevel.checkpoint()
            finally:
                raise error("its own clean-up failed")

    way = WAYS[wire]
    async with serving(spec_of(untidy, "m", **way.spec), config=config_for(way)) as house:
        told = await way.ask(house, way.path, way.kinds[0], Asked(PROMPT, 2))
        assert told.text == shouted(WORDS[:2])
        await over(house)
        assert house.endings == {way.ending: 1}
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert (record.message, record.levelname) == ("model raised while stopped", "WARNING")


# -- stop sequences ----------------------------------------------------------------------------------------------------


STOPPED = ("async generator", "generator", "endless generator", "session", "parts", "rolling batch", "function")


@pytest.mark.parametrize(("wire", "shape"), each(STOPPED))
async def test_a_text_ends_at_a_stop_sequence_over_the_borders_of_tokens(wire: str, shape: str) -> None:
    way = WAYS[wire]
    request = Asked(PROMPT, stop=("4 W5", "W9 "))
    schema = await asked(shape, wire, request)
    without = await asked(shape, wire, replace(request, included=False))
    included = await asked(shape, wire, replace(request, included=True))
    assert (without.text, included.text) == ("W0 W1 W2 W3 W", "W0 W1 W2 W3 W4 W5")
    assert schema.text == (included if way.included else without).text
    for told in (schema, without, included):
        assert told.reason in (None, "stop" if wire in LMI and "chat" not in wire else told.reason)
        if told.tokens is not None and shape not in ONE_TOKEN:
            assert told.tokens == 6  # the one that completes the sequence is a token too
    if included.pieces is not None and shape not in ONE_TOKEN:
        assert list(included.pieces) == ["W0 ", "W1 ", "W2 ", "W3 ", "W4 ", "W5"]


@pytest.mark.parametrize("wire", WAYS)
async def test_what_was_held_back_comes_before_the_end(wire: str) -> None:
    for shape in ("async generator", "late Finish"):
        told = await asked(shape, wire, Asked("a b", stop=("B !",), included=False))
        assert told.text == "A B "
        if told.tokens is not None:
            assert told.tokens == 2
        told = await asked(shape, wire, Asked("a b c", most=2, stop=("B !",), included=False))
        assert (told.text, told.reason) == ("A B ", told.reason and "length")


@pytest.mark.parametrize("wire", WAYS)
async def test_a_model_that_says_that_it_stops_itself_is_not_filtered_twice(wire: str) -> None:
    async def own(prompt: Prompt) -> AsyncIterator[Token]:
        yield Token(text="it has seen " + " ".join(prompt.parameters.stop_sequences))
        yield Token(text=" and ends", finish=FinishReason.STOP_SEQUENCE)

    way = WAYS[wire]
    for parameters, text in ((frozenset({"stop_sequences"}), "it has seen END and ends"), (frozenset(), "it has seen END")):
        model = spec_of(own, "m", parameters=parameters, **way.spec)
        async with serving(model, config=config_for(way)) as house:
            told = await way.ask(house, way.path, way.kinds[0], Asked("x", stop=("END",), included=True))
            assert told.text == text
            await over(house)
        assert house.endings == {way.ending: 1}


async def test_a_formatter_sees_which_stop_sequence_it_was() -> None:
    way = WAYS["formatted"]
    async with served("async generator", way) as house:
        document = {"inputs": PROMPT, "parameters": {"stop": ["W3", "W2"]}}
        _, _, body = await house.ask(way.path, json.dumps(document).encode())
        assert json.loads(body.splitlines()[-1]) == ["W2", "stop_sequence", "W2"]


@pytest.mark.parametrize("wire", ["chat", "completions", "lmi-json"])
async def test_a_sequence_that_met_its_stop_leaves_the_others_alone(wire: str) -> None:
    async def several(session: Session[Prompt, Any]) -> None:
        async for prompt in session:
            for number in range(prompt.parameters.n):  # one after another: none knows of stop sequences
                for word in ("a ", "b ", "c ", "d ")[: prompt.parameters.max_new_tokens]:
                    await session.send(Token(text=f"{number}{word}", sequence=number))

    way = WAYS[wire]
    async with serving(
        spec_of(several, "m", family=Family.TEXT, parameters=frozenset({"n"}), **way.spec), config=config_for(way)
    ) as house:
        line = {"inputs": "x", "parameters": {"n": 3, "stop": "1b", "max_new_tokens": 4}}
        chat = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "n": 3, "stop": "1b", "max_tokens": 4}
        _, _, body = await house.ask(way.path, json.dumps(line if wire == "lmi-json" else chat).encode())
        answer = json.loads(body)
        if wire == "lmi-json":
            texts = [one["generated_text"] for one in [answer, *answer["details"]["best_of_sequences"]]]
            assert texts == ["0a 0b 0c 0d ", "1a 1b", "2a 2b 2c 2d "]
        else:
            texts = [one.get("text") or one["message"]["content"] for one in answer["choices"]]
            assert texts == ["0a 0b 0c 0d ", "1a ", "2a 2b 2c 2d "]
            assert [one["finish_reason"] for one in answer["choices"]] == ["length", "stop", "length"]
        await over(house)
        assert house.endings == {way.ending: 1}


@pytest.mark.parametrize("wire", WAYS)
async def test_no_stop_sequence_is_met_before_the_least_number_of_tokens(wire: str) -> None:
    way = WAYS[wire]

    async def ask(name: str) -> Told:
        async def least(prompt: Prompt) -> AsyncIterator[str]:
            assert prompt.parameters.min_length == 3
            for word in WORDS:
                yield word.upper() + " "

        stop = {"stop": ["W"], "include_stop_str_in_output": True}
        async with serving(spec_of(least, "m", **way.spec), config=config_for(way)) as house:
            original = text_wires.parameters
            text_wires.parameters = lambda asked: {**original(asked), **stop, name: 3}
            try:
                return await way.ask(house, way.path, way.kinds[0], Asked("x"))
            finally:
                text_wires.parameters = original

    assert (await ask("min_tokens" if "/v1" in way.path or "chat" in wire else "min_length")).text == "W0 W1 W2 W"


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.text("ab", max_size=3), min_size=1, max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3),
    st.booleans(),
)
def test_a_whole_answer_and_a_stream_have_the_text_that_a_naive_search_cuts(
    tokens: list[str], stops: list[str], included: bool
) -> None:
    text = "".join(tokens)
    ends = [(end, start) for end in range(len(text) + 1) for start in range(end) if text[start:end] in stops]
    expected = text if not ends else text[: min(ends)[0] if included else min(ends)[1]]

    async def says(prompt: Prompt) -> AsyncIterator[str]:
        for token in tokens:
            yield token

    async def run() -> None:
        for wire in ("lmi-json", "lmi-lines", "chat", "chat-stream", "generate", "generate_stream", "bidi"):
            way = WAYS[wire]
            async with serving(spec_of(says, "m", **way.spec), config=config_for(way)) as house:
                told = await way.ask(house, way.path, way.kinds[0], Asked("x", stop=tuple(stops), included=included))
                assert told.text == expected, wire

    trio.run(run)


# -- the ceiling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WAYS)
async def test_a_request_for_more_tokens_than_the_ceiling_is_refused_by_its_names(wire: str) -> None:
    way = WAYS[wire]
    async with served("async generator", way, max_new_tokens=40) as house:
        for kind in way.kinds:
            with pytest.raises(Refused) as refused:
                await way.ask(house, way.path, kind, Asked(PROMPT, 41))
            status, said = refused.value.status, refused.value.body.decode()
            openai = "chat" in wire or "completions" in wire
            assert status == (0 if wire in SESSIONS else 400 if openai or "generate" in wire else 424)
            member = "max_tokens" if openai else "parameters.max_new_tokens"
            assert f"{member}: expected at most 40 (limits.max_new_tokens), got 41" in said
            assert not openai or json.loads(said)["error"]["param"] == "max_tokens"
            check(await way.ask(house, way.path, kind, Asked(PROMPT, 40)), WORDS[:40], "length")
            # a default is lowered to the most there may be
            check(await way.ask(house, way.path, kind, Asked(PROMPT)), WORDS[: min(40, way.default)], "length")


@pytest.mark.parametrize("wire", WAYS)
async def test_there_is_a_ceiling_unless_it_is_0_and_a_model_may_have_a_lower_one(wire: str) -> None:
    way = WAYS[wire]
    most = 2**31 - 1
    async with served("async generator", way) as house:
        with pytest.raises(Refused, match=r"at most 262144 \(limits.max_new_tokens\), got 2147483647"):
            await way.ask(house, way.path, way.kinds[0], Asked("a b", most))
    async with served("async generator", way, max_new_tokens=0) as house:
        assert (await way.ask(house, way.path, way.kinds[0], Asked("a b", most))).text == "A B "
    for ceiling in (0, 50):
        spec = replace(spec_for("async generator", way), max_new_tokens=7)
        async with serving(spec, config=config_for(way, max_new_tokens=ceiling)) as house:
            with pytest.raises(Refused, match=r"at most 7 \(the max_new_tokens of model .+\), got 8"):
                await way.ask(house, way.path, way.kinds[0], Asked("a b", 8))


# -- sequences that nobody asked for -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stray", [Token(text="a", sequence=7), Token(text="a", sequence=-1), Token(text="a", sequence=7, prefill=True)]
)
@pytest.mark.parametrize("wire", WAYS)
async def test_a_token_of_a_sequence_that_nobody_asked_for_is_the_models_error(wire: str, stray: Token) -> None:
    async def lost(session: Session[Prompt, Token]) -> None:
        await session.receive()
        await session.send(stray)
        await session.send(Token(text="b"))

    way = WAYS[wire]
    said = f"the model sent a token of sequence {stray.sequence}, where 0 to 0 were asked for"
    async with serving(spec_of(lost, "m", **way.spec), config=config_for(way)) as house:
        with pytest.raises(Refused) as refused:
            await way.ask(house, way.path, way.kinds[0], Asked("x"))
        platform = way.path.startswith("/endpoints/")  # the platform answers 424 for any error of its container
        assert refused.value.status == (0 if wire in SESSIONS else 424 if platform else 500)
        assert said in refused.value.body.decode()
        await over(house)
        assert house.endings == {"model-error": 1}


# -- a table for people to read: -s -k table ---------------------------------------------------------------------------


async def test_table_of_what_came_of_readmes_model_on_every_wire() -> None:
    rows = []
    for wire, way in WAYS.items():
        for most in (2, None):
            told = await asked("async generator", wire, Asked(PROMPT, most))
            count = len(told.text.split())
            assert count == min(100, way.default if most is None else most)
            tokens = "" if told.tokens is None else f"{told.tokens} tokens"
            cell = told.text if count < 4 else f"{told.text[:6]}... {told.text.split()[-1]}"
            rows.append((wire, way.path, str(most or "none"), f"{count} words", tokens, told.reason or "", cell))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
