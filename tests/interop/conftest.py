"""A real server process, as a user starts it, and the real clients; absent clients are skipped by name."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Server:
    """Where the server listens, and the CA that signed its certificate."""

    host: str
    port: int
    tls_port: int
    ca: Path

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def absent(client: str) -> None:
    """Skips the test that needs this client, or fails it where the environment was made for the client."""
    if client in os.environ.get("EVERYWIRE_REQUIRE", "").split(","):
        pytest.fail(f"{client} is required here and is not installed")
    pytest.skip(f"{client} is not installed")


@pytest.fixture(scope="session")
def needs() -> Callable[[str, str], Any]:
    """needs("tritonclient", "tritonclient.http") is the module, or a skip that names the client."""

    def get(client: str, module: str) -> Any:
        try:
            return importlib.import_module(module)
        except ImportError:
            return absent(client)

    return get


@pytest.fixture(scope="session")
def curl() -> str:
    """The path of curl."""
    path = shutil.which("curl")
    if path is None:
        absent("curl")
    assert path is not None
    return path


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`python -m gateway` with the library models and the models of tests/interop/served.py, on free ports."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "served.py").write_text((Path(__file__).parent / "served.py").read_text())
    config = folder / "everywire.toml"
    config.write_text(
        "\n".join(
            [
                "listen = { port = 0, tls_port = 0 }",
                f"tls = {{ dev = true, dev_dir = {json.dumps(str(folder / 'tls'))} }}",
                'bidi = { default_model = "echo" }',
                'lmi = { default_model = "lm" }',
                *(
                    f'[models.{name}]\nfactory = "{factory}"'
                    for name, factory in {
                        "echo": "models.library.echo:Echo",
                        "identity": "models.library.tensors:identity",
                        "add_sub": "models.library.tensors:add_sub",
                        "lm": "models.library.lm:LanguageModel.load",
                        "paced": "served:paced",
                        "failing": "served:failing",
                    }.items()
                ),
            ]
        )
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EVERYWIRE_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "--config", str(config), "serve"],
        cwd=folder,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield _where(process, folder)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        assert process.stderr is not None
        process.stderr.close()
        assert code == 0, f"the server ended with {code}"


def _where(process: subprocess.Popen[str], folder: Path) -> Server:
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        record = json.loads(line) if line.startswith("{") else {}
        if record.get("event") == "serving":
            ports = {at.partition(":")[0]: int(at.rpartition(":")[2]) for at in record["at"]}
            # somebody must read the log, or the server would wait for the pipe
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return Server("127.0.0.1", ports["http"], ports["https"], folder / "tls" / "ca.pem")
    raise AssertionError("the server did not start:\n" + "".join(seen))
