"""Thinking and calls of tools, which an answer to a chat has beside its text: their state, and the bytes of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import final

from protocols.events import Buffer
from protocols.lmi.errors import json_string
from protocols.openai.errors import OpenAIError

MOST_CALLS = 1024
"""The most calls of one choice."""


@final
class ToolCall:
    """One call, which grows by pieces of its arguments."""

    __slots__ = ("empty", "number", "whole")

    def __init__(self, number: int) -> None:
        self.number = number  # its index on the wire
        self.empty = True  # True until arguments come
        self.whole = bytearray()  # its bytes in a document, except for the end

    def delta(self, head: bytes, arguments: bytes) -> bytes:
        """The member of a chunk for a piece, which has a head if it is the first one."""
        return b'"tool_calls":[{"index":%d,%b%b"}}]' % (self.number, head or b'"function":{"arguments":"', arguments)


@final
class Beside:
    """The thinking and the calls of one choice.

    On the wire calls are numbered as they begin, whatever numbers the model gives them: openai-python takes the index of a
    delta for a place in a list without gaps.
    """

    __slots__ = ("calls", "thinking")

    def __init__(self) -> None:
        self.thinking = bytearray()  # escaped like the text; empty in a stream
        self.calls: dict[int, ToolCall] = {}  # by the model's index, in the order of their numbers

    def call(self, index: int, id: str, name: str, make_id: Callable[[int], str]) -> tuple[ToolCall, bytes]:
        """The call with this index, and if it is a new one its head: the members before the text of the arguments.
        OpenAIError if a new one has no name or is one too many. It counts once it is among the calls."""
        if (known := self.calls.get(index)) is not None:
            return known, b""
        number = len(self.calls)
        problem = ""
        if index < 0:
            problem = f"its index is at least 0, got {index}"
        elif not name:
            problem = f"its first piece has no name (index {index})"
        elif number >= MOST_CALLS:
            problem = f"a choice has at most {MOST_CALLS}, got one more"
        if problem:
            raise OpenAIError(f"a tool call of the model: {problem}", 500, "server_error", code="bad_tool_call")
        told = json_string(id or make_id(number)), json_string(name)
        return ToolCall(number), b'"id":%b,"type":"function","function":{"name":%b,"arguments":"' % told

    def completed(self) -> Iterator[bytes]:
        """The members of the chunks that end the calls: arguments for those that have none."""
        return (call.delta(b"", b"{}") for call in self.calls.values() if call.empty)

    def message(self, said: bytes, text: Buffer) -> list[Buffer]:
        """The members of a document's message. `said` is what is before the text."""
        members: list[Buffer] = [said, *((b'"', text, b'"') if text or not self.calls else (b"null",))]
        if self.thinking:
            members += b',"reasoning_content":"', self.thinking, b'"'
        before = b',"tool_calls":[{'
        for call in self.calls.values():
            members += before, call.whole, b'{}"}}' if call.empty else b'"}}'
            before = b",{"
        return [*members, b"]"] if self.calls else members
