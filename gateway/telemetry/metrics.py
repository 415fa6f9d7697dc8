"""Prometheus metrics of a gateway: its registry, and the text that answers a scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, Protocol, final

import trio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from gateway.core.connection import Connection, ConnectionWire
from gateway.core.server import Server
from gateway.errors import Closing, Ending, Refusal
from gateway.histogram import Histogram
from gateway.telemetry import log_queue
from gateway.telemetry.live_look import LOOKED_AT_ONCE, LiveLook
from gateway.telemetry.tallies import Tallies, TallyKey
from gateway.version import version
from gateway.wires.asgi import ASGICall
from gateway.workers.states import State
from gateway.workers.stop_times import BOUNDS
from gateway.workers.worker import Worker

if TYPE_CHECKING:
    from gateway.telemetry.loop_watch import Blocks
    from gateway.telemetry.observer import Observer
    from gateway.workers.snapshot import InstanceStatus
    from gateway.workers.stalls import Stalls
    from gateway.workers.supervisor import Supervisor

_OF_AN_EXCHANGE = ("wire", "dialect", "model")
_OF_PARTIES = (Refusal.PARTY_SHARE, Refusal.IDLE_WHEN_WANTED, Refusal.RATE, Refusal.CONNECTIONS)


def exposition(registry: CollectorRegistry, accept: str = "") -> tuple[str, bytes]:
    """Returns the content type and the body that answer a scrape: OpenMetrics if the request's Accept field asks for it, or
    else Prometheus' text format. Must be called on the event loop, which owns the counters."""
    encode, content_type = choose_encoder(accept)
    return content_type, encode(registry)


@final
class Scrapes:
    """Makes the texts of scrapes one after the other. Those that wait for the same text share the next one, which is begun
    after the last of them has come: none is older than its request."""

    def __init__(self, make: Callable[[str], Awaitable[tuple[str, bytes]]]) -> None:
        """`make` returns the content type and the text for an Accept field."""
        self._make, self._lock = make, trio.StrictFIFOLock()
        self._next: dict[str, list[tuple[str, bytes]]] = {}

    async def text(self, accept: str) -> tuple[str, bytes]:
        """The content type and the text for this Accept field."""
        kind: str = choose_encoder(accept)[1]
        shared = self._next.setdefault(kind, [])
        async with self._lock:
            if not shared:  # the first one here makes it, or the next one if that was cancelled
                if self._next.get(kind) is shared:
                    del self._next[kind]
                shared.append(await self._make(accept))
            return shared[0]


class Barred(Protocol):
    """Counters of refused clients and of exchanges with keys."""

    @property
    def reasons(self) -> Sequence[str]:
        """The reasons for which a client's request may be refused."""
        ...

    @property
    def refusals(self) -> Mapping[str, int]:
        """The number of refused requests, by reason."""
        ...

    @property
    def endings(self) -> Mapping[tuple[str, Ending], int]:
        """The number of ended exchanges, by their key's name and their ending."""
        ...


