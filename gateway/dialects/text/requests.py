"""The parts that all schemas of text share: the model's options, its prompt, and the parameters that it supports."""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar, final
from uuid import uuid4

import msgspec
import trio

from gateway.codecs.prompts import format_of
from gateway.codecs.threads import LONG, codec
from gateway.codecs.turns import Stage
from gateway.config import LimitsConfig, LMIConfig
from gateway.config.properties import text_options
from gateway.core.exchange import Exchange
from gateway.dialects.answers import EventStreams, reply_of
from gateway.dialects.inner_call import InnerCall
from gateway.dialects.json_bodies import read_json
from gateway.dialects.model_choice import ModelChoice
from gateway.errors import GatewayError, ModelCrashed, ModelFailed
from gateway.workers.worker import Worker
from models.chat import Conversation, apply_template, plain_template
from models.continuations import Continuations
from models.errors import ContextLengthExceeded, ModelError, is_failure
from models.messages import Finish, GenerationParameters, Prompt, Token, ToolCall
from protocols import lmi, openai, text_members

log = logging.getLogger("gateway.dialects")

Asked = TypeVar("Asked", lmi.TextRequest, lmi.DynamicRequest, openai.ChatRequest, openai.CompletionRequest)
Numbers = TypeVar("Numbers", lmi.Parameters, GenerationParameters)

LINE = 96
"""Bytes that a token's line has beside its text, about: keys, numbers and framing."""
# Parameters that the gateway enforces itself, for every model.
_OF_THE_ANSWER = frozenset(("details", "include_stop_str_in_output", "max_new_tokens", "return_full_text", "stop_sequences"))
PASSED = b"x-everywire-passed"
"""The field of an answer's head that names members which the model got although nobody here knows them."""
_NAMED, _TOLD, _LOGGED = 16, 256, 1024  # at most so many names, in so many bytes of the head and characters of the log
_NAME = re.compile(r"[A-Za-z0-9_.$-]{1,256}").fullmatch
_TABLES = {"auto": lmi.Table.VLLM, "disable": lmi.Table.VLLM} | {table.value: table for table in lmi.Table}


@final
class TextCalls:
    """The models in service and their options of text generation."""

    def __init__(self, models: ModelChoice, streams: EventStreams) -> None:
        self.models, self.streams = models, streams

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


def decided(
    worker: Worker,
    request: Asked,
    form: text_members.Form,
    *,
    judges: bool = True,
    prefix: str = "",
    beside: Mapping[str, Any] | None = None,
) -> tuple[Asked, text_members.Decided]:
    """The request with those members in `parameters.extra` that go on to its model, and the judgement on its members.
    MemberRefused for one that asks for what the answer would not have: see `text_members.decide`. With `judges`, a model
    that judges formats itself must be asked then (`check_format`)."""
    parameters = request.parameters
    if not parameters.extra and not beside:
        return request, text_members.NOTHING
    listed = worker.said("parameters")
    if not isinstance(listed, Collection):
        listed = ()
    kept = text_members.decide(
        parameters.extra,
        listed,
        worker.name,
        form,
        features=worker.features,
        judges=judges and worker.said("check_format") is not None,
        prefix=prefix,
        beside=beside,
    )
    if len(kept.extra) < len(parameters.extra):
        request = msgspec.structs.replace(request, parameters=msgspec.structs.replace(parameters, extra=kept.extra))
    return request, kept


def decided_own(
    worker: Worker, request: Asked, document: Mapping[str, Any], *, judges: bool = True
) -> tuple[Asked, text_members.Decided]:
    """`decided` for a document of LMI's schema, whose `parameters` are the model's own. Other members of it never go on to
    the model. LMIError for a member that is refused."""
    beside = {name: value for name, value in document.items() if name not in lmi.MEMBERS}
    try:
        return decided(worker, request, "own", judges=judges, prefix="parameters.", beside=beside)
    except text_members.MemberRefused as e:
        stage: lmi.Stage = "parameters" if e.path.startswith("parameters.") else "payload"
        raise lmi.LMIError(e.message, stage=stage) from None


