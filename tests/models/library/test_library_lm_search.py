"""Several sequences of one request: drawn side by side, the best of many, and beams against brute force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from models.library.lm.model import LanguageModel, Level
from models.library.lm.search import ranked
from models.library.lm.tokenizer import EOS, Tokenizer
from models.messages import Finish, FinishReason, GenerationParameters, Prompt, Token
from models.session import Session
from tests.models.library.library_session import Tape, converse

MODEL = LanguageModel.load()
SERVER = MODEL.encode("The server")
LETTERS = tuple(byte + 1 for byte in b"abc")


async def answer(model: LanguageModel = MODEL, text: str = "The server", **parameters: Any) -> list[Token]:
    return await converse(model, Prompt(text=text, parameters=GenerationParameters(**parameters)))


def sequence(tokens: Sequence[Token], number: int) -> list[Token]:
    return [token for token in tokens if token.sequence == number]


def ids_of(tokens: Sequence[Token]) -> list[int]:
    return [token.id for token in tokens]


def sums(tokens: Sequence[Token], count: int) -> list[float]:
    return [math.fsum(token.log_prob or 0 for token in sequence(tokens, number)) for number in range(count)]


# n and best_of


async def test_sequences_are_drawn_side_by_side_each_by_its_own_numbers() -> None:
    asked: dict[str, Any] = {"do_sample": True, "seed": 4, "max_new_tokens": 9}
    alone = await answer(**asked)
    tokens = await answer(n=3, **asked)
    assert [token.sequence for token in tokens[:6]] == [0, 1, 2] * 2
    assert sequence(tokens, 0) == alone
    for number in range(3):
        own = list(MODEL.generate(SERVER, GenerationParameters(**asked), number))
        assert sequence(tokens, number) == own
    assert len({tuple(ids_of(sequence(tokens, number))) for number in range(3)}) == 3


async def test_greedy_sequences_are_equal_but_for_their_number() -> None:
    tokens = await answer(n=2, repetition_penalty=1.3)
    assert ids_of(sequence(tokens, 0)) == ids_of(sequence(tokens, 1)) == ids_of(await answer(repetition_penalty=1.3))


async def test_a_sequence_that_has_ended_leaves_its_turns_to_the_others() -> None:
    tokens = await answer(n=6, do_sample=True, seed=1, max_new_tokens=60, stop_sequences=(".",))
    lengths = [len(sequence(tokens, number)) for number in range(6)]
    assert len(set(lengths)) > 1
    for number in range(6):
        assert [token.finish is not None for token in sequence(tokens, number)].index(True) == lengths[number] - 1


async def test_the_best_of_many_are_those_with_the_highest_log_probability_best_first() -> None:
    asked: dict[str, Any] = {"do_sample": True, "seed": 11, "max_new_tokens": 8, "temperature": 1.3, "top_n_tokens": 2}
    tokens = await answer(n=2, best_of=7, **asked)
    candidates = [list(MODEL.generate(SERVER, GenerationParameters(**asked), number)) for number in range(7)]
    totals = [math.fsum(token.log_prob or 0 for token in candidate) for candidate in candidates]
    order = sorted(range(7), key=lambda number: -totals[number])
    assert order[:2] != [0, 1]
    for number in range(2):
        found, wanted = sequence(tokens, number), candidates[order[number]]
        assert [(t.id, t.text, t.log_prob, t.finish, t.top) for t in found] == [
            (t.id, t.text, t.log_prob, t.finish, t.top) for t in wanted
        ]
    assert [token.sequence for token in tokens] == sorted(token.sequence for token in tokens)


async def test_best_of_is_never_less_than_n() -> None:
    asked: dict[str, Any] = {"do_sample": True, "seed": 11, "max_new_tokens": 4}
    assert await answer(n=3, best_of=1, **asked) == await answer(n=3, best_of=3, **asked) == await answer(n=3, **asked)


@pytest.mark.parametrize("asked", [{"n": 2}, {"n": 2, "best_of": 5}, {"n": 2, "num_beams": 5}])
async def test_without_new_tokens_each_sequence_is_finished(asked: dict[str, Any]) -> None:
    finished: list[Any] = [Finish(reason=FinishReason.LENGTH, sequence=number) for number in range(2)]
    assert await answer(max_new_tokens=0, **asked) == finished


async def test_a_delay_passes_between_the_turns_of_all_sequences(autojump_clock: trio.testing.MockClock) -> None:
    began = trio.current_time()
    await answer(n=3, max_new_tokens=5, extra={"delay_ms": 250})
    assert trio.current_time() - began == pytest.approx(4 * 0.25)


# Beams


def tiny(seed: int) -> LanguageModel:
    """A model of a, b, c and the end, whose next token depends on the last four; other bytes are next to impossible."""
    random = np.random.Generator(np.random.PCG64(seed))
    children = np.array([EOS, *LETTERS], dtype=np.uint16)
    rare = 1e-12

    def level(fanout: list[int]) -> Level:
        contexts = sum(map(bool, fanout))
        return Level(
            start=np.cumsum([0, *fanout], dtype=np.int32),
            token=np.tile(children, contexts),
            gain=random.dirichlet([0.6, 1, 1, 1], contexts).ravel() * (1 - rare),
            rest=np.where(fanout, rare, 1.0),
        )

    levels = [level([4 * (token in children) for token in range(257)])]
    levels += [level([4] * 4**length) for length in (2, 3, 4)]
    return LanguageModel(Tokenizer([]), np.full(257, 1 / 257), levels)


def log_prob(model: LanguageModel, ids: Sequence[int]) -> float:
    """The log-probability of these tokens after the prompt "a"."""
    context = [EOS, LETTERS[0], *ids]
    return sum(float(model.next_log_probs(context[: at + 2])[token]) for at, token in enumerate(ids))


def every_sequence(length: int) -> list[tuple[int, ...]]:
    """All sequences that end by the end of sequence, or at this length."""
    ended = [(*ids, EOS) for size in range(length) for ids in itertools.product(LETTERS, repeat=size)]
    return [*ended, *itertools.product(LETTERS, repeat=length)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.7, 1.0, 2.0])
async def test_wide_beams_find_what_brute_force_finds(seed: int, penalty: float) -> None:
    model = tiny(seed)
    # 64 beams hold all the 27 open sequences of 3 tokens.
    tokens = await answer(model, "a", num_beams=64, n=8, max_new_tokens=4, length_penalty=penalty)
    scores = {ids: log_prob(model, ids) / math.pow(len(ids), penalty) for ids in every_sequence(4)}
    best = sorted(scores, key=lambda ids: -scores[ids])[:8]
    assert [tuple(ids_of(sequence(tokens, number))) for number in range(8)] == best


def reference_beams(model: LanguageModel, width: int, length: int, penalty: float, early: bool) -> list[tuple[int, ...]]:
    """transformers' BeamSearchScorer, in plain lists."""
    beams: list[tuple[int, ...]] = [()]
    done: list[tuple[float, tuple[int, ...]]] = []

    def final(ids: tuple[int, ...]) -> float:
        return log_prob(model, ids) / math.pow(len(ids), penalty)

    for _ in range(length):
        candidates = [(*ids, token) for ids in beams for token in (EOS, *LETTERS)]
        candidates.sort(key=lambda ids: -log_prob(model, ids))
        done += [(final(ids), ids) for ids in candidates[:width] if ids[-1] == EOS]
        done = sorted(done, key=lambda found: -found[0])[:width]
        beams = [ids for ids in candidates if ids[-1] != EOS][:width]
        if len(done) == width and (early or done[-1][0] >= final(beams[0])):
            return [ids for _, ids in done]
    done += [(final(ids), ids) for ids in beams]
    return [ids for _, ids in sorted(done, key=lambda found: -found[0])[:width]]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 3.0])
