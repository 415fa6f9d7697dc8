"""The transformer: what it computes, that a batch changes nothing of it, and the parameters that it acts on."""

from __future__ import annotations

import gc
import importlib.util
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from models.errors import ModelError
from models.library.lm import neural
from models.library.lm.model import PARAMETERS
from models.library.lm.network import Network
from models.library.lm.tokenizer import EOS
from models.messages import FinishReason, GenerationParameters, Prompt, Token
from models.rolling import rolling
from models.session import Session
from tests.models.backends.tiny_transformers import needed
from tests.models.library.library_session import Tape

SCRIPT = Path(__file__).parents[3] / "scripts" / "train_tlm.py"
TEXTS = (
    "Return the",
    "",
    "Open a file and",
    "If the name of the module is not given, the",
    "This",
    "x" * 700,
    "The\n\nvalue of",
)


@pytest.fixture(scope="module")
def model() -> neural.TransformerModel:
    return neural.TransformerModel.load()


def advance(model: neural.TransformerModel, sequence: neural.Continuation, chunk: int = 10_000) -> None:
    while sequence.pending:
        model.prefill(sequence, min(chunk, sequence.pending))


def alone(model: neural.TransformerModel, text: str = "Return the", **parameters: Any) -> list[Token]:
    """The tokens of a prompt's first sequence, when nothing else is in the batch."""
    (sequence, *_) = model.open(Prompt(text=text, parameters=GenerationParameters(**parameters)))
    advance(model, sequence)
    told: list[Token] = []
    while not told or told[-1].finish is None:
        (token,) = model.step([sequence])
        assert isinstance(token, Token)
        told.append(token)
    model.close(sequence)
    return told


def text_of(tokens: Sequence[Any]) -> str:
    return "".join(token.text for token in tokens if isinstance(token, Token))


# -- the network -----------------------------------------------------------------------------------------------------


def plain(network: Network, weights: Any, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """The same function in double precision, without caches, windows by a mask, one text at a time."""

    def norm(x: Any) -> Any:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)

    embedding = weights["embedding"].astype(np.float64)
    heads, window = network.heads, network.window
    x = norm(embedding[list(tokens)])
    distance = np.arange(len(x))[:, None] - np.arange(len(x))
    bias = -(2.0 ** (-8 * np.arange(1, heads + 1) / heads))[:, None, None] * distance
    bias[:, (distance < 0) | (distance >= window)] = -np.inf
    for layer in range(network.layers):
        qkv, out, up, down = (weights[f"{name}{layer}"].astype(np.float64) for name in ("qkv", "out", "up", "down"))
        made = (norm(x) @ qkv).reshape(len(x), heads + 2, -1).transpose(1, 0, 2)
        q, k, v = made[:heads], made[heads], made[heads + 1]
        scores = q @ k.T / math.sqrt(q.shape[-1]) + bias
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        x = x + (shares @ v).transpose(1, 0, 2).reshape(len(x), -1) @ out
        x = x + np.maximum(norm(x) @ up, 0) ** 2 @ down
    logits = norm(x) @ embedding.T
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_it_computes_what_the_formula_says_beyond_its_window_too(model: neural.TransformerModel) -> None:
    network = model.network
    ids = [EOS, *model.tokenizer.encode("Return the name of the file that was opened. " * 60)][: 3 * network.window]
    assert len(ids) == 3 * network.window
    with np.load(neural.WEIGHTS, allow_pickle=False) as weights:
        expected = plain(network, weights, ids)
    cache = network.cache()
    told = np.concatenate([network.log_probs([cache], [token]) for token in ids])
    assert np.abs(told - expected).max() < 2e-3
    assert np.abs(np.exp(told.astype(np.float64)).sum(axis=1) - 1).max() < 1e-5


