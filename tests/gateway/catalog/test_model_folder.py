"""Model folders: their places, the keys of model.toml, the code that runs, and the message for each mistake."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.catalog.factories import LIBRARY
from gateway.catalog.folder import ModelFolder, Place, find_folder, forget, load_error, make_spec, read_folder
from gateway.config import ModelConfig
from gateway.errors import BadModel, BadRequest, GatewayError, InsufficientStorage, LoadFailed, NotFound
from models.messages import Family
from models.spec import Batching, ModelSpec, Restart, RestartPolicy, TensorSpec

DEFAULTS = ModelConfig(factory="", capacity=7, timeout=9.0)
ECHO = "async def model(data: bytes) -> bytes:\n    return data\n"
MODULE = "everywire_model_of_this_test"


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    forget(MODULE)
    assert not [name for name in sys.modules if name.startswith(MODULE)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "root" / "m"
    made.mkdir(parents=True)
    return made


def read(folder: Path, *, code: bool = True) -> ModelFolder:
    root = str(folder.parent)
    return read_folder(find_folder(str(folder), [root]), code=[root] if code else [], defaults=DEFAULTS)


def made(folder: Path, *, code: bool = True) -> ModelSpec:
    return make_spec(read(folder, code=code), "m", MODULE)


def refusal(folder: Path, kind: type[GatewayError] = BadModel, *, code: bool = True) -> str:
    with pytest.raises(kind) as caught:
        made(folder, code=code)
    message = caught.value.message
    assert "\n" not in message
    return message


# -- places of a folder ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://localhost{}", "FILE://{}", "{}/", "{}/../m"])
def test_a_folder_under_a_root_is_found(folder: Path, form: str) -> None:
    assert find_folder(form.format(folder), ["/nowhere", str(folder.parent)]) == str(folder)
    assert find_folder(form.format(folder), [str(folder)]) == str(folder)
    assert find_folder(form.format(folder), ["/"]) == str(folder)


def test_an_escaped_path_is_found(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    assert find_folder(f"file://{tmp_path}/a%20b", [str(tmp_path)]) == str(tmp_path / "a b")


def test_links_of_the_path_and_of_the_root_are_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder.parent)
    assert find_folder(str(tmp_path / "link" / "m"), [str(folder.parent)]) == str(folder)
    assert find_folder(str(folder), [str(tmp_path / "link")]) == str(folder)


def test_what_there_is_outside_of_the_roots_is_not_told(folder: Path, tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", folder.parent
    outside.mkdir()
    (root / "out").symlink_to(outside)
    (root / "loop").symlink_to("loop")
    (tmp_path / "root2").mkdir()
    told = set()
    for url in [outside, tmp_path / "nothing", root / "out", f"{root}/../outside", tmp_path / "root2", "/", "/etc/passwd"]:
        with pytest.raises(BadRequest) as caught:
            find_folder(str(url), [str(root)])
        told.add(caught.value.message.replace(str(url), "X"))
    assert told == {"url X is not under one of the folders that models are loaded from (repository.roots)"}
    with pytest.raises(BadRequest, match=r"repository\.roots"):
        find_folder(str(folder), [])


@pytest.mark.parametrize(
    "url",
    ["", "m", "./m", "http://x/m", "file://other/m", "file:m", "file:///m?x", "file:///m#x", "file://[/m", "s3://b/m", "/m\0", "/\ud800"],
)  # fmt: skip
def test_a_url_that_is_no_path_of_this_machine_is_refused(url: str) -> None:
    with pytest.raises(BadRequest, match="url"):
        find_folder(url, ["/"])


def test_inside_of_the_roots_it_is_told_what_is_not_there(folder: Path) -> None:
    root = [str(folder.parent)]
    with pytest.raises(NotFound, match="there is no such folder"):
        find_folder(str(folder / "nothing"), root)
    with pytest.raises(NotFound) as caught:
        find_folder(str(folder / ("x" * 5000)), root)
    assert len(caught.value.message) < 300
    (folder / "model.tar.gz").write_bytes(b"")
    with pytest.raises(BadRequest, match="is an archive: it must be unpacked"):
        find_folder(str(folder / "model.tar.gz"), root)
    (folder / "file").write_bytes(b"")
    with pytest.raises(BadRequest, match="is not a folder"):
        find_folder(str(folder / "file"), root)


# -- model.toml ------------------------------------------------------------------------------------------------------


def test_a_library_model_is_named_with_what_it_needs(folder: Path) -> None:
    (folder / "model.toml").write_text(
        'factory = "echo"\ncapacity = 3\nqueue = 0\ntimeout = "5min"\nload_timeout = 10\nmemory = "64MiB"\n'
    )
    spec = made(folder, code=False)
    assert (spec.name, spec.family, spec.capacity, spec.queue) == ("m", Family.PARTS, 3, 0)
    assert (spec.timeout, spec.load_timeout, spec.memory) == (300.0, 10.0, 64 * 1024**2)
    assert read(folder).need == 64 * 1024**2


def test_what_it_does_not_say_is_the_default(folder: Path) -> None:
    (folder / "model.toml").write_text('factory = "models.library.echo:Echo"')
    spec = made(folder)
    assert (spec.capacity, spec.timeout, spec.memory) == (7, 9.0, 0)
    (folder / "model.toml").write_text('factory = "echo"')
    assert made(folder).capacity == LIBRARY["echo"].capacity


async def test_a_data_file_of_the_folder_is_given_as_its_path(folder: Path) -> None:
    (folder / "data").mkdir()
    np.save(folder / "data" / "rows.npy", np.arange(3.0))
    (folder / "model.toml").write_text('factory = "models.library.lookup:Lookup"\noptions = { table = "data/rows.npy" }')
    spec = made(folder)
    async with spec.load() as model:
        assert model._table.tolist() == [0, 1, 2]  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "nothing", "", "a\\u0000b", "out", "pipe", "sub/../../secret"])
def test_a_data_file_is_in_the_folder_or_it_is_none(folder: Path, path: str) -> None:
    (folder.parent / "secret").write_text("")
    os.mkfifo(folder / "pipe")
    (folder / "sub").mkdir()
    (folder / "model.toml").write_text(f'factory = "lm"\noptions = {{ path = "{path}" }}')
    message = refusal(folder)
    assert "model.toml: options.path" in message or "model's folder" in message or "pipe is not a regular file" in message


def test_a_link_out_of_the_folder_is_refused_wherever_it_is(folder: Path) -> None:
    (folder.parent / "secret").write_text("")
    (folder / "sub").mkdir()
    (folder / "sub" / "out").symlink_to("../../secret")
    (folder / "model.toml").write_text('factory = "echo"')
    assert "sub/out is a link that leads out of the model's folder" in refusal(folder)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('factory = "ehco"', "factory must be the name of a library model, or .* not 'ehco'; did you mean 'echo'"),
        ('factory = "os:system"', "not 'os:system'"),
        ('factory = "models.library.lm:np.load"', "'models.library.lm' defines no 'np.load'"),
        ('factory = "models.library.lm:TABLES"', "defines no 'TABLES'"),
        ('factory = "models.library.lm:LanguageModel.load.__globals__"', "factory must be"),
        ('factory = "models.library..lm:x"', "factory must be"),
        ('factory = "models.library.nothing:x"', "there is no module 'models.library.nothing'"),
        ('factory = "models.adapt:adapt"', "factory must be"),
        ("factory = 3", "factory must be the name of a library model, .* not 3"),
        ("capacity = 3", "factory is missing"),
        ('factory = "echo"\ncapacty = 3', "capacty is not a key of it; did you mean capacity"),
        ('factory = "echo"\nzzz = 3', "zzz is not a key of it; there are: factory, options"),
        ('factory = "echo"\ncapacity = 0', "capacity must be a whole number, at least 1, not 0"),
        ('factory = "echo"\ncapacity = true', "capacity must be a whole number, at least 1, not true"),
        ('factory = "echo"\ncapacity = "3"', "capacity must be a whole number"),
        ('factory = "echo"\ntimeout = "soon"', "timeout must be a duration"),
        ('factory = "echo"\ntimeout = nan', "timeout must be a duration"),
        ('factory = "echo"\nload_timeout = 0', "load_timeout must be a duration above 0"),
        ('factory = "echo"\nmemory = "much"', "memory must be a number of bytes"),
        ('factory = "echo"\nmemory = -1', "memory must be a number of bytes"),
        ('factory = "echo"\noptions = 3', "options must be a table, not 3"),
        ('factory = "echo"\nbatching = 3', "batching must be a table, not 3"),
        (
            'factory = "echo"\n[batching]\nmax_dely = 3',
            "batching.max_dely is not a key of it; did you mean batching.max_delay",
        ),
        (
            'factory = "echo"\n[process]\nenabled = true',
            r"process.enabled cannot be set here: only in \[repository.process\]",
        ),
        ('factory = "echo"\n[process]\ndevice_variable = "A"', "process.device_variable cannot be set here"),
        ('factory = "echo"\n[process]\ninstances = 0', "process.instances must be a whole number"),
        ('factory = "echo"\n[process]\ninstanses = 1', "did you mean process.instances"),
        ('factory = "echo"\n[process]\nenvironment = { "A=B" = "1" }', "cannot be the name of a variable"),
        ('factory = "echo"\nstep_timeout = -1', "step_timeout must be a duration, at least 0"),
        ('factory = "echo"\n[restart]\nkind = "never"', "restart.kind must be one of permanent, transient, temporary"),
        ('factory = "echo"\ninputs = [{ shape = [1] }]', "inputs must be a list of tensors"),
        ('factory = "echo"\nversion = "a/b"', "version must be 1 to 64 letters"),
        ('factory = "echo"\noptions = { x = 3 }', "model.toml: got an unexpected keyword argument 'x'"),
        ("factory = ", "is not TOML"),
        ("x = " + "[" * 100_000, "is not TOML"),
        ("#" * (256 * 1024 + 1), "is larger than 256 KiB"),
        (".".join("a" * 20_000) + " = 1", "is not TOML: line 1 has a key of more than 32 parts"),
        ("\n\noptions." + " . ".join(["'a'", '"b"'] * 10_000) + " = 1", "line 3 has a key of more than 32 parts"),
        ("[" + ".".join("a" * 33) + "]", "line 1 has a key of more than 32 parts"),
        ("x = " + "[" * 33 + "]" * 33, "line 1 has values more than 32 deep"),
        ("options = " + "{ a.b.c = " * 11 + "1" + "}" * 11, "line 1 has"),
        ("x = " + "1" * 5000, "line 1 has a word of more than 4096 characters: 11111"),
    ],
)
def test_each_mistake_is_told_with_its_file_and_key(folder: Path, text: str, told: str) -> None:
    import re

    (folder / "model.toml").write_text(text)
    message = refusal(folder)
    assert re.search(told, message), message
    assert message.startswith(str(folder / "model.toml"))


def test_a_model_toml_may_be_as_deep_as_a_person_writes(folder: Path) -> None:
    from gateway.config.text import read_toml

    key = ".".join("a" * 32)
    for text in (f"[{key}]\n{key} = 1.5", f"[[{key}]]\nx = 1", "x = " + "[" * 30 + "1.5, 2.5" + "]" * 30):
        assert read_toml(text)
    dots = "." * 100
    assert read_toml(f"""x = "{dots}\\"{dots}"  # {dots}\ny = '{dots}'\n""") == {"x": f'{dots}"{dots}', "y": dots}
    assert read_toml(f'x = """{dots}"\n"""" # {dots}\n') == {"x": f'{dots}"\n"'}
    assert read_toml(f"x = '''{dots}''\n'''\n") == {"x": f"{dots}''\n"}


