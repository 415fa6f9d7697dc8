"""The codec of v2 as a server for the grammar: every way in which it may read a request and write the reply."""

from __future__ import annotations

from typing import Any

from protocols import v2
from protocols.v2.request import parse_by_rules
from tests.protocols.v2.grammar.v2_grammar import Case, Declared, Model, Wire, output_of
from tests.protocols.v2.grammar.v2_mutations import BEYOND_THE_CODEC
from tests.protocols.v2.grammar.v2_oracle import Wrong, check
from tests.protocols.v2.grammar.v2_outcome import outcome

READS = 3
"""How often a request comes: a codec looks at the first, takes the second apart, and knows the third."""


def signature_of(model: Model) -> v2.ModelSignature:
    """The signature of a model, for the codec."""

    def specs(declared: tuple[Declared, ...] | None) -> tuple[v2.TensorSpec, ...] | None:
        if declared is None:
            return None
        return tuple(v2.TensorSpec(name=d.name, datatype=d.datatype, shape=d.shape, optional=d.optional) for d in declared)

    return v2.ModelSignature(
        name=model.name,
        versions=("1",),
        inputs=specs(model.inputs),
        outputs=specs(model.outputs),
        max_batch_size=model.max_batch_size,
    )


class CodecServer:
    """Answers cases by the codec of their model, which it keeps, and by the rules. Both must give the same answer."""

    def __init__(self) -> None:
        self._codecs: dict[str, tuple[v2.InferCodec, v2.ModelSignature]] = {}

    def check(self, case: Case) -> None:
        """Parses the requests before the case, then answers the case in each way. Raises Wrong if an answer is not due."""
        if case.kind in BEYOND_THE_CODEC:
            return None
        name = case.model.name
        if name not in self._codecs:
            signature = signature_of(case.model)
            self._codecs[name] = v2.InferCodec(signature, version="1"), signature
        codec, signature = self._codecs[name]
        for wire in case.before:
            for _ in range(READS):
                codec.parse(wire.body, _length(wire))
        try:
            length = v2.parse_header_length(case.wire.lengths)
        except v2.V2Error as error:
            return check(case, error.status, _JSON, error.error_body())
        body = bytearray(case.wire.body)  # as a server receives it
        expected = outcome(parse_by_rules, body, length, signature)
        if (typed := outcome(v2.parse_infer, body, length, signature)) != expected:
            raise Wrong(f"the typed reader says {typed!r:.300}, the rules {expected!r:.300}")
        said = _answered(codec, signature, body, length, by_rules=True)
        check(case, *said)
        for _ in range(READS):
            body = bytearray(case.wire.body)
            found = outcome(codec.parse, body, length)
            if found != expected:
                raise Wrong(f"the codec says {found!r:.300}, the rules {expected!r:.300}")
            if (again := _answered(codec, signature, body, length, by_rules=False)) != said:
                check(case, *again)
                said = again


_JSON = {b"content-type": b"application/json"}


def _length(wire: Wire) -> int | None:
    return v2.parse_header_length(wire.lengths)


def _answered(
    codec: v2.InferCodec, signature: v2.ModelSignature, body: bytearray, length: int | None, *, by_rules: bool
) -> tuple[int, dict[bytes, bytes], bytes]:
    try:
        request = parse_by_rules(body, length, signature) if by_rules else codec.parse(body, length)
        outputs = [v2.V2Tensor(name=output_of(t.name), datatype=t.datatype, array=t.array) for t in request.inputs]
        reply: Any
        if by_rules:
            reply = v2.render_infer(signature.name, "1", outputs, request, signature=signature)
        else:
            reply = codec.render(outputs, request)
    except v2.V2Error as error:
        return error.status, _JSON, error.error_body()
    return 200, dict(reply.headers), b"".join(reply.buffers)
