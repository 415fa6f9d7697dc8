"""The start block: a terminal is told what is served and two calls that work as they are printed; a file is told nothing."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.catalog.factories import library_specs
from gateway.cli.start.block import start_block
from gateway.config import AccessConfig, Config, OperatorConfig
from gateway.config.exposure import UNVERIFIED
from gateway.serving.ports import Ports
from gateway.testing import memory_gateway
from models.adapt import spec_of
from models.errors import ModelError
from models.messages import Part
from models.spec import ModelSpec, TensorSpec
from tests.gateway.cli.start.terminal import PATIENCE, everywire

APP = "async def shout(prompt: str) -> str:\n    return prompt.upper()\n"


def shout(prompt: str) -> str:
    return prompt.upper()


def scale(x: np.ndarray) -> np.ndarray:
    return x * 2


def bounce(part: Part) -> Part:
    return part


SCALE = replace(spec_of(scale), inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1,)),))


async def block_of(
    *models: Any, config: Config | None = None, at: tuple[str, ...] = ("http://127.0.0.1:8080",)
) -> list[str]:
    async with memory_gateway(models, config=config or Config()) as there:
        there.gateway.acceptor.ports = Ports(addresses=at)
        return [line.removeprefix("  ") for line in start_block(there.gateway).strip("\n").splitlines()]


async def test_a_text_model_is_called_in_two_ways() -> None:
    first, *lines = await block_of(shout)
    assert re.fullmatch(r"everywire [\w.]+ at http://127\.0\.0\.1:8080", first)
    assert lines == [
        "Models: shout",
        "Try:",
        '  everywire call shout "hello every wire"',
        """  curl -N http://127.0.0.1:8080/predictions/shout -d '{"inputs": "hello every wire", "stream": true}'""",
        UNVERIFIED,
        "Ctrl-C stops.",
    ]


async def test_a_plane_that_does_not_listen_has_no_console_to_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with memory_gateway([shout], config=Config(operator=OperatorConfig(port=port))) as there:
            assert "Console" not in start_block(there.gateway)
            assert f"Console: http://127.0.0.1:{port}" in start_block(there.gateway, plane_port=port)
    async with memory_gateway([shout], config=Config(operator=OperatorConfig(port=0))) as there:
        assert f"Console: http://127.0.0.1:{there.gateway.operator_port}" in start_block(there.gateway)


async def test_the_librarys_models_are_said_to_be_the_librarys() -> None:
    lines = await block_of(*library_specs())
    assert lines[1].endswith(": these are the library's; yours: everywire dev app.py")
    assert lines[3] == '  everywire call lm "Return the"'


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ([bounce], ['  everywire call bounce "hello every wire" --wire invoke', "  curl -N http://127.0.0.1:8080/models/bounce/invoke -d 'hello every wire'"]),
        ([scale], ["  curl -N http://127.0.0.1:8080/v2/models/scale"]),
        ([SCALE], ["infer -d '{\"inputs\": [{\"name\": \"x\", \"datatype\": \"FP32\", \"shape\": [4], \"data\": [0, 0, 0, 0]}]}'"]),
        ([bounce, SCALE, shout], ['  everywire call shout "hello every wire"']),
    ],
)  # fmt: skip
async def test_each_kind_of_model_has_calls_of_its_own(models: list[Any], said: list[str]) -> None:
    lines = await block_of(*models)
    assert [text for text in said if not any(text in line for line in lines)] == []


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (("http://0.0.0.0:9000",), "everywire call --url http://127.0.0.1:9000 shout"),
        (("http://[::]:9000",), "everywire call --url http://[::1]:9000 shout"),
        (("https://127.0.0.1:8443", "http://127.0.0.1:9000"), "curl -N http://127.0.0.1:9000/predictions/shout"),
        (("unix:/run/a b.sock",), "curl -N --unix-socket '/run/a b.sock' http://localhost/predictions/shout"),
    ],
)
async def test_the_calls_lead_to_where_it_listens(at: tuple[str, ...], said: str) -> None:
    assert any(said in line for line in await block_of(shout, at=at))


async def test_no_call_is_printed_that_cannot_work(tmp_path: Path) -> None:
    assert "Try:" not in await block_of(shout, at=("https://127.0.0.1:8443",))
    assert "Try:" not in await block_of()
    (tmp_path / "keys").write_text("")
    lines = await block_of(shout, config=Config(access=AccessConfig(keys_file=str(tmp_path / "keys"))))
    assert ("Try:" in lines, "Requests need a key, a certificate or a signature." in lines, UNVERIFIED in lines) == (
        False,
        True,
        False,
    )


async def test_a_model_that_does_not_answer_says_so(autojump_clock: Any) -> None:
    broken = ModelSpec(name="broken", family=SCALE.family, load=_fails)
    lines = await block_of(broken, *(replace(SCALE, name=f"m{n}") for n in range(9)))
    assert lines[1].startswith("Models: broken (restarting), m0, ")
    assert lines[1].endswith("m6 and 2 more")
    assert "/v2/models/m0/" in lines[3]


def _fails() -> Any:
    raise ModelError("no weights")


# -- in a terminal -------------------------------------------------------------------------------------------------


@pytest.mark.programs
def test_the_calls_work_as_they_are_printed_and_ctrl_c_stops(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    with everywire(tmp_path, "--port", "0", "--set", "operator.port=0", "--model", "app.py") as (terminal, process):
        text = terminal.until("Ctrl-C stops.")
        assert text.count(UNVERIFIED) == 1
        assert text.index(" serving at=") < text.index("  everywire ")
        calls = re.findall(r"^    (.*)$", text, re.MULTILINE)
        console = re.findall(r"^  Console: (.*)$", text, re.MULTILINE)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        answers = [
            subprocess.run(
                ["bash", "-c", call],
                cwd=tmp_path,
                env={**os.environ, "PATH": path},
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
            for call in [*calls, f"curl -sf {console[0]}"]
        ]
        assert [answer.returncode for answer in answers] == [0, 0, 0], answers
        assert [("HELLO EVERY WIRE" in answer.stdout) for answer in answers] == [True, True, False]
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0


@pytest.mark.programs
def test_a_configuration_error_comes_alone(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "--port", "0", "--model", "app:missing"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "Error: models.missing.factory: 'app' has no 'missing'; it has: shout\n")
