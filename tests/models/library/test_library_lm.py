"""The language model: true probabilities, every parameter, every way to end, and its conversations."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import ModelError
from models.library.lm.model import TABLES, LanguageModel
from models.library.lm.tokenizer import EOS
from models.messages import Finish, FinishReason, GenerationParameters, Prompt, Token
from models.session import Session
from tests.models.library.library_session import Tape, converse, stalled

MODEL = LanguageModel.load()
SERVER = MODEL.encode("The server")


def generate(ids: list[int] = SERVER, **parameters: Any) -> list[Token]:
    return list(MODEL.generate(ids, GenerationParameters(**parameters)))


def sample(seed: int = 1, **parameters: Any) -> list[Token]:
    return generate(do_sample=True, seed=seed, **parameters)


def text_of(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


# Probabilities


@settings(max_examples=60)
@given(st.lists(st.integers(0, len(MODEL.tokenizer) - 1), max_size=6))
def test_the_probabilities_after_any_context_sum_to_one(context: list[int]) -> None:
    log_probs = MODEL.next_log_probs(context)
    assert abs(float(np.exp(log_probs).sum()) - 1) < 1e-9
    assert np.isfinite(log_probs).all()


def test_the_probabilities_after_real_text_sum_to_one() -> None:
    ids = [EOS, *MODEL.encode("Return the number of bytes written, which is always the length of the data.")]
    for end in range(len(ids) + 1):
        assert abs(float(np.exp(MODEL.next_log_probs(ids[:end])).sum()) - 1) < 1e-9


def test_only_the_last_tokens_of_a_context_count() -> None:
    ids = MODEL.encode("Return a list of all the")
    assert len(ids) > MODEL.order
    assert (MODEL.next_log_probs(ids) == MODEL.next_log_probs(ids[-MODEL.order + 1 :])).all()
    assert (MODEL.next_log_probs(ids) != MODEL.next_log_probs(ids[-1:])).any()


@pytest.mark.parametrize("token", [-1, 4096])
def test_an_id_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match="expected token ids from 0 to 4095"):
        MODEL.next_log_probs([token])


def test_english_is_more_probable_than_the_same_words_shuffled() -> None:
    def bits_per_byte(text: str) -> float:
        log_probs = [token.log_prob for token in MODEL.prefill(MODEL.encode(text)) if token.log_prob is not None]
        return -sum(log_probs) / math.log(2) / len(text)

    text = "If the argument is not a string, an exception is raised and the value of the file is not changed."
    shuffled = random.Random(1).sample(text.split(), len(text.split()))
    assert bits_per_byte(text) * 1.5 < bits_per_byte(" ".join(shuffled))


def test_the_shipped_tables_are_small() -> None:
    assert TABLES.stat().st_size < 6_000_000


# Choosing


def test_each_token_says_which_bytes_it_is() -> None:
    for seed in range(20):
        tokens = sample(seed, temperature=20.0, top_n_tokens=2, max_new_tokens=20)
        assert b"".join(token.data for token in tokens).decode(errors="replace") == text_of(tokens)
        assert all((top.data != b"") == (top.id != EOS) for token in tokens for top in token.top)


def test_greedy_takes_the_most_probable_token_and_reports_its_log_probability() -> None:
    context = [EOS, *SERVER]
    for token in generate(max_new_tokens=12):
        log_probs = MODEL.next_log_probs(context)
        assert token.id == int(np.argmax(log_probs))
        assert token.log_prob == float(log_probs[token.id]) <= 0
        context.append(token.id)


def test_the_same_seed_gives_the_same_text_and_another_seed_another() -> None:
    assert sample(seed=5) == sample(seed=5)
    assert text_of(sample(seed=5)) != text_of(sample(seed=6))
    assert text_of(sample(seed=-1)) == text_of(sample(seed=2**64 - 1))


def test_without_a_seed_texts_differ() -> None:
    texts = {text_of(generate(do_sample=True, temperature=2.0)) for _ in range(3)}
    assert len(texts) > 1


def test_a_sampled_token_reports_the_log_probability_before_temperature() -> None:
    first = sample(temperature=0.3, max_new_tokens=1)[0]
    assert first.log_prob == float(MODEL.next_log_probs([EOS, *SERVER])[first.id])


@pytest.mark.parametrize(
    "narrow", [{"temperature": 0.0}, {"temperature": 1e-300}, {"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}]
)
def test_sampling_that_leaves_one_choice_is_greedy(narrow: dict[str, Any]) -> None:
    assert sample(**narrow) == generate()


def test_top_k_and_top_p_only_draw_from_the_most_probable() -> None:
    order = np.argsort(-MODEL.next_log_probs([EOS, *SERVER]), kind="stable")
    mass = np.cumsum(np.exp(MODEL.next_log_probs([EOS, *SERVER])[order]))
    nucleus = order[: int(np.argmax(mass >= 0.3)) + 1]
    of_k = {sample(seed, top_k=3, max_new_tokens=1)[0].id for seed in range(60)}
    of_p = {sample(seed, top_p=0.3, max_new_tokens=1)[0].id for seed in range(60)}
    assert of_k == set(order[:3].tolist())
    assert of_p <= set(nucleus.tolist())
    assert len(of_p) > 1


def test_draws_follow_the_model_s_probabilities() -> None:
    best = int(np.argmax(MODEL.next_log_probs([EOS, *SERVER])))
    expected = float(np.exp(MODEL.next_log_probs([EOS, *SERVER])[best]))
    drawn = sum(sample(seed, max_new_tokens=1)[0].id == best for seed in range(400)) / 400
    assert drawn == pytest.approx(expected, abs=0.08)


def test_a_repetition_penalty_ends_the_loops_of_greedy_text() -> None:
    def distinct(tokens: list[Token]) -> float:
        return len({token.id for token in tokens}) / len(tokens)

    loop = generate(MODEL.encode("This module"), max_new_tokens=100)
    free = generate(MODEL.encode("This module"), max_new_tokens=100, repetition_penalty=1.3)
    assert distinct(loop) < 0.3
    assert distinct(free) > 0.7


def test_the_penalty_counts_the_prompt_too() -> None:
    best = generate(max_new_tokens=1)[0].id
    assert generate([best, *SERVER], max_new_tokens=1)[0].id == best
    assert generate([best, *SERVER], max_new_tokens=1, repetition_penalty=9.0)[0].id != best


# Ending


def test_the_length_ends_a_text_at_its_last_token() -> None:
    tokens = generate(max_new_tokens=7)
    assert [token.finish for token in tokens] == [None] * 6 + [FinishReason.LENGTH]


def test_the_end_of_sequence_is_a_special_token_without_text() -> None:
    *_, dot, last = generate(MODEL.encode("It was generated with gencodec"), max_new_tokens=60)
    assert dot.finish is None
    assert last == Token(text="", id=EOS, log_prob=last.log_prob, special=True, finish=FinishReason.EOS_TOKEN)


def test_the_end_of_sequence_can_be_ignored() -> None:
    tokens = generate(MODEL.encode("It was generated with gencodec"), max_new_tokens=60, ignore_eos_token=True)
    assert len(tokens) == 60
    assert EOS not in {token.id for token in tokens}


def test_a_stop_sequence_ends_the_text_and_is_in_it_even_across_tokens() -> None:
    free = text_of(generate())
    for length in (1, 4, 9):
        stop = free[10 : 10 + length]
        tokens = generate(stop_sequences=("never seen\0", stop))
        assert tokens[-1].finish is FinishReason.STOP_SEQUENCE
        assert stop in text_of(tokens)
        assert stop not in text_of(tokens[:-1])


def test_a_stop_sequence_in_the_prompt_does_not_end_the_text() -> None:
    assert len(generate(stop_sequences=("The server",), max_new_tokens=5)) == 5


def test_bytes_of_an_unfinished_character_are_held_back_until_the_end() -> None:
    # At this temperature all tokens are about equally likely, so that stray bytes come soon.
    tokens = sample(seed=3, temperature=100.0, max_new_tokens=300)
    assert text_of(tokens) == MODEL.decode([token.id for token in tokens])
    assert any(not token.text for token in tokens)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"temperature": -0.1}, "temperature: expected a finite number, at least 0, got -0.1"),
        ({"temperature": math.nan}, "temperature"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: expected a number from 0.01 to 100, got 0.0"),
        ({"top_p": 1.1}, "top_p: expected a number from 0 to 1, got 1.1"),
        ({"max_new_tokens": -1}, "max_new_tokens: expected at least 0, got -1"),
        ({"stop_sequences": ("a", "")}, "stop_sequences: expected at most 64, of 1 to 1000 characters each, got ('a', '')"),
        ({"stop_sequences": ("a",) * 65}, "stop_sequences"),
        ({"stop_sequences": ("a" * 1001,)}, "stop_sequences"),
        ({"min_p": 1.1}, "min_p: expected a number from 0 to 1, got 1.1"),
        ({"typical_p": math.nan}, "typical_p"),
        ({"presence_penalty": 2.1}, "presence_penalty: expected a number from -2 to 2, got 2.1"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"logit_bias": {4096: 1.0}}, "logit_bias: expected token ids from 0 to 4095, got 4096"),
        ({"logit_bias": {1: math.inf}}, "logit_bias: expected numbers from -100 to 100, got inf"),
        ({"min_length": -1}, "min_length: expected at least 0, got -1"),
        ({"stop_token_ids": (5, -1)}, "stop_token_ids: expected token ids from 0 to 4095, got -1"),
        ({"bad_sequences": ("",)}, "bad_sequences: expected at most 64, of 1 to 1000 characters each, got ('',)"),
        ({"n": 65}, "n: expected a number from 1 to 64, got 65"),
        ({"best_of": 0}, "best_of: expected a number from 1 to 64, got 0"),
        ({"num_beams": 65}, "num_beams: expected a number from 1 to 64, got 65"),
        ({"num_beams": 2, "n": 3}, "n: expected at most num_beams, which is 2, got 3"),
        ({"num_beams": 2, "do_sample": True}, "do_sample: expected false with num_beams above 1, got True"),
        ({"num_beams": 2, "length_penalty": 10.5}, "length_penalty: expected a number from -10 to 10, got 10.5"),
        (
            {"best_of": 8, "max_new_tokens": 8193},
            "max_new_tokens: expected max_new_tokens * best_of of at most 65536, got 8193 * 8",
        ),
        ({"num_beams": 8, "max_new_tokens": 8193}, "max_new_tokens: expected max_new_tokens * num_beams of at most 65536"),
        ({"truncate": 0}, "truncate: expected at least 1, got 0"),
        ({"top_n_tokens": 101}, "top_n_tokens: expected a number from 0 to 100, got 101"),
        ({"logprobs": -1}, "logprobs: expected a number from 0 to 100, got -1"),
        ({"prompt_logprobs": 101}, "prompt_logprobs"),
        ({"extra": {"delay_ms": 10_001}}, "delay_ms: expected a number from 0 to 10000, got 10001"),
        ({"extra": {"delay_ms": True}}, "delay_ms"),
        ({"extra": {"delay_ms": math.nan}}, "delay_ms"),
        ({"extra": {"delay_ms": "x" * 10_000}}, "delay_ms"),
    ],
)
async def test_a_parameter_outside_its_range_is_named_before_anything_is_sent(parameters: dict[str, Any], said: str) -> None:
    tape = Tape([Prompt(text="The", parameters=GenerationParameters(**parameters))])
    with pytest.raises(ModelError) as caught:
        await MODEL(Session(tape))
    assert caught.value.message.startswith(said)
    assert len(caught.value.message) < 200
    assert caught.value.status == 424
    assert tape.sent == []


def test_it_acts_on_every_parameter_but_the_form_of_the_answer() -> None:
    of_the_answer = {"details", "return_full_text", "extra"}
    assert LanguageModel.parameters == set(GenerationParameters.__struct_fields__) - of_the_answer | {"delay_ms"}


def test_the_largest_parameters_are_accepted() -> None:
    stops = tuple(str(number) + "\0" * 990 for number in range(64))
    tokens = sample(temperature=1e308, repetition_penalty=0.01, top_k=10**9, stop_sequences=stops, seed=10**30)
    assert len(tokens) == 30


# Conversations


async def test_each_token_of_a_prompt_is_one_message_and_the_last_one_ends_it() -> None:
    assert await converse(MODEL, Prompt(text="The server")) == generate()
    assert MODEL.count_tokens("The server") == len(SERVER)


async def test_several_prompts_of_one_session_are_continued_one_after_another() -> None:
    prompt = Prompt(text="The server", parameters=GenerationParameters(max_new_tokens=3))
    tape = Tape([prompt, prompt])
    await MODEL(Session(tape))
    assert [way for way, _ in tape.log] == ["in", "out", "out", "out"] * 2


async def test_no_prompt_gives_no_message_and_an_empty_one_a_text() -> None:
    assert await converse(MODEL) == []
    assert len(await converse(MODEL, Prompt(text=""))) == 30


async def test_zero_new_tokens_give_only_the_finish() -> None:
    prompt = Prompt(text="The", parameters=GenerationParameters(max_new_tokens=0))
    assert await converse(MODEL, prompt) == [Finish(reason=FinishReason.LENGTH)]


async def test_the_prompt_s_own_tokens_come_first_when_asked_for() -> None:
    text = "The naïve server, 日本"
    prompt = Prompt(text=text, parameters=GenerationParameters(decoder_input_details=True, max_new_tokens=2))
    sent = await converse(MODEL, prompt)
    prefill = [token for token in sent if token.prefill]
    assert sent[: len(prefill)] == prefill
    assert [token.id for token in prefill] == MODEL.encode(text)
    assert text_of(prefill) == text
    assert prefill[0].log_prob is None
    for index, token in itertools.islice(enumerate(prefill), 1, None):
        context = [EOS, *MODEL.encode(text)[:index]]
        assert token.log_prob == float(MODEL.next_log_probs(context)[token.id])


@pytest.mark.parametrize("asked", [{"decoder_input_details": True}, {"prompt_logprobs": 0}, {"prompt_logprobs": 3}])
async def test_prompt_logprobs_too_ask_for_the_prompt_s_tokens_each_with_the_most_probable_ones(
    asked: dict[str, Any],
) -> None:
    prompt = Prompt(text="The server is", parameters=GenerationParameters(max_new_tokens=1, **asked))
    first, *prefill, _ = await converse(MODEL, prompt)
    ids = MODEL.encode("The server is")
    assert [first.id, *(token.id for token in prefill)] == ids
    assert first.top == ()
    for index, token in enumerate(prefill, 1):
        log_probs = MODEL.next_log_probs([EOS, *ids[:index]])
        best = np.argsort(-log_probs, kind="stable")[: asked.get("prompt_logprobs", 0)]
        assert [top.id for top in token.top] == best.tolist()


async def test_a_truncated_prompt_is_its_last_tokens() -> None:
    asked: dict[str, Any] = {"decoder_input_details": True, "repetition_penalty": 1.2}
    text = "The value of the server"
    last = MODEL.encode(text)[-2:]
    sent = await converse(MODEL, Prompt(text=text, parameters=GenerationParameters(truncate=2, **asked)))
    assert sent == [*MODEL.prefill(last), *generate(last, **asked)]
    whole = await converse(MODEL, Prompt(text=text, parameters=GenerationParameters(truncate=100, **asked)))
    assert whole == [*MODEL.prefill(MODEL.encode(text)), *generate(MODEL.encode(text), **asked)]


async def test_a_delay_passes_between_tokens(autojump_clock: trio.testing.MockClock) -> None:
    prompt = Prompt(text="The", parameters=GenerationParameters(max_new_tokens=5, extra={"delay_ms": 250}))
    began = trio.current_time()
    await converse(MODEL, prompt)
    assert trio.current_time() - began == pytest.approx(4 * 0.25)


async def test_a_client_that_stops_reading_stops_the_generation() -> None:
    tape = await stalled(MODEL, Prompt(text="The"), Prompt(text="The"), room=3)
    assert [way for way, _ in tape.log] == ["in", "out", "out", "out"]


async def test_a_long_prompt_lets_other_tasks_run_while_it_is_encoded() -> None:
    ran = 0

    async def other() -> None:
        nonlocal ran
        while True:
            await trio.lowlevel.checkpoint()
            ran += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await converse(MODEL, Prompt(text="a word " * 5_000, parameters=GenerationParameters(max_new_tokens=1)))
        nursery.cancel_scope.cancel()
    assert ran > 20
