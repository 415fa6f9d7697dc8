"""`everywire emulate sagemaker` before a container that does wrong, or is not there; the AWS SDK in front."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.interop import aws
from tests.interop.emulated import Container, Emulator, container, emulating

pytestmark = aws.QUIET

ENDPOINT = "container"
QUIET = ("--half-close-quiet", "1s")
# MiB that the kernel's buffers between four processes may hold, with room to spare. An unbounded flood passes this within a
# second.
SOCKETS = 48
# MiB by which the front may grow meanwhile: 256 KiB and two frames for a session, and memory that an allocator keeps.
GROWN = 16


@pytest.fixture(scope="module")
def behind(needs: Callable[[str, str], Any]) -> Iterator[Container]:
    """A container that whoever kills it starts again."""
    needs("aws-sdk", "aws_sdk_sagemaker_runtime_http2")
    needs("websockets", "websockets.asyncio.server")
    with container("on_websockets") as made:
        yield made


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulate")


@pytest.fixture(scope="module")
def front(behind: Container, cache: Path) -> Iterator[Emulator]:
    """The front before it, which is patient with its health and with nothing else."""
    short = ("connect_timeout=3s", "ping_interval=500ms", "pings_unanswered=4")
    with emulating(behind.port, cache, *QUIET, *(f"--limit={limit}" for limit in short)) as front:
        front.event("model ready")
        yield front


@pytest.fixture(scope="module")
def patient(behind: Container, cache: Path) -> Iterator[Emulator]:
    """The front before it, with the limits that it has where nobody sets any."""
    with emulating(behind.port, cache, *QUIET) as front:
        front.event("model ready")
        yield front


def play(front: Emulator, story: Callable[[aws.Client], Any], *endings: str) -> None:
    """One story with a client of its own; each of its calls must have its line in the log, with that ending."""
    since = len(front.log)

    async def told() -> None:
        async with aws.client(front.server) as client:
            await story(client)

    aws.run(told())
    assert sorted(front.endings(since, len(endings))) == sorted(endings)


async def answers(client: aws.Client) -> None:
    assert await client.talk(ENDPOINT, b"hello") == [b"hello"]


@contextmanager
def reading(front: Emulator, path: str) -> Iterator[subprocess.Popen[str]]:
    """A client process that has read the first part."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.interop.emulated_client", str(front.server.tls_port), str(front.server.ca), path],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "reading\n"
            yield process
        finally:
            process.kill()


def test_a_container_that_is_killed_in_mid_session_is_a_broken_stream_and_answers_when_it_is_back(
    front: Emulator, behind: Container, sdk: Any
) -> None:
    async def story(client: aws.Client) -> None:
        streams = [await client.call(ENDPOINT) for _ in range(3)]
        for stream in streams:
            await stream.send(b"before")
            assert await stream.answer() == b"before"
        behind.kill()
        for stream in streams:
            with pytest.raises(sdk.ModelStreamError) as raised:
                await stream.receive()
            assert raised.value.error_code == "StreamBroken"
        stream = await client.call(ENDPOINT)
        with pytest.raises(sdk.ModelError) as refused:
            await stream.head()
        assert refused.value.original_status_code == 502
        assert refused.value.original_message == (
            f"cannot connect to the container at 127.0.0.1:{behind.port}: Connection refused"
        )
        behind.start()
        await answers(client)

    play(front, story, *["model-error"] * 4, "complete")


def test_a_container_that_hangs_in_the_handshake_is_a_model_error_that_names_the_limit(front: Emulator, sdk: Any) -> None:
    async def story(client: aws.Client) -> None:
        stream = await client.call(ENDPOINT, model_invocation_path="hang")
        with pytest.raises(sdk.ModelError) as raised:
            await stream.head()
        assert raised.value.original_status_code == 504
        assert raised.value.original_message == "the container did not answer within 3 s (connect_timeout)"
        await answers(client)

    play(front, story, "model-error", "complete")


def test_a_container_that_hangs_in_mid_session_is_a_broken_stream(front: Emulator, behind: Container, sdk: Any) -> None:
    async def story(client: aws.Client) -> None:
        stream = await client.call(ENDPOINT)
        await stream.send(b"before")
        assert await stream.answer() == b"before"
        behind.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(sdk.ModelStreamError) as raised:
                await stream.receive()
        finally:
            behind.process.send_signal(signal.SIGCONT)
        assert raised.value.error_code == "StreamBroken"
        assert raised.value.message == "the container left 4 Pings in a row unanswered (pings_unanswered)"
        await answers(client)

    play(front, story, "model-error", "complete")


