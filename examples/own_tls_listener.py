"""The program's own TLS listener before a gateway: certificate and ALPN by the requested name, and its own limits.

    python own_tls_listener.py FOLDER [PORT]

FOLDER has a NAME.pem (the chain) and a NAME-key.pem for each name that is served, such as `api.example.com`. A client that
asks for another name, or for none, is refused in the handshake. A name that begins with `http1.` offers HTTP/1.1 alone,
any other HTTP/2 too. At most 1000 connections are open, and 100 of one address; one more is closed before its handshake.

SIGTERM or Ctrl-C closes the listener and drains; a second one cuts the streams that still run.
"""

import signal
import ssl
import sys
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import trio

from gateway.config import Config, DrainConfig, ListenConfig
from gateway.gateway import Gateway
from models.messages import Prompt

CONNECTIONS, OF_ONE_ADDRESS = 1000, 100
HANDSHAKE = 10.0  # seconds


async def speak(prompt: Prompt) -> AsyncIterator[str]:
    """The prompt's words, one every tenth of a second."""
    for word in prompt.text.split():
        await trio.sleep(0.1)
        yield word + " "


def context_of(folder: Path) -> ssl.SSLContext:
    """A context that switches, in the handshake, to that of the name which the client asks for."""
    contexts = {}
    for chain in sorted(folder.glob("*.pem")):
        key = chain.with_name(chain.stem + "-key.pem")
        if key.exists():
            contexts[chain.stem] = context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.set_ciphers("ECDHE+AESGCM:ECDHE+CHACHA20")  # TLS 1.2's for HTTP/2 (RFC 9113 section 9.2.2)
            context.load_cert_chain(chain, key)
            context.set_alpn_protocols(["http/1.1"] if chain.stem.startswith("http1.") else ["h2", "http/1.1"])
    if not contexts:
        raise SystemExit(f"{folder} has no NAME.pem with its NAME-key.pem")

    def choose(tls: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> int | None:
        if name not in contexts:
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        tls.context = contexts[name]
        return None

    first = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    first.minimum_version = ssl.TLSVersion.TLSv1_2
    first.sni_callback = choose
    return first


class Front:
    """Serves accepted connections, within the limits."""

    def __init__(self, gateway: Gateway, context: ssl.SSLContext) -> None:
        self.gateway, self.context = gateway, context
        self.of: Counter[str] = Counter()  # connections by address

    async def serve(self, below: trio.SocketStream) -> None:
        """Serves one connection to its end. No exception leaves this: it would end the listener and all connections."""
        try:
            address = below.socket.getpeername()[0]
        except OSError:
            await trio.aclose_forcefully(below)
            return  # reset before it was served
        if self.of.total() >= CONNECTIONS or self.of[address] >= OF_ONE_ADDRESS:
            await trio.aclose_forcefully(below)
            return
        self.of[address] += 1
        try:
            # Not https_compatible: TLS's close_notify at the end tells a whole answer from one that was cut.
            stream = trio.SSLStream(below, self.context, server_side=True)
            try:
                with trio.fail_after(HANDSHAKE):
                    await stream.do_handshake()
            except (trio.BrokenResourceError, trio.TooSlowError):
                await trio.aclose_forcefully(stream)
                return
            await self.gateway.serve_stream(stream)
        finally:
            self.of[address] -= 1
            if not self.of[address]:
                del self.of[address]


async def main(folder: Path, port: int) -> None:
    gateway = Gateway(Config(listen=ListenConfig(port=-1), drain=DrainConfig(timeout=10)), models=[speak])
    front = Front(gateway, context_of(folder))
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            accepting = trio.CancelScope()
            nursery.start_soon(obey, signals, gateway, accepting)
            await nursery.start(gateway.serve)
            listeners = await trio.open_tcp_listeners(port, host="127.0.0.1")
            print(f"listening on https://127.0.0.1:{listeners[0].socket.getsockname()[1]}", flush=True)
            with accepting:
                # The outer nursery runs the connections: they go on when accepting has ended.
                await trio.serve_listeners(front.serve, listeners, handler_nursery=nursery)
            await gateway.stopped()
            nursery.cancel_scope.cancel()
    report = gateway.drain_report
    print(f"drained: {report.endings if report else {}}", flush=True)


async def obey(signals: AsyncIterator[int], gateway: Gateway, accepting: trio.CancelScope) -> None:
    """Closes the listener and drains on the first signal, and hurries the drain on each further one."""
    await anext(signals)
    accepting.cancel()
    gateway.begin_drain()
    async for _ in signals:
        gateway.hurry()


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        raise SystemExit("usage: python own_tls_listener.py FOLDER [PORT]")
    trio.run(partial(main, Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 8443))
