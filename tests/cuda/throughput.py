"""Tokens per second of ModernBERT-base's shape, forward, backward and AdamW, and its share of the device's matrix rate.

Weights and ids are random, packs are full and made beforehand: what is timed is the training step of the library under
Lightning's loop. Blocks of steps take turns with a large matrix product, so that both see the same clocks; medians.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from on_the_spot import QUIET, Options, parse_options, row, save_tokenizer
from torch import Tensor

from lit_encoders import LitMLM
from lit_encoders.data.packs import PackedBatch, Position

# answerdotai/ModernBERT-base, config.json.
BASE: dict[str, Any] = {
    "model_type": "modernbert",
    "vocab_size": 50368,
    "hidden_size": 768,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "intermediate_size": 1152,
    "max_position_embeddings": 8192,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
    "pad_token_id": 50283,
    "bos_token_id": 50281,
    "eos_token_id": 50282,
    "cls_token_id": 50281,
    "sep_token_id": 50282,
}
TINY = {
    **BASE, "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 256, "local_attention": 16, "pad_token_id": 0,
    "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3,
}  # fmt: skip
MASK_RATIO = 0.3  # ModernBERT's own (Warner et al. 2024, arXiv:2412.13663).


def visible_pairs(length: int, causal: bool, reach: int | None) -> int:
    """How many (query, key) pairs a document has; ``reach`` is the largest distance, None for all.

    >>> visible_pairs(3, False, None), visible_pairs(3, True, None), visible_pairs(3, False, 1)
    (9, 6, 7)
    """
    reach = length - 1 if reach is None else min(reach, length - 1)
    one_side = reach * length - reach * (reach + 1) // 2
    return length + (1 if causal else 2) * one_side


def step_flops(config: dict[str, Any], lengths: Sequence[int], causal: bool, num_targets: int) -> dict[str, float]:
    """Floating-point operations of forward and backward, those a matrix unit has to do; a multiplication counts one.

    Returns:
        "linear" (projections, head and decoder) and "attention" (scores and values, visible pairs only).
    """
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    num_full = len(range(0, layers, config["global_attn_every_n_layers"]))
    per_token = 4 * hidden**2 + 3 * hidden * inner
    per_target = hidden**2 + hidden * config["vocab_size"]
    full = sum(visible_pairs(length, causal, None) for length in lengths)
    near = sum(visible_pairs(length, causal, config["local_attention"] // 2) for length in lengths)
    pairs = num_full * full + (layers - num_full) * near
    # The backward takes two products for each of the forward; a product of n x m x k is 2 n m k operations.
    return {
        "linear": 6.0 * (layers * per_token * sum(lengths) + per_target * num_targets),
        "attention": 6.0 * 2 * hidden * pairs,
    }


def make_pack(slots: int, length: int, vocab_size: int, number: int) -> PackedBatch:
    """A full pack of documents of one length: [CLS], random ids, [SEP]."""
    count = slots // length
    draw = torch.Generator().manual_seed(number)
    ids = torch.randint(5, vocab_size, (count, length), generator=draw)
    ids[:, 0], ids[:, -1] = 2, 3
    positions = torch.arange(length).repeat(count)
    segments = torch.arange(count).repeat_interleave(length)
    return PackedBatch(
        input_ids=ids.flatten(),
        position_ids=positions,
        segment_ids=segments,
        segment_starts=segments * length,
        document_positions=positions - 1,
        segment_lengths=np.full(count, length),
        documents=np.arange(count) + number * count,
        eligible_span=np.tile([0, length - 2], (count, 1)),
        here=Position(0, 0, number),
        after=Position(0, 0, number + 1),
    )


class Packs:
    """The same few packs again and again, without length."""

    def __init__(self, packs: list[PackedBatch]) -> None:
        self.packs = packs

    def __iter__(self) -> Iterator[PackedBatch]:
        return cycle(self.packs)


class MatrixRate:
    """Rate of a large square product of random numbers in bfloat16, operations per second."""

    def __init__(self, device: str, size: int) -> None:
        self.size = size
        self.left, self.right, self.out = (torch.randn(size, size).to(device, torch.bfloat16) for _ in range(3))
        self.num_bytes = sum(x.numel() * x.element_size() for x in (self.left, self.right, self.out))

    def measure(self, repeats: int = 10) -> float:
        torch.mm(self.left, self.right, out=self.out)
        wait(self.out)
        start = time.perf_counter()
        for _ in range(repeats):
            torch.mm(self.left, self.right, out=self.out)
        wait(self.out)
        return 2.0 * self.size**3 * repeats / (time.perf_counter() - start)


def wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


class Blocks(Callback):
    """Times blocks of steps and measures the matrix rate after each. The first block warms up and is not counted."""

    def __init__(self, steps: int, matrix: MatrixRate) -> None:
        self.steps, self.matrix = steps, matrix
        self.seconds: list[float] = []
        self.rates: list[float] = []
        self.targets: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.steps == 0:
            wait(self.matrix.out)
            self.start = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.steps:
            return
        wait(self.matrix.out)
        seconds = time.perf_counter() - self.start
        if batch_idx >= self.steps:
            self.seconds.append(seconds)
            self.rates.append(self.matrix.measure())
            self.targets.append(float(trainer.callback_metrics["train/targets"]))


def measure(options: Options, folder: Path, objective: Any, length: int, slots: int) -> str:
    """One line of the table."""
    config = TINY if options.tiny else BASE
    steps, num_blocks = (1, 2) if options.tiny else (4, 6)
    cuda = options.device == "cuda"
    module = LitMLM(
        dict(config), tokenizer=str(folder), objective=objective, mask_ratio=MASK_RATIO, attention=options.attention
    )
    packs = [make_pack(slots, length, config["vocab_size"], number) for number in range(4)]
    blocks = Blocks(steps, MatrixRate(options.device, 128 if options.tiny else 8192))
    if cuda:
        gc.collect()  # The model measured before hangs in a cycle with its trainer.
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(
        **QUIET,
        accelerator=options.accelerator,
        devices=1,
        precision="bf16-mixed",
        max_steps=steps * num_blocks,
        default_root_dir=folder,
        callbacks=[blocks],
    )
    trainer.fit(module, Packs([pack.pin_memory() for pack in packs] if cuda else packs))
    flops = step_flops(config, [length] * (slots // length), objective == "clm", round(median(blocks.targets)))
    seconds, rate = median(blocks.seconds) / steps, median(blocks.rates)
    share = sum(flops.values()) / seconds / rate
    speed = f"{slots / seconds:,.0f} tokens/s with {module._backend}, {share:.1%} of {rate / 1e12:.3g} TFLOP/s"
    if not cuda:
        return speed
    return f"{speed}, peak {(torch.cuda.max_memory_allocated() - blocks.matrix.num_bytes) / 2**30:.1f} GiB"


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(__doc__, arguments)
    lengths, slots = ((32, 128), 256) if options.tiny else ((1024, 8192), 32768)
    failed = False
    with tempfile.TemporaryDirectory() as name:
        save_tokenizer(Path(name))
        for objective in ("mlm", "clm"):
            for length in lengths:
                ratio = f" {MASK_RATIO:.0%}" if objective == "mlm" else ""
                shape = "tiny" if options.tiny else "ModernBERT-base"
                setting = (
                    f"{options.name}, bf16-mixed, {shape}, {objective.upper()}{ratio}, {length:,} tokens a document, "
                    f"{slots:,} slots"
                )
                if options.time_left() < 0:
                    row("throughput", setting, "not reached")
                    continue
                try:
                    row("throughput", setting, measure(options, Path(name), objective, length, slots))
                except torch.OutOfMemoryError:
                    row("throughput", setting, "does not fit into the device's memory")
                    failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
