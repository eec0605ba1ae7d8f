"""Embeddings out of packs: those of plain transformers, one text at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_encoders import LitCLM, LitMLM
from lit_encoders.evaluation.embeddings import Pooling, embed, pool
from lit_encoders.modules.lit_encoder import LitEncoder

TEXTS = [
    "w1 w2 w3",
    " ".join(f"w{(7 * place) % 90}" for place in range(60)),
    "w5",
    "w8 w8 w13 nothing w21",
    " ".join(f"w{(3 * place) % 90}" for place in range(33)),
    "",
    "w2",
]
NUM_SPECIALS = 2


@pytest.fixture(scope="module")
def folders(bert_folder: Path, tmp_path_factory: pytest.TempPathFactory, make_tokenizer: Any) -> dict[str, Path]:
    """Saved tiny models: two encoders, and a decoder that transformers reads causally by itself."""
    from transformers import LlamaConfig, LlamaForCausalLM, ModernBertConfig, ModernBertForMaskedLM

    folder = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": 95, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    torch.manual_seed(1)
    # Layers: full, window, window, full; a window layer reaches 8 tokens to each side.
    windows = {"num_hidden_layers": 4, "local_attention": 16, "global_attn_every_n_layers": 3}
    modernbert = ModernBertConfig(**sizes, **ids, **windows, cls_token_id=2, sep_token_id=3)
    ModernBertForMaskedLM(modernbert).save_pretrained(folder / "modernbert")
    LlamaForCausalLM(LlamaConfig(**sizes, **ids, num_hidden_layers=2)).save_pretrained(folder / "llama")
    make_tokenizer().save_pretrained(folder / "modernbert")
    make_tokenizer(mask_token=None).save_pretrained(folder / "llama")
    return {"bert": bert_folder, **{name: folder / name for name in ("modernbert", "llama")}}


def plain(folder: Path, texts: Sequence[str], pooling: Pooling, longest: int, causal: bool = False) -> Tensor:
    """What transformers says, text by text, without packs or padding."""
    from transformers import AutoModel, AutoTokenizer

    model: Any = AutoModel.from_pretrained(folder).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    found = []
    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=longest, return_tensors="pt")["input_ids"]
        size = ids.shape[1]
        mask = {"attention_mask": torch.ones(size, size, dtype=torch.bool).tril()[None, None]} if causal else {}
        with torch.no_grad():
            hidden = model(ids, **mask).last_hidden_state[0]
        found.append(hidden.mean(0) if pooling == "mean" else hidden[0])
    return torch.stack(found)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slots", [64, 4096])
@pytest.mark.parametrize("pooling", ["mean", "first"])
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_embeddings_are_those_of_transformers(
    folders: dict[str, Path], name: str, pooling: Pooling, slots: int
) -> None:
    found = embed(LitMLM(str(folders[name])), TEXTS, sequence_length=64, slots=slots, pooling=pooling)
    assert found.dtype == torch.float32
    assert found.device.type == "cpu"
    assert_close(found, plain(folders[name], TEXTS, pooling, 64))


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_neighbours_change_nothing(folders: dict[str, Path], name: str) -> None:
    module = LitMLM(str(folders[name]))
    (alone,) = embed(module, ["w1 w2 w3"], sequence_length=128)
    for texts, place in ((["w1 w2 w3", "w9 " * 100], 0), (["w9 " * 100, "w4", "w1 w2 w3"], 2)):
        assert_close(embed(module, texts, sequence_length=128)[place], alone)


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_e05_a_long_neighbour_changes_nothing(folders: dict[str, Path], pooling: Pooling) -> None:
    """As padding up to 256 tokens would, where a vector reads it."""
    module, short, long = LitMLM(str(folders["modernbert"])), "w1 w2 w3", "w9 w4 " * 127
    alone = [embed(module, [text], sequence_length=256, pooling=pooling)[0] for text in (short, long)]
    assert_close(embed(module, [short, long], sequence_length=256, pooling=pooling), torch.stack(alone))
    assert_close(embed(module, [long, short, long], sequence_length=256, pooling=pooling)[1], alone[0])
    assert torch.isfinite(alone[1]).all()


def test_vectors_stand_in_the_order_of_the_texts(bert_folder: Path) -> None:
    module = LitMLM(str(bert_folder))
    forth = embed(module, TEXTS, sequence_length=64, slots=64)
    back = embed(module, TEXTS[::-1], sequence_length=64, slots=64)
    assert_close(back.flip(0), forth)
    assert torch.pdist(forth).min() > 1e-2, "texts differ, so order shows"


def test_long_text_is_cut_off(bert_folder: Path) -> None:
    """As transformers cuts it, with its special tokens."""
    module = LitMLM(str(bert_folder))
    words = [f"w{number}" for number in range(20)]
    cut, short, whole = embed(module, [" ".join(words), " ".join(words[:6]), "w0"], sequence_length=6 + NUM_SPECIALS)
    assert_close(cut, short)
    assert_close(torch.stack([cut, whole]), plain(bert_folder, [" ".join(words), "w0"], "mean", 6 + NUM_SPECIALS))


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_and_the_mode_comes_back(bert_folder: Path, training: bool) -> None:
    module = LitMLM(str(bert_folder))
    module.configure_model()
    assert module.backbone is not None
    module.backbone.train(training)
    found = embed(module, TEXTS[:3], sequence_length=64)
    assert all(part.training is training for part in module.backbone.modules())
    assert_close(found, plain(bert_folder, TEXTS[:3], "mean", 64))


def test_mode_comes_back_after_a_mistake(bert_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = LitMLM(str(bert_folder))
    module.configure_model()
    assert module.backbone is not None
    module.backbone.train()

    def fail(*arguments: object) -> Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(module.backbone, "encode", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        embed(module, ["w1"], sequence_length=16)
    assert module.backbone.training


def test_embeddings_have_no_gradient(bert_folder: Path) -> None:
    module = LitMLM(str(bert_folder))
    assert not embed(module, ["w1"], sequence_length=16).requires_grad
    assert module.backbone is not None
    assert all(parameter.requires_grad for parameter in module.backbone.parameters())


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_causal_module_reads_causally(folders: dict[str, Path], pooling: Pooling) -> None:
    found = embed(LitCLM(str(folders["bert"])), TEXTS, sequence_length=64, pooling=pooling)
    assert_close(found, plain(folders["bert"], TEXTS, pooling, 64, causal=True))
    assert not torch.allclose(found, plain(folders["bert"], TEXTS, pooling, 64), atol=1e-2)


def test_decoder_is_read_as_transformers_reads_it(folders: dict[str, Path]) -> None:
    texts = [text for text in TEXTS if text]
    assert_close(
        embed(LitCLM(str(folders["llama"])), texts, sequence_length=64), plain(folders["llama"], texts, "mean", 64)
    )


def test_no_text_has_no_vectors(bert_folder: Path) -> None:
    assert embed(LitMLM(str(bert_folder)), [], sequence_length=16).shape == (0, 32)


def test_pooling_is_that_of_each_text_alone() -> None:
    lengths = [3, 1, 5]
    hidden = torch.randn(sum(lengths), 4, generator=torch.Generator().manual_seed(0))
    parts = hidden.split(lengths)
    torch.testing.assert_close(
        pool(hidden, torch.tensor(lengths), "mean"), torch.stack([part.double().mean(0).float() for part in parts])
    )
    assert torch.equal(pool(hidden, torch.tensor(lengths), "first"), torch.stack([part[0] for part in parts]))
    assert pool(hidden.bfloat16(), torch.tensor(lengths), "mean").dtype == torch.bfloat16


# Mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "max"}, r"^pooling must be one of mean, first, got 'max'$"),
        ({"sequence_length": 129}, r"^sequence_length must be at most the model's 128, got 129$"),
        ({"sequence_length": 64, "slots": 63}, r"^slots must hold a text of sequence_length \(64\), got 63$"),
        ({"sequence_length": 2}, r"^sequence_length must be above a text's 2 special tokens, got 2$"),
    ],
)
def test_bad_options_are_said(bert_folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        embed(LitMLM(str(bert_folder)), ["w1"], **{"sequence_length": 16, **options})


def test_text_without_a_token_is_said(bert_folder: Path, tmp_path: Path) -> None:
    """Where the tokenizer puts nothing around it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "w1": 1, "[MASK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", mask_token="[MASK]").save_pretrained(tmp_path)
    BertForMaskedLM(
        BertConfig(vocab_size=3, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    ).save_pretrained(tmp_path)
    module: LitEncoder = LitMLM(str(tmp_path))
    assert embed(module, ["w1", "w1 w1"], sequence_length=16).shape == (2, 8)
    with pytest.raises(ValueError, match=r"^texts must have at least one token each, got none in ' '$"):
        embed(module, ["w1", " "], sequence_length=16)
