"""LMI's generation parameters: reads and checks every name of the schema's tables, with its type, range and default."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias, final

import msgspec

from protocols.lmi.errors import LMIError, Stage

MAX_STRINGS = 64
"""The most strings, or token ids, in one list: stop_sequences, bad_sequences, stop_token_ids."""

MAX_SEQUENCES = 64
"""The limit of n, best_of and num_beams: each is a separate generation that is held until the answer is complete."""

MAX_TOP = 20
"""The limit of top_n_tokens, logprobs and prompt_logprobs: vLLM's `max_logprobs`, and OpenAI's limit of top_logprobs."""

MAX_BIASES = 65_536
"""The most tokens in logit_bias."""

# TensorRT-LLM's table calls `stop` a boolean, which is a mistake: its handler reads strings.
ALIASES: Mapping[str, str] = {"stop": "stop_sequences", "ignore_eos": "ignore_eos_token"}
"""LMI's second names of parameters."""

_INT32 = 2**31 - 1
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}").fullmatch
_EMPTY: Mapping[Any, Any] = MappingProxyType({})


class Table(enum.Enum):
    """The backend whose defaults and ranges hold; the values are those of `option.rolling_batch`. Every table has every
    name."""

    VLLM = "vllm"
    LMI_DIST = "lmi-dist"
    """As VLLM: both agree on all parameters that they share."""
    TRTLLM = "trtllm"
    """TensorRT-LLM: top_k, top_p, temperature and min_length have other defaults, and top_p may be 0."""


class SamplingRule(enum.Enum):
    """The rule that decides between greedy decoding and sampling; the values are the versions of LMI that have it."""

    V0_31 = "0.31"
    """`do_sample` alone: absent or false is greedy, whatever `temperature` is."""
    V0_32 = "0.32"
    """`do_sample` if it is given; otherwise a given temperature asks for sampling."""


@final
class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of all tables with vLLM's defaults. `extra` holds all other parameters, unchecked.

    `do_sample` is the result of rule and table: false is greedy. `seed` None means that the model chooses one. `top_k` 0 is
    off; -1, which some backends write, is read as 0. `best_of` is never less than `n`. `limited` is
    for those who know the request: False if it names no `max_new_tokens`.
    """

    do_sample: bool = False
    seed: int | None = None
    temperature: float = 1.0
    repetition_penalty: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = _EMPTY
    max_new_tokens: int = 30
    limited: bool = True
    min_length: int = 0
    ignore_eos_token: bool = False
    stop_sequences: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    # The tables have false. But LMI's text is that of its tokens, one after another, and includes the stop string.
    include_stop_str_in_output: bool = True
    bad_sequences: tuple[str, ...] = ()
    n: int = 1
    best_of: int = 1
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    truncate: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    details: bool = False
    return_full_text: bool = False
    decoder_input_details: bool = False
    top_n_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    extra: Mapping[str, Any] = _EMPTY


def read_parameters(
    given: Mapping[str, Any],
    *,
    table: Table = Table.VLLM,
    rule: SamplingRule = SamplingRule.V0_31,
    may_be_0: bool = False,
    aliases: Mapping[str, str] = ALIASES,
) -> tuple[Parameters, Mapping[str, str]]:
    """Reads the `parameters` of a request. Also returns those that the request itself gives: canonical names (`stop` counts
    as stop_sequences), each with the name it has in the request. Null parameters count as absent; they and unknown ones are
    not in it. `may_be_0`: `max_new_tokens` may be 0, which takes the prompt in and generates nothing. `aliases`: other names
    of parameters, in place of LMI's own second names.

    `stream` and `output_formatter` are about the form of the answer: their types are checked, and they are ignored. LMIError
    of stage "parameters" names the first parameter that is out of range or contradicts another.
    """
    readers = _TRTLLM_READERS if table is Table.TRTLLM else _READERS
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    extra: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        if (check := _OF_THE_ANSWER.get(name)) is not None:
            check(f"parameters.{name}", value)
            continue
        field = aliases.get(name, name)
        if (read := readers.get(field)) is None:
            extra[name] = value
            continue
        if may_be_0 and field == "max_new_tokens":
            read = _or_none
        taken = read(f"parameters.{name}", value)
        if field in values and values[field] != taken:
            refuse(f"parameters.{name}", f"what parameters.{names[field]} says, or one of the two alone", value)
        values[field] = taken
        names[field] = name
    _settle_sampling(values, table, rule)
    _settle_sequences(values, names)
    if values.get("prompt_logprobs"):
        values.setdefault("decoder_input_details", True)
    return Parameters(**values, extra=extra), names


def check_one_sequence(parameters: Parameters, given: Mapping[str, str], where: str) -> None:
    """Raises LMIError for a parameter that asks for several sequences, or makes several; `where` tells why only one can
    be."""
    for name in ("n", "best_of", "num_beams"):
        if name in given and getattr(parameters, name) > 1:
            refuse(f"parameters.{given[name]}", f"1 {where}", getattr(parameters, name))


def refuse(name: str, expected: str, value: object, *, stage: Stage = "parameters") -> NoReturn:
    """Raises LMIError with the standard text: what was expected of `name`, and the value, shortened."""
    raise LMIError(f"{name}: expected {expected}, got {shown(value)}", stage=stage)


def shown(value: object) -> str:
    """A value as the text of an error has it, shortened."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case int() | float():
            return str(value)[:40]
        case str():
            return f"the string {value[:40]!r}" if value else "an empty string"
        case list() | tuple():  # a tuple comes from code, not from JSON
            return f"an array of {len(value)}"
        case _:
            return "an object"


