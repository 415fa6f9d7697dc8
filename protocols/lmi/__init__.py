"""The LMI text-generation schema: requests, and answers as json, jsonlines or SSE: all public names."""

from protocols.lmi.dynamic_batch import (
    DynamicEncoder,
    DynamicRequest,
    dynamic_error_body,
    parse_dynamic,
    parse_dynamic_document,
)
from protocols.lmi.errors import ErrorType, LMIError, Stage, error_body, generation_error_body, tgi_error_body
from protocols.lmi.parameters import Parameters, SamplingRule, Table, check_one_sequence, read_parameters
from protocols.lmi.request import (
    MEMBERS,
    Formatter,
    TextRequest,
    is_chat,
    is_text,
    parse_document,
    parse_request,
    read_document,
)
from protocols.lmi.response import TextEncoder, parse_stream_line, response_headers
from protocols.lmi.triton import read_triton_parameters

__all__ = [
    "MEMBERS",
    "DynamicEncoder",
    "DynamicRequest",
    "ErrorType",
    "Formatter",
    "LMIError",
    "Parameters",
    "SamplingRule",
    "Stage",
    "Table",
    "TextEncoder",
    "TextRequest",
    "check_one_sequence",
    "dynamic_error_body",
    "error_body",
    "generation_error_body",
    "is_chat",
    "is_text",
    "parse_document",
    "parse_dynamic",
    "parse_dynamic_document",
    "parse_request",
    "parse_stream_line",
    "read_document",
    "read_parameters",
    "read_triton_parameters",
    "response_headers",
    "tgi_error_body",
]
