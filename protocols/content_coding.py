"""Content codings (gzip and deflate): reads their names, chooses one, decodes in bounded steps, and encodes."""

from __future__ import annotations

import enum
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import final

from protocols.errors import RemoteProtocolError
from protocols.events import Buffer

DEEPEST = 2
"""The most nested codings that are decoded."""
MEMBERS = 65_536
"""The most members of one gzip body. A member costs as much work as a few KiB, and may be empty. Blocked gzip (BGZF) has
one for each 64 KiB of content."""

_INPUT = 16 * 1024  # bytes given to zlib in one call: zlib copies what it leaves
_OUTPUT = 64 * 1024  # bytes that one call may make
_MEMBER = 512  # the cost of one call, in bytes that it could have read in that time
STEP = 1024 * 1024
"""Bytes that one step of `deflate_steps` reads."""


class Coding(enum.Enum):
    """RFC 9110 section 8.4.1; the value is the name in a field."""

    GZIP = b"gzip"
    """RFC 1952."""
    DEFLATE = b"deflate"
    """The zlib format, RFC 1950. The bare stream that some senders mean by this name has no checksum: it is refused."""


ACCEPTED = b"gzip, deflate"
"""The value of Accept-Encoding in a 415 answer (RFC 9110 section 15.5.16)."""

_CODINGS = {b"gzip": Coding.GZIP, b"x-gzip": Coding.GZIP, b"deflate": Coding.DEFLATE}
_WINDOW = {Coding.GZIP: 16 + zlib.MAX_WBITS, Coding.DEFLATE: zlib.MAX_WBITS}

# RFC 9110 section 12.5.3, with the weight of section 12.4.2
_ACCEPTABLE = re.compile(
    rb"[ \t]*([!#$%&'*+.^_`|~0-9A-Za-z-]+)"
    rb"(?:[ \t]*;[ \t]*[qQ]=(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?))?[ \t]*"
)


def parse_content_encoding(values: Iterable[bytes]) -> tuple[Coding, ...]:
    """The codings that a Content-Encoding field (all of its lines) names, in the order in which they were applied. Names
    have any case, `identity` and empty members are ignored, and `x-gzip` is gzip. RemoteProtocolError with status 415 for an
    unknown name, and for more than two codings."""
    codings = []
    for name in _members(values):
        if name == b"identity":
            continue
        coding = _CODINGS.get(name)
        if coding is None:
            raise RemoteProtocolError(
                f"content-encoding {name[:40].decode('latin-1')!r} is not known: gzip and deflate are, or send the body "
                "as it is",
                status=415,
            )
        codings.append(coding)
    if len(codings) > DEEPEST:
        raise RemoteProtocolError(
            f"content-encoding names {len(codings)} codings inside one another: at most {DEEPEST} are taken off", status=415
        )
    return tuple(codings)


def _members(values: Iterable[bytes]) -> Iterator[bytes]:
    for value in values:
        for member in value.split(b","):
            if name := member.strip(b" \t").lower():
                yield name


def choose_coding(values: Iterable[bytes]) -> Coding | None:
    """The coding for a reply to a request with this Accept-Encoding field (all of its lines). None: send the body uncoded.

    The highest weight wins. At equal weights gzip goes before deflate, and both before `identity`. If `identity` is not
    named, `*` gives its weight: a client that accepts anything gets the body uncoded, as from Triton. Malformed members are
    ignored. If no coding is acceptable, the body is sent uncoded even for `identity;q=0`, as RFC 9110 section 12.5.3 allows.
    """
    weights: dict[bytes, float] = {}
    for value in values:
        for member in value.split(b","):
            found = _ACCEPTABLE.fullmatch(member)
            if found is not None:
                name, weight = found.groups()
                weights.setdefault(name.lower(), 1.0 if weight is None else float(weight))
    gzip = weights.get(b"gzip", weights.get(b"x-gzip", 0.0))
    deflate = weights.get(b"deflate", 0.0)
    best = max(gzip, deflate)
    if not best or best < weights.get(b"identity", weights.get(b"*", 0.0)):
        return None
    return Coding.GZIP if gzip == best else Coding.DEFLATE


