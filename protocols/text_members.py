"""Members of text requests that a client takes for a guarantee, on every wire: a model that declares them gets them.

Each wire reads the members that it acts on itself, and keeps all others. `decide` tells what becomes of those, once the
model is known. A member of the table that asks for something is acted on if the model declares the feature, or lists the
member in its parameters; otherwise it is refused, because the answer would not have it. A hint or a label is passed over;
any other member goes on to the model. A value that asks for nothing (null, an empty text, array or object, false where only
true asks) is as if absent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, final

import msgspec

from protocols.json.schema import LARGEST, SchemaError, check_schema, is_larger
from protocols.json.strict import JSONError, loads
from protocols.lmi.parameters import shown

Form: TypeAlias = Literal["chat", "completions", "own"]
"""The schema of a request: OpenAI's two, or one whose parameters are the model's own: LMI, TGI, v2 and sessions."""

Kind: TypeAlias = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


@final
class MemberRefused(Exception):
    """A member asks for what the answer would not have. `path` leads to it in the request; the message begins with it."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path, self.message = path, message


@final
class Format(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The format that a request asks of the text."""

    kind: Kind
    schema: dict[str, Any] | bool | None = None
    pattern: str = ""
    choices: tuple[str, ...] = ()
    name: str = ""
    strict: bool = False


@final
class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """The members of a request after the judgement."""

    extra: Mapping[str, Any] = MappingProxyType({})
    """Those that go on to the model."""
    unknown: tuple[str, ...] = ()
    """The names of those among them that nobody here knows."""
    format: Format | None = None
    adapter: str = ""
    template: Mapping[str, Any] = MappingProxyType({})
    """The client's values for the chat template."""
    prefill: bool = False
    """True if the last message of a chat is to be continued."""


NOTHING = Decided()
"""The judgement of a request that has none of these members."""


@final
class _Wish(msgspec.Struct, frozen=True, gc=False):
    """Something that a member asks for."""

    base: str
    """The path to the member."""
    below: str
    """The path below it."""
    why: str
    """The reason for a refusal."""
    feature: str = ""
    """A model that declares it gets what is asked. Empty: none does."""
    field: str = ""
    """The field of `Decided` that tells it. A format constrains the text, and only one may."""
    make: Callable[[], Any] | None = None
    """Makes the field's value. _Wrong if the member's value is not what its schema says."""


def decide(
    members: Mapping[str, Any],
    listed: Collection[str],
    model: str,
    form: Form,
    *,
    features: Collection[str] = (),
    judges: bool = False,
    prefix: str = "",
    beside: Mapping[str, Any] | None = None,
) -> Decided:
    """Judges the members of a request that its wire does not act on. MemberRefused names the first that is refused; of
    those that constrain the text it names the last, as only one may.

    `listed` has the parameters that the model acts on, `features` what else it declares. `judges`: the model judges formats
    itself, so schemas are not checked. `prefix` comes before a member's name in its path. `beside` has further members,
    which never go on to the model.
    """
    extra: dict[str, Any] = {}
    unknown: list[str] = []
    asked: list[_Wish] = []
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
            asked += _asked(f"{prefix}{name}", rule, value, members)
    for name, value in ({} if beside is None else beside).items():
        if (rule := _RULES.get(name)) is not None and form in rule.forms:
            asked += _asked(name, rule, value, {} if beside is None else beside)
    if not asked:
        return Decided(extra=extra, unknown=tuple(unknown)) if extra else NOTHING
    found = _granted(asked, features, model, form, judges)
    return Decided(extra=extra, unknown=tuple(unknown), **found)


def _granted(asked: list[_Wish], features: Collection[str], model: str, form: Form, judges: bool) -> dict[str, Any]:
    """The fields of `Decided` that the wishes give. MemberRefused for one that is not granted."""
    constraints = [wish for wish in asked if wish.field == "format"]
    found: dict[str, Any] = {}
    for wish in asked:
        if wish.field == "format" and wish is not constraints[-1]:
            continue
        if wish.feature not in features:
            raise _refused(wish, wish.why.replace("MODEL", f"model {model[:60]!r}"))
        if wish.feature in _OF_CHATS and form != "chat":
            raise _refused(wish, "not offered here: expected messages, which make a chat of the request")
        if wish.field == "format" and len(constraints) > 1:
            raise _refused(wish, f"expected one format, got {constraints[0].base}{constraints[0].below} too")
        if wish.make is None:
            continue
        try:
            value = wish.make()
            if isinstance(value, _Schema):
                value = value.format if judges else _checked(value)
        except _Wrong as wrong:
            raise _refused(wish, wrong.message, wrong.below) from None
        if found.setdefault(wish.field, value) != value:
            raise _refused(wish, f"expected what another member says of the {wish.field}, or one of the two alone")
    return found


def _refused(wish: _Wish, why: str, below: str | None = None) -> MemberRefused:
    path = f"{wish.base}{wish.below if below is None else below}"
    return MemberRefused(path, f"{path}: {why}")


def _asked(path: str, rule: _Rule, value: Any, beside: Mapping[str, Any]) -> Iterator[_Wish]:
    """The wishes of a member, with the path to it."""
    try:
        for wish in rule.wishes(value, beside):
            yield msgspec.structs.replace(wish, base=path)
    except _Wrong as wrong:
        yield _Wish(path, wrong.below, wrong.message)


def _mistyped(path: str, value: object, expected: str, types: tuple[type, ...]) -> Iterator[_Wish]:
    if value is not None and not isinstance(value, types):
        yield _Wish(path, "", f"expected {expected}, got {shown(value)}")


# --- wishes of one member

_Wishes: TypeAlias = Callable[[Any, Mapping[str, Any]], Iterator[_Wish]]
"""Yields the wishes of a member's value, in the order of the body; it also sees the members beside it. _Wrong for a value of
another type."""
_ALL: frozenset[Form] = frozenset(("chat", "completions", "own"))
_OPENAI: frozenset[Form] = frozenset(("chat", "completions"))
_OF_CHATS = frozenset(("tools", "prefill"))  # features that a text without messages has no place for
_UNLISTED = "MODEL does not list it in its parameters"
_NOT_OFFERED = "not offered, the models here read and write text alone"
_TOOLS = "not offered, tools have taken its place"
_LACKING = "not offered, the answer would lack it"
_CHOICES = 1024  # texts of a choice
_OF_A_TEXT = 8192  # arrays and objects of a schema that comes as a text: nobody has paid for them


@final
class _Rule(msgspec.Struct, frozen=True):
    wishes: _Wishes
    forms: frozenset[Form] = _ALL
    listed: bool = False
    """True if a model that lists the member in its parameters gets it."""


def _undeclared(feature: str) -> str:
    return f"MODEL does not declare {feature}"


_FORMATS: Mapping[str, Kind] = {
    "json": "json_schema", "json_schema": "json_schema", "json_object": "json_object", "regex": "regex", "choice": "choice",
    "grammar": "grammar", "structural_tag": "grammar",
}  # fmt: skip
"""The kinds of constraint, by the names that requests have for them."""


def _is_nothing(value: object) -> bool:
    return value is None or value == "" or value == [] or value == {}


@final
class _Wrong(Exception):
    """A member is not what its schema says; `below` is the path below it."""

    def __init__(self, below: str, message: str) -> None:
        super().__init__(below)
        self.below, self.message = below, message


def _wrong(below: str, expected: str, value: object) -> _Wrong:
    return _Wrong(below, f"expected {expected}, got {shown(value)}")


def _any(why: str) -> _Wishes:
    """Each value is a wish, except an empty one."""

    def wishes(value: Any, _: Mapping[str, Any]) -> Iterator[_Wish]:
        if not _is_nothing(value):
            yield _Wish("", "", why)

    return wishes


def _except(why: str, *nothing: object) -> _Wishes:
    """Each value is a wish, except null and those in `nothing`: OpenAI's `web_search_options` of {} asks for a search."""

    def wishes(value: Any, _: Mapping[str, Any]) -> Iterator[_Wish]:
        if value is not None and value not in nothing:
            yield _Wish("", "", why)

    return wishes


def _flag(why: str, asks: bool = True, *, feature: str = "", field: str = "") -> _Wishes:
    """The boolean that asks is a wish; the other one is the state of things."""

    def wishes(value: Any, _: Mapping[str, Any]) -> Iterator[_Wish]:
        if _is_nothing(value):
            return
        if not isinstance(value, bool):
            raise _wrong("", "true or false", value)
        if value is asks:
            yield _Wish("", "", why, feature, field, lambda: True)

    return wishes


# --- formats


@final
class _Schema(msgspec.Struct, frozen=True, gc=False):
    """A format by a schema, and the path to the schema."""

    format: Format
    below: str


def _checked(made: _Schema) -> Format:
    """The format, if an answer can be held to its schema."""
    schema = made.format.schema
    assert isinstance(schema, dict | bool)
    try:
        check_schema(schema)
    except SchemaError as e:
        raise _Wrong(made.below + e.below, e.message) from None
    return made.format


def _wish_of(kind: Kind, below: str, make: Callable[[], Any]) -> _Wish:
    lark = " (in Lark's form)" if kind == "grammar" else ""
    return _Wish("", below, _undeclared(kind) + lark, kind, "format", make)


def _schema(value: Any, below: str, name: str = "", *, strict: bool = False) -> _Schema:
    """The format of a schema, which may be a text of JSON."""
    if isinstance(value, str):
        if len(value) > LARGEST:
            raise _wrong(below, f"a schema of at most {LARGEST} characters", value)
        try:
            value = loads(value.encode(errors="replace"), what="the schema", containers=_OF_A_TEXT, values=8 * _OF_A_TEXT)
        except JSONError:
            raise _wrong(below, "a schema, or its JSON as a text", value) from None
    if not isinstance(value, dict | bool):
        raise _wrong(below, "a schema", value)
    if is_larger(value):
        raise _wrong(below, f"a schema of at most {LARGEST} characters", value)
    return _Schema(Format(kind="json_schema", schema=value, name=name, strict=strict), below)


def _pattern(kind: Kind, value: Any, below: str) -> Format:
    if isinstance(value, dict) and kind == "grammar":  # vLLM's structural tags
        value = msgspec.json.encode(value).decode() if not is_larger(value) else None
    if not isinstance(value, str) or not value or len(value) > LARGEST:
        raise _wrong(below, f"a text of 1 to {LARGEST} characters", value)
    return Format(kind=kind, pattern=value)


def _choice(value: Any, below: str) -> Format:
    if not isinstance(value, list) or not 0 < len(value) <= _CHOICES or is_larger(value):
        raise _wrong(below, f"an array of 1 to {_CHOICES} texts", value)
    for at, text in enumerate(value):
        if not isinstance(text, str) or not text:
            raise _wrong(f"{below}[{at}]", "a text that is not empty", text)
    return Format(kind="choice", choices=tuple(value))


def _made(kind: Kind, value: Any, below: str) -> Callable[[], Any]:
    match kind:
        case "json_schema":
            return lambda: _schema(value, below)
        case "json_object":
            return lambda: Format(kind="json_object")
        case "choice":
            return lambda: _choice(value, below)
        case _:
            return lambda: _pattern(kind, value, below)


def _constraint(name: str) -> _Wishes:
    def wishes(value: Any, _: Mapping[str, Any]) -> Iterator[_Wish]:
        if not _is_nothing(value):
            yield _wish_of(_FORMATS[name], "", _made(_FORMATS[name], value, ""))

    return wishes


_JSON_OBJECT: _Wishes = _flag(_undeclared("json_object"), feature="json_object", field="format")


def _json_object(value: Any, beside: Mapping[str, Any]) -> Iterator[_Wish]:
    for wish in _JSON_OBJECT(value, beside):
        yield msgspec.structs.replace(wish, make=_made("json_object", value, ""))


def _format(value: Any, _: Mapping[str, Any]) -> Iterator[_Wish]:
    """`response_format`: OpenAI's, and vLLM's and TGI's types."""
    yield from _format_at(value, "")


def _format_at(value: Any, below: str) -> Iterator[_Wish]:
    if value is None:
        return
    if not isinstance(value, dict):
        raise _wrong(below, "an object", value)
    said = {name: member for name, member in value.items() if member is not None}
    if said == {"type": "text"}:
        return
    kind = said.get("type")
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise _wrong(f"{below}.type", f"text alone, or one of {', '.join(_FORMATS)}", kind)
    if kind == "json_object" and not _is_nothing(said.get("schema")):  # llama.cpp's: more than any object
        yield _wish_of("json_schema", below, lambda: _schema(said["schema"], f"{below}.schema"))
        return
    yield _wish_of(_FORMATS[kind], below, lambda: _format_of(kind, said, below))


def _format_of(kind: str, said: dict[str, Any], below: str) -> Any:
    """The format that an object with a `type` tells: its value stands beside that, by one of several names."""
    if kind == "json_schema":
        return _named_schema(said, below)
    if kind == "structural_tag":
        return _pattern("grammar", {name: member for name, member in said.items() if name != "type"} or said, below)
    names = (kind, "value", "pattern", "choices", "schema")
    name = next((name for name in names if name in said), "value")
    return _made(_FORMATS[kind], said.get(name), f"{below}.{name}")()


def _named_schema(said: dict[str, Any], below: str) -> _Schema:
    """OpenAI's: nested in a chat, flat in a response; TGI's has a `value`."""
    if "value" in said:
        return _schema(said["value"], f"{below}.value")
    if "json_schema" in said:
        said, below = said["json_schema"], f"{below}.json_schema"
        if not isinstance(said, dict):
            raise _wrong(below, "an object", said)
    name, strict = said.get("name"), said.get("strict")
    if name is not None and not isinstance(name, str):
        raise _wrong(f"{below}.name", "a string", name)
    if strict is not None and not isinstance(strict, bool):
        raise _wrong(f"{below}.strict", "true or false", strict)
    return _schema(said.get("schema"), f"{below}.schema", (name or "")[:256], strict=bool(strict))


def _format_in(value: Any, _: Mapping[str, Any]) -> Iterator[_Wish]:
    """`text` and `output_config`, as other routes have them: only their `format` asks for something."""
    if value is None:
        return
    if not isinstance(value, dict):
        raise _wrong("", "an object", value)
    yield from _format_at(value.get("format"), ".format")


def _structured_outputs(value: Any, _: Mapping[str, Any]) -> Iterator[_Wish]:
    if _is_nothing(value):
        return
    if not isinstance(value, dict):
        raise _wrong("", "an object", value)
    for name, member in value.items():
        if not _is_nothing(member) and member is not False:
            if name in _FORMATS:
                kind = _FORMATS[name]
                yield _wish_of(kind, f".{name}", _made(kind, member, f".{name}"))
            else:
                yield _Wish("", f".{name[:60]}", "not offered")


def _grammar(value: Any, _: Mapping[str, Any]) -> Iterator[_Wish]:
    """llama.cpp's is a text, TGI's an object with a type."""
    if _is_nothing(value):
        return
    if isinstance(value, str):
        yield _wish_of("grammar", "", _made("grammar", value, ""))
        return
    kind = value.get("type") if isinstance(value, dict) else value
    if not isinstance(kind, str) or kind not in ("json", "json_schema", "regex"):
        raise _wrong(".type" if isinstance(value, dict) else "", "a text, or an object of type json or regex", kind)
    yield _wish_of(_FORMATS[kind], "", _made(_FORMATS[kind], value.get("value"), ".value"))


# --- other members


def _adapters(value: Any, _: Mapping[str, Any]) -> Iterator[_Wish]:
    if not _is_nothing(value) and not (isinstance(value, list) and all(map(_is_nothing, value))):
        yield _Wish("", "", _undeclared("adapters"), "adapters", "adapter", lambda: _adapter(value))


def _adapter(value: Any) -> str:
    name = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(name, str) or len(name) > 1024:
        raise _wrong("", "the name of one adapter", value)
    return name


def _template(value: Any, _: Mapping[str, Any]) -> Iterator[_Wish]:
    if not _is_nothing(value):
        yield _Wish("", "", _undeclared("template"), "template", "template", lambda: _object(value))


def _object(value: Any) -> Any:
    if not isinstance(value, dict):
        raise _wrong("", "an object", value)
    return value


def _tools(choice: str, why: str, feature: str = "") -> _Wishes:
    def wishes(value: Any, beside: Mapping[str, Any]) -> Iterator[_Wish]:
        if value is None:
            return
        if not isinstance(value, list):
            raise _wrong("", "an array", value)
        if value and beside.get(choice) != "none":  # otherwise they may not be called
            yield _Wish("", "", why, feature)

    return wishes


def _tool_choice(tools: str, why: str) -> _Wishes:
    """A choice beside tools; its value is read with them."""

    def wishes(value: Any, beside: Mapping[str, Any]) -> Iterator[_Wish]:
        if value is None or value == "none":
            return
        if not beside.get(tools):
            yield _Wish("", "", f"expected none where there are no {tools}: {why}")
        elif value != "auto" and tools == "tools":
            yield _Wish("", "", _undeclared("tool_choice"), "tool_choice")

    return wishes


def _side(value: Any, _: Mapping[str, Any]) -> Iterator[_Wish]:
    if not _is_nothing(value) and value != "left":
        yield _Wish("", "", "not offered, the end of a prompt is what is kept: left")


_RULES: Mapping[str, _Rule] = {
    # constraints of the text
    "response_format": _Rule(_format),
    "text": _Rule(_format_in, _OPENAI),
    "output_config": _Rule(_format_in, _OPENAI),
    "structured_outputs": _Rule(_structured_outputs),
    **dict.fromkeys(("guided_json", "json_schema"), _Rule(_constraint("json"))),
    "guided_json_object": _Rule(_json_object),
    "guided_choice": _Rule(_constraint("choice")),
    **dict.fromkeys(("guided_regex", "regex"), _Rule(_constraint("regex"))),
    **dict.fromkeys(("guided_grammar", "ebnf", "structural_tag"), _Rule(_constraint("grammar"))),
    "grammar": _Rule(_grammar),
    **dict.fromkeys(("whitespace_pattern", "guided_whitespace_pattern"), _Rule(_any("not offered"))),
    **dict.fromkeys(("disable_any_whitespace", "disable_additional_properties"), _Rule(_flag("not offered"))),
    # another model, another prompt
    **dict.fromkeys(("adapters", "adapter_id", "lora_path", "lora_id"), _Rule(_adapters)),
    "chat_template_kwargs": _Rule(_template),
    "chat_template": _Rule(_any("not offered, the model has its own")),
    "continue_final_message": _Rule(_flag(_undeclared("prefill"), feature="prefill", field="prefill")),
    "add_generation_prompt": _Rule(
        _flag(_undeclared("prefill"), asks=False, feature="prefill", field="prefill")
    ),
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
    "tools": _Rule(_tools("tool_choice", _undeclared("tools"), "tools")),
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
