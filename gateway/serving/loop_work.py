"""LoopWork: names the work that the stack of a thread shows, and the peer or model for which it is done.

The kind of work is that of the first row of `WORKS` which has the file of any frame. So the rows stand in the order of what
tells most: a JSON text that arrives in a gRPC message is a gRPC message. All of it is read from stacks of a loop that is
late, by the thread that watches it: nothing is noted where the work is done.
"""

from __future__ import annotations

import inspect
import os
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import final

import trio

import models
import protocols
from gateway.addresses import peer_of as peer_of_socket
from gateway.addresses import split_port
from gateway.core.connection import Connection
from gateway.core.exchange import Exchange
from gateway.core.runner import Runner
from gateway.telemetry.loop_watch import Work
from gateway.telemetry.observer import peer_of
from gateway.workers.supervisor import Supervisor
from models.tracebacks.parked import local

CANCELLED = "cancelled streams"
WORKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("container answers", ("gateway/containers/",)),
    ("metrics scrapes", ("gateway/telemetry/metrics.py", "gateway/telemetry/live_look.py")),
    ("model.toml", ("gateway/config/text.py",)),
    (
        "model folders",
        tuple(f"gateway/catalog/{name}.py" for name in ("folder", "load_unload", "repository", "served_folder")),
    ),
    ("operator requests", ("gateway/operator/",)),
    ("compressed bodies", ("protocols/content_coding.py", "protocols/grpc/compression.py")),
    ("gRPC messages", ("protocols/grpc/", "gateway/dialects/grpc/")),
    (
        "JSON bodies",
        (*(f"protocols/{name}/" for name in ("json", "v2", "openai", "lmi")), "gateway/dialects/json_bodies.py"),
    ),
    ("AWS messages", ("protocols/aws/", "gateway/dialects/aws/")),
    ("TLS records", ("gateway/net/tls_transport.py",)),
    ("HTTP/2 frames", ("protocols/http2/", "gateway/wires/http2.py")),
    ("WebSocket frames", ("protocols/websocket/", "gateway/wires/websocket.py")),
    ("HTTP/1.1 messages", ("protocols/http1/", "gateway/wires/http1.py")),
    ("new connections", ("gateway/serving/acceptor.py", "gateway/net/listeners.py", "gateway/wires/detect.py")),
    (CANCELLED, ()),
    ("periodic checks", ("gateway/serving/timer.py",)),
    ("requests", tuple(f"gateway/{room}/" for room in ("codecs", "core", "dialects", "serving", "wires", "workers"))),
)
"""The kinds of work, each with the files and folders whose code does it. Metrics have one series for each."""
_ENDS = (Exchange.peer_gone.__code__, Connection.lost.__code__)
"""Code that ends the exchanges of a peer that has left."""
_OWNERS = ("gateway/core/", "gateway/wires/", "gateway/serving/", "gateway/net/")
"""Code whose variables tell the peer."""
_ROOTS = tuple(
    f"{Path(str(path)).parent}{os.sep}" for path in (Path(__file__).parents[1], *protocols.__path__, *models.__path__)
)


@lru_cache(maxsize=4096)
def _shown(file: str) -> str:
    """The path of a file of ours in the repository; empty for others."""
    for root in _ROOTS:
        if file.startswith(root):
            path = file.removeprefix(root).replace(os.sep, "/")
            return path if path.startswith(("gateway/", "protocols/", "models/")) else ""
    return ""


@lru_cache(maxsize=4096)
def _row(file: str) -> int:
    """The number of the first row that has the file; that behind the last one if none has."""
    path = _shown(file)
    rows = (n for n, (_, places) in enumerate(WORKS) if path and path.startswith(places))
    return next(rows, len(WORKS))


