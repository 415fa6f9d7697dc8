"""Prompts: requests of LMI's schema as a text model sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from models.errors import ModelError
from models.messages import GenerationParameters, Prompt, ResponseFormat
from protocols import lmi
from protocols.json.strict import CONTAINERS, VALUES
from protocols.text_members import NOTHING, Decided


def read_prompt(
    data: bytes,
    judge: Callable[[lmi.TextRequest, dict[str, Any]], tuple[lmi.TextRequest, Decided]] | None = None,
    *,
    containers: int = CONTAINERS,
    values: int = VALUES,
) -> Prompt:
    """Reads the prompt in a part: an LMI request object, or plain text. Its answer must be one text. `judge` gets the
    request and its document, and returns the request as the model may get it and the judgement on its members, or raises
    LMIError. ModelError if the prompt is invalid."""
    try:
        kind = "application/json" if data.lstrip()[:1] == b"{" else "text/plain"
        document = lmi.read_document(data, kind, containers=containers, values=values)
        request = lmi.parse_document(document)
        lmi.check_one_sequence(request.parameters, request.given, "here, where an answer is one text")
        said = NOTHING
        if judge is not None:
            request, said = judge(request, document)
        return prompt_of(request.inputs, request.parameters, said)
    except lmi.LMIError as e:
        raise ModelError(e.message, code="BadPrompt", status=400) from None


def prompt_of(text: str, parameters: lmi.Parameters, said: Decided = NOTHING) -> Prompt:
    """The prompt of a request without messages, as its model sees it. `said` is the judgement on its members."""
    given = GenerationParameters(**msgspec.structs.asdict(parameters))
    if said is NOTHING:
        return Prompt(text=text, parameters=given)
    return Prompt(
        text=text,
        parameters=given,
        response_format=format_of(said),
        adapter=said.adapter,
        template=said.template,
    )


def format_of(said: Decided) -> ResponseFormat | None:
    """The format that a request asks for, as its model sees it."""
    return None if said.format is None else ResponseFormat(**msgspec.structs.asdict(said.format))
