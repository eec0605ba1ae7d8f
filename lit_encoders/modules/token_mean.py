"""One division per optimizer step: the mean over all targets of all its micro-batches and ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from typing_extensions import override

# Keeps sums over targets near 1 in the backward pass; a power of two, so that dividing by it loses nothing.
LOSS_DIVISOR = 4096.0


@dataclass(frozen=True)
class Loss:
    """What a micro-batch gives the optimizer step: a sum, and the number that the step divides by, once.

    Attributes:
        total: sum of the (weighted) losses of all targets, in nats, scalar with a gradient.
        num_targets: how many there are, known on the host.
        terms: for logging, each term's name, its sum without a gradient and its number of targets; logged as
            ``train/<name>``.
        divisor: what the micro-batch adds to the number that the step divides by; None is ``num_targets``.
        counts: for logging and records, what the micro-batch adds to a number, by name; logged as ``train/<name>``.
    """

    total: Tensor
    num_targets: int
    terms: Mapping[str, tuple[Tensor, int]] = field(default_factory=dict)
    divisor: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Add up what every process has; in place.

    Not ``strategy.reduce``: it begins with a barrier, which on a GPU holds the host up until the device is done.
    """
    torch.distributed.all_reduce(values)
    return values


class _Window:
    """What the micro-batches since the last optimizer step added up to, on this rank."""

    def __init__(self) -> None:
        self.divisor = 0.0
        self.num_targets = 0
        self.num_tokens = 0
        self.terms: dict[str, tuple[Tensor, int]] = {}
        self.counts: Counter[str] = Counter()
        self.heads: set[str | None] = set()

    def add(self, loss: Loss, num_tokens: int) -> None:
        self.divisor += loss.num_targets if loss.divisor is None else loss.divisor
        self.counts.update(loss.counts)
        self.num_targets += loss.num_targets
        self.num_tokens += num_tokens
        for name, (total, count) in loss.terms.items():
            before, seen = self.terms.get(name, (torch.zeros_like(total), 0))
            self.terms[name] = before + total, seen + count


