"""The forward pass of a small transformer in numpy: many sequences in one pass, each with its own cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]

# The rows of a matrix product. BLAS rounds differently for different numbers of rows, and a sequence must not depend on how
# many others there are. In a block of 8 the position of a row makes no difference. A single row costs more this way.
_BLOCK = 8
# Weights are multiplied in panels of columns that are small enough for OpenBLAS to use one thread (at most 65536 * 4
# multiplications: its interface/gemm.c). Dividing steps as small as these costs more than it gains, and far more if other
# programs use the cores.
_PRODUCT = 65536 * 4
_EPSILON = np.float32(1e-6)


@final
class Cache:
    """The keys and values of the last tokens of one sequence, on every layer. Attention reads one window of them. There is
    room for as many again, before those outside the window are dropped."""

    __slots__ = ("_kept", "filled", "pairs")

    def __init__(self, layers: int, window: int, width: int) -> None:
        """`width` is that of a key."""
        self.pairs: Floats = np.empty((layers, 2, 2 * window, width), np.float32)
        """Indexed by layer, key or value, and place."""
        self.filled = 0
        """The number of places that have been written."""
        self._kept = window - 1

    def reserve(self, tokens: int) -> None:
        """Makes room for `tokens` tokens, at most a window and one."""
        if self.filled + tokens > self.pairs.shape[2]:
            first = self.filled - self._kept
            self.pairs[:, :, : self._kept] = self.pairs[:, :, first : self.filled].copy()
            self.filled = self._kept


@final
class Network:
    """The weights, and the functions that apply them to tokens.

    A token's embedding passes through the layers. Each layer adds the result of attention over the last `window` tokens,
    where farther ones count less (ALiBi: Press and others 2022), and then that of a two-layer perceptron with squared ReLU.
    The heads share keys and values (Shazeer 2019), so a cache is a quarter as large, and as quick to read. Inputs are
    divided by their root mean square, products have no bias, and the output uses the weights of the embeddings.

    The result for a token depends on its own sequence alone, to the last bit: matrix products are computed in blocks of rows
    of one size, and attention row by row.
    """

    def __init__(self, weights: Mapping[str, npt.NDArray[Any]]) -> None:
        """Takes the arrays that `scripts/train_tlm.py` writes. ValueError if their shapes do not fit."""
        embedding = weights["embedding"].astype(np.float32)
        self.vocabulary, self.width = embedding.shape
        self.heads, self.window = int(weights["heads"]), int(weights["window"])
        self.layers = sum(name.startswith("qkv") for name in weights)
        head = self.width // self.heads
        width = self.width
        shapes = {
            "qkv": (width, width + 2 * head),
            "out": (width, width),
            "up": (width, 4 * width),
            "down": (4 * width, width),
        }
        layers: list[list[Floats]] = [
            [_matrix(weights, f"{name}{layer}", shape) for name, shape in shapes.items()] for layer in range(self.layers)
        ]
        for qkv, *_ in layers:
            qkv[:, :width] *= np.float32(head**-0.5)  # scales the queries once, instead of every score
        self._layers = [[_panels(matrix) for matrix in matrices] for matrices in layers]
        self._embedding, self._unembedding = _normed(embedding), _panels(embedding.T)
        slopes = 2.0 ** (-8 * np.arange(1, self.heads + 1) / self.heads)
        self._bias: Floats = (slopes[:, None] * np.arange(1 - self.window, 1)).astype(np.float32)
        """The values added to the scores of a head, the nearest token last."""

    @property
    def reach(self) -> int:
        """The number of last tokens that can influence the next one."""
        return self.layers * (self.window - 1) + 1

    def cache(self) -> Cache:
        """A new empty cache for a sequence."""
        return Cache(self.layers, self.window, self.width // self.heads)

    def log_probs(self, caches: Sequence[Cache], tokens: Sequence[int]) -> Floats:
        """Takes in a token for each of these caches. A cache may occur up to `window` times, for consecutive tokens. Returns
        the natural log-probabilities [row, token] of the token after each."""
        logits = _product(self._passed(caches, tokens), self._unembedding)[: len(tokens)]
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return logits

    def take(self, caches: Sequence[Cache], tokens: Sequence[int]) -> None:
        """Takes tokens in without computing what comes after them."""
        self._passed(caches, tokens)

    def _passed(self, caches: Sequence[Cache], tokens: Sequence[int]) -> Floats:
        """The output of the last layer, divided by its root mean square. Rows of zeros fill the last block."""
        rows, width, heads, window = len(tokens), self.width, self.heads, self.window
        places = _places(caches)
        spans = [(row, place, max(0, place + 1 - window)) for row, place in enumerate(places)]
        x = np.zeros((-rows % _BLOCK + rows, width), np.float32)
        x[:rows] = self._embedding[list(tokens)]
        found = np.zeros_like(x)
        by_head = found[:rows].reshape(rows, heads, -1)
        scores = np.full((rows, heads, window), -np.inf, np.float32)
        for layer, (qkv, out, up, down) in enumerate(self._layers):
            made = _product(_normed(x), qkv)[:rows].reshape(rows, heads + 2, -1)
            pairs = [cache.pairs[layer] for cache in caches]
            for row, place, _ in spans:
                pairs[row][:, place] = made[row, heads:]
            for row, place, first in spans:
                keys = pairs[row][0, first : place + 1]
                np.matmul(made[row, :heads], keys.T, out=scores[row, :, first - place - 1 :])
            shares: Floats = scores + self._bias
            shares -= shares.max(axis=2, keepdims=True)
            np.exp(shares, out=shares)
            shares /= shares.sum(axis=2, keepdims=True)
            for row, place, first in spans:
                values = pairs[row][1, first : place + 1]
                np.matmul(shares[row, :, first - place - 1 :], values, out=by_head[row])
            x += _product(found, out)
            hidden = np.maximum(_product(_normed(x), up), 0)
            hidden *= hidden
            x += _product(hidden, down)
        return _normed(x)


def _matrix(weights: Mapping[str, npt.NDArray[Any]], name: str, shape: tuple[int, int]) -> Floats:
    if weights[name].shape != shape:
        raise ValueError(f"{name}: expected the shape {shape}, got {weights[name].shape}")
    return weights[name].astype(np.float32)


def _panels(matrix: Floats) -> Floats:
    """The matrix as an array [panel, row, column]."""
    rows, columns = matrix.shape
    most = max(1, _PRODUCT // (_BLOCK * rows))
    wide = max(width for width in range(1, most + 1) if columns % width == 0)
    return np.ascontiguousarray(matrix.reshape(rows, -1, wide).transpose(1, 0, 2))


def _places(caches: Sequence[Cache]) -> list[int]:
    """The place of each row's key and value in its cache."""
    counts: dict[Cache, int] = {}
    for cache in caches:
        counts[cache] = counts.get(cache, 0) + 1
    for cache, count in counts.items():
        cache.reserve(count)
    places = []
    for cache in caches:
        places.append(cache.filled)
        cache.filled += 1
    return places


def _normed(x: Floats) -> Floats:
    scale: Floats = np.mean(np.square(x), axis=1, keepdims=True, dtype=np.float32)
    scale += _EPSILON
    np.sqrt(scale, out=scale)
    return x / scale


def _product(x: Floats, panels: Floats) -> Floats:
    """The product, computed by blocks of rows and by panels."""
    count, _, wide = panels.shape
    product = np.empty((len(x), count * wide), np.float32)
    blocks = product.reshape(-1, _BLOCK, count, wide).transpose(0, 2, 1, 3)
    np.matmul(x.reshape(-1, 1, _BLOCK, x.shape[1]), panels, out=blocks)
    return product
