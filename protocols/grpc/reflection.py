"""Server reflection (grpc.reflection.v1 and v1alpha): clients such as grpcurl ask a server for its services.

The messages are those of grpc/grpc-proto, `grpc/reflection/v1/reflection.proto` and the one of v1alpha, which differ only
in their package. The answer in each case is that of grpcio-reflection. (An empty request gets INVALID_ARGUMENT; the C++
server has UNIMPLEMENTED.) As in C++, methods are symbols too, and `valid_host` is the `host` of the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, final

from protocols.events import Buffer
from protocols.grpc.descriptors import GRPC_SERVICE_FILE, HEALTH_FILE, MODEL_CONFIG_FILE, Method, ProtoFile
from protocols.grpc.protobuf import FieldType, MessageType
from protocols.grpc.status import StatusCode

_EXTENSION = MessageType(
    "ExtensionRequest", {1: FieldType("containing_type", "string"), 2: FieldType("extension_number", "int32")}
)
REQUEST = MessageType(
    "ServerReflectionRequest",
    {
        1: FieldType("host", "string"),
        3: FieldType("file_by_filename", "string", oneof="message_request"),
        4: FieldType("file_containing_symbol", "string", oneof="message_request"),
        5: FieldType("file_containing_extension", _EXTENSION, oneof="message_request"),
        6: FieldType("all_extension_numbers_of_type", "string", oneof="message_request"),
        7: FieldType("list_services", "string", oneof="message_request"),
    },
)
_FILES = MessageType("FileDescriptorResponse", {1: FieldType("file_descriptor_proto", "bytes", repeated=True)})
_NUMBERS = MessageType(
    "ExtensionNumberResponse",
    {1: FieldType("base_type_name", "string"), 2: FieldType("extension_number", "int32", repeated=True)},
)
_SERVICE = MessageType("ServiceResponse", {1: FieldType("name", "string")})
_SERVICES = MessageType("ListServiceResponse", {1: FieldType("service", _SERVICE, repeated=True)})
_ERROR = MessageType("ErrorResponse", {1: FieldType("error_code", "int32"), 2: FieldType("error_message", "string")})
RESPONSE = MessageType(
    "ServerReflectionResponse",
    {
        1: FieldType("valid_host", "string"),
        2: FieldType("original_request", REQUEST),
        4: FieldType("file_descriptor_response", _FILES, oneof="message_response"),
        5: FieldType("all_extension_numbers_response", _NUMBERS, oneof="message_response"),
        6: FieldType("list_services_response", _SERVICES, oneof="message_response"),
        7: FieldType("error_response", _ERROR, oneof="message_response"),
    },
)

_SERVER_REFLECTION = {
    "ServerReflection": (Method("ServerReflectionInfo", REQUEST, RESPONSE, client_streaming=True, server_streaming=True),)
}
REFLECTION_FILES = tuple(
    ProtoFile(f"grpc/reflection/{version}/reflection.proto", f"grpc.reflection.{version}", _SERVER_REFLECTION)
    for version in ("v1", "v1alpha")
)
FILES = (GRPC_SERVICE_FILE, MODEL_CONFIG_FILE, HEALTH_FILE, *REFLECTION_FILES)
"""The files of a server with inference, health and reflection."""
PATHS = tuple(f"/{file.package}.ServerReflection/ServerReflectionInfo" for file in REFLECTION_FILES)
"""The paths of the reflection method, one for each version. A call is a stream of requests with one response each."""


@final
class ServerReflection:
    """Answers reflection requests about some files and their imports. It lists the services of all these files. Threads may
    share it. It makes the descriptors when the first request needs them."""

    def __init__(self, files: Iterable[ProtoFile] = FILES) -> None:
        self._files = {one.name: one for file in files for one in file.with_imports()}

    def answer(self, message: Buffer) -> bytes:
        """The ServerReflectionResponse to a ServerReflectionRequest. For unknown names it has an `error_response` NOT_FOUND,
        and for an empty request INVALID_ARGUMENT; the call goes on. A file comes with all its imports, even if they were
        sent before. ProtobufError for malformed bytes: that ends the call."""
        request = REQUEST.read(message)
        said = self._said(request)
        return RESPONSE.write({"valid_host": request["host"], "original_request": request, **said})

    def _said(self, request: Mapping[str, Any]) -> dict[str, Any]:
        match request:
            case {"file_by_filename": name}:
                return self._described(self._files.get(name), f"no file {name!r:.100}")
            case {"file_containing_symbol": name}:
                return self._described(self._homes.get(name), f"no symbol {name!r:.100}")
            case {"file_containing_extension": {"containing_type": name, "extension_number": number}}:
                return _error(StatusCode.NOT_FOUND, f"no extension {number} of {name!r:.100}")  # proto3 has no extensions
            case {"all_extension_numbers_of_type": name}:
                home = self._homes.get(name)
                if home is None or home.symbols[name] != "message":
                    return _error(StatusCode.NOT_FOUND, f"no message {name!r:.100}")
                return {"all_extension_numbers_response": {"base_type_name": name}}
            case {"list_services": _}:
                return {"list_services_response": {"service": [{"name": name} for name in self._services]}}
        return _error(StatusCode.INVALID_ARGUMENT, "the request has no message_request that is known")

    def _described(self, file: ProtoFile | None, otherwise: str) -> dict[str, Any]:
        if file is None:
            return _error(StatusCode.NOT_FOUND, otherwise)
        return {"file_descriptor_response": {"file_descriptor_proto": [one.descriptor for one in file.with_imports()]}}

    @cached_property
    def _homes(self) -> Mapping[str, ProtoFile]:
        """The file of each symbol."""
        return {name: file for file in self._files.values() for name in file.symbols}

    @cached_property
    def _services(self) -> list[str]:
        return sorted(f"{file.package}.{name}" for file in self._files.values() for name in file.services)


def _error(code: StatusCode, message: str) -> dict[str, Any]:
    return {"error_response": {"error_code": int(code), "error_message": message}}
