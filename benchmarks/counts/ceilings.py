"""The ceilings of the counts, which only fall, and the environment in which they hold.

`ceilings.json` has, of each case, the counts of all units that are counted: whole numbers, with no slack but in `is_above`.
Another interpreter or another version of a library counts otherwise, so elsewhere the figures are only printed.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TypeAlias, final

from benchmarks.counts.cases import CASES

FILE = Path(__file__).with_name("ceilings.json")
REQUIREMENTS = Path(__file__).parent.parent / "requirements-counts.txt"
GROWTH = 1.25
"""The most CPU that a unit among eight times as many may cost, in multiples of one among few. Without a fault it is 0.80 to
1.03, and was 1.15 once for large JSON beside other load; what fails is measured once more."""

Ceilings: TypeAlias = dict[str, dict[str, int]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """A figure that is above its ceiling."""

    case: str
    figure: str
    most: int
    found: int
    units: int

    def __str__(self) -> str:
        case, count = CASES[self.case], self.found - self.most
        each = f"{count / self.units:+.2f} a {case.unit}"
        return f"{self.case}: {self.figure} rose from {self.most:,} to {self.found:,} in {self.units} {case.unit}s, {each}"


def ceilings() -> Ceilings:
    """The ceilings of all cases."""
    stored: Ceilings = json.loads(FILE.read_text())["cases"] if FILE.exists() else {}
    return stored


def is_above(figure: str, count: int, ceiling: int, units: int) -> bool:
    """True if a count is above its ceiling. Bytes allocated may rise by less than one a unit: the text of a time or of a
    process's number has a digit more or less from run to run."""
    return count > ceiling + (units - 1 if figure == "bytes allocated" else 0)


def rises(found: Mapping[str, Mapping[str, int]], most: Ceilings) -> Iterator[Rise]:
    """The figures that are above their ceilings."""
    for case, counts in found.items():
        for figure, count in counts.items():
            ceiling = most.get(case, {}).get(figure)
            if ceiling is not None and is_above(figure, count, ceiling, counts["units"]):
                yield Rise(case=case, figure=figure, most=ceiling, found=count, units=counts["units"])


def written(found: Mapping[str, Mapping[str, int]], most: Ceilings, *, raised: bool) -> Ceilings:
    """The ceilings after these counts: those that have fallen, and those of new figures. With `raised`, the counts."""
    cases = dict(most)
    for name, counts in found.items():
        before = most.get(name, {})
        cases[name] = dict(counts) if raised else {f: min(n, before.get(f, n)) for f, n in counts.items()}
    return {name: cases[name] for name in CASES if name in cases}


def write(cases: Ceilings) -> None:
    """Stores the ceilings."""
    FILE.write_text(json.dumps({"interpreter": interpreter(), "cases": cases}, indent=1) + "\n")


def interpreter() -> str:
    """This interpreter, as the ceilings name theirs."""
    return f"{platform.python_implementation()} {platform.python_version()}, {platform.system()} {platform.machine()}"


def elsewhere() -> str:
    """Why the ceilings do not hold here; empty in their environment."""
    named = json.loads(FILE.read_text())["interpreter"] if FILE.exists() else interpreter()
    if interpreter() != named:
        return f"they are of {named}, this is {interpreter()}"
    for name, version in pins().items():
        try:
            here = metadata.version(name)
        except metadata.PackageNotFoundError:
            here = "none"
        if here != version:
            return f"they are of {name} {version}, here is {here}"
    return ""


def pins() -> dict[str, str]:
    """The versions of the environment."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", REQUIREMENTS.read_text(), re.MULTILINE))
