"""Causal language models of Hugging Face's `transformers` as text models: loaded whole, stepped token by token."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import math
import re
import threading
from collections.abc import AsyncIterator, Callable, Collection, Generator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias, final

import msgspec
import trio

from models.blocking import iterate_steps, run_step
from models.chat import ChatMessage, plain_template
from models.continuations import Stops
from models.errors import ContextLengthExceeded, ModelError
from models.messages import Finish, FinishReason, GenerationParameters, Prompt, Token, TopToken
from models.session import Session

# torch and transformers are optional and imported when a model is loaded, so their objects have no types here.
Torch: TypeAlias = Any
Tensor: TypeAlias = Any
Cache: TypeAlias = Any

Step: TypeAlias = tuple[Token | Finish, ...]
"""The messages of one step, possibly none."""

MAX_TOP = 100
MAX_TEXTS = 64
MAX_TEXT_LENGTH = 1000
MAX_KEPT_TOKENS = 65_536
# Below it sampling is greedy, because division by it may overflow: vLLM's limit (`_SAMPLING_EPS`).
MIN_TEMPERATURE = 1e-5
# The tokens before a text that determine how it begins, for example with a space; vLLM uses as many.
_CONTEXT = 6
_UNFINISHED = "\ufffd"
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")
# An unfinished character of UTF-8 has at most three bytes; a decoder shows them as one U+FFFD, or as one for each.
_MOST_UNFINISHED = 3


@final
class Transformers:
    """A causal language model and its tokenizer (family TEXT), read from a directory that `save_pretrained` wrote, or by
    name from the Hub. The constructor blocks until both are loaded.

    Each forward pass, with the choice of the next token, is a step in a thread. The next step begins when the session has
    taken the token. A client that stops reading therefore stops its generation, and one that leaves ends it after the
    running step. `log_prob` is that of the model's own distribution, before bias, penalties, temperature and filters, which
    are applied in the order of `transformers`. A request that the model cannot serve ends its session before anything is
    sent for that prompt: with ContextLengthExceeded if the prompt leaves no room, otherwise with ModelError (status 424).
    """

    parameters: ClassVar[frozenset[str]] = frozenset(
        {
            "bad_sequences", "best_of", "decoder_input_details", "do_sample", "frequency_penalty", "ignore_eos_token",
            "include_stop_str_in_output", "logit_bias", "logprobs", "max_new_tokens", "min_length", "min_p", "n",
            "presence_penalty", "prompt_logprobs", "repetition_penalty", "seed", "skip_special_tokens", "stop_sequences",
            "stop_token_ids", "temperature", "top_k", "top_n_tokens", "top_p", "truncate", "typical_p",
        }
    )  # fmt: skip
    """The GenerationParameters that it acts on: all except those of beam search and of the form of the answer."""

    def __init__(
        self,
        path: str,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        threads: int = 1,
        max_context: int | None = None,
        max_sequences: int = 16,
        prefill_chunk: int = 512,
        trust_remote_code: bool = False,
    ) -> None:
        """`device` and `dtype` are torch's names ("cuda:0", "bfloat16"); "auto" is the dtype in which the weights are
        stored. `threads` steps run at once, of all sessions together, and one more for each stuck step
        (`ModelSpec.step_timeout`). `max_context` limits prompt and output, in tokens, below the model's own positions.
        `max_sequences` limits `n` and `best_of`. A prompt is taken in by passes of `prefill_chunk` tokens, between which
        other sessions can run. `trust_remote_code` lets the directory bring its own Python code.

        ValueError for an option outside its range, and for a model that keeps no state between steps. ImportError if torch
        or transformers is not installed.
        """
        for name, value in (
            ("threads", threads), ("max_context", max_context), ("max_sequences", max_sequences),
            ("prefill_chunk", prefill_chunk),
        ):  # fmt: skip
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        self._loaded: _Loaded | None = _load(path, device, dtype, max_context, trust_remote_code)
        self.context = self._loaded.context or 0
        """The most tokens of prompt and answer together; 0: unknown."""
        self._limiter = trio.CapacityLimiter(threads)
        self._max_sequences = max_sequences
        self._chunk = prefill_chunk

    def close(self) -> None:
        """Releases the model: its memory is free when the running steps have ended. Any later use raises RuntimeError; a
        second call does nothing."""
        self._loaded = None

    async def __call__(self, session: Session[Prompt, Token | Finish]) -> None:
        """Continues each prompt, one after another, until the end of input."""
        async for prompt in session:
            ids = await run_step(partial(self.prompt_ids, prompt), limiter=self._limiter, replaced=True)
            session.prompt_tokens = len(ids)
            made = self.generate(ids, prompt.parameters)
            async with aclosing(iterate_steps(made, limiter=self._limiter, replaced=True)) as steps:
                async for messages in steps:
                    for message in messages:
                        await session.send(message)

    def chat_template(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt for a conversation, by the tokenizer's own template, or by `plain_template` if it has none. ModelError
        (status 400) for messages that the template refuses."""
        tokenizer = self._model().tokenizer
        if not tokenizer.chat_template:
            return plain_template(messages)
        # "developer" is the newer name of "system", which most templates know.
        renamed = {} if "developer" in str(tokenizer.chat_template) else {"developer": "system"}
        turns = [_turn(message, renamed.get(message.role, message.role)) for message in messages]
        try:
            return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        except importlib.import_module("jinja2").TemplateError as e:
            said = f"messages: the model's chat template refuses them: {str(e)[:200]}"
            raise ModelError(said, code="BadMessages", status=400) from None

    def count_tokens(self, text: str) -> int:
        """The number of tokens that the model gets for a prompt."""
        return len(self._model().ids_of(text))

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """The tokens that the model continues. ContextLengthExceeded if they leave no room in the context, ModelError
        (status 424) for a parameter outside its range."""
        loaded, parameters = self._model(), prompt.parameters
        check(parameters, vocabulary=loaded.vocabulary, max_sequences=self._max_sequences)
        ids = loaded.prompt_ids(prompt.text, parameters)
        kept = _kept(parameters) * loaded.room(ids, parameters)
        expected = f"at most {MAX_KEPT_TOKENS} tokens in all sequences"
        _require("max_new_tokens", kept, expected, kept <= MAX_KEPT_TOKENS)
        return ids

    def generate(self, ids: Sequence[int], parameters: GenerationParameters) -> Generator[Step, None, None]:
        """Yields the messages for a prompt of `prompt_ids`, step by step. Each step blocks for at most one forward pass.
        Several threads may advance a generator in turn.

        One sequence is sent as it is generated. Several (`n`, `best_of`) are generated one after another and sent when all
        are complete, the one with the highest sum of log-probabilities first. Greedy ones are all equal.
        """
        loaded = self._model()
        most = loaded.room(ids, parameters)
        if parameters.decoder_input_details or parameters.prompt_logprobs is not None:
            logits, cache = yield from _reported_prefill(loaded, parameters, ids, self._chunk)
        elif most:
            logits, cache = yield from _prefill(loaded, ids, self._chunk)
        if most == 0:
            yield tuple([Finish(reason=FinishReason.LENGTH, sequence=number) for number in range(parameters.n)])
            return
        continuation = _Continuation(loaded, parameters, ids, most)
        if kept := _kept(parameters):
            yield from _best(continuation, logits, cache, kept)
        else:
            for token in continuation.tokens(logits, cache):
                yield (token,)

    def _model(self) -> _Loaded:
        if self._loaded is None:
            raise RuntimeError("the model is closed")
        return self._loaded


