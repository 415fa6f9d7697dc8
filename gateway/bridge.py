"""A model container behind ws:// and http://, shown as a model of parts."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import final

import trio

from gateway import client
from gateway.container_client import (
    BAD_GATEWAY,
    GATEWAY_TIMEOUT,
    Container,
    ContainerLimits,
    Dial,
    NoAnswer,
    Within,
    container_address,
    dialler,
    next_piece,
    text_headers,
)
from gateway.container_relay import BROKEN, Relay
from gateway.errors import BadRequest, TransportLost
from models.errors import ModelError
from models.messages import Family, Part
from models.session import Call, Session
from models.spec import Model, ModelSpec
from protocols.errors import RemoteProtocolError
from protocols.events import Buffer, Response

__all__ = ["ContainerLimits", "ContainerUnhealthy", "container_spec"]

log = logging.getLogger("gateway.bridge")

_DEFAULT_LIMITS = ContainerLimits()
_TIMED_OUT = "ModelInvocationTimeExceeded"
_RETRY_SECONDS = 1.0
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


def container_spec(
    url: str, *, name: str, limits: ContainerLimits = _DEFAULT_LIMITS, ca: str = "", dial: Dial | None = None
) -> ModelSpec:
    """A container at `url` (`ws://host:port`, perhaps with the path of its WebSocket; see `container_address`) as a
    model; `dataclasses.replace` gives it another capacity, queue, timeout or restart policy.

    A session is a WebSocket of its own: a frame for each part and a part for each frame, byte for byte. One whose call
    has the parameter `unary` is POST /invocations instead. The model accepts its sessions itself, once the container
    has accepted: until then its refusal is ModelError with the container's own status and text.

    `load` waits until GET /ping answers 200, and raises ContainerUnhealthy when it has failed `health_failures` times
    in a row while no session heard from the container either: live sessions then end with WorkerLost, and the restart
    policy loads again, which waits for the container. One failure alone changes nothing, for a container that works
    hard may be slow to answer.

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
            yield Bridge(container)
            nursery.cancel_scope.cancel()

    return ModelSpec(
        name=name,
        family=Family.PARTS,
        load=load,
        platform="container",
        load_timeout=limits.healthy_within,
        accepts=True,
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

    def __init__(self, container: Container) -> None:
        self._container = container

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
                machine, answer = await container.upgrade(transport, target, headers, within)
                _reply(session.reply, answer, _IN_REPLY)
                session.accept()
                await Relay(container, transport, machine).run(session)
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
        if call.query:
            target += f"?{call.query}"
        return target.encode(errors="surrogatepass")  # what is no visible ASCII is refused where it is written

    # -- one invocation ----------------------------------------------------------------------------------------------

    async def _invoke(self, session: Session[Part, Part]) -> None:
        container, call = self._container, session.call
        headers = [*_forwarded(call, _ON_INVOCATION), (b"connection", b"close")]
        body: Buffer = b""
        with suppress(trio.EndOfChannel):
            body = (await session.receive()).data
        within = Within(container.limits.invocation_timeout, "invocation_timeout")
        try:
            async with container.connect(within) as transport:
                peer = client.http1(transport)
                answer = await container.ask(peer, b"POST", b"/invocations", headers, within, body)
                if not 200 <= answer.status <= 299:
                    raise await container.refusal(peer, answer, code="ModelError")
                _reply(session.reply, answer, ("content-type", *_IN_REPLY))
                session.accept()
                while (piece := await self._piece(peer)) is not None:
                    container.heard = True
                    await session.send(Part(data=piece))
        except NoAnswer as e:
            raise ModelError(e.message, code=_TIMED_OUT if e.status == GATEWAY_TIMEOUT else BROKEN, status=e.status) from e

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
