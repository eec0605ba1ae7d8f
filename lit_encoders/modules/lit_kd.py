"""LitKD: learn a teacher's distribution over the vocabulary on target positions, beside the targets themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method
from typing_extensions import override

from lit_encoders.data.examples import model_source
from lit_encoders.data.packs import PackedBatch
from lit_encoders.models.backbone import Backbone, RowGroup, load_config, load_language_model, max_positions
from lit_encoders.models.vocabulary import check_same_vocabulary, load_tokenizer
from lit_encoders.modules.backbone_module import Dtype
from lit_encoders.modules.lit_encoder import LitEncoder
from lit_encoders.modules.settings import check_choice
from lit_encoders.objectives import Objective
from lit_encoders.objectives.losses import Direction, Teacher
from lit_encoders.objectives.masking import Targets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DistilIn = Literal["both", "mlm", "clm"]


class LitKD(LitEncoder):
    """A `LitEncoder` whose loss is ``(1 - kd_weight) * cross-entropy + kd_weight * T^2 KL`` on target positions.

    The teacher reads what the student reads, masked or causal, and is asked at the same positions: all targets, or with
    ``streams`` those of the streams with ``distill``. It stands outside the module: frozen, without dropout, in no
    checkpoint, no count and no optimizer. UltraBERT states neither temperature, direction, weights nor positions
    (Park, Lee, Kang 2026); DistilBERT has a temperature of 2 (Sanh et al. 2019, arXiv:1910.01108).

    Logs ``train/kd_loss``, and ``train/<stream>/kd_loss``: nats per target, times the squared temperature.

    Args:
        backbone: the student; see `LitEncoder`, as for all further settings.
        teacher: folder or hub name of a masked or causal LM of the same vocabulary; or, for a trial, the settings of a
            configuration with its ``model_type``: a teacher that knows nothing.
        temperature: both logits are divided by it, above 0.
        direction: "forward" is KL(teacher, student), "reverse" KL(student, teacher).
        kd_weight: share of the divergence in the loss of a distilled target, in [0, 1].
        distil_in: objectives in whose steps the teacher is asked.
        teacher_dtype: of the teacher's weights.
        shard_teacher: whether FSDP2 shards the teacher too.
        truncate_vocabulary: take a teacher with more tokens, whose first ones are the student's; its distribution is
            renormalised over them.
        settings: of `LitEncoder`.

    Raises:
        ValueError: a value is out of its range, or the teacher has another vocabulary or too few positions.
    """

    distils = True

    def __init__(
        self,
        backbone: str | dict[str, Any],
        teacher: str | dict[str, Any],
        temperature: float = 1.0,
        direction: Direction = "forward",
        kd_weight: float = 0.5,
        distil_in: DistilIn = "both",
        teacher_dtype: Dtype = "float32",
        shard_teacher: bool = False,
        truncate_vocabulary: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(backbone, **settings)
        if not 0 < temperature < float("inf"):
            raise ValueError(f"model.temperature must be above 0, got {temperature}")
        if not 0 <= kd_weight <= 1:
            raise ValueError(f"model.kd_weight must be in [0, 1], got {kd_weight}")
        check_choice("direction", direction, Direction)
        check_choice("distil_in", distil_in, DistilIn)
        if self.streams and not any(stream.distill for stream in self.streams):
            raise ValueError("model.streams must have a stream with distill for a teacher to teach, got none")
        self.teacher_source = model_source(teacher) if isinstance(teacher, str) else teacher
        try:
            self.teacher_config = load_config(self.teacher_source)
        except ValueError as error:
            raise ValueError(str(error).replace("model.backbone", "model.teacher")) from error
        self.temperature = temperature
        self.direction = direction
        self.kd_weight = kd_weight
        self.distil_in = distil_in
        self.teacher_dtype: torch.dtype = getattr(torch, teacher_dtype)
        self.shard_teacher = shard_teacher
        self.truncate_vocabulary = truncate_vocabulary
        # In a tuple, so that it is no part of this module.
        self._teacher: tuple[Backbone, ...] = ()

    def check_teacher(self) -> None:
        """Refuse a teacher whose ids mean something else, or with too few positions.

        Raises:
            ValueError: with both numbers.
        """
        if isinstance(self.teacher_source, str):
            self._check_vocabulary(load_tokenizer(self.teacher_source, "model.teacher"))
        # Without a trainer, as after load_from_checkpoint, there is no data to compare with.
        limit, data = max_positions(self.teacher_config), getattr(self._trainer, "datamodule", None)
        longest = getattr(data, "sequence_length", 0)
        if limit is not None and longest > limit:
            raise ValueError(f"model.teacher must have positions for data.sequence_length ({longest}), got {limit}")

    def _check_vocabulary(self, theirs: PreTrainedTokenizerBase) -> None:
        own, other = len(self.tokenizer.get_vocab()), len(theirs.get_vocab())
        if other != own and not (self.truncate_vocabulary and other > own):
            raise ValueError(
                f"model.teacher must have the student's vocabulary of {own} tokens (model.truncate_vocabulary takes a "
                f"larger one that begins with it), got {other}"
            )
        try:
            check_same_vocabulary(theirs, self.tokenizer)
        except ValueError as error:
            raise ValueError(str(error).replace("model.tokenizer", "model.teacher")) from error

    @override
    def configure_model(self) -> None:
        super().configure_model()
        if self._teacher:
            return
        self.check_teacher()
        whole = isinstance(self.teacher_source, str)
        try:
            model = load_language_model(self.teacher_source, self.teacher_config, self.teacher_dtype, whole=whole)
        except ValueError as error:
            raise ValueError(str(error).replace("model.backbone", "model.teacher")) from error
        teacher = Backbone(model).eval().requires_grad_(False)
        if self.shard_teacher and self.device_mesh is not None:
            teacher.shard(self.device_mesh["data_parallel"])
            register_fsdp_forward_method(teacher, "teach")
        self._teacher = (teacher,)
        size = sum(parameter.numel() for parameter in teacher.parameters())
        name = self.teacher_source if whole else f"an untrained {self.teacher_config.model_type}"
        rank_zero_info(f"teacher: {name} ({size:,} parameters), outside the model")

    @override
    def on_fit_start(self) -> None:
        for teacher in self._teacher:
            teacher.to(self.device)

    @override
    def with_teacher(
        self, batch: PackedBatch, objective: Objective, targets: Targets, groups: list[RowGroup], distil: list[bool]
    ) -> list[RowGroup]:
        if self.distil_in not in ("both", objective) or not any(distil):
            return groups
        (teacher,) = self._teacher
        rows: list[Tensor] = [group.rows for group, wanted in zip(groups, distil, strict=True) if wanted]
        said = iter(teacher.teach(targets.input_ids, batch.position_ids, self.packing(batch, objective), rows))
        return [
            replace(g, teacher=Teacher(*next(said), self.temperature, self.direction), kd_weight=self.kd_weight)
            if wanted
            else g
            for g, wanted in zip(groups, distil, strict=True)
        ]
