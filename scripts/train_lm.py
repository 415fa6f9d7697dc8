"""Trains the library's language model on the docstrings of the Python that runs this, and measures it.

    python scripts/train_lm.py [--out models/library/data/lm.npz] [--texts FILE]

Everything is deterministic for one version of Python: the order of the files, the split, the merges, the tables.
"""

from __future__ import annotations

import argparse
import ast
import heapq
import itertools
import json
import math
import platform
import re
import sys
import sysconfig
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[1]))

from models.library.lm.model import TABLES, LanguageModel
from models.library.lm.tokenizer import BYTES, EOS, Pair, Tokenizer, merge, pieces
from models.messages import utf8

VOCABULARY = 4096
ORDER = 5
HELD_OUT_ONE_IN = 20
WRAPPED = 50
"""A line at least this long was wrapped, so that the next one continues it."""
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "lib2to3", "turtledemo", "ensurepip", "__pycache__"}
CREDITS = re.compile(r"\S@\w+\.|copyright|author|(written|contributed) by", re.IGNORECASE)

Integers = npt.NDArray[np.integer[Any]]


# The corpus


def modules() -> Iterator[tuple[str, ast.Module]]:
    """The standard library's modules, tests aside, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not LEFT_OUT & set(name.parts):
            yield name.as_posix(), ast.parse(path.read_bytes())


def docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def is_prose(lines: Sequence[str]) -> bool:
    """Lists and code are indented, examples have a prompt, tables have borders: the model shall speak English. It
    shall name no person either."""
    return not any(line.startswith((" ", ">>>", "+", "|")) or CREDITS.search(line) for line in lines)


def unwrap(lines: Sequence[str]) -> str:
    """Joins the lines of running text: one that was wrapped is long."""
    out = lines[0]
    for before, line in itertools.pairwise(lines):
        out += (" " if len(before) >= WRAPPED else "\n") + line
    return re.sub(" {2,}", " ", out)


def corpus() -> tuple[list[str], list[str]]:
    """Training and held-out documents: the prose of one module's docstrings is one document, and a paragraph that
    occurs in several places is taken once, so that no held-out paragraph was trained on."""
    split: tuple[list[str], list[str]] = ([], [])
    seen: set[str] = set()
    for name, tree in modules():
        kept = []
        for docstring in docstrings(tree):
            for paragraph in re.split(r"\n\s*\n", docstring.expandtabs()):
                lines = [line.rstrip() for line in paragraph.strip("\n").split("\n")]
                words = " ".join(paragraph.split())
                if words and words not in seen and is_prose(lines):
                    seen.add(words)
                    kept.append(unwrap(lines))
        if kept:
            split[zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0].append("\n\n".join(kept))
    return split


# Byte-pair merges


def train_merges(documents: Sequence[str]) -> list[Pair]:
    """The most frequent pair of tokens becomes a token, again and again, until the vocabulary is full; of equally
    frequent pairs the one with the smaller ids goes first."""
    counted = Counter(piece for document in documents for piece in pieces(document))
    words = [[byte + 1 for byte in utf8(word)] for word in counted]
    counts = list(counted.values())
    pairs: Counter[Pair] = Counter()
    where: defaultdict[Pair, set[int]] = defaultdict(set)
    for index, word in enumerate(words):
        for pair in itertools.pairwise(word):
            pairs[pair] += counts[index]
            where[pair].add(index)
    heap = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(heap)
    merges: list[Pair] = []
    while 1 + BYTES + len(merges) < VOCABULARY:
        negative, best = heapq.heappop(heap)
        if pairs[best] != -negative:
            continue  # the count has changed since; its newer entry is further down
        changed: set[Pair] = set()
        for index in where[best]:
            merged = merge(words[index], best, 1 + BYTES + len(merges))
            for pair in itertools.pairwise(words[index]):
                pairs[pair] -= counts[index]
                changed.add(pair)
            for pair in itertools.pairwise(merged):
                pairs[pair] += counts[index]
                where[pair].add(index)
                changed.add(pair)
            words[index] = merged
        for pair in changed:
            if pairs[pair] > 0:
                heapq.heappush(heap, (-pairs[pair], pair))
        merges.append(best)
    return merges


# The n-grams


def token_stream(tokenizer: Tokenizer, documents: Sequence[str]) -> Integers:
    """EOS, document, EOS, document ... EOS: an EOS ends one text and begins the next."""
    ids = [EOS]
    for document in documents:
        ids += [*tokenizer.encode(document), EOS]
    return np.array(ids, dtype=np.int64)


def discounts(counts: Integers) -> list[float]:
    """The discounts of modified Kneser-Ney for a count of 0, 1, 2 and more (Chen and Goodman 1998, equation 26)."""
    n1, n2, n3, n4 = (int((counts == count).sum()) for count in (1, 2, 3, 4))
    y = n1 / (n1 + 2 * n2)
    return [0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3]


def tables(tokenizer: Tokenizer, merges: Sequence[Pair], stream: Integers) -> dict[str, npt.NDArray[Any]]:
    """Counts all n-grams inside documents and keeps every one.

    An n-gram is numbered by its place among the sorted (number of its first n - 1 tokens, last token), so the numbers
    of level n are the rows of its table and the contexts of level n + 1.
    """
    vocabulary = len(tokenizer)
    number, inside = stream, np.ones(len(stream), dtype=np.bool_)
    grams = [np.arange(vocabulary)]
    raw = [np.bincount(stream, minlength=vocabulary)]
    starts_text = [grams[0] == EOS]
    adjusted = []
    for n in range(2, ORDER + 1):
        size = len(stream) - n + 1
        # Only the first and the last token of an n-gram may be EOS.
        inside = inside[:size] & ((stream[n - 2 : n - 2 + size] != EOS) | (n == 2))
        at = np.flatnonzero(inside)
        keys, first, numbers, counts = np.unique(
            number[at] * vocabulary + stream[at + n - 1], return_index=True, return_inverse=True, return_counts=True
        )
        # A shorter n-gram counts the tokens it was seen after, not how often: that is Kneser-Ney. One that begins a
        # text has nothing before it and keeps its count.
        before = np.bincount(number[at[first] + 1], minlength=len(raw[-1]))
        adjusted.append(np.where(starts_text[-1], raw[-1], before) if n > 2 else before)
        number = np.full(size, -1)
        number[at] = numbers
        grams.append(keys)
        raw.append(counts)
        starts_text.append(stream[at[first]] == EOS)
    adjusted.append(raw[-1])
    out: dict[str, npt.NDArray[Any]] = {
        "merges": np.array(merges, dtype=np.uint16),
        "discounts": np.array([discounts(counts) for counts in adjusted]),
        "count1": compact(adjusted[0]),
    }
    for n in range(2, ORDER + 1):
        context, token = np.divmod(grams[n - 1], vocabulary)
        out[f"fanout{n}"] = compact(np.bincount(context, minlength=len(grams[n - 2])))
        out[f"token{n}"] = token.astype(np.uint16)
        out[f"count{n}"] = compact(adjusted[n - 1])
    return out


def compact(values: Integers) -> Integers:
    return values.astype(np.min_scalar_type(int(np.max(values))))


# The measure


def bits(model: LanguageModel, stream: Integers, order: int) -> float:
    """The bits that the model needs for the stream's tokens with `order` - 1 tokens of context."""
    total, context = 0.0, [EOS]
    for token in stream[1:].tolist():
        total -= float(model.next_log_probs(context[max(0, len(context) - order + 1) :])[token])
        context = [EOS] if token == EOS else [*context[-order:], token]
    return total / math.log(2)


