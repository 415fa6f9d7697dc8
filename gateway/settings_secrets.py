"""Which values are secrets, by the names that they go by, and what is shown in their place."""

from __future__ import annotations

import re
from typing import Any

MASK = "********"

# Not every token is one: models have eos_token, pad_token and max_tokens among their options.
_NAMES = re.compile(
    r"(?i)(password|passwd|passphrase|secret|authorization|(api|private|access|signing|encryption)[_-]?key"
    r"|(api|access|auth|bearer|hf|hub|session|refresh|id)[_-]?token)s?$|^tokens?$"
)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def without_secrets(name: str, value: Any) -> Any:
    """The value of a setting, or of a model's option, with each secret in it masked: text under a name such as `password`,
    `api_key` or `hf_token`, in tables and lists too, and the user and password of a URL."""
    if isinstance(value, dict):
        return {inner: without_secrets(inner, item) for inner, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_secrets(name, item) for item in value)
    if not isinstance(value, str):
        return value
    return MASK if value and _NAMES.search(name) else _IN_URL.sub(MASK, value)
