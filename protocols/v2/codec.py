"""The v2 codec of one model: what clients usually send and models usually answer, at small cost.

`parse_infer` and `render_infer` are the rules, and the one place of their errors. Here the same comes out for less:
heads and JSON that were seen before, requests of the common shape, and replies without parameters. The rest goes to
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, final

import msgspec
import numpy as np

from protocols.events import Buffer
from protocols.v2.body import DEFAULT_LIMITS, JSON_FORM, V2Limits, form_of
from protocols.v2.metadata import ModelSignature
from protocols.v2.request import V2Request, WantedOutput, parse_infer
from protocols.v2.response import V2Reply, check_outputs, choose_outputs, render_infer
from protocols.v2.templates import Template, template_of
from protocols.v2.tensors import NO_PARAMETERS, BytesData, Parameters, V2Error, V2Tensor, encode_binary, to_json
from protocols.v2.typed_request import read_typed

_KEPT = 128  # entries of a memo ...
_KEPT_BYTES = 1024  # ... and bytes of the text in each
_COMPARED = 256 * 1024  # bytes of JSON: one above is not compared with what was seen before

_array = np.ndarray
_encode = msgspec.json.Encoder().encode

Key = TypeVar("Key")
Value = TypeVar("Value")


class _Plan(msgspec.Struct, frozen=True, gc=False):
    """What a head means whatever the `size` bytes of binary data after it: of each input the name, the datatype, the
    dtype, the shape and where it begins. Heads with an id or parameters have none: they are one client's own."""

    size: int
    inputs: tuple[tuple[str, str, np.dtype[Any], tuple[int, ...], int], ...]
    outputs: tuple[WantedOutput, ...]
    binary_default: bool


