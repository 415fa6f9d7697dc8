"""Runs the formatters of a model's author on one request, in the process that runs the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, final

from models.errors import ModelError
from models.formatters import Input, InputFormatter, OutputFormatter, TextGenerationOutput, TextInput, TextSequence
from models.messages import Token
from protocols import lmi
from protocols.json.strict import JSONError, loads

_FORMS = frozenset(form.value for form in lmi.Formatter)


@final
class JSONBounds(NamedTuple):
    """The limits of JSON that a formatter reads: `limits.json_depth`, `limits.json_containers`, `limits.json_values`."""

    depth: int
    containers: int
    values: int


@final
class Formatting:
    """One request and its answer, read and written by the author's functions. The output formatter sees the object that the
    input formatter has made."""

    def __init__(self, id: str, reads: InputFormatter | None, writes: OutputFormatter | None) -> None:
        """`id` is the request's. If the model has no input formatter, `take` has the request."""
        self._id, self._reads, self._writer = id, reads, writes
        self._output: TextGenerationOutput

    @property
    def writes(self) -> bool:
        """True if the author's code writes this answer: the function that the input formatter has chosen for this request,
        otherwise the model's output formatter. False if there is none, or the input formatter chose a form of the schema."""
        return self._writer is not None

    def read(
        self, content: bytes, fields: Mapping[str, str], bounds: JSONBounds, name: str, options: Mapping[str, str]
    ) -> dict[str, Any]:
        """Calls the input formatter and returns its request in the schema's form; to be called in a thread. ModelError if
        the formatter returns an invalid request; also raises whatever it raises."""
        assert self._reads is not None
        item = Input(content, fields, decode=partial(_decode, bounds))
        asked = self._reads(item, model_name=name, configs=dict(options))
        document = _document_of(asked)
        chosen = asked.output_formatter
        if callable(chosen):
            self._writer = chosen
        elif isinstance(chosen, str) and chosen in _FORMS:
            self._writer = None
        self.take(asked)
        return document

    def take(self, asked: TextInput) -> None:
        """Sets the request that the output formatter sees."""
        if self._writer is not None:
            asked.request_id = self._id
            self._output = TextGenerationOutput(self._id, asked)

    def write(self, tokens: Sequence[Token]) -> str:
        """Calls the output formatter for one more token, the last of these, and returns its text. The tokens before it are
        the prompt's. ModelError if it does not return a str; also raises whatever it raises."""
        output, writer = self._output, self._writer
        assert writer is not None
        for token in tokens:
            if token.prefill:
                output.prompt_tokens_details.append(token)
            else:
                sequence = output.sequences.setdefault(token.sequence, TextSequence())
                sequence.add(token, None if token.finish is None else token.finish.value)
        text: Any = writer(output)
        if not isinstance(text, str):
            raise _wrong(f"the output formatter returned {type(text).__name__}, not str")
        return text


def _decode(bounds: JSONBounds, content: bytes) -> Any:
    depth, containers, values = bounds
    try:
        return loads(content, what="the body", depth=depth, containers=containers, values=values)
    except JSONError as e:
        said = e.message
    raise ModelError(said, code="BadInput", status=400 if "(limits." in said else 424)


def _document_of(asked: Any) -> dict[str, Any]:
    if not isinstance(asked, TextInput):
        raise _wrong(f"the input formatter returned {type(asked).__name__}, not a TextInput")
    if not isinstance(asked.input_text, str):
        raise _wrong(f"the input formatter gave an input_text of type {type(asked.input_text).__name__}, not str")
    given: Any = asked.parameters
    try:
        parameters = {} if given is None else dict(given)
    except (TypeError, ValueError):
        raise _wrong(f"the input formatter gave parameters of type {type(given).__name__}, not a mapping") from None
    chosen: Any = asked.output_formatter
    if isinstance(chosen, str):
        parameters["output_formatter"] = chosen
    elif chosen is not None and not callable(chosen):
        raise _wrong(f"the input formatter gave an output_formatter of type {type(chosen).__name__}, not str or a function")
    return {"inputs": asked.input_text, "stream": asked.stream, "parameters": parameters}


def _wrong(message: str) -> ModelError:
    return ModelError(message, code="BadFormatter", status=500)
