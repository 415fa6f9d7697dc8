"""What SageMaker's bidirectional stream carries, whatever the form it is written in: parts, the failure, the end."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

import msgspec

from protocols.errors import RemoteProtocolError
from protocols.events import Buffer


class DataType(enum.Enum):
    """What the bytes of a part claim to be. Nobody inspects them."""

    UTF8 = "UTF8"
    BINARY = "BINARY"

    __hash__ = object.__hash__  # members are single; Enum's own is a Python call for each look-up


class Completion(enum.Enum):
    """Whether further parts continue this one (PARTIAL). Parts are passed on as they are, never aggregated."""

    PARTIAL = "PARTIAL"
    COMPLETE = "COMPLETE"

    __hash__ = object.__hash__


@final
class PayloadPart(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One part, with the defaults filled in: BINARY and COMPLETE where the event says nothing.

    Received `data` is `bytes` up to 16 KiB, in the JSON forms up to 192 KiB, and a read-only memoryview above (there `bytes`
    too where the base64 has escapes). `content_type` is the event's own, empty where it has none; GA clients send
    application/octet-stream.
    """

    data: Buffer
    data_type: DataType = DataType.BINARY
    completion: Completion = Completion.COMPLETE
    content_type: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFailure:
    """The exception that ends a response. `exception_type` is ModelStreamError, InternalStreamFailure, or another name
    that the server chose; `message` and `code` are empty where it gave none."""

    exception_type: str
    message: str = ""
    code: str = ""


class StreamEnd(enum.Enum):
    """What a decoder says when no more parts will come."""

    END = enum.auto()


END: Final = StreamEnd.END
AtEnd: TypeAlias = Literal[StreamEnd.END]

_DATA_TYPES: dict[object, DataType] = {kind.value: kind for kind in DataType}
_COMPLETIONS: dict[object, Completion] = {state.value: state for state in Completion}


def read_flags(data_type: object, state: object, status: object) -> tuple[DataType, Completion]:
    """DataType and CompletionState by their values, None where they are not set. RemoteProtocolError for other values.

    `status` is CompletionStatus: the beta document's text has that name where its examples and GA have CompletionState.
    Either is taken; both and different is an error.
    """
    kind = _DATA_TYPES.get("BINARY" if data_type is None else data_type)
    if kind is None:
        raise RemoteProtocolError(f"DataType must be 'UTF8' or 'BINARY', got {shown(data_type)}")
    if status is not None:
        if state is not None and state != status:
            raise RemoteProtocolError(f"CompletionState is {shown(state)} and CompletionStatus is {shown(status)}")
        state = status
    completion = _COMPLETIONS.get("COMPLETE" if state is None else state)
    if completion is None:
        raise RemoteProtocolError(f"CompletionState must be 'PARTIAL' or 'COMPLETE', got {shown(state)}")
    return kind, completion


def shown(value: object) -> str:
    """A peer's value as an error may show it: short."""
    return repr(value[:64] if isinstance(value, str | bytes) else value)