def tell_passed(exchange: Exchange, worker: Worker, names: Sequence[str]) -> None:
    """Says which members went to the model although nobody here knows them: in the head of the answer, if that is not sent
    yet, and in the log."""
    if not names:
        return
    named = ", ".join(names[:_NAMED])[:_LOGGED]
    log.debug("members passed on to the model", extra={"id": exchange.id, "model": worker.name, "members": named})
    told = ""
    for name in filter(_NAME, names[:_NAMED]):
        longer = f"{told}, {name}" if told else name
        if len(longer) > _TOLD:
            break
        told = longer
    outbound = exchange.outbound
    if told and not outbound.status and all(name != PASSED for name, _ in outbound.beside):
        outbound.beside = (*outbound.beside, (PASSED, told.encode()))


def within_ceiling(worker: Worker, limits: LimitsConfig, request: Asked) -> Asked:
    """The request with its number of tokens within the ceiling. LMIError, which names the parameter as the request has it,
    if it asks for more. If it does not ask, it is not `limited`, and the ceiling and the model's context lower the
    default."""
    most, setting = limits.max_new_tokens, "limits.max_new_tokens"
    own = worker.spec.max_new_tokens
    if own and (not most or own < most):
        most, setting = own, f"the max_new_tokens of model {worker.name!r}"
    parameters = request.parameters
    asked = parameters.max_new_tokens
    if name := request.given.get("max_new_tokens"):
        if not most or asked <= most:
            return request
        wanted = f"expected at most {most} ({setting}), got {asked}"
        raise lmi.LMIError(f"parameters.{name}: {wanted}", stage="parameters")
    least = min(filter(None, (asked, most, worker.context)), default=asked)
    parameters = msgspec.structs.replace(parameters, max_new_tokens=least, limited=False)
    return msgspec.structs.replace(request, parameters=parameters)


async def within_room(
    exchange: Exchange | InnerCall, worker: Worker, text: str, parameters: Numbers
) -> tuple[Numbers, int | None]:
    """For a model that tells its context: the parameters with no more tokens than the prompt leaves in it, and the number of
    the prompt's tokens. As they are, and None, if the model cannot count those. ModelFailed if the prompt leaves no room."""
    count = await count_tokens(exchange, worker, text)
    if count is None:
        return parameters, None
    taken = count if parameters.truncate is None else min(count, parameters.truncate)
    room, asked = worker.context - taken, parameters.max_new_tokens
    if room < min(asked, 1):
        error = ContextLengthExceeded(taken + 1, worker.context)
        raise ModelFailed(error.message, code=error.code, status=error.status)
    if asked > room:
        parameters = msgspec.structs.replace(parameters, max_new_tokens=room)
    return parameters, taken


def check_supported(worker: Worker, request: lmi.TextRequest | lmi.DynamicRequest, options: LMIConfig) -> None:
    """Raises LMIError for a parameter that the model does not support, if `lmi.unsupported` refuses those, and for tokens of
    the prompt that the model does not report."""
    if name := unsupported(worker, request.parameters, request.given, options):
        raise lmi.LMIError(f"parameters.{name}: {not_supported(worker)}", stage="parameters")
    if not request.parameters.decoder_input_details or not isinstance(request, lmi.TextRequest):
        return
    if (name := request.shows_prompt) and (why := unreported(worker)):
        raise lmi.LMIError(f"parameters.{name}: {why}", stage="parameters")


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


def lists(worker: Worker, parameter: str) -> bool:
    """True if the model lists a parameter among those that it acts on."""
    listed = worker.said("parameters")
    return isinstance(listed, Collection) and parameter in listed


