"""curl and text generation: every form that LMI, TGI and OpenAI have, byte for byte, over each version of HTTP."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.interop.served_text import PATIENCE, SECRET, tell, twenty_at_once
from tests.interop.servers import Server

SETTINGS = ('lmi = { default_model = "counted" }',)
"""Settings of the server `text_server`."""

pytestmark = pytest.mark.usefixtures("curl")  # before the server: where it is absent, none need start


@dataclass(frozen=True)
class Answer:
    """The answer as curl printed it."""

    status: int
    type: str
    body: str

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The objects of a stream of events, each framed as it must be; the last may be the word [DONE]."""
        assert self.type == "text/event-stream; charset=utf-8"
        assert self.body.endswith("\n\n")
        data = self.body.removesuffix("\n\n").split("\n\n")
        assert all(event.startswith("data: ") and "\n" not in event for event in data), self.body
        return [event[6:] if event == "data: [DONE]" else json.loads(event[6:]) for event in data]

    def lines(self) -> list[Any]:
        """The objects of JSON lines."""
        assert self.type == "application/jsonlines"
        assert self.body.endswith("\n")
        return [json.loads(line) for line in self.body.removesuffix("\n").split("\n")]


Ask = Callable[..., Answer]


@pytest.fixture(params=["--http1.0", "--http1.1", "--http2-prior-knowledge"])
def ask(request: pytest.FixtureRequest, curl: str, text_server: Server, tmp_path: Path) -> Ask:
    """ask(path, body) posts the body, an object or a text, as curl does where nobody says what it is."""
    features = subprocess.run([curl, "--version"], capture_output=True, text=True, check=True).stdout
    if "http2" in request.param and "HTTP2" not in features:
        pytest.skip("this curl has no HTTP/2")

    def ask(path: str, body: Any, *arguments: str) -> Answer:
        out = tmp_path / "out"
        sent = body if isinstance(body, str) else json.dumps(body)
        where = ["-o", str(out), "-w", "%{http_code} %{content_type}"]
        command = [curl, "-sS", "--max-time", str(PATIENCE), request.param, *where, text_server.url + path, "-d", sent]
        run = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
        status, _, kind = run.stdout.partition(" ")
        return Answer(int(status), kind, out.read_text())

    return ask


def lmi(ask: Ask, model: str, prompt: Any = "hello", *, stream: bool | None = None, **parameters: Any) -> Answer:
    body = {"inputs": prompt, "parameters": parameters} | ({} if stream is None else {"stream": stream})
    return ask(f"/predictions/{model}", body)


# ---- LMI's own forms. Bytes: those of json.dumps(ensure_ascii=False), lines ended by \n, `data: ` and a blank line for events.


ROUTES = ["/predictions/counted", "/models/counted/invoke", "/invocations"]


@pytest.mark.parametrize("path", ROUTES)
def test_one_document(ask: Ask, path: str) -> None:
    answer = ask(path, '{"inputs": "a b", "parameters": {"max_new_tokens": 2}}')
    assert answer == Answer(200, "application/json", '{"generated_text": " 0 1"}')


def test_one_document_with_details(ask: Ask) -> None:
    answer = lmi(ask, "counted", "a b", max_new_tokens=2, details=True, decoder_input_details=True)
    assert answer.body == (
        '{"generated_text": " 0 1", "details": {"finish_reason": "length", "generated_tokens": 2, "inputs": "a b", "tokens": '
        '[{"id": 100, "text": " 0", "log_prob": -0.5}, {"id": 101, "text": " 1", "log_prob": -0.5}], "prefill": '
        '[{"id": 0, "text": "a", "log_prob": null}, {"id": 1, "text": "b", "log_prob": -1.0}]}}'
    )


def test_json_lines(ask: Ask) -> None:
    answer = lmi(ask, "counted", "a b", max_new_tokens=2, stream=True)
    lines = (
        '{"token": {"id": 100, "text": " 0", "log_prob": -0.5}}\n'
        '{"token": {"id": 101, "text": " 1", "log_prob": -0.5}, "generated_text": " 0 1"}\n'
    )
    assert answer == Answer(200, "application/jsonlines", lines)


def test_events(ask: Ask) -> None:
    events = (
        'data: {"token": {"id": 100, "text": " 0", "log_prob": -0.5}}\n\n'
        'data: {"token": {"id": 101, "text": " 1", "log_prob": -0.5}, "generated_text": " 0 1"}\n\n'
    )
    wanted = Answer(200, "text/event-stream; charset=utf-8", events)
    assert lmi(ask, "counted", "a b", max_new_tokens=2, output_formatter="sse") == wanted
    assert lmi(ask, "sse-counted", "a b", max_new_tokens=2) == wanted


