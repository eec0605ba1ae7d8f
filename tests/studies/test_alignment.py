"""The alignment study: cells from given losses, what its sentences say, and a whole small study that resumes."""

from __future__ import annotations

import csv
import json
import math
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lit_encoders.evaluation.statistics import Interval, t_interval
from lit_encoders.evaluation.tables import show_difference
from lit_encoders.studies.alignment import (
    AlignmentSettings,
    draw_text,
    equal_shares,
    measured_languages,
    run_alignment,
    shortened,
    trained_runs,
)
from lit_encoders.studies.alignment_report import as_csv, as_plain, table, verdict
from lit_encoders.studies.alignment_table import (
    ROWS,
    Family,
    ModelLosses,
    base_losses,
    compare,
    row_losses,
    study_cells,
)
from lit_encoders.studies.verb import study_verb

# What they start together takes long: on one worker, once.
pytestmark = pytest.mark.xdist_group("alignment")

FAMILIES = (Family("a", ("a1", "a2"), ("a3",)), Family("b", ("b1",), ("b2", "b3")))
BASE = {"g": 1.0, "a1": 5.0, "a2": 7.0, "a3": 8.0, "b1": 4.0, "b2": 6.0, "b3": 8.0}


def made_up_losses(shift: float) -> ModelLosses:
    """Every model's losses are the base's, moved by the same number."""
    names = {row.model(family) for row in ROWS for family in FAMILIES}
    return {name: {language: loss + shift for language, loss in BASE.items()} for name in names}


# Cells


def test_columns_are_means_over_families_of_means_over_languages() -> None:
    assert base_losses(BASE, FAMILIES, "g") == {"trained": (6 + 4) / 2, "general": 1.0, "unseen": (8 + 7) / 2}


def test_an_expert_counts_on_its_own_family() -> None:
    experts = next(row for row in ROWS if row.title == "family experts")
    losses = {
        "expert-a": {"g": 2.0, "a1": 1.0, "a2": 3.0, "a3": 4.0},
        "expert-b": {"g": 4.0, "b1": 6.0, "b2": 1.0, "b3": 3.0},
    }
    assert row_losses(experts, losses, FAMILIES, "g") == {"trained": (2 + 6) / 2, "general": 3.0, "unseen": (4 + 2) / 2}


def test_differences_are_taken_seed_by_seed() -> None:
    first = [{"trained": 3.0, "general": 1.0, "unseen": 2.0}, {"trained": 5.0, "general": 1.5, "unseen": 2.0}]
    second = [{"trained": 2.0, "general": 1.0, "unseen": 2.0}, {"trained": 3.0, "general": 1.0, "unseen": 2.0}]
    cells = compare("x", "y", first, second)
    assert [cell.interval for cell in cells] == [t_interval([1.0, 2.0]), t_interval([0.0, 0.5]), t_interval([0.0, 0.0])]
    assert {(cell.row, cell.reference) for cell in cells} == {("x", "y")}


def test_every_row_has_every_column_and_strategies_their_baseline() -> None:
    against_base, against_baselines = study_cells(FAMILIES, "g", BASE, {0: made_up_losses(0.5), 1: made_up_losses(1.5)})
    assert [(cell.row, cell.column) for cell in against_base] == [
        (row.title, column) for row in ROWS for column in ("trained", "general", "unseen")
    ]
    assert len(ROWS) == 7
    assert all(cell.interval == t_interval([0.5, 1.5]) for cell in against_base)
    assert all(cell.interval == Interval(0.0, 0.0, 2) for cell in against_baselines)
    baselines = {cell.row: cell.reference for cell in against_baselines}
    assert baselines == {
        "layer freezing": "family experts",
        "layer-range L2-SP": "family experts",
        "dense-reverted": "dense CPT",
        "expert-reverted": "family experts",
        "expert soup": "family experts",
    }


# What is said


@pytest.mark.parametrize(
    ("shifts", "sentence"),
    [
        ([0.5, -0.5, 0.25], "The study has no power: no cell differs from the base by more than its interval."),
        ([0.5], "The study has no power: one seed gives no intervals."),
        ([0.5, 0.5, 0.51], "21 of 21 cells differ from the base by more than their interval (marked *)."),
    ],
)
def test_verdict_says_whether_there_is_power(shifts: list[float], sentence: str) -> None:
    losses = {seed: made_up_losses(shift) for seed, shift in enumerate(shifts)}
    assert verdict(study_cells(FAMILIES, "g", BASE, losses)[0]) == sentence


