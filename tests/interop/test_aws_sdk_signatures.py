"""Signature Version 4 as the AWS SDK for Python signs it: what is refused, and what the SDK shows of that."""

import datetime
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.interop.aws import QUIET, Servers, client, run
from tests.interop.servers import Server

pytestmark = QUIET


@pytest.fixture
def verifying(sdk: Any, aws_servers: Servers) -> Server:
    """The server that verifies signatures."""
    return aws_servers(True)


@pytest.fixture
def call_error(needs: Callable[[str, str], Any]) -> Any:
    """The SDK's exception for an HTTP error that no operation models: it shows status and name, and drops the text."""
    return needs("aws-sdk", "smithy_core.exceptions").CallError


@pytest.fixture
def event_error(needs: Callable[[str, str], Any]) -> Any:
    """The SDK's exception for an error in the stream that no operation models: it shows name and text."""
    return needs("aws-sdk", "smithy_aws_event_stream.exceptions").UnmodeledEventError


@pytest.fixture
def signers(needs: Callable[[str, str], Any]) -> Any:
    """The SDK's module that signs."""
    return needs("aws-sdk", "aws_sdk_signers.signers")


IDENTITIES = [
    ({"secret": "another"}, "InvalidSignatureException"),
    ({"key": "AKIDNOBODY"}, "UnrecognizedClientException"),
    ({"region": "eu-central-1"}, "InvalidSignatureException"),
]


@pytest.mark.parametrize(("identity", "code"), IDENTITIES)
def test_a_request_signed_by_another_is_refused_at_once(
    verifying: Server, call_error: Any, identity: dict[str, str], code: str
) -> None:
    async def story() -> None:
        async with client(verifying, **identity) as aws:
            stream = await aws.call("echo")
            with pytest.raises(call_error) as raised:
                await stream.head()
            assert "status: 403" in raised.value.message
            assert raised.value.message.endswith(f"#{code}")
            assert raised.value.fault == "client"

    run(story())


@pytest.mark.parametrize("identity", [identity for identity, _ in IDENTITIES])
def test_where_signatures_are_not_looked_at_any_identity_will_do(
    sdk: Any, aws_servers: Servers, identity: dict[str, str]
) -> None:
    async def story() -> None:
        async with client(aws_servers(False), **identity) as aws:
            assert await aws.ask("echo", b"hello") == [b"hello"]

    run(story())


def test_a_client_whose_clock_is_off_is_refused_at_once(
    verifying: Server, call_error: Any, signers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "Late":
            return super().now(tz) - datetime.timedelta(minutes=10)

    late = SimpleNamespace(datetime=Late, UTC=datetime.UTC, timezone=datetime.timezone, timedelta=datetime.timedelta)
    monkeypatch.setattr(signers, "datetime", late)

    async def story() -> None:
        async with client(verifying) as aws:
            stream = await aws.call("echo")
            with pytest.raises(call_error, match="InvalidSignatureException"):
                await stream.head()

    run(story())


@pytest.fixture
def forge(signers: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """forge(n): the nth event signed from here on carries another signature than its own."""
    sign = signers.AsyncEventSigner._sign_event

    def at(which: int) -> None:
        signed = itertools.count(1)

        async def forged(self: Any, **what: Any) -> bytes:
            signature: bytes = await sign(self, **what)
            return bytes([signature[0] ^ 1]) + signature[1:] if next(signed) == which else signature

        monkeypatch.setattr(signers.AsyncEventSigner, "_sign_event", forged)

    return at


@pytest.mark.parametrize("which", [1, 3])
def test_an_event_with_another_signature_ends_the_stream_after_the_parts_before_it(
    verifying: Server, event_error: Any, forge: Callable[[int], None], which: int
) -> None:
    async def story() -> None:
        async with client(verifying) as aws:
            stream = await aws.call("echo")
            forge(which)
            for number in range(1, which):
                await stream.send(b"%d" % number)
                assert await stream.answer() == b"%d" % number
            await stream.send(b"forged")
            with pytest.raises(event_error, match=r"InvalidSignatureException.*:chunk-signature"):
                await stream.receive()
            assert await stream.receive() is None
            assert await aws.ask("echo", b"and then") == [b"and then"]

    run(story())


def test_an_end_of_input_with_another_signature_is_no_end(
    verifying: Server, event_error: Any, forge: Callable[[int], None]
) -> None:
    async def story() -> None:
        async with client(verifying) as aws:
            forge(2)
            with pytest.raises(event_error, match="InvalidSignatureException"):
                await aws.ask("listener", b"one")

    run(story())


def test_an_event_that_is_left_out_breaks_the_chain(verifying: Server, event_error: Any) -> None:
    async def story() -> None:
        async with client(verifying) as aws:
            stream = await aws.call("echo")
            await stream.send(b"one")
            assert await stream.answer() == b"one"
            await stream.lose(b"two")
            await stream.send(b"three")
            with pytest.raises(event_error, match="InvalidSignatureException"):
                await stream.receive()

    run(story())