@final
class Metrics(Collector):
    """The metrics of one gateway. Exchanges are counted from when this is made; everything else is read at a scrape.

    Peers cannot make new labels: configured models have their names, and the empty name stands for all others and for
    none.
    """

    def __init__(
        self,
        server: Server,
        supervisor: Supervisor,
        observer: Observer,
        *,
        arriving: Sized,
        lag: Histogram,
        starved: Histogram,
        blocks: Blocks,
        stalls: Stalls,
        access: Barred,
    ) -> None:
        """`arriving`: the connections of which the protocol is not known yet. `lag`: how late the event loop reached its
        timer. `starved`: those of them for which it waited for a CPU. `blocks`: steps that blocked it. `stalls`: sessions
        of models that say nothing. `access`: refused clients, and the endings of exchanges with keys."""
        self.server, self.observer, self.lag, self.starved = server, observer, lag, starved
        self.tallies = Tallies(observer.live, supervisor.configured, server.exchange_closed)
        """The counters of exchanges."""
        self._arriving, self._access = arriving, access
        self.blocks = blocks
        """The steps that blocked the event loop, and the works that kept it."""
        self.stalls = stalls
        """The sessions of models that say nothing."""
        self._configured = supervisor.configured
        self._seen: LiveLook | None = None  # for the next collection
        self._workers: dict[Worker, str] = {}  # workers that may still count, with their label
        self._before: dict[str, Counter[str]] = {}  # the counts of workers that are gone
        self._stopped_before: dict[str, Histogram] = {}
        for worker in supervisor.workers.values():
            self._notice(worker)
        supervisor.noticed.append(self._notice)
        self.registry = CollectorRegistry()
        self.registry.register(self)

    # -- at a scrape -------------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics. The registry calls it at a scrape."""
        yield InfoMetricFamily("everywire_build", "The version of the gateway.", {"version": version()})
        look, self._seen = self._seen or self._look(), None
        yield from self._of_exchanges()
        yield from self._live(look)
        yield from self._memory(look)
        yield from self._of_models()
        yield from self._of_instances()

    def _of_exchanges(self) -> Iterator[Metric]:
        tallies = self.tallies.by_key
        labels = _OF_AN_EXCHANGE
        endings = CounterMetricFamily("everywire_exchanges", "Exchanges that have ended.", labels=(*labels, "ending"))
        spent = CounterMetricFamily(
            "everywire_exchange_spent_seconds",
            "The time of exchanges by part, of live ones so far.",
            labels=(*labels, "part"),
        )
        for key, tally in tallies.items():
            for ending, n in tally.endings.items():
                if n:
                    endings.add_metric((*key, ending.value), n)
            for part, seconds in tally.spent.items():
                spent.add_metric((*key, part), seconds)
        yield endings
        yield spent
        yield _counted(
            "everywire_exchange_received_bytes",
            "Bytes of bodies and frames received, of live exchanges so far.",
            {key: tally.bytes_in for key, tally in tallies.items()},
        )
        yield _counted(
            "everywire_exchange_sent_bytes",
            "Bytes of bodies and frames sent, of live exchanges so far.",
            {key: tally.bytes_out for key, tally in tallies.items()},
        )
        yield _counted(
            "everywire_exchange_received_items",
            "Messages from clients, of live exchanges so far.",
            {key: tally.items_in for key, tally in tallies.items()},
        )
        yield _counted(
            "everywire_exchange_sent_items",
            "Messages from models, of live exchanges so far.",
            {key: tally.items_out for key, tally in tallies.items()},
        )
        yield _histogram(
            "everywire_exchange_duration_seconds",
            "From the head of a request to its ending.",
            labels,
            {key: tally.duration for key, tally in tallies.items()},
        )
        yield _histogram(
            "everywire_exchange_first_item_seconds",
            "From the head of a request until the first item of its answer was with the kernel.",
            labels,
            {key: tally.first for key, tally in tallies.items() if tally.first.count},
        )
        yield _histogram(
            "everywire_exchange_item_gap_seconds",
            "The mean time between two items of an answer: from the first item to the ending, over the items but one.",
            labels,
            {key: tally.gap for key, tally in tallies.items() if tally.gap.count},
        )

    def _of_access(self) -> Iterator[Metric]:
        access = self._access
        barred = CounterMetricFamily(
            "everywire_access_refusals", "Requests refused because the client has no right to them.", labels=("reason",)
        )
        for reason in access.reasons:
            barred.add_metric((reason,), access.refusals.get(reason, 0))
        yield barred
        let_in = CounterMetricFamily(
            "everywire_key_exchanges", "Ended exchanges of clients with a key.", labels=("key", "ending")
        )
        for (name, ending), n in access.endings.items():
            let_in.add_metric((name, ending.value), n)
        yield let_in

    def _look(self) -> LiveLook:
        self.tallies.count_live()
        look = LiveLook()
        for wire in self.wires():
            look.see_wire(wire)
        for exchange in self.observer.live:
            look.see(exchange)
        return look

    async def prepare(self) -> None:
        """Looks in turns, for a collection right after it, so that thousands of exchanges do not block other tasks."""
        self._seen = await self.look_in_turns()

    async def look_in_turns(self) -> LiveLook:
        """Returns a look at everything live, and counts it in `tallies`. Other tasks run meanwhile."""
        look, live = LiveLook(), self.observer.live
        for number, wire in enumerate(self.wires(), 1):
            look.see_wire(wire)
            if number % LOOKED_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        for number, exchange in enumerate(list(live), 1):
            if exchange in live:
                look.see(exchange)
                look.see_peer(exchange)
                self.tallies.count_one(exchange)
            if number % LOOKED_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        return look

    @property
    def refusals(self) -> dict[Refusal, int]:
        """The number of requests that were not admitted, by every reason."""
        counted = {**self.observer.refusals, Refusal.CONNECTIONS: self.server.endings_of_connections[Closing.REFUSED]}
        return {refusal: counted.get(refusal, 0) for refusal in Refusal}

    def _live(self, look: LiveLook) -> Iterator[Metric]:
        server, refusals = self.server, self.refusals
        refused = CounterMetricFamily("everywire_refusals", "Requests that were not admitted.", labels=("reason",))
        for refusal, n in refusals.items():
            refused.add_metric((refusal.value,), n)
        yield refused
        of_parties = CounterMetricFamily(
            "everywire_party_refusals",
            "Requests that were not admitted so that one party leaves room for others.",
            labels=("reason",),
        )
        for refusal in _OF_PARTIES:
            of_parties.add_metric((refusal.value,), refusals[refusal])
        yield of_parties
        ended = CounterMetricFamily(
            "everywire_ended_connections", "Connections that the server itself has ended.", labels=("reason",)
        )
        for closing, n in server.endings_of_connections.items():
            ended.add_metric((closing.value,), n)
        yield ended
        yield from self._of_access()
        floods = CounterMetricFamily(
            "everywire_floods", "Connections ended because their peer sent too much of one kind.", labels=("wire", "kind")
        )
        for key, n in server.floods.items():
            floods.add_metric(key, n)
        yield floods
        yield _gauges("everywire_live_exchanges", "Exchanges that have not ended.", ("wire",), _by_wire(look.live))
        yield _gauges(
            "everywire_waiting_exchanges", "Exchanges that wait now, by what they wait for.", ("wire", "part"), look.waiting
        )
        yield _gauges("everywire_connections", "Connections that are open.", ("wire",), _by_wire(look.connections))
        yield GaugeMetricFamily(
            "everywire_arriving_connections", "Connections of which the protocol is not known yet.", len(self._arriving)
        )
        yield GaugeMetricFamily("everywire_draining", "1 while the server is shutting down.", int(server.draining))
        yield from self._blocked()
        yield CounterMetricFamily(
            "everywire_log_dropped", "Log records of the process that were never written.", log_queue.dropped()
        )
        yield _histogram(
            "everywire_loop_lag_seconds",
            "How late the event loop reached a timer that is due ten times a second.",
            (),
            {(): self.lag},
        )
        yield _histogram(
            "everywire_turn_seconds",
            "How long the task that reads and writes for all connections ran before other tasks did.",
            (),
            {(): server.runner.turn_times},
        )

    def _blocked(self) -> Iterator[Metric]:
        blocks = self.blocks
        times: dict[str, float] = {"": 0.0}
        seconds = times.copy()
        for model, count in list(blocks.count.items()):  # a copy, because a thread counts
            known = model if model in self._configured else ""
            times[known] = times.get(known, 0.0) + count
            seconds[known] = seconds.get(known, 0.0) + blocks.seconds.get(model, 0.0)
        for name, about, values in (
            ("everywire_loop_blocks", "Steps that blocked the event loop for longer than limits.loop_block.", times),
            ("everywire_loop_blocked_seconds", "Seconds for which these steps blocked it.", seconds),
        ):
            family = CounterMetricFamily(name, about, labels=("model",))
            for model, value in values.items():
                family.add_metric((model,), value)
            yield family
        late = CounterMetricFamily(
            "everywire_loop_late_seconds", "Seconds for which the event loop was late, by its work.", labels=("work",)
        )
        for kind, value in {"": 0.0, **blocks.late}.items():
            late.add_metric((kind,), value)
        yield late

    def _memory(self, look: LiveLook) -> Iterator[Metric]:
        server = self.server
        yield _gauges("everywire_held_bytes", "Bytes that exchanges hold, by place.", ("hop",), _keyed(look.held))
        yield GaugeMetricFamily("everywire_reserved_bytes", "Bytes of the byte budget that are in use.", server.budget.used)
        yield GaugeMetricFamily(
            "everywire_reserved_limit_bytes", "The byte budget (limits.total_bytes).", server.budget.limit
        )
        pool = server.pool
        yield _gauges(
            "everywire_body_pool_bytes",
            "Memory for bodies that is in use, or kept for reuse.",
            ("state",),
            {("lent",): pool.lent_bytes, ("idle",): pool.idle_bytes},
        )

    def wires(self) -> Iterator[ConnectionWire | ASGICall]:
        """Yields the wires of open connections. A connection that closes meanwhile is left out."""
        connections = self.server.connections
        for connection in list(connections):
            if connection not in connections:
                continue
            if isinstance(connection, Connection):
                yield connection.wire
            elif isinstance(connection, ASGICall):
                yield connection

    # -- models ------------------------------------------------------------------------------------------------------

    def _of_models(self) -> Iterator[Metric]:
        self._forget()
        by_name: dict[str, list[Worker]] = {name: [] for name in (*self._configured, *self._before)}
        for worker, name in self._workers.items():
            by_name.setdefault(name, []).append(worker)
        states = GaugeMetricFamily("everywire_model_state", "Models that are in this state.", labels=("model", "state"))
        now: dict[str, dict[str, int]] = {}
        totals: dict[str, Counter[str]] = {}
        stopped: dict[str, Histogram] = {}
        for name, workers in by_name.items():
            for state in State:
                states.add_metric((name, state.value), sum(worker.state is state for worker in workers))
            now[name] = {
                "slots": sum(worker.spec.capacity for worker in workers),
                "slots_in_use": sum(worker.slots.in_use for worker in workers),
                "queued": sum(worker.slots.queued for worker in workers),
                "queued_bytes": sum(worker.slots.queued_bytes for worker in workers),
                "stuck": sum(worker.stuck.now for worker in workers),
            }
            totals[name] = sum(map(_totals_of, workers), self._before.get(name, Counter()))
            stopped[name] = _merged([worker.stopping.times for worker in workers], self._stopped_before.get(name))
        yield states
        for what, about in _NOW.items():
            yield _gauges(
                f"everywire_model_{what}", about, ("model",), {(name,): values[what] for name, values in now.items()}
            )
        calls = CounterMetricFamily("everywire_model_calls", "Calls that have ended.", labels=("model", "outcome"))
        for name, total in totals.items():
            for outcome in ("success", "failure", "cancelled"):
                calls.add_metric((name, outcome), total[outcome])
        yield calls
        for what, about in _TOTALS.items():
            family = CounterMetricFamily(f"everywire_model_{what}", about, labels=("model",))
            for name, total in totals.items():
                family.add_metric((name,), total[what])
            yield family
        yield _histogram(
            "everywire_model_stop_seconds",
            "From the request to stop a session until it had stopped completely.",
            ("model",),
            {(name,): histogram for name, histogram in stopped.items()},
        )

    def _of_instances(self) -> Iterator[Metric]:
        there: dict[tuple[str, ...], InstanceStatus] = {
            (name, str(one.number)): one
            for worker, name in self._workers.items()
            for one in getattr(worker.model, "__model_instances__", ())
        }
        received = {
            name: worker.body_memory.used_bytes for worker, name in self._workers.items() if worker.body_memory is not None
        }
        yield from metrics_of_instances(there, received)

    def _notice(self, worker: Worker) -> None:
        """Notes a worker that is new or has changed."""
        self._forget()
        if worker not in self._workers and worker.state is not State.STOPPED:
            self._workers[worker] = worker.name if worker.name in self._configured else ""

    def _forget(self) -> None:
        """Keeps the counts of workers that have ended: a reload must not decrease a counter."""
        for worker, name in list(self._workers.items()):
            if worker.stopped.is_set() and not worker.slots.live and not worker.slots.in_use:
                del self._workers[worker]
                self._before[name] = self._before.get(name, Counter()) + _totals_of(worker)
                self._stopped_before[name] = _merged([worker.stopping.times], self._stopped_before.get(name))


