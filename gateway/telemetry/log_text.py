"""Writes the log events that people read most for a terminal: the access line, and the progress and report of a drain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gateway.addresses import split_port
from gateway.untrusted_text import escape

COLUMNS = 160
"""The most characters of an access line."""
CUT_LINES = 20
"""The most streams that a drain's report lists; the others are counted."""

_QUIET = ("complete", "cancelled-by-client", "refused")
"""Endings that need no attention. Any other is written in capitals."""
_GREEN, _YELLOW, _RED, _PLAIN = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[0m"
_LEAST_MS, _LEAST_SHARE = 1.0, 0.01  # shorter parts of an exchange's time are left out
_UNITS = ("KiB", "MiB", "GiB", "TiB")
_MOST_OWN = 36  # characters of the client's own id: those of a UUID
_MOST_RIGHT = 80  # the most characters behind the path


def access_line(time: str, fields: Mapping[str, Any], *, colour: bool, most: int = COLUMNS) -> str:
    """Writes the line of one exchange, from the fields of its record. It has at most `most` characters: parts of the time
    make way for the path, the shortest first, and a longer path is cut. KeyError or TypeError if these are not the fields of
    an exchange."""
    status, ending = fields["status"], fields["ending"]
    loud = ending not in _QUIET
    head = f"{status} {ending.upper() if loud else ending}"
    parts = _parts(fields)
    before = [fields["model"], _times(fields["ms"], parts), _amounts(fields)]
    first = fields["ms_first"]
    if first is not None and fields["items_out"] > 1 and first < (1 - _LEAST_SHARE) * fields["ms"]:
        before.insert(2, f"first {_seconds(first)}")
    if incident := fields.get("incident"):
        before.append(f"incident {incident}")
    if grpc_status := fields.get("grpc_status"):
        before.append(f"grpc-status {grpc_status}")
    if own := fields.get("client_request_id"):
        before.append(f"client's id {_cut(own, _MOST_OWN)}")
    # for a WebSocket, wire and dialect may have the same name
    after = [" ".join(dict.fromkeys(filter(None, (fields["dialect"], fields["wire"])))), split_port(fields["peer"])[0]]
    after += [f"{name} {fields[name]}" for name in ("key", "front", "instance") if name in fields]
    after.append(fields["id"])
    request = f"{escape(fields['method'])} {escape(fields['path'])}"
    # the id is never cut: the client and other lines name the exchange by it
    right = _columns(after)[-_MOST_RIGHT:]
    room = most - len(right) - 2
    said = shorter = f"{time} {head}  {_columns(before)}  {request}"
    while len(shorter) > room and parts:
        del parts[min(parts, key=parts.__getitem__)]
        before[1] = _times(fields["ms"], parts)
        shorter = f"{time} {head}  {_columns(before)}  {request}"
    line = f"{shorter if len(shorter) <= room else _cut(said, room)}  {right}"
    if not colour:
        return line
    shade = _RED if loud or status >= 500 else _YELLOW if status >= 400 or ending != "complete" else _GREEN
    return line.replace(head, f"{shade}{head}{_PLAIN}", 1)


def _columns(texts: list[str]) -> str:
    return "  ".join(escape(text) for text in texts if text)


def draining_line(live: int, seconds: float) -> str:
    """Writes the first line of a drain, for a user who waits for its end."""
    return f"Draining {live} stream{'s' * (live != 1)}, up to {seconds:g} s. Ctrl-C again ends them now."


def report_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Writes a drain's report: the number of each ending, then a line for each stream that was cut, at most CUT_LINES."""
    endings = ", ".join(f"{count} {ending}" for ending, count in report["endings"].items()) or "nothing was live"
    yield f"drained in {spoken_time(report['seconds'])}: {endings}"
    cut = report["cut"]
    for row in cut[:CUT_LINES]:
        said = f"cut      {row['id']}  {row['model']}  {row['wire']}  {row['ending']}  after {spoken_time(row['age'])}"
        yield escape(said)
    if len(cut) > CUT_LINES:
        yield f"cut      and {len(cut) - CUT_LINES} more"


def spoken_time(seconds: float) -> str:
    """Writes a duration for people: `0.4s`, `3min`, `2h05min`."""
    if seconds < 120:
        return f"{seconds:.1f}s"
    minutes = int(seconds) // 60
    return f"{minutes}min" if minutes < 120 else f"{minutes // 60}h{minutes % 60:02}min"


def _parts(fields: Mapping[str, Any]) -> dict[str, float]:
    """Returns the parts of the duration, in ms, without those under 1 ms or 1 %."""
    least = max(_LEAST_MS, _LEAST_SHARE * fields["ms"])
    return {key[3:]: taken for key, taken in fields.items() if key[:3] == "ms_" and key != "ms_first" and taken >= least}


def _times(ms: float, parts: Mapping[str, float]) -> str:
    """Writes the duration and its parts, unless all of it was the model's."""
    if not parts.keys() - {"model"}:
        return _seconds(ms)
    return f"{_seconds(ms)} ({', '.join(f'{part} {_seconds(taken)}' for part, taken in parts.items())})"


def _amounts(fields: Mapping[str, Any]) -> str:
    """Writes the messages and bytes sent, and those received if more than one message was."""
    items = fields["items_out"]
    out = f"{items} item{'s' * (items != 1)} {size_text(fields['bytes_out'])}"
    return f"{fields['items_in']} in {size_text(fields['bytes_in'])}  {out}" if fields["items_in"] > 1 else out


def _seconds(ms: float) -> str:
    if ms < 100:
        return f"{ms:.1f}ms"
    if ms < 120_000:
        return f"{ms / 1000:.2f}s"
    seconds = int(ms / 1000)
    return f"{seconds // 60}m {seconds % 60:02}s" if seconds < 7200 else f"{seconds // 3600}h {seconds // 60 % 60:02}m"


def size_text(count: int) -> str:
    """Writes a number of bytes for people: `27 B`, `6.3 KiB`."""
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, len(_UNITS))
    return f"{count / 1024**power:.1f} {_UNITS[power - 1]}"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