async def test_narrow_beams_are_those_of_a_plain_computation(early: bool, penalty: float) -> None:
    for seed, width in itertools.product(range(6), (2, 3)):
        model = tiny(seed)
        asked: dict[str, Any] = {"num_beams": width, "n": width, "max_new_tokens": 7}
        tokens = await answer(model, "a", length_penalty=penalty, early_stopping=early, **asked)
        found = [tuple(ids_of(sequence(tokens, number))) for number in range(width)]
        assert found == reference_beams(model, width, 7, penalty, early)


async def test_early_stopping_may_miss_a_better_sequence() -> None:
    differing = 0
    for seed in range(12):
        asked: dict[str, Any] = {"num_beams": 2, "max_new_tokens": 9, "length_penalty": 2.0}
        differing += await answer(tiny(seed), "a", early_stopping=True, **asked) != await answer(tiny(seed), "a", **asked)
    assert differing


async def test_beams_are_at_least_as_probable_as_greedy_text_and_come_best_first() -> None:
    tokens = await answer(num_beams=5, n=5, max_new_tokens=10, ignore_eos_token=True)
    greedy = await answer(max_new_tokens=10, ignore_eos_token=True)
    totals = sums(tokens, 5)
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > sums(greedy, 1)[0]
    assert len({tuple(ids_of(sequence(tokens, number))) for number in range(5)}) == 5


