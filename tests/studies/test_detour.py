"""The detour study: what its tables and sentences say of given figures, and a whole small study that resumes."""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lit_encoders import LitMLM
from lit_encoders.analysis.cka import FORMS, layer_distances
from lit_encoders.cli import main
from lit_encoders.data.ontology import Term
from lit_encoders.evaluation.statistics import t_interval
from lit_encoders.modules.lit_encoder import LitEncoder
from lit_encoders.studies.detour import DetourSettings, decay_name, phases, run_detour, shortened
from lit_encoders.studies.detour_report import (
    COLUMNS,
    DETOUR,
    INTERVENTIONS,
    TASKS,
    TRANSPLANTS,
    TWIN,
    Measured,
    Results,
    arms,
    as_csv,
    compared,
    decay_table,
    difference,
    difference_table,
    distance_table,
    picture,
    report,
    titles,
    value_table,
    verdict,
    view_picture,
    write_report,
)
from lit_encoders.studies.runs import train

# What they start together takes long: on one worker, once.
pytestmark = pytest.mark.xdist_group("detour")

FACTS: dict[str, Any] = {
    **json.loads(json.dumps(asdict(DetourSettings()))),
    "seeds": [0, 5, 7, 8, 9],
    "few_seeds": [0, 5, 7],
    "precision": "32-true",
    "versions": {"torch": "9.9"},
    "text": {"pretraining": 14_449},
}
NAMES = titles(FACTS)
BASE = dict.fromkeys(COLUMNS, 0.25)


def figures(value: float) -> Measured:
    """The tasks have the value, the MLM loss ten times as much."""
    return {column: value if column in TASKS else 10 * value for column in COLUMNS}


def made_up_results(gains: Sequence[float] = (0.1, 0.1, 0.11, 0.1, 0.1), few: int = 3) -> Results:
    """Twins stand at 0.3 and a hundredth more for each seed; the detour gains on that, a number for each seed."""
    twins = [0.3 + number / 100 for number in range(len(gains))]
    rows = {"twin": [figures(value) for value in twins]}
    rows["detour"] = [figures(value + gain) for value, gain in zip(twins, gains, strict=True)]
    for name in (*(arm.name for arm in INTERVENTIONS), *(f"transplant-{name}" for name in TRANSPLANTS)):
        rows[name] = [figures(value + 0.02) for value in twins[:few]]
    decays = {
        name: {share: [figures(value + added + share) for value in twins[:few]] for share in (0.2, 0.0, 0.05)}
        for name, added in (("twin", 0.0), ("detour", 0.1))
    }
    control = {form: 0.02 if form == "plain" else 0.05 for form in FORMS}
    distances = [
        [
            {"layer": layer, "form": form, "distance": (layer + 1) / 10 + number / 100, "control": control[form]}
            for form in FORMS
            for layer in range(11)
        ]
        for number in range(len(gains))
    ]
    return Results(rows, decays, distances, {"twin": [10.0] * len(gains), "detour": [12.5] * len(gains)})


# Phases


def test_arms_differ_in_the_objective_of_phase_1_alone() -> None:
    (twin, twin_decay), (detour, detour_decay) = (phases(arm, 0.1, DetourSettings()) for arm in (TWIN, DETOUR))
    assert (twin.objective, twin.mask_ratio, detour.objective) == ("mlm", 0.3, "clm")
    assert replace(twin, objective="clm", mask_ratio=None) == detour
    assert (detour.steps, detour.warmup_steps, detour.shape, detour.peak) == (80, 2, "constant", 1.0)
    assert twin_decay == detour_decay
    assert (twin_decay.objective, twin_decay.mask_ratio, twin_decay.steps) == ("mlm", 0.15, 8)
    assert (twin_decay.shape, twin_decay.final_share, twin_decay.warmup_steps) == ("one_minus_sqrt", 0.1, None)


@pytest.mark.parametrize("arm", arms(), ids=lambda arm: arm.name)
def test_interventions_are_detours_and_no_decay_is_no_phase(arm: Any) -> None:
    assert phases(arm, 0.1, DetourSettings()) == phases(TWIN if arm == TWIN else DETOUR, 0.1, DetourSettings())
    assert [phase.name for phase in phases(arm, 0.0, DetourSettings())] == ["first"]
    assert phases(arm, 0.5, DetourSettings())[1].steps == 40
    assert [phase.name for phase in phases(arm, 0.05, DetourSettings())] == ["first", "decay"]


