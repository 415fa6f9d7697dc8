"""SageMaker's container, unary: /invocations and /models/{name}/invoke, for every family of model."""

from __future__ import annotations

from typing import Any, final

import trio

from gateway.core.exchange import Exchange
from gateway.core.outbound import Outbound
from gateway.core.route import Row
from gateway.core.whole_body import receive_body
from gateway.dialects.answers import JSON, Wrapping, octets, refusal_headers, reply_headers, reply_of, reply_value
from gateway.dialects.call import query_members, session_of, text_header
from gateway.dialects.model_choice import ModelChoice
from gateway.dialects.text.lmi import LMIDialect
from gateway.dialects.text.lmi_errors import refuse_as_lmi
from gateway.dialects.v2.infer import InferDialect
from gateway.dialects.v2.requests import refuse as refuse_as_v2
from gateway.errors import Ending, GatewayError
from gateway.workers.worker import Worker
from models.messages import Family, Part, PartKind
from models.session import Channel
from protocols import v2
from protocols.aws import invoke, multi_model
from protocols.buffers import Budget


@final
class ContainerDialect:
    """Answers the platform's requests to a container. The platform's own routes use it too, and wrap its answer.

    A text model takes LMI's schema. A tensor model takes a v2 body: JSON, or binary with the length of its JSON in the
    content type or in `Inference-Header-Content-Length`. A model of parts takes the body as one part, whose kind is UTF8 if
    the content type is text or JSON.
    """

    def __init__(self, models: ModelChoice, lmi: LMIDialect, v2: InferDialect) -> None:
        self._models, self._lmi, self._v2 = models, lmi, v2

    def rows(self) -> list[Row]:
        """The two unary routes."""
        return [
            Row("POST", "/invocations", self.invocations, dialect="container", refuse=refuse_as_lmi),
            Row("POST", "/models/{name}/invoke", self.invoke, dialect="container", refuse=refuse_as_mme),
        ]

    async def invocations(self, exchange: Exchange) -> None:
        """POST /invocations: the model is `?model_name=`, the default, or the only one that fits."""
        name = _query_value(exchange, "model_name")
        if name:
            worker = self._models.invoked(exchange.permit, name)
        elif _is_binary(exchange):
            worker = self._models.unnamed(
                exchange.permit, self._models.config.sagemaker.default_model, Family.TENSOR, "sagemaker"
            )
        else:
            worker = self._models.of_invocations(exchange.permit)
        await self._invoke(exchange, worker)

    async def invoke(self, exchange: Exchange, name: str) -> None:
        """POST /models/{name}/invoke. The path alone names the model; X-Amzn-SageMaker-Target-Model is only passed on to the
        model."""
        await self._invoke(exchange, self._models.invoked(exchange.permit, name))

    async def _invoke(self, exchange: Exchange, worker: Worker) -> None:
        exchange.model = worker.name
        limits = self._models.config.limits
        match worker.spec.family:
            case Family.TEXT:
                self._lmi.take(exchange, worker)
                limit, setting = min(limits.text_json, limits.body), "limits.text_json"
            case Family.TENSOR:
                exchange.claim("v2", refuse_as_v2)
                limit, setting = limits.body, "limits.body"
            case Family.PARTS:
                exchange.claim("container", refuse_as_mme)
                limit, setting = limits.body, "limits.body"
        worker.check_ready(exchange, room=not exchange.input_ended)  # a body that is here may choose the error's form
        body = await receive_body(exchange, limit, setting=setting, memory=worker.body_memory)
        await self.answer(exchange, worker, body)

    async def answer(self, exchange: Exchange, worker: Worker, body: memoryview, wrapping: Wrapping | None = None) -> None:
        """Calls the model with the body of a request, whatever its route. `wrapping` takes the answer and the errors in the
        exchange's place."""
        match worker.spec.family:
            case Family.TEXT:
                await self._lmi.generate(exchange, worker, body, wrapping)
            case Family.TENSOR:
                await self._tensors(exchange, worker, body, wrapping)
            case Family.PARTS:
                await self._parts(exchange, worker, body, wrapping)

    async def _tensors(self, exchange: Exchange, worker: Worker, body: memoryview, wrapping: Wrapping | None) -> None:
        try:
            length = _json_length(exchange, len(body))
        except v2.V2Error as e:
            (wrapping or exchange.outbound).respond(e.status, [JSON], e.error_body(), ending=Ending.REFUSED)
            return
        await self._v2.answer(exchange, worker, body, length, wrapping, form=_triton_form)

    async def _parts(self, exchange: Exchange, worker: Worker, body: memoryview, wrapping: Wrapping | None) -> None:
        channel = BodyChannel(exchange, body, wrapping or exchange.outbound)
        if wrapping is None:
            exchange.fail = channel.fail
        with await worker.slots.take(exchange):
            session = session_of(exchange, worker, channel, parameters={"unary": True})
            await worker.call(session, exchange, Family.PARTS)
        channel.finish()


