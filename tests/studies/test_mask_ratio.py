"""The mask-ratio study: what its tables and sentences say of given figures, and a whole small study that resumes."""

from __future__ import annotations

import csv
import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from safetensors.torch import load_file

from lit_encoders.callbacks import Phase
from lit_encoders.callbacks.layer_freezing import FreezeWindow
from lit_encoders.data.ontology import Term
from lit_encoders.evaluation.statistics import t_interval
from lit_encoders.modules.lit_encoder import LitEncoder
from lit_encoders.objectives.streams import MaskStream, check_streams
from lit_encoders.studies.mask_ratio import MaskRatioSettings, row_streams, run_mask_ratio, shortened
from lit_encoders.studies.mask_ratio_report import (
    ROWS,
    TASKS,
    Measured,
    as_csv,
    compared,
    difference,
    difference_table,
    last_gain,
    milestone_table,
    picture,
    report,
    titles,
    value_table,
    verdict,
    write_report,
)

# What they start together takes long: on one worker, once.
pytestmark = pytest.mark.xdist_group("mask_ratio")

MILESTONES = (100.0, 200.0, 400.0)
REFERENCES = {
    name: {"classification": value, "retrieval": value / 2} for name, value in (("base", 0.5), ("student", 0.25))
}
FACTS: dict[str, Any] = {
    "low": 0.05,
    "high": 0.5,
    "single_low": 0.06,
    "seeds": [0, 5, 7],
    "teacher_mask_ratio": 0.3,
    "student_layers": 3,
    "fit_terms": 2500,
    "test_terms": 2000,
    "learning_rate": 0.01,
    "versions": {"torch": "9.9"},
    "text": {"pretraining": 14_449},
    "student": "10 before, 5 after",
    "training_seconds": {row.name: 60.0 + number for number, row in enumerate(ROWS)},
}
NAMES = titles(FACTS)


def made_up_runs(gains: Sequence[float], rows: Sequence[str] = tuple(NAMES)) -> dict[str, list[list[Measured]]]:
    """A seed for each gain: its figures stand at the row's number in hundredths, and gain at the last milestone."""
    return {
        row: [
            [dict.fromkeys(TASKS, 0.3 + number / 100 + added) for added in (0.0, 0.01, 0.01 + gain)] for gain in gains
        ]
        for number, row in enumerate(rows)
    }


# Rows


def test_streams_of_every_row() -> None:
    low, high = MaskStream("low", 0.05, 0.75), MaskStream("high", 0.5, 0.25)
    two_heads = [replace(low, head="low"), replace(high, head="high")]
    settings = MaskRatioSettings(low_share=0.75)
    assert {row.name: row_streams(row, settings) for row in ROWS} == {
        "single-low": [],
        "single-high": [],
        "mixed-shared": [low, high],
        "mixed-decoupled": two_heads,
        "kd-low": [replace(two_heads[0], distill=True), two_heads[1]],
        "kd-both": [replace(stream, distill=True) for stream in two_heads],
    }


def test_streams_go_together_at_the_settings_of_the_study() -> None:
    for row in ROWS[2:]:
        check_streams(row_streams(row, MaskRatioSettings()))


def test_titles_have_the_ratios_of_the_settings() -> None:
    assert list(NAMES.values())[:3] == ["6 % only", "50 % only", "5 % + 50 %, one head"]
    assert titles({"low": 0.07, "high": 0.285, "single_low": 0.15})["mixed-shared"] == "7 % + 28.5 %, one head"


def test_rows_are_compared_with_their_baseline_and_once() -> None:
    pairs = compared(made_up_runs([0.0]))
    assert len(set(pairs)) == len(pairs) == 7
    assert [pair for pair in pairs if pair[0].startswith("kd")] == [
        ("kd-low", "mixed-decoupled"),
        ("kd-both", "mixed-decoupled"),
        ("kd-both", "kd-low"),
    ]
    assert ("mixed-decoupled", "mixed-shared") in pairs
    assert compared(made_up_runs([0.0], ["kd-both", "kd-low"])) == [("kd-both", "kd-low")]


