"""Runs a gateway on a loopback port in a thread of its own, for clients that need a socket and may block."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, final

import trio

from gateway.config import Config
from gateway.gateway import Gateway
from models.adapt import spec_of
from models.library.scripted import Scripted
from models.messages import Prompt

REMEMBERED = 1000
"""The number of last prompts that `scripted_gateway` keeps."""


@contextmanager
def loopback_gateway(models: Iterable[Any] = (), config: Config | None = None) -> Iterator[Gateway]:
    """Runs a gateway with these models for the length of the block, on a free port of 127.0.0.1: `gateway.port`, and
    `gateway.addresses` has its address. At the end it is cancelled, and its answers with it.

    The block may be sync code, or a task of any event loop. It is blocked until the gateway listens and its models are
    loaded, and again at the end until the thread has ended. The gateway's object may be read in the block, but not called:
    it belongs to the other thread. An exception of the gateway's start is raised."""
    config = config or Config()
    listen = replace(config.listen, host="127.0.0.1", port=0, tls_port=-1, bidi_port=-1, grpc_port=-1)
    gateway = Gateway(replace(config, listen=listen), models)
    began: Future[trio.lowlevel.TrioToken] = Future()
    scope = trio.CancelScope()

    async def serve() -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(gateway.serve)
                began.set_result(trio.lowlevel.current_trio_token())

    ended: Future[None] = Future()

    def run() -> None:
        try:
            trio.run(serve)
        except BaseException as e:
            (ended if began.done() else began).set_exception(e)
        finally:
            if not ended.done():
                ended.set_result(None)

    thread = threading.Thread(target=run, name="everywire loopback gateway", daemon=True)
    thread.start()
    token = began.result()
    try:
        yield gateway
    finally:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(scope.cancel)
        thread.join()
        ended.result()


@final
class ScriptedServer:
    """A scripted model behind a gateway on a loopback port."""

    name = "scripted"
    """The name of the model."""

    def __init__(self, gateway: Gateway, model: Scripted) -> None:
        self._model = model
        self.url = f"http://127.0.0.1:{gateway.port}"
        """The address of the gateway."""
        self.base_url = f"{self.url}/v1"
        """The address for clients of OpenAI."""

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The prompts that the model has got so far, at most the last 1,000: the oldest is the first."""
        return tuple(self._model.prompts)


@contextmanager
def scripted_gateway(turns: Sequence[Any] | None = None, config: Config | None = None) -> Iterator[ScriptedServer]:
    """Serves `models.library.scripted.Scripted` with these turns for the length of the block, as `loopback_gateway` does.
    Functions among the turns run in the gateway's thread."""
    model = Scripted(turns, remember=REMEMBERED)
    with loopback_gateway([spec_of(model, ScriptedServer.name)], config) as gateway:
        yield ScriptedServer(gateway, model)
