"""One training run and one measurement, quietly: what every study is made of."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_encoders.modules.lit_mlm import LitMLM

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer

    from lit_encoders.callbacks import Phase
    from lit_encoders.modules.lit_encoder import LitEncoder


# Tokens measured at once; losses do not depend on it, and each batch costs one cast of all weights to bfloat16.
MEASURED_SLOTS = 2048


def train(
    module: LitEncoder,
    text: Path,
    folder: Path,
    phases: Sequence[Phase],
    callbacks: Sequence[Callback],
    *,
    piece_tokens: int,
    slots: int,
    seed: int,
    cache: Path,
    milestones: Sequence[float] = (),
    keep_phases: bool = False,
    fork: Path | None = None,
) -> None:
    """Train a module and write ``folder/export``, or one export for each milestone.

    Args:
        module: what to train.
        text: file of documents.
        folder: of the run.
        phases: of its schedule.
        callbacks: besides the schedule.
        piece_tokens: longest document, special tokens included.
        slots: tokens of a step.
        seed: of the order of documents.
        cache: folder of tokenised text.
        milestones: numbers of real tokens, each of which leaves ``folder/export/tokens-N``; without them the end does.
        keep_phases: whether each phase's end leaves ``folder/checkpoints/<phase>.ckpt``.
        fork: checkpoint of another run to go on from; the phases that it has passed are those of this schedule too.
    """
    from lit_encoders.callbacks import ExactResume, HFExport, ObjectiveSchedule
    from lit_encoders.data.datamodule import TextDataModule

    # Nothing is validated on the way; without a set of its own, some of the training text would be held out.
    data = TextDataModule(
        str(text), val=str(text), sequence_length=piece_tokens, slots=slots, seed=seed, cache_dir=cache
    )
    schedule = ObjectiveSchedule(list(phases))
    export = HFExport(at_tokens=list(milestones), at_end=not milestones)
    # The study has its own way of going on: a run that is cut off begins anew.
    kept = [ExactResume(every_n_steps=10**9, on_signals=False)] if keep_phases else []
    with quiet():
        trainer = _trainer(
            folder,
            limit_val_batches=0,
            enable_checkpointing=keep_phases,
            callbacks=[schedule, *callbacks, export, *kept],
        )
        trainer.fit(module, data, ckpt_path=fork)


def measure(model: Path, sets: Mapping[str, Path], piece_tokens: int, cache: Path) -> dict[str, float]:
    """Held-out MLM losses of a model, nats per target; the masks are the same for every model.

    Args:
        model: its folder.
        sets: files of held-out documents, by name.
        piece_tokens: longest document, special tokens included.
        cache: folder of tokenised text.
    """
    from lit_encoders.data.datamodule import TextDataModule

    files: dict[str, str | list[str]] = {name: str(path) for name, path in sets.items()}
    first = str(next(iter(sets.values())))
    slots = max(MEASURED_SLOTS, piece_tokens)
    data = TextDataModule(first, val=files, sequence_length=piece_tokens, slots=slots, seed=0, cache_dir=cache)
    module = LitMLM(str(model), seed=0)
    # CLM has targets everywhere, and would take three times as long.
    module.val_objectives = ["mlm"]
    with quiet():
        (metrics, *_) = _trainer(model.parent).validate(module, data, verbose=False)
        return {name: metrics[f"val/{name}/mlm_loss"] for name in sets}


def precision() -> str:
    """Precision of every run here: bfloat16 where the processor multiplies in it (a step takes 20 % less), else 32."""
    from lit_encoders.modules.precision import automatic_precision

    return automatic_precision("cpu")


def _trainer(folder: Path, **settings: Any) -> Trainer:
    from lightning.pytorch import Trainer

    return Trainer(
        default_root_dir=folder,
        # Sized for a laptop; and on a GPU, several runs at once would wait for each other.
        accelerator="cpu",
        precision=precision(),  # type: ignore[arg-type]
        max_epochs=-1,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, **settings},
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back what Lightning, transformers and this library say of a run: a study has dozens of them."""
    from transformers.utils import logging as transformers_logging

    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
