"""Members of text requests that a client takes for a guarantee, on every wire: refused by name unless the model keeps them.

Each wire reads the members that it acts on itself, and keeps all others. `decide` tells what becomes of those, once the
model is known: a member of the table is refused if it asks for something that the answer would not have; a hint or a label
is passed over; any other member goes on to the model. A value that asks for nothing (null, an empty text, array or object,
false where only true asks) is as if absent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal, TypeAlias, final

import msgspec

from protocols.lmi.parameters import shown

Form: TypeAlias = Literal["chat", "completions", "own"]
"""The schema of a request: OpenAI's two, or one whose parameters are the model's own: LMI, TGI, v2 and sessions."""

Wish: TypeAlias = tuple[str, str, bool]
"""Something that a member asks for: the path to it, why it is refused, and True if it constrains the text."""


@final
class MemberRefused(Exception):
    """A member asks for what the answer would not have. `path` leads to it in the request; the message begins with it."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path, self.message = path, message


@final
class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """The members of a request after the judgement."""

    extra: Mapping[str, Any]
    """Those that go on to the model."""
    unknown: tuple[str, ...]
    """The names of those among them that nobody here knows."""


def decide(
    members: Mapping[str, Any],
    listed: Collection[str],
    model: str,
    form: Form,
    *,
    prefix: str = "",
    beside: Mapping[str, Any] | None = None,
) -> Decided:
    """Judges the members of a request that its wire does not act on. MemberRefused names the first that is refused; of
    those that constrain the text it names the last, as only one may.

    `listed` has the parameters that the model acts on. `prefix` comes before a member's name in its path. `beside` has
    further members, which never go on to the model.
    """
    extra: dict[str, Any] = {}
    unknown: list[str] = []
    asked: list[Wish] = []
    for name, value in members.items():
        rule = _RULES.get(name)
        if name in _HINTS:
            if form == "own":
                extra[name] = value
            else:
                asked += _mistyped(f"{prefix}{name}", value, *_HINTS[name])
        elif rule is None or form not in rule.forms:
            extra[name] = value
            unknown.append(name)
        elif rule.listed and name in listed:
            extra[name] = value
        else:
            asked += _asked(f"{prefix}{name}", rule, value, members, model)
    for name, value in ({} if beside is None else beside).items():
        if (rule := _RULES.get(name)) is not None and form in rule.forms:
            asked += _asked(name, rule, value, {} if beside is None else beside, model)
    if asked:
        constraints = [wish for wish in asked if wish[2]]
        path, why, _ = next(wish for wish in asked if not wish[2] or wish is constraints[-1])
        raise MemberRefused(path, f"{path}: {why}")
    return Decided(extra=extra, unknown=tuple(unknown))


def _asked(path: str, rule: _Rule, value: Any, beside: Mapping[str, Any], model: str) -> Iterator[Wish]:
    """The wishes of a member, with their whole paths and reasons."""
    named = f"model {model[:60]!r}"
    try:
        for below, why, constrains in rule.wishes(value, beside):
            yield path + below, why.replace("MODEL", named), constrains
    except _Wrong as wrong:
        yield path + wrong.below, wrong.message, False


def _mistyped(path: str, value: object, expected: str, types: tuple[type, ...]) -> Iterator[Wish]:
    if value is not None and not isinstance(value, types):
        yield path, f"expected {expected}, got {shown(value)}", False


# --- wishes of one member

_Wishes: TypeAlias = Callable[[Any, Mapping[str, Any]], Iterator[Wish]]
"""Yields the wishes of a member's value, in the order of the body; it also sees the members beside it. _Wrong for a value of
another type."""
_ALL: frozenset[Form] = frozenset(("chat", "completions", "own"))
_OPENAI: frozenset[Form] = frozenset(("chat", "completions"))
_UNLISTED = "MODEL does not list it in its parameters"
_NOT_OFFERED = "not offered, the models here read and write text alone"
_TOOLS = "not offered, tools have taken its place"
_LACKING = "not offered, the answer would lack it"


@final
class _Rule(msgspec.Struct, frozen=True):
    wishes: _Wishes
    forms: frozenset[Form] = _ALL
    listed: bool = False
    """True if a model that lists the member in its parameters gets it."""


def _undeclared(feature: str) -> str:
    return f"MODEL does not declare {feature}"


_FORMATS: Mapping[str, str] = {
    "json": "json_schema", "json_schema": "json_schema", "json_object": "json_object", "regex": "regex", "choice": "choice",
    "grammar": "grammar (in Lark's form)", "structural_tag": "grammar (in Lark's form)",
}  # fmt: skip
"""The kinds of constraint, by the names that requests have for them, and what a model would have to declare."""


