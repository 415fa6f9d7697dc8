"""curl, as the documentation shows it."""

import json
import subprocess

import pytest

from tests.interop import servers
from tests.interop.served_text import tell
from tests.interop.servers import Server


def run(curl: str, *arguments: str) -> str:
    return subprocess.run([curl, "-sS", "--max-time", "120", *arguments], capture_output=True, text=True, check=True).stdout


@pytest.mark.by_default
@pytest.mark.parametrize("form", ["jsonlines", "sse"])
def test_tokens_arrive_one_by_one_from_a_model_that_pauses(text_server: Server, curl: str, form: str) -> None:
    name, tokens = f"one by one as {form}", 8
    body = json.dumps({"inputs": name, "parameters": {"max_new_tokens": tokens, "output_formatter": form}, "stream": True})
    command = [curl, "-sSN", "--max-time", "120", f"{text_server.url}/predictions/stepped", "-d", body]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for number in range(tokens):  # each is read before the model makes the next: none is held back for another
            while '{"token": ' not in (line := process.stdout.readline()):
                assert line
            assert f'"text": " {number}"' in line
            tell(text_server.url, f"set {name}:{number}")
        process.stdout.read()
    assert process.returncode == 0


def test_the_answer_without_a_stream_is_one_document(server: Server, curl: str) -> None:
    body = '{"inputs": "Return the", "parameters": {"max_new_tokens": 5, "details": true}}'
    answer = json.loads(run(curl, f"{server.url}/invocations", "-d", body))
    assert answer["details"]["generated_tokens"] == 5
    assert "".join(t["text"] for t in answer["details"]["tokens"]) == answer["generated_text"]


def test_http2_by_prior_knowledge_and_by_alpn(server: Server, curl: str) -> None:
    if "HTTP2" not in run(curl, "--version"):
        pytest.skip("this curl has no HTTP/2")
    clear = run(
        curl, "--http2-prior-knowledge", "-w", "%{http_version} %{http_code}", "-o", "/dev/null", f"{server.url}/ping"
    )
    secure = run(
        curl, "--cacert", str(server.ca), "-w", "%{http_version} %{http_code}", "-o", "/dev/null",
        f"https://{server.host}:{server.tls_port}/ping",
    )  # fmt: skip
    assert (clear, secure) == ("2 200", "2 200")


def test_a_large_upload_that_is_refused_gets_its_answer(
    server: Server, curl: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("upload") / "body"
    file.write_bytes(bytes(20 * 1024 * 1024))
    command = [
        curl,
        "-sS",
        "--max-time",
        "120",
        "-w",
        "\n%{http_code}",
        f"{server.url}/invocations",
        "--data-binary",
        f"@{file}",
    ]
    # hypercorn closes as soon as it has answered, which now and then costs curl the answer, while it still sends: exit code 55
    for _ in range(5 if servers.by == servers.HYPERCORN else 1):
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode != 55:
            break
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("\n413")
    assert "limits.text_json" in ended.stdout


def test_unknown_paths_and_methods_are_told_apart(server: Server, curl: str) -> None:
    assert run(curl, "-o", "/dev/null", "-w", "%{http_code}", f"{server.url}/nowhere") == "404"
    answer = run(curl, "-i", f"{server.url}/invocations")
    assert answer.startswith("HTTP/1.1 405")
    assert "allow: OPTIONS, POST" in answer
