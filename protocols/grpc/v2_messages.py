"""The inference messages of gRPC's Open Inference Protocol (v2): ModelInferRequest, ModelInferResponse and the stream's.

They are read and written by hand: a tensor's bytes stay a view of the message, and are sent without a copy. A request that
differs from an earlier one only in its raw data and its id is recognized by the bytes before that data, and read by a
plan. FP32 [1, 16] then takes 1.0 us (2.0 with an id), as does FP32 of 16 MiB; without a plan it takes 9 us. A request
without a plan pays 1 us for the search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import msgspec
import numpy as np

from protocols.events import Buffer
from protocols.floods import GRPC_AT_ONCE, GRPC_FIELDS, GRPC_NAME
from protocols.grpc.contents import FIELD_OF
from protocols.grpc.protobuf import LENGTH, ProtobufError, Room, encode_field, encode_varint, fields, read_text
from protocols.grpc.v2_fields import (
    FINAL,
    ID,
    INFER_RESPONSE,
    KEPT_BYTES,
    MODEL_NAME,
    MODEL_VERSION,
    NAME,
    OUTPUT_PARAMETERS,
    OUTPUTS,
    PARAMETERS,
    RAW_INPUTS,
    RAW_OUTPUTS,
    TENSORS,
    TensorFields,
    add_parameter,
    check_many,
    check_names,
    drop_transfer,
    encode_id,
    encode_names,
    encode_parameters,
    encode_tensor,
    join,
    join_raw,
    keep,
    raw_data,
    read_name,
    read_tensors,
    typed_tensors,
)
from protocols.v2.body import DEFAULT_LIMITS, V2Limits, read_parameters
from protocols.v2.metadata import ModelSignature
from protocols.v2.request import V2Request, WantedOutput, check_inputs, check_output, read_count
from protocols.v2.response import check_outputs, choose_outputs
from protocols.v2.tensors import NO_PARAMETERS, BytesData, Parameters, V2Error, V2Tensor, show

EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"
"""The parameter of a request that asks for an empty response at its end, if the model is decoupled."""

_PARAMETER = 100  # bytes of memory, about, that an entry of a map takes beside its texts
_ELEMENT = 5  # bytes of the shortest element of BYTES but the empty one
_LENGTHS = 4  # plans that are tried for messages of one size

_INFER_RESPONSE_TAG = b"%c" % INFER_RESPONSE
_array = np.ndarray


# Requests, as a server reads them


class MessageSize(NamedTuple):
    """The parts of a ModelInferRequest whose fields are read one by one, in bytes."""

    described: int
    """All but the contents of tensors: names, parameters, outputs."""
    tensors: int
    """The tensors, with the typed contents that they may have."""

    @property
    def cost(self) -> int:
        """The most bytes of memory that the fields take beside the message, before arrays are made: contents in many pieces
        are joined, with a length for each element of BYTES, and parameters become objects."""
        fields = min((self.described + self.tensors) // 2, GRPC_FIELDS)
        return self.described + 2 * self.tensors + _PARAMETER * fields


def size_of(message: Buffer, at_most: int = GRPC_FIELDS) -> MessageSize | None:
    """Measures a ModelInferRequest; None if it has more than `at_most` fields of its own. ProtobufError for a malformed
    message."""
    view, described, tensors, room = memoryview(message).cast("B"), 0, 0, Room(at_most)
    try:
        for tag, value, _ in fields(view, room):
            if tag == TENSORS:
                tensors += len(value)
            elif tag != RAW_INPUTS and tag & 7 == LENGTH:
                described += len(value)
    except ProtobufError as e:
        if e.over_limit:
            return None
        raise
    return MessageSize(described, tensors)


def read_names(message: Buffer) -> tuple[str, str, str]:
    """The model's name and version and the id of a ModelInferRequest, whatever else it holds: for the answer to a request
    that is refused. Names behind many other fields are not looked for, and very long ones are left out. ProtobufError for a
    malformed message."""
    found, room = {MODEL_NAME: "", MODEL_VERSION: "", ID: ""}, Room(GRPC_AT_ONCE)
    try:
        for tag, value, _ in fields(memoryview(message).cast("B"), room):
            if tag in found:
                found[tag] = read_text(value) if len(value) <= GRPC_NAME else ""
    except ProtobufError as e:
        if not e.over_limit:
            raise
    return found[MODEL_NAME], found[MODEL_VERSION], found[ID]


@final
class InferCall(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """A ModelInferRequest. `request` is the part for the model; its inputs are views of the message, which must not change
    while they live. `typed` is True if its tensors came as `contents`; the answer's may too. `empty_final` is the parameter
    `triton_enable_empty_final_response`, which is not passed to the model."""

    model_name: str
    model_version: str
    request: V2Request
    typed: bool = False
    empty_final: bool = False
    plan: InferPlan | None = None

    def check(self, signature: ModelSignature) -> None:
        """Raises V2Error unless the inputs and the requested outputs are those that the model declares. A request read by a
        plan is not checked again for the signature that the plan was last checked for."""
        plan = self.plan
        if plan is not None and plan.checked is signature:
            return
        check_inputs(self.request.inputs, signature)
        for output in self.request.outputs:
            check_output(output.name, signature)
        if plan is not None:
            plan.checked = signature


@final
class InferPlan:
    """The common content of requests that have the same bytes before their first raw contents, except for an id, and raw
    contents of the same sizes."""

    __slots__ = ("checked", "empty_final", "model_name", "model_version", "outputs", "size", "tensors")

    def __init__(self, call: InferCall, tensors: tuple[Any, ...], size: int) -> None:
        self.model_name, self.model_version = call.model_name, call.model_version
        self.outputs, self.empty_final = call.request.outputs, call.empty_final
        self.tensors = tensors
        """For each tensor: name, datatype, dtype, shape, bytes, and the tag and length of the next one's contents."""
        self.size = size
        """The size of the message without its id, in bytes."""
        self.checked: ModelSignature | None = None

    def read(self, message: Buffer, at: int, id: str) -> InferCall | None:
        """The request in a message whose first raw contents begin at `at`. None if it differs from the plan after all."""
        inputs = []
        for name, datatype, dtype, shape, nbytes, between in self.tensors:
            inputs.append(V2Tensor(name=name, datatype=datatype, array=_array(shape, dtype, message, at)))
            if between:
                at += nbytes
                end = at + len(between)
                if message[at:end] != between:
                    return None
                at = end
        return InferCall(
            model_name=self.model_name,
            model_version=self.model_version,
            request=V2Request(id=id, inputs=tuple(inputs), outputs=self.outputs, binary_default=True),
            empty_final=self.empty_final,
            plan=self,
        )


