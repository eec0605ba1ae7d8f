"""A text of 600 MB: memory stays what a small one takes, it is tokenised once, and a stream does not wait for it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

MEGABYTES = 600
# What a run prints of itself: seconds from its start to its first step, and its largest resident memory.
RUN = """
import resource, sys, time
began = time.perf_counter()
from lightning.pytorch import Callback, Trainer
from lit_encoders import LitMLM, TextDataModule
from lit_encoders.callbacks import CLMDetour

model, text, val, cache, streaming = sys.argv[1:6]
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

class First(Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 0:
            print("first", time.perf_counter() - began, flush=True)

data = TextDataModule(
    text, val=val, sequence_length=64, slots=512, cache_dir=cache, streaming=streaming == "yes", num_workers=0
)
trainer = Trainer(
    accelerator="cpu", max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    num_sanity_val_steps=0, limit_val_batches=1, callbacks=[CLMDetour(steps=5), First()], default_root_dir=cache,
)
trainer.fit(LitMLM(model), data)
print("memory", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1e6, flush=True)
"""


def write_text(path: Path, megabytes: int) -> None:
    """Lines of about 200 words of the tests' tokenizer, none like the one before."""
    block = [" ".join(f"w{(7 * line + word * word) % 90}" for word in range(200)) for line in range(500)]
    with path.open("w") as file:
        number = 0
        while file.tell() < megabytes * 1_000_000:
            file.write("".join(f"w{number % 90} w{number // 90 % 90} {line}\n" for line in block))
            number += 1


def fit(model: Path, text: Path, val: Path, cache: Path, streaming: str = "no") -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", "-c", RUN, str(model), str(text), str(val), str(cache), streaming]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith(("first ", "memory "))]
    return {name: float(value) for name, value in lines}


@pytest.mark.slow
def test_a_large_text(bert_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, val = tmp_path / "text.txt", tmp_path / "val.txt"
    write_text(text, MEGABYTES)
    write_text(val, 1)
    began = time.perf_counter()
    first = fit(bert_folder, text, val, tmp_path / "cache")
    took = time.perf_counter() - began
    second = fit(bert_folder, text, val, tmp_path / "cache")
    stream = fit(bert_folder, text, val, tmp_path / "stream", "yes")
    with capsys.disabled():
        print(f"\nfirst start {first}, whole run {took:.0f} s; second start {second}; streaming {stream}")
        print(f"peak of all runs: {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6:.2f} GB")
    for run in (first, second, stream):
        assert run["memory"] < 1.5
    assert second["first"] < 10
    assert stream["first"] < first["first"] / 2
