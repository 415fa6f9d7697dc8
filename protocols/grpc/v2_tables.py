"""The messages of Triton's GRPCInferenceService, and those of grpc.health.v1, as tables.

The numbers are those of triton-inference-server/common, `protobuf/grpc_service.proto` and `model_config.proto`, and of
grpc/grpc-proto, `grpc/health/v1/health.proto`. The model configuration has only the fields that clients read; they skip the
rest. Both roles read and write all messages by these tables, except those of inference: `v2_messages` has a separate codec
for them, and their tables serve descriptors alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from protocols.grpc.protobuf import EnumType, FieldType, MessageType

_NAME = FieldType("name", "string")
_VERSION = FieldType("version", "string")


def _empty(name: str) -> MessageType:
    return MessageType(name, {})


def _named(name: str) -> MessageType:
    """A request about one thing or, with an empty name, about all."""
    return MessageType(name, {1: _NAME})


def _versioned(name: str) -> MessageType:
    return MessageType(name, {1: _NAME, 2: _VERSION})


# Health and metadata

SERVER_LIVE = _empty("ServerLiveRequest"), MessageType("ServerLiveResponse", {1: FieldType("live", "bool")})
SERVER_READY = _empty("ServerReadyRequest"), MessageType("ServerReadyResponse", {1: FieldType("ready", "bool")})
MODEL_READY = _versioned("ModelReadyRequest"), MessageType("ModelReadyResponse", {1: FieldType("ready", "bool")})
SERVER_METADATA = (
    _empty("ServerMetadataRequest"),
    MessageType("ServerMetadataResponse", {1: _NAME, 2: _VERSION, 3: FieldType("extensions", "string", repeated=True)}),
)

_TENSOR_METADATA = MessageType(
    "ModelMetadataResponse.TensorMetadata",
    {1: _NAME, 2: FieldType("datatype", "string"), 3: FieldType("shape", "int64", repeated=True)},
)
MODEL_METADATA = (
    _versioned("ModelMetadataRequest"),
    MessageType(
        "ModelMetadataResponse",
        {
            1: _NAME,
            2: FieldType("versions", "string", repeated=True),
            3: FieldType("platform", "string"),
            4: FieldType("inputs", _TENSOR_METADATA, repeated=True),
            5: FieldType("outputs", _TENSOR_METADATA, repeated=True),
        },
    ),
)

# Inference

_INFER_PARAMETER = MessageType(
    "InferParameter",
    {
        1: FieldType("bool_param", "bool", oneof="parameter_choice"),
        2: FieldType("int64_param", "int64", oneof="parameter_choice"),
        3: FieldType("string_param", "string", oneof="parameter_choice"),
        4: FieldType("double_param", "double", oneof="parameter_choice"),
        5: FieldType("uint64_param", "uint64", oneof="parameter_choice"),
    },
)
_PARAMETERS = FieldType("parameters", _INFER_PARAMETER, key="string")
_CONTENTS = MessageType(
    "InferTensorContents",
    {
        1: FieldType("bool_contents", "bool", repeated=True),
        2: FieldType("int_contents", "int32", repeated=True),
        3: FieldType("int64_contents", "int64", repeated=True),
        4: FieldType("uint_contents", "uint32", repeated=True),
        5: FieldType("uint64_contents", "uint64", repeated=True),
        6: FieldType("fp32_contents", "float", repeated=True),
        7: FieldType("fp64_contents", "double", repeated=True),
        8: FieldType("bytes_contents", "bytes", repeated=True),
    },
)


def _tensor(name: str) -> MessageType:
    return MessageType(
        name,
        {
            1: _NAME,
            2: FieldType("datatype", "string"),
            3: FieldType("shape", "int64", repeated=True),
            4: _PARAMETERS,
            5: FieldType("contents", _CONTENTS),
        },
    )


_REQUESTED_OUTPUT = MessageType("ModelInferRequest.InferRequestedOutputTensor", {1: _NAME, 2: _PARAMETERS})
_INFER_HEAD = {
    1: FieldType("model_name", "string"),
    2: FieldType("model_version", "string"),
    3: FieldType("id", "string"),
    4: _PARAMETERS,
}
MODEL_INFER = (
    MessageType(
        "ModelInferRequest",
        {
            **_INFER_HEAD,
            5: FieldType("inputs", _tensor("ModelInferRequest.InferInputTensor"), repeated=True),
            6: FieldType("outputs", _REQUESTED_OUTPUT, repeated=True),
            7: FieldType("raw_input_contents", "bytes", repeated=True),
        },
    ),
    MessageType(
        "ModelInferResponse",
        {
            **_INFER_HEAD,
            5: FieldType("outputs", _tensor("ModelInferResponse.InferOutputTensor"), repeated=True),
            6: FieldType("raw_output_contents", "bytes", repeated=True),
        },
    ),
)
MODEL_STREAM_INFER = (
    MODEL_INFER[0],
    MessageType(
        "ModelStreamInferResponse",
        {1: FieldType("error_message", "string"), 2: FieldType("infer_response", MODEL_INFER[1])},
    ),
)

# Configuration

DATA_TYPES: Mapping[str, int] = MappingProxyType({
    "TYPE_INVALID": 0, "TYPE_BOOL": 1, "TYPE_UINT8": 2, "TYPE_UINT16": 3, "TYPE_UINT32": 4, "TYPE_UINT64": 5, "TYPE_INT8": 6,
    "TYPE_INT16": 7, "TYPE_INT32": 8, "TYPE_INT64": 9, "TYPE_FP16": 10, "TYPE_FP32": 11, "TYPE_FP64": 12, "TYPE_STRING": 13,
    "TYPE_BF16": 14,
})  # fmt: skip
"""The numbers of `data_type`, by the words of the configuration in JSON."""
_DATA_TYPE = FieldType("data_type", "enum", enum=EnumType("DataType", DATA_TYPES))

_MODEL_INPUT = MessageType(
    "ModelInput",
    {1: _NAME, 2: _DATA_TYPE, 4: FieldType("dims", "int64", repeated=True), 8: FieldType("optional", "bool")},
)
# Its `dims` has another field number than that of an input.
_MODEL_OUTPUT = MessageType("ModelOutput", {1: _NAME, 2: _DATA_TYPE, 3: FieldType("dims", "int64", repeated=True)})
_DYNAMIC_BATCHING = MessageType(
    "ModelDynamicBatching",
    {
        1: FieldType("preferred_batch_size", "int32", repeated=True),
        2: FieldType("max_queue_delay_microseconds", "uint64"),
        3: FieldType("preserve_ordering", "bool"),
        4: FieldType("priority_levels", "uint64"),
        5: FieldType("default_priority_level", "uint64"),
    },
)
_TRANSACTION_POLICY = MessageType("ModelTransactionPolicy", {1: FieldType("decoupled", "bool")})
MODEL_CONFIGURATION = MessageType(
    "ModelConfig",
    {
        1: _NAME,
        2: FieldType("platform", "string"),
        4: FieldType("max_batch_size", "int32"),
        5: FieldType("input", _MODEL_INPUT, repeated=True),
        6: FieldType("output", _MODEL_OUTPUT, repeated=True),
        11: FieldType("dynamic_batching", _DYNAMIC_BATCHING, oneof="scheduling_choice"),
        13: FieldType("sequence_batching", MessageType("ModelSequenceBatching", {}), oneof="scheduling_choice"),
        15: FieldType("ensemble_scheduling", MessageType("ModelEnsembling", {}), oneof="scheduling_choice"),
        17: FieldType("backend", "string"),
        19: FieldType("model_transaction_policy", _TRANSACTION_POLICY),
    },
)
MODEL_CONFIG = (
    _versioned("ModelConfigRequest"),
    MessageType("ModelConfigResponse", {1: FieldType("config", MODEL_CONFIGURATION)}),
)

# Statistics

_DURATION = MessageType("StatisticDuration", {1: FieldType("count", "uint64"), 2: FieldType("ns", "uint64")})


def _durations(name: str, *names: str, first: int = 1) -> MessageType:
    return MessageType(name, {number: FieldType(field, _DURATION) for number, field in enumerate(names, first)})


_INFER_STATISTICS = _durations(
    "InferStatistics",
    "success",
    "fail",
    "queue",
    "compute_input",
    "compute_infer",
    "compute_output",
    "cache_hit",
    "cache_miss",
)
_RESPONSE_STATISTICS = _durations(
    "InferResponseStatistics", "compute_infer", "compute_output", "success", "fail", "empty_response", "cancel"
)
_BATCH_STATISTICS = MessageType(
    "InferBatchStatistics",
    {
        1: FieldType("batch_size", "uint64"),
        2: FieldType("compute_input", _DURATION),
        3: FieldType("compute_infer", _DURATION),
        4: FieldType("compute_output", _DURATION),
    },
)
_MEMORY_USAGE = MessageType(
    "MemoryUsage", {1: FieldType("type", "string"), 2: FieldType("id", "int64"), 3: FieldType("byte_size", "uint64")}
)
_MODEL_STATISTICS = MessageType(
    "ModelStatistics",
    {
        1: _NAME,
        2: _VERSION,
        3: FieldType("last_inference", "uint64"),
        4: FieldType("inference_count", "uint64"),
        5: FieldType("execution_count", "uint64"),
        6: FieldType("inference_stats", _INFER_STATISTICS),
        7: FieldType("batch_stats", _BATCH_STATISTICS, repeated=True),
        8: FieldType("memory_usage", _MEMORY_USAGE, repeated=True),
        9: FieldType("response_stats", _RESPONSE_STATISTICS, key="string"),
    },
)
MODEL_STATISTICS = (
    _versioned("ModelStatisticsRequest"),
    MessageType("ModelStatisticsResponse", {1: FieldType("model_stats", _MODEL_STATISTICS, repeated=True)}),
)

# Repository

_REPOSITORY_PARAMETER = MessageType(
    "ModelRepositoryParameter",
    {
        1: FieldType("bool_param", "bool", oneof="parameter_choice"),
        2: FieldType("int64_param", "int64", oneof="parameter_choice"),
        3: FieldType("string_param", "string", oneof="parameter_choice"),
        4: FieldType("bytes_param", "bytes", oneof="parameter_choice"),
    },
)
_MODEL_INDEX = MessageType(
    "RepositoryIndexResponse.ModelIndex",
    {1: _NAME, 2: _VERSION, 3: FieldType("state", "string"), 4: FieldType("reason", "string")},
)


def _change(name: str) -> MessageType:
    return MessageType(
        name,
        {
            1: FieldType("repository_name", "string"),
            2: FieldType("model_name", "string"),
            3: FieldType("parameters", _REPOSITORY_PARAMETER, key="string"),
        },
    )


REPOSITORY_INDEX = (
    MessageType("RepositoryIndexRequest", {1: FieldType("repository_name", "string"), 2: FieldType("ready", "bool")}),
    MessageType("RepositoryIndexResponse", {1: FieldType("models", _MODEL_INDEX, repeated=True)}),
)
REPOSITORY_MODEL_LOAD = _change("RepositoryModelLoadRequest"), _empty("RepositoryModelLoadResponse")
REPOSITORY_MODEL_UNLOAD = _change("RepositoryModelUnloadRequest"), _empty("RepositoryModelUnloadResponse")

# Shared memory

_SYSTEM_REGION = MessageType(
    "SystemSharedMemoryStatusResponse.RegionStatus",
    {1: _NAME, 2: FieldType("key", "string"), 3: FieldType("offset", "uint64"), 4: FieldType("byte_size", "uint64")},
)
_CUDA_REGION = MessageType(
    "CudaSharedMemoryStatusResponse.RegionStatus",
    {1: _NAME, 2: FieldType("device_id", "uint64"), 3: FieldType("byte_size", "uint64")},
)
SYSTEM_SHARED_MEMORY_STATUS = (
    _named("SystemSharedMemoryStatusRequest"),
    MessageType("SystemSharedMemoryStatusResponse", {1: FieldType("regions", _SYSTEM_REGION, key="string")}),
)
SYSTEM_SHARED_MEMORY_REGISTER = (
    MessageType(
        "SystemSharedMemoryRegisterRequest",
        {1: _NAME, 2: FieldType("key", "string"), 3: FieldType("offset", "uint64"), 4: FieldType("byte_size", "uint64")},
    ),
    _empty("SystemSharedMemoryRegisterResponse"),
)
SYSTEM_SHARED_MEMORY_UNREGISTER = (
    _named("SystemSharedMemoryUnregisterRequest"),
    _empty("SystemSharedMemoryUnregisterResponse"),
)
CUDA_SHARED_MEMORY_STATUS = (
    _named("CudaSharedMemoryStatusRequest"),
    MessageType("CudaSharedMemoryStatusResponse", {1: FieldType("regions", _CUDA_REGION, key="string")}),
)
CUDA_SHARED_MEMORY_REGISTER = (
    MessageType(
        "CudaSharedMemoryRegisterRequest",
        {
            1: _NAME,
            2: FieldType("raw_handle", "bytes"),
            3: FieldType("device_id", "int64"),
            4: FieldType("byte_size", "uint64"),
        },
    ),
    _empty("CudaSharedMemoryRegisterResponse"),
)
CUDA_SHARED_MEMORY_UNREGISTER = (
    _named("CudaSharedMemoryUnregisterRequest"),
    _empty("CudaSharedMemoryUnregisterResponse"),
)

# Trace and log


def _trace_settings(of: str) -> FieldType:
    value = MessageType(f"{of}.SettingValue", {1: FieldType("value", "string", repeated=True)})
    return FieldType("settings", value, key="string")


def _log_settings(name: str) -> MessageType:
    value = MessageType(
        f"{name}.SettingValue",
        {
            1: FieldType("bool_param", "bool", oneof="parameter_choice"),
            2: FieldType("uint32_param", "uint32", oneof="parameter_choice"),
            3: FieldType("string_param", "string", oneof="parameter_choice"),
        },
    )
    return MessageType(name, {1: FieldType("settings", value, key="string")})


TRACE_SETTING = (
    MessageType("TraceSettingRequest", {1: _trace_settings("TraceSettingRequest"), 2: FieldType("model_name", "string")}),
    MessageType("TraceSettingResponse", {1: _trace_settings("TraceSettingResponse")}),
)
LOG_SETTINGS = _log_settings("LogSettingsRequest"), _log_settings("LogSettingsResponse")

# grpc.health.v1

SERVING_STATUS: Mapping[str, int] = MappingProxyType({
    "UNKNOWN": 0, "SERVING": 1, "NOT_SERVING": 2, "SERVICE_UNKNOWN": 3,
})  # fmt: skip
"""The numbers of `status` in a HealthCheckResponse. SERVICE_UNKNOWN is for Watch alone."""
HEALTH_CHECK = (
    MessageType("HealthCheckRequest", {1: FieldType("service", "string")}),
    MessageType(
        "HealthCheckResponse",
        {1: FieldType("status", "enum", enum=EnumType("HealthCheckResponse.ServingStatus", SERVING_STATUS))},
    ),
)

METHODS: Mapping[str, tuple[MessageType, MessageType]] = MappingProxyType({
    "/inference.GRPCInferenceService/ServerLive": SERVER_LIVE,
    "/inference.GRPCInferenceService/ServerReady": SERVER_READY,
    "/inference.GRPCInferenceService/ModelReady": MODEL_READY,
    "/inference.GRPCInferenceService/ServerMetadata": SERVER_METADATA,
    "/inference.GRPCInferenceService/ModelMetadata": MODEL_METADATA,
    "/inference.GRPCInferenceService/ModelConfig": MODEL_CONFIG,
    "/inference.GRPCInferenceService/ModelStatistics": MODEL_STATISTICS,
    "/inference.GRPCInferenceService/RepositoryIndex": REPOSITORY_INDEX,
    "/inference.GRPCInferenceService/RepositoryModelLoad": REPOSITORY_MODEL_LOAD,
    "/inference.GRPCInferenceService/RepositoryModelUnload": REPOSITORY_MODEL_UNLOAD,
    "/inference.GRPCInferenceService/SystemSharedMemoryStatus": SYSTEM_SHARED_MEMORY_STATUS,
    "/inference.GRPCInferenceService/SystemSharedMemoryRegister": SYSTEM_SHARED_MEMORY_REGISTER,
    "/inference.GRPCInferenceService/SystemSharedMemoryUnregister": SYSTEM_SHARED_MEMORY_UNREGISTER,
    "/inference.GRPCInferenceService/CudaSharedMemoryStatus": CUDA_SHARED_MEMORY_STATUS,
    "/inference.GRPCInferenceService/CudaSharedMemoryRegister": CUDA_SHARED_MEMORY_REGISTER,
    "/inference.GRPCInferenceService/CudaSharedMemoryUnregister": CUDA_SHARED_MEMORY_UNREGISTER,
    "/inference.GRPCInferenceService/TraceSetting": TRACE_SETTING,
    "/inference.GRPCInferenceService/LogSettings": LOG_SETTINGS,
    "/grpc.health.v1.Health/Check": HEALTH_CHECK,
    "/grpc.health.v1.Health/Watch": HEALTH_CHECK,
})  # fmt: skip
"""The request and the response of each method by its path, except ModelInfer and ModelStreamInfer."""
