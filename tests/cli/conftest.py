"""Commands as a user types them, on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

# Imported here, so that its log handler writes to the session's standard error and not to that of the first test.
import lightning.pytorch  # noqa: F401
import pytest
import yaml

from lit_encoders.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def recipe(bert_folder: Path, text_file: Path, tmp_path: Path) -> Path:
    """A recipe of four steps that runs in a second."""
    settings = {
        "model": {
            "class_path": "lit_encoders.LitMLM",
            "init_args": {"backbone": str(bert_folder), "learning_rate": 0.01},
        },
        "data": {"train": str(text_file), "val_share": 0.2, "sequence_length": 48, "slots": 96},
        "schedule": {
            "class_path": "lit_encoders.callbacks.CLMDetour",
            "init_args": {"steps": 2, "decay_share": 0.5, "head_warmup_steps": 1},
        },
        "trainer": {"accelerator": "cpu", "log_every_n_steps": 1},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in an empty folder; give exit code, standard output and standard error."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def command(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command
