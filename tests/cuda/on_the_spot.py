"""What the scripts of this folder share: a tokenizer made on the spot, the command line, and rows of the table."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"w{number}" for number in range(95)]
QUIET: dict[str, Any] = {
    "max_epochs": -1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
    "log_every_n_steps": 1,
}


@dataclass(frozen=True)
class Options:
    """Where and how much to measure.

    Attributes:
        device: "cuda" or "cpu".
        tiny: a few seconds of work, to see that everything runs; its figures mean nothing.
        attention: back-end on the device.
        stop: reading of the monotonic clock after which nothing new is begun.
    """

    device: str
    tiny: bool
    attention: str
    stop: float

    @property
    def accelerator(self) -> str:
        return "gpu" if self.device == "cuda" else "cpu"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name() if self.device == "cuda" else "CPU"

    def time_left(self) -> float:
        return self.stop - time.monotonic()


def parse_options(description: str | None, arguments: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--attention", default="auto", choices=["auto", "varlen", "flash_attn", "sdpa"])
    parser.add_argument("--seconds", type=float, default=600.0)
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device; --device cpu --tiny tries the script without one")
    return Options(given.device, given.tiny, given.attention, time.monotonic() + given.seconds)


def row(check: str, setting: str, result: str) -> None:
    """Print a line of the final table; `run_all.sh` gathers them."""
    print(f"| {check} | {setting} | {result} |", flush=True)


def save_tokenizer(folder: Path) -> str:
    """Save a whole-word tokenizer with BERT's special tokens; returns its folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([*SPECIALS, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="[MASK]", **names).save_pretrained(folder)
    return str(folder)
