"""The targets of MLM in a pack: tokens or whole words, as masking chooses them."""

from __future__ import annotations

from torch import Tensor

from lit_encoders.data.packs import PackedBatch
from lit_encoders.objectives.masking import MaskVocabulary, Ratio, Targets, mlm_targets
from lit_encoders.objectives.whole_words import whole_word_targets


def masked_targets(
    batch: PackedBatch,
    vocabulary: MaskVocabulary,
    continuations: Tensor | None,
    *,
    seed: int,
    epoch: int,
    mask_ratio: Ratio,
    corruption_ratio: float | None,
    shares: tuple[float, float, float],
) -> Targets:
    """What MLM reads and predicts in a pack, on the pack's device: a pure function of its arguments.

    Args:
        batch: packed ids.
        vocabulary: what masking may touch and write; on the pack's device, on the host for whole words.
        continuations: ids that go on with a word, bool (V,), on the host, to mask whole words; None masks tokens.
        seed: of the masks.
        epoch: of the masks; they differ between epochs.
        mask_ratio: share of eligible tokens that are targets, or that of each piece, (N,).
        corruption_ratio: share of eligible tokens that ``shares`` apply to; None is ``mask_ratio``.
        shares: of the corrupted tokens that become the mask token, a random token, or stay.
    """
    if continuations is None:
        return mlm_targets(
            batch.input_ids,
            batch.segment_ids,
            batch.segment_starts,
            batch.document_positions,
            batch.documents,
            batch.eligible_span,
            vocabulary,
            seed=seed,
            epoch=epoch,
            mask_ratio=mask_ratio,
            corruption_ratio=corruption_ratio,
            shares=shares,
        )
    # How many targets whole words make shows in the ids only: chosen on the host, no step waits for them.
    host = batch.on_host or batch
    found = whole_word_targets(
        host.input_ids,
        host.segment_ids,
        host.segment_starts,
        host.document_positions,
        host.documents,
        vocabulary,
        continuations,
        seed=seed,
        epoch=epoch,
        mask_ratio=mask_ratio,
        corruption_ratio=corruption_ratio,
        shares=shares,
    )
    return found.to(batch.input_ids.device)
