"""Measures the longest step of each call that grows with a message, at the limit at which the work goes on elsewhere.

A step on the loop keeps all clients waiting, so it may take 1 ms. A step in a thread may take 50 ms, because one call of C
holds the lock of all threads. Each row has the worst input that is known, at the limit that the product has: beyond it the
work goes to a thread, or on in a further step. `most` is above these two if a step cannot be divided, for the reason in
`why`. In a thread the longest time between two lines of Python counts, since the lock is given up in between. Figures are
the least of several rounds, in the CPU time of the thread.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import time
import tomllib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, final
from urllib.parse import parse_qsl

import numpy as np
from hpack import Encoder

from gateway.catalog import folder
from gateway.codecs import threads
from gateway.config.properties import parse_properties
from gateway.core import whole_body
from gateway.dialects import compression
from gateway.dialects.aws import bidi as bidi_dialect
from gateway.dialects.aws import signatures
from gateway.dialects.v2 import channels
from gateway.instances import messages as instance_messages
from gateway.serving.nearest import nearest
from models import convert
from models.continuations import Stops
from models.messages import utf8
from protocols import openai, v2
from protocols.aws import bidi, bidi_json, multi_model
from protocols.aws.sigv4 import canonical_query
from protocols.content_coding import STEP, Coding, Inflater, deflate_steps
from protocols.floods import GRPC_AT_ONCE, GRPC_FIELDS, HEAVY_JSON, QUERY_MEMBERS, SLOW_JSON, SMALL_CALL, TOML_BYTES
from protocols.forwarded import client_of
from protocols.grpc.v2_messages import InferRequestReader, read_names
from protocols.http1.head import read_request
from protocols.http1.limits import HTTP1Limits
from protocols.http2.hpack import RememberingDecoder
from protocols.json import strict
from protocols.json.text import census_of
from protocols.v2 import repository
from protocols.v2.numbers import read_numbers
from protocols.websocket import frames

KiB, MiB = 1024, 1024**2
LOOP, THREAD = 1.0, 50.0
"""Milliseconds that a step may take."""
FLOOR = 0.45
"""Milliseconds that `floor` took where the figures of docs/explanation/costs.md were taken."""
ROUNDS = 7
PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "costs.md"
"""The page with the table."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call, with its worst input at its limit."""

    call: str
    limit: str
    """The name of the constant or setting at which the work goes to a thread or on in a further step."""
    nbytes: int
    work: Callable[[], object]
    thread: bool = False
    most: float = 0.0
    """Milliseconds; 0: the bound of its place."""
    why: str = ""
    refused: bool = False
    """The call ends with an error, which a peer can cause like an answer."""

    @property
    def bound(self) -> float:
        """The most milliseconds that it may take."""
        return self.most or (THREAD if self.thread else LOOP)


def floor() -> float:
    """Milliseconds of work that depends on the machine alone: a loop of Python over 8 KiB, and the checksum of 512 KiB."""
    data, table = bytes(512 * KiB), list(range(256))

    def work() -> None:
        out = []
        for byte in data[: 8 * KiB]:
            out.append(table[byte])
        zlib.crc32(data)

    return min(_spent(work) for _ in range(4 * ROUNDS))


def measured(step: Step) -> float:
    """The milliseconds of a step. AssertionError if it was to be refused, and is not."""
    work = partial(_refused, step.work) if step.refused else step.work
    return min(_longest(work) if step.thread else _spent(work) for _ in range(2 if step.thread else ROUNDS))


def _spent(work: Callable[[], object]) -> float:
    began = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - began) / 1e6


def _refused(work: Callable[[], object]) -> None:
    try:
        work()
    except threads._REFUSALS:
        return
    raise AssertionError("it was expected to be refused")


def _longest(work: Callable[[], object]) -> float:
    """The longest time between two lines of Python, in milliseconds."""
    last, most = 0, 0

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal last, most
        now = time.thread_time_ns()
        most = max(most, now - last if last else 0)
        last = time.thread_time_ns()
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        work()
    finally:
        sys.settrace(before)
    return most / 1e6


# -- the worst inputs ----------------------------------------------------------------------------------------------------


