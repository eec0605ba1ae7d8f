"""Tiny models, and files of items that a tiny model can learn."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

# Of a number and a seed.
Records = Callable[[int, int], list[dict[str, Any]]]
Write = Callable[[str, Sequence[dict[str, Any]]], str]


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory, make_tokenizer: Any) -> Path:
    """A saved tiny decoder with a tokenizer that has nothing to mask with."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "llama"
    sizes = {"vocab_size": 95, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**sizes, **ids, num_hidden_layers=2)).save_pretrained(folder)
    make_tokenizer(mask_token=None).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def other_bert(tmp_path_factory: pytest.TempPathFactory, bert_folder: Path, make_tokenizer: Any) -> Path:
    """The tiny BERT with other weights."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    folder = tmp_path_factory.mktemp("other") / "bert"
    torch.manual_seed(5)
    BertForMaskedLM(BertConfig.from_pretrained(bert_folder)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write records as JSON lines; give the path."""

    def to_file(name: str, records: Sequence[dict[str, Any]]) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(path)

    return to_file


def draw_labelled(count: int, seed: int) -> list[dict[str, Any]]:
    """Texts of two classes: words below w45, and words from there on."""
    draw = random.Random(seed)
    records = []
    for number in range(count):
        side = number % 2
        words = [f"w{45 * side + draw.randrange(45)}" for _ in range(draw.randint(2, 9))]
        records.append({"text": " ".join(words), "label": "high" if side else "low", "part": "ab"[number % 3 == 0]})
    return records


def draw_tagged(count: int, seed: int) -> list[dict[str, Any]]:
    """Sentences of spans of two types: the word says the tag, w0 to w3 begin one of X, w4 to w7 go on with it, ..."""
    draw = random.Random(seed)
    tags = ["B-X", "I-X", "B-Y", "I-Y"]
    records = []
    for _ in range(count):
        places = [draw.choice([4, 4, 0, 2]) for _ in range(draw.randint(3, 6))]
        # A span of two words for every beginning.
        places = [place for first in places for place in ([first, first + 1] if first < 4 else [first])]
        words = [f"w{4 * place + draw.randrange(4)}" for place in places]
        records.append({"tokens": words, "tags": [[*tags, "O"][place] for place in places]})
    return records


def draw_pairs(count: int, seed: int) -> list[dict[str, Any]]:
    """Queries of three words, and documents of three others that go with them, word for word."""
    draw = random.Random(seed)
    records = []
    for _ in range(count):
        numbers = draw.sample(range(45), 3)
        records.append(
            {
                "query": " ".join(f"w{number}" for number in numbers),
                "document": " ".join(f"w{45 + number}" for number in numbers),
            }
        )
    return records


@pytest.fixture(scope="session")
def labelled_records() -> Records:
    return draw_labelled


@pytest.fixture(scope="session")
def tagged_records() -> Records:
    return draw_tagged


@pytest.fixture(scope="session")
def pair_records() -> Records:
    return draw_pairs
