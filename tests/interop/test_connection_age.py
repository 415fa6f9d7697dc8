"""Clients of two servers behind one address: with `limits.connection_age` they move on, and nothing of theirs is cut."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.interop import served_grpc
from tests.interop.balancer import Balancer
from tests.interop.grpc_frames import PATIENCE, SERVICE, infer_request
from tests.interop.servers import serving
from tests.interop.test_listening import run

INFER, STREAM = f"{SERVICE}/ModelInfer", f"{SERVICE}/ModelStreamInfer"
AGE = 1.0


@contextmanager
def balanced(folder: Path, *, tls: bool = False) -> Iterator[Balancer]:
    with ExitStack() as stack:
        settings = [f"limits = {{ connection_age = {AGE} }}", *served_grpc.models()]
        servers = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            servers.append(stack.enter_context(serving(folder / name, "served_grpc.py", settings, folder / "tls")))
        balancer = Balancer(servers, tls=tls)
        stack.callback(balancer.close)
        yield balancer


@pytest.mark.parametrize("http", ["1.1", "2"])  # by TLS: curl 7.88 cannot use a connection of HTTP/2 in clear twice
def test_curl_moves_on_and_every_answer_comes(curl: str, tmp_path: Path, http: str) -> None:
    with balanced(tmp_path, tls=True) as balancer:
        command = [curl, "-sS", f"--http{http}", "--cacert", str(balancer.ca), "--rate", "5/s", "-o", "/dev/null"]
        url = f"https://localhost:{balancer.port}/v2/health/live?[1-20]"
        said = run(*command, "-w", "%{http_code} %{http_version} %{num_connects}\n", url)
        answers = [line.split() for line in said.splitlines()]
        assert [answer[:2] for answer in answers] == [["200", http]] * 20
        made = sum(int(connects) for _, _, connects in answers)
        assert 2 <= made <= 8
        assert balancer.taken == [0] + [1] * (made - 1)


def test_grpcio_moves_on_while_its_stream_stays(needs: Callable[[str, str], Any], tmp_path: Path) -> None:
    grpcio = needs("grpcio", "grpc")
    with balanced(tmp_path) as balancer, grpcio.insecure_channel(f"127.0.0.1:{balancer.port}") as channel:
        until = time.monotonic() + 5 * AGE
        asked = []

        def requests() -> Iterator[bytes]:
            while time.monotonic() < until:
                asked.append(None)
                yield infer_request("headers", "x")
                time.sleep(0.05)

        stream = channel.stream_stream(STREAM)(requests(), timeout=PATIENCE)
        answers = []
        reader = threading.Thread(target=lambda: answers.extend(stream))
        reader.start()
        while time.monotonic() < until:
            channel.unary_unary(INFER)(infer_request("headers", "x"), timeout=PATIENCE)
            time.sleep(0.05)
        reader.join(PATIENCE)
        assert stream.code() is grpcio.StatusCode.OK
        assert len(answers) == len(asked) > 20
        assert balancer.taken[0] == 0
        assert len(balancer.taken) >= 3
