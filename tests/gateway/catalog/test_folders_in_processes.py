"""Models of folders in processes of their own: loaded, called, killed, reloaded and unloaded while the gateway serves."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from gateway.catalog.folder import make_spec
from gateway.catalog.served_folder import folder_settings, read_served_folder
from gateway.client import post
from gateway.config import Config, ModelConfig, ProcessConfig, RepositoryConfig, SageMakerConfig
from gateway.config.tree import V2Config
from gateway.errors import BadModel, GatewayError, InsufficientStorage, LoadFailed
from gateway.testing import MemoryGateway, memory_gateway
from protocols.events import End
from tests.gateway.instances.test_process_models import alive, children, descriptors, ready, serving, status, until
from tests.gateway.promises import raw

pytestmark = pytest.mark.programs

MiB = 1024 * 1024
CODE = """\
import os
from . import beside

def model(prompt: str) -> str:
    return f"{beside.WORD} {os.getpid()}"
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder(tmp_path, "m")
    return tmp_path


def folder(root: Path, name: str, code: str = CODE, toml: str = "", *, word: str = "one") -> Path:
    (made := root / name).mkdir(exist_ok=True)
    (made / "model.py").write_text(code)
    (made / "beside.py").write_text(f"WORD = {word!r}\n")
    if toml:
        (made / "model.toml").write_text(toml)
    return made


def repository(root: Path, *, code: bool = True, **settings: Any) -> RepositoryConfig:
    settings.setdefault("process", ProcessConfig(enabled=True))
    return RepositoryConfig(roots=(str(root),), code=(str(root),) if code else (), unload_timeout=5.0, **settings)


@asynccontextmanager
async def loading(root: Path, **settings: Any) -> AsyncIterator[MemoryGateway]:
    """A gateway that loads from this root, and has a model of its own."""
    config = Config(
        repository=repository(root, **settings),
        sagemaker=SageMakerConfig(multi_model=True),
        v2=V2Config(model_control=True),
    )
    files = descriptors()
    async with serving(config, own=ModelConfig(factory="echo")) as memory:
        yield memory
        for name in memory.gateway.repository.names:
            await memory.gateway.repository.unload(name)
        assert memory.gateway.repository.used == 0
        assert not [name for name in sys.modules if name.startswith("everywire_model_")]
    await until(lambda: descriptors() <= files)


async def api(memory: MemoryGateway, path: str, said: Any = None, method: bytes = b"POST") -> tuple[int, Any]:
    peer = memory.http1()
    body = b"" if said is None else json.dumps(said).encode()
    await peer.send(*(post(1, path, body) if method == b"POST" else (raw(1, method, path), End(stream=1))))
    status, _, answer = await peer.read_answer(1)
    return status, json.loads(answer) if answer[:1] in (b"{", b"[") else bytes(answer)


async def asked(memory: MemoryGateway, name: str = "m") -> tuple[str, int]:
    """The model's word, and its process."""
    answer = await memory.client().lmi("x", name, stream=False)
    word, pid = answer.text.split()
    return word, int(pid)


async def load(memory: MemoryGateway, root: Path, name: str = "m") -> None:
    await memory.gateway.repository.load(name, str(root / name))


async def refused(memory: MemoryGateway, root: Path, kind: type[GatewayError], name: str = "m") -> str:
    """Why a folder cannot be loaded; nothing of it is left."""
    before = children()
    with pytest.raises(kind) as caught:
        await load(memory, root, name)
    await until(lambda: children() <= before)
    assert (memory.gateway.repository.names, memory.gateway.repository.used) == ([], 0)
    assert "\n" not in caught.value.message
    return caught.value.message


async def test_a_folders_model_is_loaded_called_and_unloaded_with_its_process(root: Path) -> None:
    async with loading(root) as memory:
        assert (await api(memory, "/v2/repository/models/m/load"))[0] == 200
        word, pid = await asked(memory)
        assert (word, pid) == ("one", *[one.pid for one in status(memory).instances])
        assert pid != os.getpid()
        assert (await api(memory, "/v2/repository/models/m/unload"))[0] == 200
        assert not alive(pid)


async def test_the_multi_model_api_does_so_too(root: Path) -> None:
    async with loading(root) as memory:
        assert await api(memory, "/models", {"model_name": "m", "url": str(root / "m")}) == (
            200, {"status": 'Model "m" registered'}
        )  # fmt: skip
        _, pid = await asked(memory)
        _, page = await api(memory, "/models", method=b"GET")
        assert [one["modelName"] for one in page["models"]] == ["m"]
        assert (await api(memory, "/models/m", method=b"DELETE"))[0] == 200
        assert not alive(pid)


