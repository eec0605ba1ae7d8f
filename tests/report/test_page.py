"""The page: whole in itself, safe against any name, readable on a phone."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lit_encoders.report.page import render
from lit_encoders.report.run_record import RunRecord, read_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "<img src=x onerror=alert(1)>\"'&"


class Tags(HTMLParser):
    """All tags with their attributes, and which stay open."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "img", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def tags_of(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == []
    return tags


@pytest.fixture
def two_runs(make_run: Callable[..., Path]) -> list[RunRecord]:
    one = make_run("one")
    (one / "drift.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    other = make_run("other", finished=False, mask_ratio=0.3)
    return [read_run(str(one), "one"), read_run(str(other), "other")]


def test_nothing_comes_from_elsewhere(two_runs: list[RunRecord]) -> None:
    page = render(two_runs)
    seen = tags_of(page).seen
    assert not {tag for tag, _ in seen} & {"script", "link", "iframe", "object", "base"}
    sources = [value or "" for _, attrs in seen for name, value in attrs.items() if name in ("src", "href")]
    assert len(sources) == 1
    assert sources[0].startswith("data:image/png;base64,")
    assert "http:" not in page
    assert "https:" not in page
    assert not re.search(r"url\(|@import", page)


def test_what_differs_stands_open_and_the_rest_is_folded(two_runs: list[RunRecord]) -> None:
    page = render(two_runs)
    differs, rest = page.split("<details>", 1)
    folded = rest.split("</details>", 1)[0]
    assert "<td>0.15</td><td>0.3</td>" in differs
    assert "model.<wbr>mask_<wbr>ratio" in differs
    assert "model.<wbr>backbone" in folded
    assert "model.<wbr>mask_<wbr>ratio" not in folded
    assert "<td>finished</td><td>unfinished</td>" in page


def test_phases_are_named_in_charts_and_tables(two_runs: list[RunRecord]) -> None:
    page = render(two_runs[:1])
    assert page.count('class="phase p0"') >= 2
    assert ">detour</text>" in page
    assert "<td>detour</td>" in page
    assert ">optimizer steps</text>" in page
    assert ">tokens</text>" in page


def test_no_name_is_taken_for_html(make_run: Callable[..., Path]) -> None:
    folder = make_run(EVIL, backbone="</style></td><script>alert(1)</script>")
    (folder / "evaluation.json").write_text('{"<b>task": "<i>1"}')
    runs = [read_run(str(folder), EVIL), read_run(str(make_run("b")), "</title><script>")]
    seen = tags_of(render(runs)).seen
    assert not {tag for tag, _ in seen} & {"script", "img", "b", "i"}
    assert not [attrs for _, attrs in seen if "onerror" in attrs]


def test_a_run_of_which_little_is_left_has_a_page() -> None:
    page = render([RunRecord("a", "a", "finished", 3)])
    tags_of(page)
    assert "No configuration is left of a." in page
    assert 'type="radio"' not in page


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_shows_it_without_scrolling_sideways(two_runs: list[RunRecord], tmp_path: Path) -> None:
    assert CHROMIUM is not None
    (tmp_path / "page.html").write_text(render(two_runs))
    # The least width of a window is above that of a phone; a frame has none.
    (tmp_path / "frames.html").write_text(
        '<iframe src="page.html" style="width:375px"></iframe><iframe src="page.html" style="width:1280px"></iframe>'
        "<script>onload = () => document.title = [...document.querySelectorAll('iframe')].map(frame => {"
        "const page = frame.contentDocument; const shown = [...page.querySelectorAll('figure > svg')].filter("
        "chart => chart.getBoundingClientRect().height > 100).length;"
        "return (page.documentElement.scrollWidth <= frame.clientWidth) + ' ' + shown }).join(', ')</script>"
    )
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--enable-logging=stderr"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    address = (tmp_path / "frames.html").as_uri()
    command = [CHROMIUM, *flags, profile, "--dump-dom", address]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    # Three metrics, against tokens; those against steps are hidden.
    assert "<title>true 3, true 3</title>" in shown.stdout
    assert "CONSOLE" not in shown.stderr
