"""Protocol Buffers (proto3) on the wire: the fields of a message, and messages that a table of fields describes.

The rules are those of protobuf.dev, "Encoding" and "Language Guide (proto3)". Groups are refused: proto3 has none. The
types `sint32`, `sint64` and the fixed-size integers are left out, because no message here has them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

from protocols.errors import ProtocolError
from protocols.events import Buffer

Kind: TypeAlias = Literal["bool", "int32", "int64", "uint32", "uint64", "enum", "float", "double", "string", "bytes"]

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
"""The wire types: they tell how a field's value ends, even for unknown fields."""

MAX_DEPTH = 100
"""The deepest nesting of messages, as in Google's parsers."""
MAX_VALUES = 100_000
"""The most fields and packed numbers of one message that a table reads: each becomes an object."""

_MAX_LENGTH = 2**31 - 1
_FLOAT, _DOUBLE = struct.Struct("<f"), struct.Struct("<d")
_MASK = 2**64 - 1


@final
class ProtobufError(ProtocolError):
    """The bytes are not the expected message. gRPC answers with the status INTERNAL; with RESOURCE_EXHAUSTED if the message
    exceeds a limit."""

    over_limit = False
    """True if the message may be well-formed, but has more fields than are read."""


# Reading


def read_varint(data: Buffer, at: int) -> tuple[int, int]:
    """The varint at `at` as an unsigned number of 64 bits, and the index behind it. ProtobufError if it is cut off or has
    more than ten bytes."""
    value = shift = 0
    try:
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & _MASK, at
            shift += 7
            if shift == 70:
                raise ProtobufError("a varint has more than ten bytes")
    except IndexError:
        raise ProtobufError("a varint is cut off") from None


def _read_tag(data: Buffer, at: int) -> tuple[int, int]:
    value, end = read_varint(data, at)
    if end - at > 5 or value >= 2**32:  # Google's parsers read no more, even if the rest is zeros
        raise ProtobufError("a tag is a number of 32 bits in at most five bytes")
    return value, end


def _read_length(data: Buffer, at: int) -> tuple[int, int]:
    value, end = read_varint(data, at)
    if value > _MAX_LENGTH:
        raise ProtobufError(f"a length is at most {_MAX_LENGTH}, got {value}")
    return value, end


@final
class Room:
    """The number of fields that a message may still have, those of nested messages included. A field of two bytes takes 0.2
    us to read, and may become an object."""

    __slots__ = ("_most", "_what", "left")

    def __init__(self, left: int, what: str = "fields") -> None:
        """`what` is the limit's noun in the error."""
        self._most = self.left = left
        self._what = what

    def take(self, count: int) -> None:
        """Takes room for `count` fields. ProtobufError if there is not enough."""
        self.left -= count
        if self.left < 0:
            raise self.over()

    def over(self) -> ProtobufError:
        """Leaves no room, and makes the error for a message that has too many fields."""
        self.left = -1
        error = ProtobufError(f"the message has too many fields: more than {self._most} {self._what}")
        error.over_limit = True
        return error


def fields(view: memoryview, room: Room) -> Iterator[tuple[int, Any, int]]:
    """Yields the fields of a message in order: the tag (field number times 8, plus wire type), the value, and the index
    behind it. The value is an unsigned `int` of 64 bits for a varint, and a slice of the view otherwise. ProtobufError for a
    malformed message, and for more fields than there is room for; all fields before the fault are yielded first."""
    at, size = 0, len(view)
    left = begun = room.left
    while at < size:
        left -= 1
        if left < 0:
            raise room.over()
        tag = view[at]
        if tag < 0x80:
            at += 1
        else:
            tag, at = _read_tag(view, at)
        if tag < 8:
            raise ProtobufError("a field has the number 0")
        wire = tag & 7
        if wire == LENGTH:
            if at < size and (length := view[at]) < 0x80:
                at += 1
            else:
                length, at = _read_length(view, at)
            end = at + length
        elif wire == VARINT:
            if at < size and (value := view[at]) < 0x80:
                at += 1
            else:
                value, at = read_varint(view, at)
            yield tag, value, at
            continue
        elif wire == FIXED32:
            end = at + 4
        elif wire == FIXED64:
            end = at + 8
        else:
            raise ProtobufError(f"field {tag >> 3} has the wire type {wire}, which proto3 does not have")
        if end > size:
            raise ProtobufError(f"field {tag >> 3} has {end - at} bytes, only {size - at} are left of its message")
        yield tag, view[at:end], end
        at = end
    room.take(begun - left)


def read_text(view: memoryview) -> str:
    """The text of a string field. ProtobufError if it is not UTF-8."""
    try:
        return str(view, "utf-8")
    except UnicodeDecodeError:
        raise ProtobufError("a string is not UTF-8") from None


