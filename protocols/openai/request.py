"""Requests of OpenAI's API for chat completions and completions: reads and checks the document."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Mapping
from types import MappingProxyType
from typing import Any, final

import msgspec

from protocols.lmi.errors import LMIError
from protocols.lmi.parameters import Parameters, read_parameters
from protocols.openai.conversation import Message, Tool, media_of, read_messages, read_tool_choice, read_tools
from protocols.openai.errors import OpenAIError
from protocols.openai.members import boolean, error, get, object_of, refuse_value, string

MAX_CHOICES = 128
"""OpenAI's limit of `n`. Here it limits all choices of an answer, those of several prompts together."""


@final
class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation to continue, with `n` choices. `model` is empty if the request names none."""

    messages: tuple[Message, ...]
    model: str = ""
    parameters: Parameters = Parameters()
    given: Mapping[str, str] = MappingProxyType({})
    """The parameters that the request changes from their defaults: their names in `parameters`, each with the member of the
    request. `max_new_tokens` is always in it if the request gives it."""
    stream: bool = False
    include_usage: bool = False
    """True if a stream must end with a chunk that counts the tokens."""
    continuous_usage: bool = False
    """True if each chunk of a stream counts the tokens so far."""
    logprobs: bool = False
    top_logprobs: int = 0
    n: int = 1
    media: int = 0
    """The characters of base64 in its messages: three bytes come of each four."""
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    """`auto`, `none`, `required`, or the name of a tool."""
    parallel_tool_calls: bool = True
    effort: str = ""
    """`reasoning_effort`: a hint."""
    include_reasoning: bool = True
    """False if thinking is not to be shown."""


@final
class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts to continue, each with `n` choices. The choice of prompt `p` and sequence `s` has the index `p * n + s`."""

    prompts: tuple[str, ...]
    model: str = ""
    parameters: Parameters = Parameters()
    given: Mapping[str, str] = MappingProxyType({})
    """The parameters that the request changes from their defaults: their names in `parameters`, each with the member of the
    request. `max_new_tokens` is always in it if the request gives it."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    """True if the text begins with the prompt."""
    logprobs: int | None = None
    """How many of the most probable tokens of each step are reported. 0: only the chosen one. None: none."""
    n: int = 1

    @property
    def shows_prompt(self) -> bool:
        """True if the log-probabilities begin with those of the prompt's tokens."""
        return self.echo and self.logprobs is not None


def parse_chat(
    document: Mapping[str, Any], *, max_tokens: int = 0, features: Collection[str] = (), model: str = ""
) -> ChatRequest:
    """Reads the document of a request for a chat completion. OpenAIError, of status 400, if it cannot be served.

    `max_tokens` is the default if the request has neither `max_completion_tokens` nor `max_tokens`; 0: no limit. A null
    member counts as absent. All members that are not read here are in `parameters.extra`: `protocols.text_members` tells
    which of them may go on to the model. `features` are those that `model` declares: images, sound and calls of tools in
    messages are refused by name unless they are among them.
    """
    messages = read_messages(document.get("messages"), features, model)
    tools = read_tools(document.get("tools")) if "tools" in features else ()
    choice = read_tool_choice(document.get("tool_choice"), tools) if tools else "auto"
    streamed = _stream(document)
    logprobs = get(document, "logprobs", boolean, False)
    parameters, given = _parameters(document, _CHAT, max_tokens)
    if parameters.top_n_tokens and not logprobs:
        raise error("top_logprobs", "top_logprobs: expected only where logprobs is true")
    parameters = msgspec.structs.replace(parameters, extra=_extra(document, _CHAT_KNOWN))
    return ChatRequest(
        messages=messages,
        model=model_of(document),
        parameters=parameters,
        given=given,
        **streamed,
        logprobs=logprobs,
        top_logprobs=parameters.top_n_tokens,
        n=parameters.n,
        media=media_of(messages),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=document.get("parallel_tool_calls") is not False,
        effort=effort if isinstance(effort := document.get("reasoning_effort"), str) else "",
        include_reasoning=document.get("include_reasoning") is not False,
    )


def parse_completion(
    document: Mapping[str, Any], *, max_tokens: int = 16, max_choices: int = MAX_CHOICES
) -> CompletionRequest:
    """Reads the document of a request for completions. OpenAIError, of status 400, if it cannot be served.

    `max_tokens` is the default if the request gives none, 0: no limit; OpenAI's own is 16. The request's may be 0: the
    prompt alone is taken in. With `echo` and `logprobs` the model is asked for the prompt's tokens, each with as many
    alternatives. `logprobs` true is 1. Null and unknown members are treated as in `parse_chat`.
    """
    if isinstance(asked := document.get("logprobs"), bool):
        document = {**document, "logprobs": 1 if asked else None}
    prompts = _prompts(document.get("prompt"))
    streamed = _stream(document)
    echo = get(document, "echo", boolean, False)
    parameters, given = _parameters(document, _COMPLETION, max_tokens, may_be_0=True)
    _check_choices(len(prompts), parameters, streamed["stream"], max_choices)
    logprobs = None if document.get("logprobs") is None else parameters.top_n_tokens
    if echo and logprobs is not None:  # `shows_prompt`
        parameters = msgspec.structs.replace(parameters, decoder_input_details=True, prompt_logprobs=logprobs)
        given["decoder_input_details"] = "echo"
        if logprobs:
            given["prompt_logprobs"] = "echo"
    parameters = msgspec.structs.replace(parameters, extra=_extra(document, _COMPLETION_KNOWN))
    return CompletionRequest(
        prompts=prompts,
        model=model_of(document),
        parameters=parameters,
        given=given,
        **streamed,
        echo=echo,
        logprobs=logprobs,
        n=parameters.n,
    )