def test_the_numbers_are_those_of_torch(tmp_path: Path) -> None:
    torch = needed("torch")
    spec = importlib.util.spec_from_file_location("train_tlm", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    torch.manual_seed(3)
    ours = train.Transformer(vocabulary=300, width=64, layers=2, heads=2, window=16).eval()
    np.savez(tmp_path / "weights.npz", **ours.arrays())
    with np.load(tmp_path / "weights.npz", allow_pickle=False) as weights:
        network = Network(weights)
        for name, weight in ours.named_parameters():  # as the file has them
            weight.data = torch.from_numpy(weights[name.replace(".", "")].astype(np.float32))
    tokens = np.random.default_rng(4).integers(1, 300, 80).tolist()
    with torch.no_grad():
        expected = torch.log_softmax(ours(torch.tensor([[EOS, *tokens]]))[0], -1).numpy()
    cache = network.cache()
    told = [network.log_probs([cache] * len(piece), piece) for piece in ([EOS], tokens[:10], tokens[10:26], tokens[26:])[:3]]
    told += [network.log_probs([cache], [token]) for token in tokens[26:]]
    assert np.abs(np.concatenate(told) - expected).max() < 1e-4


def test_weights_of_other_shapes_are_refused() -> None:
    with np.load(neural.WEIGHTS, allow_pickle=False) as file:
        weights = dict(file)
    weights["up2"] = weights["up2"][:, 1:]
    with pytest.raises(ValueError, match=r"up2: expected the shape \(128, 512\), got \(128, 511\)"):
        Network(weights)


def test_it_has_learned_the_text(model: neural.TransformerModel) -> None:
    # a tenth of the tokens, as the script measures all: a uniform guess has 4096, the tokens' frequencies have 765
    ids = [EOS, *model.tokenizer.encode("Return a new object which has the same value as the given string.")]
    log_probs = model.network.log_probs([cache := model.network.cache()] * (len(ids) - 1), ids[:-1])
    assert cache.filled == len(ids) - 1
    assert math.exp(-float(log_probs[np.arange(len(ids) - 1), ids[1:]].mean())) < 100


# -- batch invariance ------------------------------------------------------------------------------------------------


@dataclass
class Asked:
    text: str
    parameters: dict[str, Any]


def asked(number: int) -> Asked:
    """Greedy, sampled and processed ones in turn, each with its own seed."""
    kind: dict[str, Any] = (
        {},
        {"do_sample": True, "temperature": 0.9, "top_p": 0.95},
        {"do_sample": True, "top_k": 20, "repetition_penalty": 1.2},
        {"repetition_penalty": 1.3, "ignore_eos_token": True},
    )[number % 4]
    return Asked(TEXTS[number % len(TEXTS)], {"seed": number, "max_new_tokens": 8 + 3 * (number % 7), **kind})


@pytest.mark.parametrize("together", [2, 7, 16, 23])
def test_a_sequence_is_the_same_alone_and_in_any_batch_to_the_last_bit(
    model: neural.TransformerModel, together: int
) -> None:
    # they join one after another, with prompts in chunks of changing sizes, and leave when they are complete
    random = np.random.default_rng(together)
    expected = [alone(model, asked(number).text, **asked(number).parameters) for number in range(together)]
    told: list[list[Any]] = [[] for _ in range(together)]
    coming, live = [*range(together)], {}
    while coming or live:
        if coming:
            number = coming.pop(0)
            (live[number],) = model.open(
                Prompt(text=asked(number).text, parameters=GenerationParameters(**asked(number).parameters))
            )
        for sequence in live.values():
            if sequence.pending:
                model.prefill(sequence, int(random.integers(1, sequence.pending + 1)))
        ready = [number for number in live if not live[number].pending and random.random() < 0.9]
        for number, token in zip(ready, model.step([live[number] for number in ready]), strict=True):
            told[number].append(token)
            assert isinstance(token, Token)
            if token.finish is not None:
                model.close(live.pop(number))
    assert told == expected
    assert model.caches == 0


async def test_it_is_the_same_through_the_rolling_batch(model: neural.TransformerModel) -> None:
    expected = [alone(model, asked(number).text, **asked(number).parameters) for number in range(9)]
    tapes = [
        Tape([Prompt(text=asked(number).text, parameters=GenerationParameters(**asked(number).parameters))])
        for number in range(9)
    ]
    async with neural.load(max_batch=4, prefill_budget=50) as batch, trio.open_nursery() as nursery:
        for tape in tapes:
            nursery.start_soon(batch, Session(tape))
    assert [tape.sent for tape in tapes] == expected


def test_only_what_is_within_reach_is_taken_in(model: neural.TransformerModel) -> None:
    reach = model.network.reach
    assert reach == 4 * 127 + 1
    text = "Return the value of the option that was given to the parser. " * 100
    (sequence,) = model.open(Prompt(text=text))
    assert sequence.prompt_tokens > sequence.pending == reach - 1
    ids = [EOS, *model.tokenizer.encode(text)]
    cache = model.network.cache()
    for token in ids[:-1]:
        model.network.take([cache], [token])
    whole = model.network.log_probs([cache], ids[-1:])[0]
    (token,) = alone(model, text, max_new_tokens=1)
    assert (token.id, token.log_prob) == (int(whole.argmax()), float(whole.max()))


# -- parameters ------------------------------------------------------------------------------------------------------


def test_what_it_does_not_do_is_what_compares_whole_sequences() -> None:
    left_out = PARAMETERS - neural.PARAMETERS
    assert left_out == {"best_of", "num_beams", "length_penalty", "early_stopping"}


def test_greedy_takes_the_most_probable_token_and_tells_its_log_prob(model: neural.TransformerModel) -> None:
    tokens = alone(model, max_new_tokens=12, top_n_tokens=3)
    assert [(token.id, token.log_prob) for token in tokens] == [(token.top[0].id, token.top[0].log_prob) for token in tokens]
    assert [len(token.top) for token in tokens] == [3] * 12
    assert tokens[-1].finish is FinishReason.LENGTH


def test_a_seed_is_one_text_and_another_seed_another(model: neural.TransformerModel) -> None:
    one, again, other = (alone(model, do_sample=True, seed=seed, max_new_tokens=30) for seed in (1, 1, 2))
    assert one == again != other


@pytest.mark.parametrize(
    "parameters", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"typical_p": 1e-9, "top_k": 1}, {"temperature": 0.0}]
)
def test_filters_that_leave_one_token_are_greedy(model: neural.TransformerModel, parameters: dict[str, Any]) -> None:
    greedy = alone(model, max_new_tokens=12)
    assert alone(model, do_sample=True, seed=5, max_new_tokens=12, **parameters) == greedy


