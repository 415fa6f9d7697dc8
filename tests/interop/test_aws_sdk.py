"""The AWS SDK for Python, aws-sdk-sagemaker-runtime-http2, unmodified: TLS with ALPN, signed event streams, duplex.

Everything is shown twice: signatures are verified, or not looked at. Python 3.12; see requirements-aws.txt.
"""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.interop.aws import QUIET, STREAMS, Client, Servers, client, run
from tests.interop.servers import Server

pytestmark = QUIET

# The SDK encodes events of 16 MiB, of which a part's own bytes are these where it has no members, and less a DataType's
# header (8 bytes of name, 4 of lengths and type, and the value) where it has one.
LARGEST = 16_777_111


@pytest.mark.by_default
def test_a_duplex_echo_of_a_thousand_parts_keeps_order_and_bytes(service: Server) -> None:
    parts = [hashlib.sha256(str(i).encode()).digest() * (1 + i % 40) for i in range(1000)]

    async def story() -> None:
        async with client(service) as aws:
            stream = await aws.call("echo")

            async def talk() -> None:
                for data in parts:
                    await stream.send(data, data_type="BINARY", completion_state="COMPLETE")
                await stream.end()

            talking = asyncio.create_task(talk())
            assert await stream.rest() == parts
            await talking

    run(story())


def test_the_head_comes_before_the_first_part_and_fragments_pass_as_they_are(service: Server) -> None:
    character = "ö".encode()
    sent = [
        (b"zw" + character[:1], "UTF8", "PARTIAL"),
        (b"", "UTF8", "PARTIAL"),
        (character[1:], "UTF8", "COMPLETE"),
        (b"\xff\x00", "BINARY", "PARTIAL"),
        (b"\xfe", "BINARY", "COMPLETE"),
        (b"\xff is not text", "UTF8", "COMPLETE"),
    ]

    async def story() -> None:
        async with client(service) as aws:
            stream = await aws.call("echo")
            await stream.head()  # nothing was sent yet
            for data, kind, completion in sent:
                await stream.send(data, data_type=kind, completion_state=completion)
                part = await stream.receive()
                assert (part.bytes_ or b"", part.data_type, part.completion_state) == (data, kind, completion)
            await stream.end()
            assert await stream.receive() is None

    run(story())


def test_a_part_without_members_is_binary_and_complete_and_its_padding_goes_nowhere(service: Server) -> None:
    async def story() -> None:
        async with client(service) as aws:
            stream = await aws.call("echo")
            await stream.send(b"plain", p="x" * 100)
            part = await stream.receive()
            assert (part.bytes_, part.data_type, part.completion_state, part.p) == (b"plain", "BINARY", "COMPLETE", None)

    run(story())


def test_variants_take_their_turns_by_weight_and_a_header_chooses_one(service: Server) -> None:
    async def invoked(aws: Client, endpoint: str, **members: str) -> tuple[str, str]:
        stream = await aws.call(endpoint, **members)
        variant = (await stream.head()).invoked_production_variant
        return variant, json.loads(await stream.answer())["model"]

    async def story() -> None:
        async with client(service) as aws:
            assert Counter([await invoked(aws, "split") for _ in range(8)]) == {("Blue", "blue"): 6, ("Green", "green"): 2}
            assert await invoked(aws, "split", target_variant="Green") == ("Green", "green")
            assert await invoked(aws, "told") == ("AllTraffic", "told")
            assert await invoked(aws, "told", target_variant="AllTraffic") == ("AllTraffic", "told")

    run(story())


def test_the_model_sees_path_and_query_byte_for_byte(service: Server) -> None:
    path, query = "v1/../Listen.-_/a", "model=nova%2D3&keyterm=Z%c3%bcrich&keyterm=a~b.c_d-e&x=%2F%3f"

    async def story() -> None:
        async with client(service) as aws:
            said = json.loads((await aws.ask("told", model_invocation_path=path, model_query_string=query))[0])
            assert (said["path"], said["query"]) == (path, query)

    run(story())


