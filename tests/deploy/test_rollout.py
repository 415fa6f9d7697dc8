"""A new model is rolled out as the manifest would have it: the old pod goes only when the new one is ready."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import final

import pytest

from tests.deploy.platforms import Container
from tests.deploy.test_manifests import NAME, command, container, environ, sums
from tests.ports import free_port

GOOD = "from models.library.tensors import add_sub as model\n"
BROKEN = """
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from models.messages import InferRequest, InferResponse


@asynccontextmanager
async def model() -> AsyncIterator[Callable[[InferRequest], InferResponse]]:
    raise OSError("no weights")
    yield
"""
# a factory that hangs is one that loads, for as long as the manifest waits for it
SLOW = """
import json
import threading

from models.messages import InferRequest, InferResponse


class Model:
    def __init__(self) -> None:
        print(json.dumps({"event": "reading weights"}), flush=True)
        threading.Event().wait()

    def __call__(self, request: InferRequest) -> InferResponse:
        raise NotImplementedError


model = Model
"""


@final
class Pod:
    """A container and its kubelet: what the probes of the manifest make of its answers, one period after the other."""

    def __init__(self, process: Container) -> None:
        self.process, self.started, self.ready, self.restarts = process, False, False, 0
        self._missed = dict.fromkeys(("startupProbe", "readinessProbe", "livenessProbe"), 0)

    def probe(self) -> None:
        """A period of each probe that is asked now, as the kubelet has it: until the startup probe has succeeded once, the
        others are not."""
        if not self.started:
            self.started = self._answers("startupProbe")
            self.restarts += self._exhausted("startupProbe")
            return
        answers = self._answers("readinessProbe")
        self.ready = answers or (self.ready and not self._exhausted("readinessProbe"))
        self._answers("livenessProbe")
        self.restarts += self._exhausted("livenessProbe")

    def _answers(self, name: str) -> bool:
        status, _ = self.process.ask("GET", container()[name]["httpGet"]["path"])
        answers = 200 <= status < 400
        self._missed[name] = 0 if answers else self._missed[name] + 1
        return answers

    def _exhausted(self, name: str) -> bool:
        return self._missed[name] >= int(container()[name]["failureThreshold"])


@contextmanager
def pod(folder: Path, code: str) -> Iterator[Pod]:
    """A pod of the manifest, with the model in this code, and its log where nobody has waited for anything yet."""
    made, work = folder / NAME, folder / "work"
    made.mkdir(parents=True)
    work.mkdir()
    (made / "model.py").write_text(code)
    port = free_port()
    here = {"--host=0.0.0.0": "--host=127.0.0.1", "--port=8080": f"--port={port}"}
    args = [here.get(arg, arg) for arg in [*command(on=str(made)), f"--set=repository.code={made}"]]
    others = ("EVERYWIRE_LISTEN__GRPC_PORT", "EVERYWIRE_METRICS__PORT")  # two pods share no addresses, but here they do
    variables = environ() | {name: str(free_port()) for name in others}
    with Container(args, work, variables, port=port) as process:
        yield Pod(process)


def roll_out(old: Pod, new: Pod, *, periods: int) -> Pod:
    """The pod that serves after so many periods of a rollout that takes no pod away before there is another: KServe's Deployments
    of one replica round `maxUnavailable` of 25 % down to none."""
    for _ in range(periods):
        old.probe()
        assert old.ready, "the old pod would be out of its Service"
        new.probe()
        if new.ready:
            old.process.terminate()
            return new
    return old


def periods() -> int:
    """Periods that a pod has for its start before it is started anew, and one."""
    return int(container()["startupProbe"]["failureThreshold"]) + 1


@pytest.mark.programs
@pytest.mark.parametrize(
    ("code", "event", "why"),
    [(BROKEN, "model given up", "was given up"), (SLOW, "reading weights", "is loading")],
    ids=["broken", "slow"],
)
def test_a_model_that_does_not_load_is_never_rolled_out(tmp_path: Path, code: str, event: str, why: str) -> None:
    with ExitStack() as stack:
        old = stack.enter_context(pod(tmp_path / "old", GOOD))
        old.process.await_event("serving")
        old.probe()
        old.probe()
        new = stack.enter_context(pod(tmp_path / "new", code))
        new.process.await_event(event)
        assert roll_out(old, new, periods=periods()) is old
        assert (new.started, new.ready) == (False, False)
        assert new.restarts >= 1  # the platform tries again, and counts that
        assert new.process.ask("GET", container()["livenessProbe"]["httpGet"]["path"])[0] == 200
        status, body = new.process.ask("GET", container()["readinessProbe"]["httpGet"]["path"])
        assert (status, json.loads(body)) == (503, {"ready": False, "reasons": [f"model '{NAME}' {why}"]})
        assert sums(old.process) == {"OUTPUT0": [6, 9], "OUTPUT1": [4, 5]}


@pytest.mark.programs
def test_one_that_loads_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    with ExitStack() as stack:
        old = stack.enter_context(pod(tmp_path / "old", GOOD))
        old.process.await_event("serving")
        old.probe()
        new = stack.enter_context(pod(tmp_path / "new", GOOD))
        new.process.await_event("serving")
        assert roll_out(old, new, periods=periods()) is new
        assert old.process.ended() == 0
        assert sums(new.process) == {"OUTPUT0": [6, 9], "OUTPUT1": [4, 5]}
