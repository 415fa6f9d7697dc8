"""boto3's sagemaker-runtime client, unmodified: every family of model, headers, variants, many models, errors, streams."""

from __future__ import annotations

import io
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.interop.runtime import FIT, KEY, NEED, PATIENCE, REGION, SECRET, KiB, MiB, Runtime, running, table

pytestmark = [
    pytest.mark.usefixtures("connect"),  # before any server: where boto3 is absent, none need start
    pytest.mark.filterwarnings("default"),  # botocore's own
]

JSON = "application/json"
BINARY_JSON = "application/vnd.sagemaker-triton.binary+json;json-header-size="

Connect = Callable[..., Any]


@pytest.fixture(scope="session")
def connect(needs: Callable[[str, str], Any]) -> Connect:
    """connect(server) is a client that tries once, on HTTP unless `scheme` says otherwise."""
    boto3 = needs("boto3", "boto3")
    config = needs("boto3", "botocore.config").Config
    session = boto3.session.Session(aws_access_key_id=KEY, aws_secret_access_key=SECRET, region_name=REGION)

    def connect(server: Runtime, scheme: str = "http", *, settings: dict[str, Any] | None = None, **more: Any) -> Any:
        verify = str(server.ca) if scheme == "https" else None
        once = config(retries={"total_max_attempts": 1}, read_timeout=PATIENCE, **(settings or {}))
        return session.client("sagemaker-runtime", endpoint_url=server.urls[scheme], verify=verify, config=once, **more)

    return connect


@pytest.fixture(scope="session")
def client(connect: Connect, runtime: Runtime) -> Iterator[Any]:
    client = connect(runtime, settings={"max_pool_connections": 32})
    yield client
    client.close()


def text(inputs: str, **parameters: Any) -> dict[str, Any]:
    """The body of a call of a text model. Streaming is the client's choice by its operation, and the schema's too."""
    return {"Body": json.dumps({"inputs": inputs, "parameters": parameters}), "ContentType": JSON}


def streamed(inputs: str, **parameters: Any) -> dict[str, Any]:
    body = {"inputs": inputs, "parameters": parameters, "stream": True, "output_formatter": "jsonlines"}
    return {"Body": json.dumps(body), "ContentType": JSON}


def body(answer: dict[str, Any]) -> bytes:
    with closing(answer["Body"]) as stream:
        return bytes(stream.read())


def switch(client: Any, words: str) -> None:
    """`set NAME`, or `wait NAME`, which returns when the server's side has come so far."""
    assert body(client.invoke_endpoint(EndpointName="switch", Body=words)) == words.encode()


def refused(client: Any, name: str, **call: Any) -> dict[str, Any]:
    """The response of a call that has to raise the client's own exception of that name."""
    with pytest.raises(getattr(client.exceptions, name)) as caught:
        client.invoke_endpoint(**{"Body": b"hello", **call})
    response: dict[str, Any] = caught.value.response
    assert response["Error"]["Code"] == name
    return response


# ---- every family of model


@pytest.mark.by_default
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_text_model_answers_in_the_schema_of_lmi(runtime: Runtime, connect: Connect, scheme: str) -> None:
    client = connect(runtime, scheme)
    answer = client.invoke_endpoint(EndpointName="lm", **text("Return the", max_new_tokens=3))
    assert answer["ContentType"] == JSON
    assert answer["InvokedProductionVariant"] == "AllTraffic"
    assert answer["ResponseMetadata"]["HTTPHeaders"]["x-amzn-requestid"]
    assert json.loads(body(answer))["generated_text"].strip()
    lines = body(client.invoke_endpoint(EndpointName="lm", **streamed("Return the", max_new_tokens=3))).splitlines()
    assert len(lines) == 3
    assert json.loads(lines[-1])["generated_text"].strip()
    client.close()


