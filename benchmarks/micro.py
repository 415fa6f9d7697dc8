"""Unit costs of machines and codecs through their public names, each beside a floor that does the same work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from struct import Struct
from zlib import crc32

import h11
import numpy as np
from wsproto.connection import Connection as LibraryConnection
from wsproto.connection import ConnectionType
from wsproto.events import BytesMessage

from benchmarks import batching, grpc_codec, head_parser, http2_heads, json_library, requests, rolling_batch
from benchmarks.units import Case, Cost, repeated
from protocols import lmi, v2
from protocols.aws.bidi import Completion, DataType, PartDecoder, encode_part, encode_request_part
from protocols.events import NEED_DATA, Data, End, Frame, Opcode, Response
from protocols.http1.connection import HTTP1Connection
from protocols.roles import Role
from protocols.websocket.connection import WebSocketConnection

_WRITE = 65_536
_ANSWER = bytes(168)
_HEAD = (
    (b"content-type", b"application/octet-stream"), (b"content-length", b"168"),
    (b"x-request-id", b"8f14e45f-ceea-467f-9c1b-2f5d6b7a8c9d"),
)  # fmt: skip
_LINE = b'{"token": {"id": 763, "text": " token", "log_prob": -0.5}}\n'


# ---- HTTP/1.1


def http1() -> Iterator[Case]:
    """A whole unary exchange and a chunk of a stream: our server machine, by hand, and h11."""
    yield Case(
        name="unary exchange, 64 bytes of tensor",
        costs={"HTTP1Connection": _http1_unary(), "by hand": repeated(_http1_by_hand), "h11": _http1_h11()},
    )
    yield Case(
        name="token out, a chunk",
        costs={"HTTP1Connection": _http1_chunk(), "by hand": repeated(lambda: b"%x\r\n%b\r\n" % (len(_LINE), _LINE))},
    )


def _http1_unary() -> Cost:
    machine, request = HTTP1Connection(Role.SERVER), requests.infer_binary(16)

    def step() -> None:
        machine.receive_data(request)
        while (event := machine.next_event()) is not NEED_DATA and type(event) is not End:
            if type(event) is Data:
                machine.credit(event.stream, len(event.buffers[0]))
        stream = machine.stream
        machine.send(Response(stream=stream, status=200, headers=_HEAD))
        machine.send(Data(stream=stream, buffers=(_ANSWER,)))
        machine.send(End(stream=stream))
        machine.data_to_send(_WRITE)
        machine.data_sent()

    return repeated(step)


_REQUEST = requests.infer_binary(16)


def _http1_by_hand() -> object:
    head, _, body = _REQUEST.partition(b"\r\n\r\n")
    line, *fields = head.split(b"\r\n")
    found = {}
    for field in fields:
        name, _, value = field.partition(b":")
        found[name.lower()] = value.strip()
    lines = b"".join(b"%b: %b\r\n" % field for field in _HEAD)
    return line, body[: int(found[b"content-length"])], b"HTTP/1.1 200 OK\r\n%b\r\n%b" % (lines, _ANSWER)


def _http1_h11() -> Cost:
    connection = h11.Connection(h11.SERVER)

    def step() -> None:
        connection.receive_data(_REQUEST)
        while type(connection.next_event()) is not h11.EndOfMessage:
            pass
        connection.send(h11.Response(status_code=200, headers=list(_HEAD)))
        connection.send(h11.Data(data=_ANSWER))
        connection.send(h11.EndOfMessage())
        connection.start_next_cycle()

    return repeated(step)


def _http1_chunk() -> Cost:
    machine = HTTP1Connection(Role.SERVER)
    machine.receive_data(requests.generate(requests.TOKENS))
    while (event := machine.next_event()) is not NEED_DATA and type(event) is not End:
        pass
    machine.send(Response(stream=machine.stream, status=200))

    def step() -> None:
        machine.send(Data(stream=1, buffers=(_LINE,)))
        machine.data_to_send(_WRITE)
        machine.data_sent()

    return repeated(step)


# ---- HTTP/2


def http2() -> Iterator[Case]:
    """The work of http2_heads: heads, frames and whole unary exchanges, beside h2."""

    def best(work: http2_heads.Work, server: type[http2_heads.Ours] | type[http2_heads.Plain]) -> float:
        return min(work(server()) for _ in range(3))

    for name, work in http2_heads.WORK.items():
        yield Case(
            name=name,
            costs={"HTTP2Connection": partial(best, work, http2_heads.Ours), "h2": partial(best, work, http2_heads.Plain)},
        )


# ---- WebSocket


def websocket() -> Iterator[Case]:
    """A frame in and a frame out of a server: ours, by hand, and wsproto's."""
    for size in (1024, 16_384):
        payload = (requests.PIECE * 16)[:size]
        masked, name = requests.frame(payload), f"{size // 1024} KiB"
        yield Case(
            name=f"frame in, {name}",
            costs={
                "WebSocketConnection": _frame_in(masked, size),
                "by hand": repeated(partial(_unmasked, masked)),
                "wsproto": _library_frame_in(masked),
            },
        )
        yield Case(
            name=f"frame out, {name}",
            costs={
                "WebSocketConnection": _frame_out(payload),
                "by hand": repeated(partial(requests.answer_frame, payload)),
                "wsproto": _library_frame_out(payload),
            },
        )


