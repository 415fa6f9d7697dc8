"""How the language model chooses a token: each parameter against a plain computation of what it means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.library.lm.model import LanguageModel
from models.library.lm.sampling import BadSequences, Floats, best, choices, drawn, random_of
from models.library.lm.tokenizer import EOS
from models.messages import GenerationParameters, Token, utf8

MODEL = LanguageModel.load()
SERVER = MODEL.encode("The server")
ENDING = MODEL.encode("It was generated with gencodec")


def generate(ids: list[int] = SERVER, **parameters: Any) -> list[Token]:
    return list(MODEL.generate(ids, GenerationParameters(**parameters)))


def text_of(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


def ids_of(tokens: list[Token]) -> list[int]:
    return [token.id for token in tokens]


# Scores


def reference_scores(
    log_probs: Floats, prompt: Sequence[int], output: Sequence[int], given: GenerationParameters
) -> list[float]:
    """The processors in their order, one token at a time."""
    least, scores = float(np.min(log_probs)), []
    for token, log_prob in enumerate(log_probs.tolist()):
        score = log_prob - least + given.logit_bias.get(token, 0.0)
        text = b"".join(map(MODEL.tokenizer.bytes_of, [*output, token]))
        bad = any(utf8(word) in text for word in given.bad_sequences)
        if bad or (token == EOS and (given.ignore_eos_token or len(output) < given.min_length)):
            score = -math.inf
        if token in prompt or token in output:
            score = score / given.repetition_penalty if score >= 0 else score * given.repetition_penalty
        score -= given.presence_penalty * (token in output) + given.frequency_penalty * output.count(token)
        scores.append(score)
    return scores


PROCESSED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 1.5},
    {"presence_penalty": -1.0},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -2.0},
    {"logit_bias": {258: 4.0, 300: -100.0, 47: 3.5}},
    {"bad_sequences": (" wrap", "und s", "Th")},
    {"min_length": 6, "logit_bias": {EOS: 9.0}},
    {"ignore_eos_token": True, "logit_bias": {EOS: 100.0, 47: -50.0}},
    {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {EOS: 8.0, 290: -40.0},
        "bad_sequences": ("an", ". "),
        "min_length": 3,
    },
]


@pytest.mark.parametrize("parameters", PROCESSED)
def test_greedy_takes_the_highest_of_the_scores_as_a_plain_computation_has_them(parameters: dict[str, Any]) -> None:
    asked = GenerationParameters(max_new_tokens=12, **parameters)
    output: list[int] = []
    for token in MODEL.generate(SERVER, asked):
        log_probs = MODEL.next_log_probs([EOS, *SERVER, *output])
        assert token.id == int(np.argmax(reference_scores(log_probs, SERVER, output, asked)))
        assert token.log_prob == float(log_probs[token.id])
        output.append(token.id)
    assert output != ids_of(generate(max_new_tokens=12))


def test_a_bias_makes_a_token_certain_or_rare() -> None:
    free = generate(max_new_tokens=1)[0].id
    assert ids_of(generate(max_new_tokens=3, logit_bias={300: 100.0})) == [300] * 3
    assert generate(max_new_tokens=1, logit_bias={free: -100.0})[0].id != free


def test_the_end_of_sequence_waits_for_the_shortest_length() -> None:
    free = generate(ENDING, max_new_tokens=60)
    assert free[-1].id == EOS
    length = len(free) - 1
    assert generate(ENDING, max_new_tokens=60, min_length=length) == free
    longer = generate(ENDING, max_new_tokens=60, min_length=length + 1)
    assert longer[length].id != EOS


def test_presence_and_frequency_count_the_output_and_not_the_prompt() -> None:
    first = generate(max_new_tokens=1)[0].id
    assert generate([first, *SERVER], max_new_tokens=1, presence_penalty=2.0, frequency_penalty=2.0)[0].id == first


@pytest.mark.parametrize("start", range(0, 24, 3))
@pytest.mark.parametrize("length", [1, 2, 5, 11])
def test_a_bad_sequence_never_comes_wherever_the_tokens_have_their_borders(start: int, length: int) -> None:
    free = text_of(generate())
    bad = free[start : start + length]
    text = text_of(generate(bad_sequences=("never seen\0", bad)))
    assert bad not in text
    assert len(text) > 5


def test_a_bad_sequence_is_only_looked_for_in_the_output() -> None:
    free = text_of(generate(max_new_tokens=1))
    across = "r" + free[:1]
    assert text_of(generate(max_new_tokens=1, bad_sequences=(across,))) == free


@settings(max_examples=60)
@given(st.text("aé n", min_size=1, max_size=4), st.lists(st.integers(1, 4095), max_size=3), st.text("aé n", max_size=4))
def test_exactly_the_tokens_that_complete_a_bad_sequence_are_forbidden(word: str, ids: list[int], end: str) -> None:
    output = [*ids, *MODEL.encode(end)]
    bad, matched = BadSequences(MODEL.tokenizer, [word]), [0]
    for token in output:
        if token in bad.forbidden(matched):
            return
        matched = bad.after(matched, token)
    text = b"".join(map(MODEL.tokenizer.bytes_of, output))
    completing = {t for t in range(len(MODEL.tokenizer)) if utf8(word) in text + MODEL.tokenizer.bytes_of(t)}
    assert set(bad.forbidden(matched)) == completing


# Choices


def reference_choices(scores: Floats, given: GenerationParameters) -> dict[int, float]:
    """The probabilities of the tokens that are left, filter by filter."""
    weights = {
        token: math.exp((score - float(np.max(scores))) / given.temperature) for token, score in enumerate(scores.tolist())
    }
    order = sorted(weights, key=lambda token: (-scores[token], token))
    if given.top_k > 0:
        order = order[: given.top_k]
    order = nucleus(order, weights, given.top_p)
    order = [token for token in order if weights[token] >= given.min_p * weights[order[0]]]
    mass = math.fsum(weights[token] for token in order)
    if given.typical_p < 1:
        surprise = {token: -math.log(weights[token] / mass) for token in order}
        entropy = math.fsum(weights[token] / mass * surprise[token] for token in order)
        order = nucleus(sorted(order, key=lambda token: abs(surprise[token] - entropy)), weights, given.typical_p)
        mass = math.fsum(weights[token] for token in order)
    return {token: weights[token] / mass for token in order}


def nucleus(order: list[int], weights: dict[int, float], share: float) -> list[int]:
    """The first tokens until their mass reaches this share."""
    if share == 1:
        return order
    wanted, kept = share * math.fsum(weights[token] for token in order), []
    for token in order:
        kept.append(token)
        wanted -= weights[token]
        if wanted <= 0:
            break
    return kept


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 3.0},
    {"top_k": 5},
    {"top_p": 0.5},
    {"min_p": 0.1},
    {"typical_p": 0.3},
    {"typical_p": 0.9},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02, "typical_p": 0.6, "temperature": 1.4},
    {"top_k": 3, "top_p": 0.95, "min_p": 0.3},
]


@pytest.mark.parametrize("parameters", FILTERS)
@pytest.mark.parametrize("prompt", ["The server", "Return", "1"])
def test_what_may_be_drawn_is_what_a_plain_computation_leaves(parameters: dict[str, Any], prompt: str) -> None:
    scores = MODEL.next_log_probs([EOS, *MODEL.encode(prompt)])
    asked = GenerationParameters(do_sample=True, **parameters)
    order, weights = choices(scores, asked)
    expected = reference_choices(scores, asked)
    assert set(order.tolist()) == set(expected)
    got = dict(zip(order.tolist(), (weights / weights.sum()).tolist(), strict=True))
    assert got == pytest.approx(expected)
    assert (len(expected) < len(scores)) == bool(parameters.keys() - {"temperature"})


@pytest.mark.parametrize("parameters", FILTERS[3:])
def test_only_what_the_filters_leave_is_drawn(parameters: dict[str, Any]) -> None:
    asked = GenerationParameters(do_sample=True, max_new_tokens=1, **parameters)
    possible = reference_choices(MODEL.next_log_probs([EOS, *SERVER]), asked)
    drawn = {generate(do_sample=True, max_new_tokens=1, seed=seed, **parameters)[0].id for seed in range(60)}
    assert drawn <= set(possible)
    assert len(drawn) > 1


def test_the_most_typical_token_need_not_be_the_most_probable() -> None:
    scores: Floats = np.log([0.6, 0.2, *[0.01] * 20])  # the entropy is 1.55, the surprises are 0.51, 1.61 and 4.61
    order, _ = choices(scores, GenerationParameters(typical_p=0.01))
    assert order.tolist() == [1]


def test_a_token_that_is_left_out_is_never_drawn_whatever_the_temperature() -> None:
    tokens = generate(ENDING, do_sample=True, seed=1, temperature=1e308, max_new_tokens=200, ignore_eos_token=True)
    assert EOS not in ids_of(tokens)
    scores = np.array([0.0, -math.inf, -1.0])
    order, weights = choices(scores, GenerationParameters(temperature=1e308, typical_p=0.99))
    assert dict(zip(order.tolist(), weights.tolist(), strict=True)) == {0: 1.0, 2: 1.0}


@pytest.mark.parametrize("sampling", [{"temperature": 9.0}, {"seed": 3}, {"top_k": 9}, {"typical_p": 0.1}, {"min_p": 0.5}])
def test_greedy_has_no_use_for_the_parameters_of_sampling(sampling: dict[str, Any]) -> None:
    assert generate(**sampling) == generate()


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12), st.integers(1, 14))
def test_equal_scores_keep_the_order_of_ids(values: list[int], count: int) -> None:
    scores = np.array(values, dtype=np.float64)
    assert best(scores, count).tolist() == sorted(range(len(values)), key=lambda token: -values[token])[:count]


# Seeds


def test_each_sequence_of_a_seed_has_numbers_of_its_own_and_the_first_those_of_a_single_one() -> None:
    single = np.random.Generator(np.random.PCG64(7)).random()
    streams = [random_of(7, sequence).random() for sequence in range(8)]
    assert streams[0] == single
    assert len(set(streams)) == 8
    assert streams == [random_of(7, sequence).random() for sequence in range(8)]


# Data that comes with a token


@pytest.mark.parametrize(
    ("asked", "count"), [({"top_n_tokens": 4}, 4), ({"logprobs": 3}, 3), ({"top_n_tokens": 2, "logprobs": 5}, 5)]
)
def test_the_most_probable_tokens_of_each_step_come_with_its_token(asked: dict[str, Any], count: int) -> None:
    output: list[int] = []
    for token in generate(do_sample=True, seed=2, max_new_tokens=6, **asked):
        log_probs = MODEL.next_log_probs([EOS, *SERVER, *output])
        order = np.argsort(-log_probs, kind="stable")[:count].tolist()
        assert [top.id for top in token.top] == order
        assert [top.log_prob for top in token.top] == [float(log_probs[found]) for found in order]
        assert [top.text for top in token.top] == [MODEL.decode([found]) for found in order]
        output.append(token.id)
    assert all(not token.top for token in generate())
    assert all(not token.top for token in generate(logprobs=0))


def test_the_end_of_sequence_among_the_most_probable_is_special() -> None:
    ending = generate(ENDING, max_new_tokens=60, top_n_tokens=1)[-1]
    shown = generate(ENDING, max_new_tokens=60, top_n_tokens=1, skip_special_tokens=False)[-1]
    assert [(top.id, top.special, top.text) for top in ending.top] == [(EOS, True, "")]
    assert [(top.id, top.special, top.text) for top in shown.top] == [(EOS, True, "<eos>")]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.01, 1.0, 3.0, 10.0]),
    top_p=st.sampled_from([0.0, 0.1, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    temperature=st.sampled_from([0.05, 1.0, 5.0]),
)
def test_a_draw_that_sorts_only_the_most_probable_draws_what_sorting_all_does(
    seed: int, spread: float, top_p: float, min_p: float, temperature: float
) -> None:
    random = np.random.default_rng(seed)
    scores = random.standard_normal(4096) * spread
    scores[random.integers(0, 4096, 40)] = -math.inf
    parameters = GenerationParameters(temperature=temperature, top_p=top_p, min_p=min_p)
    order, weights = choices(scores, parameters)
    cumulative = np.cumsum(weights)
    for share in (*random.random(20), 1e-9, 0.5, 1.0 - 1e-9):
        assert drawn(scores, parameters, share) == order[np.searchsorted(cumulative, share * cumulative[-1])]
