"""The site that Sphinx makes of docs/: built without a network and without a warning, and it fetches nothing from anywhere."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks, skip_or_fail

# A build that asks for a name or connects fails: what it needs is installed.
_BUILD = """
import socket, sys
def refuse(*args, **kwargs):
    raise OSError(f"the documentation is built without a network, and this asks for it: {args}")
socket.getaddrinfo = socket.create_connection = refuse
socket.socket.connect = socket.socket.connect_ex = refuse
from sphinx.cmd.build import main
sys.exit(main(sys.argv[1:]))
"""
_MODULE = re.compile(r"^- `([\w.]+)`", re.MULTILINE)
OURS = {"gateway", "models", "protocols"}
_FETCHING_RELATIONS = {
    "stylesheet",
    "icon",
    "preload",
    "prefetch",
    "modulepreload",
    "preconnect",
    "dns-prefetch",
    "manifest",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    skip_or_fail([name for name in ("furo", "myst_parser", "sphinx") if importlib.util.find_spec(name) is None])
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, "-q", "--fail-on-warning", "--keep-going", "-d", str(folder / "kept"), "docs", str(folder / "html")],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return folder / "html"


class _Fetched(HTMLParser):
    """The addresses that a browser fetches by itself when it shows a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.addresses += [given[name] for name in ("src", "srcset", "data", "poster") if name in given]
        if tag == "link" and _FETCHING_RELATIONS & set(given.get("rel", "").split()):
            self.addresses.append(given.get("href", ""))
        self.addresses += _fetched_by_style(given.get("style", ""))


def test_the_extra_for_the_site_has_what_the_modules_of_its_reference_import() -> None:
    """The page's commands are enough in an environment of their own, in which .ci/run follows them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installed, asked = set[str](), [*project["dependencies"], *project["optional-dependencies"]["docs"]]
    while asked:
        name = re.split(r"[\[<>=!~; ]", asked.pop())[0].lower().replace("_", "-")
        if name not in installed:
            installed.add(name)
            with suppress(importlib.metadata.PackageNotFoundError):
                asked += [one for one in importlib.metadata.requires(name) or () if "extra ==" not in one]
    known = importlib.metadata.packages_distributions()
    for page in (ROOT / "docs" / "reference").glob("api-*.md"):
        for module in _MODULE.findall(page.read_text(encoding="utf-8")):
            spec = importlib.util.find_spec(module)
            assert spec is not None
            assert spec.origin is not None
            for line in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
                names = [line.module or ""] if isinstance(line, ast.ImportFrom) else []
                names += [name.name for name in line.names] if isinstance(line, ast.Import) else []
                for root in {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - OURS:
                    assert {name.lower().replace("_", "-") for name in known[root]} & installed, (module, root)


def _fetched_by_style(style: str) -> list[str]:
    return re.findall(r"url\(\s*['\"]?([^'\")]+)", style) + re.findall(r"@import\s+['\"]([^'\"]+)", style)


def fetched(file: Path) -> list[str]:
    """The addresses that a browser fetches to show this file."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".css":
        return _fetched_by_style(re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))
    page = _Fetched()
    page.feed(text)
    return page.addresses + [
        a for style in re.findall(r"<style[^>]*>(.*?)</style>", text, re.DOTALL) for a in _fetched_by_style(style)
    ]


def is_elsewhere(address: str) -> bool:
    return re.match(r"(?!data:)(?:[\w+.-]+:|//)", address) is not None


@pytest.mark.pages
def test_the_site_is_built_and_begins_with_the_index(site: Path) -> None:
    assert "Your first model" in (site / "index.html").read_text(encoding="utf-8")


@pytest.mark.pages
def test_nothing_is_fetched_from_another_host(site: Path) -> None:
    files = [*site.rglob("*.html"), *site.rglob("*.css"), *site.rglob("*.svg")]
    assert len(files) > 40
    assert {str(f): a for f in files if (a := [address for address in fetched(f) if is_elsewhere(address)])} == {}
    for script in site.rglob("*.js"):
        text = re.sub(r"/\*.*?\*/", "", script.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.search(r"(?:import|fetch|importScripts|src\s*=)\s*\(?\s*['\"](?:https?:)?//", text), script


@pytest.mark.pages
def test_every_page_is_in_the_navigation_of_every_page(site: Path) -> None:
    pages = sorted(p.relative_to(ROOT / "docs").with_suffix(".html") for p in (ROOT / "docs").rglob("*.md"))
    assert len(pages) > 30
    start = (site / "index.html").read_text(encoding="utf-8")
    navigation = start.partition('class="sidebar-tree"')[2].partition("</aside>")[0]
    assert [str(page) for page in pages if page.name != "README.html" and f'href="{page}"' not in navigation] == []


@pytest.mark.pages
def test_the_reference_has_every_module_that_it_lists(site: Path) -> None:
    for page in (ROOT / "docs" / "reference").glob("api-*.md"):
        built = (site / "reference" / page.name).with_suffix(".html").read_text(encoding="utf-8")
        for module in _MODULE.findall(page.read_text(encoding="utf-8")):
            assert f'id="module-{module}"' in built, f"{page.name}: {module}"


def test_the_reference_lists_every_module_that_a_page_imports() -> None:
    listed = {
        m
        for page in (ROOT / "docs" / "reference").glob("api-*.md")
        for m in _MODULE.findall(page.read_text(encoding="utf-8"))
    }
    imported: set[str] = set()
    for page in ["README.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]:
        for block in blocks(page):
            imported.update(re.findall(r"^\s*from ((?:models|gateway|protocols)[\w.]*) import", block.text, re.MULTILINE))
    assert len(imported) > 20
    assert imported - listed - {"models.library.echo"} == set()  # the library has its own page


@pytest.mark.parametrize(
    ("markup", "elsewhere"),
    [
        ('<script src="https://cdn.example/x.js">', True),
        ('<img src="//cdn.example/x.png">', True),
        ('<link rel="preload stylesheet" href="http://cdn.example/x.css">', True),
        ("<style>@import 'https://cdn.example/x.css'</style>", True),
        ('<p style="background: url(https://cdn.example/x.png)">', True),
        ('<a href="https://example.org/">', False),
        ('<link rel="canonical" href="https://example.org/">', False),
        ('<img src="data:image/png;base64,//8=">', False),
        ('<img src="../_static/x.png">', False),
    ],
)  # fmt: skip
def test_what_a_browser_fetches_is_known(markup: str, elsewhere: bool, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(markup, encoding="utf-8")
    assert any(map(is_elsewhere, fetched(file))) is elsewhere
