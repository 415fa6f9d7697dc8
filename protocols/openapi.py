"""Builds OpenAPI 3.1 documents from the msgspec types that read and write the bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import msgspec

VERSION = "3.1.0"
_SCHEMAS = "#/components/schemas/{name}"
_CAPTURED = re.compile(r"\{(\w+)\}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """One form of a body. `type` is the type that msgspec reads or writes. None: bytes or text, described in words alone."""

    content_type: str = "application/json"
    type: Any = None  # any type that msgspec supports
    description: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A header field or a query parameter."""

    name: str
    description: str
    type: Any = str  # any type that msgspec supports


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The meaning of a status, and the forms of its body."""

    status: int
    description: str
    bodies: tuple[Body, ...] = ()
    headers: tuple[Field, ...] = ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method at one path, or at several paths that leave out parts of each other. `name` is the id of the first path;
    the ids of the others add the names that their paths capture beyond it. Without `bodies` a request has no body; with
    `required` it must have one."""

    name: str
    method: str
    paths: tuple[str, ...]
    summary: str
    description: str = ""
    bodies: tuple[Body, ...] = ()
    required: bool = False
    headers: tuple[Field, ...] = ()
    queries: tuple[Field, ...] = ()
    answers: tuple[Answer, ...] = ()


def document(
    *, title: str, version: str, description: str, operations: Sequence[Operation], captured: Mapping[str, str]
) -> dict[str, Any]:  # a JSON object
    """The document of these operations. `captured` describes each path parameter by name; KeyError if one is missing.
    ValueError for two operations with the same method and path, or with the same id."""
    found = list(_types(operations))
    written, components = msgspec.json.schema_components(found, ref_template=_SCHEMAS)
    schemas = dict(zip(map(repr, found), written, strict=True))
    for schema in components.values():
        if "description" in schema:
            schema["description"] = " ".join(schema["description"].split())  # a docstring, indented as in its source
    paths: dict[str, dict[str, Any]] = {}
    ids: set[str] = set()
    for operation in operations:
        for path in operation.paths:
            at, method, id = paths.setdefault(path, {}), operation.method.lower(), _id(operation, path)
            if method in at or id in ids:
                raise ValueError(f"{operation.method} {path} ({id}) is there twice")
            ids.add(id)
            at[method] = _operation(operation, path, id, schemas, captured)
    return {
        "openapi": VERSION,
        "info": {"title": title, "version": version, "description": description},
        "paths": paths,
        "components": {"schemas": msgspec.json.decode(msgspec.json.encode(components))},  # a default may be a tuple
    }


def _types(operations: Iterable[Operation]) -> Iterable[Any]:
    """Each type once."""
    seen: dict[str, Any] = {repr(str): str}
    for operation in operations:
        bodies = [*operation.bodies, *(body for answer in operation.answers for body in answer.bodies)]
        fields = [
            *operation.headers,
            *operation.queries,
            *(field for answer in operation.answers for field in answer.headers),
        ]
        for type in [body.type for body in bodies if body.type is not None] + [field.type for field in fields]:
            seen.setdefault(repr(type), type)
    return seen.values()


def _id(operation: Operation, path: str) -> str:
    more = [name for name in _CAPTURED.findall(path) if name not in _CAPTURED.findall(operation.paths[0])]
    return operation.name + "".join(f"_of_{name}" for name in more)


def _operation(
    operation: Operation, path: str, id: str, schemas: Mapping[str, Any], captured: Mapping[str, str]
) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "description": captured[name], "schema": {"type": "string"}}
        for name in _CAPTURED.findall(path)
    ]
    parameters += [
        {"name": field.name, "in": place, "description": field.description, "schema": schemas[repr(field.type)]}
        for place, fields in (("header", operation.headers), ("query", operation.queries))
        for field in fields
    ]
    written: dict[str, Any] = {"operationId": id, "summary": operation.summary}
    if operation.description:
        written["description"] = operation.description
    if parameters:
        written["parameters"] = parameters
    if operation.bodies:
        written["requestBody"] = {"required": operation.required, "content": _content(operation.bodies, schemas)}
    written["responses"] = {str(answer.status): _answer(answer, schemas) for answer in operation.answers}
    return written


def _answer(answer: Answer, schemas: Mapping[str, Any]) -> dict[str, Any]:
    written: dict[str, Any] = {"description": answer.description}
    if answer.headers:
        written["headers"] = {
            field.name: {"description": field.description, "schema": schemas[repr(field.type)]} for field in answer.headers
        }
    if answer.bodies:
        written["content"] = _content(answer.bodies, schemas)
    return written


def _content(bodies: Iterable[Body], schemas: Mapping[str, Any]) -> dict[str, Any]:
    return {body.content_type: _media(body, schemas) for body in bodies}


def _media(body: Body, schemas: Mapping[str, Any]) -> dict[str, Any]:
    """A media type object. OpenAPI 3.1 gives a body that is not JSON no schema beyond a description."""
    if body.type is None:
        return {"schema": {"description": body.description}}
    schema = schemas[repr(body.type)]
    return {"schema": {**schema, "description": body.description}} if body.description else {"schema": schema}
