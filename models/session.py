"""A model's conversation with one client: receive, send, and what is known about the call."""

from __future__ import annotations

import operator
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar, final

import msgspec
import numpy as np
import numpy.typing as npt
import trio

In = TypeVar("In")
Out = TypeVar("Out")
In_co = TypeVar("In_co", covariant=True)
Out_contra = TypeVar("Out_contra", contravariant=True)


@final
class ClientCertificate(msgspec.Struct, frozen=True, kw_only=True):
    """The certificate that a client has shown, and that the server has verified. What it does not say is empty."""

    subject: str = ""
    """As RFC 4514 writes it: `CN=batch,O=Example`."""
    issuer: str = ""
    names: tuple[str, ...] = ()
    """Its alternative names, each with its kind: `DNS:batch.example.org`, `URI:spiffe://example.org/batch`, `email:...`,
    `IP:...`."""
    serial: str = ""
    """Hexadecimal."""
    fingerprint: str = ""
    """SHA-256 of the certificate, hexadecimal."""


@final
class Call(msgspec.Struct, frozen=True, kw_only=True):
    """The client's call: fixed for the whole session. Header names are lower-case; the query is as it was sent. A gateway
    leaves its clients' credentials out of both, unless `access.pass_credentials` is set. Over gRPC the headers are the
    call's metadata, and the bytes of a `-bin` name are text by Latin-1."""

    id: str = ""
    model: str = ""
    version: str = ""
    dialect: str = ""
    path: str = ""
    query: str = ""
    headers: Mapping[str, str] = MappingProxyType({})
    parameters: Mapping[str, Any] = MappingProxyType({})
    party: str = ""
    """The name of the key that the client has shown; empty where the server knows no keys, or it came in by another way."""
    client_certificate: ClientCertificate | None = None
    """None where the server has verified none: it did not ask, the client had none, or somebody else ended the TLS."""


class Channel(Protocol[In_co, Out_contra]):
    """What a session stands on: a wire's dialect, a converter, or memory. `receive` raises trio.EndOfChannel at the
    end of input; both follow the cancel rules of Session.

    `complete` is true once the answer has all that it can have: a model that sends on is told so, or what it sends is
    dropped, and its call ends without blame.

    A channel may have an attribute `exhausted` that is true from when its last message was taken: iteration then ends
    without asking for another. One whose answer has a head has `accept()`, which sends it now, and a mapping `reply` of
    header names to values for it. One that often need not wait has `try_send(message)`, which sends what it can send at
    once, as `send` does and as whole, and is true; where it is false it has sent nothing, and `send` is to do it. One that
    has memory for large arrays has `empty_array(shape, dtype)`, as numpy's `empty`.
    """

    @property
    def complete(self) -> bool: ...
    async def receive(self) -> In_co: ...
    async def send(self, message: Out_contra, /) -> None: ...


