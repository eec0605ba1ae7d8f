"""Export of any head of a run: plain transformers gives the logits that the run's own forward gives with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from transformers import AutoModelForMaskedLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from lit_encoders import LitEncoder, MaskStream, TextDataModule
from lit_encoders.callbacks import CLMDetour
from lit_encoders.cli import main
from lit_encoders.models.attention import PackLayout
from lit_encoders.weights.export import export_checkpoint

MakeTrainer = Callable[..., Trainer]
STREAMS = [
    MaskStream("wide", 0.5, 0.3, head="wide"),
    MaskStream("narrow", 0.1, 0.4, head="narrow"),
    MaskStream("third", 0.3, 0.3, head="third"),
]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
BACKBONES: dict[str, dict[str, Any]] = {
    "bert": SMALL,
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "electra": {**SMALL, "embedding_size": 16},
    "modernbert": {**SMALL, **IDS, "local_attention": 8},
    "roberta": {**SMALL, "pad_token_id": 0},
    "ultrabert": {**SMALL, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "num_key_value_heads": 2},
}


def run(
    make_trainer: MakeTrainer, folder: Path, text: Path, kind: str, path: Path, **settings: Any
) -> tuple[LitEncoder, Path]:
    """A few steps, in which each head becomes one of its own."""
    if kind not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this version of transformers has no {kind}")
    tied = settings.pop("tied", True)
    backbone = {"model_type": kind, "vocab_size": 95, "max_position_embeddings": 64, **BACKBONES[kind]}
    module = LitEncoder(
        {**backbone, "tie_word_embeddings": tied},
        tokenizer=str(folder),
        streams=STREAMS,
        learning_rate=1e-2,
        **settings,
    )
    data = TextDataModule(str(text), sequence_length=48, slots=192, val_share=0.1)
    detour = CLMDetour(steps=2, decay_share=0.5, decay_mask_ratio=None, head_warmup_steps=2)
    trainer = make_trainer(callbacks=[detour], limit_val_batches=0)
    trainer.fit(module, data)
    trainer.save_checkpoint(path / "run.ckpt")
    return module.eval(), path / "run.ckpt"


def logits_of(module: LitEncoder, ids: torch.Tensor, head: str | None) -> torch.Tensor:
    assert module.backbone is not None
    with torch.no_grad():
        hidden = module.backbone.encode(ids, torch.arange(len(ids)), PackLayout(np.array([len(ids)])))
        return module.backbone.logits(hidden, module.head_key(head))


KINDS = [(kind, {}) for kind in BACKBONES]
KINDS += [("bert", {"tie_decoder": True}), ("bert", {"tied": False}), ("modernbert", {"tied": False})]


@pytest.mark.parametrize(("kind", "settings"), KINDS, ids=str)
def test_x01_any_head_in_plain_transformers(
    bert_folder: Path, text_file: Path, make_trainer: MakeTrainer, tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    """X07, X09: tied and untied; the load report is empty, in training the heads went ways of their own."""
    module, checkpoint = run(make_trainer, bert_folder, text_file, kind, tmp_path, clm_head="copy", **settings)
    ids = torch.randint(5, 95, (20,), generator=torch.Generator().manual_seed(0))
    found = {}
    for head in (None, "wide", "narrow", "third", "clm"):
        folder = export_checkpoint(checkpoint, tmp_path / f"export-{head}", head=head)
        model, report = AutoModelForMaskedLM.from_pretrained(
            folder, output_loading_info=True, attn_implementation="sdpa"
        )
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), head
        own = head in (None, "wide") or (head == "clm" and settings.get("tied", True))
        tied = settings.get("tied", True) and (own or settings.get("tie_decoder", False))
        decoder, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        if kind != "ultrabert":
            assert (decoder.data_ptr() == embedding.data_ptr()) == tied, head
        with torch.no_grad():
            found[head] = model.eval()(ids[None]).logits[0]
        torch.testing.assert_close(found[head], logits_of(module, ids, head), rtol=1e-4, atol=1e-5)
    assert torch.equal(found[None], found["wide"]), "the first stream's head is the model's own"
    assert len({tuple(x.flatten().tolist()) for x in found.values()}) == 4


def test_an_exported_head_trains_on_as_the_model_s_own(
    bert_folder: Path, text_file: Path, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    _, checkpoint = run(make_trainer, bert_folder, text_file, "bert", tmp_path)
    export_checkpoint(checkpoint, tmp_path / "export", head="third", dtype="bfloat16")
    module = LitEncoder(str(tmp_path / "export"))
    trainer = make_trainer(max_steps=1, limit_val_batches=0)
    trainer.fit(module, TextDataModule(str(text_file), sequence_length=48, slots=192, val_share=0.1))
    assert module.backbone is not None
    assert not module.backbone.tied


def test_a_head_that_the_run_did_not_train(
    bert_folder: Path,
    text_file: Path,
    make_trainer: MakeTrainer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, checkpoint = run(make_trainer, bert_folder, text_file, "bert", tmp_path)
    with pytest.raises(
        ValueError, match=r"head must be one that the run trained \(wide, narrow, third\), got 'fourth'"
    ):
        export_checkpoint(checkpoint, tmp_path / "export", head="fourth")
    assert not (tmp_path / "export").exists()
    arguments = ["export", "--checkpoint", str(checkpoint), "--output", str(tmp_path / "export"), "--head"]
    assert main([*arguments, "fourth"]) != 0
    message = capsys.readouterr().err.strip()
    assert "head must be one that the run trained" in message
    assert "Traceback" not in message
    assert main([*arguments, "narrow"]) == 0
    assert "AutoModelForMaskedLM" in capsys.readouterr().out
