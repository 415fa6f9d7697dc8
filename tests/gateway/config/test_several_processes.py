"""Several processes of one server: what of the limits each has, how it is shown, and what contradicts them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.serve import make_gateway
from gateway.config import Config, ListenConfig, RepositoryConfig
from gateway.config.load import Resolved, resolve
from gateway.config.machine import usable_cores
from gateway.config.problem import ConfigError
from gateway.config.share import configuration_of_each, processes_of
from gateway.config.show import to_json, to_toml
from gateway.gateway import Gateway
from gateway.serving.ports import Ports

TWO = {"listen.processes": 2}


@pytest.fixture(autouse=True)
def on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")


def resolved(overrides: Mapping[str, Any]) -> Resolved:
    return resolve(file=None, environ={}, overrides=overrides)


def refused(overrides: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved({**TWO, **overrides})
    return str(caught.value)


def test_0_is_as_many_as_there_are_usable_cores() -> None:
    assert processes_of(resolved({"listen.processes": 0}).config) == usable_cores() >= 1
    assert processes_of(resolved({"listen.processes": 3}).config) == 3


def test_each_has_its_share_of_what_is_of_all_rounded_up() -> None:
    config = resolved(
        {"limits.total_bytes": "1GiB", "limits.connections": 101, "repository.memory": "3GiB", "listen.processes": 2}
    ).config
    each = configuration_of_each(config, 2)
    assert each.limits.total_bytes == 512 * 1024**2
    assert each.limits.connections == 51
    assert each.repository.memory == 1536 * 1024**2
    assert each.limits.body == 64 * 1024**2  # computed of its own share
    assert each.limits.per_peer == config.limits.per_peer


def test_a_body_that_is_configured_stays_as_it_is_where_it_can_come_at_all() -> None:
    chosen = resolved({**TWO, "limits.total_bytes": "1GiB", "limits.body": "300MiB"}).config
    assert configuration_of_each(chosen, 2).limits.body == 300 * 1024**2
    assert configuration_of_each(chosen, 4).limits.body == 256 * 1024**2


def test_what_each_has_is_shown() -> None:
    told = resolved({**TWO, "limits.connections": 101})
    assert "connections = 101  # --set limits.connections; each of 2 processes has 51\n" in to_toml(told)
    assert to_json(told)["limits.connections"]["each_process"] == 51
    alone = resolved({"limits.connections": 101})
    assert "each of" not in to_toml(alone)
    assert "each_process" not in to_json(alone)["limits.connections"]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"sagemaker.multi_model": True}, "sagemaker.multi_model (--set sagemaker.multi_model) = true"),
        ({"v2.model_control": True}, "v2.model_control (--set v2.model_control) = true"),
        (
            {"endpoints.mme.models": "/opt/ml/models/a"},
            "endpoints.mme.models (--set endpoints.mme.models) = '/opt/ml/models/a'",
        ),
        ({"repository.process.enabled": True}, "repository.process"),
    ],
)
def test_what_would_be_each_ones_own_contradicts_them_and_both_are_named(overrides: dict[str, Any], named: str) -> None:
    said = refused(overrides)
    assert said.startswith("listen.processes (--set listen.processes) = 2 and ")
    assert named in said
    assert "contradict each other" in said
    resolved(overrides)  # which one process may have


def test_they_share_the_processes_of_a_model() -> None:
    config = resolved({**TWO, "models.chat.factory": "app:Chat", "models.chat.process.instances": 2}).config
    assert config.models["chat"].process.count == 2


def test_they_need_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "several processes need Linux" in refused({})


@pytest.mark.parametrize("processes", [0, 2])
def test_a_program_that_serves_in_its_own_process_has_one(processes: int) -> None:
    config = Config(listen=ListenConfig(processes=processes))
    with pytest.raises(ConfigError, match=rf"listen\.processes is {processes}, and this program serves in its own process"):
        Gateway(config)
    assert Gateway(config, ports=Ports(port=8080)).port == 8080  # unless a parent hands it connections


def test_a_folder_whose_model_has_a_process_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "model.toml").write_text('factory = "echo"\n[process]\ninstances = 2\n')
    config = Config(listen=ListenConfig(processes=2), repository=RepositoryConfig(roots=(str(tmp_path),), model=str(folder)))
    with pytest.raises(ConfigError, match=r"repository\.model: its model\.toml has a process, and listen\.processes is 2"):
        make_gateway(config, ports=Ports(port=8080))
