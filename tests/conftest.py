"""Tiny models, tokenizers and texts made on the spot: no test needs a network or a model hub."""

from __future__ import annotations

import os

# Before torch is imported: threads that spin at barriers make a step 70 times slower beside another process.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Tests run on two processors side by side; tiny models gain nothing from more threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORDS = [f"w{number}" for number in range(90)]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCAB_SIZE = len(SPECIALS) + len(WORDS)

TINY_BERT: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
TINY_MODERNBERT: dict[str, Any] = {
    "model_type": "modernbert",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "local_attention": 16,
    "global_attn_every_n_layers": 3,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
}


def word_tokenizer(mask_token: str | None = "[MASK]") -> Any:
    """A whole-word tokenizer with BERT's special tokens: [CLS] text [SEP]."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([*SPECIALS, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, mask_token=mask_token, **names)


def make_text(path: Path, documents: int = 200, seed: int = 0, longest: int = 40) -> Path:
    """Write one document a line, of 1 to ``longest`` words; later words follow from earlier ones, so CLM can learn."""
    import random

    draw = random.Random(seed)
    lines = []
    for _ in range(documents):
        place, words = draw.randrange(len(WORDS)), []
        for _ in range(draw.randint(1, longest)):
            words.append(WORDS[place])
            place = (place * 7 + draw.choice([1, 2, 3])) % len(WORDS)
        lines.append(" ".join(words))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return word_tokenizer()


@pytest.fixture(scope="session")
def make_tokenizer() -> Any:
    return word_tokenizer


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny BERT with its MLM head and tokenizer."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    folder = tmp_path_factory.mktemp("models") / "bert"
    torch.manual_seed(0)
    settings = {key: value for key, value in TINY_BERT.items() if key != "model_type"}
    BertForMaskedLM(BertConfig(**settings)).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def quiet_bert(bert_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model without dropout: the same arithmetic on any number of ranks, and by hand."""
    import json
    import shutil

    folder = tmp_path_factory.mktemp("quiet") / "bert"
    shutil.copytree(bert_folder, folder)
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("text") / "train.txt")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenised corpora of tests never land in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Any]:
    """Quiet trainers on the CPU that leave no files of their own."""

    def make(**settings: Any) -> Any:
        from lightning.pytorch import Trainer

        defaults: dict[str, Any] = {
            "default_root_dir": tmp_path,
            "accelerator": "cpu",
            "max_epochs": -1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
        }
        return Trainer(**{**defaults, **settings})

    return make
