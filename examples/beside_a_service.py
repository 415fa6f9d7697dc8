"""A gateway in the program's own nursery, beside a TCP service that reports its state; one signal ends both well.

    python beside_a_service.py [PORT [STATUS_PORT]]
    curl -N localhost:8080/invocations -d '{"inputs": "one two three", "stream": true}'
    nc localhost 8090    # then type: models, or: counts

The status service answers until the gateway has drained, so that a drain can be watched. SIGTERM or Ctrl-C drains; a
second one cuts the streams that still run. If one of the two fails, the nursery ends the other too.
"""

import json
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from functools import partial

import trio

from gateway.config import Config, DrainConfig, ListenConfig
from gateway.gateway import Gateway
from models.messages import Prompt


async def speak(prompt: Prompt) -> AsyncIterator[str]:
    """The prompt's words, one every tenth of a second."""
    for word in prompt.text.split():
        await trio.sleep(0.1)
        yield word + " "


async def tell(gateway: Gateway, stream: trio.SocketStream) -> None:
    """One client of the status service: a line asks, a line of JSON answers."""
    asked = b""
    async with stream:
        try:
            async for piece in stream:
                *lines, asked = (asked + piece).split(b"\n")
                for line in lines:
                    await stream.send_all(json.dumps(answer(gateway, line.strip())).encode() + b"\n")
                if len(asked) > 1000:
                    return  # no valid question is that long
        except trio.BrokenResourceError:
            pass  # the client has left; an exception would end the gateway too


def answer(gateway: Gateway, line: bytes) -> object:
    """The status service's answer to a line."""
    match line:
        case b"counts":
            return {"draining": gateway.draining, **asdict(gateway.counts())}
        case b"models":
            return {name: status.state.value for name, status in gateway.models.items()}
        case _:
            return {"error": "ask for: counts, models"}


async def main(port: int, status_port: int) -> None:
    config = Config(listen=ListenConfig(host="127.0.0.1", port=port), drain=DrainConfig(timeout=10))
    gateway = Gateway(config, models=[speak])
    # First: a signal that comes while the models load must not be lost.
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(obey, signals, gateway)
            await nursery.start(gateway.serve)
            service = partial(trio.serve_tcp, partial(tell, gateway), status_port, host="127.0.0.1")
            listeners: list[trio.SocketListener] = await nursery.start(service)
            status = listeners[0].socket.getsockname()[1]
            print(f"listening on http://127.0.0.1:{gateway.port}, status on 127.0.0.1:{status}", flush=True)
            await gateway.stopped()
            nursery.cancel_scope.cancel()  # the status service, which has no end of its own
    report = gateway.drain_report
    print(f"drained: {report.endings if report else {}}", flush=True)


async def obey(signals: AsyncIterator[int], gateway: Gateway) -> None:
    """Drains on the first signal, and hurries the drain on each further one."""
    await anext(signals)
    gateway.begin_drain()
    async for _ in signals:
        gateway.hurry()


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8080
    trio.run(main, port, int(sys.argv[2]) if len(sys.argv) > 2 else 8090)