# What is said


def test_differences_and_gains_are_taken_seed_by_seed() -> None:
    runs = {
        name: [[{"classification": value} for value in seed] for seed in seeds]
        for name, seeds in (("x", [(0.1, 0.5), (0.2, 0.7)]), ("y", [(0.1, 0.25), (0.1, 0.5)]))
    }
    assert difference(runs, "x", "y", "classification") == t_interval([0.5 - 0.25, 0.7 - 0.5])
    assert difference(runs, "x", "y", "classification", 0) == t_interval([0.0, 0.2 - 0.1])
    assert last_gain(runs["x"], "classification") == t_interval([0.5 - 0.1, 0.7 - 0.2])


@pytest.mark.parametrize(
    ("gains", "sentence"),
    [
        ([0.1, 0.1, 0.11], "12 of 12 curves rise by more than their interval, 0 fall, and 0 cannot be told from flat."),
        (
            [0.1, -0.1, 0.05],
            "0 of 12 curves rise by more than their interval, 0 fall, and 12 cannot be told from flat.",
        ),
        (
            [-0.1, -0.1, -0.11],
            "0 of 12 curves rise by more than their interval, 12 fall, and 0 cannot be told from flat.",
        ),
    ],
)
def test_verdict_says_which_curves_still_rise(gains: list[float], sentence: str) -> None:
    said = verdict(made_up_runs(gains))
    assert said.startswith(f"Between the last two milestones {sentence}")
    assert said.endswith("A ranking below saturation need not be the one at saturation.")


def test_verdict_counts_each_curve() -> None:
    rising, flat = made_up_runs([0.1, 0.1]), made_up_runs([0.1, -0.1])
    assert "3 of 12 curves rise" in verdict(
        {
            **flat,
            "kd-low": rising["kd-low"],
            "kd-both": [[{**measured, "retrieval": 0.5} for measured in seed] for seed in rising["kd-both"]],
        }
    )


def test_verdict_of_one_seed() -> None:
    assert verdict(made_up_runs([0.1])) == "Whether the curves still rise cannot be said: one seed gives no intervals."


def cells(table: str) -> list[list[str]]:
    lines = table.splitlines()
    assert len({len(line) for line in lines}) == 1, "columns are aligned"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]


def test_values_are_those_of_the_last_milestone() -> None:
    head, *rows = cells(value_table(REFERENCES, made_up_runs([0.0, 0.0]), NAMES))
    assert head == ["", "classification (accuracy)", "retrieval (nDCG@10)"]
    assert rows[:2] == [["base", "0.500", "0.250"], ["student", "0.250", "0.125"]]
    assert [row[0] for row in rows[2:]] == list(NAMES.values())
    assert [row[1] for row in rows[2:]] == [f"{0.31 + number / 100:.3f} ± 0.000" for number in range(6)]


def test_differences_have_a_row_for_each_pair() -> None:
    runs = made_up_runs([0.0, 0.0])
    rows = cells(difference_table(runs, NAMES))[1:]
    assert rows[0] == ["50 % only - 6 % only", "+0.010 ± 0.000 *", "+0.010 ± 0.000 *"]
    assert len(rows) == len(compared(runs))


def test_milestones_have_a_column_each_and_the_gain() -> None:
    head, first, *_ = cells(milestone_table((1e5, 2e5, 4e5), made_up_runs([0.02, 0.04]), NAMES, "retrieval"))
    assert head == ["retrieval (nDCG@10)", "100,000", "200,000", "400,000", "last gain"]
    # Two seeds 0.02 apart: s / sqrt(2) is 0.01, and t of one degree of freedom 12.7062.
    assert first == ["6 % only", "0.300", "0.310", "0.340", "+0.030 ± 0.127"]


