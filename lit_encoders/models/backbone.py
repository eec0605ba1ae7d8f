"""A Hugging Face masked or causal LM that reads packs. The only file that knows Hugging Face attribute names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from lit_encoders.models.attention import ATTENTION_NAME, PackLayout, register_packed_attention
from lit_encoders.models.heads import ExtraHead
from lit_encoders.models.stored_names import GEMMA3_TEXT_TOWER
from lit_encoders.objectives.losses import Teacher, chunked_cross_entropy, chunked_distillation

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PretrainedConfig, PreTrainedModel

Transform = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Architecture:
    """What differs between model types.

    Attributes:
        transform: the LM head before its decoder, (rows, D) -> (rows, E).
        head: dotted names of the modules that ``transform`` uses.
        first_position: the position id of a document's first token.
    """

    transform: Transform
    head: tuple[str, ...] = ()
    first_position: Callable[[Any], int] = lambda config: 0


def _bert_head(model: Any, hidden: Tensor) -> Tensor:
    return model.cls.predictions.transform(hidden)  # type: ignore[no-any-return]


def _modernbert_head(model: Any, hidden: Tensor) -> Tensor:
    return model.head(hidden)  # type: ignore[no-any-return]


def _roberta_head(model: Any, hidden: Tensor) -> Tensor:
    head = model.lm_head
    return head.layer_norm(torch.nn.functional.gelu(head.dense(hidden)))  # type: ignore[no-any-return]


def _electra_head(model: Any, hidden: Tensor) -> Tensor:
    return model.generator_predictions(hidden)  # type: ignore[no-any-return]


def _distilbert_head(model: Any, hidden: Tensor) -> Tensor:
    return model.vocab_layer_norm(model.activation(model.vocab_transform(hidden)))  # type: ignore[no-any-return]


def _ultrabert_head(model: Any, hidden: Tensor) -> Tensor:
    head = model.head
    return head.act_fn(head.linear2(head.act_fn(head.linear1(hidden))))  # type: ignore[no-any-return]


def _modernbert_decoder_head(model: Any, hidden: Tensor) -> Tensor:
    return model.lm_head(hidden)  # type: ignore[no-any-return]


def _no_head(model: Any, hidden: Tensor) -> Tensor:
    return hidden


def _after_padding(config: Any) -> int:
    return int(config.pad_token_id) + 1


# An architecture is listed once its packed form was proven equal to its own documents run alone.
ARCHITECTURES: Mapping[str, Architecture] = {
    "bert": Architecture(_bert_head, ("cls.predictions.transform",)),
    "camembert": Architecture(_roberta_head, ("lm_head.dense", "lm_head.layer_norm"), _after_padding),
    "distilbert": Architecture(_distilbert_head, ("vocab_transform", "activation", "vocab_layer_norm")),
    "electra": Architecture(_electra_head, ("generator_predictions",)),
    "eurobert": Architecture(_no_head),
    "gemma3_text": Architecture(_no_head),
    "gpt2": Architecture(_no_head),
    "llama": Architecture(_no_head),
    "modernbert": Architecture(_modernbert_head, ("head",)),
    "modernbert-decoder": Architecture(_modernbert_decoder_head, ("lm_head",)),
    "nomic_bert": Architecture(_bert_head, ("cls.predictions.transform",)),
    "qwen3": Architecture(_no_head),
    "roberta": Architecture(_roberta_head, ("lm_head.dense", "lm_head.layer_norm"), _after_padding),
    "ultrabert": Architecture(_ultrabert_head, ("head.linear1", "head.linear2", "head.act_fn")),
    "xlm-roberta": Architecture(_roberta_head, ("lm_head.dense", "lm_head.layer_norm"), _after_padding),
}
# Settings that change scores or logits in a way that neither packed attention nor the chunked loss computes.
_UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping")


def load_config(source: str | Mapping[str, Any]) -> PretrainedConfig:
    """Read a model's configuration from a folder or hub name, or make it from a mapping with ``model_type``.

    Raises:
        ValueError: no such model, or one that is no masked or causal LM, or an architecture that cannot be packed.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    if isinstance(source, str):
        try:
            config = AutoConfig.from_pretrained(source)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"model.backbone must be a folder or hub name of a Hugging Face model, got {source!r} ({reason})"
            ) from error
    else:
        settings = dict(source)
        model_type = settings.pop("model_type", None)
        if not isinstance(model_type, str):
            raise ValueError(f"model.backbone given as a mapping must have a model_type, got keys {sorted(source)}")
        if model_type not in CONFIG_MAPPING_NAMES:
            raise ValueError(f"model.backbone.model_type is unknown to transformers, got {model_type!r}")
        try:
            config = AutoConfig.for_model(model_type, **settings)
        except Exception as error:  # Each configuration class checks its settings with errors of its own.
            reason = " ".join(str(error).split())
            raise ValueError(
                f"model.backbone must be settings that model type {model_type!r} knows, got {settings} ({reason:.200})"
            ) from error
    if config.model_type == "gemma3":
        config = config.text_config  # The text tower of a model that also sees.
    known = set(MODEL_FOR_MASKED_LM_MAPPING_NAMES) | set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if config.model_type not in known:
        raise ValueError(f"model.backbone must be a masked or causal LM, got model type {config.model_type!r}")
    if config.model_type not in ARCHITECTURES:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise ValueError(
            f"model.backbone must be an architecture whose documents can be packed ({supported}), "
            f"got {config.model_type!r}"
        )
    for name in _UNSUPPORTED:
        if getattr(config, name, None) is not None:
            raise ValueError(f"model.backbone must have no {name}, got {getattr(config, name)}")
    return config  # type: ignore[no-any-return]