def test_a_client_may_leave_a_container_that_says_nothing(patient: Emulator) -> None:
    with reading(patient, "deaf") as process:
        since = len(patient.log)
        process.kill()
        assert patient.endings(since) == ["cancelled-by-client"]


def test_a_flood_stands_still_while_its_client_does_and_takes_no_memory(front: Emulator, behind: Container) -> None:
    play(front, answers, "complete")
    resident, said = front.resident, len(behind.said)
    with reading(front, "flood") as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert behind.said.still(1.0) - said < SOCKETS
        grown, sent = front.resident - resident, len(behind.said)
        play(front, answers, "complete")  # nobody else waits for it
        assert len(behind.said) == sent, "the container goes on"
        since = len(front.log)
        process.send_signal(signal.SIGCONT)
        behind.said.find(lambda line: line, since=sent)
        process.kill()
        assert front.endings(since) == ["cancelled-by-client"]
    assert grown < GROWN


def test_a_container_that_stops_reading_stops_its_client_and_takes_no_memory(patient: Emulator) -> None:
    resident, part = patient.resident, bytes(2**18)

    async def story(client: aws.Client) -> None:
        stream = await client.call(ENDPOINT, model_invocation_path="deaf")
        assert await stream.answer() == b"here"
        for _ in range(4 * SOCKETS):  # parts of a fourth of a MiB
            try:
                await asyncio.wait_for(stream.send(part), 2)  # for so long it must stand still
            except TimeoutError:
                break
        else:
            pytest.fail("the client goes on")
        assert patient.resident - resident < GROWN
        await answers(client)  # nobody else waits for it

    play(patient, story, "cancelled-by-client", "complete")


def test_a_container_that_is_not_up_yet_is_waited_for(cache: Path, sdk: Any, needs: Callable[[str, str], Any]) -> None:
    boto3 = needs("boto3", "boto3")
    config = needs("boto3", "botocore.config").Config(retries={"total_max_attempts": 1})

    async def too_early(client: aws.Client) -> None:
        stream = await client.call(ENDPOINT)
        with pytest.raises(sdk.ServiceUnavailableError, match="loading"):
            await stream.head()

    with container("on_websockets") as behind:
        behind.kill()
        limits = ("--limit=health_interval=100ms", "--limit=health_failures=3")
        with emulating(behind.port, cache, *QUIET, *limits) as front:
            front.event("waiting for the container")
            play(front, too_early, "refused")
            client = boto3.client(
                "sagemaker-runtime", endpoint_url=front.server.url, region_name="us-west-2", aws_access_key_id="any",
                aws_secret_access_key="any", config=config,
            )  # fmt: skip
            with pytest.raises(client.exceptions.ModelNotReadyException):
                client.invoke_endpoint(EndpointName=ENDPOINT, Body=b"x")
            client.close()
            behind.start()
            front.event("model ready")
            play(front, answers, "complete")
            since = len(front.log)
            behind.kill()
            (crashed,) = front.event("model crashed", since=since)
            assert "ContainerUnhealthy: GET /ping failed 3 times in a row" in crashed["reason"]
            behind.start()
            front.event("model ready", since=since)
            play(front, answers, "complete")


def test_a_container_that_hangs_up_on_invocations_is_a_model_error_that_names_them(
    front: Emulator, needs: Callable[[str, str], Any]
) -> None:
    boto3 = needs("boto3", "boto3")
    config = needs("boto3", "botocore.config").Config(retries={"total_max_attempts": 1})
    client = boto3.client(
        "sagemaker-runtime", endpoint_url=front.server.url, region_name="us-west-2", aws_access_key_id="any",
        aws_secret_access_key="any", config=config,
    )  # fmt: skip
    since = len(front.log)
    with pytest.raises(client.exceptions.ModelError) as raised:
        client.invoke_endpoint(EndpointName=ENDPOINT, Body=b"x")
    client.close()
    assert front.endings(since) == ["model-error"]
    assert raised.value.response["OriginalStatusCode"] == 502
    assert raised.value.response["OriginalMessage"].startswith("the container gave no answer to POST /invocations: ")
