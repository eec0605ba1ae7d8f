"""What a run did, phase by phase: a table at its end, and ``summary.json``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lit_encoders.callbacks.hf_export import HFExport
from lit_encoders.callbacks.objective_schedule import find_schedule
from lit_encoders.callbacks.throughput import Throughput
from lit_encoders.callbacks.weight_reversion import WeightReversion
from lit_encoders.weights.export import load_lines


@dataclass(frozen=True)
class Mark:
    """Where a run stood at a validation.

    Attributes:
        step: optimizer steps.
        tokens: real tokens over all ranks.
        seconds: spent in training steps, 0 without a `Throughput` callback.
        losses: held-out losses by name, nats per target.
    """

    step: int
    tokens: int
    seconds: float
    losses: dict[str, float]


@dataclass(frozen=True)
class PhaseReport:
    """A phase between two marks; ``losses`` are (at its start, at its end), None where not measured."""

    name: str
    objective: str
    steps: int
    tokens: int
    tokens_per_second: float | None
    losses: dict[str, tuple[float | None, float | None]]


def report_phase(name: str, objective: str, steps: int, first: Mark, last: Mark) -> PhaseReport:
    """Compare the marks at a phase's two ends.

    >>> report_phase("a", "mlm", 2, Mark(0, 0, 0.0, {}), Mark(2, 100, 4.0, {"val/mlm_loss": 1.5})).tokens_per_second
    25.0
    """
    tokens, seconds = last.tokens - first.tokens, last.seconds - first.seconds
    names = sorted({*first.losses, *last.losses}, reverse=True)
    return PhaseReport(
        name,
        objective,
        steps,
        tokens,
        tokens / seconds if seconds > 0 else None,
        {name: (first.losses.get(name), last.losses.get(name)) for name in names},
    )


class RunSummary(Callback):
    """Print a table at the end of a fit and write ``summary.json`` into the run folder.

    Needs a module that counts its ``tokens`` and logs ``val/...loss``, as `LitEncoder` does, and `Throughput` for
    tokens per second.
    """

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[Mark] = []
        self._records: dict[str, Any] = {}

    def _mark(self, trainer: Trainer, module: Any) -> None:
        clock = next((c for c in trainer.callbacks if isinstance(c, Throughput)), None)  # type: ignore[attr-defined]
        metrics = trainer.callback_metrics
        losses = {n: float(v) for n, v in metrics.items() if n.startswith("val/") and n.endswith("loss")}
        seconds = 0.0 if clock is None else clock.seconds
        mark = Mark(trainer.global_step, getattr(module, "tokens", 0), seconds, losses)
        self.marks = [m for m in self.marks if m.step != mark.step] + [mark]

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._mark(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.marks or self.marks[-1].step != trainer.global_step:
            self._mark(trainer, pl_module)
        # Here, where every rank passes: the figures are summed over them.
        self._records = pl_module.records() if hasattr(pl_module, "records") else {}  # type: ignore[operator]

    def reports(self, trainer: Trainer) -> list[PhaseReport]:
        """One report per phase, or one for a run without a schedule."""
        schedule = find_schedule(trainer)
        if schedule is None:
            spans = [("run", getattr(trainer.lightning_module, "objective", ""), 0, trainer.global_step)]
        else:
            spans = [(p.name, p.phase.objective, p.start, p.stop) for p in schedule.resolved if p.steps]
        by_step = {0: Mark(0, 0, 0.0, {}), **{mark.step: mark for mark in self.marks}}
        reports = []
        for name, objective, start, stop in spans:
            stop = min(stop, trainer.global_step)
            if start in by_step and stop in by_step and stop > start:
                reports.append(report_phase(name, objective, stop - start, by_step[start], by_step[stop]))
        return reports

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        reports = self.reports(trainer)
        epochs = getattr(getattr(trainer, "datamodule", None), "epochs", None)
        export = next((c.folder for c in trainer.callbacks if isinstance(c, HFExport)), None)  # type: ignore[attr-defined]
        reverted = next((c.report for c in trainer.callbacks if isinstance(c, WeightReversion)), None)  # type: ignore[attr-defined]
        summary = {
            "phases": [asdict(report) for report in reports],
            "steps": trainer.global_step,
            "tokens": getattr(pl_module, "tokens", None),
            "epochs": epochs,
            "precision": str(trainer.precision),
            "export": None if export is None else str(export),
            "reverted": reverted,
            **self._records,
        }
        log_hyperparameters(trainer, pl_module)
        root = Path(trainer.default_root_dir)
        root.mkdir(parents=True, exist_ok=True)
        beside = root / ".summary.json"
        beside.write_text(json.dumps(summary, indent=2))
        os.replace(beside, root / "summary.json")
        # Piped output has no width of its own, and 80 columns would fold the table.
        console = Console(width=None if sys.stdout.isatty() else 120)
        print_summary(reports, epochs, export, console)
        if reverted is not None:
            print_reverted(reverted, console)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"marks": [asdict(mark) for mark in self.marks]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.marks = [Mark(**mark) for mark in state_dict["marks"]]


def log_hyperparameters(trainer: Trainer, module: LightningModule) -> None:
    """Put a run's settings beside its last held-out figures, for TensorBoard's table of runs.

    Args:
        trainer: at the end of a fit.
        module: whose ``hparams`` they are.
    """
    figures = {n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith(("val/", "probe/"))}
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger) and figures:
            final = {f"final/{name}": value for name, value in figures.items()}
            logger.log_hyperparams(dict(module.hparams), final)


Epochs = float | dict[str, float] | None


def print_summary(reports: list[PhaseReport], epochs: Epochs, export: Path | None, console: Console) -> None:
    """Print a run's phases, where its export lies, and how to load it."""
    table = Table(title="Held-out losses are nats per target, at the start and at the end of each phase")
    losses = list(dict.fromkeys(name for report in reports for name in report.losses))
    for column in ("phase", "objective"):
        table.add_column(column)
    for column in ("steps", "tokens", "tokens/s", *(n.removeprefix("val/").replace("_", " ") for n in losses)):
        table.add_column(column, justify="right")
    for report in reports:
        speed = "" if report.tokens_per_second is None else f"{report.tokens_per_second:,.0f}"
        pairs = [
            " -> ".join("?" if v is None else f"{v:.3f}" for v in report.losses.get(n, (None, None))) for n in losses
        ]
        table.add_row(report.name, report.objective, f"{report.steps:,}", f"{report.tokens:,}", speed, *pairs)
    console.print(table)
    if isinstance(epochs, dict):
        every = ", ".join(f"{number:.2f} of {name}" for name, number in epochs.items())
        console.print(f"Epochs of the training text: {every}.")
    elif epochs is not None:
        console.print(f"{epochs:.2f} epochs of the training text.")
    objectives = [report.objective for report in reports]
    if "clm" in objectives and "mlm" in objectives[objectives.index("clm") :]:
        console.print(
            "MLM loss rises during the detour, and an MLM twin ends lower in it: the detour is judged downstream."
        )
    if export is not None:
        console.print(load_lines(export), soft_wrap=True, highlight=False)


