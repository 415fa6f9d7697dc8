"""A server is ready while each model that was configured for it answers, and says why where it is not."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from gateway.catalog.factories import load_spec
from gateway.config import Config, ModelConfig, RepositoryConfig, SageMakerConfig
from gateway.gateway import Gateway
from models.messages import Family
from models.spec import Model, ModelSpec, Restart
from tests.gateway.dialects.aws.test_mme_api import folder
from tests.gateway.dialects.v2.test_v2_control import CONTROL, get, index, load, unload
from tests.gateway.operator.operators import Operator
from tests.gateway.promises import House, Probe, answering, serving, silent
from tests.gateway.workers.test_supervision import Loader

OTHER = Probe(silent, "other").spec("bidi")


def failing(name: str = "probe", *, required: bool = True, **policy: Any) -> tuple[Loader, ModelSpec]:
    loader = Loader(Probe(silent))
    return loader, replace(loader.spec("bidi", name, **policy), required=required)


@asynccontextmanager
async def drained(*specs: ModelSpec, config: Config | None = None) -> AsyncIterator[House]:
    """A house that is drained at its end, when the tasks of its loaders are over too."""
    async with serving(*specs, config=config) as house:
        yield house
        await house.gateway.drain()


async def told(house: House) -> tuple[bool, list[str]]:
    """The server's readiness, the same in each of its three ways, and the reasons that an operator is given."""
    ping, v2 = await get(house, "/ping"), await get(house, "/v2/health/ready")
    operator = await Operator(house.gateway).ask("GET", "/health/ready")
    ready, reasons = operator.json["ready"], operator.json["reasons"]
    assert (ping[0], v2[0], operator.status) == ((200,) * 3 if ready else (503,) * 3)
    assert v2[1]["ready"] == ready
    assert len(v2[1].get("reasons", ())) == len(reasons) == sum("reason" in state for state in ping[1].values())
    assert list(house.gateway.unready) == reasons
    assert (await get(house, "/v2/health/live")) == (200, {"live": True})
    return ready, reasons


async def test_a_model_that_was_given_up_is_why_its_server_is_not_ready(autojump_clock: Any) -> None:
    loader, spec = failing(kind=Restart.TEMPORARY)
    async with drained(spec, OTHER) as house:
        assert await told(house) == (True, [])
        loader.crash.set()
        await house.still()
        assert await told(house) == (False, ["model 'probe' was given up: ZeroDivisionError: in the background"])
        # anybody may ask these, and the text of an exception is not for anybody
        assert (await get(house, "/v2/health/ready"))[1]["reasons"] == ["model 'probe' was given up"]
        assert (await get(house, "/ping"))[1] == {
            "probe": {"status": "FAILED", "reason": "was given up"},
            "other": {"status": "Healthy"},
        }


async def test_a_model_that_cannot_be_loaded_is_from_the_first_attempt_on(autojump_clock: Any) -> None:
    loader, spec = failing(intensity=1, period=1000.0, backoff=5.0)
    loader.fails = True
    async with drained(spec, OTHER) as house:
        assert await told(house) == (
            False,
            ["model 'probe' could not be loaded, and is tried again: OSError: no weights"],
        )
        await trio.sleep(20)
        assert await told(house) == (False, ["model 'probe' was given up: OSError: no weights"])


async def test_a_model_that_has_ended_is(autojump_clock: Any) -> None:
    loader, spec = failing(kind=Restart.TRANSIENT)
    async with drained(spec, OTHER) as house:
        loader.end.set()
        await house.still()
        ready, (reason,) = await told(house)
        assert (ready, reason.startswith("model 'probe' has ended: LoadEnded")) == (False, True)


async def test_one_crash_does_not_take_the_server_out_of_service(autojump_clock: Any) -> None:
    loader, spec = failing(backoff=4.0)
    async with drained(spec) as house:
        loader.crash.set()
        await house.still()
        assert await told(house) == (True, [])
        await trio.sleep(4)
        assert await told(house) == (True, [])


async def test_a_crash_from_which_a_model_does_not_come_back_within_5_s_does(autojump_clock: Any) -> None:
    loader, spec = failing(backoff=8.0, backoff_max=8.0)
    async with drained(spec, OTHER) as house:
        loader.crash.set()
        await trio.sleep(4.9)
        assert await told(house) == (True, [])
        await trio.sleep(0.2)
        ready, (reason,) = await told(house)
        assert (ready, "'probe' crashed, and is not back within 5 s: ZeroDivisionError" in reason) == (False, True)
        await trio.sleep(3)
        assert await told(house) == (True, [])


async def test_one_may_be_missing_that_is_not_required(autojump_clock: Any) -> None:
    loader, spec = failing(required=False, kind=Restart.TEMPORARY)
    async with drained(spec, OTHER) as house:
        loader.crash.set()
        await house.still()
        assert (house.gateway.unready, (await get(house, "/v2/health/ready"))) == ((), (200, {"ready": True}))
        assert (await get(house, "/ping"))[0] == 200


async def test_but_not_all_of_them(autojump_clock: Any) -> None:
    loader, spec = failing(required=False, kind=Restart.TEMPORARY)
    async with drained(spec) as house:
        loader.crash.set()
        await house.still()
        said = "model 'probe' was given up, and no model is ready: ZeroDivisionError: in the background"
        assert await told(house) == (False, [said])


