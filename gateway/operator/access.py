"""Access to the operator plane: bearer tokens, and the rules that keep out pages of other sites if no token is demanded."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import TypeAlias, final

import trio
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from gateway.addresses import UNIX, Host, places_of, written_ip
from gateway.config import MetricsConfig, OperatorConfig
from gateway.config.agreement import is_local
from gateway.config.problem import ConfigError
from gateway.config.text import show
from gateway.config.watched_file import WatchedFile
from gateway.errors import GatewayError
from gateway.log_limits import LogLimits
from gateway.untrusted_text import escape

log = logging.getLogger("gateway.operator")

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

_LARGEST = 64 * 1024  # bytes of a file of tokens
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_SITES = frozenset({"same-origin", "none"})


@final
class Unauthorized(GatewayError):
    """The request has no token, or a wrong one (RFC 6750 section 3)."""

    status = 401
    code = "Unauthorized"

    def __init__(self, section: str, said: str) -> None:
        """`section` is that of the settings which name the tokens."""
        super().__init__(said)
        self.headers = ((b"www-authenticate", b'Bearer realm="everywire %s"' % section.encode()),)


@final
class Misdirected(GatewayError):
    """A request that a page of another site may have made."""

    status = 403
    code = "Forbidden"


@final
class Tokens:
    """The tokens that open a plane: one of the configuration, and those of a file, which is read again when it changes.

    Only their digests are kept. A token is compared with all of them in constant time.
    """

    def __init__(self, config: OperatorConfig | MetricsConfig) -> None:
        """Raises ConfigError if the file cannot be read, has no token, or has an invalid one."""
        own = config.token if isinstance(config, OperatorConfig) else ""
        self._own = [_digest(own)] if own else []
        self._section = section_of(config)
        self._filed = list[bytes]()
        self.file = WatchedFile(config.token_file, _LARGEST) if config.token_file else None
        """The file; None where there is none."""
        if self.file is not None:
            try:
                self._read(self.file)
            except (OSError, ValueError) as e:
                raise ConfigError(f"{self._section}.token_file: {_why(e)}") from None

    @property
    def demanded(self) -> bool:
        """True if a request needs a token."""
        return bool(self._own or self.file)

    def open(self, authorization: str) -> bool:
        """True if this Authorization field has one of the tokens."""
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return False
        digest, found = _digest(token.strip(" ")), False
        for known in (*self._own, *self._filed):
            found |= hmac.compare_digest(known, digest)
        return found

    async def reload(self) -> None:
        """Reads the changed file again. If it cannot be used, the tokens that were read last stay valid."""
        assert self.file is not None
        try:
            self._read(self.file)
        except (OSError, ValueError) as e:
            # a file that is half written, or just being replaced, must not lock the operator out
            log.error(f"{self._section} tokens cannot be read: the tokens read last stay valid", extra={"reason": _why(e)})
        else:
            log.info(f"{self._section} tokens were read again", extra={"tokens": len(self._filed)})

    def _read(self, file: WatchedFile) -> None:
        text, name = file.read(), show(file.path)
        if len(text) > _LARGEST:
            raise ValueError(f"{name} is larger than {_LARGEST} bytes")
        tokens = [line.strip() for line in text.decode("latin-1").splitlines()]
        tokens = [token for token in tokens if token and not token.startswith("#")]
        if not tokens:
            raise ValueError(f"{name} has no token: write one a line")
        if not all(re.fullmatch(r"[!-~]{16,}", token) for token in tokens):
            raise ValueError(f"{name} has a token that is not 16 or more visible ASCII characters")
        self._filed = [_digest(token) for token in tokens]


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{show(error.filename or '')} cannot be read: {error.strerror}"
    return str(error)


def section_of(config: OperatorConfig | MetricsConfig) -> str:
    """The name of this section of the configuration."""
    return "operator" if isinstance(config, OperatorConfig) else "metrics"


def address_of(request: HTTPConnection) -> str:
    """The address of a request's client, for the log; `unix:` for a client of a Unix socket."""
    client = request.client
    return written_ip(client.host, client.port) if client else UNIX


