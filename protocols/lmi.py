"""The LMI text-generation schema: requests in, answers out as json, jsonlines or SSE. Its public names, together."""

from protocols.lmi_errors import LMIError, Stage, error_body, generation_error_body
from protocols.lmi_request import Formatter, Parameters, TextRequest, parse_request
from protocols.lmi_response import TextEncoder, parse_stream_line, response_headers

__all__ = [
    "Formatter",
    "LMIError",
    "Parameters",
    "Stage",
    "TextEncoder",
    "TextRequest",
    "error_body",
    "generation_error_body",
    "parse_request",
    "parse_stream_line",
    "response_headers",
]