@asynccontextmanager
async def load(
    path: str,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    threads: int = 1,
    max_context: int | None = None,
    max_sequences: int = 16,
    prefill_chunk: int = 512,
    trust_remote_code: bool = False,
) -> AsyncIterator[Transformers]:
    """Loads a model in a thread, and closes it at the end of the context. The options are those of Transformers."""
    make = partial(
        Transformers,
        path,
        device=device,
        dtype=dtype,
        threads=threads,
        max_context=max_context,
        max_sequences=max_sequences,
        prefill_chunk=prefill_chunk,
        trust_remote_code=trust_remote_code,
    )
    model = await run_step(make, limiter=trio.CapacityLimiter(1))
    try:
        yield model
    finally:
        model.close()


def check(parameters: GenerationParameters, *, vocabulary: int, max_sequences: int) -> None:
    """Raises ModelError (status 424) for the first parameter outside its range. The ranges are vLLM's if it has one."""
    p = parameters
    _require("temperature", p.temperature, "a finite number, at least 0", 0 <= p.temperature < math.inf)
    _require("repetition_penalty", p.repetition_penalty, "a number from 0.01 to 100", 0.01 <= p.repetition_penalty <= 100)
    _require("top_k", p.top_k, "-1 or more", p.top_k >= -1)
    for name in ("top_p", "min_p", "typical_p"):
        _require(name, getattr(p, name), "a number from 0 to 1", 0 <= getattr(p, name) <= 1)
    for name in ("presence_penalty", "frequency_penalty"):
        _require(name, getattr(p, name), "a number from -2 to 2", -2 <= getattr(p, name) <= 2)
    for token, bias in p.logit_bias.items():
        known = 0 <= token < vocabulary and -100 <= bias <= 100
        _require("logit_bias", {token: bias}, f"numbers from -100 to 100 for tokens from 0 to {vocabulary - 1}", known)
    for name in ("max_new_tokens", "min_length"):
        _require(name, getattr(p, name), "at least 0", getattr(p, name) >= 0)
    for name in ("top_n_tokens", "logprobs", "prompt_logprobs"):
        value = getattr(p, name)
        _require(name, value, f"a number from 0 to {MAX_TOP}", value is None or 0 <= value <= MAX_TOP)
    for name in ("n", "best_of"):
        _require(name, getattr(p, name), f"a number from 1 to {max_sequences}", 1 <= getattr(p, name) <= max_sequences)
    _require("truncate", p.truncate, "at least 1", p.truncate is None or p.truncate >= 1)
    for name in ("stop_sequences", "bad_sequences"):
        texts = getattr(p, name)
        few = len(texts) <= MAX_TEXTS and all(1 <= len(text) <= MAX_TEXT_LENGTH for text in texts)
        _require(name, texts, f"at most {MAX_TEXTS}, of 1 to {MAX_TEXT_LENGTH} characters each", few)


