"""The console's files: as they are vendored, small, under a policy, and the same until they change."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from gateway.config import Config, ListenConfig, OperatorConfig
from gateway.gateway import Gateway
from gateway.operator.console import FOLDER, POLICY
from tests.gateway.operator.operators import Operator

VENDOR = FOLDER / "vendor"
VENDORED = json.loads((VENDOR / "vendored.json").read_text(encoding="utf-8"))
FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc"))
PLAY = FOLDER / "play"
OWN = [path for path in FILES if path.suffix in (".mjs", ".css", ".html") and path.parent in (FOLDER, PLAY)]
LIMIT, PLAYGROUND = 120 * 1024, 32 * 1024


def guarded() -> Operator:
    """A plane that demands a token, asked without one."""
    return Operator(Gateway(Config(listen=ListenConfig(port=-1), operator=OperatorConfig(token="correct-horse-battery"))))


@pytest.mark.parametrize("entry", VENDORED, ids=lambda entry: entry["file"])
def test_a_vendored_file_is_as_its_package_has_it(entry: dict[str, str]) -> None:
    assert hashlib.sha256((VENDOR / entry["file"]).read_bytes()).hexdigest() == entry["sha256"]


def test_every_vendored_file_is_listed_and_has_its_licence_beside_it() -> None:
    listed = {entry["file"] for entry in VENDORED}
    assert listed == {path.name for path in VENDOR.iterdir()} - {"vendored.json"}
    assert {f"{entry['package']}.LICENSE.txt" for entry in VENDORED} <= listed


def size_of(*, play: bool) -> int:
    return sum(path.stat().st_size for path in FILES if (path.parent == PLAY) is play)


def test_the_console_is_small() -> None:
    """The playground apart: most readers never open it, and its modules come when they do, with a limit of their own."""
    assert size_of(play=False) <= LIMIT
    assert 0 < size_of(play=True) <= PLAYGROUND


def test_no_page_but_the_playground_loads_its_modules() -> None:
    loaded = [
        line
        for path in FOLDER.glob("*.mjs")
        for line in path.read_text(encoding="utf-8").splitlines()
        if "play/play" in line
    ]
    assert [line.strip().partition(".catch")[0] for line in loaded] == [
        'playground ??= await import("./play/playground.mjs")'
    ]


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_a_file_of_ours_loads_nothing_from_elsewhere_and_makes_no_markup_of_text(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace('"http://127.0.0.1:8080"', "")
    assert not re.search(
        r"https?://|innerHTML|outerHTML|insertAdjacent|dangerously|eval\(|new Function|\sstyle=|url\(|@import", text
    )


def test_a_file_of_ours_begins_with_its_purpose() -> None:
    for path in OWN:
        assert path.suffix == ".html" or path.read_text(encoding="utf-8").startswith(("// ", "/* ")), path.name


def test_what_a_module_imports_is_there() -> None:
    for path in OWN:
        for name in re.findall(r'from "(\.\.?/[^"]+)"', path.read_text(encoding="utf-8")):
            assert (path.parent / name).is_file(), (path.name, name)


@pytest.mark.parametrize(("name", "kind"), [
    ("/", "text/html"), ("/console/main.mjs", "text/javascript"), ("/console/console.css", "text/css"),
    ("/console/vendor/preact.mjs", "text/javascript"), ("/console/play/pcm.mjs", "text/javascript"), ("/console/vendor/htm.LICENSE.txt", "text/plain"),
])  # fmt: skip
async def test_it_is_open_and_has_its_policy(name: str, kind: str) -> None:
    answer = await guarded().ask("GET", name)
    assert (answer.status, answer.headers["content-type"].split(";")[0]) == (200, kind)
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["permissions-policy"] == "microphone=(self)"
    assert (answer.headers["cache-control"], answer.headers["x-content-type-options"]) == ("no-cache", "nosniff")


def test_its_policy_lets_scripts_come_from_files_alone() -> None:
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules.pop("require-trusted-types-for") == "'script'"
    assert {rules.pop(name) for name in ("script-src", "style-src", "connect-src", "worker-src")} == {"'self'"}
    assert set(rules.values()) == {"'none'"}
    assert rules.keys() == {"default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types"}


async def test_a_browser_that_has_a_file_is_told_so_and_no_more() -> None:
    operator = guarded()
    first = await operator.ask("GET", "/console/main.mjs")
    again = await operator.ask("GET", "/console/main.mjs", if_none_match=first.headers["etag"])
    assert (again.status, again.body, again.headers["etag"]) == (304, b"", first.headers["etag"])
    other = await operator.ask("GET", "/console/main.mjs", if_none_match='"another"')
    assert (other.status, other.body) == (200, first.body)


async def test_its_folder_leads_to_the_page() -> None:
    answer = await guarded().ask("GET", "/console/")
    assert (answer.status, answer.headers["location"]) == (307, "../")


@pytest.mark.parametrize("name", ["nothing.mjs", "../app.py", "%2e%2e/app.py", "vendor", "vendor/", "vendor/../../app.py"])
async def test_nothing_else_is_a_file_of_it(name: str) -> None:
    assert (await guarded().ask("GET", f"/console/{name}")).status == 404
