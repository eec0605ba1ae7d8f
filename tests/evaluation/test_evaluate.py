"""Several models on several tasks: what is run, compared and checked before the first run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from lit_encoders.evaluation.evaluate import Milestone, evaluate_models, last_doubling, milestones_of
from lit_encoders.evaluation.scores import Scores, class_scores
from lit_encoders.evaluation.statistics import t_interval
from lit_encoders.evaluation.task_base import Task
from lit_encoders.modules.lit_encoder import LitEncoder


@dataclass(frozen=True)
class Made(Task):
    """A task whose scores are drawn: model and seed decide them."""

    count: int = 250
    seeded: bool = True
    runs: list[tuple[str, int]] = field(default_factory=list)
    refuse: Callable[[LitEncoder], None] = lambda module: None
    main_metric: ClassVar[str] = "accuracy"
    files = ()
    protocol = {}  # noqa: RUF012

    @property
    def is_seeded(self) -> bool:
        return self.seeded

    def check(self, module: LitEncoder) -> None:
        self.refuse(module)

    def load(self) -> list[str]:
        return [str(number % 2) for number in range(self.count)]

    def num_items(self, items: list[str]) -> int:
        return len(items)

    def groups(self, items: list[str]) -> list[str]:
        return ["even" if label == "0" else "odd" for label in items]

    def run(self, model: str, items: list[str], seed: int) -> Scores:
        self.runs.append((Path(model).parent.name, seed))
        generator = np.random.default_rng([seed, "other" in model])
        right = generator.random(len(items)) < (0.6 if "other" in model else 0.9)
        said = [label if hit else str(1 - int(label)) for label, hit in zip(items, right, strict=True)]
        return class_scores(items, said, ["0", "1"])


@pytest.fixture
def models(bert_folder: Path, other_bert: Path) -> list[str]:
    return [str(bert_folder), str(other_bert)]


def test_every_model_is_run_with_every_seed_and_compared_item_by_item(models: list[str]) -> None:
    task, said = Made("made"), []
    (result,) = evaluate_models(models, [task], [3, 4], [(1, 0)], said.append)
    assert [seed for _, seed in task.runs] == [3, 4, 3, 4]
    assert len(said) == 4
    items = task.load()
    expected = [[task.run(model, items, seed) for seed in (3, 4)] for model in models]
    for figures, runs in zip(result.figures, expected, strict=True):
        values = [run.value("accuracy") for run in runs]
        assert figures["accuracy"].values == values
        assert figures["accuracy"].interval == t_interval(values)
    (comparison,) = result.comparisons
    # Single classes are in the figures: intervals of all of them would find something by chance.
    assert set(comparison.differences) == {"accuracy", "macro_f1"}
    means = [np.mean([run.value("accuracy") for run in runs]) for runs in expected]
    assert comparison.differences["accuracy"].value == pytest.approx(means[1] - means[0])
    assert comparison.differences["accuracy"].high < 0
    assert [found.group for found in comparison.tallies] == ["", "even", "odd"]
    whole, *parts = comparison.tallies
    assert (whole.won, whole.lost, whole.tied) == tuple(
        sum(getattr(part, name) for part in parts) for name in ("won", "lost", "tied")
    )
    assert whole.won < whole.lost
    plain = json.loads(json.dumps(result.plain(models)))
    assert [entry["model"] for entry in plain["models"]] == models
    assert plain["models"][0]["metrics"]["accuracy"]["values"] == [run.value("accuracy") for run in expected[0]]


def test_what_draws_nothing_is_run_once(models: list[str]) -> None:
    task = Made("made", seeded=False)
    (result,) = evaluate_models(models[:1], [task], [3, 4])
    assert [seed for _, seed in task.runs] == [0]
    assert result.plain(models[:1])["models"][0]["metrics"]["accuracy"]["half_width"] is None


def test_all_is_checked_before_the_first_run(models: list[str]) -> None:
    """A second task that cannot be must not show itself after hours of the first."""
    first, ready = Made("first"), []

    def refuse(module: LitEncoder) -> None:
        if "other" in str(module.source):
            raise ValueError("too few positions")

    for second, message in (
        (Made("second", refuse=refuse), r"^too few positions$"),
        (Made("second", count=199), r"^tasks\.second must have at least 200 items to compare models on \(or --no-com"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate_models(models, [first, second], [0], [(1, 0)], ready=lambda: ready.append(0))
    with pytest.raises(ValueError, match=r"^model\.backbone must be a folder or hub name of a Hugging Face model, got"):
        evaluate_models([models[0], "/no/model"], [first], [0], ready=lambda: ready.append(0))
    assert not first.runs
    assert not ready
    evaluate_models(models, [first, Made("second", count=199)], [0], ready=lambda: ready.append(len(first.runs)))
    assert ready == [0]


def make_run(folder: Path, names: list[str], tokens: object = None, export: bool = True) -> Path:
    for name in names:
        (folder / "export" / name).mkdir(parents=True)
        (folder / "export" / name / "config.json").write_text("{}")
    if export:
        (folder / "export" / "config.json").write_text("{}")
    (folder / "summary.json").write_text(json.dumps({"tokens": tokens}))
    return folder


def test_milestones_come_by_their_tokens_and_the_end_is_one(tmp_path: Path) -> None:
    names = ["tokens-2.5B", "tokens-300", "tokens-750K", "tokens-20M", "clm", "tokens-1.2.3", "tokens-many"]
    run = make_run(tmp_path / "run", names, tokens=2_600_000_123)
    (run / "export" / "tokens-1K").mkdir()
    assert milestones_of(run) == [
        Milestone(300, run / "export" / "tokens-300"),
        Milestone(750e3, run / "export" / "tokens-750K"),
        Milestone(20e6, run / "export" / "tokens-20M"),
        Milestone(2.5e9, run / "export" / "tokens-2.5B"),
        Milestone(2_600_000_123, run / "export"),
    ]


@pytest.mark.parametrize(("tokens", "export"), [(None, True), (1000, True), (2000, False)])
def test_an_end_that_is_none_is_left_out(tmp_path: Path, tokens: Any, export: bool) -> None:
    run = make_run(tmp_path / "run", ["tokens-1K"], tokens, export)
    assert [milestone.tokens for milestone in milestones_of(run)] == [1000]


def test_names_of_milestones_are_those_that_runs_give(tmp_path: Path) -> None:
    from lit_encoders.callbacks.hf_export import milestone_name

    asked = [1.0, 300, 1500, 2e6, 1.25e9, 3e12]
    run = make_run(tmp_path / "run", [milestone_name(tokens) for tokens in asked])
    assert [milestone.tokens for milestone in milestones_of(run)] == asked


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [([], None), ([5], None), ([3, 5], None), ([1, 2], (1, 0)), ([1, 2, 3, 4], (3, 1)), ([1, 2, 4, 7.9], (3, 1))],
)
def test_last_doubling_begins_at_half_of_the_tokens(tokens: list[float], expected: tuple[int, int] | None) -> None:
    assert last_doubling([Milestone(number, Path()) for number in tokens]) == expected