def max_positions(config: PretrainedConfig) -> int | None:
    """Longest document that the model has positions for, in tokens; None where it has no limit."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return None
    return int(limit) - ARCHITECTURES[config.model_type].first_position(config)


def attention_dropout(config: PretrainedConfig) -> float:
    """Probability of dropping an attention weight that the configuration asks for."""
    names = ("attention_probs_dropout_prob", "attention_dropout")
    return max(float(getattr(config, name, 0.0) or 0.0) for name in names)


def load_language_model(
    source: str | Mapping[str, Any], config: PretrainedConfig, dtype: torch.dtype, whole: bool = False
) -> PreTrainedModel:
    """Build the model of a configuration, with weights where ``source`` names a folder or hub name.

    Weights that the source lacks (such as the MLM head of a bare encoder) start at random; a decoder that the
    configuration ties is tied.

    Args:
        source: folder, hub name, or the mapping the configuration was made from.
        config: of that source, as `load_config` gives it.
        dtype: of the weights, whatever the stored type.
        whole: refuse a source that lacks weights, as a teacher must not.

    Raises:
        ValueError: weights are missing and ``whole`` is asked for.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    register_packed_attention()
    masked = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    auto: Any = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    # A copy: transformers writes the attention into the configuration, and two models may come from one.
    settings = {"config": copy.deepcopy(config), "dtype": dtype, "attn_implementation": ATTENTION_NAME}
    if isinstance(source, str):
        if config.model_type == "gemma3_text":
            settings["key_mapping"] = GEMMA3_TEXT_TOWER
        with _quiet_loading():
            model, report = auto.from_pretrained(source, output_loading_info=True, **settings)
        if report["missing_keys"]:
            names = ", ".join(sorted(report["missing_keys"]))
            if whole:
                raise ValueError(f"model.backbone must have all of its weights, got {source!r} without {names:.200}")
            rank_zero_info(f"new weights, which the backbone does not have (warm a new head up first): {names}")
        if report["unexpected_keys"]:
            names = ", ".join(sorted(report["unexpected_keys"]))
            rank_zero_info(f"left out, since a language model has no place for it: {names:.200}")
    else:
        model = auto.from_config(settings.pop("config"), **settings)
    # Loading leaves a model in eval mode; a module under training is in training mode, dropout included.
    return model.train()  # type: ignore[no-any-return]


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Hold back transformers' report: it takes a missing head for a corrupt file; what is missing is said after."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@dataclass(frozen=True)
class RowGroup:
    """Targets that one head predicts.

    Attributes:
        rows: slots that predict, int64 (K,).
        labels: what they predict, int64 (K,).
        weights: weight of each target in the sum, (K,), or None for 1.
        head: name of an added head, None for the model's own.
        teacher: whose distribution is learnt on them too, or None.
        kd_weight: share of the divergence from the teacher in the loss, in [0, 1].
    """

    rows: Tensor
    labels: Tensor
    weights: Tensor | None = None
    head: str | None = None
    teacher: Teacher | None = None
    kd_weight: float = 0.0