# What is said


def test_differences_pair_by_seed_over_the_seeds_that_both_have() -> None:
    five = [{"retrieval": value} for value in (0.1, 0.4, 0.2, 0.9, 0.9)]
    three = [{"retrieval": value} for value in (0.2, 0.3, 0.5)]
    assert difference(three, five, "retrieval") == t_interval([0.2 - 0.1, 0.3 - 0.4, 0.5 - 0.2])
    assert difference(five, three, "retrieval").num_values == 3


def test_rows_are_compared_with_what_they_change() -> None:
    pairs = compared(made_up_results())
    assert len(set(pairs)) == len(pairs) == 1 + 2 * 3 + 5
    assert pairs[0] == ("detour", "twin")
    assert [other for row, other in pairs if row == "low-rests-late"] == ["detour", "twin"]
    assert {other for row, other in pairs if row.startswith("transplant")} == {"twin"}


@pytest.mark.parametrize(
    ("gains", "sentence"),
    [
        ((0.1, 0.1, 0.11), "the detour is above its twin, beyond the interval."),
        ((-0.1, -0.1, -0.11), "the detour is below its twin, beyond the interval."),
        # Mean 0, s 0.1: 4.3027 * 0.1 / sqrt(3).
        ((0.1, -0.1, 0.0), "the detour cannot be told from its twin: a difference below 0.248 would not show."),
    ],
)
def test_verdict_says_whether_the_arms_differ(gains: Sequence[float], sentence: str) -> None:
    said = verdict(made_up_results(gains))
    assert said.startswith(f"In classification {sentence} In retrieval {sentence} Of all 24 intervals")


def test_verdict_counts_the_intervals_that_there_are() -> None:
    """Rows of one seed have none, and cannot be among those that leave out 0."""
    assert "Of all 24 intervals of differences in the two tasks 24 leave out 0;" in verdict(made_up_results())
    assert "Of all 2 intervals of differences in the two tasks 2 leave out 0;" in verdict(made_up_results(few=1))


def test_verdict_of_one_seed() -> None:
    assert verdict(made_up_results([0.1], few=1)) == "One seed gives no intervals: nothing can be said."


def cells(table: str) -> list[list[str]]:
    lines = table.splitlines()
    assert len({len(line) for line in lines}) == 1, "columns are aligned"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]


def test_values_have_the_number_of_their_seeds() -> None:
    head, base, *rows = cells(value_table(BASE, made_up_results((0.0,) * 5, few=1), NAMES))
    assert head == ["", *COLUMNS.values()]
    assert base == ["base", "0.250", "0.250", "0.250"]
    # s of five numbers a hundredth apart is 0.0158, t of four degrees 2.7764.
    assert rows[0] == ["twin (MLM, then MLM), 5 seeds", *["0.320 ± 0.020"] * 2, "3.200 ± 0.196"]
    assert rows[2] == ["low layers rest in the detour (0:2), 1 seed", *["0.320 (one seed)"] * 2, "3.200 (one seed)"]
    assert len(rows) == len(arms())


def test_differences_have_a_row_for_each_pair() -> None:
    results = made_up_results((0.1,) * 5)
    rows = cells(difference_table(results, NAMES, compared(results)))[1:]
    assert rows[0] == ["detour (CLM, then MLM) - twin", *["+0.100 ± 0.000 *"] * 2, "+1.000 ± 0.000 *"]
    assert rows[1][:2] == ["low layers rest in the detour (0:2) - detour", "-0.080 ± 0.000 *"]
    assert [row[0] for row in rows[-5:]] == [
        f"{name} - twin" for name in ("layers 0:2", "layers 2:4", "layers 4:6", "all attention", "all MLP")
    ]


def test_decays_stand_in_their_order() -> None:
    head, *rows = cells(decay_table(made_up_results(), "retrieval"))
    assert head == ["retrieval (nDCG@10): decay", "twin", "detour", "detour - twin"]
    assert rows == [
        ["0 %", "0.310", "0.410", "+0.100 ± 0.000 *"],
        ["5 %", "0.360", "0.460", "+0.100 ± 0.000 *"],
        ["20 %", "0.510", "0.610", "+0.100 ± 0.000 *"],
    ]