_NOW = {
    "slots": "Sessions that may run at once.",
    "slots_in_use": "Sessions that run, including stuck ones.",
    "queued": "Exchanges that wait for a slot.",
    "queued_bytes": "Bytes that exchanges in the queue hold.",
    "stuck": "Sessions whose code does not return.",
}
_INSTANCE = ("model", "instance")
_OF_INSTANCES = {"sessions": "Sessions in this process of a model.", "resident_bytes": "Memory of this process of a model."}
_TOTALS_OF_INSTANCES = {
    "restarts": "Starts of this process of a model after the first.",
    "cpu_seconds": "CPU that this process of a model has used since it started.",
}


def metrics_of_instances(
    there: Mapping[tuple[str, ...], InstanceStatus], received: Mapping[str, int] = {}
) -> Iterator[Metric]:
    """Yields the metrics of models' processes, by model name and number. `received`: bytes of received bodies, by model."""
    for field, about in _OF_INSTANCES.items():
        values = {key: getattr(one, field) for key, one in there.items()}
        yield _gauges(f"everywire_instance_{field}", about, _INSTANCE, values)
    shared = {
        (*key, direction): getattr(one, f"shared_{direction}_bytes")
        for key, one in there.items()
        for direction in ("bodies", "answers")
    }
    shared |= {(name, "", "received"): size for name, size in received.items()}
    about = "Memory that a model's processes share with the gateway, in use or kept for reuse."
    yield _gauges("everywire_instance_shared_bytes", about, (*_INSTANCE, "direction"), shared)
    up = {key: one.state == "ready" for key, one in there.items()}
    yield _gauges("everywire_instance_up", "1 while this process of a model takes sessions.", _INSTANCE, up)
    for field, about in _TOTALS_OF_INSTANCES.items():
        family = CounterMetricFamily(f"everywire_instance_{field}", about, labels=_INSTANCE)
        for key, one in there.items():
            family.add_metric(key, getattr(one, field))
        yield family


