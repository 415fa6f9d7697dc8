"""v2 for models that take pieces: binary inputs reach them while the request's body is still arriving."""

from __future__ import annotations

import math
from typing import final

import msgspec
import trio

from gateway.codecs.tensors import SHORT, request_of
from gateway.codecs.threads import run_in_codec_thread
from gateway.core.exchange import Exchange
from gateway.core.inbound import Inbound
from gateway.dialects.answers import reply_headers
from gateway.dialects.compression import compressed
from gateway.dialects.json_bodies import read_json
from gateway.dialects.v2.channels import UnaryCall
from gateway.dialects.v2.requests import V2Calls, error_of, schedule, slot_within
from gateway.errors import GatewayError, Overloaded, UnsupportedEncoding
from gateway.workers.worker import Worker
from models.messages import Family, InferRequest
from protocols import v2
from protocols.events import Frame
from protocols.v2.streamed_request import PieceReader, V2Piece


async def infer_in_pieces(calls: V2Calls, exchange: Exchange, worker: Worker, header_length: int) -> None:
    """Answers an inference request with binary inputs for a model that takes its inputs in pieces."""
    try:
        pieces = await Pieces.begin(calls, exchange, worker, header_length)
        within = schedule(exchange, pieces.request.parameters)
    except v2.V2Error as e:
        raise error_of(e) from None
    with await slot_within(exchange, worker, within):
        call = UnaryCall(exchange, worker, pieces.request, pieces.next_piece)
        await worker.call(call, exchange, Family.TENSOR)
        if call.response is None:
            raise call.failure()
        try:
            reply = await calls.write(exchange, worker, call.response, pieces.request)
        except v2.V2Error as e:
            raise error_of(e) from None
    head = [*reply.form, *reply_headers(exchange)]
    headers, buffers = await compressed(exchange, head, reply.buffers, calls.models.config.v2.compression)
    exchange.outbound.respond(200, headers, *buffers)


@final
class Pieces:
    """A request whose body is read as its model receives: the client's window keeps back bytes that the model has not
    asked for."""

    __slots__ = ("_exchange", "_inbound", "_reader", "_receiving", "request")

    def __init__(self, exchange: Exchange, reader: PieceReader, request: v2.V2Request) -> None:
        self._exchange, self._reader, self.request = exchange, reader, request
        self._inbound = exchange.open_inbound()
        self._receiving = False

    @classmethod
    async def begin(cls, calls: V2Calls, exchange: Exchange, worker: Worker, header_length: int) -> Pieces:
        """Reads the request's JSON. V2Error if it is invalid; UnsupportedEncoding for a body with a content coding, whose
        bytes are not those of the tensors."""
        encoding = b", ".join(exchange.header_values(b"content-encoding"))
        if any(coding.strip(b" \t").lower() not in (b"", b"identity") for coding in encoding.split(b",")):
            raise UnsupportedEncoding(
                f"content-encoding {encoding[:40].decode('latin-1')!r} is not accepted by a model that takes its inputs in "
                "pieces: send the body as it is",
                accepted=b"identity",
            )
        length = exchange.request.content_length
        reader = PieceReader(
            header_length, length, calls.codec_of(worker).signature, calls.bounds_of(worker), largest=calls.body
        )
        # Only the JSON must arrive in time: with the tensors, the client may be as slow as the model's timeout allows.
        exchange.limit_silence(calls.models.config.limits.body_silence, "limits.body_silence")
        inbound = exchange.open_inbound()
        while not isinstance(text := reader.head_text(), memoryview):
            await _read(inbound, reader)
        request = await read_json(exchange, text, calls.models.config.limits, reader.head)
        assert isinstance(request, v2.V2Request)
        del text
        exchange.limit_silence(math.inf, "")
        exchange.parts_in = 0
        pieces = cls(exchange, reader, request)
        inbound.under_way = pieces._under_way
        return pieces

    def _under_way(self) -> tuple[object, int] | None:
        """For a large row that has begun: how many pieces came before it, and how many of its bytes are here."""
        return (self._exchange.parts_in, self._reader.here) if self._reader.need else None

    async def next_piece(self) -> InferRequest:
        """Returns the next piece, until the last. trio.BusyResourceError if another task waits for it."""
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving from this session")
        self._receiving = True
        reader = self._reader
        try:
            self._inbound.assembled()  # the piece before
            await self._exchange.turn.checkpoint()
            while True:
                piece = reader.next_piece() if reader.work <= SHORT else await run_in_codec_thread(reader.next_piece)
                if isinstance(piece, V2Piece):
                    return self._message(piece)
                await _read(self._inbound, reader)
        except v2.V2Error as e:
            raise self._broken(error_of(e)) from None
        except Overloaded as e:
            raise self._broken(e) from None
        finally:
            self._receiving = False

    def _message(self, piece: V2Piece) -> InferRequest:
        self._exchange.parts_in += 1
        request = request_of(msgspec.structs.replace(self.request, inputs=piece.inputs))
        inputs = [
            msgspec.structs.replace(tensor, whole=whole) if whole else tensor
            for tensor, whole in zip(request.inputs, piece.whole, strict=True)
        ]
        return msgspec.structs.replace(request, inputs=tuple(inputs), last=piece.last)

    def _broken(self, error: GatewayError) -> GatewayError:
        """Interrupts the exchange and returns the error to raise: a model that catches it and goes on is cancelled."""
        self._exchange.interrupt(error)
        return error


async def _read(inbound: Inbound, reader: PieceReader) -> None:
    need = reader.need
    if need:
        inbound.gathering(reader.here, need)
    data = await inbound.receive()
    if data is None:
        reader.receive_eof()
    else:
        assert not isinstance(data, Frame)
        if need:
            inbound.gathering(min(reader.here + len(data), need), need)
        reader.receive_data(data)
