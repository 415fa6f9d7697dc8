"""The sentence about a server is the first row of the table that holds, of what has happened between two looks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.errors import Refusal
from gateway.operator.stats import HistogramView, ModelStats, PeerView, StatsView, stats_of_all
from gateway.operator.verdict import Verdict, verdict
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


def refusals(**counts: int) -> dict[str, int]:
    return dict.fromkeys((refusal.value for refusal in Refusal), 0) | {Refusal[name].value: n for name, n in counts.items()}


PEERS = [
    PeerView(address="10.0.0.1", streams=3, room=1.0, input=900.0, slots=0),
    PeerView(address="10.4.7.31", streams=50, room=700.0, input=1.0, slots=47),
]
WELL = "Healthy: 100 requests/s, p99 of chat 500 ms, no refusals"
ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("unready", {"ready": False, "reasons": ["draining", "model 'chat' is loading"]}, "Not ready: draining; model 'chat' is loading"),
    ("refusing", {"models": {"chat": model(complete=5280, refused=720)}, "refusals": refusals(QUEUE=700, RATE=20)},
     "Refusing: the queue of chat is full (12 %)"),
    ("healthy", {"models": {"chat": model(complete=5940, refused=60)}, "refusals": refusals(QUEUE=60)},
     "Healthy: 100 requests/s, p99 of chat 500 ms, 60 refusals"),
    ("refusing", {"refusals": refusals(CONNECTIONS=7000)}, "Refusing: there are too many connections (100 %)"),
    ("readers", {"models": {"chat": model(room=30.0, slot=40.0, model=30.0)}, "peers": PEERS},
     "Slow readers: 30 % of time; 10.4.7.31 has 50 streams and holds 47 of 64 slots"),
    ("readers", {"models": {"chat": model(room=48.0, model=52.0)}}, "Slow readers: 48 % of time"),
    ("full", {"models": {"chat": model(complete=10, slot=58.0, room=29.0, model=100.0)}},
     "chat is full: 8 of 8 slots, 11 queued, 5.8 s for a slot"),
    ("failing", {"models": {"chat": model(model=1.0), "flaky": model(complete=62, failed=38)}}, "flaky fails 38 % of its requests"),
    ("healthy", {"models": {"chat": model(complete=5710, failed=290, model=1.0)}}, WELL),
    ("blocked", {"lag": (590, 10)}, "Something blocks the event loop: it is 250 ms late"),
    ("healthy", {"lag": (599, 1)}, WELL),
    ("senders", {"models": {"chat": model(input=50.0, model=50.0)}}, "Clients send slowly: 50 % of time"),
    ("healthy", {"models": {"chat": model(late=100, model=1.0)}}, "Healthy: 100 requests/s, p99 of chat 30 s, no refusals"),
    ("healthy", {}, WELL),
    ("healthy", {"models": {}}, "Healthy: no requests"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "figures", "sentence"), ROWS)
def test_the_first_row_that_holds_is_said(kind: str, figures: dict[str, Any], sentence: str) -> None:
    said = verdict(None, look(**figures), [FULL if kind == "full" else CHAT])
    assert (said.kind, said.sentence) == (kind, sentence)


def test_only_what_has_happened_since_the_look_before_counts() -> None:
    before = look(
        at=1000.0, lag=(0, 600), refusals=refusals(QUEUE=10**6), models={"chat": model(failed=10**6, room=10.0**9, late=6000)}
    )  # fmt: skip
    now = msgspec.structs.replace(
        before,
        at=1060.0,
        models={"chat": model(complete=12000, failed=10**6, room=10.0**9, late=6000, model=1.0)},
        lag=look(lag=(600, 600)).lag,
    )
    assert verdict(before, now, [CHAT]) == Verdict(kind="healthy", sentence=WELL, model="chat")


def test_a_model_that_fails_names_the_incident() -> None:
    flaky = msgspec.structs.replace(CHAT, last_error=ErrorView(error="KeyError: 1", incident="3f2a01b7c9de", ago=1.0))
    said = verdict(None, look(models={"chat": model(complete=1, failed=1)}), [flaky])
    assert (said.kind, said.model, said.incident) == ("failing", "chat", "3f2a01b7c9de")


def test_a_duplex_model_waits_for_its_clients_without_blame() -> None:
    speech = msgspec.structs.replace(CHAT, name="speech", family="parts")
    figures = look(models={"speech": model(input=90.0, model=10.0)})
    assert verdict(None, figures, [speech]).kind == "healthy"


@pytest.mark.parametrize("refusal", list(Refusal))
def test_every_reason_has_words(refusal: Refusal) -> None:
    said = verdict(None, look(refusals=refusals(**{refusal.name: 6000})), [CHAT]).sentence
    assert said.startswith("Refusing: ")
    assert said != f"Refusing: {refusal.value} (100 %)"


def test_a_server_that_has_begun_anew_is_not_told_of_with_numbers_below_zero() -> None:
    before = look(at=1000.0, models={"chat": model(complete=10**6, model=10.0**6)})
    assert verdict(before, look(at=1060.0), [CHAT]).sentence == "Healthy: no requests"
