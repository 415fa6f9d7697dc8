"""Sums over fronts: counters, histograms and gauges are added, equal information stays once, drain reports are joined."""

from __future__ import annotations

import re
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.fronts.sums import Family, Sample, Sums, families_of, sum_of
from gateway.gateway import Gateway
from gateway.serving.drain import CutExchange, DrainReport
from gateway.telemetry.metrics import exposition


def counter(**values: float) -> Family:
    return Family("calls", "Calls.", "counter", [Sample("calls_total", {"model": k}, v) for k, v in values.items()])


def gauge(value: float) -> Family:
    return Family("live", "Live.", "gauge", [Sample("live", {}, value)])


BUILD = Family("build", "Which.", "info", [Sample("build_info", {"version": "1"}, 1.0)])


def text_of(sums: Sums) -> str:
    return exposition(sums.registry)[1].decode()


def test_counters_and_gauges_are_sums_and_the_build_is_there_once() -> None:
    sums = Sums()
    sums.put(1, [BUILD, counter(a=1, b=2), gauge(3)])
    sums.put(2, [BUILD, counter(b=5, c=1), gauge(4)])
    sums.listening(2)
    text = text_of(sums)
    assert 'calls_total{model="a"} 1.0\n' in text
    assert 'calls_total{model="b"} 7.0\n' in text
    assert 'calls_total{model="c"} 1.0\n' in text
    assert "\nlive 7.0\n" in text
    assert 'build_info{version="1"} 1.0\n' in text
    assert text.endswith("everywire_fronts 2.0\n")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert len({line.rpartition(" ")[0] for line in lines}) == len(lines)  # no sample twice


def test_what_a_front_has_counted_stays_when_it_goes_and_what_it_held_does_not() -> None:
    sums = Sums()
    sums.put(1, [counter(a=5), gauge(2)])
    sums.put(2, [counter(a=1), gauge(1)])
    sums.remove(1)  # it was killed: what it said last holds
    assert 'calls_total{model="a"} 6.0\n' in text_of(sums)
    assert "\nlive 1.0\n" in text_of(sums)
    sums.remove(2, [counter(a=4), gauge(0)])  # it has drained, and said its last
    sums.put(3, [counter(a=1)])
    assert 'calls_total{model="a"} 10.0\n' in text_of(sums)


def test_a_gateways_own_metrics_come_through_as_they_are() -> None:
    registry, sums = Gateway().registry, Sums()
    sums.put(1, families_of(registry.collect()))
    one = exposition(registry)[1].decode()
    assert text_of(sums).startswith(one)
    sums.put(2, families_of(registry.collect()))
    for line, twice in zip(one.splitlines(), text_of(sums).splitlines(), strict=False):
        name, _, value = line.rpartition(" ")
        if not line.startswith(("#", "everywire_build")):
            assert twice == f"{name} {2 * float(value)}" or re.search(r"e[+-]\d", twice)


_values = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 1000))


@given(st.lists(st.tuples(st.integers(1, 3), st.one_of(st.none(), _values)), max_size=20))
def test_a_counter_never_falls_whichever_fronts_come_and_go(steps: list[tuple[int, dict[str, int] | None]]) -> None:
    sums, known, before = Sums(), dict[int, Counter[str]](), Counter[str]()
    gone = Counter[str]()
    for front, more in steps:
        if more is None:
            gone += known.pop(front, Counter())
            sums.remove(front)
        else:
            known[front] = known.get(front, Counter()) + Counter(more)
            sums.put(front, [counter(**known[front])])
        told = Counter[str]({m: int(float(n)) for m, n in re.findall(r'calls_total\{model="(.)"\} (\S+)', text_of(sums))})
        assert +told == sum(known.values(), gone)
        assert all(told[model] >= n for model, n in before.items())
        before = told


def row(id: str, age: float) -> CutExchange:
    return CutExchange(id=id, wire="w", dialect="d", model="m", ending="drained", age=age, bytes_in=0, bytes_out=0)


def test_a_drain_report_is_the_sum_of_all() -> None:
    one = DrainReport(live=3, endings={"complete": 2, "drained": 1}, seconds=1.5, clean=False, finished=2, refused=4,
                      cut=(row("a", 2.0),))  # fmt: skip
    other = DrainReport(
        live=2, endings={"complete": 1, "drained": 1}, seconds=0.5, clean=False, finished=1, cut=(row("b", 9.0),)
    )
    assert sum_of([one, other]) == DrainReport(
        live=5,
        endings={"complete": 3, "drained": 2},
        seconds=1.5,
        clean=False,
        finished=3,
        refused=4,
        cut=(row("b", 9.0), row("a", 2.0)),
    )


def test_it_is_clean_where_all_are_and_none_is_missing() -> None:
    clean = DrainReport(live=1, endings={"complete": 1}, seconds=1.0, clean=True, finished=1)
    assert sum_of([clean, clean]).clean
    assert not sum_of([clean], lost=1).clean
    assert sum_of([]).clean
