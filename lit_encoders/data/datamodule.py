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
from lit_encoders.data.mixture import MixedPlan, MixedPosition
from lit_encoders.data.packs import BEGINNING, Pack, PackedBatch, PackPlan, Plan, Position, gather
from lit_encoders.data.sources import SampleBy, TextSource, as_source, in_split
from lit_encoders.data.streaming import StreamPlan, stream_digest, stream_reader
from lit_encoders.data.tokens import FORMAT, Affixes, Document, TokenStore, affixes, tokenizer_digest, write_stores
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

    def __init__(self, plan: Plan, pad_id: int) -> None:
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

    def __init__(self, plan: Plan, packs: Any, pad_id: int, num_workers: int, pin_memory: bool) -> None:
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
            ``hub:OWNER/NAME``, or ``example:NAME``; see `TextSource`. Several sources by name are mixed pack by pack,
            and their tokens and losses logged as ``train/<name>/...``.
        weights: share of each source in the tokens, by name, above 0; None takes them as they are in size. Each is read
            in epochs of its own.
        val: the same for validation; several sets by name, each logged as ``val/<name>/...``; None takes
            ``val_share`` of the training documents, of several sources as a set for each.
        val_share: share of documents held out where ``val`` is None, in (0, 1); equal texts stay on one side.
        sequence_length: longest piece of a document in tokens, special tokens included.
        slots: tokens of a pack, at least ``sequence_length``; None takes ``sequence_length``.
        tokenizer: folder or hub name; None takes the module's.
        text_column: column of the text, or of token ids, in anything but plain text.
        sample_by: what a document of a plain text file is.
        num_workers: processes that read tokens; 0 reads in this one.
        seed: of the order of documents; None takes the one of ``seed_everything``, else 0.
        cache_dir: where tokenised corpora are kept; None is `default_cache`.
        streaming: read the training text while a run goes on, window by window, instead of tokenising all of it first;
            ``train`` is then local files of one kind or a dataset of the hub, and ``val`` has to be given.

    Raises:
        ValueError: from ``prepare_data``, before anything is trained, with the key, the rule and the value.
    """

    def __init__(
        self,
        train: str | list[str] | dict[str, str | list[str]],
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
        weights: dict[str, float] | None = None,
        streaming: bool = False,
    ) -> None:
        super().__init__()
        if streaming and val is None:
            raise ValueError("data.val must name held-out text where data.streaming is on, got None")
        if streaming and isinstance(train, dict) and weights is None:
            raise ValueError("data.weights must be given where data.streaming is on: sizes are not known, got None")
        if val is None and not 0 < val_share < 1:
            raise ValueError(f"data.val_share must be in (0, 1), got {val_share}")
        if sequence_length < 1:
            raise ValueError(f"data.sequence_length must be at least 1, got {sequence_length}")
        if slots is not None and slots < sequence_length:
            raise ValueError(f"data.slots must be at least data.sequence_length ({sequence_length}), got {slots}")
        if num_workers < 0:
            raise ValueError(f"data.num_workers must be at least 0, got {num_workers}")
        self.train_sources = _sources(train, "data.train", text_column, sample_by)
        self.val_sources = {} if val is None else _sources(val, "data.val", text_column, sample_by)
        self.streaming = streaming
        self.weights = _check_weights(weights, list(self.train_sources))
        self.val_share = val_share
        self.sequence_length = sequence_length
        self.slots = slots or sequence_length
        self.tokenizer_name = tokenizer
        self.num_workers = num_workers
        self.seed = resolve_seed(seed)
        self.cache_dir = Path(cache_dir) if cache_dir else default_cache()
        self.position: Any = BEGINNING
        self.plans: dict[str, Plan] = {}
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

    @property
    def source_names(self) -> list[str]:
        """Names of the sources that are mixed, in order; none for one without a name."""
        return [name for name in self.train_sources if name]

    def _folders(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Path]:
        """Where the store of each split stands: "train" and "val", or "train/<name>" and "val/<name>" for named ones.

        A folder is named by what it depends on: the text, how it is split, and the tokenizer.
        """
        by_tokenizer = tokenizer_digest(tokenizer)

        def folder(*facts: str) -> Path:
            key = hashlib.sha256("\n".join([str(FORMAT), by_tokenizer, *facts]).encode()).hexdigest()
            return self.cache_dir / key[:32]

        folders: dict[str, Path] = {}
        for name, source in self.train_sources.items():
            if self.streaming:
                # Of this run alone: another one may be at another place.
                root = str(Path(self.trainer.default_root_dir).resolve()) if self.trainer is not None else ""
                folders[_split_name("train", name)] = folder("stream", stream_digest(source), root)
            elif self.val_sources:
                folders[_split_name("train", name)] = folder(source.digest()) / "train"
            else:
                both = folder(source.digest(), repr(self.val_share))
                folders[_split_name("train", name)] = both / "train"
                folders[_split_name("val", name)] = both / "val"
        for name, source in self.val_sources.items():
            folders[_split_name("val", name)] = folder(source.digest()) / "train"
        return folders

    @override
    def prepare_data(self) -> None:
        self._check_length()
        tokenizer = self.tokenizer
        self._stores = self._folders(tokenizer)
        ahead = {} if self.streaming else self.train_sources
        sources = {_split_name("train", name): source for name, source in ahead.items()}
        sources |= {_split_name("val", name): source for name, source in self.val_sources.items()}
        for name, source in sources.items():
            folder = self._stores[name].parent
            if not folder.exists():
                rank_zero_info(f"Tokenising {', '.join(source.files)}")
                names = ("train",) if self.val_sources else ("train", "val")
                self._make_cache()
                write_stores(source.documents(), tokenizer, self._split, names, folder)
        for name, path in self._stores.items():
            if not (self.streaming and name.partition("/")[0] == "train"):
                self._check_store(name, path, sources.get(name))

    def _check_store(self, name: str, path: Path, source: TextSource | None) -> None:
        """Refuse a split without documents; a held-out part has no source of its own."""
        meta = TokenStore(path).meta
        held_out = path.parent / "val"
        if meta.num_documents == 0 and source is not None and held_out.exists() and len(TokenStore(held_out)):
            raise ValueError(
                f"data.val_share must leave documents to train on: lower it or set data.val, got {self.val_share}"
            )
        if meta.num_documents == 0 and source is None:
            of = f" of {name.partition('/')[2]}" if "/" in name else ""
            raise ValueError(
                f"data.val_share must give at least one document{of}: raise it or set data.val, got {self.val_share}"
            )
        if meta.num_documents == 0:
            assert source is not None
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
        plans: dict[str, Plan] = {
            name: PackPlan(TokenStore(path), around, self.slots, self.sequence_length, self.seed, shuffle=False)
            for name, path in stores.items()
            if name.partition("/")[0] == "val"
        }
        trained = {
            name: self._source_plan(source, stores[_split_name("train", name)], around, tokenizer)
            for name, source in self.train_sources.items()
        }
        self.plans = {"train": self._mix(trained) if self.source_names else trained[""], **plans}
        _, world_size = self._ranks()
        if not self.streaming and len(self.train_plan.store) < world_size:
            raise ValueError(
                f"data.train must hold at least one document for each of the {world_size} ranks, "
                f"got {len(self.train_plan.store)}"
            )
        if world_size > 1 and isinstance(self.train_plan, PackPlan) and self.train_plan.num_windows == 1:
            packs = len(self.train_plan.first_packs())
            if packs < world_size:
                raise ValueError(
                    f"data.train must fill at least one pack of {self.slots} slots for each of the {world_size} ranks, "
                    f"got {packs} packs"
                )
        if stage == "fit":
            # A new fit begins at the beginning; a resumed one restores its position after this.
            self.position = self.train_plan.beginning

    def _source_plan(
        self, source: TextSource, path: Path, around: Affixes, tokenizer: PreTrainedTokenizerBase
    ) -> PackPlan | StreamPlan:
        if not self.streaming:
            return PackPlan(TokenStore(path), around, self.slots, self.sequence_length, self.seed)
        writes = self.trainer is None or self.trainer.local_rank == 0
        path.mkdir(parents=True, exist_ok=True)
        size = (self.slots, self.sequence_length)
        return StreamPlan(stream_reader(source), tokenizer, path, around, *size, self.seed, writes)

    def _mix(self, plans: dict[str, PackPlan | StreamPlan]) -> MixedPlan:
        if self._ends:
            raise ValueError(
                "trainer.max_epochs must be -1 where data.train has several sources, which have epochs of their own, "
                f"got {self.trainer.max_epochs}"  # type: ignore[union-attr]
            )
        weights = self.weights or {
            name: float(plan.num_tokens()) for name, plan in plans.items() if isinstance(plan, PackPlan)
        }
        return MixedPlan(plans, [weights[name] for name in plans])

    @property
    def train_plan(self) -> Plan:
        """The packs to train on."""
        return self.plans["train"]

    @property
    def _ends(self) -> bool:
        return self.trainer is not None and self.trainer.max_epochs not in (None, -1)

    def _report_fill(self) -> None:
        # The last of a few packs is rarely full, whatever the documents.
        if self.fill < LOW_FILL and len(self.train_plan.first_packs()) >= ENOUGH_PACKS:
            rank_zero_warn(
                f"packs are {self.fill:.0%} full: documents do not combine well into {self.slots} slots; "
                "a larger data.slots wastes less"
            )

    @property
    def fill(self) -> float:
        """Share of the slots of the first window's packs that hold tokens."""
        return self.train_plan.fill

    @property
    def val_names(self) -> list[str]:
        """Names of the validation sets, in the order of their loaders; one empty name for a single set."""
        return [name.removeprefix("val").removeprefix("/") for name in self.plans if name != "train"]

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the training files, as given."""
        return tuple(file for source in self.train_sources.values() for file in source.files)

    def documents(self) -> Iterator[Document]:
        """Yield the documents that are trained on or held out of it, as they stand in the files, source by source."""
        for source in self.train_sources.values():
            yield from source.documents()

    @property
    def packs_per_epoch(self) -> int | None:
        """Packs of the first epoch (later ones differ a little); None for a mixture, which has none of its own."""
        return self.train_plan.num_packs(0) if isinstance(self.train_plan, PackPlan) else None

    @property
    def epochs(self) -> float | dict[str, float]:
        """Passes over the training text so far, with the started window counted in full steps of its packs.

        Of a mixture, those of each source.
        """
        plan = self.train_plan
        if isinstance(plan, MixedPlan):
            every = zip(self.source_names, plan.plans, self.position.places, strict=True)
            return {name: of_source.epochs_at(place) for name, of_source, place in every}
        return plan.epochs_at(self.position)

    def _loader(self, name: str, packs: Any) -> PackLoader:
        pin = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return PackLoader(self.plans[name], packs, self.pad_id, self.num_workers, pin)

    def _ranks(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    @override
    def train_dataloader(self) -> PackLoader:
        plan, (rank, world) = self.train_plan, self._ranks()
        if self.position == plan.beginning:  # A resumed run plans the window that it stands in, and no other.
            self._report_fill()
        multiple = self.trainer.accumulate_grad_batches if self._ends and self.trainer is not None else None
        return self._loader("train", lambda: plan.for_rank(self.position, rank, world, multiple))

    @override
    def val_dataloader(self) -> list[PackLoader]:
        return [
            self._loader(name, partial(plan.for_rank, plan.beginning, *self._ranks(), 1))
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
    def teardown(self, stage: str) -> None:
        self._close()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if "train" in self.plans:
            for plan, _ in self._by_source(self.train_plan.beginning).values():
                if isinstance(plan, StreamPlan):
                    plan.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        place = self.position
        if isinstance(place, MixedPosition):
            plain: list[Any] = [[list(one) for one in place.places], list(place.tokens)]
        else:
            plain = list(place)
        streams = {
            name: plan.state(at) for name, (plan, at) in self._by_source(place).items() if isinstance(plan, StreamPlan)
        }
        return {"position": plain, **({"streams": streams} if streams else {}), **self._identity()}

    def _by_source(self, place: Any) -> dict[str, tuple[Plan, Position]]:
        """The plan of each source, with its place."""
        plan = self.train_plan
        if isinstance(plan, MixedPlan):
            return {n: (one, at) for n, one, at in zip(self.source_names, plan.plans, place.places, strict=True)}
        return {"": (plan, place)}

    def _identity(self) -> dict[str, Any]:
        """What a position in the plan depends on."""
        facts = {"seed": self.seed, "slots": self.slots, "sequence_length": self.sequence_length}
        plan = self.train_plan
        if isinstance(plan, MixedPlan):
            return {**facts, "text": self._texts(), "weights": dict(zip(self.source_names, plan.weights, strict=True))}
        return {**facts, "text": self._texts()[""]}

    def _texts(self) -> dict[str, str]:
        """What the text of each source is: the name of its store, or of its stream."""
        return {
            name: stream_digest(self.train_sources[name])[:32]
            if isinstance(plan, StreamPlan)
            else str(plan.store.folder.parent.name)  # type: ignore[attr-defined]
            for name, (plan, _) in self._by_source(self.train_plan.beginning).items()
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = self._identity()
        other = [
            f"data.{key} {state_dict.get(key)!r}, got {own[key]!r}" for key in own if state_dict.get(key) != own[key]
        ]
        if other:
            raise ValueError(f"a checkpoint goes on with the data that it was made with: {'; '.join(other)}")
        saved = state_dict["position"]
        for name, (plan, _) in self._by_source(self.train_plan.beginning).items():
            if isinstance(plan, StreamPlan):
                plan.restore(state_dict["streams"][name])
        if isinstance(self.train_plan, MixedPlan):
            places, tokens = saved
            self.position = MixedPosition(tuple(Position(*place) for place in places), tuple(tokens))
        else:
            self.position = Position(*saved)


def _split_name(split: str, name: str) -> str:
    """Name of a split of a source.

    >>> _split_name("val", "wiki"), _split_name("train", "")
    ('val/wiki', 'train')
    """
    return f"{split}/{name}" if name else split


def _sources(
    given: str | list[str] | dict[str, str | list[str]], key: str, text_column: str, sample_by: SampleBy
) -> dict[str, TextSource]:
    """Sources by name; one without a name has an empty one."""
    if not isinstance(given, dict):
        return {"": as_source(given, text_column, sample_by, key)}
    if not (given and all(re.fullmatch(r"[\w-]+", name) for name in given)):
        of = "sets" if key == "data.val" else "sources"
        raise ValueError(f"{key} must name its {of} in letters, digits, '_' and '-', got {sorted(given)}")
    return {name: as_source(files, text_column, sample_by, f"{key}.{name}") for name, files in given.items()}


def _check_weights(weights: dict[str, float] | None, names: list[str]) -> dict[str, float] | None:
    if weights is None:
        return None
    if set(weights) != set(names):
        raise ValueError(
            "data.weights must have a number for each source of data.train "
            f"({', '.join(filter(None, names)) or 'which needs names'}), got {sorted(weights)}"
        )
    for name, weight in weights.items():
        if not 0 < weight < float("inf"):
            raise ValueError(f"data.weights must be above 0, got {weight} for {name}")
    return weights
