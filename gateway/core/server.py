"""Server: what all connections of one gateway share."""

from __future__ import annotations

import itertools
import logging
import math
import random
import secrets
from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol, final

import trio

from gateway.config import Config
from gateway.config.problem import ConfigError
from gateway.core.exchange import Exchange
from gateway.core.memory import BodyPool
from gateway.core.runner import HasTurns, Runner
from gateway.credentials import Door
from gateway.doorbell import Doorbell
from gateway.errors import Closing
from gateway.log_limits import LogLimits
from gateway.net.proxies import TrustedProxies
from gateway.party import MemoryAccount, Parties, Party
from protocols.buffers import ByteBudget, untouched
from protocols.date_field import DateField
from protocols.events import Headers
from protocols.floods import Flood

log = logging.getLogger("gateway.connection")

_SCRATCH, _LONG_SCRATCH = 64 * 1024, 256 * 1024
_TOLD_AT_ONCE = 32  # exchanges that are cancelled in one turn: some milliseconds
_AGE_JITTER = 0.1  # as in gRPC's servers (MAX_CONNECTION_AGE)
NOSNIFF: Headers = ((b"x-content-type-options", b"nosniff"),)
"""Forbids browsers to guess another content type than an answer declares."""


class Served(Protocol):
    """A connection, or a call of an ASGI server, as the gateway that serves it sees it."""

    def tick(self, now: float) -> None:
        """Called by the coarse timer: checks its time stamps."""
        ...

    def drain(self) -> None:
        """Tells the client that no new requests are taken; live exchanges go on."""
        ...

    def drain_now(self) -> None:
        """Interrupts the exchanges that still run: the drain deadline has passed."""
        ...

    def lost(self) -> None:
        """Gives the transport up, if it is not gone already."""
        ...


@final
class Tellings:
    """Tells exchanges what ends them, some in each turn, those of all connections together. All tasks that this wakes run
    before the loop looks at other clients."""

    __slots__ = ("_ended", "_soon", "_waiting", "heavy")

    def __init__(self, soon: Callable[[HasTurns], None]) -> None:
        self._soon = soon
        self._waiting: deque[tuple[deque[Exchange], Callable[[Exchange], None]]] = deque()
        self._ended = False
        self.heavy = True

    def tell(self, exchanges: Collection[Exchange], what: Callable[[Exchange], None]) -> None:
        """Calls `what`, which must not raise, with each of these exchanges whose peer is not gone by then. At once if it is
        only one, or no others wait and it is among the first; else in a later turn. Connections have these by turns."""
        if len(exchanges) == 1:
            what(*exchanges)
        elif exchanges:
            self._waiting.append((deque(exchanges), what))
            if self._ended:
                self.end()
            elif len(self._waiting) == 1:
                self.turn()

    def turn(self) -> None:
        """Tells the next ones."""
        if self._waiting:
            self._tell_some()
        if self._waiting:
            self._soon(self)

    def end(self) -> None:
        """Tells all that wait, and from now on each at once: the server ends, so there are no more turns."""
        self._ended = True
        while self._waiting:
            self._tell_some()

    def _tell_some(self) -> None:
        some, what = self._waiting.popleft()
        for _ in range(min(_TOLD_AT_ONCE, len(some))):
            exchange = some.popleft()
            if not exchange.gone:
                what(exchange)
        if some:
            self._waiting.append((some, what))


