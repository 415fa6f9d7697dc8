"""Serves a model container behind ws:// and http:// as a model of parts."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, final

import trio

from gateway import client
from gateway.config.problem import ConfigError
from gateway.containers.connection import (
    AS_IT_IS,
    BAD_GATEWAY,
    GATEWAY_TIMEOUT,
    Container,
    ContainerLimits,
    Dial,
    NoAnswer,
    Within,
    container_address,
    container_limits,
    content_coding,
    dialler,
    next_piece,
    text_headers,
)
from gateway.containers.multi_model import NO_MEMORY, ContainerModels
from gateway.containers.relay import Holding, Relay
from gateway.credentials import SUBPROTOCOL, offered_protocols, without_credentials
from gateway.errors import BadRequest, TransportLost
from models.errors import ModelError
from models.messages import Family, Part
from models.session import Call, Session
from models.spec import Model, ModelSpec
from protocols.aws.invoke import MODEL_INVOCATION_TIME_EXCEEDED, STREAM_BROKEN
from protocols.errors import RemoteProtocolError
from protocols.events import Buffer, Headers, Response

__all__ = ["CAPACITY", "ContainerLimits", "ContainerUnhealthy", "container", "container_spec"]

log = logging.getLogger("gateway.bridge")

CAPACITY = 1000
"""The default number of concurrent sessions of one container. It is high, because the container itself refuses more."""

_DEFAULT_LIMITS = ContainerLimits()
_RETRY_SECONDS = 1.0
_NOT_FOUND = 404
_CHAT = b"/v1/chat/completions"
# The most models that are unloaded for one invocation: a container that always lacks memory must not lose all.
_ROOMS = 8
# A ModelInvocationPath in the service model. It allows the segments . and .., which are refused here.
_PATH = re.compile(r"[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*")
_SUBPROTOCOL = SUBPROTOCOL.decode()
_REQUEST_ID = "x-amzn-sagemaker-request-id"
# The client's headers that a container gets. All others are the platform's own; some hold credentials.
_ON_HANDSHAKE = (
    "content-type",
    "accept",
    "x-amzn-sagemaker-custom-attributes",
    "x-amzn-sagemaker-inference-id",
    "x-amzn-sagemaker-session-id",
)
_ON_INVOCATION = (*_ON_HANDSHAKE, "x-amzn-sagemaker-target-model")
# The container's headers that a client gets.
_IN_REPLY = (
    "x-amzn-sagemaker-custom-attributes",
    "x-amzn-sagemaker-new-session-id",
    "x-amzn-sagemaker-closed-session-id",
)


class ContainerUnhealthy(Exception):
    """The container has not answered GET /ping for too long. The worker ends, and waits for it as for a new container."""


def container(url: str, *, ca: str = "", models: str = "", **limits: Any) -> ModelSpec:
    """Makes the model of a container from the options in a configuration.

        [models.remote]
        factory = "gateway.containers.model:container"
        options = { url = "ws://10.0.0.7:8080", connect_timeout = "500ms" }

    `limits` are the fields of ContainerLimits, with durations and sizes as anywhere in a configuration. `models` makes it a
    multi-model container, as for `container_spec`. The model's default `capacity` is 1000 sessions, and its default
    `load_timeout` is `healthy_within`. ConfigError for an invalid option.
    """
    if not all(isinstance(option, str) for option in (url, ca, models)):
        raise ConfigError("url, ca and models must be strings")
    chosen = container_limits(limits)
    try:
        return container_spec(url, name="container", limits=chosen, ca=ca, models=models)
    except ValueError as e:
        raise ConfigError(str(e)) from None


def container_spec(
    url: str,
    *,
    name: str,
    limits: ContainerLimits = _DEFAULT_LIMITS,
    ca: str = "",
    models: str = "",
    dial: Dial | None = None,
) -> ModelSpec:
    """Returns the spec of a container at `url` as a model. `url` is `ws://host:port`, with an optional path of the WebSocket
    (see `container_address`). `dataclasses.replace` sets another capacity, queue, timeout or restart policy.

    Each session is a separate WebSocket: a frame for each part and a part for each frame, byte for byte. It ends when the
    container sends Close; `docs/reference/websocket.md` says how a container learns of the end of the input. A session whose
    call has the parameter `unary` is POST /invocations instead. With `chat` too, it is POST /v1/chat/completions, and
    /invocations only if the container answers 404 there. The model accepts a session when the container has. If the
    container refuses, the session ends with a ModelError that has the container's status and text.

    `load` waits until GET /ping answers 200. It raises ContainerUnhealthy if GET /ping fails `health_failures` times in a
    row while no session receives bytes from the container either. Live sessions then end with WorkerLost, and the restart
    policy loads the model again, which waits for the container. A single failure changes nothing, because a busy container
    may be slow to answer.

    `models` is the folder of the models, as a path in the container: then each invocation names a model in
    X-Amzn-SageMaker-Target-Model, and the container is asked to load and unload models by the multi-model API.

    `ca` is a file with the CA of a wss:// container; default: the system's CAs. `dial` opens the connections; default: over
    TCP. ValueError for an invalid URL, ConfigError for an invalid CA.
    """
    address = container_address(url)
    container = Container(address, limits, dial or dialler(address, limits, ca=ca))

    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        await _wait_healthy(container)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch_health, container)
            many = ContainerModels(container, models, nursery) if models else None
            try:
                yield Bridge(container, many)
            finally:
                if many is not None:
                    many.close()
                nursery.cancel_scope.cancel()

    return ModelSpec(
        name=name,
        family=Family.PARTS,
        load=load,
        platform="container",
        capacity=CAPACITY,
        load_timeout=limits.healthy_within,
        accepts=True,
        many=bool(models),
    )


async def _wait_healthy(container: Container) -> None:
    said = ""
    while reason := await container.ping():
        # a repeated reason is logged at DEBUG: a load may wait eight minutes for the container
        level = logging.DEBUG if reason == said else logging.INFO
        log.log(level, "waiting for the container", extra={"container": container.address.authority, "reason": reason})
        said = reason
        await trio.sleep(_RETRY_SECONDS)


async def _watch_health(container: Container) -> None:
    limits, failures = container.limits, 0
    while limits.health_interval:
        await trio.sleep(limits.health_interval)
        reason = await container.ping()
        failures = failures + 1 if reason and not container.heard else 0
        container.heard = False
        if reason:
            extra = {"container": container.address.authority, "reason": reason, "in_a_row": failures}
            log.warning("the container is not healthy", extra=extra)
        if failures >= limits.health_failures:
            raise ContainerUnhealthy(f"GET /ping failed {failures} times in a row (health_failures): {reason}")


@final
class Bridge:
    """The model of a container. It raises ModelError for failures of the container, and BadRequest for requests that must
    not reach it. No connection outlives its session."""

    def __init__(self, container: Container, models: ContainerModels | None = None) -> None:
        self._container, self._models = container, models

    async def __call__(self, session: Session[Part, Part], /) -> None:
        if session.call.parameters.get("unary") is True:
            await self._invoke(session)
        else:
            await self._stream(session)

    # -- a session over the container's WebSocket --------------------------------------------------------------------

    async def _stream(self, session: Session[Part, Part]) -> None:
        container, call = self._container, session.call
        target, headers = self._target(call), _forwarded(call, _ON_HANDSHAKE)
        fields = text_headers([(_SUBPROTOCOL, call.headers.get(_SUBPROTOCOL, ""))]) if call.dialect == "websocket" else ()
        within = Within(container.limits.connect_timeout, "connect_timeout")
        try:
            async with container.connect(within) as transport:
                holding = Holding(getattr(session.channel, "budget", None))
                machine, answer, end = await container.upgrade(
                    transport, target, headers, within, holding, offered_protocols(fields)
                )
                _reply(session.reply, answer, (*_IN_REPLY, _SUBPROTOCOL))
                session.accept()
                await Relay(container, transport, machine, holding, end).run(session)
        except NoAnswer as e:
            raise ModelError(e.message, code="HandshakeFailed", status=e.status) from e

    def _target(self, call: Call) -> bytes:
        path = call.parameters.get("invocation_path", "")
        if path:
            if _PATH.fullmatch(path) is None:
                raise BadRequest(f"the model invocation path does not match {_PATH.pattern}: {path[:100]!r}")
            if not {".", ".."}.isdisjoint(path.split("/")):
                raise BadRequest(f"the model invocation path must not have the segments . and .. here: {path[:100]!r}")
        target = f"/{path or self._container.address.path}"
        if query := without_credentials(call.query):  # `access.pass_credentials` is for models in this process
            target += f"?{query}"
        return target.encode(errors="surrogatepass")  # the HTTP machine refuses all but visible ASCII

    # -- one invocation ----------------------------------------------------------------------------------------------

    async def _invoke(self, session: Session[Part, Part]) -> None:
        headers = [*_forwarded(session.call, _ON_INVOCATION), AS_IT_IS, (b"connection", b"close")]
        body: Buffer = b""
        with suppress(trio.EndOfChannel):
            body = (await session.receive()).data
        try:
            if self._models is None:
                await self._ask_alone(session, headers, body)
            else:
                await self._ask_one_of_many(self._models, session, headers, body)
        except NoAnswer as e:
            code = MODEL_INVOCATION_TIME_EXCEEDED if e.status == GATEWAY_TIMEOUT else STREAM_BROKEN
            raise ModelError(e.message, code=code, status=e.status) from e

    async def _ask_alone(self, session: Session[Part, Part], headers: Headers, body: Buffer) -> None:
        """Invokes the container. It gets a chat at OpenAI's path, and if it has no such path, at /invocations."""
        if session.call.parameters.get("chat") is True:
            status, said = await self._ask(session, _CHAT, headers, body, may_try_again=True)
            if said is None:
                return
            if status != _NOT_FOUND:
                try:
                    raise said
                finally:
                    del said  # it refers to this frame, and the cycle would keep the frame's objects
        await self._ask(session, b"/invocations", headers, body)

    async def _ask_one_of_many(
        self, models: ContainerModels, session: Session[Part, Part], headers: Headers, body: Buffer
    ) -> None:
        """Invokes the target model. If the container has forgotten the model, it is loaded again, once. If the container has
        no memory, other models are unloaded and it is asked again."""
        target = session.call.headers.get("x-amzn-sagemaker-target-model", "")
        if not target:
            raise BadRequest("the endpoint serves many models: X-Amzn-SageMaker-Target-Model must name one")
        forgotten, rooms = False, 0
        while True:
            async with models.in_use(target) as path:
                status, said = await self._ask(session, path, headers, body, may_try_again=True)
                if said is None:
                    return
                if status == NO_MEMORY and rooms < _ROOMS and await models.make_room():
                    rooms += 1
                    continue
                if status != _NOT_FOUND or forgotten:
                    try:
                        raise said
                    finally:
                        del said  # it refers to this frame, and the cycle would keep the frame's objects
                forgotten = True
                models.lost(target)

    async def _ask(
        self, session: Session[Part, Part], path: bytes, headers: Headers, body: Buffer, *, may_try_again: bool = False
    ) -> tuple[int, ModelError | None]:
        """Asks once, and sends the answer to the session. Raises the container's refusal; with `may_try_again`, it returns
        the status and the refusal."""
        container = self._container
        within = Within(container.limits.invocation_timeout, "invocation_timeout")
        async with container.connect(within) as transport:
            peer = client.http1(transport)
            answer = await container.ask(peer, b"POST", path, headers, within, body)
            if not 200 <= answer.status <= 299:
                refusal = await container.refusal(peer, answer, code="ModelError")
                if may_try_again:
                    return answer.status, refusal
                try:
                    raise refusal
                finally:
                    del refusal  # it refers to this frame, and the cycle would keep the frame's objects
            if coding := content_coding(answer):
                raise ModelError(
                    f"the container answered with content-encoding {coding[:100]!r}, though identity was asked for",
                    code="ModelError",
                    status=BAD_GATEWAY,
                )
            _reply(session.reply, answer, ("content-type", *_IN_REPLY))
            session.accept()
            while (piece := await self._piece(peer)) is not None:
                container.heard = True
                await session.send(Part(data=piece))
        return answer.status, None

    async def _piece(self, peer: client.Peer) -> Buffer | None:
        allowed = self._container.limits.invocation_timeout
        with trio.move_on_after(allowed):
            try:
                return await next_piece(peer)
            except (TransportLost, RemoteProtocolError) as e:
                raise NoAnswer(f"the container's answer was cut off: {e}", status=BAD_GATEWAY) from e
        raise NoAnswer(f"the container's answer stood still for {allowed:g} s (invocation_timeout)", status=GATEWAY_TIMEOUT)


def _forwarded(call: Call, names: Sequence[str]) -> list[tuple[bytes, bytes]]:
    """Returns the client's headers for the container, and the id that the log has. A call of the response stream has a
    separate header for the container's Accept, because its own Accept means the event stream."""
    given = call.headers
    values = {name: given.get(name, "") for name in names}
    values["accept"] = given.get("x-amzn-sagemaker-accept", "") or values["accept"]
    values[_REQUEST_ID] = call.id
    return text_headers([(name, value) for name, value in values.items() if value])


def _reply(reply: dict[str, str], answer: Response, names: Sequence[str]) -> None:
    said: Mapping[bytes, bytes] = dict(answer.headers)
    for name in names:
        if value := said.get(name.encode()):
            reply[name] = value.decode("latin-1")
