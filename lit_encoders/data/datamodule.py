"""TextDataModule: files in, packs of token ids out, for training and validation."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader, Dataset, Sampler
from typing_extensions import override

from lit_encoders.data.examples import model_source
from lit_encoders.data.packs import Pack, PackedBatch, PackPlan, Position, gather
from lit_encoders.data.sources import SampleBy, as_source, in_split
from lit_encoders.data.tokens import FORMAT, Document, TokenStore, affixes, tokenizer_digest, write_stores
from lit_encoders.objectives.hashing import resolve_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOW_FILL = 0.9
ENOUGH_PACKS = 32


def default_cache() -> Path:
    """Where tokenised corpora are kept: ``$XDG_CACHE_HOME/lit_encoders``, else ``~/.cache/lit_encoders``."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "lit_encoders"


class _Gather(Dataset[PackedBatch]):
    """Map-style: the index is a pack of the plan, so that workers only read tokens."""

    def __init__(self, plan: PackPlan, pad_id: int) -> None:
        self.store, self.affixes, self.slots = plan.store, plan.affixes, plan.slots
        self.longest, self.pad_id = plan.sequence_length, pad_id

    @override
    def __getitem__(self, pack: Pack) -> PackedBatch:  # type: ignore[override]
        return gather(self.store, pack, self.affixes, self.slots, self.longest, self.pad_id)


class _PackSampler(Sampler[Pack]):
    def __init__(self, packs: Any) -> None:
        self.packs = packs

    @override
    def __iter__(self) -> Iterator[Pack]:
        return self.packs()  # type: ignore[no-any-return]


class PackLoader:
    """Batches of a plan, without length. No plain DataLoader: Lightning would replace its sampler under DDP.

    Args:
        plan: the packs.
        packs: starts a pass: the packs of this rank, planned in this process.
        pad_id: fills the rest of a pack.
        num_workers: processes that read tokens.
        pin_memory: whether batches go to a GPU.
    """

    def __init__(self, plan: PackPlan, packs: Any, pad_id: int, num_workers: int, pin_memory: bool) -> None:
        self.loader = DataLoader(
            _Gather(plan, pad_id),
            batch_size=None,
            sampler=_PackSampler(packs),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=pin_memory,
        )

    def __iter__(self) -> Iterator[PackedBatch]:
        return iter(self.loader)


