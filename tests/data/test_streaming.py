"""Streams: every document once an epoch, window by window, gone on with from any place; what is over is removed."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_encoders import TextDataModule
from lit_encoders.data import streaming
from lit_encoders.data.packs import Pack, Position
from lit_encoders.data.sources import as_source
from lit_encoders.data.streaming import StreamPlan, stream_digest, stream_reader
from lit_encoders.data.tokens import affixes

WINDOW = 16
ROWS = 40  # Two windows and a short one.


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "WINDOW_DOCUMENTS", WINDOW)


def texts(rows: int = ROWS) -> list[str]:
    draw = np.random.default_rng(0)
    return [" ".join([f"w{number % 90}", *(f"w{n}" for n in draw.integers(90, size=5))]) for number in range(rows)]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(texts()) + "\n")
    return path


@pytest.fixture
def make(tmp_path: Path, text: Path, tokenizer: Any) -> Iterator[Any]:
    made: list[StreamPlan] = []

    def plan(folder: str = "windows", files: Any = None, writes: bool = True) -> StreamPlan:
        reader = stream_reader(as_source(files or str(text), "text", "line", "data.train"))
        root = tmp_path / folder
        root.mkdir(exist_ok=True)
        made.append(StreamPlan(reader, tokenizer, root, affixes(tokenizer), 48, 24, seed=0, writes=writes))
        return made[-1]

    yield plan
    for one in made:
        one.close()


def places(packs: list[Pack]) -> list[tuple[Any, list[int]]]:
    return [(pack.here, pack.documents.tolist()) for pack in packs]


def test_every_document_once_an_epoch(make: Any) -> None:
    plan = make()
    packs = list(islice(plan.sequence(), 60))
    seen = Counter((pack.here.epoch, number) for pack in packs for number in pack.documents.tolist())
    last = max(epoch for epoch, _ in seen)
    assert last >= 2
    for epoch in range(last):
        assert sorted(number for e, number in seen if e == epoch) == list(range(ROWS))
    assert max(seen.values()) == 1
    orders = [[n for p in packs if p.here.epoch == epoch for n in p.documents.tolist()] for epoch in (0, 1)]
    assert orders[0] != orders[1]


def test_any_place_is_gone_on_from_with_one_window_read(make: Any, tmp_path: Path) -> None:
    """Also on another machine, where no window lies yet."""
    whole = list(islice(make().for_rank(Position(), 0, 1), 50))
    first = make("first")
    for stop in (3, 11, 17, 30):
        fresh = make(f"fresh-{stop}")
        list(islice(first.for_rank(Position(), 0, 1), stop))
        place = whole[stop - 1].after
        state = json.loads(json.dumps(first.state(place)))
        fresh.restore(state)
        upcoming = fresh.for_rank(place, 0, 1)
        got = [next(upcoming)]
        # The one that it stands in, and the next one ahead.
        assert fresh.windows_read <= 2
        got += list(islice(upcoming, 9))
        assert places(got) == places(whole[stop : stop + 10])


def test_ranks_share_the_packs_and_one_process_writes(make: Any) -> None:
    alone = list(islice(make().for_rank(Position(), 0, 1), 40))
    writer, other = make("shared"), make("shared", writes=False)
    ranks = [writer.for_rank(Position(), 0, 2), other.for_rank(Position(), 1, 2)]
    both = [next(rank) for _ in range(20) for rank in ranks]
    assert places(both) == places(alone)
    assert other.windows_read == 0


def test_windows_that_are_over_are_removed(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "WINDOW_DOCUMENTS", 4)
    plan = make()
    most = 0
    for _ in islice(plan.sequence(), 60):
        most = max(most, len(list((tmp_path / "windows").glob("window-*"))))
    assert most <= 4


def test_a_half_written_window_is_written_again(make: Any, tmp_path: Path) -> None:
    whole = places(list(islice(make().sequence(), 10)))
    broken = tmp_path / "broken" / "window-000000"
    broken.mkdir(parents=True)
    (broken / "train").mkdir()
    assert places(list(islice(make("broken").sequence(), 10))) == whole


@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv", "tsv", "parquet", "txt.gz", "jsonl.gz", "ids.jsonl"])
def test_formats_hold_what_they_hold_without_streaming(kind: str, tmp_path: Path) -> None:
    rows = [*texts(10), "  ", texts(11)[-1]]
    values: list[Any] = [[5 + number, 6] for number in range(12)] if kind == "ids.jsonl" else rows
    path = tmp_path / f"data.{kind}"
    lines = {
        "txt": "\n".join(rows),
        "jsonl": "\n".join(json.dumps({"other": 1, "text": value}) for value in values),
        "csv": "\n".join(["text,other", *(f"{row},1" for row in rows)]),
        "tsv": "\n".join(["text\tother", *(f"{row}\t1" for row in rows)]),
    }
    if kind == "parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.table({"text": rows, "other": [1] * len(rows)}), path)
    elif kind.endswith("gz"):
        path.write_bytes(gzip.compress((lines[kind.split(".")[0]] + "\n").encode()))
    else:
        path.write_text(lines[kind.split(".")[-1]] + "\n")
    source = as_source(str(path), "text", "line", "data.train")
    streamed = [document for document, _ in stream_reader(source).rows(None)]
    kept = [d for d in streamed if d and not (isinstance(d, str) and d.isspace())]
    assert [list(d) if isinstance(d, list) else d for d in kept] == [
        list(d) if isinstance(d, list) else d for d in source.documents()
    ]


def test_closing_stops_reading_ahead(make: Any, tmp_path: Path) -> None:
    plan = make()
    plan.first_packs()
    plan.close()
    assert plan._pool._shutdown
    with pytest.raises(InterruptedError):
        plan._read(2 if 2 in plan.states else 0)
    assert not list((tmp_path / "windows").glob(".window-*/train"))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"a.txt": "\n\n"}, "data.train must hold at least one document that is not blank, got none"),
        ({"a.txt": "w1\n", "b.jsonl": '{"text": "w1"}\n'}, "data.train must be files of one kind"),
        ({"a.jsonl": '{"body": "w1"}\n'}, "text"),
    ],
)
def test_texts_that_cannot_be_streamed(content: dict[str, str], line: str, tmp_path: Path, make: Any) -> None:
    for name, written in content.items():
        (tmp_path / name).write_text(written)
    files = [str(tmp_path / name) for name in content]
    with pytest.raises(ValueError, match=line):
        make("none", files).first_packs()


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({}, "data.val must name held-out text where data.streaming is on, got None"),
        (
            {"val": "x.txt", "train": {"a": "a.txt"}},
            "data.weights must be given where data.streaming is on: sizes are not known, got None",
        ),
    ],
)
def test_settings_that_a_stream_needs(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        TextDataModule(**{"train": "a.txt", "streaming": True, **settings})


def test_a_digest_does_not_read_the_text(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = as_source(str(text), "text", "line", "data.train")
    before = stream_digest(source)
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("the text was read"))
    assert stream_digest(source) == before
    assert stream_digest(as_source(str(text), "text", "paragraph", "data.train")) != before
