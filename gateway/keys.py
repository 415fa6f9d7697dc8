"""Keys of clients: reads the file of their digests and rights, and finds the key that a client has shown."""

from __future__ import annotations

import enum
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from hashlib import sha256
from hmac import compare_digest
from math import inf
from typing import Any, Final, final

LARGEST: Final = 1024 * 1024
"""The most bytes of a key file."""
PREFIX: Final = "ew_"
"""The prefix of keys that `new_key` makes."""

_WANTED = "ew_ and 43 characters of base64url, or 32 or more visible ASCII characters"
_MADE, _OTHER = re.compile(r"ew_[A-Za-z0-9_-]{43}"), re.compile(r"[!-~]{32,4096}")
_NAME, _NAME_WANTED = re.compile(r"[A-Za-z0-9._-]{1,64}"), "1 to 64 letters, digits, '.', '_' and '-'"
_DIGEST = re.compile(r"sha256:([0-9A-Fa-f]{64})")
_ATTRIBUTE = re.compile(r"([a-z_]{1,20})=(.*)", re.DOTALL)
_MODELS = re.compile(r"[!-+\--~]{1,1024}(?:,[!-+\--~]{1,1024})*")
_NUMBER = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_NEWLINE = b"\n"
_SHOWN = 40
_TOLD = 3  # the most problems in one error


class Scope(enum.Enum):
    """The rights of a key over the models that it reaches."""

    INFER = "infer"
    """May call them."""
    CONTROL = "control"
    """May also load and unload them, and change the server's log settings."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key, from its line in the file. It has the key's digest, not the key itself."""

    name: str
    """The name of its owner. Several keys of one name are one party."""
    digest: bytes = field(repr=False)
    models: tuple[str, ...] = ("*",)
    """The names of the models that it reaches. In each, `*` stands for any characters."""
    scope: Scope = Scope.INFER
    share: int | None = None
    """The percentage of each model's slots and queue that it may hold; None: by the server's settings."""
    in_flight: int = 0
    """The most exchanges at once; 0: any number."""
    rate: float = 0.0
    """The most exchanges per second; 0: any number."""
    priority: int = 1
    """The best priority level that it may ask for. Level 1 is served first."""
    expires: float = inf
    """The time at which it expires, in seconds since 1970; infinity: never."""

    @property
    def quota(self) -> tuple[object, ...]:
        """The limits that all keys of one name share."""
        return self.share, self.in_flight, self.rate

    def reaches(self, model: str) -> bool:
        """True if the key may use a model of this name."""
        models = self.models
        if models == ("*",):
            return True
        return any(_matches(pattern, model) for pattern in models)


def _matches(pattern: str, name: str) -> bool:
    """True if the pattern matches this name; `*` matches any characters. Each part between stars is matched at its first
    occurrence: there is no backtracking."""
    first, *parts = pattern.split("*")
    if not parts:
        return name == first
    last, at = parts.pop(), len(first)
    end = len(name) - len(last)
    if not name.startswith(first) or not name.endswith(last) or end < at:
        return False
    for part in parts:
        found = name.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


class KeyFileError(ValueError):
    """A key file that cannot be used. Each problem names the line and the attribute, and never quotes a possible key."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        more = len(self.problems) - _TOLD
        super().__init__("; ".join(self.problems[:_TOLD]) + (f"; and {more} more" if more > 0 else ""))


@final
class KeySet:
    """The keys of one file. A set does not change: a changed file makes a new set."""

    __slots__ = ("_by_digest",)

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._by_digest = {key.digest: key for key in keys}

    def __iter__(self) -> Iterator[Key]:
        return iter(self._by_digest.values())

    def __len__(self) -> int:
        return len(self._by_digest)

    def __repr__(self) -> str:
        return f"KeySet({len(self)} keys)"

    def __contains__(self, key: object) -> bool:
        return isinstance(key, Key) and key.digest in self._by_digest

    def find(self, shown: bytes, now: float) -> Key | None:
        """Finds the key with these bytes, at this time in seconds since 1970. None if there is none, or it has expired."""
        digest = sha256(shown).digest()
        key = self._by_digest.get(digest)
        # the lookup compared digests already: this repeats it in constant time
        if key is None or not compare_digest(key.digest, digest) or key.expires <= now:
            return None
        return key

    def without_those_over(self, now: float) -> KeySet:
        """Returns the set without the keys that have expired at this time; this set itself if none has."""
        if all(now < key.expires for key in self):
            return self
        return KeySet(key for key in self if now < key.expires)


def read_keys(data: bytes) -> KeySet:
    """Reads the keys of a file's bytes. KeyFileError lists everything that is wrong."""
    if len(data) > LARGEST:
        raise KeyFileError([f"the file is larger than {LARGEST} bytes"])
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise KeyFileError([f"line {1 + data.count(_NEWLINE, 0, e.start)}: not UTF-8"]) from None
    keys: dict[bytes, Key] = {}
    quotas: dict[str, tuple[Key, int]] = {}
    lines: dict[bytes, int] = {}
    problems = []
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            key = _key_of(words)
            if key.digest in keys:
                raise ValueError(f"the digest is on line {lines[key.digest]} already: list each key once")
            other, where = quotas.setdefault(key.name, (key, number))
            if other.quota != key.quota:
                raise ValueError(f"share, in_flight and rate must be those of line {where}, which has the same name")
        except ValueError as e:
            problems.append(f"line {number}: {e}")
            continue
        keys[key.digest], lines[key.digest] = key, number
    if problems:
        raise KeyFileError(problems)
    return KeySet(keys.values())


