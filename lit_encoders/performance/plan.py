"""What a run will take: steps, FLOPs, hours and bytes, and what would stop it. No text is read, no weight is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from textwrap import fill
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer
from rich.console import Console
from rich.table import Table
from torch.optim import AdamW

from lit_encoders.callbacks.anchored import AnchoredCallback
from lit_encoders.callbacks.hf_export import HFExport
from lit_encoders.callbacks.layer_freezing import LayerFreezing
from lit_encoders.callbacks.objective_schedule import ObjectiveSchedule, Phase, find_schedule, resolve_phases
from lit_encoders.data.tokens import affixes
from lit_encoders.mistakes import one_line
from lit_encoders.modules.lit_encoder import LitEncoder
from lit_encoders.modules.lit_kd import LitKD
from lit_encoders.modules.precision import check_precision
from lit_encoders.objectives import Objective
from lit_encoders.performance.flops import Work, encoder_shape, full_pieces, head_shape, pack_work
from lit_encoders.performance.memory import (
    DeviceBytes,
    bytes_per_device,
    checkpoint_bytes,
    export_bytes,
    moments_per_weight,
    piece_bytes,
)

if TYPE_CHECKING:
    from lit_encoders.data.datamodule import TextDataModule

# What a run refuses a setting with.
_REFUSALS = (ValueError, TypeError, NotImplementedError, OSError, ImportError, MisconfigurationException)


@dataclass(frozen=True)
class PlannedPhase:
    """One stretch of a run.

    Attributes:
        name: of the phase.
        trains: objective and mask ratios.
        steps: optimizer steps.
        tokens: slots, over all ranks.
        work: FLOPs of a pack.
        flops: of the phase, over all ranks.
    """

    name: str
    trains: str
    steps: int
    tokens: int
    work: Work
    flops: float


@dataclass
class Plan:
    """What a run will take, and what is wrong with it.

    Attributes:
        model: in words.
        step: in words.
        slots_per_step: tokens of an optimizer step, over all ranks.
        ranks: number of them.
        phases: in order; one of a single step where the run's length is not known.
        devices: bytes on each device, by how the ranks share the model.
        checkpoint: bytes of one.
        export: bytes of its weights.
        notes: what was assumed, and what is left out.
        problems: what would stop the run or make it another one, each a line with key, rule and value.
    """

    model: str
    step: str
    slots_per_step: int
    ranks: int
    phases: list[PlannedPhase] = field(default_factory=list)
    devices: dict[str, DeviceBytes] = field(default_factory=dict)
    checkpoint: int = 0
    export: int = 0
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


# ---- what is asked for ---------------------------------------------------------------------------------------------


def count_ranks(devices: object, num_nodes: object = 1) -> int | None:
    """The ranks that a trainer's settings ask for; None where only the machine can tell.

    >>> count_ranks(4, 2), count_ranks("2"), count_ranks([0, 1, 2]), count_ranks("auto"), count_ranks(-1)
    (8, 2, 3, None, None)
    """
    if isinstance(devices, str):
        found = [part.strip() for part in devices.split(",") if part.strip()]
        if not all(part.lstrip("-").isdigit() for part in found):
            return None
        devices = int(found[0]) if len(found) == 1 and "," not in devices else found
    count = len(devices) if isinstance(devices, list | tuple) else devices
    if not isinstance(count, int) or not isinstance(num_nodes, int) or count < 1:
        return None
    return count * num_nodes


def rank_problems(ranks: int, configured: int | None, accumulate: int, strategy: Any = None) -> list[str]:
    """What is wrong with a number of ranks.

    Args:
        ranks: to plan for.
        configured: that the trainer's settings ask for.
        accumulate: micro-batches of a step on each rank.
        strategy: the trainer's, as configured: a name, or ``class_path`` with ``init_args``.

    >>> rank_problems(4, configured=2, accumulate=8), len(rank_problems(3, configured=1, accumulate=8))
    ([], 1)
    """
    lines = []
    if configured is not None and (accumulate * configured) % ranks:
        lines.append(
            f"trainer.accumulate_grad_batches must give the {ranks} ranks as many packs each to keep the step of "
            f"trainer.devices, got {accumulate} x {configured} packs"
        )
    sizes = getattr(strategy, "init_args", None) or {}
    data, tensor = sizes.get("data_parallel_size"), sizes.get("tensor_parallel_size")
    if isinstance(data, int) and isinstance(tensor, int) and data * tensor != ranks:
        lines.append(
            f"trainer.strategy.data_parallel_size x tensor_parallel_size must be the {ranks} ranks, "
            f"got {data} x {tensor}"
        )
    return lines


# ---- the model, without its weights --------------------------------------------------------------------------------


def build_on_meta(module: LitEncoder) -> None:
    """Build a module as a run would, with all its heads and its teacher, but without weights and uncompiled.

    Args:
        module: not attached to a trainer yet.
    """
    # No name of a model: nothing is loaded then, and its configuration has been read.
    bare = {"source": {}, "teacher_source": {}, "compile_encoder": False}
    kept = {name: getattr(module, name) for name in bare if hasattr(module, name)}
    for name in kept:
        setattr(module, name, bare[name])
    try:
        with torch.device("meta"):
            module.configure_model()
    finally:
        for name, value in kept.items():
            setattr(module, name, value)


def phase_work(module: LitEncoder, objective: Objective, mask_ratio: float, slots: int, sequence_length: int) -> Work:
    """Count a pack of an objective, filled with pieces as long as they may be.

    MLM has ``mask_ratio`` of all slots as targets, CLM all: special tokens, which are none, are not known here.

    Args:
        module: built, with what is frozen for the whole run frozen.
        objective: of the pack.
        mask_ratio: of MLM without streams.
        slots: tokens of the pack.
        sequence_length: longest piece.
    """
    assert module.backbone is not None
    rows: dict[str | None, float] = {}
    asked = 0.0
    if objective == "clm":
        rows["clm" if "clm" in module.backbone.heads else None] = slots
    elif module.streams:
        for stream in module.dealer.streams:
            count = stream.share * stream.mask_ratio * slots
            rows[stream.head] = rows.get(stream.head, 0.0) + count
            asked += count if stream.distill else 0.0
    else:
        rows[None] = mask_ratio * slots
    teacher = None
    if isinstance(module, LitKD) and module.distil_in in ("both", objective):
        asked = asked if module.streams and objective == "mlm" else sum(rows.values())
        (theirs,) = module._teacher
        teacher = encoder_shape(theirs), head_shape(theirs), asked
    return pack_work(
        encoder_shape(module.backbone),
        {name: head_shape(module.backbone, name) for name in rows},
        rows,
        full_pieces(slots, sequence_length),
        objective == "clm",
        teacher,
    )


# ---- what would go wrong -------------------------------------------------------------------------------------------


@contextmanager
def _noted(problems: list[str]) -> Iterator[None]:
    """Take what a run would be refused with as a line, and go on."""
    try:
        yield
    except _REFUSALS as error:
        problems.append(one_line(str(error) or type(error).__name__))


def short_phases(phases: Sequence[Phase], steps: int | None, tokens: float | None, slots_per_step: int) -> list[str]:
    """Phases, or a whole budget, that are not one optimizer step long, and are rounded up to one.

    Args:
        phases: of a schedule.
        steps: its budget in optimizer steps; or
        tokens: in slots.
        slots_per_step: slots of a step, over all ranks.

    >>> short_phases([Phase("decay", "mlm", share=0.1)], steps=None, tokens=1000, slots_per_step=256)
    ["schedule phase 'decay' must be at least one step of 256 tokens, got 100 tokens"]
    """
    if tokens is not None and tokens < slots_per_step:
        return [f"schedule.tokens must be at least one step of {slots_per_step:,} tokens, got {tokens:,.0f}"]
    lines = []
    for phase in phases:
        length = float(slots_per_step)
        if phase.tokens is not None:
            length = phase.tokens
        elif phase.share is not None:
            length = phase.share * (tokens or (steps or 0) * slots_per_step)
        if 0 < round(length, 6) < slots_per_step:
            lines.append(
                f"schedule phase {phase.name!r} must be at least one step of {slots_per_step:,} tokens, "
                f"got {length:,.0f} tokens"
            )
    return lines


def drop_long_warmups_(schedule: ObjectiveSchedule, slots_per_step: int) -> list[str]:
    """Take away warm-ups that do not fit their phase, so that the others can be looked at; say which.

    Args:
        schedule: changed in place.
        slots_per_step: slots of a step, over all ranks.
    """

    def refusals(phase: Phase) -> list[str]:
        lines: list[str] = []
        with _noted(lines):
            resolve_phases([phase], steps=schedule.steps, tokens=schedule.tokens, slots_per_step=slots_per_step)
        return lines

    found: list[str] = []
    for number, phase in enumerate(schedule.phases):
        bare = replace(phase, warmup_steps=None, warmup_tokens=None, warmup_share=None)
        if not refusals(bare) and (lines := refusals(phase)):
            found += lines
            schedule.phases[number] = bare
    return found


def _schedule_problems(trainer: Trainer, module: LitEncoder, schedule: ObjectiveSchedule, step: int) -> list[str]:
    problems = short_phases(schedule.phases, schedule.steps, schedule.tokens, step)
    problems += drop_long_warmups_(schedule, step)
    with _noted(problems):
        schedule.setup(trainer, module, "fit")
    return problems


def _timed(trainer: Trainer) -> bool:
    """Whether the clock ends the run (trainer.max_time)."""
    return any(isinstance(callback, Timer) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def _data_problems(module: LitEncoder, data: TextDataModule) -> list[str]:
    """What a datamodule would refuse before it reads any text."""
    problems: list[str] = []
    for source in (*data.train_sources.values(), *data.val_sources.values()):
        with _noted(problems):
            source.paths()  # Whether there are such files; none is opened.
    with _noted(problems):
        data._check_length()
    if data.source_names and data._ends:
        with _noted(problems):
            data._mix({})  # Refuses before it looks at any.
    with _noted(problems):
        _ = module.tokenizer  # Whether it fits the model.
        around = affixes(data.tokenizer)
        special = len(around.prefix) + len(around.suffix)
        if data.sequence_length < special + 1:
            raise ValueError(
                f"data.sequence_length must hold a token beside the {special} special ones of a document, "
                f"got {data.sequence_length}"
            )
    return problems


def _module_problems(trainer: Trainer, module: LitEncoder) -> list[str]:
    """What a module would refuse, but for kernels: those depend on the device."""
    problems: list[str] = []
    with _noted(problems):
        check_precision(str(trainer.precision))
    if isinstance(module, LitKD):
        with _noted(problems):
            module.check_teacher()
    if type(module).configure_optimizers is LitEncoder.configure_optimizers:
        if module.optimizer_callable is None:
            # The fused one, that a run has, takes no parameters without weights.
            module.optimizer_callable = lambda groups: AdamW(groups, lr=module.learning_rate)
        with _noted(problems):
            made: Any = module.configure_optimizers()
            schedule = find_schedule(trainer)
            if isinstance(made, dict) and schedule is not None and schedule.resolved:
                trainer.strategy.lr_scheduler_configs = [SimpleNamespace(**made["lr_scheduler"])]  # type: ignore[list-item]
                schedule.on_fit_start(trainer, module)
    return problems


def _callback_problems(trainer: Trainer, module: LitEncoder) -> tuple[list[str], list[AnchoredCallback]]:
    """What callbacks of this library would refuse; freezes what is frozen for the whole run.

    Returns:
        The lines, and the callbacks that hold anchors.
    """
    problems: list[str] = []
    schedule = find_schedule(trainer)
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, LayerFreezing | HFExport):
            with _noted(problems):
                callback.setup(trainer, module, "fit")
                if schedule is None or schedule.resolved:  # Else no phase has a place yet.
                    callback.on_fit_start(trainer, module)
    anchored = []
    for callback in callbacks:
        if isinstance(callback, AnchoredCallback):
            with _noted(problems):
                callback.parameters = callback.choose(trainer, module)
                anchored.append(callback)
    return problems, anchored


# ---- the plan ------------------------------------------------------------------------------------------------------


def make_plan(
    trainer: Trainer,
    module: LitEncoder,
    data: TextDataModule,
    *,
    ranks: int | None = None,
    devices: object = 1,
    num_nodes: object = 1,
    strategy: Any = None,
) -> Plan:
    """Say what a run will take.

    Args:
        trainer: of one process, with the run's callbacks and limits; of no use afterwards.
        module: as configured; of no use afterwards.
        data: as configured; nothing is read.
        ranks: to plan for; None takes ``devices`` x ``num_nodes``, and 1 where these are no numbers.
        devices: the trainer's setting.
        num_nodes: the trainer's setting.
        strategy: the trainer's setting.

    Raises:
        TypeError: the module is no `LitEncoder`.
    """
    if not isinstance(module, LitEncoder):
        raise TypeError(f"model must be a LitEncoder to be planned, got {type(module).__name__}")
    configured = count_ranks(devices, num_nodes)
    accumulate = trainer.accumulate_grad_batches
    asked, ranks = ranks, ranks or configured or 1
    # Before a schedule or the checks below set anything.
    mask_ratio, optimizer = module.mask_ratio, module.optimizer_callable
    moments = moments_per_weight(optimizer)
    build_on_meta(module)
    trainer.strategy.connect(module)
    # What callbacks ask the trainer for; the text itself is not there.
    trainer.strategy.world_size = ranks  # type: ignore[attr-defined]
    trainer.datamodule = SimpleNamespace(slots=data.slots, sequence_length=data.sequence_length)  # type: ignore[attr-defined]
    data.trainer = module.trainer = trainer

    step = data.slots * accumulate * ranks
    plan = Plan("", "", step, ranks)
    schedule = find_schedule(trainer)
    plan.problems = rank_problems(ranks, configured, accumulate, strategy) + _data_problems(module, data)
    if schedule is not None:
        plan.problems += _schedule_problems(trainer, module, schedule, step)
    elif trainer.max_steps < 0 and trainer.max_epochs in (None, -1) and not _timed(trainer):
        plan.problems.append("schedule or trainer.max_steps must end the run, got neither")
    plan.problems += _module_problems(trainer, module)
    lines, anchored = _callback_problems(trainer, module)
    plan.problems = list(dict.fromkeys(plan.problems + lines))

    assert module.backbone is not None
    parameters = list(module.backbone.parameters())
    size, trains = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
    kind = str(module.weight_dtype).removeprefix("torch.")
    frozen = "" if trains == size else f", {size - trains:,} of them frozen for the whole run"
    plan.model = f"{module.config.model_type}, {len(module.backbone.layers)} layers, {size:,} weights in {kind}{frozen}"
    plan.step = (
        f"{step:,} tokens: {data.slots:,} slots x {accumulate} micro-batches x {ranks} rank{'s' if ranks > 1 else ''}"
    )

    def phase(name: str, objective: Objective, steps: int, ratio: float) -> PlannedPhase:
        work = phase_work(module, objective, ratio, data.slots, data.sequence_length)
        streams = ", ".join(f"{s.name} {s.mask_ratio:g}" for s in module.streams)
        trains = "clm" if objective == "clm" else f"mlm, mask ratio {streams or format(ratio, 'g')}"
        return PlannedPhase(name, trains, steps, steps * step, work, steps * accumulate * ranks * work.total)

    if schedule is not None:
        plan.phases = [
            phase(p.name, p.phase.objective, p.steps, p.phase.mask_ratio or mask_ratio) for p in schedule.resolved
        ]
    elif trainer.max_steps >= 0:
        plan.phases = [phase("run", module.objective, trainer.max_steps, mask_ratio)]
    if not plan.phases:  # How long the run is cannot be said.
        plan.phases = [phase("each step", module.objective, 1, mask_ratio)]

    _add_bytes(plan, trainer, module, anchored, moments)
    plan.notes += _assumptions(trainer, module, data, plan)
    if optimizer is not None:
        plan.notes.append(f"moments: {moments:g} per weight, as the optimizer keeps them of a small matrix")
    if asked is None and configured is None:
        plan.notes.append(f"trainer.devices {devices!r} is counted as 1 rank: --devices says otherwise")
    if asked is not None and configured not in (None, asked) and not rank_problems(ranks, configured, accumulate):
        plan.notes.append(
            f"a step has {ranks / (configured or 1):g} times the tokens that it has on trainer.devices: "
            f"trainer.accumulate_grad_batches {accumulate * (configured or 1) // ranks} would keep it"
        )
    return plan


def _add_bytes(
    plan: Plan, trainer: Trainer, module: LitEncoder, anchored: Sequence[AnchoredCallback], moments: float
) -> None:
    """Fill in what stands on a device and on disk."""
    assert module.backbone is not None
    parameters = list(module.backbone.parameters())
    # Callbacks with the same start share one copy.
    copies = {(c.base, c.device, name): p for c in anchored for name, p in c.parameters.items()}
    here = [p for (_, device, _), p in copies.items() if device is None]
    teachers = getattr(module, "_teacher", ())
    teacher = [p for backbone in teachers for p in backbone.parameters()]
    ways = {"one device": 1}
    if plan.ranks > 1:
        ways |= {f"DDP, each of {plan.ranks}": 1, f"FSDP2, each of {plan.ranks}": plan.ranks}
    for name, ranks in ways.items():
        plan.devices[name] = bytes_per_device(
            parameters,
            moments=moments,
            anchors=here,
            teacher=teacher,
            ranks=ranks,
            shard_teacher=getattr(module, "shard_teacher", False),
        )
    plan.checkpoint = checkpoint_bytes(parameters, moments)
    exports = [c for c in trainer.callbacks if isinstance(c, HFExport)]  # type: ignore[attr-defined]
    dtype = next((getattr(torch, c.dtype) for c in exports if c.dtype is not None), None)
    plan.export = export_bytes(module.backbone.model.parameters(), dtype)
    away = sum(piece_bytes(p) for (_, device, _), p in copies.items() if device is not None)
    if away:
        plan.notes.append(f"anchors of {readable(away)} are kept elsewhere (device), under FSDP2 over the ranks")


def _assumptions(trainer: Trainer, module: LitEncoder, data: TextDataModule, plan: Plan) -> list[str]:
    """What was assumed, and what is left out."""
    longest = max((p.work.attention / p.work.total for p in plan.phases), default=0.0)
    notes = [
        "tokens are slots: a little more than real tokens",
        "FLOPs are those of matrix products: per token and weight 2 forward, and 4 backward where gradients are "
        "needed; attention by pairs of tokens that see each other; LM heads on target rows; no validation",
        f"packs are taken as full of pieces of {data.sequence_length:,} tokens, the most that attention can cost "
        f"(up to {longest:.0%} of the FLOPs here): shorter documents cost less",
        "activations are not estimated, nor what comes and goes with them: DDP's buckets, blocks that FSDP2 gathers, "
        "narrow copies of mixed precision",
        "not checked: attention kernels, free memory, and whatever only the text itself can show",
    ]
    if module.activation_checkpointing:
        notes.append("model.activation_checkpointing computes the blocks' forward again: not counted")
    if trainer.max_epochs not in (None, -1):
        notes.append(f"trainer.max_epochs {trainer.max_epochs}: how many steps these are depends on the text")
    return notes


# ---- in words ------------------------------------------------------------------------------------------------------


def readable(count: float) -> str:
    """Write a number of bytes with a unit of thousands.

    >>> readable(999), readable(15_500_000_000)
    ('999 B', '15.5 GB')
    """
    for unit, letter in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if count >= unit:
            return f"{count / unit:.1f} {letter}"
    return f"{count:.0f} B"


def describe(plan: Plan, tokens_per_second: float | None = None) -> str:
    """Write a plan down.

    Args:
        plan: to write.
        tokens_per_second: slots per second of all devices together, for hours.
    """
    tables = [_phase_table(plan, tokens_per_second), _byte_table(plan)]
    console = Console(width=120, highlight=False)
    with console.capture() as captured:
        console.print(f"model  {plan.model}\nstep   {plan.step}", soft_wrap=True)
        for table in tables:
            console.print()
            console.print(table)
        console.print(f"\ncheckpoint  {readable(plan.checkpoint)}\nexport      {readable(plan.export)} of weights")
        flops, tokens = sum(p.flops for p in plan.phases), sum(p.tokens for p in plan.phases)
        if tokens_per_second is not None and tokens:
            each = flops / tokens * tokens_per_second / plan.ranks
            console.print(
                f"speed       {tokens_per_second:,.0f} tokens/s are {each / 1e12:,.1f} TFLOP/s on each device"
            )
    lines = [line.rstrip() for line in captured.get().splitlines()]
    lines += ["", "notes", *(fill(f"- {note}", 120, subsequent_indent="  ") for note in plan.notes)]
    if plan.problems:
        lines += ["", "would go wrong", *(f"- {problem}" for problem in plan.problems)]
    return "\n".join(lines)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        words = column in ("phase", "trains", "on a device")
        table.add_column(column, justify="left" if words else "right", no_wrap=True)
    return table


def _phase_table(plan: Plan, tokens_per_second: float | None) -> Table:
    timed = [] if tokens_per_second is None else ["hours"]
    table = _table("phase", "trains", "steps", "tokens", "FLOPs", *timed)
    rows = [(p.name, p.trains, p.steps, p.tokens, p.flops) for p in plan.phases]
    if len(rows) > 1:
        of = plan.phases
        rows.append(("all", "", sum(p.steps for p in of), sum(p.tokens for p in of), sum(p.flops for p in of)))
    for name, trains, steps, tokens, flops in rows:
        hours = [] if tokens_per_second is None else [f"{tokens / tokens_per_second / 3600:,.1f}"]
        table.add_row(name, trains, f"{steps:,}", f"{tokens:,}", f"{flops:.3e}", *hours)
    return table


def _byte_table(plan: Plan) -> Table:
    table = _table("on a device", *plan.devices)
    for part in ("weights", "gradients", "moments", "anchors", "teacher", "total"):
        counts = [getattr(held, part) for held in plan.devices.values()]
        if any(counts):
            table.add_row(part, *map(readable, counts))
    return table