def test_csv_has_every_figure_and_the_seeds_own_numbers() -> None:
    runs = made_up_runs([0.01, 0.02, 0.03])
    rows = list(csv.DictReader(as_csv(MILESTONES, FACTS["seeds"], REFERENCES, runs).splitlines()))
    assert len(rows) == 2 * 2 + 6 * 3 * 3 * 2
    assert rows[1] == {"row": "base", "seed": "", "tokens": "", "task": "retrieval", "value": "0.25"}
    found = {(row["row"], row["seed"], row["tokens"], row["task"]): float(row["value"]) for row in rows if row["seed"]}
    assert found == {
        (row, str(seed), str(tokens), task): runs[row][place][number][task]
        for row in runs
        for place, seed in enumerate((0, 5, 7))
        for number, tokens in enumerate(MILESTONES)
        for task in TASKS
    }


def test_picture_begins_at_the_student() -> None:
    figure = picture(MILESTONES, REFERENCES, made_up_runs([0.02, 0.04]), NAMES)
    assert [axes.get_title() for axes in figure.axes] == list(TASKS.values())
    lines = {line.get_label(): line.get_xydata() for line in figure.axes[1].lines}
    assert set(lines) == set(NAMES.values())
    points = [(0.0, 0.125), (100.0, 0.3), (200.0, 0.31), (400.0, 0.34)]
    assert [tuple(point) for point in lines["6 % only"]] == [pytest.approx(point) for point in points]


def test_report_says_what_it_is_of_and_what_it_does_not_settle() -> None:
    short, whole = report(MILESTONES, REFERENCES, made_up_runs([0.1, 0.1, 0.1]), FACTS, "do this")
    assert short in whole
    for part in (
        "at 400 tokens", "over 3 seeds.", "`do this`", "at 30 %\nmasking", "fitted on 2,500 terms and tested on 2,000",
        "Student: 10 before, 5 after. Text: 14,449 definitions.", "6 % only 60, 50 % only 61,", "- torch 9.9",
        "- learning_rate: 0.01", "Of 14 differences",
    ):  # fmt: skip
        assert part in whole
    assert "- versions" not in whole
    assert whole.index("## What this does not settle") > whole.index("## How it was made")
    assert "over 1 seed.\n" in report(MILESTONES, REFERENCES, made_up_runs([0.1]), FACTS, "")[1]


def test_report_is_written_as_files(tmp_path: Path) -> None:
    runs = made_up_runs([0.1, 0.2, 0.3])
    short = write_report(tmp_path, MILESTONES, REFERENCES, runs, FACTS, "do this")
    assert short.splitlines()[-1] == str(tmp_path / "report.md")
    assert {file.name for file in tmp_path.iterdir()} == {"report.md", "results.csv", "results.json", "curves.png"}
    stored = json.loads((tmp_path / "results.json").read_text())
    assert (stored["rows"], stored["references"], stored["milestones"]) == (runs, REFERENCES, [100, 200, 400])
    assert stored["settings"]["seeds"] == [0, 5, 7]
    assert stored["differences"][0] == {
        "row": "single-high",
        "reference": "single-low",
        "task": "classification",
        "seeds": 3,
        "differs": True,
        "mean": pytest.approx(0.01),
        "half_width": pytest.approx(0.0, abs=1e-9),
    }
    assert len(stored["differences"]) == 14


def test_one_seed_has_no_interval_in_any_file(tmp_path: Path) -> None:
    short = write_report(tmp_path, MILESTONES, REFERENCES, made_up_runs([0.1]), {**FACTS, "seeds": [3]}, "")
    assert "+0.010 (one seed)" in short
    stored = json.loads((tmp_path / "results.json").read_text())
    assert {cell["half_width"] for cell in stored["differences"]} == {None}


# The whole of it

COMMAND = "lit-encoders study mask-ratio"


