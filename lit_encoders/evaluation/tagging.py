"""Tagging words: which piece stands for a word, and strict F1 over spans.

A word has the tag that is predicted at its first piece; one that was cut off has "O", so that its span is missed.
Words are read as running text, with a blank between two: as the model read them in pretraining.
Spans are those of `seqeval` in its strict mode, under a scheme that the result names: gold B I against I I is a hit for
a lenient reader, and none in IOB2.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from lit_encoders.evaluation.items import TaggedWords
from lit_encoders.evaluation.scores import Combine, Scores, class_scores, column_ratio, f1, mean_of_known

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lit_encoders.evaluation.scores import FloatArray

# "words": tags that mark no spans, such as parts of speech.
Scheme = Literal["IOB1", "IOB2", "IOE1", "IOE2", "IOBES", "BILOU", "words"]
OUTSIDE = "O"
# What stands for a word that was cut off where no tag means that nothing was found.
MISSED = ""


def first_pieces(word_numbers: Sequence[int | None], num_words: int) -> list[int]:
    """Place of the first piece of each word; -1 for one that has none.

    Args:
        word_numbers: word of each piece, None for pieces of no word.
        num_words: how many words there are.

    >>> first_pieces([None, 0, 0, 2, None], 4)
    [1, -1, 3, -1]
    """
    places = [-1] * num_words
    for place, word in reversed(list(enumerate(word_numbers))):
        if word is not None:
            places[word] = place
    return places


def word_numbers(words: Sequence[str], pieces: Sequence[tuple[int, int]]) -> list[int | None]:
    """Word of each piece of words that are joined by blanks; None for a piece of nothing but blanks.

    Args:
        words: of a sentence.
        pieces: first and one past the last character of each.

    >>> word_numbers(["a", "", "bc"], [(0, 1), (1, 2), (2, 4), (4, 5)])
    [0, None, 2, 2]
    """
    starts, start = [], 0
    for word in words:
        starts.append(start)
        start += len(word) + 1
    text = " ".join(words)
    found: list[int | None] = []
    for first, end in pieces:
        # A piece may begin with the blank before its word.
        first = next((place for place in range(first, end) if not text[place].isspace()), end)
        found.append(bisect_right(starts, first) - 1 if first < end else None)
    return found


def check_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that does not know which characters its pieces are."""
    if not tokenizer.is_fast:
        raise ValueError(
            "model must have a fast tokenizer for tagging, which knows where its pieces lie, got a slow one"
        )


def tokenise_words(
    tokenizer: PreTrainedTokenizerBase, words: Sequence[str], sequence_length: int
) -> tuple[list[int], list[int]]:
    """Token ids of a sentence of words with its special tokens, and the place of each word's first piece.

    Args:
        tokenizer: that knows the words of its pieces (a fast one).
        words: of the sentence.
        sequence_length: most tokens, above the number of special ones; the rest is cut off.

    Raises:
        ValueError: the tokenizer does not know the words of its pieces.
    """
    from lit_encoders.data.tokens import affixes

    check_fast(tokenizer)
    around = affixes(tokenizer)
    text = " ".join(words)
    # Not `is_split_into_words`: byte-level BPE would read the words without the blanks between them.
    options = {"add_special_tokens": False, "split_special_tokens": True, "return_offsets_mapping": True}
    found: Any = tokenizer(text, **options, verbose=False)
    content = sequence_length - len(around.prefix) - len(around.suffix)
    before = len(around.prefix)
    places = first_pieces(word_numbers(words, found["offset_mapping"][:content]), len(words))
    ids = [*around.prefix, *found["input_ids"][:content], *around.suffix]
    return ids, [place if place < 0 else place + before for place in places]


