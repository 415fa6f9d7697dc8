"""The v2 codec of one model: quick ways for usual requests and replies.

`parse_infer` and `render_infer` define the results and all errors. This codec gives the same results at less cost for two
cases: requests that differ from an earlier one only in their data (`plans`), and replies without parameters. It passes
everything else to those functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, final

import msgspec

from protocols.events import Buffer
from protocols.v2.body import DEFAULT_LIMITS, JSON_FORM, V2Limits, form_of
from protocols.v2.metadata import ModelSignature
from protocols.v2.plans import KEPT_BYTES, LONGEST_TEXT, Plan, is_somebodys, plan_of_data, plan_of_text
from protocols.v2.request import V2Request, WantedOutput, parse_by_rules
from protocols.v2.response import V2Reply, check_outputs, choose_outputs, render_infer
from protocols.v2.tensors import NO_PARAMETERS, Parameters, V2Error, V2Tensor, encode_binary, to_json
from protocols.v2.typed_request import parse_infer, read_typed

_KEPT = 128  # entries of a cache, each with a text of at most KEPT_BYTES

_encode = msgspec.json.Encoder().encode

Key = TypeVar("Key")
Value = TypeVar("Value")


@final
class InferCodec:
    """Reads the inference requests of one model and writes the replies, as `parse_infer` and `render_infer` do.

    It caches 128 heads of requests, 128 requests in JSON without their data, and 128 beginnings of outputs, each of at most
    1 KiB, and never an id, a parameter or a tensor's data. Threads may share it.
    """

    __slots__ = (
        "_limits",
        "_longest",
        "_longest_head",
        "_openings",
        "_plans",
        "_prefix",
        "_promises",
        "_recent",
        "_signature",
        "_texts",
        "_version",
    )

    def __init__(self, signature: ModelSignature, *, version: str = "", limits: V2Limits = DEFAULT_LIMITS) -> None:
        self._signature, self._version, self._limits = signature, version, limits
        self._longest_head = min(KEPT_BYTES, limits.json)
        self._longest, self._promises = min(LONGEST_TEXT, limits.json), signature.promised is not None
        named = {"model_name": signature.name} | ({"model_version": version} if version else {})
        self._prefix = _encode(named)[:-1] + b","
        self._plans: dict[bytes, Plan] = {}  # by the JSON before binary data
        self._texts: dict[bytes, Plan | None] = {}  # by the text before the first "data"; None: seen once
        # the plan of the last text: the next request is likely to come from the same client
        self._recent: Plan | None = None
        self._openings: dict[tuple[str, str, tuple[int, ...]], bytes] = {}

    @property
    def signature(self) -> ModelSignature:
        """The declaration of the model."""
        return self._signature

    def parse(self, body: Buffer, header_length: int | None) -> V2Request:
        """The request in a complete body, as `parse_infer` reads it."""
        if type(body) is not bytes:  # bytes, because arrays may then be views of the body
            body = memoryview(body).toreadonly().cast("B")
        size = len(body)
        if header_length is None:
            if size > self._longest:
                return parse_infer(body, None, self._signature, self._limits)
            text, recent = body if type(body) is bytes else bytes(body), self._recent
            if recent is not None and (request := recent.read_text(text)) is not None:
                return request
            return self._read_text(text)
        if not 0 < header_length <= self._longest_head or header_length > size:
            return parse_infer(body, header_length, self._signature, self._limits)
        head = bytes(body[:header_length])
        size -= header_length
        plan = self._plans.get(head)
        if plan is not None and plan.size == size:
            return plan.read_data(body, header_length)
        read = read_typed(head, memoryview(body)[header_length:], self._signature, self._limits)
        if read is None:
            return parse_by_rules(body, header_length, self._signature, self._limits)
        if (plan := plan_of_data(read, size)) is not None:
            _keep(self._plans, head, plan)
        return read

    def _read_text(self, text: bytes) -> V2Request:
        """The request in a short text that does not fit the last plan."""
        cut = text.find(b'"data"', 0, KEPT_BYTES)
        key = text[:cut] if cut > 0 else b""
        plan = self._texts.get(key)
        if plan is not None and plan is not self._recent and (request := plan.read_text(text)) is not None:
            self._recent = plan
            return request
        request = read_typed(text, None, self._signature, self._limits)
        if request is None:
            return parse_by_rules(text, None, self._signature, self._limits)
        if key and not is_somebodys(request):
            # a text seen only once is not worth a plan: it may have a shape that no other request has
            again = plan is None and key in self._texts
            _keep(self._texts, key, plan_of_text(text, request) if again else None)
        return request

    def render(
        self,
        outputs: Sequence[V2Tensor],
        request: V2Request,
        response_id: str = "",
        parameters: Parameters = NO_PARAMETERS,
    ) -> V2Reply:
        """The reply to `request` with the model's outputs, as `render_infer` makes it."""
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
            pass  # `render_infer` below raises the error in full
        name, version = self._signature.name, self._version
        return render_infer(name, version, outputs, request, response_id, parameters, self._signature)

    def _write_output(self, tensor: V2Tensor, binary: bool, data: list[Buffer]) -> bytes:
        """The JSON of an output; its binary data are added to `data`. TypeError if it has parameters."""
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
        """The JSON of an output up to its shape."""
        name, datatype, shape = key = (tensor.name, tensor.datatype, tensor.array.shape)
        if type(name) is not str or not name:
            raise TypeError("names are the rules' to refuse")
        opening = _encode({"name": name, "datatype": datatype, "shape": shape})[:-1] + b","
        if len(opening) <= KEPT_BYTES:
            _keep(self._openings, key, opening)
        return opening


def _is_just(asked: WantedOutput, output: V2Tensor) -> bool:
    """True if that output is requested, without classification."""
    return asked.name == output.name and not asked.classification


def _keep(memo: dict[Key, Value], key: Key, value: Value) -> None:
    if len(memo) >= _KEPT and key not in memo:
        memo.clear()  # one step, because threads may read it
    memo[key] = value