def _is_nothing(value: object) -> bool:
    return value is None or value == "" or value == [] or value == {}


@final
class _Wrong(Exception):
    """A member is not what its schema says; `below` is the path below it."""

    def __init__(self, below: str, expected: str, value: object) -> None:
        super().__init__(below)
        self.below, self.message = below, f"expected {expected}, got {shown(value)}"


def _any(why: str, *, constrains: bool = False) -> _Wishes:
    """Each value is a wish, except an empty one."""

    def wishes(value: Any, _: Mapping[str, Any]) -> Iterator[Wish]:
        if not _is_nothing(value):
            yield "", why, constrains

    return wishes


def _except(why: str, *nothing: object) -> _Wishes:
    """Each value is a wish, except null and those in `nothing`: OpenAI's `web_search_options` of {} asks for a search."""

    def wishes(value: Any, _: Mapping[str, Any]) -> Iterator[Wish]:
        if value is not None and value not in nothing:
            yield "", why, False

    return wishes


def _flag(why: str, asks: bool = True, *, constrains: bool = False) -> _Wishes:
    """The boolean that asks is a wish; the other one is the state of things."""

    def wishes(value: Any, _: Mapping[str, Any]) -> Iterator[Wish]:
        if _is_nothing(value):
            return
        if not isinstance(value, bool):
            raise _Wrong("", "true or false", value)
        if value is asks:
            yield "", why, constrains

    return wishes


def _constraint(kind: str) -> _Wishes:
    return _any(_undeclared(_FORMATS[kind]), constrains=True)


def _format(value: Any, _: Mapping[str, Any]) -> Iterator[Wish]:
    """`response_format`: OpenAI's, and vLLM's and TGI's types."""
    if value is None:
        return
    if not isinstance(value, dict):
        raise _Wrong("", "an object", value)
    said = {name: member for name, member in value.items() if member is not None}
    if said == {"type": "text"}:
        return
    kind = said.get("type")
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise _Wrong(".type", f"text alone, or one of {', '.join(_FORMATS)}", kind)
    yield "", _undeclared(_FORMATS[kind]), True


def _format_in(value: Any, beside: Mapping[str, Any]) -> Iterator[Wish]:
    """`text` and `output_config`, as other routes have them: only their `format` asks for something."""
    if value is None:
        return
    if not isinstance(value, dict):
        raise _Wrong("", "an object", value)
    try:
        for below, why, constrains in _format(value.get("format"), beside):
            yield f".format{below}", why, constrains
    except _Wrong as wrong:
        wrong.below = f".format{wrong.below}"
        raise


def _structured_outputs(value: Any, beside: Mapping[str, Any]) -> Iterator[Wish]:
    if _is_nothing(value):
        return
    if not isinstance(value, dict):
        raise _Wrong("", "an object", value)
    for name, member in value.items():
        if not _is_nothing(member) and member is not False:
            if name in _FORMATS:
                yield f".{name}", _undeclared(_FORMATS[name]), True
            else:
                yield f".{name[:60]}", "not offered", False


def _grammar(value: Any, _: Mapping[str, Any]) -> Iterator[Wish]:
    """llama.cpp's is a text, TGI's an object with a type."""
    if _is_nothing(value):
        return
    if isinstance(value, str):
        yield "", _undeclared(_FORMATS["grammar"]), True
        return
    kind = value.get("type") if isinstance(value, dict) else value
    if not isinstance(kind, str) or kind not in ("json", "json_schema", "regex"):
        raise _Wrong(".type" if isinstance(value, dict) else "", "a text, or an object of type json or regex", kind)
    yield "", _undeclared(_FORMATS[kind]), True


def _adapters(value: Any, _: Mapping[str, Any]) -> Iterator[Wish]:
    if not _is_nothing(value) and not (isinstance(value, list) and all(map(_is_nothing, value))):
        yield "", _undeclared("adapters"), False


def _tools(choice: str, why: str) -> _Wishes:
    def wishes(value: Any, beside: Mapping[str, Any]) -> Iterator[Wish]:
        if value is None:
            return
        if not isinstance(value, list):
            raise _Wrong("", "an array", value)
        if value and beside.get(choice) != "none":  # otherwise they may not be called
            yield "", why, False

    return wishes


def _tool_choice(tools: str, why: str) -> _Wishes:
    def wishes(value: Any, beside: Mapping[str, Any]) -> Iterator[Wish]:
        if value is not None and value != "none" and not beside.get(tools):
            yield "", f"expected none where there are no {tools}: {why}", False

    return wishes


