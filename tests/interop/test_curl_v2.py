"""curl and the Open Inference Protocol: JSON, binary data from a file, compression, every framing, HTTP/2."""

from __future__ import annotations

import gzip
import json
import struct
import subprocess
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.interop.servers import Server

INFER = "/v2/models/identity_fp32/infer"
NUMBERS = struct.pack("<4f", 1, 2, 3, 4)
REQUEST = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}]}


@dataclass(frozen=True)
class Answer:
    """The answer as curl printed it: the last head, and the body."""

    version: str
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.body)
        return value

    def tensors(self) -> tuple[dict[str, Any], bytes]:
        """The reply's JSON and what follows it."""
        length = int(self.headers["inference-header-content-length"])
        return json.loads(self.body[:length]), self.body[length:]


Ask = Callable[..., Answer]


@pytest.fixture(params=["--http1.1", "--http2-prior-knowledge"])
def ask(request: pytest.FixtureRequest, curl: str, v2_server: Server, tmp_path: Path) -> Ask:
    """ask(path, *arguments) runs curl, over each version of HTTP."""
    features = subprocess.run([curl, "--version"], capture_output=True, text=True, check=True).stdout
    if request.param != "--http1.1" and "HTTP2" not in features:
        pytest.skip("this curl has no HTTP/2")

    def ask(path: str, *arguments: str) -> Answer:
        head, body = tmp_path / "head", tmp_path / "out"
        head.unlink(missing_ok=True)
        body.unlink(missing_ok=True)
        where = ["-D", str(head), "-o", str(body), "--max-time", "120", "-sS", request.param]
        subprocess.run([curl, *where, f"{v2_server.url}{path}", *arguments], check=True, capture_output=True)
        last = head.read_text().strip().split("\n\n" if "\r" not in head.read_text() else "\r\n\r\n")[-1].splitlines()
        version, status = last[0].split()[:2]
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in last[1:])}
        assert version == ("HTTP/1.1" if request.param == "--http1.1" else "HTTP/2")
        return Answer(version, int(status), headers, body.read_bytes() if body.exists() else b"")

    return ask


def output(reply: dict[str, Any]) -> Any:
    """The only one."""
    (only,) = reply["outputs"]
    return only


@pytest.fixture
def binary(tmp_path: Path) -> tuple[Path, int]:
    """A file of a binary request, and the length of its JSON."""
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [4], "parameters": {"binary_data_size": 16}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    file = tmp_path / "request"
    file.write_bytes(head + NUMBERS)
    return file, len(head)


def test_json_as_curl_sends_it_by_itself(ask: Ask) -> None:
    answer = ask(INFER, "-d", json.dumps(REQUEST))  # with the media type of a form
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    reply = answer.json()
    assert (reply["model_name"], reply["model_version"]) == ("identity_fp32", "1")
    assert output(reply) == {"name": "OUTPUT0", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}


def test_json_from_a_file_by_its_option(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "request").write_text(json.dumps(REQUEST, indent=2))
    assert ask(INFER, "--json", f"@{tmp_path / 'request'}").status == 200


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["-H", "Transfer-Encoding: chunked"],
        ["-H", "Expect: 100-continue"],
        ["-H", "Transfer-Encoding: chunked", "-H", "Expect: 100-continue"],
        ["-H", "Content-Type: application/octet-stream"],
        ["--limit-rate", "1k"],
    ],
    ids=["plain", "chunked", "expect", "chunked and expect", "octets", "slowly"],
)
def test_binary_data_from_a_file(ask: Ask, binary: tuple[Path, int], more: list[str]) -> None:
    file, length = binary
    answer = ask(INFER, "--data-binary", f"@{file}", "-H", f"Inference-Header-Content-Length: {length}", *more)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/octet-stream")
    reply, data = answer.tensors()
    assert output(reply) == {
        "name": "OUTPUT0", "datatype": "FP32", "shape": [4], "parameters": {"binary_data_size": 16}
    }  # fmt: skip
    assert data == NUMBERS


def test_an_upload_of_unknown_length(ask: Ask, binary: tuple[Path, int]) -> None:
    file, length = binary
    heads = ("-H", "Transfer-Encoding: chunked", "-H", f"Inference-Header-Content-Length: {length}")
    answer = ask(INFER, "-T", str(file), "-X", "POST", *heads)
    assert answer.tensors()[1] == NUMBERS


