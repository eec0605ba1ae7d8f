"""The checks for a GPU, tried on the CPU in small: what they measure means nothing here, but they run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lit_encoders.models.attention import PackLayout
from lit_encoders.models.backbone import Backbone, RowGroup, load_config, load_language_model

FOLDER = Path(__file__).parent
LENGTHS = [1, 5, 5, 64, 130]
Measure = Callable[..., Any]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a script as Python finds it when it is run: with its own folder first on the path."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield import_module
    for name in {"on_the_spot", "detour_curve", "throughput"} - before:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@pytest.mark.parametrize(("window", "heads"), [(None, (4, 2)), (9, (4, 4)), (65, (4, 1))])
def test_parity_of_attention(attention_errors: Measure, causal: bool, window: int | None, heads: Any) -> None:
    options = {"causal": causal, "window": window, "heads": heads, "lengths": LENGTHS}
    forward, gradients = attention_errors("cpu", "sdpa", **options)
    assert forward <= 2  # The limits of test_kernels.py.
    assert gradients <= 3
    if window is not None:
        # The limits would see a window that is off by one.
        assert min(attention_errors("cpu", "sdpa", **options, reference_window=window + 1)) > 10


@pytest.mark.parametrize("name", ["modernbert", "llama"])
def test_parity_of_backbones(backbone_errors: Measure, plain_errors: Measure, name: str) -> None:
    """Here both sides are the same back-end."""
    for mixed in (True, False):
        assert backbone_errors("cpu", "sdpa", name, causal=True, mixed=mixed, lengths=LENGTHS) == (1, 1)
    assert plain_errors("cpu", "sdpa", name, lengths=LENGTHS) == pytest.approx(1, abs=0.1)


def test_detour_curve(script: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert script("detour_curve").main(["--device", "cpu", "--tiny"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert "20 steps | ok with sdpa: losses within" in rows[1]
    assert "targets equal" in rows[1]


def test_a_curve_with_other_targets_is_no_match(script: Callable[[str], Any]) -> None:
    detour = script("detour_curve")
    one, other = (detour.Curve("sdpa", [2.0], ["clm"], [torch.tensor([number])]) for number in (1, 2))
    assert detour.compare(one, other) == (0, False)


def test_throughput(script: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    throughput = script("throughput")
    assert throughput.main(["--device", "cpu", "--tiny"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == 4
    assert all("tokens/s with sdpa" in row for row in rows)
    throughput.main(["--device", "cpu", "--tiny", "--seconds", "0"])
    assert capsys.readouterr().out.count("not reached") == 4


def test_visible_pairs(script: Callable[[str], Any]) -> None:
    for length in (1, 2, 7):
        distance = torch.arange(length)[:, None] - torch.arange(length)
        for reach in (None, 0, 1, 6, 9):
            seen = distance.abs() <= (length if reach is None else reach)
            assert script("throughput").visible_pairs(length, False, reach) == seen.sum()
            assert script("throughput").visible_pairs(length, True, reach) == (seen & (distance >= 0)).sum()


def test_operations_are_those_that_torch_counts(script: Callable[[str], Any]) -> None:
    throughput = script("throughput")
    config = throughput.TINY
    backbone = Backbone(load_language_model(config, load_config(config), torch.float32))
    pack = throughput.make_pack(256, 64, config["vocab_size"], 0)
    rows = torch.arange(100)
    # In bfloat16, because torch does not count the product added in place that float32 takes.
    with FlopCounterMode(display=False) as counter, torch.autocast("cpu", torch.bfloat16):
        total, _ = backbone(pack.input_ids, pack.position_ids, PackLayout(np.array([64] * 4)), [RowGroup(rows, rows)])[
            0
        ][:2]
        total.backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(count for op, count in counted.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    assert products == throughput.step_flops(config, [64] * 4, False, 100)["linear"]


@pytest.fixture
def run_all(tmp_path: Path) -> Callable[[int], Any]:
    """Runs the shell script with a Python that writes down what it is asked for, prints a row and fails at will."""
    stub = tmp_path / "python"
    stub.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\necho "| row | of | $# |"\n[ "$FAIL" != "$4" ]\n')
    stub.chmod(0o755)

    def run(seconds: int, fail: str = "nothing") -> Any:
        settings = {**os.environ, "PYTHON": str(stub), "OUT": str(tmp_path), "FAIL": fail}
        command = ["bash", str(FOLDER / "run_all.sh"), str(seconds), "--tiny"]
        done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
        table = (tmp_path / "results.md").read_text().splitlines()
        assert done.stdout.splitlines()[-len(table) :] == table
        calls = tmp_path / "calls"
        return done.returncode, table, calls.read_text().splitlines() if calls.exists() else []

    return run


def test_everything_is_run_in_order_and_ends_in_one_table(run_all: Callable[..., Any]) -> None:
    code, table, calls = run_all(60)
    assert code == 0
    assert table[:2] == ["| check | setting | result |", "|---|---|---|"]
    assert len(table) == 2 + 4
    assert calls[0] == "-m pip install -q --no-deps --no-build-isolation -e ."
    assert calls[1].startswith("-m pytest tests/cuda --ignore=tests/cuda/test_scripts_on_cpu.py")
    assert calls[2].startswith("-W ignore tests/cuda/detour_curve.py --seconds ")
    assert calls[3].startswith("-W ignore tests/cuda/throughput.py --seconds ")
    assert calls[3].endswith(" --tiny")


def test_a_failed_check_fails_the_whole(run_all: Callable[..., Any]) -> None:
    code, table, calls = run_all(60, fail="--seconds")
    assert code == 1
    assert len(calls) == 4
    assert [line for line in table if "FAILED" in line] == [
        "| detour | exit status 1 | FAILED, see the output |",
        "| throughput | exit status 1 | FAILED, see the output |",
    ]


def test_what_is_not_reached_is_said(run_all: Callable[..., Any]) -> None:
    code, table, calls = run_all(0)
    assert (code, calls) == (0, [])
    assert table[2:] == [f"| {name} | all | not reached |" for name in ("install", "parity", "detour", "throughput")]
