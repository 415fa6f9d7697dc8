"""The route that a client meant whose path nothing answers: found segment by segment, at a cost that no client chooses."""

from __future__ import annotations

from collections.abc import Iterable

_LEAST = 0.65
"""How much of a path must be alike, from 0 to 1."""
_LONGEST = 128  # bytes of a path that is compared
_CAPTURED = 0.9  # likeness of a segment that matches any: a literal segment that is equal comes before it


def nearest(path: bytes, routes: Iterable[bytes]) -> bytes:
    """The route that is most like the path; empty if none is like it. A segment such as `{name}` is like any."""
    if len(path) > _LONGEST:
        return b""
    asked = path.rstrip(b"/").split(b"/")[1:]
    best, found = _LEAST, b""
    for route in routes:
        segments = route.split(b"/")[1:]
        if abs(len(segments) - len(asked)) > 1:
            continue
        alike = sum(map(_alike, asked, segments)) / max(len(asked), len(segments))
        if alike > best:
            best, found = alike, route
    return found


def _alike(asked: bytes, segment: bytes) -> float:
    """The share of two segments that is the same, from their begin and their end."""
    if asked == segment:
        return 1.0
    if segment.startswith(b"{"):
        return _CAPTURED if asked else 0.0
    short = min(len(asked), len(segment))
    same = 0
    while same < short and asked[same] == segment[same]:
        same += 1
    end = 0
    while end < short - same and asked[-1 - end] == segment[-1 - end]:
        end += 1
    return (same + end) / max(len(asked), len(segment))
