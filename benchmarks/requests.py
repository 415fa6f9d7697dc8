"""The bytes that clients send, made once: every server of a run gets equal requests."""

from __future__ import annotations

import json
import struct

import numpy as np

from gateway.client.questions import grpc_request
from protocols.aws.bidi import CONTENT_TYPE, Completion, DataType, encode_part, encode_request_part

HOST = b"127.0.0.1"
INFER = b"/v2/models/identity/infer"
INVOCATIONS = b"/invocations"
WEBSOCKET = b"/invocations-bidirectional-stream"
GRPC = b"/inference.GRPCInferenceService/"
DUPLEX = b"/endpoints/echo/invocations-bidirectional-stream"
TOKENS = 256
PIECE = bytes(n * 7 & 255 for n in range(1024))


def post(path: bytes, content_type: bytes, body: bytes, extra: bytes = b"") -> bytes:
    """A whole HTTP/1.1 request."""
    head = b"POST %b HTTP/1.1\r\nHost: %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n"
    return head % (path, HOST, content_type, len(body), extra) + body


def infer_binary(count: int) -> bytes:
    """A v2 infer request with one FP32 tensor of shape [1, count] as binary data, answered in kind."""
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, count], "parameters": {"binary_data_size": 4 * count}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}, separators=(",", ":")).encode()
    body = head + struct.pack("<f", 0.125) * count
    length = b"Inference-Header-Content-Length: %d\r\n" % len(head)
    return post(INFER, b"application/octet-stream", body, length)


def infer_stream(count: int) -> tuple[tuple[tuple[bytes, bytes], ...], bytes]:
    """The fields and the body of `infer_binary` as HTTP/2 has them."""
    head, _, body = infer_binary(count).partition(b"\r\n\r\n")
    given = [line.split(b": ", 1) for line in head.split(b"\r\n")[2:]]
    pseudo = ((b":method", b"POST"), (b":scheme", b"http"), (b":authority", HOST), (b":path", INFER))
    return (*pseudo, *((name.lower(), value) for name, value in given)), body


def infer_json(count: int, rows: int = 1) -> bytes:
    """A v2 infer request like `infer_binary`, with its numbers in JSON."""
    data = [n % 1000 / 8 for n in range(rows * count)]
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [rows, count], "data": data}
    return post(INFER, b"application/json", json.dumps({"inputs": [tensor]}, separators=(",", ":")).encode())


def generate(tokens: int, model: str = "") -> bytes:
    """A request for that many tokens as JSON lines."""
    body = {"inputs": "hello", "parameters": {"max_new_tokens": tokens}, "stream": True}
    path = b"/predictions/" + model.encode() if model else INVOCATIONS
    return post(path, b"application/json", json.dumps(body, separators=(",", ":")).encode())


def events(tokens: int, model: str) -> bytes:
    """A request for that many tokens as server-sent events."""
    asked = {"text_input": "hello", "parameters": {"max_new_tokens": tokens}}
    path = b"/v2/models/%b/generate_stream" % model.encode()
    return post(path, b"application/json", json.dumps(asked, separators=(",", ":")).encode())


def upgrade() -> bytes:
    """A WebSocket handshake, with the key of RFC 6455's own example."""
    return (
        b"GET %b HTTP/1.1\r\nHost: %b\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ) % (WEBSOCKET, HOST)


def frame(payload: bytes) -> bytes:
    """A client's binary WebSocket frame of 126 to 65,535 bytes, masked."""
    key = b"\x5a\xc3\x0f\x96"
    run = (key * (len(payload) // 4 + 1))[: len(payload)]
    masked = int.from_bytes(payload, "big") ^ int.from_bytes(run, "big")
    return b"\x82\xfe" + len(payload).to_bytes(2, "big") + key + masked.to_bytes(len(payload), "big")


def answer_frame(payload: bytes) -> bytes:
    """The echo of `frame`, as a server writes it."""
    return b"\x82\x7e" + len(payload).to_bytes(2, "big") + payload


def duplex_message() -> bytes:
    """1 KiB as the AWS SDK sends it: an event in a signed envelope, here without a signature."""
    return b"".join(encode_request_part(PIECE, DataType.BINARY, Completion.COMPLETE, date_ms=1_750_000_000_000))


def duplex_answer() -> bytes:
    """The echo of `duplex_message`, as the gateway writes it: the event alone."""
    return b"".join(encode_part(PIECE, DataType.BINARY, Completion.COMPLETE))


DUPLEX_HEAD = (
    (b":method", b"POST"), (b":scheme", b"http"), (b":authority", HOST), (b":path", DUPLEX),
    (b"content-type", CONTENT_TYPE.encode()),
)  # fmt: skip


def call_head(method: str) -> tuple[tuple[bytes, bytes], ...]:
    """The fields of a gRPC call of the inference service."""
    return (
        (b":method", b"POST"), (b":scheme", b"http"), (b":authority", HOST), (b":path", GRPC + method.encode()),
        (b"te", b"trailers"), (b"content-type", b"application/grpc"),
    )  # fmt: skip


def call_message(count: int, model: str = "identity") -> bytes:
    """A framed ModelInferRequest with one FP32 tensor of shape [1, count], raw."""
    return grpc_request({"INPUT0": np.full((1, count), 0.125, np.float32)}, model)
