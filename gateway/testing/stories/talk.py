"""The vocabulary of all stories: the forms of a request, the messages of both ends, and the ends of a call."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

from protocols.events import Buffer


@final
class Form(enum.Enum):
    """The form of a request, which also decides the kind of its model."""

    LMI = "lmi"
    LMI_JSON = "lmi-json"
    OPENAI = "openai"
    INFER = "infer"
    INFER_JSON = "infer-json"
    INFER_EVENTS = "infer-events"
    INFER_FRAMES = "infer-frames"
    GRPC = "grpc"
    GRPC_STREAM = "grpc-stream"
    INVOKE = "invoke"
    STREAM = "stream"
    BIDI = "bidi"
    SOCKET = "websocket"

    @property
    def kind(self) -> str:
        """The kind of the models that take it."""
        match self:
            case Form.LMI | Form.LMI_JSON | Form.OPENAI:
                return "text"
            case Form.INFER | Form.INFER_JSON | Form.INFER_EVENTS | Form.INFER_FRAMES | Form.GRPC | Form.GRPC_STREAM:
                return "tensor"
            case _:
                return "parts"

    @property
    def model(self) -> str:
        """The first word of the models' names in a simulation. It differs from `kind` only for gRPC, which has a separate
        method for models with one response to each request."""
        return "single" if self is Form.GRPC else self.kind

    @property
    def tensors(self) -> int:
        """The number of responses of a tensor model: 1 if there can be only one, 0 if the story decides."""
        return 1 if self in (Form.INFER, Form.INFER_JSON, Form.GRPC) else 0

    @property
    def duplex(self) -> bool:
        return self in (Form.BIDI, Form.SOCKET)

    @property
    def streams(self) -> bool:
        """True if each message leaves when the model sends it."""
        return self not in (Form.LMI_JSON, Form.INFER, Form.INFER_JSON, Form.GRPC)

    @property
    def goes_on(self) -> bool:
        """True if an error of one request is a message, so that the call, which may have more requests, ends well."""
        return self is Form.GRPC_STREAM

    @property
    def cuts(self) -> bool:
        """True if an error in the middle of an answer cuts the answer off, because it cannot be sent."""
        return self is Form.INVOKE


class Leave(enum.Enum):
    """The way in which a client leaves before the end of its answer."""

    CLOSE = "close"
    RESET = "reset"
    HALF = "half-close"
    STREAM = "stream"
    """A reset of the stream alone, or a WebSocket Close."""


class Deceit(enum.Enum):
    """Something invalid that a client sends."""

    GARBAGE = "garbage"
    """Bytes that are invalid on its wire."""
    BODY = "body"
    """A body that is invalid in its dialect."""
    MODEL = "model"
    """A model that does not exist."""


class Hostility(enum.Enum):
    """The attack of a hostile client."""

    STOPS = "stops"
    """The client declares the length of its body or message, sends the beginning, and then stops."""
    FLOOD = "flood"
    """The client sends HTTP/2 frames without a request, or WebSocket Pings, without end."""


class View(enum.Enum):
    """The end of a call as its client sees it."""

    PENDING = "pending"
    COMPLETE = "complete"
    ERROR = "error"
    CUT = "cut"


def fragment(data: Buffer, last: bool) -> bytes:
    """Returns the bytes of a part, with a mark that tells if it is continued."""
    return bytes(data) + (b"." if last else b"+")


def unmarked(data: Buffer, last: bool) -> bytes:
    """Returns the bytes of a part, for a wire that does not tell if it is continued."""
    return bytes(data)


def whole(text: str) -> list[bytes]:
    """Returns a text as one message."""
    return [text.encode()]


@final
class Messages:
    """The messages that one end has sent or received, in order, and the bytes of them all."""

    __slots__ = ("data", "each")

    def __init__(self) -> None:
        self.each: list[bytes] = []
        self.data = bytearray()

    def add(self, message: bytes) -> None:
        self.each.append(message)
        self.data += message

    def begin_with(self, others: Messages, *, strands: bool = False) -> bool:
        """True if these begin with all of the other messages. With `strands`, each strand is compared separately."""
        if not strands:
            return self.each[: len(others.each)] == others.each
        whole: dict[bytes, list[bytes]] = {}
        for message in self.each:
            whole.setdefault(message.partition(b".")[0], []).append(message)
        at = Counter[bytes]()
        for message in others.each:
            strand = message.partition(b".")[0]
            if message not in whole.get(strand, [])[at[strand] : at[strand] + 1]:
                return False
            at[strand] += 1
        return True

    def __repr__(self) -> str:
        return repr([message[:12] for message in self.each])


def _untold(text: str) -> None:
    """Does nothing: there is no trace."""


@dataclass(slots=True, eq=False)
class Talk:
    """One call as both ends remember it: the messages that its client sent (`asked`) and got (`heard`), and that its model
    got (`taken`) and sent (`said`)."""

    name: str
    line: str
    """The name of its connection."""
    model: str
    asked: Messages = field(default_factory=Messages)
    taken: Messages = field(default_factory=Messages)
    said: Messages = field(default_factory=Messages)
    heard: Messages = field(default_factory=Messages)
    view: View = View.PENDING
    begun: int = 0
    over: int = 0
    left: bool = False
    """True if the client has ended the call, or given up."""
    calls: int = 1
    """The most calls of the model for it."""
    strands: bool = False
    """True if only messages of one strand are in order: those that are equal up to the first full stop."""
    kept: Callable[[Buffer, bool], bytes] = fragment
    """The function that makes the remembered bytes of a part."""
    split: Callable[[str], list[bytes]] = whole
    """The function that splits a text into remembered messages."""
    tell: Callable[[str], None] = _untold
    """Writes a line of the trace."""

    @property
    def query(self) -> str:
        """The query of the request, by which the model and the checks find the call."""
        return f"?talk={self.name}"

    def ask(self, message: bytes) -> None:
        """Notes a message that the client sends."""
        self.asked.add(message)

    def take(self, message: bytes) -> None:
        """Notes a message that the model has got."""
        self.taken.add(message)

    def say(self, message: bytes) -> None:
        """Notes a message that the model sends."""
        self.said.add(message)

    def hear(self, message: bytes) -> None:
        """Notes a message that the client has got."""
        self.heard.add(message)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Counts the beginning and the end of the model's call."""
        self.begun += 1
        self.tell(f"{self.name} model begins")
        try:
            yield
        finally:
            self.over += 1
            self.tell(f"{self.name} model ends")


def named(query: str) -> str:
    """Returns the name of a talk from the query of its request."""
    return query.removeprefix("talk=")
