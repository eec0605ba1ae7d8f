"""Stop a run before a loss or a gradient that is not finite gets into its weights.

How a fused optimizer leaves everything as it is where ``found_inf`` is 1, its step count too: torch/optim/adam.py,
``_fused_adam``; torch.amp.GradScaler uses the same attribute.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from typing_extensions import override

from lit_encoders.callbacks.objective_schedule import find_schedule
from lit_encoders.data.packs import PackedBatch
from lit_encoders.models.sharding import local
from lit_encoders.modules.token_mean import LOSS_DIVISOR, TokenMeanModule
from lit_encoders.resume.stops import RunStoppedError

FILE = "nonfinite.json"
# Where reading a number waits for all that was asked of the device before, and where ``found_inf`` spares the wait.
DEFERRED = ("cuda",)
# How many documents and parameters the message names; the file has all.
SHOWN = 6


@torch.no_grad()
def gradient_norms(gradients: Sequence[Tensor]) -> Tensor:
    """L2 norms of gradients, float32 (gradients,), on the device of the first; nothing is read.

    Infinite also where squares are, beyond 1e19: so would be Adam's second moment, and the norm to clip by.

    Args:
        gradients: any shapes and types; of one that is sharded, this process's piece counts.

    >>> gradient_norms([torch.tensor([3.0, 4.0]), torch.tensor([[float("inf")]])])
    tensor([5., inf])
    """
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    pieces = [local(gradient) for gradient in gradients]
    pieces = [piece._values() if piece.is_sparse else piece for piece in pieces]
    for place, piece in enumerate(pieces):
        places.setdefault((piece.device, piece.dtype), []).append(place)
    norms: list[Tensor] = [torch.empty(0)] * len(pieces)
    for (_, dtype), mine in places.items():
        # The norm of finite numbers in half precision may be beyond its range.
        wider = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        for place, norm in zip(mine, torch._foreach_norm([pieces[i] for i in mine], 2, dtype=wider), strict=True):
            norms[place] = norm.to(pieces[0].device, torch.float32, non_blocking=True)
    return torch.stack(norms) if norms else torch.zeros(0)


def not_finite(norms: Tensor, losses: Tensor) -> Tensor:
    """1 where a loss or a norm is not finite, else 0: float32, scalar, not read.

    Args:
        norms: float32 (gradients,).
        losses: (micro-batches,).

    >>> not_finite(torch.tensor([1.0, 2.0]), torch.tensor([0.5])), not_finite(torch.ones(1), torch.tensor([math.nan]))
    (tensor(0.), tensor(1.))
    """
    sound = losses.isfinite().all() & norms.isfinite().all().to(losses.device)
    return sound.logical_not().to(torch.float32)


def can_skip(optimizer: Optimizer) -> bool:
    """Whether an optimizer's kernel leaves weights, moments and step count alone where ``found_inf`` is 1.

    Not the fused SGD, which would keep a momentum that nobody has filled. Nor one with hooks after its step, such as a
    decoupled `L2SP`, which know nothing of a step that was skipped.
    """
    return (
        type(optimizer) in (Adam, AdamW)
        and all(group["fused"] for group in optimizer.param_groups)
        and not optimizer._optimizer_step_post_hooks
        and not hasattr(optimizer, "found_inf")
    )


@dataclass(frozen=True)
class _MicroBatch:
    """A micro-batch that was trained: its loss, on the device, and the batch's place in the text where it has one."""

    loss: Tensor
    place: Mapping[str, Any]


@dataclass(frozen=True)
class _Seen:
    """All of an optimizer step that a report needs, should its flag be 1.

    Attributes:
        step: its number, counted from 1.
        micro_batches: on this rank.
        parameters: those with a gradient.
        norms: of their gradients on this rank, (parameters,).
        flag: 1 where any rank saw something that is not finite, else 0, on the device.
    """

    step: int
    micro_batches: list[_MicroBatch]
    parameters: list[nn.Parameter]
    norms: Tensor
    flag: Tensor


