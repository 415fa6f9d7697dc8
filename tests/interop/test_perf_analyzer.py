"""perf_analyzer, the binary of tritonclient 2.51's wheel: its sweep over concurrency, and what it believes of our statistics."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.interop.conftest import absent
from tests.interop.servers import Server

WINDOW = ["--measurement-mode", "time_windows", "-p", "200", "--stability-percentage", "999", "--max-trials", "20"]
"""At least three windows of 200 ms at each concurrency, until three are of a kind: nearly anything is."""

Sweep = Callable[..., str]


def libraries(folder: Path) -> str:
    """The search path for libb64 and CUDA's runtime, which the binary loads although it needs no GPU: those of
    nvidia-pytriton's wheel, which have other names there; otherwise the system's and nvidia-cuda-runtime-cu12's."""
    places = []
    for module, inside in (("pytriton", "../nvidia_pytriton.libs"), ("nvidia.cuda_runtime", "lib")):
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            continue
        places += [Path(at) / inside for at in spec.submodule_search_locations or ()] if spec else []
    for name, pattern in (("libb64.so.0d", "libb64*.so.0d"), ("libcudart.so.12", "libcudart*.so.12*")):
        for found in [path for place in places for path in place.glob(pattern)][:1]:
            (folder / name).symlink_to(found.resolve())
    return str(folder)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory, v2_server: Server) -> Sweep:
    """sweep(model, *arguments) is what perf_analyzer prints of a sweep from 1 to 4 requests at once; `over` is "http" or "grpc"."""
    beside = Path(sys.executable).parent
    binary = shutil.which("perf_analyzer", path=os.pathsep.join([str(beside), os.environ.get("PATH", "")]))
    if binary is None:
        absent("perf_analyzer")
    assert binary is not None
    environment = os.environ | {"LD_LIBRARY_PATH": libraries(tmp_path_factory.mktemp("libraries"))}
    version = subprocess.run([binary, "--version"], env=environment, capture_output=True, text=True)
    missing = re.search(r"error while loading shared libraries: ([^:]+)", version.stderr)
    if missing:
        absent(missing[1])

    def sweep(model: str, *arguments: str, server: Server = v2_server, over: str = "http") -> str:
        where = ["-u", f"{server.host}:{server.port}", "-i", over, "-m", model, "--concurrency-range", "1:4:1"]
        ran = subprocess.run(
            [binary, *where, *WINDOW, *arguments], env=environment, capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
        return ran.stdout

    return sweep


def statistics(server: Server, model: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url}/v2/models/{model}/stats", timeout=120) as answer:
        (stats,) = json.load(answer)["model_stats"]
        return dict(stats)


def each(words: str, report: str) -> list[int]:
    """The number behind these words, of each concurrency."""
    return [int(number) for number in re.findall(rf"^ *{words}: (\d+)$", report, re.MULTILINE)]


# as JSON it sends one value whatever the shape
@pytest.mark.parametrize(
    ("model", "batch", "arguments"),
    [
        ("identity_fp32", 1, ["--shape", "INPUT0:1024"]),
        ("identity_fp32", 1, ["--shape", "INPUT0:16", "--async"]),
        ("identity_fp32", 1, ["--shape", "INPUT0:1", "--input-tensor-format", "json", "--output-tensor-format", "json"]),
        ("identity_bytes", 1, ["--shape", "INPUT0:4", "--string-length", "10"]),
        ("mixed", 1, []),
        ("batching", 2, ["-b", "2"]),
    ],
    ids=["binary", "asynchronous", "json", "bytes", "several inputs", "batches"],
)
def test_the_sweep_runs_and_our_statistics_agree_with_it(
    sweep: Sweep, v2_server: Server, model: str, batch: int, arguments: list[str]
) -> None:
    before = statistics(v2_server, model)
    report = sweep(model, *arguments)
    agree(report, before, statistics(v2_server, model), batch)


@pytest.mark.parametrize(
    ("model", "batch", "arguments"),
    [
        ("identity_fp32", 1, ["--shape", "INPUT0:1024"]),
        ("identity_fp32", 1, ["--shape", "INPUT0:16", "--async"]),
        ("identity_fp32", 1, ["--shape", "INPUT0:16", "--async", "--streaming"]),
        ("identity_fp32", 1, ["--shape", "INPUT0:16", "--grpc-compression-algorithm", "gzip"]),
        ("identity_bytes", 1, ["--shape", "INPUT0:4", "--string-length", "10"]),
        ("mixed", 1, []),
        ("batching", 2, ["-b", "2"]),
    ],
    ids=["unary", "asynchronous", "stream", "gzip", "bytes", "several inputs", "batches"],
)
def test_the_sweep_over_grpc(sweep: Sweep, v2_server: Server, model: str, batch: int, arguments: list[str]) -> None:
    before = statistics(v2_server, model)
    report = sweep(model, *arguments, over="grpc")
    agree(report, before, statistics(v2_server, model), batch)


def test_a_decoupled_model_answers_more_often_than_it_is_asked(sweep: Sweep, grpc_server: Server, tmp_path: Path) -> None:
    asked = tmp_path / "asked.json"
    asked.write_text(json.dumps({"data": [{"INPUT0": {"content": [3], "shape": [1]}}]}))
    report = sweep("counting", "--async", "--streaming", "--input-data", str(asked), server=grpc_server, over="grpc")
    found = re.findall(r"^ *(Throughput|Response Throughput): ([\d.]+) infer/sec", report, re.MULTILINE)
    requests, responses = (
        [float(rate) for name, rate in found if name == wanted] for wanted in ("Throughput", "Response Throughput")
    )
    assert len(requests) == len(responses) == 4
    assert all(2 < answered / called < 4 for called, answered in zip(requests, responses, strict=True))


def agree(report: str, before: dict[str, Any], after: dict[str, Any], batch: int) -> None:
    """Checks that a sweep's report agrees with the gateway's statistics."""
    rates = re.findall(r"^Concurrency: (\d+), throughput: ([\d.]+) infer/sec", report, re.MULTILINE)
    assert [int(n) for n, _ in rates] == [1, 2, 3, 4]
    assert all(float(rate) > 0 for _, rate in rates)
    asked, served, executed = each("Request count", report), each("Inference count", report), each("Execution count", report)
    assert len(asked) == len(served) == len(executed) == 4
    assert each("Successful request count", report) == executed
    assert served == [batch * n for n in executed]
    # It asks for our counts while requests are in flight: at either end of a window it may miss as many as run at once, and
    # those of the milliseconds for which a busy machine keeps it from asking.
    for concurrency, (client, server) in enumerate(zip(asked, executed, strict=True), 1):
        assert abs(client - server) <= 6 * concurrency + client // 20, (client, server)
    executions = after["execution_count"] - before["execution_count"]
    assert executions >= max(sum(executed), sum(asked))  # none that a client has counted is missing
    assert after["inference_count"] - before["inference_count"] == batch * executions
    assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == executions
    assert after["inference_stats"]["fail"] == before["inference_stats"]["fail"]