def _key_of(words: list[str]) -> Key:
    name, *rest = words
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"the name, which is first, must be {_NAME_WANTED}")
    found = _DIGEST.fullmatch(rest[0]) if rest else None
    if found is None:
        raise ValueError("the digest, which is second, must be sha256: and 64 hexadecimal digits")
    key = Key(name=name, digest=bytes.fromhex(found[1]))
    return replace(key, **attributes_of(rest[1:])) if len(rest) > 1 else key


def attributes_of(words: Iterable[str]) -> dict[str, Any]:
    """Reads attributes such as `rate=20` into the fields of a Key. ValueError names the attribute."""
    said: dict[str, Any] = {}
    for word in words:
        found = _ATTRIBUTE.fullmatch(word)
        if found is None:  # not quoted: it may be a key in the wrong place
            raise ValueError(f"attributes, such as rate=20, must follow the digest: {_KNOWN}")
        name, value = found.groups()
        read = _READERS.get(name)
        if read is None:
            raise ValueError(f"there is no attribute {name}: {_KNOWN}")
        if name in said:
            raise ValueError(f"{name} is there twice")
        try:
            said[name] = read(value)
        except _Expected as e:
            raise ValueError(f"{name} must be {e}, not {value[:_SHOWN]!r}") from None
    return said


class _Expected(Exception):
    """A value is invalid. The text says what was expected."""


def _read_models(text: str) -> tuple[str, ...]:
    if _MODELS.fullmatch(text) is None:
        raise _Expected("names of models with commas between them, * for any characters")
    models = tuple(dict.fromkeys(text.split(",")))
    return ("*",) if "*" in models else models


def _read_scope(text: str) -> Scope:
    try:
        return Scope(text)
    except ValueError:
        raise _Expected("infer or control") from None


def _whole(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and low <= int(text) <= high):
            raise _Expected(f"a whole number from {low} to {high}")
        return int(text)

    return read


def _read_rate(text: str) -> float:
    if _NUMBER.fullmatch(text) is None or not float(text):
        raise _Expected("a number above 0, in exchanges a second")
    return float(text)


def _read_expires(text: str) -> float:
    try:
        if len(text) == 10:
            day = date.fromisoformat(text)
            return datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp() + timedelta(days=1).total_seconds()
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            raise ValueError
        return moment.timestamp()
    except (ValueError, OverflowError):
        wanted = "a date such as 2027-01-31 (until its end in UTC), or a time such as 2027-01-31T12:00:00Z"
        raise _Expected(wanted) from None


_READERS: Mapping[str, Callable[[str], Any]] = {
    "models": _read_models,
    "scope": _read_scope,
    "share": _whole(1, 100),
    "in_flight": _whole(1, 10**8),
    "rate": _read_rate,
    "priority": _whole(1, 16),
    "expires": _read_expires,
}
ATTRIBUTES: Final = tuple(_READERS)
"""The names of the attributes that may follow the digest in a key's line."""
_KNOWN = f"there are {', '.join(ATTRIBUTES)}"


def new_key() -> str:
    """Makes a new key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def line_of(name: str, key: str, attributes: Iterable[str] = ()) -> str:
    """Writes a key's line of the file, with attributes such as `rate=20`. ValueError for an invalid name, key or
    attribute."""
    words = list(attributes)
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"the name must be {_NAME_WANTED}")
    if _MADE.fullmatch(key) is None and _OTHER.fullmatch(key) is None:
        raise ValueError(f"a key is {_WANTED}")
    attributes_of(words)
    return " ".join([name, f"sha256:{sha256(key.encode()).hexdigest()}", *words])
