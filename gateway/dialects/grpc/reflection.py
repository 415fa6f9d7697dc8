"""Server reflection: what grpcurl and its like ask before they can call anything."""

from __future__ import annotations

from functools import partial
from typing import final

from gateway.codecs.threads import codec
from gateway.codecs.turns import Stage
from gateway.core.exchange import Exchange
from gateway.core.route import Needs, Row
from gateway.dialects.grpc.calls import KIND, Calls, Incoming, end_stream, start_stream
from gateway.dialects.grpc.status import CallRefused, refuse
from protocols.floods import SMALL_CALL
from protocols.grpc.framing import frame
from protocols.grpc.heads import CallHead
from protocols.grpc.protobuf import ProtobufError
from protocols.grpc.reflection import PATHS, ServerReflection

_WEIGHT = 4 * 1024  # the size that a request counts among the steps of codecs


@final
class ReflectionDialect:
    """Answers ServerReflectionInfo, of v1 and of v1alpha, whose messages are the same."""

    def __init__(self, calls: Calls) -> None:
        self._calls, self._reflection = calls, ServerReflection()

    def rows(self) -> list[Row]:
        """The method by its two names."""
        return [
            Row("POST", path, self.info, dialect="grpc", refuse=refuse, kind=KIND, needs=Needs.METADATA) for path in PATHS
        ]

    async def info(self, exchange: Exchange, call: CallHead) -> None:
        """A response to each request, in order, until the client sends no more."""
        self._calls.begin(exchange, call)
        incoming, outbound = Incoming(exchange, call, SMALL_CALL, "of this method"), exchange.outbound
        while (message := await incoming.next()) is not None:
            try:
                answer = partial(self._reflection.answer, message)
                buffers = frame((await codec(_WEIGHT, answer, exchange.owner, Stage.READ),))
            except ProtobufError as e:
                raise CallRefused.of(e) from None
            incoming.taken()
            await outbound.wait_room(sum(map(len, buffers)))
            if not outbound.status:
                start_stream(exchange)
            outbound.push(*buffers)
        end_stream(exchange)
