"""The rows of all dialects: the only list of the requests that the gateway answers. May import every dialect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from gateway.catalog.load_unload import ModelControl
from gateway.catalog.repository import Repository
from gateway.config import Config
from gateway.core.route import Row
from gateway.dialects.answers import EventStreams
from gateway.dialects.aws.bidi import BidiDialect
from gateway.dialects.aws.container import ContainerDialect
from gateway.dialects.aws.endpoints import Endpoints
from gateway.dialects.aws.invoke import SageMakerDialect
from gateway.dialects.aws.multi_model import MMEDialect
from gateway.dialects.aws.openai_path import EndpointChatDialect
from gateway.dialects.aws.signatures import Signatures
from gateway.dialects.grpc.calls import Calls
from gateway.dialects.grpc.control import ControlDialect
from gateway.dialects.grpc.health import HealthDialect
from gateway.dialects.grpc.infer import InferMessages, ModelInferDialect
from gateway.dialects.grpc.reflection import ReflectionDialect
from gateway.dialects.grpc.server import ServerDialect
from gateway.dialects.grpc.stream import ModelStreamDialect
from gateway.dialects.health import ManagementDialect
from gateway.dialects.index import IndexDialect
from gateway.dialects.model_choice import ModelChoice
from gateway.dialects.text.lmi import LMIDialect
from gateway.dialects.text.openai import OpenAIDialect
from gateway.dialects.text.requests import TextCalls
from gateway.dialects.v2.generate import GenerateDialect
from gateway.dialects.v2.infer import InferDialect
from gateway.dialects.v2.infer_stream import StreamDialect
from gateway.dialects.v2.metadata import V2Dialect
from gateway.dialects.v2.operations import OpenAPIDialect
from gateway.dialects.v2.repository import V2ControlDialect
from gateway.dialects.v2.requests import V2Calls
from gateway.dialects.v2.websocket import SessionDialect
from gateway.version import version
from gateway.workers.supervisor import Supervisor


class _Dialect(Protocol):
    def rows(self) -> Sequence[Row]: ...


def rows(
    config: Config,
    supervisor: Supervisor,
    repository: Repository,
    control: ModelControl,
    streams: EventStreams,
    *,
    draining: Callable[[], bool],
) -> list[Row]:
    """Makes the dialects and returns all their rows. `streams` gets their event streams; `draining` returns True once the
    server drains. ConfigError for a default model, an endpoint's model or credentials that do not exist."""
    signatures = Signatures(config.sagemaker.sigv4)
    models = ModelChoice(config, supervisor.workers, supervisor.served)
    models.check_defaults()
    endpoints = Endpoints(config, models, repository)
    endpoints.check()
    texts, tensors = TextCalls(models, streams), V2Calls(models, streams)
    management = ManagementDialect(models, supervisor, draining)
    openai, infer = OpenAIDialect(texts), InferDialect(tensors)
    lmi = LMIDialect(models, texts, openai)
    container = ContainerDialect(models, lmi, infer)
    calls, messages, v2_control = (
        Calls(config.limits.body),
        InferMessages(tensors),
        V2ControlDialect(tensors, control, repository),
    )
    dialects: list[_Dialect] = [
        IndexDialect(models),
        management,
        openai,
        container,
        lmi,
        SageMakerDialect(models, endpoints, container, signatures),
        EndpointChatDialect(texts, endpoints, openai, signatures),
        BidiDialect(models, endpoints, signatures),
        V2Dialect(tensors, management, name="everywire", version=version()),
        OpenAPIDialect(version()),
        v2_control,
        infer,
        GenerateDialect(tensors),
        StreamDialect(tensors),
        SessionDialect(tensors, config.bidi),
        ServerDialect(calls, tensors, management, name="everywire", version=version()),
        ModelInferDialect(calls, messages),
        ModelStreamDialect(calls, messages, config.v2.stream_requests),
        ControlDialect(calls, v2_control, control),
        HealthDialect(calls, management),
        ReflectionDialect(calls),
        *([MMEDialect(repository)] if config.sagemaker.multi_model else ()),
    ]
    return [row for dialect in dialects for row in dialect.rows()]
