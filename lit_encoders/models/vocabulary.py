"""Tokenizers, and what masking has to know of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lit_encoders.objectives.masking import MaskVocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What the files of a tokenizer begin with, of whatever kind.
_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece")


def load_tokenizer(source: str, key: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or hub name.

    Args:
        source: folder or hub name.
        key: the setting that the user wrote, for messages.

    Raises:
        ValueError: there is none.
    """
    from transformers import AutoTokenizer

    folder = Path(source)
    if folder.is_dir() and not any(file.name.startswith(_TOKENIZER_FILES) for file in folder.iterdir()):
        # transformers would make one up out of the special tokens alone.
        raise ValueError(f"{key} must be a folder or hub name with a tokenizer, got {source!r} (no tokenizer files)")
    try:
        return AutoTokenizer.from_pretrained(source)  # type: ignore[no-any-return]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{key} must be a folder or hub name with a tokenizer, got {source!r} ({reason})") from error


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Refuse a tokenizer whose ids the model has no embeddings for.

    Raises:
        ValueError: with both sizes. A model may have more rows than the tokenizer has tokens (padded embeddings).
    """
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        raise ValueError(
            "model.tokenizer must have the model's vocabulary: the largest token id must be below "
            f"{vocab_size}, got {largest}"
        )


def check_same_vocabulary(tokenizer: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer whose ids mean something else than the model's own tokenizer's.

    Raises:
        ValueError: with both sizes and the number of tokens that differ.
    """
    given, expected = tokenizer.get_vocab(), own.get_vocab()
    different = sum(given.get(token) != number for token, number in expected.items())
    if different:
        raise ValueError(
            f"model.tokenizer must have the model's vocabulary ({len(expected)} tokens), got {len(given)} tokens, "
            f"{different} of the model's missing or under another id"
        )


def load_model_tokenizer(model: str | None, named: str | None, vocab_size: int) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer, or the one named in its place, and check it against the model's vocabulary.

    Args:
        model: folder or hub name; None for a model made from a configuration, which brings no tokenizer.
        named: folder or hub name of another tokenizer; None takes the model's.
        vocab_size: rows of the model's embeddings.

    Raises:
        ValueError: there is none, or it has another vocabulary.
    """
    if named is None and model is None:
        raise ValueError("model.tokenizer must be named where model.backbone is a configuration, got None")
    tokenizer = load_tokenizer(named or str(model), "model.tokenizer")
    check_vocabulary(tokenizer, vocab_size)
    if named is not None and model is not None:
        try:
            expected = load_tokenizer(model, "model.backbone")
        except ValueError:
            return tokenizer  # A backbone without a tokenizer of its own has nothing to compare with.
        check_same_vocabulary(tokenizer, expected)
    return tokenizer


def continuations(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> torch.Tensor:
    """Ids that are written onto the token before them, bool (V,): what a word consists of, for whole-word masking.

    WordPiece marks them with "##". Byte-level BPE and SentencePiece mark the start of a word instead, with a space; a
    piece without the mark continues a word where it begins with a letter or a digit, so punctuation stands alone. In a
    vocabulary without either mark every token is a word.
    """
    vocabulary = tokenizer.get_vocab()
    table = torch.zeros(vocab_size, dtype=torch.bool)
    spaces = ("\u0120", "\u2581")
    if any(token.startswith("##") for token in vocabulary):
        table[[number for token, number in vocabulary.items() if token.startswith("##")]] = True
    elif any(token.startswith(spaces) for token in vocabulary):
        bare = {token: number for token, number in vocabulary.items() if not token.startswith(spaces)}
        table[[number for token, number in bare.items() if token[:1].isalnum()]] = True
    return table


def mask_vocabulary(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, mask_token: str | None = None
) -> MaskVocabulary | None:
    """Which ids masking may touch and write; None for a tokenizer without a mask token.

    Args:
        tokenizer: of the model.
        vocab_size: rows of its embeddings; ids that the tokenizer does not know are never drawn.
        mask_token: token to mask with where the tokenizer has none of its own.

    Raises:
        ValueError: the mask token named is not in the vocabulary.
    """
    mask_token_id = tokenizer.mask_token_id
    if mask_token is not None:
        mask_token_id = tokenizer.get_vocab().get(mask_token)
        if mask_token_id is None:
            raise ValueError(f"model.mask_token must be a token of the vocabulary, got {mask_token!r}")
    if mask_token_id is None:
        return None
    special = torch.zeros(vocab_size, dtype=torch.bool)
    special[tokenizer.all_special_ids] = True
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[list(tokenizer.get_vocab().values())] = True
    known[mask_token_id] = False
    return MaskVocabulary(special, (known & ~special).nonzero()[:, 0], mask_token_id)
