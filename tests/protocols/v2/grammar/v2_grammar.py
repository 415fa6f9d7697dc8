"""Whole inference requests (v2) from a grammar of the protocol, each with the answer that the identity model owes it.

All choices are read from a string of bytes, and a zero is always the simplest one: so hypothesis shrinks a request by its
bytes, and a seed gives a hundred thousand of them. v2_mutations breaks requests on purpose.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeAlias, TypeVar, final

from hypothesis import strategies as st

Option = TypeVar("Option")

INTEGERS = {
    "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q",
}  # fmt: skip
FLOATS = {"FP16": "e", "FP32": "f", "FP64": "d"}
DATATYPES = ("FP32", "INT32", "BYTES", "BOOL", *INTEGERS, *FLOATS, "BF16")
SIZES = {"BOOL": 1, "BF16": 2, **{name: struct.calcsize(f"<{code}") for name, code in {**INTEGERS, **FLOATS}.items()}}
LARGEST = {"FP16": 65504.0, "BF16": 3.3895e38, "FP32": 3.4028234e38, "FP64": 1.7976931348623157e308}
CHOICES = 1200
"""Bytes of choices for one request. Choices after them are the simplest."""


@final
class Choices:
    """Choices read from bytes, in order. After the last byte all are zeros."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def octets(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        self._at += count
        return found.ljust(count, b"\0")

    def below(self, bound: int) -> int:
        return int.from_bytes(self.octets(1 if bound <= 64 else 8), "big") % bound

    def of(self, options: Sequence[Option]) -> Option:
        return options[self.below(len(options))]

    def chance(self, percent: int) -> bool:
        """True in about that share of cases, never for a zero byte: the choice is then the less simple one."""
        return self.octets(1)[0] > 255 - percent * 256 // 100

    def shuffled(self, options: Sequence[Option]) -> list[Option]:
        rest = list(options)
        return [rest.pop(self.below(len(rest))) for _ in options]


# Declarations of a model


@final
@dataclass(frozen=True, slots=True)
class Declared:
    """An input or output. A size of -1 is any size, a shape of None any shape, and a datatype of "" any datatype."""

    name: str
    datatype: str
    shape: tuple[int, ...] | None
    optional: bool = False


@final
@dataclass(frozen=True, slots=True)
class Model:
    """An identity model: input INPUT0 is returned as OUTPUT0, INPUT1 as OUTPUT1, any other under its own name.

    `inputs` and `outputs` are None if the model declares none."""

    name: str = "undeclared"
    inputs: tuple[Declared, ...] | None = None
    outputs: tuple[Declared, ...] | None = None
    max_batch_size: int = 0


NAMES = (
    "INPUT0", "x", "INPUT1", "y:0", "é", "日本", "a b", 'q"uote', "back\\slash", "tab\tbed", "💥", "data", "a/b", "INPUT", '[{"data":[',
    "Infinity", "n" * 70, "'", "\u2028", "\x7f", "%s{0}",
)  # fmt: skip
"""Names of inputs. No output has the name of another input."""


def output_of(name: str) -> str:
    """The name under which the identity model gives an input back."""
    number = name.removeprefix("INPUT")
    return f"OUTPUT{number}" if number != name and number.isdecimal() else name


def models(c: Choices, count: int) -> list[Model]:
    """The undeclared model, one with a batch whose only input is optional, and others of all kinds."""
    nothing = Model("optional", (Declared("INPUT0", "FP32", (-1,), optional=True),), None, 4)
    return [Model(), nothing, *(_model(c, f"declared{index}") for index in range(2, count))]


def one_of(c: Choices, served: Sequence[Model]) -> Model:
    """Returns one of these models, most often the undeclared one, which accepts the most requests."""
    return c.of(served) if c.chance(70) else served[0]


