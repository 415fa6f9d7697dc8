"""Trains the library's transformer on the text that the n-gram model has, and measures both on the same held-out text.

    python scripts/train_tlm.py [--out models/library/data/tlm.npz] [--epochs 8] [--seed 1] [--validate]

It needs PyTorch, which nothing else in the library does. The tokenizer is the n-gram model's, so that perplexities compare
token by token. The text is that of the Python that runs this. If PyTorch runs in another Python, `python scripts/train_lm.py
--texts FILE` writes the text there and `--texts FILE` reads it here. One seed gives one result on one machine; another
machine rounds differently.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from train_lm import ORDER, bits, corpus, token_stream

from models.library.lm.model import TABLES, LanguageModel
from models.library.lm.network import Network
from models.library.lm.neural import WEIGHTS
from models.library.lm.tokenizer import EOS
from models.messages import utf8

WIDTH, LAYERS, HEADS, WINDOW = 128, 4, 4, 128
LENGTH = 256
"""Tokens of a row: twice the window, so that training sees full windows."""
BATCH = 8
RATE = 0.01
WARM_UP = 10
"""Steps in which the learning rate rises; then it falls to a twentieth as a cosine does."""
DROPOUT = 0.1
VALIDATION_ONE_IN = 20


class Transformer(nn.Module):
    """The network of `models.library.lm.network`, for PyTorch to differentiate."""

    def __init__(
        self,
        *,
        vocabulary: int,
        width: int = WIDTH,
        layers: int = LAYERS,
        heads: int = HEADS,
        window: int = WINDOW,
        dropout: float = DROPOUT,
    ) -> None:
        super().__init__()
        self.heads, self.window, self.drop = heads, window, nn.Dropout(dropout)
        self.embedding = nn.Parameter(torch.randn(vocabulary, width) * 0.02)
        small, head = width**-0.5, width // heads
        self.qkv, self.out, self.up, self.down = (
            nn.ParameterList(nn.Parameter(torch.randn(rows, columns) * scale) for _ in range(layers))
            for rows, columns, scale in (
                (width, width + 2 * head, small), (width, width, 0.2 * small),
                (width, 4 * width, small), (4 * width, width, 0.1 * small),
            )
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits after each token of each row; a row's texts, which begin with EOS, do not see one another."""
        batch, length = tokens.shape
        x = self.drop(norm(self.embedding[tokens]))
        mask = self.mask(tokens).to(x.dtype)
        for qkv, out, up, down in zip(self.qkv, self.out, self.up, self.down, strict=True):
            made = (norm(x) @ qkv).view(batch, length, self.heads + 2, -1).transpose(1, 2)
            queries, keys, values = made.split((self.heads, 1, 1), dim=1)
            keys, values = keys.expand_as(queries), values.expand_as(queries)
            found = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
            x = x + self.drop(found.transpose(1, 2).reshape(batch, length, -1) @ out)
            x = x + self.drop(functional.relu(norm(x) @ up).square() @ down)
        return norm(x) @ self.embedding.T

    def mask(self, tokens: Tensor) -> Tensor:
        """The mask that is added to the scores: it falls with the distance. It is minus infinity for tokens that are not
        seen: later ones, those outside the window and those of another text."""
        place = torch.arange(tokens.shape[1])
        distance = place[:, None] - place[None, :]
        text = (tokens == EOS).cumsum(1)
        seen = (distance >= 0) & (distance < self.window) & (text[:, :, None] == text[:, None, :])
        slopes = 2.0 ** (-8 * torch.arange(1, self.heads + 1) / self.heads)
        return (-slopes[:, None, None] * distance).masked_fill(~seen[:, None], -math.inf)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays of the file: 16-bit weights by name and layer, and the sizes that their shapes do not show."""
        weights = {name.replace(".", ""): weight.detach().numpy() for name, weight in self.named_parameters()}
        sizes = {"heads": np.array(self.heads), "window": np.array(self.window)}
        return {name: weight.astype(np.float16) for name, weight in weights.items()} | sizes


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def batches(stream: Tensor, random: torch.Generator) -> Iterator[Tensor]:
    """One epoch: the stream from a random place on, cut into rows that come in random order, each with one token more."""
    first = int(torch.randint(LENGTH, (), generator=random))
    rows = stream[first:].unfold(0, LENGTH + 1, LENGTH)
    for chosen in torch.randperm(len(rows), generator=random).split(BATCH):
        yield rows[chosen]


def train(model: Transformer, stream: Tensor, *, epochs: int, seed: int) -> None:
    """Muon for the matrices, which are orthogonal updates that need far fewer steps on little text; Adam for the
    embedding. Products are of 16 bits where the processor has them."""
    random = torch.Generator().manual_seed(seed)
    matrices = [weight for name, weight in model.named_parameters() if name != "embedding"]
    optimizers = [
        torch.optim.Muon(matrices, lr=RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([model.embedding], lr=RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    steps, step, began = epochs * math.ceil(len(stream) / LENGTH / BATCH), 0, time.perf_counter()
    model.train()
    for epoch in range(epochs):
        losses = []
        for rows in batches(stream, random):
            fall = 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2
            for optimizer in optimizers:
                optimizer.zero_grad()
                optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / WARM_UP) * fall
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            losses.append(float(loss.detach()))
            step += 1
        seconds = time.perf_counter() - began
        print(f"epoch {epoch + 1} of {epochs}: loss {sum(losses) / len(losses):.3f}, {seconds:.0f} s", flush=True)
    model.eval()


def network_bits(network: Network, documents: Sequence[Sequence[int]]) -> float:
    """The bits that the network needs for each document and its end, after EOS."""
    total = 0.0
    for ids in documents:
        cache, tokens = network.cache(), [EOS, *ids]
        for start in range(0, len(tokens), network.window):
            piece = tokens[start : start + network.window]
            log_probs = network.log_probs([cache] * len(piece), piece)
            after = [*tokens, EOS][start + 1 : start + 1 + len(piece)]
            total -= float(log_probs[np.arange(len(piece)), after].sum(dtype=np.float64))
    return total / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--texts", type=Path, help="the documents, as scripts/train_lm.py --texts writes them")
    said = "measure on one training document in twenty, which is left out: for choosing the settings"
    parser.add_argument("--validate", action="store_true", help=said)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)

    training, held_out = json.loads(given.texts.read_text(encoding="utf-8")) if given.texts else corpus()
    if given.validate:
        held_out = training[::VALIDATION_ONE_IN]
        training = [document for number, document in enumerate(training) if number % VALIDATION_ONE_IN]
    lm = LanguageModel.load(TABLES)
    stream = token_stream(lm.tokenizer, training)
    model = Transformer(vocabulary=len(lm.tokenizer))
    count = sum(weight.numel() for weight in model.parameters())
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}: {count} weights")
    print(f"training: {len(training)} documents, {len(stream) - 1} tokens", flush=True)
    train(model, torch.from_numpy(stream), epochs=given.epochs, seed=given.seed)
    np.savez(given.out, allow_pickle=False, merges=lm.tokenizer.merges, **model.arrays())

    with np.load(given.out, allow_pickle=False) as weights:
        network = Network(weights)
    documents = [lm.encode(document) for document in held_out]
    tokens, size = sum(map(len, documents)) + len(documents), sum(len(utf8(document)) for document in held_out)
    print(f"weights: {given.out.stat().st_size} bytes")
    print(f"held out: {len(held_out)} documents, {size} bytes, {tokens} tokens")
    print("model        perplexity per token   bits per byte")
    held_stream = token_stream(lm.tokenizer, held_out)
    rows = [("transformer", network_bits(network, documents))]
    if not given.validate:  # the tables have seen all of the training text
        rows.append((f"{ORDER}-gram", bits(lm, held_stream, ORDER)))
    for name, total in rows:
        print(f"{name:12} {2 ** (total / tokens):20.1f} {total / size:15.3f}")


if __name__ == "__main__":
    main()
