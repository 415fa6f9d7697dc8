"""OpenAPI 3.1 documents, from the msgspec types that also read and write the bodies."""

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
    """One form of a body. `type` is what msgspec reads or writes; None: bytes or text that only `description` tells of."""

    content_type: str = "application/json"
    type: Any = None  # whatever msgspec takes for one
    description: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A header field, or a parameter of a query."""

    name: str
    description: str
    type: Any = str  # whatever msgspec takes for one


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a status means, and the forms its body may have."""

    status: int
    description: str
    bodies: tuple[Body, ...] = ()
    headers: tuple[Field, ...] = ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method at one path, or at several that differ by what they leave out. `name` is the id of the first; the others
    add what their path names more. Without `bodies` a request has none; with `required` it has one."""

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
    """The document of these operations. `captured` describes what a path captures, by name; KeyError for one that it does
    not know. ValueError for two operations of one method at one path, or of one id."""
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
    """A body that is no JSON has no schema in OpenAPI 3.1 but what says what it is."""
    if body.type is None:
        return {"schema": {"description": body.description}}
    schema = schemas[repr(body.type)]
    return {"schema": {**schema, "description": body.description}} if body.description else {"schema": schema}