def test_a_model_toml_that_is_no_text_or_no_file_is_refused(folder: Path) -> None:
    (folder / "model.toml").write_bytes(b"\xff")
    assert "is not UTF-8 text (at byte 0)" in refusal(folder)
    (folder / "model.toml").unlink()
    os.mkfifo(folder / "model.toml")
    assert "is not a regular file" in refusal(folder)
    (folder / "model.toml").unlink()
    (folder / "model.toml").symlink_to("nothing")
    assert "cannot be read" in refusal(folder)
    (folder / "model.toml").unlink()
    assert "holds neither model.toml nor model.py: it is not a model's folder" in refusal(folder)
    (folder / "serving.properties").touch()
    assert "holds neither model.toml nor model.py: serving.properties says how" in refusal(folder)


# -- model.py --------------------------------------------------------------------------------------------------------


def test_code_runs_only_below_the_folders_that_are_configured_for_it(folder: Path) -> None:
    (folder / "model.py").write_text("raise SystemExit")
    assert "is code, and runs only below the folders of repository.code" in refusal(folder, code=False)


def test_beside_a_library_model_code_is_its_formatters(folder: Path) -> None:
    (folder / "model.toml").write_text('factory = "lm"')
    (folder / "model.py").write_text("def model(prompt: str) -> str: ...")
    assert "model.toml names a library model (factory), so it may hold only formatters: it has none" in refusal(folder)
    marks = "from models.formatters import input_formatter, output_formatter\n"
    (folder / "model.py").write_text(marks + "@input_formatter\ndef a(item): ...\n@input_formatter\ndef b(item): ...\n")
    assert "two functions are marked @input_formatter: a and b" in refusal(folder)
    (folder / "model.py").write_text(marks + "@input_formatter\ndef a(item): ...\n@output_formatter\ndef b(step): ...\n")
    spec = made(folder)
    assert (spec.input_formatter.__name__, spec.output_formatter.__name__) == ("a", "b")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("code", "family"),
    [
        (ECHO, Family.PARTS),
        (ECHO.replace("model", "anything"), Family.PARTS),
        ("def model(text: str) -> str:\n    return text\n", Family.TEXT),
        ("class Model:\n    def __call__(self, text: str) -> str:\n        return text\n", Family.TEXT),
        (
            "from models.adapt import spec_of\ndef _words(text: str):\n    yield text\nspec = spec_of(_words, 'w')\n",
            Family.TEXT,
        ),
        ("from . import helper\nmodel = helper.echo\n", Family.PARTS),
        ("from .helper import echo as model\n", Family.PARTS),
    ],
)
def test_what_model_py_defines_is_the_model(folder: Path, code: str, family: Family) -> None:
    (folder / "model.py").write_text(code)
    (folder / "helper.py").write_text(ECHO.replace("model", "echo"))
    path = list(sys.path)
    spec = made(folder)
    assert (spec.name, spec.family) == ("m", family)
    assert sys.path == path


