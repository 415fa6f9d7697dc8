"""The fixtures of the interop tests: servers that run for all of them, and clients that are skipped by name if absent."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from tests.interop import aws, served_grpc, served_text, served_v2, servers, triton
from tests.interop.runtime import KEY, REGION, SECRET, KiB, Runtime, running
from tests.interop.servers import LIBRARY, serving, tables
from tests.interop.servers import Server as Server


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--served-by", choices=["gateway", "hypercorn"], default="gateway", help="whose listeners accept")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--served-by") == "hypercorn":
        servers.by[:] = servers.HYPERCORN


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("programs")  # every test here is about one beside this process


def absent(client: str) -> None:
    """Skips the test that needs this client, or fails it where the environment was made for the client."""
    if client in os.environ.get("EVERYWIRE_REQUIRE", "").split(","):
        pytest.fail(f"{client} is required here and is not installed")
    pytest.skip(f"{client} is not installed")


@pytest.fixture(scope="session")
def needs() -> Callable[[str, str], Any]:
    """needs("tritonclient", "tritonclient.http") is the module, or a skip that names the client."""

    def get(client: str, module: str) -> Any:
        try:
            return importlib.import_module(module)
        except ImportError:
            return absent(client)

    return get


@pytest.fixture(scope="session")
def curl() -> str:
    """The path of curl."""
    path = shutil.which("curl")
    if path is None:
        absent("curl")
    assert path is not None
    return path


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The library models and the models of tests/interop/served.py, on free ports."""
    models = LIBRARY | {"failing": "served:failing"}
    defaults = ['bidi = { default_model = "echo" }', 'lmi = { default_model = "lm" }']
    with serving(tmp_path_factory.mktemp("server"), "served.py", [*defaults, *tables(models)]) as server:
        yield server


@pytest.fixture(scope="module")
def text_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The models of tests/interop/served_text.py, for the tests of one module, which may have lines of configuration more: its
    SETTINGS."""
    settings = served_text.configuration(*getattr(request.module, "SETTINGS", ()))
    with serving(tmp_path_factory.mktemp("text"), "served_text.py", settings) as server:
        yield server


@pytest.fixture(scope="session")
def v2_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The models of tests/interop/served_v2.py, which may be loaded and unloaded."""
    with serving(tmp_path_factory.mktemp("v2"), "served_v2.py", served_v2.configuration()) as server:
        yield server


@pytest.fixture(scope="session")
def triton_itself(tmp_path_factory: pytest.TempPathFactory) -> Iterator[triton.Triton]:
    """Triton's own server, with the models of tests/interop/served_v2.py."""
    files = triton.wheel()
    if files is None:
        absent("nvidia-pytriton")
    assert files is not None
    if int(np.__version__.split(".")[0]) >= 2:
        absent("numpy-1")  # Triton's Python backend reads arrays by numpy 1's layout
    with triton.serving_triton(tmp_path_factory.mktemp("triton"), files) as server:
        yield server


@pytest.fixture(scope="session")
def grpc_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The models of tests/interop/served_grpc.py and of served_v2.py, with room for messages of 64 MiB."""
    more = [
        f'[models.{n}]\nfactory = "tests.interop.served_v2:declared"\noptions = {{ model = "{n}" }}'
        for n in served_v2.DECLARED
        if n not in served_grpc.MODELS
    ]
    with serving(tmp_path_factory.mktemp("grpc"), "served_grpc.py", [*served_grpc.configuration(), *more]) as server:
        yield server


@pytest.fixture(scope="session")
def aws_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[aws.Servers]:
    """aws_servers(signed, "a line of configuration", ...) is a server for the AWS SDK, started when it is first asked for."""
    tls = tmp_path_factory.mktemp("tls")
    started: dict[tuple[bool, tuple[str, ...]], Server] = {}
    with ExitStack() as running:

        def get(signed: bool, *settings: str) -> Server:
            if (signed, settings) not in started:
                serve = aws.serving(tmp_path_factory.mktemp("aws"), tls, signed, settings)
                started[signed, settings] = running.enter_context(serve)
            return started[signed, settings]

        yield get


@pytest.fixture(params=[False, True], ids=["unsigned", "signed"])
def signed(request: pytest.FixtureRequest) -> bool:
    """True if the server verifies signatures. The client signs in any case."""
    verifies: bool = request.param
    return verifies


@pytest.fixture
def sdk(needs: Callable[[str, str], Any]) -> Any:
    """The models of the AWS SDK for Python."""
    return needs("aws-sdk", "aws_sdk_sagemaker_runtime_http2.models")


@pytest.fixture
def service(sdk: Any, signed: bool, aws_servers: aws.Servers) -> Server:
    """A server for the AWS SDK, which is there."""
    return aws_servers(signed)


@pytest.fixture(scope="session")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """A server with endpoints, variants and a folder of models, for SageMaker's runtime clients."""
    with running(tmp_path_factory.mktemp("runtime")) as server:
        yield server


@pytest.fixture(scope="session")
def signed_runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """A server like `runtime` that requires signatures, with a smaller limit on bodies."""
    folder = tmp_path_factory.mktemp("signed")
    (folder / "credentials").write_text(f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    sections = {
        "sagemaker": f"body = {64 * KiB}",
        "access": "unsigned = true",  # tests ask other routes too
        "sagemaker.sigv4": f'credentials = "credentials"\nregion = "{REGION}"',
    }
    with running(folder, **sections) as server:
        yield server
