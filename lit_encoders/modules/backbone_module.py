"""A module around a backbone: its weights, tokenizer, precision and attention, whatever it is trained for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lit_encoders.data.examples import model_source
from lit_encoders.data.packs import PackedBatch
from lit_encoders.models.attention import AttentionBackend, PackLayout, choose_backend
from lit_encoders.models.backbone import Backbone, attention_dropout, load_config, load_language_model, max_positions
from lit_encoders.models.sharding import fill_state_
from lit_encoders.models.vocabulary import continuations, load_model_tokenizer, mask_vocabulary
from lit_encoders.modules.precision import check_precision, compute_dtype
from lit_encoders.modules.token_mean import TokenMeanModule
from lit_encoders.objectives import Objective
from lit_encoders.objectives.hashing import resolve_seed
from lit_encoders.objectives.masking import MaskVocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Dtype = Literal["float32", "bfloat16", "float64"]


class BackboneModule(TokenMeanModule, ABC):
    """A `TokenMeanModule` with a backbone, which is loaded where the trainer says that weights are to be made.

    Args:
        backbone, tokenizer, mask_token, attention, dtype, activation_checkpointing, compile, seed: see `LitEncoder`.

    Raises:
        ValueError: the backbone is not known.
    """

    def __init__(
        self,
        backbone: str | dict[str, Any],
        tokenizer: str | None,
        mask_token: str | None,
        attention: AttentionBackend,
        dtype: Dtype,
        activation_checkpointing: bool,
        compile: bool,
        seed: int | None,
    ) -> None:
        super().__init__()
        self.source = model_source(backbone) if isinstance(backbone, str) else backbone
        self.config = load_config(self.source)
        self.tokenizer_source = None if tokenizer is None else model_source(tokenizer)
        self.mask_token = mask_token
        self.attention = attention
        self.weight_dtype: torch.dtype = getattr(torch, dtype)
        if self.weight_dtype == torch.bfloat16:
            rank_zero_warn(
                f"model.dtype {dtype}: optimizer steps below the precision of a weight are rounded away; "
                "float32 with trainer.precision bf16-mixed computes as fast and loses none"
            )
        self.activation_checkpointing = activation_checkpointing
        self.compile_encoder = compile
        self.seed = resolve_seed(seed)
        self.backbone: Backbone | None = None
        self._backend: Literal["varlen", "flash_attn", "sdpa"] = "sdpa"

    @abstractmethod
    def _add_heads(self, backbone: Backbone) -> None:
        """Add the heads that training needs to a backbone just loaded; whatever draws is seeded."""

    @property
    @override
    def head_names(self) -> Sequence[str | None]:
        return [None, *([] if self.backbone is None else self.backbone.heads)]

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the backbone, or the one named; checked against the model's vocabulary."""
        model = self.source if isinstance(self.source, str) else None
        return load_model_tokenizer(model, self.tokenizer_source, self.config.vocab_size)

    @cached_property
    def mask_vocabulary(self) -> MaskVocabulary | None:
        """What masking may touch and write, on the module's device after set-up; None without a mask token."""
        return mask_vocabulary(self.tokenizer, self.config.vocab_size, self.mask_token)

    def check_mlm(self) -> None:
        """Refuse MLM with a tokenizer that has nothing to mask with.

        Raises:
            ValueError: naming ``mask_token=``.
        """
        if self.mask_vocabulary is None:
            raise ValueError(
                "model.objective must be 'clm' (LitCLM) for a tokenizer without a mask token, got 'mlm'; "
                "or name one of its tokens with model.mask_token="
            )

    @cached_property
    def _continuations(self) -> Tensor:
        return continuations(self.tokenizer, self.config.vocab_size)

    @property
    def max_positions(self) -> int | None:
        """Longest document that the backbone has positions for, in tokens."""
        return max_positions(self.config)

    def packing(self, batch: PackedBatch, objective: Objective) -> PackLayout:
        """Boundaries and direction of a batch for an objective."""
        return PackLayout(
            batch.segment_lengths,
            causal=objective == "clm",
            backend=self._backend,
            device=batch.input_ids.device,
        )

    @override
    def configure_callbacks(self) -> list[Callback]:
        # Lightning's first hook: an attention that cannot run here is refused before any data is read.
        precision, device = str(self.trainer.precision), self.trainer.strategy.root_device.type
        check_precision(precision)
        computed = compute_dtype(precision, self.weight_dtype)
        self._backend = choose_backend(self.attention, device, computed, attention_dropout(self.config))
        if self.attention == "auto":
            rank_zero_info(f"attention: {self._backend}")
        return []

    @override
    def configure_model(self) -> None:
        if self.backbone is not None:
            return
        # New weights (a head that the folder lacks) must not depend on what drew before.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.backbone = Backbone(load_language_model(self.source, self.config, self.weight_dtype))
            self._add_heads(self.backbone)
        if self.activation_checkpointing:
            self.backbone.use_activation_checkpointing()
        if self.compile_encoder:
            self.backbone.compile_encoder()
        if self.device_mesh is not None:
            self.backbone.shard(self.device_mesh["data_parallel"])

    @override
    def on_train_start(self) -> None:
        heads = [] if self.backbone is None else list(self.backbone.heads.parameters())
        if any(isinstance(parameter, DTensor) for parameter in heads):
            # A sharded checkpoint needs state of a head that has rested until then, too.
            for optimizer in self.trainer.optimizers:
                fill_state_(optimizer, heads)
