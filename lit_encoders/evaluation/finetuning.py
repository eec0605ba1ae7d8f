"""Fine-tuning an encoder for a task: packs of texts, one linear head or none, Lightning's trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from typing_extensions import override

from lit_encoders.data.packs import IntArray
from lit_encoders.evaluation.embeddings import Pooling, pool
from lit_encoders.models.attention import PackLayout
from lit_encoders.modules.lit_encoder import LitEncoder
from lit_encoders.modules.open_module import measuring_device
from lit_encoders.modules.precision import automatic_precision
from lit_encoders.optim.param_groups import parameter_groups
from lit_encoders.optim.schedules import phase_factor


@dataclass(frozen=True)
class FineTuning:
    """How to fine-tune.

    Attributes:
        epochs: passes over the training items.
        batch: items of a step.
        learning_rate: peak, of AdamW; it falls to 0 as a line.
        weight_decay: of AdamW, on matrices.
        warmup_share: of all steps, in [0, 1].
        sequence_length: longest text in tokens; the rest is cut off.
        pooling: a text's vector, the mean of its tokens or the first.
        temperature: that cosines are divided by, where queries learn to find their documents.
    """

    epochs: int = 3
    batch: int = 16
    learning_rate: float = 5e-5
    weight_decay: float = 0.01
    warmup_share: float = 0.1
    sequence_length: int = 256
    pooling: Pooling = "mean"
    temperature: float = 0.05

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "sequence_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"fine_tuning.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"fine_tuning.{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"fine_tuning.weight_decay must be at least 0, got {self.weight_decay}")
        if not 0 <= self.warmup_share <= 1:
            raise ValueError(f"fine_tuning.warmup_share must be in [0, 1], got {self.warmup_share}")
        if self.pooling not in get_args(Pooling):
            raise ValueError(f"fine_tuning.pooling must be one of {', '.join(get_args(Pooling))}, got {self.pooling!r}")


@dataclass(frozen=True)
class Example:
    """An item to learn from, in tokens.

    Attributes:
        rows: its texts, special tokens included: one, or a query and its document.
        labels: number of the class, or of each word's tag.
        places: of the words' first pieces, in the first text, one for each label; none for the text as a whole.
    """

    rows: tuple[tuple[int, ...], ...]
    labels: tuple[int, ...] = ()
    places: tuple[int, ...] = ()


@dataclass(frozen=True)
class TaskBatch:
    """Examples in one pack.

    Attributes:
        input_ids: int64 (T,).
        position_ids: position of each token in its text, int64 (T,).
        sizes: tokens of each text, on the host, (N,); of queries and documents all queries come first.
        lengths: the same on the device, int64 (N,).
        slots: of words' first pieces, int64 (K,); none for whole texts.
        labels: int64 (K,), or (N,) for whole texts.
        twins: of queries and documents, pairs of two of them that share the query or the document: neither is the
            other's negative, bool (N / 2, N / 2).
    """

    input_ids: Tensor
    position_ids: Tensor
    sizes: IntArray
    lengths: Tensor
    slots: Tensor
    labels: Tensor
    twins: Tensor | None = None


def collate(examples: Sequence[Example]) -> TaskBatch:
    """Pack examples: no padding, whatever their lengths.

    >>> batch = collate([Example(((5, 6),), (1,)), Example(((7,),), (0,))])
    >>> batch.input_ids.tolist(), batch.sizes.tolist(), batch.labels.tolist()
    ([5, 6, 7], [2, 1], [1, 0])
    """
    texts = [example.rows[side] for side in range(len(examples[0].rows)) for example in examples]
    sizes = np.array([len(row) for row in texts], dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    return TaskBatch(
        torch.tensor([token for row in texts for token in row]),
        torch.cat([torch.arange(size) for size in sizes.tolist()]),
        sizes,
        torch.from_numpy(sizes),
        torch.tensor(
            [int(start) + place for start, example in zip(starts, examples, strict=False) for place in example.places],
            dtype=torch.int64,
        ),
        torch.tensor([label for example in examples for label in example.labels], dtype=torch.int64),
        _twins(examples) if len(examples[0].rows) > 1 else None,
    )


def _twins(examples: Sequence[Example]) -> Tensor:
    found = torch.zeros(len(examples), len(examples), dtype=torch.bool)
    for side in range(len(examples[0].rows)):
        numbers: dict[tuple[int, ...], int] = {}
        same = torch.tensor([numbers.setdefault(example.rows[side], len(numbers)) for example in examples])
        found |= same[:, None] == same
    return found.fill_diagonal_(False)


class FineTuner(LightningModule):
    """An encoder with a linear head over texts or over words; without classes, queries learn to find their documents.

    Args:
        encoder: of the model, whose encoder learns too; its LM head rests.
        num_classes: of the head; 0 for none.
        settings: see `FineTuning`.
        total_steps: optimizer steps.
    """

    def __init__(self, encoder: LitEncoder, num_classes: int, settings: FineTuning, total_steps: int) -> None:
        super().__init__()
        encoder.configure_model()
        assert encoder.backbone is not None
        self.encoder = encoder
        self.settings = settings
        self.total_steps = total_steps
        self.head = nn.Linear(encoder.config.hidden_size, num_classes) if num_classes else None
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)

    def hidden(self, batch: TaskBatch) -> Tensor:
        """Last hidden states of a pack, read in both directions unless the model is for CLM alone, (T, D)."""
        assert self.encoder.backbone is not None
        packing = PackLayout(batch.sizes, causal=self.encoder.objective == "clm")
        return self.encoder.backbone.encode(batch.input_ids, batch.position_ids, packing)

    def loss(self, batch: TaskBatch) -> Tensor:
        """Mean loss of a batch, scalar."""
        hidden = self.hidden(batch)
        if self.head is None:
            vectors = pool(hidden, batch.lengths, self.settings.pooling)
            return in_batch_loss(vectors, self.settings.temperature, batch.twins)
        if len(batch.slots):
            return cross_entropy(self.head(hidden[batch.slots]).float(), batch.labels)
        return cross_entropy(self.head(pool(hidden, batch.lengths, self.settings.pooling)).float(), batch.labels)

    @override
    def training_step(self, batch: TaskBatch, batch_idx: int) -> Tensor:
        return self.loss(batch)

    @override
    def transfer_batch_to_device(self, batch: TaskBatch, device: torch.device, dataloader_idx: int) -> TaskBatch:
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(batch).items() if isinstance(value, Tensor)
        }
        return replace(batch, **moved)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        assert self.encoder.backbone is not None
        base, head = self.encoder.backbone.model.base_model, self.head
        learning = nn.ModuleDict({"encoder": base, **({} if head is None else {"head": head})})
        groups = parameter_groups(learning, self.settings.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=self.settings.learning_rate)
        warmup = round(self.settings.warmup_share * self.total_steps)

        def factor(step: int) -> float:
            # From the first step on: a rate of 0 would waste it, which matters where there are few.
            return phase_factor(step + 1, self.total_steps + 1, warmup, "linear")

        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}


def in_batch_loss(vectors: Tensor, temperature: float, twins: Tensor | None = None) -> Tensor:
    """Cross-entropy of each query's own document among all documents of the batch, and the other way round.

    Args:
        vectors: of the queries, then of their documents in the same order, (2 N, D).
        temperature: that cosines are divided by.
        twins: pairs that are no negatives, symmetric, bool (N, N); None for none. See `TaskBatch`.

    Returns:
        Scalar, nats. Source: van den Oord et al. (2018), arXiv:1807.03748.
    """
    queries, documents = normalize(vectors.float(), dim=1).chunk(2)
    scores = queries @ documents.T / temperature
    if twins is not None:
        scores = scores.masked_fill(twins, -torch.inf)
    own = torch.arange(len(scores), device=scores.device)
    return (cross_entropy(scores, own) + cross_entropy(scores.T, own)) / 2


def fine_tune(
    open_encoder: Callable[[], LitEncoder],
    examples: Sequence[Example],
    num_classes: int,
    settings: FineTuning,
    seed: int,
) -> FineTuner:
    """Fine-tune an encoder, quietly; the result is in evaluation mode, its head on the CPU, where embeddings are.

    Args:
        open_encoder: gives the model as it stands, with a precision of its own.
        examples: to learn from.
        num_classes: of the head; 0 for none.
        settings: see `FineTuning`.
        seed: of the head's start, the order of examples and dropout.
    """
    steps = settings.epochs * math.ceil(len(examples) / settings.batch)
    accelerator = "gpu" if measuring_device().type == "cuda" else "cpu"
    devices = [torch.cuda.current_device()] if accelerator == "gpu" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        tuner = FineTuner(open_encoder(), num_classes, settings, steps).train()
        loader: DataLoader[Example] = DataLoader(
            list(examples),  # type: ignore[arg-type]
            batch_size=settings.batch,
            shuffle=True,
            generator=torch.Generator().manual_seed(seed),
            collate_fn=collate,
        )
        trainer = Trainer(
            accelerator=accelerator,
            devices=1,
            precision=automatic_precision("cuda" if accelerator == "gpu" else "cpu"),  # type: ignore[arg-type]
            max_steps=steps,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(tuner, loader)
    tuner.cpu().eval()
    tuner.encoder.to(measuring_device())
    return tuner