def _require(name: str, value: object, expected: str, holds: bool) -> None:
    if not holds:
        raise ModelError(f"{name}: expected {expected}, got {str(value)[:100]}", code="ValidationError", status=424)


def _kept(parameters: GenerationParameters) -> int:
    """The number of sequences that are kept until the best are known. 0 if each token is sent as it is made."""
    count = max(parameters.n, parameters.best_of)
    if count == 1:
        return 0
    return 1 if _is_greedy(parameters) else count


def _is_greedy(parameters: GenerationParameters) -> bool:
    return not parameters.do_sample or parameters.temperature < MIN_TEMPERATURE


def _turn(message: ChatMessage, role: str) -> dict[str, str]:
    turn = {"role": role, "content": message.content}
    return {**turn, "name": message.name} if message.name else turn


def _prefill(loaded: _Loaded, ids: Sequence[int], chunk: int) -> Generator[Step, None, tuple[Tensor, Cache]]:
    """The logits and the state after a prompt; each step takes one chunk of it."""
    logits = cache = None
    for start in range(0, len(ids), chunk):
        if start:
            yield ()
        logits, cache = loaded.forward(ids[start : start + chunk], cache)
    return logits, cache


def _reported_prefill(
    loaded: _Loaded, parameters: GenerationParameters, ids: Sequence[int], chunk: int
) -> Generator[Step, None, tuple[Tensor, Cache]]:
    """The logits and the state after a prompt; each step yields the tokens of one chunk with the model's predictions."""
    report = _PromptReport(loaded, parameters)
    cache: Cache = None
    for start in range(0, len(ids), chunk):
        piece = ids[start : start + chunk]
        logits, cache = loaded.forward(piece, cache, every=True)
        yield report.tokens(piece, logits)
    return report.after[None], cache


def _best(continuation: _Continuation, logits: Tensor, cache: Cache, count: int) -> Generator[Step, None, None]:
    """Yields nothing for each step, and at the end the best sequences, each whole."""
    made: list[list[Token]] = []
    for number in range(1, count + 1):
        own = cache if number == count else copy.deepcopy(cache)  # a step adds to its cache
        tokens: list[Token] = []
        for token in continuation.tokens(logits, own):
            tokens.append(token)
            yield ()
        made.append(tokens)
    made.sort(key=_sum_of_log_probs, reverse=True)
    for sequence in range(continuation.parameters.n):
        best = made[sequence % count]  # one greedy sequence stands for all
        yield tuple([msgspec.structs.replace(token, sequence=sequence) for token in best])


