"""The v2 codec of one model: what clients usually send and models usually answer, at small cost.

`parse_infer` and `render_infer` are the rules, and the one place of their errors. Here the same comes out for less:
heads that were seen before, requests of the common shape, and replies without parameters. The rest goes to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, final

import msgspec
import numpy as np

from protocols.events import Buffer
from protocols.tensors import NO_PARAMETERS, Parameters, V2Error, V2Tensor, encode_binary, to_json
from protocols.v2_body import DEFAULT_LIMITS, V2Limits, form_of
from protocols.v2_metadata import ModelSignature
from protocols.v2_request import RequestedOutput, V2Request, parse_infer
from protocols.v2_response import V2Reply, choose_outputs, render_infer
from protocols.v2_typed import read_typed

_KEPT = 128  # entries of a memo ...
_KEPT_BYTES = 1024  # ... and bytes of the text in each
_CHECKED = ("BYTES", "BOOL")  # datatypes of which the bytes are looked at

_encode = msgspec.json.Encoder().encode

Key = TypeVar("Key")
Value = TypeVar("Value")


class _Plan(msgspec.Struct, frozen=True, gc=False):
    """What a head means whatever the `size` bytes of binary data after it: of each input the name, the datatype, the
    dtype, the shape and where it begins. Heads with an id or parameters have none: they are one client's own."""

    size: int
    inputs: tuple[tuple[str, str, np.dtype[Any], tuple[int, ...], int], ...]
    outputs: tuple[RequestedOutput, ...]
    binary_default: bool


@final
class InferCodec:
    """Reads the inference requests of one model and writes the replies, as `parse_infer` and `render_infer` do.

    It remembers 128 heads of requests and as many beginnings of outputs, each of at most 1 KiB, and never an id, a
    parameter or a tensor's data. Threads may share it.
    """

    __slots__ = ("_limits", "_openings", "_plans", "_prefix", "_signature", "_version")

    def __init__(self, signature: ModelSignature, *, version: str = "", limits: V2Limits = DEFAULT_LIMITS) -> None:
        self._signature, self._version, self._limits = signature, version, limits
        named = {"model_name": signature.name} | ({"model_version": version} if version else {})
        self._prefix = _encode(named)[:-1]
        self._plans: dict[bytes, _Plan] = {}
        self._openings: dict[tuple[str, str, tuple[int, ...]], bytes] = {}

    def parse(self, body: Buffer, header_length: int | None) -> V2Request:
        """The request in a complete body: see `parse_infer`."""
        view = memoryview(body)
        if not header_length or header_length > _KEPT_BYTES:
            return self._read(view, header_length)
        head = view[:header_length].tobytes()
        size = view.nbytes - header_length
        plan = self._plans.get(head)
        if plan is None or plan.size != size:
            request = self._read(view, header_length)
            if (plan := _plan_of(request, size)) is not None:
                _keep(self._plans, head, plan)
            return request
        view = view.toreadonly()
        inputs = [
            V2Tensor(name=name, datatype=datatype, array=np.ndarray(shape, dtype, view, header_length + at))
            for name, datatype, dtype, shape, at in plan.inputs
        ]
        return V2Request(inputs=tuple(inputs), outputs=plan.outputs, binary_default=plan.binary_default)

    def _read(self, body: memoryview, header_length: int | None) -> V2Request:
        request = read_typed(body, header_length, self._signature, self._limits) if header_length != 0 else None
        return parse_infer(body, header_length, self._signature, self._limits) if request is None else request

    def render(
        self,
        outputs: Sequence[V2Tensor],
        request: V2Request,
        response_id: str = "",
        parameters: Parameters = NO_PARAMETERS,
    ) -> V2Reply:
        """The reply to `request` with what the model gave: see `render_infer`."""
        try:
            reply = None if parameters else self._write(outputs, request, response_id or request.id)
        except (V2Error, TypeError, ValueError):
            reply = None
        if reply is None:
            name, version = self._signature.name, self._version
            return render_infer(name, version, outputs, request, response_id, parameters, self._signature)
        return reply

    def _write(self, outputs: Sequence[V2Tensor], request: V2Request, id: str) -> V2Reply | None:
        entries: list[bytes] = []
        data: list[Buffer] = []
        for tensor, binary in choose_outputs(outputs, request, self._signature):
            if tensor.parameters:
                return None
            if binary:
                buffers = encode_binary(tensor.array, tensor.datatype)
                size = len(buffers[0]) if buffers else 0
                entries.append(b'%b,"parameters":{"binary_data_size":%d}}' % (self._open(tensor), size))
                data += buffers
            else:
                numbers = to_json(tensor.array, tensor.datatype)
                entries.append(b'%b,"data":%b}' % (self._open(tensor), numbers))
        named = b'%b,"id":%b' % (self._prefix, _encode(id)) if id else self._prefix
        text = b'%b,"outputs":[%b]}' % (named, b",".join(entries))
        return V2Reply(form=form_of(len(text), data), buffers=[text, *data])

    def _open(self, tensor: V2Tensor) -> bytes:
        """The JSON of an output as far as its shape."""
        key = (tensor.name, tensor.datatype, tensor.array.shape)
        opening = self._openings.get(key)
        if opening is None:
            name, datatype, shape = key
            opening = _encode({"name": name, "datatype": datatype, "shape": shape})[:-1]
            if type(name) is str and len(opening) <= _KEPT_BYTES:  # 1 and True would be one key
                _keep(self._openings, key, opening)
        return opening


def _plan_of(request: V2Request, size: int) -> _Plan | None:
    """The plan of the head of `request`, after which came `size` bytes, if it may have one."""
    if request.id or request.parameters:
        return None
    inputs = []
    at = 0
    for tensor in request.inputs:
        array = tensor.array
        if tensor.parameters or tensor.datatype in _CHECKED or not array.size:
            return None
        inputs.append((tensor.name, tensor.datatype, array.dtype, array.shape, at))
        at += array.nbytes
    if at != size:  # some came as JSON
        return None
    return _Plan(size=size, inputs=tuple(inputs), outputs=request.outputs, binary_default=request.binary_default)


def _keep(memo: dict[Key, Value], key: Key, value: Value) -> None:
    if len(memo) >= _KEPT:
        memo.clear()  # one step: threads may read it
    memo[key] = value
