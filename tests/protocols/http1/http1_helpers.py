"""Short words for telling HTTP/1.1 conversations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from protocols.events import ConnectionEnd, Data, End, Event, Head, Request, Response, Signal
from protocols.http1.connection import HTTP1Connection, HTTP1Limits
from protocols.roles import Role

HOST = b"host: a.example\r\n"


def server(received: bytes = b"", **limits: int) -> HTTP1Connection:
    machine = HTTP1Connection(Role.SERVER, HTTP1Limits(**limits))
    machine.receive_data(received)
    return machine


def client(**limits: int) -> HTTP1Connection:
    return HTTP1Connection(Role.CLIENT, HTTP1Limits(**limits))


def request(
    method: bytes = b"GET",
    target: bytes = b"/",
    fields: bytes = b"",
    body: bytes = b"",
    version: bytes = b"1.1",
    host: bytes = HOST,
) -> bytes:
    return method + b" " + target + b" HTTP/" + version + b"\r\n" + host + fields + b"\r\n" + body


def pull(machine: HTTP1Connection, events: list[Any] | None = None) -> list[Any]:  # a test knows which event is where
    """Returns `events` and all events that are there now. Pieces of one body are one Data. A request that brings its body
    is the events that it stands for."""
    events = [] if events is None else events
    while not isinstance(event := machine.next_event(), Signal):
        append(events, event)
        if isinstance(event, ConnectionEnd):
            break
    return events


def append(events: list[Any], event: Event | Signal) -> None:
    if isinstance(event, Data):
        piece = b"".join(event.buffers)
        if events and isinstance(last := events[-1], Data) and last.stream == event.stream:
            piece = b"".join(last.buffers) + piece
            events.pop()
        event = Data(stream=event.stream, buffers=(piece,))
    if isinstance(event, Request) and event.body is not None:
        stream, body = event.stream, event.body
        data = [Data(stream=stream, buffers=(body,))] if body else []
        events += [Request(stream=stream, head=event.head), *data, End(stream=stream)]
        return
    events.append(event)


def body(events: Iterable[Event]) -> bytes:
    return b"".join(bytes(b) for event in events if isinstance(event, Data) for b in event.buffers)


def written(machine: HTTP1Connection) -> bytes:
    """All output, confirmed."""
    out = b"".join(machine.data_to_send(1 << 40))
    machine.data_sent()
    return out


def cuts(data: bytes) -> Iterator[tuple[bytes, ...]]:
    """Cut at each position, and byte by byte."""
    for i in range(len(data) + 1):
        yield data[:i], data[i:]
    yield tuple(data[i : i + 1] for i in range(len(data)))


def answer(machine: HTTP1Connection, status: int = 200, content: bytes = b"", *fields: tuple[bytes, bytes]) -> None:
    """A whole answer of known length to the request under way."""
    headers = fields if status in (204, 304) else ((b"content-length", b"%d" % len(content)), *fields)
    machine.send(Response(stream=machine.stream, status=status, headers=headers))
    machine.send(Data(stream=machine.stream, buffers=(content,)))
    machine.send(End(stream=machine.stream))


def get(stream: int = 1, **fields: Any) -> Request:
    return Request(stream=stream, head=Head(**{"method": b"GET", "target": b"/", "authority": b"a.example", **fields}))
