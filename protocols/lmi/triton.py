"""Triton's names of the parameters of a text: those of its backends TensorRT-LLM and vLLM, beside LMI's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from protocols.lmi.parameters import ALIASES, Parameters, boolean, read_parameters, refuse

NAMES: Mapping[str, str] = {
    **ALIASES,
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_length",
    "stop_words": "stop_sequences",
    "bad_words": "bad_sequences",
    "random_seed": "seed",
    "len_penalty": "length_penalty",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "beam_width": "num_beams",
    "num_return_sequences": "n",
    "truncate_prompt_tokens": "truncate",
    "return_log_probs": "details",
}
"""The names that have another one in LMI's schema."""

TEXTS = frozenset(("stop_sequences", "bad_sequences", "stop", "stop_words", "bad_words"))
"""The names whose values are texts."""

_LARGEST_ID = 2**31 - 1


def read_triton_parameters(given: Mapping[str, Any]) -> tuple[Parameters, Mapping[str, str]]:
    """Reads the parameters of a request of Triton's generate extension, by Triton's names and by LMI's, and returns what
    `read_parameters` returns. Two names of one parameter must have the same value.

    Triton's clients send some members always: texts that are empty, a `runtime_top_p` of 0 and ids of -1 count as absent.
    `end_id` is one more of the stop_token_ids. `pad_id`, and wishes for outputs that a reply of one text does not have, are
    ignored once their types are checked. LMIError of stage "parameters" names the first member that is invalid.
    """
    if _TREATED.isdisjoint(given):
        return read_parameters(given, aliases=NAMES)
    kept: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        if (check := _CHECKED.get(name)) is not None:
            check(f"parameters.{name}", value)
        elif not _is_absent(name, value):
            kept[name] = value
    parameters, names = read_parameters(kept, aliases=NAMES)
    end = given.get("end_id")
    if end is not None and end != -1:
        parameters = msgspec.structs.replace(parameters, stop_token_ids=(*parameters.stop_token_ids, int(end)))
        names = {"stop_token_ids": "end_id", **names}
    return parameters, names


def _is_absent(name: str, value: object) -> bool:
    if name in TEXTS:
        return value in ("", [""])  # a tensor of one element is written either way
    return name == "runtime_top_p" and value == 0 and not isinstance(value, bool)


def _id(name: str, value: object) -> None:
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(number, bool) or not isinstance(number, int) or not -1 <= number <= _LARGEST_ID:
        refuse(name, f"-1 (none), or an integer from 0 to {_LARGEST_ID}", value)


_CHECKED: Mapping[str, Callable[[str, object], object]] = {
    **dict.fromkeys(("end_id", "pad_id"), _id),
    **dict.fromkeys(
        ("exclude_input_in_output", "streaming", "return_context_logits", "return_generation_logits", "return_perf_metrics",
         "return_finish_reason", "return_cumulative_logprob", "return_logprobs", "return_num_input_tokens",
         "return_num_output_tokens"),
        boolean,
    ),
}  # fmt: skip
"""The members that are no parameters of the model, each with the check of its type."""

_TREATED = TEXTS.union(_CHECKED, ("runtime_top_p",))
"""All members that are not read as LMI's are."""