def made_up_terms() -> list[Term]:
    """Definitions of the words of their branch; synonyms of words of the definition, in another order."""
    draw = random.Random(0)
    terms = [Term("root", "root", "", (), ()), *(Term(name, name, "", (), ("root",)) for name in "abc")]
    for number in range(90):
        words = [f"w{30 * (number % 3) + word}" for word in draw.sample(range(30), 12)]
        terms.append(
            Term(f"t{number}", "", " ".join(words), (f"{words[7]} {words[2]} {words[9]}",), ("abc"[number % 3],))
        )
    return terms


@pytest.fixture(scope="module")
def settings(bert_folder: Path) -> MaskRatioSettings:
    return replace(
        shortened(MaskRatioSettings()),
        base=str(bert_folder),
        root="root",
        student_layers=2,
        milestones=(100, 300),
        learning_rate=1e-2,
        slots=128,
        sequence_length=16,
        teacher_slots=64,
        fit_terms=40,
        test_terms=30,
    )


Study = tuple[Path, str, list[str]]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory, settings: MaskRatioSettings) -> Study:
    """A finished study's folder, its tables, and what was run."""
    said: list[str] = []
    output = tmp_path_factory.mktemp("studies") / "mask-ratio"
    short = run_mask_ratio(output, settings, made_up_terms, command=COMMAND, say=said.append)
    return output, short, said


def stored(output: Path) -> dict[str, Any]:
    """What has to come out again; the seconds of a training run do not."""
    found = json.loads((output / "results.json").read_text())
    del found["settings"]["training_seconds"]
    return found


def test_study_runs_everything_once(study: Study) -> None:
    output, short, said = study
    names = [*("text", "base", "teacher", "student"), *(row.name for row in ROWS)]
    assert [line.rpartition("/")[2] for line in said] == names
    assert said[-1] == f"6 of 6: {output / 'seed-0' / 'kd-both'}"
    assert "one seed gives no intervals" in short
    assert not list(output.glob("seed-*/*/export")), "models of a measured run are not kept"


def test_text_leaves_out_the_tested_terms(study: Study) -> None:
    text = [json.loads(line)["text"] for line in (study[0] / "text" / "train.jsonl").read_text().splitlines()]
    terms = json.loads((study[0] / "text" / "terms.json").read_text())
    tested = {term["definition"] for term in terms["test"]}
    assert (len(text), len(terms["fit"]), len(tested)) == (60, 40, 30)
    assert not tested & set(text)
    assert json.loads((study[0] / "text" / "result.json").read_text()) == {
        "pretraining": 60,
        "fit": {"terms": 40, "with one branch": 40, "with a synonym": 40},
        "test": {"terms": 30, "with one branch": 30, "with a synonym": 30},
    }


def test_student_is_the_teacher_with_fewer_layers(study: Study, settings: MaskRatioSettings) -> None:
    layers = [
        json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        for folder in (Path(settings.base), study[0] / "teacher" / "export", study[0] / "student" / "export")
    ]
    assert layers == [3, 3, 2]
    base, teacher, student = (
        load_file(folder / "model.safetensors")
        for folder in (Path(settings.base), study[0] / "teacher" / "export", study[0] / "student" / "export")
    )
    words = "bert.embeddings.word_embeddings.weight"
    assert teacher[words].equal(student[words])
    assert not teacher[words].equal(base[words])
    assert "parameters before" in (study[0] / "report.md").read_text()


def test_figures_are_of_every_model_and_milestone(study: Study) -> None:
    found = stored(study[0])
    assert set(found["references"]) == {"base", "teacher", "student"}
    assert {row: [len(seed) for seed in seeds] for row, seeds in found["rows"].items()} == {
        row.name: [2] for row in ROWS
    }
    measured = [*found["references"].values(), *(m for seeds in found["rows"].values() for seed in seeds for m in seed)]
    assert all(0 <= figures[task] <= 1 for figures in measured for task in TASKS)
    assert len({tuple(figures.values()) for figures in measured}) > len(ROWS), "training moves the figures"