class TextDataModule(LightningDataModule):
    """Text files as packs: tokenised once, chunked and never cut off, the same packs for any number of workers.

    A micro-batch is one pack of ``slots`` tokens. Documents are shuffled anew each epoch; the epochs follow each other
    without end unless the trainer has ``max_epochs``.

    Args:
        train: files (text, JSON lines, csv, tsv, parquet; .gz and .zst), globs, a folder that `datasets` saved,
            ``hub:OWNER/NAME``, or ``example:NAME``; see `TextSource`.
        val: the same for validation; several sets by name, each logged as ``val/<name>/...``; None takes
            ``val_share`` of the training documents.
        val_share: share of documents held out where ``val`` is None, in (0, 1); equal texts stay on one side.
        sequence_length: longest piece of a document in tokens, special tokens included.
        slots: tokens of a pack, at least ``sequence_length``; None takes ``sequence_length``.
        tokenizer: folder or hub name; None takes the module's.
        text_column: column of the text, or of token ids, in anything but plain text.
        sample_by: what a document of a plain text file is.
        num_workers: processes that read tokens; 0 reads in this one.
        seed: of the order of documents; None takes the one of ``seed_everything``, else 0.
        cache_dir: where tokenised corpora are kept; None is `default_cache`.

    Raises:
        ValueError: from ``prepare_data``, before anything is trained, with the key, the rule and the value.
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str] | dict[str, str | list[str]] | None = None,
        val_share: float = 0.01,
        sequence_length: int = 512,
        slots: int | None = None,
        tokenizer: str | None = None,
        text_column: str = "text",
        sample_by: SampleBy = "line",
        num_workers: int = 0,
        seed: int | None = None,
        cache_dir: str | Path | None = None,
    ) -> None:
        super().__init__()
        if val is None and not 0 < val_share < 1:
            raise ValueError(f"data.val_share must be in (0, 1), got {val_share}")
        if sequence_length < 1:
            raise ValueError(f"data.sequence_length must be at least 1, got {sequence_length}")
        if slots is not None and slots < sequence_length:
            raise ValueError(f"data.slots must be at least data.sequence_length ({sequence_length}), got {slots}")
        if num_workers < 0:
            raise ValueError(f"data.num_workers must be at least 0, got {num_workers}")
        self.train_source = as_source(train, text_column, sample_by, "data.train")
        named = val if isinstance(val, dict) else {} if val is None else {"": val}
        if isinstance(val, dict) and not (val and all(re.fullmatch(r"[\w-]+", name) for name in val)):
            raise ValueError(f"data.val must name its sets in letters, digits, '_' and '-', got {sorted(val)}")
        self.val_sources = {
            name: as_source(files, text_column, sample_by, f"data.val.{name}".rstrip("."))
            for name, files in named.items()
        }
        self.val_share = val_share
        self.sequence_length = sequence_length
        self.slots = slots or sequence_length
        self.tokenizer_name = tokenizer
        self.num_workers = num_workers
        self.seed = resolve_seed(seed)
        self.cache_dir = Path(cache_dir) if cache_dir else default_cache()
        self.position = Position()
        self.plans: dict[str, PackPlan] = {}
        self._stores: dict[str, Path] | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer in use: the one named, else the module's."""
        module = self.trainer.lightning_module if self.trainer is not None else None
        if self.tokenizer_name is None:
            if module is None or not hasattr(module, "tokenizer"):
                raise ValueError("data.tokenizer must name a tokenizer where the module has no `tokenizer`, got None")
            return module.tokenizer  # type: ignore[return-value]
        from lit_encoders.models.vocabulary import load_tokenizer

        return load_tokenizer(model_source(self.tokenizer_name), "data.tokenizer")

    def _folders(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Path]:
        """Where the store of each split stands: "train", and "val" or one "val/<name>" per named set.

        A folder is named by what it depends on: the text, how it is split, and the tokenizer.
        """
        by_tokenizer = tokenizer_digest(tokenizer)

        def folder(*facts: str) -> Path:
            key = hashlib.sha256("\n".join([str(FORMAT), by_tokenizer, *facts]).encode()).hexdigest()
            return self.cache_dir / key[:32]

        if not self.val_sources:
            both = folder(self.train_source.digest(), repr(self.val_share))
            return {"train": both / "train", "val": both / "val"}
        folders = {"train": folder(self.train_source.digest()) / "train"}
        for name, source in self.val_sources.items():
            folders[f"val/{name}".rstrip("/")] = folder(source.digest()) / "train"
        return folders

    @override
    def prepare_data(self) -> None:
        self._check_length()
        tokenizer = self.tokenizer
        self._stores = self._folders(tokenizer)
        sources = {"train": self.train_source}
        sources |= {f"val/{name}".rstrip("/"): source for name, source in self.val_sources.items()}
        for name, source in sources.items():
            folder = self._stores[name].parent
            if not folder.exists():
                rank_zero_info(f"Tokenising {', '.join(source.files)}")
                names = ("train",) if self.val_sources else ("train", "val")
                self._make_cache()
                write_stores(source.documents(), tokenizer, self._split, names, folder)
        for name, path in self._stores.items():
            meta = TokenStore(path).meta
            held_out = path.parent / "val"
            if meta.num_documents == 0 and name == "train" and held_out.exists() and len(TokenStore(held_out)):
                raise ValueError(
                    f"data.val_share must leave documents to train on: lower it or set data.val, got {self.val_share}"
                )
            if meta.num_documents == 0 and name not in sources:
                raise ValueError(
                    f"data.val_share must give at least one document: raise it or set data.val, got {self.val_share}"
                )
            if meta.num_documents == 0:
                source = sources[name]
                files = ", ".join(source.files)
                raise ValueError(f"{source.key} must hold at least one document that is not blank, got none in {files}")
            if meta.num_literal_specials:
                rank_zero_warn(
                    f"data.{name}: the string of a special token stands in {meta.num_literal_specials} documents; "
                    "there it is read as ordinary text"
                )

    def _make_cache(self) -> None:
        try:
            self.cache_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"data.cache_dir must be a folder that can be made, got '{self.cache_dir}'") from error

    def _split(self, document: Document) -> str:
        held_out = not self.val_sources and in_split(document, self.val_share)
        return "val" if held_out else "train"

    def _check_length(self) -> None:
        module = self.trainer.lightning_module if self.trainer is not None else None
        limit = getattr(module, "max_positions", None)
        if limit is not None and self.sequence_length > limit:
            raise ValueError(
                f"data.sequence_length must be at most the model's {limit} positions, got {self.sequence_length}"
            )

    @override
    def setup(self, stage: str) -> None:
        tokenizer = self.tokenizer
        around = affixes(tokenizer)
        if self.sequence_length < len(around.prefix) + len(around.suffix) + 1:
            raise ValueError(
                f"data.sequence_length must hold a token beside the {len(around.prefix) + len(around.suffix)} special "
                f"ones of a document, got {self.sequence_length}"
            )
        pad = tokenizer.pad_token_id
        self.pad_id = pad if pad is not None else (tokenizer.eos_token_id or 0)
        # Other ranks than the first of a machine have not prepared anything themselves.
        stores = self._stores or self._folders(tokenizer)
        self.plans = {
            name: PackPlan(
                TokenStore(path), around, self.slots, self.sequence_length, self.seed, shuffle=name == "train"
            )
            for name, path in stores.items()
        }
        _, world_size = self._ranks()
        if len(self.plans["train"].store) < world_size:
            raise ValueError(
                f"data.train must hold at least one document for each of the {world_size} ranks, "
                f"got {len(self.plans['train'].store)}"
            )
        if stage == "fit":
            # A new fit begins at the beginning; a resumed one restores its position after this.
            self.position = Position()
            self._report_fill()

    def _report_fill(self) -> None:
        # The last of a few packs is rarely full, whatever the documents.
        if self.fill < LOW_FILL and len(self.plans["train"].window(0, 0)) >= ENOUGH_PACKS:
            rank_zero_warn(
                f"packs are {self.fill:.0%} full: documents do not combine well into {self.slots} slots; "
                "a larger data.slots wastes less"
            )

    @property
    def fill(self) -> float:
        """Share of the slots of the first window's packs that hold tokens."""
        packs = self.plans["train"].window(0, 0)
        return sum(int(pack.lengths.sum()) for pack in packs) / (self.slots * len(packs))

    @property
    def val_names(self) -> list[str]:
        """Names of the validation sets, in the order of their loaders; one empty name for a single set."""
        return [name.removeprefix("val").removeprefix("/") for name in self.plans if name != "train"]

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the training files, as given."""
        return self.train_source.files

    @property
    def packs_per_epoch(self) -> int:
        """Packs of the first epoch (later ones differ a little)."""
        return self.plans["train"].num_packs(0)

    @property
    def epochs(self) -> float:
        """Passes over the training text so far, with the started window counted in full steps of its packs."""
        plan, (epoch, window, pack) = self.plans["train"], self.position
        return epoch + (window + pack / len(plan.window(epoch, window))) / plan.num_windows

    def _loader(self, name: str, packs: Any) -> PackLoader:
        pin = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return PackLoader(self.plans[name], packs, self.pad_id, self.num_workers, pin)

    def _ranks(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    @override
    def train_dataloader(self) -> PackLoader:
        plan, (rank, world) = self.plans["train"], self._ranks()
        ends = self.trainer is not None and self.trainer.max_epochs not in (None, -1)
        multiple = self.trainer.accumulate_grad_batches if ends and self.trainer is not None else None
        return self._loader("train", lambda: plan.for_rank(self.position, rank, world, multiple))

    @override
    def val_dataloader(self) -> list[PackLoader]:
        return [
            self._loader(name, partial(plan.for_rank, Position(), *self._ranks(), 1))
            for name, plan in self.plans.items()
            if name != "train"
        ]

    @override
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        # Called right before the step: loaders fetch ahead, so only here is it known which batch is trained next.
        if self.trainer is not None and self.trainer.training and isinstance(batch, PackedBatch):
            self.position = batch.after
        return batch

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"position": list(self.position), **self._identity()}

    def _identity(self) -> dict[str, Any]:
        """What a position in the plan depends on."""
        text = self.plans["train"].store.folder.parent.name
        return {"seed": self.seed, "slots": self.slots, "sequence_length": self.sequence_length, "text": text}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = self._identity()
        other = [f"data.{key} {state_dict[key]!r}, got {own[key]!r}" for key in own if state_dict[key] != own[key]]
        if other:
            raise ValueError(f"a checkpoint goes on with the data that it was made with: {'; '.join(other)}")
        self.position = Position(*state_dict["position"])