def unreported(worker: Worker, alternatives: int = 0) -> str:
    """The reason why the tokens of a prompt cannot be shown, with so many `alternatives` of each: the model lists the
    parameters that it acts on, and those that ask for them are not among them. Empty if they are, and if it lists nothing:
    its answer will tell (`PromptReport`)."""
    listed = worker.said("parameters")
    if not isinstance(listed, Collection):
        return ""
    if alternatives and "prompt_logprobs" not in listed:
        return f"model {worker.name!r} does not report the most probable tokens in its prompt (prompt_logprobs)"
    if "decoder_input_details" not in listed and "prompt_logprobs" not in listed:
        return f"model {worker.name!r} does not report the tokens of its prompt (decoder_input_details)"
    return ""


@final
class PromptReport:
    """Sees that a model reports its prompt, for an answer that shows it."""

    __slots__ = ("_begun", "_member", "_model")

    def __init__(self, worker: Worker, member: str) -> None:
        """`member` of the request asks for the report."""
        self._model, self._member, self._begun = worker.name, member, False

    def check(self, message: Token | ToolCall | Finish | None) -> bool:
        """True once the report is complete: it comes before any other message, and before the model's end, which is None.
        ModelFailed if there is none."""
        if type(message) is Token and message.prefill:
            self._begun = True
            return False
        if not self._begun:
            said = f"{self._member}: model {self._model!r} has not reported the tokens of its prompt"
            raise ModelFailed(said, code="ValidationError", status=424)
        return True


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
        return await codec(len(body), read, exchange.owner, Stage.READ)
    return await read_json(exchange, body, limits, read)


async def chat_prompt(exchange: Exchange, worker: Worker, said: Conversation, size: int) -> str:
    """Makes the model's prompt of a conversation, by the model's chat template or the plain one. A request of `size` bytes
    that is long runs it in a thread. ModelFailed, ModelCrashed if the template fails."""
    template: Callable[..., Any] = worker.said("chat_template") or plain_template
    try:
        if getattr(template, "elsewhere", False):
            prompt = await worker.run_author_code(partial(template, said))
        elif size <= LONG:
            prompt = apply_template(template, said)
        else:
            prompt = await worker.run_author_code(partial(apply_template, template, said))
    except BaseException as e:
        raised(exchange, worker, "chat template", e)
    if not isinstance(prompt, str):
        raise ModelFailed(f"the chat template returned {type(prompt).__name__}, not str", code="BadTemplate", status=500)
    return prompt


async def check_format(exchange: Exchange | InnerCall, worker: Worker, asked: text_members.Decided) -> None:
    """Asks a model that judges formats itself about the request's. ModelFailed, ModelCrashed if it refuses or fails."""
    if (format := format_of(asked)) is None or (check := worker.said("check_format")) is None:
        return
    try:
        await worker.run_author_code(partial(check, format))
    except ModelError as e:  # it blames the request
        raise ModelFailed(e.message, code="ValidationError", status=e.status) from e
    except BaseException as e:
        raised(exchange, worker, "check_format", e)


async def count_tokens(exchange: Exchange | InnerCall, worker: Worker, text: str) -> int | None:
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


def raised(exchange: Exchange | InnerCall, worker: Worker, what: str, error: BaseException) -> NoReturn:
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
    if worker.log_limits.allows(f"{what} raised", level=logging.ERROR):
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

    __slots__ = ("_exchange", "_prompt", "_report", "exhausted", "text")

    def __init__(self, exchange: Exchange, worker: Worker, prompt: Prompt, report: PromptReport | None = None) -> None:
        """`report`: given if the answer shows the prompt's tokens."""
        self._exchange, self._prompt = exchange, prompt
        self._report = report
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

    def check_report(self, message: Token | ToolCall | Finish | None) -> None:
        """Called with each message, and with None at the end of the model's call. ModelFailed if the answer must show the
        prompt's tokens, and the model has not sent them first."""
        if self._report is not None and self._report.check(message):
            self._report = None

    def take(self) -> Prompt:
        """The prompt, once; then trio.EndOfChannel."""
        if self.exhausted:
            raise trio.EndOfChannel
        self.exhausted = True
        return self._prompt
