"""Span scores against seqeval's, and words against what a tokenizer makes of running text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from seqeval import scheme as schemes
from seqeval.metrics import f1_score
from sklearn.metrics import accuracy_score
from sklearn.metrics import f1_score as class_f1_score

from lit_encoders.evaluation.items import TaggedWords
from lit_encoders.evaluation.tagging import (
    MISSED,
    Scheme,
    check_fast,
    check_scheme,
    span_scores,
    tokenise_words,
    word_numbers,
)

SPAN_SCHEMES = [name for name in get_args(Scheme) if name != "words"]
LETTERS = {"IOB1": "IB", "IOB2": "IB", "IOE1": "IE", "IOE2": "IE", "IOBES": "IBES", "BILOU": "BILU"}


def draw_tags(scheme: str, count: int, seed: int) -> tuple[list[list[str]], list[list[str]]]:
    """Tags in any order, most of them against the scheme's rules; half of the predicted ones are right."""
    generator = np.random.default_rng(seed)
    tags = ["O", *(f"{letter}-{kind}" for letter in LETTERS[scheme] for kind in ("X", "Y-Z"))]
    gold = [generator.choice(tags, size=generator.integers(1, 9)).tolist() for _ in range(count)]
    predicted = [[str(generator.choice(tags)) if generator.random() < 0.4 else tag for tag in row] for row in gold]
    return gold, predicted


def expected_scores(gold: list[list[str]], predicted: list[list[str]], scheme: str) -> dict[str, float]:
    options: dict[str, Any] = {"mode": "strict", "scheme": getattr(schemes, scheme), "zero_division": 0}
    # By name, in the order of names.
    kinds = f1_score(gold, predicted, average=None, **options)
    names = sorted({span.tag for side in (gold, predicted) for spans in entities(side, scheme) for span in spans})
    return {
        "span_f1": f1_score(gold, predicted, average="micro", **options),
        "macro_f1": f1_score(gold, predicted, average="macro", **options),
        **{f"f1/{name}": value for name, value in zip(names, kinds, strict=True)},
    }


def entities(tags: list[list[str]], scheme: str) -> Any:
    return schemes.Entities(tags, scheme=getattr(schemes, scheme)).entities


@pytest.mark.parametrize("scheme", SPAN_SCHEMES)
def test_span_scores_are_those_of_seqeval(scheme: Scheme) -> None:
    gold, predicted = draw_tags(scheme, 60, seed=0)
    scores = span_scores(gold, predicted, scheme)
    found = {name: scores.value(name) for name in scores.metrics}
    assert found == pytest.approx(expected_scores(gold, predicted, scheme))
    assert 0 < found["span_f1"] < 1
    for points, *rows in zip(scores.points, gold, predicted, strict=True):
        # A sentence without spans, in which none was found, is right.
        some = any(spans for row in rows for spans in entities([row], scheme))
        assert points == pytest.approx(expected_scores(rows[:1], rows[1:], scheme)["span_f1"] if some else 1.0)


@pytest.mark.parametrize("scheme", SPAN_SCHEMES)
def test_span_scores_of_resampled_sentences_are_those_of_seqeval(scheme: Scheme) -> None:
    """A type that no sentence drawn has is left out of macro F1."""
    gold, predicted = draw_tags(scheme, 5, seed=1)
    gold[0], predicted[0] = ["O", "O"], ["O", "O"]
    scores = span_scores(gold, predicted, scheme)
    for weights in np.random.default_rng(0).multinomial(5, np.full(5, 0.2), size=15):
        items = np.repeat(np.arange(5), weights)
        expected = expected_scores([gold[i] for i in items], [predicted[i] for i in items], scheme)
        sums = weights @ scores.counts
        for name in ("span_f1", "macro_f1"):
            assert float(scores.metrics[name](sums)) == pytest.approx(expected[name])


def test_e01_strict_reading_takes_no_span_without_its_beginning() -> None:
    gold, predicted = [["B-X", "I-X"]], [["I-X", "I-X"]]
    assert span_scores(gold, predicted, "IOB2").value("span_f1") == 0.0
    # What a lenient reader says, which is not what a result of ours may mean.
    assert f1_score(gold, predicted) == 1.0
    assert span_scores(gold, predicted, "IOB1").value("span_f1") == 0.0
    assert span_scores([["I-X", "I-X"]], predicted, "IOB1").value("span_f1") == 1.0


def test_every_run_has_the_same_metrics() -> None:
    """Whatever it predicted: figures of several seeds are set side by side by their names."""
    tags = ["B-X", "B-Y", "B", "I", "O"]
    names = {"span_f1", "macro_f1", "f1/X", "f1/Y", "f1/_"}
    for said in ("B-X", "B-Y", "O"):
        scores = span_scores([["B-X"]], [[said]], "IOB2", tags)
        assert set(scores.metrics) == names
        assert scores.value("f1/Y") == 0.0
    assert span_scores([["B-X"]], [["B-X"]], "IOB2", tags).value("macro_f1") == 1.0
    assert set(span_scores([["n"]], [["v"]], "words", ["n", "v", "d"]).metrics) == {
        *("accuracy", "macro_f1", "f1/n", "f1/v", "f1/d")
    }