def _model(c: Choices, name: str) -> Model:
    inputs = tuple(
        Declared(name, "" if c.chance(8) else c.of(DATATYPES), None if c.chance(8) else _declared_shape(c), c.chance(15))
        for name in c.shuffled(NAMES)[: c.of((1, 1, 2, 1, 3))]
    )
    outputs = None if c.chance(25) else tuple(Declared(output_of(i.name), i.datatype, i.shape) for i in inputs)
    return Model(name, inputs, outputs, c.of((4, 1, 7)) if c.chance(25) else 0)


def _declared_shape(c: Choices) -> tuple[int, ...]:
    return tuple(c.of((-1, 2, 1, 3, -1, 0 if c.chance(5) else 4)) for _ in range(c.of((1, 2, 0, 3))))


# JSON, as text that is under control


@final
class Raw(str):
    """JSON text that is written as it stands."""


@final
class Obj(list[tuple[str, Any]]):
    """A JSON object: its members in order. A name may be there twice."""

    def set(self, key: str, value: Any) -> None:
        for index, (name, _) in enumerate(self):
            if name == key:
                self[index] = key, value
                return
        self.append((key, value))

    def get(self, key: str) -> Any:
        return next((value for name, value in self if name == key), None)

    def drop(self, key: str) -> None:
        self[:] = [(name, value) for name, value in self if name != key]


@final
@dataclass(frozen=True, slots=True)
class Style:
    """How a client writes JSON: what stands around its signs, and what it escapes in strings."""

    comma: str = ","
    colon: str = ":"
    edge: str = ""
    escapes: str = "few"

    def text(self, value: Any) -> str:
        match value:
            case Raw():
                return value
            case str():
                return self.string(value)
            case Obj():
                members = [f"{self.string(key)}{self.colon}{self.text(item)}" for key, item in value]
                return f"{{{self.comma.join(members)}}}"
            case list():
                return f"[{self.comma.join([self.text(item) for item in value])}]"
            case _:
                return json.dumps(value)

    def string(self, value: str) -> str:
        if self.escapes == "all":
            codes = value.encode("utf-16-be").hex()
            escaped = "".join([f"\\u{codes[at : at + 4]}" for at in range(0, len(codes), 4)])
            return f'"{escaped}"'
        text = json.dumps(value, ensure_ascii=self.escapes == "ascii")
        return text.replace("/", "\\/") if self.escapes == "ascii" else text


STYLES = (
    Style(), Style(", ", ": "), Style(escapes="ascii"), Style(" ,\r\n\t", "\n :\t", " \n"), Style(", ", ": ", "\r\n", "all"), Style(",\n", ":", "\t"),
)  # fmt: skip


# Elements


def pack(datatype: str, number: float) -> bytes:
    """A number that the datatype has room for, as its bytes."""
    if datatype == "BF16":
        below = int.from_bytes(struct.pack("<f", number), "little") >> 16
        if not math.isfinite(number):
            return below.to_bytes(2, "little")
        near = [n.to_bytes(2, "little") for n in (below, below + 1) if n & 0x7FFF != 0x7F80]
        return min(near, key=lambda n: (abs(Fraction(unpack("BF16", n)) - Fraction(number)), n[0] & 1))
    return struct.pack(f"<{(INTEGERS | FLOATS)[datatype]}", number)


def unpack(datatype: str, data: bytes) -> float:
    """The number that these bytes are."""
    if datatype == "BF16":
        datatype, data = "FP32", b"\0\0" + data
    number: float = struct.unpack(f"<{(INTEGERS | FLOATS)[datatype]}", data)[0]
    return number


def bounds(datatype: str) -> tuple[int, int]:
    """The smallest and the largest integer."""
    bits = SIZES[datatype] * 8
    return (0, 2**bits - 1) if datatype.startswith("U") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