def test_model_toml_beside_model_py_says_how_it_is_served(folder: Path) -> None:
    (folder / "model.py").write_text(
        "from models.adapt import spec_of\n"
        "async def _echo(data: bytes) -> bytes:\n    return data\n"
        "model = spec_of(_echo, 'x', capacity=2, queue=3, memory=4096)\n"
    )
    spec = made(folder)
    assert (spec.name, spec.capacity, spec.queue, spec.memory) == ("m", 2, 3, 4096)
    (folder / "model.toml").write_text('capacity = 5\nmemory = "1 KiB"')
    spec = made(folder)
    assert (spec.capacity, spec.queue, spec.memory) == (5, 3, 1024)


def test_a_folder_says_all_that_a_configured_model_may(folder: Path) -> None:
    (folder / "model.py").write_text(
        "import numpy as np\nfrom models.adapt import spec_of\n"
        "from models.spec import Restart, RestartPolicy\n"
        "def _double(x: np.ndarray) -> np.ndarray:\n    return x + x\n"
        "model = spec_of(_double, 'x', threads=2, restart=RestartPolicy(kind=Restart.TRANSIENT, intensity=9))\n"
    )
    (folder / "model.toml").write_text(
        'version = "3"\nmax_batch_size = 8\nstep_timeout = "2s"\nstop_within = 1\nstuck_limit = 0\n'
        'inputs = [{ name = "x", datatype = "FP32", shape = [-1] }]\n'
        "[batching]\nmax_delay = '5ms'\npreferred = [4, 8]\npad_rows = true\n[restart]\nperiod = 60\n"
    )
    spec = made(folder)
    assert (spec.version, spec.max_batch_size, spec.step_timeout, spec.stop_within, spec.stuck_limit) == (
        "3",
        8,
        2.0,
        1.0,
        0,
    )
    assert spec.inputs == (TensorSpec(name="x", datatype="FP32", shape=(-1,)),)
    assert spec.batching == Batching(max_delay=0.005, preferred=(4, 8), pad_rows=True)
    assert spec.threads == 2
    assert spec.restart == RestartPolicy(kind=Restart.TRANSIENT, intensity=9, period=60.0)


