"""The AWS CLI, unmodified: `aws sagemaker-runtime invoke-endpoint`. It starts slowly, so that few calls have to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.interop.conftest import absent
from tests.interop.runtime import KEY, PATIENCE, REGION, SECRET, Runtime, table

pytestmark = pytest.mark.usefixtures("aws")  # before any server: where the CLI is absent, none need start


class Ran(NamedTuple):
    """The result of a call of the CLI: its exit status, its output, its errors, and the file that it wrote."""

    code: int
    said: dict[str, Any]
    errors: str
    body: bytes


Invoke = Callable[..., Ran]


@pytest.fixture(scope="session")
def aws() -> str:
    """The CLI beside this Python, or else on the PATH."""
    found = shutil.which("aws", path=str(Path(sys.executable).parent)) or shutil.which("aws")
    if found is None:
        absent("aws-cli")
    assert found is not None
    return found


@pytest.fixture
def invoke(aws: str, tmp_path: Path) -> Invoke:
    """invoke(server, endpoint, body, "--more", "arguments", NAME="value of the environment")."""

    def invoke(server: Runtime, endpoint: str, data: bytes, *more: str, scheme: str = "http", **variables: str) -> Ran:
        (tmp_path / "body").write_bytes(data)
        answer = tmp_path / "answer"
        answer.unlink(missing_ok=True)
        command = ["sagemaker-runtime", "invoke-endpoint", "--endpoint-name", endpoint, "--body", f"fileb://{tmp_path}/body"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        environment |= {
            "HOME": str(tmp_path),
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_MAX_ATTEMPTS": "1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CA_BUNDLE": str(server.ca),
            **variables,
        }
        ran = subprocess.run(
            [aws, "--endpoint-url", server.urls[scheme], "--output", "json", *command, *more, str(answer)],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        said = json.loads(ran.stdout) if ran.stdout.strip() else {}
        return Ran(ran.returncode, said, ran.stderr, answer.read_bytes() if answer.exists() else b"")

    return invoke


@pytest.mark.by_default
def test_an_answer_lands_in_the_file_and_its_head_is_printed(runtime: Runtime, invoke: Invoke) -> None:
    head = {"content-type": "image/x-portable", "x-amzn-sagemaker-custom-attributes": "spent=3"}
    ran = invoke(runtime, "replying", json.dumps(head).encode(), "--content-type", "application/json", scheme="https")
    assert (ran.code, ran.errors) == (0, "")
    assert ran.said == {
        "ContentType": "image/x-portable",
        "InvokedProductionVariant": "AllTraffic",
        "CustomAttributes": "spent=3",
    }
    assert ran.body == bytes(range(256))


def test_options_reach_the_model(runtime: Runtime, invoke: Invoke) -> None:
    options = {
        "target-variant": "dark",
        "inference-id": "i 1",
        "custom-attributes": "a=b",
        "accept": "c/d",
        "session-id": "s",
    }
    ran = invoke(runtime, "split", b"hello", *(word for k, v in options.items() for word in (f"--{k}", v)))
    assert (ran.code, ran.said["InvokedProductionVariant"]) == (0, "dark")
    headers = json.loads(ran.body)["headers"]
    assert headers["accept"] == "c/d"
    for name in ("target-variant", "inference-id", "custom-attributes", "session-id"):
        assert headers[f"x-amzn-sagemaker-{name}"] == options[name]


def test_a_target_model_is_loaded_on_use(runtime: Runtime, invoke: Invoke) -> None:
    tensor = {"name": "INDEX", "datatype": "INT64", "shape": [1], "data": [9]}
    body = json.dumps({"inputs": [tensor]}).encode()
    ran = invoke(runtime, "many", body, "--content-type", "application/json", "--target-model", "table-5.tar.gz")
    assert (ran.code, ran.errors) == (0, "")
    assert json.loads(ran.body)["outputs"][0]["data"] == list(table(5)[9])


def test_the_models_own_words_are_shown_and_the_exit_status_is_255(runtime: Runtime, invoke: Invoke) -> None:
    ran = invoke(runtime, "failing-parts", b"refuse")
    assert (ran.code, ran.said, ran.body) == (255, {}, b"")
    assert "(ModelError)" in ran.errors
    assert "Received client error (418) from failing-parts" in ran.errors
    assert "the part said refuse" in ran.errors
    ran = invoke(runtime, "many", b"", "--target-model", "../outside")
    assert ran.code == 255
    assert "(ValidationError)" in ran.errors


def test_signatures_are_verified(signed_runtime: Runtime, invoke: Invoke) -> None:
    ran = invoke(signed_runtime, "echo", b"hello")
    assert (ran.code, ran.body) == (0, b"hello")
    ran = invoke(signed_runtime, "echo", b"hello", AWS_SECRET_ACCESS_KEY="another")
    assert ran.code == 255
    assert "(InvalidSignatureException)" in ran.errors
