"""A gateway in an asyncio program: Trio runs as a guest in asyncio's event loop, in the same thread, beside its tasks.

    python beside_asyncio.py [PORT [STATUS_PORT]]
    curl -N localhost:8080/invocations -d '{"inputs": "one two three", "stream": true}'
    nc localhost 8090    # then type: said

The model calls an engine written for asyncio, which has a background task. SIGTERM or Ctrl-C drains the gateway, a second
one cuts the streams that still run; then the program's own service ends. Your program needs only `trio_in_asyncio` and
`asyncio_in_trio`.
"""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import trio
from outcome import Outcome

from gateway.config import Config, DrainConfig, ListenConfig
from gateway.gateway import Gateway
from models.messages import Prompt

T = TypeVar("T")


async def trio_in_asyncio(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Runs a Trio function in this event loop. If the caller is cancelled, the function is cancelled and its end awaited."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[Outcome[T]] = loop.create_future()
    scope, tokens = trio.CancelScope(), list[trio.lowlevel.TrioToken]()

    async def guest() -> T:
        tokens.append(trio.lowlevel.current_trio_token())
        with scope:
            return await function(*args)
        raise asyncio.CancelledError

    trio.lowlevel.start_guest_run(
        guest,
        run_sync_soon_threadsafe=loop.call_soon_threadsafe,
        done_callback=over.set_result,
        host_uses_signal_set_wakeup_fd=True,
    )
    while not over.done():
        try:
            await asyncio.shield(over)
        except asyncio.CancelledError:
            if tokens:
                tokens[0].run_sync_soon(scope.cancel)
            else:
                scope.cancel()  # the guest has not begun
    return over.result().unwrap()


async def asyncio_in_trio(coroutine: Coroutine[Any, Any, T]) -> T:
    """Awaits an asyncio coroutine in a Trio task. If the task is cancelled, the coroutine is cancelled and its end
    awaited."""
    token = trio.lowlevel.current_trio_token()
    task = asyncio.get_running_loop().create_task(coroutine)
    over = trio.Event()
    task.add_done_callback(lambda _: token.run_sync_soon(over.set))
    try:
        await over.wait()
    except trio.Cancelled:
        task.cancel()
        with trio.move_on_after(5, shield=True):
            await over.wait()
        raise
    return task.result()


class Engine:
    """An engine as an asyncio program may have it: a queue, and a task that serves it."""

    def __init__(self) -> None:
        self._asked: asyncio.Queue[tuple[str, asyncio.Future[str]]] = asyncio.Queue()
        self.said = 0

    async def work(self) -> None:
        while True:
            word, answer = await self._asked.get()
            await asyncio.sleep(0.1)
            if not answer.cancelled():
                answer.set_result(word + " ")
                self.said += 1

    async def say(self, word: str) -> str:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        await self._asked.put((word, answer))
        return await answer


async def main(port: int, status_port: int) -> None:
    engine = Engine()
    clients: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def speak(prompt: Prompt) -> AsyncIterator[str]:
        """The prompt's words, each as the engine says it."""
        for word in prompt.text.split():
            yield await asyncio_in_trio(engine.say(word))

    async def tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client of the program's own service."""
        if (task := asyncio.current_task()) is not None:
            clients[task] = writer
            task.add_done_callback(clients.pop)
        try:
            while await reader.readline() == b"said\n":
                writer.write(f"{engine.said} words\n".encode())
                await writer.drain()
        except (ConnectionError, ValueError):
            pass  # the client has left, or its line is too long
        finally:
            writer.close()

    config = Config(listen=ListenConfig(host="127.0.0.1", port=port), drain=DrainConfig(timeout=10))
    gateway = Gateway(config, models=[speak])
    async with await asyncio.start_server(tell, "127.0.0.1", status_port) as service:
        status = service.sockets[0].getsockname()[1]
        working = asyncio.create_task(engine.work())
        await trio_in_asyncio(serve, gateway, status)
        working.cancel()
        for writer in clients.values():
            writer.close()
        await asyncio.gather(*clients)
    report = gateway.drain_report
    print(f"drained: {report.endings if report else {}}", flush=True)


async def serve(gateway: Gateway, status: int) -> None:
    """Serves until a signal has drained the gateway. All calls to the gateway are made here, on Trio's side."""
    token, loop = trio.lowlevel.current_trio_token(), asyncio.get_running_loop()

    def obey() -> None:
        """Drains on the first signal, and hurries the drain on each further one."""
        if gateway.draining:
            gateway.hurry()
        else:
            gateway.begin_drain()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, token.run_sync_soon, obey)
    async with trio.open_nursery() as nursery:
        await nursery.start(gateway.serve)
        print(f"listening on http://127.0.0.1:{gateway.port}, status on 127.0.0.1:{status}", flush=True)


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8080
    asyncio.run(main(port, int(sys.argv[2]) if len(sys.argv) > 2 else 8090))
