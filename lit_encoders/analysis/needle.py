"""A needle in a haystack: does an embedding know a fact that its document has? By length, and where the fact stands.

Source: the needle task of Touchent, de la Clergerie (2026), arXiv:2605.12438, which reports 62.2 % against 51.6 % at
n = 225 from a small probe on the frozen encoder, without intervals. It does not say what the probe was, nor how much it
was fitted on: both are ours here, and so are the two controls. Facts take their values from small sets, so the probe is
asked whether what makes the fact is in the embedding, not whether it can compare words that it has never met.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_encoders.analysis.needle_documents import (
    POSITIONS,
    Filler,
    Needle,
    Position,
    control_needles,
    make_documents,
    make_filler,
    make_needles,
)
from lit_encoders.analysis.needle_probe import PairProbe, Pairs, ask_both, ask_one
from lit_encoders.data.tokens import affixes, encode, num_ids
from lit_encoders.evaluation.embeddings import embed, last_hidden, pool, read_packs
from lit_encoders.evaluation.statistics import Share, wilson_interval
from lit_encoders.modules.lit_encoder import LitEncoder

# Tokens of the positive control's texts, and what the probe has to reach on them.
CONTROL_LENGTH = 64
CONTROL_SHARE = 0.95


@dataclass(frozen=True)
class Cell:
    """What the probe answers rightly at one length and position.

    Attributes:
        length: of the documents, in tokens, special ones included.
        position: where their facts stand.
        correct: of the pairs tested.
    """

    length: int
    position: Position
    correct: Share


@dataclass(frozen=True)
class Haystack:
    """Answers over a grid, with what shows whether they mean anything.

    Attributes:
        cells: lengths, and for each its positions.
        shuffled: what comes out where labels are dealt out by chance, in the fit and in the test, over all lengths.
        control: the same probe on as many documents of a question that mean token embeddings answer, without the
            encoder.
        steps: most steps that a probe took to converge.
        converged: whether all did.
    """

    cells: list[Cell]
    shuffled: Share
    control: Share
    steps: int
    converged: bool

    def over_positions(self, length: int) -> Share:
        """All pairs of a length; those of different lengths have their facts in common, so they are never pooled."""
        cells = [cell.correct for cell in self.cells if cell.length == length]
        return wilson_interval(sum(cell.hits for cell in cells), sum(cell.trials for cell in cells))


def measure_needle(
    module: LitEncoder,
    lengths: Sequence[int],
    positions: Sequence[Position] = POSITIONS,
    *,
    pairs: int = 100,
    fit: int = 100,
    filler: Filler | None = None,
    seed: int = 0,
    slots: int = 4096,
) -> Haystack:
    """Fit a probe for each length on the resting encoder's embeddings, and test it on other people's facts.

    An interval is that of the pairs tested, given the probe: another draw of fitted documents moves all cells of a
    length together. Lengths have the same facts, so a difference between two of them is the length's.

    Args:
        module: of the model.
        lengths: of the documents in tokens, special ones included; each has exactly that many.
        positions: where facts stand.
        pairs: tested at each length and position, an even number: half ask for the fact, half for a near miss.
        fit: documents at each length and position that the probe is fitted on, each asked both ways.
        filler: to hide facts in; None makes sentences.
        seed: of facts, filler and shuffled labels.
        slots: most tokens that are read at once; where a document is longer, its length.

    Raises:
        ValueError: a length is more than the model has positions for or less than a fact needs, the tokenizer cannot
            tell facts apart, or there are fewer people than facts.
    """
    sets = make_needles([fit, pairs], positions, seed)
    controls = control_needles([fit, pairs], positions, seed)
    longest = check_lengths(module, lengths, [needle for needles in (*sets, *controls) for needle in needles])
    made = make_filler(module.tokenizer, seed=seed)
    # First: it takes seconds, and shows that a probe can be fitted here at all.
    vectors = [_mean_token_embeddings(module, _document_ids(module, n, made, CONTROL_LENGTH)) for n in controls]
    asked = [[_mean_token_embeddings(module, ids) for ids in _question_ids(module, needles)] for needles in controls]
    fitted, tested = _as_pairs(vectors, asked, positions)
    probes = [PairProbe(fitted)]
    control = _share(probes[0].correct(tested))
    questions = [_questions(module, needles, longest, slots) for needles in sets]
    cells, by_chance = [], []
    for length in lengths:
        vectors = [_embed_documents(module, needles, filler or made, length, slots) for needles in sets]
        fitted, tested = _as_pairs(vectors, questions, positions)
        probes.append(PairProbe(fitted))
        correct = probes[-1].correct(tested)
        for place, position in enumerate(positions):
            cells.append(Cell(length, position, _share(correct[place :: len(positions)])))
        # Tested labels are dealt out too: with the true ones a chance agreement of the fit's would count in all pairs.
        fitted, tested = fitted.shuffled(f"{seed} {length} fit"), tested.shuffled(f"{seed} {length} test")
        probes.append(PairProbe(fitted))
        by_chance.append(probes[-1].correct(tested))
    steps = max(probe.steps for probe in probes)
    converged = all(probe.converged for probe in probes)
    return Haystack(cells, _share(torch.cat(by_chance)), control, steps, converged)


def check_lengths(module: LitEncoder, lengths: Sequence[int], needles: Sequence[Needle]) -> int:
    """Refuse lengths that a model or a fact has no room for; return the tokens of the longest question.

    Raises:
        ValueError: as `measure_needle`.
    """
    facts, near_misses = _question_ids(module, needles)
    for needle, fact, near_miss in zip(needles, facts, near_misses, strict=True):
        if fact == near_miss:
            raise ValueError(
                "model must have a tokenizer that tells facts apart, got the same ids for "
                f"'{needle.fact}' and '{needle.near_miss}'"
            )
    around = affixes(module.tokenizer)
    special = len(around.prefix) + len(around.suffix)
    longest = max(len(ids) for ids in (*facts, *near_misses)) + special
    # A fact within a document may begin with a space, which can be a token of its own.
    least = longest + 1
    for length in lengths:
        if module.max_positions is not None and length > module.max_positions:
            raise ValueError(f"lengths must be at most the model's {module.max_positions} positions, got {length}")
        if length < least:
            raise ValueError(f"lengths must be at least {least} tokens to hold the longest fact, got {length}")
    if least > CONTROL_LENGTH:
        raise ValueError(
            f"model must have a tokenizer that writes a fact in fewer than {CONTROL_LENGTH} tokens, got {longest}"
        )
    return longest


def _question_ids(module: LitEncoder, needles: Sequence[Needle]) -> tuple[list[list[int]], list[list[int]]]:
    """Ids of facts and of near misses, without special tokens."""
    size = num_ids(module.tokenizer)
    facts, near_misses = [needle.fact for needle in needles], [needle.near_miss for needle in needles]
    return encode(facts, module.tokenizer, size), encode(near_misses, module.tokenizer, size)


def _questions(module: LitEncoder, needles: Sequence[Needle], longest: int, slots: int) -> list[Tensor]:
    texts = [[needle.fact for needle in needles], [needle.near_miss for needle in needles]]
    return [embed(module, asked, sequence_length=longest, slots=max(slots, longest)) for asked in texts]


def _document_ids(module: LitEncoder, needles: Sequence[Needle], filler: Filler, length: int) -> list[list[int]]:
    around = affixes(module.tokenizer)
    content = length - len(around.prefix) - len(around.suffix)
    return make_documents(needles, filler, content, module.tokenizer)


def _embed_documents(module: LitEncoder, needles: Sequence[Needle], filler: Filler, length: int, slots: int) -> Tensor:
    # Out of ids, not by `embed`: tokenising a text again would not give an exact number of tokens.
    around = affixes(module.tokenizer)
    rows = [[*around.prefix, *ids, *around.suffix] for ids in _document_ids(module, needles, filler, length)]
    found = torch.empty(len(rows), module.config.hidden_size)
    for pack, sizes, hidden in read_packs(module, rows, max(slots, length), None, last_hidden):
        found[pack] = pool(hidden[0], sizes, "mean").cpu()
    return found


def _mean_token_embeddings(module: LitEncoder, rows: Sequence[Sequence[int]]) -> Tensor:
    """The mean of a text's input embeddings, (N, E): what the model knows before its first layer."""
    module.configure_model()
    assert module.backbone is not None
    table: Any = module.backbone.model.get_input_embeddings()
    weight = table.weight.detach().float().cpu()
    return torch.stack([weight[torch.tensor(row)].mean(0) for row in rows])


def _as_pairs(
    vectors: Sequence[Tensor], questions: Sequence[Sequence[Tensor]], positions: Sequence[Position]
) -> tuple[Pairs, Pairs]:
    """Pairs to fit on and to test: at every position half of the tested ones ask for the fact."""
    facts, near_misses = questions[1]
    labels = torch.arange(len(facts)) // len(positions) % 2 == 0
    return ask_both(vectors[0], *questions[0]), ask_one(vectors[1], facts, near_misses, labels)


def _share(correct: Tensor) -> Share:
    return wilson_interval(int(correct.sum()), len(correct))