# --- parameters that depend on each other


def _settle_sampling(values: dict[str, Any], table: Table, rule: SamplingRule) -> None:
    asked = values.get("do_sample")
    if asked is None:
        asked = rule is SamplingRule.V0_32 and "temperature" in values
    sampled = asked and values.get("temperature") != 0
    if table is Table.TRTLLM:
        # TensorRT-LLM itself has no do_sample: it is greedy where top_k and top_p are both 0.
        sampled = sampled and not (values.get("top_k") == 0 and values.get("top_p") == 0)
        for name, value in (_TRTLLM_SAMPLED if sampled else _TRTLLM_GREEDY).items():
            values.setdefault(name, value)
        if sampled and values["top_p"] == 0:
            values["top_p"] = 1.0  # with a top_k, 0 means off in TensorRT-LLM
    values["do_sample"] = sampled


def _settle_sequences(values: dict[str, Any], names: Mapping[str, str]) -> None:
    """Sets `n` and `best_of`. Without `n`, all sequences are returned, as in LMI, which makes `num_beams` beams whatever
    `best_of` is."""
    beams, best_of = values.get("num_beams", 1), values.get("best_of", 1)
    if "n" not in values:
        values["n"] = beams if beams > 1 else best_of
    elif "best_of" in values and best_of < values["n"]:
        refuse("parameters.best_of", f"at least parameters.{names['n']}, which is {values['n']}", best_of)
    elif 1 < beams < values["n"]:
        refuse(f"parameters.{names['n']}", f"at most parameters.{names['num_beams']}, which is {beams}", values["n"])
    values["best_of"] = max(best_of, values["n"])


# --- one value

_Reader: TypeAlias = Callable[[str, object], Any]


