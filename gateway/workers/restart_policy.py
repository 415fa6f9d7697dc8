"""Decides if and when a crashed worker starts again, as a pure function."""

from __future__ import annotations

from collections.abc import Sequence

from models.spec import Restart, RestartPolicy

_DOUBLINGS = 64  # more than any wait needs, without an overflow


def decide(
    policy: RestartPolicy, crashes: Sequence[float], now: float, *, ended: bool = False, chance: float = 0.0
) -> float | None:
    """Returns the seconds to wait before the next start; None if the model is not started again.

    `crashes` are the times of all crashes so far, including the last one, on the clock of `now`. More than `intensity` of
    them within `period` seconds are too many (OTP's supervisor rule). Below that, the wait is `backoff` and doubles with
    each crash in the period, up to `backoff_max`. `ended`: the model did not crash, but ended by itself. A transient model
    is not started again then; a permanent one is, and the end counts as a crash. `chance`, from 0 to 1, is the share of the
    policy's jitter that is taken off the wait.
    """
    if policy.kind is Restart.TEMPORARY or (ended and policy.kind is Restart.TRANSIENT):
        return None
    recent = len(within_period(policy, crashes, now))
    if recent > policy.intensity:
        return None
    return min(policy.backoff * 2.0 ** min(recent - 1, _DOUBLINGS), policy.backoff_max) * (1 - policy.jitter * chance)


def within_period(policy: RestartPolicy, crashes: Sequence[float], now: float) -> list[float]:
    """Returns the crashes that still count: those of the last `period` seconds."""
    return [t for t in crashes if now - t <= policy.period]