class Session(Generic[In, Out]):
    """One call of a model.

    `receive` takes the client's next message and gives the wire its window back for the bytes taken; at the end of
    input it raises `trio.EndOfChannel`, again and again. A cancelled `receive` loses nothing: the next one returns
    that message. `send` returns when the message has room in the wire's queue, so a client that stops reading stops
    the model here; a cancelled `send` has sent nothing, a returned one is whole. One task may receive while another
    sends; a second receiver or sender gets `trio.BusyResourceError`.

    When the client leaves, the deadline passes or the server drains, the model is cancelled where it waits: let
    `trio.Cancelled` pass. In a process with `loop = "asyncio"` that is `asyncio.CancelledError`, and all else here is the
    same, Trio's exceptions too.
    """

    __slots__ = ("_call", "_prompt_tokens", "_receiving", "_reply", "_sending", "channel", "deadline")

    def __init__(
        self,
        channel: Channel[In, Out],
        call: Call | Callable[[], Call] | None = None,
        *,
        deadline: float = float("inf"),
    ) -> None:
        """`call` may be a function that makes it, for the models that look."""
        self.channel = channel
        """What the session stands on. Models use `receive` and `send`."""
        self._receiving = self._sending = False
        self._reply: dict[str, str] | None = None
        self._call = call
        self.deadline = deadline
        """On Trio's clock, or in a process with `loop = "asyncio"` on that of `asyncio.get_running_loop().time()`. Infinite
        when there is none."""
        self._prompt_tokens: int | None = None

    @property
    def call(self) -> Call:
        """How the client asked."""
        call = self._call
        if type(call) is not Call:
            call = self._call = Call() if call is None else call()
        return call

    @property
    def id(self) -> str:
        """The id that the log and the client's `x-request-id` carry."""
        return self.call.id

    @property
    def party(self) -> str:
        """Whose call it is: the name of the key that the client has shown; empty where it has shown none."""
        return self.call.party

    @property
    def reply(self) -> dict[str, str]:
        """Header fields (lower-case names) for the head of the answer, to be set before it goes out: before `accept` or
        the first `send`. `content-type` where the wire leaves that to the model, and
        `x-amzn-sagemaker-custom-attributes`; a wire without such a head, or one that does not know a name, ignores it."""
        if self._reply is None:
            self._reply = self._shared_reply()
        return self._reply

    @reply.setter
    def reply(self, fields: Mapping[str, str]) -> None:
        current, given = self.reply, dict(fields)  # which may be the same
        current.clear()
        current.update(given)

    def _shared_reply(self) -> dict[str, str]:
        shared: dict[str, str] | None = getattr(self.channel, "reply", None)
        return {} if shared is None else shared

    @property
    def prompt_tokens(self) -> int | None:
        """How many tokens the last prompt has, for the wires that tell their clients: a text model says it when it knows,
        here or with a token. TypeError for what is no integer (one of numpy's is), ValueError for one below 0."""
        return self._prompt_tokens

    @prompt_tokens.setter
    def prompt_tokens(self, count: int | None) -> None:
        if count is not None and (count := operator.index(count)) < 0:
            raise ValueError(f"prompt_tokens must be at least 0, not {count}")
        self._prompt_tokens = count

    def accept(self) -> None:
        """Takes the session: the head of the answer goes out now, where the wire has one that is not out yet, and an
        error from here on is said in band. Only models whose `ModelSpec.accepts` is true need to call it, and only they
        can refuse a stream with an HTTP status, by raising ModelError before. Harmless anywhere else."""
        accept = getattr(self.channel, "accept", None)
        if accept is not None:
            accept()

    async def receive(self) -> In:
        """The client's next message. Raises trio.EndOfChannel when there are no more, trio.BusyResourceError if
        another task is receiving."""
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving from this session")
        self._receiving = True
        try:
            return await self.channel.receive()
        finally:
            self._receiving = False

    async def send(self, message: Out) -> None:
        """Sends one message whole, once it has room. Raises trio.BusyResourceError if another task is sending,
        TypeError for a message of another family, trio.ClosedResourceError after the session's end. Messages of a text
        model for a text that has its end are dropped, and a model that goes on is cancelled."""
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this session")
        self._sending = True
        try:
            await self.channel.send(message)
        finally:
            self._sending = False

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float64) -> npt.NDArray[Any]:
        """A new array for an answer, as `numpy.empty` makes it. Where the model runs in a process of its own, a large one
        goes to the gateway without being copied, if it is sent as it is: do not write to it any more then. In any thread."""
        empty: Callable[..., npt.NDArray[Any]] = getattr(self.channel, "empty_array", np.empty)
        return empty(shape, dtype)

    def __aiter__(self) -> AsyncIterator[In]:
        return self

    async def __anext__(self) -> In:
        if self._receiving:  # `receive`, one call cheaper: it runs for each message of most models
            raise trio.BusyResourceError("another task is receiving from this session")
        channel = self.channel
        if getattr(channel, "exhausted", False):  # most calls have one message: an exception less for each
            raise StopAsyncIteration
        self._receiving = True
        try:
            return await channel.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None
        finally:
            self._receiving = False
