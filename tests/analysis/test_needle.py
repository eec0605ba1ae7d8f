"""Needles in haystacks: documents token by token, the probe on what has an answer and on what has none, the verb."""

from __future__ import annotations

import csv
import json
import re
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_encoders.analysis.needle import CONTROL_SHARE, Haystack, measure_needle
from lit_encoders.analysis.needle_documents import (
    FACTS,
    POSITIONS,
    Position,
    control_needles,
    hide,
    make_documents,
    make_filler,
    make_needles,
    sentences,
)
from lit_encoders.analysis.needle_probe import PairProbe, Pairs, ask_both, ask_one, pair_features
from lit_encoders.analysis.needle_verb import haystack_table, needle_verb
from lit_encoders.evaluation.embeddings import embed
from lit_encoders.evaluation.statistics import wilson_interval
from lit_encoders.modules.open_module import open_module

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def all_words() -> list[str]:
    """Every word that facts, controls and filler are made of."""
    needles = [*make_needles([1300], POSITIONS)[0], *control_needles([9], POSITIONS)[0]]
    texts = [text for needle in needles for text in (needle.fact, needle.near_miss)]
    return sorted({word for text in (*texts, *islice(sentences(), 2000)) for word in re.findall(r"\w+|[^\w\s]+", text)})


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A whole-word tokenizer that knows them: [CLS] text [SEP]."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([*SPECIALS, *all_words()])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="[MASK]", **names)


