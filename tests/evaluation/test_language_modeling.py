"""Losses of held-out text against plain transformers, token by token."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_encoders.evaluation.language_modeling import language_scores, sliding_windows, windows_of
from lit_encoders.modules.lit_encoder import LitEncoder

# Of 1 to 61 words, one of them no word of the vocabulary, with letters of two bytes.
TEXTS = [
    "w1 w2 w3",
    " ".join(f"w{(7 * place) % 90}" for place in range(61)),
    "w5",
    "w8 élève w13 w21 naïveté",
    " ".join(f"w{(3 * place) % 90}" for place in range(33)),
]


@pytest.fixture(scope="module")
def decoder(llama_folder: Path) -> LitEncoder:
    return LitEncoder(str(llama_folder), objective="clm", dtype="float64")


def token_losses(folder: Path, size: int, stride: int) -> list[list[float]]:
    """Nats of each predicted token of each text: one call of transformers for each, with what its window holds."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    found = []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        losses = []
        for place in range(1, len(ids)):
            # The end of the first window that holds the token.
            end = size if place < size else size + stride * math.ceil((place + 1 - size) / stride)
            start = max(0, min(end, len(ids)) - size)
            with torch.no_grad():
                logits = model(torch.tensor([ids[start:place]])).logits[0, -1]
            losses.append(-float(logits.log_softmax(0)[ids[place]]))
        found.append(losses)
    return found