DECIMALS = (
    "0.0", "1", "0.1", "-0.0", "2.5", "3.14159", "-1e-3", "1E2", "1.5e+3", "1e-45", "1e-320", "5e-324", "1e-400", "0.30000001192092896", "16777217",
    "1." + "0" * 398, "0." + "3" * 60, "1e10", "9007199254740993", "18446744073709551615", "3.4028234e38", "340282346638528859811704183484516925440",
    "1e300", "1.7976931348623157e308", "123456789012345678901234567890", "6.103515625e-05", "65503.9", "2.2250738585072011e-308",
)  # fmt: skip
STRINGS = (
    "", "a", "text", "é", "日本語", "💥", 'q"', "\\", "\n\t\0", "NaN", "-Infinity", "a:b", '":', "[[[[", "}]", '"data"', "1e999", "0" * 500,
    "\u2028\x7f", "\\u0061", "ÿ" * 30, "{}" * 70,
)  # fmt: skip


def _element(c: Choices, datatype: str, *, binary: bool) -> tuple[bytes, str]:
    """An element as bytes, and as JSON."""
    if datatype == "BYTES":
        content = c.octets(c.of((3, 0, 40))) if binary and c.chance(30) else c.of(STRINGS).encode()
        return content, "" if binary else content.decode()
    if datatype == "BOOL":
        value = c.of((1, 0, 2, 255, 128)) if binary else c.of((1, 0))
        return bytes([value]), c.of(("true", "1")) if value else c.of(("false", "0"))
    if datatype in INTEGERS:
        return _integer(c, datatype)
    kind = c.of(("decimal", "bits", "bits", "special"))
    if kind == "decimal":
        text = c.of(DECIMALS)
        if abs(float(text)) > LARGEST[datatype]:
            text = "1.25"
        return pack(datatype, float(text)), text
    data = c.octets(SIZES[datatype]) if kind == "bits" else pack(datatype, c.of((math.nan, math.inf, -math.inf)))
    number = unpack(datatype, data)
    if math.isnan(number):
        return data, c.of(("NaN", "null"))
    if math.isinf(number):
        return data, "Infinity" if number > 0 else "-Infinity"
    return data, repr(number)


def _integer(c: Choices, datatype: str) -> tuple[bytes, str]:
    low, high = bounds(datatype)
    value = c.of((1, 0, 100, low, high, low + c.below(high - low), low + 1, high - 1))
    text = str(value)
    if abs(value) < 2**53 and c.chance(20):
        text = f"{value}{c.of(('.0', 'e0', '.000E+0', '.0e-0', 'E+00'))}" if c.chance(80) else f"{value * 10}e-1"
    return pack(datatype, value), text


# Requests


@final
@dataclass(slots=True)
class Input:
    """A tensor that is sent: its elements as bytes (of BYTES, the content of each), and what stands for it in JSON."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    elements: list[bytes]
    texts: list[str] | None
    """The elements in JSON; None where the tensor is binary."""
    entry: Obj = field(default_factory=Obj)
    data: bytes = b""
    """Its part of the binary data."""

    @property
    def shown(self) -> str:
        """The text by which an error names this input: the beginning of the name, as Python's repr writes it."""
        return shown(self.name)

    def values(self) -> list[Any]:
        """The JSON of each element."""
        assert self.texts is not None
        return list(self.texts) if self.datatype == "BYTES" else [Raw(text) for text in self.texts]


def shown(name: str) -> str:
    """The beginning of a name, as an error shows it."""
    return repr(name)[1:21].rstrip("'\"")


def framed(elements: Sequence[bytes]) -> bytes:
    """BYTES as binary data."""
    return b"".join([struct.pack("<I", len(item)) + item for item in elements])


def nested(values: list[Any], shape: Sequence[int]) -> list[Any]:
    """A flat list as lists of lists, as the shape says."""
    if len(shape) < 2:
        return values
    step = math.prod(shape[1:])
    return [nested(values[at * step : (at + 1) * step], shape[1:]) for at in range(shape[0])]


