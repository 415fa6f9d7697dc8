"""Finds what the guide for plain English forbids, in docstrings, comments and pages.

`python -m tests.docs.english PATH ...` lists the findings of these files and folders. `english.json` keeps how many each file
had when it was last written: `--shrink` lowers its counts to those of today, `--freeze` replaces all of them.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FROZEN = Path(__file__).with_name("english.json")
FOLDERS = ("benchmarks", "docs", "examples", "gateway", "models", "protocols", "scripts", "tests")
LONGEST = 35
"""Words of the longest sentence that a page may have."""

# A clause that stands for a noun hides who acts, and a condition opens with "If".
_OPENING = re.compile(
    r"\W*(?:what|who|whom|whose|whether|where|whatever|whoever|wherever|of(?! course))\b(?!:)", re.IGNORECASE
)
_THE_SAME = re.compile(
    r"\W*the same(?:\W*$|\s*[,.;:]| (?:as|at|by|for|from|goes|has|holds|if|in|is|of|on|to|when|where|with)\b)", re.IGNORECASE
)
BANNED = re.compile(
    r"\b(?:meant without it|as good as|none is one|(?:that|which) (?:is|are) none|is no place for|by its own(?! \w)|seen to"
    r"|goes without saying|as it were|affair|(?:is|are) not looked at|in so far|such an? one|such ones|without such(?! an? )"
    r"|[Tt]he (?:former|latter)|(?:do|does|did|says?|said|done) so|or so many"
    r"|[Hh]e|[Hh]im|[Hh]imself|[Hh]is|nobody's|somebody's)\b"
)
_PRAGMA = re.compile(r"#(?:!| ?(?:noqa|type:|fmt:|pragma|mypy:|ruff:|nosec|-\*-))")
_TOKEN = re.compile(
    r"#[^\n]*"
    r'|"""(?:[^\\]|\\.)*?"""'
    r"|'''(?:[^\\]|\\.)*?'''"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'(?:[^'\\\n]|\\.)*'",
    re.DOTALL,
)
_SENTENCE_END = re.compile(r"(?<=[.!?])[)\"'*_]*\s+(?=[\"'(*_`]*[A-Z0-9`])")
_ABBREVIATED = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|approx|no)\.", re.IGNORECASE)
_CODE = re.compile(r"(`+).+?\1")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_ITEM = re.compile(r"\A\s*(?:[-*+]|\d+\.)\s+")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One sentence that breaks a rule."""

    line: int
    rule: str
    sentence: str


def sentences(text: str) -> Iterator[str]:
    """The sentences of one paragraph, where each piece of code is the word `code`."""
    plain = _LINK.sub(r"\1", _CODE.sub("`code`", text))
    plain = _ABBREVIATED.sub(r"\1", " ".join(plain.split()))
    yield from filter(None, _SENTENCE_END.split(plain))


