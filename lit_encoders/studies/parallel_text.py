"""Pages that exist in several languages, as pieces of equal length: what to train on, and what is held out in all.

A page is held out in every language at once. Otherwise a model could meet its content in another language, where many
words are the same (names, code, borrowed words).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from lit_encoders.data.examples import find_example

# Text -> ids of its content, without special tokens around it.
Tokenize = Callable[[str], list[int]]
Pieces = list[list[int]]


def is_held_out(page: int, every: int) -> bool:
    """Whether a page is held out, by its number: the last of each ``every`` pages.

    >>> [is_held_out(page, 3) for page in range(6)]
    [False, False, True, False, False, True]
    """
    return page % every == every - 1


def without_lines(page: str, known: Collection[str]) -> str:
    """A page without the lines that stand elsewhere: untranslated ones, or ones that were trained on.

    >>> without_lines("un\\ntwo\\ntrois", {"two"})
    'un\\ntrois'
    """
    return "\n".join(line for line in page.splitlines() if line not in known)


def lines_of(pages: Iterable[str]) -> set[str]:
    """Every line of some pages."""
    return {line for page in pages for line in page.splitlines()}


def cut_pieces(ids: Sequence[int], length: int) -> Pieces:
    """Cut ids into pieces of one length; a shorter rest is dropped.

    >>> cut_pieces([1, 2, 3, 4, 5], 2)
    [[1, 2], [3, 4]]
    """
    return [list(ids[start : start + length]) for start in range(0, len(ids) - length + 1, length)]


def draw_pieces(pages: Sequence[str], tokenize: Tokenize, length: int, count: int, seed: int, name: str) -> Pieces:
    """Cut pages, in an order of their own, into pieces until there are enough.

    Args:
        pages: the same ``seed`` takes them in the same order.
        tokenize: applied to one page after another, no more of them than needed.
        length: tokens of a piece.
        count: pieces wanted.
        seed: of the order of pages.
        name: of the text, for messages.

    Raises:
        ValueError: the pages do not hold so many pieces.
    """
    order = list(range(len(pages)))
    random.Random(seed).shuffle(order)
    pieces: Pieces = []
    for page in order:
        pieces += cut_pieces(tokenize(pages[page]), length)
        if len(pieces) >= count:
            return pieces[:count]
    raise ValueError(f"text {name!r} must hold {count} pieces of {length} tokens, got {len(pieces)}")


def split_text(
    pages: Mapping[str, Sequence[str]],
    general: str,
    tokenize: Tokenize,
    length: int,
    num_train: int,
    num_held_out: int,
    every: int = 10,
) -> Iterator[tuple[str, Pieces, Pieces]]:
    """Cut parallel pages into pieces to train on and pieces held out, language by language.

    Lines that also stand in the general language are no translation and are left out of every other; lines that also
    stand on a page to train on are left out of what is held out.

    Args:
        pages: of each language, the same page at the same place.
        general: the language that the others were translated from.
        tokenize: see `draw_pieces`.
        length: tokens of a piece, special tokens not included.
        num_train: pieces to train on, of each language.
        num_held_out: pieces held out, of each language.
        every: one page of so many is held out.

    Yields:
        Language, pieces to train on, pieces held out.

    Raises:
        ValueError: languages differ in the number of their pages, or one has too little text.
    """
    counts = {language: len(texts) for language, texts in pages.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"languages must have the same pages, got {counts} of them")
    untranslated = lines_of(pages[general])
    for language, texts in pages.items():
        own = texts if language == general else [without_lines(page, untranslated) for page in texts]
        train = [page for number, page in enumerate(own) if not is_held_out(number, every)]
        trained = lines_of(train)
        held_out = [without_lines(page, trained) for number, page in enumerate(own) if is_held_out(number, every)]
        yield (
            language,
            draw_pieces(train, tokenize, length, num_train, 0, f"{language}, to train on"),
            draw_pieces(held_out, tokenize, length, num_held_out, 0, f"{language}, held out"),
        )


def write_pieces(pieces: Pieces, path: Path) -> None:
    """Write pieces as JSON lines that `TextDataModule` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces), encoding="utf-8")


def read_pieces(path: Path) -> Pieces:
    """Read what `write_pieces` wrote."""
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def help_pages(languages: Iterable[str]) -> dict[str, list[str]]:
    """Pages of LibreOffice's help in some languages, out of the examples; English is ``en-us``.

    Raises:
        ValueError: some are not on this machine; the message has the one command that fetches them.
    """
    missing, pages = [], {}
    for language in languages:
        try:
            example, path = find_example(f"help-{language}")
        except ValueError:
            missing.append(f"help-{language}")
            continue
        assert example.documents is not None
        pages[language] = list(example.documents(path))
    if missing:
        raise ValueError(f"texts are not on this machine yet: run lit-encoders examples {' '.join(missing)}")
    return pages
