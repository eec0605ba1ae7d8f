"""FLOPs against torch's own counter on real passes, and pairs of tokens against what attention really sees."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lit_encoders.models.attention import PackLayout, packed_attention
from lit_encoders.models.backbone import Backbone, RowGroup, load_config, load_language_model
from lit_encoders.models.layer_range import LayerRange
from lit_encoders.objectives.losses import Teacher
from lit_encoders.performance.flops import (
    AttentionLayer,
    EncoderShape,
    Product,
    attended_pairs,
    attention_flops,
    encoder_flops,
    encoder_shape,
    full_pieces,
    head_flops,
    head_shape,
    pack_work,
)

WINDOW = 5
SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}
IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
LOCAL = ["sliding_attention", "full_attention", "sliding_attention"]
SETTINGS: dict[str, dict[str, Any]] = {
    "bert": SMALL,
    # Its embeddings go through a projection.
    "electra": {**SMALL, "embedding_size": 16},
    # Grouped keys and values, heads wider than the hidden size, windows.
    "gemma3_text": {**GROUPED, **IDS, "sliding_window": WINDOW, "layer_types": LOCAL},
    # No nn.Linear anywhere.
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": 2, "eos_token_id": 3},
    "modernbert": {**SMALL, **IDS, "local_attention": 2 * (WINDOW - 1), "global_attn_every_n_layers": 2},
}
LENGTHS = np.array([4, 9, 9, 14])
PIECES = [(4, 1), (9, 2), (14, 1)]
TOKENS, ROWS, VOCAB = 36, 7, 95


def settings(name: str) -> dict[str, Any]:
    return {"model_type": name, "vocab_size": VOCAB, "max_position_embeddings": 64, **SETTINGS[name]}


def make(name: str, device: str = "cpu") -> Backbone:
    config = load_config(settings(name))
    with torch.device(device):
        return Backbone(load_language_model(settings(name), config, torch.float32))


def counted(backbone: Backbone, causal: bool, teacher: Backbone | None = None) -> int:
    """What torch counts in a real forward and backward pass.

    Of its attention kernels on a CPU the counter knows but the one that is made of plain products.
    """
    ids = torch.arange(TOKENS) % 90 + 5
    places = torch.cat([torch.arange(int(length)) for length in LENGTHS])
    rows, labels = torch.arange(ROWS) * 5, torch.arange(ROWS) + 5
    layout = PackLayout(LENGTHS, causal=causal)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        asked = {}
        if teacher is not None:
            asked = {"teacher": Teacher(*teacher.teach(ids, places, layout, [rows])[0]), "kd_weight": 0.5}
        backbone(ids, places, layout, [RowGroup(rows, labels, **asked)])[0][0].backward()
    return int(counter.get_total_flops())


def pairs_of_kernel(length: int, window: int | None, causal: bool) -> int:
    """Pairs that the sdpa back-end multiplies, whether or not they see each other: whole squares, or blocks of keys."""
    if window is None or length <= window:
        return length * length
    block, reach = min(2 * window, length), window - 1
    return -(-length // block) * block * (block + (reach if causal else 2 * reach))


def wasted(layers: tuple[AttentionLayer, ...], causal: bool) -> int:
    """FLOPs of pairs that the kernel multiplies and masks."""
    total = 0
    for layer in layers:
        pairs = sum(
            count * (pairs_of_kernel(length, layer.window, causal) - attended_pairs(length, layer.window, causal))
            for length, count in PIECES
        )
        total += (12 if layer.backward else 4) * pairs * layer.heads * layer.head_dim
    return total


def in_place(head: tuple[Product, ...]) -> int:
    """FLOPs of the decoder's gradient, which is added in place: the counter does not know ``addmm_``."""
    return 2 * ROWS * head[-1].weights * head[-1].weight_grad


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, *range(1, 9)])
def test_pairs_by_counting(window: int | None, causal: bool) -> None:
    for length in range(1, 10):
        pairs = sum(
            (window is None or abs(i - j) < window) and (j <= i or not causal)
            for i in range(length)
            for j in range(length)
        )
        assert attended_pairs(length, window, causal) == pairs


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 20])
def test_pairs_are_those_that_attention_sees(window: int | None, causal: bool) -> None:
    """Equal scores and one-hot values: the output of a token is the weight of each token it sees."""
    length = 13
    zeros, values = torch.zeros(1, 1, length, length), torch.eye(length)[None, None]
    out, _ = packed_attention(
        torch.nn.Identity(),
        zeros,
        zeros,
        values,
        None,
        packing=PackLayout(np.array([length]), causal=causal),
        sliding_window=window,
    )
    assert attended_pairs(length, window, causal) == int((out[0, :, 0] > 0).sum())


