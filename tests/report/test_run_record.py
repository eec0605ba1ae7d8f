"""Run folders as plain data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from lit_encoders.report.run_record import PhaseSpan, read_run, run_names, summary_phases


def test_a_finished_run(make_run: Callable[..., Path]) -> None:
    run = read_run(str(make_run()), "run")
    assert (run.name, run.state, run.steps, run.config_file) == ("run", "finished", 6, "config.yaml")
    assert run.settings["model"] == "lit_encoders.LitMLM"
    assert run.settings["model.mask_ratio"] == "0.15"
    losses = {"val/mlm_loss": (10.0, 6.5)}
    assert run.phases == [
        PhaseSpan("detour", "clm", 0, 4, 400, 12.5, losses),
        PhaseSpan("decay", "mlm", 4, 6, 200, 12.5, losses),
    ]


def test_an_unfinished_run_has_the_phases_that_it_saved_and_logged(make_run: Callable[..., Path]) -> None:
    run = read_run(str(make_run(finished=False)), "run")
    assert (run.state, run.steps) == ("unfinished", 5)
    assert run.phases == [
        PhaseSpan("detour", "clm", 0, 4, 400, None, {"val/mlm_loss": (10.0, 6.5)}),
        PhaseSpan("mlm", "mlm", 4, 5, 100, None, {"val/mlm_loss": (6.5, None)}, ended=False),
    ]


def test_without_checkpoints_phases_are_told_by_their_objective(make_run: Callable[..., Path]) -> None:
    folder = make_run(finished=False)
    (folder / "checkpoints" / "detour.json").unlink()
    spans = [(p.name, p.start, p.stop, p.ended) for p in read_run(str(folder), "run").phases]
    assert spans == [("clm", 0, 4, True), ("mlm", 4, 5, False)]


def test_a_run_that_was_stopped_by_a_number(make_run: Callable[..., Path]) -> None:
    folder = make_run(finished=False)
    (folder / "nonfinite.json").write_text(json.dumps({"step": 5}))
    assert read_run(str(folder), "run").state == "unfinished: stopped by a number that is not finite, at step 5"


def test_phases_left_out_of_a_summary_leave_a_gap() -> None:
    phases = [{"name": "b", "objective": "mlm", "steps": 3, "tokens": 9, "tokens_per_second": None, "losses": {}}]
    (span,) = summary_phases(phases, {"a": 5, "b": 8})
    assert (span.start, span.stop) == (5, 8)


def test_the_newest_configuration_counts(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    for number in (1, 2, 10):
        (folder / f"config-{number}.yaml").write_text(yaml.safe_dump({"seed_everything": number}))
    run = read_run(str(folder), "run")
    assert (run.config_file, run.settings) == ("config-10.yaml", {"seed_everything": "10"})


def test_pictures_of_the_folder_stand_for_those_of_the_log(
    make_run: Callable[..., Path], add_image: Callable[..., None]
) -> None:
    folder = make_run()
    add_image(folder, "drift", 3)
    add_image(folder, "cka", 3)
    (folder / "drift.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (folder / "fake.png").write_bytes(b"<svg onload=alert(1)>")
    assert [p.title for p in read_run(str(folder), "run").pictures] == ["drift.png", "cka, step 3"]


def test_a_run_of_which_little_is_left(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"phases": [], "steps": 3}')
    run = read_run(str(tmp_path), "run")
    assert (run.state, run.steps, run.settings, run.curves) == ("finished", 3, {}, {})


def test_no_run_at_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"runs must be folders that exist, got '/nowhere'"):
        read_run("/nowhere", "run")
    with pytest.raises(ValueError, match=r"runs must be folders with a config\.yaml, a summary\.json or logs/"):
        read_run(str(tmp_path), "run")


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("summary.json", "{", "must be a file of JSON that can be read"),
        ("summary.json", "[]", "must hold keys and values, got list"),
        ("summary.json", '{"phases": [{"name": "a"}]}', "must have phases as a run writes them"),
        ("config.yaml", "a: [", "must be a file of YAML that can be read"),
        ("config.yaml", "a", "must hold keys and values, got str"),
    ],
)
def test_damaged_files_are_named_in_one_line(tmp_path: Path, name: str, text: str, rule: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rule) as caught:
        read_run(str(tmp_path), "run")
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names(tmp_path: Path) -> None:
    assert run_names(["x/a/one", "x/b/one", "x/two"]) == ["a/one", "b/one", "x/two"]
    with pytest.raises(ValueError, match="at least one run folder, got none"):
        run_names([])
    with pytest.raises(ValueError, match=r"must be folders that differ, got 'x/\.\./y' twice"):
        run_names(["y", "x/../y"])
