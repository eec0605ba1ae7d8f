"""Which curves stand in one chart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lit_encoders.report.charts import Lane
from lit_encoders.report.event_log import Point
from lit_encoders.report.panels import make_lanes, make_panels
from lit_encoders.report.run_record import PhaseSpan, RunRecord, read_run


def test_a_metric_of_all_runs_is_one_chart(make_run: Callable[..., Path]) -> None:
    runs = [read_run(str(make_run("a")), "a"), read_run(str(make_run("b", finished=False, offset=1.0)), "b")]
    panels = make_panels(runs, "tokens")
    assert {group: [panel.title for panel in inside] for group, inside in panels.items()} == {
        "Held-out losses": ["val/mlm_loss"],
        "Training losses": ["train/clm_loss", "train/mlm_loss"],
    }
    (held_out,) = panels["Held-out losses"]
    assert [(line.label, line.colour, line.points[-1]) for line in held_out.lines] == [
        ("a", 0, (600, 4.5)),
        ("b", 1, (400, 7.5)),
    ]


def test_sources_and_ranges_share_the_chart_of_their_metric() -> None:
    curves = {f"val/{name}mlm_loss": [Point(0, None, 1.0)] for name in ("", "wiki/", "code/")}
    ((panel,),) = make_panels([RunRecord("a", "a", "finished", 1, curves=curves)], "steps").values()
    assert [line.label for line in panel.lines] == ["code", "all", "wiki"]
    assert make_panels([RunRecord("a", "a", "finished", 1, curves=curves)], "tokens") == {}


def run(*phases: tuple[str, int, int]) -> RunRecord:
    return RunRecord("a", "a", "finished", 1, phases=[PhaseSpan(name, "", *ends) for name, *ends in phases])


def test_lanes() -> None:
    detour, twin = run(("detour", 0, 90), ("decay", 90, 100)), run(("twin", 0, 90), ("decay", 90, 100))
    other = run(("detour", 0, 50))
    assert make_lanes([detour, detour], "steps") == [Lane((("detour", 0, 90), ("decay", 90, 100)))]
    assert make_lanes([detour, twin], "steps") == [Lane([("detour / twin", 0, 90), ("decay", 90, 100)])]
    assert [lane.colours for lane in make_lanes([detour, other, detour], "steps")] == [[0, 2], [1]]
    # Tokens that are not known place nothing.
    assert make_lanes([detour], "tokens") == []
