"""Calls the formatters of a request in a process of its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import msgspec
import trio

from gateway.codecs.formatting import JSONBounds
from gateway.instances.instance import Instance
from gateway.instances.messages import GivenInput, ReadInput, Write
from models.errors import ModelError
from models.formatters import TextInput
from models.messages import Token


@final
class InstanceFormatting:
    """A `Formatting` that calls the formatters in one instance, until `forget`. The request runs in that instance too."""

    def __init__(self, instance: Instance, id: str, *, writes: bool) -> None:
        """`id` is the request's. `writes`: the model has an output formatter of its own."""
        self.instance, self._id = instance, id
        self._number = instance.begin_formatting()
        self.writes = writes

    def read(
        self, content: bytes, fields: Mapping[str, str], bounds: JSONBounds, name: str, options: Mapping[str, str]
    ) -> dict[str, Any]:
        """Returns the request of the schema that the input formatter makes of a body. Call it from a thread. Raises the
        error of the formatter; WorkerLost if the process has ended."""
        asked = ReadInput(self._number, self._id, content, dict(fields), bounds, name, dict(options))
        document: dict[str, Any] = trio.from_thread.run(self._read, asked)
        return document

    async def _read(self, asked: ReadInput) -> dict[str, Any]:
        said = await self.instance.asked(asked)
        try:
            document, self.writes = msgspec.convert(said, tuple[dict[str, Any], bool])
        except msgspec.ValidationError as e:
            raise self.instance.broken(f"of a request that was read: {e}") from None
        return document

    def take(self, asked: TextInput) -> None:
        """Sends the parsed request to the instance. ModelError if its parameters cannot be sent to a process."""
        parameters = dict(asked.parameters or {})
        try:
            self.instance.give(GivenInput(self._number, self._id, asked.input_text, parameters, asked.stream))
        except OverflowError:
            raise ModelError(
                "the parameters have an integer of more than 64 bits, which this model does not take",
                code="BadParameter",
                status=400,
            ) from None

    async def write(self, tokens: Sequence[Token]) -> str:
        """Returns the text that the output formatter makes of the last of `tokens`; those before it belong to the prompt.
        Raises the error of the formatter; WorkerLost if the process has ended."""
        text = await self.instance.asked(Write(self.instance.next_number(), self._number, list(tokens)))
        if not isinstance(text, str):
            raise self.instance.broken("a formatted text of another type")
        return text

    def forget(self) -> None:
        """Releases the instance's state for the request."""
        self.instance.end_formatting(self._number)
