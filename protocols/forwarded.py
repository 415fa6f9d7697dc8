"""Finds the client of a forwarded request, as its proxies name it: `Forwarded` (RFC 7239) and `X-Forwarded-For`.

Each proxy appends the address of its caller at the right end, and a client may have sent anything before that. The list is
therefore walked from the right, and an entry counts only if the proxy that appended it is trusted.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

IPAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


class Node(NamedTuple):
    """An address that a proxy has named."""

    address: IPAddress
    port: int | None
    """None if the proxy named no port."""


# RFC 7239 section 4. Unquoted values may also hold the characters of IPv6 and ports: some proxies leave the quotes out.
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_PAIR = re.compile(rf'({_TOKEN})=(?:([!#$%&\'*+.^_`|~0-9A-Za-z:\[\]-]+)|"((?:[^"\\]|\\.)*)")')
_NODE = re.compile(r"\[([0-9A-Fa-f:.]+)\](?::(\d{1,5}|_[A-Za-z0-9._-]+))?|([0-9.]+)(?::(\d{1,5}|_[A-Za-z0-9._-]+))?")

_HOPS = 32
"""The most entries that are walked: a client could send thousands of trusted addresses, and each costs work."""
_LONGEST = 4096
"""The most characters of one Forwarded line, which must be parsed whole. A longer line is malformed."""
_PAIRS = 512
"""A Forwarded line with as many pairs is malformed, too: each costs work, even if the line is short."""
_GAP = re.compile(r"[ \t,;]*")


def client_of(
    forwarded: Sequence[bytes], x_forwarded_for: Sequence[bytes], trusts: Callable[[IPAddress], bool]
) -> Node | None:
    """The farthest client that a trusted proxy has named. The values are those of both fields, each in the order of its
    lines; the caller trusts the peer that sent them. None if no proxy named a client.

    A proxy sets one of the two fields and passes on its client's version of the other. If both are present and name
    different addresses, neither is believed.
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
    """The entries from the right. None for a hidden one, such as `unknown`, and for a whole malformed line: after an open
    quote, the text that a proxy appended would count as its client's."""
    if not values:
        return None
    return (_node(text) for value in reversed(values) for text in reversed(_elements(value.decode("latin-1"))))


def _elements(value: str) -> list[str]:
    """The `for` value of each element. Empty if the element has none, and once for a whole malformed line."""
    if len(value) > _LONGEST:
        return [""]
    found: list[str] = []
    pairs: dict[str, str] = {}
    at, first = 0, True
    for _ in range(_PAIRS):
        gap = _GAP.match(value, at)
        assert gap is not None
        at = gap.end()
        if pairs and ("," in gap[0] or at == len(value)):  # an empty element is ignored (RFC 9110 section 5.6.1.2)
            found.append(pairs.get("for", ""))
            pairs = {}
        if at == len(value):
            return found
        pair = _PAIR.match(value, at)
        if pair is None or pair[1].lower() in pairs or not (first or gap[0].strip(" \t")):
            return [""]
        pairs[pair[1].lower()] = pair[2] if pair[2] is not None else re.sub(r"\\(.)", r"\1", pair[3])
        at, first = pair.end(), False
    return [""]


def _of_list(values: Sequence[bytes]) -> Iterator[Node | None] | None:
    if not values:
        return None
    texts = (text for value in reversed(values) for text in reversed(value.decode("latin-1").split(",")))
    return (_node(stripped) for text in texts if (stripped := text.strip(" \t")))


def _node(text: str) -> Node | None:
    """A node as in RFC 7239 section 6, or an IPv6 address without brackets, as X-Forwarded-For has it."""
    found = _NODE.fullmatch(text)
    host, port = (found[1] or found[3], found[2] or found[4]) if found else (text, None)
    if not found and not re.fullmatch(r"[0-9A-Fa-f:.]+", text):  # refuses an address with a zone, which no network contains
        return None
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    number = int(port) if port and port.isdecimal() else None
    if number is not None and number > 0xFFFF:
        return None
    return Node(getattr(address, "ipv4_mapped", None) or address, number)
