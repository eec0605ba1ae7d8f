"""Token stores made of given ids or lengths."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lit_encoders.data.tokens import TokenStore, write_stores

WORDS = [f"w{number}" for number in range(90)]


@pytest.fixture
def make_store(tmp_path: Path, tokenizer: Any) -> Callable[..., TokenStore]:
    """Write texts to a store and open it."""

    def make(texts: Sequence[str], name: str = "store") -> TokenStore:
        write_stores(texts, tokenizer, lambda text: "train", ("train",), tmp_path / name)
        return TokenStore(tmp_path / name / "train")

    return make


@pytest.fixture
def store_of_lengths(make_store: Callable[..., TokenStore]) -> Callable[..., TokenStore]:
    """A store whose documents have these numbers of words, each document's words its own."""

    def make(lengths: Sequence[int], name: str = "store") -> TokenStore:
        texts = [
            " ".join(WORDS[(document * 31 + place) % 90] for place in range(length))
            for document, length in enumerate(lengths)
        ]
        return make_store(texts, name)

    return make
