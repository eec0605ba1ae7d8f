"""Fine-tuning: losses against plain transformers text by text, seeds, and what learns."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from lit_encoders.evaluation.embeddings import Pooling
from lit_encoders.evaluation.finetuning import Example, FineTuner, FineTuning, collate, fine_tune, in_batch_loss
from lit_encoders.modules.open_module import open_module

QUICK = FineTuning(epochs=2, batch=4, learning_rate=1e-3, sequence_length=32)


def rows(*lengths: int) -> list[tuple[int, ...]]:
    """Token ids as of texts of these lengths, special ones included."""
    draw = random.Random(sum(lengths))
    return [(2, *(draw.randrange(5, 95) for _ in range(length - 2)), 3) for length in lengths]


def hidden_states(folder: Path, row: tuple[int, ...], causal: bool = False) -> Tensor:
    """Of one text alone, by transformers."""
    from transformers import AutoModel

    model: Any = AutoModel.from_pretrained(folder).eval()
    mask = {"attention_mask": torch.ones(len(row), len(row), dtype=torch.bool).tril()[None, None]} if causal else {}
    with torch.no_grad():
        return model(torch.tensor([row]), **mask).last_hidden_state[0]  # type: ignore[no-any-return]


def test_batch_is_a_pack_of_all_texts() -> None:
    first, second, third, fourth = rows(3, 5, 4, 2)
    batch = collate([Example((first, second)), Example((third, fourth))])
    # Queries come before documents.
    assert batch.input_ids.tolist() == [*first, *third, *second, *fourth]
    assert batch.sizes.tolist() == batch.lengths.tolist() == [3, 4, 5, 2]
    assert batch.position_ids.tolist() == [*range(3), *range(4), *range(5), *range(2)]
    words = collate([Example((first,), (0, 1), (0, 2)), Example((second,), (1,), (3,))])
    assert words.slots.tolist() == [0, 2, 3 + 3]
    assert words.labels.tolist() == [0, 1, 1]


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_loss_of_texts_is_the_mean_text_by_text(quiet_bert: Path, pooling: Pooling) -> None:
    settings = replace(QUICK, pooling=pooling)
    tuner = FineTuner(open_module(str(quiet_bert)), 3, settings, 1)
    texts, labels = rows(3, 20, 7, 20), [2, 0, 1, 1]
    found = tuner.loss(collate([Example((row,), (label,)) for row, label in zip(texts, labels, strict=True)]))
    assert tuner.head is not None
    expected = []
    for row, label in zip(texts, labels, strict=True):
        states = hidden_states(quiet_bert, row)
        vector = states.mean(0) if pooling == "mean" else states[0]
        expected.append(cross_entropy(tuner.head(vector)[None], torch.tensor([label])).item())
    assert found.item() == pytest.approx(np.mean(expected), rel=1e-5)
    assert len({round(loss, 5) for loss in expected}) > 1


def test_loss_of_words_is_the_mean_word_by_word(quiet_bert: Path) -> None:
    tuner = FineTuner(open_module(str(quiet_bert)), 4, QUICK, 1)
    texts = rows(9, 4, 15)
    marked = [((1, 3), (0, 3)), ((2,), (1,)), ((1, 2, 13), (2, 2, 0))]
    found = tuner.loss(
        collate([Example((row,), labels, places) for row, (places, labels) in zip(texts, marked, strict=True)])
    )
    assert tuner.head is not None
    expected = []
    for row, (places, labels) in zip(texts, marked, strict=True):
        logits = tuner.head(hidden_states(quiet_bert, row)[list(places)])
        expected += cross_entropy(logits, torch.tensor(labels), reduction="none").tolist()
    assert found.item() == pytest.approx(np.mean(expected), rel=1e-5)


def test_decoder_learns_as_it_reads(llama_folder: Path) -> None:
    """From left to right, as transformers has it."""
    tuner = FineTuner(open_module(str(llama_folder)), 2, QUICK, 1)
    (row,) = rows(9)
    assert tuner.head is not None
    expected = cross_entropy(tuner.head(hidden_states(llama_folder, row).mean(0))[None], torch.tensor([1]))
    assert tuner.loss(collate([Example((row,), (1,))])).item() == pytest.approx(expected.item(), rel=1e-5)


def test_loss_of_pairs_is_that_of_its_formula(quiet_bert: Path) -> None:
    tuner = FineTuner(open_module(str(quiet_bert)), 0, replace(QUICK, temperature=0.1), 1)
    queries, documents = rows(4, 6, 9), rows(12, 5, 7)
    found = tuner.loss(collate([Example(pair) for pair in zip(queries, documents, strict=True)]))
    vectors = [[hidden_states(quiet_bert, row).mean(0) for row in side] for side in (queries, documents)]
    scores = torch.tensor([[cosine_similarity(q, d, dim=0).item() / 0.1 for d in vectors[1]] for q in vectors[0]])
    forth = -scores.log_softmax(1).diagonal().mean()
    back = -scores.log_softmax(0).diagonal().mean()
    assert found.item() == pytest.approx((forth + back).item() / 2, rel=1e-4)


def test_loss_of_pairs_in_closed_form() -> None:
    """Two pairs at right angles: ln(1 + exp(-1 / t))."""
    vectors = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 3.0]])
    for temperature in (0.5, 1.0):
        expected = np.log(1 + np.exp(-1 / temperature))
        assert in_batch_loss(vectors, temperature).item() == pytest.approx(expected, rel=1e-6)
    swapped = vectors[[0, 1, 3, 2]]
    assert in_batch_loss(swapped, 1.0).item() == pytest.approx(np.log(1 + np.e), rel=1e-6)


def test_what_is_an_answer_too_is_no_negative() -> None:
    """Two queries of one document, and a query with two documents, do not push each other away."""
    one, two, three, four, five = rows(3, 4, 5, 6, 7)
    batch = collate([Example((one, four)), Example((two, four)), Example((two, five)), Example((three, one))])
    expected = torch.zeros(4, 4, dtype=torch.bool)
    expected[0, 1] = expected[1, 0] = expected[1, 2] = expected[2, 1] = True
    assert batch.twins is not None
    assert torch.equal(batch.twins, expected)
    vectors = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    scores = torch.tensor([[cosine_similarity(q, d, dim=0).item() for d in vectors[4:]] for q in vectors[:4]])
    losses = []
    for matrix in (scores, scores.T):
        for row in range(4):
            rivals = [column for column in range(4) if not expected[row, column]]
            losses.append((matrix[row, rivals].logsumexp(0) - matrix[row, row]).item())
    assert in_batch_loss(vectors, 1.0, batch.twins).item() == pytest.approx(np.mean(losses), rel=1e-5)
    assert collate([Example((one,), (0,))]).twins is None


# Training


def classes(count: int, seed: int = 0) -> list[Example]:
    """Texts whose class shows in each of their words."""
    draw = random.Random(seed)
    examples = []
    for number in range(count):
        side = number % 2
        words = [5 + 45 * side + draw.randrange(45) for _ in range(draw.randint(2, 9))]
        examples.append(Example(((2, *words, 3),), (side,)))
    return examples


def tune(folder: Path, seed: int, settings: FineTuning = QUICK) -> dict[str, Tensor]:
    return fine_tune(lambda: open_module(str(folder)), classes(12), 2, settings, seed).state_dict()


def test_seed_alone_decides_the_result(bert_folder: Path) -> None:
    """Head, order and dropout; what was drawn before changes nothing, and nothing is drawn from the global state."""
    first = tune(bert_folder, seed=1)
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    again = tune(bert_folder, seed=1)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]
    assert random.getstate() == states[2]
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = tune(bert_folder, seed=2)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_encoder_learns_and_the_lm_head_rests(bert_folder: Path) -> None:
    tuner = fine_tune(lambda: open_module(str(bert_folder)), classes(12), 2, QUICK, 0)
    module = open_module(str(bert_folder))
    module.configure_model()
    before, after = module.state_dict(), tuner.encoder.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("layer.0." in name for name in moved)
    # The decoder is tied to the embeddings, which learn.
    assert {name for name in moved if ".cls." in name} <= {"backbone.model.cls.predictions.decoder.weight"}
    assert not tuner.training
    assert next(tuner.parameters()).device.type == "cpu"


def test_rate_rises_then_falls_to_nothing(bert_folder: Path) -> None:
    """The first step is no lost one, and neither is the last."""
    tuner = FineTuner(open_module(str(bert_folder)), 2, replace(QUICK, warmup_share=0.2, learning_rate=1.0), 10)
    configured: Any = tuner.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.5, *(1 - place / 9 for place in range(9))])
    decays = {
        len(parameter.shape) >= 2: group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert decays == {True: 0.01, False: 0.0}


# Mistakes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, r"^fine_tuning\.epochs must be at least 1, got 0$"),
        ({"batch": -1}, r"^fine_tuning\.batch must be at least 1, got -1$"),
        ({"sequence_length": 0}, r"^fine_tuning\.sequence_length must be at least 1, got 0$"),
        ({"learning_rate": 0.0}, r"^fine_tuning\.learning_rate must be above 0, got 0\.0$"),
        ({"learning_rate": float("nan")}, r"^fine_tuning\.learning_rate must be above 0, got nan$"),
        ({"temperature": float("inf")}, r"^fine_tuning\.temperature must be above 0, got inf$"),
        ({"weight_decay": -0.1}, r"^fine_tuning\.weight_decay must be at least 0, got -0\.1$"),
        ({"warmup_share": 1.1}, r"^fine_tuning\.warmup_share must be in \[0, 1\], got 1\.1$"),
        # It would have been taken for the mean.
        ({"pooling": "max"}, r"^fine_tuning\.pooling must be one of mean, first, got 'max'$"),
    ],
)
def test_settings_out_of_range_are_said(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FineTuning(**settings)