def test_distances_are_means_over_seeds_beside_their_control() -> None:
    head, first, *rows = cells(distance_table(made_up_results()))
    assert head[:4] == ["layer", "plain: 1 - CKA", "plain: seeds", "plain: ratio"]
    assert first == ["0", "0.1200", "0.0200", "6.00", "0.1200", "0.0500", "2.40"]
    assert [row[0] for row in rows] == [str(layer) for layer in range(1, 11)]


def distances_of(*pairs: tuple[float, float | None]) -> Results:
    """One layer of made-up distances and controls, seed by seed."""
    found = [[{"layer": 0, "form": form, "distance": d, "control": c} for form in FORMS] for d, c in pairs]
    return replace(made_up_results(), distances=found)


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([(0.1, None)], ["0.1000", "-", "-"]),
        ([(0.1, 0.0), (0.1, 0.0)], ["0.1000", "0.0000", "-"]),
        ([(math.nan, 0.2), (0.1, math.nan)], ["0.1000", "0.2000", "0.50"]),
        ([(math.nan, None)], ["-", "-", "-"]),
        # What rounding leaves of 0.
        ([(-2e-16, 0.1)], ["0.0000", "0.1000", "0.00"]),
    ],
)
def test_distances_that_are_none(pairs: Any, said: list[str]) -> None:
    """A layer that never varies has no CKA."""
    assert cells(distance_table(distances_of(*pairs)))[1] == ["0", *said, *said]


def test_csv_has_every_figure_and_the_seeds_own_numbers() -> None:
    results = made_up_results()
    rows = list(csv.DictReader(as_csv(BASE, results, FACTS["seeds"]).splitlines()))
    assert len(rows) == 3 * (1 + 2 * 5 + 8 * 3 + 2 * 3 * 3)
    assert rows[1] == {"row": "base", "decay": "", "seed": "", "measure": "retrieval", "value": "0.25"}
    found = {(row["row"], row["decay"], row["seed"], row["measure"]): float(row["value"]) for row in rows[3:]}
    expected = {
        (row, "", str(seed), column): measured[column]
        for row, every in results.rows.items()
        for seed, measured in zip(FACTS["seeds"], every, strict=False)
        for column in COLUMNS
    } | {
        (row, str(share), str(seed), column): measured[column]
        for row, shares in results.decays.items()
        for share, every in shares.items()
        for seed, measured in zip(FACTS["few_seeds"], every, strict=True)
        for column in COLUMNS
    }
    assert found == expected


def test_pictures() -> None:
    results = made_up_results()
    figure = picture(results)
    assert [axes.get_title() for axes in figure.axes] == list(COLUMNS.values())
    lines = {line.get_label(): line.get_xydata() for line in figure.axes[0].lines}
    points = [(0.0, 0.41), (5.0, 0.46), (20.0, 0.61)]
    assert [tuple(point) for point in lines["detour"]] == [pytest.approx(point) for point in points]
    axes = view_picture(results).axes[0]
    assert len(axes.get_yticklabels()) == 2 * len(FORMS)
    # Layers by number: 10 comes after 9.
    rows = axes.images[0].get_array()
    assert [float(value) for value in rows[0]] == pytest.approx([0.12 + layer / 10 for layer in range(11)])
    assert [label.get_text() for label in view_picture(distances_of((0.1, None))).axes[0].get_yticklabels()] == [
        f"{form}: detour - twin" for form in sorted(FORMS)
    ]
    assert view_picture(distances_of((math.nan, None))).axes[0].images[0].get_array().mask.all()