@pytest.mark.parametrize(
    "parameters",
    [
        {"repetition_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"logit_bias": {EOS: -100.0, 100: 20.0}},
        {"bad_sequences": (" the", "er")},
    ],
)
async def test_processors_change_what_beams_find(parameters: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 12}
    assert ids_of(await answer(**asked, **parameters)) != ids_of(await answer(**asked))


async def test_beams_end_before_their_stop_and_never_have_a_bad_sequence() -> None:
    asked: dict[str, Any] = {"num_beams": 4, "n": 4, "max_new_tokens": 12, "length_penalty": 0.0}
    free = "".join(token.text for token in sequence(await answer(**asked), 0))
    stop, bad = free[10:13], free[4:7]
    stopped = await answer(stop_sequences=(stop,), include_stop_str_in_output=False, **asked)
    assert any(token.finish is FinishReason.STOP_SEQUENCE for token in stopped)
    other = await answer(bad_sequences=(bad,), **asked)
    for number in range(4):
        assert stop not in "".join(token.text for token in sequence(stopped, number))
        assert bad not in "".join(token.text for token in sequence(other, number))


async def test_beams_go_on_when_nearly_every_candidate_is_complete() -> None:
    tokens = await answer(tiny(0), "a", num_beams=2, n=2, max_new_tokens=3, stop_token_ids=(EOS, *LETTERS))
    assert [len(sequence(tokens, number)) for number in range(2)] == [1, 1]
    assert all(token.finish in (FinishReason.STOP_SEQUENCE, FinishReason.EOS_TOKEN) for token in tokens)


async def test_best_of_means_nothing_to_beams_and_the_length_penalty_nothing_without_them() -> None:
    assert await answer(num_beams=3, best_of=9) == await answer(num_beams=3)
    assert await answer(length_penalty=9.0, early_stopping=True) == await answer()


def test_all_candidates_come_ranked_however_few_are_asked_for_at_first() -> None:
    totals = [np.array([0.5, -1.0, -math.inf, 2.0]), np.array([0.5, 3.0, -2.0, -math.inf])]
    expected = [(1, 1, 3.0), (0, 3, 2.0), (0, 0, 0.5), (1, 0, 0.5), (0, 1, -1.0), (1, 2, -2.0)]
    for few in range(1, 9):
        assert list(ranked(totals, few)) == expected


# While it searches


@pytest.mark.parametrize("asked", [{"best_of": 64, "do_sample": True}, {"num_beams": 64}])
async def test_a_search_is_cancelled_between_its_steps(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for = 0
    next_log_probs = MODEL.next_log_probs

    def counted(context: Sequence[int]) -> Any:
        nonlocal asked_for
        asked_for += 1
        return next_log_probs(context)

    monkeypatch.setattr(MODEL, "next_log_probs", counted)
    tape = Tape([Prompt(text="The", parameters=GenerationParameters(max_new_tokens=500, **asked))])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(MODEL, Session(tape))
        for _ in range(20):
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert 0 < asked_for < 400
    assert tape.sent == []


async def test_other_tasks_run_while_bad_sequences_are_looked_up() -> None:
    ran = 0

    async def other() -> None:
        nonlocal ran
        while True:
            await trio.lowlevel.checkpoint()
            ran += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await answer(max_new_tokens=1, bad_sequences=tuple(map(str, range(64))))
        nursery.cancel_scope.cancel()
    assert ran > 32
