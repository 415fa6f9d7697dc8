"""The sentence about a server is the first row of the table that holds, of what has happened between two looks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.errors import Refusal
from gateway.operator.history import History, HistoryView
from gateway.operator.stats import (
    HistogramView,
    LateView,
    ModelStats,
    PeerView,
    PointView,
    StalledView,
    StatsView,
    VerdictView,
    stats_of_all,
)
from gateway.operator.verdict import verdict
from gateway.operator.views import ErrorView, ModelView

PARTS = ("begin", "slot", "input", "room", "flush", "model")
CHAT = ModelView(name="chat", version="1", state="ready", reason="", family="text", capacity=64, slots_in_use=58, queued=0)
FULL = ModelView(name="chat", version="1", state="ready", reason="", family="text", capacity=8, slots_in_use=8, queued=11)


def model(*, complete: int = 6000, failed: int = 0, refused: int = 0, late: int = 0, **spent: float) -> ModelStats:
    duration = [0] * 18
    duration[8], duration[13] = complete - late, late
    nothing = HistogramView(buckets=[0] * 18, seconds=0.0)
    return ModelStats(
        endings={"complete": complete, "model-error": failed, "refused": refused}, items_in=0, items_out=0, bytes_in=0,
        bytes_out=0, spent=dict.fromkeys(PARTS, 0.0) | spent, duration=HistogramView(buckets=duration, seconds=0.0),
        first=nothing, gap=HistogramView(buckets=[0] * 16, seconds=0.0),
    )  # fmt: skip


def look(at: float = 60.0, *, lag: tuple[int, int] = (600, 0), **more: Any) -> StatsView:
    """Figures; `lag` is how often the loop was in time, and how often late."""
    buckets = [0] * 12
    buckets[0], buckets[7] = lag
    own = {"ready": True, "models": {"chat": model(model=100.0)}, "lag": HistogramView(buckets=buckets, seconds=0.0)}
    return msgspec.structs.replace(stats_of_all([]), at=at, uptime=at, **(own | more))


def late(*works: tuple[str, str, float]) -> list[LateView]:
    return [LateView(work=work, whose=whose, seconds=seconds) for work, whose, seconds in works]


def refusals(**counts: int) -> dict[str, int]:
    return dict.fromkeys((refusal.value for refusal in Refusal), 0) | {Refusal[name].value: n for name, n in counts.items()}


PEERS = [
    PeerView(address="10.0.0.1", streams=3, room=0.0, input=900.0, slots=0),
    PeerView(address="10.4.7.31", streams=50, room=700.0, input=0.0, slots=47),
]
BLOCKED = msgspec.structs.replace(CHAT, slots_blocked=47)
SILENT = StalledView(
    model="chat", live=2, ended=0, seconds=250.0, limit=600.0, at="/srv/app.py:12 in generate", stream="4f2a"
)
OVER = msgspec.structs.replace(SILENT, live=0, ended=1, seconds=600.0, at="")
WELL = "Healthy: 100 requests/s, p99 of chat 498 ms, no refusals"
ROWS: list[tuple[str, dict[str, Any], list[ModelView], str]] = [
    ("unready", {"ready": False, "reasons": ["model 'chat' is loading"]}, [CHAT], "Not ready: model 'chat' is loading"),
    ("draining", {"ready": False, "reasons": ["draining"]}, [CHAT], "Draining: new requests are refused"),
    ("refusing", {"models": {"chat": model(complete=5280, refused=720)}, "refusals": refusals(QUEUE=700, RATE=20)}, [CHAT],
     "Refusing: queue of chat is full (12 %)"),
    ("healthy", {"models": {"chat": model(complete=5940, refused=60)}, "refusals": refusals(QUEUE=60)}, [CHAT],
     "Healthy: 100 requests/s, p99 of chat 498 ms, 1.0 % refused"),
    ("healthy", {"models": {"chat": model(complete=5000, refused=1000)}}, [CHAT],
     "Healthy: 100 requests/s, p99 of chat 498 ms, no refusals, 17 % invalid"),
    ("refusing", {"refusals": refusals(CONNECTIONS=7000)}, [CHAT], "Refusing: too many connections (100 %)"),
    ("refusing", {"models": {}, "refusals": refusals(CONNECTIONS=1)}, [CHAT], "Refusing: too many connections (100 %)"),
    ("stalled", {"stalled": [SILENT], "models": {"chat": model(room=90.0)}}, [FULL],
     "chat has sent nothing for 4 min, at /srv/app.py:12 in generate"),
    ("stalled", {"stalled": [OVER]}, [CHAT], "chat sent nothing for 10 min"),
    ("refusing", {"stalled": [SILENT], "refusals": refusals(QUEUE=7000)}, [FULL], "Refusing: queue of a model is full (100 %)"),
    ("readers", {"models": {"chat": model(room=30.0, slot=40.0, model=30.0)}, "peers": PEERS}, [BLOCKED],
     "Slow readers: 30 % of time; 10.4.7.31 holds 47 of 64 slots of chat"),
    ("readers", {"models": {"chat": model(room=48.0, model=52.0)}, "peers": PEERS}, [BLOCKED, msgspec.structs.replace(BLOCKED, name="b")],
     "Slow readers: 48 % of time; 10.4.7.31 holds 47 slots"),
    ("readers", {"models": {"chat": model(room=48.0, model=52.0)}}, [CHAT], "Slow readers: 48 % of time"),
    ("full", {"models": {"chat": model(complete=10, refused=9, slot=58.0, room=29.0, model=100.0)}}, [FULL],
     "chat is full: 8 of 8 slots, 11 queued, 5.8 s for a slot"),
    ("full", {"models": {"chat": model(complete=0, slot=58.0)}}, [FULL], "chat is full: 8 of 8 slots, 11 queued"),
    ("failing", {"models": {"chat": model(model=1.0), "flaky": model(complete=62, failed=38)}}, [CHAT], "flaky fails 38 % of its requests"),
    ("healthy", {"models": {"chat": model(complete=5710, failed=290, model=1.0)}}, [CHAT], WELL),
    ("blocked", {"lag": (590, 10)}, [CHAT], "Something blocks the event loop"),
    ("busy", {"lag": (590, 10), "starved": [0] * 7 + [10]}, [CHAT], "The machine is busy: the server waits for a CPU"),
    ("busy", {"lag": (580, 20), "starved": [0] * 7 + [16, 0]}, [CHAT], "The machine is busy: the server waits for a CPU"),
    ("blocked", {"lag": (580, 20), "starved": [0] * 7 + [10]}, [CHAT], "Something blocks the event loop"),
    ("blocked", {"lag": (590, 10), "late": late(("TLS records", "127.0.0.1", 2.0), ("requests", "10.0.0.1", 1.0))}, [CHAT],
     "The event loop is blocked: TLS records of 127.0.0.1"),
    ("blocked", {"lag": (590, 10), "late": late(*[("TLS records", f"10.0.0.{n}", 1.0) for n in range(3)], ("", "", 1.0))}, [CHAT],
     "The event loop is blocked: TLS records"),
    ("blocked", {"lag": (590, 10), "late": late(("model code", "chat", 1.0), ("wait for a CPU", "", 9.0))}, [CHAT],
     "The event loop is blocked: model code of chat"),
    ("blocked", {"lag": (590, 10), "late": late(("TLS records", "127.0.0.1", 1.0), ("", "", 1.1))}, [CHAT], "Something blocks the event loop"),
    ("busy", {"lag": (590, 10), "starved": [0] * 7 + [10], "late": late(("TLS records", "127.0.0.1", 1.0), ("wait for a CPU", "", 9.0))}, [CHAT],
     "The machine is busy: the server waits for a CPU; most of its own goes to TLS records of 127.0.0.1"),
    ("busy", {"lag": (590, 10), "starved": [0] * 7 + [10], "late": late(("TLS records", "127.0.0.1", 0.9), ("wait for a CPU", "", 9.1))}, [CHAT],
     "The machine is busy: the server waits for a CPU"),
    ("healthy", {"lag": (599, 1), "late": late(("TLS records", "127.0.0.1", 0.1))}, [CHAT], WELL),
    ("senders", {"models": {"chat": model(input=50.0, model=50.0)}, "peers": PEERS}, [CHAT], "Clients send slowly"),
    ("healthy", {"models": {"chat": model(late=100, model=1.0)}}, [CHAT], "Healthy: 100 requests/s, p99 of chat 18 s, no refusals"),
    ("healthy", {"models": {"chat": model(room=0.9)}}, [CHAT], WELL),
    ("healthy", {}, [CHAT], WELL),
    ("empty", {"models": {}, "lag": (0, 600)}, [CHAT], "Ready. Nothing has called yet."),
]  # fmt: skip


async def nothing() -> Any:
    """Never asked."""


def point_of(stats: StatsView) -> PointView:
    """These figures as the history keeps them."""
    history = History(nothing, nothing)
    history.add(stats)
    return msgspec.json.decode(history.json(600), type=HistoryView).points[0]


def judged(figures: StatsView, models: list[ModelView]) -> VerdictView:
    """The verdict on all since the server began."""
    return verdict(None, figures, figures.uptime, models)


@pytest.mark.parametrize(("kind", "figures", "models", "sentence"), ROWS)
def test_the_first_row_that_holds_is_said(
    kind: str, figures: dict[str, Any], models: list[ModelView], sentence: str
) -> None:
    said = judged(look(**figures), models)
    assert (said.kind, said.sentence) == (kind, sentence)


def test_a_silence_of_several_processes_is_one_and_the_longest_live_one_is_named() -> None:
    longer = msgspec.structs.replace(SILENT, live=1, seconds=300.0, stream="77aa")
    total = stats_of_all([look(stalled=[SILENT]), look(stalled=[OVER]), look(stalled=[longer])])
    assert total.stalled == [msgspec.structs.replace(longer, live=3, ended=1)]
    said = judged(msgspec.structs.replace(look(), stalled=total.stalled), [CHAT])
    assert said.sentence == "chat has sent nothing for 5 min, at /srv/app.py:12 in generate"
    assert said.detail == (
        "3 streams are silent, 77aa longest; models.chat.stall_timeout ends it after 10 min. chat has 58 of 64 slots, 0 queued."
    )


def test_a_refusal_is_told_with_the_silence_behind_it() -> None:
    said = judged(look(stalled=[SILENT], refusals=refusals(QUEUE=7000)), [FULL])
    assert said.detail.endswith(" chat has sent nothing for 4 min, at /srv/app.py:12 in generate.")


def test_only_what_has_happened_since_the_look_before_counts() -> None:
    before = look(
        at=1000.0, lag=(0, 600), starved=[0] * 7 + [600], refusals=refusals(QUEUE=10**6), models={"chat": model(failed=10**6, room=10.0**9, late=6000)}
    )  # fmt: skip
    now = msgspec.structs.replace(
        before,
        at=1060.0,
        models={"chat": model(complete=12000, failed=10**6, room=10.0**9, late=6000, model=1.0)},
        lag=look(lag=(600, 600)).lag,
        starved=[0] * 7 + [600],
    )
    said = verdict(point_of(before), now, 60.0, [CHAT])
    assert (said.kind, said.sentence, said.model, said.seconds) == ("healthy", WELL, "chat", 60.0)
    assert said.spent == dict.fromkeys(PARTS, 0.0) | {"model": 1.0}


def test_slow_readers_are_named_with_all_they_hold() -> None:
    said = judged(look(models={"chat": model(room=48.0, model=52.0)}, peers=PEERS), [BLOCKED])
    assert (said.level, said.model, said.peer) == ("warn", "chat", "10.4.7.31")
    assert said.detail == (
        "10.4.7.31 accounts for 100 % of it, with 50 live streams. Clients that do not read hold 47 of the 64 slots of chat."
    )


def test_the_work_that_blocks_the_event_loop_is_named_with_its_share() -> None:
    works = late(("TLS records", "127.0.0.1", 3.0), ("TLS records", "10.0.0.1", 1.0), ("wait for a CPU", "", 1.0))
    said = judged(look(lag=(590, 10), late=works), [CHAT])
    assert (said.peer, said.model) == ("127.0.0.1", "")
    assert said.detail == (
        "Its timer is 160 ms late (p99). This had 75 % of the time for which it was late. All streams wait meanwhile."
    )
    said = judged(look(lag=(590, 10), late=late(("model code", "chat", 1.0))), [CHAT])
    assert (said.peer, said.model) == ("", "chat")


def test_the_works_of_all_fronts_are_added_and_the_rest_are_sums_of_their_kind() -> None:
    mine = late(*[("TLS records", f"10.0.0.{n}", 6.0 - n) for n in range(6)])
    told = stats_of_all([look(late=mine), look(late=late(("TLS records", "10.0.0.5", 2.5), ("requests", "", 0.5)))])
    assert [(one.work, one.whose, one.seconds) for one in told.late] == [
        *[("TLS records", f"10.0.0.{n}", 6.0 - n) for n in (0, 1, 2)], ("TLS records", "10.0.0.5", 3.5),
        ("TLS records", "10.0.0.3", 3.0), ("TLS records", "", 2.0), ("requests", "", 0.5),
    ]  # fmt: skip


def test_slow_senders_are_named() -> None:
    said = judged(look(models={"chat": model(input=50.0, model=50.0)}, peers=PEERS), [CHAT])
    assert (said.peer, said.detail.partition(". ")[2]) == ("10.0.0.1", "Most of it for 10.0.0.1 (3 streams).")


def test_an_event_loop_that_is_late_within_its_bound_is_not_blamed() -> None:
    figures = look()
    late = [590 if bound == 0.05 else 0 for bound in (*figures.bounds.lag, 0.0)]
    assert judged(msgspec.structs.replace(figures, lag=HistogramView(buckets=late, seconds=0.0)), [CHAT]).kind == "healthy"


def test_a_model_that_fails_names_the_incident() -> None:
    flaky = msgspec.structs.replace(CHAT, last_error=ErrorView(error="KeyError: 1", incident="3f2a01b7c9de", ago=1.0))
    said = judged(look(models={"chat": model(complete=1, failed=1)}), [flaky])
    assert (said.kind, said.model, said.incident) == ("failing", "chat", "3f2a01b7c9de")
    assert said.detail == "1 of 2 requests. The last error: KeyError: 1"


def test_a_duplex_model_waits_for_its_clients_without_blame() -> None:
    speech = msgspec.structs.replace(CHAT, name="speech", family="parts")
    assert judged(look(models={"speech": model(input=90.0, model=10.0)}), [speech]).kind == "healthy"


@pytest.mark.parametrize("refusal", list(Refusal))
def test_every_reason_has_words(refusal: Refusal) -> None:
    said = judged(look(refusals=refusals(**{refusal.name: 6000})), [CHAT]).sentence
    assert said.startswith("Refusing: ")
    assert said != f"Refusing: {refusal.value} (100 %)"


def test_a_server_that_has_begun_anew_is_not_told_of_with_numbers_below_zero() -> None:
    before = look(at=1000.0, models={"chat": model(complete=10**6, model=10.0**6)})
    said = verdict(point_of(before), look(at=1060.0), 60.0, [CHAT])
    assert said.sentence == "Healthy: no request has ended in the last minute"


def test_the_waits_of_all_fronts_for_a_cpu_are_added() -> None:
    told = [look(lag=(590, 10), starved=[0] * 7 + [10]), look(lag=(600, 0))]
    assert sum(stats_of_all(told).starved) == 10
    assert point_of(told[0]).starved == [0] * 7 + [10]
