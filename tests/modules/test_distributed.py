"""Two gloo processes against one: the same packs, masks, losses and weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

# What they start together takes long: on one worker, once.
pytestmark = pytest.mark.xdist_group("distributed")

SCRIPT = Path(__file__).with_name("two_processes.py")


def without_dropout(folder: Path, target: Path) -> Path:
    """Dropout is drawn per pack on its own rank: without it the arithmetic is the same on any number of ranks."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.fixture(scope="module")
def results(bert_folder: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("ranks")
    model = without_dropout(bert_folder, output / "model")
    for strategy in ("auto", "ddp", "fsdp2"):
        command = [sys.executable, str(SCRIPT), str(model), str(text_file), str(output), strategy]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    return {path.stem: torch.load(path, weights_only=True) for path in output.glob("*.pt")}


def test_l02_a_rank_with_few_targets_weighs_less(results: dict[str, Any]) -> None:
    """1 target of gradient 4 and 3 of gradient 1 give 1.75, on both ranks."""
    assert [results[f"ddp-rank{rank}"]["gradients"][0] for rank in (0, 1)] == [1.75, 1.75]


def test_l07_a_rank_without_targets_halves_nothing(results: dict[str, Any]) -> None:
    gradients = results["ddp-rank0"]["gradients"]
    assert gradients[1] == 2.0
    assert gradients[2] != gradients[2], "where no rank has a target there is no gradient"
    assert results["ddp-rank1"]["loss"] == 2.0, "the last loss logged is that of the last step with targets"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_ranks_share_out_the_same_packs_and_masks(results: dict[str, Any], strategy: str) -> None:
    one, ranks = results["auto-rank0"], [results[f"{strategy}-rank{rank}"] for rank in (0, 1)]
    for key in ("packs", "labels"):
        dealt = [item for pair in zip(*(rank[key] for rank in ranks), strict=True) for item in pair]
        assert dealt == one[key]
    assert {rank["tokens"] for rank in ranks} == {one["tokens"]}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_end_where_one_does(results: dict[str, Any], strategy: str) -> None:
    """18 steps across two switches, clipped, with a CLM head of its own; weights and losses in float32."""
    one, ranks = results["auto-rank0"], [results[f"{strategy}-rank{rank}"] for rank in (0, 1)]
    for name, tensor in one["state"].items():
        assert torch.equal(ranks[0]["state"][name], ranks[1]["state"][name])
        torch.testing.assert_close(
            ranks[0]["state"][name], tensor, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    for name, value in one["val"].items():
        assert ranks[0]["val"][name] == pytest.approx(value, abs=1e-5), name


@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp2"])
def test_a_head_that_rests_is_bit_equal_after_it(results: dict[str, Any], strategy: str) -> None:
    """Weights and moments of the MLM head through ten CLM steps; the CLM head starts from them, its moments anew."""
    before, after = (results[f"{strategy}-rank0"]["heads"][step] for step in (3, 13))
    mlm, clm = (
        "backbone.model.cls.predictions.transform.dense.weight",
        "backbone.heads.clm.cls.predictions.transform.dense.weight",
    )
    for kind in ("weights", "moments"):
        assert torch.equal(before[kind][mlm], after[kind][mlm])
    assert not torch.equal(after["weights"][clm], after["weights"][mlm])
    assert clm in after["moments"]
    # Nothing was stepped yet; a sharded checkpoint needs a state all the same.
    assert not before["moments"].get(clm, torch.zeros(1)).any()
    assert torch.equal(results[f"{strategy}-rank0"]["state"][clm.removeprefix("backbone.")], after["weights"][clm])
