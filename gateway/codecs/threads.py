"""Runs long steps of codecs in a few threads, so that they do not block the event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gateway.codecs.turns import Stage, codec_turns
from gateway.errors import GatewayError
from models.blocking import codec_threads, in_thread
from protocols.aws.bidi_head import BidiInputError
from protocols.aws.sigv4 import SigV4Error
from protocols.errors import RemoteProtocolError
from protocols.grpc.protobuf import ProtobufError
from protocols.grpc.status import GRPCError
from protocols.json.strict import JSONError
from protocols.lmi.errors import LMIError
from protocols.openai.errors import OpenAIError
from protocols.v2.tensors import V2Error

T = TypeVar("T")

_REFUSALS = (
    GatewayError, RemoteProtocolError, V2Error, JSONError, LMIError, OpenAIError, SigV4Error, BidiInputError, ProtobufError,
    GRPCError,
)  # fmt: skip


async def run_in_codec_thread(call: Callable[[], T]) -> T:
    """Runs a pure and bounded step in one of the codec threads (`codec_threads`).

    An exception of the step keeps none of its objects alive. A bug's traceback comes with it as text, for the log.
    """
    return await in_thread(call, limiter=codec_threads(), expected=_REFUSALS)


LONG = 64 * 1024
"""Bytes or elements of the longest codec step that runs on the loop: a longer one would keep other tasks waiting."""
FREE = 2 * 1024
"""Bytes or elements of the longest codec step that needs no turn."""


async def codec(size: int, call: Callable[[], T], owner: object = None, stage: Stage = Stage.USE) -> T:
    """Runs a pure codec step over `size` bytes or elements: here up to `LONG`, otherwise in a thread. Beyond `FREE` the
    steps of all exchanges have turns, round robin by `owner`, the exchange's connection.

    A cancelled exchange still waits for the thread: until it returns it holds the body, and the byte budget must count that.
    The limits on JSON and bodies bound the step; the wire's ending does not wait for it.
    """
    if size <= FREE:
        return call()
    if size <= LONG:
        return await codec_turns().step(size, call, owner, stage)
    return await run_in_codec_thread(call)


async def long_codec(call: Callable[[], T], owner: object, stage: Stage = Stage.USE) -> T:
    """Runs a pure codec step in a thread while no other such step runs. The turn for that goes round robin by `owner`."""
    async with codec_turns().in_thread(owner, stage):
        return await run_in_codec_thread(call)