@final
@dataclass(slots=True)
class Draft:
    """A valid request before it is written. `outputs` are those asked for, each with its `binary_data`; `classes` how many
    of the largest values each is asked for, where it is."""

    model: Model
    head: Obj
    inputs: list[Input]
    outputs: list[tuple[str, bool | None]]
    style: Style
    classes: dict[str, int] = field(default_factory=dict)
    id: str = ""
    binary_default: bool = False
    says_length: bool = True
    length_form: str = "once"
    raw: bytes | None = None
    """The body of a raw binary request."""


Lengths: TypeAlias = list[bytes]


@final
@dataclass(slots=True)
class Wire:
    """A request as it is sent: JSON, binary data, and the fields of Inference-Header-Content-Length."""

    text: bytes
    data: bytes
    lengths: Lengths

    @property
    def body(self) -> bytes:
        return self.text + self.data


def written(draft: Draft) -> Wire:
    """The request as it is sent."""
    if draft.raw is not None:
        return Wire(b"", draft.raw, [b"0"])
    text = (draft.style.edge + draft.style.text(draft.head) + draft.style.edge).encode()
    data = b"".join([tensor.data for tensor in draft.inputs])
    if not data and not draft.says_length:
        return Wire(text, data, [])
    length = b"%d" % len(text)
    match draft.length_form:
        case "twice":
            return Wire(text, data, [length, length])
        case "zeros":
            return Wire(text, data, [b"000" + length])
        case _:
            return Wire(text, data, [length])


def draft_of(c: Choices, model: Model) -> Draft:
    """A valid request to this model."""
    if model.inputs is not None and len(model.inputs) == 1 and c.chance(25):
        raw = _raw(c, model)
        if raw is not None:
            return raw
    inputs = _inputs(c, model)
    head = Obj([("inputs", [tensor.entry for tensor in inputs])])
    draft = Draft(model, head, inputs, [], c.of(STYLES), says_length=c.chance(30))
    if c.chance(6):
        draft.length_form = c.of(("twice", "zeros"))
    if c.chance(30):
        draft.id = c.of(("7", "", "a:b", "é\n", '"', "0" * 100))
        head.set("id", draft.id)
    if c.chance(40):
        names = c.shuffled([output_of(tensor.name) for tensor in inputs])
        draft.outputs = [(name, c.of((None, True, False))) for name in names[: 1 + c.below(3)]]
        draft.classes = {name: c.of((1, 2, 3, 0, 10**20)) for name, _ in draft.outputs if c.chance(15)}
        head.set("outputs", [_output(c, *output, draft.classes) for output in draft.outputs])
    parameters = Obj()
    if c.chance(40):
        draft.binary_default = c.of((True, False))
        parameters.set("binary_data_output", draft.binary_default)
    if c.chance(20):
        key = c.of(("k", "sequence_id", "priority", "é", "data", "triton", "exchange", "timeout"))
        parameters.set(key, 600_000_000 if key in ("sequence_id", "priority", "timeout") else _scalar(c))
    if parameters or c.chance(5):
        head.set("parameters", parameters)
    if c.chance(10):
        value: Any = c.of((None, "m", Obj([("a", [1, Obj()])]), [[]], "x" * 50))
        head.set(c.of(("model_name", "model_version", "unknown", "data", "é")), value)
    if c.chance(5):
        head.extend((key, None) for key in ("id", "outputs", "parameters") if key not in dict(head))
    if c.chance(30):
        head[:] = c.shuffled(head)
    return draft


def _scalar(c: Choices) -> Any:
    return c.of((1, "s", True, 2.5, -(2**63), "é\\", "", False, Raw("1E2")))


def _output(c: Choices, name: str, binary: bool | None, classes: dict[str, int]) -> Obj:
    entry = Obj([("name", name)])
    parameters = Obj() if binary is None else Obj([("binary_data", binary)])
    if name in classes:
        parameters.set("classification", classes[name])
    if c.chance(5):
        parameters.set("k", _scalar(c))
    if parameters or c.chance(5):
        entry.set("parameters", parameters)
    if c.chance(5):
        entry.set("unknown", [])
    return entry