def test_report_says_what_it_is_of_and_what_it_does_not_settle() -> None:
    short, whole = report(BASE, made_up_results(), FACTS, "do this")
    assert short in whole
    for part in (
        "`do this`", "80 steps of 512 tokens", "or MLM at 30 % masking", "MLM at 15 % masking for\n10 % of these steps",
        "fitted on 1,000 terms and tested on 900", "of 500 held-out definitions", "Text: 14,449 definitions.",
        "twin 10, detour 12.", "- torch 9.9", "- decay_share: 0.1", "this on 40,960.", "took 1.25 times as long",
        "over 5 seeds (3 for", "(decays.png)", "(views.png)",
    ):  # fmt: skip
        assert part in whole, part
    assert "- versions" not in whole
    assert whole.index("## What this does not settle") > whole.index("## How it was made")
    one = {**FACTS, "seeds": [3], "few_seeds": [3]}
    assert "over 1 seed (1 for" in report(BASE, made_up_results([0.1], 1), one, "")[1]


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.parametrize("distance", [0.1, math.nan, math.inf])
def test_report_is_written_as_files(tmp_path: Path, distance: float) -> None:
    """Plain JSON also where there is no interval and no CKA."""
    results = replace(made_up_results(few=1), distances=distances_of((distance, None)).distances)
    short = write_report(tmp_path, BASE, results, FACTS, "do this")
    assert short.splitlines()[-1] == str(tmp_path / "report.md")
    names = {"report.md", "results.csv", "results.json", "decays.png", "views.png"}
    assert {file.name for file in tmp_path.iterdir()} == names
    stored = json.loads((tmp_path / "results.json").read_text(), parse_constant=refuse_constant)
    assert (stored["base"], stored["rows"]) == (BASE, results.rows)
    assert stored["decays"]["twin"]["0.05"] == results.decays["twin"][0.05]
    assert stored["distances"][0][0]["distance"] == (0.1 if distance == 0.1 else None)
    assert [cell["half_width"] for cell in stored["differences"][3:]] == [None] * (11 * 3)
    assert stored["differences"][0] == {
        "row": "detour",
        "reference": "twin",
        "measure": "classification",
        "seeds": 5,
        "differs": True,
        "mean": pytest.approx(0.102),
        "half_width": pytest.approx(0.00555, abs=1e-5),
    }
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names if name.endswith("png"))


# The whole of it

COMMAND = "lit-encoders study detour"
LAYER = "bert.encoder.layer.{}."


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
def settings(bert_folder: Path) -> DetourSettings:
    return replace(
        shortened(DetourSettings()),
        base=str(bert_folder),
        root="root",
        steps=4,
        slots=128,
        sequence_length=16,
        learning_rate=1e-2,
        decay_share=0.5,
        decay_shares=(0.0, 0.25),
        seeds=(0, 3, 4),
        low="0:1",
        mid="1:2",
        high="2:3",
        fit_terms=40,
        test_terms=30,
        cka_texts=20,
    )


@pytest.fixture(scope="module", autouse=True)
def _one_second_a_run() -> Iterator[None]:
    """So that reports are the same to the last byte."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lit_encoders.studies.detour.perf_counter", itertools.count().__next__)
        yield


@dataclass
class Step:
    """What a training step was made with."""

    objective: str
    mask_ratio: float
    rate: float
    packs: list[int]


@dataclass
class Study:
    """A finished study: its folder, its tables, what was run, and the steps of each run."""

    output: Path
    short: str
    said: list[str]
    steps: dict[str, list[Step]]

    def tensors(self, run: str) -> dict[str, Any]:
        return load_file(self.output / run / "export" / "model.safetensors")

    def phase_1(self, run: str) -> dict[str, Any]:
        """Weights of a run's model at the end of phase 1."""
        checkpoint = torch.load(self.output / run / "checkpoints" / "first.ckpt", weights_only=True)
        return {
            name.removeprefix("backbone.model."): tensor
            for name, tensor in checkpoint["state_dict"].items()
            if name.startswith("backbone.model.")
        }


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory, settings: DetourSettings) -> Study:
    """With all of its models."""
    output = tmp_path_factory.mktemp("studies") / "detour"
    said: list[str] = []
    steps: dict[str, list[Step]] = {}
    train_step = LitEncoder.training_step

    def record(module: LitEncoder, batch: Any, batch_idx: int) -> Any:
        run = Path(module.trainer.default_root_dir).relative_to(output).as_posix()
        rate = module.trainer.optimizers[0].param_groups[0]["lr"]
        steps.setdefault(run, []).append(Step(module.objective, module.mask_ratio, rate, batch.input_ids.tolist()))
        return train_step(module, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LitEncoder, "training_step", record)
        short = run_detour(output, settings, made_up_terms, keep_models=True, command=COMMAND, say=said.append)
    return Study(output, short, said, steps)


