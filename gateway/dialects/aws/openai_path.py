"""SageMaker's path for OpenAI's clients: chat completions of an endpoint, or of an inference component of one."""

from __future__ import annotations

from functools import partial
from typing import final

import msgspec

from gateway.core.exchange import Exchange
from gateway.core.route import Row
from gateway.core.whole_body import receive_body
from gateway.dialects.answers import refusal_headers
from gateway.dialects.aws.container import BodyChannel
from gateway.dialects.aws.endpoints import Endpoints
from gateway.dialects.aws.signatures import Signatures
from gateway.dialects.call import session_of, single_fields
from gateway.dialects.text.openai import OpenAIDialect, refuse
from gateway.dialects.text.requests import TextCalls, document_in
from gateway.errors import BadRequest, GatewayError, ModelFailed
from gateway.workers.worker import Worker
from models.messages import Family
from protocols import lmi, openai
from protocols.aws import invoke

_ENDPOINT = "/endpoints/{endpoint}/openai"
_COMPONENT = "/endpoints/{endpoint}/inference-components/{component}/openai"
_CHAT = "/v1/chat/completions"


@final
class EndpointChatDialect:
    """Serves OpenAI's clients whose base URL ends in `/endpoints/NAME/openai/v1`.

    The path names the model, by the rules of InvokeEndpoint; `model` in the body names none, and the answer repeats it. A
    container behind the gateway gets the request as it came.
    """

    def __init__(self, calls: TextCalls, endpoints: Endpoints, dialect: OpenAIDialect, signatures: Signatures) -> None:
        self._calls, self._endpoints, self._openai, self._signatures = calls, endpoints, dialect, signatures

    def rows(self) -> list[Row]:
        """The two routes. Every other path beside them is an error in OpenAI's form."""
        row = partial(Row, "POST", dialect="openai", refuse=refuse, signed=True)
        return [
            row(_ENDPOINT + _CHAT, self.of_endpoint, under=_ENDPOINT),
            row(_COMPONENT + _CHAT, self.of_component, under=_COMPONENT),
        ]

    async def of_endpoint(self, exchange: Exchange, endpoint: str) -> None:
        """POST /endpoints/{endpoint}/openai/v1/chat/completions."""
        await self._chat(exchange, endpoint)

    async def of_component(self, exchange: Exchange, endpoint: str, component: str) -> None:
        """POST /endpoints/{endpoint}/inference-components/{component}/openai/v1/chat/completions: the component names the
        model, as an endpoint does."""
        await self._chat(exchange, component)

    async def _chat(self, exchange: Exchange, name: str) -> None:
        claim = self._signatures.claim(exchange)
        try:
            asked = invoke.read_request(invoke.InvokeOperation.INVOKE_ENDPOINT, name, single_fields(exchange))
        except invoke.InvokeInputError as e:
            raise BadRequest(str(e)) from None
        models = self._calls.models
        limits, permit = models.config.limits, exchange.permit
        async with self._endpoints.chosen(permit, asked.endpoint, asked.target_variant, asked.target_model) as (worker, _):
            exchange.model = worker.name
            forwards = _is_container(worker)
            if not forwards:
                models.check_family(worker, Family.TEXT, "openai")
            worker.check_ready(exchange)
            body = await receive_body(
                exchange,
                min(limits.text_json, limits.body),
                setting="limits.text_json",
                as_sent=claim is not None,
                memory=worker.body_memory,
            )
            await self._signatures.check_body(claim, body)
            if forwards:
                await _forward(exchange, worker, body)
                return
            try:
                document = await document_in(exchange, body, "application/json", limits)
            except lmi.LMIError as e:
                raise BadRequest(e.message) from None
            await self._openai.chat(exchange, worker, document, len(body), self._calls.options(worker))


def _is_container(worker: Worker) -> bool:
    """True for the model that stands for a container (`gateway.containers`)."""
    spec = worker.spec
    return spec.family is Family.PARTS and spec.accepts and spec.platform == "container"


async def _forward(exchange: Exchange, worker: Worker, body: memoryview) -> None:
    channel = _ForwardedChat(exchange, body, exchange.outbound)
    exchange.fail = channel.fail
    with await worker.slots.take(exchange):
        session = session_of(exchange, worker, channel, parameters={"unary": True, "chat": True})
        await worker.call(session, exchange, Family.PARTS)
    channel.finish()


@final
class _ForwardedChat(BodyChannel):
    """The channel of a chat with a container."""

    def fail(self, error: GatewayError) -> None:
        """Answers an HTTP status before the head: with the container's own error if that has OpenAI's form. After the head,
        aborts: only the connection can show that the body is cut."""
        outbound = self._exchange.outbound
        if outbound.status:
            outbound.abort(error.ending)
        elif (own := _own_error(error)) is not None:
            outbound.respond(error.status, refusal_headers(error), own.body(), ending=error.ending)
        else:
            refuse(self._exchange, error)


class _Error(msgspec.Struct):
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | int | None = None


class _Answer(msgspec.Struct):
    error: _Error


def _own_error(error: GatewayError) -> openai.OpenAIError | None:
    """The error object that the text of a container is; None for another text."""
    if not isinstance(error, ModelFailed):
        return None
    try:
        said = msgspec.json.decode(error.message, type=_Answer).error
    except msgspec.DecodeError:
        return None
    code = None if said.code is None else str(said.code)
    return openai.OpenAIError(said.message, error.status, said.type, said.param, code)