async def test_options_are_given_to_a_factory_and_its_files_as_paths(folder: Path) -> None:
    (folder / "model.py").write_text(
        "from pathlib import Path\n"
        "class Model:\n"
        "    def __init__(self, words: Path, count: int) -> None:\n"
        "        self.words = words.read_text() * count\n"
        "    def __call__(self, text: str) -> str:\n"
        "        return self.words\n"
    )
    (folder / "words.txt").write_text("hi")
    (folder / "model.toml").write_text('options = { words = "words.txt", count = 2 }')
    async with made(folder).load() as model:
        inner: Any = model
        assert inner._call.words == "hihi"
    (folder / "model.toml").write_text("options = { count = 2 }")
    said = "model.py: missing a required argument: 'words'. Give options = {words = VALUE}. Other options: count"
    assert said in refusal(folder)


def test_two_that_might_be_the_model_are_told(folder: Path) -> None:
    (folder / "model.py").write_text(ECHO.replace("model", "one") + ECHO.replace("model", "two"))
    assert refusal(folder).endswith("name one function, class or ModelSpec `model`; it defines one, two")
    (folder / "model.py").write_text("model = 3")
    assert "model.py: 3 is no model" in refusal(folder)


def test_what_code_raises_is_told_with_its_place(folder: Path) -> None:
    (folder / "model.py").write_text("from . import helper\n")
    (folder / "helper.py").write_text("\n\nraise OSError('x' * 1000)\n")
    message = refusal(folder, LoadFailed)
    assert "OSError: xxx" in message
    assert message.endswith(f"({folder}/helper.py, line 3)")
    (folder / "model.py").write_text("import numpy\nnumpy.load('/nothing')\n")
    assert refusal(folder, LoadFailed).endswith(f"({folder}/model.py, line 2)")
    (folder / "model.py").write_text("class E(Exception):\n    def __str__(self):\n        1 / 0\nraise E\n")
    assert "E: (its text cannot be read)" in refusal(folder, LoadFailed)


