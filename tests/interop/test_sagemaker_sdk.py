"""The SageMaker SDK's iterators over boto3's response stream, unmodified: lines and bytes, failures, clients that leave."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.interop.runtime import KEY, REGION, SECRET
from tests.interop.served_text import PATIENCE, tell, twenty_at_once, within_patience
from tests.interop.servers import Server

pytestmark = [
    pytest.mark.usefixtures("iterators"),  # before any server: where it is absent, none need start
    # its own, but for what its import says of version 3
    pytest.mark.filterwarnings("default", "ignore:You are using the SageMaker Python SDK v2"),
]


@pytest.fixture(scope="module")
def iterators(needs: Callable[[str, str], Any]) -> Any:
    return needs("sagemaker", "sagemaker.iterators")


@pytest.fixture(scope="module")
def broken(needs: Callable[[str, str], Any]) -> Any:
    """The exception of boto3 for a stream that ends with an error."""
    return needs("sagemaker", "botocore.exceptions").EventStreamError


@pytest.fixture
def client(needs: Callable[[str, str], Any], text_server: Server) -> Iterator[Any]:
    """The client of boto3 that the SDK is given."""
    boto3, config = needs("sagemaker", "boto3"), needs("sagemaker", "botocore.config").Config
    once = config(retries={"total_max_attempts": 1}, read_timeout=PATIENCE, max_pool_connections=32)
    session = boto3.session.Session(aws_access_key_id=KEY, aws_secret_access_key=SECRET, region_name=REGION)
    client = session.client("sagemaker-runtime", endpoint_url=text_server.url, config=once)
    yield client
    client.close()


def invoke(client: Any, model: str, prompt: str, **parameters: Any) -> Any:
    """The event stream of an answer in JSON lines."""
    body = json.dumps({"inputs": prompt, "parameters": parameters, "stream": True})
    answer = client.invoke_endpoint_with_response_stream(EndpointName=model, Body=body, ContentType="application/json")
    return answer["Body"]


def texts(lines: Any) -> list[str]:
    return [json.loads(line)["token"]["text"] for line in lines]


@pytest.mark.by_default
def test_each_line_is_a_token(iterators: Any, client: Any) -> None:
    lines = within_patience(lambda: list(iterators.LineIterator(invoke(client, "counted", "hello", max_new_tokens=3))))
    assert texts(lines) == [" 0", " 1", " 2"]
    assert json.loads(lines[-1])["generated_text"] == " 0 1 2"


def test_the_bytes_are_the_lines(iterators: Any, client: Any) -> None:
    parts = within_patience(lambda: list(iterators.ByteIterator(invoke(client, "counted", "hello", max_new_tokens=3))))
    assert texts(b"".join(parts).splitlines()) == [" 0", " 1", " 2"]
    assert b"".join(parts).endswith(b"\n")


def test_a_dynamic_batch_streams_the_lines_that_the_iterator_was_written_for(iterators: Any, client: Any) -> None:
    body = json.dumps({"inputs": ["one two", "three"]})
    answer = client.invoke_endpoint_with_response_stream(
        EndpointName="dynamic-stream", Body=body, ContentType="application/json"
    )
    lines = within_patience(lambda: list(iterators.LineIterator(answer["Body"])))
    steps = [json.loads(line)["outputs"] for line in lines]
    assert ["".join(step[i] for step in steps) for i in (0, 1)] == [" one two", " three"]


def test_the_librarys_model_streams(iterators: Any, client: Any) -> None:
    def read() -> list[bytes]:
        return list(iterators.LineIterator(invoke(client, "lm", "Return the", max_new_tokens=20, details=True)))

    lines = within_patience(read)
    last = json.loads(lines[-1])
    assert "".join(texts(lines)) == last["generated_text"]
    assert last["details"]["generated_tokens"] == len(lines)


@pytest.mark.parametrize("model", ["failing", "crashing"])
def test_a_model_that_fails_in_a_stream_ends_the_iteration_with_an_exception(
    iterators: Any, client: Any, broken: type[Exception], model: str
) -> None:
    lines: list[bytes] = []

    def read() -> None:
        for line in iterators.LineIterator(invoke(client, model, "hello")):
            lines.append(line)

    with pytest.raises(broken, match="ModelStreamError"):
        within_patience(read)
    assert texts(lines) == [" 0", " 1"]


def test_a_bad_parameter_is_no_stream_at_all(client: Any) -> None:
    with pytest.raises(client.exceptions.ModelError, match="temperature") as caught:
        invoke(client, "counted", "hello", temperature=-1)
    assert caught.value.response["OriginalStatusCode"] == 424


def test_nineteen_requests_do_not_notice_a_bad_one(iterators: Any, client: Any, text_server: Server) -> None:
    def good(prompt: str) -> str:
        return "".join(texts(iterators.LineIterator(invoke(client, "met", prompt))))

    def bad() -> None:
        with pytest.raises(client.exceptions.ModelError):
            invoke(client, "met", "hello", top_p=2)

    twenty_at_once(text_server.url, "met-sagemaker", good, bad)


def test_a_client_that_closes_the_stream_stops_the_model(iterators: Any, client: Any, text_server: Server) -> None:
    stream = invoke(client, "stepped", "left", max_new_tokens=9)
    assert texts([next(iterators.LineIterator(stream))]) == [" 0"]
    stream.close()
    tell(text_server.url, "wait left:cancelled")


def test_a_model_that_is_slow_to_stop_holds_up_nobody(iterators: Any, client: Any, text_server: Server) -> None:
    stream = invoke(client, "stubborn", "slow")
    assert texts([next(iterators.LineIterator(stream))]) == [" 0"]
    stream.close()
    tell(text_server.url, "wait slow:stopping")
    lines = within_patience(lambda: list(iterators.LineIterator(invoke(client, "counted", "hello", max_new_tokens=2))))
    assert texts(lines) == [" 0", " 1"]
    tell(text_server.url, "set slow:let go")
    tell(text_server.url, "wait slow:gone")
