"""Masking ratios on a laptop: one, the other, both with one head or two, and a teacher on one stream or on both.

A small version of UltraBERT's table 1 (Park, Lee, Kang 2026) and of its question where to distil: a student pruned from
a teacher goes on with MLM, and is asked at token milestones what its embeddings are good for. Here are the settings and
the runs; what they say is in `mask_ratio_report`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from lit_encoders.data.examples import model_source
from lit_encoders.data.ontology import Term
from lit_encoders.objectives.streams import MaskStream
from lit_encoders.studies.mask_ratio_report import ROWS, Measured, Row, write_report
from lit_encoders.studies.results import Run, claim_folder, run_all, versions
from lit_encoders.studies.runs import precision, quiet, train
from lit_encoders.studies.term_tasks import TermItem, example_terms, measure_terms, read_split, split_terms, write_split

if TYPE_CHECKING:
    from lit_encoders.modules.lit_encoder import LitEncoder

# Rows of the ontology, in file order.
Terms = Callable[[], Sequence[Term]]


@dataclass(frozen=True)
class MaskRatioSettings:
    """What the study's numbers depend on.

    Attributes:
        base: the encoder whose embeddings everything begins with; a head that it lacks is warmed up.
        root: term of the ontology whose children are the classes.
        low: mask ratio of the first stream.
        high: mask ratio of the second stream, and of the run that has no other.
        single_low: mask ratio of the run that has no other; the paper's table has 6 %, its mixture 5 %.
        low_share: share of the documents in the first stream; four to one in the paper.
        student_layers: layers that pruning leaves.
        temperature: of the teacher.
        kd_weight: share of the teacher in the loss of a distilled target.
        seeds: of the order of documents, the masks and dropout.
        milestones: numbers of real tokens at which a run is measured, rising.
        warmup_steps: of these, the learning rate rises in; then it stays, so that milestones are comparable.
        learning_rate: of the students.
        slots: tokens of a step.
        sequence_length: longest text, in tokens.
        calibration_tokens: read to choose the student's layers.
        head_steps: of the teacher: its new head alone, at twice the teacher's learning rate.
        teacher_steps: of the teacher: all of it; the rate falls to 0 as a cosine.
        teacher_slots: tokens of a step of the teacher.
        teacher_mask_ratio: of the teacher.
        teacher_learning_rate: peak of these.
        fit_terms: terms that probes are fitted on.
        test_terms: terms held out.
    """

    base: str = "example:minilm"
    root: str = "HP:0000118"
    low: float = 0.05
    high: float = 0.5
    single_low: float = 0.06
    low_share: float = 0.8
    student_layers: int = 3
    temperature: float = 1.0
    kd_weight: float = 0.5
    seeds: tuple[int, ...] = (0, 1, 2)
    milestones: tuple[float, ...] = (20_000, 40_000, 80_000)
    warmup_steps: int = 20
    learning_rate: float = 2e-4
    slots: int = 512
    sequence_length: int = 96
    calibration_tokens: int = 20_000
    head_steps: int = 60
    teacher_steps: int = 300
    teacher_slots: int = 512
    teacher_mask_ratio: float = 0.3
    teacher_learning_rate: float = 5e-4
    fit_terms: int = 1500
    test_terms: int = 1200


def shortened(settings: MaskRatioSettings) -> MaskRatioSettings:
    """The same study in a minute or two: one seed, a few steps, few terms. It shows that it runs, and nothing else."""
    return replace(
        settings,
        seeds=(0,),
        milestones=(500, 1000, 2000),
        warmup_steps=1,
        calibration_tokens=500,
        head_steps=2,
        teacher_steps=2,
        fit_terms=200,
        test_terms=100,
    )


def row_streams(row: Row, settings: MaskRatioSettings) -> list[MaskStream]:
    """The streams of a row that mixes; none for one with a single mask ratio.

    >>> [(s.name, s.head, s.distill) for s in row_streams(ROWS[3], MaskRatioSettings())]
    [('low', 'low', False), ('high', 'high', False)]
    """
    if row.single:
        return []
    shares = {"low": settings.low_share, "high": 1 - settings.low_share}
    return [
        MaskStream(
            name,
            getattr(settings, name),
            share,
            distill=name in row.distilled,
            head=name if row.decoupled else None,
        )
        for name, share in shares.items()
    ]


@dataclass(frozen=True)
class _Study:
    """The study in its folder: which run leaves what where."""

    output: Path
    settings: MaskRatioSettings

    @property
    def text(self) -> Path:
        return self.output / "text" / "train.jsonl"

    @property
    def teacher(self) -> Path:
        return self.output / "teacher" / "export"

    @property
    def student(self) -> Path:
        return self.output / "student" / "export"

    def make_text(self, terms: Terms, folder: Path) -> dict[str, Any]:
        """Split the terms."""
        split = split_terms(terms(), self.settings.root, self.settings.fit_terms, self.settings.test_terms)
        write_split(split, self.text, folder / "terms.json")
        return {"pretraining": len(split.pretraining), **{name: _counts(getattr(split, name)) for name in _SPLITS}}

    def measure(self, model: str) -> dict[str, float]:
        """Both tasks with a model as it stands."""
        from lit_encoders.modules.open_module import open_module

        with quiet():
            return measure_terms(
                open_module(model_source(model)),
                read_split(self.output / "text" / "terms.json"),
                self.settings.sequence_length,
            )

    def make_base(self, folder: Path) -> dict[str, Any]:
        """Measure what everything begins with."""
        return {"measured": self.measure(self.settings.base)}

    def make_teacher(self, folder: Path) -> dict[str, Any]:
        """Give the encoder an MLM head, and train all of it on the text."""
        from lit_encoders.callbacks import LayerFreezing, Phase
        from lit_encoders.modules.lit_mlm import LitMLM

        settings = self.settings
        warmup = min(settings.warmup_steps, settings.teacher_steps)
        phases = [
            Phase("head", "mlm", steps=settings.head_steps, peak=2.0),
            Phase("whole", "mlm", steps=settings.teacher_steps, warmup_steps=warmup, shape="cosine"),
        ]
        module = LitMLM(
            settings.base,
            learning_rate=settings.teacher_learning_rate,
            mask_ratio=settings.teacher_mask_ratio,
            seed=0,
        )
        encoder_rests = LayerFreezing(["all", "embeddings"], phases=["head"])
        self._train(module, folder, phases, [encoder_rests], settings.teacher_slots, 0)
        return {"measured": self.measure(str(self.teacher))}

    def make_student(self, folder: Path) -> dict[str, Any]:
        """Prune the teacher."""
        from lit_encoders.analysis.pruning import prune_verb

        settings = self.settings
        with quiet():
            said = prune_verb(
                str(self.teacher),
                folder / "export",
                str(self.text),
                layers=str(settings.student_layers),
                tokens=settings.calibration_tokens,
            )
        return {"measured": self.measure(str(self.student)), "size": said.splitlines()[0]}

    def train_row(self, row: Row, seed: int, keep_models: bool, folder: Path) -> dict[str, Any]:
        """Train one student, and measure it at each milestone."""
        from lit_encoders.callbacks import Phase
        from lit_encoders.callbacks.hf_export import milestone_name

        settings = self.settings
        # A pack is not always full; the last milestone has to be reached.
        steps = round(settings.milestones[-1] / settings.slots * 1.05) + 1
        phase = Phase("run", "mlm", steps=steps, warmup_steps=settings.warmup_steps)
        began = perf_counter()
        self._train(self._module(row, seed), folder, [phase], [], settings.slots, seed, settings.milestones)
        seconds = perf_counter() - began
        exports = [folder / "export" / milestone_name(tokens) for tokens in settings.milestones]
        measured = [self.measure(str(export)) for export in exports]
        if not keep_models:
            shutil.rmtree(folder / "export")
        return {"measured": measured, "training_seconds": round(seconds, 1)}

    def _module(self, row: Row, seed: int) -> LitEncoder:
        from lit_encoders.modules.lit_kd import LitKD
        from lit_encoders.modules.lit_mlm import LitMLM

        settings = self.settings
        shared: dict[str, Any] = {"learning_rate": settings.learning_rate, "seed": seed}
        if row.single:
            return LitMLM(str(self.student), mask_ratio=getattr(settings, row.single), **shared)
        shared["streams"] = row_streams(row, settings)
        if not row.distilled:
            return LitMLM(str(self.student), **shared)
        return LitKD(
            str(self.student),
            str(self.teacher),
            temperature=settings.temperature,
            kd_weight=settings.kd_weight,
            **shared,
        )

    def _train(
        self,
        module: LitEncoder,
        folder: Path,
        phases: list[Any],
        callbacks: list[Any],
        slots: int,
        seed: int,
        milestones: Sequence[float] = (),
    ) -> None:
        train(
            module,
            self.text,
            folder,
            phases,
            callbacks,
            piece_tokens=self.settings.sequence_length,
            slots=slots,
            seed=seed,
            cache=self.output / "tokens",
            milestones=milestones,
        )

    def run_rows(
        self, jobs: int, keep_models: bool, say: Callable[[str], None]
    ) -> tuple[dict[str, list[list[Measured]]], dict[str, float]]:
        """Figures of all rows, made now unless they are there: row -> seed -> milestone; and their mean seconds."""
        runs: dict[Path, Run] = {
            self.output / f"seed-{seed}" / row.name: partial(self.train_row, row, seed, keep_models)
            for seed in self.settings.seeds
            for row in ROWS
        }
        results = run_all(runs, jobs, say)
        found: dict[str, list[list[Measured]]] = {row.name: [] for row in ROWS}
        seconds = dict.fromkeys(found, 0.0)
        for folder in runs:
            found[folder.name].append(results[folder]["measured"])
            seconds[folder.name] += results[folder]["training_seconds"] / len(self.settings.seeds)
        return found, seconds


_SPLITS = ("fit", "test")


def _counts(items: Sequence[TermItem]) -> dict[str, int]:
    return {
        "terms": len(items),
        "with one branch": sum(bool(item.branch) for item in items),
        "with a synonym": sum(bool(item.synonym) for item in items),
    }


def run_mask_ratio(
    output: Path,
    settings: MaskRatioSettings,
    terms: Terms = example_terms,
    jobs: int = 1,
    keep_models: bool = False,
    command: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """Run the study, or what is left of it, and write its report.

    Args:
        output: folder, new or of the same study.
        settings: what its numbers depend on.
        terms: where text and tasks come from.
        jobs: runs at once, see `run_all`.
        keep_models: whether the exports of all runs stay once they are measured.
        command: for the report.
        say: told of each run that ends.

    Returns:
        The table, as text.

    Raises:
        ValueError: the folder holds another study, there are too few terms, or a number is out of its range.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    milestones = list(settings.milestones)
    if len(milestones) < 2 or milestones[0] <= 0 or milestones != sorted(set(milestones)):
        raise ValueError(f"milestones must rise from above 0, and be at least two, got {milestones}")
    facts = {**asdict(settings), "precision": precision(), "versions": versions()}
    claim_folder(output, facts)
    study = _Study(output, settings)
    once: dict[str, Run] = {
        "text": partial(study.make_text, terms),
        "base": study.make_base,
        "teacher": study.make_teacher,
        "student": study.make_student,
    }
    made = {name: run_all({output / name: run}, 1, say)[output / name] for name, run in once.items()}
    rows, seconds = study.run_rows(jobs, keep_models, say)
    references = {name: made[name]["measured"] for name in ("base", "teacher", "student")}
    more = {"text": made["text"], "student": made["student"]["size"], "training_seconds": seconds}
    return write_report(output, settings.milestones, references, rows, {**facts, **more}, command)