def print_stored_summary(root: Path, console: Console) -> None:
    """Print the table of a run that is over, out of its ``summary.json``."""
    summary = json.loads((root / "summary.json").read_text(encoding="utf-8"))
    reports = [
        PhaseReport(**{**phase, "losses": {name: tuple(pair) for name, pair in phase["losses"].items()}})
        for phase in summary["phases"]
    ]
    export = summary["export"]
    print_summary(reports, summary["epochs"], None if export is None else Path(export), console)
    if summary["reverted"] is not None:
        print_reverted(summary["reverted"], console)


def print_reverted(report: Mapping[str, Any], console: Console) -> None:
    """Print what setting layer ranges back changed: `WeightReversion`'s report."""
    table = Table(title=f"Layers {report['layers']} set back to {report['base']!r}")
    for column in ("", "trained", "set back"):
        table.add_column(column, justify="right" if column else "left")
    for text, drifts in report["drift"].items():
        both = [f"{drifts[when]['relative_l2']:.4g}" for when in ("before", "after")]
        table.add_row(f"drift of {text}", *both)
    for name, losses in report["losses"].items():
        both = [f"{losses[which]:.3f}" for which in ("trained", "reverted")]
        table.add_row(name.removeprefix("val/").replace("_", " "), *both)
    console.print(table)
    console.print(load_lines(Path(report["export"])), soft_wrap=True, highlight=False)
