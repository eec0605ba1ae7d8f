"""Causal language modelling targets: each token predicts the next one of its own document."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lit_encoders.objectives.masking import Targets


def clm_targets(input_ids: Tensor, segment_ids: Tensor, lengths: npt.NDArray[np.int64]) -> Targets:
    """Shift labels by one inside each document; a document's last token has no target.

    Args:
        input_ids: token ids, int64 (T,).
        segment_ids: segment of each token, ascending, int64 (T,); segments from ``len(lengths)`` on are padding.
        lengths: tokens of each document, on the host, (N,).

    >>> ids, segments = torch.tensor([10, 11, 12, 20, 21, 0]), torch.tensor([0, 0, 0, 1, 1, 2])
    >>> targets = clm_targets(ids, segments, np.array([3, 2]))
    >>> targets.rows.tolist(), targets.labels.tolist()
    ([0, 1, 3], [11, 12, 21])
    """
    counts = np.maximum(lengths - 1, 0)
    has_next = (segment_ids[:-1] == segment_ids[1:]) & (segment_ids[:-1] < len(lengths))
    rows = torch.nonzero_static(has_next, size=int(counts.sum()))[:, 0]
    return Targets(input_ids, rows, input_ids[rows + 1], counts)
