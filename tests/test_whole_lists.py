"""A later list replaces an earlier one whole, in files and flags; a callback of `base.yaml` can be set otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_encoders.cli import main
from lit_encoders.recipes import config_folder
from lit_encoders.whole_lists import replace_lists

LOW = {"name": "low", "mask_ratio": 0.05, "share": 0.8, "head": "low"}
HIGH = {"name": "high", "mask_ratio": 0.5, "share": 0.2, "head": "high"}
OTHERS = "[{name: one, mask_ratio: 0.1, share: 0.8}, {name: two, mask_ratio: 0.4, share: 0.2}]"


def write(path: Path, settings: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(settings))
    return str(path)


@pytest.fixture
def config(bert_folder: Path, text_file: Path, tmp_path: Path) -> str:
    init: dict[str, Any] = {"backbone": str(bert_folder), "streams": [LOW, HIGH]}
    schedule = {"steps": 40, "phases": [{"name": name, "objective": "mlm", "share": 0.5} for name in "ab"]}
    return write(
        tmp_path / "run.yaml",
        {
            "model": {"class_path": "lit_encoders.LitMLM", "init_args": init},
            "data": {"train": str(text_file), "val_share": 0.1, "sequence_length": 48, "slots": 96},
            "schedule": {"class_path": "lit_encoders.callbacks.ObjectiveSchedule", "init_args": schedule},
        },
    )


@pytest.fixture
def resolved(config: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """The configuration that a command would run."""

    def resolve(*arguments: str) -> dict[str, Any]:
        with pytest.raises(SystemExit) as stopped:
            main(["fit", "--config", config, *arguments, "--print_config"])
        assert stopped.value.code == 0
        return yaml.safe_load(capsys.readouterr().out)  # type: ignore[no-any-return]

    return resolve


def streams(found: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [(stream["name"], stream["head"]) for stream in found["model"]["init_args"]["streams"]]


def test_streams_inherit_nothing_from_those_before(resolved: Any, tmp_path: Path) -> None:
    assert streams(resolved()) == [("low", "low"), ("high", "high")]
    assert streams(resolved(f"--model.streams={OTHERS}")) == [("one", None), ("two", None)]
    assert streams(resolved("--model.streams", OTHERS)) == [("one", None), ("two", None)]
    overlay = write(tmp_path / "over.yaml", {"model": {"init_args": {"streams": yaml.safe_load(OTHERS)}}})
    assert streams(resolved("--config", overlay)) == [("one", None), ("two", None)]
    assert streams(resolved(f"--config={overlay}", f"--model.streams={[HIGH, LOW]}")) == [
        ("high", "high"),
        ("low", "low"),
    ]


def test_phases_inherit_nothing_from_those_before(resolved: Any) -> None:
    flags = ["--schedule.phases=[{name: a, objective: clm, steps: 5}, {name: c, objective: mlm, steps: 2}]"]
    found = resolved(*flags, "--schedule.steps=null")["schedule"]["init_args"]["phases"]
    assert [(phase["share"], phase["steps"]) for phase in found] == [(None, 5), (None, 2)]


def test_lists_that_are_added_to_stay(resolved: Any, tmp_path: Path) -> None:
    more = {"trainer": {"callbacks+": [{"class_path": "lit_encoders.callbacks.WeightDrift"}]}}
    before = len(resolved()["trainer"]["callbacks"])
    assert len(resolved("--config", write(tmp_path / "more.yaml", more))["trainer"]["callbacks"]) == before + 1
    only = "--trainer.callbacks=[{class_path: lit_encoders.callbacks.WeightDrift}]"
    assert len(resolved(only)["trainer"]["callbacks"]) == 1


def test_a_first_list_needs_nothing_emptied(config: str) -> None:
    base = config_folder() / "base.yaml"
    arguments = ["--config", config, "--model.learning_rate", "1e-3", "--data.weights={a: 1}"]
    assert replace_lists(arguments, base) == arguments
    assert replace_lists(["--config", config, "--config", config], base)[2:5] == [
        "--model.init_args.streams=[]",
        "--schedule.init_args.phases=[]",
        "--config",
    ]


def test_a_callback_of_the_base_is_set_otherwise(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    entry = {"class_path": "lit_encoders.callbacks.ExactResume", "init_args": {"every_n_steps": 3}}
    more = write(tmp_path / "more.yaml", {"trainer": {"callbacks+": [entry]}})
    flags = ["--schedule.steps=8", "--model.streams=null", "--trainer.default_root_dir=runs/a"]
    assert main(["fit", "--config", config, "--config", more, *flags]) == 0
    kept = sorted(path.stem for path in Path("runs/a/checkpoints").glob("*.ckpt"))
    assert kept == ["a", "b", "step-00000003", "step-00000006"]


def test_two_alike_are_one_line(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    entry = {"class_path": "lit_encoders.callbacks.WeightReversion", "init_args": {"layers": "0:1"}}
    more = write(tmp_path / "more.yaml", {"trainer": {"callbacks+": [entry, entry]}})
    assert main(["fit", "--config", config, "--config", more]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.fullmatch(r"lit-encoders: error: .*WeightReversion.*", said)
    assert not Path("runs").exists()
