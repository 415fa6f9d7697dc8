"""The parts that all schemas of text share: the model's options, its prompt, and the parameters that it supports."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar, final
from uuid import uuid4

import msgspec
import trio

from gateway.codecs.threads import LONG, codec
from gateway.config import LimitsConfig, LMIConfig
from gateway.config.properties import text_options
from gateway.core.exchange import Exchange
from gateway.dialects.answers import reply_of
from gateway.dialects.json_bodies import read_json
from gateway.dialects.model_choice import ModelChoice
from gateway.errors import GatewayError, ModelCrashed, ModelFailed
from gateway.workers.worker import Worker
from models.chat import ChatMessage, plain_template
from models.continuations import Continuations
from models.errors import ModelError, is_failure
from models.messages import Prompt
from protocols import lmi, openai

log = logging.getLogger("gateway.dialects")

Asked = TypeVar("Asked", lmi.TextRequest, lmi.DynamicRequest, openai.ChatRequest, openai.CompletionRequest)

LINE = 96
"""Bytes that a token's line has beside its text, about: keys, numbers and framing."""
# Parameters that the gateway enforces itself, for every model.
_OF_THE_ANSWER = frozenset(("details", "include_stop_str_in_output", "max_new_tokens", "return_full_text", "stop_sequences"))
_TABLES = {"auto": lmi.Table.VLLM, "disable": lmi.Table.VLLM} | {table.value: table for table in lmi.Table}


@final
class TextCalls:
    """The models in service and their options of text generation."""

    def __init__(self, models: ModelChoice) -> None:
        self.models = models

    def options(self, worker: Worker) -> LMIConfig:
        """The server's section `lmi`, overridden by the model's own serving.properties."""
        config = self.models.config.lmi
        return text_options(config, worker.spec.options) if worker.spec.options else config


def table_of(options: LMIConfig) -> lmi.Table:
    """The table of parameters that holds for these options."""
    return _TABLES[options.rolling_batch]


def rule_of(options: LMIConfig) -> lmi.SamplingRule:
    """The rule that decides between greedy decoding and sampling."""
    return lmi.SamplingRule(options.do_sample)


def within_ceiling(worker: Worker, limits: LimitsConfig, request: Asked) -> Asked:
    """The request with its number of tokens within the ceiling. LMIError, which names the parameter as the request has it,
    if it asks for more. If it does not ask, the ceiling lowers the default."""
    most, setting = limits.max_new_tokens, "limits.max_new_tokens"
    own = worker.spec.max_new_tokens
    if own and (not most or own < most):
        most, setting = own, f"the max_new_tokens of model {worker.name!r}"
    parameters = request.parameters
    if not most or parameters.max_new_tokens <= most:
        return request
    if name := request.given.get("max_new_tokens"):
        wanted = f"expected at most {most} ({setting}), got {parameters.max_new_tokens}"
        raise lmi.LMIError(f"parameters.{name}: {wanted}", stage="parameters")
    return msgspec.structs.replace(request, parameters=msgspec.structs.replace(parameters, max_new_tokens=most))


def check_supported(worker: Worker, request: lmi.TextRequest | lmi.DynamicRequest, options: LMIConfig) -> None:
    """Raises LMIError for a parameter that the model does not support, if `lmi.unsupported` refuses those."""
    if name := unsupported(worker, request.parameters, request.given, options):
        raise lmi.LMIError(f"parameters.{name}: {not_supported(worker)}", stage="parameters")


def unsupported(worker: Worker, parameters: lmi.Parameters, given: Mapping[str, str], options: LMIConfig) -> str:
    """The first parameter to refuse, because the model does not support it: the name that the request has for it, cut to 60
    characters. Empty if there is none, `lmi.unsupported` ignores them, or the model does not list its parameters."""
    if options.unsupported == "ignore":
        return ""
    supported = worker.said("parameters")
    if not isinstance(supported, Collection):  # a module of torch has a method of that name
        return ""
    refused = (given.keys() | parameters.extra.keys()) - _OF_THE_ANSWER - frozenset(supported)
    return given.get(first := min(refused), first)[:60] if refused else ""


