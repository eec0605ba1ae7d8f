"""Freezing, L2-SP, drift, reversion and export alone, under DDP and under FSDP2 with two gloo processes."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM

# What they start together takes long: on one worker, once.
pytestmark = pytest.mark.xdist_group("two_processes")

SCRIPT = Path(__file__).with_name("two_processes.py")
STRATEGIES = ["auto", "ddp", "fsdp2"]
PREFIX = "backbone.model."
FROZEN = (f"{PREFIX}bert.encoder.layer.0.", f"{PREFIX}bert.encoder.layer.1.", f"{PREFIX}bert.embeddings.")
Scenario = dict[str, Any]


class Results:
    def __init__(self, root: Path, model: Path) -> None:
        self.root, self.model = root, model
        self.loaded = {path.stem: torch.load(path, weights_only=True) for path in root.glob("*.pt")}

    def of(self, strategy: str, scenario: str, rank: int = 0) -> Scenario:
        return self.loaded[f"{strategy}-rank{rank}"][scenario]  # type: ignore[no-any-return]

    def folder(self, strategy: str, scenario: str) -> Path:
        return self.root / strategy / scenario


@pytest.fixture(scope="module")
def results(bert_folder: Path, text_file: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("ranks")
    config = json.loads((bert_folder / "config.json").read_text())
    # Dropout is drawn per pack on its own rank; a larger spread gives gradients that do not drown in rounding.
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.2}
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(**config)).save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    for strategy in STRATEGIES:
        command = [sys.executable, str(SCRIPT), str(root / "model"), str(text_file), str(root), strategy]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    return Results(root, root / "model")


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float, names: Iterable[str]) -> None:
    for name in names:
        assert torch.allclose(ours[name], theirs[name], rtol=tolerance, atol=tolerance), name


def decays(name: str, weight: Tensor) -> float:
    return 0.1 if weight.ndim >= 2 else 0.0


def plain_adam(found: Scenario, gradients: list[dict[str, Tensor | None]]) -> list[dict[str, Tensor]]:
    """Weights after each step of torch's own AdamW, one tensor at a time, with the gradients given."""
    weights = {name: nn.Parameter(w.clone()) for name, w in found["start"].items()}
    groups = [{"params": [w], "weight_decay": decays(name, w)} for name, w in weights.items()]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.98), eps=1e-6, foreach=False)
    after = []
    for step in gradients:
        for name, weight in weights.items():
            weight.grad = step[name]
        optimizer.step()
        after.append({name: w.detach().clone() for name, w in weights.items()})
    return after