def _sum_of_log_probs(tokens: Sequence[Token]) -> float:
    return sum(token.log_prob or 0.0 for token in tokens)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """A model with its tokenizer, and the properties from their configurations."""

    torch: Torch
    library: Any
    model: Any
    tokenizer: Any
    encoding: threading.Lock
    """A tokenizer in Rust sets its own truncation and padding each time that it encodes."""
    eos: frozenset[int]
    special: frozenset[int]
    vocabulary: int
    bytes_of: Callable[[int], bytes]
    """Returns the bytes of a token, or none if they are unknown."""
    context: int | None
    """The most tokens of prompt and output together. None: no limit is known."""
    state: str
    """The name of the argument, and of the answer's member, for the state of a pass: `cache` in newer versions of
    transformers, `past_key_values` in older ones and in code that comes with a model."""
    last_only: bool
    """True if a pass can compute the logits of the last position alone."""

    def forward(self, ids: Sequence[int], cache: Cache, *, every: bool = False) -> tuple[Tensor, Cache]:
        """The logits after these tokens, a row for `every` one or only for the last, and the new state, which includes
        `cache` and may be the same object."""
        options: dict[str, Any] = {self.state: cache, "use_cache": True}
        if self.last_only and not every:
            options["logits_to_keep"] = 1
        with self.torch.inference_mode():
            given = self.torch.tensor([list(ids)], device=self.model.device)
            answer = self.model(input_ids=given, **options)
            logits = answer.logits[0] if every else answer.logits[0, -1:]
        return logits, getattr(answer, self.state)

    def log_probs(self, logits: Tensor) -> Tensor:
        with self.torch.inference_mode():
            return self.torch.log_softmax(logits.float(), dim=-1)

    def top(self, log_probs: Tensor, count: int) -> list[tuple[int, float]]:
        """The most probable tokens with their log-probabilities, the best first."""
        if count == 0:
            return []
        found = log_probs.topk(min(count, log_probs.shape[-1]))
        return list(zip(found.indices.tolist(), map(_at_most_0, found.values.tolist()), strict=True))

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The ids of a text. A lone surrogate, which is not a character, counts as U+FFFD."""
        clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        with self.encoding:
            return list(self.tokenizer.encode(clean, add_special_tokens=special))

    def ids_of(self, text: str) -> list[int]:
        """The ids of a prompt."""
        ids = self.encode(text, special=True)
        bos = self.tokenizer.bos_token_id
        # the prompt of a chat template begins with it already
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def prompt_ids(self, text: str, parameters: GenerationParameters) -> list[int]:
        """The ids that the model gets. ContextLengthExceeded if they leave no room for a requested token."""
        ids = self.ids_of(text)
        if parameters.truncate is not None:
            ids = ids[-parameters.truncate :]
        if not ids:
            starts = [token for token in (self.tokenizer.bos_token_id, *sorted(self.eos)) if token is not None]
            if not starts:
                raise ModelError("inputs: expected a prompt of at least 1 token, got none", code="ValidationError")
            ids = starts[:1]
        room = 1 if parameters.max_new_tokens else 0
        if self.context is not None and len(ids) + room > self.context:
            if not parameters.limited:
                raise ContextLengthExceeded(len(ids) + room, self.context)
            raise ContextLengthExceeded(len(ids) + parameters.max_new_tokens, self.context, prompt_tokens=len(ids))
        return ids

    def room(self, ids: Sequence[int], parameters: GenerationParameters) -> int:
        """The number of tokens that may follow the prompt."""
        most = parameters.max_new_tokens
        if not parameters.limited and (kept := _kept(parameters)):
            most = min(most, MAX_KEPT_TOKENS // kept)
        return most if self.context is None else min(most, self.context - len(ids))

    def data_of(self, token: int, *, skip_special: bool = True) -> bytes:
        """The bytes of a token, if they are known and are text; else none."""
        return b"" if skip_special and token in self.special else self.bytes_of(token)

    def decoder(self, parameters: GenerationParameters) -> Callable[[list[int]], str]:
        decode, skip = self.tokenizer.decode, parameters.skip_special_tokens
        return lambda ids: str(decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def _at_most_0(log_prob: float) -> float:
    return min(0.0, log_prob)  # rounding may give more


def _load(path: str, device: str, dtype: str, max_context: int | None, trust_remote_code: bool) -> _Loaded:
    try:
        torch, library = importlib.import_module("torch"), importlib.import_module("transformers")
    except ImportError as e:
        raise ImportError(
            f"the transformers backend needs torch and transformers: pip install jinja2 torch 'transformers>=4.56,<6' ({e})"
        ) from e
    tokenizer = library.AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    model = library.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code)
    model = model.to(device).eval()
    config = model.config.get_text_config()
    eos = _eos_ids(model, config, tokenizer)
    added = tokenizer.added_tokens_decoder
    positions = getattr(config, "max_position_embeddings", None)
    bounds = [bound for bound in (positions, max_context) if bound is not None]
    takes = inspect.signature(model.forward).parameters
    state = "cache" if "cache" in takes else "past_key_values"
    loaded = _Loaded(
        torch=torch,
        library=library,
        model=model,
        tokenizer=tokenizer,
        encoding=threading.Lock(),
        eos=eos,
        special=eos | set(tokenizer.all_special_ids) | {token for token, about in added.items() if about.special},
        vocabulary=config.vocab_size,
        bytes_of=token_bytes(tokenizer),
        context=min(bounds, default=None),
        state=state,
        last_only="logits_to_keep" in takes,
    )
    if loaded.forward([0], None)[1] is None:
        raise ValueError(f"{path[:200]}: {type(model).__name__} gives no {state}, so it cannot go on step by step")
    return loaded


def token_bytes(tokenizer: Any) -> Callable[[int], bytes]:
    """A function that returns the bytes of a token, for tokenizers whose tokens may end inside a character: byte-level ones
    (GPT-2, Llama 3, Qwen), and those that fall back to bytes for unknown text (Llama 2). It returns none for a token whose
    text has its bytes."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    kinds = set() if decoder is None else _kinds_of(json.loads(decoder.__getstate__()))
    added = {token: str(about.content).encode() for token, about in tokenizer.added_tokens_decoder.items()}
    alphabet = _byte_alphabet() if "ByteLevel" in kinds else {}
    falls_back = "ByteFallback" in kinds

    def bytes_of(token: int) -> bytes:
        if token in added or not (alphabet or falls_back):
            return added.get(token, b"")
        piece = tokenizer.convert_ids_to_tokens(token) or ""  # the vocabulary may be larger than the tokenizer's
        if alphabet:
            known = alphabet.keys() >= set(piece)
            return bytes([alphabet[character] for character in piece]) if known else b""
        single = _FALLBACK.fullmatch(piece)
        return bytes([int(single[1], 16)]) if single else b""

    return bytes_of