def again(study: Study, folder: Path) -> Path:
    """The same study in a folder that may be changed."""
    return Path(shutil.copytree(study.output, folder))


def same_report(output: Path, study: Study) -> None:
    for name in ("results.json", "results.csv", "report.md"):
        assert (output / name).read_text() == (study.output / name).read_text(), name


def models_in(output: Path) -> list[str]:
    return sorted(path.name for path in output.glob("seed-*/*/*") if path.is_dir())


FORKS = ["low-rests-late", *(f"{arm}-decay-{share}" for arm in ("twin", "detour") for share in (0, 25))]
MOVED = [f"transplant-{name}" for name in TRANSPLANTS]


def test_study_runs_everything_once(study: Study) -> None:
    seeds = dict.fromkeys(("twin", "detour"), (0, 3, 4)) | dict.fromkeys(("low-rests", "mid-rests"), (0,))
    main_runs = [f"seed-{seed}/{name}" for name, every in seeds.items() for seed in every]
    rest = [f"seed-0/{name}" for name in (*FORKS, *MOVED)]
    runs = [line.partition(f"{study.output}/")[2] for line in study.said]
    assert runs == ["text", "base", *main_runs, *rest, "views"]
    assert "1 seed" in study.short
    assert "cannot be told" in study.short or "beyond the interval" in study.short
    assert json.loads((study.output / "text" / "result.json").read_text()) == {"pretraining": 60}


def test_arms_read_the_same_packs_in_the_same_order(study: Study) -> None:
    for seed in (0, 3, 4):
        twin, detour = (study.steps[f"seed-{seed}/{name}"] for name in ("twin", "detour"))
        assert len(twin) == len(detour) == 6
        assert [step.packs for step in twin] == [step.packs for step in detour]
        assert [step.rate for step in twin] == [step.rate for step in detour]
    assert study.steps["seed-0/twin"][0].packs != study.steps["seed-3/twin"][0].packs


def test_steps_are_trained_as_the_phases_say(study: Study) -> None:
    twin, detour = (study.steps[f"seed-0/{name}"] for name in ("twin", "detour"))
    assert [(step.objective, step.mask_ratio) for step in twin] == [*[("mlm", 0.3)] * 4, *[("mlm", 0.15)] * 2]
    assert [step.objective for step in detour] == [*["clm"] * 4, *["mlm"] * 2]
    assert [step.mask_ratio for step in detour[4:]] == [0.15] * 2
    # 1-sqrt from the peak to a tenth of it: at the end of the decay's two steps it would be there.
    peak = 1e-2
    assert [step.rate for step in twin[1:]] == pytest.approx(
        [peak] * 4 + [peak * (0.1 + 0.9 * (1 - math.sqrt(1 / 2)))], rel=1e-6
    )


def test_other_decays_go_on_where_phase_1_ended(study: Study) -> None:
    for arm in ("twin", "detour"):
        main_run, fork = study.steps[f"seed-0/{arm}"], study.steps[f"seed-0/{arm}-decay-25"]
        assert [(step.objective, step.packs, step.mask_ratio) for step in fork] == [("mlm", main_run[4].packs, 0.15)]
        assert f"seed-0/{arm}-decay-0" not in study.steps
    late = study.steps["seed-0/low-rests-late"]
    assert [step.packs for step in late] == [step.packs for step in study.steps["seed-0/detour"][4:]]


@pytest.mark.parametrize("arm", [TWIN, DETOUR], ids=lambda arm: arm.name)
def test_a_fork_gives_the_weights_of_the_whole_run(
    study: Study, settings: DetourSettings, tmp_path: Path, arm: Any
) -> None:
    """To the last bit, with dropout: so other decays differ from the main one in the decay alone."""
    base = study.output / "base" / "export"
    assert json.loads((base / "config.json").read_text())["hidden_dropout_prob"] > 0
    place = study.output / "seed-3" / arm.name
    train(
        LitMLM(str(base), learning_rate=settings.learning_rate, seed=3),
        study.output / "text" / "train.jsonl",
        tmp_path / "fork",
        phases(arm, settings.decay_share, settings),
        [],
        piece_tokens=settings.sequence_length,
        slots=settings.slots,
        seed=3,
        cache=study.output / "tokens",
        fork=place / "checkpoints" / "first.ckpt",
    )
    found, expected = (folder / "export" / "model.safetensors" for folder in (tmp_path / "fork", place))
    assert found.read_bytes() == expected.read_bytes()
    assert not (tmp_path / "fork" / "checkpoints").exists()


