"""Both sides of an instance by hand: one that sends and receives messages, a stand-in for a process, and a client."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import trio

from gateway.instances.asyncio_child import serve_on_asyncio
from gateway.instances.instance import Instance
from gateway.instances.memory import Arena, SharedMemory
from gateway.instances.messages import (
    Describe,
    Described,
    Ended,
    Frames,
    Hello,
    Load,
    Loaded,
    Message,
    Open,
    encoded,
    frames_of,
    item_of,
    message_of,
)
from gateway.instances.pipe import Pipe
from gateway.instances.spawn import Exit, ProcessPlan
from gateway.instances.trio_child import TrioChild
from models.messages import Family
from models.session import Call, Session
from models.spec import ModelSpec

PATIENCE = 60  # seconds, of what comes at once


@asynccontextmanager
async def streams() -> AsyncIterator[tuple[trio.SocketStream, trio.SocketStream]]:
    """Two ends of a connection within this process."""
    ours, theirs = trio.socket.socketpair()
    async with trio.SocketStream(ours) as a, trio.SocketStream(theirs) as b:
        yield a, b


class Side:
    """One side of a connection, which says what it is told to."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream, self._frames = stream, Frames()
        self._heard = deque[Message]()

    async def say(self, *messages: Message) -> None:
        """One frame, or more where they are large."""
        with trio.fail_after(PATIENCE):
            for frame in frames_of([encoded(message) for message in messages]):
                await self.stream.send_all(frame)

    async def give(self, session: int, *given: Any) -> None:
        """Messages of a model."""
        await self.say(*[item_of(session, message)[0] for message in given])

    async def hear(self) -> Message | None:
        """The next message; None at the end of the stream."""
        with trio.fail_after(PATIENCE):
            while not self._heard:
                data = await self.stream.receive_some(65536)
                if not data:
                    return None
                self._heard += [message for found in self._frames.feed(data) for message in found]
        return self._heard.popleft()

    async def take(self) -> Any:
        """The next message, which is one of a model."""
        return message_of(await self.hear())[0]

    async def rest(self) -> list[Message]:
        """All that is said until the end."""
        found = []
        while (message := await self.hear()) is not None:
            found.append(message)
        return found

    def hang_up(self) -> None:
        self.stream.socket.close()


@contextmanager
def shared(size: int, also: Arena | None = None) -> Iterator[tuple[SharedMemory, SharedMemory]]:
    """Memory as both sides of an instance have it, in one process."""
    ours = SharedMemory.create(size, also=also)
    theirs = SharedMemory.of_descriptors(*map(os.dup, ours.descriptors))
    try:
        yield ours, theirs
    finally:
        ours.close()
        theirs.close()


# -- the gateway's side ----------------------------------------------------------------------------------------------------


class NoProcess:
    """A stand-in for the process of an Instance: it ends when it is told to."""

    def __init__(self, memory: SharedMemory | None = None) -> None:
        self.plan = ProcessPlan(name="m", number=0)
        self.pid, self.tail, self.killed, self.memory = 4711, "", 0, memory
        self.socket, theirs = socket.socketpair()
        for each in (self.socket, theirs):
            each.setblocking(False)
        self.side = Side(trio.SocketStream(trio.socket.from_stdlib_socket(theirs)))
        self.over, self._exit = trio.Event(), Exit()
        self.closed = False

    def stream(self) -> trio.SocketStream:
        return trio.SocketStream(trio.socket.from_stdlib_socket(self.socket))

    def used(self) -> tuple[int, float]:
        return 0, 0.0

    async def ended(self) -> Exit:
        await self.over.wait()
        return self._exit

    def end(self, end: Exit, *, hang_up: bool = True) -> None:
        self._exit = end
        self.over.set()
        if hang_up:
            self.side.hang_up()

    def kill(self) -> None:
        if not self.over.is_set():
            self.killed += 1
            self.end(Exit(signal=9))

    def close(self) -> None:
        self.closed = True
        trio.lowlevel.notify_closing(self.socket)
        self.socket.close()
        self.side.hang_up()

    async def read_output(self, said: Callable[[str, str], None]) -> None:
        said("stderr", "hello")
        await self.over.wait()


class House:
    """An instance that runs."""

    def __init__(self, instance: Instance, process: NoProcess, nursery: trio.Nursery) -> None:
        self.instance, self.process, self.side, self._nursery = instance, process, process.side, nursery
        self.loads, self.worn, self.error, self.over = 0, 0, None, trio.Event()
        self.scope = trio.CancelScope()

    async def run(self) -> None:
        try:
            with self.scope:
                await self.instance.run([], self.ready, self.wear)
        except Exception as e:
            self.error = e
        self.over.set()

    def wear(self) -> None:
        self.worn += 1

    def ready(self) -> None:
        self.loads += 1
        self.instance.ready = True

    async def end(self) -> Exception | None:
        """Why it has ended."""
        with trio.fail_after(PATIENCE):
            await self.over.wait()
        return self.error

    def call(self, client: Client | None = None, first: Any = None, **named: Any) -> Exchange:
        exchange = Exchange(client or Client())
        self._nursery.start_soon(exchange.run, self.instance, first, named)
        return exchange


