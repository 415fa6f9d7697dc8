"""Reads the deadline of a request, and its priority in a queue, from its head."""

from __future__ import annotations

import re
from collections.abc import Coroutine, Mapping
from typing import Any, final

from gateway.config import AdmissionConfig
from gateway.config.text import show
from gateway.core.exchange import Exchange
from gateway.core.route import Handler, Route
from gateway.errors import BadRequest, DeadlineExceeded, Refusal

# gRPC over HTTP2, Requests: TimeoutValue is 1 to 8 digits
_OWN = b"grpc-timeout"  # gRPC calls read it themselves
_GRPC = re.compile(rb"([0-9]{1,8})([HMSmun])")
_GRPC_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_NUMBER = re.compile(rb"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s)?")
_PRIORITY = re.compile(rb"[0-9]{1,9}")


@final
class Admission:
    """Reads the header fields that the configuration names. Requests with the same head are read once: the result is kept
    with their route."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._timeouts = tuple([name.lower().encode() for name in config.timeout_headers])
        self._priority = config.priority_header.lower().encode()
        self._names = (*self._timeouts, self._priority) if self._priority else self._timeouts

    def asked(self, exchange: Exchange, route: Route) -> Route:
        """Returns the request's route with the deadline and priority of its head; `route` itself if the head has none.
        Raises BadRequest for an invalid value, DeadlineExceeded for a deadline of 0."""
        fields = exchange.fields
        for name in self._names:
            if name in fields:
                return self._read(fields, route)
        return route

    def _read(self, fields: Mapping[bytes, bytes], route: Route) -> Route:
        row, handler, arguments = route
        names = [name for name in self._timeouts if name in fields and not (name == _OWN and row.kind is not None)]
        allowed = [(_seconds(name, fields[name]), name) for name in names]
        priority = 0
        if self._priority and self._priority in fields:
            value = fields[self._priority]
            if not _PRIORITY.fullmatch(value):
                raise BadRequest(
                    f"{self._priority.decode()} must be a whole number (1 is the highest priority), not {_shown(value)}"
                )
            priority = int(value)
        seconds, name = min(allowed, default=(None, b""))
        whose = f"{name.decode()} of the request"
        if seconds == 0:
            raise DeadlineExceeded(f"no time is left ({whose})", refusal=Refusal.NO_TIME)
        return row, AdmittedHandler(handler, seconds, whose, priority), arguments


@final
class AdmittedHandler:
    """A handler of requests that ask for a deadline or a priority."""

    __slots__ = ("_handler", "_name", "_priority", "_seconds")

    def __init__(self, handler: Handler, seconds: float | None, name: str, priority: int) -> None:
        self._handler, self._seconds, self._name, self._priority = handler, seconds, name, priority

    def __call__(self, exchange: Exchange, *values: Any, **arguments: Any) -> Coroutine[Any, Any, None]:
        exchange.ask_priority(self._priority)
        if self._seconds is not None:
            exchange.limit_call(self._seconds, self._name)
        return self._handler(exchange, *values, **arguments)


def _seconds(name: bytes, value: bytes) -> float:
    if name == _OWN:
        if (grpc := _GRPC.fullmatch(value)) is not None:
            return int(grpc[1]) * _GRPC_SECONDS[grpc[2]]
        expected = "up to 8 digits and one of H, M, S, m, u, n"
    elif (number := _NUMBER.fullmatch(value)) is not None:
        scale = 1e-3 if number[2] == b"ms" or (number[2] is None and name.endswith(b"-ms")) else 1.0
        return float(number[1]) * scale
    else:
        expected = "a number of milliseconds" if name.endswith(b"-ms") else 'a number of seconds, such as 1.5 or "1500ms"'
    raise BadRequest(f"{name.decode()} must be {expected}, not {_shown(value)}")


def _shown(value: bytes) -> str:
    return show(value[:100].decode("latin-1"))
