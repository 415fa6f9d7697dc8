"""v2's infer_stream: sends each response of a model at once, as a server-sent event or as a binary frame."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter_ns
from typing import final

from gateway.core.exchange import Exchange
from gateway.core.route import Row
from gateway.core.whole_body import receive_body
from gateway.dialects.call import session_of
from gateway.dialects.v2.channels import EVENTS, FRAMES, StreamChannel, StreamForm, replied
from gateway.dialects.v2.operations import rows_of
from gateway.dialects.v2.requests import V2Calls, error_of, schedule, slot_within
from gateway.dialects.v2.streamed_request import Pieces
from gateway.errors import BadRequest
from gateway.workers.worker import Worker
from models.messages import Family, InferResponse
from protocols import v2
from protocols.events import Buffer


@final
class StreamDialect:
    """Answers inference requests with any number of responses."""

    def __init__(self, calls: V2Calls) -> None:
        self._calls = calls

    def rows(self) -> list[Row]:
        """Its one route."""
        return rows_of({"infer_stream": self.infer_stream})

    async def infer_stream(self, exchange: Exchange, name: str, version: str = "") -> None:
        """POST /v2/models/{name}[/versions/{version}]/infer_stream. An error before the first response is an HTTP error; a
        later one is the last event or frame. A model may give no response at all."""
        calls = self._calls
        worker = calls.worker(exchange, name, version, infers=True)
        header_length = calls.header_length(exchange)
        whole, arriving, arrived = None, None, 0
        try:
            if worker.spec.pieces and header_length:
                pieces = await Pieces.begin(calls, exchange, worker, header_length)
                request, arriving = pieces.request, pieces.next_piece
            else:
                body = await receive_body(exchange, calls.body, setting="limits.body", memory=worker.body_memory)
                arrived = perf_counter_ns()
                request = whole = await calls.read(exchange, worker, body, header_length)
            frames = v2.prefers_frames(exchange.header_values(b"accept"))
            if not frames and (request.binary_default or any(output.binary for output in request.outputs)):
                raise BadRequest(
                    "server-sent events carry no binary data: ask for outputs as JSON, or for frames with "
                    f"accept: {v2.FRAMES}"
                )
            within = schedule(exchange, request.parameters)
        except v2.V2Error as e:
            raise error_of(e) from None
        form = FRAMES if frames else EVENTS
        encode = partial(self._replied, exchange, worker, request, form)
        channel = StreamChannel(exchange, worker, request, form, encode, arriving)
        with await slot_within(exchange, worker, within, whole, arrived):
            await channel.call(session_of(exchange, worker, channel, parameters=request.parameters), Family.TENSOR)
        channel.finish()

    async def _replied(
        self, exchange: Exchange, worker: Worker, request: v2.V2Request, form: StreamForm, response: InferResponse
    ) -> Sequence[Buffer]:
        text, *data = await replied(self._calls, exchange, worker, request, response)
        return form.wrap(text, data)
