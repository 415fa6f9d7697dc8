"""Byte-pair encoding: converts text to token ids and back, lossless for every Unicode text."""

from __future__ import annotations

import bisect
import codecs
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias, final

from models.messages import utf8

Pair: TypeAlias = tuple[int, int]

EOS = 0
"""The end of sequence, which also precedes each text. Ids 1 to 256 are the single bytes, then come the merges."""
BYTES = 256

# Every character is matched by exactly one alternative, so the joined pieces are the text. The length limit bounds the
# merging of one piece, which is quadratic, whatever a client sends.
_PIECE = re.compile(
    r" ?[^\W\d_]{1,24}| ?\d{1,3}| ?(?:[^\w\s]|_){1,24}|\n{1,24}|\s{1,24}(?!\S)|\s{1,24}",
)


def pieces(text: str) -> Iterator[str]:
    """Cuts a text into words, numbers, punctuation and white space, whose borders merges never cross. A space belongs to the
    word that follows it. The joined pieces are the text."""
    return (match.group() for match in _PIECE.finditer(text))


def merge(ids: Sequence[int], pair: Pair, merged: int) -> list[int]:
    """Replaces each occurrence of the pair, from the left."""
    out: list[int] = []
    position = 0
    while position < len(ids):
        if position + 1 < len(ids) and (ids[position], ids[position + 1]) == pair:
            out.append(merged)
            position += 2
        else:
            out.append(ids[position])
            position += 1
    return out


@final
class Tokenizer:
    """A byte-pair vocabulary. The pair `merges[i]` makes the token 257 + i, and earlier merges take precedence."""

    def __init__(self, merges: Iterable[Pair]) -> None:
        self._merged: dict[Pair, int] = {}
        self._bytes: list[bytes] = [b"", *(bytes([value]) for value in range(BYTES))]
        for left, right in merges:
            self._merged[left, right] = len(self._bytes)
            self._bytes.append(self._bytes[left] + self._bytes[right])
        self._sorted = sorted(range(len(self._bytes)), key=self._bytes.__getitem__)
        # Words repeat, so the cache makes a usual piece one look-up. It is bounded because pieces come from clients.
        self.encode_piece = functools.lru_cache(maxsize=16384)(self._encode_piece)

    @property
    def merges(self) -> list[Pair]:
        """The pairs of which it was made."""
        return [*self._merged]

    def __len__(self) -> int:
        """The number of token ids, including the end of sequence."""
        return len(self._bytes)

    def _encode_piece(self, piece: str) -> tuple[int, ...]:
        ids = [byte + 1 for byte in utf8(piece)]
        while len(ids) > 1:
            pair = min(itertools.pairwise(ids), key=self._rank)
            if pair not in self._merged:
                break
            ids = merge(ids, pair, self._merged[pair])
        return tuple(ids)

    def _rank(self, pair: Pair) -> int:
        return self._merged.get(pair, len(self._bytes))

    def encode(self, text: str) -> list[int]:
        """The token ids of a text; never EOS."""
        return [token for piece in pieces(text) for token in self.encode_piece(piece)]

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token: possibly part of a character, and none for EOS."""
        return self._bytes[token]

    def containing(self, part: bytes) -> list[int]:
        """The tokens that contain these bytes; `part` must not be empty."""
        return [token for token, value in enumerate(self._bytes) if part in value]

    def beginning_with(self, prefix: bytes) -> list[int]:
        """The tokens that begin with these bytes; `prefix` must not be empty."""

        def beginning(token: int) -> bytes:
            return self._bytes[token][: len(prefix)]

        first = bisect.bisect_left(self._sorted, prefix, key=beginning)
        return self._sorted[first : bisect.bisect_right(self._sorted, prefix, lo=first, key=beginning)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids. Ids that `encode` never gives may not be UTF-8: such bytes become U+FFFD."""
        return b"".join(map(self.bytes_of, ids)).decode(errors="replace")


@final
class TextStream:
    """Decodes token by token, and holds back the bytes of an unfinished character, so that a text is never split inside
    one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def fork(self) -> TextStream:
        """A copy in the same state."""
        copy = TextStream(self._tokenizer)
        copy._decoder.setstate(self._decoder.getstate())
        return copy

    def feed(self, token: int) -> str:
        """The text that this token adds; it may be empty."""
        return self._decoder.decode(self._tokenizer.bytes_of(token))

    def rest(self) -> str:
        """The held-back text at the end: U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)
