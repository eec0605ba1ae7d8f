"""What the callbacks cost: time inside their hooks as a share of the steps' time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

from lit_encoders import LitMLM, TextDataModule
from lit_encoders.callbacks import L2SP, LayerFreezing, WeightDrift, WeightReversion

# On two CPU cores a step takes several seconds. The shares are of this many steps after the first, instead of 50.
STEPS = 6
# ModernBERT with 32M weights, at the size of Ettin's (Weller et al. 2025, arXiv:2507.11412).
MODEL: dict[str, Any] = {
    "model_type": "modernbert", "vocab_size": 50368, "hidden_size": 384, "num_hidden_layers": 10,
    "num_attention_heads": 6, "intermediate_size": 576, "max_position_embeddings": 1024, "local_attention": 128,
    "global_attn_every_n_layers": 3, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2,
    "sep_token_id": 3,
}  # fmt: skip
HOOKS = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end", "on_before_zero_grad")


class Clock(Callback):
    """Wall time of whole optimizer steps after the first."""

    def __init__(self) -> None:
        self.began = self.seconds = 0.0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            self.began = time.perf_counter()
        self.seconds = time.perf_counter() - self.began


@contextmanager
def timed(callback: Callback, names: tuple[str, ...]) -> Iterator[dict[str, float]]:
    """Count the time inside a callback's hooks; of each the first call is left out (threads, memory)."""
    spent: dict[str, float] = {}

    def wrap(name: str) -> Callable[..., Any]:
        inner = getattr(callback, name)

        def hook(*arguments: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            output = inner(*arguments, **keywords)
            spent[name] = spent[name] + time.perf_counter() - start if name in spent else 0.0
            return output

        return hook

    for name in names:
        setattr(callback, name, wrap(name))
    yield spent


class Measurements(Callback):
    """How long the figures take that are only looked at now and then."""

    def __init__(self, l2sp: L2SP, drift: WeightDrift) -> None:
        self.l2sp, self.drift = l2sp, drift
        self.seconds: dict[str, float] = {}

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        for name, measure in (("l2sp", self.l2sp.measure), ("drift", lambda: self.drift._record(trainer, pl_module))):
            start = time.perf_counter()
            measure()
            self.seconds[name] = time.perf_counter() - start


@pytest.mark.slow
def test_time_in_hooks(tokenizer: Any, make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    """At 8,192 tokens a step: L2SP at most 3 % (figures logged every 50 steps), the others 1 % (drift every 100)."""
    draw = random.Random(0)
    lines = (" ".join(f"w{draw.randrange(90)}" for _ in range(500)) for _ in range(40))
    (tmp_path / "text.txt").write_text("\n".join(lines) + "\n")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    module = LitMLM(MODEL, tokenizer=str(tmp_path / "tokenizer"))
    data = TextDataModule(str(tmp_path / "text.txt"), sequence_length=512, slots=8192, val_share=0.05)
    l2sp, drift, clock = L2SP({"0:5": 0.1, "rest": 0.01}), WeightDrift("0:5", every_n_steps=100), Clock()
    measured = Measurements(l2sp, drift)
    callbacks: dict[str, Callback] = {
        "L2SP": l2sp,
        "LayerFreezing": LayerFreezing("0:1", steps=":1000"),
        "WeightReversion": WeightReversion("3:7"),
        "WeightDrift": drift,
    }
    with ExitStack() as stack:
        spent = {name: stack.enter_context(timed(callback, HOOKS)) for name, callback in callbacks.items()}
        trainer = make_trainer(
            max_steps=1 + STEPS,
            callbacks=[*callbacks.values(), measured, clock],
            limit_val_batches=0,
            log_every_n_steps=50,
        )
        trainer.fit(module, data)
    a_step = clock.seconds / STEPS
    each = {name: sum(hooks.values()) / STEPS for name, hooks in spent.items()}
    each["L2SP"] += measured.seconds["l2sp"] / 50
    each["WeightDrift"] += measured.seconds["drift"] / 100
    shares = {name: seconds / a_step for name, seconds in each.items()}
    weights = sum(parameter.numel() for parameter in module.parameters())
    print(
        f"\n{weights / 1e6:.1f}M weights, {a_step:.2f} s a step; "
        + ", ".join(f"{n} {s:.3%}" for n, s in shares.items())
    )
    assert shares.pop("L2SP") <= 0.03
    assert max(shares.values()) <= 0.01
