"""Finds the route that is most like an unknown path, segment by segment, at a bounded cost."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LEAST = 0.65
"""The share of a path that must be alike, from 0 to 1."""
_LONGEST = 128  # bytes of the longest path that is compared
_LACKING = 0.95  # likeness of a route whose beginning the path lacks
_CAPTURED = 0.9  # likeness of a segment such as `{name}`: below 1, so that an equal literal segment is preferred


def without_doubled_slashes(path: bytes) -> bytes:
    """Returns the path as its client meant it, who joined a base that ends with a slash and a path that begins with one."""
    return re.sub(rb"//+", b"/", path)


def nearest(path: bytes, routes: Iterable[bytes]) -> bytes:
    """Returns the route that is most like the path; empty if none is like it. A segment such as `{name}` is like any. A path
    that is the end of a route, and lacks its beginning, is most like that."""
    if len(path) > _LONGEST:
        return b""
    asked = path.rstrip(b"/").split(b"/")[1:]
    best, found = _LEAST, b""
    for route in routes:
        segments = route.split(b"/")[1:]
        if asked and segments[-len(asked) :] == asked and best < _LACKING:
            best, found = _LACKING, route
            continue
        if abs(len(segments) - len(asked)) > 1:
            continue
        alike = sum(map(_alike, asked, segments)) / max(len(asked), len(segments))
        if alike > best:
            best, found = alike, route
    return found


def _alike(asked: bytes, segment: bytes) -> float:
    """Returns the share of two segments that is the same, counted from their begin and their end."""
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
