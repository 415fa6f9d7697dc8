"""The share of the machine that a process may use, by its control groups, version 2 or 1; invalid limits are ignored."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gateway.catalog import process_model
from gateway.config import (
    Config,
    LimitsConfig,
    ListenConfig,
    ModelConfig,
    ProcessConfig,
    RepositoryConfig,
    machine,
    share,
)
from gateway.config.machine import core_limits, memory_limits, usable_cores, usable_memory

GiB = 1024**3


def machine_of(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A file system with these files of control groups, of a process that is in these groups."""
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{n}": t for n, t in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def limits(root: Path) -> tuple[list[int], list[float]]:
    return sorted(memory_limits(root)), sorted(core_limits(root))


def test_version_2_in_a_container_that_sees_its_own_group_alone(tmp_path: Path) -> None:
    root = machine_of(tmp_path, "0::/", {"memory.max": str(2 * GiB), "cpu.max": "250000 100000"})
    assert limits(root) == ([2 * GiB], [2.5])


def test_version_2_where_the_groups_above_have_limits_too(tmp_path: Path) -> None:
    files = {
        "pods/one/memory.max": "max",
        "pods/memory.max": str(8 * GiB),
        "memory.max": str(16 * GiB),
        "pods/one/cpu.max": "max 100000",
        "pods/cpu.max": "400000 100000",
        "other/memory.max": "1",
    }
    assert limits(machine_of(tmp_path, "0::/pods/one", files)) == ([8 * GiB, 16 * GiB], [4])


def test_version_2_where_the_path_is_that_of_the_host(tmp_path: Path) -> None:
    root = machine_of(tmp_path, "0::/kubepods/pod7/c1", {"memory.max": str(GiB), "cpu.max": "50000 100000"})
    assert limits(root) == ([GiB], [0.5])


def test_version_1(tmp_path: Path) -> None:
    groups = "9:name=systemd:/\n4:memory:/docker/c1\n2:cpu,cpuacct:/docker/c1\n0::/"
    files = {
        "memory/docker/c1/memory.limit_in_bytes": str(3 * GiB),
        "memory/memory.limit_in_bytes": "9223372036854771712",  # none, in version 1's words
        "cpu,cpuacct/docker/c1/cpu.cfs_quota_us": "150000",
        "cpu,cpuacct/docker/c1/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    assert limits(machine_of(tmp_path, groups, files)) == ([3 * GiB, 9223372036854771712], [1.5])


def test_version_1_with_a_folder_for_each_controller(tmp_path: Path) -> None:
    files = {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}
    assert limits(machine_of(tmp_path, "1:cpuacct,cpu:/", files)) == ([], [2])


@pytest.mark.parametrize(
    ("groups", "memory", "cpu"),
    [
        ("0::/", "max", "max 100000"),
        ("0::/", "much", "1e5 100000"),
        ("0::/", "-5", "-1 -1"),
        ("0::/", "0", "0 0"),
        ("0::/", "", "100000"),
        ("0::/../..", "5", "1 1"),
        ("", "5", "1 1"),
        ("nonsense", "5", "1 1"),
        ("0::/", "9" * 5000, "1 0"),
    ],
)
def test_what_is_no_limit_is_none(groups: str, memory: str, cpu: str, tmp_path: Path) -> None:
    assert limits(machine_of(tmp_path, groups, {"memory.max": memory, "cpu.max": cpu})) == ([], [])


def test_a_system_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    assert limits(tmp_path) == ([], [])


def test_the_least_of_all_is_what_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        machine, "_ROOT", machine_of(tmp_path, "0::/", {"memory.max": "4096000", "cpu.max": "150000 100000"})
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert (usable_memory.__wrapped__(), usable_cores.__wrapped__()) == (4096000, 1)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("1000 100000")
    assert usable_cores.__wrapped__() == 1  # never none
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("900000 100000")
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("9223372036854771712")
    assert usable_cores.__wrapped__() == 4
    assert usable_memory.__wrapped__() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_the_defaults_are_a_quarter_of_it() -> None:
    assert LimitsConfig().total_bytes == RepositoryConfig().memory == usable_memory() // 4


def test_as_many_processes_serve_as_the_quota_has_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_ROOT", machine_of(tmp_path, "0::/", {"cpu.max": "250000 100000"}))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(share, "usable_cores", usable_cores.__wrapped__)
    assert share.processes_of(Config(listen=ListenConfig(processes=0))) == 2


def test_the_threads_of_processes_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_ROOT", machine_of(tmp_path, "0::/", {"cpu.max": "850000 100000"}))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(process_model, "usable_cores", usable_cores.__wrapped__)
    model = ModelConfig(factory="a:b", process=ProcessConfig(instances=2))
    assert [plan.threads_each for plan in process_model._plans("x", model)] == [4, 4]
