"""Runs long steps of codecs in a few threads, so that the event loop does not feel them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gateway.errors import GatewayError
from models.blocking import codec_threads, in_thread
from protocols.aws.bidi_head import BidiInputError
from protocols.aws.sigv4 import SigV4Error
from protocols.errors import RemoteProtocolError
from protocols.grpc.protobuf import ProtobufError
from protocols.grpc.status import GRPCError
from protocols.lmi.errors import LMIError
from protocols.openai.errors import OpenAIError
from protocols.strict_json import JSONError
from protocols.v2.tensors import V2Error

T = TypeVar("T")

_REFUSALS = (
    GatewayError, RemoteProtocolError, V2Error, JSONError, LMIError, OpenAIError, SigV4Error, BidiInputError, ProtobufError,
    GRPCError,
)  # fmt: skip


async def run_in_codec_thread(call: Callable[[], T]) -> T:
    """Runs a pure and bounded step in one of the threads for those: see `codec_threads`.

    An exception that it raises keeps none of the step's objects alive. A bug's traceback comes along as text, for the log.
    """
    return await in_thread(call, limiter=codec_threads(), expected=_REFUSALS)


LONG = 256 * 1024
"""Above this many bytes or numbers a codec takes longer than others should wait for their turn."""


async def codec(size: int, call: Callable[[], T]) -> T:
    """Runs a pure codec step over `size` bytes or elements: here if it is short, in a thread if the loop would feel it.

    A thread is waited for also when the exchange is cancelled: until it returns it holds the body, and so must the byte
    budget. The limits on JSON and bodies bound the step; the wire's ending does not wait for it.
    """
    if size <= LONG:
        return call()
    return await run_in_codec_thread(call)