def _raw(c: Choices, model: Model) -> Draft | None:
    assert model.inputs is not None
    (spec,) = model.inputs
    if spec.shape is None or not spec.datatype:
        return None
    count = math.prod(size for size in spec.shape if size != -1)
    if spec.shape.count(-1) > 1 or (spec.datatype == "BYTES" and (-1 in spec.shape or count != 1)):
        return None
    if spec.shape.count(-1) and not count:
        return None  # no bytes fit any size
    shape = tuple(c.of((1, 2, 0, 5)) if size == -1 else size for size in spec.shape)
    if model.max_batch_size:
        shape = (1, *shape)
    elements = [_element(c, spec.datatype, binary=True)[0] for _ in range(math.prod(shape))]
    tensor = Input(spec.name, spec.datatype, shape, elements, None)
    return Draft(model, Obj(), [tensor], [], STYLES[0], binary_default=True, raw=b"".join(elements))


def _inputs(c: Choices, model: Model) -> list[Input]:
    if model.inputs is not None:
        batch = (1 + c.below(model.max_batch_size),) if model.max_batch_size else ()
        specs = [spec for spec in model.inputs if not (spec.optional and c.chance(50))]
        if c.chance(20):
            specs = c.shuffled(specs)
        return [_input(c, spec.name, spec.datatype or c.of(DATATYPES), (batch + _shape(c, spec))[:16]) for spec in specs]
    count = c.of((1, 1, 2, 1, 3, 1, 1, 0))
    return [_input(c, name, c.of(DATATYPES), _free_shape(c)) for name in c.shuffled(NAMES)[:count]]


def _shape(c: Choices, spec: Declared) -> tuple[int, ...]:
    if spec.shape is None:
        return _free_shape(c)
    large, fixed = 0, math.prod(size for size in spec.shape if size != -1)
    if spec.shape.count(-1) == 1 and fixed and c.chance(3):
        large = c.of((700, 4096, 4097, 2000, 4095, 20000, 1200, 900)) // fixed
    return tuple((large or c.of((1, 2, 3, 4, 0, 5))) if size == -1 else size for size in spec.shape)


LARGE_SHAPES = (
    (4096,), (3, 700), (1,) * 16, (4097,), (1500,), (0, 2**40), (2,) * 8, (100, 33), (7, 5, 60), (1, 4000, 1), (20000,)
)  # fmt: skip


def _free_shape(c: Choices) -> tuple[int, ...]:
    if c.chance(3):
        return c.of(LARGE_SHAPES)
    shape = tuple([c.of((2, 1, 3, 1, 4, 0, 5)) for _ in range(c.of((1, 2, 0, 3, 1, 4, 2)))])
    return shape if math.prod(shape) <= 64 else shape[:2]


