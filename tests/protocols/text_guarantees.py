"""Names of the list of members that clients take for a guarantee, with values that ask for something and for nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

OBJECT, SCHEMA = {"a": 1}, {"type": "object"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]

GUARANTEES: Mapping[str, Sequence[Any]] = {
    "response_format": ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
                        {"type": "json", "value": SCHEMA}, {"type": "structural_tag"}),
    "guided_json": (SCHEMA, '{"type": "object"}'),
    "json_schema": (SCHEMA,),
    "guided_json_object": (True,),
    "guided_choice": (["a", "b"],),
    "guided_regex": ("a+",),
    "regex": ("a+",),
    "guided_grammar": ("root ::= 'a'",),
    "ebnf": ("root ::= 'a'",),
    "structural_tag": ("{}", {"format": {}}),
    "grammar": ("root ::= 'a'", {"type": "json", "value": SCHEMA}, {"type": "regex", "value": "a+"}),
    "whitespace_pattern": ("[ ]?",),
    "guided_whitespace_pattern": ("[ ]?",),
    "disable_any_whitespace": (True,),
    "disable_additional_properties": (True,),
    "adapters": (["french"], "french", ["", "french"]),
    "adapter_id": ("french",),
    "lora_path": ("/french", ["/french"]),
    "lora_id": ("french",),
    "chat_template_kwargs": ({"enable_thinking": False},),
    "chat_template": ("{{ messages }}",),
    "continue_final_message": (True,),
    "add_generation_prompt": (False,),
    "truncation_side": ("right",),
    "prompt_embeds": ("AAAA",),
    "mm_processor_kwargs": (OBJECT,),
    "media_io_kwargs": (OBJECT,),
    "allowed_token_ids": ([1, 2],),
    "logits_processors": (["a.b"],),
    "custom_logit_processor": ("code",),
    "repetition_detection": (OBJECT,),
    "documents": ([{"text": "x"}],),
    "stop_regex": ("a+",),
    "watermarking": (True,),
    "watermark": (True,),
    "use_beam_search": (True,),
    "return_token_ids": (True,),
    "return_tokens_as_token_ids": (True,),
    "return_hidden_states": (True,),
    "logprob_token_ids": ([1],),
    "separate_reasoning": (False,),
    "kv_transfer_params": (OBJECT,),
    "ec_transfer_params": (OBJECT,),
    "tools": (TOOLS, [{"type": "custom", "custom": {"name": "f"}}]),
    "tool_choice": ("required", "auto", {"type": "function", "function": {"name": "f"}}),
    "functions": ([{"name": "f"}],),
    "function_call": ("auto", {"name": "f"}),
    "modalities": (["text", "audio"], ["audio"]),
    "moderation": (OBJECT,),
    "audio": ({"voice": "ash", "format": "wav"},),
    "web_search_options": (OBJECT, {}),
    "fallbacks": ([OBJECT],),
    "mcp_servers": ([OBJECT],),
    "container": ("id", OBJECT),
}  # fmt: skip
"""Each name of the list that is refused on every wire, with values that ask for something."""

LISTED = (
    "allowed_token_ids", "logits_processors", "custom_logit_processor", "repetition_detection", "documents", "stop_regex",
    "watermarking", "watermark", "use_beam_search", "echo",
)  # fmt: skip

HINTS: Mapping[str, tuple[Any, Any]] = {
    **dict.fromkeys(("include_reasoning", "parallel_tool_calls", "store"), (True, "yes")),
    **dict.fromkeys(("metadata", "client_metadata", "prediction", "prompt_cache_options", "cache_control"), (OBJECT, "x")),
    **dict.fromkeys(("context_management", "diagnostics"), (OBJECT, "x")),
    **dict.fromkeys(
        ("guided_decoding_backend", "inference_geo", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort",
         "safety_identifier", "service_tier", "speed", "user", "verbosity"), ("x", 5)),
}  # fmt: skip
"""Names that are passed over, each with a value and one of a wrong type."""

TO_THE_MODEL = ("priority", "cache_salt", "request_id", "session_id", "stream_interval", "vllm_xargs", "nobody_knows")

NOTHING: Mapping[str, Any] = {
    **dict.fromkeys(
        ("watermark", "watermarking", "use_beam_search", "return_token_ids", "return_tokens_as_token_ids",
         "return_hidden_states", "continue_final_message", "disable_any_whitespace", "disable_additional_properties",
         "guided_json_object"), False),
    "add_generation_prompt": True,
    "separate_reasoning": True,
    "truncation_side": "left",
    "adapters": [],
    "adapter_id": "",
    "lora_path": [None],
    "documents": [],
    "chat_template_kwargs": {},
    "chat_template": "",
    "structured_outputs": {"json": None, "json_object": False, "regex": ""},
    "guided_regex": "",
    "guided_choice": [],
    "grammar": "",
    "response_format": {"type": "text", "json_schema": None},
    "tools": [],
    "functions": [],
    "tool_choice": "none",
    "function_call": "none",
    "modalities": ["text"],
    "kv_transfer_params": {},
}  # fmt: skip
"""Values that ask for nothing."""
