"""The parent's side of one front: its process, the messages to and from it, and the connections on their way to it."""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, final

import trio

from gateway.catalog.processes.linked import ModelNews
from gateway.doorbell import Doorbell
from gateway.errors import GatewayError
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
    Handed,
    Heard,
    KillWanted,
    LetGo,
    LinkWanted,
    Message,
    Over,
    Reply,
    Serving,
    SharedNews,
    Taken,
    frame_of,
    packet_of,
    said_of,
)
from gateway.instances.links import MOST
from gateway.instances.spawn import OURS, Exit, Process, ProcessPlan
from gateway.version import version

log = logging.getLogger("gateway.fronts")

MODULE = "gateway.cli.front"
"""The module that a front runs, as `python -m` does."""
_READ = 256 * 1024
ANSWER = 5.0
"""Seconds for an answer about the present state."""
_PAUSE = 0.05  # seconds, if the kernel has too many descriptors in flight
_LAST_WORDS = 5.0  # seconds that a process has to end after its last message


@final
class FrontError(GatewayError):
    """An error that a front has answered with."""

    def __init__(self, message: str, status: int, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@final
class SilentFront(Exception):
    """A front has ended, or has not answered in time."""


@final
class FrontLink:
    """One front, from its start to its end.

    `run` runs for its whole life. Its messages set attributes; `changed` is called when one changes, and `acknowledged`
    with each acknowledgement of connections."""

    def __init__(self, process: Process, handed: socket.socket, id: int) -> None:
        """Only `start` makes links."""
        self.process, self.id, self.number = process, id, process.plan.number
        self._handed = handed
        self._control = trio.SocketStream(trio.socket.from_stdlib_socket(process.socket))
        self._out = deque[bytes]()
        self._posted, self._given = Doorbell(), Doorbell()
        self._on_their_way = deque[tuple[Handed, socket.socket]]()
        self._answers: dict[int, tuple[trio.Event, list[Reply]]] = {}
        self._asked = 0
        self.listening = False
        """True once it serves the connections that it is given."""
        self.standing: FrontState | None = None
        """Its readiness; None before it has told it."""
        self._heard = 0
        self.serving: Serving | None = None
        """Its models, once the first load of each has ended; None before."""
        self.failed = ""
        """The reason why it could not serve, or could not go on."""
        self.configuration = False
        """True if that reason is an error of the configuration."""
        self.draining = False
        """True once it drains."""
        self.over: Over | None = None
        """Its last message, after a drain."""
        self.exit: Exit | None = None
        """The end of its process; None while that runs."""
        self.taking = False
        """True from the time when it has come up until it has ended. The parent sets this."""
        self.asked_to_end = False
        """True once it was told to drain or to end."""
        self.loads = set[int]()
        """The loads of models in shared processes that it uses. The parent sets this."""
        self.asked: Callable[[FrontLink, KillWanted | LetGo], None] = lambda link, message: None
        """Called with its messages about shared processes."""
        self.linked: Callable[[FrontLink, int, list[int]], None] = lambda link, id, descriptors: None
        """Called when it wants a link to a shared process, with the link's descriptors. The callee closes them."""
        self.changed: Callable[[FrontLink], None] = lambda link: None
        self.acknowledged: Callable[[FrontLink, Taken], None] = lambda link, taken: None

    @classmethod
    def start(cls, begin: Begin, id: int) -> FrontLink:
        """Starts a front's process. Call it on the loop's thread: the process dies with the thread. `id` must be unique.
        OSError if it cannot be started."""
        own = {name: value for name, value in os.environ.items() if name.startswith(OURS)}
        plan = ProcessPlan(
            name=f"front {begin.number}",
            number=begin.number,
            module=MODULE,
            environment=own,
            threads_each=max(1, len(os.sched_getaffinity(0)) // begin.processes),
            speaks_for_itself=True,
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                process = Process.start(plan)
                try:
                    first = frame_of(begin)
                    sent = socket.send_fds(process.socket, [first], [theirs.fileno()])
                except BaseException:
                    process.close()
                    raise
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        link = cls(process, ours, id)
        if sent < len(first):
            link._out.append(first[sent:])
            link._posted.ring()
        return link

    # -- start and end -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serves the link until the front's process has ended, and frees everything. If it is cancelled, the process is
        killed."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                nursery.start_soon(self._hand_over)
                nursery.start_soon(self._hear)
                nursery.start_soon(self._listen_to)
                self.exit = await self.process.ended()
                nursery.cancel_scope.cancel()
        finally:
            with suppress(ValueError, OSError):
                while self._hear_one():  # connections that it took before it died are not given to another
                    pass
            self.process.close()
            trio.lowlevel.notify_closing(self._handed)
            self._handed.close()
            for answered, _ in self._answers.values():
                answered.set()
            self._on_their_way.clear()

    async def _listen_to(self) -> None:
        """Reads its messages to the end, after which the process must end soon."""
        try:
            await self._read()
        except ValueError as e:
            self.broken(e)
        with trio.move_on_after(_LAST_WORDS):
            await trio.sleep_forever()
        log.warning("a front does not end: it is killed", extra={"front": self.number, "pid": self.process.pid})
        self.process.kill()

    def broken(self, error: Exception) -> None:
        """Kills a front that has sent something invalid."""
        reason = f"it sent something that is not a message: {type(error).__name__}: {str(error)[:200]}"
        log.error("a front is killed", extra={"front": self.number, "pid": self.process.pid, "reason": reason})
        self.process.kill()

    def kill(self) -> None:
        """Ends the front at once, with all that it serves."""
        self.process.kill()

    # -- messages ----------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        frames = ControlFrames()
        with suppress(trio.BrokenResourceError):
            while data := await self._control.receive_some(_READ):
                for message in frames.feed(data):
                    self._take(message)

    def _take(self, message: Message) -> None:
        match message:
            case FrontHello(theirs):
                if theirs != version():
                    self.failed = f"it is everywire {theirs[:50]}, and this is {version()}: restart the server"
                    self.process.kill()
                return
            case FrontListens():
                self.listening = True
            case FrontState():
                self.standing = message
            case Serving():
                self.serving = message
            case CannotServe(text, configuration):
                self.failed, self.configuration = text[:2000], configuration
            case KillWanted() | LetGo():
                self.asked(self, message)
                return
            case GivenUp():
                self.draining = True
            case Over():
                self.over = message
            case Reply():
                asked = self._answers.pop(message.number, None)
                if asked is not None:  # otherwise the question has timed out
                    asked[1].append(message)
                    asked[0].set()
                return
            case _:
                raise ValueError(f"a {type(message).__name__}")
        self.changed(self)

    async def ask(self, what: str, argument: Any = None, *, within: float = ANSWER) -> Any:
        """Sends a command and returns the answer. FrontError if the front answers with an error; SilentFront if it has ended
        or does not answer `within` seconds."""
        self._asked += 1
        number, answered, answers = self._asked, trio.Event(), list[Reply]()
        self._answers[number] = answered, answers
        try:
            self.tell(what, argument, number)
            with trio.move_on_after(within):
                await answered.wait()
        finally:
            self._answers.pop(number, None)
        if not answers:
            raise SilentFront(f"front {self.number} does not answer")
        (answer,) = answers
        if answer.error:
            raise FrontError(answer.error, answer.status, answer.code)
        return answer.value

    def tell(self, what: str, argument: Any = None, number: int = 0) -> None:
        """Sends a command without waiting for an answer."""
        self._out.append(frame_of(Command(number, what, argument)))
        self._posted.ring()

    def tell_heard(self) -> None:
        """Answers the front's latest `FrontState`, unless it was answered: a model that waits for that takes calls now."""
        if self.standing is not None and self.standing.number != self._heard:
            self._heard = self.standing.number
            self._out.append(frame_of(Heard(self._heard)))
            self._posted.ring()

    def tell_news(self, news: ModelNews) -> None:
        """Sends the front news of a model's shared processes."""
        self._out.append(frame_of(SharedNews(news)))
        self._posted.ring()

    async def _write(self) -> None:
        with suppress(trio.BrokenResourceError):  # the reading task notices
            while True:
                await self._posted.wait()
                while self._out:
                    await self._control.send_all(self._out.popleft())

    # -- connections -------------------------------------------------------------------------------------------------

    def hand(self, number: int, sock: socket.socket, *, tls: bool) -> None:
        """Sends the front a connection. The caller keeps the socket open until it is acknowledged."""
        self._on_their_way.append((Handed(number, tls), sock))
        self._given.ring()

    async def _hand_over(self) -> None:
        waiting = self._on_their_way
        while True:
            await self._given.wait()
            while waiting:
                some = [waiting[n] for n in range(min(len(waiting), AT_ONCE))]
                try:
                    packet = packet_of([handed for handed, _ in some])
                    socket.send_fds(self._handed, [packet], [sock.fileno() for _, sock in some])
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(self._handed)
                except ConnectionError:
                    return  # the task that waits for its end notices
                except OSError as e:  # ETOOMANYREFS, ENOBUFS
                    log.warning("hand-over paused", extra={"front": self.number, "reason": e.strerror, "seconds": _PAUSE})
                    await trio.sleep(_PAUSE)
                else:
                    for _ in some:
                        waiting.popleft()

    async def _hear(self) -> None:
        with suppress(OSError):
            while True:
                await trio.lowlevel.wait_readable(self._handed)
                try:
                    while self._hear_one():
                        pass
                except BlockingIOError:
                    continue
                except ValueError as e:
                    self.broken(e)
                return

    def _hear_one(self) -> bool:
        """Receives one packet. False if the front has hung up; BlockingIOError if no packet has arrived."""
        packet, descriptors, _, _ = socket.recv_fds(self._handed, PACKET, MOST, socket.MSG_CMSG_CLOEXEC)
        try:
            said = said_of(packet) if packet else None
            if isinstance(said, LinkWanted):
                theirs, descriptors = descriptors, []
                self.linked(self, said.id, theirs)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if isinstance(said, Taken):
            self.acknowledged(self, said)
        return bool(packet)
