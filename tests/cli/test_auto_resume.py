"""The same command, typed again: it goes on, says what it passed over, and refuses what would be another run."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Run = Callable[..., tuple[int, str, str]]
ROOT = Path("runs/tiny")
FOLDER = ROOT / "checkpoints"


def cut_off(*gone: str) -> bytes:
    """Make of a finished run one that was killed before some of its checkpoints; give its export."""
    export = (ROOT / "export" / "model.safetensors").read_bytes()
    (ROOT / "summary.json").unlink()
    shutil.rmtree(ROOT / "export")
    for name in gone:
        for path in FOLDER.glob(f"{name}.*"):
            path.unlink()
    return export


@pytest.fixture
def ended(run: Run, recipe: Path) -> Run:
    """A finished run in runs/tiny, with checkpoints at steps 1 (head_warmup), 2, 3 (detour) and 4 (decay)."""
    settings = yaml.safe_load(recipe.read_text())
    callbacks = [("HFExport", {}), ("RunSummary", {}), ("ExactResume", {"every_n_steps": 2, "keep": 3})]
    settings["trainer"]["callbacks"] = [
        {"class_path": f"lit_encoders.callbacks.{name}", "init_args": given} for name, given in callbacks
    ]
    recipe.write_text(yaml.safe_dump(settings))
    assert run("fit", "--config", recipe)[0] == 0
    return run


def test_the_same_command_goes_on(ended: Run, recipe: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From the newest with steps left: the last one is the end of a run that did not get to its export."""
    expected = cut_off()
    code, out, err = ended("fit", "--config", recipe)
    assert code == 0, err
    assert "going on from 'runs/tiny/checkpoints/detour.ckpt' (step 3)" in caplog.messages
    assert (ROOT / "export" / "model.safetensors").read_bytes() == expected
    assert "Held-out losses" in out
    assert not list(ROOT.glob("config-*.yaml")), "the same configuration is not saved twice"


@pytest.mark.parametrize("kind", [*range(10), "flipped", "no manifest"])
def test_a_damaged_checkpoint_is_named_and_passed_over(
    ended: Run, recipe: Path, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expected = cut_off("decay")
    newest = FOLDER / "detour.ckpt"
    content = newest.read_bytes()
    if kind == "no manifest":
        newest.with_suffix(".json").unlink()
    elif kind == "flipped":
        place = len(content) * 2 // 3
        newest.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
    else:
        newest.write_bytes(content[: len(content) * kind // 10])
    code, _, err = ended("fit", "--config", recipe)
    assert code == 0, err
    assert any(line.startswith(f"checkpoint '{newest}' is passed over: it ") for line in caplog.messages)
    assert "going on from 'runs/tiny/checkpoints/step-00000002.ckpt' (step 2)" in caplog.messages
    assert (ROOT / "export" / "model.safetensors").read_bytes() == expected


def test_without_a_checkpoint_the_run_begins_again(ended: Run, recipe: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = cut_off("*")
    code, _, err = ended("fit", "--config", recipe)
    assert code == 0, err
    assert "'runs/tiny' holds no checkpoint to go on from yet: the run begins again" in caplog.messages
    assert (ROOT / "export" / "model.safetensors").read_bytes() == expected


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--model.learning_rate=0.5", "model.init_args.learning_rate 0.01, got 0.5"),
        ("--model.mask_ratio=0.5", "model.init_args.mask_ratio 0.15, got 0.5"),
        ("--seed_everything=3", "seed_everything 0, got 3"),
        ("--data.slots=192", "data.slots 96, got 192"),
        ("--data.val_share=0.3", "data.val_share 0.2, got 0.3"),
        ("--trainer.gradient_clip_val=9", "trainer.gradient_clip_val 1.0, got 9"),
    ],
)
def test_another_run_is_refused(ended: Run, recipe: Path, flag: str, line: str) -> None:
    cut_off("decay")
    code, _, err = ended("fit", "--config", recipe, flag)
    assert code == 2
    assert err.splitlines()[-1].startswith(
        f"lit-encoders: error: trainer.default_root_dir must be a folder without a run, or with this very one: "
        f"'runs/tiny' has {line}"
    )
    assert not (ROOT / "export").exists()


def test_what_does_not_decide_may_change(ended: Run, recipe: Path) -> None:
    expected = cut_off("decay")
    code, _, err = ended("fit", "--config", recipe, "--data.num_workers=1", "--trainer.log_every_n_steps=2")
    assert code == 0, err
    assert (ROOT / "export" / "model.safetensors").read_bytes() == expected
    assert (ROOT / "config-1.yaml").is_file()


def test_what_is_to_come_may_grow_and_what_is_over_may_not_change(ended: Run, recipe: Path) -> None:
    cut_off("decay")
    code, _, err = ended("fit", "--config", recipe, "--schedule.head_warmup_steps=2")
    assert code == 2
    assert "'head_warmup' was" in err.splitlines()[-1]
    code, _, err = ended("fit", "--config", recipe, "--schedule.decay_share=0.8")
    assert code == 0, err
    assert json.loads((ROOT / "summary.json").read_text())["steps"] == 5


def test_more_micro_batches_in_a_step_are_refused(ended: Run, recipe: Path) -> None:
    cut_off("decay")
    code, _, err = ended("fit", "--config", recipe, "--trainer.accumulate_grad_batches=2")
    assert code == 2
    assert "trainer.accumulate_grad_batches 1 x 1 ranks, got 2 x 1" in err.splitlines()[-1]


def test_a_later_version_s_checkpoint_is_refused(ended: Run, recipe: Path) -> None:
    cut_off("decay")
    manifest = FOLDER / "detour.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    code, _, err = ended("fit", "--config", recipe)
    assert code == 2
    assert "ckpt_path must be a checkpoint that this version can read" in err.splitlines()[-1]


def test_a_full_disk_stops_with_one_line(ended: Run, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_off("decay")
    before = {path.name: path.read_bytes() for path in FOLDER.iterdir()}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lightning.pytorch.Trainer.save_checkpoint", full)
    code, _, err = ended("fit", "--config", recipe)
    assert code == 1
    assert err.splitlines()[-1].startswith(
        "lit-encoders: checkpoint 'runs/tiny/checkpoints/decay.ckpt' cannot be written (No space left on device)"
    )
    assert {path.name: path.read_bytes() for path in FOLDER.iterdir()} == before
    assert not (ROOT / "summary.json").exists()


def test_a_damaged_checkpoint_that_is_named_is_refused(ended: Run, recipe: Path) -> None:
    cut_off("decay")
    newest = FOLDER / "detour.ckpt"
    newest.write_bytes(newest.read_bytes()[:-30] + b"\x00" * 30)
    code, _, err = ended("fit", "--config", recipe, "--ckpt_path", newest)
    assert code == 2
    assert "ckpt_path must be a" in err.splitlines()[-1]


def test_other_verbs_take_no_checkpoint_by_themselves(
    ended: Run, recipe: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    assert ended("validate", "--config", recipe)[0] == 0
    assert not any("checkpoint" in line for line in caplog.messages)
