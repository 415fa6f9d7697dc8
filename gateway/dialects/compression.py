"""Replies with a content coding, where the client asks for one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from gateway.codec_threads import beside
from gateway.errors import Overloaded
from gateway.exchange import Exchange
from protocols.content_coding import STEP, choose_coding, deflate_steps
from protocols.events import Buffer, Headers

SMALLEST = 1024
"""Below so many bytes a reply leaves as it is: it fits a packet in any case."""
_SHORT = 64 * 1024  # bytes that are coded here, in a millisecond or two
_STREAM = b"text/event-stream"


async def compressed(
    exchange: Exchange, headers: Headers, buffers: Sequence[Buffer], level: int
) -> tuple[Headers, Sequence[Buffer]]:
    """The head and body of a whole reply as the request's Accept-Encoding wants them, coded at zlib's level (1 to 9): the
    head says `content-encoding` and `vary`, and its other fields stay, those that count bytes of the content too. They
    are what was given where the level is 0, no coding is wanted, the reply is an event stream or small, its coded form
    would save less than an eighth, or the byte budget has no room for it. Not for errors: they are for everyone to read.

    Called when nothing else of the answer is to come: it waits for room, and its memory is paid for until it is written.
    A long reply is coded in a thread, in steps of 1 MiB; a cancelled call ends with the step under way. The buffers must
    not change meanwhile.
    """
    size = sum(map(len, buffers))
    if size < SMALLEST or not level:
        return headers, buffers
    accepted = exchange.header_values(b"accept-encoding")
    coding = choose_coding(accepted) if accepted else None
    if coding is None or any(name == b"content-type" and value.startswith(_STREAM) for name, value in headers):
        return headers, buffers
    try:
        await exchange.wait_room(size)
    except Overloaded:
        return headers, buffers
    steps = deflate_steps(coding, buffers, level)
    coded: list[bytes] = []
    read = made = 0
    while (more := next(steps, None) if size <= _SHORT else await beside(partial(next, steps, None))) is not None:
        coded += more
        read, made = min(read + STEP, size), made + sum(map(len, more))
        if made > read - read // 8:
            return headers, buffers
    return [*headers, (b"content-encoding", coding.value), (b"vary", b"accept-encoding")], coded