def test_second_call_trains_nothing(study: Study, settings: MaskRatioSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    output, short, _ = study

    def refuse(*arguments: object, **more: object) -> None:
        raise AssertionError("nothing is left to train or to measure")

    for name in ("train", "measure_terms", "split_terms"):
        monkeypatch.setattr(f"lit_encoders.studies.mask_ratio.{name}", refuse)
    said: list[str] = []
    assert run_mask_ratio(output, settings, made_up_terms, command=COMMAND, say=said.append) == short
    assert said == []


def test_interrupted_study_goes_on_to_the_same_numbers(
    study: Study, settings: MaskRatioSettings, tmp_path: Path
) -> None:
    """Runs that are gone come out as they were; only they are run."""
    output = tmp_path / "again"
    shutil.copytree(study[0], output)
    for name in ("single-high", "kd-low"):
        shutil.rmtree(output / "seed-0" / name)
    # As an interruption leaves it: models, and no result.
    (output / "seed-0" / "kd-low" / "export" / "tokens-100").mkdir(parents=True)
    said: list[str] = []
    run_mask_ratio(output, settings, made_up_terms, keep_models=True, say=said.append)
    assert said == [f"{5 + n} of 6: {output / 'seed-0' / name}" for n, name in enumerate(["single-high", "kd-low"])]
    assert stored(output) == stored(study[0])
    kept = sorted(folder.relative_to(output / "seed-0").as_posix() for folder in output.glob("seed-0/*/export/*"))
    assert kept == [f"{name}/export/tokens-{count}" for name in ("kd-low", "single-high") for count in (100, 300)]


def test_rows_are_trained_as_they_say(
    study: Study, settings: MaskRatioSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every seed of every row, with the training itself left out."""
    output = tmp_path / "rows"
    shutil.copytree(study[0], output)
    monkeypatch.setattr("lit_encoders.studies.mask_ratio.claim_folder", lambda *arguments: None)
    monkeypatch.setattr("lit_encoders.studies.mask_ratio.measure_terms", lambda *arguments: dict.fromkeys(TASKS, 0.5))
    made: dict[str, list[tuple[LitEncoder, dict[str, Any]]]] = {}

    def record(module: LitEncoder, text: Path, folder: Path, phases: Any, callbacks: Any, **options: Any) -> None:
        made.setdefault(folder.name, []).append((module, options))
        for name in ("tokens-100", "tokens-300"):
            shutil.copytree(output / "student" / "export", folder / "export" / name)

    monkeypatch.setattr("lit_encoders.studies.mask_ratio.train", record)
    run_mask_ratio(output, replace(settings, seeds=(4, 9), temperature=2.0, kd_weight=0.25), made_up_terms)
    assert set(made) == {row.name for row in ROWS}
    for row in ROWS:
        assert [(module.seed, options["seed"]) for module, options in made[row.name]] == [(4, 4), (9, 9)]
        assert {options["milestones"] for _, options in made[row.name]} == {(100, 300)}
    modules = {name: runs[0][0] for name, runs in made.items()}
    assert {module.source for module in modules.values()} == {str(output / "student" / "export")}
    assert {name: type(module).__name__ for name, module in modules.items()} == {
        **dict.fromkeys([row.name for row in ROWS[:4]], "LitMLM"),
        **dict.fromkeys(["kd-low", "kd-both"], "LitKD"),
    }
    assert [modules[name].mask_ratio for name in ("single-low", "single-high")] == [0.06, 0.5]
    assert {name: module.streams for name, module in modules.items()} == {
        row.name: row_streams(row, settings) for row in ROWS
    }
    for name in ("kd-low", "kd-both"):
        asked = {key: modules[name].hparams[key] for key in ("teacher", "temperature", "kd_weight")}
        assert asked == {"teacher": str(output / "teacher" / "export"), "temperature": 2.0, "kd_weight": 0.25}


def test_teacher_is_trained_as_it_says(
    study: Study, settings: MaskRatioSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First its new head alone, then all of it; the students' rate stays, so that milestones are comparable."""
    output = tmp_path / "teacher"
    shutil.copytree(study[0], output)
    shutil.rmtree(output / "teacher")
    shutil.rmtree(output / "seed-0" / "single-low")
    made: dict[str, tuple[LitEncoder, list[Phase], list[Any], dict[str, Any]]] = {}

    def record(module: LitEncoder, text: Path, folder: Path, phases: Any, callbacks: Any, **options: Any) -> None:
        made[folder.name] = (module, phases, callbacks, options)
        for name in ("", "tokens-100", "tokens-300"):
            shutil.copytree(settings.base, folder / "export" / name, dirs_exist_ok=True)

    monkeypatch.setattr("lit_encoders.studies.mask_ratio.train", record)
    run_mask_ratio(output, settings, made_up_terms)
    module, (head, whole), (freezing,), options = made["teacher"]
    assert (module.source, module.mask_ratio, options["slots"]) == (settings.base, 0.3, 64)
    assert (head.steps, head.peak, head.shape) == (2, 2.0, "constant")
    assert (whole.steps, whole.peak, whole.shape, whole.warmup_steps) == (2, 1.0, "cosine", 1)
    assert freezing.windows == [FreezeWindow(["all", "embeddings"], phases=["head"])]
    _, (phase,), callbacks, options = made["single-low"]
    assert (phase.shape, phase.warmup_steps, callbacks, options["slots"]) == ("constant", 1, [], 128)


def test_report_has_what_a_reader_needs(study: Study) -> None:
    output, short, _ = study
    text = (output / "report.md").read_text()
    assert short.rpartition("\n")[0] in text
    for part in (
        f"`{COMMAND}`",
        "over 1 seed",
        "- torch ",
        "- learning_rate: 0.01",
        "- student_layers: 2",
        "at 300 tokens",
    ):
        assert part in text
    rows = list(csv.DictReader((output / "results.csv").open()))
    assert len(rows) == 3 * 2 + 6 * 2 * 2
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_runs_side_by_side_give_the_same_numbers(study: Study, settings: MaskRatioSettings, tmp_path: Path) -> None:
    """Up to a few terms of thirty: a process of its own has one thread, and rounds otherwise."""
    run_mask_ratio(tmp_path / "two", settings, made_up_terms, jobs=2)
    found, expected = stored(tmp_path / "two"), stored(study[0])
    for row in ROWS:
        for task in TASKS:
            ours, theirs = (fmean(m[task] for m in side["rows"][row.name][0]) for side in (found, expected))
            assert ours == pytest.approx(theirs, abs=0.1)


# Mistakes


@pytest.mark.parametrize("milestones", [(250, 100), (100, 100), (100,), (), (0, 100)])
def test_milestones_have_to_rise(settings: MaskRatioSettings, tmp_path: Path, milestones: tuple[float, ...]) -> None:
    """Said before anything is trained: the report needs a gain from one milestone to the next."""
    with pytest.raises(ValueError, match=r"^milestones must rise from above 0, and be at least two, got \["):
        run_mask_ratio(tmp_path / "new", replace(settings, milestones=milestones), made_up_terms)
    assert not (tmp_path / "new").exists()


def test_jobs_are_at_least_one(settings: MaskRatioSettings, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^jobs must be at least 1, got 0$"):
        run_mask_ratio(tmp_path / "new", settings, made_up_terms, jobs=0)


def test_another_study_is_refused_in_the_same_folder(study: Study, settings: MaskRatioSettings) -> None:
    with pytest.raises(ValueError, match=r"has high 0\.5, got 0\.4$"):
        run_mask_ratio(study[0], replace(settings, high=0.4), made_up_terms)


def test_too_few_terms_are_said(settings: MaskRatioSettings, tmp_path: Path) -> None:
    terms: Callable[[], list[Term]] = lambda: made_up_terms()[:50]  # noqa: E731
    with pytest.raises(ValueError, match=r"^terms with a definition must be more than 70, got 46$"):
        run_mask_ratio(tmp_path / "new", settings, terms)