class TokenMeanModule(LightningModule):
    """A LightningModule whose step is the mean over targets, however they are spread.

    A subclass's ``training_step`` returns `step_loss` of a `Loss`. The gradient is then the sum over the targets of all
    micro-batches and ranks, divided by their number once, before any callback reads it or adds to it. Logged losses are
    weighted the same way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logged_losses: set[str] = set()
        self._tokens = torch.zeros((), dtype=torch.int64)
        self._window = _Window()
        # What this rank has counted so far, by name.
        self.counted: Counter[str] = Counter()
        # And the nats of the losses that are summed up over the run, float64 scalars on the device, by name.
        self.summed: dict[str, Tensor] = {}

    @property
    def tokens(self) -> int:
        """Real tokens trained on so far, over all ranks; on a GPU, asking waits for the device."""
        return int(self._tokens)

    @property
    def head_names(self) -> Sequence[str | None]:
        """The heads that micro-batches may use, in the same order on every rank; none, unless overridden."""
        return ()

    def resting_parameters(self, heads: set[str | None]) -> Iterable[nn.Parameter]:
        """Parameters that a step leaves alone, given the heads that its micro-batches used; none, unless overridden."""
        return ()

    def step_metrics(self) -> dict[str, float]:
        """More figures to log with each optimizer step; none, unless overridden."""
        return {}

    @property
    def summed_names(self) -> Sequence[str]:
        """Losses whose sums over the whole run are kept, in the same order on every rank; none, unless overridden."""
        return ()

    def _summed_by_all(self) -> dict[str, float]:
        """Nats of these losses so far, over all ranks; every rank has to ask."""
        names = self.summed_names
        sums = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        for place, name in enumerate(names):
            sums[place] = self.summed.get(name, 0.0)
        if names and self.trainer.world_size > 1:
            sums = sum_over_ranks(sums)
        return dict(zip(names, sums.tolist(), strict=True))

    def _counted_by_all(self, names: Sequence[str]) -> dict[str, int]:
        """What all ranks have counted so far under these names; every rank has to ask."""
        counts = torch.tensor([self.counted[name] for name in names], dtype=torch.float64, device=self.device)
        if names and self.trainer.world_size > 1:
            counts = sum_over_ranks(counts)
        return dict(zip(names, (int(count) for count in counts.tolist()), strict=True))

    def use_head(self, head: str | None) -> None:
        """Note that the micro-batch at hand uses a head, so that it does not count as resting."""
        self._window.heads.add(head)

    def step_loss(self, loss: Loss, num_tokens: int) -> Tensor:
        """What ``training_step`` returns: the loss's sum, with its targets and tokens counted for the step's division.

        Raises:
            TypeError: it is no `Loss`.
        """
        if not isinstance(loss, Loss):
            raise TypeError(f"training_loss must return a Loss (a sum and its targets), got {type(loss).__name__}")
        self._window.add(loss, num_tokens)
        return loss.total / LOSS_DIVISOR

    @override
    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        assert optimizer_closure is not None

        def closure() -> Any:
            output = optimizer_closure()
            # Here, and not in on_before_optimizer_step: a callback's own gradient (L2-SP) must not be divided.
            self._divide_gradients()
            return output

        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        self._log_window(float(optimizer.param_groups[0]["lr"]))

    def _divide_gradients(self) -> None:
        """Turn the sum of gradients into their mean over the targets of all micro-batches and ranks."""
        window, world_size = self._window, self.trainer.world_size
        names = self.head_names
        uses = [float(name in window.heads) for name in names]
        counts = torch.tensor([window.divisor, window.num_targets, window.num_tokens, *uses], dtype=torch.float64)
        if world_size > 1:
            counts = sum_over_ranks(counts.to(self.device))
        self._num_targets = counts[1]
        self._tokens = self._tokens.to(counts.device) + counts[2].long()
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        scale = LOSS_DIVISOR * self.trainer.accumulate_grad_batches * world_size
        # Only a rank without targets of its own has to wait and see whether any other has some.
        if window.num_targets == 0 and (world_size == 1 or int(counts[1]) == 0):
            # A gradient of zero would still move weights and moments; without one the optimizer leaves them alone.
            for parameter in self.parameters():
                parameter.grad = None
        elif world_size == 1:
            torch._foreach_mul_(gradients, scale / window.divisor)
        else:
            factor = scale / torch.where(counts[0] > 0, counts[0], 1.0)
            for gradient in gradients:
                # A sharded gradient is scaled shard by shard.
                getattr(gradient, "_local_tensor", gradient).mul_(factor)
        used = window.heads
        if world_size > 1 and len(names) > 1 and len(used) < len(names):
            # A head that rests here may work on another rank, and only one that rests on all may be left alone. A rank
            # without targets has used none.
            used = {name for name, count in zip(names, counts[3:].tolist(), strict=True) if count}
        for parameter in self.resting_parameters(used):
            parameter.grad = None

    def _log_window(self, learning_rate: float) -> None:
        """Log what the micro-batches of a step added up to, over all ranks, and start anew."""
        window, self._window = self._window, _Window()
        self.counted.update(window.counts)
        for name in self.summed_names:
            if name in window.terms:
                total = window.terms[name][0].detach().double()
                self.summed[name] = total + self.summed.get(name, 0.0)
        logs = self.trainer.global_step % self.trainer.log_every_n_steps == 0  # type: ignore[attr-defined]
        if self.trainer.world_size > 1 and not logs:
            return  # Reducing over ranks what nobody would see costs time.
        losses: dict[str, Tensor] = {}
        for name, (total, count) in window.terms.items():
            if self.trainer.world_size > 1:
                pair = torch.stack([total, total.new_tensor(count)])
                pair = sum_over_ranks(pair)
                total, count = pair[0], int(pair[1])
            if count:
                losses[f"train/{name}"] = total / count
        counts = {f"train/{name}": float(count) for name, count in window.counts.items()}
        if counts and self.trainer.world_size > 1:
            every = torch.tensor(list(counts.values()), dtype=torch.float64, device=self.device)
            every = sum_over_ranks(every)
            counts = dict(zip(counts, every.tolist(), strict=True))
        self._forget_except({*losses, *counts})
        for name, value in losses.items():
            self.log(name, value, prog_bar=True)
        self.log_dict(
            {
                "train/tokens": self._tokens.to(torch.float32),
                "train/targets": self._num_targets.to(torch.float32),
                "train/learning_rate": learning_rate,
                **counts,
                **self.step_metrics(),
            }
        )
        if logs:
            self.log_against_tokens(losses)

    def _forget_except(self, logged: set[str]) -> None:
        """Lightning would go on logging the last MLM loss at every CLM step: it keeps what was logged once."""
        results = self.trainer._results
        for name in self.logged_losses - logged:
            if results is not None:
                results.pop(f"optimizer_step.{name}", None)
        self.logged_losses = logged

    def log_against_tokens(self, losses: Mapping[str, Any]) -> None:
        # The x of other loggers is one counter for everything, so a second x axis is TensorBoard's alone.
        for logger in self.trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.log_metrics({f"tokens/{name}": float(value) for name, value in losses.items()}, self.tokens)
