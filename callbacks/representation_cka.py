"""Watch how far an encoder's view of fixed texts moves, layer by layer: the distance ``1 - CKA`` from the start."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from typing_extensions import override

from lit_encoders.analysis.cka import FORMS, LEAST_TEXTS, cka_of_grams, gram
from lit_encoders.callbacks.periodic import PeriodicCallback
from lit_encoders.evaluation.embeddings import embed_layers
from lit_encoders.evaluation.texts import first_texts, texts_digest
from lit_encoders.modules.held_out import measuring
from lit_encoders.plots import heat_map


class RepresentationCKA(PeriodicCallback):
    """Measure linear CKA of the live encoder with itself at the start, on fixed texts, for each layer.

    Logs ``cka/<layer>``, the distance ``1 - CKA``. Writes ``cka.csv`` and at the end ``cka.png`` into the run folder;
    with TensorBoard the picture, steps against layers, is an image of the log. Texts are read in both directions, also
    while the run trains causally: so will whoever uses the encoder. A distance says little alone: beside it belongs
    that of a run with another seed (``lit-encoders cka --control``).

    Needs a `LitEncoder`. Source: Touchent, de la Clergerie (2026), arXiv:2605.12438.

    Args:
        text: file of texts, as data.train takes it; not from the training text.
        num_texts: how many, from the first; at least 4.
        every_n_steps: optimizer steps between two measurements, at least 1; the end is always measured.
        form: "plain" is the paper's; see `lit_encoders.analysis.cka.FORMS`.
        sequence_length: longest text in tokens; the rest is cut off.

    Raises:
        ValueError: a setting is out of its range, there are too few texts, or other ones than in the checkpoint.
        TypeError: the module is no LitEncoder.
    """

    def __init__(
        self,
        text: str,
        num_texts: int = 128,
        every_n_steps: int = 100,
        form: str = "debiased, standardised",
        sequence_length: int = 128,
    ) -> None:
        super().__init__(every_n_steps)
        if num_texts < LEAST_TEXTS:
            raise ValueError(f"RepresentationCKA.num_texts must be at least {LEAST_TEXTS}, got {num_texts}")
        if form not in FORMS:
            raise ValueError(f"RepresentationCKA.form must be one of {'; '.join(FORMS)}, got {form!r}")
        self.text = text
        self.num_texts = num_texts
        self.form = FORMS[form]
        self.sequence_length = sequence_length
        # Of each measured step, the distance of each layer.
        self.history: dict[int, list[float]] = {}
        self._texts: list[str] = []
        self._start: Tensor | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not hasattr(pl_module, "backbone") or not hasattr(pl_module, "max_positions"):
            raise TypeError(f"RepresentationCKA needs a LitEncoder, got {type(pl_module).__name__}")
        limit: Any = pl_module.max_positions
        if limit is not None and self.sequence_length > limit:
            raise ValueError(
                f"RepresentationCKA.sequence_length must be at most the model's {limit}, got {self.sequence_length}"
            )
        self._texts = first_texts(
            self.text, self.num_texts, "RepresentationCKA.text", asked_by="RepresentationCKA.num_texts"
        )
        self.history, self._start = {}, None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._start is None:
            self._start = self._grams(pl_module)

    def _grams(self, module: Any) -> Tensor:
        """Gram matrices of all layers, float64 (L, N, N): the start's size does not depend on the model's width."""
        with measuring(module):
            layers = embed_layers(
                module,
                self._texts,
                sequence_length=self.sequence_length,
                slots=max(2048, self.sequence_length),
                causal=False,
            )
        return torch.stack([gram(layer, self.form.standardised) for layer in layers])

    def measure(self, module: LightningModule) -> list[float]:
        """Distance ``1 - CKA`` of each layer from the start, as it is now."""
        assert self._start is not None
        found = cka_of_grams(self._start, self._grams(module), self.form.debiased)
        return (1 - found).tolist()  # type: ignore[no-any-return]

    @override
    def record(self, trainer: Trainer, module: LightningModule) -> dict[str, float]:
        self.history[trainer.global_step] = self.measure(module)
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._write(Path(trainer.default_root_dir))
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_figure("cka", self.picture(), trainer.global_step)
        return {f"cka/{layer}": distance for layer, distance in enumerate(self.history[trainer.global_step])}

    def _write(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        beside = root / ".cka.csv"
        with beside.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(["step", "layer", "distance"])
            table.writerows(
                [step, layer, repr(distance)]
                for step, distances in sorted(self.history.items())
                for layer, distance in enumerate(distances)
            )
        os.replace(beside, root / "cka.csv")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if trainer.is_global_zero and self.history:
            self.picture().savefig(Path(trainer.default_root_dir) / "cka.png", dpi=150, bbox_inches="tight")

    def picture(self) -> Any:
        """Heat map of distances, steps against layers, as a matplotlib figure."""
        steps = sorted(self.history)
        columns = [str(layer) for layer in range(len(self.history[steps[-1]]))]
        values = [self.history[step] for step in steps]
        return heat_map(
            values, [f"step {step}" for step in steps], columns, "distance 1 - CKA from the start, by layer"
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        digest = texts_digest(self._texts)
        return {"texts": digest, "form": list(vars(self.form).values()), "start": self._start, "history": self.history}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["texts"] != texts_digest(self._texts) or state_dict["form"] != list(vars(self.form).values()):
            raise ValueError(
                "RepresentationCKA.text, num_texts and form must be those that the run began with: "
                f"CKA compares the same texts, got '{self.text}' ({self.num_texts} texts)"
            )
        self._start = state_dict["start"]
        self.history = {step: list(distances) for step, distances in state_dict["history"].items()}