def filled(unit: bytes, size: int) -> bytes:
    """A JSON array of as many of the unit as fit the size."""
    return b"[%b]" % b",".join([unit] * ((size - 2) // (len(unit) + 1)))


REFUSED = ("cut off", "a fault at the end", "a number out of range")


def texts(size: int, *, containers: int = strict.CONTAINERS, values: int = strict.VALUES) -> Iterator[tuple[str, bytes]]:
    """Yields JSON texts that are slow to read, within the limits of containers and values."""
    yield "numbers", filled(b"1", min(size, 2 * values))
    yield "floats", filled(b"0.12345678901234567", size)
    yield "an integer beyond 64 bits", filled(b"1e3", min(size, 4 * values))[:-1] + b",12345678901234567890]"
    yield "objects", filled(b"{}", min(size, 3 * containers))
    yield "members", filled(b'{"a":1}', min(size, 8 * containers))
    yield "a member twice", filled(b'{"a":1,"a":2}', min(size, 14 * containers))
    yield "a string", b'["%b"]' % (b"\xc3\xa9" * (size // 2 - 3))
    yield "escapes", b'["%b"]' % (b"\\u00e9" * (size // 6 - 1))
    yield "quotes", b'["%b"]' % (b'\\"' * (size // 2 - 3))
    yield "cut off", b'["%b' % (b"a" * (size - 2))
    yield "a fault at the end", filled(b"1e3", min(size, 4 * values))[:-1] + b",x]"
    yield "a number out of range", filled(b"1e3", min(size, 4 * values))[:-1] + b",1e999]"


def chunky(size: int, letters: bytes, seed: int = 1) -> bytes:
    """Text that zlib searches for long."""
    return np.random.default_rng(seed).choice(np.frombuffer(letters, np.uint8), size).tobytes()


def json_steps() -> Iterator[Step]:
    """Yields the steps that read JSON: on the loop as `read_json` has them there, and in a thread."""
    for name, text in texts(threads.LONG - 64):
        cost = strict.cost_of(text)
        if cost <= HEAVY_JSON and not (cost > SLOW_JSON and strict.is_slow(text)):
            most, why = {
                "a member twice": (1.5, "the limit is one of memory: objects of two members take the most time for theirs"),
                "a fault at the end": (3.0, "msgspec, which words the error, calls Python for each number"),
            }.get(name, (0.0, ""))
            yield Step(
                call=f"JSON of a text: {name}", limit="gateway.codecs.threads:LONG", nbytes=len(text),
                refused=name in REFUSED, most=most, why=why,
                work=lambda text=text: strict.loads(text),
            )  # fmt: skip
    for name, text in texts(16 * MiB):
        yield Step(
            call=f"JSON of a text: {name}", limit="limits.text_json", nbytes=len(text), thread=True,
            refused=name in REFUSED, work=lambda text=text: strict.loads(text),
        )  # fmt: skip
    for name, text in texts(64 * MiB):
        if name in ("a string", "quotes"):
            yield Step(
                call=f"JSON of v2: {name}", limit="limits.json", nbytes=len(text), thread=True, most=300,
                why="a string is one object, which one call makes; one text of such a size is read at a time, and the "
                "limits of JSON bound it",
                work=lambda text=text: strict.loads(text, duplicates=False, allow_nonfinite=True),
            )  # fmt: skip


def head_steps() -> Iterator[Step]:
    """Yields the steps that read a request's head."""
    limits = HTTP1Limits()
    fields = b"".join(b"x%d: %b\r\n" % (n, b"v" * 300) for n in range(98))
    yield Step(
        call="head of HTTP/1.1: 100 fields", limit="limits.head", nbytes=len(fields),
        work=lambda: read_request(b"GET / HTTP/1.1\r\nhost: a\r\n%b\r\n" % fields, max_fields=limits.fields, scheme=b"http"),
    )  # fmt: skip
    options = b"GET / HTTP/1.1\r\nhost: a\r\nconnection: %b\r\n\r\n" % (b"a," * 16_000)
    yield Step(
        call="head of HTTP/1.1: a long list", limit="limits.head", nbytes=len(options), most=3,
        why="16,000 elements of one field; a quicker way costs each usual head more",
        work=lambda: read_request(options, max_fields=limits.fields, scheme=b"http"),
    )  # fmt: skip
    plain = [(b"x%d" % n, b"v" * 290) for n in range(100)]
    serial = "a block means something only behind the one before it, and a code only behind the code before it"
    for name, most, block in (
        ("100 fields", 0, Encoder().encode(plain, huffman=False)),
        ("700 indexed fields", 0, b"\x82" * 700),
        ("Huffman's code", 2, Encoder().encode(plain, huffman=True)),
        ("Huffman's code that hpack reads", 2.5, b"\x20" + Encoder().encode(plain, huffman=True)),
        ("Huffman's code of 64 KiB", 4, Encoder().encode([(b"x", b"X" * 65_400)], huffman=True)),
    ):
        yield Step(
            call=f"header block of HTTP/2: {name}", limit="limits.head", nbytes=len(block), most=most, why=serial,
            work=lambda block=block: _decoder().decode(block, True),
        )  # fmt: skip
    query = "&".join([f"a={'%ff' * 26}"] * QUERY_MEMBERS)
    yield Step(
        call="query of 100 members", limit="protocols.floods:QUERY_MEMBERS", nbytes=len(query),
        work=lambda: parse_qsl(query, max_num_fields=QUERY_MEMBERS),
    )  # fmt: skip
    yield Step(
        call="query that is signed", limit="limits.request_line", nbytes=8 * KiB - 2,
        work=lambda: canonical_query(b"a=%ff&" * (8 * KiB // 6)),
    )  # fmt: skip
    routes = [b"/v2/models/{name}/versions/{version}/infer", b"/endpoints/{name}/invocations"] * 40
    yield Step(
        call="unknown path, with a hint", limit="gateway.serving.nearest:_LONGEST", nbytes=128,
        work=lambda: nearest(b"/v2/models/" + b"a" * 117, routes),
    )  # fmt: skip
    for name, line in (("commas", b"," * 4 * KiB), ("pairs", b"a=b," * 511)):
        yield Step(
            call=f"Forwarded: {name}", limit="limits.head", nbytes=8 * len(line),
            work=lambda line=line: client_of([line] * 8, [], lambda address: True),
        )  # fmt: skip
    yield Step(
        call="X-Forwarded-For", limit="limits.head", nbytes=32 * KiB,
        work=lambda: client_of([], [b",".join([b"1.1.1.1"] * 4096)], lambda address: True),
    )  # fmt: skip


def frame_steps() -> Iterator[Step]:
    """Yields the steps that take frames apart, and what is in them."""
    for size in (1, 1000, 65_000):
        frame = frames.write_header(0x82, size, frames.MASKED) + b"mask" + bytes(size)
        run = frame * max(1, 64 * KiB // len(frame)) + b"\0"
        yield Step(
            call=f"WebSocket frames of {size} bytes", limit="protocols.websocket.frames:_RUN_FRAMES", nbytes=len(run),
            work=lambda run=run: frames.read_masked(run, 0, frames.OPENING, frames.LARGE - 1),
        )  # fmt: skip
    memory = bytearray(256 * KiB)
    yield Step(
        call="WebSocket: unmasking a large frame", limit="gateway.core.server:_LONG_SCRATCH", nbytes=len(memory),
        work=lambda: frames.mask_in_place(memory, 0, len(memory), b"mask"),
    )  # fmt: skip
    text = b"\xc3\xa9" * (frames.LARGE // 2)
    yield Step(
        call="WebSocket: a text is UTF-8", limit="protocols.websocket.message:LARGE", nbytes=len(text), work=text.decode
    )
    long = bidi_dialect._LONG - KiB
    part = b"".join(map(bytes, bidi.encode_request_part(bytes(long), date_ms=0)))
    yield Step(
        call="part of an event stream", limit="gateway.dialects.aws.bidi:_LONG", nbytes=len(part),
        work=lambda: _next_part(bidi.PartDecoder(), part),
    )  # fmt: skip
    literal = b'{"PayloadPart":{"Bytes":"%b"}}' % base64.b64encode(bytes(long // 4 * 3))
    yield Step(
        call="part in JSON, base64", limit="gateway.dialects.aws.bidi:_LONG", nbytes=len(literal),
        work=lambda: _next_part(bidi_json.LiteralDecoder(), literal),
    )  # fmt: skip
    signed = bytes(signatures._LONG - 1)
    yield Step(
        call="digest of a signed body", limit="gateway.dialects.aws.signatures:_LONG", nbytes=len(signed), most=2.5,
        why="the longer of two is of machines without SHA instructions",
        work=lambda: hashlib.sha256(signed).hexdigest(),
    )  # fmt: skip
    said = [instance_messages.encoded(instance_messages.Pong(1))] * 20_000
    (piece, *_) = instance_messages.frames_of(said)
    yield Step(
        call="messages of a model's process", limit="gateway.instances.pipe:_READ", nbytes=len(piece), most=2,
        why="one read of the smallest messages, from a process of ours",
        work=lambda: list(instance_messages.Frames().feed(piece)),
    )  # fmt: skip
    reader = InferRequestReader(v2.V2Limits())
    for call, limit, size, thread, work in (
        (
            "gRPC: empty tensors",
            "protocols.floods:GRPC_AT_ONCE",
            GRPC_AT_ONCE,
            False,
            lambda message: reader.call(reader.parts_at_once(message)),
        ),
        (
            "gRPC: empty tensors",
            "protocols.floods:GRPC_FIELDS",
            GRPC_FIELDS,
            True,
            lambda message: reader.call(reader.parts(message)),
        ),
        ("gRPC: empty tensors", "gateway.codecs.threads:FREE", threads.FREE // 2, False, reader.read),
    ):
        yield Step(
            call=call, limit=limit, nbytes=2 * size, thread=thread, refused=True,
            work=lambda work=work, size=size: work(b"\x2a\x00" * size),
        )  # fmt: skip
    yield Step(
        call="gRPC: fields of a small call", limit="protocols.floods:SMALL_CALL", nbytes=SMALL_CALL,
        work=lambda: read_names(b"\x78\x00" * (SMALL_CALL // 2)),
    )  # fmt: skip


def coding_steps() -> Iterator[Step]:
    """Yields the steps that inflate and deflate."""
    short, longer = whole_body._SHORT_STEP, whole_body._LONG_STEP
    noise = zlib.compress(chunky(4 * MiB, b"abcdefgh"), 9)
    members = zlib.compressobj(1, zlib.DEFLATED, 31).flush() * 100_000
    for name, coding, data in (("text", Coding.DEFLATE, noise), ("empty members", Coding.GZIP, members)):
        yield Step(
            call=f"inflating: {name}", limit="gateway.core.whole_body:_SHORT_STEP", nbytes=short,
            work=lambda coding=coding, data=data: _inflate(coding, data, short),
        )  # fmt: skip
        yield Step(
            call=f"inflating: {name}", limit="gateway.core.whole_body:_LONG_STEP", nbytes=longer, thread=True,
            work=lambda coding=coding, data=data: _inflate(coding, data, longer),
        )  # fmt: skip
    reply = chunky(compression._SHORT, b"ab")
    yield Step(
        call="deflating at level 1", limit="gateway.dialects.compression:_SHORT", nbytes=len(reply),
        work=lambda: list(deflate_steps(Coding.GZIP, [reply], 1)),
    )  # fmt: skip
    much = chunky(STEP, b"abcdefgh")
    yield Step(
        call="deflating at level 1", limit="protocols.content_coding:STEP", nbytes=STEP, thread=True,
        work=lambda: list(deflate_steps(Coding.GZIP, [much], 1)),
    )  # fmt: skip


def value_steps() -> Iterator[Step]:
    """Yields the steps that make texts and tensors."""
    yield Step(
        call="prompt that is a part", limit="models.convert:_SHORT", nbytes=convert._SHORT,
        work=lambda: (b"\xc3\xa9" * (convert._SHORT // 2)).decode(),
    )  # fmt: skip
    prompt = "\u00e9" * (convert._LONG // 2)
    yield Step(
        call="prompt as a part", limit="models.convert:_LONG", nbytes=convert._LONG,
        work=lambda: utf8(prompt),
    )  # fmt: skip
    for letters in (16, 4 * KiB):
        stops = Stops(["a" * 30 + chr(200 + n) for n in range(64)], included=False)
        yield Step(
            call=f"64 stop sequences, a token of {letters:,} letters", limit="protocols.lmi.parameters:MAX_STRINGS",
            nbytes=letters,
            work=lambda stops=stops, letters=letters: stops.fork().feed("a" * letters),
        )  # fmt: skip
    copied = bytes(channels._LONG)
    yield Step(
        call="copy of an answer", limit="gateway.dialects.v2.channels:_LONG", nbytes=len(copied),
        work=lambda: b"".join((copied[1:], b"x")),
    )  # fmt: skip
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}] * 300}
    yield Step(
        call="chat of 300 messages", limit="protocols.floods:HEAVY_JSON", nbytes=12 * KiB,
        work=lambda: openai.parse_chat(chat),
    )  # fmt: skip
    yield Step(
        call="count of a text's values", limit="gateway.codecs.threads:LONG", nbytes=threads.LONG,
        work=lambda: census_of(filled(b'{"a":1}', threads.LONG)),
    )  # fmt: skip
    unknown = b'{"model_name":"a","url":"b","parameters":{"c":%b}}' % filled(b"0.12345678901234567", 64 * KiB - 50)
    yield Step(
        call="body that loads a model", limit="gateway.dialects.aws.multi_model:_LARGEST", nbytes=len(unknown),
        work=lambda: multi_model.parse_load(unknown),
    )  # fmt: skip
    yield Step(
        call="body of the repository's calls", limit="gateway.dialects.v2.repository:_LARGEST", nbytes=len(unknown),
        refused=True, work=lambda: repository.decode(unknown, repository.LoadRequest, "request"),
    )  # fmt: skip
    numbers = filled(b"0.12345678901234567", 8 * MiB)
    count = numbers.count(b",") + 1
    yield Step(
        call="numbers of a tensor in JSON", limit="protocols.v2.numbers:_PIECE", nbytes=len(numbers), thread=True,
        work=lambda: read_numbers(numbers, 0, len(numbers), "FP64", (count,)),
    )  # fmt: skip
    array = np.random.default_rng(1).standard_normal(10**6)
    yield Step(
        call="numbers of an answer in JSON", limit="protocols.v2.tensors:_WRITTEN_AT_ONCE", nbytes=array.nbytes, thread=True,
        work=lambda: v2.tensors.to_json(array, "FP64"),
    )  # fmt: skip
    items = b"".join(len(item).to_bytes(4, "little") + item for item in [b"x" * (n % 7) for n in range(10**6)])
    yield Step(
        call="a million BYTES elements", limit="limits.bytes_elements", nbytes=len(items), thread=True,
        work=lambda: v2.tensors.decode_binary("BYTES", (10**6,), memoryview(items), "x"),
    )  # fmt: skip
    toml = b"".join(b"k%d.a = 1\n" % n for n in range(TOML_BYTES // 12))
    yield Step(
        call="model.toml", limit="gateway.catalog.folder:TOML_BYTES", nbytes=len(toml), thread=True,
        work=lambda: tomllib.loads(toml.decode()),
    )  # fmt: skip
    properties = b"a = b\n" * (folder._PROPERTIES_BYTES // 6)
    yield Step(
        call="serving.properties", limit="gateway.catalog.folder:_PROPERTIES_BYTES", nbytes=len(properties), thread=True,
        work=lambda: parse_properties(properties),
    )  # fmt: skip


def steps() -> Iterator[Step]:
    """Yields all steps. Each makes its input when it is asked for."""
    yield from head_steps()
    yield from frame_steps()
    yield from coding_steps()
    yield from value_steps()
    yield from json_steps()


def _decoder() -> RememberingDecoder:
    decoder = RememberingDecoder()
    decoder.max_header_list_size = 2 * 32 * KiB
    return decoder


def _next_part(decoder: Any, data: bytes) -> object:
    decoder.receive_data(data)
    return decoder.next_part()


def _inflate(coding: Coding, data: bytes, step: int) -> None:
    inflater = Inflater([coding], limit=64 * MiB)
    inflater.feed(data)
    inflater.inflate_into(bytearray(), step)


HEADS = ("call", "where", "limit", "bytes", "ns a byte", "ms", "at most, ms", "reason, where a step takes more")


def cells(step: Step, spent: float) -> Sequence[str]:
    """The row of the table."""
    return (
        step.call, "thread" if step.thread else "loop", f"`{step.limit}`", f"{step.nbytes:,}",
        f"{spent * 1e6 / step.nbytes:.1f}", f"{spent:.2f}" if spent < 10 else f"{spent:.0f}", f"{step.bound:g}",
        step.why if step.most else "",
    )  # fmt: skip


def line(texts: Sequence[str]) -> str:
    """A line of a table of Markdown."""
    return f"| {' | '.join(texts)} |"


def write(found: Sequence[tuple[Step, float]]) -> None:
    """Writes the table into the page, in place of the one that is there."""
    before, head, rest = PAGE.read_text(encoding="utf-8").partition(line(HEADS))
    _, end, after = rest.partition("\n\n")
    rows = [line(["---"] * len(HEADS)), *(line(cells(*one)) for one in found)]
    PAGE.write_text(before + "\n".join([head, *rows]) + end + after, encoding="utf-8")


def holds(step: Step, spent: float, beside: float) -> bool:
    """True if a step is within its bound, in time that is scaled by the floor of the same run."""
    return spent <= step.bound * max(1.0, beside / FLOOR)
