"""lm_eval's local-completions, unmodified: the sums and the greedy flags of its choices are those of the model itself."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

from models.backends.transformers import _byte_alphabet
from models.library.lm import tokenizer as pieces
from models.library.lm.model import LanguageModel
from tests.interop.servers import LIBRARY, Server, serving, tables
from tests.models.backends import tiny_transformers as tiny

pytestmark = [
    pytest.mark.usefixtures("lm_eval"),  # before any server: where it is absent, none need start
    pytest.mark.filterwarnings("default"),  # its own
]

CONTEXTS = ["Return the", "The value of", "If the file is", "the server", "the client waits for", "é, and it"]
OTHERS = [" answers it", " name", "!", " é"]
TASK = """
task: two_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


class Reference(Protocol):
    """A model as it is without a server."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def log_probs(self, ids: Sequence[int]) -> list[list[float]]:
        """Those of all tokens after each of these, the last included."""


@pytest.fixture(scope="module")
def lm_eval(needs: Callable[[str, str], Any]) -> None:
    for module in ("torch", "transformers", "tokenizers", "lm_eval"):
        needs(module, module)


class Ngrams:
    """The library's `lm`."""

    def __init__(self, folder: Path) -> None:
        self._model = LanguageModel.load()
        self.encode, self.decode = self._model.encode, self._model.decode
        self._write(folder)

    def log_probs(self, ids: Sequence[int]) -> list[list[float]]:
        model = self._model
        return [model.next_log_probs([pieces.EOS, *ids[:end]]).tolist() for end in range(1, len(ids) + 1)]

    def _write(self, folder: Path) -> None:
        """Its tokenizer as lm_eval loads one: the same merges in the words of `tokenizers`."""
        tokenizers, transformers = tiny.needed("tokenizers"), tiny.needed("transformers")
        own = self._model.tokenizer
        spelled = {byte: character for character, byte in _byte_alphabet().items()}
        names = ["<eos>", *("".join(spelled[byte] for byte in own.bytes_of(token)) for token in range(1, len(own)))]
        merges = [(names[left], names[right]) for left, right in own.merges]
        made = tokenizers.Tokenizer(tokenizers.models.BPE({name: i for i, name in enumerate(names)}, merges))
        split, by_bytes = tokenizers.pre_tokenizers.Split, tokenizers.pre_tokenizers.ByteLevel
        cut = split(tokenizers.Regex(pieces._PIECE.pattern), behavior="isolated")
        made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([cut, by_bytes(add_prefix_space=False, use_regex=False)])
        made.decoder = tokenizers.decoders.ByteLevel()
        transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>").save_pretrained(folder)


class Tiny:
    """A Llama with random weights, which transformers itself runs."""

    def __init__(self, folder: Path) -> None:
        self._model, self._words = tiny.reference(tiny.save(folder))

    def encode(self, text: str) -> list[int]:
        return list(self._words.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._words.decode(ids))

    def log_probs(self, ids: Sequence[int]) -> list[list[float]]:
        torch = tiny.needed("torch")
        with torch.no_grad():
            found: list[list[float]] = torch.log_softmax(self._model(torch.tensor([list(ids)])).logits[0], dim=-1).tolist()
        return found


MODELS: dict[str, Callable[[Path], Reference]] = {"lm": Ngrams, "tiny": Tiny}


@pytest.fixture(scope="module")
def references(lm_eval: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Reference, Path]]:
    """Each model, and the folder with its tokenizer."""
    made = {}
    for name, make in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        made[name] = make(folder), folder
    return made


@pytest.fixture(scope="module")
def server(references: dict[str, tuple[Reference, Path]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = {"lm": LIBRARY["lm"], "tiny": "models.backends.transformers:load"}
    options = f'options = {{ path = "{references["tiny"][1]}" }}'
    with serving(tmp_path_factory.mktemp("server"), "served.py", [*tables(models), options]) as server:
        yield server


def choices(model: Reference, context: str) -> list[str] | None:
    """The continuation that the model itself would give, and another one; None if its text has other tokens."""
    ids = model.encode(context)
    said: list[int] = []
    while len(said) < 2:
        row = model.log_probs([*ids, *said])[-1]
        said.append(row.index(max(row)))
    own = model.decode(said)
    if model.encode(context + own) != [*ids, *said]:
        return None
    return [own, *[other for other in OTHERS if other != own][len(ids) % 3 :][:1]]


def scored(model: Reference, context: str, choice: str) -> tuple[float, bool]:
    """The sum of the log-probabilities of a continuation, and True if each of its tokens is the most probable one."""
    before, ids = len(model.encode(context)), model.encode(context + choice)
    rows = model.log_probs(ids)[before - 1 : -1]
    values = [(row[token], max(row)) for token, row in zip(ids[before:], rows, strict=True)]
    return math.fsum(value for value, _ in values), all(value == best for value, best in values)


@pytest.mark.parametrize("name", MODELS)
def test_sums_and_greedy_flags_are_those_of_the_model(
    name: str, references: dict[str, tuple[Reference, Path]], server: Server, tmp_path: Path
) -> None:
    model, folder = references[name]
    contexts = [" ".join(pair) for pair in itertools.permutations(CONTEXTS, 2)]
    asked = [{"context": context, "choices": found} for context in contexts if (found := choices(model, context))][:12]
    data, out = tmp_path / "asked.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps(question) + "\n" for question in asked))
    (tmp_path / "two_choices.yaml").write_text(TASK.format(data=data))
    known = f"model={name},base_url={server.url}/v1/completions,tokenizer={folder},tokenizer_backend=huggingface"
    command = [
        *(sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--tasks", "two_choices"),
        *("--model_args", f"{known},tokenized_requests=False,max_retries=1", "--batch_size", "5"),
        *("--include_path", str(tmp_path), "--output_path", str(out), "--log_samples"),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path), "OPENAI_API_KEY": "any"}
    subprocess.run(command, check=True, env={**os.environ, **offline}, timeout=300)
    (samples,) = out.rglob("samples_two_choices_*.jsonl")
    told = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(told) == len(asked) == 12
    flags = set()
    for sample in told:
        for choice, (said,) in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            total, greedy = scored(model, sample["doc"]["context"], choice)
            assert float(said[0]) == pytest.approx(total, abs=1e-4)
            assert str(said[1]) == str(greedy)
            flags.add(greedy)
    assert flags == {True, False}