def _unmasked(masked: bytes) -> bytes:
    key, payload = np.frombuffer(masked[4:8], np.uint32), np.frombuffer(masked, np.uint32, offset=8)
    return (payload ^ key).tobytes()


def _frame_in(masked: bytes, size: int) -> Cost:
    machine = WebSocketConnection(Role.SERVER)

    def step() -> None:
        machine.receive_data(masked)
        machine.next_event()
        machine.credit(size)
        machine.next_event()

    return repeated(step)


def _frame_out(payload: bytes) -> Cost:
    machine = WebSocketConnection(Role.SERVER)

    def step() -> None:
        machine.send(Frame(opcode=Opcode.BINARY, fin=True, data=payload))
        machine.data_to_send(_WRITE)
        machine.data_sent()

    return repeated(step)


def _library_frame_in(masked: bytes) -> Cost:
    connection = LibraryConnection(ConnectionType.SERVER)

    def step() -> None:
        connection.receive_data(masked)
        for _ in connection.events():
            pass

    return repeated(step)


def _library_frame_out(payload: bytes) -> Cost:
    connection = LibraryConnection(ConnectionType.SERVER)
    return repeated(lambda: connection.send(BytesMessage(data=payload)))


# ---- event-stream

_PRELUDE = Struct(">III")
_LENGTHS = Struct(">II")


def eventstream() -> Iterator[Case]:
    """A part of 1 KiB in its signed envelope in, and one out: our codec, and its checksums and cuts alone."""
    message = b"".join(encode_request_part(requests.PIECE, DataType.BINARY, Completion.COMPLETE, date_ms=1_750_000_000_000))
    decoder = PartDecoder()

    def read() -> None:
        decoder.receive_data(message)
        decoder.next_part()

    yield Case(
        name="part in, 1 KiB in an envelope",
        costs={"PartDecoder": repeated(read), "by hand": repeated(partial(_open_twice, message))},
    )
    out = partial(encode_part, requests.PIECE, DataType.BINARY, Completion.COMPLETE)
    block = b"".join(out())[12 : 12 + _PRELUDE.unpack_from(b"".join(out()))[1]]
    yield Case(
        name="part out, 1 KiB",
        costs={"encode_part": repeated(out), "by hand": repeated(partial(_close, block, requests.PIECE))},
    )


def _open_twice(message: bytes) -> bytes:
    return _open(_open(message))


def _open(message: bytes) -> bytes:
    total, headers, _ = _PRELUDE.unpack_from(message)
    crc32(message[:8])
    crc32(message[: total - 4])
    return message[12 + headers : total - 4]


