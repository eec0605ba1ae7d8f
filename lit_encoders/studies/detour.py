"""The CLM detour on a laptop: against its twin, with layers held still, with other decays, taken apart by transplants.

A small version of the main comparison of Touchent, de la Clergerie (2026), arXiv:2605.12438: the same text in the same
order through the same number of steps, once causally and once by MLM, then a decay by MLM for both. Phase 1 is trained
once for each seed and arm; every other decay goes on from its checkpoint. Here are the settings and the runs; what they
say is in `detour_report`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from lit_encoders.analysis.cka import LEAST_TEXTS
from lit_encoders.data.examples import model_source
from lit_encoders.data.ontology import Term
from lit_encoders.studies.detour_report import DETOUR, TRANSPLANTS, TWIN, Arm, Measured, Results, arms, write_report
from lit_encoders.studies.results import RESULT, Run, claim_folder, result_in, run_all, versions
from lit_encoders.studies.runs import measure, precision, quiet, train
from lit_encoders.studies.term_tasks import (
    example_terms,
    measure_terms,
    read_split,
    split_terms,
    write_documents,
    write_split,
)

if TYPE_CHECKING:
    from torch import Tensor

    from lit_encoders.callbacks import Phase

# Terms of an ontology, in file order.
Terms = Callable[[], Sequence[Term]]


@dataclass(frozen=True)
class DetourSettings:
    """What the study's numbers depend on.

    Attributes:
        base: the encoder that everything begins with; a head that it lacks is warmed up first, once for all runs.
        root: term of the ontology whose children are the classes.
        steps: of phase 1, the detour or its twin.
        slots: tokens of a step.
        sequence_length: longest text, in tokens.
        learning_rate: of phase 1 after its warm-up, and where the decay begins.
        warmup_steps: of phase 1.
        twin_mask_ratio: of the twin's phase 1.
        decay_mask_ratio: of every decay.
        decay_share: length of the decay of the main comparison, as a share of phase 1; at least a step.
        decay_shares: further lengths that both arms go on with; 0 is none.
        final_share: share of the learning rate at the decay's end.
        seeds: of the order of documents, the masks and dropout, for the main comparison.
        few_seeds: the first of them, that the interventions, other decays and transplants are made for.
        low: layers held still in the detour, or in the decay.
        mid: layers held still in the detour.
        high: layers moved by a transplant, as those two are.
        head_steps: MLM steps of the head's warm-up, the encoder resting.
        head_learning_rate: of these.
        fit_terms: terms that probes are fitted on.
        test_terms: terms held out.
        cka_texts: held-out definitions that the models are compared on, layer by layer; at most ``test_terms``.
    """

    base: str = "example:minilm"
    root: str = "HP:0000118"
    steps: int = 80
    slots: int = 512
    sequence_length: int = 96
    learning_rate: float = 2e-4
    warmup_steps: int = 2
    twin_mask_ratio: float = 0.3
    decay_mask_ratio: float = 0.15
    decay_share: float = 0.1
    decay_shares: tuple[float, ...] = (0.0, 0.05, 0.2, 0.5)
    final_share: float = 0.1
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    few_seeds: tuple[int, ...] = (0, 1, 2)
    low: str = "0:2"
    mid: str = "2:4"
    high: str = "4:6"
    head_steps: int = 80
    head_learning_rate: float = 1e-3
    fit_terms: int = 1000
    test_terms: int = 900
    cka_texts: int = 500


def shortened(settings: DetourSettings) -> DetourSettings:
    """The same study in a few minutes: two seeds, a few steps, few terms. It shows that it runs, and nothing else."""
    return replace(
        settings,
        steps=10,
        warmup_steps=1,
        seeds=(0, 1),
        few_seeds=(0,),
        decay_shares=(0.0, 0.2),
        head_steps=2,
        fit_terms=200,
        test_terms=100,
        cka_texts=50,
    )


def check_settings(settings: DetourSettings) -> None:
    """Refuse what would fail, or mislead, only once the runs are made.

    Raises:
        ValueError: a number is out of its range.
    """
    seeds, few, shares = settings.seeds, settings.few_seeds, settings.decay_shares
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be at least one, each once, got {seeds}")
    # Rows of few seeds are compared with the first seeds of the others.
    if not few or few != seeds[: len(few)]:
        raise ValueError(f"few_seeds must be the first of the seeds {seeds}, at least one, got {few}")
    if settings.decay_share in shares:
        raise ValueError(f"decay_shares must leave out decay_share {settings.decay_share}, got {shares}")
    lengths = {share: round(share * settings.steps) for share in (settings.decay_share, *shares)}
    if lengths[settings.decay_share] < 1:
        raise ValueError(
            f"decay_share must give at least one step beside {settings.steps} of phase 1, got {settings.decay_share}"
        )
    if any(share and steps < 1 for share, steps in lengths.items()):
        raise ValueError(
            f"decay_shares must be 0 or give at least one step beside {settings.steps} of phase 1, got {shares}"
        )
    if not LEAST_TEXTS <= settings.cka_texts <= settings.test_terms:
        raise ValueError(
            f"cka_texts must be from {LEAST_TEXTS} to the {settings.test_terms} test_terms, got {settings.cka_texts}"
        )


def phases(arm: Arm, decay_share: float, settings: DetourSettings) -> list[Phase]:
    """Phase 1 and the decay of an arm; without a decay, phase 1 alone.

    >>> [(phase.objective, phase.steps) for phase in phases(DETOUR, 0.1, DetourSettings())]
    [('clm', 80), ('mlm', 8)]
    """
    from lit_encoders.callbacks import Phase

    clm = arm.objective == "clm"
    first = Phase(
        "first",
        arm.objective,
        steps=settings.steps,
        mask_ratio=None if clm else settings.twin_mask_ratio,
        warmup_steps=settings.warmup_steps,
    )
    decay = Phase(
        "decay",
        "mlm",
        steps=round(decay_share * settings.steps),
        mask_ratio=settings.decay_mask_ratio,
        shape="one_minus_sqrt",
        final_share=settings.final_share,
    )
    return [first, decay] if decay.steps else [first]


@dataclass(frozen=True)
class _Study:
    """The study in its folder: which run leaves what where."""

    output: Path
    settings: DetourSettings

    @property
    def text(self) -> Path:
        return self.output / "text" / "train.jsonl"

    @property
    def held_out(self) -> Path:
        return self.output / "text" / "held_out.jsonl"

    @property
    def base(self) -> Path:
        return self.output / "base" / "export"

    def place(self, seed: int, name: str) -> Path:
        return self.output / f"seed-{seed}" / name

    def make_text(self, terms: Terms, folder: Path) -> dict[str, Any]:
        """Split the terms."""
        split = split_terms(terms(), self.settings.root, self.settings.fit_terms, self.settings.test_terms)
        write_split(split, self.text, folder / "terms.json")
        write_documents(self.held_out, [item.definition for item in split.test])
        return {"pretraining": len(split.pretraining)}

    def measure(self, model: Path, features: Path | None = None) -> Measured:
        """Both tasks and the held-out MLM loss of a model; its layers' view of held-out texts goes into a file."""
        from safetensors.torch import save_file

        from lit_encoders.evaluation.embeddings import embed_layers
        from lit_encoders.modules.open_module import open_module

        settings, split = self.settings, read_split(self.output / "text" / "terms.json")
        with quiet():
            module = open_module(model_source(str(model)))
            found = measure_terms(module, split, settings.sequence_length)
            if features is not None:
                texts = [item.definition for item in split.test[: settings.cka_texts]]
                layers = embed_layers(module, texts, sequence_length=settings.sequence_length, causal=False)
                save_file({"layers": layers}, features)
        losses = measure(model, {"held_out": self.held_out}, settings.sequence_length, self.output / "tokens")
        return {**found, "mlm_loss": losses["held_out"]}

    def make_base(self, folder: Path) -> dict[str, Any]:
        """Give the encoder an MLM head, the encoder resting, and measure what everything begins with."""
        from lit_encoders.callbacks import LayerFreezing, Phase

        settings = self.settings
        warm = [Phase("head", "mlm", steps=settings.head_steps)]
        rests = LayerFreezing(["all", "embeddings"])
        self._train(folder, settings.base, warm, [rests], 0, learning_rate=settings.head_learning_rate)
        return {"measured": self.measure(self.base)}

    def train_arm(self, arm: Arm, seed: int, folder: Path) -> dict[str, Any]:
        """Train phase 1 and the decay of the main comparison."""
        began = perf_counter()
        plan = phases(arm, self.settings.decay_share, self.settings)
        self._train(folder, str(self.base), plan, self._frozen(arm), seed, keep_phases=True)
        seconds = perf_counter() - began
        for file in (folder / "checkpoints").glob("decay.*"):  # Its weights are the export's.
            file.unlink()
        measured = self.measure(folder / "export", folder / "features.safetensors")
        return {"measured": measured, "training_seconds": round(seconds, 1)}

    def fork_arm(self, arm: Arm, decay_share: float, seed: int, keep_models: bool, folder: Path) -> dict[str, Any]:
        """Go on from the end of phase 1 with another decay."""
        checkpoint = self.place(seed, arm.source) / "checkpoints" / "first.ckpt"
        plan = phases(arm, decay_share, self.settings)
        if len(plan) == 1:
            from lit_encoders.weights.export import export_verb

            with quiet():
                # The study's folder may have been moved since the checkpoint was written.
                export_verb(checkpoint, folder / "export", tokenizer=str(self.base))
        else:
            self._train(folder, str(self.base), plan, self._frozen(arm), seed, fork=checkpoint)
        return self._measured_and_gone(folder, keep_models)

    def transplant(self, layers: str, part: str, seed: int, keep_models: bool, folder: Path) -> dict[str, Any]:
        """Move layers of the detour's model into the twin's."""
        from lit_encoders.analysis.transplant import transplant_verb

        donor, into = (str(self.place(seed, arm.name) / "export") for arm in (DETOUR, TWIN))
        transplant_verb(donor, into, folder / "export", layers, part)  # type: ignore[arg-type]
        return self._measured_and_gone(folder, keep_models)

    def _measured_and_gone(self, folder: Path, keep_models: bool) -> dict[str, Any]:
        measured = self.measure(folder / "export")
        if not keep_models:
            shutil.rmtree(folder / "export")
        return {"measured": measured}

    def _frozen(self, arm: Arm) -> list[Any]:
        from lit_encoders.callbacks import LayerFreezing

        return [LayerFreezing(getattr(self.settings, arm.frozen), phases=[arm.phase])] if arm.frozen else []

    def _train(
        self,
        folder: Path,
        model: str,
        plan: list[Phase],
        callbacks: list[Any],
        seed: int,
        learning_rate: float | None = None,
        keep_phases: bool = False,
        fork: Path | None = None,
    ) -> None:
        from lit_encoders.modules.lit_mlm import LitMLM

        settings = self.settings
        train(
            LitMLM(model, learning_rate=learning_rate or settings.learning_rate, seed=seed),
            self.text,
            folder,
            plan,
            callbacks,
            piece_tokens=settings.sequence_length,
            slots=settings.slots,
            seed=seed,
            cache=self.output / "tokens",
            keep_phases=keep_phases,
            fork=fork,
        )

    def features(self, arm: Arm, seed: int) -> Tensor:
        """Layers' view of the held-out texts after the main comparison's decay, (L, N, D)."""
        from safetensors.torch import load_file

        return load_file(self.place(seed, arm.name) / "features.safetensors")["layers"]

    def compare_views(self, folder: Path) -> dict[str, Any]:
        """Distances of the detour from its twin, seed by seed, and of the twin from that of the next seed."""
        from lit_encoders.analysis.cka import layer_distances

        seeds = self.settings.seeds
        found = []
        for place, seed in enumerate(seeds):
            following = seeds[(place + 1) % len(seeds)]
            control = self.features(TWIN, following) if following != seed else None
            found.append(layer_distances(self.features(DETOUR, seed), self.features(TWIN, seed), control))
        return {"distances": [[asdict(item) for item in items] for items in found]}

    def run_all(self, jobs: int, keep_models: bool, say: Callable[[str], None]) -> Results:
        """Figures of all runs, made now unless they are there."""
        settings, few = self.settings, self.settings.few_seeds
        main: dict[Path, Run] = {
            self.place(seed, arm.name): partial(self.train_arm, arm, seed)
            for arm in arms()
            if arm.name == arm.source
            for seed in (few if arm.frozen else settings.seeds)
        }
        others = [(arm.name, arm, settings.decay_share) for arm in arms() if arm.name != arm.source]
        others += [(decay_name(arm, share), arm, share) for arm in (TWIN, DETOUR) for share in settings.decay_shares]
        forks: dict[Path, Run] = {
            self.place(seed, name): partial(self.fork_arm, arm, share, seed, keep_models)
            for name, arm, share in others
            for seed in few
        }
        moved: dict[Path, Run] = {
            self.place(seed, f"transplant-{name}"): partial(
                self.transplant, getattr(settings, layers, layers), part, seed, keep_models
            )
            for name, (layers, part) in TRANSPLANTS.items()
            for seed in few
        }
        needs = {self.place(seed, name): [self.place(seed, arm.source)] for name, arm, _ in others for seed in few}
        needs |= {folder: [folder.with_name(arm.name) for arm in (TWIN, DETOUR)] for folder in moved}
        _make_again(needs)
        results: dict[Path, dict[str, Any]] = {}
        for stage in (main, forks, moved, {self.output / "views": self.compare_views}):
            results |= run_all(stage, jobs, say)
        if not keep_models:
            for folder in (*main, *forks, *moved):
                for name in ("checkpoints", "export"):
                    shutil.rmtree(folder / name, ignore_errors=True)
        return self._gather(results)

    def _gather(self, results: Mapping[Path, Mapping[str, Any]]) -> Results:
        settings = self.settings

        def every(name: str, seeds: Sequence[int]) -> list[Measured]:
            return [results[self.place(seed, name)]["measured"] for seed in seeds]

        rows = {arm.name: every(arm.name, settings.few_seeds if arm.frozen else settings.seeds) for arm in arms()} | {
            f"transplant-{name}": every(f"transplant-{name}", settings.few_seeds) for name in TRANSPLANTS
        }
        decays = {
            arm.name: {share: every(decay_name(arm, share), settings.few_seeds) for share in settings.decay_shares}
            | {settings.decay_share: every(arm.name, settings.few_seeds)}
            for arm in (TWIN, DETOUR)
        }
        seconds = {
            arm.name: [results[self.place(seed, arm.name)]["training_seconds"] for seed in settings.seeds]
            for arm in (TWIN, DETOUR)
        }
        return Results(rows, decays, results[self.output / "views"]["distances"], seconds)


