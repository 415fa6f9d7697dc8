"""langchain-aws's SagemakerEndpoint and ChatSagemakerEndpoint, unmodified: whole answers, and streams as their line iterators
read them."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.interop.runtime import KEY, REGION, SECRET
from tests.interop.served_text import PATIENCE, tell, twenty_at_once, within_patience
from tests.interop.servers import Server

pytestmark = [
    pytest.mark.usefixtures("langchain"),  # before any server: where it is absent, none need start
    pytest.mark.filterwarnings("default"),  # its own
]


@pytest.fixture(scope="module")
def langchain(needs: Callable[[str, str], Any]) -> Any:
    return needs("langchain-aws", "langchain_aws.llms.sagemaker_endpoint")


Endpoint = Callable[..., Any]


@pytest.fixture(scope="module")
def broken(needs: Callable[[str, str], Any]) -> Any:
    """The exception of boto3 for a stream that ends with an error."""
    return needs("langchain-aws", "botocore.exceptions").EventStreamError


@pytest.fixture
def endpoint(langchain: Any, needs: Callable[[str, str], Any], text_server: Server) -> Endpoint:
    """endpoint(model, streaming, ...) is a SagemakerEndpoint; further arguments are parameters of the generation. Its content
    handler is the one that users of LMI write."""
    config = needs("langchain-aws", "botocore.config").Config(retries={"total_max_attempts": 1}, read_timeout=PATIENCE)

    class Handler(langchain.LLMContentHandler):  # type: ignore[misc]  # its module has no types here
        content_type = accepts = "application/json"

        def __init__(self, streaming: bool) -> None:
            self._streaming = streaming

        def transform_input(self, prompt: str, model_kwargs: dict[str, Any]) -> bytes:
            return json.dumps({"inputs": prompt, "parameters": model_kwargs, "stream": self._streaming}).encode()

        def transform_output(self, output: Any) -> str:
            answer = json.loads(output if isinstance(output, bytes) else output.read())
            return str(answer["token"]["text"] if "token" in answer else answer["generated_text"])

    def endpoint(model: str, streaming: bool, **parameters: Any) -> Any:
        return langchain.SagemakerEndpoint(
            endpoint_name=model,
            region_name=REGION,
            endpoint_url=text_server.url,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            config=config,
            content_handler=Handler(streaming),
            streaming=streaming,
            model_kwargs=parameters,
        )

    return endpoint


@pytest.fixture(scope="module")
def chats(needs: Callable[[str, str], Any]) -> Any:
    return needs("langchain-aws", "langchain_aws.chat_models.sagemaker_endpoint")


@pytest.fixture
def chat_endpoint(chats: Any, endpoint: Endpoint, needs: Callable[[str, str], Any]) -> Endpoint:
    """Makes a ChatSagemakerEndpoint, like `endpoint`. It must be given its client if the service is not AWS's."""
    client = endpoint("any", False).client
    message = needs("langchain-aws", "langchain_core.messages").AIMessage

    class Handler(chats.ChatModelContentHandler):  # type: ignore[misc]  # its module has no types here
        content_type = accepts = "application/json"

        def transform_input(self, prompt: list[dict[str, Any]], model_kwargs: dict[str, Any]) -> bytes:
            return json.dumps({"messages": prompt, **model_kwargs}).encode()

        def transform_output(self, output: Any) -> Any:
            answer = json.loads(output if isinstance(output, bytes) else output.read())
            (choice,) = answer["choices"]
            said = choice["delta"] if "delta" in choice else choice["message"]
            return message(content=said.get("content") or "")

    def make(model: str, **parameters: Any) -> Any:
        return chats.ChatSagemakerEndpoint(
            client=client, region_name=REGION, endpoint_name=model, content_handler=Handler(), model_kwargs=parameters
        )

    return make


@pytest.mark.by_default
def test_a_whole_answer(endpoint: Endpoint) -> None:
    assert endpoint("counted", False, max_new_tokens=3).invoke("hello") == " 0 1 2"


def test_a_stream_is_its_lines(endpoint: Endpoint) -> None:
    model = endpoint("counted", True, max_new_tokens=3)
    assert within_patience(lambda: list(model.stream("hello"))) == [" 0", " 1", " 2"]