def _input(c: Choices, name: str, datatype: str, shape: tuple[int, ...]) -> Input:
    binary, count = c.chance(45), math.prod(shape)
    some = [_element(c, datatype, binary=binary) for _ in range(min(count, 40))]
    if count > len(some):
        some = (some * (count // len(some) + 1))[:count]
    tensor = Input(name, datatype, shape, [data for data, _ in some], None if binary else [text for _, text in some])
    entry = tensor.entry
    entry[:] = [("name", name), ("datatype", datatype), ("shape", list(shape))]
    parameters = Obj([("k", _scalar(c))]) if c.chance(5) else Obj()
    if binary:
        tensor.data = framed(tensor.elements) if datatype == "BYTES" else b"".join(tensor.elements)
        parameters.set("binary_data_size", len(tensor.data))
        if c.chance(5):
            entry.set("data", None)
    else:
        values = tensor.values()
        entry.set("data", nested(values, shape) if c.chance(40) else values)
    if parameters or c.chance(5):
        entry.set("parameters", parameters)
    if c.chance(5):
        entry.set("unknown", Obj([("data", [1])]))
    if c.chance(30):
        entry[:] = c.shuffled(entry)
    return tensor


def sibling(draft: Draft) -> Wire:
    """The same request, its inputs in JSON with other data."""
    kept = [(tensor, tensor.entry.get("data")) for tensor in draft.inputs if tensor.texts is not None]
    for tensor, _ in kept:
        other = "" if tensor.datatype == "BYTES" else 1
        tensor.entry.set("data", [other] * len(tensor.elements))
    wire = written(draft)
    for tensor, data in kept:
        tensor.entry.set("data", data)
    return wire


# The answer or error that is due


@final
@dataclass(frozen=True, slots=True)
class Wanted:
    """An output: its elements as they were sent, and whether it is to be binary. `sent_binary` are bits that must come
    back as they are; numbers from JSON have one value, and NaN many forms."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    elements: list[bytes]
    binary: bool
    sent_binary: bool


@final
@dataclass(frozen=True, slots=True)
class Answer:
    """Status 200 with these outputs, in this order."""

    id: str
    outputs: tuple[Wanted, ...]


@final
@dataclass(frozen=True, slots=True)
class Refusal:
    """A status of the client's fault, and an error that holds each of the words, or one of several words each."""

    words: tuple[str | tuple[str, ...], ...]
    status: int = 400


@final
@dataclass(frozen=True, slots=True)
class Either:
    """Status 200 or a refusal: nobody knows what the request has become."""


Due: TypeAlias = Answer | Refusal | Either


@final
@dataclass(frozen=True, slots=True)
class Case:
    """A request and what is due. `before` are valid requests with the same head, which it may be mistaken for."""

    model: Model
    wire: Wire
    due: Due
    kind: str
    """The kind of fault; "valid" if there is none."""
    before: tuple[Wire, ...] = ()


def due_of(draft: Draft) -> Answer | Refusal:
    """The answer to a valid request, or the refusal if an output cannot be given as it asks."""
    sent = {output_of(tensor.name): tensor for tensor in draft.inputs}
    outputs, wrong = [], []
    for name, binary in draft.outputs or [(name, None) for name in sent]:
        tensor, form = sent[name], draft.binary_default if binary is None else binary
        datatype, shape, elements = tensor.datatype, tensor.shape, tensor.elements
        if count := draft.classes.get(name):
            if datatype in ("BYTES", "BOOL"):
                wrong.append((shown(name), "classification"))
                continue
            datatype, (shape, elements) = "BYTES", classified(datatype, shape, elements, count)
        if not form and datatype == "BYTES" and not all(map(_is_text, elements)):
            wrong.append((shown(name), "binary_data"))
        outputs.append(Wanted(name, datatype, shape, elements, form, tensor.texts is None))
    if wrong:  # any of them may be seen first
        names, words = zip(*wrong, strict=True)
        return Refusal((names, words))
    return Answer(draft.id, tuple(outputs))


def classified(
    datatype: str, shape: tuple[int, ...], elements: list[bytes], count: int
) -> tuple[tuple[int, ...], list[bytes]]:
    """The shape, and the elements `value:index`, of the largest values along the last axis; NaN is the smallest."""
    classes = shape[-1] if shape else 1
    count, found = min(count, classes), []
    for start in range(0, len(elements), classes or 1):
        row = [unpack(datatype, element) for element in elements[start : start + classes]]
        order = sorted(range(classes), key=lambda at: (math.isnan(row[at]), 0 if math.isnan(row[at]) else -row[at]))
        found += [(f"{row[at]:d}:{at}" if datatype in INTEGERS else f"{row[at]:f}:{at}").encode() for at in order[:count]]
    return (*shape[:-1], count), found


def _is_text(item: bytes) -> bool:
    try:
        item.decode()
    except UnicodeDecodeError:
        return False
    return True


def choices() -> st.SearchStrategy[Choices]:
    """Choices that hypothesis makes, and shrinks."""
    return st.binary(min_size=CHOICES, max_size=CHOICES).map(Choices)