class Exchange:
    """A session of a client's that is under way, and how often it has ended."""

    def __init__(self, client: Client) -> None:
        self.client, self.endings, self.scope = client, list[BaseException | None](), trio.CancelScope()
        self._over = trio.Event()

    async def run(self, instance: Instance, first: Any, named: dict[str, Any]) -> None:
        self.session = Session(self.client, **named)
        try:
            with self.scope:
                await instance.call(self.session, first)
            self.endings.append(trio.Cancelled if self.scope.cancelled_caught else None)
        except Exception as e:
            self.endings.append(e)
        self._over.set()

    async def end(self) -> Any:
        with trio.fail_after(PATIENCE):
            await self._over.wait()
        (end,) = self.endings
        return end


class Client:
    """The client of a session: it sends some messages, and records what it receives."""

    complete = False

    def __init__(self, *said: Any, more: bool = False) -> None:
        self.reply: dict[str, str] = {}
        self.log: list[Any] = []
        self.reads = trio.Event()
        self.reads.set()
        self.says, self._said = trio.open_memory_channel[Any](math.inf)
        for message in said:
            self.says.send_nowait(message)
        if not more:
            self.says.close()

    async def receive(self) -> Any:
        return await self._said.receive()

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.log.append(message)

    def accept(self) -> None:
        self.log.append(dict(self.reply))


class OneMessage(Client):
    """A client whose first message is its last, and has been received."""

    exhausted = True


@asynccontextmanager
async def instance(*, hang_timeout: float = 0.0, memory: SharedMemory | None = None, **limits: Any) -> AsyncIterator[House]:
    """An instance that has loaded; at the end its process exits, if it has not before."""
    process, load = NoProcess(memory), Load(4, **limits)
    async with trio.open_nursery() as nursery:
        house = House(Instance(process, load, hang_timeout=hang_timeout), process, nursery)
        nursery.start_soon(house.run)
        assert await house.side.hear() == load
        await house.side.say(LOADED)
        await trio.testing.wait_all_tasks_blocked()
        try:
            yield house
        finally:
            process.end(Exit(code=0))
            await house.end()
            assert process.closed
            nursery.cancel_scope.cancel()


LOADED = Loaded(None, False, False)


# -- the instance's side ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def child(
    model: Any = None,
    *,
    load: Any = None,
    loaded: bool = True,
    limits: Any = (4,),
    loop: str = "trio",
    links: socket.socket | None = None,
    **spec: Any,
) -> AsyncIterator[Side]:
    """The side of a gateway to a Child, or to one on an asyncio loop, in a thread; at the end it hangs up, and the child is
    over. Links of others come to it over `links`."""

    @asynccontextmanager
    async def loading() -> AsyncIterator[Any]:
        yield model

    def described(message: Describe) -> tuple[ModelSpec, Message]:
        return ModelSpec(**{"name": "m", "family": Family.PARTS, "load": load or loading, **spec}), Described({}, False)

    async with streams() as (ours, theirs), trio.open_nursery() as nursery:
        side = Side(ours)

        async def run() -> None:
            if loop == "asyncio":
                own = socket.socket(fileno=os.dup(theirs.socket.fileno()))
                serve = serve_on_asyncio(own, HELLO, described, links=links)
                await trio.to_thread.run_sync(asyncio.run, serve, abandon_on_cancel=True)  # a test that fails ends
            else:
                await TrioChild(Pipe(theirs), described, links).run()
            theirs.socket.close()  # as its process ends

        nursery.start_soon(run)
        if loop == "asyncio":
            assert await side.hear() == HELLO
        await side.say(Describe("m", "app:m", {}), Load(*limits))
        assert await side.hear() == Described({}, False)
        if loaded:
            assert type(await side.hear()) is Loaded
        try:
            yield side
        finally:
            side.hang_up()
        with trio.fail_after(PATIENCE):
            while nursery.child_tasks:
                await trio.testing.wait_all_tasks_blocked(0.001)


HELLO = Hello("1")


def opened(session: int, seconds: float = -1.0, **call: Any) -> Open:
    return Open(session, Call(**call), seconds)


def cancelled(session: int) -> Ended:
    return Ended(session, "cancelled")
