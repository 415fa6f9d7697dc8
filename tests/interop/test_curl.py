"""curl, as the documentation shows it."""

import itertools
import json
import re
import subprocess

import pytest

from tests.interop.servers import Server


def run(curl: str, *arguments: str) -> str:
    return subprocess.run([curl, "-sS", "--max-time", "120", *arguments], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("form", ["jsonlines", "sse"])
def test_tokens_arrive_one_by_one_from_a_model_that_pauses(server: Server, curl: str, form: str) -> None:
    body = json.dumps({"inputs": "go", "parameters": {"max_new_tokens": 8, "output_formatter": form}, "stream": True})
    trace = run(curl, "-N", "--trace-ascii", "-", "--trace-time", f"{server.url}/predictions/paced", "-d", body)
    received = re.findall(r"^(\d\d):(\d\d):([\d.]+) <= Recv data", trace, re.MULTILINE)
    times = [int(h) * 3600 + int(m) * 60 + float(s) for h, m, s in received]
    assert trace.count('{"token": ') >= 8
    # the model makes a token each 50 ms: eight arrivals, each its own, none held back for another
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert sum(gap > 0.02 for gap in gaps) == 7, times


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
    file.write_bytes(bytes(80 * 1024 * 1024))
    answer = run(curl, "-w", "\n%{http_code}", f"{server.url}/invocations", "--data-binary", f"@{file}")
    assert answer.endswith("\n413")
    assert "limits.json" in answer


def test_unknown_paths_and_methods_are_told_apart(server: Server, curl: str) -> None:
    assert run(curl, "-o", "/dev/null", "-w", "%{http_code}", f"{server.url}/nowhere") == "404"
    answer = run(curl, "-i", f"{server.url}/invocations")
    assert answer.startswith("HTTP/1.1 405")
    assert "allow: OPTIONS, POST" in answer
