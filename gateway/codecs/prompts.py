"""Prompts: a request of LMI's as a text model sees it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from models.errors import ModelError
from models.messages import GenerationParameters, Prompt
from protocols import lmi
from protocols.strict_json import CONTAINERS, VALUES


def read_prompt(
    data: bytes,
    within: Callable[[lmi.TextRequest], lmi.TextRequest] | None = None,
    *,
    containers: int = CONTAINERS,
    values: int = VALUES,
) -> Prompt:
    """A prompt as a part carries it: an LMI request object, or the plain text itself. Its answer is one text. `within` is
    `within_ceiling` of a model."""
    try:
        kind = "application/json" if data.lstrip()[:1] == b"{" else "text/plain"
        request = lmi.parse_request(data, kind, containers=containers, values=values)
        lmi.check_one_sequence(request.parameters, request.given, "here, where an answer is one text")
        if within is not None:
            request = within(request)
        return prompt_of(request.inputs, request.parameters)
    except lmi.LMIError as e:
        raise ModelError(e.message, code="BadPrompt", status=400) from None


def prompt_of(text: str, parameters: lmi.Parameters) -> Prompt:
    """The model's view of a request."""
    return Prompt(text=text, parameters=GenerationParameters(**msgspec.structs.asdict(parameters)))
