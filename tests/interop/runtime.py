"""A server with endpoints, variants and a folder of models, as SageMaker's runtime clients call it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import numpy as np

KEY, SECRET, REGION = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "us-west-2"
PATIENCE = 120.0
"""Seconds after which a test that waits has failed."""
KiB, MiB = 1024, 1024**2

NEED, FIT = 1 * MiB, 3
"""The memory that each model of the folder declares in bytes, and the number of models that the budget holds."""


@final
class Log:
    """The lines that the server writes, read as they come: somebody must, or it would wait for the pipe."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        self._lines, self._seen, self._over = process.stderr, list[dict[str, Any]](), False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._lines:
            for line in self._lines:
                record = json.loads(line) if line.startswith("{") else {"text": line}
                with self._changed:
                    self._seen.append(record)
                    self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first record that is wanted, of those that were written and those that will be."""
        deadline, at = time.monotonic() + PATIENCE, 0
        with self._changed:
            while True:
                for record in self._seen[at:]:
                    if wanted(record):
                        return record
                at = len(self._seen)
                assert not self._over, f"the server has ended: {self._seen[-5:]}"
                assert self._changed.wait(deadline - time.monotonic()), f"not in the log: {self._seen[-5:]}"

    def finish(self) -> None:
        """Returns when the server, which has ended, has no more lines."""
        self._thread.join(PATIENCE)


@final
class Runtime:
    """A running server."""

    def __init__(self, process: subprocess.Popen[str], log: Log, folder: Path) -> None:
        self.process, self.log, self.folder = process, log, folder
        at = self.log.wait(lambda record: record.get("event") == "serving")["at"]
        ports = {where.partition(":")[0]: int(where.rpartition(":")[2]) for where in at}
        self.urls = {"http": f"http://127.0.0.1:{ports['http']}", "https": f"https://localhost:{ports['https']}"}
        self.ca = folder / "tls" / "ca.pem"

    def loaded(self) -> list[str]:
        """The folders of the models that are loaded, as the multi-model API lists them."""
        with urllib.request.urlopen(self.urls["http"] + "/models", timeout=PATIENCE) as answer:
            return sorted(Path(model["modelUrl"]).name for model in json.load(answer)["models"])

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.urls["http"] + path, timeout=PATIENCE) as answer:
            return json.load(answer)


SERVED = ("switch", "seen", "replying", "stepped", "failing_text", "failing_parts", "held", "halves", "reloading")
MODELS = {
    "echo": "models.library.echo:Echo",
    "lm": "models.library.lm:LanguageModel.load",
    "identity": "models.library.tensors:identity",
    "add-sub": "models.library.tensors:add_sub",
    **{name.replace("_", "-"): f"runtime_served:{name}" for name in SERVED},
}
# model.toml or model.py of the folder's models, beside those of `table`
FOLDERS = {
    "too-large": {"model.toml": f'factory = "echo"\nmemory = {NEED * FIT + 1}\n'},
    "raises": {"model.py": 'raise RuntimeError("there is no such device")\n'},
    "misspelt": {"model.toml": 'factory = "ecko"\n'},
    "sub/below": {"model.toml": f'factory = "echo"\nmemory = {NEED}\n'},
    "slow": {
        "model.py": "from runtime_served import slow_to_load as model\n",
        "model.toml": f"memory = {NEED}\n",
    },
}


def table(number: int) -> np.ndarray:
    """The table of the folder's model of that number: of its NEED of bytes, and like no other."""
    return np.arange(NEED // 32, dtype=np.int64).repeat(4).reshape(-1, 4) * 1000 + number


def _make_folder(folder: Path) -> None:
    for number in range(6):
        model = folder / f"table-{number}"
        model.mkdir(parents=True)
        np.save(model / "rows.npy", table(number))
        (model / "model.toml").write_text(
            f'factory = "models.library.lookup:Lookup"\noptions = {{ table = "rows.npy" }}\nmemory = {NEED}\n'
        )
    for name, files in FOLDERS.items():
        (folder / name).mkdir(parents=True)
        for file, text in files.items():
            (folder / name / file).write_text(text)
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "model.toml").write_text('factory = "echo"\n')
    (folder / "link-out").symlink_to(outside)
    (folder / "link-in").symlink_to(folder / "table-0")


def _configuration(folder: Path, sections: dict[str, str]) -> str:
    many = json.dumps(str(folder / "many"))
    models = {name: f'factory = "{factory}"' for name, factory in MODELS.items()}
    models["held"] += "\ncapacity = 1\nqueue = 0"
    models["reloading"] += "\nrestart = { backoff = 0.01 }"
    every = {
        "listen": "port = 0\ntls_port = 0",
        "tls": f"dev = true\ndev_dir = {json.dumps(str(folder / 'tls'))}",
        "sagemaker": "multi_model = true",
        "repository": f"roots = [{many}]\ncode = [{many}]\nmemory = {NEED * FIT}",
        **{f"models.{name}": text for name, text in models.items()},
        "endpoints.split.variants.blue": 'model = "echo"\nweight = 3',
        "endpoints.split.variants.green": 'model = "halves"\nweight = 1',
        "endpoints.split.variants.dark": 'model = "seen"\nweight = 0',
        "endpoints.many": f"models = {many}",
    } | sections
    return "".join(f"[{name}]\n{text}\n" for name, text in every.items())


@contextmanager
def running(folder: Path, *, status: int = 0, **sections: str) -> Iterator[Runtime]:
    """`python -m gateway serve` in a folder of its own; `sections` of its file in place of the usual ones. At SIGTERM it has
    to end with this status: 3 where its drain cuts a stream."""
    _make_folder(folder / "many")
    (folder / "runtime_served.py").write_text((Path(__file__).parent / "runtime_served.py").read_text())
    (folder / "everywire.toml").write_text(_configuration(folder, sections))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("EVERYWIRE_", "SAGEMAKER_", "AWS_"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "--config", "everywire.toml", "serve"],
        cwd=folder,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    log = Log(process)
    try:
        yield Runtime(process, log, folder)
        process.send_signal(signal.SIGTERM)
        code = process.wait(PATIENCE)
        assert code == status, f"the server ended with {code}"
    finally:
        process.kill()
        process.wait()
        log.finish()
