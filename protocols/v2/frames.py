"""Inference requests and replies (v2) in sequence: each as a binary frame, on a stream or in a WebSocket."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import final

import msgspec

from protocols.buffers import untouched
from protocols.errors import RemoteProtocolError
from protocols.events import NEED_DATA, Buffer, Signal
from protocols.json import strict
from protocols.json.text import STEP
from protocols.sse import MEDIA_TYPE
from protocols.v2.body import ANSWER_LIMITS, DEFAULT_LIMITS, IHCL, V2Limits
from protocols.v2.numbers import apart_from_numbers
from protocols.v2.request import WantedOutput, encode_infer_request
from protocols.v2.response import V2Answer, decode_infer_reply
from protocols.v2.tensors import NO_PARAMETERS, Parameters, V2Error, V2Tensor, show

FRAMES = "application/vnd.everywire.infer-stream"
"""The media type of a body that is a sequence of frames."""

FRAME_HEADER = struct.Struct("<IQ")
"""The beginning of a frame: the length of its JSON (u32) and of the binary data behind it (u64), little-endian."""

_GiB = 1024**3
_JOINED = 64 * 1024  # bytes of JSON up to which it is copied into one buffer with its lengths


def prefers_frames(accept: Sequence[bytes]) -> bool:
    """True if the values of a request's Accept fields ask for frames at least as much as for server-sent events (RFC 9110
    section 12.5.1). A wildcard does not ask for frames: only a client that names them can read them."""
    weights = media_weights(accept)
    return 0 < weights.get(FRAMES, 0.0) >= weights.get(MEDIA_TYPE, 0.0)


def media_weights(accept: Sequence[bytes]) -> dict[str, float]:
    """The weight of each media type, in lower case, in the values of a request's Accept fields, from 0 (not acceptable) to 1
    (RFC 9110 section 12.4.2)."""
    weights: dict[str, float] = {}
    for value in accept:
        for element in value.decode("latin-1").lower().split(","):
            media_type, *parameters = [part.strip() for part in element.split(";")]
            weights[media_type] = next((_weight(p[2:]) for p in parameters if p.startswith("q=")), 1.0)
    return weights


def _weight(text: str) -> float:
    """A q-value; 0, which is not acceptable, if it is malformed."""
    return float(text) if re.fullmatch(r"(?:0(?:\.\d{0,3})?|1(?:\.0{0,3})?)", text) else 0.0


@final
class V2Frame(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """One request or reply. `body` is read like an HTTP body whose Inference-Header-Content-Length is `header_length`."""

    body: memoryview
    header_length: int


def encode_frame(text: Buffer, data: Sequence[Buffer] = ()) -> list[Buffer]:
    """The frame of a JSON text and its binary data, as buffers to write in order. The data are not copied."""
    lengths = FRAME_HEADER.pack(len(text), sum(map(len, data)))
    return [lengths + text, *data] if len(text) <= _JOINED else [lengths, text, *data]


def split_frame(message: Buffer) -> V2Frame:
    """The frame in a whole message. Its body is a view of the message. V2Error if the two lengths at its beginning do not
    match the rest."""
    view = memoryview(message)
    if view.nbytes < FRAME_HEADER.size:
        raise V2Error(f"a binary message begins with {FRAME_HEADER.size} bytes of lengths, got {view.nbytes} bytes in all")
    header_length, size = FRAME_HEADER.unpack_from(view)
    rest = view.nbytes - FRAME_HEADER.size
    if header_length + size != rest:
        raise V2Error(
            f"a binary message of {header_length} bytes of JSON and {show(size)} of binary data, "
            f"but {rest} bytes follow its lengths"
        )
    return V2Frame(body=view[FRAME_HEADER.size :], header_length=header_length)


@final
class FrameDecoder:
    """Decodes a body of frames, whatever pieces it arrives in.

    The lengths of a frame are checked before any memory is taken for it: `json` limits its JSON, and `body` all of it, in
    bytes. RemoteProtocolError for more, and for a body that ends inside a frame, and then at each call. The bytes are copied
    once, into the frame's own memory.
    """

    __slots__ = ("_body", "_body_limit", "_error", "_filled", "_header_length", "_json_limit", "_rest")

    def __init__(self, *, json: int = DEFAULT_LIMITS.json, body: int = _GiB) -> None:
        self._json_limit, self._body_limit = json, body
        self._rest = bytearray()  # input behind the current frame
        self._body: memoryview | None = None
        self._header_length = self._filled = 0
        self._error: RemoteProtocolError | None = None

    @property
    def need(self) -> int:
        """The bytes of memory that the current frame takes; 0 while its lengths are unknown."""
        return 0 if self._body is None else len(self._body)

    def receive_data(self, data: Buffer) -> None:
        """Stores bytes. To bound the memory, call `next_frame` until NEED_DATA before storing more."""
        view = memoryview(data)
        self._rest += view[self._fill(view) :]

    def receive_eof(self) -> None:
        """Tells that the body has ended. RemoteProtocolError if a frame is incomplete."""
        if self._error is None and (self._body is not None or self._rest):
            got = f"{self._filled} of {len(self._body)} bytes" if self._body is not None else f"{len(self._rest)} bytes"
            self._error = RemoteProtocolError(f"the stream ended in the middle of a frame, after {got}")
        if self._error is not None:
            raise self._error.again()

    def next_frame(self) -> V2Frame | Signal:
        """The next frame, or NEED_DATA."""
        if self._error is not None:
            raise self._error.again()
        if self._body is None:
            if len(self._rest) < FRAME_HEADER.size:
                return NEED_DATA
            self._begin()
        body = self._body
        assert body is not None
        if self._filled < len(body):
            return NEED_DATA
        self._body = None
        return V2Frame(body=body.toreadonly(), header_length=self._header_length)

    def _begin(self) -> None:
        self._header_length, size = FRAME_HEADER.unpack_from(self._rest)
        whole = self._header_length + size
        if self._header_length > self._json_limit:
            text = f"the JSON of a frame is at most {self._json_limit} bytes (json), got {self._header_length}"
            self._error = RemoteProtocolError(text, status=413)
        elif whole > self._body_limit:
            text = f"a frame is at most {self._body_limit} bytes (body), got {whole}"
            self._error = RemoteProtocolError(text, status=413)
        if self._error is not None:
            raise self._error.again()
        self._body = untouched(whole)
        self._filled = 0
        with memoryview(self._rest) as kept, kept[FRAME_HEADER.size :] as behind:
            taken = self._fill(behind)
        del self._rest[: FRAME_HEADER.size + taken]

    def _fill(self, view: memoryview) -> int:
        """Copies bytes into the current frame; returns how many it took."""
        body = self._body
        if body is None:
            return 0
        n = min(len(body) - self._filled, len(view))
        body[self._filled : self._filled + n] = view[:n]
        self._filled += n
        return n


def encode_infer_frame(
    inputs: Sequence[V2Tensor],
    *,
    id: str = "",
    parameters: Parameters = NO_PARAMETERS,
    outputs: Sequence[WantedOutput] = (),
    binary_data_output: bool | None = None,
) -> list[Buffer]:
    """A client's request as one frame: the buffers of one binary WebSocket message. It is as from `encode_infer_request`,
    with all inputs as binary data."""
    _, (text, *data) = encode_infer_request(
        inputs, id=id, parameters=parameters, outputs=outputs, binary_data_output=binary_data_output
    )
    return encode_frame(text, data)


class _Failure(msgspec.Struct):
    error: str | None = None
    id: str | None = None


_decode_failure = msgspec.json.Decoder(_Failure).decode


def decode_streamed_reply(body: Buffer, header_length: int | None = None, limits: V2Limits = ANSWER_LIMITS) -> V2Answer:
    """Reads one reply of many, for a client: the data of a server-sent event or a text message as they are, or a frame's
    body with its `header_length`. V2Error if it is not a v2 reply. If the server reports an error, V2Error with its text and
    status 500, because no status is sent."""
    view = memoryview(body)
    try:
        failure = _decode_failure(view[:header_length])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        failure = _Failure()  # decode_infer_reply reports what is wrong
    if failure.error is not None:
        raise V2Error(failure.error, status=500)
    headers = [] if header_length is None else [(IHCL, b"%d" % header_length)]
    return decode_infer_reply(headers, body, limits=limits)


def failure_body(message: str, id: str = "") -> bytes:
    """The JSON body for one failed request of several."""
    return msgspec.json.encode({"error": message, "id": id} if id else {"error": message})


def id_of(text: Buffer, limits: V2Limits = DEFAULT_LIMITS) -> str:
    """The id of a JSON request that is refused for another reason. Empty if it has none, is not JSON, or has more values,
    apart from the numbers in its data, than allowed."""
    if len(text) > STEP:  # the decoder skips all unneeded members in one step, which would be long
        apart = apart_from_numbers(bytes(text), limits.tensors)
        text = text if apart is None else apart.beside
    if len(text) <= STEP:
        try:
            return _decode_failure(text).id or ""
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
    try:
        head = strict.loads(
            text, depth=limits.depth, allow_nonfinite=True, containers=limits.containers, values=limits.values
        )
    except strict.JSONError:
        return ""
    id = head.get("id") if type(head) is dict else None
    return id if type(id) is str else ""