def _make_again(needs: Mapping[Path, Sequence[Path]]) -> None:
    """Let runs be made once more whose models are gone since the study ended, where a run that needs them is missing.

    Args:
        needs: folder of a run -> folders of those whose models it begins with.
    """
    for folder, sources in needs.items():
        if result_in(folder) is not None:
            continue
        for source in sources:
            models = (source / "checkpoints" / "first.ckpt", source / "export" / "config.json")
            if not all(model.is_file() for model in models):
                (source / RESULT).unlink(missing_ok=True)


def decay_name(arm: Arm, share: float) -> str:
    """Folder of an arm's run with another decay.

    >>> decay_name(TWIN, 0.05)
    'twin-decay-5'
    """
    return f"{arm.name}-decay-{100 * share:g}"


def run_detour(
    output: Path,
    settings: DetourSettings,
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
        keep_models: whether checkpoints and exports of all runs stay once everything is measured.
        command: for the report.
        say: told of each run that ends.

    Returns:
        The tables, as text.

    Raises:
        ValueError: the folder holds another study, there are too few terms, or a number is out of its range.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    check_settings(settings)
    facts = {**asdict(settings), "precision": precision(), "versions": versions()}
    claim_folder(output, facts)
    study = _Study(output, settings)
    text = run_all({output / "text": partial(study.make_text, terms)}, 1, say)[output / "text"]
    base = run_all({output / "base": study.make_base}, 1, say)[output / "base"]
    results = study.run_all(jobs, keep_models, say)
    return write_report(output, base["measured"], results, {**facts, "text": text}, command)