def refuse_as_mme(exchange: Exchange, error: GatewayError) -> None:
    """Answers an error before the head in the form of the multi-model container API."""
    exchange.outbound.respond(
        error.status, refusal_headers(error), multi_model.error_body_of(error.status, error.message), ending=error.ending
    )


def _is_binary(exchange: Exchange) -> bool:
    kind = text_header(exchange, b"content-type").partition(";")[0].strip().lower()
    return kind == invoke.BINARY_JSON or exchange.header(v2.IHCL) is not None


def _json_length(exchange: Exchange, size: int) -> int | None:
    """The length in bytes of the JSON before binary tensors. V2Error if two fields disagree, or one is not a length."""
    lengths = exchange.header_values(v2.IHCL)
    length = v2.parse_header_length(lengths) if lengths else None
    try:
        said = invoke.json_header_size(text_header(exchange, b"content-type"), size)
    except invoke.InvokeInputError as e:
        raise v2.V2Error(str(e)) from None
    if length is not None and said is not None and length != said:
        raise v2.V2Error(f"json-header-size is {said} and Inference-Header-Content-Length is {length}")
    return length if said is None else said


def _triton_form(headers: Any) -> Any:
    """The head of a v2 reply for SageMaker's clients of Triton: the length of the JSON is in the content type."""
    length = next((value for name, value in headers if name == v2.IHCL), None)
    if length is None:
        return headers
    return ((b"content-type", invoke.binary_json_content_type(int(length)).encode()),)


class BodyChannel(Channel[Part, Part]):
    """The channel of a unary call of parts: the body is the one part in, and the parts out are the answer's body."""

    complete = False  # its model says by its return that there is no more

    def __init__(self, exchange: Exchange, body: memoryview, answer: Outbound | Wrapping) -> None:
        self._exchange, self._answer = exchange, answer
        self._body: memoryview | None = body
        self.exhausted = False

    @property
    def reply(self) -> dict[str, str]:
        return reply_of(self._exchange)

    @property
    def budget(self) -> Budget:
        """The session's budget, for a model that itself holds bytes of the session."""
        return self._exchange.account

    async def receive(self) -> Part:
        body, self._body = self._body, None
        if body is None:
            await self._exchange.turn.checkpoint()
            raise trio.EndOfChannel
        self.exhausted = True
        kind = text_header(self._exchange, b"content-type").lower()
        text = kind.startswith(("text/", "application/json"))
        return Part(data=body, kind=PartKind.UTF8 if text else PartKind.BINARY)

    async def send(self, message: Part, /) -> None:
        if not isinstance(message, Part):
            raise TypeError(f"a call of parts is answered with Part, not {type(message).__name__}")
        data = octets(message.data)
        await self._answer.wait_room(len(data))
        self.accept(message.kind)
        if len(data):
            self._answer.push(data)

    def accept(self, kind: PartKind = PartKind.BINARY) -> None:
        exchange = self._exchange
        if not exchange.outbound.status:
            default = "text/plain; charset=utf-8" if kind is PartKind.UTF8 else "application/octet-stream"
            content_type = (b"content-type", reply_value(exchange, "content-type", default).encode())
            self._answer.start(200, [content_type, *reply_headers(exchange)])

    def finish(self) -> None:
        """Ends the answer after the model has returned."""
        if self._exchange.outbound.finishing is None:
            self.accept()
            self._answer.finish()

    def fail(self, error: GatewayError) -> None:
        """Answers an HTTP status before the head. After it, aborts: only the connection can show that the body is cut."""
        if self._exchange.outbound.status:
            self._exchange.outbound.abort(error.ending)
        else:
            refuse_as_mme(self._exchange, error)


def _query_value(exchange: Exchange, name: str) -> str:
    if name.encode() not in exchange.query:
        return ""
    return next((value for key, value in query_members(exchange) if key == name), "")
