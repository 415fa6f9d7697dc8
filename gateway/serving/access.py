"""Access: decides at the head of a request whether it is permitted, before its body is read or paid for."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

from gateway.config import AccessConfig, Config
from gateway.config.exposure import closes
from gateway.config.problem import ConfigError
from gateway.config.text import show
from gateway.config.watched_file import WatchedFile
from gateway.core.exchange import Exchange
from gateway.core.route import Needs, Row
from gateway.core.server import Server
from gateway.credentials import shown_key
from gateway.errors import (
    BadRequest,
    Ending,
    GatewayError,
    NotPermitted,
    Refusal,
    TooManyRequests,
    Unauthenticated,
    UnsupportedType,
    WrongHost,
)
from gateway.keys import LARGEST, Key, KeyFileError, KeySet, Scope, read_keys
from gateway.party import Party, Quota
from gateway.serving.pages import SAFE, Pages, is_from_page, is_json, is_preflight
from gateway.untrusted_text import escape
from models.blocking import in_thread
from protocols.events import Headers
from protocols.request_ids import client_request_id, echoed

log = logging.getLogger("gateway.access")

_STRANGERS = 20  # 401s of one connection
_PATH = 200  # characters of a path in the log
_SHORT = 32 * 1024  # bytes of a file short enough to be parsed in the event loop
_REASONS = (
    "missing-key", "wrong-key", "two-keys", "model", "scope", "rate", "in-flight", "origin", "content-type", "host",
)  # fmt: skip

_MISSING = "this server needs a key: send `Authorization: Bearer KEY` or `x-api-key: KEY`"
_WRONG = "the key is unknown or has expired"


@final
class Admittance:
    """The access decision for one head. It holds for each request with that head, as long as the keys are the same."""

    __slots__ = ("beside", "key", "keys", "party")

    def __init__(self, keys: KeySet, beside: Headers, key: Key | None, party: Party | None) -> None:
        self.keys, self.beside, self.key, self.party = keys, beside, key, party


@final
class ClientAccess:
    """The access control of one gateway.

    If keys, signatures or required certificates are configured, each request needs one of them, on every wire; health is
    open. In any configuration, a browser's page of another site cannot change anything.
    """

    def __init__(self, config: Config, server: Server, wall_clock: Callable[[], float]) -> None:
        """`wall_clock` returns the seconds since 1970, by which keys expire. Raises ConfigError for an invalid key file."""
        access = config.access
        self._server, self._wall_clock = server, wall_clock
        self._pages = Pages(config)
        self._named = bool(access.hosts)
        self._signatures = bool(config.sagemaker.sigv4.credentials)
        self._certificates = bool(config.tls.client_ca)
        self.closed = closes(config)
        """True if a request needs a key, a signature or a certificate."""
        self._open = frozenset((Needs.NOTHING, *(Needs(name) for name in access.open)))
        self._beside = access.pass_credentials
        self._grace = access.grace
        self.reasons: Sequence[str] = _REASONS
        """The reasons for which a request may be refused here."""
        self.refusals: dict[str, int] = dict.fromkeys(_REASONS, 0)
        """How many requests were refused, by reason."""
        self.endings: Counter[tuple[str, Ending]] = Counter()
        """How many exchanges are over, by the name of their key and their ending."""
        self.keys = KeySet()
        """The keys that are valid now."""
        self._parties: dict[str, Party] = {}
        self._live: dict[Exchange, Key] = {}
        self._gone: dict[bytes, float] = {}  # when the exchanges of a removed or expired key must end
        self.file = WatchedFile(access.keys_file, LARGEST) if access.keys_file else None
        """The key file; None if there is none."""
        if self.file is not None:
            self._take(read_key_file(access, self.file).without_those_over(wall_clock()), 0.0)
            self._tell_mode(self.file)

    # -- at the head of a request --------------------------------------------------------------------------------------

    def look(self, exchange: Exchange, row: Row | None, arguments: Mapping[str, Any]) -> Admittance | None:
        """Returns the access decision for a request's head; None if there is nothing to keep. `row` is the row of the
        request, None if there is none, and `arguments` what its path captures. Raises the error for a request that is not
        permitted."""
        own = echoed(exchange.fields)
        if exchange.owner.by_operator:
            exchange.outbound.beside = own
            return None  # the plane has checked the token and the browser's site, by its own rules
        pages, from_page = self._pages, is_from_page(exchange)
        told = pages.fields(exchange.request.headers, arguments.get("allow")) if from_page else pages.told
        exchange.outbound.beside = beside = (*told, *own) if own else told
        asks_health = row is not None and row.is_health
        if self._named and not asks_health and not pages.is_called(exchange.request) and not pages.knows(exchange):
            host = show(exchange.request.authority[:100].decode("latin-1"))
            raise self._refused(exchange, "host", WrongHost(f"this server is not called {host} (access.hosts)"))
        if from_page:
            self._check_page(exchange, row)
        if not self.closed or (row is not None and row.needs in self._open) or is_preflight(exchange):
            return Admittance(self.keys, beside, None, None) if beside else None
        key = self._key_of(exchange, row)
        party = None
        if key is not None:
            party = self._parties[key.name]
            exchange.count_for(party)
            exchange.permit = key
            self._check_scope(exchange, key, row, arguments)
        return Admittance(self.keys, beside, key, party) if beside or key is not None else None

    def is_asked_first(self, exchange: Exchange) -> bool:
        """True if the request is a preflight of an allowed page. It is answered whatever its path is: only then does the
        page's browser send the request itself, and let the page read why it is refused."""
        return self._pages.knows(exchange)

    def beside(self, method: bytes, headers: Headers) -> Headers:
        """Returns the fields to add to the answer to a request of which no more is known."""
        told = self._pages.fields(headers, "OPTIONS" if method == b"OPTIONS" else None)
        return (*told, *echoed(dict(reversed(headers))))

    def _check_page(self, exchange: Exchange, row: Row | None) -> None:
        if not self._pages.may_ask(exchange):
            said = "a page of another site may not ask for this: its origin is not in access.origins"
            raise self._refused(exchange, "origin", NotPermitted(said))
        if row is None or row.needs is not Needs.CONTROL or exchange.request.method in SAFE:
            return
        if not is_json(exchange):
            said = "a page must send content-type: application/json to manage models, so that its browser asks first"
            raise self._refused(exchange, "content-type", UnsupportedType(said))

    def _key_of(self, exchange: Exchange, row: Row | None) -> Key | None:
        """Returns the request's valid key; None if a certificate or a signature permits the request."""
        if self.file is not None:
            try:
                shown = shown_key(exchange.request.headers, beside=self._beside)
            except BadRequest as e:
                raise self._refused(exchange, "two-keys", BadRequest(e.message)) from None
            if shown is not None:
                key = self.keys.find(shown, self._wall_clock())
                if key is None:
                    raise self._refused(exchange, "wrong-key", Unauthenticated(_WRONG))
                return key
        if self._certificates and exchange.owner.client_certificate is not None:
            return None
        if self._signatures and row is not None and row.signed:
            return None  # its handler verifies it
        said = _MISSING if self.file is not None else "this server needs a signature or a certificate of its clients"
        raise self._refused(exchange, "missing-key", Unauthenticated(said, missing=True))

    def _check_scope(self, exchange: Exchange, key: Key, row: Row | None, arguments: Mapping[str, Any]) -> None:
        if row is None:
            return
        if row.needs is Needs.CONTROL and key.scope is not Scope.CONTROL:
            raise self._refused(
                exchange, "scope", NotPermitted("this key may call models but not manage them: that needs scope=control")
            )
        name = arguments.get("name")
        if name is not None and not key.reaches(name):
            raise self._refused(exchange, "model", NotPermitted.of_model(name))

    def _refused(self, exchange: Exchange, reason: str, error: GatewayError) -> GatewayError:
        """Returns the error, marked with its reason, and counts an Unauthenticated one for its connection."""
        error.barred = reason
        if isinstance(error, Unauthenticated):
            owner = exchange.owner
            owner.strangers += 1
            if owner.strangers >= _STRANGERS:
                exchange.wire.dismiss()
        return error

    def count(self, exchange: Exchange, error: GatewayError) -> None:
        """Counts and logs a request that ends with an error of `look` or `admit`."""
        self.refusals[error.barred] += 1
        if log.isEnabledFor(logging.INFO) and self._server.log_limits.allows("access refused"):
            facts = {
                "id": exchange.id,
                "peer": exchange.owner.peer,
                "wire": exchange.wire.name,
                "path": escape(exchange.path[:_PATH].decode("latin-1")),
                "reason": error.barred,
            }
            if own := client_request_id(exchange.fields):
                facts["client_request_id"] = own
            if exchange.key is not None:
                facts["key"] = exchange.key.name
            log.info("access refused", extra=facts)

    def admit(self, exchange: Exchange, entry: Admittance) -> None:
        """Admits a request whose head has a decision made with the current keys: it counts for its key from now on. Raises
        TooManyRequests."""
        if entry.beside:
            exchange.outbound.beside = entry.beside
        key, party = entry.key, entry.party
        if key is None or party is None:
            return
        exchange.permit = key
        exchange.count_for(party)
        if key.priority > 1:
            exchange.ask_priority(0)
        quota = party.quota
        assert quota is not None, "each key's party has one"
        if 0 < quota.at_once <= quota.running:
            said = f"{quota.running} exchanges of key {party.name!r} run, its limit (in_flight={quota.at_once})"
            raise self._refused(exchange, "in-flight", TooManyRequests(said, refusal=Refusal.IN_FLIGHT))
        if quota.rate and (wait := quota.wait(self._server.clock())):
            said = f"key {party.name!r} may begin {quota.rate:g} exchanges a second (rate={quota.rate:g})"
            raise self._refused(exchange, "rate", TooManyRequests(said, retry_after=wait, refusal=Refusal.RATE))
        quota.running += 1
        self._live[exchange] = key

    # -- at its end ------------------------------------------------------------------------------------------------------

    def around(self, closed: Callable[[Exchange], None]) -> Callable[[Exchange], None]:
        """Returns the function to call, in place of `closed`, with each exchange that is over."""
        return partial(self._closed, closed) if self.file is not None else closed

    def _closed(self, closed: Callable[[Exchange], None], exchange: Exchange) -> None:
        party = exchange.key
        if party is not None:
            assert exchange.ending is not None
            self.endings[party.name, exchange.ending] += 1
            if self._live.pop(exchange, None) is not None and party.quota is not None:
                party.quota.running -= 1
        closed(exchange)

    # -- as time goes by -------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Removes expired keys, and after `access.grace` ends the exchanges of removed keys. Called once a second, with the
        time on Trio's clock."""
        left = self.keys.without_those_over(self._wall_clock())
        if left is not self.keys:
            self._take(left, now)
        if self._gone:
            self._end_those_gone(now)

    async def reload(self) -> None:
        """Reads the changed file again. If it is not valid, the keys that were read last stay."""
        file = self.file
        assert file is not None
        try:
            data = file.read()
            short = len(data) < _SHORT or len(data) > LARGEST
            keys = read_keys(data) if short else await in_thread(partial(read_keys, data), expected=(KeyFileError,))
        except (OSError, KeyFileError) as e:
            log.error("keys cannot be read: the keys read last stay valid", extra={"file": file.path, "reason": _why(e)})
            return
        self._take(keys.without_those_over(self._wall_clock()), self._server.clock())
        log.info("keys were read again", extra={"file": file.path, "keys": len(keys)})
        self._tell_mode(file)

    def _take(self, keys: KeySet, now: float) -> None:
        for key in self.keys:
            if key not in keys:
                self._gone.setdefault(key.digest, now + self._grace)
        for key in keys:
            self._gone.pop(key.digest, None)
        before, self._parties = self._parties, {}
        for key in keys:
            name = key.name
            party = self._parties[name] = before.get(name) or self._server.parties.of_key(name)
            party.share = key.share
            party.quota = party.quota or Quota()
            party.quota.set(key.in_flight, key.rate)
        self.keys = keys

    def _end_those_gone(self, now: float) -> None:
        due = {digest for digest, until in self._gone.items() if until <= now}
        for digest in due:
            del self._gone[digest]
        if due:
            for exchange in [exchange for exchange, key in self._live.items() if key.digest in due]:
                exchange.interrupt(Unauthenticated(_WRONG))

    def _tell_mode(self, file: WatchedFile) -> None:
        if file.read_by_others:
            log.warning("the key file is readable by other users", extra={"file": file.path, "setting": "access.keys_file"})
        if not len(self.keys):
            log.warning("the key file has no valid key", extra={"file": file.path, "setting": "access.keys_file"})


def read_key_file(config: AccessConfig, file: WatchedFile | None = None) -> KeySet:
    """Reads the keys of the configured file. Raises ConfigError if it is not valid."""
    file = file or WatchedFile(config.keys_file, LARGEST)
    try:
        return read_keys(file.read())
    except (OSError, KeyFileError) as e:
        raise ConfigError(f"access.keys_file: {show(file.path)}: {_why(e)}") from None


def _why(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