def _kinds_of(decoder: dict[str, Any]) -> set[str]:
    """The types of a decoder of `tokenizers`, and of its parts."""
    return {decoder["type"]}.union(*map(_kinds_of, decoder.get("decoders", ())))


def _byte_alphabet() -> dict[str, int]:
    """The characters that represent bytes in byte-level vocabularies: GPT-2's `bytes_to_unicode`."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _eos_ids(model: Any, config: Any, tokenizer: Any) -> frozenset[int]:
    """The end-of-sequence ids of the first of these that has any: the generation config, the model, the tokenizer."""
    for source in (model.generation_config, config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return frozenset([found] if isinstance(found, int) else found)
    return frozenset()


@final
class _Continuation:
    """Sequences that continue one prompt, all drawn from one generator of random numbers."""

    def __init__(self, loaded: _Loaded, parameters: GenerationParameters, ids: Sequence[int], most: int) -> None:
        self._loaded, self.parameters, self._ids, self._most = loaded, parameters, ids, most
        self._random = loaded.torch.Generator(device=loaded.model.device)
        if parameters.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(parameters.seed % 2**64)  # a client may send any integer

    def tokens(self, logits: Tensor, cache: Cache) -> Iterator[Token]:
        """Yields one sequence, from the logits and the state after the prompt. The last token has the reason of the end."""
        loaded, parameters = self._loaded, self.parameters
        choose = _Chooser(loaded, parameters, self._ids, None if _is_greedy(parameters) else self._random)
        data_of = partial(loaded.data_of, skip_special=parameters.skip_special_tokens)
        text = Detokenizer(loaded.decoder(parameters), self._ids)
        stops = Stops(parameters.stop_sequences, included=parameters.include_stop_str_in_output)
        count = max(parameters.top_n_tokens, parameters.logprobs or 0)
        for number in range(1, self._most + 1):
            token = choose(logits[-1])
            log_probs = loaded.log_probs(logits[-1])
            top = _top_tokens(loaded, text, log_probs, count, data_of)
            reason = self._reason(token, number)
            left_out = token in parameters.stop_token_ids and not parameters.include_stop_str_in_output
            added = "" if left_out else text.feed(token)
            if reason is not None:
                added += text.rest()
            added = stops.feed(added, ignore=number <= parameters.min_length)
            if stops.met is not None:
                reason = FinishReason.STOP_SEQUENCE
            elif reason is not None:
                added += stops.rest()
            yield Token(
                text=added,
                id=token,
                log_prob=_at_most_0(log_probs[token].item()),
                special=token in loaded.special,
                finish=reason,
                top=top,
                data=b"" if left_out else data_of(token),
                stop=stops.met or "",
            )
            if reason is not None:
                return
            logits, cache = loaded.forward([token], cache)

    def _reason(self, token: int, number: int) -> FinishReason | None:
        if token in self._loaded.eos:
            return FinishReason.EOS_TOKEN
        if token in self.parameters.stop_token_ids:
            return FinishReason.STOP_SEQUENCE
        return FinishReason.LENGTH if number == self._most else None


def _top_tokens(
    loaded: _Loaded, text: Detokenizer, log_probs: Tensor, count: int, data_of: Callable[[int], bytes]
) -> tuple[TopToken, ...]:
    return tuple(
        [
            TopToken(
                text=text.would_add(token),
                id=token,
                log_prob=log_prob,
                special=token in loaded.special,
                data=data_of(token),
            )
            for token, log_prob in loaded.top(log_probs, count)
        ]
    )


@final
class _PromptReport:
    """The tokens of a prompt with the model's prediction for each, from the logits of the token before it."""

    def __init__(self, loaded: _Loaded, parameters: GenerationParameters) -> None:
        self._loaded = loaded
        self._count = parameters.prompt_logprobs or 0
        self._text = Detokenizer(loaded.decoder(parameters), ())
        self._data_of = partial(loaded.data_of, skip_special=parameters.skip_special_tokens)
        self.after: Tensor = None
        """The logits after the last token. None before the first, which nothing predicts."""

    def tokens(self, ids: Sequence[int], logits: Tensor) -> tuple[Token, ...]:
        """The tokens of the next piece, which has a row of logits for each."""
        tokens = tuple([self._token(token, row) for token, row in zip(ids, logits, strict=True)])
        self.after = self.after.clone()  # releases the other rows
        return tokens

    def _token(self, token: int, logits: Tensor) -> Token:
        loaded, before, self.after = self._loaded, self.after, logits
        log_prob: float | None = None
        top: tuple[TopToken, ...] = ()
        if before is not None:
            log_probs = loaded.log_probs(before)
            log_prob = _at_most_0(log_probs[token].item())
            top = _top_tokens(loaded, self._text, log_probs, self._count, self._data_of)
        return Token(
            text=self._text.feed(token),
            id=token,
            log_prob=log_prob,
            special=token in loaded.special,
            prefill=True,
            top=top,
            data=self._data_of(token),
        )