def same(one: dict[str, Any], other: dict[str, Any], part: str = "") -> set[bool]:
    """Whether the tensors are the same, bit by bit, of names with this part."""
    names = [name for name in other if part in name]
    assert names
    return {torch.equal(one[name], other[name]) for name in names}


def test_no_decay_is_the_end_of_phase_1(study: Study) -> None:
    for arm in ("twin", "detour"):
        assert same(study.phase_1(f"seed-0/{arm}"), study.tensors(f"seed-0/{arm}-decay-0")) == {True}
        assert False in same(study.tensors(f"seed-0/{arm}"), study.tensors(f"seed-0/{arm}-decay-25"))


@pytest.mark.parametrize(("name", "layer"), [("low-rests", 0), ("mid-rests", 1)])
def test_layers_rest_in_the_detour(study: Study, name: str, layer: int) -> None:
    base, first, end = study.tensors("base"), study.phase_1(f"seed-0/{name}"), study.tensors(f"seed-0/{name}")
    for other in range(3):
        assert (same(first, base, LAYER.format(other)) == {True}) == (other == layer)
        assert False in same(end, first, LAYER.format(other)), "in the decay all of them learn"
    assert False in same(first, base, "word_embeddings")


def test_low_layers_rest_in_the_decay(study: Study) -> None:
    first, end = study.phase_1("seed-0/detour"), study.tensors("seed-0/low-rests-late")
    assert same(first, end, LAYER.format(0)) == {True}
    assert False in same(first, end, LAYER.format(1))
    assert False in same(first, study.tensors("seed-0/detour"), LAYER.format(0))


@pytest.mark.parametrize("name", TRANSPLANTS)
def test_transplants_have_the_detours_layers(study: Study, settings: DetourSettings, name: str) -> None:
    twin, detour, found = (study.tensors(f"seed-0/{run}") for run in ("twin", "detour", f"transplant-{name}"))
    parts = {"low": LAYER.format(0), "mid": LAYER.format(1), "high": LAYER.format(2), "attention": ".attention."}
    moved = {tensor for tensor in twin if tensor.startswith("bert.encoder.layer.")}
    moved = {n for n in moved if (".attention." not in n if name == "mlp" else parts[name] in n)}
    assert {n for n in twin if not torch.equal(found[n], twin[n])} == {
        n for n in moved if not torch.equal(detour[n], twin[n])
    }
    assert all(torch.equal(found[n], detour[n]) for n in moved)


def test_controls_pair_each_seed_with_the_next(study: Study) -> None:
    def layers(seed: int, name: str) -> Any:
        return load_file(study.output / f"seed-{seed}" / name / "features.safetensors")["layers"]

    expected = [
        [asdict(item) for item in layer_distances(layers(seed, "detour"), layers(seed, "twin"), layers(other, "twin"))]
        for seed, other in ((0, 3), (3, 4), (4, 0))
    ]
    assert layers(0, "twin").shape == (3, 20, 32)
    stored = json.loads((study.output / "results.json").read_text(), parse_constant=refuse_constant)
    assert stored["distances"] == expected


def test_figures_are_of_every_run(study: Study) -> None:
    stored = json.loads((study.output / "results.json").read_text(), parse_constant=refuse_constant)
    assert {row: len(seeds) for row, seeds in stored["rows"].items()} == {
        **{arm.name: 1 for arm in INTERVENTIONS},
        **dict.fromkeys(MOVED, 1),
        **dict.fromkeys(("twin", "detour"), 3),
    }
    assert {arm: list(shares) for arm, shares in stored["decays"].items()} == {
        arm: ["0.0", "0.25", "0.5"] for arm in ("twin", "detour")
    }
    assert stored["decays"]["twin"]["0.5"] == stored["rows"]["twin"][:1]
    measured = [m for seeds in stored["rows"].values() for m in seeds]
    assert all(0 <= found[task] <= 1 for found in measured for task in TASKS)
    assert all(1 < found["mlm_loss"] < 10 for found in measured)
    assert len({found["mlm_loss"] for found in measured}) == len(measured), "every run has a model of its own"
    assert f"`{COMMAND}`" in (study.output / "report.md").read_text()


