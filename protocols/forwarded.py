"""Reads the client of a forwarded request, as the proxies on its way name it: `Forwarded` (RFC 7239) and `X-Forwarded-For`.

Each proxy adds who has called it at the right end, and a client may have sent anything before it. So a list is walked from
its right end, and only as far as the one that says so is trusted.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

IPAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


class Node(NamedTuple):
    """The caller that a proxy has named."""

    address: IPAddress
    port: int | None
    """None where it is not told."""


# RFC 7239 section 4, and in a value without quotes also what IPv6 and ports need, because some proxies leave the quotes out
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_PAIR = re.compile(rf'({_TOKEN})=(?:([!#$%&\'*+.^_`|~0-9A-Za-z:\[\]-]+)|"((?:[^"\\]|\\.)*)")')
_NODE = re.compile(r"\[([0-9A-Fa-f:.]+)\](?::(\d{1,5}|_[A-Za-z0-9._-]+))?|([0-9.]+)(?::(\d{1,5}|_[A-Za-z0-9._-]+))?")

_HOPS = 32
"""Proxies that are walked past: what a client sends may name thousands that are trusted, and each is work."""
_LONGEST = 4096
"""Characters of one line of Forwarded, which has to be read whole: a longer one is malformed."""


def client_of(
    forwarded: Sequence[bytes], x_forwarded_for: Sequence[bytes], trusts: Callable[[IPAddress], bool]
) -> Node | None:
    """The last one on the way that a trusted proxy has named, of the values of both fields, each in the order of its lines;
    the caller trusts the one that has sent them. None where nobody is named.

    A proxy sets one of the fields, and lets pass what its client says in the other: where both are there and do not say the
    same, neither is believed.
    """
    named = [_walk(nodes, trusts) for nodes in (_of_forwarded(forwarded), _of_list(x_forwarded_for)) if nodes is not None]
    if len(named) == 2 and (named[0] is None or named[1] is None or named[0].address != named[1].address):
        return None
    return named[0] if named else None


def _walk(nodes: Iterator[Node | None], trusts: Callable[[IPAddress], bool]) -> Node | None:
    found: Node | None = None
    for node in islice(nodes, _HOPS):
        if node is None:
            break
        found = node
        if not trusts(node.address):
            break
    return found


def _of_forwarded(values: Sequence[bytes]) -> Iterator[Node | None] | None:
    """The callers named, from the right; None for a hidden one, such as `unknown`, and for all of a malformed line: after an
    open quote, the text that a proxy has added would be part of its client's."""
    if not values:
        return None
    return (_node(text) for value in reversed(values) for text in reversed(_elements(value.decode("latin-1"))))


def _elements(value: str) -> list[str]:
    """Whom each element names; the empty text for nobody, and for all of a malformed line."""
    if len(value) > _LONGEST:
        return [""]
    found: list[str] = []
    pairs: dict[str, str] = {}
    at, end = 0, len(value)
    while True:
        at = _blank(value, at)
        if at < end and value[at] not in ",;":
            pair = _PAIR.match(value, at)
            if pair is None or pair[1].lower() in pairs:
                return [""]
            pairs[pair[1].lower()] = pair[2] if pair[2] is not None else re.sub(r"\\(.)", r"\1", pair[3])
            at = _blank(value, pair.end())
        if at < end and value[at] not in ",;":
            return [""]
        if at >= end or value[at] == ",":
            if pairs:  # an empty element is none (RFC 9110 section 5.6.1.2)
                found.append(pairs.get("for", ""))
                pairs = {}
            if at >= end:
                return found
        at += 1


def _blank(value: str, at: int) -> int:
    while at < len(value) and value[at] in " \t":
        at += 1
    return at


def _of_list(values: Sequence[bytes]) -> Iterator[Node | None] | None:
    if not values:
        return None
    texts = (text for value in reversed(values) for text in reversed(value.decode("latin-1").split(",")))
    return (_node(stripped) for text in texts if (stripped := text.strip(" \t")))


def _node(text: str) -> Node | None:
    """A node as in RFC 7239 section 6, or an IPv6 address without brackets, as X-Forwarded-For has it."""
    found = _NODE.fullmatch(text)
    host, port = (found[1] or found[3], found[2] or found[4]) if found else (text, None)
    if not found and not re.fullmatch(r"[0-9A-Fa-f:.]+", text):  # a zone would be in nobody's network
        return None
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    number = int(port) if port and port.isdecimal() else None
    if number is not None and number > 0xFFFF:
        return None
    return Node(getattr(address, "ipv4_mapped", None) or address, number)