@final
class Server:
    """The limits, memory, clock, exchange ids and observers that all connections share. Connections use it for each request
    and each read, so the functions they call are attributes, bound directly to the objects that do the work."""

    runner: Runner
    """The tasks of its exchanges."""
    run_exchange: Callable[[Exchange], None]
    """Makes the exchange run when it is its turn."""
    turn_soon: Callable[[HasTurns], None]
    """Calls the connection's `turn` after others had theirs."""

    def __init__(
        self,
        config: Config,
        opened: Callable[[Exchange], None],
        closed: Callable[[Exchange], None],
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`opened` is called with each exchange when it begins, `closed` when it is over. `chance` returns numbers from 0
        to 1. Raises ConfigError for trusted proxies that are not addresses."""
        self.config, self.limits, self.chance = config, config.limits, chance
        self.budget = ByteBudget(self.limits.total_bytes)
        self.plenty = self.budget.limit // 2
        """Bytes of the budget in use up to which no party's share is checked."""
        self.share = self.budget.limit * self.limits.party_share // 100
        """Bytes of the budget that one party may hold while more than `plenty` are in use."""
        self.pool = BodyPool(self.limits.body_pool)
        self.frame_memory = _frame_memory(self.budget.limit)
        """Returns memory for a large frame, which is paid for as it arrives; None if the frame could never fit."""
        self.long_scratch = memoryview(bytearray(_LONG_SCRATCH))
        """Memory to receive bytes of a body that are copied at once: as large as a stream's window usually is."""
        self.scratch = self.long_scratch[:_SCRATCH]
        """Memory to receive bytes that are not kept: the begin of `long_scratch`."""
        self.door = Door(
            passes_credentials=config.access.pass_credentials,
            keys=bool(config.access.keys_file),
            signatures=bool(config.sagemaker.sigv4.credentials),
        )
        """Decides which fields of a request its models see."""
        self.parties = Parties()
        self.log_limits = LogLimits()
        """Limits how often log lines that peers cause are written."""
        self.proxies = _trusted_proxies(config)
        self.date = DateField(beside=NOSNIFF)
        """The Date field of its answers, and the other fields that all of them have."""
        self.beside: Callable[[bytes, Headers], Headers] = _nothing
        """Returns the fields to add to the answer to a request that is refused before it has an exchange, by its method, if
        that is known, and its known headers: with the fields of CORS, a page can read the refusal."""
        self.bidi_port = 0
        """The number of `listen.bidi_port`; 0: it is not open."""
        self.draining = False
        """True once new requests are refused."""
        self.draining_since = math.inf
        """When that began: earlier requests whose work begins only now are not refused."""
        self.leaving = False
        """True once no connection stays for another request: while the server drains, and for a while before if another
        server takes its place."""
        self.one_answer = False
        """True while each new connection ends with its first answer: another server should have the client's next one."""
        self.exchange_opened, self.exchange_closed = opened, closed
        # Only letters and digits: an id needs no check before it goes into a head.
        self.new_id = map(f"{secrets.token_hex(4)}%d".__mod__, itertools.count(1)).__next__
        self.clock: Callable[[], float] = trio.current_time
        self.connections: set[Served] = set()
        """The connections that live."""
        self.floods: dict[tuple[str, str], int] = {}
        """How many connections were ended because their peers flooded them, by wire and kind of flood."""
        self.endings_of_connections: dict[Closing, int] = dict.fromkeys(Closing, 0)
        """How many connections the server has ended by itself, by reason."""
        self.bell = Doorbell()
        """Rings when a connection begins or is over: for the task that waits until none is left."""

    def run_by(self, runner: Runner) -> None:
        """Makes this runner run its exchanges and give its connections their turns."""
        self.runner, self.run_exchange, self.turn_soon = runner, runner.start, runner.turn_soon
        self.tellings = Tellings(runner.turn_soon)

    def begin(self) -> None:
        """Binds Trio's clock directly, so that reading it needs no lookup. Call it inside Trio."""
        self.clock = trio.lowlevel.current_clock().current_time

    def account_of(self, party: Party) -> MemoryAccount:
        """Returns the party's account of the budget."""
        account = party.account
        if account is None:
            account = party.account = MemoryAccount(self.budget, plenty=self.plenty, share=self.share)
        return account

    def leaves_at(self, began: float) -> float:
        """Returns when a connection that began at `began` asks its client to open another one (`limits.connection_age`)."""
        return leaves_at(began, self.limits.connection_age, self.chance())

    def flooded(self, peer: str, wire: str, flood: Flood, cut: int) -> None:
        """Counts and logs a connection that was ended because of a flood, with the number of its exchanges that this cut."""
        kind = flood.kind
        self.floods[wire, kind] = self.floods.get((wire, kind), 0) + 1
        facts = {"peer": peer, "wire": wire, "kind": kind, "count": flood.count}
        self.log_limits.write(log, "flood", {**facts, "seconds": round(flood.seconds, 3), "exchanges": cut}, logging.WARNING)

    def connection_ended(self, why: Closing) -> None:
        """Counts a connection that the server ends by itself: called once for each."""
        self.endings_of_connections[why] += 1

    def connection_closed(self, connection: Served) -> None:
        """Forgets a connection that has given back all that it held."""
        self.connections.discard(connection)
        self.bell.ring()


def _nothing(method: bytes, headers: Headers) -> Headers:
    return ()


def allows_request(fields: Headers) -> bool:
    """True if these fields of CORS are the answer to a preflight that an allowed page may send."""
    return any(name == b"access-control-allow-methods" for name, _ in fields)


def leaves_at(began: float, age: float, chance: float) -> float:
    """Returns the time at which a connection that began at `began` is `age` seconds old, less up to a tenth by `chance` from
    0 to 1. Infinity if `age` is 0."""
    return began + age * (1 - _AGE_JITTER * chance) if age else math.inf


def _frame_memory(most: int) -> Callable[[int], memoryview | None]:
    return lambda n: untouched(n) if n <= most else None


def _trusted_proxies(config: Config) -> TrustedProxies | None:
    try:
        return TrustedProxies(listed) if (listed := config.listen.trusted_proxies) else None
    except ValueError as e:
        raise ConfigError(f"listen.trusted_proxies: {e}") from None