async def test_a_process_that_is_killed_starts_again_and_can_be_unloaded_meanwhile(root: Path) -> None:
    async with loading(root) as memory:
        await load(memory, root)
        _, pid = await asked(memory)
        os.kill(pid, signal.SIGKILL)
        await ready(memory, but=[pid])
        _, pid = await asked(memory)
        os.kill(pid, signal.SIGKILL)
        await memory.gateway.repository.unload("m")
        assert memory.gateway.repository.names == []


async def test_a_reload_is_another_process_with_the_new_code(root: Path) -> None:
    async with loading(root) as memory:
        await load(memory, root)
        _, old = await asked(memory)
        folder(root, "m", word="two")
        await memory.gateway.repository.reload("m")
        word, new = await asked(memory)
        assert (word, new != old) == ("two", True)
        await until(lambda: not alive(old))
        folder(root, "m", "raise KeyError('no')")
        with pytest.raises(LoadFailed):
            await memory.gateway.repository.reload("m")
        assert await asked(memory) == ("two", new), "it serves on"


async def test_what_its_processes_have_counts_as_the_models_memory(root: Path) -> None:
    folder(root, "m", "taken = bytearray(64 * 1024 * 1024)\n" + CODE)
    async with loading(root, memory=1024 * MiB) as memory:
        await load(memory, root)
        (there,) = status(memory).instances
        assert 64 * MiB < memory.gateway.repository.used < 1024 * MiB
        assert abs(memory.gateway.repository.used - there.resident_bytes) < 16 * MiB
    async with loading(root, memory=40 * MiB) as memory:
        assert "repository.memory" in await refused(memory, root, InsufficientStorage)


