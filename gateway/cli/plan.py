"""The command `everywire plan`: the number of gateways for a load, from the figures in docs/explanation/performance.md."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import final

import click

MICROSECONDS = {
    ("infer", "http1"): ("w1-c64", 25.9),
    ("infer", "http2"): ("w1-h2-64", 41.5),
    ("tokens", "http1"): ("w4-paced-256", 46.9),
    ("tokens-at-once", "http1"): ("w4-lines-64", 2.7),
    ("duplex", "http2"): ("w5-256", 19.1),
    ("duplex", "websocket"): ("w6-256", 25.0),
}
"""The row of the table and the CPU of a unit in microseconds, by traffic and wire. A unit is a request, a token, or a
message there and back."""
KIB = {"websocket": 9.5, "http2": 9.0}
"""Memory of a silent stream in KiB, row w7. HTTP/1.1 counts as a WebSocket, which is one connection too."""
TLS = 1.34
"""The factor of CPU for TLS."""
_MOST = 10**12


@final
@dataclass(frozen=True, kw_only=True)
class FleetLoad:
    """A load of `streams` at once with `rate` units per second each, and the limits of a pod."""

    traffic: str
    wire: str
    streams: int
    rate: float
    tls: bool = False
    share: int = 60
    """Percent of a core that a pod uses while no other pod has failed."""
    memory: int = 1 << 30
    """Bytes of memory that a pod has for its streams."""
    capacity: int = 0
    """Sessions that a pod's models run at once; 0: no limit."""
    zones: int = 3
    surge: int = 1


@final
@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The number of pods by each limit, and in all."""

    microseconds: float
    cores: float
    by_cpu: int
    by_memory: int
    by_capacity: int
    for_a_zone: int
    for_a_rollout: int

    @property
    def needed(self) -> int:
        """The number of pods that carry the load, without spare ones."""
        return max(self.by_cpu, self.by_memory, self.by_capacity)

    @property
    def pods(self) -> int:
        return self.needed + self.for_a_zone + self.for_a_rollout


def plan(load: FleetLoad) -> Fleet:
    """Computes the pods for a load. KeyError if that traffic was not measured over that wire."""
    _, unit = MICROSECONDS[load.traffic, load.wire]
    microseconds = unit * (TLS if load.tls else 1)
    cores = load.streams * load.rate * microseconds / 1e6
    held = load.streams * KIB.get(load.wire, KIB["websocket"]) * 1024
    by_cpu, by_memory = _up(cores / (load.share / 100)), _up(held / load.memory)
    by_capacity = _up(load.streams / load.capacity) if load.capacity else 1
    needed = max(by_cpu, by_memory, by_capacity)
    # Without one zone, the pods of the others carry the whole load.
    zone = _up(needed / (load.zones - 1)) if load.zones > 1 else 0
    return Fleet(
        microseconds=microseconds, cores=cores, by_cpu=by_cpu, by_memory=by_memory, by_capacity=by_capacity,
        for_a_zone=zone, for_a_rollout=load.surge,
    )  # fmt: skip


def _up(pods: float) -> int:
    return max(1, math.ceil(round(pods, 6)))


def told(load: FleetLoad, plan: Fleet) -> list[str]:
    """The lines that show a plan with its inputs."""
    row, _ = MICROSECONDS[load.traffic, load.wire]
    by_capacity = f"{load.capacity:,} sessions a pod" if load.capacity else "no bound"
    kib = KIB.get(load.wire, KIB["websocket"])
    return [
        f"{load.streams:,} streams x {load.rate:,g}/s x {plan.microseconds:.1f} us = {plan.cores:,.1f} cores"
        f"  ({row}{', TLS' if load.tls else ''})",
        f"CPU:      {plan.by_cpu:,} pods, at {load.share} % of a core each",
        f"memory:   {plan.by_memory:,} pods, at {kib} KiB a stream and {load.memory >> 20:,} MiB a pod",
        f"capacity: {plan.by_capacity:,} pods, {by_capacity}",
        f"zones:    {plan.for_a_zone:,} more, so that one of {load.zones} may be lost",
        f"rollout:  {plan.for_a_rollout:,} more",
        f"pods:     {plan.pods:,}",
    ]


@click.command(
    name="plan",
    short_help="How many gateways a load needs.",
    epilog="""
\b
Examples:
  everywire plan --streams 256 --rate 50      256 answers at once, a token each 20 ms
  everywire plan --traffic duplex --wire websocket --streams 5000 --rate 50
                                              5000 voices of 50 messages a second each way
  everywire plan --traffic infer --streams 1 --rate 20000 --tls
                                              20000 small requests a second
""",
)
@click.option(
    "--traffic", type=click.Choice(sorted({traffic for traffic, _ in MICROSECONDS})), default="tokens", show_default=True,
    help="What a unit is.",
)  # fmt: skip
@click.option(
    "--wire", type=click.Choice(sorted({wire for _, wire in MICROSECONDS})), default=None,
    help="How clients speak.  [default: http1, for duplex http2]",
)  # fmt: skip
@click.option("--streams", type=click.IntRange(1, _MOST), required=True, help="How many are open at once.")
@click.option("--rate", type=click.FloatRange(0, _MOST), required=True, help="Units a second of each.")
@click.option("--tls", is_flag=True, help="TLS ends at the gateway.")
@click.option("--share", type=click.IntRange(1, 100), default=60, show_default=True, help="Percent of a core to use.")
@click.option("--memory", type=click.IntRange(1, _MOST), default=1024, show_default=True, help="MiB of a pod for streams.")
@click.option("--capacity", type=click.IntRange(0, _MOST), default=0, help="Sessions at once in a pod.  [default: no bound]")
@click.option("--zones", type=click.IntRange(1, 100), default=3, show_default=True, help="Zones, of which one may be lost.")
@click.option("--surge", type=click.IntRange(0, _MOST), default=1, show_default=True, help="Pods more in a rollout.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def plan_command(
    *, traffic: str, wire: str | None, streams: int, rate: float, tls: bool, share: int, memory: int, capacity: int,
    zones: int, surge: int, as_json: bool,
) -> None:  # fmt: skip
    """Say how many gateways a load needs, each on one core, by what was measured.

    The figures are those of docs/explanation/performance.md, of the machine that is named there. Yours differs: measure.
    """
    wire = wire or ("http2" if traffic == "duplex" else "http1")
    if (traffic, wire) not in MICROSECONDS:
        measured = " or ".join(sorted(known for of, known in MICROSECONDS if of == traffic))
        raise click.UsageError(f"--traffic {traffic} was measured over {measured}, not over {wire}")
    if not math.isfinite(rate):
        raise click.UsageError(f"--rate takes a number of units a second, not {rate}")
    load = FleetLoad(
        traffic=traffic, wire=wire, streams=streams, rate=rate, tls=tls, share=share, memory=memory << 20, capacity=capacity,
        zones=zones, surge=surge,
    )  # fmt: skip
    made = plan(load)
    if as_json:
        click.echo(json.dumps({**asdict(load), **asdict(made), "pods": made.pods}))
        return
    for line in told(load, made):
        click.echo(line)
