"""The part of a refused head that is read, for the page that sent it."""

from __future__ import annotations

from protocols.http1.refused import RefusedHead

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Large: %b\r\nOrigin: https://app.example\r\n"
    b"Access-Control-Request-Method:  PUT \r\nX-Origin: no\r\n\r\nOrigin: body\r\n" % (b"x" * 20_000)
)


def test_it_does_not_depend_on_how_the_head_comes() -> None:
    for size in (1, 2, 3, 7, 1000, len(HEAD)):
        refused = RefusedHead()
        for at in range(0, len(HEAD), size):
            refused.feed(HEAD[at : at + size])
        assert refused.headers == [(b"origin", b"https://app.example"), (b"access-control-request-method", b"PUT")]
        assert refused.over


def test_no_more_is_kept_than_a_line_and_sixteen_fields() -> None:
    refused = RefusedHead()
    for _ in range(100):
        refused.feed(b"\r\nOrigin: a")
        refused.feed(b"\r\nX: " + b"x" * 10_000)
    assert len(refused.headers) == 16
    assert not refused.over
    assert refused.size > 1_000_000
    assert len(refused._tail) <= 16 * 1024
