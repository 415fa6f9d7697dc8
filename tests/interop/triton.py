"""Triton's own server, from the wheel of nvidia-pytriton, with models that are those of tests/interop/served_v2.py."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.interop.served_v2 import DECLARED, Declared
from tests.ports import free_port

PATIENCE = 120.0
"""Seconds that Triton may take to start."""

MODEL = '''\
import json
import time

import numpy
import triton_python_backend_utils as pb


class TritonPythonModel:
    """Answers each input with the output that stands at its place in the configuration."""

    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.name = args["model_name"]
        self.pairs = [(i["name"], o["name"]) for i, o in zip(config["input"], config["output"])]
        self.decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)

    def execute(self, requests):
        if self.decoupled:
            for request in requests:
                self.several(request)
            return None
        return [self.answer(request) for request in requests]

    def several(self, request):
        sender = request.get_response_sender()
        many = int(pb.get_input_tensor_by_name(request, "INPUT0").as_numpy()[0])
        for number in range(abs(many)):
            data = numpy.full(16384 if self.name == "pieces" else 1, number, numpy.int32)
            sender.send(pb.InferenceResponse([pb.Tensor("OUTPUT0", data)]))
        if many < 0:
            error = pb.TritonError("no more numbers", pb.TritonError.INVALID_ARG)
            sender.send(pb.InferenceResponse(error=error), flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        else:
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

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
            told = json.dumps(json.loads(request.parameters() or "{}"), sort_keys=True)
            outputs.append(pb.Tensor("SAID", numpy.array([told.encode()], dtype=object)))
        if self.name == "delayed":
            time.sleep(int(tensor.as_numpy()[0]) / 1000)
        if self.name == "failing":
            return pb.InferenceResponse(error=pb.TritonError("the model refuses", pb.TritonError.INVALID_ARG))
        return pb.InferenceResponse(outputs)
'''


class Triton:
    """A server that can be started again on its ports: one call in some hundreds ends the process of 2.51."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, http: int, grpc: int) -> None:
        self._command, self._environment, self._log = command, environment, log
        self.http, self.grpc = f"127.0.0.1:{http}", f"127.0.0.1:{grpc}"
        self._process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def start(self) -> None:
        """Returns when its models answer."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=dict(self._environment), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._wait(f"http://{self.http}/v2/health/ready")

    def _wait(self, url: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)  # it says nowhere else that it listens
        raise AssertionError("Triton did not start:\n" + self._log.read_text(errors="replace")[-4000:])

    def gone(self, seconds: float) -> bool:
        """True if its process ends within so many seconds; then those of its models, which may outlive it, are ended."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return True

    def stop(self) -> None:
        """Ends it."""
        self._process.terminate()
        if not self.gone(20):
            self._process.kill()
            self.gone(20)


def wheel() -> Path | None:
    """The folder of the server's files in the installed wheel; None where it is not installed."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "tritonserver"


@contextmanager
def serving_triton(folder: Path, files: Path) -> Iterator[Triton]:
    """Runs Triton with the models of DECLARED until the end of the block.

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
    port, grpc_port = free_port(), free_port()
    libraries = [str(files.parents[1] / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR") or ""]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),  # its way to the venv
    }
    memory = f"everywire-{os.getpid()}-{port}-"
    arguments = [
        *("--model-repository", str(repository), "--backend-directory", str(backend.parent)),
        *("--http-address", "127.0.0.1", "--http-port", str(port), "--allow-metrics", "false"),
        *("--allow-grpc", "true", "--grpc-address", "127.0.0.1", "--grpc-port", str(grpc_port)),
        *("--model-control-mode", "explicit", "--load-model", "*"),
        *("--exit-timeout-secs", "5", "--backend-config", f"python,shm-region-prefix-name={memory}"),
    ]
    command = [str(files / "bin" / "tritonserver"), *arguments]
    server = Triton(command, environment, folder / "log", port, grpc_port)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        for left in Path("/dev/shm").glob(f"{memory}*"):
            left.unlink(missing_ok=True)


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
    if declared.decoupled:
        tail += "model_transaction_policy { decoupled: true }\n"
    return head + tensors("input", declared.inputs) + tensors("output", declared.outputs) + tail
