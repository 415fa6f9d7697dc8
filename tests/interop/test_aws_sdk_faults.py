"""Errors as the AWS SDK for Python shows them: modeled errors, at once, with their members.

"At once" is: while the client's input is open and nothing was sent.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.interop.aws import QUIET, Servers, client, run, serving
from tests.interop.servers import Server

pytestmark = QUIET


def test_a_model_error_in_mid_stream_is_the_modeled_exception_after_all_parts_before_it(service: Server, sdk: Any) -> None:
    async def story() -> None:
        async with client(service) as aws:
            stream = await aws.call("failing")
            for data in (b"one", b"two", b"fail"):
                await stream.send(data)
            assert [await stream.answer(), await stream.answer()] == [b"one", b"two"]
            with pytest.raises(sdk.ModelStreamError) as raised:
                await stream.receive()
            assert (raised.value.message, raised.value.error_code) == ("the part said fail", "SaidFail")
            assert await stream.receive() is None

    run(story())


def test_a_crash_of_the_model_shows_an_id_and_not_its_text(service: Server, sdk: Any) -> None:
    async def story() -> None:
        async with client(service) as aws:
            stream = await aws.call("failing")
            await stream.send(b"crash")
            with pytest.raises(sdk.ModelStreamError, match=r"incident [0-9a-f]{12}") as raised:
                await stream.receive()
            assert "secret" not in raised.value.message

    run(story())


BAD: list[tuple[str, dict[str, str], str]] = [
    ("nobody", {}, "no endpoint 'nobody'"),
    ("not_a_name", {}, "EndpointName must match"),
    ("e" * 64, {}, "EndpointName has at most 63"),
    ("echo", {"target_variant": "Purple"}, "no variant 'Purple'"),
    ("echo", {"target_variant": "-blue"}, "TargetVariant must match"),
    ("echo", {"target_variant": "v" * 64}, "TargetVariant has at most 63"),
    ("echo", {"model_invocation_path": "/listen"}, "ModelInvocationPath must match"),
    ("echo", {"model_invocation_path": "v1//listen"}, "ModelInvocationPath must match"),
    ("echo", {"model_invocation_path": "p" * 101}, "ModelInvocationPath has at most 100"),
    ("echo", {"model_query_string": "?model=nova"}, "ModelQueryString must match"),
    ("echo", {"model_query_string": "model="}, "ModelQueryString must match"),
    ("echo", {"model_query_string": "model=%zz"}, "ModelQueryString must match"),
    ("echo", {"model_query_string": "q=" + "x" * 2047}, "ModelQueryString has at most 2048"),
]


def test_what_a_request_says_wrong_is_a_modeled_error_at_once_and_the_client_goes_on(service: Server, sdk: Any) -> None:
    async def story() -> None:
        async with client(service) as aws:
            for endpoint, members, text in BAD:
                stream = await aws.call(endpoint, **members)
                with pytest.raises(sdk.InputValidationError, match=text):
                    await stream.head()
                assert await aws.ask("echo", b"and then") == [b"and then"]

    run(story())


def test_a_refusal_before_the_head_is_the_models_own_status_and_text_at_once(service: Server, sdk: Any) -> None:
    async def story() -> None:
        async with client(service) as aws:
            stream = await aws.call("guarded", model_query_string="word=sesame")
            with pytest.raises(sdk.ModelError) as raised:
                await stream.head()
            error = raised.value
            assert (error.original_status_code, error.original_message) == (403, "the word is wrong")
            assert error.error_code == "WrongWord"
            assert await aws.ask("guarded", b"in", model_query_string="word=open") == [b"in"]

    run(story())


def test_a_model_without_a_free_slot_is_a_service_that_is_unavailable_at_once(service: Server, sdk: Any) -> None:
    async def story() -> None:
        async with client(service) as aws:
            first = await aws.call("single")
            await first.head()
            second = await aws.call("single")
            with pytest.raises(sdk.ServiceUnavailableError):
                await second.head()

    run(story())


def test_a_models_time_limit_is_a_model_stream_error(service: Server, sdk: Any) -> None:
    async def story() -> None:
        async with client(service) as aws:
            stream = await aws.call("brief")
            await stream.send(b"brief")
            assert await stream.answer() == b"here"
            with pytest.raises(sdk.ModelStreamError, match=r"models\.brief\.timeout") as raised:
                await stream.receive()
            assert raised.value.error_code == "ModelInvocationTimeExceeded"

    run(story())


def test_the_limits_of_silence_and_of_a_session_are_model_stream_errors(
    sdk: Any, signed: bool, aws_servers: Servers
) -> None:
    limits = "bidi = { idle_timeout = 2, session_timeout = 5 }"

    async def story() -> None:
        async with client(aws_servers(signed, limits)) as aws:
            silent, busy = await aws.call("held"), await aws.call("busy")
            with pytest.raises(sdk.ModelStreamError, match=r"bidi\.idle_timeout") as raised:
                await silent.rest()
            assert raised.value.error_code == "ModelInvocationTimeExceeded"
            with pytest.raises(sdk.ModelStreamError, match=r"bidi\.session_timeout") as raised:
                await busy.rest()
            assert raised.value.error_code == "ModelInvocationTimeExceeded"

    run(story())


def test_a_drain_in_mid_session_is_the_services_failure_and_not_the_models(sdk: Any, signed: bool, tmp_path: Path) -> None:
    async def story(server: Server) -> None:
        async with client(server) as aws:
            stream = await aws.call("held")
            await stream.send(b"drained")
            assert await stream.answer() == b"here"
            server.terminate()
            with pytest.raises(sdk.InternalStreamFailure, match="shutting down"):
                await stream.receive()

    with serving(tmp_path, tmp_path / "tls", signed, ["drain = { timeout = 0.2 }"], status=3) as server:
        run(story(server))
