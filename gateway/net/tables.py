"""Makes tables small again: a set or a dict that many have left keeps its room."""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from typing import Any, TypeVar

import trio

_SMALL = 16 * 1024  # bytes of a table that may stay as it is
_ENTRY = 256  # bytes for an entry: a table that has more is mostly empty; one that has just grown has 128
_HOLDERS = 1000  # Trio's objects, at most, that are looked at; some hundred lead to its tables

K = TypeVar("K")
V = TypeVar("V")


def is_hollow(table: set[Any] | dict[Any, Any]) -> bool:
    """True if most of a large table is empty."""
    return sys.getsizeof(table) > max(_SMALL, _ENTRY * len(table))


def shrink(table: set[Any]) -> None:
    """Gives back the room of a hollow set. It stays the same object, and another thread sees no other members meanwhile."""
    if is_hollow(table):
        table &= table


def shrunk(table: dict[K, V]) -> dict[K, V]:
    """Returns the dict to use from now on: a copy of a hollow one, or the same."""
    return table.copy() if is_hollow(table) else table


def shrink_tables_of_trio(nursery: trio.Nursery) -> None:
    """Shrinks the sets in which Trio has the tasks of this nursery and of all others, and its table of those that wait for a
    descriptor. The garbage collector leads to them, so that none of their names is needed."""
    seen, level = set[int](), list[Any]([nursery])
    while level and len(seen) < _HOLDERS:
        holders, level = level, []
        for holder in holders:
            if id(holder) in seen:
                continue
            seen.add(id(holder))
            kind = type(holder)
            if kind is set:
                shrink(holder)
            elif kind is defaultdict:
                if is_hollow(holder):  # the loop alone uses it
                    kept = holder.copy()
                    holder.clear()
                    holder.update(kept)
            elif kind.__module__.partition(".")[0] == "trio":  # no other object, and no member of a table, is looked at
                level += gc.get_referents(holder)
