"""The AWS SDK for Python, aws-sdk-sagemaker-runtime-http2, unmodified: TLS with ALPN, signed event streams, duplex.

It runs on asyncio, so each test is a small asyncio program. Python 3.12; see requirements-aws.txt.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.interop.conftest import Server

pytestmark = pytest.mark.filterwarnings("default")  # the SDK's own


@pytest.fixture
def sdk(needs: Callable[[str, str], Any], server: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("SSL_CERT_FILE", str(server.ca))
    return needs("aws-sdk", "aws_sdk_sagemaker_runtime_http2.models")


async def open_stream(server: Server, sdk: Any, endpoint: str) -> tuple[Any, Any]:
    from aws_sdk_sagemaker_runtime_http2.client import AsyncSageMakerRuntimeHTTP2Client
    from aws_sdk_sagemaker_runtime_http2.config import AsyncSageMakerRuntimeHTTP2Config
    from smithy_http.aio.crt import AWSCRTHTTPClient

    config = await AsyncSageMakerRuntimeHTTP2Config.resolve(
        endpoint_uri=f"https://localhost:{server.tls_port}",
        region="us-west-2",
        aws_access_key_id="AKIDEXAMPLE",
        aws_secret_access_key="secret",
        transport=AWSCRTHTTPClient(),
    )
    client = AsyncSageMakerRuntimeHTTP2Client(config=config)
    request = sdk.InvokeEndpointWithBidirectionalStreamInput(endpoint_name=endpoint)
    return client, await client.invoke_endpoint_with_bidirectional_stream(request)


def part(sdk: Any, data: bytes, **members: str) -> Any:
    return sdk.RequestStreamEventPayloadPart(value=sdk.RequestPayloadPart(bytes_=data, **members))


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 60))  # type: ignore[arg-type]


def test_a_duplex_echo_of_a_thousand_parts_keeps_order_and_bytes(server: Server, sdk: Any) -> None:
    parts = [hashlib.sha256(str(i).encode()).digest() * (1 + i % 40) for i in range(1000)]

    async def main() -> None:
        client, stream = await open_stream(server, sdk, "echo")

        async def talk() -> None:
            for data in parts:
                await stream.input_stream.send(part(sdk, data, data_type="BINARY", completion_state="COMPLETE"))
            await stream.input_stream.close()

        talking = asyncio.create_task(talk())
        _output, events = await stream.await_output()
        got = []
        async for event in events:
            got.append(event.value.bytes_)
        await talking
        assert got == parts
        await client.close()

    run(main)


def test_the_head_comes_before_the_first_part_and_fragments_pass_as_they_are(server: Server, sdk: Any) -> None:
    async def main() -> None:
        client, stream = await open_stream(server, sdk, "echo")
        _output, events = await stream.await_output()  # nothing was sent yet
        await stream.input_stream.send(part(sdk, "zwö".encode()[:3], data_type="UTF8", completion_state="PARTIAL"))
        await stream.input_stream.send(part(sdk, "zwö".encode()[3:], data_type="UTF8", completion_state="COMPLETE"))
        first, second = await events.receive(), await events.receive()
        assert (first.value.bytes_ + second.value.bytes_).decode() == "zwö"
        assert [first.value.completion_state, second.value.completion_state] == ["PARTIAL", "COMPLETE"]
        assert first.value.data_type == "UTF8"
        await stream.input_stream.close()
        assert await events.receive() is None
        await client.close()

    run(main)


def test_a_model_error_in_mid_stream_is_the_modeled_exception(server: Server, sdk: Any) -> None:
    async def main() -> None:
        client, stream = await open_stream(server, sdk, "failing")
        _output, events = await stream.await_output()
        await stream.input_stream.send(part(sdk, b"fine"))
        assert (await events.receive()).value.bytes_ == b"fine"
        await stream.input_stream.send(part(sdk, b"fail"))
        with pytest.raises(sdk.ModelStreamError) as raised:
            await events.receive()
        assert raised.value.message == "the part said fail"
        assert raised.value.error_code == "SaidFail"
        await client.close()

    run(main)


def test_an_unknown_endpoint_is_refused_at_once(server: Server, sdk: Any) -> None:
    async def main() -> None:
        client, stream = await open_stream(server, sdk, "nobody")
        with pytest.raises(sdk.InputValidationError, match="no model"):
            await stream.await_output()
        await client.close()

    run(main)
