"""Parallel pages: the same ones are held out in every language, and nothing that was trained on is among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_encoders.studies.parallel_text import (
    cut_pieces,
    draw_pieces,
    is_held_out,
    read_pieces,
    split_text,
    without_lines,
    write_pieces,
)


def characters(text: str) -> list[int]:
    """A token for each letter."""
    return [ord(letter) for letter in text if letter.isalpha()]


def test_pieces_have_one_length() -> None:
    assert cut_pieces(range(7), 3) == [[0, 1, 2], [3, 4, 5]]
    assert cut_pieces(range(2), 3) == []


def test_pages_are_taken_until_there_are_enough_pieces() -> None:
    seen: list[str] = []

    def tokenize(page: str) -> list[int]:
        seen.append(page)
        return characters(page)

    pages = ["aaaa", "bbbb", "cccc", "dddd"]
    pieces = draw_pieces(pages, tokenize, 2, 3, seed=0, name="x")
    assert len(pieces) == 3
    assert len(seen) == 2
    assert pieces == draw_pieces(pages, characters, 2, 3, seed=0, name="x")
    with pytest.raises(ValueError, match=r"^text 'x' must hold 9 pieces of 2 tokens, got 8$"):
        draw_pieces(pages, characters, 2, 9, seed=0, name="x")


def test_held_out_pages_are_the_same_in_all_languages_and_share_no_line() -> None:
    every, count = 3, 9
    pages = {
        "en": [f"english{'abcdefghi'[n]}\nmenu\nonly" for n in range(count)],
        "fr": [f"french{'abcdefghi'[n]}\nmenu\nFichier" for n in range(count)],
    }
    found = {name: (train, held) for name, train, held in split_text(pages, "en", characters, 1, 28, 14, every)}
    letters = {name: ["".join(chr(piece[0]) for piece in part) for part in parts] for name, parts in found.items()}
    # Untranslated lines are gone from French; lines of training pages are gone from what is held out.
    assert "menu" not in "".join(letters["fr"])
    assert "Fichier" in letters["fr"][0]
    assert "Fichier" not in letters["fr"][1]
    assert "menu" in letters["en"][0]
    assert "menu" not in letters["en"][1]
    held_out = {"abcdefghi"[n] for n in range(count) if is_held_out(n, every)}
    assert held_out == {"c", "f", "i"}
    for name, stem in (("en", "english"), ("fr", "french")):
        for part, wanted in zip(letters[name], (set("abdegh"), held_out), strict=True):
            assert {part[place + len(stem)] for place in range(len(part)) if part[place:].startswith(stem)} <= wanted


def test_lines_are_dropped_whole() -> None:
    assert without_lines("a\nab\nb", {"a", "b"}) == "ab"


def test_languages_must_have_the_same_pages() -> None:
    with pytest.raises(ValueError, match=r"^languages must have the same pages, got \{'en': 1, 'fr': 2\} of them$"):
        list(split_text({"en": ["a"], "fr": ["a", "b"]}, "en", characters, 1, 1, 1))


def test_pieces_come_back(tmp_path: Path) -> None:
    write_pieces([[1, 2], [3]], tmp_path / "new" / "x.jsonl")
    assert read_pieces(tmp_path / "new" / "x.jsonl") == [[1, 2], [3]]


def test_missing_languages_are_named_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lit_encoders.studies.parallel_text import help_pages

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"run lit-encoders examples help-fr help-de$"):
        help_pages(["fr", "de"])