@final
class InferCodec:
    """Reads the inference requests of one model and writes the replies, as `parse_infer` and `render_infer` do.

    It remembers 128 heads of requests, as many requests in JSON without their data and as many beginnings of outputs,
    each of at most 1 KiB, and never an id, a parameter or a tensor's data. Threads may share it.
    """

    __slots__ = (
        "_largest",
        "_limits",
        "_openings",
        "_plans",
        "_prefix",
        "_promises",
        "_recent",
        "_signature",
        "_templates",
        "_version",
    )

    def __init__(self, signature: ModelSignature, *, version: str = "", limits: V2Limits = DEFAULT_LIMITS) -> None:
        self._signature, self._version, self._limits = signature, version, limits
        self._largest, self._promises = limits.json, signature.promised is not None
        named = {"model_name": signature.name} | ({"model_version": version} if version else {})
        self._prefix = _encode(named)[:-1] + b","
        self._plans: dict[bytes, _Plan] = {}
        self._templates: dict[bytes, Template | None] = {}  # by the text before the first "data"; None was seen once
        self._recent: Template | None = None  # what was read last, as one client seldom comes once
        self._openings: dict[tuple[str, str, tuple[int, ...]], bytes] = {}

    @property
    def signature(self) -> ModelSignature:
        """What the model declares."""
        return self._signature

    def parse(self, body: Buffer, header_length: int | None) -> V2Request:
        """The request in a complete body: see `parse_infer`."""
        if type(body) is not bytes:  # which arrays may view as it is
            body = memoryview(body).toreadonly().cast("B")
        size = len(body)
        if header_length is None:
            if size > self._largest:
                return parse_infer(body, None, self._signature, self._limits)
            text, recent = body if type(body) is bytes else bytes(body), self._recent
            if recent is not None and size <= _COMPARED and (request := recent.read(text)) is not None:
                return request
            return self._read_json(text)
        if not 0 < header_length <= size or header_length > self._largest:
            return parse_infer(body, header_length, self._signature, self._limits)
        head = bytes(body[:header_length])
        size -= header_length
        plan = self._plans.get(head) if header_length <= _KEPT_BYTES else None
        if plan is None or plan.size != size:
            request = read_typed(head, memoryview(body)[header_length:], self._signature, self._limits)
            if request is None:
                del head  # which may be large
                return parse_infer(body, header_length, self._signature, self._limits)
            if header_length <= _KEPT_BYTES and (plan := _plan_of(request, size)) is not None:
                _keep(self._plans, head, plan)
            return request
        inputs = [
            V2Tensor(name=name, datatype=datatype, array=_array(shape, dtype, body, header_length + at))
            for name, datatype, dtype, shape, at in plan.inputs
        ]
        return V2Request(inputs=tuple(inputs), outputs=plan.outputs, binary_default=plan.binary_default)

    def _read_json(self, text: bytes) -> V2Request:
        """The request in a text that is not as the last one was."""
        if len(text) > _COMPARED:
            return read_typed(text, None, self._signature, self._limits) or self._read_by_rules(text)
        cut = text.find(b'"data"', 0, _KEPT_BYTES)
        key = text[:cut] if cut > 0 else b""
        template = self._templates.get(key)
        if template is not None and template is not self._recent and (request := template.read(text)) is not None:
            self._recent = template
            return request
        request = read_typed(text, None, self._signature, self._limits)
        if request is None:
            return self._read_by_rules(text)
        if key and not _is_somebodys(request):
            # what comes once, like a shape that no other has, is not worth taking apart
            again = template is None and key in self._templates
            _keep(self._templates, key, template_of(text, request, _KEPT_BYTES) if again else None)
        return request

    def _read_by_rules(self, text: bytes) -> V2Request:
        return parse_infer(text, None, self._signature, self._limits)

    def render(
        self,
        outputs: Sequence[V2Tensor],
        request: V2Request,
        response_id: str = "",
        parameters: Parameters = NO_PARAMETERS,
    ) -> V2Reply:
        """The reply to `request` with what the model gave: see `render_infer`."""
        try:
            if not parameters:
                data: list[Buffer] = []
                asked = request.outputs
                if len(outputs) == 1 and (not asked or (len(asked) == 1 and _is_just(asked[0], outputs[0]))):
                    if self._promises:
                        check_outputs(outputs, self._signature, request)
                    binary = asked[0].binary if asked else None
                    entries = self._write_output(outputs[0], request.binary_default if binary is None else binary, data)
                else:
                    chosen = choose_outputs(outputs, request, self._signature)
                    entries = b",".join([self._write_output(tensor, binary, data) for tensor, binary in chosen])
                if id := response_id or request.id:
                    text = b'%b"id":%b,"outputs":[%b]}' % (self._prefix, _encode(id), entries)
                else:
                    text = b"".join((self._prefix, b'"outputs":[', entries, b"]}"))
                if data:
                    return V2Reply(form=form_of(len(text), data), buffers=[text, *data])
                return V2Reply(form=JSON_FORM, buffers=[text])
        except (V2Error, TypeError, ValueError):
            pass  # the rules say it again, in their words
        name, version = self._signature.name, self._version
        return render_infer(name, version, outputs, request, response_id, parameters, self._signature)

    def _write_output(self, tensor: V2Tensor, binary: bool, data: list[Buffer]) -> bytes:
        """The JSON of an output, whose binary data is added to `data`. TypeError for one with parameters."""
        if tensor.parameters:
            raise TypeError("parameters are written by the rules")
        array, datatype = tensor.array, tensor.datatype
        opening = self._openings.get((tensor.name, datatype, array.shape)) or self._open(tensor)
        if not binary:
            return b"".join((opening, b'"data":', to_json(array, datatype), b"}"))
        buffers = encode_binary(array, datatype)
        data += buffers
        return b'%b"parameters":{"binary_data_size":%d}}' % (opening, sum(map(len, buffers)))

    def _open(self, tensor: V2Tensor) -> bytes:
        """The JSON of an output as far as its shape."""
        name, datatype, shape = key = (tensor.name, tensor.datatype, tensor.array.shape)
        if type(name) is not str or not name:
            raise TypeError("names are the rules' to refuse")
        opening = _encode({"name": name, "datatype": datatype, "shape": shape})[:-1] + b","
        if len(opening) <= _KEPT_BYTES:
            _keep(self._openings, key, opening)
        return opening


def _is_just(asked: WantedOutput, output: V2Tensor) -> bool:
    """Whether that output is asked for, and as it is."""
    return asked.name == output.name and not asked.classification


def _is_somebodys(request: V2Request) -> bool:
    """Whether it holds an id or parameters, which are one client's own."""
    if request.id or request.parameters:
        return True
    for tensor in request.inputs:  # noqa: SIM110, a generator would cost more than the rest
        if tensor.parameters:
            return True
    return False


def _plan_of(request: V2Request, size: int) -> _Plan | None:
    """The plan of the head of `request`, after which came `size` bytes, if it may have one."""
    if _is_somebodys(request):
        return None
    inputs = []
    at = 0
    for tensor in request.inputs:
        array = tensor.array
        # The bytes of BYTES and BOOL are looked at each time.
        if type(array) is BytesData or tensor.datatype == "BOOL" or not array.size:
            return None
        inputs.append((tensor.name, tensor.datatype, array.dtype, array.shape, at))
        at += array.nbytes
    if at != size:  # some came as JSON
        return None
    return _Plan(size=size, inputs=tuple(inputs), outputs=request.outputs, binary_default=request.binary_default)


def _keep(memo: dict[Key, Value], key: Key, value: Value) -> None:
    if len(memo) >= _KEPT and key not in memo:
        memo.clear()  # one step: threads may read it
    memo[key] = value
