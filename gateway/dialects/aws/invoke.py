"""SageMaker's platform side, unary: InvokeEndpoint and InvokeEndpointWithResponseStream for every family of model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import final

from gateway.core.exchange import Exchange
from gateway.core.route import Row
from gateway.core.whole_body import receive_body
from gateway.dialects.aws.container import ContainerDialect
from gateway.dialects.aws.endpoints import Endpoints
from gateway.dialects.aws.error_origin import ErrorOrigin, blame
from gateway.dialects.aws.signatures import Signatures, forbidden_of, refusal
from gateway.dialects.call import single_fields
from gateway.dialects.model_choice import ModelChoice
from gateway.errors import BadRequest, Ending, GatewayError, ModelFailed, ModelNotReady
from gateway.workers.states import State
from protocols.aws import bidi, invoke
from protocols.aws.invoke import InvokeErrorType, InvokeOperation
from protocols.events import Buffer, Headers

# Bytes that an event adds to its part, about: prelude, header fields and checksum.
_EVENT = 128


@final
class SageMakerDialect:
    """Serves clients of SageMaker's runtime, such as boto3 and the AWS CLI."""

    def __init__(
        self, models: ModelChoice, endpoints: Endpoints, container: ContainerDialect, signatures: Signatures
    ) -> None:
        self._endpoints, self._container, self._signatures = endpoints, container, signatures
        config = models.config.sagemaker
        self._body = config.body
        self._timeouts = {
            InvokeOperation.INVOKE_ENDPOINT: (config.invoke_timeout, "sagemaker.invoke_timeout"),
            InvokeOperation.INVOKE_ENDPOINT_WITH_RESPONSE_STREAM: (config.stream_timeout, "sagemaker.stream_timeout"),
        }

    def rows(self) -> list[Row]:
        """The two operations. They have no error for a wrong method: the plain one answers it."""
        row = partial(Row, dialect="sagemaker", refuse=refuse, refuses_method=False, signed=True)
        return [
            row("POST", "/endpoints/{endpoint}/invocations", self.invoke),
            row("POST", "/endpoints/{endpoint}/invocations-response-stream", self.invoke_with_response_stream),
        ]

    async def invoke(self, exchange: Exchange, endpoint: str) -> None:
        """POST /endpoints/{endpoint}/invocations."""
        await self._invoke(exchange, InvokeOperation.INVOKE_ENDPOINT, endpoint)

    async def invoke_with_response_stream(self, exchange: Exchange, endpoint: str) -> None:
        """POST /endpoints/{endpoint}/invocations-response-stream."""
        await self._invoke(exchange, InvokeOperation.INVOKE_ENDPOINT_WITH_RESPONSE_STREAM, endpoint)

    async def _invoke(self, exchange: Exchange, operation: InvokeOperation, endpoint: str) -> None:
        claim = self._signatures.claim(exchange)
        headers = single_fields(exchange)
        try:
            asked = invoke.read_request(operation, endpoint, headers)
        except invoke.InvokeInputError as e:
            raise BadRequest(str(e)) from None
        async with self._endpoints.chosen(exchange.permit, asked.endpoint, asked.target_variant, asked.target_model) as (
            worker,
            variant,
        ):
            exchange.model = worker.name
            if worker.state is State.LOADING:
                raise ModelNotReady(f"the model of endpoint {asked.endpoint!r} is loading; try again")
            worker.check_ready(exchange)
            limit, setting = self._timeouts[operation]
            if limit:
                exchange.limit_call(limit, setting)
            body = await receive_body(
                exchange, self._body, setting="sagemaker.body", as_sent=True, memory=worker.body_memory
            )
            await self._signatures.check_body(claim, body)
            if operation is InvokeOperation.INVOKE_ENDPOINT:
                wrapped: _Invoked | _Streamed = _Invoked(exchange, variant)
            else:
                wrapped = _Streamed(exchange, variant)
            exchange.fail = wrapped.fail
            await self._container.answer(exchange, worker, body, wrapped)


_ERRORS = {
    ErrorOrigin.CALLER: InvokeErrorType.VALIDATION_ERROR,
    ErrorOrigin.LOADING: InvokeErrorType.MODEL_NOT_READY,
    ErrorOrigin.BUSY: InvokeErrorType.SERVICE_UNAVAILABLE,
    ErrorOrigin.PLATFORM: InvokeErrorType.INTERNAL_FAILURE,
}


def refuse(exchange: Exchange, error: GatewayError) -> None:
    """Answers an error before the head in the shapes of the operations."""
    whose = blame(error)
    if (forbidden := forbidden_of(error)) is not None:
        status, headers, body = refusal(forbidden)
        _respond(exchange, status, [*headers, *error.retry], body, error.ending)
    elif whose is ErrorOrigin.MODEL:
        _model_error(exchange, error.status, error.message, error.ending)
    else:
        status, headers, body = invoke.error_response(_ERRORS[whose], error.message)
        _respond(exchange, status, [*headers, *error.retry], body, error.ending)