def test_a_place_of_nobodys_who_reads_the_error_is_not_told(folder: Path) -> None:
    (folder / "model.py").write_text("def model(data: bytes) -> bytes: ...")
    try:
        os.stat("/nothing/at/all")
    except OSError as e:
        told = load_error(e, "m", read(folder)).message
    assert told.endswith(f"'/nothing/at/all', loading {folder}/model.py")
    late = load_error(TimeoutError("too late"), "m", read(folder)).message
    assert late == f"model 'm' cannot be loaded: TimeoutError: too late, loading {folder}/model.py"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("no '/m/a'", "no 'x'"),
        ("in /m/a.", "in x."),
        ("/m/a/b, /m/a", "x/b, x"),
        ("file:///m/a", "file://x"),
        ("/m/ab /m/a-1 /m/a.b /n/m/a", "/m/ab /m/a-1 /m/a.b /n/m/a"),
    ],
)
def test_a_folder_is_called_by_its_name_in_the_texts_of_others(text: str, told: str) -> None:
    assert Place("/m/a", "x").retold(text) == told


def test_what_a_factory_raises_when_it_is_called_is_no_mistake_of_the_folders_words(folder: Path) -> None:
    (folder / "model.py").write_text("def model():\n    1 / 0\n")
    assert refusal(folder, LoadFailed).endswith(f"ZeroDivisionError: division by zero ({folder}/model.py, line 2)")


def test_memory_that_runs_out_is_told_as_such_however_deep(folder: Path) -> None:
    for code in ("raise MemoryError", "try:\n    raise MemoryError\nexcept MemoryError as e:\n    raise OSError from e"):
        (folder / "model.py").write_text(code)
        assert "model.py ran out of memory" in refusal(folder, InsufficientStorage)
    (folder / "model.py").write_text("def model():\n    raise MemoryError\n")
    assert "model.py ran out of memory" in refusal(folder, InsufficientStorage)


def test_code_that_was_replaced_within_a_moment_is_not_taken_from_a_cache(folder: Path) -> None:
    for text in ("one", "two"):
        (folder / "model.py").write_text(f"__doc__ = '{text}'\n{ECHO}")
        os.utime(folder / "model.py", (1, 1))
        made(folder)
        assert sys.modules[MODULE].__doc__ == text
        forget(MODULE, str(folder))
    assert not (folder / "__pycache__").exists()


def test_a_module_is_forgotten_with_those_beside_it(folder: Path) -> None:
    (folder / "model.py").write_text("from .helper import echo as model\n")
    (folder / "helper.py").write_text(ECHO.replace("model", "echo"))
    made(folder)
    assert {n for n in sys.modules if n.startswith(MODULE)} == {MODULE, f"{MODULE}.helper"}
    forget(MODULE, str(folder))
    assert not {n for n in sys.modules if n.startswith(MODULE)}
    assert str(folder) not in sys.path_importer_cache


# -- the memory that it needs ----------------------------------------------------------------------------------------


def test_each_file_counts_once_and_what_is_declared_counts_alone(folder: Path) -> None:
    toml = 'factory = "echo"\n'
    (folder / "model.toml").write_text(toml)
    (folder / "sub").mkdir()
    (folder / "sub" / "weights").write_bytes(bytes(5000))
    (folder / "again").symlink_to("sub/weights")
    os.link(folder / "sub" / "weights", folder / "hard")
    (folder / "dangling").symlink_to("nothing")
    assert read(folder).size == 5000 + len(toml)
    assert read(folder).need == (5000 + len(toml)) * 6 // 5
    (folder / "model.toml").write_text(toml + "memory = 10\n")
    assert read(folder).need == 10
