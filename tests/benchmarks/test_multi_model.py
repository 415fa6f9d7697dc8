"""The walk over many models in its fast form: nothing lost, nothing wrong, and nothing left."""

from pathlib import Path

import pytest

from benchmarks.multi_model import KiB, Plan, make_models, report, walk

PLAN = Plan(models=24, fit=10, size=1024 * KiB, workers=8, calls=400, warm_up=200)
# so few that the least recently used is often in use: its callers find it gone, and load it again
TIGHT = Plan(models=24, fit=3, size=256 * KiB, workers=8, calls=200, warm_up=100)


@pytest.mark.programs
@pytest.mark.parametrize(("side", "plan"), [("container", PLAN), ("platform", PLAN), ("container", TIGHT)])
def test_models_come_and_go_under_concurrent_calls(tmp_path: Path, side: str, plan: Plan) -> None:
    make_models(tmp_path, plan)
    figures = walk(plan, side, tmp_path)
    assert figures.memory_peak == plan.fit * plan.size
    assert figures.loads > plan.models
    assert 0 < figures.loads - figures.evictions <= plan.fit
    assert report(figures)