@final
class Access:
    """The rules of one plane.

    If the plane demands a token, each request must have one. If it demands none, pages of other sites are kept out: the
    `Host` of a request must be an address, localhost or a configured name, which a rebound DNS name never is, and a request
    that changes something must not come from another site.
    """

    def __init__(self, config: OperatorConfig | MetricsConfig) -> None:
        self.tokens = Tokens(config)
        """The tokens that open the plane."""
        self._section = section_of(config)
        self.log_limits = LogLimits()
        """Limits how often log lines that callers of the plane cause are written."""
        hosts = [place.name for place in places_of(config.host) if isinstance(place, Host)]
        named = config.hosts if isinstance(config, OperatorConfig) else ()
        self._names = frozenset(name.lower().rstrip(".") for name in (*hosts, *named, "localhost"))
        # beyond this machine, scrapers call the metrics by names that nobody has configured
        self._open = isinstance(config, MetricsConfig) and not is_local(config.host)
        self._local = is_local(config.host)

    @property
    def demands_token(self) -> bool:
        return self.tokens.demanded

    @property
    def private(self) -> bool:
        """True if a stranger cannot get in: the plane is on this machine alone, or demands a token."""
        return self._local or self.tokens.demanded

    def guarded(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint behind the rules. A refused request raises Unauthorized or Misdirected."""

        @wraps(endpoint)
        async def checked(request: Request) -> Response:
            self.check(request)
            return await endpoint(request)

        return checked

    def check(self, request: HTTPConnection, *, known: bool = False) -> None:
        """Raises Unauthorized or Misdirected if the rules refuse a request, and logs that. `known`: it has a ticket, which
        somebody with a token has asked for."""
        try:
            self._check(request, known=known)
        except GatewayError as e:
            peer, why = address_of(request), e.message.partition(":")[0]
            path = escape(request.url.path[:200])
            facts = {"peer": peer, "path": path, "reason": why}
            self.log_limits.write(log, f"{self._section} request refused", facts, logging.WARNING)
            raise

    async def sum_up(self) -> None:
        """Logs the sums of lines that were left out, once they are due. The plane's timer calls it."""
        self.log_limits.tick(trio.current_time())

    def allows(self, request: Request) -> bool:
        """True if the rules let the request pass."""
        try:
            self._check(request)
        except GatewayError:
            return False
        return True

    def _check(self, request: HTTPConnection, *, known: bool = False) -> None:
        if not self.tokens.demanded:
            if not self._open:
                self._check_browser(request)
        elif not known and not self.tokens.open(request.headers.get("authorization", "")):
            said = "a wrong token" if "authorization" in request.headers else "no token"
            where = "the server's operator.token, or one of operator.token_file"
            if self._section == "metrics":
                where = "a token of the server's metrics.token_file"
            raise Unauthorized(self._section, f"{said}: send `Authorization: Bearer TOKEN` with {where}")

    def _check_browser(self, request: HTTPConnection) -> None:
        host = request.headers.get("host", "")
        if not self._may_be_called(host):
            more = ", or set operator.hosts" if self._section == "operator" else ""
            raise Misdirected(f"this server is not called {show(host[:100])}: use an address or localhost{more}")
        if request.scope.get("method") in _SAFE:  # a WebSocket has none, and may change something
            return
        origin = request.headers.get("origin")
        site = request.headers.get("sec-fetch-site", "none")
        foreign = origin is not None and origin.partition("://")[2].lower() != host.lower()
        if foreign or site not in _SITES:
            raise Misdirected("a page of another site may not change anything here")

    def _may_be_called(self, host: str) -> bool:
        found = re.fullmatch(r"\[([0-9A-Fa-f:.]+)\](?::\d*)?|([^:\[\]/@\s]+)(?::\d*)?", host)
        if found is None:
            return False
        name = (found[1] or found[2]).lower().rstrip(".")
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True
