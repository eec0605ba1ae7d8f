"""`preview` shows what a run would read; `fit --fork` begins a new run from a checkpoint of another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_encoders.data.packs import PackPlan
from lit_encoders.data.tokens import Affixes, TokenStore, write_stores
from lit_encoders.preview import corpus_figures


def test_figures_by_hand(tmp_path: Path, tokenizer: Any) -> None:
    """Three documents of 2, 4 and 7 words, one of them unknown; sequences of 6 cut the last into two."""
    texts = ["w1 w2", "w1 w2 w3 zzz", "w1 w2 w3 w4 w5 w6 w7"]
    write_stores(texts, tokenizer, lambda text: "train", ("train",), tmp_path / "store")
    store = TokenStore(tmp_path / "store" / "train")
    plan = PackPlan(store, Affixes((2,), (3,)), slots=12, sequence_length=6, seed=0)
    figures = corpus_figures(plan, unknown_id=1)
    assert (figures.documents, figures.tokens, figures.chunked) == (3, 13 + 6, 1)
    assert figures.unknown_share == pytest.approx(1 / 13)
    assert figures.characters_per_token == pytest.approx(sum(map(len, texts)) / 13)
    # Pieces of 4, 6, 6 and (5..7 of the last) 4 tokens: 20 of two packs of 12.
    assert figures.packs == 2
    assert figures.fill == pytest.approx(20 / 24)


def test_preview_of_a_recipe(run: Any, recipe: Path) -> None:
    code, out, _ = run("preview", "--config", recipe)
    assert code == 0
    assert "budget                4 steps of 96 slots: " in out
    assert "[CLS]>w" in out
    assert "mlm: " in out
    assert "WARNING" not in out
    assert list(Path.cwd().iterdir()) == []


def test_preview_of_a_budget_in_tokens(run: Any, recipe: Path) -> None:
    code, out, err = run("preview", "--config", recipe, "--schedule.steps=null", "--schedule.tokens=1K")
    assert code == 0, err
    # 1,000 tokens in packs of 96 are 11 steps of detour, half as much of decay, and the head's one.
    assert "budget                18 steps of 96 slots: " in out


def test_a_tokenizer_that_does_not_fit_is_warned_of(run: Any, recipe: Path, tmp_path: Path) -> None:
    thai = tmp_path / "thai.txt"
    thai.write_text("\n".join(["ภาษาไทยเป็นภาษาที่มีระดับเสียง", "โรคเบาหวานเป็นโรคเรื้อรัง w1 w2"] * 20))
    code, out, _ = run("preview", "--config", recipe, f"--data.train={thai}", f"--data.val={thai}")
    assert code == 0
    assert "WARNING: 50.0% of the tokens are unknown to the tokenizer" in out


def test_a_fork_is_a_new_run(run: Any, recipe: Path) -> None:
    assert run("fit", "--config", recipe)[0] == 0
    fork = ["fit", "--config", recipe, "--fork", "runs/tiny/checkpoints/detour.ckpt"]
    code, _, err = run(*fork)
    assert code == 2
    assert "must be a folder without a run" in err
    code, _, err = run(*fork, "--trainer.default_root_dir=runs/fork", "--schedule.decay_share=0.9")
    assert code == 0, err
    summary = json.loads(Path("runs/fork/summary.json").read_text())
    assert [(phase["name"], phase["steps"]) for phase in summary["phases"]] == [
        ("head_warmup", 1),
        ("detour", 2),
        ("decay", 2),
    ]
    kept = torch.load("runs/fork/checkpoints/decay.ckpt", weights_only=True)
    assert kept["global_step"] == 5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--fork=none.ckpt"], "fork must be a checkpoint that exists, got 'none.ckpt'"),
        (["--fork=none.ckpt", "--ckpt_path=other.ckpt"], "fork and ckpt_path exclude each other"),
    ],
)
def test_forks_that_cannot_be(run: Any, recipe: Path, flags: list[str], message: str) -> None:
    code, _, err = run("fit", "--config", recipe, *flags)
    assert code == 2
    assert message in err.splitlines()[-1]
    assert list(Path.cwd().iterdir()) == []


def test_a_mistake_leaves_another_command_s_run_alone(run: Any, recipe: Path) -> None:
    """Two commands started at once: the one that fails must not take the folder of the other away."""
    from lit_encoders.trainer_cli import EncoderCLI

    cli = EncoderCLI.__new__(EncoderCLI)
    cli.root, cli.made = Path("runs/tiny"), [Path("runs/tiny"), Path("runs")]
    assert run("fit", "--config", recipe)[0] == 0
    before = sorted(Path("runs").rglob("*"))
    cli.remove_what_was_made()
    assert sorted(Path("runs").rglob("*")) == before