@final
class LoopWork:
    """Names the work of one gateway. May be called in any thread."""

    def __init__(self, runner: Runner, supervisor: Supervisor) -> None:
        self._runner, self._supervisor = runner, supervisor

    def whose(self, task: trio.lowlevel.Task) -> tuple[str, str]:
        """Returns the model that a task works for, in a call, in its load or beside it, and the exchange's id."""
        try:
            exchange, model = self._exchange_or_model(task)
            return (model, "") if exchange is None else (exchange.model, exchange.id)
        except AttributeError:  # an object that is being made has not all its attributes yet
            return "", ""

    def of(self, task: trio.lowlevel.Task | None, frames: list[FrameType]) -> Work:
        """Returns the work that these frames do, the innermost first, for the task that they belong to."""
        row = min((_row(frame.f_code.co_filename) for frame in frames), default=len(WORKS))
        kind = WORKS[row][0] if row < len(WORKS) else ""
        try:
            return self._owned(kind, task, frames)
        except AttributeError:  # so here
            return Work(kind, "")

    def _owned(self, kind: str, task: trio.lowlevel.Task | None, frames: list[FrameType]) -> Work:
        """This kind of work, with the peer or the model for which it is done."""
        exchange, model = (None, "") if task is None else self._exchange_or_model(task)
        exchange = next((found for frame in frames if (found := _exchange_in(frame)) is not None), exchange)
        if (exchange is not None and exchange.gone) or any(frame.f_code in _ENDS for frame in frames):
            kind = CANCELLED
        if folder := next((name for frame in frames if (name := _folder_in(frame))), ""):
            return Work(kind, folder)
        peer = next((name for frame in frames if (name := _container_in(frame))), "")
        peer = peer or next((name for frame in frames if (name := _peer_in(frame))), "")
        if not peer and exchange is not None:
            peer = peer_of(exchange)
        if not peer and task is not None and (outermost := getattr(task.coro, "cr_frame", None)) is not None:
            peer = _client_in(outermost)
        return Work(kind, split_port(peer)[0] if peer else model)

    def _exchange_or_model(self, task: trio.lowlevel.Task) -> tuple[Exchange | None, str]:
        above: trio.lowlevel.Task | None = task
        workers = {worker.task: name for name, worker in list(self._supervisor.workers.items())}
        while above is not None:
            if (exchange := self._runner.exchange_of(above)) is not None:
                return exchange, ""
            if name := workers.get(above):
                return None, name
            above = None if above.parent_nursery is None else above.parent_nursery.parent_task
        return None, ""


def _path_of(frame: FrameType, *places: str) -> str:
    """The path of the frame's code if it is in one of these places; else empty."""
    path = _shown(frame.f_code.co_filename)
    return path if path.startswith(places) else ""


def _folder_in(frame: FrameType) -> str:
    """The name of the model's folder that a frame reads."""
    path = local(frame, "path") if _path_of(frame, "gateway/catalog/folder.py") else None
    return os.path.basename(path) if isinstance(path, str) else ""


def _container_in(frame: FrameType) -> str:
    """The authority of the container whose answers a frame reads."""
    if not _path_of(frame, "gateway/containers/"):
        return ""
    owner = local(frame, "self")
    address = getattr(getattr(owner, "_container", owner), "address", None)
    return str(getattr(address, "authority", ""))


def _exchange_in(frame: FrameType) -> Exchange | None:
    """The exchange that a frame is about, by its variables."""
    path = _path_of(frame, *_OWNERS)
    if not path or (path == "gateway/core/runner.py" and frame.f_code.co_flags & inspect.CO_COROUTINE):
        return None  # that code runs one exchange after another, and its variables may be those of the one before
    return next((one for name in ("self", "exchange") if isinstance(one := local(frame, name), Exchange)), None)


def _peer_in(frame: FrameType) -> str:
    """The peer that a frame works for, by its variables; empty if they tell none."""
    if _path_of(frame, "gateway/operator/"):
        return _client_in(frame)
    if not _path_of(frame, *_OWNERS):
        return ""
    if (exchange := _exchange_in(frame)) is not None:
        return peer_of(exchange)
    found = (getattr(local(frame, name), "peer", "") for name in ("self", "connection", "transport"))
    return next((peer for peer in found if isinstance(peer, str) and peer), "")


def _client_in(frame: FrameType) -> str:
    """The client of an application or of a socket."""
    scope = local(frame, "scope")
    if isinstance(scope, dict) and scope.get("client"):
        return str(scope["client"][0])
    sock = local(frame, "sock")
    return "" if sock is None else peer_of_socket(sock)
