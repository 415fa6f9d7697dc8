"""Models in processes of their own: how they are configured, and what is refused."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import gateway
from gateway.config import Config, ModelConfig, ProcessConfig
from gateway.config.agreement import unsupported_processes
from gateway.config.fields import SETTINGS
from gateway.config.load import Resolved, resolve
from gateway.config.problem import ConfigError, Problem
from gateway.config.show import to_json, to_toml
from gateway.config.text import MASK

FACTORY = {"models.chat.factory": "app:Chat"}


@pytest.fixture(autouse=True)
def on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")


def resolved(overrides: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Resolved:
    return resolve(file=None, environ=environ or {}, overrides={**FACTORY, **overrides})


def process(environ: Mapping[str, str] | None = None, /, **settings: Any) -> ProcessConfig:
    """The section of a model, with these settings of it."""
    said = {f"models.chat.process.{key}": value for key, value in settings.items()}
    return resolved(said, environ).config.models["chat"].process


def problem(overrides: Mapping[str, Any]) -> Problem:
    """The only problem of a configuration."""
    with pytest.raises(ConfigError) as caught:
        resolved(overrides)
    (found,) = caught.value.problems
    return found


def test_without_its_section_a_model_is_in_no_process_of_its_own() -> None:
    assert process() == ProcessConfig() == ModelConfig(factory="app:Chat").process
    assert not process().wanted
    assert gateway.ProcessConfig is ProcessConfig


@pytest.mark.parametrize(
    "setting",
    [
        {"instances": 1},
        {"devices": ["0"]},
        {"device_variable": "HIP_VISIBLE_DEVICES"},
        {"cpu_threads": 1},
        {"environment": {"A": ""}},
        {"loop": "asyncio"},
        {"memory_limit": "4 GiB"},
        {"hang_timeout": "5s"},
    ],
)
def test_anything_set_in_it_asks_for_processes_unless_somebody_says_no(setting: dict[str, Any]) -> None:
    assert process(**setting).wanted
    assert process(**setting, enabled=True).wanted
    assert not process(**setting, enabled=False).wanted


def test_every_field_beside_enabled_asks_for_processes() -> None:
    assert [path[3] for path in SETTINGS if path[:3] == ("models", "*", "process")] == [
        "enabled", "instances", "devices", "device_variable", "cpu_threads", "environment", "loop", "memory_limit",
        "shared_memory", "python", "hang_timeout",
    ]  # fmt: skip


def test_what_is_set_to_its_default_asks_for_nothing() -> None:
    defaults = {"devices": [], "device_variable": "CUDA_VISIBLE_DEVICES", "environment": {}, "memory_limit": 0}
    assert not process(**defaults, loop="trio", hang_timeout=0).wanted
    assert process(enabled=True).wanted


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"enabled": True}, 1),
        ({"instances": 3}, 3),
        ({"devices": ["0", "1"]}, 2),
        ({"devices": ["0", "1"], "instances": 1}, 1),
        ({"devices": ["0", "1"], "instances": 5}, 5),
    ],
)
def test_there_are_as_many_as_somebody_says_else_as_there_are_devices_else_one(settings: dict[str, Any], count: int) -> None:
    assert process(**settings).count == count


def test_a_file_says_all_of_it(tmp_path: Path) -> None:
    file = tmp_path / "everywire.toml"
    file.write_text(
        """
        [models.chat]
        factory = "echo"

        [models.chat.process]
        instances = 3
        devices = ["0", "GPU-8f3a 1", "1,2"]
        device_variable = "HIP_VISIBLE_DEVICES"
        cpu_threads = 2
        environment = { TOKENIZERS_PARALLELISM = "false", _x1 = "" }
        loop = "asyncio"
        memory_limit = "8 GiB"
        shared_memory = "64 MiB"
        hang_timeout = "1min"
        """
    )
    read = resolve(file=file, environ={}, overrides={})
    said = read.config.models["chat"].process
    assert said == ProcessConfig(
        instances=3,
        devices=("0", "GPU-8f3a 1", "1,2"),
        device_variable="HIP_VISIBLE_DEVICES",
        cpu_threads=2,
        environment={"TOKENIZERS_PARALLELISM": "false", "_x1": ""},
        loop="asyncio",
        memory_limit=8 * 2**30,
        shared_memory=64 * 2**20,
        hang_timeout=60.0,
    )
    assert said.wanted
    assert read.sources["models.chat.process.environment.TOKENIZERS_PARALLELISM"] == f"{file}:10"


def test_flags_and_the_environment_say_the_same_and_a_variable_is_its_text() -> None:
    flags = process(**{"instances": "2", "devices": '["0", "1"]', "environment.N": "1", "environment.B": "true"})
    assert (flags.instances, flags.devices, flags.environment) == (2, ("0", "1"), {"N": "1", "B": "true"})
    prefix = "EVERYWIRE_MODELS__chat__PROCESS__"
    environ = {
        f"{prefix}INSTANCES": "4",
        f"{prefix}ENVIRONMENT": '{ A = "1", Mixed = "2" }',
        f"{prefix}ENVIRONMENT__Mixed": "[3]",
        f"{prefix}MEMORY_LIMIT": "1 GiB",
    }
    found = process(environ)
    assert (found.instances, found.memory_limit) == (4, 2**30)
    assert found.environment == {"A": "1", "Mixed": "[3]"}


def test_variables_join_over_the_sources(tmp_path: Path) -> None:
    file = tmp_path / "everywire.toml"
    file.write_text('[models.chat]\nfactory = "a:b"\n[models.chat.process.environment]\nA = "1"\nB = "1"\n')
    overrides = {"models.chat.process.environment": {"B": "2", "C": "2"}, "models.chat.process.environment.C": "3"}
    config = resolve(file=file, environ={}, overrides=overrides).config
    assert config.models["chat"].process.environment == {"A": "1", "B": "2", "C": "3"}


# ---- refused settings ----


@pytest.mark.parametrize(
    ("key", "value", "expected", "got"),
    [
        ("instances", 0, "a whole number, at least 1", "0"),
        ("instances", "two", "a whole number, at least 1", "'two'"),
        ("cpu_threads", 0, "a whole number, at least 1", "0"),
        ("devices", ["0", ""], 'a list of devices, none of them empty, such as ["0", "1"]', "['0', '']"),
        ("devices", [" "], 'a list of devices, none of them empty, such as ["0", "1"]', "[' ']"),
        ("devices", ["0\0"], 'a list of devices, none of them empty, such as ["0", "1"]', "['0\\x00']"),
        ("devices", [0], 'a list of devices, none of them empty, such as ["0", "1"]', "[0]"),
        ("device_variable", "", "letters, digits and '_', beginning with neither a digit nor EVERYWIRE_", "''"),
        (
            "device_variable",
            "EVERYWIRE_GPU",
            "letters, digits and '_', beginning with neither a digit nor EVERYWIRE_",
            "'EVERYWIRE_GPU'",
        ),
        ("environment", 5, 'a table of strings, such as {TOKENIZERS_PARALLELISM = "false"}', "5"),
        ("environment.THREADS", 4, "a string without zero bytes", "4"),
        ("environment.QUIET", True, "a string without zero bytes", "true"),
        ("environment.A", {"B": "c"}, "a string without zero bytes", "{'B': 'c'}"),
        ("environment.A", "b\0c", "a string without zero bytes", "'b\\x00c'"),
        ("environment.A", "caf\udce9", "UTF-8 text", "'caf\\udce9'"),
        (
            "memory_limit",
            -1,
            'a number of bytes, at least 0, such as 65536, "64 KiB" or "1GiB"',
            "-1",
        ),
        ("loop", "uvloop", "one of trio, asyncio", "'uvloop'"),
        (
            "shared_memory",
            0,
            'a number of bytes, at least 1, such as 65536, "64 KiB" or "1GiB"',
            "0",
        ),
        ("hang_timeout", "soon", 'a duration, at least 0, such as 30, "500ms" or "5min"', "'soon'"),
    ],
)
def test_a_wrong_value_names_the_setting_what_was_expected_and_what_came(
    key: str, value: Any, expected: str, got: str
) -> None:
    key = f"models.chat.process.{key}"
    assert problem({key: value}) == Problem(
        text=f"--set {key}: {key} must be {expected}, not {got}", where=f"--set {key}", key=key, expected=expected, got=got
    )


@pytest.mark.parametrize("name", ["EVERYWIRE_", "EVERYWIRE_OPERATOR__TOKEN", "1A", "A-B", "A B", "", "É", "A\n", "A=B"])
def test_a_name_that_is_no_variables_or_the_gateways_is_refused(name: str) -> None:
    found = problem({"models.chat.process.environment": {name: "secret-value"}})
    assert found.text == (
        f"--set models.chat.process.environment: {name!a} cannot be the name of a variable in models.chat.process.environment: "
        "letters, digits and '_', beginning with neither a digit nor EVERYWIRE_"
    )
    assert (found.expected, found.got) == (SETTINGS["models", "*", "process", "environment"].wanted, f"{name!a}")


@pytest.mark.parametrize("name", ["everywire_x", "XEVERYWIRE_", "EVERYWIRE", "_"])
def test_other_names_are_the_operators(name: str) -> None:
    assert process(environment={name: "x"}).environment == {name: "x"}


def test_what_is_misspelt_in_it_names_the_setting_that_was_meant() -> None:
    found = problem({"models.chat.process.instanses": 2})
    assert found.suggestion == "models.chat.process.instances"
    assert "models.chat.process is a section" in problem({"models.chat.process": 2}).text


@pytest.mark.parametrize("system", ["darwin", "win32", "freebsd14"])
def test_another_system_than_linux_has_no_processes(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    for settings in ({"instances": 1}, {"enabled": True}):
        found = problem({f"models.chat.process.{key}": value for key, value in settings.items()})
        assert found.text == "models.chat.process: processes need Linux; leave it out"
        assert (found.key, found.expected, found.got) == ("models.chat.process", "Linux", system)
    for settings in ({}, {"instances": 2, "enabled": False}):
        assert not process(**settings).wanted


def test_programs_are_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(models={"a.b": ModelConfig(factory="a:b", process=ProcessConfig(instances=2))})
    assert list(unsupported_processes(config)) == []
    monkeypatch.setattr(sys, "platform", "darwin")
    (found,) = unsupported_processes(config)
    assert found.text == 'models."a.b".process: processes need Linux; leave it out'


# ---- printing ----


def test_it_is_printed_so_that_it_reads_back_as_the_same(tmp_path: Path) -> None:
    said = {"instances": 2, "devices": ["0"], "environment": {"A": 'quo"te', "N": "1"}, "memory_limit": "1 GiB"}
    first = resolved({f"models.chat.process.{key}": value for key, value in said.items()})
    printed = to_toml(first)
    for line in (
        "# enabled: true if anything else here differs from its default\n",
        "instances = 2  # --set models.chat.process.instances\n",
        "# cpu_threads: the usable CPU cores, divided by `instances`; at least 1\n",
        "\n[models.chat.process.environment]\n",
        'memory_limit = "1 GiB"  # --set models.chat.process.memory_limit\n',
        "hang_timeout = 0.0\n",
    ):
        assert line in printed
    file = tmp_path / "printed.toml"
    file.write_text(printed)
    assert resolve(file=file, environ={}, overrides={}).config == first.config


def test_folders_have_a_section_for_all_of_theirs() -> None:
    found = resolved({"repository.process.instances": 2, "repository.process.environment.A": "1"}).config.repository.process
    assert found == ProcessConfig(instances=2, environment={"A": "1"})
    assert not resolved({}).config.repository.process.wanted


def test_and_need_linux_for_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    found = problem({"repository.process.instances": 2})
    assert found.text == "repository.process: processes need Linux; leave it out"


def test_what_nobody_set_reads_back_as_no_processes(tmp_path: Path) -> None:
    file = tmp_path / "printed.toml"
    file.write_text(to_toml(resolved({})))
    assert not resolve(file=file, environ={}, overrides={}).config.models["chat"].process.wanted


def test_secrets_among_the_variables_are_masked() -> None:
    read = resolved({"models.chat.process.environment": {"HF_TOKEN": "hf-1", "MODE": "fast"}})
    shown = tomllib.loads(to_toml(read, masked=True))["models"]["chat"]["process"]["environment"]
    assert shown == {"HF_TOKEN": MASK, "MODE": "fast"}
    told = to_json(read, masked=True)
    assert told["models.chat.process.environment.HF_TOKEN"]["value"] == MASK
    assert told["models.chat.process.instances"] == {"value": None, "source": "default"}
    assert "hf-1" not in repr(read)
    assert problem({"models.chat.process.environment.HF_TOKEN": 15}).got == f"'{MASK}'"
