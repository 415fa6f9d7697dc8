"""The Open Inference Protocol (v2, also KServe's and Triton's) over HTTP: all public names for servers and clients."""

from __future__ import annotations

from protocols.v2.body import ANSWER_LIMITS, IHCL, V2Limits, parse_header_length
from protocols.v2.codec import InferCodec
from protocols.v2.frames import (
    FRAMES,
    FrameDecoder,
    V2Frame,
    decode_streamed_reply,
    encode_frame,
    encode_infer_frame,
    failure_body,
    id_of,
    prefers_frames,
    split_frame,
)
from protocols.v2.metadata import (
    EXTENSIONS,
    ModelSignature,
    TensorSpec,
    live_body,
    model_config,
    model_metadata,
    model_ready,
    ready_body,
    server_metadata,
)
from protocols.v2.request import V2Request, WantedOutput, encode_infer_request
from protocols.v2.response import V2Answer, V2Reply, check_outputs, decode_infer_reply, render_infer
from protocols.v2.schema import DynamicBatching
from protocols.v2.tensors import NO_PARAMETERS, BytesData, Parameters, V2Error, V2Tensor
from protocols.v2.typed_request import parse_infer

__all__ = [
    "ANSWER_LIMITS",
    "EXTENSIONS",
    "FRAMES",
    "IHCL",
    "NO_PARAMETERS",
    "BytesData",
    "DynamicBatching",
    "FrameDecoder",
    "InferCodec",
    "ModelSignature",
    "Parameters",
    "TensorSpec",
    "V2Answer",
    "V2Error",
    "V2Frame",
    "V2Limits",
    "V2Reply",
    "V2Request",
    "V2Tensor",
    "WantedOutput",
    "check_outputs",
    "decode_infer_reply",
    "decode_streamed_reply",
    "encode_frame",
    "encode_infer_frame",
    "encode_infer_request",
    "failure_body",
    "id_of",
    "live_body",
    "model_config",
    "model_metadata",
    "model_ready",
    "parse_header_length",
    "parse_infer",
    "prefers_frames",
    "ready_body",
    "render_infer",
    "server_metadata",
    "split_frame",
]
