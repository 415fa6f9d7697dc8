"""Compression of gRPC messages: names of encodings, inflating one message within a limit, and deflating one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from protocols.content_coding import Coding, Inflater, deflate
from protocols.errors import RemoteProtocolError
from protocols.events import Buffer
from protocols.grpc.status import GRPCError, StatusCode

ACCEPTED = b"identity,deflate,gzip"
"""The value of our `grpc-accept-encoding`."""
LEVEL = 6
"""The default level of zlib, which is also C-core's."""

_STEP = 1024 * 1024
_ENCODINGS: dict[bytes, Coding | None] = {b"identity": None, b"gzip": Coding.GZIP, b"deflate": Coding.DEFLATE}


def parse_encoding(value: bytes) -> Coding | None:
    """Returns the encoding that a `grpc-encoding` names, in any case; None for identity.

    GRPCError with UNIMPLEMENTED for an unknown name, with a text that lists ours. That is a server's answer; a client
    reports INTERNAL instead (compression.md).
    """
    name = value.lower()
    if name not in _ENCODINGS:
        raise GRPCError(
            StatusCode.UNIMPLEMENTED,
            f"grpc-encoding: expected one of {ACCEPTED.decode()}, got {value[:40].decode('latin-1')!r}",
        )
    return _ENCODINGS[name]


def parse_accepted(values: Iterable[bytes]) -> frozenset[Coding]:
    """Returns those of our encodings that a `grpc-accept-encoding` field (all of its lines) names. Unknown names are
    ignored, and so is identity, which every peer accepts."""
    names = {name.strip(b" \t").lower() for value in values for name in value.split(b",")}
    return frozenset(coding for name, coding in _ENCODINGS.items() if coding is not None and name in names)


@final
class MessageInflater:
    """Inflates one message in steps, so that a caller can pay for each step before it is made.

        inflater, out = MessageInflater(data, coding, limit=limit), bytearray()
        while not inflater.step(out, 65536):
            ...

    The format is C-core's: gzip (RFC 1952) with exactly one member, or deflate in the zlib format (RFC 1950), with nothing
    behind it. `setting` names the setting of the limit, for error messages.
    """

    __slots__ = ("_inflater", "_setting")

    def __init__(self, data: Buffer, encoding: Coding, *, limit: int, setting: str = "limit") -> None:
        # C-core refuses a second member with INTERNAL, "not all input consumed" (message_compress.cc; seen in grpcio 1.85).
        self._inflater = Inflater((encoding,), limit=limit, members=1)
        self._inflater.feed(data)
        self._setting = setting

    def step(self, out: bytearray, at_most: int) -> bool:
        """Appends at most `at_most` bytes, which must be 1 or more. True if the message is complete now.

        GRPCError with RESOURCE_EXHAUSTED if the message is longer than the limit; at most one byte beyond it is made.
        GRPCError with INTERNAL for data that are damaged, cut off, or followed by more bytes. `out` is empty then.
        """
        inflater = self._inflater
        try:
            inflater.inflate_into(out, at_most)
            if not inflater.hungry:
                return False
            inflater.finish()
        except RemoteProtocolError as e:
            out.clear()  # the traceback of the error refers to it
            if e.status == 413:
                text = f"compressed message over the limit: {e} ({self._setting})"
                raise GRPCError(StatusCode.RESOURCE_EXHAUSTED, text) from None
            raise GRPCError(StatusCode.INTERNAL, f"compressed message is invalid: {e}") from None
        return True


def inflate_message(data: Buffer, encoding: Coding, *, limit: int, setting: str = "limit") -> memoryview:
    """Inflates one message in one call, as a read-only view. Errors as from `MessageInflater.step`."""
    inflater, out = MessageInflater(data, encoding, limit=limit, setting=setting), bytearray()
    while not inflater.step(out, _STEP):
        pass
    return memoryview(out).toreadonly()


def deflate_message(buffers: Sequence[Buffer], encoding: Coding, *, level: int = LEVEL) -> list[bytes] | None:
    """Compresses one message at zlib's level (1 to 9). None if that would not make it shorter: send it uncompressed then, as
    C-core does. The work is one step: for a large message use `protocols.content_coding.deflate_steps`."""
    pieces: list[bytes] = list(deflate(encoding, buffers, level))
    return pieces if sum(map(len, pieces)) < sum(memoryview(buffer).nbytes for buffer in buffers) else None
