"""The pictures of the pages are what their scripts write."""

import re

from scripts import write_backpressure_picture as moving
from scripts import write_performance_plots as plots


def test_the_moving_picture_is_what_its_script_writes() -> None:
    assert moving.PICTURE.read_text(encoding="utf-8") == moving.written(), "run scripts/write_backpressure_picture.py"


def test_it_moves_only_where_motion_is_wanted() -> None:
    before, _, wanted = moving.written().partition("@media (prefers-reduced-motion: no-preference) {")
    assert "animation" not in before
    assert "@keyframes" not in before
    assert wanted.count("infinite") > len(moving.PHASES)


def test_its_phases_follow_each_other_within_its_time() -> None:
    starts = [phase.start for phase in moving.PHASES]
    assert starts == sorted(set(starts))
    assert starts[0] == 0
    assert starts[-1] < moving.SECONDS
    text = moving.written()
    assert [phase.caption for phase in moving.PHASES if f">{phase.caption}</text>" not in text] == []
    assert len(re.findall(r'class="caption [^"]*still"', text)) == 1


def test_the_plots_are_those_of_the_stored_figures() -> None:
    for path, text in plots.written().items():
        assert path.read_text(encoding="utf-8") == text, "run scripts/write_performance_plots.py"


def test_a_plot_has_every_figure_with_its_peer() -> None:
    bars = dict(plots.tokens())
    assert (bars["everywire, lines-64"], bars["LitServe, lines-64"]) == (2.7, 186)
    assert len(bars) == 7
    waits = [value for _, value in plots.neighbours()]
    assert waits == sorted(waits, reverse=True)
    assert len(waits) == plots.SHOWN_ATTACKS
