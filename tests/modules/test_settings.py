"""Settings that are refused, and the words that say so."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest

from lit_encoders import MaskStream
from lit_encoders.modules.settings import check_choice, check_masking, check_optimizer, check_stream_settings

MASKING: dict[str, Any] = {
    "mask_ratio": 1.0, "val_mask_ratio": 0.15, "corruption_ratio": None, "corruption": (0.8, 0.1, 0.1)
}  # fmt: skip
OPTIMIZER: dict[str, Any] = {
    "learning_rate": 0.0, "betas": (0.0, 0.98), "eps": 1e-6, "weight_decay": 0.05, "layer_decay": None
}  # fmt: skip
STREAMS: dict[str, Any] = {
    "streams": [MaskStream("all", 0.15, 1.0)], "aggregation": "tokens", "shares_of": "documents",
    "whole_words": False, "distils": False,
}  # fmt: skip


def test_the_ends_of_a_range_that_belong_to_it() -> None:
    check_choice("size", "small", Literal["small", "large"])
    check_masking(**MASKING)
    check_masking(**MASKING | {"corruption_ratio": 0.0, "corruption": (0, 0, 1)})
    check_optimizer(**OPTIMIZER)
    check_optimizer(**OPTIMIZER | {"layer_decay": 1.0})
    check_stream_settings(**STREAMS)
    check_stream_settings(**STREAMS | {"streams": [], "whole_words": True, "aggregation": "streams"})
    check_stream_settings(**STREAMS | {"streams": [MaskStream("all", 0.15, 1.0, distill=True)], "distils": True})


def test_a_word_that_is_none_of_those_known() -> None:
    with pytest.raises(ValueError, match=r"^model.size must be one of small, large, got 'medium'$"):
        check_choice("size", "medium", Literal["small", "large"])


@pytest.mark.parametrize(
    ("check", "usual", "name", "value", "rule"),
    [
        (check_masking, MASKING, "mask_ratio", 0.0, r"in \(0, 1\]"),
        (check_masking, MASKING, "val_mask_ratio", math.nan, r"in \(0, 1\]"),
        (check_masking, MASKING, "corruption_ratio", -0.1, r"in \[0, 1\]"),
        (check_masking, MASKING, "corruption", (1.2, -0.1, -0.1), "three shares that sum to 1"),
        (check_optimizer, OPTIMIZER, "learning_rate", math.inf, "at least 0 and finite"),
        (check_optimizer, OPTIMIZER, "eps", -1e-6, "at least 0 and finite"),
        (check_optimizer, OPTIMIZER, "weight_decay", math.nan, "at least 0 and finite"),
        (check_optimizer, OPTIMIZER, "betas", (0.9, 1.0), r"in \[0, 1\)"),
        (check_optimizer, OPTIMIZER, "layer_decay", 0.0, r"in \(0, 1\]"),
    ],
)
def test_numbers_out_of_range(check: Any, usual: dict[str, Any], name: str, value: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=f"^model.{name} must be {rule}, got "):
        check(**usual | {name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"streams": [MaskStream("all", 0.15, 0.5)]}, "shares that sum to 1, got 0.5"),
        ({"streams": [], "aggregation": "sum"}, "model.aggregation must be one of tokens, streams, inputs, got 'sum'"),
        ({"shares_of": "words"}, "model.shares_of must be one of documents, tokens, got 'words'"),
        ({"streams": [MaskStream("all", 0.15, 1.0, head="clm")]}, "must not name a head 'clm'"),
        ({"whole_words": True, "aggregation": "streams"}, "'tokens' or 'inputs' with model.whole_words"),
        ({"streams": [MaskStream("all", 0.15, 1.0, distill=True)]}, "only in a LitKD, .* got distill in 'all'"),
    ],
)
def test_streams_that_the_rest_cannot_serve(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_stream_settings(**STREAMS | change)
