"""The task of predicting held-out text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from lit_encoders.evaluation.language_modeling import check_windows, default_stride, language_scores
from lit_encoders.evaluation.scores import Scores
from lit_encoders.evaluation.task_base import Task
from lit_encoders.evaluation.texts import first_texts
from lit_encoders.models.backbone import load_language_model
from lit_encoders.modules.lit_encoder import LitEncoder
from lit_encoders.modules.open_module import open_module

# Where nobody says how many: the text may be a whole corpus.
_MOST_DOCUMENTS = 500


@dataclass(frozen=True)
class Perplexity(Task):
    """Perplexity and bits per byte of held-out text; see `language_scores`.

    Attributes:
        text: file of documents, as data.train takes it.
        column: of the text, in anything but plain text.
        sequence_length: longest window in tokens.
        stride: of CLM's windows.
        mask_ratio: of MLM.
        documents: how many, from the first; None for all, but at most 500.
    """

    text: str = ""
    column: str = "text"
    sequence_length: int = 512
    stride: int | None = None
    mask_ratio: float = 0.15
    documents: int | None = None

    main_metric: ClassVar[str] = "bits_per_byte"

    @property
    @override
    def files(self) -> tuple[str, ...]:
        return ("text",)

    @property
    @override
    def is_seeded(self) -> bool:
        return False

    @property
    @override
    def protocol(self) -> dict[str, Any]:
        stride = self.stride or default_stride(self.sequence_length)
        return {"sequence_length": self.sequence_length, "stride": stride, "mask_ratio": self.mask_ratio}

    @override
    def check(self, module: LitEncoder) -> None:
        check_windows(module, self.sequence_length, self.stride, self.mask_ratio, f"{self.key}.")
        # An LM head that is not stored would be a random one.
        load_language_model(module.source, module.config, module.weight_dtype, whole=True)

    @override
    def load(self) -> list[str]:
        return first_texts(
            self.text,
            _MOST_DOCUMENTS if self.documents is None else self.documents,
            f"{self.key}.text",
            self.column,
            asked_by=f"{self.key}.documents",
            fewer=self.documents is None,
        )

    @override
    def num_items(self, items: list[str]) -> int:
        return len(items)

    @override
    def groups(self, items: list[str]) -> list[str]:
        return [""] * len(items)

    @override
    def run(self, model: str, items: list[str], seed: int) -> Scores:
        return language_scores(
            open_module(model, on_gpu=True),
            items,
            sequence_length=self.sequence_length,
            stride=self.stride,
            mask_ratio=self.mask_ratio,
        )
