"""Every page: its code runs, its links lead somewhere, what it names is there. And the reader of pages can fail."""

import logging
import re
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
import trio

from gateway import errors
from gateway.catalog.folder import read_folder
from gateway.config import Config, ModelConfig, SageMakerConfig
from gateway.config.load import resolve
from gateway.containers.connection import ContainerLimits
from gateway.dialects.v2.operations import OPERATIONS
from gateway.errors import BadModel, Ending, GatewayError
from gateway.fronts.sums import Sums
from gateway.gateway import Gateway
from gateway.testing import memory_gateway
from protocols.aws import invoke, multi_model, sigv4
from tests.docs.pages import (
    FOLLOWED,
    OF_THE_PROJECT,
    PAGES,
    ROOT,
    Block,
    Reader,
    blocks,
    code_lines,
    commands,
    is_followed,
    namespace_of,
    stories,
    words,
)

# Blocks without a language are what goes over a wire. These pages have some, and these tests hold the forms.
WIRE = {
    "docs/reference/bidi.md": "tests/protocols/aws/test_bidi.py, tests/protocols/aws/test_bidi_json.py",
    "docs/reference/lmi.md": "tests/docs/test_wire_samples.py",
    "docs/reference/lmi-answers.md": "tests/docs/test_wire_samples.py",
    "docs/reference/lmi-formatters.md": "tests/docs/test_wire_samples.py",
    "docs/reference/openai.md": "tests/docs/test_wire_samples.py",
    "docs/reference/v2.md": "tests/protocols/v2/grammar/test_v2_decisions.py",
    "docs/reference/v2-streams.md": "tests/docs/test_wire_samples.py",
}
MOST_UNRUN = 13
"""Blocks that nobody runs: each has its reason above it."""

MOST_WORDS = {"docs/howto": 1500, "docs/tutorial": 1500, "docs/move": 1500}
"""The most words of a page, by the folder that it is in. A longer page has two tasks, or says a thing twice."""