@final
class _Chooser:
    """Chooses the tokens of one sequence: the best one, or one drawn by `random`, after bias, penalties and filters.

    The order is that of transformers' `generate`, and so are the processors, except those that it does not have.
    """

    def __init__(self, loaded: _Loaded, parameters: GenerationParameters, ids: Sequence[int], random: Any) -> None:
        self._torch, self._parameters, self._random = loaded.torch, parameters, random
        device = loaded.model.device
        self._ids = loaded.torch.tensor([list(ids)], device=device)
        self._made = 0
        self._counts: Tensor = None
        """The number of times that each token is in the output."""
        bias = parameters.logit_bias
        self._biased = loaded.torch.tensor(list(bias), device=device, dtype=loaded.torch.long)
        self._bias = loaded.torch.tensor(list(bias.values()), device=device, dtype=loaded.torch.float32)
        self._eos = sorted(loaded.eos)
        self._process = loaded.library.LogitsProcessorList(_processors(loaded, parameters, sampled=random is not None))

    def __call__(self, logits: Tensor) -> int:
        torch = self._torch
        with torch.inference_mode():
            scores = self._process(self._ids, self._own(logits)[None])
            if self._random is None:
                chosen = scores.argmax(dim=-1)
            else:
                chosen = torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=self._random)[0]
            token = int(chosen)
            self._ids = torch.cat([self._ids, chosen[None]], dim=-1)
            self._made += 1
            self._counts[token] += 1
        return token

    def _own(self, logits: Tensor) -> Tensor:
        """A copy of the logits with the changes for which transformers has no processors."""
        parameters, scores = self._parameters, logits.to(self._torch.float32, copy=True)
        if self._counts is None:
            self._counts = self._torch.zeros_like(scores)
        scores[self._biased] += self._bias
        if parameters.presence_penalty or parameters.frequency_penalty:
            scores -= parameters.presence_penalty * (self._counts > 0) + parameters.frequency_penalty * self._counts
        if parameters.ignore_eos_token or self._made < parameters.min_length:
            scores[self._eos] = -math.inf
        return scores


