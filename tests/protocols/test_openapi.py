"""OpenAPI documents of small sets of operations."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from protocols.openapi import Answer, Body, Field, Operation, document


class Thing(msgspec.Struct):
    """A thing,
    in two lines."""

    size: int = 0


GET = Operation(
    name="thing",
    method="GET",
    paths=("/things/{name}", "/boxes/{box}/things/{name}"),
    summary="One of them.",
    answers=(Answer(status=200, description="It.", bodies=(Body(type=Thing, description="Of any size."),)),),
)
PUT = Operation(
    name="put",
    method="PUT",
    paths=("/things/{name}",),
    summary="Another.",
    description="It is kept.",
    bodies=(Body(type=Thing), Body(content_type="image/png", description="A picture of it.")),
    required=True,
    headers=(Field(name="X-Size", description="How large it is.", type=int),),
    queries=(Field(name="keep", description="How long.", type=float),),
    answers=(Answer(status=204, description="Kept.", headers=(Field(name="X-Was", description="Its size before."),)),),
)


def made(*operations: Operation) -> dict[str, Any]:
    captured = {"name": "The name.", "box": "The box."}
    return document(title="t", version="1", description="d", operations=operations, captured=captured)


def test_types_are_shared_and_described_in_one_line() -> None:
    doc = made(GET, PUT)
    OpenAPIV31SpecValidator(doc).validate()
    assert list(doc["components"]["schemas"]) == ["Thing"]
    assert doc["components"]["schemas"]["Thing"]["description"] == "A thing, in two lines."
    shown = doc["paths"]["/things/{name}"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert shown == {"$ref": "#/components/schemas/Thing", "description": "Of any size."}


def test_the_id_of_a_longer_path_says_what_it_names_more() -> None:
    paths = made(GET)["paths"]
    assert paths["/things/{name}"]["get"]["operationId"] == "thing"
    assert paths["/boxes/{box}/things/{name}"]["get"]["operationId"] == "thing_of_box"
    assert [p["name"] for p in paths["/boxes/{box}/things/{name}"]["get"]["parameters"]] == ["box", "name"]


def test_headers_bodies_and_answers_are_there() -> None:
    put = made(PUT)["paths"]["/things/{name}"]["put"]
    assert put["parameters"][1] == {
        "name": "X-Size",
        "in": "header",
        "description": "How large it is.",
        "schema": {"type": "integer"},
    }
    assert put["parameters"][2] == {
        "name": "keep", "in": "query", "description": "How long.", "schema": {"type": "number"},
    }  # fmt: skip
    assert put["requestBody"]["required"]
    assert put["requestBody"]["content"]["image/png"] == {"schema": {"description": "A picture of it."}}
    assert put["responses"]["204"]["headers"] == {"X-Was": {"description": "Its size before.", "schema": {"type": "string"}}}


def test_what_is_there_twice_or_has_no_words_is_refused() -> None:
    with pytest.raises(ValueError, match="is there twice"):
        made(GET, GET)
    with pytest.raises(KeyError):
        document(title="t", version="1", description="d", operations=(GET,), captured={"name": "The name."})
    of_no_type = Answer(status=200, description="", bodies=(Body(type=object()),))
    with pytest.raises(TypeError):
        made(Operation(name="x", method="GET", paths=("/x",), summary="", answers=(of_no_type,)))
