"""Header fields that put a request to another server into the trace of its exchange."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from protocols.events import Headers


def _none() -> Headers:
    return ()


_made_by: ContextVar[Callable[[], Headers]] = ContextVar("gateway trace fields", default=_none)

made_by = _made_by.set
"""Sets the function that makes the fields in this context. It is called for each request."""


def trace_fields() -> Headers:
    """Returns the fields of the current span; none without tracing."""
    return _made_by.get()()