# ---- freezing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_f01_bit_equal_through_the_window_and_exact_after_it(results: Results, strategy: str) -> None:
    """AdamW with decay, moments running, steps 2 and 3 frozen; then as a plain loop that left the two steps out."""
    found = results.of(strategy, "window")
    weights, moments = found["weights"], found["moments"]
    frozen = [name for name in found["start"] if name.startswith(FROZEN)]
    assert 0 < len(frozen) < len(found["start"])
    for name in found["start"]:
        same = [torch.equal(a[name], b[name]) for a, b in pairwise(weights)]
        rests = [torch.equal(a[name], b[name]) for a, b in pairwise(moments)]
        assert same == rests == ([False, True, True, False, False] if name in frozen else [False] * 5), name
    for step, taken in enumerate(found["taken"]):
        assert {n for n, g in taken.items() if g is None} == (set(frozen) if step in (2, 3) else set())
    for ours, theirs in zip(weights, plain_adam(found, found["taken"]), strict=True):
        assert_close(ours, theirs, 1e-12, found["start"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clipping_norms_hold_what_trains_alone(results: Results, strategy: str) -> None:
    found = results.of(strategy, "window")
    for came, taken in zip(found["came"], found["taken"], strict=True):
        trains = [name for name, gradient in taken.items() if gradient is not None]
        norm = math.sqrt(sum(float(came[name].square().sum()) for name in trains))
        assert norm > 0.05, "clipping has something to do"
        for name in trains:
            assert torch.allclose(taken[name], came[name] * (0.05 / (norm + 1e-6)), rtol=1e-9, atol=0), name


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("scenario", ["window", "always", "decoupled", "all", "resumed", "shapes"])
def test_f06_ranks_stay_bit_equal(results: Results, strategy: str, scenario: str) -> None:
    """Also after a range was unfrozen that DDP had wrapped; each rank has other data."""
    first, second = (results.of(strategy, scenario, rank)["weights"] for rank in (0, 1))
    for ours, theirs in zip(first, second, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("scenario", ["window", "always", "decoupled", "all", "resumed", "shapes"])
def test_two_processes_end_where_one_does(results: Results, strategy: str, scenario: str) -> None:
    one, ours = results.of("auto", scenario), results.of(strategy, scenario)
    for a, b in zip(ours["weights"], one["weights"], strict=True):
        assert_close(a, b, 1e-6, a)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_whole_run_needs_no_gradient(results: Results, strategy: str) -> None:
    found = results.of(strategy, "always")
    trains = [name for name in found["start"] if not name.startswith(FROZEN)]
    assert found["trains"] == trains
    for taken in found["came"]:
        assert [name for name, gradient in taken.items() if gradient is not None] == trains
    for name, weight in found["start"].items():
        assert torch.equal(weight, found["end"][name]) == (name not in trains), name
    frozen = sum(weight.numel() for name, weight in found["start"].items() if name not in trains)
    assert {row["train/frozen_parameters"] for row in found["logged"]} == {frozen}


# ---- L2-SP -------------------------------------------------------------------------------------------------------


def penalty(weights: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    def strength(name: str) -> float:
        return 0.5 if name.startswith(FROZEN[:2]) else 0.1

    return math.fsum(strength(n) * d**2 for n in start for d in (weights[n] - start[n]).flatten().tolist())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_s04_s08_penalty_and_gradient(results: Results, strategy: str) -> None:
    """2 * strength * (w - w0), on top of the mean over the tokens of all ranks; the penalty is of the whole tensors."""
    found = results.of(strategy, "all")
    before = [found["start"], *found["weights"]]
    for step, (came, taken) in enumerate(zip(found["came"], found["taken"], strict=True)):
        assert found["logged"][step]["l2sp/penalty"] == pytest.approx(penalty(before[step], found["start"]), rel=1e-6)
        for name, gradient in taken.items():
            layer = next((n for n in (0, 1, 2) if f"layer.{n}." in name), None)
            if layer == 0 and step < 2:
                assert gradient is None  # Frozen.
                continue
            slope = 1.0 if layer in (0, 1) else 0.2
            wanted = came[name] + slope * (before[step][name] - found["start"][name])
            assert torch.allclose(gradient, wanted, rtol=1e-12, atol=1e-15), name
    assert found["logged"][3]["l2sp/penalty"] > 1e-3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_decoupled_is_a_step_and_then_a_pull(results: Results, strategy: str) -> None:
    found = results.of(strategy, "decoupled")
    weights = {name: nn.Parameter(w.clone()) for name, w in found["start"].items()}
    groups = [{"params": [w], "weight_decay": decays(name, w)} for name, w in weights.items()]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.98), eps=1e-6, foreach=False)
    for step, taken in enumerate(found["taken"]):
        for name, weight in weights.items():
            assert torch.equal(taken[name], found["came"][step][name]), "the gradient is left alone"
            weight.grad = taken[name]
        optimizer.step()
        for name, weight in weights.items():
            strength = 0.5 if name.startswith(FROZEN[:2]) else 0.1
            weight.data -= 1e-2 * 2 * strength * (weight.data - found["start"][name])
        assert_close({n: w.data for n, w in weights.items()}, found["weights"][step], 1e-12, weights)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_s09_the_resumed_run_has_the_same_penalty(results: Results, strategy: str) -> None:
    """A new module and trainer, from a checkpoint after one step; base: the folder, whose digest is kept."""
    whole, half, resumed = (results.of(strategy, scenario) for scenario in ("all", "half", "resumed"))
    wanted = penalty(half["end"], half["start"])
    assert wanted > 0
    assert resumed["logged"][0]["l2sp/penalty"] == pytest.approx(wanted, rel=1e-6)
    assert len(resumed["weights"]) == 3
    for ours, theirs in zip(resumed["weights"], whole["weights"][1:], strict=True):
        # Layer 0 is frozen from the start until step 2: it has to come back without an invented step count.
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_s08_uneven_and_unsharded_weights(results: Results, strategy: str) -> None:
    """Rows of 3, 1 and 5 on two processes, and a head that every process holds as a whole."""
    found = results.of(strategy, "shapes")
    first, start = found["weights"][0], found["start"]
    strengths = {name: 0.5 if name.startswith("layers.0.") else 0.25 for name in start}
    total = sum(strengths[name] * float((first[name] - start[name]).square().sum()) for name in start)
    assert found["logged"][0]["l2sp/penalty"] == 0
    assert found["logged"][1]["l2sp/penalty"] == pytest.approx(total, rel=1e-6)
    for name, gradient in found["taken"][1].items():
        wanted = found["came"][1][name] + 2 * strengths[name] * (first[name] - start[name])
        assert torch.allclose(gradient, wanted, rtol=1e-12, atol=1e-15), name


# ---- exports, reversion and drift --------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scenario", ["all", "resumed"])
def test_exports_hold_the_whole_weights(results: Results, strategy: str, scenario: str) -> None:
    """The gathered state, and beside it the same with two layers back at the base's bytes."""
    folder, end = results.folder(strategy, scenario), results.of(strategy, scenario)["end"]
    start = load_file(results.model / "model.safetensors")
    for name in ("export", "export-reverted"):
        model, report = AutoModelForMaskedLM.from_pretrained(folder / name, output_loading_info=True)
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert model.dtype == torch.float64
        written = load_file(folder / name / "model.safetensors")
        assert set(written) == set(start)
        for key, tensor in written.items():
            back = name == "export-reverted" and key.startswith(("bert.encoder.layer.1.", "bert.encoder.layer.2."))
            assert torch.equal(tensor, start[key].double() if back else end[PREFIX + key]), (name, key)
    assert not list(folder.rglob(".*"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_summary_has_drift_and_losses_of_both(results: Results, strategy: str) -> None:
    report, one = (
        json.loads((results.folder(s, "all") / "summary.json").read_text())["reverted"] for s in (strategy, "auto")
    )
    assert report["drift"]["1:3"]["after"] == {"relative_l2": 0.0, "cosine": 1.0, "rms": 0.0}
    for measure, value in one["drift"]["1:3"]["before"].items():
        assert report["drift"]["1:3"]["before"][measure] == pytest.approx(value, rel=1e-6)
    assert set(report["losses"]) == {"val/mlm_loss", "val/clm_loss"}
    for name, losses in one["losses"].items():
        assert report["losses"][name] == pytest.approx(losses, abs=1e-6)
        assert abs(losses["trained"] - losses["reverted"]) > 1e-3


def drifts(folder: Path) -> dict[tuple[str, ...], float]:
    with (folder / "drift.csv").open(newline="") as file:
        return {(row["step"], row["range"], row["measure"]): float(row["value"]) for row in csv.DictReader(file)}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_drift_of_whole_tensors(results: Results, strategy: str) -> None:
    """Against float64 sums over whole tensors, against one process, and over the resume."""
    found, one = drifts(results.folder(strategy, "all")), drifts(results.folder("auto", "all"))
    scenario = results.of(strategy, "all")
    assert {step for step, _, _ in found} == {"1", "2", "3", "4"}
    assert found.keys() == one.keys() == drifts(results.folder(strategy, "resumed")).keys()
    places = {f"{n}:{n + 1}": (f"{PREFIX}bert.encoder.layer.{n}.",) for n in range(3)}
    places |= {"embeddings": FROZEN[2:], "0:2": FROZEN[:2], "head": (f"{PREFIX}cls.",), "everything": ("",)}
    assert {place for _, place, _ in found} == set(places)
    for (step, place, measure), value in found.items():
        weights, start = scenario["weights"][int(step) - 1], scenario["start"]
        names = [name for name in weights if name.startswith(places[place])]
        base, now = (torch.cat([x[n].flatten() for n in names]) for x in (start, weights))
        wanted = {
            "relative_l2": (now - base).norm() / base.norm(),
            "cosine": base @ now / base.norm() / now.norm(),
            "rms": (now - base).square().mean().sqrt(),
        }[measure]
        assert value == pytest.approx(float(wanted), rel=1e-9, abs=1e-12), (step, place, measure)
        assert value == pytest.approx(one[step, place, measure], rel=1e-6, abs=1e-9), (step, place, measure)