def span_scores(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], scheme: Scheme, tags: Sequence[str] = ()
) -> Scores:
    """Micro and macro F1 over spans, and F1 of each type; an item is a sentence.

    Macro F1 is over types that are there or were predicted, as `seqeval` has it.

    Args:
        gold: tags of each sentence.
        predicted: as many for each.
        scheme: how tags make spans.
        tags: all that may stand there, so that every run has the same metrics.

    Raises:
        ValueError: no such scheme, lengths differ, or seqeval is not installed.
    """
    check_scheme(scheme)
    if [len(tags) for tags in gold] != [len(tags) for tags in predicted]:
        raise ValueError("predicted must have a tag for each tag of gold, got other lengths")
    if scheme == "words":
        return _word_scores(gold, predicted, tags)
    truth, said = (spans(tags, scheme) for tags in (gold, predicted))
    may_be = {tag[1:].strip("-") or "_" for tag in tags if tag != OUTSIDE}
    types = sorted(may_be | {span[0] for found in (*truth, *said) for span in found})
    numbers = {name: place for place, name in enumerate(types)}
    size = len(types)
    counts = np.zeros((len(gold), 3 * size))
    for row, (ours, theirs) in enumerate(zip(truth, said, strict=True)):
        for offset, found in ((0, ours & theirs), (size, theirs - ours), (2 * size, ours - theirs)):
            for span in found:
                counts[row, offset + numbers[span[0]]] += 1

    def per_type(sums: FloatArray) -> FloatArray:
        return f1(sums[..., :size], sums[..., size : 2 * size], sums[..., 2 * size :])

    def micro(sums: FloatArray) -> FloatArray:
        hits, wrong, missed = (sums[..., part * size : (part + 1) * size].sum(-1) for part in range(3))
        return np.nan_to_num(f1(hits, wrong, missed))

    metrics: dict[str, Combine] = {"span_f1": micro, "macro_f1": lambda sums: mean_of_known(per_type(sums))}
    for name, place in numbers.items():
        metrics[f"f1/{name}"] = lambda sums, place=place: np.nan_to_num(per_type(sums)[..., place])  # type: ignore[misc]
    # A sentence without spans, in which none was found, is right.
    own = np.array([float(micro(row)) if row.sum() else 1.0 for row in counts])
    return Scores(counts, metrics, own)


def _word_scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], tags: Sequence[str]) -> Scores:
    flat = [[tag for sentence in every for tag in sentence] for every in (gold, predicted)]
    words = class_scores(flat[0], flat[1], sorted({*flat[0], *flat[1], *tags} - {MISSED}))
    ends = np.cumsum([len(sentence) for sentence in gold])
    sums = np.vstack([np.zeros(words.counts.shape[1]), words.counts.cumsum(0)])
    counts = sums[ends] - sums[np.concatenate([[0], ends[:-1]])]
    right = column_ratio(-2, -1)
    return Scores(counts, words.metrics, right(counts))


def spans(sentences: Sequence[Sequence[str]], scheme: Scheme) -> list[set[tuple[str, int, int]]]:
    """Type, first word and end of each span of each sentence, by `seqeval`'s strict reading of the scheme."""
    try:
        from seqeval import scheme as schemes
        from seqeval.scheme import Entities
    except ImportError:
        raise ValueError("tagging needs seqeval: pip install -c constraints.txt -e '.[eval]'") from None
    found = Entities([list(tags) for tags in sentences], scheme=getattr(schemes, scheme))
    return [{(span.tag, span.start, span.end) for span in sentence} for sentence in found.entities]


def check_scheme(scheme: Scheme, items: Sequence[TaggedWords] = (), key: str = "scheme") -> None:
    """Refuse what is no scheme, and tags that the scheme does not have.

    Raises:
        ValueError: naming the tag.
    """
    if scheme not in get_args(Scheme):
        raise ValueError(f"{key} must be one of {', '.join(get_args(Scheme))}, got {scheme!r}")
    if scheme == "words":
        return
    prefixes = {"IOBES": "IOBES", "BILOU": "BILOU", "IOE1": "IOE", "IOE2": "IOE"}.get(scheme, "IOB")
    for item in items:
        # The letter alone, or with a hyphen and a type.
        for tag in item.tags:
            if tag.partition("-")[0] not in set(prefixes):
                raise ValueError(
                    f"{key} {scheme} must have tags that begin with one of {', '.join(prefixes)}, got {tag!r}"
                )