def _side(value: Any, _: Mapping[str, Any]) -> Iterator[Wish]:
    if not _is_nothing(value) and value != "left":
        yield "", "not offered, the end of a prompt is what is kept: left", False


_RULES: Mapping[str, _Rule] = {
    # constraints of the text
    "response_format": _Rule(_format),
    "text": _Rule(_format_in, _OPENAI),
    "output_config": _Rule(_format_in, _OPENAI),
    "structured_outputs": _Rule(_structured_outputs),
    **dict.fromkeys(("guided_json", "json_schema"), _Rule(_constraint("json"))),
    "guided_json_object": _Rule(_flag(_undeclared("json_object"), constrains=True)),
    "guided_choice": _Rule(_constraint("choice")),
    **dict.fromkeys(("guided_regex", "regex"), _Rule(_constraint("regex"))),
    **dict.fromkeys(("guided_grammar", "ebnf", "structural_tag"), _Rule(_constraint("grammar"))),
    "grammar": _Rule(_grammar),
    **dict.fromkeys(("whitespace_pattern", "guided_whitespace_pattern"), _Rule(_any("not offered"))),
    **dict.fromkeys(("disable_any_whitespace", "disable_additional_properties"), _Rule(_flag("not offered"))),
    # another model, another prompt
    **dict.fromkeys(("adapters", "adapter_id", "lora_path", "lora_id"), _Rule(_adapters)),
    "chat_template_kwargs": _Rule(_any(_undeclared("template"))),
    "chat_template": _Rule(_any("not offered, the model has its own")),
    "continue_final_message": _Rule(_flag(_undeclared("prefill"))),
    "add_generation_prompt": _Rule(_flag(_undeclared("prefill"), asks=False)),
    "truncation_side": _Rule(_side),
    "suffix": _Rule(_except(_NOT_OFFERED, ""), frozenset(("completions",))),
    "prompt_embeds": _Rule(_any(_NOT_OFFERED)),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), _Rule(_any(_NOT_OFFERED))),
    # how tokens are chosen: a model that acts on it lists it
    **dict.fromkeys(
        ("allowed_token_ids", "logits_processors", "custom_logit_processor", "repetition_detection", "documents",
         "stop_regex"),
        _Rule(_any(_UNLISTED), listed=True),
    ),
    **dict.fromkeys(("watermarking", "watermark", "use_beam_search"), _Rule(_flag(_UNLISTED), listed=True)),
    "echo": _Rule(_flag(_UNLISTED), frozenset(("chat",)), listed=True),
    # parts of the answer
    **dict.fromkeys(
        ("return_token_ids", "return_tokens_as_token_ids", "return_hidden_states"), _Rule(_flag(_LACKING))
    ),
    "logprob_token_ids": _Rule(_any(_LACKING)),
    "prompt_logprobs": _Rule(_any(_LACKING), _OPENAI),
    "separate_reasoning": _Rule(_flag("not offered, thinking is always apart", asks=False)),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), _Rule(_any("not offered"))),
    # other work of the server
    "tools": _Rule(_tools("tool_choice", _undeclared("tools"))),
    "tool_choice": _Rule(_tool_choice("tools", _undeclared("tools"))),
    "functions": _Rule(_tools("function_call", _TOOLS)),
    "function_call": _Rule(_tool_choice("functions", _TOOLS)),
    "modalities": _Rule(_except(_NOT_OFFERED, [], ["text"])),
    **dict.fromkeys(("moderation", "audio", "web_search_options"), _Rule(_except(_NOT_OFFERED))),
    **dict.fromkeys(("fallbacks", "mcp_servers", "container"), _Rule(_any(_NOT_OFFERED))),
}  # fmt: skip
"""The members that ask for more than a text."""


# --- hints and labels

_HINTS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    **dict.fromkeys(("include_reasoning", "parallel_tool_calls", "store"), ("true or false", (bool,))),
    **dict.fromkeys(
        ("metadata", "client_metadata", "prediction", "prompt_cache_options", "cache_control"), ("an object", (dict,))
    ),
    **dict.fromkeys(("context_management", "diagnostics"), ("an object or an array", (dict, list))),
    **dict.fromkeys(
        ("guided_decoding_backend", "inference_geo", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort",
         "safety_identifier", "service_tier", "speed", "user", "verbosity"),
        ("a string", (str,)),
    ),
}  # fmt: skip
"""Hints and labels of OpenAI's schemas, with their types: an answer without their effect is no worse. A type that is wrong
is refused, because its sender expects an effect. A schema whose parameters are the model's own passes them on."""
