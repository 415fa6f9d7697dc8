"""The backend of transformers: its tokens are those of `generate`, its text is cut well, its steps hold nobody up."""

from __future__ import annotations

import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from models.adapt import made_family, partial_loader, spec_of
from models.backends.transformers import Detokenizer, Transformers, load, token_bytes
from models.blocking import Step, StepHolder, reset_step_holder, set_step_holder
from models.chat import ChatMessage, plain_template
from models.errors import ContextLengthExceeded, ModelError
from models.messages import Family, Finish, FinishReason, GenerationParameters, Prompt, Token
from models.session import Session
from tests.models.backends import tiny_transformers as tiny
from tests.models.library.library_session import Tape, converse

TEXT = "the server reads"
# Its tokens are all different, and some of them are single bytes of one character.
RECITED = "the client waits é😀 answers; reads"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """One thread for torch: matrices this small take longer with more threads."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        yield  # for the tests that need no model
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(path: Path) -> Transformers:
    return Transformers(str(path))


@pytest.fixture(scope="module")
def reciting_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_reciting(tmp_path_factory.mktemp("reciting"), RECITED)


@pytest.fixture(scope="module")
def reciting(reciting_path: Path) -> Transformers:
    return Transformers(str(reciting_path))


@pytest.fixture(scope="module")
def words() -> Any:
    return tiny.tokenizer()


def prompt(text: str = TEXT, **parameters: Any) -> Prompt:
    return Prompt(text=text, parameters=GenerationParameters(**parameters))


def steps(model: Transformers, text: str = TEXT, **parameters: Any) -> list[Any]:
    asked = prompt(text, **parameters)
    return [message for step in model.generate(model.prompt_ids(asked), asked.parameters) for message in step]


def text_of(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


def ids_of(tokens: list[Token]) -> list[int]:
    return [token.id for token in tokens]


# Beside transformers' own loop


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
async def test_greedy_tokens_and_log_probs_are_those_of_generate(kind: str, tmp_path: Path, words: Any) -> None:
    saved = tiny.save(tmp_path, kind=kind)
    ids, log_probs = tiny.generated(saved, words.encode(TEXT), do_sample=False, max_new_tokens=40)
    sent = await converse(Transformers(str(saved)), prompt(max_new_tokens=40))
    assert ids_of(sent) == ids
    for token, row in zip(sent, log_probs, strict=True):
        assert token.log_prob == pytest.approx(row[token.id].item(), abs=1e-4)
    assert [token.finish for token in sent[:-1]] == [None] * (len(ids) - 1)
    assert sent[-1].finish is (FinishReason.EOS_TOKEN if ids[-1] == tiny.EOS else FinishReason.LENGTH)
    assert text_of(sent) == words.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 3.0, "top_k": 5},
        {"temperature": 3.0, "top_p": 0.6},
        {"temperature": 3.0, "min_p": 0.3},
        {"temperature": 3.0, "typical_p": 0.4},
        {"temperature": 2.0, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.7},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [1, 2])
def test_sampled_tokens_are_those_of_generate_with_the_same_seed(
    model: Transformers, path: Path, words: Any, seed: int, options: dict[str, Any]
) -> None:
    theirs = {"do_sample": True, "max_new_tokens": 12, "top_k": 0, **options}
    ids, _ = tiny.generated(path, words.encode(TEXT), seed, **theirs)
    assert ids_of(steps(model, do_sample=True, max_new_tokens=12, seed=seed, **options)) == ids


@pytest.mark.parametrize("bad", ["client", " waits é", "é", " answers; reads"])
def test_the_penalty_of_repetition_and_bad_sequences_count_for_greedy_tokens_too(
    reciting: Transformers, reciting_path: Path, words: Any, bad: str
) -> None:
    banned = [words.encode(bad), words.encode(" " + bad)]
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16, "repetition_penalty": 1.3}
    ids, _ = tiny.generated(reciting_path, words.encode("the"), bad_words_ids=banned, **options)
    sent = steps(reciting, "the", max_new_tokens=16, repetition_penalty=1.3, bad_sequences=(bad,))
    assert ids_of(sent) == ids
    assert bad not in text_of(sent)
    assert bad in text_of(steps(reciting, "the", max_new_tokens=16, repetition_penalty=1.3))


@pytest.mark.parametrize(
    "parameters",
    [{"presence_penalty": 2.0}, {"frequency_penalty": 0.7}, {"presence_penalty": -2.0, "frequency_penalty": 0.5}],
    ids=str,
)
def test_penalties_are_taken_from_the_logits_of_what_the_output_has(
    model: Transformers, path: Path, words: Any, parameters: dict[str, Any]
) -> None:
    torch, (theirs, _) = tiny.needed("torch"), tiny.reference(path)
    ids, made = words.encode(TEXT), list[int]()
    for _ in range(15):
        with torch.no_grad():
            scores = theirs(torch.tensor([ids + made])).logits[0, -1].tolist()
        for token in set(made):
            scores[token] -= parameters.get("presence_penalty", 0)
            scores[token] -= parameters.get("frequency_penalty", 0) * made.count(token)
        made.append(scores.index(max(scores)))
    assert ids_of(steps(model, max_new_tokens=15, **parameters)) == made


def test_the_penalty_of_frequency_grows_with_each_time_and_that_of_presence_does_not(
    reciting: Transformers, words: Any
) -> None:
    [token] = words.encode("!")
    favoured: dict[str, Any] = {"logit_bias": {token: 20.0}, "ignore_eos_token": True, "max_new_tokens": 20}
    present = steps(reciting, "the", presence_penalty=2.0, **favoured)
    frequent = steps(reciting, "the", frequency_penalty=2.0, **favoured)
    assert ids_of(present) == [token] * 20
    assert 5 < ids_of(frequent).count(token) < 15


def test_a_bias_changes_the_choice_and_not_the_log_prob(model: Transformers) -> None:
    [free] = steps(model, max_new_tokens=1, top_n_tokens=100)
    wanted = free.top[50]
    [token] = steps(model, max_new_tokens=1, logit_bias={wanted.id: 100.0})
    assert (token.id, token.log_prob) == (wanted.id, pytest.approx(wanted.log_prob, abs=1e-4))


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_the_prompt_is_reported_with_what_the_model_thought_of_it_however_it_is_cut(
    path: Path, words: Any, chunk: int
) -> None:
    torch, (theirs, _) = tiny.needed("torch"), tiny.reference(path)
    text = "the server reads é"
    ids = words.encode(text)
    with torch.no_grad():
        rows = torch.log_softmax(theirs(torch.tensor([ids])).logits[0], dim=-1)
    model = Transformers(str(path), prefill_chunk=chunk)
    sent = steps(model, text, max_new_tokens=3, prompt_logprobs=2)
    report, made = sent[: len(ids)], sent[len(ids) :]
    assert ids_of(report) == ids
    assert text_of(report) == text
    assert all(token.prefill for token in report)
    assert (report[0].log_prob, report[0].top) == (None, ())
    for row, token in zip(rows, report[1:], strict=False):
        assert token.log_prob == pytest.approx(row[token.id].item(), abs=1e-4)
        assert [top.id for top in token.top] == row.topk(2).indices.tolist()
    assert [token.data for token in report] == list(map(token_bytes(words), ids))
    assert {top.data for token in report for top in token.top if not top.special}.isdisjoint({b""})
    assert ids_of(made) == ids_of(steps(model, text, max_new_tokens=3))
    assert not any(token.prefill for token in made)
    assert [token.top for token in steps(model, text, max_new_tokens=0, decoder_input_details=True)[:-1]] == [()] * len(ids)


def test_the_most_probable_tokens_come_best_first_with_their_text(reciting: Transformers, words: Any) -> None:
    for name in ("top_n_tokens", "logprobs"):
        sent = steps(reciting, "the", max_new_tokens=3, **{name: 3})
        for token in sent:
            assert len(token.top) == 3
            assert (token.top[0].id, token.top[0].text, token.top[0].log_prob) == (token.id, token.text, token.log_prob)
            assert sorted((top.log_prob for top in token.top), reverse=True) == [top.log_prob for top in token.top]


# Sampling


async def test_sessions_at_once_give_each_the_text_of_its_seed_and_leave_the_global_generator_alone(path: Path) -> None:
    torch = tiny.needed("torch")
    model = Transformers(str(path), threads=2)
    before = torch.get_rng_state()
    asked = [
        prompt(do_sample=True, temperature=2.0, seed=seed, max_new_tokens=10) for seed in (1, 2, 1, 2**64 - 1, -1, None)
    ]
    alone = [text_of(await converse(model, one)) for one in asked]
    tapes = [Tape([one]) for one in asked]
    async with trio.open_nursery() as nursery:
        for tape in tapes:
            nursery.start_soon(model, Session(tape))
    together = [text_of(tape.sent) for tape in tapes]
    assert together[:5] == alone[:5]
    assert alone[0] == alone[2] != alone[1]
    assert alone[3] == alone[4]  # a seed is 64 bits
    assert together[5] != alone[5]
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_temperature_sampling_is_greedy(model: Transformers) -> None:
    greedy = ids_of(steps(model, max_new_tokens=8))
    for temperature in (0.0, 1e-9, 1e-300):
        assert ids_of(steps(model, do_sample=True, seed=3, temperature=temperature, max_new_tokens=8)) == greedy
    assert ids_of(steps(model, do_sample=True, seed=3, top_p=0.0, max_new_tokens=8)) == greedy
    assert ids_of(steps(model, temperature=5.0, top_k=2, seed=3, max_new_tokens=8)) == greedy


# Several sequences


def sequences(sent: list[Token]) -> list[list[Token]]:
    return [[token for token in sent if token.sequence == number] for number in range(max(t.sequence for t in sent) + 1)]


def test_the_best_sequences_come_whole_and_the_most_probable_first(model: Transformers) -> None:
    asked: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "seed": 5, "max_new_tokens": 8}
    every = sequences(steps(model, n=5, **asked))
    assert len(every) == 5
    sums = [sum(token.log_prob or 0 for token in one) for one in every]
    assert sums == sorted(sums, reverse=True)
    assert len({text_of(one) for one in every}) > 1
    assert all(one[-1].finish is not None and all(t.finish is None for t in one[:-1]) for one in every)
    best = sequences(steps(model, n=2, best_of=5, **asked))
    assert best == every[:2]
    assert ids_of(steps(model, **asked)) in [ids_of(one) for one in every]


def test_each_of_several_sequences_goes_on_from_the_prompt_alone(model: Transformers, path: Path, words: Any) -> None:
    torch, (theirs, _) = tiny.needed("torch"), tiny.reference(path)
    ids = words.encode(TEXT)
    for one in sequences(steps(model, n=3, do_sample=True, temperature=2.0, seed=5, max_new_tokens=8)):
        with torch.no_grad():
            rows = torch.log_softmax(theirs(torch.tensor([ids + ids_of(one)])).logits[0, len(ids) - 1 :], dim=-1)
        assert [token.log_prob for token in one] == pytest.approx(
            [row[token.id].item() for row, token in zip(rows, one, strict=False)], abs=1e-4
        )


def test_greedy_sequences_are_all_the_same(model: Transformers) -> None:
    one = steps(model, max_new_tokens=5)
    first, second = sequences(steps(model, n=2, best_of=3, max_new_tokens=5))
    assert first == one
    assert [(t.id, t.text, t.finish) for t in second] == [(t.id, t.text, t.finish) for t in one]


# Endings


def test_a_model_ends_with_its_end_of_sequence(reciting: Transformers) -> None:
    sent = steps(reciting, "the", max_new_tokens=60)
    assert "the" + text_of(sent) == RECITED
    assert (sent[-1].id, sent[-1].text, sent[-1].special) == (tiny.EOS, "", True)
    assert sent[-1].finish is FinishReason.EOS_TOKEN
    assert text_of(steps(reciting, "the", max_new_tokens=60, skip_special_tokens=False)).endswith("reads</s>")


def test_the_end_of_sequence_can_be_put_off_and_ruled_out(reciting: Transformers) -> None:
    whole = len(steps(reciting, "the", max_new_tokens=60))
    assert len(steps(reciting, "the", max_new_tokens=60, min_length=whole - 1)) == whole
    put_off = steps(reciting, "the", max_new_tokens=60, min_length=whole)
    assert ids_of(put_off[:whole]).count(tiny.EOS) == 0
    ruled_out = steps(reciting, "the", max_new_tokens=60, ignore_eos_token=True)
    assert (len(ruled_out), ruled_out[-1].finish) == (60, FinishReason.LENGTH)
    assert tiny.EOS not in ids_of(ruled_out)


def test_a_stop_token_ends_with_or_without_its_text(reciting: Transformers, words: Any) -> None:
    [stop] = words.encode(";")
    sent = steps(reciting, "the", max_new_tokens=60, stop_token_ids=(stop,))
    assert text_of(sent) == " client waits é😀 answers;"
    assert sent[-1].finish is FinishReason.STOP_SEQUENCE
    without = steps(reciting, "the", max_new_tokens=60, stop_token_ids=(stop,), include_stop_str_in_output=False)
    assert text_of(without) == " client waits é😀 answers"
    assert without[-1].id == stop


@pytest.mark.parametrize("included", [True, False])
def test_every_part_of_the_text_stops_it_where_it_is_first_complete(reciting: Transformers, included: bool) -> None:
    text = RECITED.removeprefix("the")
    for start in range(0, len(text), 3):
        for length in (1, 2, 7):
            stop = text[start : start + length]
            sent = steps(
                reciting, "the", max_new_tokens=60, stop_sequences=(stop, "zz"), include_stop_str_in_output=included
            )
            at = text.index(stop)
            assert text_of(sent) == text[: at + len(stop) if included else at]
            assert sent[-1].finish is FinishReason.STOP_SEQUENCE


def test_what_might_have_been_a_stop_is_told_as_soon_as_it_is_none(reciting: Transformers) -> None:
    sent = steps(reciting, "the", max_new_tokens=4, stop_sequences=(" client wax",), include_stop_str_in_output=False)
    assert sent[0].text == ""
    assert text_of(sent).startswith(" client waits")
    last = steps(reciting, "the", max_new_tokens=1, stop_sequences=(" client wax",), include_stop_str_in_output=False)
    assert [(t.text, t.finish) for t in last] == [(" client", FinishReason.LENGTH)]


def test_the_bytes_of_all_tokens_are_those_of_the_text(model: Transformers) -> None:
    split = 0
    for seed in range(20):
        sent = steps(
            model, do_sample=True, temperature=5.0, seed=seed, max_new_tokens=12, top_n_tokens=3, ignore_eos_token=True
        )
        assert b"".join(token.data for token in sent).decode(errors="replace") == text_of(sent)
        split += sum(not token.text for token in sent)
        for token in sent:
            for top in token.top:
                assert top.special or top.data
                assert top.data != token.data or top.id == token.id
    assert split  # the bytes of some had to wait for others


def test_a_special_token_has_bytes_only_where_it_is_text(reciting: Transformers) -> None:
    assert steps(reciting, max_new_tokens=60)[-1].data == b""
    assert steps(reciting, max_new_tokens=60, skip_special_tokens=False)[-1].data == b"</s>"


def test_a_tokenizer_that_falls_back_to_bytes_says_which() -> None:
    tokenizers, transformers = tiny.needed("tokenizers"), tiny.needed("transformers")
    vocabulary = {"<s>": 0, "\u2581the": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)}}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<s>", byte_fallback=True))
    made.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback()]
    )
    bytes_of = token_bytes(transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>"))
    assert [bytes_of(token) for token in (0, 1, 2, 0xE2 + 2, 257, 999)] == [b"<s>", b"", b"\0", b"\xe2", b"\xff", b""]


def test_an_unfinished_character_is_held_back_and_at_the_end_replaced(reciting: Transformers) -> None:
    sent = steps(reciting, "the", max_new_tokens=60)
    assert not any("\ufffd" in token.text for token in sent)
    assert [token.text for token in sent if token.text.strip() in ("é", "😀")] == ["é", "😀"]
    cut = next(number for number, token in enumerate(sent, 1) if token.text == "😀") - 1
    assert text_of(steps(reciting, "the", max_new_tokens=cut)) == " client waits é\ufffd"


def test_no_tokens_are_a_finish_for_each_sequence(model: Transformers) -> None:
    assert steps(model, max_new_tokens=0) == [Finish(reason=FinishReason.LENGTH)]
    assert steps(model, max_new_tokens=0, n=2)[1] == Finish(reason=FinishReason.LENGTH, sequence=1)


def test_a_full_context_ends_the_text_and_a_prompt_that_fills_it_is_refused(path: Path, words: Any) -> None:
    model = Transformers(str(path), max_context=8)
    length = len(words.encode(TEXT))
    sent = steps(model, max_new_tokens=60, ignore_eos_token=True)
    assert (length + len(sent), sent[-1].finish) == (8, FinishReason.LENGTH)
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 8 tokens; the prompt has 8") as refused:
        steps(model, "the " * 7)
    error = refused.value
    assert (error.status, error.code, error.limit, error.prompt_tokens) == (400, "ContextLengthExceeded", 8, 8)
    assert len(steps(model, "the " * 7, truncate=7, max_new_tokens=60)) == 1
    assert ids_of(steps(model, TEXT * 3, truncate=2)) == ids_of(steps(model, words.decode(words.encode(TEXT)[-2:])))
    with pytest.raises(ContextLengthExceeded, match="context length is 128"):
        steps(Transformers(str(path), max_context=1000), "the " * 150)


async def test_sequences_that_are_kept_are_bounded_and_one_that_is_sent_is_not(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Transformers(str(path), max_context=13)
    monkeypatch.setattr("models.backends.transformers.MAX_KEPT_TOKENS", 19)
    for name in ("best_of", "n"):
        asked: dict[str, Any] = {name: 2, "do_sample": True, "max_new_tokens": 90}
        with pytest.raises(ModelError, match="max_new_tokens: expected at most 19 tokens in all sequences, got 20"):
            steps(model, **asked)
    assert len(sequences(steps(model, n=2, max_new_tokens=90))) == 2
    assert steps(model, do_sample=True, max_new_tokens=90)


# Prompts


async def test_a_session_knows_how_many_tokens_its_prompt_has(model: Transformers, words: Any) -> None:
    session = Session[Any, Any](Tape([prompt(max_new_tokens=1)]))
    await model(session)
    assert session.prompt_tokens == len(words.encode(TEXT)) == model.count_tokens(TEXT)


def test_an_empty_prompt_begins_with_the_beginning_of_sequence(model: Transformers) -> None:
    report = steps(model, "", max_new_tokens=1, decoder_input_details=True)[0]
    assert (report.id, report.special, report.text) == (tiny.BOS, True, "")


def test_half_of_a_surrogate_pair_is_no_error(model: Transformers) -> None:
    report = [t for t in steps(model, "a\ud800b", max_new_tokens=1, decoder_input_details=True) if t.prefill]
    assert text_of(report) == "a\ufffdb"


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role }}({{ m.name }}): {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_a_conversation_becomes_a_prompt_by_the_models_own_template(tmp_path: Path) -> None:
    model = Transformers(str(tiny.save(tmp_path, chat_template=TEMPLATE, begins=True)))
    messages = [ChatMessage(role="developer", content="Be brief."), ChatMessage(role="user", content="Hi", name="Ann")]
    made = model.chat_template(messages)
    assert made == "<s>system(): Be brief.\nuser(Ann): Hi\nassistant:"
    begin = [token.id for token in steps(model, made, max_new_tokens=0, decoder_input_details=True)[:2]]
    assert begin[0] == tiny.BOS != begin[1]
    assert steps(model, "the", max_new_tokens=0, decoder_input_details=True)[0].id == tiny.BOS
    with pytest.raises(ModelError, match="refuses them: no tools") as refused:
        model.chat_template([ChatMessage(role="tool", content="x")])
    assert refused.value.status == 400


def test_without_a_template_a_conversation_is_plain(model: Transformers) -> None:
    messages = [ChatMessage(role="user", content="Hi")]
    assert model.chat_template(messages) == plain_template(messages)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", float("inf")), ("temperature", float("nan")), ("repetition_penalty", 0.0),
        ("top_k", -2), ("top_p", 1.1), ("min_p", -0.1), ("typical_p", float("nan")), ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5), ("logit_bias", {100_000: 1.0}), ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: float("inf")}), ("max_new_tokens", -1), ("min_length", -1), ("top_n_tokens", 101),
        ("logprobs", -1), ("prompt_logprobs", 1000), ("n", 0), ("best_of", 17), ("truncate", 0),
        ("stop_sequences", ("",)), ("stop_sequences", ("x" * 1001,)), ("bad_sequences", ("x",) * 65),
    ],
)  # fmt: skip
async def test_a_parameter_outside_its_range_is_refused_by_name_before_anything_is_sent(
    model: Transformers, name: str, value: Any
) -> None:
    tape = Tape([prompt(**{name: value, "decoder_input_details": True})])
    with pytest.raises(ModelError, match=f"^{name}: expected .*, got ") as refused:
        await model(Session(tape))
    assert (refused.value.status, tape.sent) == (424, [])


# Sessions


class Gate:
    """Stands before a model's forward pass, counts, and holds passes up while it is shut."""

    def __init__(self, model: Transformers, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes, self.threads = 0, set[int]()
        self.open = threading.Event()
        self.open.set()
        inner = model._model().model
        forward = inner.forward

        def gated(*args: Any, **kwargs: Any) -> Any:
            self.passes += 1
            self.threads.add(threading.get_ident())
            self.open.wait(60)
            return forward(*args, **kwargs)

        monkeypatch.setattr(inner, "forward", gated)


@pytest.fixture
def gate(model: Transformers, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(model, monkeypatch)


async def test_prompts_are_continued_one_after_another(model: Transformers) -> None:
    asked = prompt(max_new_tokens=4)
    once = await converse(model, asked)
    assert await converse(model, asked, asked) == [*once, *once]


async def test_a_client_that_stops_reading_stops_the_model_at_the_next_token(model: Transformers, gate: Gate) -> None:
    tape = Tape([prompt(max_new_tokens=50, ignore_eos_token=True)], room=3)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(model, Session(tape))
        while gate.passes < 4:
            await trio.lowlevel.checkpoint()
        await settled(model)
        nursery.cancel_scope.cancel()
    assert (len(tape.sent), gate.passes) == (3, 4)
    assert threading.get_ident() not in gate.threads


async def test_a_step_that_is_stuck_is_known_to_whoever_watches_the_models_threads(model: Transformers, gate: Gate) -> None:
    running: list[Step] = []
    holder = Watching(running)
    before, tape = gate.passes, Tape([prompt(max_new_tokens=2, ignore_eos_token=True)], room=10)
    async with trio.open_nursery() as nursery:
        gate.open.clear()
        reset = set_step_holder(holder)
        nursery.start_soon(model, Session(tape))
        reset_step_holder(reset)
        while gate.passes == before:
            await trio.lowlevel.checkpoint()
        (step,) = running
        assert step.limiter is model._limiter  # which has a place more while it is stuck
        assert step.thread in gate.threads
        gate.open.set()
    assert not running


class Watching(StepHolder):
    """Keeps the steps that run."""

    def __init__(self, running: list[Step]) -> None:
        self.running = running

    def begin(self, step: Step) -> None:
        self.running.append(step)

    def end(self, step: Step) -> None:
        self.running.remove(step)


async def settled(model: Transformers) -> None:
    """Waits until no step is running and all tasks are blocked."""
    while model._limiter.borrowed_tokens:
        await trio.lowlevel.checkpoint()
    await trio.testing.wait_all_tasks_blocked()


async def test_a_session_that_is_cancelled_goes_at_once_and_its_step_leaves_nothing_behind(
    model: Transformers, gate: Gate
) -> None:
    asked = prompt(max_new_tokens=6, do_sample=True, seed=1)
    whole = await converse(model, asked)
    before, tape = gate.passes, Tape([asked], room=2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(model, Session(tape))
        gate.open.clear()
        while gate.passes == before:
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    # The session has ended while its step is in the model still, which the next one waits for.
    assert model._limiter.borrowed_tokens == 1
    later = Tape([asked])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(model, Session(later))
        await trio.testing.wait_all_tasks_blocked()
        assert (gate.passes, later.sent) == (before + 1, [])
        gate.open.set()
    assert later.sent == whole
    assert gate.passes == before + 1 + len(whole)
    assert model._limiter.borrowed_tokens == 0


async def test_steps_of_one_model_take_turns(model: Transformers, gate: Gate) -> None:
    gate.open.clear()
    tapes = [Tape([prompt(max_new_tokens=5, ignore_eos_token=True)]) for _ in range(3)]
    async with trio.open_nursery() as nursery:
        for tape in tapes:
            nursery.start_soon(model, Session(tape))
        await trio.testing.wait_all_tasks_blocked()
        while not gate.passes:
            await trio.lowlevel.checkpoint()
        assert (gate.passes, model._limiter.statistics().tasks_waiting) == (1, 2)
        gate.open.set()
    assert [len(tape.sent) for tape in tapes] == [5, 5, 5]


async def test_a_long_prompt_is_cancelled_between_its_chunks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Transformers(str(path), prefill_chunk=2)
    gate = Gate(model, monkeypatch)
    gate.open.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(model, Session(Tape([prompt("the server " * 10)])))
        while not gate.passes:
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    gate.open.set()
    await settled(model)
    assert gate.passes == 1


# Loading


async def test_a_model_is_loaded_in_a_thread_and_free_when_its_context_ends(path: Path) -> None:
    async with load(str(path), dtype="bfloat16", threads=2) as model:
        assert len(await converse(model, prompt(max_new_tokens=3))) <= 3
        inner = weakref.ref(model._model().model)
        assert str(inner().dtype) == "torch.bfloat16"  # type: ignore[union-attr]
    assert inner() is None
    with pytest.raises(RuntimeError, match="closed"):
        await model(Session(Tape([prompt()])))
    model.close()


async def test_a_class_and_a_loader_say_that_they_are_of_text(path: Path) -> None:
    assert made_family(Transformers) is Family.TEXT
    spec = spec_of(partial_loader(load, {"path": str(path)}), "tiny")
    assert spec.family is Family.TEXT
    async with spec.load() as model:
        assert await converse(model, prompt(max_new_tokens=1))


def test_what_it_acts_on_are_parameters() -> None:
    assert set(GenerationParameters.__struct_fields__) > Transformers.parameters
    assert not {"num_beams", "length_penalty", "early_stopping"} & Transformers.parameters


@pytest.mark.parametrize("module", ["torch", "transformers"])
def test_without_its_libraries_the_error_says_how_to_get_them(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install jinja2 torch 'transformers>=4\.56,<6'"):
        Transformers("anywhere")


@pytest.mark.parametrize("option", ["threads", "max_context", "max_sequences", "prefill_chunk"])
def test_an_option_below_one_is_refused_before_anything_is_loaded(option: str) -> None:
    with pytest.raises(ValueError, match=f"^{option}: expected at least 1, got 0"):
        Transformers("anywhere", **{option: 0})  # type: ignore[arg-type]


# Text in pieces, without a model


def decoder(words: Any) -> Callable[[list[int]], str]:
    return lambda ids: str(words.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@settings(max_examples=200)
@given(st.data())
def test_any_tokens_are_told_as_the_text_of_all_of_them(words: Any, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(words) - 1), max_size=24))
    before = words.encode(data.draw(st.sampled_from(["", "the", "é", "the server 😀"])))
    decode = decoder(words)
    stream = Detokenizer(decode, before)
    told = "".join(stream.feed(token) for token in ids) + stream.rest()
    assert decode(before) + told == decode([*before, *ids])


@settings(max_examples=100)
@given(st.text(max_size=12))
def test_a_text_is_told_without_a_replaced_character_and_never_late(words: Any, text: str) -> None:
    ids, stream = words.encode(text), Detokenizer(decoder(words), ())
    told = ""
    for end, token in enumerate(ids, 1):
        told += stream.feed(token)
        raw = words.decode(ids[:end], clean_up_tokenization_spaces=False)
        assert told == raw.rstrip("\ufffd") or "\ufffd" in text
    assert told + stream.rest() == text


def test_what_a_token_would_add_is_shown_with_an_unfinished_character(words: Any) -> None:
    first, second = words.encode("é")
    [space] = words.encode(" ")
    stream = Detokenizer(decoder(words), words.encode("the"))
    assert [stream.would_add(token) for token in (space, first)] == [" ", "\ufffd"]
    assert stream.feed(first) == ""
    assert [stream.would_add(token) for token in (space, second)] == ["\ufffd ", "é"]
    assert stream.feed(second) == "é"


def byte_fallback(ids: list[int]) -> str:
    """As decoders of sentencepiece with byte fallback do: 256 begins a word, whose space is not told at the very
    beginning; runs of bytes that are no UTF-8 are shown as one U+FFFD for each."""
    out, run = "", b""
    for token in [*ids, 256]:
        if token < 256:
            run += bytes([token])
            continue
        try:
            out += run.decode()
        except UnicodeDecodeError:
            out += "\ufffd" * len(run)
        out, run = out + " w", b""
    return out[:-2].removeprefix(" ")


def test_words_keep_their_spaces_and_bytes_their_characters_with_byte_fallback() -> None:
    def told(before: list[int], ids: list[int]) -> list[str]:
        stream = Detokenizer(byte_fallback, before)
        return [*(stream.feed(token) for token in ids), stream.rest()]

    euro = list("€".encode())
    assert told([256], [256, *euro, *euro, 256]) == [" w", "", "", "€", "", "", "€", " w", ""]
    assert told([], [256, 256]) == ["w", " w", ""]
    # An unfinished character after a whole one does not take back what was told, and holds up nothing after it.
    assert "".join(told([256], [*euro, 0xE2, 256, 256])) == "€\ufffd w w"
    assert told([256], [0xFF, 0xFF, 0xFF, 0xFF, 256])[3:] == ["\ufffd", "\ufffd\ufffd\ufffd w", ""]
