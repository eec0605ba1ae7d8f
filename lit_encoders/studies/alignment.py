"""Continued pretraining on language families: what it teaches, and what it costs the language that was known before.

A small version of Ahuja, Blevins (2026), arXiv:2606.00284: two baselines and five strategies on an encoder of 6 layers,
with MLM. Here are the settings, the runs and the weights made of them; the table is made in `alignment_table`.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from lit_encoders.modules.lit_mlm import LitMLM
from lit_encoders.studies.alignment_report import write_report
from lit_encoders.studies.alignment_table import ROWS, Family, ModelLosses
from lit_encoders.studies.parallel_text import Pieces, help_pages, read_pieces, split_text, write_pieces
from lit_encoders.studies.results import Run, claim_folder, run_all, versions
from lit_encoders.studies.runs import measure, precision, train

Strategy = Literal["", "freezing", "l2sp"]
# Languages -> the same pages of each.
Pages = Callable[[Sequence[str]], Mapping[str, Sequence[str]]]


@dataclass(frozen=True)
class AlignmentSettings:
    """What the study's numbers depend on.

    Attributes:
        base: the encoder; a head that it lacks is warmed up.
        general: the language that must not be forgotten.
        families: of languages.
        middle: the layers that the strategies hold still. The paper's 9:28 of 34 layers begins at 26 % and ends at
            82 % of the depth; of 6 layers that is 1.6 to 4.9.
        middle_strength: of L2-SP there, per squared weight; the paper's.
        rest_strength: of L2-SP elsewhere; the paper's.
        seeds: of a run's text, its order, the masks and dropout.
        steps: optimizer steps of each trained run.
        warmup_steps: of these, the learning rate rises in; then it falls to 0 as a cosine.
        learning_rate: peak. The paper has 2e-5 (experts) and 5e-5 (dense) over 17,000 steps; 200 need more to move.
        slots: tokens of a step.
        piece_tokens: tokens of a document, special tokens included.
        train_pieces: of each language, to draw from.
        held_out_pieces: of each language, never trained on.
        head_steps: of the base: its head alone, in the general language, at twice the base's learning rate.
        base_steps: of the base: all of it, in the general language.
        base_learning_rate: peak of these.
    """

    base: str = "example:minilm"
    general: str = "en-us"
    families: tuple[Family, ...] = (
        Family("romance", trained=("fr", "es", "it"), unseen=("pt", "ca")),
        Family("germanic", trained=("de", "nl"), unseen=("da", "sv")),
    )
    middle: str = "2:5"
    middle_strength: float = 0.05
    rest_strength: float = 0.001
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 200
    warmup_steps: int = 20
    learning_rate: float = 3e-4
    slots: int = 512
    piece_tokens: int = 128
    train_pieces: int = 2400
    held_out_pieces: int = 32
    head_steps: int = 60
    base_steps: int = 240
    base_learning_rate: float = 5e-4

    @property
    def languages(self) -> list[str]:
        """The general one, then each family's."""
        return [self.general, *(language for family in self.families for language in family.languages)]


def shortened(settings: AlignmentSettings) -> AlignmentSettings:
    """The same study in under a minute: one seed, a few steps, little text. It shows that it runs, and nothing else."""
    return replace(
        settings, seeds=(0,), steps=3, warmup_steps=1, train_pieces=40, held_out_pieces=4, head_steps=2, base_steps=2
    )


@dataclass(frozen=True)
class TrainedRun:
    """A run of continued pretraining.

    Attributes:
        name: of its folder.
        languages: that it trains on, with equal numbers of tokens.
        strategy: what holds it back: nothing, "freezing" or "l2sp".
    """

    name: str
    languages: tuple[str, ...]
    strategy: Strategy = ""


def trained_runs(families: Sequence[Family]) -> list[TrainedRun]:
    """The runs of one seed: one on all languages, and for each family a plain, a frozen and an anchored one.

    >>> [run.name for run in trained_runs([Family("celtic", ("cy",), ("br",))])]
    ['dense', 'expert-celtic', 'freezing-celtic', 'l2sp-celtic']
    """
    dense = TrainedRun("dense", tuple(language for family in families for language in family.trained))
    strategies: dict[str, Strategy] = {"expert": "", "freezing": "freezing", "l2sp": "l2sp"}
    experts = [
        TrainedRun(f"{name}-{family.name}", family.trained, strategy)
        for name, strategy in strategies.items()
        for family in families
    ]
    return [dense, *experts]


