"""The token store: what goes in comes out, whole or not at all."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_encoders.data import tokens
from lit_encoders.data.tokens import Affixes, TokenIds, TokenStore, affixes, tokenizer_digest, write_stores

Make = Callable[..., TokenStore]
TEXTS = ["w1 w2 w3", "w4", "w5 strange w6 w7 strange", "w8 " * 300]


def word_pieces(template: str | None = "[CLS] $A [SEP]", **specials: str) -> Any:
    """BERT's tokenizer in small: punctuation stands apart, words fall into pieces."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = ["[", "]", "mask", "sep", *(f"w{n}" for n in range(9)), "w", "##0", "##1"]
    backend = Tokenizer(models.WordPiece({t: n for n, t in enumerate(names + pieces)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if template:
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    given = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **given, **specials)


BERT = {"cls_token": "[CLS]", "sep_token": "[SEP]"}


def everything(store: TokenStore) -> list[list[int]]:
    lengths = store.lengths(np.arange(len(store)))
    return [store.tokens(document, 0, int(length)).tolist() for document, length in enumerate(lengths)]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_ids_equal_the_tokenizers(make_store: Make, tokenizer: Any) -> None:
    store = make_store(TEXTS)
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert everything(store) == expected
    assert store.lengths(np.array([3, 0])).tolist() == [300, 3]
    assert store.tokens(2, 1, 4).tolist() == expected[2][1:4]
    assert store.tokens(2, 1, 4).dtype == np.int64


def test_counts_are_of_all_documents(make_store: Make) -> None:
    store = make_store(TEXTS)
    meta = store.meta
    assert (meta.num_documents, meta.num_tokens, meta.num_eligible) == (4, 309, 307)
    assert meta.num_characters == sum(map(len, TEXTS))
    assert meta.num_literal_specials == 0
    assert meta.special_ids == [0, 1, 2, 3, 4]
    assert [store.num_eligible(document) for document in range(4)] == [3, 1, 3, 300]


def test_documents_do_not_depend_on_batches(make_store: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"w{n % 90} w{n * 7 % 90} odd" for n in range(25)] + TEXTS
    whole = make_store(texts, "whole")
    monkeypatch.setattr(tokens, "_BATCH", 4)
    batched = make_store(iter(texts), "batched")  # type: ignore[arg-type]
    assert contents(whole.folder) == contents(batched.folder)


def test_m03_literal_special_strings_become_ordinary_pieces(tmp_path: Path) -> None:
    tokenizer = word_pieces(**BERT)
    texts = ["w1 [MASK] w2 [SEP] w3", "w4", "w5 [CLS]"]
    write_stores(texts, tokenizer, lambda text: "train", ("train",), tmp_path / "store")
    store = TokenStore(tmp_path / "store" / "train")
    names = tokenizer.convert_ids_to_tokens(everything(store)[0])
    assert names == ["w1", "[", "mask", "]", "w2", "[", "sep", "]", "w3"]
    assert store.num_eligible(0) == 9
    assert store.meta.num_literal_specials == 2
    # The tokenizer itself is left as it was.
    assert tokenizer("[MASK]", add_special_tokens=False)["input_ids"] == [4]


def test_m03_special_strings_that_the_model_itself_knows_are_never_eligible(make_store: Make) -> None:
    """A whole-word vocabulary holds "[MASK]" as a word: the id is the special one, so it is not counted."""
    store = make_store(["w1 [MASK] w2"])
    assert everything(store) == [[6, 4, 7]]
    assert store.num_eligible(0) == 2
    assert store.meta.num_literal_specials == 1


def test_texts_without_tokens_are_dropped(make_store: Make) -> None:
    store = make_store([" ", "w1", "\t\n", "w2"])
    assert everything(store) == [[6], [7]]
    assert store.meta.num_characters == 4


def test_no_document_at_all_is_an_empty_store(make_store: Make) -> None:
    store = make_store([])
    assert len(store) == 0
    assert store.meta.num_tokens == 0
    assert store.lengths(np.array([], np.int64)).tolist() == []


def test_each_text_goes_to_the_store_its_split_names(tmp_path: Path, tokenizer: Any) -> None:
    texts = [f"w{n}" for n in range(10)]
    write_stores(texts, tokenizer, lambda text: "odd" if int(text[1:]) % 2 else "even", ("even", "odd"), tmp_path / "s")
    assert everything(TokenStore(tmp_path / "s" / "odd")) == [[5 + n] for n in (1, 3, 5, 7, 9)]
    assert everything(TokenStore(tmp_path / "s" / "even")) == [[5 + n] for n in (0, 2, 4, 6, 8)]


def test_ids_are_content_as_they_are(make_store: Make) -> None:
    """Text and ids may stand side by side; special ids inside stay, and are not eligible."""
    documents: list[Any] = ["w1 w2", [2, 6, 7, 3], [94, 0, 4], [], "w3", [1]]
    store = make_store(documents)
    assert everything(store) == [[6, 7], [2, 6, 7, 3], [94, 0, 4], [8], [1]]
    # The unknown token (1) is special to this tokenizer.
    assert [store.num_eligible(document) for document in range(5)] == [2, 2, 1, 1, 0]
    assert store.meta.num_characters == len("w1 w2" + "w3")
    assert store.meta.num_literal_specials == 0


def test_ids_give_the_store_that_their_text_gives(make_store: Make, tokenizer: Any) -> None:
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    of_text, of_ids = contents(make_store(TEXTS).folder), contents(make_store(ids, "ids").folder)
    assert {name for name in of_text if of_text[name] != of_ids[name]} == {"meta.json"}


@pytest.mark.parametrize("wrong", [95, -1, -100, 2**70])
def test_ids_of_another_tokenizer_are_an_error(tmp_path: Path, tokenizer: Any, wrong: int) -> None:
    """It names the document, the rule and the id, and leaves nothing behind."""
    documents = [[0, 94], TokenIds([5, wrong, 6], "data.val: column 'ids' in record 2 of 'a.parquet'")]
    message = (
        rf"^data\.val: column 'ids' in record 2 of 'a\.parquet' must hold ids of the tokenizer, 0 to 94, got {wrong}$"
    )
    with pytest.raises(ValueError, match=message):
        write_stores(documents, tokenizer, lambda document: "train", ("train",), tmp_path / "cache" / "store")
    assert list((tmp_path / "cache").iterdir()) == []


def test_long_documents_are_tokenised_a_few_at_a_time(
    make_store: Make, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    sizes: list[int] = []
    encode = tokens.encode

    def watched(documents: Sequence[Any], *arguments: Any) -> list[list[int]]:
        sizes.append(len(documents))
        return encode(documents, *arguments)

    monkeypatch.setattr(tokens, "encode", watched)
    monkeypatch.setattr(tokens, "_BATCH_SIZE", 100)
    texts = ["w1", "w2", "w3 " * 200, "w4", "w5 " * 32, "w6 " * 40, "w7"]
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert everything(make_store(texts)) == expected
    assert sizes == [3, 3, 1]


@pytest.mark.parametrize("taken", [0, 3, 11])
def test_nothing_is_left_behind_when_reading_fails(
    tmp_path: Path, tokenizer: Any, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_BATCH", 5)

    def broken() -> Iterator[str]:
        yield from [f"w{n}" for n in range(taken)]
        raise ValueError("line 12 must be JSON")

    with pytest.raises(ValueError, match="line 12 must be JSON"):
        write_stores(broken(), tokenizer, lambda text: "train", ("train",), tmp_path / "cache" / "store")
    assert list((tmp_path / "cache").iterdir()) == []


def test_store_that_stands_already_is_left_alone(tmp_path: Path, tokenizer: Any) -> None:
    """Two processes with the same content: the second one's work is dropped without a word."""
    write_stores(TEXTS, tokenizer, lambda text: "train", ("train",), tmp_path / "store")
    before = contents(tmp_path / "store")
    first = TokenStore(tmp_path / "store" / "train")
    write_stores(TEXTS[:1], tokenizer, lambda text: "train", ("train",), tmp_path / "store")
    assert contents(tmp_path / "store") == before
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert everything(first)[1] == [9]


def test_store_travels_to_workers_by_its_folder(make_store: Make) -> None:
    store = make_store(TEXTS)
    sent = pickle.dumps(store)
    assert len(sent) < 1000
    assert everything(pickle.loads(sent)) == everything(store)


@pytest.mark.parametrize(("size", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_ids_are_stored_in_the_smallest_type_that_holds_them(tmp_path: Path, size: int, dtype: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({f"w{n}": n for n in range(size)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0")
    write_stores([f"w1 w{size - 1}"], tokenizer, lambda text: "train", ("train",), tmp_path / "s")
    store = TokenStore(tmp_path / "s" / "train")
    assert store.meta.dtype == dtype
    assert everything(store) == [[1, size - 1]]


@pytest.mark.parametrize(
    ("template", "specials", "expected"),
    [
        ("[CLS] $A [SEP]", BERT, Affixes((2,), (3,))),
        ("[CLS] [CLS] $A", BERT, Affixes((2, 2), ())),
        ("$A [SEP]", BERT, Affixes((), (3,))),
        ("[CLS] $A", {**BERT, "eos_token": "[SEP]"}, Affixes((2,), (3,))),
        (None, {"eos_token": "[SEP]"}, Affixes((), (3,))),
        (None, {}, Affixes((), ())),
    ],
)
def test_affixes_are_what_stands_around_a_text(
    template: str | None, specials: dict[str, str], expected: Affixes
) -> None:
    """A tokenizer that closes nothing gets its end token."""
    assert affixes(word_pieces(template, **specials)) == expected


def test_digest_follows_vocabulary_and_rules_not_the_last_call() -> None:
    digest = tokenizer_digest(word_pieces(**BERT))
    used = word_pieces(**BERT)
    used(["w1", "w1 w2"], padding=True, truncation=True, max_length=5)
    assert tokenizer_digest(used) == digest
    assert tokenizer_digest(word_pieces("$A [SEP]", **BERT)) != digest
    larger = word_pieces(**BERT)
    larger.add_tokens(["w99"])
    assert tokenizer_digest(larger) != digest
    named = word_pieces(**BERT, bos_token="w1")
    assert tokenizer_digest(named) != digest


def test_store_is_read_by_position_in_a_document(make_store: Make) -> None:
    texts: Sequence[str] = ["w1 w2 w3 w4", "w5 w6"]
    store = make_store(texts)
    assert store.tokens(0, 4, 4).tolist() == []
    assert store.tokens(1, 0, 1).tolist() == [10]