@pytest.fixture(scope="module")
def bert(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import BertConfig, BertForMaskedLM

    folder = tmp_path_factory.mktemp("needle") / "bert"
    sizes = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=128)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def modernbert(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """For documents of 8,192 tokens; a window layer reaches 64 tokens to each side."""
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    folder = tmp_path_factory.mktemp("needle") / "modernbert"
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    windows = {"local_attention": 128, "global_attn_every_n_layers": 3, "max_position_embeddings": 8192}
    torch.manual_seed(0)
    config = ModernBertConfig(**sizes, **ids, **windows, vocab_size=len(tokenizer))
    ModernBertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


# Documents


def test_facts_of_two_sets_are_of_different_people() -> None:
    fit, test = make_needles([30, 20], POSITIONS, seed=3)
    assert (len(fit), len(test)) == (90, 60)
    assert Counter(needle.position for needle in test) == dict.fromkeys(POSITIONS, 20)
    values = {value for _, values in FACTS for value in values}
    people = [" ".join(w for w in re.findall(r"\w+", n.fact) if w[0].isupper() and w not in values) for n in fit + test]
    people = [person.removeprefix("The ") for person in people]
    assert len(set(people)) == 150


def test_a_near_miss_differs_in_its_value_alone() -> None:
    (needles,) = make_needles([100], POSITIONS)
    used = set()
    for needle in needles:
        words = [re.findall(r"\w+", text) for text in (needle.fact, needle.near_miss)]
        ((said, missed),) = [pair for pair in zip(*words, strict=True) if pair[0] != pair[1]]
        used.add(next(t for t, values in FACTS if {said, missed} <= set(values)))
    assert used == {template for template, _ in FACTS}


def test_values_are_as_often_said_as_missed() -> None:
    """So a question alone does not tell its answer."""
    (needles,) = make_needles([1365], POSITIONS)
    said, missed = (
        Counter(next(v for _, values in FACTS for v in values if re.search(rf"\b{v}\b", text)) for text in texts)
        for texts in ([n.fact for n in needles], [n.near_miss for n in needles])
    )
    assert set(said) == set(missed)
    # About 170 of each, give or take 13.
    assert max(abs(said[value] - missed[value]) for value in said) < 5 * 18


def test_everything_follows_from_the_seed(tokenizer: Any) -> None:
    def made(seed: int) -> list[list[int]]:
        return make_documents(make_needles([4], POSITIONS, seed)[0], make_filler(tokenizer, seed=seed), 60, tokenizer)

    assert made(0) == made(0)
    assert made(0) != made(1)
    assert control_needles([3, 3], POSITIONS, 0) == control_needles([3, 3], POSITIONS, 0)


@pytest.mark.parametrize("content", [20, 63, 126])
def test_documents_have_their_length_and_their_fact_where_it_should_be(tokenizer: Any, content: int) -> None:
    (needles,) = make_needles([20], POSITIONS)
    documents = make_documents(needles, make_filler(tokenizer), content, tokenizer)
    assert {len(document) for document in documents} == {content}
    assert len({tuple(document) for document in documents}) == len(documents)
    for needle, document in zip(needles, documents, strict=True):
        fact, near_miss = (
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in (needle.fact, needle.near_miss)
        )
        starts = [i for i in range(content) if document[i : i + len(fact)] == fact]
        missing = content - len(fact)
        assert starts == [{"start": 0, "middle": missing // 2, "end": missing}[needle.position]]
        assert not any(document[i : i + len(near_miss)] == near_miss for i in range(content))


@pytest.mark.parametrize(
    ("position", "expected"), [("start", [9, 1, 2, 3]), ("middle", [1, 9, 2, 3]), ("end", [1, 2, 3, 9])]
)
def test_facts_are_hidden_by_hand(position: Position, expected: list[int]) -> None:
    assert hide([9], [1, 2, 3], position) == expected


def test_documents_of_a_byte_level_tokenizer_read_as_text() -> None:
    """It writes the space before a word into the word's first token."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(islice(sentences(), 200), vocab_size=600, show_progress=False)
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer)
    (needles,) = make_needles([5], POSITIONS)
    for needle, document in zip(needles, make_documents(needles, make_filler(tokenizer), 100, tokenizer), strict=True):
        text = tokenizer.decode(document)
        assert len(document) == 100
        assert needle.fact in text
        assert text.startswith(needle.fact) == (needle.position == "start")
        assert f" {needle.fact}" in text or needle.position == "start"


def test_filler_is_a_text_that_goes_round(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the river was quiet\n\nnear the door\n")
    filler = make_filler(tokenizer, str(tmp_path / "a.txt"))
    assert tokenizer.convert_ids_to_tokens(filler.ids) == ["the", "river", "was", "quiet", "near", "the", "door"]
    assert filler.starts == [0, 4]
    taken = {tuple(tokenizer.convert_ids_to_tokens(filler.take(str(key), 5))) for key in range(20)}
    assert taken == {("the", "river", "was", "quiet", "near"), ("near", "the", "door", "the", "river")}
    assert len(filler.take("any", 1000)) == 1000


# The probe


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def alike_or_not(count: int, seed: int) -> Pairs:
    """A document is a fact and much else; a question is a fact alone. Neither tells the answer without the other."""
    facts, near_misses = draw(count, 48, seed=seed), draw(count, 48, seed=seed + 1)
    documents = facts + 0.5 * draw(count, 48, seed=seed + 2) + 5
    return ask_one(documents, facts, near_misses, torch.arange(count) % 2 == 0)


def test_both_questions_and_one() -> None:
    documents, facts, near_misses = (draw(4, 3, seed=seed) for seed in range(3))
    both = ask_both(documents, facts, near_misses)
    assert both.labels.tolist() == [True] * 4 + [False] * 4
    assert both.groups.tolist() == [0, 1, 2, 3] * 2
    assert torch.equal(both.documents, torch.cat([documents, documents]))
    assert torch.equal(both.questions, torch.cat([facts, near_misses]))
    one = ask_one(documents, facts, near_misses, torch.tensor([True, False, False, True]))
    assert torch.equal(one.questions, torch.stack([facts[0], near_misses[1], near_misses[2], facts[3]]))


def test_features_by_hand() -> None:
    d, q = draw(5, 3, seed=0), draw(5, 3, seed=1)
    expected = [
        [*a, *b, *(x * y for x, y in zip(a, b, strict=True)), *(abs(x - y) for x, y in zip(a, b, strict=True))]
        for a, b in zip(d.tolist(), q.tolist(), strict=True)
    ]
    torch.testing.assert_close(pair_features(d, q), torch.tensor(expected))


def test_the_probe_learns_to_compare_and_converges() -> None:
    probe = PairProbe(alike_or_not(800, 0))
    assert probe.converged
    assert probe.correct(alike_or_not(400, 10)).double().mean() > 0.95


def test_the_probe_is_scikit_learns_at_its_optimum() -> None:
    """Many more steps change no answer: those that it took were enough."""
    fitted, tested = alike_or_not(200, 0), alike_or_not(200, 10)
    few, many = PairProbe(fitted), PairProbe(fitted, max_steps=20_000)
    assert few.strength == many.strength
    assert torch.equal(few.correct(tested), many.correct(tested))


@pytest.mark.filterwarnings("ignore:lbfgs failed to converge")
def test_a_probe_that_is_cut_short_says_so() -> None:
    assert not PairProbe(alike_or_not(200, 0), max_steps=2).converged


def test_shuffled_labels_are_as_many_and_teach_nothing() -> None:
    fitted, tested = alike_or_not(400, 0).shuffled("a"), alike_or_not(400, 10).shuffled("b")
    assert int(tested.labels.sum()) == 200
    assert not torch.equal(tested.labels, alike_or_not(400, 10).labels)
    correct = PairProbe(fitted).correct(tested)
    assert wilson_interval(int(correct.sum()), 400).holds(0.5)


def test_a_dimension_that_never_varies_does_no_harm() -> None:
    pairs = alike_or_not(200, 0)
    constant = Pairs(
        *(torch.cat([v, torch.ones(200, 1)], 1) for v in (pairs.documents, pairs.questions)), pairs.labels, pairs.groups
    )
    assert PairProbe(constant).correct(constant).double().mean() > 0.95


# A whole haystack


@pytest.fixture(scope="module")
def haystack(bert: str) -> Haystack:
    return measure_needle(open_module(bert), [24, 128], pairs=60, fit=100)


def test_controls_of_a_tiny_model(haystack: Haystack) -> None:
    assert haystack.control.value >= CONTROL_SHARE
    assert haystack.control.trials == 180
    assert haystack.shuffled.holds(0.5)
    assert haystack.shuffled.trials == 360
    assert haystack.converged


def test_what_is_hardly_hidden_is_found(haystack: Haystack) -> None:
    assert [(cell.length, cell.position, cell.correct.trials) for cell in haystack.cells] == [
        (length, position, 60) for length in (24, 128) for position in POSITIONS
    ]
    short, long = haystack.over_positions(24), haystack.over_positions(128)
    assert short.trials == 180
    assert short.low > 0.5
    assert short.value > long.value


def test_the_table_shows_every_cell_and_both_controls(haystack: Haystack) -> None:
    table = haystack_table(haystack)
    assert len([line for line in table.splitlines() if line.startswith("| ")]) == 1 + 2 * 4
    assert "Shuffled labels" in table
    assert "reached" in table
    assert f"converged in at most {haystack.steps} steps" in table


def test_the_encoder_reads_the_documents_as_they_are(bert: str, tokenizer: Any) -> None:
    """Of words that a text gives back as they were, so that text and ids are one."""
    from lit_encoders.analysis import needle

    module = open_module(bert)
    (needles,) = make_needles([2], POSITIONS)
    filler = make_filler(tokenizer)
    texts = [tokenizer.decode(ids) for ids in make_documents(needles, filler, 62, tokenizer)]
    found = needle._embed_documents(module, needles, filler, 64, 256)
    torch.testing.assert_close(found, embed(module, texts, sequence_length=64))


def test_the_verb_writes_a_table_and_a_picture(bert: str, tmp_path: Path) -> None:
    output = tmp_path / "needle"
    (tmp_path / "text.txt").write_text("the river was quiet and the door was open\n" * 3)
    text = needle_verb(
        bert, output, [32.0, 64.0], "end,start", pairs=20, fit=20, text=str(tmp_path / "text.txt"), seed=1
    )
    with (output / "needle.csv").open() as file:
        rows = list(csv.DictReader(file))
    places = [("32", "end"), ("32", "start"), ("64", "end"), ("64", "start")]
    assert [(row["length"], row["position"]) for row in rows] == places
    assert all(float(row["low"]) <= float(row["accuracy"]) <= float(row["high"]) for row in rows)
    assert {row["pairs"] for row in rows} == {"20"}
    found = json.loads((output / "needle.json").read_text())
    assert (found["seed"], found["fit"], found["lengths"], len(found["cells"])) == (1, 20, [32, 64], 4)
    assert found["cells"][0]["correct"]["hits"] / 20 == float(rows[0]["accuracy"])
    assert (output / "needle.png").read_bytes().startswith(b"\x89PNG")
    assert str(output / "needle.png") in text


# Mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [64.0, 129.0]}, r"^lengths must be at most the model's 128 positions, got 129$"),
        ({"lengths": [5.0]}, r"^lengths must be at least 1\d tokens to hold the longest fact, got 5$"),
        ({"lengths": [64.5]}, r"^lengths must be whole numbers of tokens, each once, got 64.5$"),
        ({"lengths": [64.0, 64.0]}, r"^lengths must be whole numbers of tokens, each once, got 64,64$"),
        ({"positions": "start,top"}, r"^positions must be out of start,middle,end, each once, got 'start,top'$"),
        ({"positions": "end,end"}, r"^positions must be out of start,middle,end, each once, got 'end,end'$"),
        ({"pairs": 18}, r"^pairs must be an even number of at least 20 for an interval, got 18$"),
        ({"pairs": 21}, r"^pairs must be an even number of at least 20 for an interval, got 21$"),
        ({"fit": 3}, r"^fit must be at least 20 documents for a probe to learn from, got 3$"),
        ({"fit": 2000}, r"^fit and pairs must be at most 4096 facts together over all positions, got 6060$"),
        ({"text": "nowhere.txt"}, r"^text must name files that exist, got 'nowhere.txt'$"),
    ],
)
def test_mistakes_are_said_before_anything_is_read(
    bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("lit_encoders.modules.backbone_module.load_language_model", lambda *a, **k: pytest.fail("late"))
    with pytest.raises(ValueError, match=message):
        needle_verb(bert, tmp_path / "out", **{"lengths": [64.0], "pairs": 20, "fit": 20, **options})
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_tokenizer_is_said(bert: str, tmp_path: Path) -> None:
    from transformers import AutoModelForMaskedLM

    AutoModelForMaskedLM.from_pretrained(bert).save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match=r"^model.tokenizer must be a folder or hub name with a tokenizer, got "):
        needle_verb(str(tmp_path / "bare"), tmp_path / "out")


def test_a_tokenizer_that_cannot_tell_facts_apart_is_said(bert_folder: Path, tmp_path: Path) -> None:
    """All of a fact's words are unknown to it."""
    with pytest.raises(
        ValueError, match=r"^model must have a tokenizer that tells facts apart, got the same ids for '"
    ):
        needle_verb(str(bert_folder), tmp_path / "out", [64.0])


def test_an_output_that_exists_is_said(bert: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^output must be a folder that does not exist yet, got "):
        needle_verb(bert, tmp_path)


# Long documents, and a trained model


def test_documents_of_8192_tokens(modernbert: str) -> None:
    found = measure_needle(open_module(modernbert), [8192], ["middle"], pairs=2, fit=4)
    assert [(cell.length, cell.position, cell.correct.trials) for cell in found.cells] == [(8192, "middle", 2)]


@pytest.mark.slow
def test_the_verb_at_8192_tokens_takes_less_than_a_minute(modernbert: str, tmp_path: Path) -> None:
    started = time.monotonic()
    print(needle_verb(modernbert, tmp_path / "out", [8192.0], "middle", pairs=20, fit=20))
    assert time.monotonic() - started < 60


@pytest.mark.slow
def test_minilm_knows_facts_that_stand_in_its_texts(tmp_path: Path) -> None:
    print(needle_verb("example:minilm", tmp_path / "out"))
    found = json.loads((tmp_path / "out" / "needle.json").read_text())
    assert found["converged"]
    assert found["control"]["hits"] >= CONTROL_SHARE * found["control"]["trials"]
    assert found["shuffled"]["low"] <= 0.5 <= found["shuffled"]["high"]
    assert {cell["length"] for cell in found["cells"]} == {128, 256, 512}
    assert all(cell["correct"]["low"] > 0.5 for cell in found["cells"] if cell["length"] == 128)