def equal_shares(total: int, parts: int) -> list[int]:
    """Divide a number into parts that differ by one at most.

    >>> equal_shares(800, 3)
    [267, 267, 266]
    """
    return [total // parts + (part < total % parts) for part in range(parts)]


def draw_text(pools: Mapping[str, Pieces], pieces: int, seed: int) -> Pieces:
    """Draw a run's text, the same number of pieces from each language and none twice.

    Args:
        pools: pieces of each language; what a seed draws of one does not depend on the others.
        pieces: in all.
        seed: of the run.
    """
    shares = equal_shares(pieces, len(pools))
    drawn: Pieces = []
    for (language, pool), share in zip(pools.items(), shares, strict=True):
        drawn += random.Random(f"{seed} {language}").sample(pool, share)
    return drawn


def measured_languages(model: str, settings: AlignmentSettings) -> list[str]:
    """Languages that a model is measured on: the general one and those of the families that it stands for.

    >>> measured_languages("expert-germanic", AlignmentSettings())
    ['en-us', 'de', 'nl', 'da', 'sv']
    """
    families = [f for f in settings.families if any(row.model(f) == model for row in ROWS)]
    return [settings.general, *(language for family in families for language in family.languages)]


@dataclass(frozen=True)
class _Study:
    """The study in its folder: which run leaves what where."""

    output: Path
    settings: AlignmentSettings

    def held_out(self, languages: Sequence[str]) -> dict[str, Path]:
        return {language: self.output / "text" / "held_out" / f"{language}.jsonl" for language in languages}

    def pool(self, language: str) -> Path:
        return self.output / "text" / "train" / f"{language}.jsonl"

    @property
    def base(self) -> Path:
        return self.output / "base" / "export"

    def measure(self, model: Path, languages: Sequence[str]) -> dict[str, float]:
        return measure(model, self.held_out(languages), self.settings.piece_tokens, self.output / "tokens")

    # ---- what is made once -----------------------------------------------------------------------------------------

    def make_text(self, pages: Pages, folder: Path) -> dict[str, Any]:
        """Cut the pages of all languages into pieces, for the base's tokenizer."""
        from lit_encoders.data.examples import model_source
        from lit_encoders.data.tokens import affixes, encode, num_ids
        from lit_encoders.models.vocabulary import load_tokenizer

        settings = self.settings
        tokenizer = load_tokenizer(model_source(settings.base), "base")
        around, size = affixes(tokenizer), num_ids(tokenizer)
        length = settings.piece_tokens - len(around.prefix) - len(around.suffix)
        texts = split_text(
            pages(settings.languages),
            settings.general,
            lambda page: encode([page], tokenizer, size)[0],
            length,
            settings.train_pieces,
            settings.held_out_pieces,
        )
        unknown = {}
        for language, train_pieces, held_out in texts:
            write_pieces(train_pieces, self.pool(language))
            write_pieces(held_out, self.held_out([language])[language])
            ids = [token for piece in train_pieces for token in piece]
            unknown[language] = ids.count(tokenizer.unk_token_id) / len(ids)
        return {"tokens_of_a_piece": length, "share_of_unknown_tokens": unknown}

    def make_base(self, folder: Path) -> dict[str, Any]:
        """Give the encoder an MLM head and a start in the general language, so that there is something to forget."""
        from lit_encoders.callbacks import LayerFreezing, Phase

        settings = self.settings
        warmup = min(settings.warmup_steps, settings.base_steps)
        phases = [
            Phase("head", "mlm", steps=settings.head_steps, peak=2.0),
            Phase("general", "mlm", steps=settings.base_steps, warmup_steps=warmup, shape="cosine"),
        ]
        encoder_rests = LayerFreezing(["all", "embeddings"], phases=["head"])
        self._train(settings.base, folder, read_pieces(self.pool(settings.general)), phases, [encoder_rests], 0)
        return {"losses": self.measure(folder / "export", settings.languages)}

    def _train(
        self, backbone: str, folder: Path, text: Pieces, phases: list[Any], callbacks: list[Any], seed: int
    ) -> None:
        settings = self.settings
        write_pieces(text, folder / "train.jsonl")
        peak = settings.base_learning_rate if backbone == settings.base else settings.learning_rate
        train(
            LitMLM(backbone, learning_rate=peak, seed=seed),
            folder / "train.jsonl",
            folder,
            phases,
            callbacks,
            piece_tokens=settings.piece_tokens,
            slots=settings.slots,
            seed=seed,
            cache=self.output / "tokens",
        )

    # ---- what is made for each seed --------------------------------------------------------------------------------

    def train_run(self, run: TrainedRun, seed: int, folder: Path) -> dict[str, Any]:
        """Train and measure one model."""
        from lit_encoders.callbacks import L2SP, LayerFreezing, Phase

        settings = self.settings
        strengths = {settings.middle: settings.middle_strength, "rest": settings.rest_strength}
        callbacks: list[Any] = []
        if run.strategy == "freezing":
            callbacks.append(LayerFreezing(settings.middle))
        elif run.strategy == "l2sp":
            callbacks.append(L2SP(strength=strengths))
        phase = Phase("cpt", "mlm", steps=settings.steps, warmup_steps=settings.warmup_steps, shape="cosine")
        pools = {language: read_pieces(self.pool(language)) for language in run.languages}
        text = draw_text(pools, settings.steps * settings.slots // settings.piece_tokens, seed)
        began = perf_counter()
        self._train(str(self.base), folder, text, [phase], callbacks, seed)
        seconds = perf_counter() - began
        return {"losses": self._measure_model(run.name, folder), "training_seconds": round(seconds, 1)}

    def revert(self, tuned: Path, folder: Path) -> dict[str, Any]:
        """Set a trained model's middle back to the base, and measure it."""
        from lit_encoders.models.layer_range import LayerRange
        from lit_encoders.weights.checkpoint import open_weights
        from lit_encoders.weights.revert import replace_range

        base, weights = open_weights(str(self.base), "base"), open_weights(str(tuned), "tuned")
        replace_range(base, weights, LayerRange(self.settings.middle), folder / "export", "revert")
        return {"losses": self._measure_model(folder.name, folder)}

    def mix(self, experts: Sequence[Path], folder: Path) -> dict[str, Any]:
        """Average the experts, and measure the mean."""
        from lit_encoders.weights.checkpoint import open_stored
        from lit_encoders.weights.soup import soup

        soup([open_stored(str(expert), "models") for expert in experts], folder / "export")
        return {"losses": self._measure_model(folder.name, folder)}

    def _measure_model(self, name: str, folder: Path) -> dict[str, float]:
        return self.measure(folder / "export", measured_languages(name, self.settings))

    def run_seeds(self, jobs: int, say: Callable[[str], None]) -> dict[int, ModelLosses]:
        """Losses of all models of each seed, made now unless they are there."""
        families = [family.name for family in self.settings.families]
        trained: dict[Path, Run] = {}
        made: dict[Path, Run] = {}
        for seed in self.settings.seeds:
            folder = self.output / f"seed-{seed}"
            for run in trained_runs(self.settings.families):
                trained[folder / run.name] = partial(self.train_run, run, seed)
            made[folder / "dense-reverted"] = partial(self.revert, folder / "dense" / "export")
            for family in families:
                tuned = folder / f"expert-{family}" / "export"
                made[folder / f"expert-reverted-{family}"] = partial(self.revert, tuned)
            made[folder / "soup"] = partial(self.mix, [folder / f"expert-{family}" / "export" for family in families])
        results = run_all(trained, jobs, say) | run_all(made, jobs, say)
        losses: dict[int, ModelLosses] = {seed: {} for seed in self.settings.seeds}
        for folder, result in results.items():
            losses[int(folder.parent.name.removeprefix("seed-"))][folder.name] = result["losses"]
        return losses

    def forget_models(self) -> None:
        """Remove the weights of every run; the base stays."""
        for folder in self.output.glob("seed-*/*/export"):
            shutil.rmtree(folder)


def run_alignment(
    output: Path,
    settings: AlignmentSettings,
    pages: Pages = help_pages,
    jobs: int = 1,
    keep_models: bool = False,
    command: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """Run the study, or what is left of it, and write its report.

    Args:
        output: folder, new or of the same study.
        settings: what its numbers depend on.
        pages: where the text comes from.
        jobs: runs at once, see `run_all`.
        keep_models: whether the weights of all runs stay once everything is measured.
        command: for the report.
        say: told of each run that ends.

    Returns:
        The table, as text.

    Raises:
        ValueError: the folder holds another study, there is too little text, or a number is out of its range.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    facts = {**asdict(settings), "precision": precision(), "versions": versions()}
    claim_folder(output, facts)
    study = _Study(output, settings)
    once = {name: output / name for name in ("text", "base")}
    text = run_all({once["text"]: partial(study.make_text, pages)}, 1, say)[once["text"]]
    base: dict[str, float] = run_all({once["base"]: study.make_base}, 1, say)[once["base"]]["losses"]
    losses = study.run_seeds(jobs, say)
    if not keep_models:
        study.forget_models()
    return write_report(output, settings.families, settings.general, base, losses, {**facts, "text": text}, command)
