"""Whether a crashed worker starts again, and when: a pure decision."""

from __future__ import annotations

from collections.abc import Sequence

from models.spec import RestartPolicy


def decide(policy: RestartPolicy, crashes: Sequence[float], now: float) -> float | None:
    """Seconds to wait before the next start, or None to give the model up.

    `crashes` are the times of all crashes so far, the last one included, on the clock of `now`. More than `intensity`
    of them within `period` seconds is too many (OTP's supervisor rule); below that the wait doubles from `backoff`
    with each crash in the period, up to `backoff_max`.
    """
    recent = sum(1 for t in crashes if now - t <= policy.period)
    if recent > policy.intensity:
        return None
    return min(policy.backoff * 2.0 ** max(recent - 1, 0), policy.backoff_max)
