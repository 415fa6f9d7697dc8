"""The life of a pod of deploy/kubernetes under 200 streams: ready only when it is true, and what had time to end is whole."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import yaml

from gateway.client import BrokenOff, lmi, open_client
from gateway.errors import TransportLost
from tests.deploy.kustomized import FOLDER
from tests.deploy.platforms import ROOT, Container, Image
from tests.ports import free_port

pytestmark = pytest.mark.programs
STREAMS, ENDLESS = 200, 20
PATIENCE = 120
MODEL = """
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from models.messages import Prompt


async def until(name):
    while not os.path.exists(os.path.join(os.environ["FOLDER"], name)):
        await trio.sleep(0.02)


async def held(prompt: Prompt) -> AsyncIterator[str]:
    yield "begun "
    await until("never" if prompt.text == "endless" else "release")
    yield "whole"


@asynccontextmanager
async def model() -> AsyncIterator[Callable[[Prompt], AsyncIterator[str]]]:
    await until("loaded")
    yield held
"""


class Pod(Container):
    """The pod's command, by its manifest and its configuration, with another model and another end of the drain."""

    def __init__(self, folder: Path, *, drain: str) -> None:
        (deployment,) = yaml.safe_load_all((FOLDER / "base" / "deployment.yaml").read_text(encoding="utf-8"))
        self.spec: Any = deployment["spec"]["template"]["spec"]
        (self.container,) = self.spec["containers"]
        self.folder = folder
        text = (FOLDER / "base" / "everywire.toml").read_text(encoding="utf-8")
        text = re.sub(r"\[models\.sums\]\n(?:.+\n)+", f'[models.held]\nfactory = "life:model"\ncapacity = {STREAMS}\n', text)
        assert "models.held" in text
        (folder / "everywire.toml").write_text(text)
        (folder / "life.py").write_text(MODEL)
        port = free_port()
        args = [arg.replace("/etc/everywire", str(folder)) for arg in self.container["args"]]
        environ = {
            "EVERYWIRE_LISTEN__HOST": "127.0.0.1",
            "EVERYWIRE_LISTEN__PORT": str(port),
            "EVERYWIRE_METRICS__PORT": str(free_port()),
            "EVERYWIRE_DRAIN__TIMEOUT": drain,
            "PYTHONPATH": f"{ROOT}:{folder}",
            "FOLDER": str(folder),
        }
        super().__init__(Image(ROOT / "deploy" / "Dockerfile").command(args), folder, environ, port=port)

    def probe(self, name: str) -> bool:
        """True if the kubelet takes the probe's answer for a success."""
        try:
            status, _ = self.ask("GET", self.container[name]["httpGet"]["path"])
        except OSError:
            return False
        return 200 <= status < 400

    def tell(self, word: str) -> None:
        (self.folder / word).touch()

    def kill(self) -> None:
        """SIGKILL, as the kubelet sends it where the grace is over."""
        self._process.send_signal(signal.SIGKILL)


async def until(true: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENCE):
        while not await trio.to_thread.run_sync(true):  # noqa: ASYNC110 - another process sets it
            await trio.sleep(0.02)


class Clients:
    """Streams that are open together, and how each of them ended."""

    def __init__(self, pod: Pod) -> None:
        self._pod, self.begun, self.ended = pod, 0, Counter[str]()

    async def stream(self, prompt: str) -> None:
        text = ""
        try:
            async with (
                open_client(f"http://127.0.0.1:{self._pod.port}") as client,
                client.stream(lmi(prompt, "held", stream=True)) as tokens,
            ):
                async for token in tokens:
                    self.begun += not text
                    text += token
            self.ended["whole" if text == "begun whole" else f"short: {text}"] += 1
        except BrokenOff:
            self.ended["told that it was cut"] += 1
        except TransportLost:
            self.ended["lost"] += 1

    async def all_begun(self) -> None:
        await until(lambda: self.begun == STREAMS)

    async def all_ended(self) -> None:
        await until(lambda: self.ended.total() == STREAMS)


@pytest.fixture
async def clients(nursery: trio.Nursery) -> Callable[[Pod], Clients]:
    def start(pod: Pod) -> Clients:
        made = Clients(pod)
        for n in range(STREAMS):
            nursery.start_soon(made.stream, "endless" if n < ENDLESS else "short")
        return made

    return start


async def ready(pod: Pod) -> None:
    """From its start until its Service has it: not a moment before its model is loaded."""
    await until(lambda: pod.probe("livenessProbe"))
    assert not pod.probe("startupProbe")
    assert not pod.probe("readinessProbe")
    pod.tell("loaded")
    await until(lambda: pod.probe("startupProbe"))
    assert pod.probe("readinessProbe")


async def test_every_stream_that_has_time_is_whole_and_every_other_one_is_told(
    tmp_path: Path, clients: Callable[[Pod], Clients]
) -> None:
    with Pod(tmp_path, drain="3s") as pod:
        await ready(pod)
        load = clients(pod)
        await load.all_begun()
        assert pod.probe("livenessProbe")
        # preStop: the pod is out of its Service, and who has not heard of that yet is served
        assert pod.ask("GET", "/v2/models/held/ready")[0] == 200
        pod.terminate()
        began = await trio.to_thread.run_sync(pod.await_event, "draining")
        assert began["live"] == STREAMS
        assert not pod.probe("readinessProbe")
        with pytest.raises(ConnectionRefusedError):  # drain.delay is 0: the port is closed to who comes now
            pod.ask("POST", "/predictions/held", {"inputs": "short"})
        pod.tell("release")
        report = await trio.to_thread.run_sync(pod.await_event, "drain report")
        status = await trio.to_thread.run_sync(pod.ended)
        await load.all_ended()
    figures = {"status": status, "finished": report["finished"], "cut": len(report["cut"]), **load.ended}
    assert figures == {
        "status": 3,
        "finished": STREAMS - ENDLESS,
        "cut": ENDLESS,
        "whole": STREAMS - ENDLESS,
        "told that it was cut": ENDLESS,
    }


async def test_a_pod_that_is_killed_before_its_drain_is_over_loses_streams(
    tmp_path: Path, clients: Callable[[Pod], Clients]
) -> None:
    """Why the grace must be longer: the same pod where SIGKILL comes first."""
    with Pod(tmp_path, drain="1h") as pod:
        await ready(pod)
        load = clients(pod)
        await load.all_begun()
        pod.terminate()
        await trio.to_thread.run_sync(pod.await_event, "draining")
        pod.tell("release")
        await until(lambda: load.ended["whole"] == STREAMS - ENDLESS)
        pod.kill()
        assert await trio.to_thread.run_sync(pod.ended) == -signal.SIGKILL
        await load.all_ended()
    assert load.ended == {"whole": STREAMS - ENDLESS, "lost": ENDLESS}
