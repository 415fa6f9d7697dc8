"""The playground: calls of models that a browser makes by way of the operator plane, as the operator's."""

from __future__ import annotations

import secrets
from typing import Final, final

import msgspec
import trio
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.errors import Conflict, GatewayError, NotFound, TooManyRequests
from gateway.operator.access import Access, Unauthorized
from gateway.operator.answers import Answers
from gateway.operator.operations import ErrorReply, TicketView
from gateway.wires.asgi import AnswerCut
from protocols.websocket.handshake import END_OF_INPUT

_CALLS = 4  # at once
_TICKETS = 16  # that nobody has used yet
_LIFE = 10.0  # seconds of a ticket
_PROTOCOL = "everywire.play"
_TICKET = "everywire.ticket."
_END: Final = "everywire.play.end"
# A model must not see the plane's token, nor which page asked.
_KEPT_BACK = frozenset({b"authorization", b"cookie", b"origin", b"sec-websocket-protocol", END_OF_INPUT})


@final
class Playground:
    """An ASGI application below /play: the data port's paths, behind the plane's rules.

    A call goes through as the operator's: no key is asked for. Four run at once. There is none if strangers reach the
    plane without a token, or if the process of the plane runs no models.
    """

    def __init__(self, answers: Answers, access: Access) -> None:
        self._answers, self._access = answers, access
        self._tickets: dict[str, float] = {}  # until when each holds, the oldest first
        self._running = 0

    def ticket(self) -> TicketView:
        """A word for one WebSocket, which cannot carry the token. NotFound, Conflict or TooManyRequests if there is none."""
        self._look()
        self._forget()
        if len(self._tickets) >= _TICKETS:
            raise TooManyRequests(
                f"{_TICKETS} tickets of the playground wait for their WebSockets: try again in {_LIFE:g} s"
            )
        word = secrets.token_urlsafe(24)
        self._tickets[word] = trio.current_time() + _LIFE
        path = "models/{name}" + self._answers.place.config.websocket.path
        return TicketView(ticket=word, path=path, end=_END)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        socket = scope["type"] == "websocket"
        try:
            self._admit(HTTPConnection(scope), socket=socket)
        except GatewayError as e:
            if not socket:
                raise
            refusal = Response(msgspec.json.encode(ErrorReply(error=e.message, code=e.code)), e.status)
            await refusal(scope, receive, send)
            return
        play = self._answers.play
        assert play is not None, "or it was refused"
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in _KEPT_BACK]
        if socket:
            headers.append((END_OF_INPUT, _END.encode()))
        self._running += 1
        try:
            await play({**scope, "headers": headers}, receive, _choosing(send) if socket else send)
        except AnswerCut:
            pass  # its access line says why; the server ends what the client has of it
        finally:
            self._running -= 1

    def _admit(self, asked: HTTPConnection, *, socket: bool) -> None:
        known = socket and self._redeems(asked)
        self._access.check(asked, known=known)
        if socket and not known:
            raise Unauthorized(
                "operator", f"a WebSocket needs a ticket that is not older than {_LIFE:g} s: POST /play/ticket"
            )
        self._look()

    def _look(self) -> None:
        """Raises what keeps everybody from playing now."""
        if not self._access.private:
            raise NotFound(
                "there is no playground: everybody who reaches this plane could call the models; set operator.token_file"
            )
        if self._answers.play is None:
            raise Conflict(
                "the playground is off with listen.processes > 1: the process of this plane runs no models; "
                "call them on the data port"
            )
        if self._running >= _CALLS:
            raise TooManyRequests(f"{_CALLS} calls of the playground run, as many as may: stop one, or try again later")

    def _forget(self) -> None:
        now = trio.current_time()
        self._tickets = {word: until for word, until in self._tickets.items() if until > now}

    def _redeems(self, asked: HTTPConnection) -> bool:
        """True if it has a ticket that holds, which it has used up with that."""
        self._forget()
        offered = asked.headers.get("sec-websocket-protocol", "").split(",")
        words = [name.strip().removeprefix(_TICKET) for name in offered if name.strip().startswith(_TICKET)]
        return len(words) == 1 and self._tickets.pop(words[0], None) is not None


def _choosing(send: Send) -> Send:
    """Accepts a WebSocket with a subprotocol of ours: a browser that has offered some takes no answer without one. The first
    message is ours too: it names the stream, which a page cannot read from the head."""

    async def choose(message: Message) -> None:
        if message["type"] != "websocket.accept":
            await send(message)
            return
        await send({**message, "subprotocol": _PROTOCOL})
        stream = next((value.decode() for name, value in message["headers"] if name == b"x-request-id"), "")
        await send({"type": "websocket.send", "text": msgspec.json.encode({"stream": stream}).decode()})

    return choose
