"""The training script: what it reads, and that its tables make a true model."""

from __future__ import annotations

import ast
import importlib.util
import math
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType

import numpy as np
import pytest

from models.library.lm.model import LanguageModel
from models.library.lm.tokenizer import EOS, Tokenizer

SCRIPT = Path(__file__).parents[3] / "scripts" / "train_lm.py"


@pytest.fixture(scope="module")
def train() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_lm", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_of_other_text_make_a_model_that_knows_it(train: ModuleType, tmp_path: Path) -> None:
    documents = [topics[name] for name in sorted(topics)]
    training, held_out = documents[:24], documents[24:26]
    merges = train.train_merges(training)
    tokenizer = Tokenizer(merges)
    stream, held_stream = train.token_stream(tokenizer, training), train.token_stream(tokenizer, held_out)
    np.savez(tmp_path / "tables.npz", **train.tables(tokenizer, merges, stream))
    model = LanguageModel.load(tmp_path / "tables.npz")

    for end in (0, 1, 50, len(stream)):
        context = stream[:end].tolist()
        assert abs(float(np.exp(model.next_log_probs(context)).sum()) - 1) < 1e-9
    tokens = held_stream[:1500]
    assert train.bits(model, tokens, 5) < train.bits(model, tokens, 2) < train.unigram_bits(stream, tokens, len(tokenizer))


def test_a_certain_continuation_is_nearly_certain(train: ModuleType) -> None:
    model = LanguageModel.load()
    context = [EOS, *model.encode("It was generated with gencodec.py.")]
    assert model.next_log_probs(context)[EOS] > math.log(0.8)


def test_docstrings_of_modules_classes_and_functions_are_read(train: ModuleType) -> None:
    tree = ast.parse('"""Module."""\nclass C:\n    """Class."""\n    def f(self):\n        """Method."""\n')
    assert list(train.docstrings(tree)) == ["Module.", "Class.", "Method."]


def test_wrapped_lines_are_joined_and_short_ones_keep_their_ends(train: ModuleType) -> None:
    long = "A line that was wrapped because it came to the margin,"
    assert train.unwrap([long, "goes  on here."]) == f"{long} goes on here."
    assert train.unwrap(["- one", "- two"]) == "- one\n- two"


@pytest.mark.parametrize(
    "line",
    [">>> code()", "    indented", "| table |", "+------+", "Written by Somebody", "mail to a@example.org", "(c) Copyright"],
)
def test_what_is_not_prose_is_left_out(train: ModuleType, line: str) -> None:
    assert train.is_prose(["Some prose.", "More of it."])
    assert not train.is_prose(["Some prose.", line])
