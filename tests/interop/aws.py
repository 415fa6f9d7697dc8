"""The AWS SDK for Python as the tests use it, and the server they use it on, which verifies signatures or does not.

The SDK needs asyncio, awscrt, and TLS with ALPN; each test is a small asyncio program.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, final

import pytest

from tests.interop import servers
from tests.interop.servers import Server

QUIET = pytest.mark.filterwarnings("default", "ignore::pytest.PytestUnraisableExceptionWarning")
"""The SDK's own warnings are not ours; and its writers complain when a stream has ended before them."""

KEY, SECRET, REGION = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "us-west-2"
BLOCK = 4096
"""Bytes of zeros in each part of the model `flood`, behind its number."""
STREAMS = 100
"""That a connection may have open at once."""

_OWN = ("ledger", "flood", "held", "busy", "told", "listener", "hasty", "zeros", "failing", "guarded")
_MODELS = {
    "echo": "models.library.echo:Echo",
    "lm": "models.library.lm:LanguageModel.load",
    **{name: f"served_aws:{name}" for name in _OWN},
    "brief": "served_aws:held",
    "single": "served_aws:held",
    "blue": "served_aws:told",
    "green": "served_aws:told",
}
_MORE = {"echo": "capacity = 200", "brief": "timeout = 3", "single": "capacity = 1\nqueue = 0"}
_SPLIT = [
    '[endpoints.split.variants.Blue]\nmodel = "blue"\nweight = 3',
    '[endpoints.split.variants.Green]\nmodel = "green"',
]


class Servers(Protocol):
    """Gives the server with these lines of configuration."""

    def __call__(self, signed: bool, *settings: str) -> Server: ...


def serving(
    folder: Path, tls: Path, signed: bool, settings: Iterable[str] = (), *, status: int = 0
) -> AbstractContextManager[Server]:
    """A server with the models of served_aws.py. `signed`: it verifies signatures, of one key in one region. `status` is
    what it ends with."""
    lines = [*settings, f"http2 = {{ streams = {STREAMS} }}"]
    if signed:
        credentials = folder / "credentials"
        credentials.write_text(f"[test]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
        lines.append("access = { unsigned = true }")  # tests ask other routes too
        lines.append(f'sagemaker = {{ sigv4 = {{ credentials = "{credentials}", region = "{REGION}" }} }}')
    for name, table in zip(_MODELS, servers.tables(_MODELS), strict=True):
        lines += [table, _MORE.get(name, "")]
    return servers.serving(folder, "served_aws.py", [*lines, *_SPLIT], tls, status=status)


def _bytes(part: Any) -> bytes:
    return part.bytes_ or b""  # the SDK has None for an empty part


class _Nowhere:
    async def write(self, data: bytes) -> None:
        """As the SDK's own, and forgets it."""


@final
class Stream:
    """A session of the SDK. Exceptions of the SDK pass through."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._events: Any = None

    async def head(self) -> Any:
        """Waits for the head of the answer and returns it. Raises the modeled error if there is none."""
        output, self._events = await self._stream.await_output()
        return output

    async def send(self, data: bytes, **members: str) -> None:
        models = importlib.import_module("aws_sdk_sagemaker_runtime_http2.models")
        part = models.RequestPayloadPart(bytes_=data, **members)
        await self._stream.input_stream.send(models.RequestStreamEventPayloadPart(value=part))

    async def lose(self, data: bytes) -> None:
        """The part is signed, and never arrives."""
        publisher = self._stream.input_stream
        writer, publisher._writer = publisher._writer, _Nowhere()
        await self.send(data)
        publisher._writer = writer

    async def receive(self) -> Any:
        """The next part, None at the end."""
        if self._events is None:
            await self.head()
        event = await self._events.receive()
        return None if event is None else event.value

    async def answer(self) -> bytes:
        """The bytes of the next part, which there must be."""
        part = await self.receive()
        assert part is not None, "the stream has ended"
        return _bytes(part)

    async def end(self) -> None:
        """The end of input."""
        await self._stream.input_stream.close()

    async def rest(self) -> list[bytes]:
        """The bytes of all parts to come."""
        parts = []
        while (part := await self.receive()) is not None:
            parts.append(_bytes(part))
        return parts


@final
class Client:
    """The SDK's client."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def call(self, endpoint: str, **members: str) -> Stream:
        models = importlib.import_module("aws_sdk_sagemaker_runtime_http2.models")
        request = models.InvokeEndpointWithBidirectionalStreamInput(endpoint_name=endpoint, **members)
        return Stream(await self._client.invoke_endpoint_with_bidirectional_stream(request))

    async def ask(self, endpoint: str, *parts: bytes, **members: str) -> list[bytes]:
        """A whole session: the parts, the end of input, and all that comes back."""
        stream = await self.call(endpoint, **members)
        for data in parts:
            await stream.send(data)
        await stream.end()
        return await stream.rest()

    async def talk(self, endpoint: str, *parts: bytes) -> list[bytes]:
        """A whole session in which each part is answered before more is said, whatever time that takes."""
        stream, answers = await self.call(endpoint), []
        for data in parts:
            await stream.send(data)
            answers.append(await stream.answer())
        await stream.end()
        return [*answers, *await stream.rest()]


@asynccontextmanager
async def client(server: Server, *, key: str = KEY, secret: str = SECRET, region: str = REGION) -> AsyncIterator[Client]:
    """A client of that server, with an identity."""
    sdk = importlib.import_module("aws_sdk_sagemaker_runtime_http2.client")
    config = importlib.import_module("aws_sdk_sagemaker_runtime_http2.config")
    transport = importlib.import_module("smithy_http.aio.crt").AWSCRTHTTPClient
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SSL_CERT_FILE", str(server.ca))  # awscrt reads it when a transport is made
        made = sdk.AsyncSageMakerRuntimeHTTP2Client(
            config=await config.AsyncSageMakerRuntimeHTTP2Config.resolve(
                endpoint_uri=f"https://localhost:{server.tls_port}",
                region=region,
                aws_access_key_id=key,
                aws_secret_access_key=secret,
                transport=transport(),
            )
        )
        try:
            yield Client(made)
        finally:
            await made.close()


def run(story: Coroutine[Any, Any, None]) -> None:
    """Plays it; two minutes are a hang."""

    async def play() -> None:
        # a stream that the server has ended while the SDK still writes leaves a task whose error nobody there looks at
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        async with asyncio.timeout(120):
            await story

    asyncio.run(play())
    gc.collect()  # so that warnings of the SDK's tasks count for this test
