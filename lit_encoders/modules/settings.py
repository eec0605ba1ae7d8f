"""Settings of a LitEncoder that are refused: words and numbers out of range, and streams that the rest cannot serve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

from lit_encoders.objectives.streams import Aggregation, MaskStream, SharesOf, check_streams


def check_choice(name: str, value: object, words: Any) -> None:
    """Refuse a value that is none of the words of a ``Literal``.

    Args:
        name: of the setting, under ``model``.
        value: that the user gave.
        words: the ``Literal``.

    Raises:
        ValueError: it is another one.
    """
    if value not in get_args(words):
        raise ValueError(f"model.{name} must be one of {', '.join(get_args(words))}, got {value!r}")


def check_masking(
    mask_ratio: float, val_mask_ratio: float, corruption_ratio: float | None, corruption: Sequence[float]
) -> None:
    """Refuse ratios and shares of masking that are out of their ranges.

    Raises:
        ValueError: with the name of the setting and its range.
    """
    for name, ratio in {"mask_ratio": mask_ratio, "val_mask_ratio": val_mask_ratio}.items():
        if not 0 < ratio <= 1:
            raise ValueError(f"model.{name} must be in (0, 1], got {ratio}")
    if corruption_ratio is not None and not 0 <= corruption_ratio <= 1:
        raise ValueError(f"model.corruption_ratio must be in [0, 1], got {corruption_ratio}")
    if min(corruption) < 0 or not math.isclose(sum(corruption), 1.0):
        raise ValueError(f"model.corruption must be three shares that sum to 1, got {list(corruption)}")


def check_optimizer(
    learning_rate: float, betas: Sequence[float], eps: float, weight_decay: float, layer_decay: float | None
) -> None:
    """Refuse settings of the optimizer that are out of their ranges.

    Raises:
        ValueError: with the name of the setting and its range.
    """
    for name, value in {"learning_rate": learning_rate, "eps": eps, "weight_decay": weight_decay}.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"model.{name} must be at least 0 and finite, got {value}")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"model.betas must be in [0, 1), got {list(betas)}")
    if layer_decay is not None and not 0 < layer_decay <= 1:
        raise ValueError(f"model.layer_decay must be in (0, 1], got {layer_decay}")


def check_stream_settings(
    streams: Sequence[MaskStream], aggregation: Aggregation, shares_of: SharesOf, whole_words: bool, distils: bool
) -> None:
    """Refuse streams that make no sense, together or beside the module's other settings.

    Args:
        streams: of the run; none is fine.
        aggregation: how their losses become one.
        shares_of: what their shares are of.
        whole_words: whether all pieces of a word are masked or none.
        distils: whether the module has a teacher.

    Raises:
        ValueError: naming the setting to change.
    """
    if streams:
        check_streams(streams)
    check_choice("aggregation", aggregation, Aggregation)
    check_choice("shares_of", shares_of, SharesOf)
    if any(stream.head == "clm" for stream in streams):
        raise ValueError("model.streams must not name a head 'clm', which is that of CLM steps, got one that does")
    if streams and whole_words and aggregation == "streams":
        raise ValueError(
            "model.aggregation must be 'tokens' or 'inputs' with model.whole_words (how many targets words make is "
            "not known ahead), got 'streams'"
        )
    distilled = [stream.name for stream in streams if stream.distill]
    if distilled and not distils:
        raise ValueError(
            f"model.streams may distill only in a LitKD, which has a teacher, got distill in {distilled[0]!r}"
        )