def test_a_stop_sequence_ends_the_text(model: neural.TransformerModel) -> None:
    whole = text_of(alone(model, max_new_tokens=30))
    stop = whole[10:14]
    tokens = alone(model, max_new_tokens=30, stop_sequences=(stop,))
    assert text_of(tokens) == whole[: whole.index(stop) + 4]
    assert tokens[-1].finish is FinishReason.STOP_SEQUENCE
    without = alone(model, max_new_tokens=30, stop_sequences=(stop,), include_stop_str_in_output=False)
    assert text_of(without) == whole[: whole.index(stop)]


def test_penalties_biases_and_bad_sequences_change_the_choice(model: neural.TransformerModel) -> None:
    greedy = alone(model, max_new_tokens=40)
    first = greedy[0]
    assert alone(model, max_new_tokens=1, logit_bias={first.id: -100.0})[0].id != first.id
    assert first.text not in text_of(alone(model, max_new_tokens=40, bad_sequences=(first.text,)))
    repeats = [
        len({token.id for token in alone(model, max_new_tokens=40, repetition_penalty=penalty)}) for penalty in (1, 2)
    ]
    assert repeats[0] < repeats[1]


def test_the_end_of_sequence_is_told_and_can_be_ruled_out(model: neural.TransformerModel) -> None:
    bias = {EOS: 100.0}
    (last,) = alone(model, max_new_tokens=9, logit_bias=bias, skip_special_tokens=False)
    assert (last.id, last.special, last.finish, last.text) == (EOS, True, FinishReason.EOS_TOKEN, "<eos>")
    assert len(alone(model, max_new_tokens=9, logit_bias=bias, ignore_eos_token=True)) == 9
    assert len(alone(model, max_new_tokens=9, logit_bias=bias, min_length=4)) == 5


async def sent(prompt: Prompt, prefill_budget: int = 3) -> list[Any]:
    tape, error = Tape([prompt]), None
    session: Session[Any, Any] = Session(tape)
    async with neural.load(prefill_budget=prefill_budget) as batch:
        try:
            await batch(session)
        except ModelError as e:  # out of the block it would come in a group
            error = e
        count = batch.count_tokens
    if error is not None:
        raise error
    assert count is not None
    assert session.prompt_tokens == min(count(prompt.text), prompt.parameters.truncate or 10_000)
    return tape.sent


