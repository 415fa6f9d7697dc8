"""The ranges of the language model's parameters, and the limits that keep a request's cost small."""

from __future__ import annotations

import math

from msgspec import structs

from models.errors import ModelError
from models.messages import GenerationParameters

MAX_DELAY_MS = 10_000
MAX_TEXTS = 64
"""The most stop sequences, and the most bad sequences: each token is searched for all of them."""
MAX_TEXT_LENGTH = 1000
MAX_SEQUENCES = 64
MAX_TOP = 100
UNASKED = 2048
"""The most tokens of a text whose request names no limit."""
MAX_KEPT_TOKENS = 65_536
"""The most tokens that a search keeps until it knows the best sequences: `max_new_tokens` times the followed sequences."""


def check(parameters: GenerationParameters, vocabulary: int) -> None:
    """Raises ModelError (status 424) for the first parameter outside its range. Token ids must be below `vocabulary`."""
    _check_choice(parameters)
    _check_tokens(parameters, vocabulary)
    _check_ends(parameters)
    _check_sequences(parameters)


def settled(parameters: GenerationParameters) -> GenerationParameters:
    """The parameters with a limit of its own where the request names none: without one, a greedy text would never end."""
    if parameters.limited:
        return parameters
    most = min(parameters.max_new_tokens, UNASKED, MAX_KEPT_TOKENS // max(parameters.best_of, parameters.num_beams))
    return structs.replace(parameters, max_new_tokens=most)


def delay_seconds(parameters: GenerationParameters) -> float:
    """The extra parameter `delay_ms` in seconds, 0 without it. ModelError (status 424) unless it is 0 to 10000."""
    delay = parameters.extra.get("delay_ms", 0)
    number = isinstance(delay, int | float) and not isinstance(delay, bool)
    _require("delay_ms", delay, f"a number from 0 to {MAX_DELAY_MS}", number and 0 <= delay <= MAX_DELAY_MS)
    return float(delay) / 1000


def _check_choice(given: GenerationParameters) -> None:
    _require("temperature", given.temperature, "a finite number, at least 0", 0 <= given.temperature < math.inf)
    _range("repetition_penalty", given.repetition_penalty, 0.01, 100)
    for name in ("top_p", "min_p", "typical_p"):
        _range(name, getattr(given, name), 0, 1)
    for name in ("presence_penalty", "frequency_penalty"):
        _range(name, getattr(given, name), -2, 2)


def _check_tokens(given: GenerationParameters, vocabulary: int) -> None:
    for name, ids in (("logit_bias", given.logit_bias), ("stop_token_ids", given.stop_token_ids)):
        if outside := [token for token in ids if not 0 <= token < vocabulary]:
            _require(name, outside[0], f"token ids from 0 to {vocabulary - 1}", False)
    for bias in given.logit_bias.values():
        _require("logit_bias", bias, "numbers from -100 to 100", -100 <= bias <= 100)
    for name in ("top_n_tokens", "logprobs", "prompt_logprobs"):
        value = getattr(given, name)
        if value is not None:
            _range(name, value, 0, MAX_TOP)


def _check_ends(given: GenerationParameters) -> None:
    _require("max_new_tokens", given.max_new_tokens, "at least 0", given.max_new_tokens >= 0)
    _require("min_length", given.min_length, "at least 0", given.min_length >= 0)
    _require("truncate", given.truncate, "at least 1", given.truncate is None or given.truncate >= 1)
    for name, texts in (("stop_sequences", given.stop_sequences), ("bad_sequences", given.bad_sequences)):
        few = len(texts) <= MAX_TEXTS and all(1 <= len(text) <= MAX_TEXT_LENGTH for text in texts)
        _require(name, texts, f"at most {MAX_TEXTS}, of 1 to {MAX_TEXT_LENGTH} characters each", few)


def _check_sequences(given: GenerationParameters) -> None:
    for name in ("n", "best_of", "num_beams"):
        _range(name, getattr(given, name), 1, MAX_SEQUENCES)
    followed = "best_of"
    if given.num_beams > 1:
        followed = "num_beams"
        _range("length_penalty", given.length_penalty, -10, 10)
        _require("n", given.n, f"at most num_beams, which is {given.num_beams}", given.n <= given.num_beams)
        # As in vLLM, which accepts no temperature with beams: sampling among them is another algorithm.
        _require("do_sample", True, "false with num_beams above 1", not given.do_sample)
    elif given.best_of <= given.n:
        return  # nothing is kept, because tokens are sent as they are made
    many = getattr(given, followed)
    product = f"{given.max_new_tokens} * {many}"
    expected = f"max_new_tokens * {followed} of at most {MAX_KEPT_TOKENS}"
    _require("max_new_tokens", product, expected, given.max_new_tokens * many <= MAX_KEPT_TOKENS)


def _range(name: str, value: float, least: float, most: float) -> None:
    _require(name, value, f"a number from {least} to {most}", least <= value <= most)


def _require(name: str, value: object, expected: str, holds: bool) -> None:
    if not holds:
        raise ModelError(f"{name}: expected {expected}, got {str(value)[:100]}", code="ValidationError", status=424)
