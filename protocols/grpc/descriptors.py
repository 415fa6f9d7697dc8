"""Descriptors (google/protobuf/descriptor.proto) of the .proto files that are served, made from the tables of messages.

Clients without generated code ask for them, see `reflection`. The same tables read and write the messages (inference has
a separate codec, which tests compare with its tables), so descriptors and messages cannot differ. Left out are comments
and options; the fields of `model_config.proto` that the tables lack, so that a client sees just the part of a
configuration that this server sends; and the method List of `health.proto`, which is not served.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, final

from protocols.grpc.protobuf import EnumType, FieldType, MessageType
from protocols.grpc.v2_tables import HEALTH_CHECK, METHODS, MODEL_CONFIGURATION, MODEL_INFER, MODEL_STREAM_INFER

Symbol: TypeAlias = Literal["message", "field", "oneof", "enum", "value", "service", "method"]

# The messages of descriptor.proto, as far as files of proto3 need them. It is itself a file of proto2: a number that is set
# is on the wire even if it is 0, as in a oneof with one member here. Nested messages are written before their owners.

_NAME = FieldType("name", "string")
_FIELD = MessageType(
    "FieldDescriptorProto",
    {
        1: _NAME,
        3: FieldType("number", "int32"),
        4: FieldType("label", "int32"),
        5: FieldType("type", "int32"),
        6: FieldType("type_name", "string"),
        9: FieldType("oneof_index", "int32", oneof="oneof_index"),
    },
)
_ENUM_VALUE = MessageType("EnumValueDescriptorProto", {1: _NAME, 2: FieldType("number", "int32", oneof="number")})
_ENUM = MessageType("EnumDescriptorProto", {1: _NAME, 2: FieldType("value", _ENUM_VALUE, repeated=True)})
_MESSAGE = MessageType(
    "DescriptorProto",
    {
        1: _NAME,
        2: FieldType("field", _FIELD, repeated=True),
        3: FieldType("nested_type", "bytes", repeated=True),
        4: FieldType("enum_type", _ENUM, repeated=True),
        7: FieldType("options", MessageType("MessageOptions", {7: FieldType("map_entry", "bool")})),
        8: FieldType("oneof_decl", MessageType("OneofDescriptorProto", {1: _NAME}), repeated=True),
    },
)
_METHOD = MessageType(
    "MethodDescriptorProto",
    {
        1: _NAME,
        2: FieldType("input_type", "string"),
        3: FieldType("output_type", "string"),
        5: FieldType("client_streaming", "bool"),
        6: FieldType("server_streaming", "bool"),
    },
)
_SERVICE = MessageType("ServiceDescriptorProto", {1: _NAME, 2: FieldType("method", _METHOD, repeated=True)})
_FILE = MessageType(
    "FileDescriptorProto",
    {
        1: _NAME,
        2: FieldType("package", "string"),
        3: FieldType("dependency", "string", repeated=True),
        4: FieldType("message_type", "bytes", repeated=True),
        5: FieldType("enum_type", _ENUM, repeated=True),
        6: FieldType("service", _SERVICE, repeated=True),
        12: FieldType("syntax", "string"),
    },
)
_OPTIONAL, _REPEATED, _OF_MESSAGE = 1, 3, 11
_TYPES: Mapping[str, int] = MappingProxyType({
    "double": 1, "float": 2, "int64": 3, "uint64": 4, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13,
    "enum": 14,
})  # fmt: skip


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Method:
    """A method of a service as its .proto file declares it."""

    name: str
    request: MessageType
    response: MessageType
    client_streaming: bool = False
    server_streaming: bool = False


@final
@dataclasses.dataclass(frozen=True, eq=False)
class ProtoFile:
    """A .proto file by its declarations: services by name, and messages. Messages that methods and fields use are added,
    unless a file of `imports` has them; enums are those of fields. The descriptor is made at its first use, which takes 3 ms
    for GRPCInferenceService, and kept."""

    name: str
    package: str
    services: Mapping[str, Sequence[Method]] = dataclasses.field(default_factory=dict)
    messages: Sequence[MessageType] = ()
    imports: tuple[ProtoFile, ...] = ()

    def with_imports(self) -> Iterator[ProtoFile]:
        """Yields the files that this file needs, each once, and this file."""
        files = {self: None}
        for file in self.imports:
            files |= dict.fromkeys(file.with_imports())
        return iter(files)

    @property
    def descriptor(self) -> bytes:
        """The FileDescriptorProto. ValueError if tables contradict each other: two messages or enums with one name, a field
        of the kind `enum` without an enum, or a message declared within one that is missing."""
        return self._made[0]

    @property
    def symbols(self) -> Mapping[str, Symbol]:
        """The declarations of the file by full name, each with its kind. A map also declares a message for its entries, and
        the values of an enum belong to the scope of the enum, as in protobuf."""
        return self._made[1]

    @cached_property
    def types(self) -> Mapping[str, MessageType]:
        """The messages by their names in the package. A message comes after those that it uses."""
        others = {message for file in self.imports for message in file.types.values()}
        found: dict[str, MessageType] = {}

        def add(message: MessageType) -> None:
            if message in others or found.get(message.name) is message:
                return
            for _, field in sorted(message.fields.items()):
                if isinstance(field.type, MessageType):
                    add(field.type)
            if found.setdefault(message.name, message) is not message:
                raise ValueError(f"{self.name} has two messages {message.name}")

        for message in self.messages:
            add(message)
        for methods in self.services.values():
            for method in methods:
                add(method.request)
                add(method.response)
        return found

    @cached_property
    def _made(self) -> tuple[bytes, Mapping[str, Symbol]]:
        describing = _Describing(self)
        return describing.file(), MappingProxyType(describing.symbols)


@final
class _Describing:
    """Makes the descriptor of one file."""

    __slots__ = ("_enums", "_file", "_full_names", "_nested", "symbols")

    def __init__(self, file: ProtoFile) -> None:
        self._file = file
        self.symbols: dict[str, Symbol] = {}
        self._full_names = {
            message: f"{one.package}.{name}" for one in (*file.imports, file) for name, message in one.types.items()
        }
        self._nested: dict[str, list[MessageType]] = {}  # by the name of the enclosing message
        self._enums: dict[str, list[EnumType]] = {}
        for message in file.types.values():
            self._nested.setdefault(message.name.rpartition(".")[0], []).append(message)
            for field in message.fields.values():
                if field.enum is not None:
                    inside = self._enums.setdefault(field.enum.name.rpartition(".")[0], [])
                    if field.enum not in inside:
                        inside.append(field.enum)
        for owner in (*self._nested, *self._enums):
            if owner and owner not in file.types:
                raise ValueError(f"{file.name} has no message {owner}, which others are declared in")

    def file(self) -> bytes:
        file = self._file
        return _FILE.write(
            {
                "name": file.name,
                "package": file.package,
                "dependency": [one.name for one in file.imports],
                "message_type": [self._message(message) for message in self._nested.get("", ())],
                "enum_type": [self._enum(enum) for enum in self._enums.get("", ())],
                "service": [self._service(name, methods) for name, methods in file.services.items()],
                "syntax": "proto3",
            }
        )

    def _declare(self, kind: Symbol, name: str) -> str:
        """Records a declaration by its full name, and returns the last part of the name."""
        if name in self.symbols:
            raise ValueError(f"{self._file.name} declares {name} twice")
        self.symbols[name] = kind
        return name.rpartition(".")[2]

    def _message(self, message: MessageType) -> bytes:
        full = self._full_names[message]
        oneofs = list(dict.fromkeys(field.oneof for _, field in sorted(message.fields.items()) if field.oneof))
        values: dict[str, Any] = {
            "name": self._declare("message", full),
            "oneof_decl": [{"name": self._declare("oneof", f"{full}.{oneof}")} for oneof in oneofs],
            "nested_type": [self._message(inner) for inner in self._nested.get(message.name, ())],
            "enum_type": [self._enum(enum) for enum in self._enums.get(message.name, ())],
            "field": [],
        }
        for number, field in sorted(message.fields.items()):
            described = self._field(full, number, field)
            if field.oneof:
                described["oneof_index"] = oneofs.index(field.oneof)
            if field.key:
                entry = f"{full}.{''.join(word[:1].upper() + word[1:] for word in field.name.split('_'))}Entry"
                pair = [FieldType("key", field.key), FieldType("value", field.type, enum=field.enum)]
                values["nested_type"].append(
                    _MESSAGE.write(
                        {
                            "name": self._declare("message", entry),
                            "field": [self._field(entry, at, one) for at, one in enumerate(pair, 1)],
                            "options": {"map_entry": True},
                        }
                    )
                )
                described |= {"label": _REPEATED, "type": _OF_MESSAGE, "type_name": f".{entry}"}
            values["field"].append(described)
        return _MESSAGE.write(values)

    def _field(self, owner: str, number: int, field: FieldType) -> dict[str, Any]:
        described = {
            "name": self._declare("field", f"{owner}.{field.name}"),
            "number": number,
            "label": _REPEATED if field.repeated else _OPTIONAL,
        }
        if isinstance(field.type, MessageType):
            return described | {"type": _OF_MESSAGE, "type_name": f".{self._full_names[field.type]}"}
        if field.type == "enum":
            if field.enum is None:
                raise ValueError(f"{owner}.{field.name} has no enum")
            described["type_name"] = f".{self._file.package}.{field.enum.name}"
        return described | {"type": _TYPES[field.type]}

    def _enum(self, enum: EnumType) -> dict[str, Any]:
        full = f"{self._file.package}.{enum.name}"
        scope = full.rpartition(".")[0]
        return {
            "name": self._declare("enum", full),
            "value": [
                {"name": self._declare("value", f"{scope}.{name}"), "number": number} for name, number in enum.values.items()
            ],
        }

    def _service(self, name: str, methods: Sequence[Method]) -> dict[str, Any]:
        full = f"{self._file.package}.{name}"
        return {
            "name": self._declare("service", full),
            "method": [
                {
                    "name": self._declare("method", f"{full}.{method.name}"),
                    "input_type": f".{self._full_names[method.request]}",
                    "output_type": f".{self._full_names[method.response]}",
                    "client_streaming": method.client_streaming,
                    "server_streaming": method.server_streaming,
                }
                for method in methods
            ],
        }


MODEL_CONFIG_FILE = ProtoFile("model_config.proto", "inference", messages=(MODEL_CONFIGURATION,))
GRPC_SERVICE_FILE = ProtoFile(
    "grpc_service.proto",
    "inference",
    {
        "GRPCInferenceService": (
            Method("ModelInfer", *MODEL_INFER),
            Method("ModelStreamInfer", *MODEL_STREAM_INFER, client_streaming=True, server_streaming=True),
            *(Method(path.rpartition("/")[2], *pair) for path, pair in METHODS.items() if path.startswith("/inference.")),
        )
    },
    imports=(MODEL_CONFIG_FILE,),
)
HEALTH_FILE = ProtoFile(
    "grpc/health/v1/health.proto",
    "grpc.health.v1",
    {"Health": (Method("Check", *HEALTH_CHECK), Method("Watch", *HEALTH_CHECK, server_streaming=True))},
)