@pytest.mark.parametrize(("size", "stride"), [(64, None), (16, None), (16, 5), (16, 15), (7, 1)])
def test_clm_losses_are_those_of_transformers(
    decoder: LitEncoder, llama_folder: Path, size: int, stride: int | None
) -> None:
    expected = token_losses(llama_folder, size, stride or size // 2)
    scores = language_scores(decoder, TEXTS, sequence_length=size, stride=stride, slots=64)
    # The sum over tokens is taken in float64, each loss comes out of the chunked head in float32 at the least.
    assert scores.counts[:, 0] == pytest.approx([sum(losses) for losses in expected], rel=1e-11)
    assert scores.counts[:, 1].tolist() == [len(losses) for losses in expected]
    assert scores.lower_is_better == {"perplexity", "loss", "bits_per_byte"}


def test_windows_predict_every_token_but_the_first_once() -> None:
    for length in range(1, 30):
        for size in range(2, 12):
            for stride in range(1, size):
                predicted: Counter[int] = Counter()
                for start, end, first in sliding_windows(range(length), size, stride):
                    assert end - start <= size
                    # There is something before it to predict it from: what a window keeps of the one before.
                    assert first - start >= min(first, size - stride)
                    predicted.update(range(first, end))
                assert predicted == Counter(range(1, length))


def test_l05_perplexity_is_token_weighted_whatever_the_packs(decoder: LitEncoder, llama_folder: Path) -> None:
    losses = token_losses(llama_folder, 16, 8)
    flat = [loss for each in losses for loss in each]
    mean_of_means = np.mean([np.mean(each) for each in losses])
    for slots in (16, 64, 4096):
        scores = language_scores(decoder, TEXTS, sequence_length=16, slots=slots)
        assert scores.value("loss") == pytest.approx(np.mean(flat), rel=1e-11)
        assert scores.value("perplexity") == pytest.approx(math.exp(np.mean(flat)), rel=1e-11)
        assert abs(scores.value("perplexity") / math.exp(mean_of_means) - 1) > 0.01


def test_bits_per_byte_are_of_the_bytes(decoder: LitEncoder, llama_folder: Path) -> None:
    losses = token_losses(llama_folder, 64, 32)
    scores = language_scores(decoder, TEXTS, sequence_length=64)
    num_bytes = [len(text.encode("utf-8")) for text in TEXTS]
    assert num_bytes[3] == len(TEXTS[3]) + 4, "letters of two bytes"
    nats = [sum(each) for each in losses]
    assert scores.value("bits_per_byte") == pytest.approx(sum(nats) / sum(num_bytes) / math.log(2), rel=1e-11)
    # A text is won by who needs fewer bits for it, also where its tokens are other ones.
    assert scores.points == pytest.approx(
        [-n / b / math.log(2) for n, b in zip(nats, num_bytes, strict=True)], rel=1e-6
    )


# MLM


def read_packs(module: LitEncoder, texts: list[str], **options: Any) -> tuple[Any, list[tuple[Tensor, Tensor, Tensor]]]:
    """Scores, and for each window what was read, which places are predicted and their ids."""
    module.configure_model()
    assert module.backbone is not None
    windows = []

    def note(part: Any, given: Any) -> None:
        ids, _, packing, (group,) = given
        start = 0
        for length, count in packing.groups:
            for _ in range(count):
                inside = (group.rows >= start) & (group.rows < start + length)
                windows.append((ids[start : start + length], group.rows[inside] - start, group.labels[inside]))
                start += length

    hook = module.backbone.register_forward_pre_hook(note)
    try:
        return language_scores(module, texts, **options), windows
    finally:
        hook.remove()


def whole(window: tuple[Tensor, Tensor, Tensor]) -> list[int]:
    """A window's ids without the masks."""
    ids, places, labels = window
    return ids.index_copy(0, places, labels).tolist()


def test_mlm_losses_are_those_of_transformers_at_the_masked_tokens(quiet_bert: Path) -> None:
    from transformers import AutoModelForMaskedLM

    model: Any = AutoModelForMaskedLM.from_pretrained(quiet_bert).eval()
    module = LitEncoder(str(quiet_bert))
    scores, windows = read_packs(module, TEXTS, sequence_length=20, mask_ratio=0.3, slots=64)
    losses = []
    for ids, places, labels in windows:
        assert (ids[places] == module.tokenizer.mask_token_id).all()
        with torch.no_grad():
            logits = model(ids[None]).logits[0, places]
        losses += torch.nn.functional.cross_entropy(logits, labels, reduction="none").tolist()
    assert scores.value("loss") == pytest.approx(np.mean(losses), rel=1e-5)
    assert scores.counts[:, 1].sum() == len(losses) > 20
    # The mean of the masked ones stands for all tokens of the texts.
    tokens = [len(text.split()) for text in TEXTS]
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    expected = np.mean(losses) * sum(tokens) / num_bytes / math.log(2)
    assert scores.value("bits_per_byte") == pytest.approx(expected, rel=1e-5)


def test_mlm_windows_hold_every_token_once_and_masks_their_share(bert_folder: Path) -> None:
    module = LitEncoder(str(bert_folder))
    _, windows = read_packs(module, TEXTS, sequence_length=20, mask_ratio=0.3)
    tokenizer = module.tokenizer
    cut = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    expected = [[2, *ids[start : start + 18], 3] for ids in cut for start in range(0, len(ids), 18)]
    assert sorted(map(whole, windows)) == sorted(expected)
    for ids, places, _ in windows:
        eligible = len(ids) - 2
        assert math.floor(0.3 * eligible) <= len(places) <= math.ceil(0.3 * eligible)
        assert not {0, len(ids) - 1} & {*places.tolist()}


def test_masks_do_not_follow_the_packs(bert_folder: Path) -> None:
    """Nor another model's weights: two models are asked the same questions."""
    module = LitEncoder(str(bert_folder))
    masked = []
    for slots in (20, 64, 4096):
        scores, windows = read_packs(module, TEXTS, sequence_length=20, slots=slots)
        masked.append(({tuple(whole(window)): window[1].tolist() for window in windows}, scores.value("loss")))
    assert masked[0][0] == masked[1][0] == masked[2][0]
    assert masked[0][1] == pytest.approx(masked[2][1], rel=1e-5)


def test_measuring_leaves_the_model_and_the_generators_as_they_were(bert_folder: Path) -> None:
    module = LitEncoder(str(bert_folder))
    module.configure_model()
    assert module.backbone is not None
    module.backbone.train()
    state = torch.get_rng_state()
    # Dropout would differ from call to call.
    values = {language_scores(module, TEXTS, sequence_length=64).value("loss") for _ in range(2)}
    assert len(values) == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert module.backbone.training


def test_text_without_tokens_predicts_nothing(tmp_path: Path) -> None:
    """Where the tokenizer puts nothing around a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "w1": 1, "w2": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    LlamaForCausalLM(LlamaConfig(vocab_size=3, **sizes)).save_pretrained(tmp_path)
    module = LitEncoder(str(tmp_path), objective="clm")
    assert [window.document for window in windows_of(module, ["", "w1", "w1 w2"], 4, 2)] == [1, 2]
    alone = language_scores(module, ["w1 w2"], sequence_length=4).value("loss")
    assert language_scores(module, [" ", "w1", "w1 w2"], sequence_length=4).value("loss") == pytest.approx(alone)
    with pytest.raises(ValueError, match=r"^texts must have tokens to predict, got none$"):
        language_scores(module, ["w1", "w2"], sequence_length=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 129}, r"^sequence_length must be at most the 128 positions of '.*bert', got 129$"),
        ({"sequence_length": 2}, r"^sequence_length must be at least 2 and above a text's 2 special tokens, got 2$"),
        ({"stride": 0}, r"^stride must be in \[1, 15\], got 0$"),
        # The first token of a window would have nothing before it.
        ({"stride": 16}, r"^stride must be in \[1, 15\], got 16$"),
        ({"mask_ratio": 0.0}, r"^mask_ratio must be in \(0, 1\], got 0\.0$"),
        ({"mask_ratio": 1.5}, r"^mask_ratio must be in \(0, 1\], got 1\.5$"),
    ],
)
def test_settings_out_of_range_are_said(bert_folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        language_scores(LitEncoder(str(bert_folder)), TEXTS, **{"sequence_length": 16, **options})
