"""Held-out losses: means over all targets of a validation set, one for each objective, over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torchmetrics.aggregation import MeanMetric

from lit_encoders.modules.token_mean import TokenMeanModule
from lit_encoders.objectives import Objective


def with_perplexities(losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Losses, each followed by the perplexity that it means.

    >>> list(with_perplexities({"val/mlm_loss": torch.tensor(0.0)}).items())
    [('val/mlm_loss', tensor(0.)), ('val/mlm_perplexity', tensor(1.))]
    """
    found = {}
    for name, loss in losses.items():
        found[name] = loss
        found[name.removesuffix("loss") + "perplexity"] = loss.exp()
    return found


class HeldOutLosses:
    """What a validation set measures: a token-weighted mean for each objective, in float64.

    Args:
        name: of the set, "" for the one without a name.
        objectives: to measure.
        device: of the module.
    """

    def __init__(self, name: str, objectives: Iterable[Objective], device: torch.device) -> None:
        self.prefix = f"val/{name}/" if name else "val/"
        self.means = {objective: MeanMetric().to(device) for objective in objectives}
        for mean in self.means.values():
            mean.set_dtype(torch.float64)

    def add(self, objective: Objective, total: Tensor, num_targets: int) -> None:
        """Add a batch: the sum of its losses in nats, scalar, and its number of targets, at least 1."""
        self.means[objective].update(total.double() / num_targets, num_targets)

    def compute(self) -> dict[str, Tensor]:
        """``val/{mlm,clm}_loss``, or ``val/<name>/...``: nats per target, over all ranks; every rank has to ask."""
        return {f"{self.prefix}{objective}_loss": mean.compute() for objective, mean in self.means.items()}


@contextmanager
def measuring(module: TokenMeanModule) -> Iterator[None]:
    """Without dropout and in the precision of the run, as a validation is; afterwards the module is as it was."""
    training = module.training
    module.eval()
    try:
        with module.trainer.precision_plugin.forward_context():
            yield
    finally:
        module.train(training)


def log_held_out(module: TokenMeanModule, losses: Mapping[str, Tensor]) -> None:
    """Log what a validation measured, at the step that the run is at: losses, perplexities, and losses against tokens.

    Args:
        module: whose ``on_validation_epoch_end`` it is.
        losses: as `HeldOutLosses.compute` names them.
    """
    trainer, metrics = module.trainer, with_perplexities(losses)
    module.log_dict(metrics)
    if trainer.state.fn == "fit":
        # Lightning would place what follows step k at k - 1; a metric named "step" is its x.
        module.log("step", float(trainer.global_step))
    if trainer.sanity_checking:
        # Lightning does not log what a sanity check measures, but here it is where the curves begin.
        for logger in trainer.loggers:
            logger.log_metrics({name: float(value) for name, value in metrics.items()}, trainer.global_step)
    module.log_against_tokens(losses)
