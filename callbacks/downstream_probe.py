"""Watch what an encoder is good for while it trains: the detour's payoff does not show in a pretraining loss."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lit_encoders.callbacks.periodic import PeriodicCallback, log_now
from lit_encoders.data.sources import in_split
from lit_encoders.evaluation.embeddings import Pooling, embed
from lit_encoders.evaluation.items import LabelledText, read_labelled
from lit_encoders.evaluation.linear_probes import fit_classifier
from lit_encoders.evaluation.presets import PRESETS
from lit_encoders.evaluation.scores import class_scores
from lit_encoders.evaluation.tasks import Classification, spread
from lit_encoders.modules.held_out import measuring

_TEST_SHARE = 0.3
MEASURES = ("accuracy", "macro_f1")


class DownstreamProbe(PeriodicCallback):
    """Embed a small labelled set with the live encoder, and fit and test a logistic regression on it.

    Logs ``probe/<name>/{accuracy,macro_f1}`` at the start, every so many steps and at the end, and with TensorBoard
    against tokens; writes ``probe-<name>.csv`` into the run folder. Texts are read in both directions, also while the
    run trains causally. A thousand short texts cost a laptop's MiniLM some ten seconds; on a GPU the fit alone counts.
    The figures of two runs differ by chance too: compare several seeds (``lit-encoders evaluate``).

    Needs a `LitEncoder`, and scikit-learn (the extra ``eval``).

    Args:
        train: file of labelled texts, as data.train takes it, or a preset for classification, such as "hpo_branches".
        test: file of labelled texts; None holds out three in ten of ``train``, by content. Of a preset its own.
        name: of the set, in the log.
        text: column of the text.
        label: column of the class.
        every_n_steps: optimizer steps between two measurements, at least 1.
        limit: most texts to fit on, and most to test on, evenly from all.
        sequence_length: longest text in tokens; the rest is cut off.
        pooling: see `lit_encoders.evaluation.embeddings.pool`.

    Raises:
        ValueError: a setting is out of its range, a file or column is missing, or a tested class is in no training
            text.
        TypeError: the module is no LitEncoder.
    """

    def __init__(
        self,
        train: str,
        test: str | None = None,
        name: str = "probe",
        text: str = "text",
        label: str = "label",
        every_n_steps: int = 500,
        limit: int = 1000,
        sequence_length: int = 128,
        pooling: Pooling = "mean",
    ) -> None:
        super().__init__(every_n_steps)
        if limit < 1:
            raise ValueError(f"DownstreamProbe.limit must be at least 1, got {limit}")
        if not name or "/" in name:
            raise ValueError(f"DownstreamProbe.name must be usable as a file name, got {name!r}")
        self.train, self.test, self.name = train, test, name
        self.text, self.label = text, label
        self.limit = limit
        self.sequence_length = sequence_length
        self.pooling: Pooling = pooling
        # Of each measured step, accuracy and macro F1.
        self.history: dict[int, dict[str, float]] = {}
        self._items: dict[str, Sequence[LabelledText]] = {}

    @property
    @override
    def state_key(self) -> str:
        # Not the name alone: two of one name are refused with a better message than Lightning's.
        return self._generate_state_key(name=self.name, train=self.train)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not hasattr(pl_module, "backbone") or not hasattr(pl_module, "max_positions"):
            raise TypeError(f"DownstreamProbe needs a LitEncoder, got {type(pl_module).__name__}")
        limit: Any = pl_module.max_positions
        if limit is not None and self.sequence_length > limit:
            raise ValueError(
                f"DownstreamProbe.sequence_length must be at most the model's {limit}, got {self.sequence_length}"
            )
        alike = [c for c in trainer.callbacks if isinstance(c, DownstreamProbe) and c.name == self.name]  # type: ignore[attr-defined]
        if len(alike) > 1:
            raise ValueError(f"DownstreamProbe.name must differ between probes, got {self.name!r} twice")
        self._items = {name: spread(items, self.limit) for name, items in self._read().items()}
        unseen = {item.label for item in self._items["test"]} - {item.label for item in self._items["train"]}
        if unseen:
            raise ValueError(
                "DownstreamProbe.test must have only labels that stand among those fitted on (raise limit?), "
                f"got {min(unseen)!r}"
            )
        self.history = {}

    def _read(self) -> dict[str, Sequence[LabelledText]]:
        preset = PRESETS.get(self.train)
        if preset is not None and not isinstance(preset, Classification):
            raise ValueError(f"DownstreamProbe.train must be a task of classification, got the preset {self.train!r}")
        if preset is not None and self.test is None:
            loaded = preset.load()
            return {"train": loaded.train, "test": loaded.test}
        items = read_labelled(self.train, "DownstreamProbe.train", self.text, self.label)
        if self.test is not None:
            return {"train": items, "test": read_labelled(self.test, "DownstreamProbe.test", self.text, self.label)}
        sides = [[item for item in items if in_split(item.text, _TEST_SHARE) is tested] for tested in (False, True)]
        if not all(sides):
            raise ValueError(f"DownstreamProbe.train must hold enough texts to hold some out, got {len(items)}")
        return {"train": sides[0], "test": sides[1]}

    def measure(self, module: Any) -> dict[str, float]:
        """Accuracy and macro F1 of a fresh probe on the encoder as it is now."""
        with measuring(module):
            vectors = {
                name: embed(
                    module,
                    [item.text for item in items],
                    sequence_length=self.sequence_length,
                    slots=max(4096, self.sequence_length),
                    pooling=self.pooling,
                    causal=False,
                )
                for name, items in self._items.items()
            }
        labels = {name: [item.label for item in items] for name, items in self._items.items()}
        probe = fit_classifier(vectors["train"], labels["train"])
        scores = class_scores(labels["test"], probe.predict(vectors["test"].numpy()), sorted(set(labels["train"])))
        return {measure: scores.value(measure) for measure in MEASURES}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 0 and not self.history:
            log_now(trainer, pl_module, self.record(trainer, pl_module))

    @override
    def record(self, trainer: Trainer, module: LightningModule) -> dict[str, float]:
        found = self.measure(module)
        self.history[trainer.global_step] = found
        figures = {f"probe/{self.name}/{measure}": value for measure, value in found.items()}
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._write(Path(trainer.default_root_dir))
        if hasattr(module, "log_against_tokens"):
            module.log_against_tokens(figures)  # type: ignore[operator]
        return figures

    def _write(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        beside = root / f".probe-{self.name}.csv"
        with beside.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(["step", *MEASURES])
            table.writerows([step, *(repr(found[m]) for m in MEASURES)] for step, found in sorted(self.history.items()))
        os.replace(beside, root / f"probe-{self.name}.csv")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = {step: dict(found) for step, found in state_dict["history"].items()}
