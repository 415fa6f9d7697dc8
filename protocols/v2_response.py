"""Inference replies of the Open Inference Protocol (v2), written by a server and read by a client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import msgspec

from protocols.events import Buffer, Headers
from protocols.tensors import NO_PARAMETERS, Parameters, V2Error, V2Tensor, show, show_shape
from protocols.v2_body import (
    DEFAULT_LIMITS,
    IHCL,
    V2Limits,
    join_body,
    parse_header_length,
    read_entries,
    read_parameters,
    read_string,
    read_tensors,
    split_body,
    with_length,
    write_tensor,
)
from protocols.v2_classification import classify
from protocols.v2_metadata import ModelSignature
from protocols.v2_request import V2Request


@final
class V2Reply(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """A reply with status 200. `form` are the head fields that say how its body is read, without its length. The
    buffers are written in order; those after the first may be the model's own memory, which must not change until they
    are written."""

    form: Headers
    buffers: list[Buffer]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """All head fields that the body needs, `content-length` too."""
        return with_length(self.form, self.buffers)


def render_infer(
    model_name: str,
    model_version: str,
    outputs: Sequence[V2Tensor],
    request: V2Request,
    response_id: str = "",
    parameters: Parameters = NO_PARAMETERS,
    signature: ModelSignature | None = None,
) -> V2Reply:
    """The reply to `request` with what the model gave.

    Requested outputs come in the order requested, else all in the model's order. An output is binary where its
    request says so, else where the request's `binary_data_output` does. The id is that of the request, or
    `response_id` where the model chose one; without either there is none. V2Error 400 for a requested output that
    does not exist and for BYTES that JSON cannot carry, 500 if the model broke its own declaration.
    """
    head: dict[str, Any] = {"model_name": model_name}
    if model_version:
        head["model_version"] = model_version
    if id := response_id or request.id:
        head["id"] = id
    if parameters:
        head["parameters"] = parameters
    entries = head["outputs"] = []
    data: list[Buffer] = []
    for tensor, binary in choose_outputs(outputs, request, signature):
        entry, buffers = write_tensor(tensor, binary=binary)
        entries.append(entry)
        data += buffers
    form, body = join_body(head, data)
    return V2Reply(form=form, buffers=body)


def choose_outputs(
    outputs: Sequence[V2Tensor], request: V2Request, signature: ModelSignature | None
) -> list[tuple[V2Tensor, bool]]:
    """The outputs that the request asks for, in the form of classes where it does, each with whether it is asked for as
    binary data. V2Error where one is not what the model has declared."""
    if signature is not None and signature.promised is not None:
        check_outputs(outputs, signature)
    given = {tensor.name: tensor for tensor in outputs}
    if len(given) < len(outputs):
        names = [tensor.name for tensor in outputs]
        twice = next(name for name in names if names.count(name) > 1)
        raise V2Error(f"the model gave two outputs with the name {show(twice)}", status=500)
    if not request.outputs:
        return [(tensor, request.binary_default) for tensor in outputs]
    chosen = []
    for wanted in request.outputs:
        if wanted.name not in given:
            # A declared one has passed the check of the request: then the model owes it.
            declared = signature is not None and signature.outputs is not None
            gives = ", ".join(map(show, given)) or "none"
            raise V2Error(f"unknown output {show(wanted.name)}: the model gave {gives}", status=500 if declared else 400)
        tensor = given[wanted.name]
        if wanted.classification:
            promised = None if signature is None or signature.promised is None else signature.promised[wanted.name]
            tensor = classify(tensor, wanted.classification, promised.labels if promised is not None else ())
        chosen.append((tensor, request.binary_default if wanted.binary is None else wanted.binary))
    return chosen


def check_outputs(outputs: Sequence[V2Tensor], signature: ModelSignature) -> None:
    """V2Error with status 500 for an output that the model does not declare, or declares otherwise. One that is missing may
    be that of an optional input."""
    promised = signature.promised
    if promised is None:
        return
    for tensor in outputs:
        of = f"output {show(tensor.name)} of model {show(signature.name)}"
        spec = promised.get(tensor.name)
        if spec is None:
            raise V2Error(f"{of} is not one that it declares: {', '.join(map(show, promised)) or 'none'}", status=500)
        if spec.datatype and tensor.datatype != spec.datatype:
            raise V2Error(f"{of} is declared as {spec.datatype}, the model gave {tensor.datatype}", status=500)
        if not spec.fits(shape := tensor.array.shape):
            raise V2Error(f"{of}: its shape must {spec.wanted}, the model gave {show_shape(shape)}", status=500)


@final
class V2Answer(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """A reply as its client reads it. KServe gives no version, and Triton no id where the request had none: empty."""

    model_name: str = ""
    model_version: str = ""
    id: str = ""
    parameters: Parameters = NO_PARAMETERS
    outputs: tuple[V2Tensor, ...] = ()

    def __getitem__(self, name: str) -> V2Tensor:
        for tensor in self.outputs:
            if tensor.name == name:
                return tensor
        raise KeyError(f"no output {name!r}; there are: {', '.join(t.name for t in self.outputs)}")


def decode_infer_reply(headers: Headers, body: Buffer, *, status: int = 200, limits: V2Limits = DEFAULT_LIMITS) -> V2Answer:
    """The reply in a complete body. Binary outputs are read-only views of it, those of BYTES arrays of `bytes`.

    `headers` have lower-case names. V2Error for what is not a v2 reply, and for a status other than 200, which it then
    carries, with the server's text.
    """
    header_length = parse_header_length([value for name, value in headers if name == IHCL])
    head, rest = split_body(body, header_length, limits, "the reply")
    if status != 200:
        raise V2Error(read_string(head, "error"), status=status)
    tensors = read_tensors(read_entries(head, "outputs", limits), rest, header_length, limits, "output")
    return V2Answer(
        model_name=read_string(head, "model_name"),
        model_version=read_string(head, "model_version"),
        id=read_string(head, "id"),
        parameters=read_parameters(head, "the reply"),
        outputs=tuple([msgspec.structs.replace(tensor, array=tensor.elements) for tensor in tensors]),
    )
