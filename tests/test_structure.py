"""The laws of the house that a machine can check."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

import lit_encoders

REPOSITORY = Path(__file__).parents[1]
# Each room may import from those listed; imports inside functions count too, except for the command line's.
MAY_IMPORT = {
    "objectives": set(),
    "models": {"objectives"},
    "data": {"objectives", "models"},
    "optim": {"models"},
    "modules": {"objectives", "models", "data", "optim"},
    # `data` for the names of examples that stand for a model; `plots` is one file, for whoever has numbers to show.
    "weights": {"models", "data", "plots"},
    "evaluation": {"objectives", "models", "data", "optim", "modules", "weights", "plots"},
    "analysis": {"objectives", "models", "data", "optim", "modules", "weights", "evaluation", "plots"},
    # What a run leaves in its folder, and when it may stop: nothing here knows of modules.
    "resume": set(),
    "callbacks": {
        *("objectives", "models", "data", "optim", "modules", "weights", "analysis", "evaluation", "resume", "plots")
    },
    # `mistakes` is one file: what a run would be refused with is said in the same words.
    "performance": {"objectives", "models", "data", "optim", "modules", "weights", "callbacks", "mistakes"},
    # Pages about runs: they read what runs left behind.
    "report": {"evaluation", "plots", "weights"},
    "studies": {
        *(
            "objectives",
            "models",
            "data",
            "optim",
            "modules",
            "weights",
            "analysis",
            "evaluation",
            "callbacks",
            "plots",
        ),
        "resume",
    },
}


def room_folders() -> dict[str, Path]:
    return {room: REPOSITORY / ("" if room == "callbacks" else "lit_encoders") / room for room in MAY_IMPORT}


def imported_rooms(path: Path) -> set[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("lit_encoders.")}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_go_one_way(room: str) -> None:
    for path in room_folders()[room].rglob("*.py"):
        assert imported_rooms(path) - {room} <= MAY_IMPORT[room], path


def test_every_room_is_packaged() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    rooms = {f"lit_encoders.{path.parent.name}" for path in (REPOSITORY / "lit_encoders").glob("*/__init__.py")}
    assert listed == rooms | {"lit_encoders", "lit_encoders.callbacks", "lit_encoders.cli_configs"}
    assert project["project"]["version"] == lit_encoders.__version__


def test_nothing_is_named_utils_and_tests_have_no_package() -> None:
    names = {path.stem for path in REPOSITORY.rglob("*.py") if "site-packages" not in path.parts}
    assert not {name for name in names if "util" in name or "helper" in name}
    assert not list((REPOSITORY / "tests").rglob("__init__.py"))


@pytest.mark.parametrize("name", lit_encoders.__all__)
def test_lazy_names_exist(name: str) -> None:
    assert getattr(lit_encoders, name) is not None


def test_lazy_callbacks_exist() -> None:
    from lit_encoders import callbacks

    assert all(getattr(callbacks, name) is not None for name in callbacks.__all__)


@pytest.mark.xdist_group("together")
def test_groups_of_tests_stay_on_one_worker(request: pytest.FixtureRequest) -> None:
    """A group that several workers share starts its processes once for each: minutes of the suite."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("one process, or tests are not spread by groups")
    assert request.node.nodeid.endswith("@together")
