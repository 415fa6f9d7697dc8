"""Every member of every text schema with a value of every JSON type: it has its effect or is refused by its name, on every
route, and never passed over in silence or a failure of the server."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.messages import GenerationParameters, Prompt
from protocols import lmi, openai
from tests.gateway.dialects.text.test_lmi_forms import ask, text_spec
from tests.gateway.dialects.text.test_lmi_forms import lmi as lmi_config
from tests.gateway.promises import serving

Document = dict[str, Any]

VALUES: Mapping[str, tuple[Any, ...]] = {
    "boolean": (True, False),
    "integer": (1,),
    "number": (1.5,),
    "string": ("x",),
    "digits": ("7",),
    "array": ([],),
    "strings": (["x"],),
    "integers": ([1],),
    "objects": ([{}],),
    "mixed": (["x", None], ["x", []], [True, 1.5]),
    "object": ({},),
    "members": ({"a": {"b": []}},),
    "biases": ({"7": 0.5},),
}
"""Values of each kind. Null is not among them: it is what absence is."""

BOOLEAN, STRING = frozenset({"boolean"}), frozenset({"string", "digits"})
INTEGER, NUMBER = frozenset({"integer"}), frozenset({"integer", "number"})
OBJECT = frozenset({"object", "members", "biases"})
TEXTS = STRING | {"strings"}
ANYTHING = frozenset(VALUES)

PARAMETERS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(
        ("do_sample", "ignore_eos_token", "ignore_eos", "include_stop_str_in_output", "early_stopping", "skip_special_tokens",
         "spaces_between_special_tokens", "details", "return_full_text", "decoder_input_details", "stream"), BOOLEAN),
    **dict.fromkeys(
        ("top_k", "max_new_tokens", "min_length", "n", "best_of", "num_beams", "truncate", "top_n_tokens", "logprobs",
         "prompt_logprobs"), INTEGER),
    **dict.fromkeys(
        ("temperature", "repetition_penalty", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty",
         "length_penalty"), NUMBER),
    "seed": INTEGER | {"digits"},
    "logit_bias": frozenset({"object", "biases"}),
    **dict.fromkeys(("stop_sequences", "stop", "bad_sequences"), TEXTS | {"array"}),
    "stop_token_ids": frozenset({"array", "integers"}),
    "output_formatter": STRING,
    "nobody_knows": ANYTHING,
}  # fmt: skip
"""LMI's members, each with the kinds of value that it may have."""

GENERATES: Mapping[str, frozenset[str]] = {
    **PARAMETERS,
    **dict.fromkeys(
        ("max_tokens", "min_tokens", "runtime_top_k", "beam_width", "num_return_sequences", "truncate_prompt_tokens", "end_id",
         "pad_id"), INTEGER),
    **dict.fromkeys(("len_penalty", "runtime_top_p"), NUMBER),
    **dict.fromkeys(("stop_words", "bad_words"), TEXTS | {"array"}),
    "random_seed": INTEGER | {"digits"},
    **dict.fromkeys(
        ("return_log_probs", "exclude_input_in_output", "streaming", "return_context_logits", "return_generation_logits",
         "return_perf_metrics", "return_finish_reason", "return_cumulative_logprob", "return_logprobs",
         "return_num_input_tokens", "return_num_output_tokens"), BOOLEAN),
    "sampling_parameters": frozenset(),  # an object in a string
}  # fmt: skip
"""Those of Triton's generate extension, beside LMI's."""

