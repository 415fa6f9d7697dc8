"""Server: what all connections of one gateway share."""

from __future__ import annotations

import itertools
import math
import random
import secrets
from collections.abc import Callable
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

_SCRATCH, _LONG_SCRATCH = 64 * 1024, 256 * 1024
_AGE_JITTER = 0.1  # as gRPC's servers have it for theirs (MAX_CONNECTION_AGE)
NOSNIFF: Headers = ((b"x-content-type-options", b"nosniff"),)
"""A browser takes no answer for what it does not say it is."""


class Served(Protocol):
    """A connection, or a call of an ASGI server, as the gateway sees it that serves it."""

    def tick(self, now: float) -> None:
        """The coarse timer's: it looks at its stamps."""
        ...

    def drain(self) -> None:
        """Says goodbye: no new requests, live exchanges go on."""
        ...

    def drain_now(self) -> None:
        """The drain's deadline has passed: what still runs gets its ending."""
        ...

    def lost(self) -> None:
        """The transport is gone, or given up."""
        ...


@final
class Server:
    """The limits, the memory, the clock and the names of exchanges, and who is told of these. Connections ask it for each
    request and each read, so what they call there is bound to whoever does it: nothing is between."""

    runner: Runner
    """The tasks of its exchanges."""
    run_exchange: Callable[[Exchange], None]
    """The exchange runs when it is its turn."""
    turn_soon: Callable[[HasTurns], None]
    """Calls the connection's `turn` when others had theirs."""

    def __init__(
        self,
        config: Config,
        opened: Callable[[Exchange], None],
        closed: Callable[[Exchange], None],
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`opened` is called with each exchange when it begins, `closed` when it is over. `chance` gives numbers from 0
        to 1. ConfigError for proxies that are no addresses."""
        self.config, self.limits, self.chance = config, config.limits, chance
        self.budget = ByteBudget(self.limits.total_bytes)
        self.plenty = self.budget.limit // 2
        """Bytes of the budget that may be in use without a look at who holds them."""
        self.share = self.budget.limit * self.limits.party_share // 100
        """Bytes of the budget that one party may hold above that."""
        self.pool = BodyPool(self.limits.body_pool)
        self.frame_memory = _frame_memory(self.budget.limit)
        """Memory for a large frame, which is paid for as it arrives; None where it could never fit."""
        self.long_scratch = memoryview(bytearray(_LONG_SCRATCH))
        """Memory to receive body bytes into that are taken from there at once: as many as a stream's window usually has."""
        self.scratch = self.long_scratch[:_SCRATCH]
        """Memory to receive bytes into that nobody keeps: the first part of `long_scratch`."""
        self.door = Door(
            passes_credentials=config.access.pass_credentials,
            keys=bool(config.access.keys_file),
            signatures=bool(config.sagemaker.sigv4.credentials),
        )
        """Decides which fields of a request its models see."""
        self.parties = Parties()
        self.log_limits = LogLimits()
        """How often what peers cause is written to the log."""
        self.proxies = _trusted_proxies(config)
        self.date = DateField(beside=NOSNIFF)
        """The Date field of its answers, and what else all of them say."""
        self.draining = False
        """True once nothing new is answered."""
        self.leaving = False
        """True once no connection stays for another request: while it drains, and a while before where another server takes
        its place."""
        self.exchange_opened, self.exchange_closed = opened, closed
        # letters and digits alone: a head takes them without a look
        self.new_id = map(f"{secrets.token_hex(4)}%d".__mod__, itertools.count(1)).__next__
        self.clock: Callable[[], float] = trio.current_time
        self.connections: set[Served] = set()
        """Those that live."""
        self.floods: dict[tuple[str, str], int] = {}
        """Connections that were ended because their peers did too much of one kind, by wire and kind."""
        self.endings_of_connections: dict[Closing, int] = dict.fromkeys(Closing, 0)
        """Connections that it has ended by itself."""
        self.bell = Doorbell()
        """Rings when one is over, or has come about: for who waits until none is left."""

    def run_by(self, runner: Runner) -> None:
        """Its exchanges run, and its connections have their turns, by this runner."""
        self.runner, self.run_exchange, self.turn_soon = runner, runner.start, runner.turn_soon

    def begin(self) -> None:
        """Inside Trio: its clock is asked without a look for who it is."""
        self.clock = trio.lowlevel.current_clock().current_time

    def account_of(self, party: Party) -> MemoryAccount:
        """The party's account, made at the first call; it reserves bytes of the budget."""
        account = party.account
        if account is None:
            account = party.account = MemoryAccount(self.budget, plenty=self.plenty, share=self.share)
        return account

    def leaves_at(self, began: float) -> float:
        """When a connection that began then is old enough for its client to be sent elsewhere (`limits.connection_age`)."""
        return leaves_at(began, self.limits.connection_age, self.chance())

    def flooded(self, wire: str, kind: str) -> None:
        """A peer did too much of that kind."""
        self.floods[wire, kind] = self.floods.get((wire, kind), 0) + 1

    def connection_ended(self, why: Closing) -> None:
        """Called once for each connection that the server ends by itself, by whoever ends it."""
        self.endings_of_connections[why] += 1

    def connection_closed(self, connection: Served) -> None:
        """Everything that it held is given back."""
        self.connections.discard(connection)
        self.bell.ring()


def leaves_at(began: float, age: float, chance: float) -> float:
    """The time at which a connection that began at `began` is `age` seconds old, less up to a tenth by `chance` from 0 to 1.
    Infinity if `age` is 0."""
    return began + age * (1 - _AGE_JITTER * chance) if age else math.inf


def _frame_memory(most: int) -> Callable[[int], memoryview | None]:
    return lambda n: untouched(n) if n <= most else None


def _trusted_proxies(config: Config) -> TrustedProxies | None:
    try:
        return TrustedProxies(listed) if (listed := config.listen.trusted_proxies) else None
    except ValueError as e:
        raise ConfigError(f"listen.trusted_proxies: {e}") from None
