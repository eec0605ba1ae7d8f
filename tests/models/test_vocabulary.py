"""Tokenizers that fit their model, and the ids that masking may touch and write."""

from pathlib import Path
from typing import Any

import pytest

from lit_encoders.models.vocabulary import (
    check_same_vocabulary,
    check_vocabulary,
    continuations,
    load_tokenizer,
    mask_vocabulary,
)


def word_level(words: list[str], **specials: str) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=words[0], **specials)


def test_special_ids_and_ordinary_ids_part_the_vocabulary(tokenizer: Any) -> None:
    vocabulary = mask_vocabulary(tokenizer, vocab_size=95)
    assert vocabulary.special.nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert vocabulary.ordinary_ids.tolist() == list(range(5, 95))
    assert vocabulary.mask_token_id == 4


def test_rows_of_a_padded_embedding_are_neither(tokenizer: Any) -> None:
    """A model of 128 rows for 95 tokens: the rest is never drawn, and no special id either."""
    vocabulary = mask_vocabulary(tokenizer, vocab_size=128)
    assert vocabulary.special.shape == (128,)
    assert vocabulary.special.sum() == 5
    assert vocabulary.ordinary_ids.tolist() == list(range(5, 95))


def test_tokenizer_without_a_mask_token_has_no_vocabulary_to_mask() -> None:
    assert mask_vocabulary(word_level(["u", "a", "b"]), vocab_size=3) is None


def test_named_mask_token_is_masked_with_and_an_ordinary_target() -> None:
    """The word itself may stand in the text: the host counts it as eligible, so the device must too."""
    vocabulary = mask_vocabulary(word_level(["u", "a", "hole", "b"]), vocab_size=4, mask_token="hole")
    assert vocabulary.mask_token_id == 2
    assert vocabulary.special.tolist() == [True, False, False, False]
    assert vocabulary.ordinary_ids.tolist() == [1, 3]


def test_named_mask_token_wins_over_the_tokenizers_own() -> None:
    tokenizer = word_level(["u", "a", "hole", "m"], mask_token="m")
    vocabulary = mask_vocabulary(tokenizer, vocab_size=4, mask_token="hole")
    assert vocabulary.mask_token_id == 2
    assert vocabulary.ordinary_ids.tolist() == [1]


def test_unknown_mask_token_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"model\.mask_token must be a token of the vocabulary, got '<mask>'"):
        mask_vocabulary(tokenizer, vocab_size=95, mask_token="<mask>")


def test_added_special_tokens_are_special() -> None:
    tokenizer = word_level(["u", "a", "b"], mask_token="m", cls_token="c")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<doc>"]})
    vocabulary = mask_vocabulary(tokenizer, vocab_size=6)
    names = tokenizer.convert_ids_to_tokens(vocabulary.special.nonzero()[:, 0].tolist())
    assert set(names) == {"u", "m", "c", "<doc>"}


def test_tokenizer_must_fit_the_embeddings(tokenizer: Any) -> None:
    check_vocabulary(tokenizer, vocab_size=95)
    check_vocabulary(tokenizer, vocab_size=128)
    with pytest.raises(ValueError, match=r"model\.tokenizer .* must be below 94, got 94"):
        check_vocabulary(tokenizer, vocab_size=94)


def test_tokenizer_must_mean_the_same_ids() -> None:
    own = word_level(["u", "a", "b", "c"])
    check_same_vocabulary(word_level(["u", "a", "b", "c"]), own)
    check_same_vocabulary(word_level(["u", "a", "b", "c", "more"]), own)
    with pytest.raises(ValueError, match=r"\(4 tokens\), got 4 tokens, 2 of the model's missing or under another id"):
        check_same_vocabulary(word_level(["u", "b", "a", "c"]), own)
    with pytest.raises(ValueError, match=r"got 3 tokens, 1 of the model's missing"):
        check_same_vocabulary(word_level(["u", "a", "b"]), own)


def test_tokenizer_is_read_from_a_folder(bert_folder: Path, tokenizer: Any) -> None:
    assert load_tokenizer(str(bert_folder), "model.tokenizer").get_vocab() == tokenizer.get_vocab()


def test_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.tokenizer must be a folder or hub name with a tokenizer, got '.*'"):
        load_tokenizer(str(tmp_path), "data.tokenizer")


def test_what_continues_a_word() -> None:
    wordpiece = word_level(["u", "a", "##b", "c"])
    assert continuations(wordpiece, 4).tolist() == [False, False, True, False]
    byte_level = word_level(["u", "\u0120a", "b", ",", "\u0120,"])
    assert continuations(byte_level, 5).tolist() == [True, False, True, False, False]
    assert not continuations(word_level(["u", "a", "b"]), 3).any()
