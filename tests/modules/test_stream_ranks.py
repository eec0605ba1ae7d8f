"""Streams on two gloo processes (DDP, FSDP2) against one: gradients, resting heads, teacher, probe, records."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

# What they start together takes long: on one worker, once.
pytestmark = pytest.mark.xdist_group("stream_ranks")

SCRIPT = Path(__file__).with_name("stream_ranks.py")
BOTH = pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
ALL = pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp2"])
AGGREGATION = pytest.mark.parametrize("aggregation", ["tokens", "streams", "inputs"])


@pytest.fixture(scope="module")
def results(quiet_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One launch per strategy does all of it: a launch costs more than the training."""
    output = tmp_path_factory.mktemp("ranks")
    draw = random.Random(0)

    def write(name: str, lengths: list[int]) -> Path:
        lines = [" ".join(f"w{draw.randrange(90)}" for _ in range(length)) for length in lengths]
        (output / name).write_text("\n".join(lines) + "\n")
        return output / name

    text = write("short.txt", [draw.randint(1, 40) for _ in range(38)])
    long = write("long.txt", [draw.choice([10, 90]) for _ in range(150)])
    for strategy in ("auto", "ddp", "fsdp2"):
        command = [sys.executable, str(SCRIPT), *map(str, (quiet_bert, text, long, output, strategy))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    return {path.stem: torch.load(path, weights_only=True) for path in output.glob("*.pt")}


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], rtol: float, atol: float) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(
            tensor, other[name], rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@BOTH
@AGGREGATION
def test_l02_gradients_on_two_ranks_are_those_of_one(results: dict[str, Any], strategy: str, aggregation: str) -> None:
    """Two micro-batches a step and rank; the last has one pack in all. One process is checked by test_stream_loss."""
    one, ranks = results["auto-rank0"][aggregation], [results[f"{strategy}-rank{r}"][aggregation] for r in (0, 1)]
    assert [[documents for _, documents in rank["mine"][2:]].count(0) for rank in ranks] == [1, 2], "rank 1 has nothing"
    assert len(one["gradients"]) == len(ranks[0]["gradients"]) >= 2
    close(ranks[0]["gradients"][0], one["gradients"][0], rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(ranks[0]["gradients"], one["gradients"], strict=True):
        close(mine, theirs, rtol=1e-3, atol=1e-5)
    close(ranks[0]["state"], one["state"], rtol=1e-4, atol=1e-5)
    for name, tensor in ranks[0]["state"].items():
        assert torch.equal(tensor, ranks[1]["state"][name]), name


@BOTH
@AGGREGATION
def test_l07_records_and_losses_are_over_all_ranks(results: dict[str, Any], strategy: str, aggregation: str) -> None:
    one, ranks = results["auto-rank0"][aggregation], [results[f"{strategy}-rank{r}"][aggregation] for r in (0, 1)]
    assert one["records"]["aggregation"] == aggregation
    for name, wanted in one["records"]["streams"].items():
        # Counts are equal, and mean losses but for the order in which they are summed.
        assert ranks[0]["records"]["streams"][name] == {
            key: pytest.approx(value, rel=1e-4) if key.endswith("_loss") else value for key, value in wanted.items()
        }
    assert ranks[0]["records"]["aggregation"] == one["records"]["aggregation"]
    for mine, theirs in zip(ranks[0]["metrics"], one["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


@ALL
def test_a_head_without_documents_on_any_rank_is_bit_equal_after_the_step(
    results: dict[str, Any], strategy: str
) -> None:
    """Weights and moments; where one rank alone has documents, the head learns on all."""
    ranks = [results[name]["rests"] for name in sorted(results) if name.startswith(strategy)]
    first = ranks[0]
    rested = {"narrow": 0, "wide": 0}
    for before, after, documents in zip(first["head"], first["head"][1:], first["documents"][1:], strict=False):
        for head, count in zip(("narrow", "wide"), documents, strict=True):
            of_head = {n for n in after if (".heads." in n) == (head == "wide") and "decoder.weight" not in n}
            same = {name for name in of_head if name in before and torch.equal(before[name], after[name])}
            assert of_head
            if count:
                assert not {name for name in same if "dense.weight" in name}, head
            else:
                rested[head] += 1
                assert same == of_head, head
    assert rested["wide"] > 0
    if strategy != "auto":
        alone = [a[0] == 0 and b[0] > 0 for a, b in zip(ranks[0]["mine"], ranks[1]["mine"], strict=True)]
        assert any(alone), "a step in which only rank 1 has documents of the stream"
        for name, tensor in first["state"].items():
            assert torch.equal(tensor, ranks[1]["state"][name]), name
        close(first["state"], results["auto-rank0"]["rests"]["state"], rtol=1e-3, atol=1e-4)


@BOTH
def test_a_teacher_on_two_ranks_teaches_the_same(results: dict[str, Any], strategy: str) -> None:
    one, ranks = results["auto-rank0"]["kd"], [results[f"{strategy}-rank{rank}"] for rank in (0, 1)]
    assert "train/narrow/kd_loss" in one["metrics"][0]
    for name in ("kd", "kd-sharded") if strategy == "fsdp2" else ("kd",):
        close(ranks[0][name]["state"], one["state"], rtol=1e-3, atol=1e-4)
        for key, tensor in ranks[0][name]["state"].items():
            assert torch.equal(tensor, ranks[1][name]["state"][key]), key
        for mine, theirs in zip(ranks[0][name]["metrics"], one["metrics"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-3)


def test_a_probe_on_two_ranks_measures_what_it_does_on_one(results: dict[str, Any]) -> None:
    """And neither run is changed by it, to the bit."""
    for name in ("auto-rank0", "ddp-rank0", "ddp-rank1"):
        probed, unprobed = (results[name][which]["state"] for which in ("probed", "unprobed"))
        assert all(torch.equal(tensor, unprobed[key]) for key, tensor in probed.items())
    one, two = (results[name]["probed"]["metrics"] for name in ("auto-rank0", "ddp-rank0"))
    measured = {key: value for key, value in one[1].items() if key.startswith("gradient/")}
    assert measured.keys() == {
        f"gradient/{place}{what}"
        for place in ("", "0:2/")
        for what in ("narrow/norm", "wide/norm", "narrow~wide/cosine")
    }
    assert {key: two[1][key] for key in measured} == pytest.approx(measured, rel=1e-3, abs=1e-5)


def test_a_probe_refuses_sharded_parameters(results: dict[str, Any]) -> None:
    assert results["fsdp2-rank0"]["refused"].startswith("GradientProbe cannot look into sharded parameters")


@pytest.mark.parametrize("name", ["auto-rank0", "ddp-rank0"])
def test_records_go_on_through_a_resumed_run(results: dict[str, Any], name: str) -> None:
    before, resumed, straight = results[name]["resumed"]["records"]
    assert resumed == straight
    assert before["streams"]["wide"]["targets"] < straight["streams"]["wide"]["targets"]
    states = results[name]["resumed"]["states"]
    assert all(torch.equal(tensor, states[1][key]) for key, tensor in states[0].items())
