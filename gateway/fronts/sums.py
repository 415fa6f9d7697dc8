"""Adds the metrics and the drain reports of several fronts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import final

import msgspec
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from gateway.serving.drain import DrainReport

_SAME = frozenset({"info"})  # kinds of metrics that are the same in all fronts: they are not added
_GROWS = frozenset({"counter", "histogram"})  # kinds that must not fall when a front goes

_Key = tuple[str, tuple[tuple[str, str], ...]]


@final
class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One value of a metric."""

    name: str
    labels: dict[str, str]
    value: float

    @property
    def key(self) -> _Key:
        """The name and the labels that identify the value."""
        return self.name, tuple(sorted(self.labels.items()))


@final
class Family(msgspec.Struct, frozen=True, array_like=True):
    """A metric with all its values in one front."""

    name: str
    about: str
    kind: str
    samples: list[Sample]


def families_of(metrics: Iterable[Metric]) -> list[Family]:
    """Converts metrics, such as those of a registry, with their present values."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [Sample(sample.name, sample.labels, float(sample.value)) for sample in metric.samples],
        )
        for metric in metrics
    ]


@final
class Sums(Collector):
    """The sums of the metrics of all fronts; `registry` has them. Counts of fronts that have ended stay in the sums."""

    def __init__(self) -> None:
        self._now: dict[int, list[Family]] = {}
        self._gone: list[Family] = []
        self._fronts = 0
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def put(self, front: int, families: list[Family]) -> None:
        """Takes the present metrics of a front."""
        self._now[front] = families

    def remove(self, front: int, last: list[Family] | None = None) -> None:
        """Removes a front that has ended. `last` are its last metrics; default: those of the last `put`."""
        said = self._now.pop(front, [])
        grown = [family for family in (last or said) if family.kind in _GROWS]
        self._gone = list(_added([self._gone, grown]))

    def listening(self, fronts: int) -> None:
        """Sets the number of fronts that serve."""
        self._fronts = fronts

    def collect(self) -> Iterator[Metric]:
        """Yields the sums, for the registry."""
        for family in _added([*self._now.values(), self._gone]):
            metric = Metric(family.name, family.about, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels, sample.value)
            yield metric
        yield GaugeMetricFamily("everywire_fronts", "Processes that serve the ports.", self._fronts)


def _added(several: Iterable[list[Family]]) -> Iterator[Family]:
    """Yields each metric once, in order of appearance, with the sum for each name and labels."""
    families: dict[str, tuple[Family, dict[_Key, Sample]]] = {}
    for family in (family for one in several for family in one):
        _, samples = families.setdefault(family.name, (family, {}))
        for sample in family.samples:
            before = samples.get(sample.key)
            if before is None:
                samples[sample.key] = sample
            elif family.kind not in _SAME:
                samples[sample.key] = Sample(sample.name, sample.labels, before.value + sample.value)
    for family, samples in families.values():
        yield Family(family.name, family.about, family.kind, list(samples.values()))


def sum_of(reports: Iterable[DrainReport], *, lost: int = 0) -> DrainReport:
    """Merges drain reports into one. `lost` is the number of fronts that ended without a report; if there are some, the
    report is not clean."""
    given = list(reports)
    endings: Counter[str] = Counter()
    for report in given:
        endings.update(report.endings)
    return DrainReport(
        live=sum(report.live for report in given),
        endings=dict(endings),
        seconds=max((report.seconds for report in given), default=0.0),
        clean=not lost and all(report.clean for report in given),
        finished=sum(report.finished for report in given),
        refused=sum(report.refused for report in given),
        cut=tuple(sorted((row for report in given for row in report.cut), key=lambda row: -row.age)),
    )