def test_several_sequences(ask: Ask) -> None:
    details = lmi(ask, "counted", "a", max_new_tokens=2, n=2).json()["details"]
    assert [s["generated_text"] for s in details["best_of_sequences"]] == [" 0 1"]
    refused = lmi(ask, "counted", "a", max_new_tokens=2, n=2, stream=True)
    assert (refused.status, refused.type) == (424, "application/json")


def test_the_librarys_model(ask: Ask) -> None:
    whole = lmi(ask, "lm", "Return the", max_new_tokens=5, details=True).json()
    assert whole["details"]["generated_tokens"] == 5
    lines = lmi(ask, "lm", "Return the", max_new_tokens=5, stream=True).lines()
    assert "".join(line["token"]["text"] for line in lines) == lines[-1]["generated_text"] == whole["generated_text"]


# ---- TGI's form


def test_tgis_document_is_an_array_of_one(ask: Ask) -> None:
    (answer,) = lmi(ask, "tgi-counted", "a b", max_new_tokens=2).json()
    assert answer["generated_text"] == " 0 1"
    assert answer["details"]["prefill"] == []
    assert answer["details"]["tokens"][0] == {"id": 100, "text": " 0", "logprob": -0.5, "special": False}
    (bare,) = lmi(ask, "tgi-counted", "a b", max_new_tokens=2, details=False).json()
    assert bare == {"generated_text": " 0 1"}


def test_tgis_stream_is_events_that_are_numbered(ask: Ask) -> None:
    first, last = lmi(ask, "tgi-counted", "a b", max_new_tokens=2, stream=True).events()
    assert first == {
        "index": 1,
        "token": {"id": 100, "text": " 0", "logprob": -0.5, "special": False},
        "generated_text": None,
        "details": None,
    }
    assert (last["index"], last["generated_text"]) == (2, " 0 1")
    assert (last["details"]["finish_reason"], last["details"]["generated_tokens"]) == ("length", 2)


# ---- LMI's dynamic batch


def test_a_dynamic_batch_is_a_list_printed_as_lmi_prints_it(ask: Ask) -> None:
    answer = lmi(ask, "dynamic", ["one two", "three"])
    wanted = [{"generated_text": " one two"}, {"generated_text": " three"}]
    assert answer == Answer(200, "application/json", json.dumps(wanted, indent=2, separators=(",", ":")))
    assert lmi(ask, "dynamic", "four").json() == [{"generated_text": " four"}]


def test_a_dynamic_batch_may_stream_a_list_in_each_line(ask: Ask) -> None:
    steps = [line["outputs"] for line in lmi(ask, "dynamic-stream", ["one two", "three"]).lines()]
    assert all(len(step) == 2 for step in steps)
    assert ["".join(step[i] for step in steps) for i in (0, 1)] == [" one two", " three"]


def test_a_dynamic_batch_that_fails_says_so_as_lmi_does(ask: Ask) -> None:
    answer = lmi(ask, "dynamic-failing", ["dry"])
    assert (answer.status, answer.type) == (424, "application/json")
    assert answer.body.startswith('{\n  "code":424,\n  "message":"invoke handler failure",\n  "error":"')
    assert "the text ran dry" in answer.json()["error"]


# ---- OpenAI's forms

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("path", ["/v1/chat/completions", *ROUTES])
def test_a_chat_at_every_route_that_takes_one(ask: Ask, path: str) -> None:
    answer = ask(path, {"model": "counted", "messages": MESSAGES, "max_tokens": 2})
    assert (answer.status, answer.type) == (200, "application/json")
    document = answer.json()
    assert document["object"] == "chat.completion"
    assert document["choices"][0]["message"] == {"role": "assistant", "content": " 0 1"}
    streamed = ask(path, {"model": "counted", "messages": MESSAGES, "max_tokens": 2, "stream": True}).events()
    assert streamed.pop() == "[DONE]"
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in streamed) == " 0 1"
    assert streamed[-1]["choices"][0]["finish_reason"] == "length"


def test_a_completion(ask: Ask) -> None:
    body = {"model": "counted", "prompt": "hello", "max_tokens": 2}
    assert ask("/v1/completions", body).json()["choices"][0]["text"] == " 0 1"
    streamed = ask("/v1/completions", {**body, "stream": True}).events()
    assert streamed.pop() == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == " 0 1"


# ---- failures


def test_a_model_that_fails_in_mid_stream_ends_json_lines_with_the_schemas_last_line(ask: Ask) -> None:
    # the schema's last line, with the formatter's `error_msg`
    answer = lmi(ask, "failing", stream=True)
    *tokens, last = answer.lines()
    assert (answer.status, [line["token"]["text"] for line in tokens]) == (200, [" 0", " 1"])
    assert (last["token"]["id"], last["token"]["text"], last["token"]["special_token"]) == (-1, "", True)
    assert "the text ran dry" in last["token"]["error_msg"]
    assert last["generated_text"] == ""
    assert last["details"] == {"finish_reason": "error", "generated_tokens": None, "inputs": None}