def test_a_raw_request_is_a_file_of_numbers(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "numbers").write_bytes(NUMBERS * 100_000)
    answer = ask(INFER, "--data-binary", f"@{tmp_path / 'numbers'}", "-H", "Inference-Header-Content-Length: 0")
    reply, data = answer.tensors()
    assert output(reply)["shape"] == [400_000]
    assert data == NUMBERS * 100_000


@pytest.mark.parametrize(
    ("coding", "encode"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("GZIP", gzip.compress)]
)
def test_a_compressed_upload(ask: Ask, binary: tuple[Path, int], coding: str, encode: Callable[[bytes], bytes]) -> None:
    file, length = binary
    file.write_bytes(encode(file.read_bytes()))
    heads = ("-H", f"Inference-Header-Content-Length: {length}", "-H", f"Content-Encoding: {coding}")
    for more in ((), ("-H", "Transfer-Encoding: chunked")):
        assert ask(INFER, "--data-binary", f"@{file}", *heads, *more).tensors()[1] == NUMBERS


def test_an_unknown_coding_is_told_the_known_ones(ask: Ask) -> None:
    answer = ask(INFER, "-d", json.dumps(REQUEST), "-H", "Content-Encoding: br")
    assert (answer.status, answer.headers["accept-encoding"]) == (415, "gzip, deflate")
    assert "br" in str(answer.json()["error"])


def test_a_damaged_upload_is_refused(ask: Ask, binary: tuple[Path, int]) -> None:
    file, length = binary
    file.write_bytes(gzip.compress(file.read_bytes())[:-9])
    heads = ("-H", f"Inference-Header-Content-Length: {length}", "-H", "Content-Encoding: gzip")
    assert ask(INFER, "--data-binary", f"@{file}", *heads).status == 400


def test_a_compressed_reply(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "numbers").write_bytes(bytes(40_000))
    arguments = (INFER, "--data-binary", f"@{tmp_path / 'numbers'}", "-H", "Inference-Header-Content-Length: 0")
    answer = ask(*arguments, "--compressed")
    assert answer.headers["content-encoding"] == "gzip"
    assert "accept-encoding" in answer.headers["vary"].lower()
    assert answer.tensors()[1] == bytes(40_000)  # the length in the head is that of the JSON before it was compressed
    coded = ask(*arguments, "-H", "Accept-Encoding: deflate")
    assert coded.headers["content-encoding"] == "deflate"
    assert int(coded.headers["content-length"]) == len(coded.body) < 1000
    assert zlib.decompress(coded.body) == answer.body
    plain = ask(*arguments, "-H", "Accept-Encoding: gzip;q=0, deflate;q=0")
    assert "content-encoding" not in plain.headers
    assert plain.body == answer.body


@pytest.mark.parametrize(
    "path", ["/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/fixed", "/v2/models/fixed/ready"]
)
def test_head_is_get_without_the_body(ask: Ask, path: str) -> None:
    got, head = ask(path), ask(path, "--head")
    assert (head.status, head.body) == (200, b"") or head.body.startswith(b"HTTP/")  # curl prints the head as the body
    each = {"date", "x-request-id"}
    assert {k: v for k, v in head.headers.items() if k not in each} == {
        k: v for k, v in got.headers.items() if k not in each
    }


def test_what_is_allowed_is_told(ask: Ask) -> None:
    answer = ask(INFER, "-X", "OPTIONS")
    assert (answer.status // 100, answer.headers["allow"]) == (2, "OPTIONS, POST")
    answer = ask("/v2/models/fixed", "-X", "OPTIONS")
    assert answer.status // 100 == 2
    assert {"GET", "HEAD"} <= set(answer.headers["allow"].split(", "))
    answer = ask(INFER)
    assert (answer.status, "POST" in answer.headers["allow"]) == (405, True)
    assert "error" in answer.json()
    answer = ask("/v2/models/fixed", "-X", "DELETE")
    assert answer.status == 405
    assert "error" in answer.json()


@pytest.mark.parametrize("size", [10_000, 70_000, 8 * 1024 * 1024])
@pytest.mark.parametrize("more", [[], ["-H", "Expect: 100-continue"]], ids=["plain", "expect"])
def test_a_refusal_before_the_body_is_read_reaches_curl(ask: Ask, tmp_path: Path, size: int, more: list[str]) -> None:
    (tmp_path / "numbers").write_bytes(bytes(size))
    answer = ask("/v2/models/nobody/infer", "--data-binary", f"@{tmp_path / 'numbers'}", *more)
    assert answer.status == 404
    assert "unknown model 'nobody'" in str(answer.json()["error"])
