"""What a run will read and predict, before it is started: figures of the corpus, and a few packs in plain text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lit_encoders.data.mixture import MixedPlan
from lit_encoders.data.packs import PackedBatch, PackPlan
from lit_encoders.data.streaming import StreamPlan
from lit_encoders.data.tokens import TokenStore
from lit_encoders.objectives import Objective

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lit_encoders.data.datamodule import TextDataModule
    from lit_encoders.modules.lit_encoder import LitEncoder
    from lit_encoders.objectives.masking import Targets

UNKNOWN_SHARE = 0.01
_LOOK_AT = 50_000_000


@dataclass(frozen=True)
class CorpusFigures:
    """A corpus under a tokenizer and a pack plan.

    Attributes:
        documents: number of documents.
        tokens: tokens of an epoch, special tokens around documents included.
        characters_per_token: of the text (0 for ids that came without text).
        unknown_share: share of content tokens that are the unknown token, over the first 50M.
        fill: share of slots that hold tokens, over the first window.
        chunked: documents longer than a sequence, which are cut into pieces.
        packs: packs of the first epoch.
    """

    documents: int
    tokens: int
    characters_per_token: float
    unknown_share: float
    fill: float
    chunked: int
    packs: int


def corpus_figures(plan: PackPlan | StreamPlan, unknown_id: int | None) -> CorpusFigures:
    """Measure a corpus as a plan packs it; of a stream, its first window.

    Args:
        plan: of the corpus.
        unknown_id: id of the tokenizer's unknown token, None where it has none.
    """
    packs = plan.first_packs()
    store = plan.first_store() if isinstance(plan, StreamPlan) else plan.store
    assert isinstance(store, TokenStore)
    meta = store.meta
    around = len(plan.affixes.prefix) + len(plan.affixes.suffix)
    return CorpusFigures(
        documents=meta.num_documents,
        tokens=meta.num_tokens + meta.num_documents * around,
        characters_per_token=meta.num_characters / meta.num_tokens,
        unknown_share=0.0 if unknown_id is None else store.share_of(unknown_id, _LOOK_AT),
        fill=sum(pack.num_tokens for pack in packs) / (plan.slots * len(packs)),
        chunked=int((store.lengths(np.arange(len(store))) + around > plan.sequence_length).sum()),
        packs=plan.num_packs(0) if isinstance(plan, PackPlan) else len(packs),
    )


def show_targets(
    batch: PackedBatch, targets: Targets, tokenizer: PreTrainedTokenizerBase, objective: Objective, documents: int
) -> list[str]:
    """Write out the first documents of a pack with what is predicted where.

    Under MLM a target is ``[read>true]``, under CLM each token is followed by ``>next`` where it predicts.

    Returns:
        One line per document.
    """
    read = tokenizer.convert_ids_to_tokens(targets.input_ids.tolist())
    true = tokenizer.convert_ids_to_tokens(batch.input_ids.tolist())
    labels = dict(zip(targets.rows.tolist(), tokenizer.convert_ids_to_tokens(targets.labels.tolist()), strict=True))
    lines = []
    starts = np.cumsum(batch.segment_lengths) - batch.segment_lengths
    for number in range(min(documents, len(batch.documents))):
        words = []
        for slot in range(int(starts[number]), int(starts[number] + batch.segment_lengths[number])):
            if objective == "clm":
                words.append(f"{read[slot]}>{labels[slot]}" if slot in labels else f"{read[slot]}|")
            elif slot in labels:
                words.append(f"[{read[slot]}>{labels[slot]}]")
            else:
                words.append(read[slot] if read[slot] == true[slot] else f"({read[slot]} for {true[slot]})")
        lines.append(f"  document {batch.documents[number]}: {' '.join(words)}")
    return lines


def preview(
    module: LitEncoder, data: TextDataModule, steps: int | None, slots_per_step: int, packs: int = 2, documents: int = 2
) -> str:
    """Say what a run will read and predict.

    Args:
        module: attached to a trainer; its weights are not needed.
        data: set up for fitting.
        steps: optimizer steps of the run, None where it has no end.
        slots_per_step: slots x accumulation x ranks.
        packs: how many packs are written out.
        documents: how many documents of each.
    """
    plan, tokenizer = data.train_plan, module.tokenizer
    sources = dict(zip(data.source_names, plan.plans, strict=True)) if isinstance(plan, MixedPlan) else {"": plan}
    every = {
        name: corpus_figures(of_source, tokenizer.unk_token_id)
        for name, of_source in sources.items()
        if isinstance(of_source, (PackPlan, StreamPlan))
    }
    lines = ["figures are of the first window of each stream"] if data.streaming else []
    for name, figures in every.items():
        lines += [
            *([f"source                {name}"] if name else []),
            f"documents             {figures.documents:,}",
            f"tokens per epoch      {figures.tokens:,}",
            f"characters per token  {figures.characters_per_token:.2f}",
            f"unknown tokens        {figures.unknown_share:.2%}",
            f"fill of the packs     {figures.fill:.1%} of {plan.slots:,} slots, {figures.packs:,} packs per epoch",
            f"chunked documents     {figures.chunked:,} longer than {plan.sequence_length:,} tokens",
        ]
    for name in data.val_names:
        store = data.plans[f"val/{name}".rstrip("/")].store
        lines.append(f"held out {name or '':<12} {store.meta.num_documents:,} documents")
    if steps is not None and data.streaming:
        lines.append(f"budget                {steps:,} steps of {slots_per_step:,} slots")
    elif steps is not None:
        weights = plan.weights if isinstance(plan, MixedPlan) else [1.0]
        tokens = steps * slots_per_step * plan.fill
        passes = [
            f"{tokens * weight / sum(weights) / figures.tokens:.2f} epochs" + (f" of {name}" if name else "")
            for weight, (name, figures) in zip(weights, every.items(), strict=True)
        ]
        lines.append(f"budget                {steps:,} steps of {slots_per_step:,} slots: {', '.join(passes)}")
    for name, figures in every.items():
        if figures.unknown_share > UNKNOWN_SHARE:
            of = f" of {name}" if name else ""
            lines.append(
                f"WARNING: {figures.unknown_share:.1%} of the tokens{of} are unknown to the tokenizer: "
                "it does not fit this text; use another model or train a tokenizer"
            )
    objectives: list[Objective] = ["clm"] if module.mask_vocabulary is None else ["mlm", "clm"]
    for number, batch in zip(range(packs), data.train_dataloader(), strict=False):
        real = len(batch.documents)
        lines += ["", f"pack {number}: {real} pieces, {batch.num_tokens:,} of {len(batch.input_ids):,} slots"]
        for objective in objectives:
            targets = module.targets(batch, objective, mask_ratio=module.mask_ratio, seed=module.seed, epoch=0)
            lines.append(f" {objective}: {targets.num_targets} targets")
            lines += show_targets(batch, targets, tokenizer, objective, documents)
    return "\n".join(lines)
