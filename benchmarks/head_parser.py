"""Which library reads our HTTP/1.1 heads: CPU microseconds for three heads as clients send them.

    python -m benchmarks micro head-parser

Measures our own `read_request`, which is httptools behind and before the checks of RFC 9112 that it leaves open,
httptools alone, and h11 where it is installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import httptools

from benchmarks.units import Case, repeated
from protocols.http1.head import read_request

HEADS = {
    "v2 client": (b"POST /v2/models/identity/infer HTTP/1.1", b"Host: 127.0.0.1:8080", b"Content-Length: 1024"),
    "curl": (
        b"POST /invocations HTTP/1.1", b"Host: 127.0.0.1:8080", b"User-Agent: curl/8.5.0", b"Accept: */*",
        b"Content-Type: application/json", b"Content-Length: 123",
    ),
    "browser": (
        b"GET /v1/chat/completions?stream=1 HTTP/1.1", b"Host: example.com", b"Connection: keep-alive",
        b'sec-ch-ua: "Chromium";v="124", "Google Chrome";v="124"', b"sec-ch-ua-mobile: ?0",
        b"User-Agent: Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/124.0 Safari/537.36",
        b"Accept: text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8",
        b"Sec-Fetch-Site: none", b"Sec-Fetch-Mode: navigate", b"Sec-Fetch-User: ?1", b"Sec-Fetch-Dest: document",
        b"Accept-Encoding: gzip, deflate, br, zstd", b"Accept-Language: en-US,en;q=0.9",
        b"Cookie: a=b; c=d; session=0123456789abcdef0123456789abcdef", b"X-Request-Id: 8f14e45f-ceea-467f-9c1b-2f5d6b7a8c9d",
    ),
}  # fmt: skip


class Collected:
    """A request line and fields, as an application wants them: names in lower case."""

    def __init__(self) -> None:
        self.target = b""
        self.fields: list[tuple[bytes, bytes]] = []

    def on_url(self, target: bytes) -> None:
        self.target = target

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.lower(), value))


def with_httptools(head: bytes) -> object:
    collected = Collected()
    parser = httptools.HttpRequestParser(collected)
    parser.feed_data(head)
    return parser.get_method(), collected


def parsers() -> dict[str, Callable[[bytes], object]]:
    found: dict[str, Callable[[bytes], object]] = {
        "read_request": lambda head: read_request(head, max_fields=100, scheme=b"http"),
        "httptools": with_httptools,
    }
    if importlib.util.find_spec("h11"):
        h11 = importlib.import_module("h11")

        def with_h11(head: bytes) -> object:
            connection = h11.Connection(h11.SERVER)
            connection.receive_data(head)
            return connection.next_event()

        found["h11"] = with_h11
    return found


def cases() -> Iterator[Case]:
    """Three request heads as clients send them: our reader, httptools alone, and h11."""
    for name, lines in HEADS.items():
        head = b"\r\n".join((*lines, b"", b""))
        costs = {parser: repeated(lambda parse=parse, head=head: parse(head)) for parser, parse in parsers().items()}  # type: ignore[misc]
        yield Case(name=f"{name}: {len(lines) - 1} fields, {len(head)} bytes", costs=costs)
