"""A causal model in the form that lm-evaluation-harness runs: many requests in one pack, without padding.

Written for lm_eval 0.4.13. The package is imported where it is used only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lit_encoders.data.packs import best_fit
from lit_encoders.data.tokens import affixes, encode, num_ids
from lit_encoders.evaluation.language_modeling import sliding_windows
from lit_encoders.models.attention import PackLayout
from lit_encoders.modules.lit_encoder import LitEncoder

# lm_eval's own, for a model without a limit and for a task that sets none.
_DEFAULT_LENGTH = 2048
_DEFAULT_NEW_TOKENS = 256
# Rows that become logits at once: 512 of a vocabulary of 262,144 are 0.5 GB.
_CHUNK = 512
_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class PackedLanguageModel:
    """A causal model that answers lm_eval's three kinds of request; `lm_eval_model` makes it one of lm_eval's.

    A text begins as the tokenizer begins one, and nothing closes it.

    Args:
        module: of the model, with objective "clm".
        sequence_length: longest text that is read, in tokens; None is all that the model has positions for. What is
            longer loses its beginning.
        slots: most tokens of a pack.

    Raises:
        ValueError: the model is for MLM, the length is out of its range, or no token can stand before a text.
    """

    def __init__(self, module: LitEncoder, *, sequence_length: int | None = None, slots: int = 4096) -> None:
        check_causal(module)
        limit = module.max_positions
        if sequence_length is not None and not 2 <= sequence_length <= (limit or sequence_length):
            raise ValueError(
                f"sequence_length must be from 2 to the positions of the model ({limit}), got {sequence_length}"
            )
        module.configure_model()
        self.module = module
        self.sequence_length = sequence_length or limit or _DEFAULT_LENGTH
        self.slots = max(slots, self.sequence_length)
        around = affixes(module.tokenizer)
        tokenizer: Any = module.tokenizer
        self._prefix = list(around.prefix)
        ends = [tokenizer.eos_token_id, *around.suffix]
        self._ends = {token for token in ends if token is not None}
        # What stands before a text that has nothing before it: as lm_eval has it, the begin token, else the end token.
        opening = [token for token in (tokenizer.bos_token_id, *ends) if token is not None]
        self._opening = self._prefix or opening[:1]
        if not self._opening:
            raise ValueError("model.tokenizer must have a token that begins or ends a text, got one without")

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """How likely each continuation is after its context.

        Args:
            requests: with ``args``, a context and its continuation.
            disable_tqdm: of lm_eval; there is no bar.

        Returns:
            For each the log-probability of the continuation, in nats, and whether it is what greedy decoding gives.

        Raises:
            ValueError: a continuation is longer than the model reads.
        """
        rows = []
        for request in requests:
            before, after = self._split(*request.args)
            if len(after) > self.sequence_length:
                raise ValueError(
                    f"sequence_length must hold a whole continuation ({len(after)} tokens), got {self.sequence_length}"
                )
            # The last token is not read, only predicted.
            row = [*before, *after][-self.sequence_length - 1 :]
            rows.append((row, len(row) - len(after)))
        return continuation_scores(self.module, rows, self.slots)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """How likely each whole text is; one that is too long is read in windows, each token predicted once.

        Args:
            requests: with ``args``, a text.
            disable_tqdm: of lm_eval; there is no bar.

        Returns:
            For each its log-probability in nats.
        """
        rows: list[tuple[list[int], int]] = []
        owners = []
        for number, request in enumerate(requests):
            whole = [*self._opening, *self._ids(request.args[0])]
            size = self.sequence_length
            for start, end, first in sliding_windows(whole, size + 1, size):
                # Of several opening tokens only the first stands for itself.
                rows.append((whole[start:end], max(first, len(self._opening)) - start))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, continuation_scores(self.module, rows, self.slots), strict=True):
            totals[owner] += score
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each context greedily, up to a stop text, the end token or the task's limit.

        Every step reads all texts anew, packed: without a cache of keys it is as exact as `loglikelihood`, for every
        architecture, and for many short texts about as fast.

        Args:
            requests: with ``args``, a context and settings: ``until`` (stop texts) and ``max_gen_toks``, 256 if not
                given.
            disable_tqdm: of lm_eval; there is no bar.

        Returns:
            For each what was written, without the stop text.

        Raises:
            ValueError: a task samples, or its limit leaves no room for a context.
        """
        prompts, stops, most = [], [], []
        for request in requests:
            context, settings = request.args
            until, limit = self._generation(settings)
            ids = self._ids(context)
            prompts.append([*(self._prefix if ids else self._opening), *ids][-(self.sequence_length - limit) :])
            stops.append(until)
            most.append(limit)
        tokenizer: Any = self.module.tokenizer
        written: list[list[int]] = [[] for _ in requests]
        texts = [""] * len(requests)
        active = list(range(len(requests)))
        while active:
            tokens = next_tokens(self.module, [[*prompts[place], *written[place]] for place in active], self.slots)
            going = []
            for place, token in zip(active, tokens, strict=True):
                if token in self._ends:
                    continue
                written[place].append(token)
                texts[place] = tokenizer.decode(written[place], skip_special_tokens=True)
                found = [at for at in (texts[place].find(stop) for stop in stops[place]) if at >= 0]
                if found:
                    texts[place] = texts[place][: min(found)]
                elif len(written[place]) < most[place]:
                    going.append(place)
            active = going
        return texts

    def _ids(self, text: str) -> list[int]:
        return encode([text], self.module.tokenizer, num_ids(self.module.tokenizer))[0]

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of a context and of its continuation, cut where the context's own tokens end, as lm_eval cuts."""
        # A space belongs to the word after it: that is how tokenizers see it.
        bare = context.rstrip()
        continuation = context[len(bare) :] + continuation
        before = self._ids(bare) if bare else []
        if not before:
            return self._opening, self._ids(continuation)
        whole = self._ids(bare + continuation)
        return [*self._prefix, *whole[: len(before)]], whole[len(before) :]

    def _generation(self, settings: Mapping[str, Any]) -> tuple[list[str], int]:
        """Stop texts and most new tokens of a request."""
        samples = settings.get("do_sample")
        if samples or (samples is None and float(settings.get("temperature") or 0) > 0):
            raise ValueError(f"a task must generate greedily (do_sample: false), got {dict(settings)}")
        until = settings.get("until") or []
        given = [settings[name] for name in _NEW_TOKENS if settings.get(name) is not None]
        most = int(given[0]) if given else _DEFAULT_NEW_TOKENS
        if not 1 <= most < self.sequence_length:
            raise ValueError(
                f"sequence_length must be above the tokens that a task generates ({most}), got {self.sequence_length}"
            )
        return [stop for stop in ([until] if isinstance(until, str) else until) if stop], most


