"""The command line: what a user types, what comes out, and that nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from lit_encoders import __version__


def test_fit_fills_a_run_folder_and_another_run_is_refused(run, recipe: Path) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = run("fit", "--config", recipe)
    assert code == 0
    root = Path("runs/tiny")
    assert {path.name for path in root.iterdir()} == {"config.yaml", "logs", "checkpoints", "export", "summary.json"}
    assert {path.name for path in (root / "checkpoints").iterdir()} >= {"head_warmup.ckpt", "detour.ckpt", "decay.ckpt"}
    assert list((root / "logs").glob("events.*"))
    assert "AutoModelForMaskedLM.from_pretrained" in out
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
    code, again, _ = run("fit", "--config", recipe)
    assert code == 0
    assert "The run in 'runs/tiny' is over" in again
    assert again[again.index("Held-out") :] == out[out.index("Held-out") :]
    for other, expected in (
        (["--model.learning_rate=1"], "model.init_args.learning_rate 0.01, got 1.0"),
        (["--ckpt_path=null"], "must be a folder without a run"),
        (["--schedule.steps=99"], "must be a new folder for a schedule that a finished run did not have"),
    ):
        code, _, err = run("fit", "--config", recipe, *other)
        assert code == 2
        assert err.splitlines()[-1].startswith("lit-encoders: error: trainer.default_root_dir must be")
        assert expected in err.splitlines()[-1]
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()} == before


def test_k01_the_saved_config_gives_the_same_run(run, recipe: Path) -> None:  # type: ignore[no-untyped-def]
    assert run("fit", "--config", recipe)[0] == 0
    saved = Path("runs/tiny/config.yaml")
    assert run("fit", "--config", saved, "--trainer.default_root_dir", "runs/again")[0] == 0
    weights = [(Path("runs") / name / "export" / "model.safetensors").read_bytes() for name in ("tiny", "again")]
    assert weights[0] == weights[1]
    first, second = (yaml.safe_load((Path("runs") / name / "config.yaml").read_text()) for name in ("tiny", "again"))
    second["trainer"]["default_root_dir"] = first["trainer"]["default_root_dir"]
    assert first == second


def test_k03_flags_beat_a_checkpoint(run, recipe: Path) -> None:  # type: ignore[no-untyped-def]
    """K05: also in subclass mode; the resumed run keeps the configuration of the run before."""
    assert run("fit", "--config", recipe)[0] == 0
    checkpoint = Path("runs/tiny/checkpoints/detour.ckpt")
    code, _, err = run("fit", "--config", recipe, "--ckpt_path", checkpoint)
    assert code == 2
    assert "(it holds summary.json)" in err, "a run that has ended is not written over"
    Path("runs/tiny/summary.json").unlink()  # As if it had been cut off.
    code, _, err = run("fit", "--config", recipe, "--model.learning_rate=0.001", "--ckpt_path", checkpoint)
    assert code == 0, err
    saved = yaml.safe_load(Path("runs/tiny/config-1.yaml").read_text())
    assert saved["model"]["init_args"]["learning_rate"] == 0.001
    assert yaml.safe_load(Path("runs/tiny/config.yaml").read_text())["model"]["init_args"]["learning_rate"] == 0.01
    rates = torch.load("runs/tiny/checkpoints/decay.ckpt", weights_only=True)["optimizer_states"][0]["param_groups"]
    assert rates[0]["lr"] == pytest.approx(0.001)


def test_validate_gives_the_loss_that_the_run_ended_with(run, recipe: Path) -> None:  # type: ignore[no-untyped-def]
    assert run("fit", "--config", recipe)[0] == 0
    code, out, _ = run("validate", "--config", recipe, "--ckpt_path", "runs/tiny/checkpoints/decay.ckpt")
    assert code == 0
    last = json.loads(Path("runs/tiny/summary.json").read_text())["phases"][-1]["losses"]["val/mlm_loss"][1]
    printed = next(line for line in out.splitlines() if "val/mlm_loss" in line).split("│")[2]
    assert float(printed) == pytest.approx(last, abs=1e-6)


def test_export_of_a_checkpoint(run, recipe: Path) -> None:  # type: ignore[no-untyped-def]
    assert run("fit", "--config", recipe)[0] == 0
    code, out, _ = run("export", "--checkpoint", "runs/tiny/checkpoints/decay.ckpt", "--output", "out")
    assert code == 0
    assert "Load:" in out
    assert Path("out/model.safetensors").read_bytes() == Path("runs/tiny/export/model.safetensors").read_bytes()


def test_validate_every_counts_optimizer_steps(run, recipe: Path) -> None:  # type: ignore[no-untyped-def]
    flags = [
        "--validate_every=2",
        "--trainer.accumulate_grad_batches=2",
        "--schedule.steps=6",
        "--schedule.decay_share=0",
    ]
    assert run("fit", "--config", recipe, *flags)[0] == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator("runs/tiny/logs")
    events.Reload()
    assert [event.step for event in events.Scalars("val/mlm_loss")] == [0, 1, 2, 4, 6, 7]
    assert events.Scalars("tokens/train/clm_loss")[-1].step == events.Scalars("train/tokens")[-1].value
    # The table of runs: settings, and the last held-out figures.
    assert events.Scalars("final/val/mlm_loss")[0].value == events.Scalars("val/mlm_loss")[-1].value


def test_a_run_without_a_schedule_keeps_its_end(run, recipe: Path) -> None:  # type: ignore[no-untyped-def]
    settings = yaml.safe_load(recipe.read_text())
    del settings["schedule"]
    recipe.write_text(yaml.safe_dump(settings))
    code, out, err = run("fit", "--config", recipe, "--trainer.max_steps=3")
    assert code == 0, err
    assert torch.load("runs/tiny/checkpoints/step-00000003.ckpt", weights_only=True)["global_step"] == 3
    assert "run" in out


def test_a_dry_run_leaves_nothing(run, recipe: Path) -> None:  # type: ignore[no-untyped-def]
    code, _, err = run("fit", "--config", recipe, "--trainer.fast_dev_run=true")
    assert code == 0, err
    assert not [path for path in Path().rglob("*") if path.is_file()]


def test_help_and_version_are_quick() -> None:
    for arguments, expected in (["--help"], "usage: lit-encoders"), (["--version"], __version__), ([], "fit"):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "lit_encoders", *arguments], capture_output=True, text=True, check=True
        )
        assert expected in done.stdout
        assert time.perf_counter() - start < 3


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, lit_encoders; print(sorted({'torch', 'lightning', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_k08_the_packaged_base_lies_under_every_verb(run, recipe: Path) -> None:  # type: ignore[no-untyped-def]
    for verb in ("fit", "validate"):
        with pytest.raises(SystemExit) as done:
            run(verb, "--config", recipe, "--print_config")
        assert not done.value.code
    settings = yaml.safe_load(recipe.read_text())
    settings["trainer"]["max_steps"] = 4
    recipe.write_text(yaml.safe_dump(settings))
    assert run("fit", "--config", recipe)[0] == 0
    saved = yaml.safe_load(Path("runs/tiny/config.yaml").read_text())
    assert saved["trainer"]["num_sanity_val_steps"] == -1
    assert saved["trainer"]["max_steps"] == 4


def test_k04_a_checkpoint_of_the_command_line_opens_in_python(run, recipe: Path) -> None:  # type: ignore[no-untyped-def]
    """In a process of its own, with the settings that the configuration gave."""
    assert run("fit", "--config", recipe)[0] == 0
    code = (
        "from lit_encoders import LitMLM\n"
        "module = LitMLM.load_from_checkpoint('runs/tiny/checkpoints/decay.ckpt')\n"
        "print(type(module).__name__, module.learning_rate, module.backbone.config.vocab_size, module.tokens > 0)\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["LitMLM", "0.01", "95", "True"]


def test_k06_the_user_s_checkpoint_callback_wins(run, recipe: Path) -> None:  # type: ignore[no-untyped-def]
    settings = yaml.safe_load(recipe.read_text())
    own = {"class_path": "lit_encoders.callbacks.ExactResume", "init_args": {"every_n_steps": 2}}
    settings["trainer"]["callbacks"] = [own]
    recipe.write_text(yaml.safe_dump(settings))
    assert run("fit", "--config", recipe)[0] == 0
    names = {path.name for path in Path("runs/tiny/checkpoints").iterdir()}
    # Of the phases' ends, 1, 3 and 4, one by its name; step 2 by its number.
    kept = ["head_warmup", "detour", "decay", "step-00000002"]
    assert names == {f"{name}.{ending}" for name in kept for ending in ("ckpt", "json")}
    assert not Path("runs/tiny/summary.json").exists()


def test_a_fork_of_another_model_is_one_line(run, recipe: Path) -> None:  # type: ignore[no-untyped-def]
    assert run("fit", "--config", recipe)[0] == 0
    small = {"model_type": "bert", "vocab_size": 95, "hidden_size": 16, "num_hidden_layers": 3}
    small |= {"num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128}
    settings = yaml.safe_load(recipe.read_text())
    init_args = settings["model"]["init_args"]
    init_args["tokenizer"], init_args["backbone"] = init_args["backbone"], small
    recipe.write_text(yaml.safe_dump(settings))
    fork = ["--fork", "runs/tiny/checkpoints/detour.ckpt", "--trainer.default_root_dir=runs/fork"]
    code, _, err = run("fit", "--config", recipe, *fork)
    assert code == 2
    assert "the checkpoint must be of this model" in err.splitlines()[-1]
    assert not Path("runs/fork").exists()