OPENAI: Mapping[str, frozenset[str]] = {
    "model": STRING,
    **dict.fromkeys(("stream", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
                     "spaces_between_special_tokens", "parallel_tool_calls", "store"), BOOLEAN),
    **dict.fromkeys(("max_tokens", "n", "top_k", "min_tokens", "truncate_prompt_tokens"), INTEGER),
    **dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty", "min_p", "repetition_penalty"), NUMBER),
    "seed": PARAMETERS["seed"],
    "logit_bias": PARAMETERS["logit_bias"],
    **dict.fromkeys(("stop", "bad_words"), TEXTS | {"array"}),
    "stop_token_ids": PARAMETERS["stop_token_ids"],
    **dict.fromkeys(("metadata", "prediction", "prompt_cache_options"), OBJECT),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "safety_identifier", "service_tier",
                     "user", "verbosity"), STRING),
    "stream_options": frozenset(),  # without a stream
    "response_format": frozenset(),
    "nobody_knows": ANYTHING,
}  # fmt: skip

CHAT: Mapping[str, frozenset[str]] = {
    **OPENAI,
    "messages": frozenset(),
    "max_completion_tokens": INTEGER,
    "logprobs": BOOLEAN,
    "top_logprobs": frozenset(),  # without logprobs
    "tools": frozenset({"array"}),
    "functions": frozenset({"array"}),
    "modalities": frozenset({"array"}),
    **dict.fromkeys(("tool_choice", "function_call", "audio", "web_search_options", "moderation"), frozenset[str]()),
}

COMPLETION: Mapping[str, frozenset[str]] = {
    **OPENAI, "prompt": TEXTS, "best_of": INTEGER, "logprobs": INTEGER | BOOLEAN, "echo": BOOLEAN, "suffix": frozenset(),
}  # fmt: skip

MESSAGE: Mapping[str, frozenset[str]] = {
    "role": frozenset(), "content": STRING, "name": STRING, "tool_calls": frozenset({"array"}), "function_call": frozenset(),
    "audio": frozenset(), "tool_call_id": STRING, "refusal": STRING,
}  # fmt: skip
PART: Mapping[str, frozenset[str]] = {"type": frozenset(), "text": STRING}
STREAM_OPTIONS: Mapping[str, frozenset[str]] = dict.fromkeys(
    ("include_usage", "continuous_usage_stats", "include_obfuscation"), BOOLEAN
)


Put = Callable[[Document, str, Any], Document]


def run_in_codec_thread(document: Document, name: str, value: Any) -> Document:
    return {**document, name: value}


def within(*path: Any) -> Put:
    """Puts a member into the object that is found at that path."""

    def put(document: Document, name: str, value: Any) -> Document:
        whole = json.loads(json.dumps(document))
        at = whole
        for step in path:
            at = at[step]
        at[name] = value
        return dict(whole)

    return put


@dataclass(frozen=True)
class Place:
    """A schema, and one of its objects: where members of the table stand."""

    path: str
    document: Document
    members: Mapping[str, frozenset[str]]
    put: Put = run_in_codec_thread
    called: str = ""
    """The text before the name of a member in an error."""
    configured: Mapping[str, Any] = field(default_factory=dict)
    refused: int = 424