def _model_error(exchange: Exchange, status: int, text: str, ending: Ending) -> None:
    message = (
        f"Received {'client' if status < 500 else 'server'} error ({status}) from {exchange.model or 'the model'} "
        f"with message {text!r}"
    )
    answer = invoke.error_response(
        InvokeErrorType.MODEL_ERROR, message, original_status=status, original_message=text, log_stream_arn=""
    )
    _respond(exchange, *answer, ending)


def _respond(exchange: Exchange, status: int, headers: Headers, body: bytes, ending: Ending) -> None:
    named = [h for h in headers if h[0] != b"content-length"]
    named.append((bidi.REQUEST_ID, exchange.id.encode()))
    exchange.outbound.respond(status, named, body, ending=ending)


class _Wrapped:
    """A container's answer on its way to the platform's caller, with the platform's head and errors."""

    operation: InvokeOperation

    def __init__(self, exchange: Exchange, variant: str) -> None:
        self._exchange, self._outbound, self._variant = exchange, exchange.outbound, variant

    def _head(self, headers: Headers) -> Headers:
        exchange = self._exchange
        own = next((v.decode("latin-1") for k, v in headers if k == b"content-type"), "")
        reply = (exchange.reply or {}) | {invoke.CONTENT_TYPE: own}
        try:
            return invoke.response_headers(
                self.operation, reply, content_type=own, variant=self._variant, request_id=exchange.id
            )
        except invoke.ReplyError as e:
            raise ModelFailed(str(e), code="BadReply", status=500) from None

    def finish(self, ending: Ending = Ending.COMPLETE) -> None:
        self._outbound.finish(ending)


@final
class _Invoked(_Wrapped):
    """The answer of InvokeEndpoint: the body as it is."""

    operation, verbatim = InvokeOperation.INVOKE_ENDPOINT, True

    def __init__(self, exchange: Exchange, variant: str) -> None:
        super().__init__(exchange, variant)
        self.wait_room, self.push = exchange.outbound.wait_room, exchange.outbound.push

    def start(self, status: int, headers: Headers) -> None:
        self._outbound.start(status, self._head(headers))

    def respond(self, status: int, headers: Headers, *buffers: Buffer, ending: Ending = Ending.COMPLETE) -> None:
        if status >= 400:
            _model_error(self._exchange, status, _text(buffers), ending)
        else:
            self._outbound.respond(status, self._head(headers), *buffers, ending=ending)

    def in_band(self, says: Callable[[GatewayError], bytes]) -> None:
        # On the exchange, which drops it at its end: `says` refers to this answer, and here it would be a cycle.
        self._exchange.fail = partial(self.fail, says=says)

    def fail(self, error: GatewayError, says: Callable[[GatewayError], bytes] | None = None) -> None:
        """Answers an HTTP status before the head. After it, writes the dialect's own error if it has one; otherwise cuts the
        body off visibly."""
        exchange = self._exchange
        if not exchange.outbound.status:
            refuse(exchange, error)
        elif says is None:
            exchange.outbound.abort(error.ending)
        else:
            exchange.outbound.push(says(error))
            exchange.outbound.finish(error.ending)


@final
class _Streamed(_Wrapped):
    """The answer of InvokeEndpointWithResponseStream: each piece of the body is a PayloadPart, as it comes."""

    operation, verbatim = InvokeOperation.INVOKE_ENDPOINT_WITH_RESPONSE_STREAM, False

    async def wait_room(self, n: int = 1) -> None:
        await self._outbound.wait_room(n + _EVENT)

    def start(self, status: int, headers: Headers) -> None:
        self._outbound.start(200, self._head(headers))

    def push(self, *buffers: Buffer) -> None:
        for buffer in buffers:
            if type(buffer) is bytes and 0 < len(buffer) <= invoke.PART_SIZE:
                self._outbound.push(*invoke.encode_payload_part(buffer))
            else:
                for piece in invoke.split_body(buffer):
                    self._outbound.push(*invoke.encode_payload_part(piece))

    def respond(self, status: int, headers: Headers, *buffers: Buffer, ending: Ending = Ending.COMPLETE) -> None:
        if status >= 400:
            _model_error(self._exchange, status, _text(buffers), ending)
        else:
            self.start(status, headers)
            self.push(*buffers)
            self.finish(ending)

    def in_band(self, says: Callable[[GatewayError], bytes]) -> None:
        """Does nothing: the event stream has its own form for errors."""

    def fail(self, error: GatewayError) -> None:
        """Answers an HTTP status before the head. After it, writes an exception event and ends the body whole."""
        exchange = self._exchange
        if not exchange.outbound.status:
            refuse(exchange, error)
            return
        if blame(error) is ErrorOrigin.MODEL:
            event = invoke.encode_model_stream_error(error.message, error.code)
        else:
            event = invoke.encode_internal_stream_failure(error.message)
        exchange.outbound.push(*event)
        exchange.outbound.finish(error.ending)


def _text(buffers: tuple[Buffer, ...]) -> str:
    return b"".join(buffers)[:65536].decode("utf-8", "replace")
