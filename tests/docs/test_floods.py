"""The page about floods has the tables that the policies judge by, row for row."""

from __future__ import annotations

from typing import Any

from gateway.config.fields import SETTINGS
from protocols.floods import Allowance
from protocols.http2.floods import HTTP2_FLOODS
from protocols.websocket.floods import WEBSOCKET_FLOODS
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "reference" / "floods.md"
_HEAD = "| kind | counts 1 for each | burst | a second | earned |\n| --- | --- | --- | --- | --- |\n"


def _number(n: float, row: Allowance[Any]) -> str:
    if not row.in_bytes:
        return f"{n:,g}"
    return f"{n / 2**20:g} MiB" if n >= 2**20 else f"{n / 2**10:g} KiB"


def _cells(row: Allowance[Any]) -> str:
    burst = "2 x `http2.streams`" if row.kind == "refused" else _number(row.burst, row)
    return f"| `{row.kind}` | {row.counts} | {burst} | {_number(row.rate, row)} | {row.earned_by or '-'} |"


def tables() -> dict[str, str]:
    """The tables as the page has them, by the section of their settings."""
    return {
        section: _HEAD + "\n".join(map(_cells, table))
        for section, table in (("http2", HTTP2_FLOODS), ("websocket", WEBSOCKET_FLOODS))
    }


def test_the_page_has_the_tables_of_the_policies() -> None:
    text = PAGE.read_text()
    for table in tables().values():
        assert table in text, f"write this into {PAGE}:\n{table}"


def test_each_kind_has_its_settings() -> None:
    for section, table in (("http2", HTTP2_FLOODS), ("websocket", WEBSOCKET_FLOODS)):
        for row in table:
            for what in ("burst", "rate"):
                default = SETTINGS[section, "floods", f"{row.kind}_{what}"].default
                assert default == getattr(row, what) or (row.kind, what, default) == ("refused", "burst", 0)