SEGFAULT = "import faulthandler\nfaulthandler._sigsegv()\n"
WRONG: dict[str, tuple[str, str, type[GatewayError], str]] = {
    "no syntax": ("def model(:\n", "", LoadFailed, "SyntaxError"),
    "raises": ("\nraise KeyError('no')", "", LoadFailed, "KeyError: 'no' (m/model.py, line 2)"),
    "no model": ("A = 1", "", BadModel, "m/model.py: name one function, class or ModelSpec `model`"),
    "crashes": (SEGFAULT, "", LoadFailed, "its process ended (SIGSEGV) while it was imported: m/model.py line 2"),
    "no memory to load": ("class model:\n  def __init__(self) -> None:\n    raise MemoryError('no')\n  def __call__(self, prompt: str) -> str:\n    return ''",
                          "", InsufficientStorage, "m/model.py ran out of memory"),
    "no memory": ("raise MemoryError", "", InsufficientStorage, "m/model.py ran out of memory"),
    "option": (CODE, "options = { a = 1 }", BadModel, "options"),
    "loading raises": ("class model:\n  def __init__(self) -> None:\n    raise KeyError('no')\n  def __call__(self, prompt: str) -> str:\n    return ''",
                       "", LoadFailed, "cannot be loaded: KeyError: 'no'"),
    "loading crashes": ("import os\nclass model:\n  def __init__(self) -> None:\n    os._exit(3)\n  def __call__(self, prompt: str) -> str:\n    return ''",
                        "", LoadFailed, "its process ended (exit status 3)"),
    "batching": (CODE, "[batching]\nmax_delay = 1", BadModel, "batching"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
async def test_what_is_wrong_with_a_folder_is_said_as_in_process_and_leaves_nothing(wrong: str, root: Path) -> None:
    code, toml, kind, said = WRONG[wrong]
    folder(root, "m", code, f"restart = {{ kind = 'temporary' }}\n{toml}")
    async with loading(root) as memory:
        assert said.replace("m/", f"{root}/m/") in await refused(memory, root, kind)


async def test_a_load_that_is_given_up_ends_its_process_at_once(root: Path) -> None:
    folder(root, "m", "import ctypes\nctypes.PyDLL(None).sleep(3600)\n")
    async with loading(root) as memory:
        before = children()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load, memory, root)
            await until(lambda: children() > before)
            nursery.cancel_scope.cancel()
        await until(lambda: children() <= before)
        assert memory.gateway.repository.names == []


async def test_a_folder_says_itself_what_its_processes_have(root: Path) -> None:
    toml = "[process]\ninstances = 2\ncpu_threads = 1\nenvironment = { WORD = 'of its own' }\n"
    folder(root, "m", "import os\ndef model(prompt: str) -> str:\n    return os.environ['WORD']\n", toml)
    async with loading(root, process=ProcessConfig()) as memory:
        await load(memory, root)
        assert (await memory.client().lmi("x", "m", stream=False)).text == "of its own"
        await ready(memory, 2)
    async with loading(root, process=ProcessConfig(enabled=False)) as memory:
        await load(memory, root)
        assert (await memory.client().lmi("x", "m", stream=False)).status != 200, "the variable is not there"
        assert status(memory).instances == ()


LOOPS = """\
import asyncio

async def model(prompt: str):
    try:
        yield type(asyncio.get_running_loop()).__name__
    except RuntimeError:
        yield "none of asyncio's"
"""


@pytest.mark.parametrize(("loop", "said"), [("asyncio", "EventLoop"), ("trio", "none of asyncio's")])
async def test_a_folder_says_itself_which_loop_its_code_runs_on(loop: str, said: str, root: Path) -> None:
    folder(root, "m", LOOPS, f"[process]\nloop = '{loop}'\n")
    async with loading(root) as memory:
        await load(memory, root)
        assert said in (await memory.client().lmi("x", "m", stream=False)).text


@pytest.mark.parametrize("loop", ["trio", "asyncio"])
async def test_its_formatters_are_called_in_its_process(loop: str, root: Path) -> None:
    folder(root, "m", FORMATTERS, f"[process]\nloop = '{loop}'\ninstances = 2\n")
    async with loading(root) as memory:
        await load(memory, root)
        there = set(map(str, await ready(memory, 2)))
        for _ in range(8):
            _, answer = await api(memory, "/predictions/m", {"text": "a b", "voice": "alto"})
            begin, *words, end = answer.decode().split()
            assert (begin in there, words, end) == (True, ["alto:a", "alto:b"], begin), "each in one process, with its model"
        assert await api(memory, "/predictions/m", {"text": "a"}) == (400, (await api(memory, "/predictions/m", {}))[1])
        assert "everywire_model_" not in "".join(sys.modules)


FORMATTERS = """\
import os
from collections.abc import AsyncIterator

from models.errors import ModelError
from models.formatters import TextInput, input_formatter, output_formatter


class Spoken(TextInput):
    pass


@input_formatter
def reads(item, **keywords):
    asked = item.as_json()
    if "voice" not in asked:
        raise ModelError("voice: expected one", status=400)
    made = Spoken(asked["text"], {"max_new_tokens": 9})
    made.voice, made.pid = asked["voice"], os.getpid()
    return made


@output_formatter
def writes(output):
    token, first, last = output.sequences[0].get_next_token()
    begin = f"{output.input.pid} " if first else ""
    assert not token.text or token.text.endswith(f"@{os.getpid()}"), "the model is elsewhere"
    word = token.text.partition("@")[0]
    return begin + (f"{output.input.voice}:{word} " if word else "") + (str(os.getpid()) if last else "")


async def model(prompt: str) -> AsyncIterator[str]:
    for word in prompt.split():
        yield f"{word}@{os.getpid()}"
"""


@pytest.mark.parametrize("key", ["environment = { A = '1' }", "python = '/bin/python'"])
async def test_but_what_its_code_could_do_only_where_code_may_run(key: str, root: Path) -> None:
    (data := root / "data").mkdir()
    (data / "model.toml").write_text(f"factory = 'echo'\n[process]\n{key}\n")
    async with loading(root, code=False) as memory:
        said = await refused(memory, root, BadModel, "data")
        assert f"process.{key.split()[0]} can be set only below the folders of repository.code" in said


async def test_the_folder_that_is_served_from_the_start_runs_in_a_process_too(root: Path) -> None:
    config = Config(repository=repository(root, model=str(root / "m")))
    found = read_served_folder(config, str(root / "m"))
    before = children()
    async with memory_gateway((make_spec(found, "m", "everywire_model"),), config) as memory:
        (pid,) = await ready(memory)
        assert await asked(memory) == ("one", pid)
    assert children() <= before
    folder(root, "m", SEGFAULT)
    with pytest.raises(LoadFailed, match="SIGSEGV"):
        make_spec(found, "m", "everywire_model")
    assert children() <= before


def test_what_a_folder_says_of_its_processes_is_shown_with_its_file(root: Path) -> None:
    toml = "batching = { max_delay = 1 }\nprocess = { instances = 2, environment = { A = 'b' } }\n"
    file = folder(root, "m", toml=toml) / "model.toml"
    config = Config(repository=repository(root, model=str(root / "m"), process=ProcessConfig(cpu_threads=3)))
    assert [*folder_settings(config)] == [
        (("models", "model", "batching", "max_delay"), 1.0, str(file)),
        (("models", "model", "process", "instances"), 2, str(file)),
        (("models", "model", "process", "environment"), {"A": "b"}, str(file)),
    ]