_TOTALS = {
    "restarts": "How often the model was loaded again after it had ended or crashed.",
    "stuck_sessions": "Sessions whose code did not return in time.",
    "stop_breaches": "Sessions that took longer to stop than models.NAME.stop_within.",
    "received_bytes": "Bytes of the bodies of tensor requests that succeeded.",
    "copied_bytes": "Bytes of these bodies that were copied or converted, counted each time.",
}


def _totals_of(worker: Worker) -> Counter[str]:
    statistics = worker.statistics
    return Counter(
        success=statistics.succeeded,
        failure=statistics.failed - statistics.cancelled,
        cancelled=statistics.cancelled,
        restarts=max(worker.life.starts - 1, 0),
        stuck_sessions=worker.stuck.total,
        stop_breaches=worker.stopping.breaches,
        received_bytes=statistics.received,
        copied_bytes=statistics.copied,
    )


def _merged(several: Iterable[Histogram], before: Histogram | None) -> Histogram:
    merged = Histogram(BOUNDS)
    if before is not None:
        merged.buckets, merged.seconds = list(before.buckets), before.seconds
    for times in several:
        merged.buckets = [one + other for one, other in zip(merged.buckets, times.buckets, strict=True)]
        merged.seconds += times.seconds
    return merged


def _by_wire(counts: Mapping[str, int]) -> dict[tuple[str, ...], int]:
    return {(wire,): counts.get(wire, 0) for wire in ("http/1.1", "http/2", "websocket")}


def _keyed(counts: Mapping[str, int]) -> dict[tuple[str, ...], int]:
    return {(name,): n for name, n in counts.items()}


def _counted(name: str, about: str, values: Mapping[TallyKey, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, about, labels=_OF_AN_EXCHANGE)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _gauges(name: str, about: str, labels: Sequence[str], values: Mapping[Any, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, about, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _histogram(name: str, about: str, labels: Sequence[str], values: Mapping[Any, Histogram]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, about, labels=labels)
    for key, histogram in values.items():
        below, buckets = 0, list[tuple[str, float]]()
        for bound, n in zip((*map(str, histogram.bounds), "+Inf"), histogram.buckets, strict=True):
            below += n
            buckets.append((bound, below))
        family.add_metric(key, buckets, histogram.seconds)
    return family
