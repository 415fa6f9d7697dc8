"""Every route of v2: the one table from which the router's rows and the OpenAPI document are made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

import msgspec

from gateway.core.exchange import Exchange
from gateway.core.route import Handler, Needs, Row
from gateway.dialects.answers import JSON
from gateway.dialects.v2.requests import refuse
from protocols import openapi
from protocols.openapi import Answer, Body, Field, Operation
from protocols.sse import MEDIA_TYPE
from protocols.v2 import repository, schema
from protocols.v2.frames import FRAMES
from protocols.v2.generate import GenerateReply, GenerateRequest
from protocols.v2.schema import InferReply, InferRequest

_BINARY = "application/octet-stream"
_LENGTH = "Inference-Header-Content-Length"
_DESCRIPTION = (
    "The Open Inference Protocol, v2, with Triton's extensions. Which parser reads a request is decided by "
    f"{_LENGTH} alone, never by Content-Type. Every error has a JSON body with the member `error`. Every path answers "
    "OPTIONS, and HEAD where it answers GET. Where the server has keys for its clients, every operation but health may be "
    "refused with 401, 403 or 429 for want of the right one."
)
_CAPTURED = {
    "name": "The name of a model.",
    "version": "The version of the model; each has one.",
    "repository": "The name of a repository: there is one, whatever it is called.",
    "region": "The name of a region of shared memory.",
}
_ERRORS = {
    400: "The request is wrong; the text names the field.",
    403: "The server does not allow it; the text names the setting.",
    404: "There is no such model or version.",
    409: "The model is on its way in or out.",
    413: "The body is over a limit, which the text names.",
    415: "The body's Content-Encoding is not known.",
    500: "The model failed, or the server did; the text has what may be told.",
    503: "The model or the server takes no requests now; they may be tried again.",
    504: "The time for the request is over.",
    507: "The model does not fit into memory beside the others.",
}


def _answers(type: Any, description: str, *errors: int) -> tuple[Answer, ...]:
    return (Answer(status=200, description=description, bodies=(Body(type=type),)), *_errors(*errors))


def _errors(*statuses: int) -> Iterable[Answer]:
    return [
        Answer(status=status, description=_ERRORS[status], bodies=(Body(type=schema.ErrorReply),)) for status in statuses
    ]


def _of_model(path: str) -> tuple[str, ...]:
    return "/v2/models/{name}" + path, "/v2/models/{name}/versions/{version}" + path


def _of_repository(path: str) -> tuple[str, ...]:
    return "/v2/repository" + path, "/v2/repository/{repository}" + path


_HEALTH = "Answers also while models load and while the server shuts down."
_INFER_ERRORS = (400, 404, 413, 415, 500, 503, 504)
_BINARY_REQUEST = Body(
    content_type=_BINARY,
    description=f"{_LENGTH} bytes of JSON, as above, and then the bytes of each input that has binary_data_size, in their "
    "order. With 0 the body is the bytes of the model's only input, and all outputs come as bytes.",
)
_BINARY_REPLY = Body(
    content_type=_BINARY,
    description=f"{_LENGTH} bytes of JSON, as above, and then the bytes of each output that has binary_data_size, in "
    "their order.",
)
_JSON_LENGTH = Field(
    name=_LENGTH, description="The length of the JSON in the body; absent where all of it is JSON.", type=int
)

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        name="server_live",
        method="GET",
        paths=("/v2/health/live",),
        summary="Whether the server answers.",
        description=_HEALTH,
        answers=_answers(schema.LiveReply, "It does."),
    ),
    Operation(
        name="server_ready",
        method="GET",
        paths=("/v2/health/ready",),
        summary="Whether the server takes inference requests.",
        description=_HEALTH,
        answers=(
            *_answers(schema.ReadyReply, "It does."),
            Answer(
                status=503,
                description="Not now: models are being loaded, or it shuts down.",
                bodies=(Body(type=schema.ReadyReply),),
            ),
        ),
    ),
    Operation(
        name="server_metadata",
        method="GET",
        paths=("/v2",),
        summary="The server, and the extensions that it has.",
        answers=_answers(schema.ServerMetadata, "The server.", 503),
    ),
    Operation(
        name="openapi",
        method="GET",
        paths=("/v2/openapi.json",),
        summary="This document.",
        answers=_answers(dict[str, Any], "An OpenAPI 3.1 document.", 503),
    ),
    Operation(
        name="models",
        method="GET",
        paths=("/v2/models",),
        summary="The names of the models in service.",
        answers=_answers(repository.ModelList, "The models.", 503),
    ),
    Operation(
        name="all_statistics",
        method="GET",
        paths=("/v2/models/stats",),
        summary="The statistics of all models in service.",
        answers=_answers(repository.StatisticsReply, "The statistics.", 503),
    ),
    Operation(
        name="model_metadata",
        method="GET",
        paths=_of_model(""),
        summary="A model, and the tensors that it takes and gives.",
        answers=_answers(schema.ModelMetadata, "The model.", 404, 503),
    ),
    Operation(
        name="model_config",
        method="GET",
        paths=_of_model("/config"),
        summary="A model in the words of Triton's configuration.",
        answers=_answers(schema.ModelConfig, "The part of the configuration that clients read.", 404, 503),
    ),
    Operation(
        name="model_ready",
        method="GET",
        paths=_of_model("/ready"),
        summary="Whether a model takes inference requests.",
        description=_HEALTH,
        answers=(
            *_answers(schema.ModelReadyReply, "It does.", 404),
            Answer(
                status=503,
                description="Not now: it is being loaded, has crashed, or the server shuts down.",
                bodies=(Body(type=schema.ModelReadyReply),),
            ),
        ),
    ),
    Operation(
        name="statistics",
        method="GET",
        paths=_of_model("/stats"),
        summary="The statistics of a model, since it was loaded.",
        answers=_answers(repository.StatisticsReply, "The statistics.", 404, 503),
    ),
    Operation(
        name="infer",
        method="POST",
        paths=_of_model("/infer"),
        summary="One inference.",
        description="The path is also a WebSocket, where each message is a request and the answers come as they are there.",
        bodies=(Body(type=InferRequest), _BINARY_REQUEST),
        required=True,
        headers=(_JSON_LENGTH,),
        answers=(
            Answer(
                status=200,
                description="The outputs.",
                bodies=(Body(type=InferReply), _BINARY_REPLY),
                headers=(_JSON_LENGTH,),
            ),
            *_errors(*_INFER_ERRORS),
        ),
    ),
    Operation(
        name="infer_stream",
        method="POST",
        paths=_of_model("/infer_stream"),
        summary="One inference with any number of responses, each of which leaves when it is there.",
        description="The status is that of the first response. What goes wrong after it is a last event or frame, whose "
        f"JSON has the member `error`. An Accept of {FRAMES} asks for frames, which alone can carry binary outputs.",
        bodies=(Body(type=InferRequest), _BINARY_REQUEST),
        required=True,
        headers=(_JSON_LENGTH,),
        answers=(
            Answer(
                status=200,
                description="The responses.",
                bodies=(
                    Body(
                        content_type=MEDIA_TYPE,
                        description="A server-sent event for each response: its data are the JSON of an InferReply.",
                    ),
                    Body(
                        content_type=FRAMES,
                        description="A frame for each response: the length of its JSON (4 bytes) and of its binary data "
                        "(8 bytes), both little-endian; the JSON of an InferReply; the binary data.",
                    ),
                ),
            ),
            *_errors(*_INFER_ERRORS),
        ),
    ),
    Operation(
        name="generate",
        method="POST",
        paths=_of_model("/generate"),
        summary="One inference, with inputs and outputs as members by their names.",
        bodies=(Body(type=GenerateRequest),),
        required=True,
        answers=_answers(GenerateReply, "The outputs.", *_INFER_ERRORS),
    ),
    Operation(
        name="generate_stream",
        method="POST",
        paths=_of_model("/generate_stream"),
        summary="The same with any number of responses, or tokens, each of which leaves when it is there.",
        description="The status is that of the first response. What goes wrong after it is a last event, whose JSON has the "
        "member `error`.",
        bodies=(Body(type=GenerateRequest),),
        required=True,
        answers=(
            Answer(
                status=200,
                description="The responses.",
                bodies=(
                    Body(
                        content_type=MEDIA_TYPE,
                        description="A server-sent event for each response: its data are the JSON of a GenerateReply.",
                    ),
                ),
            ),
            *_errors(*_INFER_ERRORS),
        ),
    ),
    Operation(
        name="index",
        method="POST",
        paths=_of_repository("/index"),
        summary="The models that are there, and those that could be loaded.",
        bodies=(Body(type=repository.ModelIndexRequest),),
        answers=_answers(list[repository.ModelIndexEntry], "The models, by name.", 400, 413, 415, 503),
    ),
    Operation(
        name="load",
        method="POST",
        paths=_of_repository("/models/{name}/load"),
        summary="Loads a model of the configuration, or the folder of that name under repository.roots.",
        description="Answered when the model answers, at once where it does already. Needs v2.model_control.",
        bodies=(Body(type=repository.LoadRequest),),
        answers=_answers(repository.LoadReply, "The model answers.", 400, 403, 404, 409, 413, 415, 500, 503, 507),
    ),
    Operation(
        name="unload",
        method="POST",
        paths=_of_repository("/models/{name}/unload"),
        summary="Takes a model out of service and unloads it.",
        description="Calls that run have repository.unload_timeout to end. Answered when nothing of the model is left, and "
        "also where there was none. Needs v2.model_control.",
        bodies=(Body(type=repository.UnloadRequest),),
        answers=_answers(repository.UnloadReply, "Nothing of the model is left.", 400, 403, 409, 413, 415, 503),
    ),
    Operation(
        name="log_settings",
        method="GET",
        paths=("/v2/logging",),
        summary="What the server logs.",
        answers=_answers(repository.LogSettings, "The settings.", 503),
    ),
    Operation(
        name="change_log",
        method="POST",
        paths=("/v2/logging",),
        summary="Changes what the server logs.",
        description="Needs v2.model_control.",
        bodies=(Body(type=repository.LogChange),),
        answers=_answers(repository.LogSettings, "The settings after the change.", 400, 403, 413, 415, 503),
    ),
    *(
        operation
        for kind in ("system", "cuda")
        for operation in (
            Operation(
                name=f"{kind}_shared_memory",
                method="GET",
                paths=(f"/v2/{kind}sharedmemory/status", f"/v2/{kind}sharedmemory/region/{{region}}/status"),
                summary="The registered regions of shared memory: none.",
                answers=_answers(list[repository.SharedMemoryRegion], "An empty list.", 503),
            ),
            Operation(
                name=f"register_{kind}_shared_memory",
                method="POST",
                paths=(f"/v2/{kind}sharedmemory/region/{{region}}/register",),
                summary="Always refused: the server has no shared memory with its clients.",
                bodies=(Body(type=dict[str, Any]),),
                answers=tuple(_errors(400, 503)),
            ),
            Operation(
                name=f"unregister_{kind}_shared_memory",
                method="POST",
                paths=(f"/v2/{kind}sharedmemory/unregister", f"/v2/{kind}sharedmemory/region/{{region}}/unregister"),
                summary="Nothing is registered, afterwards as before.",
                answers=_answers(repository.Done, "An empty object.", 503),
            ),
        )
    ),
)
"""By their names; one of the dialects of v2 has a handler for each."""
_NAMED = {operation.name: operation for operation in OPERATIONS}


def rows_of(handlers: Mapping[str, Handler], *, always: bool = False, needs: Needs = Needs.INFER) -> list[Row]:
    """The rows of operations, by their names, with their handlers: one for each path."""
    return [
        Row(operation.method, path, handler, dialect="v2", refuse=refuse, always=always, needs=needs)
        for operation, handler in ((_NAMED[name], handler) for name, handler in handlers.items())
        for path in operation.paths
    ]


def document(version: str) -> dict[str, Any]:  # a JSON object
    """The OpenAPI document of this version of the server."""
    return openapi.document(
        title="everywire", version=version, description=_DESCRIPTION, operations=OPERATIONS, captured=_CAPTURED
    )


@final
class OpenAPIDialect:
    """Answers with the OpenAPI document of v2, from which clients can be generated."""

    def __init__(self, version: str) -> None:
        self._version = version
        self._written = b""

    def rows(self) -> list[Row]:
        """Its one route."""
        return rows_of({"openapi": self.openapi}, needs=Needs.METADATA)

    async def openapi(self, exchange: Exchange) -> None:
        """GET /v2/openapi.json. The document is made on the first request."""
        if not self._written:
            self._written = msgspec.json.encode(document(self._version))
        written = self._written
        if prefix := exchange.owner.prefix:
            written = b'{"servers":%b,%b' % (msgspec.json.encode([{"url": prefix}]), written[1:])
        exchange.outbound.respond(200, [JSON], written)