def _close(block: bytes, payload: bytes) -> bytes:
    lengths = _LENGTHS.pack(16 + len(block) + len(payload), len(block))
    head = lengths + crc32(lengths).to_bytes(4, "big") + block
    return head + payload + crc32(payload, crc32(head)).to_bytes(4, "big")


# ---- v2


def v2_infer() -> Iterator[Case]:
    """A request of FP32 [1, 16] read and its answer written: our codec, and numpy with a JSON library and no check."""
    binary, plain = (request.partition(b"\r\n\r\n")[2] for request in (requests.infer_binary(16), requests.infer_json(16)))
    own = b'{"id":"8f14e45f-ceea-467f",' + plain[1:]
    length = len(binary) - 64
    signature = v2.ModelSignature(name="identity", versions=("1",), platform="python")
    codec = v2.InferCodec(signature, version="1")

    def ours(body: bytes, header_length: int | None) -> object:
        request = codec.parse(body, header_length)
        tensor = request.inputs[0]
        output = v2.V2Tensor(name="OUTPUT0", datatype=tensor.datatype, array=tensor.array)
        return codec.render([output], request)

    yield Case(
        name="binary, FP32 [1, 16]",
        costs={"v2": repeated(partial(ours, binary, length)), "by hand": repeated(partial(_binary_by_hand, binary, length))},
    )
    for name, body in (("JSON, FP32 [1, 16]", plain), ("JSON with an id, FP32 [1, 16]", own)):
        yield Case(
            name=name,
            costs={"v2": repeated(partial(ours, body, None)), "by hand": repeated(partial(_json_by_hand, body))},
        )


def _binary_by_hand(body: bytes, length: int) -> object:
    entry = json.loads(body[:length])["inputs"][0]
    array = np.frombuffer(body, np.float32, offset=length).reshape(entry["shape"])
    output = {"name": "OUTPUT0", "datatype": "FP32", "shape": array.shape, "parameters": {"binary_data_size": array.nbytes}}
    return json.dumps({"model_name": "identity", "outputs": [output]}).encode(), array.data


def _json_by_hand(body: bytes) -> object:
    entry = json.loads(body)["inputs"][0]
    array = np.array(entry["data"], np.float32).reshape(entry["shape"])
    output = {"name": "OUTPUT0", "datatype": "FP32", "shape": array.shape, "data": array.ravel().tolist()}
    return json.dumps({"model_name": "identity", "outputs": [output]}).encode()


# ---- LMI


def lmi_token() -> Iterator[Case]:
    """The line of a token in JSON lines."""
    body = requests.generate(10**9).partition(b"\r\n\r\n")[2]
    # A line costs more the longer the answer's text is: begin a new answer now and then, as in production.
    encoder = [lmi.TextEncoder(lmi.parse_request(body, "application/json"))]

    def ours() -> None:
        if encoder[0].generated_tokens >= requests.TOKENS:
            encoder[0] = lmi.TextEncoder(lmi.parse_request(body, "application/json"))
        encoder[0].token(763, " token", -0.5)

    def by_hand() -> bytes:
        return b'{"token": %b}\n' % json.dumps({"id": 763, "text": " token", "log_prob": -0.5}).encode()

    yield Case(name="token's line", costs={"TextEncoder": repeated(ours), "by hand": repeated(by_hand)})


Group = Callable[[], Iterable[Case]]
GROUPS: dict[str, Group] = {
    "http1": http1,
    "http2": http2,
    "websocket": websocket,
    "eventstream": eventstream,
    "v2": v2_infer,
    "grpc": grpc_codec.cases,
    "lmi": lmi_token,
    "batching": batching.cases,
    "head-parser": head_parser.cases,
    "json-library": json_library.cases,
    "rolling-batch": rolling_batch.cases,
}
"""All groups by name."""


def purpose(group: Group) -> str:
    """The first line of a group's docstring."""
    text = (group.__doc__ or "").strip()
    return text.splitlines()[0] if text else ""
