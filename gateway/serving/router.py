"""Router: finds the row of a request, by exact path first, then by pattern; answers 404, 405 and OPTIONS."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final
from urllib.parse import unquote

from gateway.config.problem import ConfigError
from gateway.core.exchange import Exchange
from gateway.core.route import WEBSOCKET, CallKind, Refuse, Route, Row
from gateway.errors import (
    BadRequest,
    GatewayError,
    MethodNotAllowed,
    NoSuchPath,
    UnsupportedType,
    UpgradeRequired,
)
from gateway.serving.nearest import nearest, without_doubled_slashes

# Clients ask for few paths again and again: results are kept for at most so many paths of at most so many bytes.
_REMEMBERED, _REMEMBERED_LENGTH = 1024, 256
_UPGRADE = WEBSOCKET.encode()
_SEGMENT = b"[^/]+)"  # the end of a pattern that ends with a capture
# The words of the 404 for paths of other servers. They name no address, because a stranger may read them.
_ELSEWHERE = {b"/metrics": "metrics have a port of their own, which metrics.port opens"}


@final
@dataclass(frozen=True, slots=True)
class _Path:
    """One path with its row for each method."""

    methods: dict[bytes, Row]
    pattern: re.Pattern[bytes] | None = None
    path: str = ""
    """The path of its rows, as it was added."""


@final
class Router:
    """Finds the row of a request among its rows. Paths are matched as sent, before percent decoding; what a pattern
    captures is decoded for its handler. Every path answers OPTIONS."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        """Raises ConfigError if two rows have the same method and path."""
        self.rows: list[Row] = []
        """All rows, in the order they were added."""
        self._exact: dict[bytes, _Path] = {}
        self._patterns: list[_Path] = []
        self._found: dict[bytes, tuple[_Path, dict[str, Any]]] = {}
        self._any_upgrade: Row | None = None
        self._server = _Path({})  # the path of `OPTIONS *`, which asks about the whole server
        self._exact[b"*"] = self._server
        self._under: dict[re.Pattern[bytes], Refuse] = {}
        self._kinds: list[CallKind] = []
        self._routes: dict[bytes, str] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Adds a row. Raises ConfigError if another row has its method and path."""
        upgrades_anywhere = row.method == WEBSOCKET and row.path == "*"
        methods = {} if upgrades_anywhere else self._path(row).methods
        if row.method.encode() in methods or (upgrades_anywhere and self._any_upgrade is not None):
            raise ConfigError(f"two routes answer {row.method} {row.path}: only one may")
        self.rows.append(row)
        if upgrades_anywhere:
            self._any_upgrade = row
        else:
            methods[row.method.encode()] = row
            if row.method == "GET":
                methods[b"HEAD"] = row
        if row.under and row.refuse is not None:
            self._under[re.compile(_source(row.under) + rb"(/.*)?", re.DOTALL)] = row.refuse
        if row.kind is not None and row.kind not in self._kinds:
            self._kinds.append(row.kind)

    def words_for(self, exchange: Exchange) -> Refuse | None:
        """Returns the refusal format for a request without a row: by its kind, or else by its path; None: the plain one."""
        kind = self._kind_of(exchange)
        return self.refuse_under(exchange.path) if kind is None else kind.refuse

    def _kind_of(self, exchange: Exchange) -> CallKind | None:
        content_type = exchange.fields.get(b"content-type")
        if content_type is None or not self._kinds:
            return None
        return next((kind for kind in self._kinds if kind.is_of(content_type)), None)

    def refuse_under(self, path: bytes) -> Refuse | None:
        """Returns the refusal format of the API to which a path belongs, even if no row has that path; None if none."""
        return next((refuse for under, refuse in self._under.items() if under.fullmatch(path)), None)

    def _path(self, row: Row) -> _Path:
        path = row.path
        if "{" not in path:
            return self._exact.setdefault(path.encode(), _Path({}, path=path))
        source = _source(path)
        if row.slashes and source.endswith(_SEGMENT):
            source = source.removesuffix(_SEGMENT) + b".+)"
        for known in self._patterns:
            if known.pattern is not None and known.pattern.pattern == source:
                return known
        self._patterns.append(_Path({}, re.compile(source), path))
        return self._patterns[-1]

    def find(self, exchange: Exchange) -> Route:
        """Returns the route of a request. Raises NoSuchPath, BadRequest, MethodNotAllowed, UnsupportedType or
        UpgradeRequired, and sets the exchange's format for errors to that of the path."""
        kind = self._kind_of(exchange)
        if kind is not None and not exchange.wire.windowed:
            raise UpgradeRequired(
                f"{kind.name} needs HTTP/2 on a port of the gateway itself; this call came by {exchange.wire.name}"
            )
        try:
            if kind is not None:
                return self._find_of(kind, exchange)
            route = self._find(exchange)
        except GatewayError:
            if (refuse := self.words_for(exchange)) is not None:
                exchange.words = refuse
            raise
        if (wanted := route[0].kind) is not None:
            raise UnsupportedType(f"this path is {wanted.name}'s: content-type must be {wanted.media_type}")
        return route

    def _find_of(self, kind: CallKind, exchange: Exchange) -> Route:
        """Returns the route of a call of that kind."""
        path = exchange.path
        known = self._exact.get(path)
        rows = {} if known is None else known.methods
        if not any(row.kind is kind for row in rows.values()):
            raise NoSuchPath(f"there is no {kind.name} method {path.decode('latin-1')[:100]!r}")
        row = rows.get(exchange.request.method)
        if row is None:
            allow = b", ".join(sorted(rows)).decode()
            raise MethodNotAllowed(f"a {kind.name} call is made by {allow}", allow=allow)
        return row, row.handler, {"call": kind.read(exchange.request)}

    def _find(self, exchange: Exchange) -> Route:
        method = exchange.request.method
        if exchange.request.upgrade == _UPGRADE:
            method = _UPGRADE
            if self._any_upgrade is not None and not self._upgrades(exchange.path):
                return self._any_upgrade, self._any_upgrade.handler, {}
        found = self._found.get(exchange.path) or self._match(exchange.path)
        if found is None:
            raise self._unknown(exchange)
        known, captured = found
        row = known.methods.get(method)
        if row is not None:
            return row, row.handler, captured
        if method == _UPGRADE:
            raise BadRequest("this path is not a WebSocket")
        allow = self._allow(known)
        if method == b"OPTIONS":
            return options(allow, known.path)
        if _UPGRADE in known.methods and len(known.methods) == 1:
            raise UpgradeRequired("this path is a WebSocket: connect with ws:// or wss://")
        for row in known.methods.values():
            if row.refuse is not None and row.refuses_method and row.kind is None:  # a kind's format is for its calls only
                exchange.words = row.refuse
        raise MethodNotAllowed(f"{method.decode('latin-1')[:20]} is not allowed here, only {allow}", allow=allow)

    def is_health(self, exchange: Exchange) -> bool:
        """True if a row of health answers the request."""
        found = None if exchange.request.upgrade == _UPGRADE else self._match(exchange.path)
        row = None if found is None else found[0].methods.get(exchange.request.method)
        return row is not None and row.is_health

    def path_of(self, exchange: Exchange) -> str:
        """Returns the path of a request's row as it was added, for example with `{name}`; `/*` for an upgrade that the `*`
        row takes, empty if no row has the path."""
        if exchange.request.upgrade == _UPGRADE and self._any_upgrade is not None and not self._upgrades(exchange.path):
            return "/*"
        return self.path_at(exchange.path)

    def path_at(self, path: bytes) -> str:
        """Returns the path, as it was added, that matches `path`; empty if none does."""
        found = self._match(path)
        return "" if found is None else found[0].path

    def _allow(self, asked: _Path) -> str:
        methods = {b"OPTIONS"}
        for known in (asked,) if asked is not self._server else (*self._exact.values(), *self._patterns):
            methods |= known.methods.keys() - {_UPGRADE}
            if known.methods.keys() == {_UPGRADE}:
                methods.add(b"GET")  # the method of every handshake (RFC 6455 section 4.1)
        return ", ".join(sorted(method.decode() for method in methods))

    def _upgrades(self, path: bytes) -> bool:
        found = self._match(path)
        return found is not None and _UPGRADE in found[0].methods

    def _match(self, path: bytes) -> tuple[_Path, dict[str, Any]] | None:
        found = self._found.get(path)
        if found is None:
            found = self._search(path)
            if found is not None and len(path) <= _REMEMBERED_LENGTH:
                if len(self._found) >= _REMEMBERED:
                    self._found.clear()
                self._found[path] = found
        return found

    def _search(self, path: bytes) -> tuple[_Path, dict[str, Any]] | None:
        known = self._exact.get(path)
        if known is not None:
            return known, {}
        for known in self._patterns:
            assert known.pattern is not None
            match = known.pattern.fullmatch(path)
            if match is not None:
                return known, {k: unquote(v.decode("latin-1")) for k, v in match.groupdict().items()}
        return None

    def _unknown(self, exchange: Exchange) -> NoSuchPath:
        """Makes the error for a path without a route, and sets the exchange's format for errors to that of the route that is
        meant where a slash is doubled."""
        path, method = exchange.path, exchange.request.method
        meant = without_doubled_slashes(path)
        found = None if meant == path else self._match(meant)
        if found is None:
            hint = self._there(meant)
            exchange.words = self.refuse_under(meant)
        else:
            rows = found[0].methods
            row = rows.get(method) or next(iter(rows.values()))
            hint = f"; did you mean {_shown(row)}?"
            exchange.words = row.refuse if row.kind is None else None
        return NoSuchPath(f"no such path: {path.decode('latin-1')[:100]}{hint}")

    def _there(self, path: bytes) -> str:
        """Makes the hint for an unknown path: all routes of its API, or else the nearest route, or else `GET /`."""
        if (elsewhere := _ELSEWHERE.get(path)) is not None:
            return f"; {elsewhere}"
        api = next((under for under in self._under if under.fullmatch(path)), None)
        if api is None:
            if near := self._nearest(path):
                return f"; did you mean {near}?"
            return "; GET / says what is here" if b"/" in self._exact else ""
        under = [known for known in (*self._exact.values(), *self._patterns) if api.fullmatch(known.path.encode())]
        there = [f"{method.decode()} {known.path}" for known in under for method in known.methods if method != b"HEAD"]
        return f"; there are: {', '.join(there)}"

    def _nearest(self, path: bytes) -> str:
        """Returns the route whose path is nearest to an unknown one; empty if none is near."""
        if not self._routes:
            for row in self.rows:
                if row.kind is None and row.path.startswith("/") and row.path != "/":
                    self._routes.setdefault(row.path.encode(), _shown(row))
        return self._routes.get(nearest(path, self._routes), "")


def _shown(row: Row) -> str:
    return f"{'WebSocket' if row.method == WEBSOCKET else row.method} {row.path}"


def _source(path: str) -> bytes:
    """Returns the regular expression of a path: `{name}` is a segment."""
    return re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(path)).encode()


def options(allow: str, path: str = "") -> Route:
    """Returns the route of an OPTIONS request, which is answered with the methods `allow` of its path."""
    return Row("OPTIONS", path, _options, always=True), _options, {"allow": allow}


async def _options(exchange: Exchange, allow: str) -> None:
    """Answers OPTIONS with the methods of a path (RFC 9110 section 9.3.7)."""
    exchange.outbound.respond(204, [(b"allow", allow.encode())])