def check_causal(module: LitEncoder) -> None:
    """Refuse a model that reads both sides of what it would have to predict.

    Raises:
        ValueError: its objective is not "clm".
    """
    if module.objective != "clm":
        raise ValueError(
            "model must be causal (objective 'clm') for lm_eval, got one for MLM: what it says of a token depends on "
            "the tokens after it, so its predictions make no likelihood of a text"
        )


def lm_eval_model(module: LitEncoder, *, sequence_length: int | None = None, slots: int = 4096) -> Any:
    """Make a model that ``lm_eval.simple_evaluate`` takes.

    Args:
        module, sequence_length, slots: see `PackedLanguageModel`.

    Returns:
        A ``lm_eval.api.model.LM``.

    Raises:
        ValueError: as `PackedLanguageModel`.
    """
    check_causal(module)
    from lm_eval.api.model import LM

    class PackedLM(PackedLanguageModel, LM):
        def __init__(self) -> None:
            LM.__init__(self)
            PackedLanguageModel.__init__(self, module, sequence_length=sequence_length, slots=slots)

    return PackedLM()


def continuation_scores(
    module: LitEncoder, rows: Sequence[tuple[Sequence[int], int]], slots: int
) -> list[tuple[float, bool]]:
    """Log-probabilities of the ends of texts; texts that differ in their last token only are read once.

    Args:
        module: of the model, read from left to right.
        rows: tokens of each text, and the number of the first one that is predicted, at least 1.
        slots: most tokens of a pack; a text has at most one more, since its last token is not read.

    Returns:
        For each row the sum over its predicted tokens, in nats, and whether each is the likeliest one; 0 and True where
        none is predicted.
    """
    wanted = [place for place, (ids, first) in enumerate(rows) if len(ids) > first]
    reads: dict[tuple[int, ...], list[int]] = {}
    for place in wanted:
        reads.setdefault(tuple(rows[place][0][:-1]), []).append(place)
    sums, greedy = np.zeros(len(rows)), np.ones(len(rows), dtype=bool)
    texts = list(reads)
    for pack, starts, hidden in _read(module, texts, slots):
        targets: list[int] = []
        labels: list[int] = []
        owners: list[int] = []
        for text, start in zip(pack, starts, strict=True):
            for place in reads[texts[text]]:
                ids, first = rows[place]
                targets += range(start + first - 1, start + len(ids) - 1)
                labels += ids[first:]
                owners += [place] * (len(ids) - first)
        values, best = _log_probabilities(module, hidden[torch.tensor(targets, device=hidden.device)], labels)
        np.add.at(sums, owners, values)
        np.logical_and.at(greedy, owners, best)
    return [(float(score), bool(best)) for score, best in zip(sums, greedy, strict=True)]