class Backbone(nn.Module):
    """Encoder, LM head and loss under one ``forward``: the root that a sharded run gathers as a whole.

    Args:
        model: a Hugging Face LM whose model type is in `ARCHITECTURES`, loaded by `load_language_model`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.architecture = ARCHITECTURES[model.config.model_type]
        self.heads = nn.ModuleDict()
        self._first_position = self.architecture.first_position(model.config)

    @property
    def config(self) -> PretrainedConfig:
        """The Hugging Face configuration."""
        return self.model.config

    @property
    def decoder(self) -> nn.Linear:
        """The output embeddings: from the head's output to logits."""
        return self.model.get_output_embeddings()  # type: ignore[no-any-return]

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks, first to last: what layer ranges count and what a sharded run wraps one by one."""
        from lit_encoders.models.layers import find_layers

        return find_layers(self.model)[1]

    def encode(self, input_ids: Tensor, position_ids: Tensor, packing: PackLayout) -> Tensor:
        """Run the encoder over a pack.

        Args:
            input_ids: int64 (T,).
            position_ids: position of each token in its piece, from 0, int64 (T,).
            packing: boundaries, direction and kernel.

        Returns:
            The last hidden states, (T, D).
        """
        encoder: Any = self.model.base_model
        output = encoder(input_ids[None], position_ids=(position_ids + self._first_position)[None], packing=packing)
        return output.last_hidden_state[0]  # type: ignore[no-any-return]

    @property
    def tied(self) -> bool:
        """Whether the decoder's matrix is that of the embeddings."""
        return self.decoder.weight is self.model.get_input_embeddings().weight

    def add_head(self, name: str, own_decoder: bool = False) -> ExtraHead:
        """Give the model a further LM head with the values of its own, used where ``forward`` names it.

        Args:
            name: of the head.
            own_decoder: whether it gets a decoder matrix of its own where the model's is tied to the embeddings.
        """
        tied = self.tied and not own_decoder
        head = ExtraHead(self.model, self.architecture.head, self.architecture.transform, tied)
        self.heads[name] = head
        return head

    def fill_head(self, name: str) -> None:
        """Copy the values of the model's own head into an added one."""
        if isinstance(self, FSDPModule):
            # After a forward without a backward (validation) the gathered weights still stand in the parameters'
            # place; what is written into those is lost.
            self.reshard()
        extra: ExtraHead = self.heads[name]  # type: ignore[assignment]
        extra.copy_from(self.model)

    def resting_parameters(self, used: Collection[str | None]) -> list[nn.Parameter]:
        """Parameters of the heads that a step does not use, and so must leave as they are.

        Args:
            used: names of the heads in use, None among them for the model's own.
        """
        extra = {name: head for name, head in self.heads.items() if isinstance(head, ExtraHead)}
        resting = [p for name, head in extra.items() if name not in used for p in head.parameters()]
        if extra and None not in used:
            own = [theirs for _, theirs in next(iter(extra.values())).pairs(self.model)]
            # A tied decoder works on as the embeddings.
            resting += [p for p in own if not (self.tied and p is self.decoder.weight)]
        return resting

    def transform(self, hidden: Tensor, head: str | None = None) -> Tensor:
        """Apply an LM head short of its decoder, (K, D) -> (K, E)."""
        if head is not None:
            return self.heads[head](hidden)  # type: ignore[no-any-return]
        return self.architecture.transform(self.model, hidden)

    def decoder_parameters(self, head: str | None = None) -> tuple[Tensor, Tensor | None]:
        """Matrix (V, E) and bias (V,) that turn a head's output into logits."""
        if head is None:
            return self.decoder.weight, self.decoder.bias
        extra: ExtraHead = self.heads[head]  # type: ignore[assignment]
        return self.decoder.weight if extra.weight is None else extra.weight, extra.bias

    def logits(self, hidden: Tensor, head: str | None = None) -> Tensor:
        """Apply a whole LM head, (K, D) -> (K, V): for a few rows, as in predictions and tests."""
        return torch.nn.functional.linear(self.transform(hidden, head), *self.decoder_parameters(head))

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, packing: PackLayout, groups: Sequence[RowGroup]
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Losses of a pack: only target rows reach a head and its decoder.

        Args:
            input_ids: what the encoder reads, int64 (T,).
            position_ids: position of each token in its piece, int64 (T,).
            packing: boundaries, direction and kernel.
            groups: targets, by the head that predicts them; without any, the encoder runs and no head.

        Returns:
            For each group the sum of its (weighted) losses in nats, scalar; and without gradients each target's
            cross-entropy, (K,), and its divergence from the teacher, (K,), 0 without one.
        """
        hidden = self.encode(input_ids, position_ids, packing)
        losses = [self._group_loss(hidden, group) for group in groups]
        if self.heads and losses:
            # DDP waits for a gradient of every parameter; of a head that rests it is dropped before the step.
            total, rows, kd = losses[0]
            unused = self.resting_parameters([group.head for group in groups])
            losses[0] = total + 0.0 * sum(p.sum() for p in unused), rows, kd
        return losses

    def _group_loss(self, hidden: Tensor, group: RowGroup) -> tuple[Tensor, Tensor, Tensor]:
        output = self.transform(hidden.index_select(0, group.rows), group.head)
        decoder = self.decoder_parameters(group.head)
        if group.teacher is None:
            total, rows = chunked_cross_entropy(output, *decoder, group.labels, group.weights)
            return total, rows, torch.zeros_like(rows)
        return chunked_distillation(output, *decoder, group.labels, group.teacher, group.kd_weight, group.weights)

    @torch.no_grad()
    def teach(
        self, input_ids: Tensor, position_ids: Tensor, packing: PackLayout, rows: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """What this model, as a teacher, says of target rows, short of its logits.

        Args:
            input_ids, position_ids, packing: as in `forward`.
            rows: of each group of targets its slots, int64 (K,).

        Returns:
            For each group the head's output, (K, E), with the decoder's matrix, (V, E), and bias, (V,) or None.
        """
        hidden = self.encode(input_ids, position_ids, packing)
        return [(self.transform(hidden.index_select(0, slots)), *self.decoder_parameters()) for slots in rows]

    def compile_encoder(self) -> None:
        """Compile the encoder in place; head and loss stay as they are, since their number of rows varies."""
        self.model.base_model.compile(dynamic=False)

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard the parameters over a mesh (FSDP2), block by block; what stands outside the blocks in one piece.

        Embeddings, heads and a tied decoder are gathered in ``forward`` only, so nothing may call a part of the model
        from outside.
        """
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def use_activation_checkpointing(self) -> None:
        """Keep only each block's input for the backward pass and compute the rest again."""
        # Renamed after transformers 5.17.
        name = "activation_checkpointing_enable"
        enable = getattr(self.model, name, None) or self.model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