def test_an_empty_path_and_an_empty_query_are_none(service: Server) -> None:
    """As pipecat sends them: the SDK signs and sends two empty headers."""

    async def story() -> None:
        async with client(service) as aws:
            stream = await aws.call("told", model_invocation_path="", model_query_string="")
            output = await stream.head()
            said = json.loads(await stream.answer())
            assert (said["path"], said["query"]) == ("/endpoints/told/invocations-bidirectional-stream", "")
            assert output.response_metadata.request_id == said["id"]

    run(story())


def test_sixty_four_sessions_are_open_at_once_on_one_client(service: Server) -> None:
    async def story() -> None:
        async with client(service) as aws:
            assert await aws.ask("echo", b"first") == [b"first"]  # sessions that begin together open connections each
            streams = [await aws.call("echo") for _ in range(64)]
            for stream in streams:
                await stream.head()
            for turn in range(3):
                for number, stream in enumerate(streams):
                    await stream.send(b"%d of %d" % (turn, number))
                heard = await asyncio.gather(*(stream.answer() for stream in streams))
                assert heard == [b"%d of %d" % (turn, number) for number in range(64)]
            for stream in streams:
                await stream.end()
            assert await asyncio.gather(*(stream.rest() for stream in streams)) == [[]] * 64

    run(story())


@pytest.mark.parametrize(("size", "members"), [(LARGEST, {}), (LARGEST - 16, {"data_type": "UTF8"})])
def test_the_largest_part_the_client_encodes_comes_back(service: Server, size: int, members: dict[str, str]) -> None:
    data = hashlib.sha256(b"large").digest() * (size // 32) + bytes(size % 32)

    async def story() -> None:
        async with client(service) as aws:
            stream = await aws.call("echo")
            await stream.send(data, **members)
            assert await stream.answer() == data
            await stream.end()
            assert await stream.receive() is None

    run(story())


def test_the_largest_part_the_client_decodes_arrives(service: Server) -> None:
    async def story() -> None:
        async with client(service) as aws:
            assert await aws.ask("zeros", b"%d" % 2**24) == [bytes(2**24)]

    run(story())


def test_a_model_may_answer_after_the_end_of_input(service: Server) -> None:
    parts = [b"%d " % i * 1000 for i in range(200)]

    async def story() -> None:
        async with client(service) as aws:
            assert await aws.ask("listener", *parts) == parts[::-1]

    run(story())


def test_a_text_model_generates_over_the_stream(service: Server) -> None:
    request = json.dumps({"inputs": "The", "parameters": {"max_new_tokens": 5, "seed": 1}}).encode()

    async def story() -> None:
        async with client(service) as aws:
            *tokens, end = await aws.ask("lm", request)
            assert len(tokens) == 5
            assert all(tokens)
            assert end == b""  # that of the generation; the session goes on

    run(story())


def test_two_hundred_sessions_that_the_model_ends_leave_no_stream_behind(
    service: Server, needs: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client never ends its input. It opens no second connection, so it would wait for ever at a hundred."""
    transport = needs("aws-sdk", "smithy_http.aio.crt").AWSCRTHTTPClient
    create = transport._create_connection
    opened = []

    async def counted(self: Any, url: Any) -> Any:
        opened.append(url)
        return await create(self, url)

    monkeypatch.setattr(transport, "_create_connection", counted)

    async def story() -> None:
        async with client(service) as aws:
            for number in range(2 * STREAMS):
                stream = await aws.call("hasty")
                for _ in range(3):
                    await stream.send(b"session %d" % number)
                assert await stream.rest() == [b"session %d" % number]
                await stream.send(b"for nobody")
            assert len(opened) == 1

    run(story())


def test_padding_of_answers_varies_in_length_and_changes_nothing_else(sdk: Any, signed: bool, aws_servers: Servers) -> None:
    parts = [b"token %d" % i for i in range(100)]

    async def story() -> None:
        async with client(aws_servers(signed, "bidi = { padding = 64 }")) as aws:
            stream = await aws.call("echo")
            lengths = set()
            for data in parts:
                await stream.send(data, data_type="UTF8", completion_state="PARTIAL")
                part = await stream.receive()
                assert (part.bytes_, part.data_type, part.completion_state) == (data, "UTF8", "PARTIAL")
                lengths.add(len(part.p or ""))
            assert len(lengths) > 10  # there are 65: fewer among a hundred random ones are next to impossible
            assert max(lengths) <= 64

    run(story())
