"""Distillation holds a few chunks of logits more than MLM, and no (targets x vocabulary) tensor of either model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import resource, sys
import numpy as np, torch
from lit_encoders.models.attention import PackLayout
from lit_encoders.models.backbone import Backbone, RowGroup, load_config, load_language_model
from lit_encoders.objectives.losses import Teacher

def make(hidden):
    config = {"model_type": "bert", "vocab_size": 50_000, "hidden_size": hidden, "num_hidden_layers": 2,
              "num_attention_heads": 4, "intermediate_size": 2 * hidden, "max_position_embeddings": 512}
    return Backbone(load_language_model(config, load_config(config), torch.float32))

torch.manual_seed(0)
student = make(128)
optimizer = torch.optim.AdamW(student.parameters(), fused=True)
packing = PackLayout(np.full(8, 512))
ids, positions = torch.randint(5, 50_000, (4096,)), torch.arange(512).repeat(8)
rows, labels = torch.arange(0, 4000, 2), torch.randint(5, 50_000, (2000,))
teacher, size = None, 0
if sys.argv[1] == "kd":
    teacher = make(256).eval().requires_grad_(False)
    size = sum(p.numel() * p.element_size() for p in teacher.parameters())
for _ in range(2):
    group = RowGroup(rows, labels)
    if teacher is not None:
        said = teacher.teach(ids, positions, packing, [rows])[0]
        group = RowGroup(rows, labels, teacher=Teacher(*said, 2.0), kd_weight=0.5)
    student(ids, positions, packing, [group])[0][0].backward()
    optimizer.step()
    optimizer.zero_grad()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, size)
"""


@pytest.mark.slow
def test_a_step_with_a_teacher_takes_a_third_more_at_most(tmp_path: Path) -> None:
    """Vocabulary 50,000, 2,000 targets: peak memory at most 1.3 times that of MLM, and the teacher's weights."""
    script = tmp_path / "step.py"
    script.write_text(SCRIPT)
    peaks = {}
    for kind in ("mlm", "kd"):
        command = [sys.executable, str(script), kind]
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "MALLOC_ARENA_MAX": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        peak, size = map(int, done.stdout.split())
        peaks[kind] = peak - size
        print(f"{kind}: {peak / 1e6:.0f} MB, of which the teacher {size / 1e6:.0f} MB")
    assert peaks["kd"] <= 1.3 * peaks["mlm"]
    # Logits of all targets would be 400 MB for each model, and as much again for each step of the softmax.
    assert peaks["kd"] - peaks["mlm"] < 600e6
