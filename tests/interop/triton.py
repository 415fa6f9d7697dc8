"""Triton's own server, from the wheel of nvidia-pytriton, with models that are those of tests/interop/served_v2.py."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.interop.served_v2 import DECLARED, Declared
from tests.ports import free_port

PATIENCE = 120.0
"""Seconds that Triton may take to start."""

MODEL = '''\
import json

import triton_python_backend_utils as pb


class TritonPythonModel:
    """Answers each input with the output that stands at its place in the configuration."""

    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.name = args["model_name"]
        self.pairs = [(i["name"], o["name"]) for i, o in zip(config["input"], config["output"])]

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        wanted = request.requested_output_names()
        outputs = []
        for source, name in self.pairs:
            tensor = pb.get_input_tensor_by_name(request, source)
            if name in wanted:
                if self.name == "identity_bf16":  # numpy has none
                    outputs.append(pb.Tensor.from_dlpack(name, tensor.to_dlpack()))
                else:
                    outputs.append(pb.Tensor(name, tensor.as_numpy()))
        if self.name == "said":
            import numpy

            told = json.dumps(json.loads(request.parameters() or "{}"), sort_keys=True)
            outputs.append(pb.Tensor("SAID", numpy.array([told.encode()], dtype=object)))
        if self.name == "failing":
            return pb.InferenceResponse(error=pb.TritonError("the model refuses", pb.TritonError.INVALID_ARG))
        return pb.InferenceResponse(outputs)
'''


def wheel() -> Path | None:
    """The folder of the server's files in the installed wheel; None where it is not installed."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "tritonserver"


@contextmanager
def serving_triton(folder: Path, files: Path) -> Iterator[str]:
    """Runs Triton with the models of DECLARED until the end of the block; the value is its host and port.

    Its Python backend runs the interpreter of this process: the wheel has a stub for each version, which wants that
    version's shared library, its standard library and numpy.
    """
    repository, backend = folder / "models", folder / "backends" / "python"
    for name, declared in DECLARED.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(_configuration(name, declared))
        (repository / name / "1" / "model.py").write_text(MODEL)
        if declared.labels:
            (repository / name / "labels.txt").write_text("\n".join(declared.labels))
    shutil.copytree(files / "backends" / "python", backend)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = files / "python_backend_stubs" / version / "triton_python_backend_stub"
    shutil.copy(stub, backend)
    port = free_port()
    libraries = [str(files.parents[1] / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR") or ""]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),  # its way to the venv
    }
    memory = f"everywire-{os.getpid()}-{port}-"
    arguments = [
        *("--model-repository", str(repository), "--backend-directory", str(backend.parent)),
        *("--http-address", "127.0.0.1", "--http-port", str(port), "--allow-grpc", "false", "--allow-metrics", "false"),
        *("--model-control-mode", "explicit", "--load-model", "*"),
        *("--exit-timeout-secs", "5", "--backend-config", f"python,shm-region-prefix-name={memory}"),
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(files / "bin" / "tritonserver"), *arguments], env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            _wait(process, f"http://127.0.0.1:{port}/v2/health/ready", folder / "log")
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for left in Path("/dev/shm").glob(f"{memory}*"):
                left.unlink(missing_ok=True)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)  # it says nowhere else that it listens
    raise AssertionError("Triton did not start:\n" + log.read_text(errors="replace")[-4000:])


def _configuration(name: str, declared: Declared) -> str:
    def tensors(which: str, specs: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
        return "".join(
            f'{which} [{{ name: "{tensor}" data_type: TYPE_{"STRING" if datatype == "BYTES" else datatype} '
            f"dims: {list(shape)} {labels if which == 'output' else ''} }}]\n"
            for tensor, (datatype, shape) in specs.items()
        )

    labels = 'label_filename: "labels.txt"' if declared.labels else ""
    head = f'name: "{name}"\nbackend: "python"\nmax_batch_size: {declared.max_batch_size}\n'
    tail = "instance_group [{ count: 1 kind: KIND_CPU }]\n"
    return head + tensors("input", declared.inputs) + tensors("output", declared.outputs) + tail
