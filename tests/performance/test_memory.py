"""Bytes against the tensors of real models, the state of a real optimizer, and files on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, AdamW

from lit_encoders import LitMLM, TextDataModule
from lit_encoders.models.backbone import Backbone, load_config, load_language_model
from lit_encoders.models.sharding import local
from lit_encoders.optim.param_groups import parameter_groups
from lit_encoders.performance.memory import (
    bytes_per_device,
    checkpoint_bytes,
    export_bytes,
    moments_per_weight,
    piece_bytes,
)
from lit_encoders.weights.export import export_folder

# Odd numbers of rows, so that pieces are rounded up; large enough for a file's own bytes to be few.
BERT: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 120,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 301,
    "vocab_size": 5003,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


def make(dtype: torch.dtype = torch.float32) -> Backbone:
    return Backbone(load_language_model(BERT, load_config(BERT), dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", [None, "clm"])
def test_a_real_model_and_its_optimizer(dtype: torch.dtype, head: str | None) -> None:
    backbone = make(dtype)
    if head is not None:
        backbone.add_head(head)
    backbone.model.base_model.embeddings.requires_grad_(False)  # The tied decoder rests with it.
    held = bytes_per_device(backbone.parameters())
    optimizer = AdamW(parameter_groups(backbone, 0.1))
    for parameter in backbone.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    assert held.weights == sum(parameter.nbytes for parameter in backbone.parameters())
    assert held.gradients == sum(p.grad.nbytes for p in backbone.parameters() if p.grad is not None) < held.weights
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    assert held.moments == sum(value.nbytes for value in states) == 2 * held.gradients
    assert held.total == held.weights + held.gradients + held.moments
    own = make(dtype)
    more = sum(p.nbytes for p in backbone.heads.parameters())
    assert held.weights == bytes_per_device(own.parameters()).weights + more
    assert (more > 0) == (head is not None)


def test_pieces_are_those_of_fsdp2() -> None:
    """On the first of three ranks that exist in name only: no process holds more."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    backbone = make()
    whole, held = bytes_per_device(backbone.parameters()), bytes_per_device(backbone.parameters(), ranks=3)
    torch.distributed.init_process_group("fake", rank=0, world_size=3, store=FakeStore())
    try:
        backbone.shard(init_device_mesh("cpu", (3,)))
        pieces = sum(local(parameter).nbytes for parameter in backbone.parameters())
    finally:
        torch.distributed.destroy_process_group()
    assert held.weights == pieces
    assert whole.weights / 3 < held.weights < 1.01 * whole.weights / 3


def test_anchors_and_teacher() -> None:
    student, teacher = make(), make(torch.bfloat16)
    anchored = list(student.layers[0].parameters())
    for ranks, shard_teacher in ((1, False), (4, False), (4, True)):
        held = bytes_per_device(
            student.parameters(),
            anchors=anchored,
            teacher=teacher.parameters(),
            ranks=ranks,
            shard_teacher=shard_teacher,
        )
        assert held.anchors == sum(piece_bytes(weight, ranks) for weight in anchored)
        assert held.teacher == sum(piece_bytes(w, ranks if shard_teacher else 1) for w in teacher.parameters())
    assert piece_bytes(torch.zeros(()), 4) == 4  # A number is on every rank.


def test_files_of_a_real_run(make_trainer: Any, text_file: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    module = LitMLM(BERT, tokenizer=str(tokenizer_folder), clm_head="copy")
    data = TextDataModule(str(text_file), val_share=0.2, sequence_length=48, slots=96)
    trainer = make_trainer(max_steps=1, limit_val_batches=0)
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert module.backbone is not None
    planned = checkpoint_bytes(module.backbone.parameters())
    assert (tmp_path / "a.ckpt").stat().st_size == pytest.approx(planned, rel=0.02)
    for dtype in (None, "bfloat16"):
        folder = export_folder(module.backbone.model, module.tokenizer, tmp_path / f"export-{dtype}", dtype=dtype)
        planned = export_bytes(module.backbone.model.parameters(), dtype and getattr(torch, dtype))
        assert (folder / "model.safetensors").stat().st_size == pytest.approx(planned, rel=0.02)


def test_moments_of_other_optimizers() -> None:
    assert moments_per_weight(None) == moments_per_weight(AdamW) == 2.0
    assert moments_per_weight(lambda groups: AdamW(groups, amsgrad=True)) == 3.0
    assert moments_per_weight(lambda groups: SGD(groups, lr=0.1)) == 0.0
    assert bytes_per_device(nn.Linear(2, 2).parameters(), moments=1.0).moments == 24
