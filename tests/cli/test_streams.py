"""Streams and a teacher as YAML: they run, and mistakes stop in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Run = Callable[..., tuple[int, str, str]]
STREAMS = [
    {"name": "narrow", "mask_ratio": 0.05, "share": 0.8, "distill": True, "head": "narrow"},
    {"name": "wide", "mask_ratio": 0.5, "share": 0.2, "head": "wide"},
]


@pytest.fixture
def ultra(recipe: Path, bert_folder: Path) -> Callable[..., Path]:
    """The tiny recipe with streams, a teacher and a probe; changes are of the model."""

    def write(**changes: Any) -> Path:
        settings = yaml.safe_load(recipe.read_text())
        del settings["schedule"]
        settings["model"]["class_path"] = "lit_encoders.LitKD"
        settings["model"]["init_args"] |= {"teacher": str(bert_folder), "streams": STREAMS, **changes}
        settings["data"]["slots"] = 384
        settings["trainer"] |= {"max_steps": 2, "log_every_n_steps": 1}
        settings["trainer"]["callbacks+"] = [
            {"class_path": "lit_encoders.callbacks.GradientProbe", "init_args": {"every_n_steps": 1}}
        ]
        recipe.write_text(yaml.safe_dump(settings))
        return recipe

    return write


def test_a_recipe_of_streams_and_a_teacher(run: Run, ultra: Callable[..., Path]) -> None:
    code, _, error = run("fit", "--config", ultra(temperature=2.0, aggregation="streams"))
    assert code == 0, error
    (summary,) = Path("runs").glob("*/summary.json")
    record = json.loads(summary.read_text())
    assert record["aggregation"] == "streams"
    assert record["streams"]["narrow"]["distill"]
    assert 0 < record["streams"]["narrow"]["targets"] < record["streams"]["wide"]["targets"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"streams": [STREAMS[0]]}, "model.streams must have shares that sum to 1, got 0.8"),
        ({"temperature": -1.0}, "model.temperature must be above 0, got -1.0"),
        ({"kd_weight": 2.0}, "model.kd_weight must be in [0, 1], got 2.0"),
        ({"teacher": "nowhere/at-all"}, "model.teacher must be a folder or hub name of a Hugging Face model"),
        ({"aggregation": "sum"}, "aggregation"),
        ({"streams": [STREAMS[0], {**STREAMS[1], "ratio": 0.3}]}, "ratio"),
    ],
)
def test_mistakes_stop_in_one_line(run: Run, ultra: Callable[..., Path], changes: dict[str, Any], message: str) -> None:
    code, _, error = run("fit", "--config", ultra(**changes))
    assert code != 0
    assert message in error
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) == 1, error
