"""Causal targets: the next token of the same document."""

import numpy as np
import torch

from lit_encoders.objectives.causal import clm_targets


def segments(*lengths: int) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def test_c05_labels_never_cross_a_document_boundary() -> None:
    ids = torch.tensor([10, 11, 12, 20, 21])
    targets = clm_targets(ids, segments(3, 2), np.array([3, 2]))
    read = targets.input_ids[targets.rows].tolist()
    assert list(zip(read, targets.labels.tolist(), strict=True)) == [(10, 11), (11, 12), (20, 21)]
    assert targets.num_targets == 3


def test_m06_the_end_token_is_a_target_where_it_is_also_the_padding_token() -> None:
    """What is ignored follows from the boundaries, not from the id: 3 both ends and pads here."""
    ids = torch.tensor([10, 11, 3, 10, 11, 12, 13, 3, 3, 3])
    targets = clm_targets(ids, segments(3, 5, 2), np.array([3, 5]))
    assert targets.labels.tolist() == [11, 3, 11, 12, 13, 3]


def test_padding_segments_have_no_targets() -> None:
    ids = torch.tensor([10, 11, 0, 0, 0, 0])
    targets = clm_targets(ids, segments(2, 2, 2), np.array([2]))
    assert targets.rows.tolist() == [0]


def test_one_token_documents_have_no_targets() -> None:
    targets = clm_targets(torch.tensor([10, 20, 30, 31]), segments(1, 1, 2), np.array([1, 1, 2]))
    assert targets.rows.tolist() == [2]
    assert targets.labels.tolist() == [31]


def test_pack_of_padding_alone_has_no_targets() -> None:
    targets = clm_targets(torch.zeros(8, dtype=torch.int64), segments(8), np.array([], np.int64))
    assert targets.num_targets == 0
    assert len(targets.labels) == 0


def test_input_is_read_as_it_is() -> None:
    ids = torch.randint(0, 50, (40,))
    assert torch.equal(clm_targets(ids, segments(25, 15), np.array([25, 15])).input_ids, ids)


def test_agrees_with_a_loop_over_documents() -> None:
    lengths = np.random.default_rng(0).integers(1, 9, 30)
    ids = torch.arange(int(lengths.sum()) + 7)
    ends = np.cumsum(lengths)
    expected = [row for start, end in zip(ends - lengths, ends, strict=True) for row in range(start, end - 1)]
    targets = clm_targets(ids, segments(*lengths.tolist(), 7), lengths)
    assert targets.rows.tolist() == expected
    assert targets.labels.tolist() == [row + 1 for row in expected]


def test_m06_an_end_token_that_is_also_the_padding_id() -> None:
    """Rows [10, 11, 3] and [10, 11, 12, 13, 3], pad id = end id = 3: each end is a target, padding never."""
    ids = torch.tensor([10, 11, 3, 10, 11, 12, 13, 3, 3, 3])
    segments = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 2, 2])
    targets = clm_targets(ids, segments, np.array([3, 5]))
    assert targets.rows.tolist() == [0, 1, 3, 4, 5, 6]
    assert targets.labels.tolist() == [11, 3, 11, 12, 13, 3]
