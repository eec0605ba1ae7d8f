"""Means over targets: of batches of unlike sizes, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from lit_encoders.modules.held_out import HeldOutLosses, with_perplexities


def test_a_batch_counts_as_much_as_its_targets() -> None:
    losses = HeldOutLosses("", ["mlm", "clm"], torch.device("cpu"))
    losses.add("mlm", torch.tensor(20.0), 10)
    losses.add("clm", torch.tensor(8.0), 2)
    losses.add("mlm", torch.tensor(90.0), 30)
    found = losses.compute()
    assert {name: loss.item() for name, loss in found.items()} == {"val/mlm_loss": 110 / 40, "val/clm_loss": 4.0}
    assert all(loss.dtype == torch.float64 for loss in found.values())


def test_a_set_with_a_name_and_its_perplexity() -> None:
    losses = HeldOutLosses("loss", ["mlm"], torch.device("cpu"))
    losses.add("mlm", torch.tensor(6.0), 3)
    metrics = with_perplexities(losses.compute())
    assert list(metrics) == ["val/loss/mlm_loss", "val/loss/mlm_perplexity"]
    assert metrics["val/loss/mlm_perplexity"].item() == pytest.approx(math.exp(2.0), rel=1e-12)