def test_tables_show_every_cell() -> None:
    cells, against_baselines = study_cells(FAMILIES, "g", BASE, {0: made_up_losses(0.5), 1: made_up_losses(0.5)})
    lines = table(cells, ["x", "y", "z"], base_losses(BASE, FAMILIES, "g")).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split("|")[1:3] == [" base (loss)       ", " 5.000            "]
    assert lines[3].split("|")[2].strip() == "+0.500 ± 0.000 *"
    assert len(lines) == 2 + 1 + len(ROWS)
    assert "| layer freezing - family experts" in table(against_baselines, ["x", "y", "z"])


def test_one_seed_has_no_interval_in_any_file() -> None:
    (cell, *_), _ = study_cells(FAMILIES, "g", BASE, {0: made_up_losses(0.5)})
    assert show_difference(cell.interval) == "+0.500 (one seed)"
    assert math.isinf(cell.interval.half_width)
    assert as_plain(cell)["half_width"] is None
    rows = list(csv.DictReader(as_csv([cell], base_losses(BASE, FAMILIES, "g")).splitlines()))
    assert [row["row"] for row in rows] == ["base"] * 3 + ["dense CPT"]
    assert rows[3]["half_width"] == ""
    assert float(rows[0]["value"]) == 5.0


# Runs


def test_each_seed_trains_seven_models() -> None:
    runs = {run.name: run for run in trained_runs(AlignmentSettings().families)}
    assert len(runs) == 7
    assert runs["dense"].languages == ("fr", "es", "it", "de", "nl")
    assert runs["l2sp-germanic"].languages == ("de", "nl")
    made_of_them = {"dense-reverted", "expert-reverted-romance", "expert-reverted-germanic", "soup"}
    assert {row.model(f) for row in ROWS for f in AlignmentSettings().families} == {*runs, *made_of_them}


def test_models_are_measured_where_they_count() -> None:
    settings = AlignmentSettings()
    assert measured_languages("soup", settings) == settings.languages
    assert measured_languages("expert-reverted-romance", settings) == ["en-us", "fr", "es", "it", "pt", "ca"]


def test_languages_get_equal_numbers_of_tokens() -> None:
    assert equal_shares(800, 3) == [267, 267, 266]
    pools = {"a": [[number] for number in range(10)], "b": [[number] for number in range(10, 30)]}
    drawn = draw_text(pools, 12, seed=1)
    assert len({piece[0] for piece in drawn}) == len(drawn) == 12
    assert sum(piece[0] < 10 for piece in drawn) == 6
    assert drawn == draw_text(pools, 12, seed=1) != draw_text(pools, 12, seed=2)
    # Strategies of a seed read the same text, whatever else they read.
    assert draw_text({"b": pools["b"]}, 6, seed=1) == drawn[6:]


def test_unknown_study_is_an_error_with_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"^study must be one of alignment, detour, mask-ratio, got 'alignmnt'; alignment\?$"
    ):
        study_verb("alignmnt")


# The whole of it

WORDS = [f"w{number}" for number in range(90)]
COMMAND = "lit-encoders study alignment"


def made_up_pages(languages: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Pages of words that follow each other in steps of the language's own, a new start on each page."""
    pages = {}
    for number, language in enumerate(languages):
        starts = random.Random(number).sample(range(len(WORDS)), 40)
        pages[language] = [
            " ".join(WORDS[(start + (number + 2) * place) % len(WORDS)] for place in range(50)) for start in starts
        ]
    return pages


@pytest.fixture(scope="module")
def settings(bert_folder: Path) -> AlignmentSettings:
    return replace(
        shortened(AlignmentSettings()),
        base=str(bert_folder),
        general="g",
        families=FAMILIES,
        middle="1:2",
        steps=4,
        piece_tokens=16,
        slots=32,
        learning_rate=1e-2,
        train_pieces=30,
        held_out_pieces=4,
    )


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory, settings: AlignmentSettings) -> tuple[Path, str, list[str]]:
    """A finished study's folder, its table, and what was run."""
    said: list[str] = []
    output = tmp_path_factory.mktemp("studies") / "alignment"
    short = run_alignment(output, settings, made_up_pages, command=COMMAND, say=said.append)
    return output, short, said