def unpack_varints(view: memoryview) -> list[int]:
    """The varints of a packed field, as unsigned numbers of 64 bits."""
    values = list(view)
    if not values or max(values) < 0x80:  # each is one byte
        return values
    values, at, size = [], 0, len(view)
    while at < size:
        value, at = read_varint(view, at)
        values.append(value)
    return values


def to_signed(value: int, bits: int = 64) -> int:
    """The signed value of the low bits of a varint. An int32 keeps 32 of the 64 bits that its varint may have."""
    half = 1 << (bits - 1)
    return ((value + half) & ((1 << bits) - 1)) - half


# Writing


def encode_varint(value: int) -> bytes:
    """The varint of a number; a negative one takes ten bytes."""
    value &= _MASK
    if value < 0x80:
        return b"%c" % value
    if value < 0x4000:
        return b"%c%c" % (value & 0x7F | 0x80, value >> 7)
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_field(number: int, payload: bytes) -> bytes:
    """A field with a length: string, bytes, message or packed numbers."""
    if number < 16 and len(payload) < 0x80:
        return b"%c%c%b" % (number << 3 | LENGTH, len(payload), payload)
    return b"%b%b%b" % (encode_varint(number << 3 | LENGTH), encode_varint(len(payload)), payload)


# Messages by table


@final
@dataclass(frozen=True, slots=True)
class EnumType:
    """An enum as its .proto file declares it: the numbers of its values by name. `name` follows the rules of a message's."""

    name: str
    values: Mapping[str, int]


@final
@dataclass(frozen=True, slots=True)
class FieldType:
    """A field as its .proto file declares it. `key` makes it a map from keys of that kind to values of `type`. Fields of one
    message with the same `oneof` exclude each other. `enum` is the enum of a field of that kind, for descriptors alone: any
    number is read and written."""

    name: str
    type: Kind | MessageType
    repeated: bool = False
    key: Literal["", "string", "int32", "int64", "uint32", "uint64", "bool"] = ""
    oneof: str = ""
    enum: EnumType | None = None


_RANGES: Mapping[str, tuple[int, int]] = {
    "bool": (0, 1),
    "int32": (-(2**31), 2**31 - 1),
    "enum": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}
_FROM_VARINT: Mapping[str, Callable[[int], int]] = {
    "bool": bool,
    "int32": lambda value: to_signed(value, 32),
    "enum": lambda value: to_signed(value, 32),
    "int64": to_signed,
    "uint32": lambda value: value & 0xFFFF_FFFF,
    "uint64": int,
}
_FROM_BYTES: Mapping[str, Callable[[memoryview], Any]] = {
    "float": lambda view: _FLOAT.unpack(view)[0],
    "double": lambda view: _DOUBLE.unpack(view)[0],
    "string": read_text,
    "bytes": bytes,
}
_READERS: Mapping[str, Callable[[Any], Any]] = {**_FROM_VARINT, **_FROM_BYTES}
_WIRE_TYPES: Mapping[str, int] = {
    **dict.fromkeys(_FROM_VARINT, VARINT),
    "float": FIXED32,
    "double": FIXED64,
    "string": LENGTH,
    "bytes": LENGTH,
}
_DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(_FROM_VARINT, 0),
    "bool": False,
    "float": 0.0,
    "double": 0.0,
    "string": "",
    "bytes": b"",
}


def _unpack(kind: Kind, view: memoryview) -> list[Any]:
    if kind in _FROM_VARINT:
        return list(map(_FROM_VARINT[kind], unpack_varints(view)))
    form = _FLOAT if kind == "float" else _DOUBLE
    if len(view) % form.size:
        raise ProtobufError(f"packed numbers of {form.size} bytes have {len(view)} bytes")
    return [value for (value,) in form.iter_unpack(view)]


