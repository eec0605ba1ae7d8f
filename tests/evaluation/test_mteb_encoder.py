"""The encoder for mteb: our embeddings under its names; a local task scored as by our own ranking."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_encoders import LitMLM
from lit_encoders.evaluation.embeddings import embed
from lit_encoders.evaluation.finetuning import FineTuning
from lit_encoders.evaluation.items import read_collection
from lit_encoders.evaluation.mteb_encoder import MtebEncoder, fine_tune_on_pairs, folder_task, read_training_pairs
from lit_encoders.evaluation.ranking import ranking_scores
from lit_encoders.evaluation.suites import run_mteb
from lit_encoders.modules.open_module import open_module

TEXTS = ["w1 w2 w3", "w5", "w8 w8 w13 w21 w34"]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    """Twelve documents, some with titles, and a query for each of six: in BEIR's form."""
    folder = tmp_path / "small_beir"
    documents = [
        {"_id": f"d{place}", "text": f"w{3 * place} w{3 * place + 1} w{3 * place + 2}", "title": f"w{place + 60}"}
        for place in range(12)
    ]
    documents[3]["title"] = ""
    write_lines(folder / "corpus.jsonl", documents)
    write_lines(folder / "queries.jsonl", [{"_id": f"q{n}", "text": f"w{6 * n} w{n + 1}"} for n in range(6)])
    judged = "".join(f"q{n}\td{2 * n}\t{1 + n % 2}\n" for n in range(6))
    (folder / "qrels").mkdir()
    (folder / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}q0\td5\t1\n")
    return folder


def test_texts_of_all_batches_become_our_embeddings(bert_folder: Path) -> None:
    module = LitMLM(str(bert_folder))
    encoder = MtebEncoder(module, "bert", sequence_length=8, pooling="first")
    found = encoder.encode([{"text": TEXTS[:2]}, {"text": TEXTS[2:], "id": ["3"]}], task_metadata=None, batch_size=2)
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, embed(module, TEXTS, sequence_length=8, pooling="first").numpy())


def test_similarity_is_the_cosine() -> None:
    draw = torch.Generator().manual_seed(0)
    one, other = torch.randn(4, 8, generator=draw), torch.randn(4, 8, generator=draw)
    expected = torch.nn.functional.cosine_similarity(one[:, None], other[None], dim=-1)
    encoder: Any = MtebEncoder.__new__(MtebEncoder)
    torch.testing.assert_close(encoder.similarity(one.numpy(), other), expected)
    torch.testing.assert_close(encoder.similarity_pairwise(one, other.numpy()), expected.diagonal())
    torch.testing.assert_close(encoder.similarity(one[0], other), expected[:1])


def test_length_that_the_model_cannot_read_is_refused_at_once(bert_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"sequence_length must be at most the model's 128, got 129$"):
        MtebEncoder(LitMLM(str(bert_folder)), "bert", sequence_length=129)


def test_fine_tuning_on_pairs_brings_queries_to_their_documents(bert_folder: Path, tmp_path: Path) -> None:
    rows = [{"query": f"w{place}", "document": f"w{place + 40} w{place + 41}"} for place in range(32)]
    pairs = read_training_pairs(str(write_lines(tmp_path / "pairs.jsonl", rows)))
    assert pairs[1] == ("w1", "w41 w42")
    settings = FineTuning(epochs=12, batch=16, learning_rate=2e-3, sequence_length=16)

    def right(module: Any) -> float:
        encoder = MtebEncoder(module, "bert", sequence_length=16)
        sides = [encoder.encode([{"text": [pair[side] for pair in pairs]}]) for side in (0, 1)]
        return (encoder.similarity(*sides).argmax(1) == torch.arange(32)).float().mean().item()

    before = right(open_module(str(bert_folder)))
    assert right(fine_tune_on_pairs(str(bert_folder), pairs, settings)) > max(0.8, before)


def test_pairs_need_their_columns(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "pairs.jsonl", [{"query": "w1", "passage": "w2"}])
    with pytest.raises(ValueError, match=r"fine_tune_on.*'document'") as caught:
        read_training_pairs(str(path))
    assert "\n" not in str(caught.value)


# With the package


def test_it_is_an_encoder_of_mteb(bert_folder: Path) -> None:
    pytest.importorskip("mteb")
    from mteb.models import EncoderProtocol

    encoder = MtebEncoder(LitMLM(str(bert_folder)), str(bert_folder), sequence_length=64)
    assert isinstance(encoder, EncoderProtocol)
    meta = encoder.mteb_model_meta
    assert (meta.name, meta.embed_dim, meta.max_tokens) == ("lit_encoders/bert", 32, 64)


def test_local_task_is_scored_as_by_our_own_ranking(bert_folder: Path, collection: Path) -> None:
    pytest.importorskip("mteb")
    module = LitMLM(str(bert_folder))
    settings = FineTuning(sequence_length=64)
    ((found,), raw) = run_mteb(str(bert_folder), module, [str(collection)], settings)
    assert found.task == "small_beir"
    read = read_collection(str(collection), "tasks")
    texts = [query.text for query in read.queries], list(read.documents.values())
    vectors = [embed(module, side, sequence_length=64) for side in texts]
    own = ranking_scores(vectors[0], vectors[1], read)
    assert found.metrics["ndcg_at_10"].mean == pytest.approx(own.value("ndcg@10"), abs=1e-5)
    assert found.metrics["mrr_at_10"].mean == pytest.approx(own.value("mrr@10"), abs=1e-5)
    assert raw["small_beir"]["test"][0]["main_score"] == found.metrics["ndcg_at_10"].mean


def test_task_of_a_folder_has_titles_before_texts(collection: Path) -> None:
    pytest.importorskip("mteb")
    task = folder_task(str(collection))
    task.load_data()
    split = task.dataset["default"]["test"]
    assert split["corpus"][0] == {"id": "d0", "text": "w60 w0 w1 w2"}
    assert split["corpus"][3]["text"] == "w9 w10 w11"
    assert split["relevant_docs"]["q0"] == {"d0": 1, "d5": 1}
