"""Tools, the pieces of a model's calls of them, and the formats that bind a text."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, final

import msgspec

_EMPTY: Mapping[str, Any] = MappingProxyType({})


class FinishReason(enum.Enum):
    """The reason why a generation ended."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"
    TOOL_CALLS = "tool_calls"
    """The model waits for the results of its calls. The gateway says it for a sequence that ended by itself after a
    ToolCall."""


@final
class ToolSpec(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A function that the client offers to call."""

    name: str
    """1 to 128 letters, digits, `.`, `_` and `-`."""
    description: str = ""
    parameters: Mapping[str, Any] = _EMPTY
    """The JSON Schema of its arguments, as the client wrote it. Empty: it takes none."""
    strict: bool = False
    """True if the client wishes that arguments follow the schema exactly. Clients set it by habit: it is a promise only of a
    model that declares `tool_choice`."""


@final
class ToolCall(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A piece of a call of a tool: what a model sends, and what a history has.

    `index` tells the calls of a sequence apart, from 0. The first piece of an index has the `name`, and may have the `id`:
    the gateway makes an id where it is empty. `arguments` is a part of the JSON text of the arguments. Those of all pieces,
    one after another, are the whole text, which is copied and never written anew. No arguments at all are `{}`.

    `tokens` are counted towards `max_new_tokens` and the usage; 0 if the model sends Tokens for them too. `finish` on the
    last piece ends the sequence, as on a token. `text` is what the model generated for this piece, for wires that have no
    place for calls. In a history, a call is one piece.
    """

    index: int = 0
    id: str = ""
    name: str = ""
    arguments: str = ""
    sequence: int = 0
    finish: FinishReason | None = None
    tokens: int = 1
    text: str = ""
    prompt_tokens: int | None = None
    """The number of the prompt's tokens, as on a token."""


FormatKind: TypeAlias = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


@final
class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The format that a text must have. A model that declares the `kind` in its `features` keeps it from the first character
    after its thinking to the end, unless the text ends with LENGTH or a stop sequence: the gateway checks no answer."""

    kind: FormatKind
    schema: Mapping[str, Any] | bool | None = None
    """`json_schema`: the schema, as the client wrote it."""
    pattern: str = ""
    """`regex`: the expression, which the whole text matches. `grammar`: the grammar."""
    choices: tuple[str, ...] = ()
    """`choice`: the text is one of these."""
    name: str = ""
    """The name that the client has for a schema."""
    strict: bool = False
    """The member `strict` beside a schema. The schema holds either way."""


TEXT_FEATURES = frozenset(
    (
        "tools", "tool_choice", "parallel_tools", "json_object", "json_schema", "regex", "choice", "grammar", "thinking",
        "images", "audio", "adapters", "prefill", "template",
    )
)  # fmt: skip
"""The names that a text model may have in its `features`: each is something that a request asks for."""
