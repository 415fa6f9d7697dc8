"""The header fields that join a request to another server to the trace of the exchange that it is made for."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from protocols.events import Headers


def _none() -> Headers:
    return ()


_made_by: ContextVar[Callable[[], Headers]] = ContextVar("gateway trace fields", default=_none)

made_by = _made_by.set
"""Names who makes them from now on in this context: called at the time of each request."""


def trace_fields() -> Headers:
    """Those of the span that is current; none where nobody traces."""
    return _made_by.get()()
