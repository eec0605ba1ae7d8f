"""Our callbacks in another author's Lightning project: its own module, callbacks folder, optimizer and schedule."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FROZEN = re.compile(r"network\.bert\.(embeddings|encoder\.layer\.[01])\.")
LATER_LAYERS = re.compile(r"network\.bert\.encoder\.layer\.[23]\.")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("authors") / "proteins"
    shutil.copytree(Path(__file__).with_name("proteins"), folder)
    (folder / "callbacks" / "__init__.py").write_text(
        "from callbacks.weight_distance import WeightDistance as WeightDistance\n"
    )
    return folder


def run(project: Path, *arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", *arguments]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def from_python(project: Path) -> dict[str, Any]:
    run(project, "from_python.py")
    return json.loads((project / "from_python.json").read_text())  # type: ignore[no-any-return]


def distances(path: Path) -> dict[str, float]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def assert_frozen(moved: dict[str, float]) -> None:
    frozen = {name for name in moved if FROZEN.match(name)}
    assert len(frozen) == 5 + 2 * 16
    assert {name for name, distance in moved.items() if distance == 0} == frozen


def test_the_projects_own_tests_pass(project: Path) -> None:
    assert "3 passed" in run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")


def test_both_callbacks_packages_import_side_by_side(project: Path, from_python: dict[str, Any]) -> None:
    theirs, ours = (Path(folder) for folder in from_python["folders"])
    assert theirs == project / "callbacks" / "__init__.py"
    assert (ours.parent / "layer_freezing.py").exists()
    assert not (theirs.parent / "layer_freezing.py").exists()


def test_layer_freezing_from_yaml(project: Path) -> None:
    """Beside the author's optimizer of two groups and a schedule that is stepped every step."""
    printed = run(project, "train.py", "fit", "--config", "config.yaml", "--config", "freezing.yaml")
    assert "frozen in the whole run: 0:2, embeddings" in printed
    assert "train: step 1" in printed
    assert_frozen(distances(project / "distance.json"))


@pytest.mark.usefixtures("from_python")
def test_layer_freezing_from_python(project: Path) -> None:
    assert_frozen(distances(project / "python_distance.json"))


@pytest.mark.parametrize("source", ["python", "yaml"])
def test_objective_and_learning_rate_follow_the_phases(project: Path, from_python: dict[str, Any], source: str) -> None:
    """A warm-up of 2 steps to the author's rates, 0.01 and 0.02, then a linear decay over 5 steps."""
    steps = from_python["steps"] if source == "python" else json.loads((project / "watch.json").read_text())["steps"]
    assert [step["objective"] for step in steps] == ["clm"] * 5 + ["mlm"] * 5
    factors = [0, 0.5, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]
    for step, factor in zip(steps, factors, strict=True):
        assert step["rates"] == pytest.approx([0.01 * factor, 0.02 * factor])
    # The embeddings move in both phases; the later layers are frozen in the detour alone. The first rate is 0.
    for number, step in enumerate(steps[1:], start=1):
        assert "network.bert.embeddings.word_embeddings.weight" in step["moved"]
        assert any(LATER_LAYERS.match(name) for name in step["moved"]) is (number >= 5)


def test_the_schedule_ends_the_run(from_python: dict[str, Any]) -> None:
    """Two epochs of 6 steps would be 12."""
    assert from_python["global_step"] == 10


def test_throughput_counts_the_modules_tokens(from_python: dict[str, Any]) -> None:
    assert from_python["tokens_per_second"] > 0
    assert from_python["seconds"] > 0


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no objective", r"TypeError: ObjectiveSchedule needs .* attribute `objective` .* add one to ProteinLM"),
        ("no tokens", r"TypeError: Throughput needs .* attribute `tokens`; add one to ProteinLM"),
        ("no LitEncoder", r"TypeError: HFExport needs a LitEncoder.* got ProteinLM"),
        ("scheduler", r"ValueError: .*lr_scheduler must be unset beside a schedule.* got LambdaLR"),
        ("no such layers", r"ValueError: layers must lie within the model's 4 layers \(0:4\), got '4:9'"),
        ("no schedule", r"ValueError: LayerFreezing.phases must name phases of the schedule .* got 'detour'"),
    ],
)
def test_what_a_module_lacks_is_said_before_the_first_step(
    from_python: dict[str, Any], case: str, message: str
) -> None:
    refused = from_python["refusals"][case]
    assert re.fullmatch(message, refused["error"])
    assert refused["steps"] == 0
