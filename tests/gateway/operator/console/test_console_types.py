"""The console's scripts under TypeScript's checker: `tsc --checkJs`, over what they say of types by themselves."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.vendored import packed
from tests.gateway.operator.console.conftest import absent
from tests.node import node_program

TYPESCRIPT = "5.9.3"
HERE = Path(__file__).parent
CONSOLE = Path(__file__).parents[4] / "gateway" / "operator" / "console"


@pytest.fixture(scope="module")
def node() -> str:
    """Node.js."""
    path = node_program()
    if path is None:
        absent("node")
    assert path is not None
    return path


@pytest.fixture(scope="module")
def checked(node: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that checks scripts."""
    folder = tmp_path_factory.mktemp("typescript")
    try:
        with packed("typescript", TYPESCRIPT) as archive:
            archive.extractall(folder, [one for one in archive if one.name.startswith("package/lib/lib.")], filter="data")
            archive.extractall(
                folder, [archive.getmember(f"package/lib/{name}") for name in ("tsc.js", "_tsc.js")], filter="data"
            )
    except OSError:
        absent("typescript")
    options = "--checkJs --allowJs --noEmit --target es2022 --module esnext --moduleResolution bundler --skipLibCheck"
    return [
        node,
        str(folder / "package" / "lib" / "tsc.js"),
        *options.split(),
        "--lib",
        "es2022,dom,dom.iterable",
        str(HERE / "worklet.d.ts"),
    ]


def errors(command: list[str], files: list[Path]) -> list[str]:
    """The errors in these files and those that they import, but in vendored ones."""
    done = subprocess.run([*command, *map(str, files)], cwd=CONSOLE, capture_output=True, text=True, timeout=120)
    assert not done.stderr
    return [line for line in done.stdout.splitlines() if ": error TS" in line and not line.startswith("vendor/")]


def test_the_types_of_all_scripts_agree(checked: list[str]) -> None:
    assert errors(checked, [*CONSOLE.glob("*.mjs"), *CONSOLE.glob("play/*.mjs")]) == []


def test_a_wrong_name_and_a_wrong_type_are_found(checked: list[str], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.mjs"
    wrong.write_text('export const a = missing;\nexport const b = new Date() - "x".length.size;\n')
    found = errors(checked, [wrong])
    assert [line.partition("error ")[2][:6] for line in found] == ["TS2304", "TS2362", "TS2339"]
