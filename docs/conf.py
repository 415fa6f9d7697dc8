"""Makes a site of these pages: `sphinx-build --fail-on-warning -b html docs build/site`.

The pages stay plain Markdown, which reads as well without a site. This file derives the rest from them: the navigation from
the lists of README.md, and the API reference from the lists of modules in reference/api-*.md. Neither the build nor a
reader's browser fetches anything.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

project = "everywire"
root_doc = "README"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = project
html_copy_source = False
html_show_copyright = False
suppress_warnings = ["misc.highlighting_failure"]  # commands in a console may continue after an open quote

myst_heading_anchors = 4
"""Links may lead to headings, by GitHub's names for them. A link that leads nowhere is a warning, which fails the build."""

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
maximum_signature_line_length = 100
_TREE = Path(__file__).resolve().parent.parent / "gateway" / "config" / "tree.py"
autodoc_type_aliases = {name: name for name in re.findall(r"(?m)^(\w+): TypeAlias", _TREE.read_text(encoding="utf-8"))}
"""Settings are shown with the names of their kinds, not with the ranges and patterns that those stand for."""


def toctrees(index: str) -> str:
    """The navigation: the sections of the index, each of which begins with a bold name, and the pages that each links."""
    trees = []
    for name, section in re.findall(r"^\*\*(.+?)\*\*(.*?)(?=^\*\*|\Z)", index, re.MULTILINE | re.DOTALL):
        pages = dict.fromkeys(re.findall(r"\]\(([\w/.-]+)\.md[)#]", section))
        trees.append("\n".join(["```{toctree}", ":hidden:", f":caption: {name}", "", *pages, "```"]))
    return "\n\n".join(trees)


def modules_of(page: str) -> list[str]:
    """The modules that a page of the API reference lists."""
    return re.findall(r"^- `([\w.]+)`", page, re.MULTILINE)


# Their classes inherit from classes that no page lists, so the inherited members are shown.
_MACHINES = ("protocols.http1", "protocols.http2", "protocols.websocket")


def api(module: str, beside: list[str]) -> str:
    """The API reference of a module. If it has `__all__`, that is the names in it, except those defined below a module
    `beside` it, which the page shows there. Otherwise it is the names that the module defines."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"the API reference lists {module}, which is no module")
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    chosen = any(isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "__all__" for line in tree.body)
    options = ["   :imported-members:"] if chosen else []
    if module in _MACHINES:
        options.append("   :inherited-members:")
    others = tuple(f"{other}." for other in beside if not f"{module}.".startswith(f"{other}."))
    lent = [
        n.name
        for line in ast.walk(tree)  # those of a package whose names are imported when they are asked for are in an `if`
        if isinstance(line, ast.ImportFrom) and f"{line.module}.".startswith(others)
        for n in line.names
    ]
    if chosen and lent:
        options.append(f"   :exclude-members: {', '.join(lent)}")
    return "\n".join([f"## {module}", "", "```{eval-rst}", f".. automodule:: {module}", *options, "```"])


def _add(app: Sphinx, name: str, source: list[str]) -> None:
    if name == root_doc:
        source[0] += "\n" + toctrees(source[0])
    elif name.startswith("reference/api-"):
        modules = modules_of(source[0])
        source[0] += "\n" + "\n\n".join(api(module, modules) for module in modules)


def _named(app: Sphinx, what: str, name: str, of: object, options: object, said: str | None, returned: str | None) -> Any:
    """Restores the name of a type in a union, which Sphinx wraps."""
    return re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", said or "") or said, returned


def _as_restructured(app: Sphinx, what: str, name: str, of: object, options: object, lines: list[str]) -> None:
    """Makes reStructuredText of a docstring: prose with code in single backticks, lists, and blocks that are indented as
    Markdown's code. All other markup is literal text."""
    text = []
    for paragraph in re.split(r"\n{2,}", "\n".join(lines)):
        if all(line.startswith("    ") for line in paragraph.splitlines()) and paragraph:
            text += ["::", paragraph]
            continue
        parts = re.split(r"(`[^`]+`)", paragraph)
        text.append("".join(f"`{p}`" if p[:1] == "`" and len(p) > 1 else re.sub(r"([*|_\\])", r"\\\1", p) for p in parts))
    lines[:] = "\n\n".join(text).split("\n")


def _begin(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        shutil.copy(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    app.add_lexer("log", TextLexer)
    app.connect("source-read", _add)
    app.connect("autodoc-process-signature", _named)
    app.connect("autodoc-process-docstring", _as_restructured)
    app.connect("build-finished", _begin)
