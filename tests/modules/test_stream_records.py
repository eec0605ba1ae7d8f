"""What is counted of streams, on five pieces in two streams and none in a third."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np

from lit_encoders import MaskStream
from lit_encoders.modules.stream_records import count_names, stream_counts, stream_records

STREAMS = [MaskStream("a", 0.1, 0.5), MaskStream("b", 0.5, 0.3, head="b"), MaskStream("c", 0.9, 0.2)]


def test_counts_have_the_same_names_on_every_rank() -> None:
    targets: Any = SimpleNamespace(counts=np.array([5, 0, 7, 50, 1]))
    counts = stream_counts(STREAMS, np.array([0, 0, 0, 1, 1]), targets)
    assert list(counts) == count_names(STREAMS)
    assert list(counts.values()) == [3, 12, 2, 51, 0, 0]


def test_records_hold_the_settings_and_what_they_came_to() -> None:
    totals = dict(zip(count_names(STREAMS), range(6), strict=True))
    records = stream_records(STREAMS, "inputs", totals, {"b/mlm_loss": 6.0, "b/kd_loss": 1.5})
    assert json.loads(json.dumps(records)) == records
    assert records["aggregation"] == "inputs"
    assert records["streams"]["b"] == {
        "name": "b", "mask_ratio": 0.5, "share": 0.3, "weight": 1.0, "distill": False, "head": "b",
        "documents": 2, "targets": 3, "mlm_loss": 2.0, "kd_loss": 0.5,
    }  # fmt: skip
