"""Two gloo processes against one: the same packs, masks, losses and weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("two_processes.py")


@pytest.fixture(scope="module")
def results(bert_folder: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("ranks")
    for devices in ("1", "2"):
        command = [sys.executable, str(SCRIPT), str(bert_folder), str(text_file), str(output), devices]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    return {path.stem: torch.load(path, weights_only=True) for path in output.glob("*.pt")}


def test_l02_a_rank_with_few_targets_weighs_less(results: dict[str, Any]) -> None:
    """1 target of gradient 4 and 3 of gradient 1 give 1.75, on both ranks."""
    assert [results[f"world2-rank{rank}"]["gradients"][0] for rank in (0, 1)] == [1.75, 1.75]


def test_l07_a_rank_without_targets_halves_nothing(results: dict[str, Any]) -> None:
    gradients = results["world2-rank0"]["gradients"]
    assert gradients[1] == 2.0
    assert gradients[2] != gradients[2], "where no rank has a target there is no gradient"
    assert results["world2-rank1"]["loss"] == 2.0, "the last loss logged is that of the last step with targets"


def test_ranks_share_out_the_same_packs_and_masks(results: dict[str, Any]) -> None:
    one, ranks = results["world1-rank0"], [results[f"world2-rank{rank}"] for rank in (0, 1)]
    for key in ("packs", "labels"):
        dealt = [item for pair in zip(*(rank[key] for rank in ranks), strict=True) for item in pair]
        assert dealt == one[key]
    assert {rank["tokens"] for rank in ranks} == {one["tokens"]}


def test_two_processes_end_where_one_does(results: dict[str, Any]) -> None:
    """15 steps across a switch, clipped; losses and weights to 1e-5 in float32."""
    one, ranks = results["world1-rank0"], [results[f"world2-rank{rank}"] for rank in (0, 1)]
    for name, tensor in one["state"].items():
        assert torch.equal(ranks[0]["state"][name], ranks[1]["state"][name])
        torch.testing.assert_close(ranks[0]["state"][name], tensor, rtol=1e-5, atol=1e-5)
    for name, value in one["val"].items():
        assert ranks[0]["val"][name] == pytest.approx(value, abs=1e-5), name
