"""Models of transformers that are small: random ones, and one that says by heart what it is told to say."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

SENTENCE = "the server reads the request and answers it; the client waits for the answer, and reads it. "
BOS, EOS = 0, 1


def needed(module: str) -> Any:
    """The module; without it the test is skipped, or fails where the environment was made for it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        if module in os.environ.get("EVERYWIRE_REQUIRE", "").split(","):
            pytest.fail(f"{module} is required here and is not installed")
        pytest.skip(f"{module} is not installed")


def tokenizer(chat_template: str | None = None, *, begins: bool = False) -> Any:
    """Byte-level byte-pair encoding: all single bytes, and words of SENTENCE. One that `begins` puts BOS before a text."""
    transformers, tokenizers = needed("transformers"), needed("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator([SENTENCE] * 3, trainer)
    if begins:
        made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    found.chat_template = chat_template
    return found


def save(
    path: Path, *, kind: str = "llama", positions: int = 128, chat_template: str | None = None, begins: bool = False
) -> Path:
    """Writes a model of two layers whose weights are random, the same ones each time."""
    torch, transformers = needed("torch"), needed("transformers")
    words = tokenizer(chat_template, begins=begins)
    common = {"vocab_size": len(words), "bos_token_id": BOS, "eos_token_id": EOS}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=positions, **common)
    else:
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=positions, initializer_range=0.5, **common,
        )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(config)
    return _write(path, model, words)


def save_reciting(path: Path, text: str) -> Path:
    """Writes a model that after any token of this text generates the rest of it, and then ends. No token may be there twice.

    The layers add nothing. Each token has a direction, and the row of the head for the next token has the same direction.
    """
    torch, transformers = needed("torch"), needed("transformers")
    words = tokenizer()
    chain = [*words.encode(text), EOS]
    assert len(set(chain)) == len(chain), f"{text!r} has a token twice"
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=128, bos_token_id=BOS, eos_token_id=EOS,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(config)
        direction = torch.randn(len(words), 64)
    direction /= direction.norm(dim=1, keepdim=True)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(direction)
        model.lm_head.weight.zero_()
        for token, following in itertools.pairwise(chain):
            model.lm_head.weight[following] = direction[token]
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return _write(path, model, words)


def _write(path: Path, model: Any, words: Any) -> Path:
    model.save_pretrained(path)
    words.save_pretrained(path)
    return path


def reference(path: Path) -> tuple[Any, Any]:
    """The model and its tokenizer as transformers has them."""
    transformers = needed("transformers")
    return (
        transformers.AutoModelForCausalLM.from_pretrained(path),
        transformers.AutoTokenizer.from_pretrained(path),
    )


def generated(path: Path, ids: Sequence[int], seed: int = 0, **options: Any) -> tuple[list[int], Any]:
    """Returns the new tokens of transformers' own `generate` after these ids, and the log-probabilities of each step."""
    torch = needed("torch")
    model, _ = reference(path)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        asked = {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": EOS, **options}
        made = model.generate(torch.tensor([list(ids)]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), **asked)
    logits = torch.cat(made.logits)
    return made.sequences[0, len(ids) :].tolist(), torch.log_softmax(logits.float(), dim=-1)
