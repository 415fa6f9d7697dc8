"""Which handler answers a request: exact paths first, then the few patterns; 404 and 405 in words, OPTIONS."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, final
from urllib.parse import unquote

from gateway.core.exchange import Exchange
from gateway.errors import BadRequest, GatewayError, MethodNotAllowed, NoSuchPath, UpgradeRequired

Handler: TypeAlias = Callable[..., Coroutine[Any, Any, None]]
Words: TypeAlias = Callable[[Exchange, GatewayError], None]


# Clients ask for few paths again and again; what was found for them is kept, so many paths of so many bytes.
_REMEMBERED, _REMEMBERED_LENGTH = 1024, 256
_UPGRADE = b"websocket"  # stands for the method in a route


@final
@dataclass(frozen=True, slots=True)
class Route:
    """One path with its handler for each method."""

    methods: dict[bytes, Handler]
    pattern: re.Pattern[bytes] | None = None
    path: str = ""
    """As it was added."""


@final
class Router:
    """Paths are matched as sent, before percent decoding; what a pattern captures is decoded for its handler."""

    def __init__(self) -> None:
        self._exact: dict[bytes, Route] = {}
        self._patterns: list[Route] = []
        self._found: dict[bytes, tuple[Route, dict[str, Any]]] = {}
        self._any_upgrade: Handler | None = None
        self._server = Route({})  # what OPTIONS * asks about
        self._exact[b"*"] = self._server
        self.words: dict[Handler, Words] = {}
        """How those are refused whose clients know errors by their shape, where it does not come to their handler."""
        self._under: list[tuple[bytes, Words]] = []

    def add(self, method: str, path: str, handler: Handler) -> None:
        """`{name}` in a path captures one segment, which `handler` takes under that name; one that is the only one, as its
        first argument after the exchange. GET serves HEAD too, and every path OPTIONS."""
        methods = self._route(path).methods
        methods[method.encode()] = handler
        if method == "GET":
            methods[b"HEAD"] = handler

    def upgrade(self, path: str, handler: Handler) -> None:
        """A path that answers WebSocket upgrades; as with `add`."""
        self._route(path).methods[_UPGRADE] = handler

    def upgrade_elsewhere(self, handler: Handler) -> None:
        """Answers WebSocket upgrades at every path that has no handler for them."""
        self._any_upgrade = handler

    def under(self, prefix: str, words: Words) -> None:
        """Every path at `prefix` and below it belongs to one API: `words` say also that nothing is answered there, or not
        by that method, and the error names what is."""
        self._under.append((prefix.encode(), words))

    def words_under(self, path: bytes) -> Words | None:
        """The words of the API to which a path belongs, whether anything is answered there or not."""
        return next((words for prefix, words in self._under if _is_under(path, prefix)), None)

    def _route(self, path: str) -> Route:
        if "{" not in path:
            return self._exact.setdefault(path.encode(), Route({}, path=path))
        source = re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(path)).encode()
        for route in self._patterns:
            if route.pattern is not None and route.pattern.pattern == source:
                return route
        self._patterns.append(Route({}, re.compile(source), path))
        return self._patterns[-1]

    def find(self, exchange: Exchange) -> tuple[Handler, dict[str, Any]]:
        """The handler and its arguments; NoSuchPath, BadRequest, MethodNotAllowed or UpgradeRequired."""
        try:
            return self._find(exchange)
        except GatewayError:
            if (words := self.words_under(exchange.path)) is not None:
                exchange.claim("", words)
            raise

    def _find(self, exchange: Exchange) -> tuple[Handler, dict[str, Any]]:
        method = exchange.request.method
        if exchange.request.upgrade == _UPGRADE:
            method = _UPGRADE
            if self._any_upgrade is not None and not self._upgrades(exchange.path):
                return self._any_upgrade, {}
        route, captured = self._found.get(exchange.path) or self._match(exchange.path)
        handler = route.methods.get(method)
        if handler is not None:
            return handler, captured
        if method == _UPGRADE:
            raise BadRequest("this path is no WebSocket")
        allow = self._allow(route)
        if method == b"OPTIONS":
            return partial(_options, allow=allow), {}
        if _UPGRADE in route.methods and len(route.methods) == 1:
            raise UpgradeRequired("this path is a WebSocket: connect with ws:// or wss://")
        for words in filter(None, map(self.words.get, route.methods.values())):
            exchange.claim("", words)
        raise MethodNotAllowed(f"{method.decode('latin-1')[:20]} is not allowed here, only {allow}", allow=allow)

    def path_of(self, exchange: Exchange) -> str:
        """The path of a request as it was added, with `{name}` for what differs; `/*` where any is upgraded, empty where
        nothing is answered."""
        if exchange.request.upgrade == _UPGRADE and self._any_upgrade is not None and not self._upgrades(exchange.path):
            return "/*"
        try:
            return self._match(exchange.path)[0].path
        except NoSuchPath:
            return ""

    def _allow(self, route: Route) -> str:
        methods = {b"OPTIONS"}
        for known in (route,) if route is not self._server else (*self._exact.values(), *self._patterns):
            methods |= known.methods.keys() - {_UPGRADE}
            if known.methods.keys() == {_UPGRADE}:
                methods.add(b"GET")  # which every handshake is (RFC 6455 section 4.1)
        return ", ".join(sorted(method.decode() for method in methods))

    def _upgrades(self, path: bytes) -> bool:
        try:
            return _UPGRADE in self._match(path)[0].methods
        except NoSuchPath:
            return False

    def _match(self, path: bytes) -> tuple[Route, dict[str, Any]]:
        found = self._found.get(path)
        if found is None:
            found = self._search(path)
            if len(path) <= _REMEMBERED_LENGTH:
                if len(self._found) >= _REMEMBERED:
                    self._found.clear()
                self._found[path] = found
        return found

    def _search(self, path: bytes) -> tuple[Route, dict[str, Any]]:
        route = self._exact.get(path)
        if route is not None:
            return route, {}
        for route in self._patterns:
            assert route.pattern is not None
            match = route.pattern.fullmatch(path)
            if match is not None:
                return route, {k: unquote(v.decode("latin-1")) for k, v in match.groupdict().items()}
        raise NoSuchPath(f"no such path: {path.decode('latin-1')[:100]}{self._there(path)}")

    def _there(self, path: bytes) -> str:
        """Names what is answered beside a path that is not, where one API has all of them; else the path that says more."""
        prefix = next((prefix for prefix, _ in self._under if _is_under(path, prefix)), None)
        if prefix is None:
            return "; GET / says what is here" if b"/" in self._exact else ""
        known = [route for route in (*self._exact.values(), *self._patterns) if _is_under(route.path.encode(), prefix)]
        there = [f"{method.decode()} {route.path}" for route in known for method in route.methods if method != b"HEAD"]
        return f"; there are: {', '.join(there)}"


def _is_under(path: bytes, prefix: bytes) -> bool:
    return path.startswith(prefix) and path[len(prefix) : len(prefix) + 1] in (b"", b"/")


async def _options(exchange: Exchange, *, allow: str) -> None:
    """What can be asked here (RFC 9110 section 9.3.7)."""
    exchange.outbound.start(204, [(b"allow", allow.encode())])  # without a length: RFC 9110 section 8.6
    exchange.outbound.finish()