def test_words_are_scored_as_classes() -> None:
    generator = np.random.default_rng(0)
    gold = [generator.choice(["n", "v", "d"], size=size).tolist() for size in generator.integers(1, 9, size=40)]
    predicted = [[str(generator.choice(["n", "v", "d", tag])) for tag in row] for row in gold]
    scores = span_scores(gold, predicted, "words")
    flat = [[tag for row in side for tag in row] for side in (gold, predicted)]
    assert scores.value("accuracy") == pytest.approx(accuracy_score(*flat))
    assert scores.value("macro_f1") == pytest.approx(class_f1_score(*flat, average="macro"))
    assert scores.points.tolist() == pytest.approx(
        [accuracy_score(*rows) for rows in zip(gold, predicted, strict=True)]
    )


def test_word_that_was_cut_off_is_wrong_and_no_class() -> None:
    scores = span_scores([["n", "v"]], [["n", MISSED]], "words")
    assert set(scores.metrics) == {"accuracy", "macro_f1", "f1/n", "f1/v"}
    assert (scores.value("accuracy"), scores.value("macro_f1")) == (0.5, 0.5)


# Words and pieces


def byte_level_tokenizer(text: str) -> Any:
    """Byte-level BPE, as RoBERTa and ModernBERT have it: a piece that begins a word holds the blank before it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    specials = ["[CLS]", "[SEP]", "[MASK]"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=specials, initial_alphabet=alphabet)
    backend.train_from_iterator([text] * 5, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]", unk_token="[MASK]"
    )


def word_piece_tokenizer() -> Any:
    """WordPiece, as BERT has it: punctuation stands alone, and accents are stripped."""
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", "-", ".", "paris"]
    vocabulary = {word: place for place, word in enumerate(dict.fromkeys([*words, *(f"##{w}" for w in words[5:31])]))}
    return BertTokenizer(vocab=vocabulary)


SENTENCE = ["The", "Paris-born", "é", "cat", "sat", "\N{SNOWMAN}x", "."]


@pytest.mark.parametrize("make", [lambda: byte_level_tokenizer(" ".join(SENTENCE)), word_piece_tokenizer])
def test_words_are_read_as_running_text(make: Any) -> None:
    tokenizer = make()
    ids, places = tokenise_words(tokenizer, SENTENCE, 128)
    assert ids == tokenizer(" ".join(SENTENCE))["input_ids"]
    assert places == sorted(set(places))
    # Each first piece begins its word.
    offsets = tokenizer(" ".join(SENTENCE), return_offsets_mapping=True)["offset_mapping"]
    starts = [len(" ".join(SENTENCE[:number])) + (number > 0) for number in range(len(SENTENCE))]
    for place, start, word in zip(places, starts, SENTENCE, strict=True):
        assert offsets[place][0] in (start, start - 1)
        assert start < offsets[place][1] <= start + len(word)


def test_words_beyond_the_length_have_no_place(tokenizer: Any) -> None:
    words = [f"w{number}" for number in range(10)]
    ids, places = tokenise_words(tokenizer, words, 6)
    assert ids == tokenizer(" ".join(words[:4]))["input_ids"]
    assert places == [1, 2, 3, 4, -1, -1, -1, -1, -1, -1]


def test_words_without_a_piece_have_no_place(tokenizer: Any) -> None:
    assert tokenise_words(tokenizer, ["w1", "", " ", "w2 w3", "w4"], 16) == ([2, 6, 7, 8, 9, 3], [1, -1, -1, 2, 4])


def test_special_tokens_in_the_text_are_text() -> None:
    ids, places = tokenise_words(byte_level_tokenizer("a cat"), ["[SEP]", "a"], 64)
    assert (ids[0], ids[-1]) == (0, 1)
    assert not {0, 1} & {*ids[1:-1]}
    assert places[0] == 1


def test_piece_belongs_to_the_word_of_its_first_letter() -> None:
    # "ab cd": a piece with the blank before it, one of nothing but the blank, one over two words.
    assert word_numbers(["ab", "cd"], [(0, 2), (2, 3), (2, 4), (4, 5)]) == [0, None, 1, 1]
    assert word_numbers(["ab", "cd"], [(1, 4)]) == [0]


def test_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match=r"^model must have a fast tokenizer for tagging, .*, got a slow one$"):
        check_fast(Slow())  # type: ignore[arg-type]


# Mistakes


@pytest.mark.parametrize("tag", ["X-PER", "IO-PER", "-PER", "b-PER", "S-PER"])
def test_tag_outside_the_scheme_is_said(tag: str) -> None:
    items = [TaggedWords(("a", "b"), ("B-PER", tag))]
    with pytest.raises(ValueError, match=rf"^scheme IOB2 must have tags that begin with one of I, O, B, got '{tag}'$"):
        check_scheme("IOB2", items)
    check_scheme("words", items)


@pytest.mark.parametrize("scheme", SPAN_SCHEMES)
def test_tags_of_a_scheme_pass(scheme: Scheme) -> None:
    tags = ("O", *(f"{letter}{kind}" for letter in LETTERS[scheme] for kind in ("", "-X", "-X-Y")))
    check_scheme(scheme, [TaggedWords(("a",) * len(tags), tags)])


def test_unknown_scheme_and_other_lengths_are_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^scheme must be one of IOB1, .*, words, got 'BIO'$"):
        span_scores([], [], "BIO")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^predicted must have a tag for each tag of gold, got other lengths$"):
        span_scores([["O"]], [["O", "O"]], "IOB2")
