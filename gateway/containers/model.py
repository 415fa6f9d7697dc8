"""A model container behind ws:// and http://, shown as a model of parts."""

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
from gateway.credentials import without_credentials
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
"""Sessions of one container at once where nothing else is said: it is the container that refuses more."""

_DEFAULT_LIMITS = ContainerLimits()
_RETRY_SECONDS = 1.0
_NOT_FOUND = 404
# Models that go for one invocation: a container that is short of memory whatever goes must not lose them all.
_ROOMS = 8
# The whole of a ModelInvocationPath as the service model has it; what it admits and we do not are the dot segments.
_PATH = re.compile(r"[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*")
_REQUEST_ID = "x-amzn-sagemaker-request-id"
# What a container is told of its client: all other headers are the platform's own, credentials among them.
_ON_HANDSHAKE = (
    "content-type",
    "accept",
    "x-amzn-sagemaker-custom-attributes",
    "x-amzn-sagemaker-inference-id",
    "x-amzn-sagemaker-session-id",
)
_ON_INVOCATION = (*_ON_HANDSHAKE, "x-amzn-sagemaker-target-model")
# What a client is told of its container.
_IN_REPLY = (
    "x-amzn-sagemaker-custom-attributes",
    "x-amzn-sagemaker-new-session-id",
    "x-amzn-sagemaker-closed-session-id",
)


class ContainerUnhealthy(Exception):
    """The container has not answered GET /ping for too long: its worker ends, and waits for it as for a new one."""


def container(url: str, *, ca: str = "", models: str = "", **limits: Any) -> ModelSpec:
    """A container as a configuration names it: a factory whose options these are.

        [models.remote]
        factory = "gateway.containers.model:container"
        options = { url = "ws://10.0.0.7:8080", connect_timeout = "500ms" }

    `limits` are the fields of ContainerLimits, durations and sizes as anywhere in a configuration. `models` makes it a
    multi-model container, as with `container_spec`. Without a `capacity` and a `load_timeout` beside its options the model
    takes 1000 sessions at once, and waits `healthy_within` for the container. Raises ConfigError for an option that is
    wrong.
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
    """A container at `url` (`ws://host:port`, perhaps with the path of its WebSocket; see `container_address`) as a
    model; `dataclasses.replace` gives it another capacity, queue, timeout or restart policy.

    A session is a WebSocket of its own: a frame for each part and a part for each frame, byte for byte. It ends when the
    container says Close; `docs/reference/websocket.md` tells how a container hears of the end of the input. One whose call
    has the parameter `unary` is POST /invocations instead. The model accepts its sessions itself, once the container
    has accepted: until then its refusal is ModelError with the container's own status and text.

    `load` waits until GET /ping answers 200, and raises ContainerUnhealthy when it has failed `health_failures` times
    in a row while no session heard from the container either: live sessions then end with WorkerLost, and the restart
    policy loads again, which waits for the container. One failure alone changes nothing, for a container that works
    hard may be slow to answer.

    `models` is the path, as the container sees it, below which its models are: then invocations name one of them in
    X-Amzn-SageMaker-Target-Model, and the container is asked to load and unload them, by the multi-model API.

    `ca` is a file with the CA of a wss:// container, instead of the system's; `dial` opens the connections, instead of
    TCP. Raises ValueError for a URL that is none, ConfigError for a CA that is none.
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
        # once for each reason: eight minutes of the same line tell nothing more
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
    """The model. It raises ModelError for what the container did, and BadRequest for what it must not be asked; of its
    connections none outlives its session."""

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
        within = Within(container.limits.connect_timeout, "connect_timeout")
        try:
            async with container.connect(within) as transport:
                holding = Holding(getattr(session.channel, "budget", None))
                machine, answer, end = await container.upgrade(
                    transport, target, headers, within, holding.allocate, holding.pay_landing
                )
                _reply(session.reply, answer, _IN_REPLY)
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
        return target.encode(errors="surrogatepass")  # what is no visible ASCII is refused where it is written

    # -- one invocation ----------------------------------------------------------------------------------------------

    async def _invoke(self, session: Session[Part, Part]) -> None:
        headers = [*_forwarded(session.call, _ON_INVOCATION), AS_IT_IS, (b"connection", b"close")]
        body: Buffer = b""
        with suppress(trio.EndOfChannel):
            body = (await session.receive()).data
        try:
            if self._models is None:
                await self._ask(session, b"/invocations", headers, body)
            else:
                await self._ask_one_of_many(self._models, session, headers, body)
        except NoAnswer as e:
            code = MODEL_INVOCATION_TIME_EXCEEDED if e.status == GATEWAY_TIMEOUT else STREAM_BROKEN
            raise ModelError(e.message, code=code, status=e.status) from e

    async def _ask_one_of_many(
        self, models: ContainerModels, session: Session[Part, Part], headers: Headers, body: Buffer
    ) -> None:
        """What the container forgot meanwhile is loaded once more; where it has no memory, others go, and it is asked
        again."""
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
                        del said  # it knows this frame: a cycle would keep what that holds
                forgotten = True
                models.lost(target)

    async def _ask(
        self, session: Session[Part, Part], path: bytes, headers: Headers, body: Buffer, *, may_try_again: bool = False
    ) -> tuple[int, ModelError | None]:
        """Asks once, and answers with what comes. The container's refusal is raised; returned where it may be a reason to
        ask again."""
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
                    del refusal  # it knows this frame: a cycle would keep what that holds
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
    """The client's headers that the container sees, and the id that the log has. The response stream has an Accept of
    its own, as the event stream's is not the container's."""
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
