"""Tables of a page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lit_encoders.report.run_record import RunRecord, read_run
from lit_encoders.report.tables import evaluation_tables, newest_table, overview, phase_table, record_tables


def test_phases_and_newest_values(make_run: Callable[..., Path]) -> None:
    runs = [read_run(str(make_run("a")), "a"), read_run(str(make_run("b", finished=False)), "b")]
    table = phase_table(runs)
    assert table.heads == ["run", "phase", "objective", "steps", "tokens", "tokens/s", "held-out MLM loss"]
    assert table.rows[0] == ["a", "detour", "clm", "0–4", "400", "12", "10 → 6.500"]
    assert table.rows[3] == ["b", "mlm (goes on)", "mlm", "4–5", "100", "–", "6.500 → –"]
    assert phase_table(runs[:1]).heads[0] == "phase"
    assert newest_table(runs).rows[0] == ["val/mlm_loss", "4.500 (step 6)", "6.500 (step 4)"]


def test_overview(make_run: Callable[..., Path]) -> None:
    rows = {row[0]: row[1:] for row in overview([read_run(str(make_run(finished=False)), "a")]).rows}
    assert rows["state"] == ["unfinished"]
    assert rows["tokens"] == ["500"]
    assert "export" not in rows


def test_records_of_streams_and_sources() -> None:
    streams = {"low": {"share": 0.8, "targets": 1200}, "high": {"share": 0.2, "targets": 900}}
    run = RunRecord("a", "a", "finished", 6, summary={"aggregation": "tokens", "streams": streams, "steps": 6})
    first, second = record_tables(run)
    assert first.rows == [["aggregation", "tokens"]]
    assert second.heads == ["", "share", "targets"]
    assert second.rows == [["low", "0.8", "1,200"], ["high", "0.2", "900"]]


def test_evaluations_of_any_shape() -> None:
    value = {"retrieval": {"ndcg": 0.5}, "tasks": [{"name": "x", "score": 1.25}, {"name": "y", "score": 2.5}]}
    tables = evaluation_tables(RunRecord("a", "a", "finished", 6, evaluation=value))
    assert [(table.title, table.rows) for table in tables] == [
        ("a, retrieval", [["ndcg", "0.5"]]),
        ("a, tasks", [["1", "x", "1.250"], ["2", "y", "2.500"]]),
    ]
    assert evaluation_tables(RunRecord("a", "a", "finished", 6)) == []
