"""A real server process, as a user starts it, with the models of a file beside this one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARY = {
    "echo": "models.library.echo:Echo",
    "identity": "models.library.tensors:identity",
    "add_sub": "models.library.tensors:add_sub",
    "lm": "models.library.lm:LanguageModel.load",
}


@dataclass(frozen=True)
class Server:
    """A running server: its host and ports, the CA that signed its certificate, and its process."""

    host: str
    port: int
    tls_port: int
    ca: Path
    pid: int
    told: threading.Event = field(default_factory=threading.Event)
    """That it was told to drain."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def terminate(self) -> None:
        """SIGTERM, once: a second one would mean to hurry."""
        if not self.told.is_set():
            self.told.set()
            os.kill(self.pid, signal.SIGTERM)


def tables(models: Mapping[str, str]) -> list[str]:
    """The part of a configuration that names these models and their factories."""
    return [f'[models.{name}]\nfactory = "{factory}"' for name, factory in models.items()]


by: list[str] = ["-m", "gateway"]
"""The program that serves: `pytest --served-by hypercorn` puts another one here."""
HYPERCORN = [str(Path(__file__).parent / "hypercorn_server.py")]


@contextmanager
def serving(
    folder: Path, code: str, config: Iterable[str], tls: Path | None = None, *, status: int = 0, port: int = 0
) -> Iterator[Server]:
    """`python -m gateway` with a file of models from beside this one and these lines of configuration, on free ports unless
    one is given, until the end of the block. `tls` is a folder for the certificate, which several
    servers may share; `status` is what it ends with: 3 where its drain cuts a stream."""
    tls = tls or folder / "tls"
    (folder / code).write_text((Path(__file__).parent / code).read_text())
    file = folder / "everywire.toml"
    begin = [f"listen = {{ port = {port}, tls_port = 0 }}", f"tls = {{ dev = true, dev_dir = {json.dumps(str(tls))} }}"]
    file.write_text("\n".join([*begin, *config]))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EVERYWIRE_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, *by, "--config", str(file), "serve"],
        cwd=folder,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        server = _where(process, tls)
        yield server
        server.terminate()
        ended = process.wait(120)
        assert ended == status, f"the server ended with {ended}"
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def _where(process: subprocess.Popen[str], tls: Path) -> Server:
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        record = json.loads(line) if line.startswith("{") else {}
        if record.get("event") == "serving":
            ports = {at.partition(":")[0]: int(at.rpartition(":")[2]) for at in record["at"]}
            # somebody must read the log, or the server would wait for the pipe
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return Server("127.0.0.1", ports["http"], ports["https"], tls / "ca.pem", process.pid)
    raise AssertionError("the server did not start:\n" + "".join(seen))