def test_a_tensor_model_answers_json_with_json(client: Any) -> None:
    tensors = [{"name": f"INPUT{n}", "datatype": "INT32", "shape": [1, 3], "data": [5, 6, 7]} for n in range(2)]
    answer = client.invoke_endpoint(EndpointName="add-sub", Body=json.dumps({"inputs": tensors}), ContentType=JSON)
    assert answer["ContentType"] == JSON
    outputs = {t["name"]: t["data"] for t in json.loads(body(answer))["outputs"]}
    assert outputs == {"OUTPUT0": [10, 12, 14], "OUTPUT1": [0, 0, 0]}


def test_a_tensor_model_answers_tritons_binary_form_as_tritons_examples_read_it(
    client: Any, needs: Callable[[str, str], Any]
) -> None:
    triton = needs("tritonclient", "tritonclient.http")
    a, b = np.arange(16, dtype=np.float32).reshape(1, 16), np.full((1, 16), 3, np.float32)
    inputs = []
    for name, array in (("INPUT0", a), ("INPUT1", b)):
        inputs.append(triton.InferInput(name, list(array.shape), "FP32"))
        inputs[-1].set_data_from_numpy(array, binary_data=True)
    outputs = [triton.InferRequestedOutput(f"OUTPUT{n}", binary_data=True) for n in range(2)]
    request, length = triton.InferenceServerClient.generate_request_body(inputs, outputs=outputs)
    answer = client.invoke_endpoint(EndpointName="add-sub", Body=request, ContentType=f"{BINARY_JSON}{length}")
    assert answer["ContentType"].startswith(BINARY_JSON)
    length = int(answer["ContentType"][len(BINARY_JSON) :])
    result = triton.InferenceServerClient.parse_response_body(body(answer), header_length=length)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), a + b)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), a - b)


@pytest.mark.parametrize("length", ["", "5000", "-1", "nine", "3;json-header-size=4"])
def test_a_binary_body_whose_json_has_no_honest_length_is_refused(client: Any, length: str) -> None:
    response = refused(client, "ModelError", EndpointName="add-sub", ContentType=f"{BINARY_JSON}{length}")
    assert response["OriginalStatusCode"] == 400
    assert "json-header-size" in response["OriginalMessage"]


def test_a_model_of_parts_answers_bytes_and_writes_its_own_head(client: Any) -> None:
    head = {
        "content-type": "image/x-portable; v=1",
        "x-amzn-sagemaker-custom-attributes": "trace=7; spent=3",
        "x-amzn-sagemaker-new-session-id": "session-1; Expires=2030-01-02T03:04:05Z",
        "x-amzn-sagemaker-closed-session-id": "session-0",
        "x-not-of-this-operation": "1",
    }
    answer = client.invoke_endpoint(EndpointName="replying", Body=json.dumps(head))
    assert answer["ContentType"] == "image/x-portable; v=1"
    assert answer["CustomAttributes"] == "trace=7; spent=3"
    assert answer["NewSessionId"] == "session-1; Expires=2030-01-02T03:04:05Z"
    assert answer["ClosedSessionId"] == "session-0"
    assert "x-not-of-this-operation" not in answer["ResponseMetadata"]["HTTPHeaders"]
    assert body(answer) == bytes(range(256))


def test_a_head_that_the_service_could_not_carry_is_the_models_fault(client: Any) -> None:
    head = {"x-amzn-sagemaker-new-session-id": "two words"}
    response = refused(client, "ModelError", EndpointName="replying", Body=json.dumps(head))
    assert "x-amzn-sagemaker-new-session-id" in response["OriginalMessage"]