class NumericsGuard(Callback):
    """Stop the run before an optimizer step whose loss or gradient is not finite.

    Weights, moments, checkpoints and exports stay as the step before left them. The error names the step, what is not
    finite, and the documents; ``nonfinite.json`` in the run folder has all of them: for each micro-batch of the step
    and each rank its loss (of a `TokenMeanModule`, its sum over targets in nats), documents and place in the plan, and
    the norm of each gradient that is not finite.

    All gradients become one number on the device, read once per step. Where that would wait for a GPU and the optimizer
    is a fused Adam or AdamW, its kernel gets the number and leaves all as it is, and the run ends when the next step's
    gradients are asked for: no later than the next validation or checkpoint.

    It looks after all other callbacks, wherever it is listed, so that it sees what they add to gradients (`L2SP`), and
    before clipping, which would spread what is not finite. Works on any LightningModule; documents need batches that
    are `PackedBatch`. Under a gradient scaler (16-mixed) it does nothing: scalers look for such steps and leave them
    out themselves.

    Raises:
        RunStoppedError: a loss or gradient is not finite.
        NotImplementedError: the strategy keeps gradients to itself (DeepSpeed).
    """

    def __init__(self) -> None:
        super().__init__()
        self._rests = False
        self._place: Mapping[str, Any] = {}
        self._window: list[_MicroBatch] = []
        # The step whose flag waits to be read, and the optimizers that hold one.
        self._waiting: _Seen | None = None
        self._marked: list[Optimizer] = []

    # ---- hooks -----------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if trainer.strategy.handles_gradient_accumulation:
            raise NotImplementedError(
                f"NumericsGuard cannot look into the gradients of {type(trainer.strategy).__name__}: use DDP or FSDP2"
            )
        # A new list: Lightning goes through the old one at this moment.
        others = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        saving = [callback for callback in others if isinstance(callback, Checkpoint)]
        trainer.callbacks = [*(c for c in others if not isinstance(c, Checkpoint)), self, *saving]  # type: ignore[attr-defined]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._forget()
        self._rests = getattr(trainer.precision_plugin, "scaler", None) is not None
        if self._rests:
            rank_zero_info("NumericsGuard does nothing: the gradient scaler leaves out what is not finite itself")
        elif trainer.is_global_zero:
            # A run that goes on meets it again, or has got past it.
            (Path(trainer.default_root_dir) / FILE).unlink(missing_ok=True)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        known = isinstance(batch, PackedBatch)
        self._place = {**batch.here._asdict(), "documents": batch.documents} if known else {}

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if not self._rests:
            self._window.append(_MicroBatch(loss.detach(), self._place))

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._rests:
            return
        # Only now: the device has this step's passes before it, and does not run out of work while the host waits.
        self._settle(trainer, pl_module)
        micro_batches, self._window = self._window, []
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms = gradient_norms([p.grad for p in parameters if p.grad is not None])
        losses = [micro_batch.loss.reshape(-1) for micro_batch in micro_batches]
        device = trainer.strategy.root_device
        flag = not_finite(norms, torch.cat(losses) if losses else torch.zeros(0, device=norms.device)).to(device)
        if trainer.world_size > 1:
            # Not the strategy's reduce(), whose barrier waits for the device.
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        self._waiting = _Seen(trainer.global_step + 1, micro_batches, parameters, norms, flag)
        if norms.device.type in DEFERRED and can_skip(optimizer):
            optimizer.found_inf = flag  # type: ignore[attr-defined]
            self._marked.append(optimizer)
        else:
            self._settle(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._unmark()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._settle(trainer, pl_module)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._settle(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._settle(trainer, pl_module)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._forget()

    def _unmark(self) -> None:
        for optimizer in self._marked:
            del optimizer.found_inf  # type: ignore[attr-defined]
        self._marked = []

    def _forget(self) -> None:
        self._unmark()
        self._window, self._waiting = [], None

    # ---- stopping --------------------------------------------------------------------------------------------------

    def _settle(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the flag that waits, if one does; every rank reads the same."""
        seen, self._waiting = self._waiting, None
        if seen is None or not bool(seen.flag):
            return
        every = _gather(_of_rank(pl_module, seen, _loss_scale(trainer, pl_module)), trainer.world_size)
        schedule = find_schedule(trainer)
        record = {
            "step": seen.step,
            "phase": None if schedule is None else schedule.phase(seen.step - 1).name,
            "training_text": [str(file) for file in getattr(getattr(trainer, "datamodule", None), "files", [])],
            **_join(every),
        }
        path = Path(trainer.default_root_dir) / FILE
        where = f"'{path}' has the whole list"
        if trainer.is_global_zero:
            try:
                _write(record, path)
            except OSError as error:  # The other ranks wait.
                where = f"'{path}' cannot be written ({error.strerror or error})"
        trainer.strategy.barrier()
        raise RunStoppedError(f"{describe(record)}; {where}")


def describe(record: Mapping[str, Any]) -> str:
    """Say in one line what was not finite, and with which documents: where it was a loss, those of its micro-batch.

    Args:
        record: what ``nonfinite.json`` holds.

    >>> here = {"rank": 0, "micro_batch": 2, "loss": "nan", "documents": [7, 9]}
    >>> describe({"step": 3, "phase": "decay", "micro_batches": [here], "gradients": {"w": "nan"}})
    "stopped before step 3 (phase 'decay'): loss nan in micro-batch 2, with documents 7, 9 of the training text"
    >>> describe({"step": 1, "phase": None, "micro_batches": [{**here, "loss": 0.5}], "gradients": {"w": "inf"}})
    'stopped before step 1: gradient norm not finite in w (inf), with documents 7, 9 of the training text'
    """
    every = record["micro_batches"]
    wrong = [one for one in every if isinstance(one["loss"], str)]
    ranks = any(one["rank"] for one in every)
    if wrong:
        first = wrong[0]
        on_rank = f" on rank {first['rank']}" if ranks else ""
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        what = f"loss {first['loss']} in micro-batch {first['micro_batch']}{on_rank}{more}"
    else:
        norms = [f"{name} ({norm})" for name, norm in record["gradients"].items()]
        what = f"gradient norm not finite in {_some(norms)}"
    documents = list(dict.fromkeys(number for one in wrong or every for number in one.get("documents", [])))
    with_them = f", with documents {_some(documents)} of the training text" if documents else ""
    phase = "" if record["phase"] is None else f" (phase {record['phase']!r})"
    return f"stopped before step {record['step']}{phase}: {what}{with_them}"


def _some(things: Sequence[Any]) -> str:
    more = f" and {len(things) - SHOWN:,} more" if len(things) > SHOWN else ""
    return ", ".join(str(thing) for thing in things[:SHOWN]) + more


def _number(value: float) -> float | str:
    """A number as JSON can hold it: what is not finite becomes a text."""
    return value if math.isfinite(value) else str(value)


def _loss_scale(trainer: Trainer, module: LightningModule) -> float:
    """What a loss has been divided by on its way to the backward pass."""
    return trainer.accumulate_grad_batches * (LOSS_DIVISOR if isinstance(module, TokenMeanModule) else 1.0)


def _of_rank(module: LightningModule, seen: _Seen, loss_scale: float) -> dict[str, Any]:
    """This rank's part of the record, in plain types; a gradient with its parameter's place in the module."""
    names = {id(parameter): (place, name) for place, (name, parameter) in enumerate(module.named_parameters())}
    gradients = []
    for number, (parameter, norm) in enumerate(zip(seen.parameters, seen.norms.tolist(), strict=True)):
        if not math.isfinite(norm):
            place, name = names.get(id(parameter), (len(names) + number, f"parameter {number} of the optimizer"))
            gradients.append((place, name, norm))
    micro_batches = []
    for number, micro_batch in enumerate(seen.micro_batches, 1):
        text = dict(micro_batch.place)
        if text:
            text["documents"] = text["documents"].tolist()
        loss = float(micro_batch.loss.sum()) * loss_scale
        micro_batches.append({"micro_batch": number, "loss": _number(loss), **text})
    return {"micro_batches": micro_batches, "gradients": gradients}


def _gather(own: dict[str, Any], world_size: int) -> list[dict[str, Any]]:
    every: list[Any] = [own] * world_size
    if world_size > 1:
        torch.distributed.all_gather_object(every, own)
    return every


def _join(every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One record of all ranks'; a norm is that of the first rank whose piece of the gradient is not finite."""
    found: dict[str, float] = {}
    # Sorting is stable: of one parameter, lower ranks come first.
    for _, name, norm in sorted((one for own in every for one in own["gradients"]), key=lambda one: one[0]):
        found.setdefault(name, norm)
    return {
        "micro_batches": [{"rank": rank, **one} for rank, own in enumerate(every) for one in own["micro_batches"]],
        "gradients": {name: _number(norm) for name, norm in found.items()},
    }


def _write(record: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}")
    beside.write_text(json.dumps(record, indent=2, allow_nan=False), encoding="utf-8")
    os.replace(beside, path)