def unigram_bits(training: Integers, stream: Integers, vocabulary: int) -> float:
    """The baseline: each token by its frequency in the training text, one added to every count."""
    counts = np.bincount(training[1:], minlength=vocabulary) + 1
    return float(-np.log2(counts[stream[1:]] / counts.sum()).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TABLES)
    parser.add_argument("--texts", type=Path, help="write the training and held-out documents there too, as JSON")
    given = parser.parse_args()
    out: Path = given.out
    began = time.perf_counter()

    training, held_out = corpus()
    if given.texts:
        given.texts.write_text(json.dumps([training, held_out]), encoding="utf-8")
    merges = train_merges(training)
    tokenizer = Tokenizer(merges)
    train_stream, held_stream = token_stream(tokenizer, training), token_stream(tokenizer, held_out)
    np.savez_compressed(out, allow_pickle=False, **tables(tokenizer, merges, train_stream))
    trained = time.perf_counter()

    model = LanguageModel.load(out)
    tokens, size = len(held_stream) - 1, sum(len(utf8(document)) for document in held_out)
    print(f"Python {platform.python_version()}, {platform.machine()}: trained in {trained - began:.1f} s")
    print(f"training: {len(training)} documents, {sum(map(len, training))} characters, {len(train_stream) - 1} tokens")
    print(f"held out: {len(held_out)} documents, {size} bytes, {tokens} tokens")
    print(f"tables: {out.stat().st_size} bytes, vocabulary {len(tokenizer)}")
    print("model      perplexity per token   bits per byte")
    rows = [("unigram", unigram_bits(train_stream, held_stream, len(tokenizer)))]
    rows += [(f"{order}-gram", bits(model, held_stream, order)) for order in range(2, ORDER + 1)]
    for name, total in rows:
        print(f"{name:10} {2 ** (total / tokens):20.1f} {total / size:15.3f}")


if __name__ == "__main__":
    main()