@final
class MessageType:
    """A message as its .proto file declares it, by field numbers. It reads and writes such messages as dicts. `name` is its
    name in the file's package, or `Outer.Inner` if it is declared within another message."""

    __slots__ = ("_by_tag", "_entries", "_numbers", "_plain", "_rivals", "fields", "name")

    def __init__(self, name: str, fields: Mapping[int, FieldType]) -> None:
        self.name, self.fields = name, fields
        self._numbers = {field.name: number for number, field in fields.items()}
        self._by_tag: dict[int, tuple[FieldType, bool]] = {}
        self._plain: dict[str, Any] = {}
        self._rivals: dict[str, list[str]] = {}
        self._entries: dict[str, MessageType] = {}  # the type of a map's entries
        for number, field in sorted(fields.items()):
            kind = field.type
            if field.key:
                pair = {1: FieldType("key", field.key), 2: FieldType("value", kind)}
                self._entries[field.name] = MessageType(f"{name}.{field.name}", pair)
            wire = LENGTH if field.key or isinstance(kind, MessageType) else _WIRE_TYPES[kind]
            self._by_tag[number << 3 | wire] = (field, False)
            if field.repeated and wire != LENGTH:
                self._by_tag[number << 3 | LENGTH] = (field, True)
            if field.oneof:
                self._rivals[field.name] = [f.name for f in fields.values() if f.oneof == field.oneof and f is not field]
            elif not (field.repeated or field.key or isinstance(kind, MessageType)):
                self._plain[field.name] = _DEFAULTS[kind]

    def __repr__(self) -> str:
        return f"<message {self.name}>"

    def read(self, data: Buffer, *, values: int = MAX_VALUES) -> dict[str, Any]:
        """The fields of a message by name. A list, map, number or text always has a value, by default the empty one. A
        message or a member of a oneof is absent if the data do not have it. Unknown fields are skipped, as are fields with a
        wrong wire type. ProtobufError for malformed data, and for more than `values` fields, packed numbers and fields of
        nested messages."""
        found: dict[str, Any] = {}
        self._read(memoryview(data).cast("B"), found, MAX_DEPTH, Room(values))
        return found

    def _read(self, view: memoryview, found: dict[str, Any], depth: int, room: Room) -> None:
        """Adds the fields of a message to those of its earlier parts."""
        if depth < 0:
            raise ProtobufError(f"messages are nested deeper than {MAX_DEPTH}")
        if not found:
            found.update(self._plain)
            for field in self.fields.values():
                if field.key:
                    found[field.name] = {}
                elif field.repeated:
                    found[field.name] = []
        for tag, value, _ in fields(view, room):
            known = self._by_tag.get(tag)
            if known is None:
                continue
            field, packed = known
            name, kind = field.name, field.type
            if field.oneof:
                for rival in self._rivals[name]:
                    found.pop(rival, None)
            if packed:
                assert not isinstance(kind, MessageType)
                room.take(len(value))  # each number has at least one byte
                found[name] += _unpack(kind, value)
            elif field.key:
                pair: dict[str, Any] = {}
                self._entries[name]._read(value, pair, depth - 1, room)
                if "value" not in pair and isinstance(kind, MessageType):
                    pair["value"] = kind.read(b"")
                found[name][pair["key"]] = pair["value"]
            elif isinstance(kind, MessageType):
                if field.repeated:
                    found[name].append(part := {})
                else:
                    part = found.setdefault(name, {})
                kind._read(value, part, depth - 1, room)
            elif field.repeated:
                found[name].append(_READERS[kind](value))
            else:
                found[name] = _READERS[kind](value)

    def write(self, values: Mapping[str, Any]) -> bytes:
        """The bytes of a message, with its fields in the order of their numbers. None is an absent field. Default values are
        not written, except in a oneof. ValueError for an unknown name, and for a value that does not fit its field."""
        unknown = values.keys() - self._numbers.keys()
        if unknown:
            raise ValueError(f"{self.name} has no field {min(unknown)!r}")
        out: list[bytes] = []
        for number, field in sorted(self.fields.items()):
            value = values.get(field.name)
            if value is None:
                continue
            if field.key:
                entry = self._entries[field.name]
                out += [encode_field(number, entry.write({"key": k, "value": v})) for k, v in value.items()]
            elif not field.repeated:
                if field.oneof or isinstance(field.type, MessageType) or not _is_default(value):
                    out.append(_write_one(self, number, field, value))
            elif isinstance(field.type, MessageType) or _WIRE_TYPES[field.type] == LENGTH:
                out += [_write_one(self, number, field, one) for one in value]
            elif value:
                out.append(encode_field(number, b"".join([_write_scalar(self, field, one) for one in value])))
        return b"".join(out)


def _is_default(value: object) -> bool:
    return not value and not (type(value) is float and math.copysign(1, value) < 0)  # -0.0 must be written


def _write_one(message: MessageType, number: int, field: FieldType, value: Any) -> bytes:
    kind = field.type
    if isinstance(kind, MessageType):
        return encode_field(number, kind.write(value))
    payload = _write_scalar(message, field, value)
    if (wire := _WIRE_TYPES[kind]) == LENGTH:
        return encode_field(number, payload)
    return encode_varint(number << 3 | wire) + payload


def _write_scalar(message: MessageType, field: FieldType, value: Any) -> bytes:
    kind = field.type
    try:
        match kind:
            case "string":
                return str.encode(value)
            case "bytes":
                return bytes(memoryview(value))
            case "float":
                return _FLOAT.pack(value)
            case "double":
                return _DOUBLE.pack(value)
        low, high = _RANGES[str(kind)]
        if low <= value <= high:
            return encode_varint(value)
    except (TypeError, UnicodeEncodeError, OverflowError, struct.error):
        pass
    raise ValueError(f"{message.name}.{field.name} is {kind}, which {value!r:.64} does not fit")