def not_supported(worker: Worker) -> str:
    """The reason why a parameter is refused."""
    return f"model {worker.name!r} does not support it (lmi.unsupported)"


async def document_in(exchange: Exchange, body: memoryview, content_type: str, limits: LimitsConfig) -> dict[str, Any]:
    """Reads the object in a body (`lmi.read_document`), in a thread if that would block the loop. LMIError; Overloaded if
    the budget has no room for its values."""
    read = partial(
        lmi.read_document,
        body,
        content_type,
        json_limit=limits.text_json,
        depth=limits.json_depth,
        containers=limits.json_containers,
        values=limits.json_values,
    )
    if lmi.is_text(content_type):
        return await codec(len(body), read)
    return await read_json(exchange, body, limits, read)


async def chat_prompt(exchange: Exchange, worker: Worker, messages: Sequence[ChatMessage], size: int) -> str:
    """Makes the model's prompt of a conversation, by the model's chat template or the plain one. A request of `size` bytes
    that is long runs it in a thread. ModelFailed, ModelCrashed if the template fails."""
    template: Callable[[Sequence[ChatMessage]], Any] = worker.said("chat_template") or plain_template
    try:
        if size <= LONG and not getattr(template, "elsewhere", False):
            prompt = template(messages)
        else:
            prompt = await worker.run_author_code(partial(template, messages))
    except BaseException as e:
        raised(exchange, worker, "chat template", e)
    if not isinstance(prompt, str):
        raise ModelFailed(f"the chat template returned {type(prompt).__name__}, not str", code="BadTemplate", status=500)
    return prompt


async def count_tokens(exchange: Exchange, worker: Worker, text: str) -> int | None:
    """Counts a prompt's tokens by the model's own `count_tokens`, which runs in a thread; None if the model has none.
    ModelFailed, ModelCrashed if that fails."""
    count: Callable[[str], Any] | None = worker.said("count_tokens")
    if count is None:
        return None
    try:
        return _number_of(await worker.run_author_code(partial(count, text)))
    except BaseException as e:
        raised(exchange, worker, "count_tokens", e)


def _number_of(found: Any) -> int:
    """A count as an int. Any integer is accepted, numpy's too. ModelFailed for anything else."""
    try:
        count = operator.index(found)
    except TypeError:
        count = -1
    if count < 0:
        raise ModelFailed(f"count_tokens returned {str(found)[:40]!r}, not a number of tokens", code="BadCount", status=500)
    return count


def raised(exchange: Exchange, worker: Worker, what: str, error: BaseException) -> NoReturn:
    """Raises the gateway's error for an exception of a function of the model's author: ModelFailed for a ModelError,
    otherwise ModelCrashed, also for SystemExit, which would end the server. Errors of the gateway and cancellations pass."""
    if isinstance(error, GatewayError) or not is_failure(error):
        try:
            raise error
        finally:
            del error  # it knows this frame: a cycle would keep the exchange's memory
    if isinstance(error, ModelError):
        raise ModelFailed(error.message, code=error.code, status=error.status) from error
    exchange.incident = uuid4().hex[:12]
    log.error(
        f"{what} raised",
        extra={"model": worker.name, "id": exchange.id, "incident": exchange.incident},
        exc_info=error,
    )
    told = f"the {what} failed; incident {exchange.incident} in the server's log"
    worker.explain(error, exchange.incident, exchange.id, told)
    raise ModelCrashed(told) from error


class OnePrompt:
    """The part that the channels of all schemas share: one prompt in, and the text of the answer to it."""

    def __init__(self, exchange: Exchange, worker: Worker, prompt: Prompt) -> None:
        self._exchange, self._prompt = exchange, prompt
        self.text = Continuations(prompt.parameters, own_stops=worker.own_stops)
        self.exhausted = False

    @property
    def reply(self) -> dict[str, str]:
        return reply_of(self._exchange)

    @property
    def complete(self) -> bool:
        return self.text.complete

    async def receive(self) -> Prompt:
        await self._exchange.turn.checkpoint()
        return self.take()

    def take(self) -> Prompt:
        """The prompt, once; then trio.EndOfChannel."""
        if self.exhausted:
            raise trio.EndOfChannel
        self.exhausted = True
        return self._prompt
