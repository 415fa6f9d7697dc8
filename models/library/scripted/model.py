"""The scripted model: what it says to a prompt, by its own rules or by the turns of a user's script."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, ClassVar, Final, TypeAlias, final

from msgspec import structs

from models.blocking import run_step, running_loop
from models.chat import plain_template
from models.errors import ModelError
from models.library.lm.parameters import delay_seconds
from models.library.scripted.documents import STEPS, document_of
from models.library.scripted.patterns import Automaton, CannotMake, Work, text_of
from models.messages import ChatMessage, Finish, Image, Prompt, ResponseFormat, Sound, Text, Token, ToolCall, ToolSpec

Spoken: TypeAlias = Token | ToolCall | Finish
Turn: TypeAlias = str | Spoken | Mapping[str, Any] | Sequence[str | Spoken | Mapping[str, Any]]
"""A turn of a script: a text, which is sent word by word; a message as it is; a call of a tool, as a dict of its `name`,
`arguments` (a dict, or a JSON text) and `id`; thinking, as a dict of `thinking` and its text; or several of these."""

FEATURES: Final = frozenset(
    (
        "tools", "tool_choice", "parallel_tools", "json_object", "json_schema", "regex", "choice", "thinking", "images",
        "audio", "adapters", "prefill", "template",
    )
)  # fmt: skip

_READ = 16_384
"""The most characters of a text in which names are looked for, and of one that is continued."""
_QUOTED = 200
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

# Pieces of bounded length, without a search that goes far back.
_WORD = re.compile(r"\s{0,32}\S{1,32}|\s{1,32}")
_OF_JSON = re.compile(r"\w{1,16}|\W", re.DOTALL)


@final
class Scripted:
    """Answers prompts (family TEXT) without weights, always the same way. It declares every feature except grammars.

    Without `turns` it thinks first if the request asks for that. Then it sends a document in the request's format; or calls
    the tools that the last user message names, or else the first tool; or quotes the results of its calls; or repeats the
    last user message. Arguments and documents are made from their schemas (`models.library.scripted.documents`). ModelError
    with status 400 if that fails: it names the keyword.

    With `turns` it sends the turn whose number is that of the assistant's messages in the conversation. A turn may also be a
    function of the Prompt, sync or async, that returns such a turn. ModelError after the last turn. TypeError for turns of
    other kinds.

    `remember` is the number of last prompts that it keeps in `prompts`. The extra parameter `delay_ms` of a request is the
    time before each message.
    """

    features: ClassVar[frozenset[str]] = FEATURES
    parameters: ClassVar[frozenset[str]] = frozenset(("max_new_tokens", "limited", "seed", "delay_ms"))

    def __init__(self, turns: Sequence[Turn | Callable[[Prompt], Any]] | None = None, *, remember: int = 0) -> None:
        if isinstance(turns, str) or not isinstance(turns, Sequence | None):
            raise TypeError(f"turns: expected a list of turns, got {type(turns).__name__}")
        self._turns = None if turns is None else tuple(turns)
        for number, turn in enumerate(self._turns or (), 1):
            if not callable(turn):
                _check_turn(turn, f"turn {number}")
        self.prompts: deque[Prompt] = deque(maxlen=remember)
        """The last prompts, the newest at the end."""

    async def __call__(self, prompt: Prompt) -> AsyncIterator[Spoken]:
        self.prompts.append(prompt)
        delay = delay_seconds(prompt.parameters)
        for number, message in enumerate(await self._answer(prompt)):
            if delay:
                await running_loop().sleep(delay)
            yield structs.replace(message, id=number) if type(message) is Token and not message.id else message

    async def _answer(self, prompt: Prompt) -> Iterable[Spoken]:
        if self._turns is None:
            return await _own_answer(prompt)
        number = sum(message.role == "assistant" for message in prompt.messages) - prompt.prefill
        if number >= len(self._turns):
            raise ModelError(
                f"the script has {len(self._turns)} turns, and this conversation has {number} answers already: "
                "add a turn, or look why the client asks once more",
                code="ScriptEnded",
            )
        turn = self._turns[number]
        if callable(turn):
            turn = turn(prompt)
            if inspect.isawaitable(turn):
                turn = await turn
            _check_turn(turn, f"the function of turn {number + 1}")
        return _spoken(turn)

    def chat_template(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
        add_generation_prompt: bool = True,
        **more: Any,
    ) -> str:
        """The conversation as plain text, after a line for each value of the template and for each tool."""
        lines = [f"{name}: {str(value)[:_QUOTED]}" for name, value in more.items()]
        lines += [f"Tool {_described(tool)}" for tool in tools]
        conversation = plain_template(messages)
        if not add_generation_prompt:
            conversation = conversation.removesuffix("Assistant:").removesuffix("\n")
        return "\n".join([*lines, conversation])

    def count_tokens(self, text: str) -> int:
        """The number of words."""
        return len(text.split())


def _described(tool: ToolSpec) -> str:
    properties = tool.parameters.get("properties")
    names = ", ".join(islice(map(str, properties), 32)) if isinstance(properties, Mapping) else ""
    return f"{tool.name}({names})" + (f": {tool.description}" if tool.description else "")


# -- the model's own answers -------------------------------------------------------------------------------------------


async def _own_answer(prompt: Prompt) -> Iterator[Spoken]:
    answer: Iterable[Spoken]
    calls, form = _called(prompt), prompt.response_format
    if calls:
        texts = await run_step(partial(_arguments, calls))
        answer = _calls(calls, texts)
        said = f"I call {', '.join(tool.name for tool in calls)}."
    elif form is not None:
        text = await run_step(partial(_formatted, form, _last_words(prompt)))
        answer = (Token(text=found.group()) for found in _OF_JSON.finditer(text))
        said = f"The answer is in the format {form.kind}."
    else:
        answer, said = map(_token, _text(prompt)), "I answer in words."
    number = len(prompt.messages)
    thoughts = _thoughts(prompt, f"The conversation has {number} message{'s' * (number != 1)}. {said}")
    return chain(thoughts, answer)


def _token(text: str) -> Token:
    return Token(text=text)


def _thoughts(prompt: Prompt, text: str) -> Iterator[Token]:
    wanted = prompt.effort not in ("", "none") if prompt.thinking is None else prompt.thinking
    words = _WORD.findall(text) if wanted else []
    return (Token(text=word, thinking=True) for word in words[: prompt.thinking_budget or None])


def _called(prompt: Prompt) -> list[ToolSpec]:
    """The tools to call. A choice that demands a call holds after results too, and before a format."""
    choice = prompt.tool_choice
    if not prompt.tools or choice == "none":
        return []
    if choice == "auto" and (prompt.response_format is not None or _results(prompt)):
        return []
    if choice not in ("auto", "required"):
        if named := [tool for tool in prompt.tools if tool.name == choice]:
            return named[:1]
        raise _refused(f"tool_choice: expected a tool's name, got {choice[:60]!r}")
    text = _last_words(prompt)
    found = [tool for tool in prompt.tools if tool.name in text] or [prompt.tools[0]]
    return found if prompt.parallel_tools else found[:1]


def _results(prompt: Prompt) -> list[ChatMessage]:
    """The results of tools at the end of the conversation, at most 16."""
    found: list[ChatMessage] = []
    for message in reversed(prompt.messages):
        if message.role not in ("tool", "function") or len(found) == 16:
            break
        found.append(message)
    return found[::-1]


def _last_message(prompt: Prompt) -> ChatMessage | None:
    return next((message for message in reversed(prompt.messages) if message.role == "user"), None)


def _last_text(prompt: Prompt) -> str:
    """The text of the last user message; for a text that is continued, that text."""
    last = _last_message(prompt)
    return last.content if last is not None else "" if prompt.messages else prompt.text


def _last_words(prompt: Prompt) -> str:
    return _last_text(prompt)[:_READ]


def _arguments(tools: Sequence[ToolSpec]) -> list[str]:
    """The arguments of calls, each a JSON text."""
    return [_json(f"tools: {tool.name[:60]}: parameters", tool.parameters, _ANY_OBJECT) for tool in tools]


def _calls(tools: Sequence[ToolSpec], arguments: Sequence[str]) -> Iterator[ToolCall]:
    for index, (tool, text) in enumerate(zip(tools, arguments, strict=True)):
        yield from _call(index, tool.name, text)


def _call(index: int, name: str, arguments: str, call_id: str = "") -> Iterator[ToolCall]:
    """Yields the pieces of a call: its name first, then its arguments."""
    pieces = _OF_JSON.findall(arguments)
    yield ToolCall(index=index, id=call_id, name=name, text=f"{name}(" if pieces else f"{name}()")
    for piece in pieces[:-1]:
        yield ToolCall(index=index, arguments=piece, text=piece)
    for piece in pieces[-1:]:
        yield ToolCall(index=index, arguments=piece, text=f"{piece})")


def _formatted(form: ResponseFormat, words: str) -> str:
    match form.kind:
        case "json_schema":
            return _json("response_format: schema", True if form.schema is None else form.schema)
        case "json_object":
            return _written({"answer": words[:_QUOTED]})
        case "choice" if form.choices:
            return next((choice for choice in form.choices if choice and choice in words), form.choices[0])
        case "regex":
            return _matching(form.pattern)
    raise _refused(f"response_format: {form.kind} is not supported")


def _matching(pattern: str) -> str:
    try:
        automata, work = [Automaton(pattern)], Work(STEPS)
        text = text_of(automata, 1, math.inf, work)  # an empty text shows little
        text = text_of(automata, 0, math.inf, work) if text is None else text
    except CannotMake as e:
        raise _refused(f"response_format: regex: {e}") from None
    if text is None:
        raise _refused(f"response_format: regex: no text matches {pattern[:60]!r}")
    return text


def _json(place: str, *schemas: Mapping[str, Any] | bool) -> str:
    try:
        return _written(document_of(*schemas))
    except CannotMake as e:
        raise _refused(f"{place}: {e}") from None


def _written(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate in a schema: its escape is all that can be sent
        return json.dumps(value)
    return text


def _refused(message: str) -> ModelError:
    return ModelError(message, code="ValidationError", status=400)


def _text(prompt: Prompt) -> Iterator[str]:
    """Yields the words of an answer. The beginning that the client gave is left out if the answer begins that way."""
    if not prompt.prefill or not prompt.messages:
        return _words(prompt)
    begun, said = prompt.messages[-1].content, ""
    if len(begun) <= _READ:
        for word in _words(prompt):
            said += word
            if len(said) >= len(begun):
                break
    return _after(prompt, len(begun)) if said.startswith(begun) else _words(prompt)


def _after(prompt: Prompt, skipped: int) -> Iterator[str]:
    for word in _words(prompt):
        if len(word) > skipped:
            yield word[skipped:]
        skipped = max(0, skipped - len(word))


def _words(prompt: Prompt) -> Iterator[str]:
    adapter = f"({prompt.adapter}) " if prompt.adapter else ""
    if results := _results(prompt):
        names = {call.id: call.name for message in prompt.messages for call in message.tool_calls}
        for number, result in enumerate(results):
            name = result.name or names.get(result.tool_call_id) or "tool"
            before = " " if number else adapter
            yield from _pieces(f"{before}{name} {'failed' if result.is_error else 'says'}: ", result.content)
        return
    last = _last_message(prompt)
    yield from _pieces(f"{adapter}You said: ", _last_text(prompt))
    for part in () if last is None else last.parts:
        if not isinstance(part, Text):
            yield from _pieces("", f" {_seen(part)}")


def _seen(part: Image | Sound) -> str:
    if isinstance(part, Image):
        return f"I see an image: {part.media_type}, {len(part.data)} bytes."
    return f"I hear a sound: {part.format}, {len(part.data)} bytes."


def _pieces(*texts: str) -> Iterator[str]:
    """Yields the words of texts. A long text is not copied."""
    for text in texts:
        for found in _WORD.finditer(text):
            yield found.group()


# -- turns of a script -------------------------------------------------------------------------------------------------


def _check_turn(turn: Any, where: str) -> None:
    """Raises TypeError for something that is no turn."""
    items = [turn] if isinstance(turn, str | Mapping) or not isinstance(turn, Sequence) else turn
    for item in items:
        if isinstance(item, str | Token | ToolCall | Finish):
            continue
        if not isinstance(item, Mapping):
            known = "str, Token, ToolCall, Finish, dict, a list of these, or a function of the Prompt"
            raise TypeError(f"{where}: expected {known}, got {type(item).__name__}")
        wanted = {"thinking"} if "thinking" in item else {"name", "arguments", "id"}
        if unknown := [key for key in item if key not in wanted]:
            raise TypeError(
                f"{where}: a dict has name, arguments and id of a call, or thinking; got {str(unknown[0])[:60]!r}"
            )
        texts = [item[key] for key in ("thinking", "name", "id") if key in item]
        if not all(isinstance(text, str) for text in texts) or not ("thinking" in item or item.get("name")):
            raise TypeError(f"{where}: thinking, and the name and id of a call, are texts, got {str(dict(item))[:100]}")
        if not isinstance(item.get("arguments", ""), str | Mapping):
            raise TypeError(f"{where}: arguments are a dict or a JSON text, got {type(item['arguments']).__name__}")


def _spoken(turn: Any) -> Iterator[Spoken]:
    """Yields the messages of a turn."""
    index = 0
    for item in [turn] if isinstance(turn, str | Mapping) or not isinstance(turn, Sequence) else turn:
        if isinstance(item, str):
            yield from map(_token, _pieces(item))
        elif not isinstance(item, Mapping):
            yield item
            index = max(index, item.index + 1) if isinstance(item, ToolCall) else index
        elif "thinking" in item:
            yield from (Token(text=word, thinking=True) for word in _pieces(item["thinking"]))
        else:
            arguments = item.get("arguments", {})
            text = arguments if isinstance(arguments, str) else _written(dict(arguments))
            yield from _call(index, item["name"], text, item.get("id", ""))
            index += 1