def test_the_same_in_events(ask: Ask) -> None:
    assert lmi(ask, "sse-failing").events()[-1]["details"]["finish_reason"] == "error"
    last = lmi(ask, "tgi-failing", stream=True).events()[-1]
    assert (last["error"], last["error_type"]) == ("the text ran dry", "generation")
    chat = ask("/v1/chat/completions", {"model": "failing", "messages": MESSAGES, "stream": True}).events()
    assert "the text ran dry" in chat[-1]["error"]["message"]  # and no [DONE]: it was not


def test_a_failure_without_a_stream(ask: Ask) -> None:
    answer = lmi(ask, "failing")
    assert (answer.status, answer.type) == (424, "application/json")
    failed = {"finish_reason": "error", "generated_tokens": None, "inputs": None, "tokens": None}
    assert answer.json() == {"generated_text": "", "details": failed, "error": "the text ran dry", "code": 424}


@pytest.mark.parametrize("model", ["crashing", "sse-crashing", "tgi-crashing"])
def test_a_crash_tells_no_secrets(ask: Ask, model: str) -> None:
    for stream in (False, True):
        answer = lmi(ask, model, stream=stream)
        assert SECRET not in answer.body
        assert "error" in answer.body


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_parameter_is_refused_before_there_is_a_stream(ask: Ask, stream: bool) -> None:
    answer = lmi(ask, "counted", top_p=2, stream=stream)
    assert (answer.status, answer.type) == (424, "application/json")
    assert "top_p" in answer.json()["error"]
    tgi = lmi(ask, "tgi-counted", top_p=2, stream=stream)
    assert (tgi.status, tgi.json()["error_type"]) == (424, "validation")
    body = {"model": "counted", "prompt": "hello", "top_p": 2, "stream": stream}
    assert "top_p" in ask("/v1/completions", body).json()["error"]["message"]


@pytest.mark.parametrize("body", ['{"inputs": "a",}', "{}", '{"inputs": ""}', '{"inputs": "a", "parameters": null}'])
def test_what_is_no_request_gets_lmis_error(ask: Ask, body: str) -> None:
    answer = ask("/predictions/counted", body)
    assert (answer.status, answer.type) == (424, "application/json")
    assert list(answer.json()) == ["error", "code"]


def test_nineteen_requests_do_not_notice_a_bad_one(curl: str, text_server: Server) -> None:
    def post(prompt: str, **parameters: Any) -> list[Any]:
        body = json.dumps({"inputs": prompt, "parameters": parameters, "stream": True})
        command = [curl, "-sS", "-N", "--max-time", str(PATIENCE), f"{text_server.url}/predictions/met", "-d", body]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [json.loads(line) for line in out.splitlines()]

    def bad() -> None:
        (refused,) = post("hello", top_p=2)
        assert refused["code"] == 424

    twenty_at_once(text_server.url, "met-curl", lambda prompt: str(post(prompt)[-1]["generated_text"]), bad)


# ---- clients that leave

BODIES = {
    "/predictions/stepped": lambda name, stream: {"inputs": name, "parameters": {"max_new_tokens": 9}, "stream": stream},
    "/predictions/tgi-stepped": lambda name, stream: {"inputs": name, "parameters": {"max_new_tokens": 9}, "stream": stream},
    "/v1/completions": lambda name, stream: {"model": "stepped", "prompt": name, "stream": stream},
    "/v1/chat/completions": lambda name, stream: {
        "model": "stepped",
        "messages": [{"role": "user", "content": name}],
        "stream": stream,
    },
}  # fmt: skip


@pytest.mark.parametrize("version", ["--http1.1", "--http2-prior-knowledge"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_leaves_stops_the_model(curl: str, text_server: Server, path: str, stream: bool, version: str) -> None:
    name = f"left {path} {stream} {version}"
    body = json.dumps(BODIES[path](name, stream))
    command = [curl, "-sS", "-N", "--max-time", str(PATIENCE), version, text_server.url + path, "-d", body]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        tell(text_server.url, f"wait {name}:begun")
        if stream:
            assert process.stdout is not None
            assert process.stdout.readline()
        process.kill()
    tell(text_server.url, f"wait {name}:cancelled")


def test_a_model_that_is_slow_to_stop_holds_up_nobody(curl: str, ask: Ask, text_server: Server, request: Any) -> None:
    name = f"slow {request.node.callspec.id}"
    body = json.dumps({"inputs": name, "stream": True})
    command = [curl, "-sS", "-N", "--max-time", str(PATIENCE), f"{text_server.url}/predictions/stubborn", "-d", body]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.kill()
    tell(text_server.url, f"wait {name}:stopping")
    assert lmi(ask, "counted", max_new_tokens=2).body == '{"generated_text": " 0 1"}'
    tell(text_server.url, f"set {name}:let go")
    tell(text_server.url, f"wait {name}:gone")