def test_full_pieces_see_most() -> None:
    draw = random.Random(0)
    layers = [AttentionLayer(2, 4), AttentionLayer(2, 4, window=6)]
    for causal in (False, True):
        most = attention_flops(layers, full_pieces(100, 16), causal)
        for _ in range(200):
            lengths: list[int] = []
            while (left := 100 - sum(lengths)) > 0:
                lengths.append(min(left, draw.randint(1, 16)))
            assert attention_flops(layers, [(length, 1) for length in lengths], causal) <= most


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_pass_is_what_torch_counts(name: str, causal: bool) -> None:
    """To the last FLOP, apart from masked pairs and the in-place product, both of which are known."""
    shape, head = encoder_shape(make(name, "meta")), head_shape(make(name, "meta"))
    work = pack_work(shape, {None: head}, {None: ROWS}, PIECES, causal)
    assert work.total == encoder_flops(shape, PIECES, causal) + head_flops(head, ROWS)
    torch_counts = counted(make(name), causal)
    assert work.total == torch_counts - wasted(shape.attention, causal) + in_place(head)
    if name == "bert" and not causal:  # Nothing is masked there.
        assert work.total - torch_counts == 2 * ROWS * 32 * VOCAB


def test_windows_are_the_models_own() -> None:
    windows = [layer.window for layer in encoder_shape(make("modernbert", "meta")).attention]
    assert windows == [None, WINDOW, None]
    gemma = encoder_shape(make("gemma3_text", "meta")).attention
    assert [(layer.window, layer.heads, layer.head_dim) for layer in gemma] == [
        (WINDOW, 4, 16),
        (None, 4, 16),
        (WINDOW, 4, 16),
    ]


@pytest.mark.parametrize(
    ("name", "layers", "beyond"),
    [
        # A norm that trains stands before the first product: everything after it needs gradients.
        ("modernbert", "embeddings, 0:1", 0),
        # Queries, keys and values read what does not train: the gradient of their input is counted, not computed.
        ("bert", "embeddings, 0:1", 2 * TOKENS * 3 * 32 * 32),
        # Frozen above something that trains: its weights' gradients are saved, and nothing else.
        ("bert", "1:3", 0),
        ("bert", "head", 0),
    ],
)
def test_what_freezing_saves(name: str, layers: str, beyond: int) -> None:
    backbone, bare = make(name), make(name, "meta")
    for model in (backbone, bare):
        for parameter in LayerRange(layers).parameters(model.model).values():
            parameter.requires_grad_(False)
    shape, head = encoder_shape(bare), head_shape(bare)
    ours = pack_work(shape, {None: head}, {None: ROWS}, PIECES, causal=False).total
    assert ours - beyond == counted(backbone, False) - wasted(shape.attention, False) + in_place(head)
    whole = make(name, "meta")
    assert ours < pack_work(encoder_shape(whole), {None: head_shape(whole)}, {None: ROWS}, PIECES, False).total


def test_a_teacher_is_a_forward_pass() -> None:
    teacher, student = make("electra").eval().requires_grad_(False), make("bert")
    theirs = encoder_shape(teacher), head_shape(teacher), ROWS
    shape, head = encoder_shape(student), head_shape(student)
    work = pack_work(shape, {None: head}, {None: ROWS}, PIECES, False, theirs)
    alone = 2 * (TOKENS * (16 * 32 + 3 * (4 * 32 * 32 + 2 * 32 * 48)) + ROWS * (32 * 16 + 16 * VOCAB))
    assert work.teacher == alone + 4 * 3 * 32 * sum(count * length**2 for length, count in PIECES)
    assert work.total == counted(student, False, teacher) + in_place(head)


def test_an_added_head_has_products_of_its_own() -> None:
    backbone = make("bert", "meta")
    backbone.add_head("clm", own_decoder=True)
    assert head_shape(backbone, "clm") == head_shape(backbone) == (Product(32 * 32), Product(32 * VOCAB))


def test_looking_at_a_model_leaves_it_as_it_was() -> None:
    backbone = make("modernbert")
    backbone.use_activation_checkpointing()
    before = encoder_shape(make("modernbert", "meta"))
    assert encoder_shape(backbone) == before
    assert isinstance(before, EncoderShape)
    assert all(module.training for module in backbone.modules())
    assert counted(backbone, causal=False) > 0  # Attention is packed attention again.
