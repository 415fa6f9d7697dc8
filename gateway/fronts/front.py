"""A front: a gateway that gets its connections and its commands from a parent."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, final

import msgspec
import trio

from gateway.catalog.process_memory import give_back_at_rest, settle
from gateway.config.agreement import has_plane
from gateway.config.problem import ConfigError
from gateway.core.connection import Connection
from gateway.doorbell import Doorbell
from gateway.errors import GatewayError, ModelGivenUp, NotFound
from gateway.fronts.messages import (
    AT_ONCE,
    PACKET,
    Begin,
    CannotServe,
    Command,
    ControlFrames,
    FrontHello,
    FrontListens,
    FrontState,
    GivenUp,
    Heard,
    Message,
    Over,
    Reply,
    Serving,
    SharedNews,
    Taken,
    frame_of,
    handed_of,
    packet_of,
)
from gateway.fronts.shared import SharedModels
from gateway.fronts.sums import Family, families_of
from gateway.gateway import Gateway
from gateway.net.tls_reload import tell_broken
from gateway.operator.answers import GatewayAnswers
from gateway.operator.events import StreamWatch
from gateway.operator.operations import StreamQuery
from gateway.operator.views import view_of_incident
from gateway.telemetry import logging_setup
from gateway.version import version
from gateway.workers.states import State
from models.errors import contain_interrupts, leaves

log = logging.getLogger("gateway")

_READ = 64 * 1024
_REST = 0.02  # seconds for which closed connections are collected into one message
_LOOK = 1.0  # seconds between two looks at readiness, which changes with time too
_EXPECTED = (OSError, ModelGivenUp, ConfigError)
_LOADING = frozenset((State.LOADING, State.RESTARTING))


def begin_with(control: socket.socket) -> tuple[Begin, socket.socket]:
    """Receives the parent's first message, and the socket that comes with it. Blocks; for callers without a loop. EOFError
    if the parent is gone."""
    control.setblocking(True)
    control.sendall(frame_of(FrontHello(version())))
    frames, found = ControlFrames(), list[int]()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, _READ, 1, socket.MSG_CMSG_CLOEXEC)
        found += descriptors
        if not data:
            raise EOFError("the parent is gone")
        for message in frames.feed(data):
            assert isinstance(message, Begin)
            (descriptor,) = found
            return message, socket.socket(fileno=descriptor)


def failed(control: socket.socket, text: str, *, configuration: bool) -> None:
    """Tells the parent that this front cannot serve. Blocks; for callers without a loop."""
    with suppress(OSError):
        control.setblocking(True)
        control.sendall(frame_of(CannotServe(text, configuration)))


@final
class Front:
    """Serves the connections that the parent hands over, until the parent has drained it or is gone."""

    def __init__(
        self,
        gateway: Gateway,
        number: int,
        control: socket.socket,
        handed: socket.socket,
        shared: SharedModels,
        serves: Callable[[], None] | None = None,
    ) -> None:
        """`serves` is called once, when the front serves."""
        control.setblocking(False)
        handed.setblocking(False)
        self._gateway, self._number, self._handed, self._serves = gateway, number, handed, serves
        self._answers: GatewayAnswers | None = None
        self._watches: dict[int, StreamWatch] = {}  # by the number of the events' reader
        if has_plane(gateway.config.operator) or gateway.config.metrics.port >= 0:
            self._answers = GatewayAnswers(gateway)  # counts exchanges from now on
        if self._answers is not None and has_plane(gateway.config.operator):
            self._answers.operate()
        self._shared, shared.post = shared, self._post
        self._control = trio.SocketStream(trio.socket.from_stdlib_socket(control))
        self._out: list[Message] = []
        self._posted, self._fewer = Doorbell(), Doorbell()
        self._open = 0
        self._failure: CannotServe | None = None
        self._finished, self._written = False, trio.Event()
        self._standing, self._heard = FrontState(0, (), frozenset()), 0
        self._opening = set[str]()  # models that are loaded, and take calls as soon as the parent knows
        self._hearing = trio.lowlevel.ParkingLot()
        gateway.supervisor.admit = self._admit

    async def run(self) -> bool:
        """Serves until the end. False if it could not serve, or could not go on."""
        contain_interrupts()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write)
            nursery.start_soon(self._obey, nursery)
            nursery.start_soon(self._tell_listening, nursery)
            nursery.start_soon(self._tell_drain)
            await nursery.start(self._serve)
            if self._failure is None:
                self._post(Serving(sorted(self._gateway.supervisor.workers)))
                if self._serves is not None:
                    self._serves()
            settle()
            nursery.start_soon(give_back_at_rest, self._gateway.rest)
            await self._gateway.stopped()
            if self._gateway.drain_report is not None:
                stats = None if self._answers is None else await self._answers.stats()
                self._post(Over(self._gateway.drain_report, self._metrics(), stats))
            if self._failure is not None:
                self._post(self._failure)
            self._finished = True
            await self._written.wait()
            nursery.cancel_scope.cancel()
        return self._failure is None

    async def _serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Runs the gateway. Expected errors are kept for the parent; bugs are raised."""
        try:
            await self._gateway.serve(task_status=task_status)
        except BaseException as e:
            errors = list(leaves(e))
            if not all(isinstance(error, _EXPECTED) for error in errors):
                raise
            text = "; ".join(str(error) for error in errors)
            self._failure = CannotServe(text, any(isinstance(error, ConfigError) for error in errors))
        with suppress(RuntimeError):  # it has started already
            task_status.started()

    # -- messages to the parent --------------------------------------------------------------------------------------

    def _post(self, message: Message) -> None:
        self._out.append(message)
        self._posted.ring()

    async def _write(self) -> None:
        with suppress(trio.BrokenResourceError):  # the reading task notices
            while True:
                await self._posted.wait()
                while self._out:
                    await self._control.send_all(frame_of(self._out[0]))
                    del self._out[0]
                if self._finished:
                    self._written.set()

    async def _tell_listening(self, nursery: trio.Nursery) -> None:
        await self._gateway.listening()
        while self._gateway.acceptor.nursery is None:
            await trio.lowlevel.checkpoint()
        self._stand()
        self._post(FrontListens())
        nursery.start_soon(self._take_all)
        nursery.start_soon(self._tell_fewer)
        nursery.start_soon(self._tell_standing)

    # -- readiness ---------------------------------------------------------------------------------------------------

    async def _tell_standing(self) -> None:
        revision = 0
        while True:
            self._stand()
            with trio.move_on_after(_LOOK):
                revision = (await self._gateway.models_after(revision)).revision

    async def _admit(self, name: str) -> None:
        """Waits until the parent knows that a model takes calls from now on."""
        self._opening.add(name)
        try:
            number = self._stand()
            while self._heard < number:
                await self._hearing.park()
        finally:
            self._opening.discard(name)  # an old and a new worker of one name may both open

    def _stand(self) -> int:
        """Tells the parent of the present readiness if it has changed. Returns the number of the latest message about it."""
        supervisor, opening = self._gateway.supervisor, self._opening
        reasons = [absent.full for absent in supervisor.unready_with(opening)]
        unready = ("draining", *reasons) if self._gateway.draining else tuple(reasons)
        absent = [worker for worker in supervisor.workers.values() if not worker.ready and worker.name not in opening]
        missed = frozenset(worker.name for worker in absent if unready or worker.state in _LOADING)
        stands = FrontState(self._standing.number, unready, missed)
        if stands != self._standing or not stands.number:
            self._standing = msgspec.structs.replace(stands, number=stands.number + 1)
            self._post(self._standing)
        configured = supervisor.configured
        self._end_with_answers(bool(unready) or any(name in configured and configured[name].required for name in missed))
        return self._standing.number

    def _end_with_answers(self, ends: bool) -> None:
        """Begins or ceases to end each connection with its next answer: while this front misses a required model, its
        clients should connect again, so that the parent can give them to a front that has it."""
        server = self._gateway.server
        begins, server.one_answer = ends and not server.one_answer, ends
        if begins:
            for connection in server.connections:
                assert isinstance(connection, Connection)
                connection.wire.end_with_answer()

    async def _tell_drain(self) -> None:
        await self._gateway.drain_begun()
        self._post(GivenUp())  # a parent that asked for the drain ignores it

    # -- commands of the parent --------------------------------------------------------------------------------------

    async def _obey(self, nursery: trio.Nursery) -> None:
        frames = ControlFrames()
        with suppress(trio.BrokenResourceError):
            while data := await self._control.receive_some(_READ):
                for message in frames.feed(data):
                    if isinstance(message, SharedNews):
                        self._shared.take(message.news)
                    elif isinstance(message, Heard):
                        self._heard = message.number
                        self._hearing.unpark_all()
                    else:
                        assert isinstance(message, Command)
                        nursery.start_soon(self._answer, message)
        log.error("the parent is gone")
        nursery.cancel_scope.cancel()

    async def _answer(self, asked: Command) -> None:
        try:
            value = await self._do(asked.what, asked.argument)
        except GatewayError as e:
            self._post(Reply(asked.number, None, e.message, e.status, e.code))
        except Exception:  # a bug of the gateway: only this command fails
            log.exception("a question of the parent failed", extra={"what": asked.what})
            self._post(Reply(asked.number, None, f"front {self._number} failed; its log says why", 500, "InternalFailure"))
        else:
            self._post(Reply(asked.number, value))

    async def _do(self, what: str, argument: Any) -> Any:
        gateway = self._gateway
        match what:
            case "drain":
                gateway.begin_drain(argument)
            case "retire":
                gateway.retire()
            case "hurry":
                gateway.hurry()
            case "certificate":
                if gateway.certificate is not None:
                    try:
                        await gateway.reload_certificate()
                    except Exception as error:  # no content of a file may end the front
                        tell_broken(error)
            case "metrics":
                if self._answers is not None:
                    await gateway.metrics.prepare()
                return self._metrics()
            case "unready":
                return gateway.unready
            case "level":
                logging_setup.set_level(argument)
            case _:
                return await self._tell_operator(what, argument)
        return None

    async def _tell_operator(self, what: str, argument: Any) -> Any:
        answers = self._answers
        assert answers is not None, what
        match what:
            case "models":
                return await answers.models()
            case "model":
                try:
                    return [await answers.model(argument)]
                except NotFound:
                    return []
            case "reload":
                return await answers.reload(*argument)
            case "restart":
                return await answers.restart(*argument)
            case "stats":
                return await answers.stats()
            case "streams":
                return await answers.streams(msgspec.convert(argument, StreamQuery))
            case "end":
                return await answers.end(argument)
            case "incidents":
                return [view_of_incident(group, whole=True) for group in answers.explained.groups]
            case "look":
                watch = self._watches.get(argument)
                if watch is None:
                    watch = self._watches[argument] = StreamWatch(self._gateway, answers.explained)
                    self._gateway.observer.watchers.append(watch.ended)
                return await watch.look()
            case "look away":
                if (watch := self._watches.pop(argument, None)) is not None:
                    self._gateway.observer.watchers.remove(watch.ended)
            case _:
                raise AssertionError(what)
        return None

    def _metrics(self) -> list[Family]:
        return [] if self._answers is None else families_of(self._gateway.registry.collect())

    # -- connections -------------------------------------------------------------------------------------------------

    async def _take_all(self) -> None:
        while True:
            await trio.lowlevel.wait_readable(self._handed)
            for _ in range(AT_ONCE):
                try:
                    packet, descriptors, _, _ = socket.recv_fds(self._handed, PACKET, AT_ONCE, socket.MSG_CMSG_CLOEXEC)
                except BlockingIOError:
                    break
                except OSError:
                    return
                if not packet:
                    return
                await self._acknowledge(self._take(packet, descriptors))

    def _take(self, packet: bytes, descriptors: list[int]) -> Taken:
        """Serves the connections of a packet. If this process has reached its limit of descriptors, some are missing, and
        the answer says which: the parent still has them."""
        acceptor, handed = self._gateway.acceptor, handed_of(packet)
        if not acceptor.accepting:  # the parent sent these before it knew
            for descriptor in descriptors:
                os.close(descriptor)
            return Taken([], [one.number for one in handed], self._open)
        taken, lacking = handed[: len(descriptors)], handed[len(descriptors) :]
        for one, descriptor in zip(taken, descriptors, strict=True):
            self._open += 1
            acceptor.take(socket.socket(fileno=descriptor), tls=one.tls, closed=self._closed)
        return Taken([one.number for one in taken], [one.number for one in lacking], self._open)

    def _closed(self) -> None:
        self._open -= 1
        self._fewer.ring()

    async def _acknowledge(self, said: Taken) -> None:
        packet = packet_of(said)
        while True:
            try:
                self._handed.send(packet)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._handed)
            except OSError:
                return  # the task that reads the stream notices
            else:
                return

    async def _tell_fewer(self) -> None:
        while True:
            await self._fewer.wait()
            await trio.sleep(_REST)
            await self._acknowledge(Taken([], [], self._open))
