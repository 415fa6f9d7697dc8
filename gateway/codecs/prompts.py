"""Prompts: requests of LMI's schema as a text model sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from models.errors import ModelError
from models.messages import GenerationParameters, Prompt
from protocols import lmi
from protocols.json.strict import CONTAINERS, VALUES


def read_prompt(
    data: bytes,
    judge: Callable[[lmi.TextRequest, dict[str, Any]], lmi.TextRequest] | None = None,
    *,
    containers: int = CONTAINERS,
    values: int = VALUES,
) -> Prompt:
    """Reads the prompt in a part: an LMI request object, or plain text. Its answer must be one text. `judge` gets the
    request and its document, and returns the request as the model may get it, or raises LMIError. ModelError if the prompt
    is invalid."""
    try:
        kind = "application/json" if data.lstrip()[:1] == b"{" else "text/plain"
        document = lmi.read_document(data, kind, containers=containers, values=values)
        request = lmi.parse_document(document)
        lmi.check_one_sequence(request.parameters, request.given, "here, where an answer is one text")
        if judge is not None:
            request = judge(request, document)
        return prompt_of(request.inputs, request.parameters)
    except lmi.LMIError as e:
        raise ModelError(e.message, code="BadPrompt", status=400) from None


def prompt_of(text: str, parameters: lmi.Parameters) -> Prompt:
    """The prompt of a request, as its model sees it."""
    return Prompt(text=text, parameters=GenerationParameters(**msgspec.structs.asdict(parameters)))