def paragraphs(text: str, line: int) -> Iterator[tuple[int, str]]:
    """The paragraphs and list items of a text, each with its line; without examples and what is drawn or set as code."""
    kept: list[str] = []
    start = line
    for number, each in enumerate([*text.splitlines(), ""], line):
        left_out = each.startswith("    ") or each.lstrip().startswith((">>>", "...", "|", "+-"))
        if kept and (not each.strip() or left_out or _ITEM.match(each)):
            yield start, " ".join(kept)
            kept = []
        if each.strip() and not left_out:
            if not kept:
                start = number
            kept.append(_ITEM.sub("", each, count=1) if not kept else each)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The paragraphs of all docstrings, those of attributes too."""
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        for body in ("body", "orelse", "finalbody", "handlers", "cases"):
            children = getattr(node, body, None)
            if isinstance(children, list):
                waiting += children
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first, _, rest = node.value.value.partition("\n")
            lines = rest.splitlines()
            indents = [len(each) - len(each.lstrip()) for each in lines if each.strip()]
            least = min(indents, default=0)
            yield from paragraphs("\n".join([first.strip(), *(each[least:] for each in lines)]), node.lineno)


def comments(source: str) -> Iterator[tuple[int, str]]:
    """The comments, where those on lines of their own, one below the other, are one text."""
    kept: list[str] = []
    start = last = indent = 0
    line, at = 1, 0
    for token in _TOKEN.finditer(source):
        if token[0][0] != "#" or _PRAGMA.match(token[0]):
            continue
        line += source.count("\n", at, token.start())
        at = token.start()
        before = source[source.rfind("\n", 0, at) + 1 : at]
        alone = not before.strip()
        if kept and not (alone and line == last + 1 and len(before) == indent):
            yield from paragraphs("\n".join(kept), start)
            kept = []
        if not kept:
            start = line
        kept.append(token[0][1:].removeprefix(" "))
        last, indent = line, len(before) if alone else -1
    if kept:
        yield from paragraphs("\n".join(kept), start)


def page_paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """The paragraphs, headings, list items and cells of a page, each with its line; without code, comments and quotations."""
    kept: list[str] = []
    start, fence, comment = 1, "", False
    for number, each in enumerate([*text.splitlines(), ""], 1):
        bare = each.strip()
        if fence:
            fence = "" if bare == fence else fence
            continue
        opened = re.match(r"(`{3,}|~{3,})", bare)
        comment = comment or bare.startswith("<!--")
        cells = bare.startswith("|")
        quoted = bare.startswith(">")
        heading = bare.startswith("#")
        if kept and (not bare or opened or comment or cells or quoted or heading or _ITEM.match(each)):
            yield start, " ".join(kept)
            kept = []
        if opened:
            fence = opened[1]
        elif comment:
            comment = "-->" not in bare
        elif cells:
            yield from ((number, cell.strip()) for cell in re.split(r"(?<!\\)\|", bare.strip("|")) if re.search(r"\w", cell))
        elif heading:
            yield number, bare.strip("# ")
        elif bare and not quoted and (kept or not each.startswith("    ")):
            if not kept:
                start = number
            kept.append(_ITEM.sub("", each, count=1) if not kept else each)


def judged(paragraph: str, line: int, *, page: bool) -> Iterator[Finding]:
    """The findings in the sentences of one paragraph."""
    for sentence in sentences(paragraph):
        # In a page, a fragment in lower case, such as most cells, is no sentence.
        if _opens_as_a_noun(sentence) and not (page and sentence[0].islower()):
            yield Finding(line=line, rule="opening", sentence=sentence)
        if page and len(re.findall(r"[\w'’./-]*\w", sentence)) > LONGEST:
            yield Finding(line=line, rule="long", sentence=sentence)
        if BANNED.search(sentence):
            yield Finding(line=line, rule="phrase", sentence=sentence)


def _opens_as_a_noun(sentence: str) -> bool:
    if sentence.rstrip("*_\"')").endswith("?"):
        return False
    return bool(_THE_SAME.match(sentence) or (_OPENING.match(sentence) and " " in sentence))


def findings(file: Path) -> list[Finding]:
    """The findings in one file, in the order of its lines."""
    text = file.read_text(encoding="utf-8")
    page = file.suffix == ".md"
    texts = page_paragraphs(text) if page else (pair for source in (docstrings, comments) for pair in source(text))
    return sorted((f for line, each in texts for f in judged(each, line, page=page)), key=lambda found: found.line)


def files() -> Iterator[Path]:
    """All Python files and pages of the project."""
    yield from sorted(ROOT.glob("*.md"))
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".md"):
                yield file


def counted(chosen: Iterable[Path]) -> dict[str, dict[str, int]]:
    """How often each file breaks each rule; files that break none are left out."""
    counts = {str(file.relative_to(ROOT)): Counter(found.rule for found in findings(file)) for file in chosen}
    return {name: dict(sorted(rules.items())) for name, rules in sorted(counts.items()) if rules}


def frozen() -> dict[str, dict[str, int]]:
    """The counts that each file had, and may not exceed."""
    kept: dict[str, dict[str, int]] = json.loads(FROZEN.read_text(encoding="utf-8"))
    return kept


def differences(kept: dict[str, dict[str, int]], now: dict[str, dict[str, int]]) -> tuple[list[str], list[str]]:
    """The files and rules with more findings than are frozen, and those with fewer."""
    places = sorted({(name, rule) for counts in (kept, now) for name, rules in counts.items() for rule in rules})
    pairs = [(name, rule, kept.get(name, {}).get(rule, 0), now.get(name, {}).get(rule, 0)) for name, rule in places]
    return (
        [f"{name}: {rule}: {new}, frozen {old}" for name, rule, old, new in pairs if new > old],
        [f"{name}: {rule}: {new}, frozen {old}" for name, rule, old, new in pairs if new < old],
    )


def write(counts: dict[str, dict[str, int]]) -> None:
    """Replaces the frozen list; a line a file, so that two branches can change it."""
    lines = [f"  {json.dumps(name)}: {json.dumps(rules)}" for name, rules in sorted(counts.items())]
    FROZEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.docs.english", description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders whose findings are listed")
    parser.add_argument("--shrink", action="store_true", help="lower the frozen counts to those of today; none is raised")
    parser.add_argument("--freeze", action="store_true", help="replace the frozen counts by those of today")
    options = parser.parse_args()
    if options.shrink or options.freeze:
        now = counted(files())
        if options.shrink:
            kept = frozen()
            lower = {n: {r: min(c, now.get(n, {}).get(r, 0)) for r, c in rules.items()} for n, rules in kept.items()}
            now = {n: left for n, rules in lower.items() if (left := {r: c for r, c in rules.items() if c})}
        write(now)
    for path in options.paths:
        for file in sorted(p for p in [path, *path.rglob("*")] if p.is_file() and p.suffix in (".py", ".md")):
            for found in findings(file):
                print(f"{file}:{found.line}: {found.rule}: {found.sentence}")


if __name__ == "__main__":
    main()
