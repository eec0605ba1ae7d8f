"""Every shipped notebook runs, on a tiny model, and is saved as its reader should see it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))

# What takes the place of a notebook's `parameters` cell; MODEL and TEXT are the tests' own, unless named here.
TINY: dict[str, list[dict[str, Any]]] = {
    "01_clm_detour": [
        {
            "SLOTS": 128,
            "SEQUENCE_LENGTH": 64,
            "HEAD_WARMUP_STEPS": head_warmup_steps,
            "STEPS": 10,
            "LEARNING_RATE": 1e-3,
            "VALIDATE_EVERY": 4,
            "PROBES": ["w1 {mask} w3", "w4 w5 {mask}"],
            "RUN_DIR": "runs/tiny",
        }
        for head_warmup_steps in (3, 0)
    ],
    "02_subclassing": [
        {
            "VAL_SHARE": 0.05,
            "SLOTS": 128,
            "SEQUENCE_LENGTH": 64,
            "STEPS": 8,
            "LEARNING_RATE": 1e-3,
            "VALIDATE_EVERY": 4,
            "RUN_DIR": "runs/tiny",
        }
    ],
    "03_callbacks_in_your_project": [
        {
            "FIRST": "0:1",
            "MIDDLE": "1:2",
            "LAST": "2:3",
            "STEPS": 8,
            "BATCH_SIZE": 4,
            "MAX_LENGTH": 32,
            "LEARNING_RATE": 1e-3,
            "RUN_DIR": "runs/tiny",
        }
    ],
    "04_layer_aware_alignment": [
        {
            "FAMILIES": {"one": r"\bw1\b", "two": r"\bw2\b"},
            "HELD_OUT": 8,
            "FIRST": "0:1",
            "MIDDLE": "1:2",
            "LAST": "2:3",
            "HEAD_WARMUP_STEPS": head_warmup_steps,
            "STEPS": 4,
            "SLOTS": 128,
            "SEQUENCE_LENGTH": 64,
            "LEARNING_RATE": 1e-3,
            "RUN_DIR": "runs/tiny",
        }
        for head_warmup_steps in (0, 2)
    ],
    "05_mixed_ratios_and_kd": [
        {
            "LOW": 0.1,
            "HIGH": 0.5,
            "VAL_SHARE": 0.1,
            "VAL_BATCHES": 1,
            "SLOTS": 192,
            "SEQUENCE_LENGTH": 64,
            "HEAD_WARMUP_STEPS": head_warmup_steps,
            "TEACHER_STEPS": 4,
            "STUDENT_LAYERS": 2,
            "STUDENT_STEPS": 3,
            "CALIBRATION_TOKENS": 200,
            "LEARNING_RATE": 1e-3,
            "RUN_DIR": "runs/tiny",
        }
        for head_warmup_steps in (0, 2)
    ],
}
# The models that a notebook leaves in its run folder, where it is not `export` alone.
EXPORTS = {
    "03_callbacks_in_your_project": ["export", "reversion/export-reverted"],
    "04_layer_aware_alignment": [
        *("dense/export", "expert-one/export", "freezing-one/export", "l2sp-one/export"),
        *("dense-reverted", "expert-reverted-two", "soup", "between/alpha-0.5"),
    ],
    "05_mixed_ratios_and_kd": ["teacher/export", "student", "without/export", "distilled-low", "distilled-high"],
}

# Folders of the machine that a notebook was run on.
MACHINE_PATH = re.compile(
    r"(?<![\w.:/~])/(?:content|data|home|mnt|opt|private|root|scratch|srv|tmp|Users|usr|var|work)/"
)


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def parameters_cell(notebook: Any) -> Any:
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    return cell


def assigned_names(source: str) -> set[str]:
    return {target.id for node in ast.parse(source).body for target in getattr(node, "targets", [])}


def run(notebook: Any, folder: Path) -> None:
    # No folder to look in leaves ipykernel's own kernel: the interpreter that runs the tests.
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    NotebookClient(notebook, km=manager, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()


def runs() -> list[Any]:
    # A notebook without tiny parameters fails with a KeyError, rather than going untested.
    return [
        pytest.param(path, number, id=f"{path.stem}-{number}")
        for path in NOTEBOOKS
        for number in range(len(TINY.get(path.stem, [{}])))
    ]


@pytest.mark.parametrize(("path", "number"), runs())
def test_a_notebook_runs_and_its_exports_load(
    path: Path, number: int, bert_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForMaskedLM

    parameters = {"MODEL": str(bert_folder), "TEXT": str(text_file), **TINY[path.stem][number]}
    notebook = read(path)
    cell = parameters_cell(notebook)
    assert assigned_names(cell.source) == set(parameters)
    cell.source = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
    run(notebook, tmp_path)
    for export in EXPORTS.get(path.stem, ["export"]):
        AutoModelForMaskedLM.from_pretrained(tmp_path / parameters["RUN_DIR"] / export)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_saved_with_the_outputs_of_one_run(path: Path) -> None:
    notebook = read(path)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        if re.search(r"\bprint\(|\bplt\.|\.fit\(", cell.source):
            assert cell.outputs, cell.source
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output.text for output in outputs if "Warning" in output.get("text", "")]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_says_nothing_of_the_machine_it_ran_on(path: Path) -> None:
    assert path.stat().st_size < 300_000
    found = MACHINE_PATH.search(path.read_text(encoding="utf-8"))
    assert found is None, found
    notebook = read(path)
    assert notebook.metadata.kernelspec.name == "python3"
    assert not [cell for cell in notebook.cells if "execution" in cell.metadata]