def _integer_in(value: object, low: int, high: int) -> int | None:
    """The integer value of a JSON number in the range, else None: 10.0 and 1e1 are 10 (RFC 8259 has one kind of number)."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of a double
        return None
    return number if math.isfinite(number) else None


def boolean(name: str, value: object, *, stage: Stage = "parameters") -> bool:
    """Returns a boolean value; LMIError for any other."""
    return value if isinstance(value, bool) else refuse(name, "true or false", value, stage=stage)


def _string(name: str, value: object) -> str:
    return value if isinstance(value, str) else refuse(name, "a string", value)


def _real(expected: str, legal: Callable[[float], bool]) -> _Reader:
    def read(name: str, value: object) -> float:
        number = _number(value)
        return refuse(name, expected, value) if number is None or not legal(number) else number

    return read


def _integer(low: int, high: int) -> _Reader:
    def read(name: str, value: object) -> int:
        number = _integer_in(value, low, high)
        return refuse(name, f"an integer from {low} to {high}", value) if number is None else number

    return read


def _seed(name: str, value: object) -> int:
    number = int(value) if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}", value) else value
    # The range of torch's manual_seed.
    seed = _integer_in(number, -(2**63), 2**64 - 1)
    return refuse(name, "an integer of 64 bits", value) if seed is None else seed


def _top_k(name: str, value: object) -> int:
    top_k = _integer_in(value, -1, _INT32)
    return refuse(name, f"-1 or 0 (off), or an integer from 1 to {_INT32}", value) if top_k is None else max(top_k, 0)


def _strings(name: str, value: object) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or len(strings) > MAX_STRINGS:
        refuse(name, f"at most {MAX_STRINGS} strings", value)
    for string in strings:
        if not isinstance(string, str) or not string:
            refuse(name, "non-empty strings", string)
    return tuple(strings)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or len(value) > MAX_STRINGS:
        refuse(name, f"an array of at most {MAX_STRINGS} token ids", value)
    return tuple(_integer(0, _INT32)(name, item) for item in value)


def _logit_bias(name: str, value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        refuse(name, "an object of token ids and numbers", value)
    if len(value) > MAX_BIASES:
        raise LMIError(f"{name}: expected at most {MAX_BIASES} token ids, got {len(value)}", stage="parameters")
    biases = {}
    for token_id, item in value.items():
        # No leading zero: with two keys for one token, the last would silently win.
        if not _TOKEN_ID(token_id) or (token := int(token_id)) > _INT32:
            refuse(name, f"token ids from 0 to {_INT32} as keys", token_id)
        bias = item if type(item) is float else _number(item)
        if bias is None or not -100 <= bias <= 100:
            refuse(f"{name}.{token_id}", "a number from -100 to 100", item)
        biases[token] = bias
    return biases


_or_none = _integer(0, _INT32)
_share = _real("a number >= 0 and <= 1", lambda v: 0 <= v <= 1)
_mass = _real("a number > 0 and <= 1", lambda v: 0 < v <= 1)
_penalty = _real("a number from -2 to 2", lambda v: -2 <= v <= 2)

# The schema leaves the ranges to the backend, so these are vLLM's. If vLLM has none, all meaningful values are accepted.
_READERS: Mapping[str, _Reader] = {
    "do_sample": boolean,
    "seed": _seed,
    "temperature": _real("a number >= 0", lambda v: v >= 0),
    "repetition_penalty": _real("a number > 0", lambda v: v > 0),
    "top_k": _top_k,
    "top_p": _mass,
    "min_p": _share,
    "typical_p": _mass,
    "presence_penalty": _penalty,
    "frequency_penalty": _penalty,
    "logit_bias": _logit_bias,
    "max_new_tokens": _integer(1, _INT32),
    "min_length": _integer(0, _INT32),
    "ignore_eos_token": boolean,
    "stop_sequences": _strings,
    "stop_token_ids": _token_ids,
    "include_stop_str_in_output": boolean,
    "bad_sequences": _strings,
    "n": _integer(1, MAX_SEQUENCES),
    "best_of": _integer(1, MAX_SEQUENCES),
    "num_beams": _integer(1, MAX_SEQUENCES),
    "length_penalty": _real("a number", lambda v: True),
    "early_stopping": boolean,
    "truncate": _integer(1, _INT32),
    "skip_special_tokens": boolean,
    "spaces_between_special_tokens": boolean,
    "details": boolean,
    "return_full_text": boolean,
    "decoder_input_details": boolean,
    "top_n_tokens": _integer(0, MAX_TOP),
    "logprobs": _integer(0, MAX_TOP),
    "prompt_logprobs": _integer(0, MAX_TOP),
}
_TRTLLM_READERS: Mapping[str, _Reader] = {**_READERS, "top_p": _share}

_OF_THE_ANSWER: Mapping[str, _Reader] = {"stream": boolean, "output_formatter": _string}

# As the schema prints them; the implementation samples at a temperature of 0.8 too.
_TRTLLM_GREEDY: Mapping[str, Any] = {"temperature": 0.8, "top_k": 0, "top_p": 0.0, "min_length": 1}
_TRTLLM_SAMPLED: Mapping[str, Any] = {"temperature": 1.0, "top_k": 5, "top_p": 0.85, "min_length": 1}
