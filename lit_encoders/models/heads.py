"""An LM head of its own beside the model's: the same shape, other weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ExtraHead(nn.Module):
    """A second LM head: its own transform and decoder bias, and a decoder matrix of its own where the model unties it.

    A decoder that is tied to the embeddings stays the one matrix for all heads.

    Args:
        model: whose head it is shaped like; its values are copied.
        modules: dotted names of the modules of the head short of its decoder.
        transform: applies them, given anything that holds them under those names.
        tied: whether the decoder is tied to the embeddings.
    """

    def __init__(
        self, model: PreTrainedModel, modules: tuple[str, ...], transform: Callable[[Any, Tensor], Tensor], tied: bool
    ) -> None:
        super().__init__()
        self._modules_of_model = modules
        self._transform = transform
        for path in modules:
            home: nn.Module = self
            *parents, name = path.split(".")
            for parent in parents:
                if not hasattr(home, parent):
                    home.add_module(parent, nn.Module())
                home = home.get_submodule(parent)
            home.add_module(name, copy.deepcopy(model.get_submodule(path)))
        decoder: nn.Linear = model.get_output_embeddings()  # type: ignore[assignment]
        self.weight = None if tied else nn.Parameter(decoder.weight.detach().clone())
        self.bias = None if decoder.bias is None else nn.Parameter(decoder.bias.detach().clone())

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply the head short of its decoder, (K, D) -> (K, E)."""
        return self._transform(self, hidden)

    def pairs(self, model: PreTrainedModel) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Each of its parameters beside the model's own, by name."""
        for path in self._modules_of_model:
            theirs = dict(model.get_submodule(path).named_parameters())
            for name, parameter in self.get_submodule(path).named_parameters():
                yield parameter, theirs[name]
        decoder: nn.Linear = model.get_output_embeddings()  # type: ignore[assignment]
        if self.weight is not None:
            yield self.weight, decoder.weight  # type: ignore[misc]
        if self.bias is not None:
            yield self.bias, decoder.bias  # type: ignore[misc]

    @torch.no_grad()
    def copy_from(self, model: PreTrainedModel) -> None:
        """Take over the values of the model's own head."""
        for mine, theirs in self.pairs(model):
            mine.copy_(theirs)

    @torch.no_grad()
    def write_to(self, model: PreTrainedModel) -> None:
        """Make its values those of the model's own head; a decoder matrix of its own unties the model's."""
        decoder: nn.Linear = model.get_output_embeddings()  # type: ignore[assignment]
        if self.weight is not None and decoder.weight is model.get_input_embeddings().weight:
            decoder.weight = nn.Parameter(self.weight.detach().clone())
            model.config.tie_word_embeddings = False
            if decoder.bias is not None:
                # BERT ties the bias to another name of it, and no longer where the matrix is not tied.
                decoder.bias = nn.Parameter(decoder.bias.detach().clone())
        for mine, theirs in self.pairs(model):
            theirs.copy_(mine)

    def reset(self, model: PreTrainedModel) -> None:
        """Start anew, as the model's class starts a new head."""
        for path in self._modules_of_model:
            self.get_submodule(path).apply(model._init_weights)
        with torch.no_grad():
            if self.bias is not None:
                self.bias.zero_()
            if self.weight is not None:
                self.weight.normal_(std=getattr(model.config, "initializer_range", 0.02))
