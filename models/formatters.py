"""Custom forms of text requests and answers: the objects of LMI's `@input_formatter` and `@output_formatter`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, final

import msgspec

from models.errors import ModelError
from models.messages import Token

InputFormatter: TypeAlias = Callable[..., Any]
OutputFormatter: TypeAlias = Callable[["TextGenerationOutput"], str]

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__everywire_formatter__"
_NONE: Mapping[str, Any] = MappingProxyType({})


def input_formatter(function: F) -> F:
    """Marks the function of a model folder's `model.py` that reads its requests. It is called with an Input, and with
    keyword arguments that it may ignore, and returns a TextInput. If it raises ModelError, that is the answer."""
    setattr(function, _MARK, "input")
    return function


def output_formatter(function: F) -> F:
    """Marks the function of a model folder's `model.py` that writes its answers. It is called with a TextGenerationOutput
    for each generated token, and returns the text to send now, which may be empty."""
    setattr(function, _MARK, "output")
    return function


def is_marked(thing: object) -> bool:
    """True if the object is a formatter."""
    return callable(thing) and bool(getattr(thing, _MARK, ""))


def marked(module: Mapping[str, Any]) -> tuple[InputFormatter | None, OutputFormatter | None]:
    """The formatters among the names of a module. ValueError if it has two of one kind."""
    found: dict[str, Callable[..., Any]] = {}
    for name, thing in module.items():
        kind = getattr(thing, _MARK, "") if callable(thing) else ""
        if not kind or found.get(kind) is thing:
            continue
        if kind in found:
            raise ValueError(f"two functions are marked @{kind}_formatter: {found[kind].__name__} and {name}")
        found[kind] = thing
    return found.get("input"), found.get("output")


@final
class Input:
    """A request as it came: its body, and its header fields as properties."""

    def __init__(
        self, content: bytes, properties: Mapping[str, str], *, decode: Callable[[bytes], Any] | None = None
    ) -> None:
        """`properties` have lower-case names. `decode` reads JSON within limits that its caller knows."""
        self.content = content
        self.properties = properties
        self._decode = decode or msgspec.json.decode

    def get_property(self, name: str) -> str | None:
        """The value of a field, by name in any case."""
        return self.properties.get(name.lower())

    def as_text(self) -> str:
        """The body as UTF-8. ModelError with status 424 if it is not."""
        try:
            return self.content.decode()
        except UnicodeDecodeError as e:
            raise ModelError(f"the body is not UTF-8: {e.reason} at byte {e.start}", code="BadInput", status=424) from None

    def as_json(self) -> Any:
        """The body as JSON. ModelError with status 424 if it is not, and with 400 if it exceeds a limit."""
        try:
            return self._decode(self.content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise ModelError(f"the body is not JSON: {str(e)[:200]}", code="BadInput", status=424) from None


class TextInput:
    """A request as its model should see it. The output formatter may read attributes of a subclass, and any other
    attributes. A subclass with its own `__init__`, such as a dataclass, need not call this one: it sets the attributes that
    it needs.

    `parameters` are read like those of the schema. `stream` is True if tokens are sent as they are generated.
    `output_formatter` is the name of a form (json, jsonlines, sse), or a function, for this request alone.
    """

    request_id: str = ""
    input_text: str = ""
    parameters: Mapping[str, Any] = _NONE
    stream: bool = True
    output_formatter: str | OutputFormatter | None = None

    def __init__(
        self,
        input_text: str = "",
        parameters: Mapping[str, Any] | None = None,
        *,
        stream: bool = True,
        output_formatter: str | OutputFormatter | None = None,
    ) -> None:
        self.input_text = input_text
        self.parameters = {} if parameters is None else parameters
        self.stream = stream
        self.output_formatter = output_formatter


@final
class TextSequence:
    """The tokens of one continuation, and an iterator over them."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        """All tokens so far."""
        self.cumulative_log_prob = 0.0
        self.finish_reason: str | None = None
        """`length`, `eos_token` or `stop_sequence` once the continuation is complete."""
        self._next = 0

    def has_next_token(self) -> bool:
        """True if there is a token that `get_next_token` has not returned yet."""
        return self._next < len(self.tokens)

    def get_next_token(self) -> tuple[Token, bool, bool]:
        """The next token, True if it is the first, and True if it is the last. IndexError if there is none."""
        token, first = self.tokens[self._next], not self._next
        self._next += 1
        return token, first, self.finish_reason is not None and self._next == len(self.tokens)

    def add(self, token: Token, finish_reason: str | None) -> None:
        """Adds a token, with the reason if it is the last one."""
        self.tokens.append(token)
        self.cumulative_log_prob += token.log_prob or 0.0
        self.finish_reason = finish_reason


@final
class TextGenerationOutput:
    """The output of a request so far."""

    def __init__(self, request_id: str, input: TextInput) -> None:
        self.request_id, self.input = request_id, input
        self.sequences: dict[int, TextSequence] = {}
        self.best_sequence_index = 0
        self.prompt_tokens_details: list[Token] = []
        """The prompt's tokens, if `decoder_input_details` asks for them."""

    @property
    def finished(self) -> bool:
        """True if every sequence is complete."""
        return bool(self.sequences) and all(s.finish_reason is not None for s in self.sequences.values())