# --- the members


def model_of(document: Mapping[str, Any]) -> str:
    """The model that a request of either kind names; empty if it names none. OpenAIError if it is not a string."""
    return get(document, "model", string, "")


def _stream(document: Mapping[str, Any]) -> dict[str, bool]:
    """The flags of a stream: itself, usage at its end, and vLLM's usage in each chunk."""
    stream = get(document, "stream", boolean, False)
    options = get(document, "stream_options", object_of, None)
    if options is None:
        return {"stream": stream}
    if not stream:  # OpenAI and vLLM refuse it too
        raise error("stream_options", "stream_options: expected only where stream is true")
    asked = {
        name: (value := options.get(name)) is not None and boolean(f"stream_options.{name}", value)
        for name in ("include_usage", "continuous_usage_stats", "include_obfuscation")
    }
    return {
        "stream": stream,
        "include_usage": asked["include_usage"],
        "continuous_usage": asked["continuous_usage_stats"],
    }


def _prompts(value: object) -> tuple[str, ...]:
    prompts = value if isinstance(value, list) else [value]
    if not prompts:
        refuse_value("prompt", "a non-empty string or an array of them", value)
    for prompt in prompts:
        if prompts is value and isinstance(prompt, int | list):
            raise error("prompt", "prompt: expected text, got token ids, which are not offered")
        if not isinstance(prompt, str) or not prompt:
            refuse_value("prompt", "a non-empty string or an array of them", prompt)
    return tuple(prompts)


def _check_choices(prompts: int, parameters: Parameters, stream: bool, max_choices: int) -> None:
    n, best_of = parameters.n, parameters.best_of
    if prompts * n > max_choices:
        raise error("prompt", f"prompt: expected at most {max_choices} choices in all, got {prompts} prompts with n {n}")
    if stream and best_of > n:  # OpenAI: "Results cannot be streamed."
        raise error("best_of", f"best_of: expected n ({n}) in a stream, which cannot wait for the best, got {best_of}")


def _extra(document: Mapping[str, Any], known: Container[str]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in known and value is not None}


# --- the parameters of generation

# OpenAI's members, and vLLM's additions, with their names in Parameters.
_COMMON: Mapping[str, str] = {
    "max_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "n": "n",
    "seed": "seed",
    "stop": "stop_sequences",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_length",
    "ignore_eos": "ignore_eos_token",
    "stop_token_ids": "stop_token_ids",
    "include_stop_str_in_output": "include_stop_str_in_output",
    "bad_words": "bad_sequences",
    "truncate_prompt_tokens": "truncate",
    "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens",
}
_CHAT: Mapping[str, str] = {"max_completion_tokens": "max_new_tokens", **_COMMON, "top_logprobs": "top_n_tokens"}
_COMPLETION: Mapping[str, str] = {**_COMMON, "best_of": "best_of", "logprobs": "top_n_tokens"}

_SHARED = {"model", "stream", "stream_options"}
_CHAT_KNOWN = _SHARED.union({"messages", "logprobs"}, _CHAT)
_COMPLETION_KNOWN = _SHARED.union({"prompt", "echo"}, _COMPLETION)

# The defaults that differ from LMI's: one choice whatever best_of is, and a text without its stop sequence.
_NO_LIMIT = 2**31 - 1
_DEFAULTS: Mapping[str, Any] = {"n": 1, "include_stop_str_in_output": False}
_NEUTRAL: Mapping[str, Any] = {**msgspec.structs.asdict(Parameters()), **_DEFAULTS}


def _parameters(
    document: Mapping[str, Any], table: Mapping[str, str], max_tokens: int, *, may_be_0: bool = False
) -> tuple[Parameters, dict[str, str]]:
    """The parameters, and those of them that the request changes from their defaults. Clients also send neutral values: a
    model that knows no penalty need not refuse one of 0. `may_be_0`: the request may ask for no token."""
    names: dict[str, str] = {}
    values: dict[str, Any] = {**_DEFAULTS, "max_new_tokens": max_tokens or _NO_LIMIT}
    for name, field in table.items():
        value = document.get(name)
        if value is None:
            continue
        if field in names and values[field] != value:  # max_tokens and max_completion_tokens
            refuse_value(name, f"what {names[field]} says, or one of the two alone", value)
        names[field], values[field] = name, value
    _check_range(values, "temperature", 2)
    _check_range(values, "top_p", 1)
    # OpenAI's range of top_p includes 0: the nucleus without mass is the most probable token.
    greedy = values.get("top_p") == 0
    parameters = _read({**values, "do_sample": not greedy, **({"top_p": 1} if greedy else {})}, names, may_be_0)
    given = {
        field: name
        for field, name in names.items()
        if field == "max_new_tokens" or getattr(parameters, field) != _NEUTRAL[field]
    }
    return parameters, given


def _check_range(values: Mapping[str, Any], name: str, high: int) -> None:
    """Checks OpenAI's ranges where they differ from LMI's."""
    value = values.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= high:
        refuse_value(name, f"a number from 0 to {high}", value)


def _read(values: Mapping[str, Any], names: Mapping[str, str], may_be_0: bool) -> Parameters:
    """Reads the values with LMI's reader, whose ranges hold here too. Its errors name the members of this document."""
    try:
        return read_parameters(values, may_be_0=may_be_0)[0]
    except LMIError as error:
        message = re.sub(r"parameters\.(\w+)", lambda match: names.get(match[1], match[1]), error.message)
        raise OpenAIError(message, param=re.split(r"[.:]", message, maxsplit=1)[0]) from None
