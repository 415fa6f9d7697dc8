"""The words that all stories share: how a client asks, what was asked, said and heard, how a call ended or went wrong."""

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
    """How a client asks, and so what its model is."""

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
        """The models that it is for."""
        match self:
            case Form.LMI | Form.LMI_JSON | Form.OPENAI:
                return "text"
            case Form.INFER | Form.INFER_JSON | Form.INFER_EVENTS | Form.INFER_FRAMES | Form.GRPC | Form.GRPC_STREAM:
                return "tensor"
            case _:
                return "parts"

    @property
    def model(self) -> str:
        """The same, by the first word of their names in a simulation: gRPC has another method where there is one response to
        each request than where there is any number of them."""
        return "single" if self is Form.GRPC else self.kind

    @property
    def tensors(self) -> int:
        """Responses of a model of tensors: 1 where there can be no more, 0 where it is for the story to say."""
        return 1 if self in (Form.INFER, Form.INFER_JSON, Form.GRPC) else 0

    @property
    def duplex(self) -> bool:
        return self in (Form.BIDI, Form.SOCKET)

    @property
    def streams(self) -> bool:
        """Whether each message leaves when it is sent."""
        return self not in (Form.LMI_JSON, Form.INFER, Form.INFER_JSON, Form.GRPC)

    @property
    def goes_on(self) -> bool:
        """Whether what goes wrong with a request is a message, and the call, which might have others, ends well."""
        return self is Form.GRPC_STREAM

    @property
    def cuts(self) -> bool:
        """Whether an error in the middle of an answer has no words: the answer is cut off."""
        return self is Form.INVOKE


class Leave(enum.Enum):
    """How a client goes away before its answer is over."""

    CLOSE = "close"
    RESET = "reset"
    HALF = "half-close"
    STREAM = "stream"
    """Its stream alone, or a WebSocket Close."""


class Deceit(enum.Enum):
    """What a client says that it must not."""

    GARBAGE = "garbage"
    """Bytes that are nothing on its wire."""
    BODY = "body"
    """A body that is nothing in its dialect."""
    MODEL = "model"
    """A model that does not exist."""


class Hostility(enum.Enum):
    """What a client does that means harm."""

    STOPS = "stops"
    """It says how long its body or its message is, sends the beginning, and no more."""
    FLOOD = "flood"
    """Frames that ask for nothing, without end: of HTTP/2, or a WebSocket's Pings."""


class View(enum.Enum):
    """What a client made of the end of its call."""

    PENDING = "pending"
    COMPLETE = "complete"
    ERROR = "error"
    CUT = "cut"


def fragment(data: Buffer, last: bool) -> bytes:
    """A part, with whether others continue it."""
    return bytes(data) + (b"." if last else b"+")


def unmarked(data: Buffer, last: bool) -> bytes:
    """A part of a wire that does not say whether others continue it."""
    return bytes(data)


def whole(text: str) -> list[bytes]:
    """A text that is one message."""
    return [text.encode()]


@final
class Messages:
    """What one end has said or has got, in order: each message, and the bytes of them all."""

    __slots__ = ("data", "each")

    def __init__(self) -> None:
        self.each: list[bytes] = []
        self.data = bytearray()

    def add(self, message: bytes) -> None:
        self.each.append(message)
        self.data += message

    def begin_with(self, others: Messages, *, strands: bool = False) -> bool:
        """Whether these are the others and perhaps more; with `strands`, in each strand by itself."""
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
    """Nobody writes a trace."""


@dataclass(slots=True, eq=False)
class Talk:
    """One call as both ends remember it: what its client asked, its model took and said, and its client heard."""

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
    """The client ended it, or gave up."""
    calls: int = 1
    """How often the model may be called for it."""
    strands: bool = False
    """Messages that begin alike, up to a full stop, are in order; others are side by side."""
    kept: Callable[[Buffer, bool], bytes] = fragment
    """How a part is remembered."""
    split: Callable[[str], list[bytes]] = whole
    """The messages that a text is remembered as."""
    tell: Callable[[str], None] = _untold
    """Writes a line of the trace."""

    @property
    def query(self) -> str:
        """By which its model, and whoever looks at the gateway, knows it."""
        return f"?talk={self.name}"

    def ask(self, message: bytes) -> None:
        """The client says it."""
        self.asked.add(message)

    def take(self, message: bytes) -> None:
        """The model has it."""
        self.taken.add(message)

    def say(self, message: bytes) -> None:
        """The model says it."""
        self.said.add(message)

    def hear(self, message: bytes) -> None:
        """The client has it."""
        self.heard.add(message)

    @contextmanager
    def call(self) -> Iterator[None]:
        """The model's call: its beginning and its end are counted."""
        self.begun += 1
        self.tell(f"{self.name} model begins")
        try:
            yield
        finally:
            self.over += 1
            self.tell(f"{self.name} model ends")


def named(query: str) -> str:
    """The name of a talk, by the query of its request."""
    return query.removeprefix("talk=")
