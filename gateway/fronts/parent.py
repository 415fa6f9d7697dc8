"""The parent of several fronts: opens the ports, accepts connections, hands them over, and keeps the fronts running."""

from __future__ import annotations

import logging
import os
import random
import socket
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeAlias, final

import trio

from gateway.config import Config
from gateway.config.load import resolve
from gateway.config.problem import ConfigError
from gateway.doorbell import Doorbell
from gateway.errors import ModelGivenUp
from gateway.fronts.handover import SILENT, Handover
from gateway.fronts.link import FrontLink
from gateway.fronts.messages import Begin, Taken
from gateway.fronts.owned import OwnedModels, OwnedSpec
from gateway.fronts.sums import Sums, sum_of
from gateway.log_limits import LogLimits
from gateway.net.listeners import Listener
from gateway.serving.drain import DrainReport
from gateway.serving.ports import Ports, open_ports
from gateway.telemetry import logging_setup
from gateway.telemetry.logging_setup import Level
from gateway.workers.restart_policy import decide
from models.spec import RestartPolicy

log = logging.getLogger("gateway.fronts")

CommandLine: TypeAlias = "tuple[str | None, dict[str, str], dict[str, str], tuple[str, ...]]"
"""The configuration file, the given settings, the option behind each setting, and files whose models are served too."""

_HELD = 512  # the most connections that the parent holds; more wait in the kernel
_LOOK = 0.25  # seconds between two checks for waiting connections
_GRACE = 15.0  # seconds that a front has beyond the deadline of its drain: its own goodbyes take five
_UNLOAD = 60.0  # seconds that its models have to unload after that
_POLICY = RestartPolicy()

_Connection: TypeAlias = "tuple[socket.socket, bool]"  # the socket, and True if it is served with TLS


@final
class FrontFailed(OSError):
    """A front did not come up. The text has the reason."""