@final
class Inflater:
    """Takes the codings off a body, in steps of bounded work and memory.

        inflater.feed(body)
        while not inflater.hungry:
            inflater.inflate_into(out, 65536)
        inflater.finish()

    No coding may produce more than `limit` bytes: RemoteProtocolError with status 413 if one would. Status 400 if the data
    are damaged, cut off, or followed by more bytes. After an error the inflater cannot be used again. Beside its input and
    output it holds some 150 KiB for each coding.
    """

    __slots__ = ("_stages",)

    def __init__(self, codings: Sequence[Coding], *, limit: int, members: int = MEMBERS) -> None:
        self._stages = [_Stage(coding, limit, members) for coding in codings]

    def feed(self, data: Buffer) -> None:
        """Takes the next piece of the body, by reference. Call it only while `hungry`."""
        self._stages[-1].feed(data)  # the coding that was applied last comes off first

    @property
    def hungry(self) -> bool:
        """True if all input is decoded."""
        return not any(stage.ready for stage in self._stages)

    def inflate_into(self, out: bytearray, at_most: int) -> None:
        """Makes one step: appends at most `at_most` bytes, which must be 1 or more. It ends early, perhaps without output,
        when it has read `at_most` bytes, or 64 KiB if that is more. If it raises, `out` is empty."""
        end, work = len(out) + at_most, max(at_most, _OUTPUT)
        try:
            while work > 0 and len(out) < end:
                number = next((i for i, stage in enumerate(self._stages) if stage.ready), None)
                if number is None:
                    return
                stage = self._stages[number]
                before = stage.read
                if number:
                    self._stages[number - 1].feed(stage.inflate(_OUTPUT))
                else:
                    out += stage.inflate(end - len(out))
                work -= stage.read - before + _MEMBER
        except RemoteProtocolError:
            out.clear()  # the traceback of the error refers to it
            raise

    def finish(self) -> None:
        """Tells that the body is complete: RemoteProtocolError unless every coding has come to its end."""
        for stage in self._stages:
            stage.finish()


@final
class _Stage:
    """One coding. `read` counts the bytes of its input that it has taken."""

    __slots__ = ("_at", "_coding", "_data", "_engine", "_full", "_limit", "_made", "_members", "read")

    def __init__(self, coding: Coding, limit: int, members: int) -> None:
        self._coding, self._limit, self._members = coding, limit, members
        self._engine = zlib.decompressobj(_WINDOW[coding])
        self._data, self._at = memoryview(b""), 0
        self._full = False  # the last call filled its output: zlib may hold more
        self._made = self.read = 0

    @property
    def _name(self) -> str:
        return self._coding.value.decode()

    @property
    def ready(self) -> bool:
        return self._at < len(self._data) or self._full

    def feed(self, data: Buffer) -> None:
        assert not self.ready, "what was fed before comes first"
        self._data, self._at = memoryview(data), 0

    def inflate(self, at_most: int) -> bytes:
        """Calls zlib once."""
        if self._engine.eof:
            self._begin_another()
        # at the limit: one byte more tells whether it is exceeded
        most = min(at_most, _OUTPUT, self._limit - self._made) or 1
        piece = self._data[self._at : self._at + _INPUT]
        engine = self._engine
        try:
            made = engine.decompress(piece, most)
        except zlib.error as e:
            raise self._damaged(e) from None
        taken = len(piece) - len(engine.unused_data if engine.eof else engine.unconsumed_tail)
        self._at += taken
        self.read += taken
        self._full = len(made) == most and not engine.eof
        self._made += len(made)
        if self._made > self._limit:
            raise RemoteProtocolError(f"the {self._name} body inflates to more than {self._limit} bytes", status=413)
        return made

    def _begin_another(self) -> None:
        if self._coding is Coding.DEFLATE:
            raise RemoteProtocolError(f"the deflate body goes on behind its end, at byte {self.read}")
        self._members -= 1
        if not self._members:
            raise RemoteProtocolError(f"the gzip body has too many members: at byte {self.read} begins one more")
        self._engine = zlib.decompressobj(_WINDOW[self._coding])

    def _damaged(self, error: zlib.error) -> RemoteProtocolError:
        reason = str(error).rpartition(": ")[2][:100]
        if self._coding is Coding.DEFLATE and reason == "incorrect header check":
            reason += " (deflate is the zlib format of RFC 1950)"
        return RemoteProtocolError(f"the {self._name} body is damaged after byte {self.read}: {reason}")

    def finish(self) -> None:
        assert not self.ready, "the end comes after the data"
        if not self._engine.eof:
            raise RemoteProtocolError(f"the {self._name} body is cut off after {self.read} bytes")


def deflate_steps(coding: Coding, buffers: Iterable[Buffer], level: int) -> Iterator[list[bytes]]:
    """Encodes the buffers, one after the other, at zlib's level (1 to 9). Each step reads 1 MiB and yields the output so
    far, which may be empty."""
    engine = zlib.compressobj(level, zlib.DEFLATED, _WINDOW[coding])
    made: list[bytes] = []
    room = STEP
    for buffer in buffers:
        rest = memoryview(buffer)
        while len(rest):
            piece, rest = rest[:room], rest[room:]
            room -= len(piece)
            if coded := engine.compress(piece):
                made.append(coded)
            if not room:
                yield made
                made, room = [], STEP
    made.append(engine.flush())
    yield made


def deflate(coding: Coding, buffers: Iterable[Buffer], level: int) -> list[bytes]:
    """Encodes the buffers as `deflate_steps` does, in one call."""
    return [piece for step in deflate_steps(coding, buffers, level) for piece in step]
