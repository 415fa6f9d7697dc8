"""Whether a crashed worker starts again, and when: a pure decision."""

from __future__ import annotations

from collections.abc import Sequence

from models.spec import Restart, RestartPolicy

_DOUBLINGS = 64  # more than any wait needs, and no overflow


def decide(
    policy: RestartPolicy, crashes: Sequence[float], now: float, *, ended: bool = False, chance: float = 0.0
) -> float | None:
    """Seconds to wait before the next start, or None where there is none.

    `crashes` are the times of all crashes so far, the last one included, on the clock of `now`. More than `intensity`
    of them within `period` seconds is too many (OTP's supervisor rule); below that the wait doubles from `backoff`
    with each crash in the period, up to `backoff_max`. `ended` says that the last was none, but an end that nobody had
    asked for: a transient model is not started again after that, a permanent one is, and it counts as a crash. `chance`,
    from 0 to 1, is how much of the policy's jitter is taken off the wait.
    """
    if policy.kind is Restart.TEMPORARY or (ended and policy.kind is Restart.TRANSIENT):
        return None
    recent = len(within_period(policy, crashes, now))
    if recent > policy.intensity:
        return None
    return min(policy.backoff * 2.0 ** min(recent - 1, _DOUBLINGS), policy.backoff_max) * (1 - policy.jitter * chance)


def within_period(policy: RestartPolicy, crashes: Sequence[float], now: float) -> list[float]:
    """The crashes that still count: `period` seconds old or less."""
    return [t for t in crashes if now - t <= policy.period]