@final
class Parent:
    """Serves a configuration with several fronts. The parent never reads a client's bytes."""

    def __init__(self, config: Config, processes: int, command_line: CommandLine, owned: Iterable[OwnedSpec] = ()) -> None:
        """Each front reads the configuration again, by the command line. `owned` are the models whose processes the fronts
        share."""
        self.config, self.processes, self._command_line = config, processes, command_line
        self.ports = Ports()
        """The open ports; empty before `serve`."""
        self.links: list[FrontLink] = []
        """The fronts that have a process."""
        self.owned = OwnedModels(owned, self.links)
        """The models whose processes the fronts share."""
        self.current: dict[int, FrontLink] = {}
        """The front of each number that serves, or comes up to serve."""
        self.sums = Sums()
        """The metrics of all fronts."""
        self.report: DrainReport | None = None
        """The drain report of all fronts; None before they have drained."""
        self.given_up = ""
        """The reason why the server ends by itself; empty if it does not."""
        self._listeners: list[Listener] = []
        self._handover, self._log_limits = Handover[_Connection](), LogLimits()
        self._ids = 0
        self._crashes: dict[int, list[float]] = {}
        self._replacing: set[int] = set()  # numbers of which a new front comes up beside the one that serves
        self._reports: list[DrainReport] = []
        self.lost = 0
        """The number of fronts that ended during the drain without a report."""
        self._timeout = config.drain.timeout
        self._draining, self._hurried, self._reported = trio.Event(), trio.Event(), trio.Event()
        self._patience = trio.CancelScope()
        self._changed = trio.lowlevel.ParkingLot()
        self._replace_wanted = Doorbell()
        self._level: Level | None = None
        self._nursery: trio.Nursery  # runs the links
        self._up: trio.Nursery  # runs the tasks that end when a drain begins

    # -- start and end -----------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Opens the ports and serves until it has drained. ConfigError or OSError if it cannot begin; ModelGivenUp after a
        drain that it has begun by itself."""
        self._listeners, self.ports = open_ports(self.config)
        try:
            async with trio.open_nursery() as self._nursery:
                self.owned.start(self._nursery)
                async with trio.open_nursery() as self._up:
                    self._up.start_soon(self._come_up)
                    await self._draining.wait()
                    await self._say_goodbye()
                    self._up.cancel_scope.cancel()
                await self._drain()
        finally:
            self._close_ports()
            for sock, _ in self._handover.drop():
                sock.close()
        if self.given_up:
            raise ModelGivenUp(self.given_up)

    async def _come_up(self) -> None:
        for number in range(self.processes):
            self.current[number] = self._start(number)
        links = list(self.current.values())
        await self._until(lambda: any(map(_ended, links)) or all(link.listening for link in links))
        for link in links:
            if _ended(link):
                raise _failure(link)
        for link in links:
            link.taking = True
        for listener in self._listeners:
            accepted = partial(self._accepted, tls=listener.tls)
            self._up.start_soon(listener.accept, accepted, self._has_room, self._log_limits)
        self._up.start_soon(self._look)
        await self._until(lambda: all(link.serving or _ended(link) for link in links))
        models = sorted({name for link in links if link.serving for name in link.serving.models})
        facts = {"at": self.ports.addresses, "models": models, "fronts": self.processes}
        logging.getLogger("gateway").info("serving", extra=facts)
        self._up.start_soon(self._replace)

    def _start(self, number: int) -> FrontLink:
        """Starts a front of this number, which may get connections once it listens. OSError if it cannot be started."""
        self._ids += 1
        owned = self.owned.begins()
        begin = Begin(number, self.processes, self.ports, *self._command_line, first=self._ids == 1, shared=owned)
        link = FrontLink.start(begin, self._ids)
        link.asked, link.linked = self.owned.asked, self.owned.link
        self.owned.welcome(link)
        if self._level is not None:
            link.tell("level", self._level)
        link.changed, link.acknowledged = self._noticed, self._acknowledged
        self.links.append(link)
        self._nursery.start_soon(self._live, link)
        log.info("front started", extra={"front": number, "pid": link.process.pid})
        return link

    async def _live(self, link: FrontLink) -> None:
        """Runs a front's link to its end, and cleans up after it."""
        await link.run()
        lost = self._handover.open(link.id)
        self._handover.remove(link.id)
        self.links.remove(link)
        self.owned.gone(link)
        over = link.over
        self.sums.remove(link.id, over.metrics if over is not None else None)
        if self._draining.is_set():
            if over is not None:
                self._reports.append(over.report)
            elif link.taking:
                self.lost += 1
        about = {"front": link.number, "pid": link.process.pid, "how": str(link.exit), "reason": link.failed}
        if link.draining and link.failed and self.given_up:
            self.given_up = link.failed
        if over is not None or not link.taking:
            log.info("front ended", extra=about)
        else:
            log.error("front ended", extra={**about, "connections": lost})
        taking, link.taking = link.taking, False
        self._choose()
        self._changed.unpark_all()
        if taking and not link.asked_to_end and not self._draining.is_set() and link.number not in self._replacing:
            self._up.start_soon(self._restart, link.number)

    def _noticed(self, link: FrontLink) -> None:
        """Reacts to a change of a front: if it drains by itself, all others drain too."""
        if (stands := link.standing) is not None and link.listening and not link.asked_to_end:
            self._handover.add(link.id, ready=not stands.unready, missed=stands.missed)
        self._choose()
        self._changed.unpark_all()
        if link.draining and not link.asked_to_end:
            self.given_up = self.given_up or f"front {link.number} does not go on without a model that was given up"
            self.begin_drain()

    def _choose(self) -> None:
        """Hands waiting connections to the fronts that get them now, and answers the fronts whose state has changed: their
        models take calls only after this."""
        self.sums.listening(len(self._handover.chosen))
        self._hand_over()
        for link in self.links:
            link.tell_heard()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.park()

    # -- connections -------------------------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        return self._handover.held < _HELD

    def _accepted(self, sock: socket.socket, *, tls: bool) -> None:
        self._handover.put((sock, tls))
        self._hand_over()

    def _hand_over(self) -> None:
        links = {link.id: link for link in self.links}
        for id, number, (sock, tls) in self._handover.assign(trio.current_time()):
            links[id].hand(number, sock, tls=tls)

    def _acknowledged(self, link: FrontLink, taken: Taken) -> None:
        now = trio.current_time()
        for sock, _ in self._handover.heard(link.id, taken.numbers, taken.lacking, taken.open, now):
            sock.close()
        self._hand_over()
        if self._handover.idle(link.id):
            self._changed.unpark_all()

    async def _look(self) -> None:
        """Hands over waiting connections from time to time: a front that had no descriptors left takes some again later."""
        while True:
            await trio.sleep(_LOOK)
            self._hand_over()

    # -- restarts and replacements -----------------------------------------------------------------------------------

    async def _restart(self, number: int) -> None:
        """Starts a front again that has ended by itself, by the default restart policy of models."""
        crashes = self._crashes.setdefault(number, [])
        while True:
            now = trio.current_time()
            crashes.append(now)
            del crashes[: -_POLICY.intensity - 1]
            wait = decide(_POLICY, crashes, now, chance=random.random())
            if wait is None:
                self.given_up = self.given_up or f"front {number} was given up: it has ended too often"
                log.critical("a front was given up: draining", extra={"front": number})
                self.begin_drain()
                return
            log.info("front restarts", extra={"front": number, "restart_in": round(wait, 3)})
            await trio.sleep(wait)
            try:
                link = self.current[number] = self._start(number)
            except OSError as e:
                log.error("a front cannot be started", extra={"front": number, "reason": str(e)})
                continue
            await self._until(lambda link=link: link.serving or _ended(link))  # type: ignore[misc]
            if not _ended(link):
                link.taking = True
                return

    def replace(self) -> None:
        """Asks every front to read its certificate again. Then new fronts replace the old ones, one after the other; each
        reads code and configuration again. If one does not come up, the old ones stay."""
        for link in self.links:
            link.tell("certificate")
        self._replace_wanted.ring()

    async def _replace(self) -> None:
        while True:
            await self._replace_wanted.wait()
            if not await self._renew():
                continue
            for number in range(self.processes):
                old = self.current[number]
                if not old.taking:
                    continue  # it is being restarted already, and then reads all again
                if not await self._replace_one(number, old):
                    self.owned.take_back()
                    break
            else:
                log.info("fronts replaced", extra={"fronts": self.processes})

    async def _renew(self) -> bool:
        """Reads the configuration again, and starts the processes of its models; False if these do not come up. If there are
        none, the first front reports an error in the configuration."""
        if self.processes == 1:  # a single front starts the processes itself
            return True
        file, overrides, flags, _ = self._command_line
        path = None if file is None else Path(file)
        try:
            config = resolve(file=path, environ=os.environ, overrides=overrides, flags=flags).config
            reason = await self.owned.renew(config)
        except ConfigError as e:
            reason = str(e) if self.owned.latest else ""
        if reason:
            log.error("the processes of models do not come up: the old ones stay", extra={"reason": reason})
        return not reason

    async def _replace_one(self, number: int, old: FrontLink) -> bool:
        self._replacing.add(number)
        try:
            if not await self._come_up_beside(number, old):
                return False
        finally:
            self._replacing.discard(number)
            if not old.taking and self.current[number] is old:
                self._up.start_soon(self._restart, number)  # the old front has ended meanwhile
        self._handover.retire(old.id)
        self._choose()
        with trio.move_on_after(2 * SILENT):
            await self._until(lambda: self._handover.idle(old.id))
        self._end(old, "retire")
        with trio.move_on_after(self.config.drain.timeout + _GRACE + _UNLOAD):
            await self._until(lambda: old not in self.links)
        old.kill()
        return True

    async def _come_up_beside(self, number: int, old: FrontLink) -> bool:
        """Starts a front that replaces another once it serves; False if it does not come up."""
        new: FrontLink | None = None
        try:
            new = self._start(number)
            await self._until(lambda: bool(new.serving) or _ended(new))
            reason = ""
            if new.serving is None:
                reason = new.failed or f"its process ended ({new.exit})"
            elif _unready(new) and not _unready(old):
                reason = "; ".join(_unready(new))[:2000]
        except OSError as e:
            reason = str(e)
        if reason or new is None:
            log.error("a new process does not come up: the old ones stay", extra={"front": number, "reason": reason})
            if new is not None:
                self._handover.retire(new.id)
                new.asked_to_end = True
                new.kill()
            return False
        self.current[number] = new
        new.taking = True
        return True

    def set_level(self, level: Level) -> None:
        """Sets the level of the log in the parent and all fronts, present and future."""
        self._level = level
        logging_setup.set_level(level)
        for link in self.links:
            link.tell("level", level)

    # -- the end -----------------------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """True once a drain has begun."""
        return self._draining.is_set()

    def begin_drain(self, timeout: float | None = None) -> None:
        """Closes the ports and drains all fronts. Live exchanges have `timeout` seconds, by default `drain.timeout`. A later
        call can only shorten that."""
        if timeout is not None:
            self._timeout = min(self._timeout, timeout) if self.draining else timeout
            self._patience.deadline = min(self._patience.deadline, trio.current_time() + timeout + _GRACE)
            if self.draining:
                for link in self.links:
                    link.tell("drain", timeout)
        self._draining.set()

    def hurry(self) -> None:
        """Moves the deadline of a drain to now."""
        self._hurried.set()
        for link in self.links:
            link.tell("hurry")
        self._patience.deadline = min(self._patience.deadline, trio.current_time() + _GRACE)

    async def reported(self) -> DrainReport:
        """Waits for the end of a drain, and returns the report of all fronts."""
        await self._reported.wait()
        assert self.report is not None
        return self.report

    async def _say_goodbye(self) -> None:
        """Begins the drain of the fronts, which fail health checks from now on. The ports stay open for `drain.delay`
        seconds."""
        for link in list(self.links):
            if not link.listening:
                self._end(link, "")
        if delay := self.config.drain.delay:
            self._handover.paused = True  # until all fail health checks: otherwise their answers would differ
            self._tell_drain()
            with trio.move_on_after(SILENT):
                await self._until(lambda: all(link.draining or _ended(link) for link in self.links))
            self._handover.paused = False
            self._hand_over()
            with trio.move_on_after(delay):
                await self._hurried.wait()

    async def _drain(self) -> None:
        self._close_ports()
        with trio.move_on_after(2 * SILENT):  # accepted connections must reach a front before the fronts stop
            await self._until(lambda: not self._handover.held)
        self._tell_drain()
        self._patience.deadline = min(self._patience.deadline, trio.current_time() + self._timeout + _GRACE)
        with self._patience:
            await self._until(lambda: all(link.over or _ended(link) for link in self.links))
        for link in self.links:
            if not link.over:
                log.error("a front does not drain: it is killed", extra={"front": link.number, "pid": link.process.pid})
                link.kill()
        with trio.move_on_after(_UNLOAD):
            await self._until(lambda: not self.links)
        await self.owned.stop()
        self.report = sum_of(self._reports, lost=self.lost)
        self._reported.set()
        self._nursery.cancel_scope.cancel()

    def _tell_drain(self) -> None:
        for link in self.links:
            if not link.asked_to_end:
                self._end(link, "drain")
                if self._hurried.is_set():
                    link.tell("hurry")

    def _end(self, link: FrontLink, how: str) -> None:
        link.asked_to_end = True
        if how:
            link.tell(how, self._timeout if how == "drain" else None)
        else:
            link.kill()

    def _close_ports(self) -> None:
        for listener in self._listeners:
            listener.close()


def _ended(link: FrontLink) -> bool:
    return link.exit is not None or bool(link.failed)


def _unready(link: FrontLink) -> tuple[str, ...]:
    return () if link.standing is None else link.standing.unready


def _failure(link: FrontLink) -> Exception:
    text = link.failed or f"its process ended ({link.exit})"
    if link.configuration:
        return ConfigError(text)
    return FrontFailed(f"front {link.number} does not come up: {text}")