@final
class InferRequestReader:
    """Reads the ModelInferRequests of a server, for all of its models.

    It caches 128 beginnings of requests, each of at most 1 KiB, and never an id, a parameter or a tensor's data. Threads may
    share it.
    """

    __slots__ = ("_lengths", "_limits", "_plans")

    def __init__(self, limits: V2Limits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._plans: dict[bytes, InferPlan] = {}  # by the bytes before the raw contents, without the id
        self._lengths: dict[int, tuple[int, ...]] = {}  # the lengths of those bytes, by the size of a message without its id

    def read(self, message: Buffer) -> InferCall:
        """The request in a message. ProtobufError for a malformed message (gRPC's INTERNAL). V2Error for a request that no
        model can accept (INVALID_ARGUMENT); it names the input, the expected and the actual value. `InferCall.check` checks
        the request against one model."""
        return self.planned(message) or self.call(self.parts(message))

    def planned(self, message: Buffer) -> InferCall | None:
        """The result of `read` if an earlier request began like this one, else None. The cost does not depend on the
        size."""
        if type(message) is not bytes:  # bytes, because arrays may then be views of the message
            message = memoryview(message).toreadonly().cast("B")
        size = len(message)
        lengths = self._lengths
        for length in lengths.get(size, ()):
            plan = self._plans.get(bytes(message[:length]))
            if plan is not None and plan.size == size:
                call = plan.read(message, length, "")
                if call is not None:
                    return call
        begin, end = _find_id(message, size)
        if begin:
            for length in lengths.get(size - end + begin, ()):
                at = length + end - begin
                if at < end:
                    continue
                plan = self._plans.get(bytes(message[:begin]) + bytes(message[end:at]))
                if plan is not None and plan.size == size - end + begin:
                    return plan.read(message, at, read_text(memoryview(message)[begin + 2 : end]))
        return None

    def parts(self, message: Buffer) -> RequestParts:
        """The first half of `read`: the fields of a message. Contents may be copied as they are. ProtobufError and
        V2Error."""
        room = Room(min(GRPC_FIELDS, self._limits.values), "beside the contents of tensors")
        values = Room(self._limits.values, "in the contents of tensors (limits.json_values)")
        return RequestParts(memoryview(message).toreadonly().cast("B"), self._limits, room, values)

    def parts_at_once(self, message: Buffer) -> RequestParts | None:
        """The result of `parts`; None if the message has so many fields that others would wait."""
        room = Room(GRPC_AT_ONCE)
        try:
            return RequestParts(memoryview(message).toreadonly().cast("B"), self._limits, room, room)
        except ProtobufError as e:
            if e.over_limit:
                return None
            raise

    def call(self, parts: RequestParts) -> InferCall:
        """The second half of `read`: the request of these fields. V2Error."""
        call = parts.call()
        self._plan(parts, call)
        return call

    def _plan(self, parts: RequestParts, call: InferCall) -> None:
        """Keeps a plan of a request, if it can have one."""
        message = parts.view
        begin, end = _find_id(message, len(message))
        at, id_bytes = parts.raw_from, end - begin
        request = call.request
        if call.typed or not at or at > KEPT_BYTES + id_bytes or parts.ids != (begin > 0) or end > at:
            return
        if len(request.parameters) or not request.inputs:
            return
        tensors = []
        for index, tensor in enumerate(request.inputs):
            array = tensor.array
            # The bytes of BYTES and BOOL must be checked each time.
            if tensor.parameters or type(array) is BytesData or tensor.datatype == "BOOL" or not array.size:
                return
            between = b""
            if index + 1 < len(parts.raw):
                between = bytes(message[parts.raw_ends[index] : parts.raw_ends[index + 1] - len(parts.raw[index + 1])])
            tensors.append((tensor.name, tensor.datatype, array.dtype, array.shape, array.nbytes, between))
        size = len(message) - id_bytes
        head = bytes(message[:begin]) + bytes(message[end:at])
        lengths = self._lengths.get(size, ())
        if len(head) not in lengths:
            keep(self._lengths, size, (len(head), *lengths[: _LENGTHS - 1]))
        keep(self._plans, head, InferPlan(call, tuple(tensors), size))


def _find_id(message: Buffer, size: int) -> tuple[int, int]:
    """The start and end of the field `id`, if it is in the usual place: behind the name and the version of the model, or one
    of them, and shorter than 128 bytes. Zeros otherwise."""
    at = 0
    for tag in (MODEL_NAME, MODEL_VERSION):
        if at + 1 < size and message[at] == tag:
            if message[at + 1] >= 0x80:
                return 0, 0
            at += 2 + message[at + 1]
    if at and at + 1 < size and message[at] == ID and message[at + 1] < 0x80:
        end = at + 2 + message[at + 1]
        if end <= size:
            return at, end
    return 0, 0


@final
class RequestParts:
    """The fields of a ModelInferRequest, for `InferRequestReader.call`."""

    __slots__ = (
        "_limits", "call_parameters", "id", "ids", "inputs", "model_name", "model_version", "outputs", "raw", "raw_ends",
        "raw_from", "view",
    )  # fmt: skip

    def __init__(self, view: memoryview, limits: V2Limits, room: Room, values: Room) -> None:
        """`room` is for the fields, `values` for those in the contents of tensors."""
        self.view, self._limits = view, limits
        self.model_name = self.model_version = self.id = ""
        self.ids = 0
        self.call_parameters: dict[str, Any] = {}
        self.inputs: list[TensorFields] = []
        self.outputs: list[tuple[str, dict[str, Any]]] = []
        self.raw: list[memoryview] = []
        self.raw_ends: list[int] = []
        self.raw_from = 0
        """The position of the first raw contents if only raw contents follow; else 0."""
        last = 0
        for tag, value, end in fields(view, room):
            if tag == RAW_INPUTS:
                if len(self.raw) == limits.tensors:
                    raise V2Error(f"raw_input_contents has more than {limits.tensors} entries (limits.tensors)")
                if not self.raw:
                    self.raw_from = end - len(value)
                self.raw.append(value)
                self.raw_ends.append(end)
                continue
            last = end
            if tag == MODEL_NAME:
                self.model_name = read_name(value, "model_name")
            elif tag == MODEL_VERSION:
                self.model_version = read_name(value, "model_version")
            elif tag == ID:
                self.id = read_name(value, "id")
                self.ids += 1
            elif tag == PARAMETERS:
                add_parameter(self.call_parameters, value, room)
            elif tag == TENSORS:
                check_many(self.inputs, "inputs", limits)
                self.inputs.append(TensorFields(value, limits, room, values))
            elif tag == OUTPUTS:
                check_many(self.outputs, "outputs", limits)
                self.outputs.append(_read_output(value, room))
        if last > self.raw_from:
            self.raw_from = 0

    @property
    def cost(self) -> int:
        """The most bytes that arrays take besides views of the message."""
        return sum(entry.contents.cost for entry in self.inputs if entry.contents is not None)

    @property
    def work(self) -> int:
        """The number of bytes that are examined one by one to make arrays."""
        looked_at = []
        for raw, entry in zip(self.raw, self.inputs, strict=False):
            if entry.datatype == "BYTES":
                looked_at.append(min(len(raw), _ELEMENT * abs(math.prod(entry.shape))))
            elif entry.datatype == "BOOL":
                looked_at.append(len(raw) // _ELEMENT)
        converted = [entry.contents.converted for entry in self.inputs if entry.contents is not None]
        return sum(converted) + sum(looked_at)

    def call(self) -> InferCall:
        """The request of the fields. V2Error if no model can accept it."""
        parameters = self.call_parameters
        empty_final = False
        if parameters:
            read_parameters({"parameters": parameters}, "the request")
            drop_transfer(parameters)
            empty_final = parameters.pop(EMPTY_FINAL_RESPONSE, False)
            if type(empty_final) is not bool:
                raise V2Error(f"{EMPTY_FINAL_RESPONSE} of the request must be true or false, got {show(empty_final)}")
            for key in parameters:
                if key.startswith("triton_"):
                    raise V2Error(f"parameter {show(key)} of the request: names that begin with triton_ are reserved")
            self._limits.check_sequence(parameters)
        inputs, copied = read_tensors(self.inputs, self.raw, self.view, self._limits, "input")
        request = V2Request(
            id=self.id,
            parameters=parameters or NO_PARAMETERS,
            inputs=inputs,
            outputs=self._wanted() if self.outputs else (),
            binary_default=True,
            copied=copied,
        )
        return InferCall(
            model_name=self.model_name,
            model_version=self.model_version,
            request=request,
            typed=bool(inputs) and not self.raw,
            empty_final=empty_final,
        )

    def _wanted(self) -> tuple[WantedOutput, ...]:
        check_names([name for name, _ in self.outputs], "outputs")
        wanted = []
        for name, parameters in self.outputs:
            count = 0
            if parameters:
                read_parameters({"parameters": parameters}, "output", name)
                count = read_count(parameters.get("classification"), name)
            wanted.append(WantedOutput(name=name, classification=count))
        return tuple(wanted)


def _read_output(view: memoryview, room: Room) -> tuple[str, dict[str, Any]]:
    name = ""
    parameters: dict[str, Any] = {}
    for tag, value, _ in fields(view, room):
        if tag == NAME:
            name = read_name(value, "an output's name")
        elif tag == OUTPUT_PARAMETERS:
            add_parameter(parameters, value, room)
    return name, parameters


# Responses, as a server writes them


@final
class InferResponseWriter:
    """Writes the answers of one model: ModelInferResponse, and for a stream ModelStreamInferResponse.

    It caches 128 beginnings of outputs, and of answers with one output and no id, each of at most 1 KiB. Threads may share
    it.
    """

    __slots__ = ("_heads", "_openings", "_prefix", "_promises", "_signature")

    def __init__(self, signature: ModelSignature, *, version: str = "") -> None:
        self._signature, self._promises = signature, signature.promised is not None
        self._prefix = encode_names(signature.name, version)
        self._openings: dict[tuple[str, str, tuple[int, ...]], bytes] = {}
        self._heads: dict[tuple[str, str, tuple[int, ...], bytes], bytes] = {}

    def render(
        self,
        outputs: Sequence[V2Tensor],
        request: V2Request,
        response_id: str = "",
        parameters: Parameters = NO_PARAMETERS,
        *,
        typed: bool = False,
    ) -> list[Buffer]:
        """The ModelInferResponse to `request` with the model's outputs, as buffers to write in order. Buffers with the data
        of tensors may be the model's own memory, which must not change until they are written.

        Requested outputs come in the requested order; without a request, all come in the model's order. The id is that of
        the request, or `response_id` if the model chose one. `typed` writes `contents` if they have a field for each
        output's datatype. Otherwise raw contents are written, one entry for each output, because clients match them by
        position. V2Error 400 for a requested output that does not exist, 500 if the model broke its own declaration.
        """
        return self._render(outputs, request, response_id, parameters, b"", typed)

    def render_streamed(
        self,
        outputs: Sequence[V2Tensor],
        request: V2Request,
        response_id: str = "",
        parameters: Parameters = NO_PARAMETERS,
        *,
        final: bool,
        typed: bool = False,
    ) -> list[Buffer]:
        """The ModelStreamInferResponse with the response that `render` makes. `final` is its parameter
        `triton_final_response`."""
        buffers = self._render(outputs, request, response_id, parameters, FINAL[final], typed)
        size = encode_varint(sum(map(len, buffers)))
        return [_INFER_RESPONSE_TAG + size, *buffers]

    def render_end(self, request: V2Request) -> bytes:
        """The ModelStreamInferResponse that ends the responses of a decoupled model: it has no outputs."""
        id = encode_id(request.id) if request.id else b""
        return encode_field(2, b"".join((self._prefix, id, FINAL[True])))

    def _render(
        self,
        outputs: Sequence[V2Tensor],
        request: V2Request,
        response_id: str,
        parameters: Parameters,
        end: bytes,
        typed: bool,
    ) -> list[Buffer]:
        asked = request.outputs
        if len(outputs) == 1 and (
            not asked or (len(asked) == 1 and asked[0].name == outputs[0].name and not asked[0].classification)
        ):
            if self._promises:
                check_outputs(outputs, self._signature, request)
        else:
            outputs = [tensor for tensor, _ in choose_outputs(outputs, request, self._signature)]
        id = response_id or request.id
        known: tuple[str, str, tuple[int, ...], bytes] | None = None
        if len(outputs) == 1 and not (id or parameters or typed):
            tensor = outputs[0]
            if not tensor.parameters and tensor.datatype != "BYTES":  # the size of BYTES does not follow from the shape
                known = tensor.name, tensor.datatype, tensor.array.shape, end
                if (before := self._heads.get(known)) is not None:
                    return [before, *raw_data(tensor)]
        head = [self._prefix]
        if id:
            head.append(encode_id(id))
        if parameters:
            head.append(encode_parameters(4, parameters, "the response"))
        head.append(end)
        if typed and all(tensor.datatype in FIELD_OF for tensor in outputs):
            return join(head, typed_tensors(outputs))
        for tensor in outputs:
            opening = None
            if not tensor.parameters:
                opening = self._openings.get((tensor.name, tensor.datatype, tensor.array.shape))
            head.append(opening or self._open(tensor))
        buffers = join_raw(head, RAW_OUTPUTS, outputs)
        if known is not None and len(buffers[0]) <= KEPT_BYTES:
            keep(self._heads, known, bytes(buffers[0]))
        return buffers

    def _open(self, tensor: V2Tensor) -> bytes:
        """The fields of an output without its contents."""
        opening = encode_field(5, encode_tensor(tensor))
        if not tensor.parameters and len(opening) <= KEPT_BYTES:
            keep(self._openings, (tensor.name, tensor.datatype, tensor.array.shape), opening)
        return opening


def render_stream_error(message: str, id: str = "", *, model_name: str = "", model_version: str = "") -> bytes:
    """The ModelStreamInferResponse for a request of a stream that is refused or has failed: its error, its id, and
    `triton_final_response` true. The stream goes on after it."""
    response = encode_names(model_name, model_version) + (encode_id(id) if id else b"") + FINAL[True]
    return encode_field(1, message.encode(errors="replace")) + encode_field(2, response)