def _processors(loaded: _Loaded, parameters: GenerationParameters, *, sampled: bool) -> Iterator[Any]:
    """The processors of transformers for these parameters, in the order of its `generate`."""
    p, library = parameters, loaded.library
    if p.repetition_penalty != 1:
        yield library.RepetitionPenaltyLogitsProcessor(p.repetition_penalty)
    if bad := _bad_ids(loaded, p.bad_sequences):
        yield library.NoBadWordsLogitsProcessor(bad)
    if not sampled:
        return
    if p.temperature != 1:
        yield library.TemperatureLogitsWarper(float(p.temperature))
    if p.top_k > 0:
        yield library.TopKLogitsWarper(p.top_k)
    if p.top_p < 1:
        yield library.TopPLogitsWarper(float(p.top_p))
    if p.min_p > 0:
        yield library.MinPLogitsWarper(float(p.min_p))
    if p.typical_p < 1:
        yield library.TypicalLogitsWarper(float(p.typical_p))


def _bad_ids(loaded: _Loaded, texts: Collection[str]) -> list[list[int]]:
    """The token sequences of texts, each as it is and as a word behind a space, which has other tokens."""
    found = [tuple(loaded.encode(space + text, special=False)) for text in texts for space in ("", " ")]
    return [list(ids) for ids in dict.fromkeys(found) if ids]


@final
class Detokenizer:
    """Decodes token by token, and holds back the bytes of an unfinished character. All texts together are the text of the
    whole output as it follows the prompt `before`.

    Only the last tokens are decoded again, together with those before them, because the text of a token may depend on them.
    """

    def __init__(self, decode: Callable[[list[int]], str], before: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(before[-_CONTEXT:])
        self._begin()

    def _begin(self) -> None:
        """Makes all tokens so far the context of the following ones: their text has been returned."""
        self._context, self._known, self._told = self._decode(self._ids), len(self._ids), 0

    def _text(self, ids: list[int]) -> str:
        """The text of the tokens after the context."""
        text = self._decode(ids)
        if text.startswith(self._context):
            return text[len(self._context) :]
        # A decoder of single bytes (byte fallback) decodes whole characters differently if unfinished ones follow.
        return self._decode(ids[self._known :])

    def feed(self, token: int) -> str:
        """The text that this token adds; it may be empty."""
        self._ids.append(token)
        text = self._text(self._ids)
        whole = _finished(text)
        added = whole[self._told :]
        self._told += len(added)
        if text and whole == text:
            self._ids = self._ids[self._known :]
            self._begin()
        return added

    def would_add(self, token: int) -> str:
        """The text after this token that has not been returned yet; an unfinished character is U+FFFD."""
        return self._text([*self._ids, token])[self._told :]

    def rest(self) -> str:
        """The held-back text at the end: U+FFFD for an unfinished character, else nothing."""
        held = self._text(self._ids)[self._told :]
        self._told += len(held)
        return held


def _finished(text: str) -> str:
    """The text without possible bytes of an unfinished character at its end."""
    end = len(text)
    while end and len(text) - end < _MOST_UNFINISHED and text[end - 1] == _UNFINISHED:
        end -= 1
    return text[:end]
