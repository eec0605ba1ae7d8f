"""Tagging words: which piece stands for a word, and strict F1 over spans.

A word has the tag that is predicted at its first piece; one that was cut off has "O", so that its span is missed.
Spans are those of `seqeval` in its strict mode, under a scheme that the result names: gold B I against I I is a hit for
a lenient reader, and none in IOB2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from lit_encoders.evaluation.items import TaggedWords
from lit_encoders.evaluation.scores import Combine, Scores, class_scores, column_ratio, f1

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lit_encoders.evaluation.scores import FloatArray

# "words": tags that mark no spans, such as parts of speech.
Scheme = Literal["IOB1", "IOB2", "IOE1", "IOE2", "IOBES", "BILOU", "words"]
OUTSIDE = "O"


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


def tokenise_words(
    tokenizer: PreTrainedTokenizerBase, words: Sequence[str], sequence_length: int
) -> tuple[list[int], list[int]]:
    """Token ids of a sentence of words with its special tokens, and the place of each word's first piece.

    Args:
        tokenizer: that knows the words of its pieces (a fast one).
        words: of the sentence.
        sequence_length: most tokens; the rest is cut off.

    Raises:
        ValueError: the tokenizer does not know the words of its pieces.
    """
    from lit_encoders.data.tokens import affixes

    if not tokenizer.is_fast:
        raise ValueError(
            "model must have a fast tokenizer for tagging, which knows the words of its pieces, got a slow one"
        )
    around = affixes(tokenizer)
    found: Any = tokenizer(
        list(words), is_split_into_words=True, add_special_tokens=False, split_special_tokens=True, verbose=False
    )
    content = sequence_length - len(around.prefix) - len(around.suffix)
    before = len(around.prefix)
    places = first_pieces(found.word_ids()[:content], len(words))
    ids = [*around.prefix, *found["input_ids"][:content], *around.suffix]
    return ids, [place if place < 0 else place + before for place in places]


def span_scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], scheme: Scheme) -> Scores:
    """Micro and macro F1 over spans, and F1 of each type; an item is a sentence.

    Args:
        gold: tags of each sentence.
        predicted: as many for each.
        scheme: how tags make spans.

    Raises:
        ValueError: no such scheme, lengths differ, or seqeval is not installed.
    """
    check_scheme(scheme)
    if [len(tags) for tags in gold] != [len(tags) for tags in predicted]:
        raise ValueError("predicted must have a tag for each tag of gold, got other lengths")
    if scheme == "words":
        return _word_scores(gold, predicted)
    truth, said = (spans(tags, scheme) for tags in (gold, predicted))
    types = sorted({span[0] for found in (*truth, *said) for span in found})
    numbers = {name: place for place, name in enumerate(types)}
    size = len(types)
    counts = np.zeros((len(gold), 3 * size))
    for row, (ours, theirs) in enumerate(zip(truth, said, strict=True)):
        for offset, found in ((0, ours & theirs), (size, theirs - ours), (2 * size, ours - theirs)):
            for span in found:
                counts[row, offset + numbers[span[0]]] += 1

    def per_type(sums: FloatArray) -> FloatArray:
        return np.nan_to_num(f1(sums[..., :size], sums[..., size : 2 * size], sums[..., 2 * size :]))

    def micro(sums: FloatArray) -> FloatArray:
        hits, wrong, missed = (sums[..., part * size : (part + 1) * size].sum(-1) for part in range(3))
        return np.nan_to_num(f1(hits, wrong, missed))

    metrics: dict[str, Combine] = {"span_f1": micro, "macro_f1": lambda sums: per_type(sums).sum(-1) / max(size, 1)}
    for name, place in numbers.items():
        metrics[f"f1/{name}"] = lambda sums, place=place: per_type(sums)[..., place]  # type: ignore[misc]
    # A sentence without spans, in which none was found, is right.
    own = np.array([float(micro(row)) if row.sum() else 1.0 for row in counts])
    return Scores(counts, metrics, own)


def _word_scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> Scores:
    flat = [[tag for tags in every for tag in tags] for every in (gold, predicted)]
    words = class_scores(flat[0], flat[1], sorted({*flat[0], *flat[1]}))
    ends = np.cumsum([len(tags) for tags in gold])
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
        for tag in item.tags:
            if tag.partition("-")[0] not in prefixes or not tag:
                raise ValueError(
                    f"{key} {scheme} must have tags that begin with one of {', '.join(prefixes)}, got {tag!r}"
                )
