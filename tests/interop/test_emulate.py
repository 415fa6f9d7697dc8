"""`everywire emulate sagemaker` before containers that were written with other libraries, and the AWS SDK in front."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import blocks
from tests.interop import aws
from tests.interop.emulated import Emulator, container, emulating
from tests.interop.servers import LIBRARY, Server, serving, tables
from tests.ports import free_port

pytestmark = aws.QUIET

ENDPOINT = "container"
TEXT, BINARY = "UTF8", "BINARY"
LIBRARIES = ("websockets", "uvicorn", "trio_websocket")
Before = Callable[..., Emulator]


@pytest.fixture(scope="module")
def before(needs: Callable[[str, str], Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Before]:
    """before("uvicorn") is the front of the container on uvicorn, started when it is first asked for."""
    needs("aws-sdk", "aws_sdk_sagemaker_runtime_http2")
    needs("websockets", "websockets.asyncio.server")
    needs("uvicorn", "uvicorn")
    needs("starlette", "starlette")
    cache = tmp_path_factory.mktemp("emulate")
    started: dict[tuple[str, ...], Emulator] = {}
    with ExitStack() as running:

        def get(name: str, *options: str) -> Emulator:
            if (name, *options) not in started:
                behind = running.enter_context(container(f"on_{name}"))
                front = running.enter_context(emulating(behind.port, cache, *options))
                front.event("model ready")
                started[name, *options] = front
            return started[name, *options]

        yield get


@pytest.fixture(params=LIBRARIES)
def front(request: pytest.FixtureRequest, before: Before) -> Emulator:
    """The front of each container in turn."""
    return before(request.param, "--half-close-quiet", "100ms")


@contextmanager
def documented(folder: Path, pause: float) -> Iterator[int]:
    """The container of docs/howto/sagemaker.md at a port, which thinks for so many seconds before each answer."""
    (program,) = (block.text for block in blocks("docs/howto/sagemaker.md") if block.file == "container.py")
    port, answer = free_port(), "        await socket.send("
    program = program.replace("8080", str(port)).replace(answer, f"        await asyncio.sleep({pause})\n{answer}")
    assert f"sleep({pause})" in program
    (folder / "container.py").write_text(program)
    process = subprocess.Popen([sys.executable, folder / "container.py"], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"listening\n"
        yield port
    finally:
        process.kill()
        process.communicate()


def play(front: Emulator, story: Callable[[aws.Client], Any], *endings: str) -> None:
    """One story with a client of its own; each of its calls must have its line in the log, with that ending."""
    since = len(front.log)

    async def told() -> None:
        async with aws.client(front.server) as client:
            await story(client)

    aws.run(told())
    assert sorted(front.endings(since, len(endings))) == sorted(endings)


# ---- every library ----


def test_text_and_binary_come_back_as_they_went(front: Emulator) -> None:
    async def story(client: aws.Client) -> None:
        stream = await client.call(ENDPOINT)
        await stream.head()  # before the first part
        for data, kind in [("zwö".encode(), TEXT), (bytes(range(256)), BINARY), (b"\x80" * 100_000, BINARY)]:
            await stream.send(data, data_type=kind, completion_state="COMPLETE")
            part = await stream.receive()
            assert (part.bytes_, part.data_type, part.completion_state) == (data, kind, "COMPLETE")
        await stream.end()
        assert await stream.rest() == []

    play(front, story, "complete")


def test_the_container_sees_path_query_and_the_id_of_the_log_and_no_credentials(front: Emulator) -> None:
    since = len(front.log)
    told: dict[str, Any] = {}

    async def story(client: aws.Client) -> None:
        stream = await client.call(ENDPOINT, model_invocation_path="tell/v1.2/x", model_query_string="language=en&b=%20.~1")
        told.update(json.loads(await stream.answer()))
        await stream.end()
        await stream.rest()

    play(front, story, "complete")
    assert told["target"] == "/tell/v1.2/x?language=en&b=%20.~1"
    (line,) = front.event("exchange", since=since)
    assert told["headers"]["x-amzn-sagemaker-request-id"] == line["id"]
    assert not {name for name in told["headers"] if name.startswith(("authorization", "x-amz-"))}


def test_fragments_with_a_character_split_between_them_are_one_message_to_a_library(front: Emulator) -> None:
    async def story(client: aws.Client) -> None:
        stream = await client.call(ENDPOINT)
        for n, data in enumerate([b"a\xe2", b"\x82", b"\xacb"]):
            await stream.send(data, data_type=TEXT, completion_state="PARTIAL" if n < 2 else "COMPLETE")
        part = await stream.receive()
        assert (part.bytes_.decode(), part.data_type, part.completion_state) == ("a€b", TEXT, "COMPLETE")
        await stream.end()
        assert await stream.rest() == []

    play(front, story, "complete")


def test_a_thousand_parts_keep_order_and_bytes(front: Emulator) -> None:
    parts = [hashlib.sha256(str(i).encode()).digest() * (1 + i % 40) for i in range(1000)]

    async def story(client: aws.Client) -> None:
        stream = await client.call(ENDPOINT)

        async def talk() -> None:
            for data in parts:
                await stream.send(data, data_type=BINARY)

        talking = asyncio.create_task(talk())
        assert [await stream.answer() for _ in parts] == parts
        await talking
        await stream.end()
        assert await stream.rest() == []

    play(front, story, "complete")


def test_64_sessions_at_once_have_each_their_own_answers(front: Emulator) -> None:
    async def story(client: aws.Client) -> None:
        async def one(number: int) -> None:
            stream = await client.call(ENDPOINT)
            for i in range(5):
                await stream.send(b"%d %d" % (number, i), data_type=TEXT)
                assert await stream.answer() == b"%d %d" % (number, i)
            await everyone.wait()
            await stream.end()
            assert await stream.rest() == []

        everyone = asyncio.Barrier(64)
        await asyncio.gather(*map(one, range(64)))

    play(front, story, *["complete"] * 64)


@pytest.mark.parametrize(("code", "reason"), [(1011, "out of memory"), (4000, "quota: 3 of 3")])
def test_a_close_of_the_container_is_a_model_stream_error_with_its_code_and_reason(
    front: Emulator, sdk: Any, code: int, reason: str
) -> None:
    async def story(client: aws.Client) -> None:
        stream = await client.call(ENDPOINT)
        await stream.send(b"fine", data_type=TEXT)
        await stream.send(f"close {code} {reason}".encode(), data_type=TEXT)
        assert await stream.answer() == b"fine"
        with pytest.raises(sdk.ModelStreamError) as raised:
            await stream.receive()
        assert (raised.value.error_code, raised.value.message) == (str(code), reason)

    play(front, story, "model-error")


def test_a_normal_close_of_the_container_is_the_end_of_the_stream(front: Emulator) -> None:
    async def story(client: aws.Client) -> None:
        stream = await client.call(ENDPOINT)
        await stream.send(b"fine", data_type=TEXT)
        await stream.send(b"close 1000 bye", data_type=TEXT)
        assert await stream.rest() == [b"fine"]

    play(front, story, "complete")


def test_a_refused_handshake_is_a_model_error_with_the_containers_status_and_words_at_once(
    front: Emulator, sdk: Any
) -> None:
    async def story(client: aws.Client) -> None:
        stream = await client.call(ENDPOINT, model_invocation_path="refuse")
        with pytest.raises(sdk.ModelError) as raised:
            await stream.head()
        assert raised.value.original_status_code == 403
        assert raised.value.original_message == "this model is not for you"
        assert await client.talk(ENDPOINT, b"and the next") == [b"and the next"]

    play(front, story, "model-error", "complete")


# ---- behaviour of single libraries ----


def test_a_library_that_shows_fragments_sees_those_that_were_sent_and_its_own_arrive(before: Before) -> None:
    async def story(client: aws.Client) -> None:
        stream = await client.call(ENDPOINT, model_invocation_path="fragments")
        sent = [b"a\xe2", b"", b"\x82", b"\xacb"]
        for n, data in enumerate(sent):
            await stream.send(data, data_type=TEXT, completion_state="PARTIAL" if n < 3 else "COMPLETE")
        parts = [await stream.receive() for _ in range(5)]
        assert [part.bytes_ or b"" for part in parts] == [*sent, b""]
        assert [part.completion_state for part in parts] == ["PARTIAL"] * 4 + ["COMPLETE"]
        await stream.end()
        assert await stream.rest() == []

    play(before("websockets", "--half-close-quiet", "5s"), story, "complete")


def test_every_fragment_arrives_as_it_was_sent(before: Before) -> None:
    sent = [
        (b"a\xe2", TEXT, "PARTIAL"),
        (b"\x82\xac", TEXT, "COMPLETE"),
        (b"\x00", BINARY, "PARTIAL"),
        (b"", BINARY, "COMPLETE"),
    ]

    async def story(client: aws.Client) -> None:
        stream = await client.call(ENDPOINT)
        for data, kind, state in sent:
            await stream.send(data, data_type=kind, completion_state=state)
        seen = [json.loads(await stream.answer()) for _ in sent]
        assert seen == [{"hex": d.hex(), "kind": k, "last": s == "COMPLETE"} for d, k, s in sent]
        await stream.end()
        assert await stream.rest() == []

    play(before("everywire"), story, "complete")


def test_a_container_that_answers_before_it_says_close_needs_no_quiet(before: Before) -> None:
    async def story(client: aws.Client) -> None:
        asked = [b"one", b"two", b"three"]
        assert await client.ask(ENDPOINT, *asked) == asked

    play(before("wsproto", "--half-close-quiet", "0"), story, "complete")


def test_a_container_that_thinks_is_left_time_to_answer_what_it_was_asked(before: Before) -> None:
    async def story(client: aws.Client) -> None:
        asked = [b"one", b"two", b"three"]
        assert await client.ask(ENDPOINT, *asked, model_invocation_path="thoughtful") == asked

    play(before("websockets", "--half-close-quiet", "5s"), story, "complete")


@pytest.mark.parametrize("pause", [0.5, 1.5, 10])
def test_the_container_of_the_documentation_has_its_time_to_answer(before: Before, pause: float, tmp_path: Path) -> None:
    """The client has half-closed before the first answer, and has them all; the session ends at once behind the last."""

    async def story(client: aws.Client) -> None:
        stream = await client.call(ENDPOINT, model_invocation_path="v1")
        for word in (b"hello", b"wire"):
            await stream.send(word, data_type=TEXT)
        await stream.end()
        assert await stream.rest() == [b"/v1: HELLO", b"/v1: WIRE"]

    with documented(tmp_path, pause) as port, emulating(port, tmp_path / "cache") as front:
        front.event("model ready")
        play(front, story, "complete")


def test_a_container_that_is_told_of_no_end_has_its_time_to_answer_too(before: Before) -> None:
    """It neither names an end of input nor closes by itself: the answer comes after ten seconds, then its client leaves."""

    async def story(client: aws.Client) -> None:
        stream = await client.call(ENDPOINT, model_invocation_path="slow")
        await stream.send(b"one", data_type=TEXT)
        await stream.end()
        assert await stream.answer() == b"one"

    play(before("websockets"), story, "cancelled-by-client")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--half-close-quiet", "1s"), "neither for 1 s (half_close_quiet) nor between our Close and its own"),
        ((), "the session's 3 s are over (bidi.session_timeout)"),
    ],
)
def test_a_container_that_never_answers_is_an_error_that_names_it(
    before: Before, sdk: Any, options: tuple[str, ...], words: str, tmp_path: Path
) -> None:

    async def story(client: aws.Client) -> None:
        stream = await client.call(ENDPOINT, model_invocation_path="silent")
        await stream.send(b"one", data_type=TEXT)
        await stream.end()
        with pytest.raises(sdk.ModelStreamError) as raised:
            await stream.receive()
        assert re.search(r"the container at 127\.0\.0\.1:\d+ (has )?sent nothing", raised.value.message)
        for said in (words, "the client's last part", "X-Everywire-End-Of-Input"):
            assert said in raised.value.message

    limit = ("bidi.session_timeout=3s",)
    with container("on_websockets") as behind, emulating(behind.port, tmp_path, *options, settings=limit) as front:
        front.event("model ready")
        play(front, story, "model-error" if options else "deadline")


def test_a_bug_in_a_container_is_a_model_stream_error_after_what_it_had_said(before: Before, sdk: Any) -> None:
    async def story(client: aws.Client) -> None:
        stream = await client.call(ENDPOINT, model_invocation_path="crash")
        assert await stream.answer() == b"before"
        await stream.send(b"x")
        with pytest.raises(sdk.ModelStreamError) as raised:
            await stream.receive()
        assert raised.value.error_code == "1011"

    play(before("websockets"), story, "model-error")


def test_a_part_near_16_mb_goes_both_ways(before: Before) -> None:
    data = hashlib.sha256(b"seed").digest() * (15 * 2**20 // 32)

    async def story(client: aws.Client) -> None:
        stream = await client.call(ENDPOINT)
        await stream.send(data, data_type=BINARY)
        assert await stream.answer() == data
        await stream.end()
        assert await stream.rest() == []

    play(before("websockets", "--half-close-quiet", "5s"), story, "complete")


# ---- its /invocations ----


@pytest.fixture
def boto(needs: Callable[[str, str], Any], before: Before) -> Iterator[tuple[Any, Emulator]]:
    """boto3 in front of the container on uvicorn."""
    boto3, config = needs("boto3", "boto3"), needs("boto3", "botocore.config")
    front = before("uvicorn")
    client = boto3.client(
        "sagemaker-runtime", endpoint_url=front.server.url, region_name="us-west-2", aws_access_key_id="any",
        aws_secret_access_key="any", config=config.Config(retries={"total_max_attempts": 1}),
    )  # fmt: skip
    yield client, front
    client.close()


def test_invoke_endpoint_is_the_containers_answer(boto: tuple[Any, Emulator]) -> None:
    client, front = boto
    since = len(front.log)
    answer = client.invoke_endpoint(EndpointName=ENDPOINT, Body=b"abc\x00\xff", CustomAttributes="trace=1")
    assert answer["Body"].read() == b"\xff\x00cba"
    assert (answer["ContentType"], answer["CustomAttributes"]) == ("application/x-reversed", "answered=trace=1")
    assert answer["InvokedProductionVariant"] == "AllTraffic"
    told = client.invoke_endpoint(EndpointName=ENDPOINT, Body=b"tell", ContentType="text/x-mine", Accept="text/x-yours")
    assert json.loads(told["Body"].read()) == {"content-type": "text/x-mine", "accept": "text/x-yours"}
    assert front.endings(since, 2) == ["complete"] * 2


@pytest.mark.parametrize("status", [400, 429, 503])
def test_an_error_of_the_container_is_a_model_error_with_its_status_and_text(
    boto: tuple[Any, Emulator], status: int
) -> None:
    client, front = boto
    since, body = len(front.log), b"fail %d today" % status
    for call in (client.invoke_endpoint, client.invoke_endpoint_with_response_stream):
        with pytest.raises(client.exceptions.ModelError) as raised:
            call(EndpointName=ENDPOINT, Body=body)
        assert raised.value.response["OriginalStatusCode"] == status
        assert raised.value.response["OriginalMessage"] == f"the model could not: {body.decode()}"
    assert front.endings(since, 2) == ["model-error"] * 2


def test_a_response_stream_is_what_the_container_streams(boto: tuple[Any, Emulator]) -> None:
    client, front = boto
    since = len(front.log)
    answer = client.invoke_endpoint_with_response_stream(EndpointName=ENDPOINT, Body=b"stream 100", CustomAttributes="a")
    assert (answer["ContentType"], answer["CustomAttributes"]) == ("text/x-pieces; charset=utf-8", "answered=a")
    assert b"".join(e["PayloadPart"]["Bytes"] for e in answer["Body"]) == b"".join(b"piece %d\n" % i for i in range(100))
    assert front.endings(since) == ["complete"]


def test_a_response_stream_that_the_container_breaks_off_says_so_after_its_first_half(
    boto: tuple[Any, Emulator], needs: Callable[[str, str], Any]
) -> None:
    client, front = boto
    since = len(front.log)
    answer = client.invoke_endpoint_with_response_stream(EndpointName=ENDPOINT, Body=b"cut")
    events = iter(answer["Body"])
    assert next(events)["PayloadPart"]["Bytes"] == b"the first half"
    with pytest.raises(needs("boto3", "botocore.exceptions").EventStreamError, match="ModelStreamError"):
        next(events)
    answer["Body"].close()
    assert front.endings(since) == ["model-error"]


# ---- in a configuration, beside models of this machine ----


def test_a_configured_server_has_a_container_as_a_model_beside_its_own(
    needs: Callable[[str, str], Any], sdk: Any, tmp_path: Path
) -> None:
    needs("uvicorn", "uvicorn")

    async def story(server: Server) -> None:
        async with aws.client(server) as client:
            assert await client.talk("far", b"one", b"two") == [b"one", b"two"]
            assert await client.ask("echo", b"one") == [b"one"]
            assert await client.ask("failing", b"one") == [b"one"]
            stream = await client.call("far", model_invocation_path="refuse")
            with pytest.raises(sdk.ModelError) as raised:
                await stream.head()
            assert raised.value.original_status_code == 403

    with container("on_uvicorn") as behind:
        remote = [
            *("[models.far]", 'factory = "gateway.containers.model:container"'),
            f'options = {{ url = "ws://127.0.0.1:{behind.port}", half_close_quiet = "2s" }}',
        ]
        local = tables(LIBRARY | {"failing": "served:failing"})
        with serving(tmp_path, "served.py", [*remote, *local]) as server:
            aws.run(story(server))
