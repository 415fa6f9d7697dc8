"""Which handler answers a request: exact paths first, then the few patterns; 404 and 405 in words."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, final
from urllib.parse import unquote

from gateway.errors import MethodNotAllowed, NotFound
from gateway.exchange import Exchange

Handler: TypeAlias = Callable[..., Awaitable[None]]


@final
@dataclass(frozen=True, slots=True)
class Route:
    """One path with its handler for each method."""

    methods: dict[bytes, Handler]
    pattern: re.Pattern[bytes] | None = None


@final
class Router:
    """Paths are matched as sent, before percent decoding; what a pattern captures is decoded for its handler."""

    def __init__(self) -> None:
        self._exact: dict[bytes, Route] = {}
        self._patterns: list[Route] = []
        self._upgrades: Router | None = None

    def add(self, method: str, path: str, handler: Handler) -> None:
        """`{name}` in a path captures one segment. GET serves HEAD too."""
        methods = [method.encode()] + ([b"HEAD"] if method == "GET" else [])
        if "{" not in path:
            route = self._exact.setdefault(path.encode(), Route({}))
        else:
            source = re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(path)).encode()
            route = next(
                (r for r in self._patterns if r.pattern and r.pattern.pattern == source), Route({}, re.compile(source))
            )
            if not route.methods:
                self._patterns.append(route)
        for m in methods:
            route.methods[m] = handler

    def upgrade(self, path: str, handler: Handler) -> None:
        """A path that answers WebSocket upgrades, and nothing else."""
        if self._upgrades is None:
            self._upgrades = Router()
        self._upgrades.add("GET", path, handler)

    def find(self, exchange: Exchange) -> tuple[Handler, dict[str, Any]]:
        """The handler and its arguments; NotFound or MethodNotAllowed."""
        request = exchange.request
        if request.upgrade == b"websocket" and self._upgrades is not None:
            return self._upgrades.find(exchange)
        path = exchange.path
        route = self._exact.get(path)
        captured: dict[str, Any] = {}
        if route is None:
            for candidate in self._patterns:
                assert candidate.pattern is not None
                match = candidate.pattern.fullmatch(path)
                if match is not None:
                    route = candidate
                    captured = {k: unquote(v.decode("latin-1")) for k, v in match.groupdict().items()}
                    break
        if route is None:
            raise NotFound(f"no such path: {path.decode('latin-1')[:100]}")
        handler = route.methods.get(request.method)
        if handler is None:
            allow = ", ".join(sorted(m.decode() for m in route.methods))
            raise MethodNotAllowed(f"{request.method.decode('latin-1')[:20]} is not allowed here, only {allow}", allow=allow)
        return handler, captured
