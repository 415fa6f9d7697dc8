"""Inference replies of the Open Inference Protocol (v2), written by a server and read by a client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import msgspec

from protocols.events import Buffer, Headers
from protocols.v2.body import (
    ANSWER_LIMITS,
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
from protocols.v2.metadata import Expected, ModelSignature
from protocols.v2.request import V2Request, classify
from protocols.v2.tensors import NO_PARAMETERS, Parameters, V2Error, V2Tensor, show, show_shape


@final
class V2Reply(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """A reply with status 200. `form` has the head fields that tell how its body is read, without its length. Write the
    buffers in order. Those after the first may be the model's own memory, which must not change until they are written."""

    form: Headers
    buffers: list[Buffer]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """All head fields that the body needs, including `content-length`."""
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
    """The reply to `request` with the model's outputs.

    Requested outputs come in the requested order; without a request, all come in the model's order. An output is binary by
    its request's `binary_data`, else by `binary_data_output`. The id is that of the request, or `response_id` if the model
    chose one; without either there is none. V2Error 400 for a requested output that does not exist and for BYTES that JSON
    cannot carry, 500 if the model broke its own declaration.
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
    """The requested outputs, as classes if requested, each with True if it should be binary data. V2Error if an output
    differs from the model's declaration."""
    check_outputs(outputs, signature, request)
    if not request.outputs:
        return [(tensor, request.binary_default) for tensor in outputs]
    given = {tensor.name: tensor for tensor in outputs}
    chosen = []
    for wanted in request.outputs:
        if wanted.name not in given:  # only if the model has declared no outputs; otherwise the check above has failed
            gives = ", ".join(map(show, given)) or "none"
            raise V2Error(f"unknown output {show(wanted.name)}: the model gave {gives}", status=400)
        tensor = given[wanted.name]
        if wanted.classification:
            promised = None if signature is None or signature.promised is None else signature.promised[wanted.name]
            tensor = classify(tensor, wanted.classification, promised.labels if promised is not None else ())
        chosen.append((tensor, request.binary_default if wanted.binary is None else wanted.binary))
    return chosen


def check_outputs(outputs: Sequence[V2Tensor], signature: ModelSignature | None, request: V2Request) -> None:
    """Raises V2Error with status 500 for two outputs with one name, for an output that the model does not declare or
    declares otherwise, and for a declared output that is missing. If the request names outputs, only those must be there. If
    it names none and leaves out an optional input, any may be missing, because an output may depend on that input."""
    promised = None if signature is None else signature.promised
    if signature is None or promised is None:
        if len(outputs) > 1:
            _check_names(outputs)
        return
    for tensor in outputs:
        spec = promised.get(tensor.name)
        if spec is None:
            of = f"output {show(tensor.name)} of model {show(signature.name)}"
            raise V2Error(f"{of} is not one that it declares: {', '.join(map(show, promised)) or 'none'}", status=500)
        if spec.datatype and tensor.datatype != spec.datatype:
            of = f"output {show(tensor.name)} of model {show(signature.name)}"
            raise V2Error(f"{of} is declared as {spec.datatype}, the model gave {tensor.datatype}", status=500)
        if not spec.fits(shape := tensor.array.shape):
            of = f"output {show(tensor.name)} of model {show(signature.name)}"
            raise V2Error(f"{of}: its shape must {spec.wanted}, the model gave {show_shape(shape)}", status=500)
    if len(outputs) > 1:
        _check_names(outputs)
    if len(outputs) < len(promised):
        _check_all_there(outputs, signature, promised, request)


def _check_all_there(
    outputs: Sequence[V2Tensor], signature: ModelSignature, promised: Mapping[str, Expected], request: V2Request
) -> None:
    names, wanted = [tensor.name for tensor in outputs], [one.name for one in request.outputs]
    if not wanted:
        # A request whose inputs arrive in pieces has none here, and has left out nothing that is required.
        if len(request.inputs) < len(signature.inputs or ()) and (request.inputs or not signature.required):
            return
        wanted = list(promised)
    for name in wanted:
        if name not in names:
            of = f"output {show(name)} of model {show(signature.name)}"
            raise V2Error(f"{of} is declared, and the model gave {', '.join(map(show, names)) or 'none'}", status=500)


def _check_names(outputs: Sequence[V2Tensor]) -> None:
    names = [tensor.name for tensor in outputs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise V2Error(f"the model gave two outputs with the name {show(twice)}", status=500)


@final
class V2Answer(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """A reply as its client reads it. KServe sends no version, and Triton no id if the request had none: both are empty
    then."""

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


def decode_infer_reply(headers: Headers, body: Buffer, *, status: int = 200, limits: V2Limits = ANSWER_LIMITS) -> V2Answer:
    """The reply in a complete body. Binary outputs are read-only views of it; those of BYTES are arrays of `bytes`.

    `headers` must have lower-case names. V2Error if the body is not a v2 reply. For a `status` other than 200, V2Error with
    that status and the server's text.
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
