"""An encoder in the form that mteb runs, fine-tuned for retrieval first or as it is; and tasks out of local folders.

Written for mteb 2.26. The package is imported where it is used only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lit_encoders.evaluation.embeddings import Pooling, embed, token_rows
from lit_encoders.evaluation.finetuning import Example, FineTuning, fine_tune
from lit_encoders.evaluation.items import read_collection, read_pairs
from lit_encoders.modules.lit_encoder import LitEncoder
from lit_encoders.modules.open_module import open_module


class MtebEncoder:
    """A model as ``mteb.evaluate`` takes it: texts in, one vector each, compared by cosine.

    It has what ``mteb.models.EncoderProtocol`` asks for without inheriting from it, so that it works without mteb too.

    Args:
        module: of the model.
        name: of the model in results.
        sequence_length: longest text, in tokens, special ones included; a longer one is cut off.
        pooling: a text's vector, the mean of its tokens or the first.

    Raises:
        ValueError: the model has too few positions.
    """

    def __init__(self, module: LitEncoder, name: str, *, sequence_length: int = 512, pooling: Pooling = "mean") -> None:
        token_rows(module, [], sequence_length, sequence_length)  # Refuses a length that the model cannot read.
        self.module = module
        self.name = name
        self.sequence_length = sequence_length
        self.pooling = pooling

    def encode(
        self,
        inputs: Iterable[Mapping[str, Any]],
        *,
        task_metadata: Any = None,
        hf_split: str = "",
        hf_subset: str = "",
        prompt_type: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Embed texts; queries and documents alike, without prompts.

        Args:
            inputs: batches, a mapping with a list of texts under "text" each (a document's title stands in its text).
            task_metadata, hf_split, hf_subset, prompt_type, kwargs: of mteb; nothing here depends on them, and packs
                take the place of its batch size.

        Returns:
            float32 (N, D), a numpy array, in the order of the texts.
        """
        texts = [text for batch in inputs for text in batch["text"]]
        slots = max(4096, self.sequence_length)
        vectors = embed(self.module, texts, sequence_length=self.sequence_length, slots=slots, pooling=self.pooling)
        return vectors.numpy()

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Cosine of every vector of the one with every vector of the other, (N, D) and (M, D) -> (N, M).

        >>> MtebEncoder.similarity(None, [[1.0, 0.0], [3.0, 4.0]], [[2.0, 0.0]]).tolist()
        [[1.0], [0.6000000238418579]]
        """
        return _directions(embeddings1) @ _directions(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Cosine of each vector with the other's vector in its place, (N, D) twice -> (N,)."""
        return (_directions(embeddings1) * _directions(embeddings2)).sum(1)

    @property
    def mteb_model_meta(self) -> Any:
        """What mteb asks of a model beside its vectors, a ``mteb.models.ModelMeta``."""
        from mteb.models import ModelMeta
        from mteb.models.model_meta import ScoringFunction

        facts = {
            # Of the hub's form, an owner and a name.
            "name": self.name if self.name.count("/") == 1 else f"lit_encoders/{Path(self.name).name}",
            "embed_dim": self.module.config.hidden_size,
            "max_tokens": self.sequence_length,
            "similarity_fn_name": ScoringFunction.COSINE,
            "framework": ["PyTorch"],
        }
        return ModelMeta.create_empty(facts)


def _directions(vectors: Any) -> Tensor:
    """Vectors of any kind, one or many, at length 1, (N, D)."""
    return torch.atleast_2d(normalize(torch.as_tensor(vectors).float(), dim=-1))  # type: ignore[no-any-return]


def read_training_pairs(files: str) -> list[tuple[str, str]]:
    """Read queries with the passage that answers each, as of MS MARCO (Bajaj et al., 2016, arXiv:1611.09268).

    Args:
        files: as data.train takes them, with columns ``query`` and ``document``.

    Raises:
        ValueError: a file cannot be read or lacks a column.
    """
    found = read_pairs(files, "fine_tune_on", "query", "document")
    return [(query.text, found.documents[name]) for query in found.queries for name in query.relevant]


def fine_tune_on_pairs(model: str, pairs: Sequence[tuple[str, str]], settings: FineTuning, seed: int = 0) -> LitEncoder:
    """Fine-tune a model as a bi-encoder, the other documents of a batch as negatives; see `in_batch_loss`.

    Args:
        model: folder or hub name.
        pairs: queries and documents.
        settings: see `FineTuning`; its pooling and sequence_length should be those of the evaluation.
        seed: of the order of the pairs and of dropout.

    Raises:
        ValueError: a text cannot be read.
    """
    module = open_module(model, on_gpu=True)
    length = settings.sequence_length
    sides = [token_rows(module, [pair[side] for pair in pairs], length, length) for side in (0, 1)]
    examples = [Example((tuple(query), tuple(document))) for query, document in zip(*sides, strict=True)]
    return fine_tune(lambda: open_module(model, on_gpu=True), examples, 0, settings, seed).encoder


def folder_task(folder: str) -> Any:
    """A retrieval task of mteb out of a folder in BEIR's form, for data that were fetched by hand.

    Args:
        folder: see `read_collection`; a document is its title and its text, as mteb reads BEIR.

    Returns:
        A ``mteb.AbsTaskRetrieval`` with the name of the folder; main score ndcg_at_10.

    Raises:
        ValueError: as `read_collection`.
    """
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.retrieval_dataset_loaders import RetrievalSplitData
    from mteb.abstasks.task_metadata import TaskMetadata

    collection = read_collection(folder, "tasks")

    class FolderRetrieval(AbsTaskRetrieval):
        metadata = TaskMetadata(
            name=Path(folder).resolve().name,
            description=f"Documents and queries of {folder}.",
            type="Retrieval",
            category="t2t",
            eval_langs=["und-Zyyy"],  # Undetermined, in any script.
            main_score="ndcg_at_10",
            dataset={"path": str(folder), "revision": "local"},
        )

        def load_data(self, num_proc: int | None = None, *, timer: Any = None, **kwargs: Any) -> None:
            documents = [{"id": name, "text": text} for name, text in collection.documents.items()]
            split = RetrievalSplitData(
                corpus=Dataset.from_list(documents),
                queries=Dataset.from_list([{"id": query.id, "text": query.text} for query in collection.queries]),
                relevant_docs={
                    query.id: {name: round(grade) for name, grade in query.relevant.items()}
                    for query in collection.queries
                },
                top_ranked=None,
            )
            self.dataset = {"default": {"test": split}}
            self.data_loaded = True

    return FolderRetrieval()
