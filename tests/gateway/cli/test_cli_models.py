"""`everywire models` manages a real server from the command line, in words for people and lines for programs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.cli.main import program
from gateway.cli.models import COMMANDS, _event_lines
from gateway.config.load import PREFIX
from gateway.operator.client import PlaneClient
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
TOKEN = "correct-horse-battery"
APP = """
import os
from collections.abc import AsyncIterator

import trio

from models.messages import Prompt


async def hold(prompt: Prompt) -> AsyncIterator[str]:
    yield "begun "
    await trio.sleep_forever()


class Weights:
    def __init__(self) -> None:
        if os.path.exists("broken"):
            raise OSError("no such weights")

    async def __call__(self, prompt: Prompt) -> AsyncIterator[str]:
        yield "said"
"""
CONFIG = f'''
listen = {{ port = 0 }}
log = {{ format = "json" }}
operator = {{ port = 0, token = "{TOKEN}" }}
repository = {{ roots = [] }}
[models.hold]
factory = "app:hold"
[models.apart]
factory = "app:Weights"
process = {{ enabled = true, instances = 2 }}
[models.weights]
factory = "app:Weights"
'''


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[str]
    folder: Path
    port: int
    url: str


@contextmanager
def server(folder: Path) -> Iterator[Server]:
    """`python -m gateway` as a user starts it, until the end of the block."""
    folder.mkdir(exist_ok=True)
    (folder / "app.py").write_text(APP)
    (folder / "everywire.toml").write_text(CONFIG)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "--config", "everywire.toml"],
        cwd=folder, env=environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    said, rest = {}, threading.Thread(target=process.stderr.read, daemon=True)
    try:
        for line in process.stderr:
            record = json.loads(line)
            said[record["event"]] = record
            if record["event"] == "serving":
                break
        rest.start()
        port = int(said["serving"]["at"][0].rpartition(":")[2])
        yield Server(process, folder, port, said["operator plane"]["at"])
    finally:
        process.kill()
        process.wait(120)
        if rest.is_alive():
            rest.join(120)
        process.stderr.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("server")) as one:
        yield one


@pytest.fixture(autouse=True)
def _as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)


def run(*arguments: str, token: str = TOKEN) -> Result:
    return CliRunner().invoke(program, ["models", *arguments], env={"EVERYWIRE_OPERATOR__TOKEN": token} if token else {})


def lines(result: Result) -> list[dict[str, object]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@contextmanager
def held(server: Server) -> Iterator[None]:
    """A call that has begun, and goes on."""
    body = b'{"inputs": "x", "stream": true, "parameters": {"max_new_tokens": 9}}'
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(b"POST /predictions/hold HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        came = b""
        while b"begun" not in came:
            came += sock.recv(65536)
        yield


@pytest.mark.programs
def test_models_are_listed_for_people_and_for_programs(running: Server) -> None:
    shown = run("list", "--url", running.url)
    assert shown.exit_code == 0
    head, _, hold, weights = shown.stdout.splitlines()
    assert head.split()[:3] == ["NAME", "STATE", "FOR"]
    assert (hold.split()[:2], weights.split()[:2]) == (["hold", "ready"], ["weights", "ready"])
    assert [model["name"] for model in lines(run("list", "--url", running.url, "--json"))] == ["apart", "hold", "weights"]
    assert [model["name"] for model in lines(run("list", "weights", "--url", running.url, "--json"))] == ["weights"]


@pytest.mark.programs
def test_models_are_unloaded_loaded_and_reloaded(running: Server) -> None:
    for command, said in (("unload", "unloaded"), ("load", "ready"), ("reload", "ready")):
        result = run(command, "weights", "--url", running.url)
        assert (result.exit_code, result.stdout) == (0, f"weights: {said}\n")
        assert ("a changed file was not read" in result.stderr) == (command == "reload")
    assert run("reload", "apart", "--url", running.url).stderr == ""  # its new process reads the code
    assert lines(run("reload", "weights", "--patience", "0.5", "--json", "--url", running.url))[0]["state"] == "ready"


@pytest.mark.programs
def test_one_process_of_a_model_is_started_anew(running: Server) -> None:
    def pids() -> list[int]:
        (model,) = lines(run("list", "apart", "--json", "--url", running.url))
        return [instance["pid"] for instance in model["instances"]]  # type: ignore[attr-defined]

    before = pids()
    result = run("restart", "apart", "--instance", "1", "--url", running.url)
    assert (result.exit_code, result.stdout) == (0, "apart: ready\n")
    assert (pids()[0] == before[0], pids()[1] == before[1]) == (True, False)
    for name, number, said in (("apart", "2", "it has 0, 1"), ("weights", "0", "does not run in processes")):
        result = run("restart", name, "--instance", number, "--url", running.url)
        assert (result.exit_code, said in result.stderr) == (1, True)
    result = run("restart", "apart", "--url", running.url)
    assert (result.exit_code, "--instance" in result.stderr) == (2, True)


@pytest.mark.programs
def test_what_fails_is_said_on_stderr_and_the_others_are_done(running: Server) -> None:
    (running.folder / "broken").touch()
    try:
        result = run("reload", "weights", "hold", "none", "--url", running.url)
    finally:
        (running.folder / "broken").unlink()
    assert result.exit_code == 1
    assert result.stdout == "hold: ready\n"
    first, remark, second = result.stderr.splitlines()
    assert remark.startswith("hold: made again by the code that this server had already loaded")
    assert first.startswith("Error: the new version cannot be loaded, and the old one serves on: OSError: no such weights")
    assert second == "Error: no model 'none' is in service"


@pytest.mark.programs
def test_live_streams_say_what_they_wait_for(running: Server) -> None:
    with held(running):
        (stream,) = lines(run("live", "--json", "--url", running.url))
        assert (stream["model"], stream["waits_for"]) == ("hold", "model")
        head, row = run("live", "--url", running.url).stdout.splitlines()
        assert (head.split()[:2], row.split()[1:5]) == (["ID", "MODEL"], ["hold", "http/1.1", "lmi", "model"])


@pytest.mark.programs
@pytest.mark.parametrize("token", ["", "not-the-token-at-all"])
def test_without_the_token_it_is_refused(running: Server, token: str) -> None:
    result = run("list", "--url", running.url, token=token)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "send `Authorization: Bearer TOKEN`" in result.stderr


@pytest.mark.programs
def test_the_token_may_come_from_a_file(running: Server, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"# ours\n\n{TOKEN}\nanother-that-is-not-used\n")
    assert run("list", "--url", running.url, "--token-file", "tokens", token="").exit_code == 0
    environ = {"EVERYWIRE_OPERATOR__PORT": running.url.rpartition(":")[2], "EVERYWIRE_OPERATOR__TOKEN_FILE": "tokens"}
    assert CliRunner().invoke(program, ["models", "list"], env=environ).exit_code == 0


class _Other(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, *_: object) -> None:
        pass


def test_where_no_plane_answers_the_status_is_4(tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    result = run("list", "--url", nobody)
    assert (result.exit_code, result.stderr) == (4, f"Error: no operator plane answers: {nobody}: Connection refused\n")
    other = HTTPServer(("127.0.0.1", 0), _Other)
    with other:
        threading.Thread(target=other.handle_request, daemon=True).start()
        result = run("list", "--url", f"http://127.0.0.1:{other.server_port}")
    assert result.exit_code == 4
    assert "is no operator plane: it answered 200" in result.stderr


USAGE = [
    (
        ["list"],
        "No operator plane to ask. Start the server with --set operator.port=8090, or give --url http://HOST:PORT.",
    ),
    (["list", "--url", "ftp://x"], "--url: 'ftp://x' is not such as http://127.0.0.1:9000"),
    (["list", "--url", "http://:9"], "is not such as"),
    (["load", "--url", "http://127.0.0.1:1"], "Missing argument 'NAME...'"),
    (["drain", "--url", "http://127.0.0.1:1", "--timeout", "-1"], "--timeout"),
    (["list", "--url", "http://127.0.0.1:1", "--token-file", "none"], "the token cannot be read from none: No such file"),
]


@pytest.mark.parametrize(("arguments", "said"), USAGE)
def test_a_command_line_that_cannot_be_says_why(arguments: list[str], said: str) -> None:
    result = run(*arguments, token="")
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert said in line


@pytest.mark.programs
def test_a_drain_is_told_from_its_begin_to_its_report(tmp_path: Path) -> None:
    with server(tmp_path / "server") as one, held(one):
        follow = subprocess.Popen(
            [sys.executable, "-m", "gateway", "models", "live", "--follow", "--interval", "0.1", "--url", one.url],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "EVERYWIRE_OPERATOR__TOKEN": TOKEN},
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert follow.stdout is not None
        said = [follow.stdout.readline() for _ in range(2)]
        drained = run("drain", "--timeout", "0", "--url", one.url)
        assert drained.exit_code == 3
        first, cut = drained.stdout.splitlines()
        assert (first.partition(": ")[2], cut.split()[2:5]) == ("1 drained", ["hold", "http/1.1", "drained"])
        assert one.process.wait(120) == 3
        told, _ = follow.communicate(timeout=120)
    assert follow.returncode == 0
    assert said[0] == "models   apart ready, hold ready, weights ready\n"
    kinds = [line.split()[0] for line in (said[1], *told.splitlines())]
    assert [kind for kind in dict.fromkeys(kinds) if kind != "models"] == ["opened", "draining", "closed", "drained", "cut"]


@pytest.mark.programs
def test_a_drain_that_cuts_nothing_is_done_and_need_not_be_waited_for(tmp_path: Path) -> None:
    with server(tmp_path / "server") as one:
        assert lines(run("drain", "--no-wait", "--json", "--url", one.url)) == [{"draining": True, "report": None}]
        assert one.process.wait(120) == 0


@pytest.mark.programs
def test_ctrl_c_leaves_without_a_traceback(running: Server, tmp_path: Path) -> None:
    follow = subprocess.Popen(
        [sys.executable, "-m", "gateway", "models", "live", "--follow", "--json", "--url", running.url],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "EVERYWIRE_OPERATOR__TOKEN": TOKEN},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert follow.stdout is not None
    assert json.loads(follow.stdout.readline())["event"] == "models"
    follow.send_signal(signal.SIGINT)
    _, errors = follow.communicate(timeout=120)
    assert (follow.returncode, errors) == (130, "")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: str(command.name))
def test_help_has_examples_and_says_what_each_status_means(command: object) -> None:
    result = run(command.name, "--help")  # type: ignore[attr-defined]
    assert "everywire models" in result.stdout
    assert "Exit status: 0 done" in result.stdout


def test_without_a_command_it_lists_what_this_configuration_would_serve() -> None:
    result = run()
    assert result.exit_code == 0
    assert result.stdout.split()[:4] == ["NAME", "FAMILY", "CAPACITY", "FROM"]


@pytest.mark.programs
def test_a_proxy_of_the_environment_is_not_asked(running: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert PlaneClient(running.url, TOKEN).ask("GET", "/log") == {"level": "info"}


def test_an_incident_and_a_drain_that_goes_on_are_a_line_each() -> None:
    incident = {"id": "3f2a01b7c9de", "model": "fl\x1baky", "count": 2, "error": "KeyError: 1", "place": "app.py:3 in f"}
    assert list(_event_lines("incident", incident)) == [
        "incident 3f2a01b7c9de  fl\\x1baky  2 times  KeyError: 1  at app.py:3 in f"
    ]
    draining = {"live": 3, "ended": {"complete": 1, "drained": 1}, "refused": 4}
    assert list(_event_lines("draining", draining)) == ["draining 3 were live, 2 have ended, 4 refused"]