def test_models_that_stay_are_whole(study: Study) -> None:
    for run in study.output.glob("seed-*/*"):
        kept = {file.name for file in run.glob("checkpoints/*")}
        assert kept == (set() if run.name in (*FORKS, *MOVED) else {"first.ckpt", "first.json"})
        assert (run / "export" / "config.json").is_file()
    assert leftovers(study.output) == []


def leftovers(output: Path) -> list[Path]:
    return [path for path in output.rglob("*") if path.name.startswith(".") or path.suffix in (".part", ".tmp")]


def test_second_call_trains_nothing(study: Study, settings: DetourSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **more: object) -> None:
        raise AssertionError("nothing is left to train or to measure")

    for name in ("train", "measure", "measure_terms", "split_terms"):
        monkeypatch.setattr(f"lit_encoders.studies.detour.{name}", refuse)
    said: list[str] = []
    before = {name: (study.output / name).read_bytes() for name in ("report.md", "results.csv", "results.json")}
    again = run_detour(study.output, settings, made_up_terms, keep_models=True, command=COMMAND, say=said.append)
    assert (again, said) == (study.short, [])
    assert {name: (study.output / name).read_bytes() for name in before} == before


def test_interrupted_study_goes_on_to_the_same_report(
    study: Study, settings: DetourSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what has no result is run, from the start; a folder that was moved meanwhile makes no difference."""
    output = again(study, tmp_path / "again")
    gone = ["seed-3/detour", "seed-0/low-rests-late", "seed-0/detour-decay-0", "seed-0/transplant-mlp"]
    for name in (*gone, "views"):
        (output / name / "result.json").unlink()
    shutil.rmtree(output / gone[1])
    (output / gone[2] / "half").write_text("x")
    said: list[str] = []

    def fail(*arguments: object, **more: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lit_encoders.studies.detour._Study.fork_arm", fail)
        with pytest.raises(KeyboardInterrupt):
            run_detour(output, settings, made_up_terms, command=COMMAND, say=said.append)
    assert [line.partition(f"{output}/")[2] for line in said] == gone[:1]
    assert set(models_in(output)) == {"checkpoints", "export"}, "nothing is taken away before the end"
    hidden = study.output.rename(study.output.with_name("elsewhere"))
    try:
        run_detour(output, settings, made_up_terms, command=COMMAND, say=said.append)
    finally:
        hidden.rename(study.output)
    assert [line.partition(f"{output}/")[2] for line in said] == [*gone, "views"]
    same_report(output, study)
    assert models_in(output) == []
    assert leftovers(output) == []


def test_a_result_lost_after_the_end_is_made_again(study: Study, settings: DetourSettings, tmp_path: Path) -> None:
    """Also where the models that it begins with are gone: they are made once more, and others' are not."""
    output = again(study, tmp_path / "over")
    run_detour(output, settings, made_up_terms, command=COMMAND)
    assert models_in(output) == []
    for lost, needed in (("detour-decay-25", ["detour"]), ("transplant-low", ["twin", "detour"]), ("twin", [])):
        (output / "seed-0" / lost / "result.json").unlink()
        said: list[str] = []
        run_detour(output, settings, made_up_terms, command=COMMAND, say=said.append)
        assert [line.partition(f"{output}/seed-0/")[2] for line in said] == [*needed, lost]
        same_report(output, study)
        assert models_in(output) == []


def test_runs_left_alone_go_to_a_process_like_the_others(
    study: Study, settings: DetourSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread rounds otherwise than several: where a run is made must not depend on what is left."""
    asked: list[int] = []

    class RefusedError(Exception):
        pass

    def refuse(workers: int, *arguments: object, **more: object) -> None:
        asked.append(workers)
        raise RefusedError

    output = again(study, tmp_path / "alone")
    (output / "seed-0" / "transplant-low" / "result.json").unlink()
    monkeypatch.setattr("lit_encoders.studies.results.ProcessPoolExecutor", refuse)
    with pytest.raises(RefusedError):
        run_detour(output, settings, made_up_terms, jobs=2)
    assert asked == [1]


@pytest.mark.slow
def test_runs_side_by_side_give_the_same_numbers(study: Study, settings: DetourSettings, tmp_path: Path) -> None:
    """Up to what threads round otherwise: a process of its own has one."""
    run_detour(tmp_path / "two", settings, made_up_terms, jobs=2, keep_models=False)
    found, expected = (json.loads((o / "results.json").read_text())["rows"] for o in (tmp_path / "two", study.output))
    for row, seeds in expected.items():
        for column in COLUMNS:
            ours, theirs = (fmean(m[column] for m in side) for side in (found[row], seeds))
            assert ours == pytest.approx(theirs, abs=0.1)
    assert models_in(tmp_path / "two") == []


# Mistakes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"few_seeds": (0, 9)}, r"few_seeds must be the first of the seeds \(0, 3, 4\), at least one, got \(0, 9\)"),
        # By place: seed 3 would be compared with seed 0.
        ({"few_seeds": (3,)}, r"few_seeds must be the first of the seeds \(0, 3, 4\), at least one, got \(3,\)"),
        ({"few_seeds": ()}, r"few_seeds must be the first .*, at least one, got \(\)"),
        ({"seeds": ()}, r"seeds must be at least one, each once, got \(\)"),
        ({"seeds": (0, 0)}, r"seeds must be at least one, each once, got \(0, 0\)"),
        ({"decay_shares": (0.0, 0.5)}, r"decay_shares must leave out decay_share 0\.5, got \(0\.0, 0\.5\)"),
        ({"decay_share": 0.1}, r"decay_share must give at least one step beside 4 of phase 1, got 0\.1"),
        ({"decay_shares": (0.0, 0.1)}, r"decay_shares must be 0 or give at least one step .* got \(0\.0, 0\.1\)"),
        ({"decay_shares": (-0.5,)}, r"decay_shares must be 0 or give at least one step .* got \(-0\.5,\)"),
        ({"cka_texts": 31}, r"cka_texts must be from 4 to the 30 test_terms, got 31"),
        ({"cka_texts": 3}, r"cka_texts must be from 4 to the 30 test_terms, got 3"),
    ],
)
def test_numbers_out_of_range_are_said_before_anything_is_made(
    settings: DetourSettings, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        run_detour(tmp_path / "new", replace(settings, **change), made_up_terms)
    assert not (tmp_path / "new").exists()


def test_jobs_are_at_least_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new"
    assert main(["study", "detour", f"--output={output}", "--jobs=0"]) == 2
    assert capsys.readouterr().err == "lit-encoders: error: jobs must be at least 1, got 0\n"
    assert not output.exists()


def test_verb_hands_its_options_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Any, ...]] = []

    def record(output: Path, settings: DetourSettings, **options: Any) -> str:
        del options["say"]
        asked.append((output, settings, options))
        return "the table"

    monkeypatch.setattr("lit_encoders.studies.detour.run_detour", record)
    folder = tmp_path / "out"
    assert main(["study", "detour", "--output", str(folder), "--fast", "--keep_models"]) == 0
    assert capsys.readouterr().out == "the table\n"
    command = f"lit-encoders study detour --output={folder} --fast"
    options = {"jobs": 1, "keep_models": True, "command": command}
    assert asked == [(folder, shortened(DetourSettings()), options)]
    monkeypatch.setattr("lit_encoders.studies.verb.find_spec", lambda name: None)
    assert main(["study", "detour", f"--output={folder}"]) == 2
    assert "study detour needs scikit-learn: pip install" in capsys.readouterr().err


def test_settings_of_both_lengths_are_in_their_range() -> None:
    from lit_encoders.studies.detour import check_settings

    for settings in (DetourSettings(), shortened(DetourSettings())):
        check_settings(settings)
    assert decay_name(DETOUR, 0.07) == "detour-decay-7"


def test_another_study_is_refused_in_the_same_folder(study: Study, settings: DetourSettings) -> None:
    with pytest.raises(ValueError, match=r"of this very study: .* has twin_mask_ratio 0\.3, got 0\.4$"):
        run_detour(study.output, replace(settings, twin_mask_ratio=0.4), made_up_terms)