@pytest.mark.parametrize("page", PAGES)
def test_no_code_of_the_page_goes_untested(page: str, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.unrun:
            continue
        place = f"line {block.line}: nobody runs this; if nobody can, <!-- not run: the reason --> above it says why"
        match block.language:
            case _ if is_followed(block):
                assert page in FOLLOWED or page in stories(), place
            case "python":  # below
                pass
            case "toml":
                file = tmp_path / "settings.toml"
                file.write_text(block.text, encoding="utf-8")
                resolve(file=file, environ={}, overrides={})
            case "json":
                is_one = block.text.startswith(("{\n", "[\n")) or block.text.count("\n{") == 0
                for line in [block.text] if is_one else block.text.splitlines():
                    msgspec.json.decode(line)
            case "sh":
                assert all(
                    re.match(r"(python3 -m venv|source|pip install|mkdir|cd|sphinx-build) ", line)
                    for line in block.text.splitlines()
                )
            case "":
                assert page in WIRE, place
            case _:
                raise AssertionError(place)
    namespace_of(page)


def test_the_blocks_that_nobody_runs_are_few_and_say_why() -> None:
    unrun = [(page, block.line, block.unrun) for page in PAGES for block in blocks(page) if block.unrun]
    assert len(unrun) <= MOST_UNRUN
    assert [place for place in unrun if len(place[2]) < 8] == []


@pytest.mark.parametrize("folder", MOST_WORDS)
def test_a_page_is_read_in_minutes(folder: str) -> None:
    counts = {page: words(page) for page in PAGES if page.startswith(f"{folder}/")}
    assert counts
    assert {page: count for page, count in counts.items() if count > MOST_WORDS[folder]} == {}


def test_the_readme_fits_two_screens() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 80


@pytest.mark.parametrize(("page", "test"), FOLLOWED.items())
def test_whom_a_page_is_followed_by_is_a_test_of_it(page: str, test: str) -> None:
    text = (ROOT / test).read_text(encoding="utf-8")
    assert f'"{page}"' in text
    assert ".follow(" in text or "blocks(PAGE)" in text


def test_what_holds_the_bytes_of_a_page_exists() -> None:
    for page, tests in WIRE.items():
        assert any(not block.language for block in blocks(page)), f"{page} has no such block any more"
        assert [test for test in tests.split(", ") if not (ROOT / test).is_file()] == []


@pytest.mark.parametrize("page", PAGES)
def test_no_block_hides_from_that_by_its_indentation(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"(?:^|\n\n)(?![ ]*(?:[-*]|\d+\.) )[^\n ][^\n]*\n\n((?:    [^\n]+\n)+)", text)
    assert found == (README_COMMANDS if page == "README.md" else [])


README_COMMANDS = ["    pip install . && python -m gateway demo\n    pip install '.[test]' && pytest\n"]
"""In CI both are run as they stand here."""


@pytest.mark.parametrize("page", PAGES + OF_THE_PROJECT)
def test_every_link_leads_to_a_place_in_a_page(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^```[^`]*(?:`(?!``)[^`]*)*```$|`[^`\n]*`", "", text, flags=re.MULTILINE)  # code has no links
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.is_file(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(file), f"{page}: {target}"


def anchors(file: Path) -> list[str]:
    """The names that links have for the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", PAGES + OF_THE_PROJECT)
def test_every_file_of_ours_that_is_named_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in re.findall(
        r"`((?:tests|gateway|models|protocols|docs|deploy|scripts|benchmarks|examples)/[\w/.-]+\.\w+)`", text
    ):
        assert (ROOT / name).exists(), f"{page}: {name}"


def test_where_a_thing_belongs_is_a_place_that_exists() -> None:
    """CONTRIBUTING's table names folders, and files without their folder behind one with it."""
    rows = re.findall(r"^\| [^|]+ \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    for row in rows:
        for name in re.findall(r"`((?:tests|gateway|models|protocols|docs|scripts)/[\w/]*/?)`", row):
            assert (ROOT / name).is_dir(), name


def test_the_index_names_every_page() -> None:
    linked = set(re.findall(r"\]\(([^)#\s]+)\)", (ROOT / "docs" / "README.md").read_text(encoding="utf-8")))
    assert {f"docs/{link}" for link in linked} | {"README.md", "docs/README.md"} == set(PAGES)


def table(page: str, first: str) -> list[list[str]]:
    """The rows, without the heading, of the table whose heading begins so."""
    rows = (ROOT / page).read_text(encoding="utf-8").split(f"| {first} |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in row.strip("|").split(" | ")] for row in rows]


def test_the_page_of_endings_has_each_as_the_log_says_it() -> None:
    rows = table("docs/reference/endings.md", "in the log")
    assert {(said, name) for said, name, _ in rows} == {(e.value, f"Ending.{e.name}") for e in Ending}


def test_the_page_of_observability_has_each_metric_with_its_labels_and_each_reason() -> None:
    page = "docs/reference/observability.md"
    named = {}
    for part in (ROOT / page).read_text(encoding="utf-8").split("| metric | labels | meaning |")[1:]:
        for row in part.split("\n\n")[0].splitlines()[2:]:
            names, labels, _ = row.strip("| ").split(" |", 2)
            named |= {name: tuple(re.findall(r"`(\w+)`", labels)) for name in re.findall(r"`(\w+)`", names)}
    there = {
        family.name + ("_total" if family.type == "counter" else ""): family._labelnames
        for family in (*Gateway(models=[len_of]).registry.collect(), *Sums().collect())
        if family.type != "info"
    }
    assert named == there
    assert {reason for reason, _ in table(page, "reason")} == {refusal.value for refusal in errors.Refusal}


async def len_of(text: str) -> str:
    return str(len(text))


def test_the_page_of_observability_has_each_field_of_the_access_line(caplog: pytest.LogCaptureFixture) -> None:
    async def one() -> None:
        async with memory_gateway([len_of]) as house:
            await house.client().lmi("x", "len_of")

    caplog.set_level("INFO", "gateway.exchange")
    trio.run(one)
    (record,) = [record for record in caplog.records if record.name == "gateway.exchange"]
    given = {name for name in vars(record) if name not in vars(logging.makeLogRecord({}))} - {"message"}
    rows = table("docs/reference/observability.md", "field")
    assert {name for row in rows for name in row[0].replace("`", "").split(", ")} == given | {
        "client_request_id",
        "front",
        "grpc_status",
        "incident",
        "instance",
        "key",
        "stopped_by",
    }


def test_the_page_of_endings_has_each_error_with_its_ending_and_status() -> None:
    kinds = {
        k: v
        for k, v in vars(errors).items()
        if isinstance(v, type) and issubclass(v, GatewayError) and v is not GatewayError
    }
    rows = {row[0]: row for row in table("docs/reference/endings.md", "error")}
    assert rows.keys() == kinds.keys()
    for name, row in rows.items():
        assert row[2] == kinds[name].ending.value
        if name != "ModelFailed":
            assert row[3] == str(kinds[name].status)


def test_the_reference_names_every_route() -> None:
    pages = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs" / "reference").glob("*.md"))
    second = {path for operation in OPERATIONS for path in operation.paths[1:]}  # told beside the first, once for all
    routes = {row.path for row in Gateway(Config(sagemaker=SageMakerConfig(multi_model=True))).router.rows} - second
    assert len(routes) > 30
    assert [route for route in sorted(routes) if route not in pages] == []


def test_the_page_of_sagemaker_has_each_error_with_its_status() -> None:
    rows = {row[0]: row[1] for row in table("docs/reference/sagemaker.md", "type")}
    sent = {e.value: str(e.status) for e in invoke.InvokeErrorType if e is not invoke.InvokeErrorType.INTERNAL_DEPENDENCY}
    assert {name: status for name, status in rows.items() if status != "403"} == sent
    assert [row[0] for row in table("docs/reference/sagemaker.md", "`x-amzn-errortype`")] == [
        e.value for e in sigv4.ErrorCode
    ]


def test_the_page_of_containers_has_each_option_of_one() -> None:
    options = {name for row in table("docs/reference/containers.md", "option") for name in re.findall(r"\w+", row[0])}
    assert options == {"url", "ca", "models", *(field.name for field in fields(ContainerLimits))}


def test_the_page_of_multi_model_has_each_status_by_its_name() -> None:
    for status, kind, _ in table("docs/reference/multi-model.md", "status"):
        assert f'"type":"{kind}"' in multi_model.error_body_of(int(status), "").decode()


def test_the_page_of_multi_model_has_each_key_of_a_model_folder(tmp_path: Path) -> None:
    (tmp_path / "model.toml").write_text("zzz = 1")
    with pytest.raises(BadModel, match="there are: ") as refused:
        read_folder(str(tmp_path), code=(), defaults=ModelConfig(factory=""))
    keys = refused.value.message.partition("there are: ")[2].split(", ")
    rows = table("docs/reference/multi-model.md", "key of `model.toml`")
    assert sorted(key for row in rows for key in re.findall(r"\w+", row[0])) == sorted(keys)


def console(text: str) -> list[Block]:
    return [Block(language="console", text=text, line=1, section="")]


def test_a_command_goes_on_where_a_quote_is_open() -> None:
    session = "$ echo 'one\ntwo'\none\ntwo\n$ echo \\\n  three\nthree\n"
    assert list(commands(session)) == [("echo 'one\ntwo'", "one\ntwo\n"), ("echo \\\n  three", "three\n")]


@pytest.mark.pages
@pytest.mark.parametrize("session", ["$ echo one\ntwo\n", "$ echo one\n", "$ false\n", "$ printf 'a\\nb'\na ... c\n"])
def test_a_reader_complains_of_output_that_is_not_the_pages(session: str, tmp_path: Path) -> None:
    with Reader(tmp_path) as reader, pytest.raises(AssertionError, match="line 1"):
        reader.follow(console(session))


@pytest.mark.pages
def test_a_reader_takes_what_the_page_says(tmp_path: Path) -> None:
    with Reader(tmp_path) as reader:
        reader.follow(console("$ echo one two three\none ... three\n$ true\n$ echo localhost:8080\nlocalhost:8080\n"))


def test_a_reader_complains_of_code_that_it_cannot_place(tmp_path: Path) -> None:
    with Reader(tmp_path) as reader, pytest.raises(AssertionError, match="needs a name"):
        reader.follow([Block(language="python", text="print()\n", line=1, section="")])


def test_blank_lines_and_comments_are_no_code() -> None:
    assert code_lines("# app.py\n\nx = 1  # one\n    # more\n") == ["x = 1  # one"]


def test_no_text_has_a_command_that_needs_everywire_to_be_in_a_registry() -> None:
    """It is installed from a checkout: `pip install '.[otel]'` works there, and the packages' own names work anywhere."""
    files = [
        path for suffix in ("md", "py", "txt", "toml", "yaml", "json", "mjs", "html") for path in ROOT.rglob(f"*.{suffix}")
    ]
    tops = ("gateway", "models", "protocols", "docs", "deploy", "examples", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
    texts = {path: path.read_text() for path in files if path.relative_to(ROOT).parts[0] in tops}
    wrong = re.compile(r"everywire\[\w+\]|pip3? install[^`\n]* ['\"]?everywire\b(?!-)")
    assert len(texts) > 500
    assert {str(path.relative_to(ROOT)): found[0] for path, text in texts.items() if (found := wrong.search(text))} == {}