PREDICT, GENERATE = "/predictions/m", "/v2/models/m/generate"
HI = [{"role": "user", "content": "Hi"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
INPUTS = {"inputs": "x", "parameters": {}}
TOP = {"inputs": STRING, "parameters": OBJECT, "stream": BOOLEAN}
BATCH = {"rolling_batch": "disable"}
OURS = partial(Place, refused=400)
OPTIONS: Document = {"stream": True, "stream_options": {}}

PLACES = {
    "lmi": Place(PREDICT, INPUTS, TOP),
    "lmi-parameters": Place(PREDICT, INPUTS, PARAMETERS, within("parameters"), "parameters."),
    "lmi-invoked": Place("/invocations", INPUTS, PARAMETERS, within("parameters"), "parameters."),
    "lmi-trtllm": Place(PREDICT, INPUTS, PARAMETERS, within("parameters"), "parameters.", {"rolling_batch": "trtllm"}),
    "tgi": Place(PREDICT, INPUTS, TOP, configured={"tgi_compat": True}),
    "tgi-parameters": Place(PREDICT, INPUTS, PARAMETERS, within("parameters"), "parameters.", {"tgi_compat": True}),
    "dynamic": Place(PREDICT, INPUTS, {**TOP, "inputs": TEXTS}, configured=BATCH),
    "dynamic-parameters": Place(PREDICT, INPUTS, PARAMETERS, within("parameters"), "parameters.", BATCH),
    "generate": OURS(GENERATE, {"text_input": "x", "parameters": {}}, {**GENERATES, "text_input": STRING, "id": STRING,
                                                                     "parameters": OBJECT}),
    "generate-parameters": OURS(GENERATE, {"text_input": "x", "parameters": {}}, GENERATES, within("parameters")),
    "generate-stream": OURS(GENERATE + "_stream", {"text_input": "x", "parameters": {}}, GENERATES),
    "chat": OURS("/v1/chat/completions", {"messages": HI}, CHAT),
    "chat-invoked": OURS("/invocations", {"messages": HI}, {**CHAT, "messages": frozenset()}),
    "chat-message": OURS("/v1/chat/completions", {"messages": HI}, MESSAGE, within("messages", 0), "messages[0]."),
    "chat-part": OURS("/v1/chat/completions", {"messages": PARTS}, PART, within("messages", 0, "content", 0),
                      "messages[0].content[0]."),
    "chat-stream": OURS("/v1/chat/completions", {"messages": HI, **OPTIONS}, STREAM_OPTIONS, within("stream_options"),
                        "stream_options."),
    "completions": OURS("/v1/completions", {"prompt": "x"}, COMPLETION),
    "completions-stream": OURS("/v1/completions", {"prompt": "x", **OPTIONS}, STREAM_OPTIONS, within("stream_options"),
                               "stream_options."),
}  # fmt: skip

DATA = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner | st.none(), max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def check_types(parameters: object) -> None:
    """Fails if one has another type than it is declared with."""
    msgspec.convert(msgspec.structs.asdict(parameters), GenerationParameters, strict=True)


async def typed(prompt: Prompt) -> str:
    check_types(prompt.parameters)
    return "x"


@pytest.mark.parametrize("name", PLACES)
async def test_a_value_of_each_kind_has_its_effect_or_is_refused_by_the_members_name(name: str, autojump_clock: Any) -> None:
    place = PLACES[name]
    wrong = []
    async with serving(text_spec(typed), config=lmi_config(**place.configured)) as house:
        line = house.line("http1")
        for member, kinds in place.members.items():
            for kind, values in VALUES.items():
                for value in values:
                    status, _, body = await ask(house, place.path, place.put(place.document, member, value), line=line)
                    if status == 404 and member == "model":  # there is none of that name
                        continue
                    refused = status == place.refused and place.called + member in body.decode()
                    if not refused and (status != 200 or kind not in kinds):
                        wrong.append(f"{member} {value!r}: {status} {body[:60]!r}")
    assert "\n".join(wrong) == ""


READERS: Mapping[str, Callable[[Document], Any]] = {
    "lmi": lmi.parse_document,
    "tgi": partial(lmi.parse_document, tgi=True),
    "dynamic": lmi.parse_dynamic_document,
    "chat": openai.parse_chat,
    "completions": openai.parse_completion,
}
READ = [name for name in PLACES if name.partition("-")[0] in READERS]


@settings(max_examples=400)
@given(st.sampled_from(READ), st.data())
def test_any_value_at_all_is_read_as_what_it_is_declared_to_be_or_refused(name: str, data: st.DataObject) -> None:
    place = PLACES[name]
    member = data.draw(st.sampled_from(sorted(place.members)))
    document = place.put(place.document, member, data.draw(DATA))
    try:
        request = READERS[name.partition("-")[0]](document)
    except (lmi.LMIError, openai.OpenAIError) as error:
        said = error.message
    else:
        check_types(request.parameters)
        said = place.called + member
    assert place.called + member in said