def next_tokens(module: LitEncoder, rows: Sequence[Sequence[int]], slots: int) -> list[int]:
    """The likeliest token after each text.

    Args:
        module: of the model, read from left to right.
        rows: tokens of each text, at least one.
        slots: most tokens of a pack.
    """
    found = [0] * len(rows)
    for pack, starts, hidden in _read(module, rows, slots):
        last = [start + len(rows[text]) - 1 for text, start in zip(pack, starts, strict=True)]
        assert module.backbone is not None
        with torch.no_grad():
            logits = module.backbone.logits(hidden[torch.tensor(last, device=hidden.device)], module.head("clm"))
        for text, token in zip(pack, logits.argmax(1).tolist(), strict=True):
            found[text] = token
    return found


@torch.no_grad()
def _log_probabilities(module: LitEncoder, hidden: Tensor, labels: Sequence[int]) -> tuple[Any, Any]:
    """Log-probability of each label and whether it is the likeliest, on the host, out of hidden states (K, D)."""
    assert module.backbone is not None
    values, best = [], []
    wanted = torch.tensor(labels, device=hidden.device)
    for states, tokens in zip(hidden.split(_CHUNK), wanted.split(_CHUNK), strict=True):
        scores = module.backbone.logits(states, module.head("clm")).float().log_softmax(1)
        values.append(scores.gather(1, tokens[:, None])[:, 0].double().cpu())
        best.append((scores.argmax(1) == tokens).cpu())
    return torch.cat(values).numpy(), torch.cat(best).numpy()


@torch.no_grad()
def _read(
    module: LitEncoder, rows: Sequence[Sequence[int]], slots: int
) -> Iterator[tuple[list[int], list[int], Tensor]]:
    """Read texts from left to right, pack by pack: numbers of its texts, where each starts, last hidden states (T, D).

    In evaluation mode, without dropout; the module is left as it was.
    """
    backbone = module.backbone
    assert backbone is not None
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    device = next(backbone.parameters()).device
    was_training = backbone.training
    backbone.eval()
    try:
        for pack in best_fit(lengths, slots):
            # Like lengths are computed together.
            texts = sorted(pack, key=lambda text: len(rows[text]))
            sizes = lengths[texts]
            ids = torch.tensor([token for text in texts for token in rows[text]], device=device)
            positions = torch.cat([torch.arange(size) for size in sizes.tolist()]).to(device)
            hidden = backbone.encode(ids, positions, PackLayout(sizes, causal=True))
            yield texts, cast("list[int]", (np.cumsum(sizes) - sizes).tolist()), hidden
    finally:
        backbone.train(was_training)