Study = tuple[Path, str, list[str]]


def test_study_runs_everything_once(study: Study) -> None:
    output, short, said = study
    assert [line.rpartition("/")[2] for line in said[:3]] == ["text", "base", "dense"]
    assert said[-1] == f"4 of 4: {output / 'seed-0' / 'soup'}"
    assert len(said) == 2 + 7 + 4
    assert "| layer-range L2-SP" in short
    assert not list(output.glob("seed-*/*/export")), "models of a measured seed are not kept"
    assert (output / "base" / "export" / "model.safetensors").is_file()


def test_second_call_trains_nothing(study: Study, settings: AlignmentSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    output, short, _ = study

    def refuse(*arguments: object, **more: object) -> None:
        raise AssertionError("nothing is left to train or to measure")

    monkeypatch.setattr("lit_encoders.studies.alignment.train", refuse)
    monkeypatch.setattr("lit_encoders.studies.alignment.measure", refuse)
    said: list[str] = []
    assert run_alignment(output, settings, made_up_pages, command=COMMAND, say=said.append) == short
    assert said == []


def test_another_study_is_refused_in_the_same_folder(study: Study, settings: AlignmentSettings) -> None:
    with pytest.raises(ValueError, match=r"has steps 4, got 3$"):
        run_alignment(study[0], replace(settings, steps=3), made_up_pages)


def test_interrupted_study_goes_on_to_the_same_numbers(
    study: Study, settings: AlignmentSettings, tmp_path: Path
) -> None:
    """Runs that are gone come out as they were; only they are run."""
    output = tmp_path / "again"
    shutil.copytree(study[0], output)
    for name in ("l2sp-a", "freezing-b"):
        shutil.rmtree(output / "seed-0" / name)
    before = json.loads((study[0] / "results.json").read_text())
    said: list[str] = []
    run_alignment(output, settings, made_up_pages, say=said.append)
    assert said == [f"{6 + n} of 7: {output / 'seed-0' / name}" for n, name in enumerate(["freezing-b", "l2sp-a"])]
    assert json.loads((output / "results.json").read_text()) == before


@pytest.mark.slow
def test_runs_side_by_side_give_the_same_numbers(study: Study, settings: AlignmentSettings, tmp_path: Path) -> None:
    """Up to rounding: a process of its own has one thread."""
    run_alignment(tmp_path / "two", settings, made_up_pages, jobs=2)
    found, expected = (json.loads((f / "results.json").read_text())["cells"] for f in (tmp_path / "two", study[0]))
    assert [cell["mean"] for cell in found] == pytest.approx([cell["mean"] for cell in expected], abs=1e-3)


def test_rows_are_what_they_say(study: Study) -> None:
    """Training moves the loss, and so do reverting and mixing; models of families are measured on their own."""
    losses = json.loads((study[0] / "results.json").read_text())["losses"]["0"]
    base = json.loads((study[0] / "base" / "result.json").read_text())["losses"]
    assert set(losses["expert-b"]) == {"g", "b1", "b2", "b3"}
    assert set(losses["soup"]) == set(base) == {"g", "a1", "a2", "a3", "b1", "b2", "b3"}
    values = [round(model["g"], 6) for model in losses.values()]
    assert len({*values, round(base["g"], 6)}) == len(values) + 1


def test_report_has_what_a_reader_needs(study: Study) -> None:
    output, short, _ = study
    text = (output / "report.md").read_text()
    assert short.rpartition("\n")[0] in text
    for part in (f"`{COMMAND}`", "over 1 seed", "- torch ", "- learning_rate: 0.01", "1:2", "9:28"):
        assert part in text
    assert text.index("## What this does not settle") > text.index("## How it was made")
    rows = list(csv.DictReader((output / "results.csv").open()))
    assert len(rows) == 3 + 3 * len(ROWS) + 3 * 5
