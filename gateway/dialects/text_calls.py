"""What every call of a text model needs, whatever the schema: how it is served, its prompt, and what it can act on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, final
from uuid import uuid4

import msgspec
import trio

from gateway.config import LMIConfig
from gateway.dialects.base import LONG, Models
from gateway.errors import GatewayError, ModelCrashed, ModelFailed
from gateway.exchange import Exchange
from gateway.serving_properties import text_options
from gateway.workers.worker import Worker
from models.chat import ChatMessage, plain_template
from models.errors import ModelError
from models.messages import GenerationParameters, Prompt
from protocols import lmi

log = logging.getLogger("gateway.dialects")

LINE = 96
"""An estimate of a token's line beside its text: keys, numbers and framing."""
_OF_THE_ANSWER = frozenset(("details", "return_full_text"))
_TABLES = {"auto": lmi.Table.VLLM, "disable": lmi.Table.VLLM} | {table.value: table for table in lmi.Table}


@final
class TextCalls:
    """How text models are asked."""

    def __init__(self, models: Models) -> None:
        self.models = models

    def options(self, worker: Worker) -> LMIConfig:
        """The server's section `lmi`, and over it what the model's own serving.properties says."""
        config = self.models.config.lmi
        return text_options(config, worker.spec.options) if worker.spec.options else config


def table_of(options: LMIConfig) -> lmi.Table:
    """Whose table of parameters holds."""
    return _TABLES[options.rolling_batch]


def rule_of(options: LMIConfig) -> lmi.SamplingRule:
    """What decides between greedy decoding and sampling."""
    return lmi.SamplingRule(options.do_sample)


def check_supported(worker: Worker, parameters: lmi.Parameters, given: Mapping[str, str], options: LMIConfig) -> None:
    """LMIError for a parameter that the model says it does not support, where `lmi.unsupported` has it refused."""
    if name := unsupported(worker, parameters, given, options):
        raise lmi.LMIError(f"parameters.{name}: {not_supported(worker)}", stage="parameters")


def unsupported(worker: Worker, parameters: lmi.Parameters, given: Mapping[str, str], options: LMIConfig) -> str:
    """The parameter that is to be refused, since the model says that it does not support it: by the name that the request
    has for it, cut where long. Empty where there is none."""
    if options.unsupported == "ignore":
        return ""
    supported = _attribute(worker, "parameters")
    if not isinstance(supported, Collection):  # a module of torch has a method of that name
        return ""
    refused = (given.keys() | parameters.extra.keys()) - _OF_THE_ANSWER - frozenset(supported)
    return given.get(first := min(refused), first)[:60] if refused else ""


def not_supported(worker: Worker) -> str:
    """Why it is refused."""
    return f"model {worker.name!r} does not support it (lmi.unsupported)"


async def chat_prompt(exchange: Exchange, worker: Worker, messages: Sequence[ChatMessage], size: int) -> str:
    """The conversation, of a request of so many bytes, as the model's prompt: in a thread where the loop would feel it.
    ModelFailed, ModelCrashed where its own template cannot make it."""
    template: Callable[[Sequence[ChatMessage]], Any] = _attribute(worker, "chat_template") or plain_template
    try:
        if size <= LONG:
            prompt = template(messages)
        else:
            prompt = await worker.aside(partial(template, messages))
    except BaseException as e:
        raised(exchange, worker, "chat template", e)
    if not isinstance(prompt, str):
        raise ModelFailed(f"the chat template returned {type(prompt).__name__}, not str", code="BadTemplate", status=500)
    return prompt


def raised(exchange: Exchange, worker: Worker, what: str, error: BaseException) -> NoReturn:
    """What a function of the model's author raised, as what a model raises is told: ModelFailed for its ModelError, else
    ModelCrashed, SystemExit too, which would end the server."""
    if isinstance(error, GatewayError | trio.Cancelled | KeyboardInterrupt):
        raise error
    if isinstance(error, ModelError):
        raise ModelFailed(error.message, code=error.code, status=error.status) from error
    exchange.incident = uuid4().hex[:12]
    log.error(
        f"{what} raised",
        extra={"model": worker.name, "id": exchange.id, "incident": exchange.incident},
        exc_info=error,
    )
    raise ModelCrashed(f"the {what} failed; incident {exchange.incident} in the server's log") from error


def prompt_of(text: str, parameters: lmi.Parameters) -> Prompt:
    """The model's view of a request."""
    return Prompt(text=text, parameters=GenerationParameters(**msgspec.structs.asdict(parameters)))


def _attribute(worker: Worker, name: str) -> Any:
    """What the spec says, or the model itself."""
    said = getattr(worker.spec, name)
    return getattr(worker.model, name, None) if said is None else said