def test_a_streaming_endpoint_invoked_is_the_whole_text(endpoint: Endpoint) -> None:
    assert within_patience(lambda: endpoint("counted", True, max_new_tokens=3).invoke("hello")) == " 0 1 2"


def test_the_librarys_model_says_the_same_in_both_ways(endpoint: Endpoint) -> None:
    whole = endpoint("lm", False, max_new_tokens=20).invoke("Return the")
    assert whole.strip()
    streaming = endpoint("lm", True, max_new_tokens=20)
    assert "".join(within_patience(lambda: list(streaming.stream("Return the")))) == whole


def test_every_parameter_reaches_the_model(endpoint: Endpoint) -> None:
    given = {
        "do_sample": True, "seed": 7, "temperature": 0.5, "repetition_penalty": 1.5, "top_k": 3, "top_p": 0.5,
        "max_new_tokens": 9, "stop_sequences": ["END"], "min_p": 0.25, "presence_penalty": 0.5, "ignore_eos_token": True,
    }  # fmt: skip
    seen = json.loads(endpoint("told", False, **given).invoke("hello"))
    assert {name: seen[name] for name in given} == given


def test_a_chat(chat_endpoint: Endpoint) -> None:
    answer = chat_endpoint("counted", max_tokens=3).invoke([("system", "Be brief."), ("user", "hello")])
    assert answer.content == " 0 1 2"


def test_a_chat_in_a_stream_of_lmis_lines(chat_endpoint: Endpoint) -> None:
    model = chat_endpoint("chat-counted", max_tokens=3)
    pieces = within_patience(lambda: list(model.stream([("user", "hello")])))
    assert [piece.content for piece in pieces if piece.content] == [" 0", " 1", " 2"]


def test_a_chat_that_fails_in_a_stream_ends_the_iteration_with_an_exception(
    chat_endpoint: Endpoint, broken: type[Exception]
) -> None:
    pieces: list[str] = []

    def read() -> None:
        for piece in chat_endpoint("chat-failing").stream([("user", "hello")]):
            pieces.append(piece.content)

    with pytest.raises(broken, match="the text ran dry"):
        within_patience(read)
    assert pieces == [" 0", " 1"]


@pytest.mark.parametrize("model", ["failing", "crashing"])
def test_a_model_that_fails_in_a_stream_ends_the_iteration_with_an_exception(
    endpoint: Endpoint, broken: type[Exception], model: str
) -> None:
    pieces: list[str] = []

    def read() -> None:
        for piece in endpoint(model, True).stream("hello"):
            pieces.append(piece)

    with pytest.raises(broken, match="ModelStreamError"):
        within_patience(read)
    assert pieces == [" 0", " 1"]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_bad_parameter_is_a_model_error_that_names_it(endpoint: Endpoint, streaming: bool) -> None:
    model = endpoint("counted", streaming, temperature=-1)
    with pytest.raises(model.client.exceptions.ModelError, match="temperature") as caught:
        within_patience(lambda: model.invoke("hello"))
    assert caught.value.response["OriginalStatusCode"] == 424


def test_nineteen_requests_do_not_notice_a_bad_one(endpoint: Endpoint, text_server: Server) -> None:
    good, wrong = endpoint("met", True), endpoint("met", True, top_p=2)

    def bad() -> None:
        with pytest.raises(wrong.client.exceptions.ModelError):
            wrong.invoke("hello")

    twenty_at_once(text_server.url, "met-langchain", lambda prompt: "".join(good.stream(prompt)), bad)


def test_a_caller_that_drops_the_stream_stops_the_model(endpoint: Endpoint, text_server: Server) -> None:
    pieces = endpoint("stepped", True, max_new_tokens=9).stream("left")
    assert next(pieces) == " 0"
    pieces.close()
    del pieces
    gc.collect()  # the connection ends with the response, to which the library gives nobody a handle
    tell(text_server.url, "wait left:cancelled")


def test_a_model_that_is_slow_to_stop_holds_up_nobody(endpoint: Endpoint, text_server: Server) -> None:
    pieces = endpoint("stubborn", True).stream("slow")
    assert next(pieces) == " 0"
    pieces.close()
    del pieces
    gc.collect()
    tell(text_server.url, "wait slow:stopping")
    assert endpoint("counted", False, max_new_tokens=2).invoke("hello") == " 0 1"
    tell(text_server.url, "set slow:let go")
    tell(text_server.url, "wait slow:gone")
