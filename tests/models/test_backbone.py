"""A pack equals its documents run alone through plain transformers; nothing passes from one to another."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_encoders.models.attention import PackLayout
from lit_encoders.models.backbone import (
    Backbone,
    RowGroup,
    attention_dropout,
    load_config,
    load_language_model,
    max_positions,
)

# Below, at and above the window of 9 and the block of 18; like lengths side by side and apart; 205 slots.
LENGTHS = (1, 3, 7, 7, 7, 9, 10, 18, 19, 31, 31, 50, 7, 5)
PADDING = 1  # The last segment.


def documents(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 95, (length,), generator=draw) for length in lengths]


def encode(backbone: Backbone, texts: Sequence[Tensor], causal: bool) -> Tensor:
    """Logits (T, V) of documents in one pack."""
    lengths = np.array([len(text) for text in texts])
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    return backbone.logits(backbone.encode(torch.cat(list(texts)), positions, PackLayout(lengths, causal=causal)))


def gradients(backbone: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in backbone.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("causal", [False, True])
def test_c01_c03_c04_pack_equals_its_documents_alone(backbone: Backbone, alone: Any, causal: bool) -> None:
    """Logits and every parameter's gradient, in both directions, in float64."""
    texts = documents()
    real = sum(LENGTHS[:-PADDING])
    packed = encode(backbone, texts, causal)[:real]
    separate = torch.cat([alone.logits(text, causal) for text in texts[:-PADDING]])
    torch.testing.assert_close(packed, separate, rtol=0, atol=1e-9)

    pull = torch.randn(packed.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (packed * pull).sum().backward()
    (separate * pull).sum().backward()
    ours, theirs = gradients(backbone.model), gradients(alone.model)
    assert ours.keys() == theirs.keys() == dict(backbone.model.named_parameters()).keys()
    for name, grad in ours.items():
        torch.testing.assert_close(
            grad, theirs[name], rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("causal", [False, True])
def test_forward_equals_transformers_own_loss(backbone: Backbone, alone: Any, causal: bool) -> None:
    texts = documents()[:-PADDING]
    ids = torch.cat(texts)
    chosen = torch.rand(len(ids), generator=torch.Generator().manual_seed(2)) < 0.3
    rows = chosen.nonzero()[:, 0]
    labels = torch.randint(0, 95, (len(rows),), generator=torch.Generator().manual_seed(3))
    everywhere = torch.full_like(ids, -100).index_copy(0, rows, labels)

    lengths = np.array([len(text) for text in texts])
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    layout = PackLayout(lengths, causal=causal)
    total, row_losses = backbone(ids, positions, layout, [RowGroup(rows, labels)])[0][:2]

    expected = torch.zeros((), dtype=torch.float64)
    for text, wanted in zip(texts, everywhere.split(lengths.tolist()), strict=True):
        count = int((wanted != -100).sum())
        if count:
            masks = alone.masks(len(text), causal)
            # transformers takes its loss in float32.
            expected += alone.model(text[None], labels=wanted[None], **masks).loss.double() * count
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    logits = encode(backbone, texts, causal)[rows]
    plain = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(row_losses, plain, rtol=1e-10, atol=1e-12)

    weights = torch.rand(len(rows), dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    weighted, _ = backbone(ids, positions, layout, [RowGroup(rows, labels, weights)])[0][:2]
    torch.testing.assert_close(weighted, (plain * weights).sum(), rtol=1e-10, atol=0)


def test_c04_loss_gradients_equal_those_of_the_documents_alone(backbone: Backbone, alone: Any) -> None:
    """Three documents of 4, 7 and 5 tokens, one token-summed loss, head and tied decoder included."""
    texts = documents((4, 7, 5))
    rows, labels = torch.tensor([1, 3, 4, 9, 10, 13]), torch.tensor([5, 6, 7, 8, 9, 10])
    positions = torch.cat([torch.arange(length) for length in (4, 7, 5)])
    layout = PackLayout(np.array([4, 7, 5]))
    backbone(torch.cat(texts), positions, layout, [RowGroup(rows, labels)])[0][0].backward()
    separate = torch.cat([alone.logits(text, causal=False) for text in texts])
    torch.nn.functional.cross_entropy(separate[rows], labels, reduction="sum").backward()
    theirs = gradients(alone.model)
    for name, grad in gradients(backbone.model).items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("causal", [False, True])
def test_c03_no_document_sees_another(backbone: Backbone, causal: bool) -> None:
    texts = documents()
    before = encode(backbone, texts, causal).split(LENGTHS)
    for place in (0, 4, 11, len(texts) - 1):
        other = [text.clone() for text in texts]
        other[place] = documents(LENGTHS, seed=9)[place]
        after = encode(backbone, other, causal).split(LENGTHS)
        assert not torch.equal(before[place], after[place])
        assert all(torch.equal(a, b) for n, (a, b) in enumerate(zip(before, after, strict=True)) if n != place)


@pytest.mark.parametrize("place", [3, 10, 25])
def test_c01_causal_mode_never_sees_the_future_and_switches_back(backbone: Backbone, place: int) -> None:
    """The same model object: the direction is an argument of the pack, not a state."""
    texts = documents((31, 31, 12))
    changed = [text.clone() for text in texts]
    changed[1][place] = texts[1][place] % 90 + 5
    for causal in (False, True, False):
        difference = (encode(backbone, texts, causal) - encode(backbone, changed, causal))[31:62].abs().sum(-1)
        moved = difference.nonzero()[:, 0].tolist()
        assert moved[0] == (place if causal else 0)
        # Two window layers of reach 8 between two full ones: everything that may be seen is seen.
        assert moved == list(range(moved[0], 31))


@pytest.mark.parametrize("causal", [False, True])
def test_c08_window_layer_reaches_eight_tokens_each_way(
    modernbert_settings: dict[str, Any], build_backbone: Callable[..., Backbone], causal: bool
) -> None:
    """local_attention 16 is 8 to the left and 8 to the right; packed between documents that see nothing."""
    settings = modernbert_settings | {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    backbone = build_backbone(settings)
    texts = documents((40, 40, 12))
    changed = [text.clone() for text in texts]
    changed[1][20] = texts[1][20] % 90 + 5
    difference = (encode(backbone, texts, causal) - encode(backbone, changed, causal)).abs().sum(-1)
    # Token 20 is seen by i with 20 in i-8..i+8, or in i-8..i when causal.
    first = 20 if causal else 12
    assert difference.nonzero()[:, 0].tolist() == [40 + i for i in range(first, 29)]


def test_order_and_company_do_not_matter(backbone: Backbone) -> None:
    texts = documents()
    for causal in (False, True):
        together = encode(backbone, texts, causal).split(LENGTHS)
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
        shuffled = encode(backbone, [texts[n] for n in order], causal).split([LENGTHS[n] for n in order])
        for n, logits in zip(order, shuffled, strict=True):
            torch.testing.assert_close(logits, together[n], rtol=0, atol=1e-12)
        for n in (0, 5, 11):
            torch.testing.assert_close(encode(backbone, [texts[n]], causal), together[n], rtol=0, atol=1e-12)


def test_pack_may_be_longer_than_the_model_has_positions(backbone: Backbone, alone: Any) -> None:
    """Positions restart with each document: 13 documents of 100 tokens where 128 or 256 is the limit."""
    texts = documents([100] * 13)
    packed = encode(backbone, texts, causal=False)
    assert len(packed) > max_positions(backbone.config)
    torch.testing.assert_close(packed[-100:], alone.logits(texts[-1], causal=False), rtol=0, atol=1e-9)


def test_dropout_runs_and_is_drawn_from_the_generator(
    settings: dict[str, Any], build_backbone: Callable[..., Backbone]
) -> None:
    names = ("attention_probs_dropout_prob", "hidden_dropout_prob", "attention_dropout", "embedding_dropout")
    backbone = build_backbone(settings | dict.fromkeys(names, 0.2))
    texts = documents((9, 31))
    still = encode(backbone, texts, causal=False)
    backbone.train()

    def noisy(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return encode(backbone, texts, causal=False)

    assert torch.equal(noisy(0), noisy(0))
    assert not torch.equal(noisy(0), noisy(1))
    assert not torch.equal(noisy(0), still)
    assert noisy(0).isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_activation_checkpointing_gives_bit_equal_gradients(
    settings: dict[str, Any], build_backbone: Callable[..., Backbone], causal: bool
) -> None:
    names = ("attention_probs_dropout_prob", "hidden_dropout_prob", "attention_dropout", "embedding_dropout")
    results = []
    for checkpointing in (False, True):
        backbone = build_backbone(settings | dict.fromkeys(names, 0.1)).train()
        calls = []
        # Inside a block: hooks of the block itself stay outside the checkpoint.
        linear = next(part for part in backbone.layers[0].modules() if isinstance(part, torch.nn.Linear))
        linear.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        if checkpointing:
            backbone.use_activation_checkpointing()
        torch.manual_seed(0)
        encode(backbone, documents(), causal).square().sum().backward()
        results.append((len(calls), gradients(backbone)))
    (once, plain), (twice, checkpointed) = results
    assert (once, twice) == (1, 2)
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


def test_decoder_is_tied_from_a_mapping_and_from_a_folder(
    settings: dict[str, Any], build_backbone: Callable[..., Backbone], tmp_path: Path
) -> None:
    first = build_backbone(settings)
    first.model.save_pretrained(tmp_path)
    second = Backbone(load_language_model(str(tmp_path), load_config(str(tmp_path)), torch.float64))
    for backbone in (first, second):
        assert backbone.decoder.weight is backbone.model.get_input_embeddings().weight
        encode(backbone, documents((6, 7)), causal=False).square().sum().backward()
        assert backbone.decoder.weight.grad is backbone.model.get_input_embeddings().weight.grad
    state = second.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in first.state_dict().items())


def test_untied_decoder_stays_apart(bert_settings: dict[str, Any], build_backbone: Callable[..., Backbone]) -> None:
    backbone = build_backbone(bert_settings | {"tie_word_embeddings": False})
    assert backbone.decoder.weight is not backbone.model.get_input_embeddings().weight


def test_b01_x05_weights_are_float32_whatever_the_folder_holds(
    settings: dict[str, Any], build_backbone: Callable[..., Backbone], tmp_path: Path
) -> None:
    stored = build_backbone(settings, torch.float32).model.to(torch.bfloat16)
    stored.save_pretrained(tmp_path)
    config = load_config(str(tmp_path))
    assert config.dtype == torch.bfloat16
    model = load_language_model(str(tmp_path), config, torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    read = model.state_dict()
    assert all(torch.equal(read[name], value.float()) for name, value in stored.state_dict().items() if name in read)


def test_loaded_model_is_in_training_mode(bert_folder: Path) -> None:
    model = load_language_model(str(bert_folder), load_config(str(bert_folder)), torch.float32)
    assert all(part.training for part in model.modules())


def test_bare_encoder_gets_a_head_of_its_own(bert_settings: dict[str, Any], tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    encoder = BertModel(BertConfig(**{key: value for key, value in bert_settings.items() if key != "model_type"}))
    encoder.save_pretrained(tmp_path)
    backbone = Backbone(load_language_model(str(tmp_path), load_config(str(tmp_path)), torch.float32))
    for name, value in encoder.state_dict().items():
        if not name.startswith("pooler."):
            assert torch.equal(backbone.model.base_model.state_dict()[name], value)
    assert backbone.decoder.weight is backbone.model.get_input_embeddings().weight


def test_layers_are_the_models_blocks(backbone: Backbone) -> None:
    assert len(backbone.layers) == backbone.config.num_hidden_layers
    assert type(backbone.layers[0]).__name__ in ("BertLayer", "ModernBertEncoderLayer")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "/no/such/folder",
            "model.backbone must be a folder or hub name of a Hugging Face model, got '/no/such/folder'",
        ),
        ({"hidden_size": 32}, r"must have a model_type, got keys \['hidden_size'\]"),
        ({"model_type": None}, "must have a model_type"),
        ({"model_type": "nonsense"}, "model.backbone.model_type is unknown to transformers, got 'nonsense'"),
        ({"model_type": "vit"}, "model.backbone must be a masked or causal LM, got model type 'vit'"),
        ({"model_type": "deberta-v2"}, r"can be packed \(bert, .*\), got 'deberta-v2'"),
    ],
)
def test_mistakes_about_the_model_name_the_key_and_the_value(source: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(source)


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.backbone must be a folder or hub name"):
        load_config(str(tmp_path))


def test_folder_and_mapping_give_the_same_configuration(bert_folder: Path, bert_settings: dict[str, Any]) -> None:
    config = load_config(str(bert_folder))
    assert {key: getattr(config, key) for key in bert_settings} == bert_settings
    mapping = dict(bert_settings)
    load_config(mapping)
    assert mapping == bert_settings


def test_facts_of_a_configuration(bert_settings: dict[str, Any], modernbert_settings: dict[str, Any]) -> None:
    bert, modernbert = (
        load_config(bert_settings),
        load_config(modernbert_settings | {"attention_dropout": 0.3}),
    )
    assert (max_positions(bert), max_positions(modernbert)) == (128, 256)
    assert (attention_dropout(bert), attention_dropout(modernbert)) == (0.1, 0.3)