async def test_the_configuration_says_what_is_required() -> None:
    assert load_spec("m", ModelConfig(factory="models.library.echo:Echo")).required
    assert not load_spec("m", ModelConfig(factory="models.library.echo:Echo", required=False)).required


async def test_a_server_without_configured_models_is_ready_whatever_clients_load(tmp_path: Path, caplog: Any) -> None:
    folder(tmp_path, "good", 'factory = "echo"\n')
    folder(tmp_path, "bad", "", "raise OSError('no weights')\n")
    where = (str(tmp_path / "models"),)
    config = replace(
        CONTROL, repository=RepositoryConfig(roots=where, code=where), sagemaker=SageMakerConfig(multi_model=True)
    )
    async with drained(config=config) as house:
        assert await told(house) == (True, [])
        assert (await load(house, "bad"))[0] == 500
        assert await told(house) == (True, [])
        assert (await load(house, "good"))[0] == 200
        assert (await unload(house, "good"))[0] == 200
        assert await told(house) == (True, [])
    (record,) = [r for r in caplog.records if r.message == "model not loaded"]
    assert (record.levelno, "no weights" in record.__dict__["reason"]) == (logging.ERROR, True)


async def test_a_model_that_somebody_has_unloaded_is_not_waited_for(autojump_clock: Any) -> None:
    _, spec = failing()
    async with drained(spec, OTHER, config=CONTROL) as house:
        assert (await unload(house, "probe"))[0] == 200
        assert await told(house) == (True, [])
        assert (await load(house, "probe"))[0] == 200
        assert await told(house) == (True, [])


async def test_but_one_that_could_not_be_loaded_again_is_missed(autojump_clock: Any) -> None:
    loader, spec = failing()
    async with drained(spec, OTHER, config=CONTROL) as house:
        await unload(house, "probe")
        loader.fails = True
        assert (await load(house, "probe"))[0] == 500
        assert (await index(house))["probe"] == ("UNAVAILABLE", "it could not be loaded; the log says why")
        assert await told(house) == (False, ["model 'probe' could not be loaded: OSError: no weights"])
        loader.fails = False
        assert (await load(house, "probe"))[0] == 200
        assert await told(house) == (True, [])


async def test_what_was_given_up_stays_a_reason_while_somebody_tries_to_load_it(autojump_clock: Any) -> None:
    loader, spec = failing(kind=Restart.TEMPORARY)
    async with drained(spec, OTHER, config=CONTROL) as house:
        loader.crash.set()
        await house.still()
        loader.fails = True
        assert (await load(house, "probe"))[0] == 500
        assert await told(house) == (False, ["model 'probe' could not be loaded: OSError: no weights"])
        await unload(house, "probe")
        assert (await index(house))["probe"] == ("UNAVAILABLE", "unloaded")
        assert await told(house) == (True, [])


async def test_a_reload_is_nobodys_business_until_it_has_failed(autojump_clock: Any, caplog: Any) -> None:
    gate, loads = trio.Event(), []

    @asynccontextmanager
    async def versions() -> AsyncIterator[Model]:
        loads.append(1)
        if len(loads) > 1:
            await gate.wait()
            raise OSError("no weights")
        yield Probe(answering)

    async with drained(ModelSpec(name="probe", family=Family.TEXT, load=versions)) as house:
        async with trio.open_nursery() as nursery:

            async def reload() -> None:
                with pytest.raises(OSError, match="no weights"):
                    await house.gateway.reload("probe")

            nursery.start_soon(reload)
            await house.still()
            assert await told(house) == (True, [])
            gate.set()
        assert await told(house) == (True, [])  # the old version answers
        (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert (record.message, record.__dict__["reason"]) == ("model not reloaded", "OSError: no weights")
        failure = house.gateway.models["probe"].last_error
        assert failure is not None
        assert failure.incident == record.__dict__["incident"]


async def test_a_reload_that_fails_before_any_code_of_the_model_runs_is_an_error_of_the_log_too(
    tmp_path: Path, caplog: Any
) -> None:
    folder(tmp_path, "m", 'factory = "echo"\n')
    config = replace(CONTROL, repository=RepositoryConfig(roots=(str(tmp_path / "models"),)))
    async with drained(config=config) as house:
        assert (await load(house, "m"))[0] == 200
        (tmp_path / "models" / "m" / "model.toml").write_text('factory = "nothing"\n')
        assert (await load(house, "m"))[0] == 400
        (record,) = [r for r in caplog.records if r.message == "model not reloaded"]
        assert (record.levelno, "factory" in record.__dict__["reason"]) == (logging.ERROR, True)
        assert (await get(house, "/v2/models/m/ready"))[0] == 200


async def test_a_model_given_up_is_an_error_of_the_log(autojump_clock: Any, caplog: Any) -> None:
    loader, spec = failing(kind=Restart.TEMPORARY)
    async with drained(spec, OTHER) as house:
        loader.crash.set()
        await house.still()
    (record,) = [r for r in caplog.records if r.message == "model given up"]
    assert (record.levelno, record.__dict__["model"]) == (logging.ERROR, "probe")


def test_a_server_that_has_not_begun_says_so() -> None:
    assert Gateway(Config(), [OTHER]).unready == ("nothing is served yet",)
