"""The page about attacks describes every attack, and its figures are the larger ones of the file beside it."""

from __future__ import annotations

from tests.attacks.attack import attacks
from tests.attacks.table import summary
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "reference" / "attacks.md"


def test_the_page_has_every_attack_with_its_figures() -> None:
    figures = PAGE.with_suffix(".csv").read_text(encoding="utf-8")
    table = summary(figures, {name: attack.what for name, attack in attacks().items()})
    assert len(table.splitlines()) == len(attacks()) + 2, "an attack has no figures yet: python -m tests.attacks --all --csv"
    text = PAGE.read_text(encoding="utf-8")
    assert table in text, f"write this into {PAGE}:\n{table}"
    assert figures.splitlines()[0].removeprefix("# ") in text
