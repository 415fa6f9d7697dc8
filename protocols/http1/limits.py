"""The limits of one HTTP/1.1 connection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HTTP1Limits:
    """The largest values that are accepted, in bytes unless a field says otherwise."""

    request_line: int = 8192
    """Without its CRLF; a longer one gets 414. A status line has no limit of its own."""
    head: int = 32768
    """From the first byte through the empty line; a larger head gets 431."""
    fields: int = 100
    """The number of fields of a head; more get 431."""
    chunk_line: int = 256
    """Size and extensions of one chunk, without the CRLF."""
    chunk_extensions: int = 16384
    """The extensions of all chunks of one body together."""
    trailers: int = 4096
    """The trailer section, each line with its CRLF."""
    trailer_fields: int = 20
    send_buffer: int = 65536
    """The size of the send queue that `room` counts down from."""
