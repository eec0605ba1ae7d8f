"""The first texts of a source, and how the same ones are known again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_encoders.evaluation.texts import first_texts, texts_digest


def test_first_texts_come_in_order_without_blank_ones(tmp_path: Path, write: Any) -> None:
    (tmp_path / "a.txt").write_text("one\n \n\ntwo\nthree\n")
    assert first_texts(str(tmp_path / "a.txt"), 2, "texts", asked_by="n") == ["one", "two"]
    records = write("b.jsonl", [{"body": "four"}, {"body": ""}])
    assert first_texts([str(tmp_path / "a.txt"), records], 3, "texts", asked_by="n") == ["one", "two", "three"]
    assert first_texts(records, 1, "texts", "body", asked_by="n") == ["four"]


def test_too_few_texts_and_ids_are_said(write: Any) -> None:
    file = write("a.jsonl", [{"text": "one"}])
    with pytest.raises(ValueError, match=r"^texts must hold at least 2 texts \(n\), got 1 in '.*a\.jsonl'$"):
        first_texts(file, 2, "texts", asked_by="n")
    with pytest.raises(ValueError, match=r"^n must be at least 1, got 0$"):
        first_texts(file, 0, "texts", asked_by="n")
    with pytest.raises(ValueError, match=r"^texts must hold text, got token ids$"):
        first_texts(write("b.jsonl", [{"text": [5, 6]}]), 1, "texts", asked_by="n")


def test_fewer_texts_may_do_but_none_never_does(write: Any) -> None:
    assert first_texts(write("a.jsonl", [{"text": "one"}]), 2, "texts", asked_by="n", fewer=True) == ["one"]
    with pytest.raises(ValueError, match=r"^texts must hold at least one text, got 0 in '.*b\.jsonl'$"):
        first_texts(write("b.jsonl", [{"text": " "}]), 2, "texts", asked_by="n", fewer=True)


def test_digest_follows_texts_their_order_and_their_ends() -> None:
    lists = [["a", "b"], ["b", "a"], ["ab"], ["a", "b", ""], []]
    assert len({texts_digest(texts) for texts in lists}) == len(lists)
    assert texts_digest(("a", "b")) == texts_digest(["a", "b"])
