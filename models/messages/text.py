"""The messages of text models: a prompt in; tokens, pieces of tool calls and an end out."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, final

import msgspec

from models.messages.conversation import ChatMessage
from models.messages.tools import FinishReason, ResponseFormat, ToolSpec


def utf8(text: str) -> bytes:
    """The text's UTF-8 bytes. A lone surrogate, which is not a character, becomes U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


_EMPTY: Mapping[Any, Any] = MappingProxyType({})


@final
class GenerationParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a generation: all of the LMI tables (common, vLLM, lmi-dist, TensorRT-LLM) and of OpenAI's. The
    defaults leave the model's own distribution unchanged. `extra` has all other parameters, unchanged.

    A model acts on those that it supports, and may declare them (`ModelSpec.parameters`).
    """

    do_sample: bool = False
    """False: the most probable token is chosen, whatever the sampling parameters are."""
    seed: int | None = None
    """None: the model chooses one. The same seed gives the same text."""
    temperature: float = 1.0
    """0 is greedy."""
    repetition_penalty: float = 1.0
    """Divides the scores of tokens in the prompt or the output. Above 1 it makes them rarer."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    """Tokens with less than this share of the highest probability are left out."""
    typical_p: float = 1.0
    """The mass of the most typical tokens that are kept (Meister and others 2022). 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted from the score of each token that is in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's score once for each time that it is in the output."""
    logit_bias: Mapping[int, float] = _EMPTY
    """Added to the scores of these tokens."""
    max_new_tokens: int = 30
    """The most tokens, including the end-of-sequence token. The gateway ends the text there. 0: only the prompt is taken in,
    and reported if that is asked for."""
    limited: bool = True
    """False if the request names no `max_new_tokens`: then it is a default, and the model may choose a smaller number."""
    min_length: int = 0
    """The end-of-sequence token is not chosen before this many tokens."""
    ignore_eos_token: bool = False
    """True: the end-of-sequence token is never chosen."""
    stop_sequences: tuple[str, ...] = ()
    """The gateway ends the text at them, unless the model declares that it ends them itself (`ModelSpec.parameters`)."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = True
    """True if a text that ends with a stop sequence includes it."""
    bad_sequences: tuple[str, ...] = ()
    """Texts that must not be generated."""
    n: int = 1
    """The number of sequences to return; `Token.sequence` distinguishes them. If they are chosen from more, by `best_of` or
    `num_beams`, 0 is the best."""
    best_of: int = 1
    """The number of sequences to generate and choose from; never less than `n`."""
    num_beams: int = 1
    """Above 1: beam search of that width, which is deterministic and ignores `best_of`."""
    length_penalty: float = 1.0
    """For beams: the exponent of the length that divides their log-probability."""
    early_stopping: bool = False
    """For beams: True ends the search as soon as `num_beams` are complete."""
    truncate: int | None = None
    """The most tokens of the prompt; the last ones are kept."""
    skip_special_tokens: bool = True
    """True: special tokens have no text."""
    spaces_between_special_tokens: bool = True
    details: bool = False
    return_full_text: bool = False
    decoder_input_details: bool = False
    """True if the prompt's tokens must be sent first, as `Token(prefill=True)`."""
    top_n_tokens: int = 0
    """The number of most probable tokens of each step to send with its token, as `Token.top`."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    extra: Mapping[str, Any] = _EMPTY


@final
class Prompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A text to continue, and what else a request says. A model acts on what it declares in its `features`; the gateway
    refuses a request that asks another one for more than a text."""

    text: str
    """For a chat, what the model's template has made of the conversation."""
    parameters: GenerationParameters = GenerationParameters()
    messages: tuple[ChatMessage, ...] = ()
    """The conversation of a chat; empty for a text that is continued."""
    tools: tuple[ToolSpec, ...] = ()
    """The tools that the model may call. Empty with the choice `none`, unless the model declares `tool_choice`."""
    tool_choice: str = "auto"
    """`auto`: the model decides. `none`: it calls none. `required`: it calls at least one. Any other: the name of the one
    that it calls."""
    parallel_tools: bool = True
    """False if the client takes one call at most."""
    response_format: ResponseFormat | None = None
    """None: any text."""
    effort: str = ""
    """How much the model should think, in the client's word; empty if it says nothing. A hint."""
    thinking: bool | None = None
    """True or False if the client says whether the model should think; None: as the model likes."""
    thinking_budget: int = 0
    """The most tokens of thinking; 0: no limit."""
    adapter: str = ""
    """The name of the adapter (LoRA) to use; empty: none."""
    template: Mapping[str, Any] = _EMPTY
    """The client's values for the chat template, by the names of its parameters."""
    prefill: bool = False
    """True if the last message is the beginning of the model's own, which `text` ends with: the model continues it."""


@final
class TopToken(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One of the most probable tokens of a step, chosen or not."""

    text: str
    id: int = 0
    log_prob: float | None = 0.0
    special: bool = False
    data: bytes = b""
    """The token's bytes, if they are not `text` in UTF-8."""


@final
class Token(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One generated token. `text` is its addition to the output, which may be empty. `log_prob` is natural, at most 0.

    `prefill` marks a token of the prompt, sent if `decoder_input_details` asks for it; its `log_prob` is None for the first.
    `special` marks a token without its own text (end of sequence): its `text` is empty, except for text that was held back
    before it, and if special tokens are shown. `finish` on the last token is the reason of the end; a model that learns the
    reason only afterwards sends Finish. `top` has the most probable tokens of its step, the best first, if `top_n_tokens`
    asks for them. `sequence` is the number of its continuation (`n`). `prompt_tokens`, on any token, is the number of the
    prompt's tokens, for wires that report it; a model that is called with a session may set it there. `stop` is the stop
    sequence that ended the text, if `finish` is that reason.

    `data` are the token's own bytes, for tokens that `text` cannot express: a character of UTF-8 has up to four bytes, and a
    token may have only some of them. The gateway decodes them for each sequence, shows a character with the token that
    completes it, and ignores the `text` of a token with `data`. If a model's `parameters` have `stop_sequences`, it ends its
    texts itself: its `text` is shown, and its `data` are reported with log-probabilities.

    `thinking` marks a token of what the model thinks before it answers: it is counted, no stop sequence is met in it, and it
    is shown apart from the text, or not at all.
    """

    text: str
    id: int = 0
    log_prob: float | None = 0.0
    special: bool = False
    prefill: bool = False
    finish: FinishReason | None = None
    top: tuple[TopToken, ...] = ()
    sequence: int = 0
    prompt_tokens: int | None = None
    stop: str = ""
    data: bytes = b""
    thinking: bool = False


@final
class Finish(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The generation, or one `sequence` of it, is complete. It is optional: without it, a model that returns has finished
    with LENGTH after `max_new_tokens` tokens, and with EOS_TOKEN otherwise. `prompt_tokens` and `stop` are as on a token.
    `completion_tokens`, if it is set, is the number of the sequence's tokens, in place of those that were sent."""

    reason: FinishReason
    sequence: int = 0
    prompt_tokens: int | None = None
    stop: str = ""
    completion_tokens: int | None = None
