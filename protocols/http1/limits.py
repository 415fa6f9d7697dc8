"""What one HTTP/1.1 connection may cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HTTP1Limits:
    """In bytes, and in fields where it says so. Each is the largest value admitted."""

    request_line: int = 8192
    """Without its CRLF; beyond it 414. A status line has no bound of its own."""
    head: int = 32768
    """From the first byte through the empty line; beyond it 431."""
    fields: int = 100
    """Fields of a head; beyond it 431."""
    chunk_line: int = 256
    """Size and extensions of one chunk, without the CRLF."""
    chunk_extensions: int = 16384
    """Of all chunks of one body."""
    trailers: int = 4096
    """The trailer section, each line with its CRLF."""
    trailer_fields: int = 20
    send_buffer: int = 65536
    """What `room` starts from."""
