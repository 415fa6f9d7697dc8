"""Replies with a content coding, where the client asks for one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from gateway.codecs.threads import run_in_codec_thread
from gateway.core.exchange import Exchange
from gateway.errors import Overloaded
from protocols.content_coding import STEP, choose_coding, deflate_steps
from protocols.events import Buffer, Headers
from protocols.sse import MEDIA_TYPE

SMALLEST = 1024
"""Bytes of the smallest reply that is coded: a smaller one fits a packet in any case."""
_SHORT = 64 * 1024  # bytes that are coded here, in a millisecond; at a higher level the worst of them take 0.2 s
_STREAM = MEDIA_TYPE.encode()
_VARY = ((b"vary", b"accept-encoding"),)


def varying(headers: Headers) -> Headers:
    """The head of a reply that could have been coded, whether it was or not: caches must know (RFC 9110 section 12.5.5).
    A tuple of fields stays one."""
    return headers + _VARY if type(headers) is tuple else [*headers, *_VARY]


async def compressed(
    exchange: Exchange, headers: Headers, buffers: Sequence[Buffer], level: int
) -> tuple[Headers, Sequence[Buffer]]:
    """The head and body of a whole reply as the request's Accept-Encoding wants them, coded at zlib's level (1 to 9).

    A coded reply has `content-encoding` in its head; the other fields stay, also those that count bytes of the content.
    The body stays as it is if the client wants no coding, the reply is small, coding would save less than an eighth, or the
    byte budget has no room; the head then has `vary` alone. At level 0, and for an event stream, both stay as they are. Not
    for errors: every client must be able to read them.

    Called when nothing else of the answer is to come: it waits for room, and its memory is paid for until it is written.
    A long reply, and one above level 1, is coded in a thread, in steps of 1 MiB; a cancelled call ends with the step under
    way. The buffers must not change meanwhile.
    """
    if not level or any(name == b"content-type" and value.startswith(_STREAM) for name, value in headers):
        return headers, buffers
    headers, size = varying(headers), sum(map(len, buffers))
    if size < SMALLEST:
        return headers, buffers
    accepted = exchange.header_values(b"accept-encoding")
    coding = choose_coding(accepted) if accepted else None
    if coding is None:
        return headers, buffers
    try:
        await exchange.outbound.wait_room(size)
    except Overloaded:
        return headers, buffers
    steps, here = deflate_steps(coding, buffers, level), size <= _SHORT and level == 1
    coded: list[bytes] = []
    read = made = 0
    while (more := next(steps, None) if here else await run_in_codec_thread(partial(next, steps, None))) is not None:
        coded += more
        read, made = min(read + STEP, size), made + sum(map(len, more))
        if made > read - read // 8:
            return headers, buffers
    return [*headers, (b"content-encoding", coding.value)], coded
