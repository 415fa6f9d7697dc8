"""The restart policy: OTP's rule as a table, and what holds for every history."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.workers.restart_policy import decide, within_period
from models.spec import Restart, RestartPolicy

THREE_IN_TEN = RestartPolicy(intensity=3, period=10.0, backoff=1.0, backoff_max=3.0)


@pytest.mark.parametrize(
    ("crashes", "now", "wait"),
    [
        ([100], 100, 1.0),
        ([99, 100], 100, 2.0),
        ([98, 99, 100], 100, 3.0),  # 4.0, but for backoff_max
        ([97, 98, 99, 100], 100, None),  # the fourth is more than three
        ([90, 98, 99, 100], 100, None),  # exactly ten seconds old still counts
        ([89.9, 98, 99, 100], 100, 3.0),  # older does not
        ([1, 2, 3, 4, 5, 100], 100, 1.0),  # a long quiet time is forgiven
        ([100], 105, 1.0),
        ([100, 100, 100, 100], 100, None),
    ],
)
def test_three_crashes_in_ten_seconds_are_borne_and_the_fourth_is_not(
    crashes: list[float], now: float, wait: float | None
) -> None:
    assert decide(THREE_IN_TEN, crashes, now) == wait


@pytest.mark.parametrize(
    ("policy", "crashes", "wait"),
    [
        (RestartPolicy(intensity=0), [0.0], None),
        (RestartPolicy(backoff=0.0), [0.0], 0.0),
        (RestartPolicy(backoff=5.0, backoff_max=1.0), [0.0], 1.0),
        (RestartPolicy(intensity=5000, backoff=0.1, backoff_max=5.0), [0.0] * 5000, 5.0),
        (RestartPolicy(intensity=5000, backoff=0.1, backoff_max=5.0), [0.0] * 5001, None),
    ],
)
def test_the_edges_of_a_policy_are_what_they_say(policy: RestartPolicy, crashes: list[float], wait: float | None) -> None:
    assert decide(policy, crashes, 0.0) == wait


def test_the_defaults_double_from_a_tenth_of_a_second_and_give_up_at_the_fourth_crash() -> None:
    assert [decide(RestartPolicy(), [0.0] * n, 0.0) for n in (1, 2, 3, 4)] == [0.1, 0.2, 0.4, None]


@pytest.mark.parametrize(
    ("kind", "ended", "wait"),
    [
        (Restart.PERMANENT, False, 1.0),
        (Restart.PERMANENT, True, 1.0),
        (Restart.TRANSIENT, False, 1.0),
        (Restart.TRANSIENT, True, None),
        (Restart.TEMPORARY, False, None),
        (Restart.TEMPORARY, True, None),
    ],
)
def test_each_kind_is_restarted_as_otp_has_it(kind: Restart, ended: bool, wait: float | None) -> None:
    assert decide(RestartPolicy(kind=kind, backoff=1.0), [0.0], 0.0, ended=ended) == wait


@pytest.mark.parametrize(("jitter", "chance", "wait"), [(0.0, 1.0, 2.0), (0.5, 0.0, 2.0), (0.5, 0.5, 1.5), (1.0, 1.0, 0.0)])
def test_chance_takes_its_share_of_the_jitter_off_the_wait(jitter: float, chance: float, wait: float) -> None:
    assert decide(RestartPolicy(backoff=1.0, jitter=jitter), [0.0, 0.0], 0.0, chance=chance) == wait


SECONDS = st.floats(0, 1e6)
POLICIES = st.builds(
    RestartPolicy,
    intensity=st.integers(0, 40),
    period=st.floats(0, 100),
    backoff=st.floats(0, 100),
    backoff_max=st.floats(0, 100),
)
HISTORIES = st.lists(SECONDS, min_size=1, max_size=60).map(sorted)


@given(POLICIES, HISTORIES)
def test_a_model_is_given_up_exactly_when_too_many_crashes_are_recent(policy: RestartPolicy, crashes: list[float]) -> None:
    now = crashes[-1]
    recent = sum(now - t <= policy.period for t in crashes)
    assert (decide(policy, crashes, now) is None) is (recent > policy.intensity)


@given(POLICIES, HISTORIES)
def test_a_wait_is_a_number_within_its_bounds(policy: RestartPolicy, crashes: list[float]) -> None:
    wait = decide(policy, crashes, crashes[-1])
    if wait is not None:
        assert math.isfinite(wait)
        assert min(policy.backoff, policy.backoff_max) <= wait <= policy.backoff_max


@given(POLICIES, HISTORIES, SECONDS)
def test_only_the_crashes_of_the_period_decide(policy: RestartPolicy, crashes: list[float], later: float) -> None:
    now = crashes[-1] + later
    kept = within_period(policy, [*crashes, now], now)
    assert kept[-1] == now
    assert decide(policy, kept, now) == decide(policy, [*crashes, now], now)


@given(POLICIES, HISTORIES)
def test_another_crash_never_shortens_the_wait(policy: RestartPolicy, crashes: list[float]) -> None:
    now = crashes[-1]
    first, then = decide(policy, crashes, now), decide(policy, [*crashes, now], now)
    assert then is None or (first is not None and first <= then)