async def test_n_sequences_are_those_of_their_seeds(model: neural.TransformerModel) -> None:
    parameters = {"do_sample": True, "seed": 3, "max_new_tokens": 6}
    messages = await sent(Prompt(text="Return the", parameters=GenerationParameters(n=3, **parameters)))
    by_sequence = [[token for token in messages if token.sequence == number] for number in range(3)]
    assert by_sequence[0] == alone(model, **parameters)
    assert len({text_of(tokens) for tokens in by_sequence}) == 3


async def test_the_prompt_is_told_where_that_is_asked_for(model: neural.TransformerModel) -> None:
    text = "Return the value of the option. " * 4
    ids = model.tokenizer.encode(text)
    parameters = GenerationParameters(decoder_input_details=True, prompt_logprobs=2, max_new_tokens=2, n=2)
    messages = await sent(Prompt(text=text, parameters=parameters))
    prompt = [message for message in messages if message.prefill]
    assert [token.id for token in prompt] == ids
    assert messages[: len(ids)] == prompt
    assert text_of(prompt) == text
    assert (prompt[0].log_prob, prompt[0].top) == (None, ())
    log_probs = model.network.log_probs([model.network.cache()] * len(ids), [EOS, *ids[:-1]])
    assert [token.log_prob for token in prompt[1:]] == [
        float(row[token]) for row, token in zip(log_probs, ids, strict=True)
    ][1:]
    assert {len(token.top) for token in prompt[1:]} == {2}


async def test_the_other_sequences_wait_until_a_long_prompt_is_told(model: neural.TransformerModel) -> None:
    # only the first takes in what is out of reach, so that the others could begin long before
    text = "Return the value of the option. " * 150
    ids = model.tokenizer.encode(text)
    assert len(ids) > 2 * model.network.reach
    parameters = GenerationParameters(decoder_input_details=True, max_new_tokens=2, n=3)
    messages = await sent(Prompt(text=text, parameters=parameters), prefill_budget=100)
    assert [message.id for message in messages[: len(ids)]] == ids
    assert sorted(message.sequence for message in messages[len(ids) :]) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("details", [False, True])
async def test_no_token_at_all_may_be_asked_for(details: bool) -> None:
    parameters = GenerationParameters(max_new_tokens=0, n=2, decoder_input_details=details)
    messages = await sent(Prompt(text="Return the", parameters=parameters))
    assert not any(isinstance(message, Token) and not message.prefill for message in messages)
    assert [message.text for message in messages if isinstance(message, Token)] == (["Return", " the"] if details else [])


async def test_truncate_keeps_the_last_tokens(model: neural.TransformerModel) -> None:
    short = alone(model, " the name", max_new_tokens=5)
    assert alone(model, "Whatever comes before the name", max_new_tokens=5, truncate=2) == short


@pytest.mark.parametrize(
    ("parameters", "said"),
    [({"top_p": 2.0}, "top_p: expected a number from 0 to 1"), ({"n": 65}, "n: expected a number from 1 to 64")],
)
async def test_a_parameter_outside_its_range_is_named(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said) as info:
        await sent(Prompt(text="x", parameters=GenerationParameters(**parameters)))
    assert info.value.status == 424


# -- caches ----------------------------------------------------------------------------------------------------------


async def test_a_client_that_leaves_frees_its_cache() -> None:
    model = neural.TransformerModel.load()
    async with rolling(model, ahead=1) as batch:
        tape = Tape([Prompt(text="Return the", parameters=GenerationParameters(max_new_tokens=10_000))], room=3)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(batch, Session(tape))
            while len(tape.sent) < 3:
                await trio.lowlevel.checkpoint()
            (entry,) = batch._running
            assert model.caches == 1
            held = weakref.ref(entry.state.cache.pairs)  # type: ignore[union-attr]
            del entry
            nursery.cancel_scope.cancel()
        await batch(Session(Tape([Prompt(text="x", parameters=GenerationParameters(max_new_tokens=1))])))
        gc.collect()
        assert held() is None
    assert model.caches == 0