def test_what_the_caller_says_beside_the_body_is_the_models_to_see(client: Any) -> None:
    said = {
        "ContentType": "text/plain",
        "Accept": "application/x-thing",
        "CustomAttributes": "c000b4f9-df62-4c85-a0bf-7c525f9104a4;a=b",
        "InferenceId": "inference 1/2",
        "SessionId": "session-1",
        "TargetContainerHostname": "second-container",
        "EnableExplanations": "`a`>`0.8`",
    }
    headers = {
        "content-type": "text/plain",
        "accept": "application/x-thing",
        "x-amzn-sagemaker-custom-attributes": "c000b4f9-df62-4c85-a0bf-7c525f9104a4;a=b",
        "x-amzn-sagemaker-inference-id": "inference 1/2",
        "x-amzn-sagemaker-session-id": "session-1",
        "x-amzn-sagemaker-target-container-hostname": "second-container",
        "x-amzn-sagemaker-enable-explanations": "`a`>`0.8`",
    }
    seen = json.loads(body(client.invoke_endpoint(EndpointName="seen", Body=b"hello", **said)))
    assert (seen["kind"], seen["size"]) == ("UTF8", 5)
    assert headers.items() <= seen["headers"].items()
    assert json.loads(body(client.invoke_endpoint(EndpointName="seen", Body=b"")))["size"] == 0


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("CustomAttributes", "a" * 1025),
        ("InferenceId", "i" * 65),
        ("SessionId", "two words"),
        ("TargetContainerHostname", "under_score"),
        ("TargetVariant", "-"),
    ],
)
def test_a_member_that_breaks_its_pattern_is_a_validation_error_that_names_it(client: Any, member: str, value: str) -> None:
    response = refused(client, "ValidationError", EndpointName="echo", **{member: value})
    assert member in response["Error"]["Message"]


# ---- bodies


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_body_may_have_six_mebibytes_and_no_byte_more(runtime: Runtime, connect: Connect, scheme: str) -> None:
    client = connect(runtime, scheme)
    largest = np.random.default_rng(1).bytes(6 * MiB)
    assert body(client.invoke_endpoint(EndpointName="echo", Body=largest)) == largest
    for too_large in (largest + b"1", largest * 4):
        response = refused(client, "ValidationError", EndpointName="echo", Body=too_large)
        assert "sagemaker.body" in response["Error"]["Message"]
    assert body(client.invoke_endpoint(EndpointName="echo", Body=b"again")) == b"again"
    client.close()


