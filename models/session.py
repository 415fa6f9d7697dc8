"""A model's conversation with one client: receive, send, and the properties of the call."""

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
    """The certificate that a client has shown and the server has verified. Properties that it lacks are empty."""

    subject: str = ""
    """In the form of RFC 4514: `CN=batch,O=Example`."""
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
    """The client's call, fixed for the whole session. Header names are lower-case; the query is as sent. A gateway removes
    its clients' credentials from both, unless `access.pass_credentials` is set. Over gRPC the headers are the call's
    metadata, and the bytes of a `-bin` name are text in Latin-1."""

    id: str = ""
    model: str = ""
    version: str = ""
    dialect: str = ""
    path: str = ""
    query: str = ""
    headers: Mapping[str, str] = MappingProxyType({})
    parameters: Mapping[str, Any] = MappingProxyType({})
    party: str = ""
    """The name of the key that the client has shown. Empty if the server has no keys, or if the client came in without
    one."""
    client_certificate: ClientCertificate | None = None
    """None if the server has verified none: it did not ask, the client had none, or a proxy terminates TLS."""
    subprotocol: str = ""
    """The subprotocol that was chosen for a WebSocket, one of `ModelSpec.subprotocols`; empty if there is none."""


class Channel(Protocol[In_co, Out_contra]):
    """The base of a session: a wire's dialect, a converter, or memory. `receive` raises trio.EndOfChannel at the end of
    input. Both methods follow the cancel rules of Session.

    `complete` is True once nothing more can be added to the answer. A model that still sends gets an error, or its messages
    are dropped, and its call ends without a failure.

    Optional attributes: `exhausted`, True once the last message was taken, so that iteration ends without asking for
    another. If the answer has a head, `accept()`, which sends it now, and `reply`, a mapping of its header fields. If a send
    often need not wait, `try_send(message)`: True if it has sent the message as `send` does, and False if it has sent
    nothing, so that `send` must be called. If there is memory for large arrays, `empty_array(shape, dtype)`, like numpy's
    `empty`.
    """

    @property
    def complete(self) -> bool: ...
    async def receive(self) -> In_co: ...
    async def send(self, message: Out_contra, /) -> None: ...


class Session(Generic[In, Out]):
    """One call of a model.

    `receive` takes the client's next message, and gives the wire its window back for the taken bytes. At the end of input it
    raises `trio.EndOfChannel`, at each call. A cancelled `receive` loses nothing: the next call returns that message. `send`
    returns when the message has room in the wire's queue, so a client that stops reading stops the model here. A cancelled
    `send` has sent nothing, and one that returns has sent the whole message. One task may receive while another sends; a
    second receiver or sender gets `trio.BusyResourceError`.

    If the client leaves, the deadline passes or the server drains, the model is cancelled where it waits: let
    `trio.Cancelled` pass. In a process with `loop = "asyncio"` it is `asyncio.CancelledError`; all else is the same,
    including Trio's exceptions.
    """

    __slots__ = ("_call", "_prompt_tokens", "_receiving", "_reply", "_sending", "channel", "deadline")

    def __init__(
        self,
        channel: Channel[In, Out],
        call: Call | Callable[[], Call] | None = None,
        *,
        deadline: float = float("inf"),
    ) -> None:
        """`call` may be a function that makes the call, for the models that read it."""
        self.channel = channel
        """The base of the session. Models use `receive` and `send` instead."""
        self._receiving = self._sending = False
        self._reply: dict[str, str] | None = None
        self._call = call
        self.deadline = deadline
        """On Trio's clock; in a process with `loop = "asyncio"`, on that of `asyncio.get_running_loop().time()`. Infinite if
        there is none."""
        self._prompt_tokens: int | None = None

    @property
    def call(self) -> Call:
        """The client's call."""
        call = self._call
        if type(call) is not Call:
            call = self._call = Call() if call is None else call()
        return call

    @property
    def id(self) -> str:
        """The id in the log and in the client's `x-request-id`."""
        return self.call.id

    @property
    def party(self) -> str:
        """The name of the key that the client has shown; empty if it has shown none."""
        return self.call.party

    @property
    def reply(self) -> dict[str, str]:
        """Header fields (lower-case names) for the head of the answer. Set them before `accept` or the first `send`. They
        are `content-type`, if the wire leaves it to the model, and `x-amzn-sagemaker-custom-attributes`. Fields that a wire
        does not know are ignored, as are all on a wire without such a head."""
        if self._reply is None:
            self._reply = self._shared_reply()
        return self._reply

    @reply.setter
    def reply(self, fields: Mapping[str, str]) -> None:
        current, given = self.reply, dict(fields)  # they may be the same object
        current.clear()
        current.update(given)

    def _shared_reply(self) -> dict[str, str]:
        shared: dict[str, str] | None = getattr(self.channel, "reply", None)
        return {} if shared is None else shared

    @property
    def prompt_tokens(self) -> int | None:
        """The number of the last prompt's tokens, for wires that report it. A text model sets it when it knows the number,
        here or on a token. TypeError for a value that is not an integer (numpy's are accepted), ValueError for one below
        0."""
        return self._prompt_tokens

    @prompt_tokens.setter
    def prompt_tokens(self, count: int | None) -> None:
        if count is not None and (count := operator.index(count)) < 0:
            raise ValueError(f"prompt_tokens must be at least 0, not {count}")
        self._prompt_tokens = count

    def accept(self) -> None:
        """Accepts the session: the head of the answer is sent now, if the wire has one that is not sent yet, and later
        errors are reported in band. Only models whose `ModelSpec.accepts` is True need to call it, and only they can refuse
        a stream with an HTTP status, by raising ModelError before. It has no effect otherwise."""
        accept = getattr(self.channel, "accept", None)
        if accept is not None:
            accept()

    async def receive(self) -> In:
        """The client's next message. trio.EndOfChannel if there are no more, trio.BusyResourceError if another task is
        receiving."""
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving from this session")
        self._receiving = True
        try:
            return await self.channel.receive()
        finally:
            self._receiving = False

    async def send(self, message: Out) -> None:
        """Sends one whole message, once it has room. trio.BusyResourceError if another task is sending, TypeError for a
        message of another family, trio.ClosedResourceError after the session's end. If a text has ended, the text model's
        further messages are dropped, and a model that goes on is cancelled."""
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this session")
        self._sending = True
        try:
            await self.channel.send(message)
        finally:
            self._sending = False

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float64) -> npt.NDArray[Any]:
        """A new array for an answer, like `numpy.empty`. If the model runs in a separate process, a large array reaches the
        gateway without a copy if it is sent as it is: do not write to it after that. It may be called in any thread."""
        empty: Callable[..., npt.NDArray[Any]] = getattr(self.channel, "empty_array", np.empty)
        return empty(shape, dtype)

    def __aiter__(self) -> AsyncIterator[In]:
        return self

    async def __anext__(self) -> In:
        if self._receiving:  # `receive`, without its call: it runs for each message of most models
            raise trio.BusyResourceError("another task is receiving from this session")
        channel = self.channel
        if getattr(channel, "exhausted", False):  # most calls have one message, and this saves an exception for each
            raise StopAsyncIteration
        self._receiving = True
        try:
            return await channel.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None
        finally:
            self._receiving = False
