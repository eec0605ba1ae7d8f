"""The verb: where the page goes, and what is never written over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lit_encoders.report.verb import report_verb


def test_the_page_stands_in_the_first_run_or_where_it_is_asked_for(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    one, other = make_run("one"), make_run("other", finished=False)
    said = report_verb([str(one), str(other)])
    assert said.splitlines() == ["one: finished, 6 steps", "other: unfinished, 5 steps", str(one / "report.html")]
    elsewhere = tmp_path / "new" / "page.html"
    report_verb([str(one), str(other)], elsewhere)
    assert elsewhere.read_bytes() == (one / "report.html").read_bytes()
    assert not list(one.glob(".*"))


def test_only_a_page_is_written_over(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = str(make_run())
    output = tmp_path / "page.html"
    report_verb([run], output)
    report_verb([run], output)
    output.write_text("<html>my own notes</html>")
    with pytest.raises(
        ValueError, match=r"output must be a new file, or a page of an earlier report, got '.*page\.html'"
    ):
        report_verb([run], output)
    assert output.read_text() == "<html>my own notes</html>"


def test_places_that_cannot_be_written(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = str(make_run())
    with pytest.raises(ValueError, match="output must be a file, got the folder"):
        report_verb([run], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"output must be a file that can be written, got '.*file/page\.html'"):
        report_verb([run], tmp_path / "file" / "page.html")
    with pytest.raises(ValueError, match="output must be a file that can be written"):
        report_verb([run], tmp_path / f"{'x' * 250}.html")


def test_mistakes_leave_nothing_behind(make_run: Callable[..., Path], tmp_path: Path) -> None:
    output = tmp_path / "new" / "page.html"
    with pytest.raises(ValueError, match="runs must be at least one run folder, got none"):
        report_verb([], output)
    with pytest.raises(ValueError, match="runs must be folders that exist, got 'nowhere'"):
        report_verb([str(make_run()), "nowhere"], output)
    assert not output.parent.exists()