class Unseekable(io.RawIOBase):
    """A source whose length nobody knows, so that the client sends chunks."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        return self._data.read(size)


def test_a_file_is_sent_as_it_is(client: Any, tmp_path: Path) -> None:
    data = np.random.default_rng(2).bytes(MiB)
    (tmp_path / "body").write_bytes(data)
    with (tmp_path / "body").open("rb") as file:
        assert body(client.invoke_endpoint(EndpointName="echo", Body=file)) == data


def test_a_body_of_unknown_length_arrives_whole_and_has_the_same_limit(runtime: Runtime, connect: Connect) -> None:
    from botocore import UNSIGNED

    client = connect(runtime, settings={"signature_version": UNSIGNED})
    data = np.random.default_rng(3).bytes(MiB)
    assert body(client.invoke_endpoint(EndpointName="echo", Body=Unseekable(data))) == data
    response = refused(client, "ValidationError", EndpointName="echo", Body=Unseekable(bytes(6 * MiB + 1)))
    assert "sagemaker.body" in response["Error"]["Message"]
    seen = json.loads(body(client.invoke_endpoint(EndpointName="seen", Body=Unseekable(b"hello"))))
    assert seen["size"] == 5
    assert "content-length" not in seen["headers"]  # it was sent in chunks indeed
    client.close()


def test_the_limit_on_bodies_is_a_setting(signed_runtime: Runtime, connect: Connect) -> None:
    client = connect(signed_runtime)
    assert len(body(client.invoke_endpoint(EndpointName="echo", Body=bytes(64 * KiB)))) == 64 * KiB
    response = refused(client, "ValidationError", EndpointName="echo", Body=bytes(64 * KiB + 1))
    assert "65536" in response["Error"]["Message"]
    client.close()


# ---- variants


def test_a_variant_is_chosen_by_name(client: Any) -> None:
    for variant, answer in (("blue", b"hello"), ("green", b"hello"), ("dark", None)):
        got = client.invoke_endpoint(EndpointName="split", TargetVariant=variant, Body=b"hello")
        assert got["InvokedProductionVariant"] == variant
        data = body(got)
        assert data == answer if answer else b"x-amzn-sagemaker-target-variant" in data


def test_of_a_hundred_calls_each_variant_gets_exactly_its_share(client: Any) -> None:
    with ThreadPoolExecutor(4) as pool:
        calls = pool.map(lambda n: client.invoke_endpoint(EndpointName="split", Body=b"%d" % n), range(100))
        assert Counter(call["InvokedProductionVariant"] for call in calls) == {"blue": 75, "green": 25}


def test_what_is_not_there_is_a_validation_error_that_says_what_is(client: Any) -> None:
    message = refused(client, "ValidationError", EndpointName="split", TargetVariant="red")["Error"]["Message"]
    assert "red" in message
    assert "blue, green, dark" in message
    assert "split" in refused(client, "ValidationError", EndpointName="nobody")["Error"]["Message"]
    assert "Target-Model" in refused(client, "ValidationError", EndpointName="echo", TargetModel="a")["Error"]["Message"]


# ---- many models


def rows(client: Any, target: str, index: int) -> list[int]:
    """A row of the table of a model in the folder."""
    tensor = {"name": "INDEX", "datatype": "INT64", "shape": [1], "data": [index]}
    call = {"Body": json.dumps({"inputs": [tensor]}), "ContentType": JSON}
    answer = client.invoke_endpoint(EndpointName="many", TargetModel=target, **call)
    data: list[int] = json.loads(body(answer))["outputs"][0]["data"]
    return data


def test_models_are_loaded_on_use_and_the_least_recently_used_leaves(runtime: Runtime, client: Any) -> None:
    for number in (0, 1, 2):
        assert rows(client, f"table-{number}", 5) == list(table(number)[5])
    assert runtime.loaded() == ["table-0", "table-1", "table-2"]
    rows(client, "table-0.tar.gz", 6)  # as the platform names it: the same model, used once more
    assert rows(client, "table-3", 7) == list(table(3)[7])
    assert runtime.loaded() == ["table-0", "table-2", "table-3"]
    assert rows(client, "table-1.tar.gz", 8) == list(table(1)[8])
    assert len(runtime.loaded()) == FIT


def test_a_target_may_be_in_a_folder_below(client: Any) -> None:
    answer = client.invoke_endpoint(EndpointName="many", TargetModel="sub/below", Body=b"hello")
    assert (body(answer), answer["InvokedProductionVariant"]) == (b"hello", "AllTraffic")


def test_concurrent_calls_take_turns_in_a_budget_that_holds_few(runtime: Runtime, client: Any) -> None:
    def call(n: int) -> bool:
        return rows(client, f"table-{n % 6}", n) == list(table(n % 6)[n])

    with ThreadPoolExecutor(FIT) as pool:
        assert all(pool.map(call, range(60)))
    assert len(runtime.loaded()) == FIT


def test_concurrent_first_uses_share_one_load(runtime: Runtime, client: Any) -> None:
    together, name = threading.Barrier(9), "before-send.sagemaker-runtime.InvokeEndpoint"

    def first_use(n: int) -> bytes:
        return body(client.invoke_endpoint(EndpointName="many", TargetModel="slow", InferenceId=str(n), Body=b""))

    def meet(request: Any, **_: Any) -> None:
        if "X-Amzn-SageMaker-Inference-Id" in request.headers:
            together.wait(PATIENCE)

    client.meta.events.register(name, meet)
    try:
        with ThreadPoolExecutor(8) as pool:
            calls = [pool.submit(first_use, n) for n in range(8)]
            together.wait(PATIENCE)
            switch(client, "set loaded")
            assert {call.result(PATIENCE) for call in calls} == {b"1"}
    finally:
        client.meta.events.unregister(name, meet)


@pytest.mark.parametrize("target", ["../outside", "a/../../outside", "/etc", "link-out", "nobody", "table-0/rows.npy"])
def test_a_target_that_is_no_model_is_a_validation_error(runtime: Runtime, client: Any, target: str) -> None:
    before = runtime.loaded()
    message = refused(client, "ValidationError", EndpointName="many", TargetModel=target)["Error"]["Message"]
    assert message
    assert "too-large" not in message  # the error does not list other models
    assert runtime.loaded() == before


def test_an_endpoint_of_many_models_wants_to_know_which(client: Any) -> None:
    assert "Target-Model" in refused(client, "ValidationError", EndpointName="many")["Error"]["Message"]


def test_a_model_that_cannot_be_loaded_is_a_model_error_with_its_own_words(runtime: Runtime, client: Any) -> None:
    raised = refused(client, "ModelError", EndpointName="many", TargetModel="raises")
    assert raised["OriginalStatusCode"] == 500
    assert "RuntimeError: there is no such device" in raised["OriginalMessage"]
    mistake = refused(client, "ModelError", EndpointName="many", TargetModel="misspelt")
    assert mistake["OriginalStatusCode"] == 400
    assert "did you mean 'echo'?" in mistake["OriginalMessage"]
    before = runtime.loaded()
    full = refused(client, "ModelError", EndpointName="many", TargetModel="too-large")
    assert full["OriginalStatusCode"] == 507
    assert str(NEED * FIT) in full["OriginalMessage"]
    assert runtime.loaded() == before  # none had to leave for what fits in no case


# ---- the response stream


def payload(event: dict[str, Any]) -> bytes:
    return bytes(event["PayloadPart"]["Bytes"])


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_tokens_are_parts_that_come_while_the_model_goes_on(
    runtime: Runtime, client: Any, connect: Connect, scheme: str
) -> None:
    mine, name = connect(runtime, scheme), f"stepped over {scheme}"
    answer = mine.invoke_endpoint_with_response_stream(EndpointName="stepped", **streamed(name, max_new_tokens=3))
    assert (answer["ContentType"], answer["InvokedProductionVariant"]) == ("application/jsonlines", "AllTraffic")
    events = iter(answer["Body"])
    for number in range(3):
        line = payload(next(events))
        assert line.endswith(b"\n")
        assert json.loads(line)["token"]["text"] == f" {number}"
        switch(client, f"set {name}:{number}")  # the model waits for this before it goes on
    assert json.loads(line)["generated_text"] == " 0 1 2"
    assert list(events) == []
    mine.close()


def test_a_client_that_closes_the_stream_early_stops_the_model(runtime: Runtime, client: Any, connect: Connect) -> None:
    mine = connect(runtime)
    answer = mine.invoke_endpoint_with_response_stream(EndpointName="stepped", **streamed("left", max_new_tokens=9))
    assert payload(next(iter(answer["Body"])))
    answer["Body"].close()
    mine.close()
    switch(client, "wait left:cancelled")
    ended = runtime.log.wait(lambda r: r.get("event") == "exchange" and r.get("ending") == "cancelled-by-client")
    assert (ended["model"], ended["dialect"]) == ("stepped", "sagemaker")


def test_an_error_in_mid_stream_comes_after_the_parts_before_it(client: Any) -> None:
    from botocore.exceptions import EventStreamError

    answer = client.invoke_endpoint_with_response_stream(EndpointName="failing-text", **streamed("a", max_new_tokens=9))
    events, got = iter(answer["Body"]), list[bytes]()
    with pytest.raises(EventStreamError) as caught:
        got.extend(payload(event) for event in events)
    assert [json.loads(line)["token"]["text"] for line in b"".join(got).splitlines()] == [" 0", " 1"]
    assert caught.value.response["Error"]["Code"] == "ModelStreamError"
    assert "the text ran dry" in caught.value.response["Error"]["Message"]


def test_an_error_before_the_first_part_is_no_stream_at_all(client: Any) -> None:
    with pytest.raises(client.exceptions.ModelError) as caught:
        client.invoke_endpoint_with_response_stream(EndpointName="failing-text", **streamed("dry", max_new_tokens=9))
    response = caught.value.response
    assert response["ResponseMetadata"]["HTTPStatusCode"] == 424
    assert response["OriginalStatusCode"] == 422
    assert response["OriginalMessage"] == "the text ran dry"
    assert response["LogStreamArn"] == ""
    with pytest.raises(client.exceptions.ValidationError):
        client.invoke_endpoint_with_response_stream(EndpointName="nobody", Body=b"")


def test_parts_and_tensors_and_documents_stream_too(client: Any) -> None:
    data = np.random.default_rng(4).bytes(300_000)
    answer = client.invoke_endpoint_with_response_stream(EndpointName="halves", Body=data)
    assert answer["ContentType"] == "application/octet-stream"
    assert b"".join(payload(event) for event in answer["Body"]) == data
    head = {"content-type": "a/b", "x-amzn-sagemaker-custom-attributes": "tried=1"}
    answer = client.invoke_endpoint_with_response_stream(EndpointName="replying", Body=json.dumps(head), Accept="c/d")
    assert (answer["ContentType"], answer["CustomAttributes"]) == ("a/b", "tried=1")
    assert b"".join(payload(event) for event in answer["Body"]) == bytes(range(256))
    answer = client.invoke_endpoint_with_response_stream(EndpointName="lm", **text("Return the", max_new_tokens=3))
    assert answer["ContentType"] == JSON
    assert json.loads(b"".join(payload(event) for event in answer["Body"]))["generated_text"]


def test_a_binary_v2_body_streams_both_ways(client: Any, needs: Callable[[str, str], Any]) -> None:
    triton = needs("tritonclient", "tritonclient.http")
    array = np.arange(100_000, dtype=np.int64)
    tensor = triton.InferInput("INPUT0", list(array.shape), "INT64")
    tensor.set_data_from_numpy(array, binary_data=True)
    request, length = triton.InferenceServerClient.generate_request_body(
        [tensor], outputs=[triton.InferRequestedOutput("OUTPUT0", binary_data=True)]
    )
    answer = client.invoke_endpoint_with_response_stream(
        EndpointName="identity", Body=request, ContentType=f"{BINARY_JSON}{length}"
    )
    parts = [payload(event) for event in answer["Body"]]
    assert len(parts) > 1
    length = int(answer["ContentType"][len(BINARY_JSON) :])
    result = triton.InferenceServerClient.parse_response_body(b"".join(parts), header_length=length)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)


# ---- errors, each as its own exception


def test_a_models_refusal_is_a_model_error_with_its_status_and_words(client: Any) -> None:
    response = refused(client, "ModelError", EndpointName="failing-parts", Body=b"refuse")
    assert response["ResponseMetadata"]["HTTPStatusCode"] == 424
    assert (response["OriginalStatusCode"], response["OriginalMessage"]) == (418, "the part said refuse")
    response = refused(client, "ModelError", EndpointName="failing-text", **text("dry", max_new_tokens=9))
    assert (response["OriginalStatusCode"], response["OriginalMessage"]) == (422, "the text ran dry")


def test_a_crash_is_a_model_error_without_the_servers_secrets(runtime: Runtime, client: Any) -> None:
    response = refused(client, "ModelError", EndpointName="failing-parts", Body=b"crash")
    assert response["OriginalStatusCode"] == 500
    assert "secret" not in json.dumps(response)
    incident = response["OriginalMessage"].partition("incident ")[2].partition(" ")[0]
    assert runtime.log.wait(lambda r: r.get("incident") == incident and r["event"] == "model raised")


def test_a_body_that_breaks_off_is_seen_to_be_broken(client: Any) -> None:
    from botocore.exceptions import ResponseStreamingError

    answer = client.invoke_endpoint(EndpointName="failing-parts", Body=b"after")
    switch(client, "set fail")
    with pytest.raises(ResponseStreamingError):
        body(answer)


def test_a_bug_of_ours_is_an_internal_failure(client: Any) -> None:
    response = refused(client, "InternalFailure", EndpointName="failing-parts", Body=b"bug")
    assert response["ResponseMetadata"]["HTTPStatusCode"] == 500


def test_a_model_without_a_free_place_is_a_service_unavailable(client: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.invoke_endpoint, EndpointName="held", Body=b"first")
        switch(client, "wait held")
        response = refused(client, "ServiceUnavailable", EndpointName="held")
        assert response["ResponseMetadata"]["HTTPStatusCode"] == 503
        assert "models.held.queue" in response["Error"]["Message"]
        switch(client, "set let go")
        assert body(first.result(PATIENCE)) == b"first"


def test_a_model_that_is_being_loaded_is_not_ready(client: Any) -> None:
    assert body(client.invoke_endpoint(EndpointName="reloading", Body=b"hello")) == b"hello"
    switch(client, "set crash")
    switch(client, "wait loading")
    response = refused(client, "ModelNotReadyException", EndpointName="reloading")
    assert response["ResponseMetadata"]["HTTPStatusCode"] == 429
    switch(client, "set load")
    assert body(client.invoke_endpoint(EndpointName="reloading", Body=b"hello")) == b"hello"


def test_a_server_that_drains_says_so_to_who_comes_and_to_who_stays_too_long(connect: Connect, tmp_path: Path) -> None:
    from botocore.exceptions import EventStreamError

    with running(tmp_path, status=3, drain="delay = 60\ntimeout = 60") as server:
        client = connect(server)
        answer = client.invoke_endpoint_with_response_stream(EndpointName="stepped", **streamed("last", max_new_tokens=9))
        events = iter(answer["Body"])
        assert payload(next(events))
        server.process.terminate()
        server.log.wait(lambda r: r["event"] == "draining")
        response = refused(client, "ServiceUnavailable", EndpointName="echo")
        assert response["ResponseMetadata"]["HTTPStatusCode"] == 503
        assert "shutting down" in response["Error"]["Message"]
        with pytest.raises(client.exceptions.ServiceUnavailable):
            client.invoke_endpoint_with_response_stream(EndpointName="echo", Body=b"")
        server.process.terminate()  # the second time it means now
        with pytest.raises(EventStreamError, match="InternalStreamFailure"):
            next(events)
        client.close()


# ---- signatures


def test_what_is_signed_well_is_answered(signed_runtime: Runtime, connect: Connect) -> None:
    for scheme in ("http", "https"):
        client = connect(signed_runtime, scheme)
        said = {"ContentType": "text/plain", "CustomAttributes": "a=b;  c", "InferenceId": "a b"}
        assert body(client.invoke_endpoint(EndpointName="echo", Body=b"hello", **said)) == b"hello"
        assert body(client.invoke_endpoint(EndpointName="echo", Body=io.BytesIO(b"hello"))) == b"hello"
        assert body(client.invoke_endpoint(EndpointName="many", TargetModel="sub/below", Body=b"hello")) == b"hello"
        answer = client.invoke_endpoint_with_response_stream(EndpointName="lm", **streamed("Return", max_new_tokens=2))
        assert len(list(answer["Body"])) == 2
        client.close()


def change_the_body(request: Any, **_: Any) -> None:
    request.body = b"jello"


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"aws_secret_access_key": "another"}, "InvalidSignatureException"),
        ({"aws_access_key_id": "AKIDNOBODY"}, "UnrecognizedClientException"),
        ({"region_name": "eu-west-1"}, "InvalidSignatureException"),
        ({}, "InvalidSignatureException"),
    ],
    ids=["secret", "key", "region", "body"],
)
def test_what_is_signed_wrong_is_refused(
    signed_runtime: Runtime, connect: Connect, wrong: dict[str, str], code: str
) -> None:
    from botocore.exceptions import ClientError

    client = connect(signed_runtime, **{"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, **wrong})
    if not wrong:
        client.meta.events.register("before-send.sagemaker-runtime", change_the_body)
    for operation in (client.invoke_endpoint, client.invoke_endpoint_with_response_stream):
        with pytest.raises(ClientError) as caught:
            operation(EndpointName="echo", Body=b"hello")
        assert caught.value.response["Error"]["Code"] == code
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] in (400, 403)
    client.close()


def test_what_is_not_signed_is_refused(signed_runtime: Runtime, connect: Connect) -> None:
    from botocore import UNSIGNED
    from botocore.exceptions import ClientError

    client = connect(signed_runtime, settings={"signature_version": UNSIGNED})
    with pytest.raises(ClientError) as caught:
        client.invoke_endpoint(EndpointName="echo", Body=b"hello")
    assert caught.value.response["Error"]["Code"] == "MissingAuthenticationTokenException"
    client.close()
