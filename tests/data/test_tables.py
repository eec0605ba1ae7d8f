"""Folders that `datasets` saved, and names on its hub: the library's own functions, without a network."""

import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest

from lit_encoders.data.sources import TextSource

DOCUMENTS = ["plain words", "two\nlines", "été", "ภาษาไทย"]
IDS = [[5, 6], [2, 94, 3], [8], [9]]


@pytest.fixture(autouse=True)
def _own_datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded never lands in the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


def dataset(texts: list[Any] | None = None) -> datasets.Dataset:
    texts = DOCUMENTS if texts is None else texts
    return datasets.Dataset.from_dict({"text": texts, "ids": IDS[: len(texts)], "number": range(len(texts))})


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """One dataset, in two files."""
    dataset().save_to_disk(tmp_path / "saved", num_shards=2)
    return str(tmp_path / "saved")


@pytest.fixture
def splits(tmp_path: Path) -> str:
    parts = {"train": dataset(), "validation": dataset(["held out"])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "splits")
    return str(tmp_path / "splits")


@pytest.fixture
def hub(tmp_path: Path) -> str:
    """A repository of the hub's shape. `load_dataset` takes its folder as it takes its name on the hub."""
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: en\n  data_files:\n  - {split: train, path: en.jsonl}\n  - {split: test, path: test.jsonl}\n"
        "- config_name: fr\n  data_files: fr.jsonl\n---\n"
    )
    for name in ("en", "test", "fr"):
        (repository / f"{name}.jsonl").write_text(
            f'{{"text": "{name} one", "ids": [5]}}\n{{"text": "{name} two", "ids": [6]}}\n'
        )
    return f"hub:{repository}"


def read(*names: str, **options: Any) -> list[Any]:
    return list(TextSource(names, **options).documents())


def digest(*names: str, **options: Any) -> str:
    return TextSource(names, **options).digest()


def message_of(name: str, **options: Any) -> str:
    """What is said of a name, which must be one line."""
    with pytest.raises(ValueError) as caught:
        read(name, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_saved_folder_gives_its_column(folder: str) -> None:
    assert read(folder) == DOCUMENTS
    documents = read(folder, text_column="ids")
    assert documents == IDS
    assert documents[2].place == f"data.train: column 'ids' in record 3 of '{folder}'"
    assert TextSource((folder,)).paths() == [Path(folder)]


def test_saved_folder_of_many_records_is_read_whole(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(1000)]
    datasets.Dataset.from_dict({"text": [*texts, " ", ""]}).save_to_disk(tmp_path / "saved")
    assert read(str(tmp_path / "saved")) == texts


def test_rows_that_were_chosen_or_moved_are_saved_as_such(tmp_path: Path) -> None:
    dataset().select([3, 0]).with_format("numpy", columns=["number"]).save_to_disk(tmp_path / "saved")
    assert read(str(tmp_path / "saved")) == [DOCUMENTS[3], DOCUMENTS[0]]


def test_saved_splits_give_train_or_the_one_named(splits: str) -> None:
    assert read(splits) == read(splits + "#train") == DOCUMENTS
    assert read(splits + "#validation") == ["held out"]
    assert read(splits + "#validation", splits) == ["held out", *DOCUMENTS]


def test_saved_folders_are_found_by_pattern_beside_files(tmp_path: Path) -> None:
    for name in ("c", "a"):
        dataset([name]).save_to_disk(tmp_path / "all" / name)
    (tmp_path / "all" / "b.txt").write_text("b")
    (tmp_path / "all" / "d").mkdir()
    assert read(str(tmp_path / "all" / "*")) == ["a", "b", "c"]


def test_file_with_the_mark_of_a_split_in_its_name_is_a_file(splits: str) -> None:
    Path(splits + "#notes.txt").write_text("a file")
    assert read(splits + "#notes.txt") == ["a file"]


def test_saved_folder_without_records_is_an_error(tmp_path: Path) -> None:
    dataset([]).save_to_disk(tmp_path / "saved")
    assert message_of(str(tmp_path / "saved")) == (
        f"data.train must hold at least one document that is not blank, got none in '{tmp_path / 'saved'}'"
    )


def test_digest_of_a_saved_folder_follows_its_content_only(tmp_path: Path, folder: str) -> None:
    before = digest(folder)
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copy)
    dataset().save_to_disk(tmp_path / "again", num_shards=2)
    assert {digest(str(tmp_path / name)) for name in ("copy", "again")} == {before}
    dataset([*DOCUMENTS[:3], "other"]).save_to_disk(tmp_path / "other", num_shards=2)
    assert len({before, digest(str(tmp_path / "other")), digest(folder, text_column="ids")}) == 3


def test_digest_of_saved_splits_is_that_of_the_split(splits: str, folder: str) -> None:
    assert digest(splits) == digest(splits + "#train")
    assert digest(splits) != digest(splits + "#validation")


def test_unknown_split_of_a_saved_folder_is_named_with_the_nearest(splits: str, folder: str) -> None:
    assert message_of(splits + "#validaton", key="data.val") == (
        f"data.val: the split of '{splits}' ('FOLDER#SPLIT') must be one of train, validation, got 'validaton'; "
        "validation?"
    )
    assert message_of(folder + "#train") == (f"data.train: '{folder}' must have splits, got one dataset and '#train'")


def test_saved_splits_without_train_need_a_name(tmp_path: Path) -> None:
    datasets.DatasetDict({"en": dataset(["one"]), "fr": dataset(["un"])}).save_to_disk(tmp_path / "saved")
    assert message_of(str(tmp_path / "saved")).endswith("must be one of en, fr, got 'train'")
    assert read(f"{tmp_path / 'saved'}#fr") == ["un"]


def test_split_of_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    assert message_of(f"{tmp_path}/none#train") == f"data.train must name files that exist, got '{tmp_path}/none#train'"


def test_missing_column_of_a_table_is_named_with_those_there_are(folder: str, hub: str) -> None:
    end = "must have the column 'txt' (data.text_column), got"
    assert message_of(folder, text_column="txt") == f"data.train: '{folder}' {end} text, ids, number; text?"
    assert message_of(hub + ":en", text_column="txt") == f"data.train: '{hub}:en' {end} text, ids; text?"


@pytest.mark.parametrize(("values", "got"), [(["a", None], "None"), ([["a"]], "a list with 'a'")])
def test_wrong_record_of_a_table_is_named_by_its_number(tmp_path: Path, values: list[Any], got: str) -> None:
    datasets.Dataset.from_dict({"text": values}).save_to_disk(tmp_path / "saved")
    assert message_of(str(tmp_path / "saved")) == (
        f"data.train: column 'text' in record {len(values)} of '{tmp_path / 'saved'}' must be text or a list of token "
        f"ids, got {got}"
    )


@pytest.mark.parametrize(
    ("file", "keep"),
    [("data-00000-of-00002.arrow", 0), ("data-00001-of-00002.arrow", 400), ("state.json", 20), ("state.json", None)],
)
def test_damaged_saved_folder_is_an_error(folder: str, file: str, keep: int | None) -> None:
    path = Path(folder) / file
    content = path.read_bytes()
    path.unlink()
    if keep is not None:
        path.write_bytes(content[:keep])
    message = message_of(folder)
    assert message.startswith(f"data.train must name a folder that `save_to_disk` wrote, got '{folder}' (")
    with pytest.raises(ValueError, match=r"data\.train must name a folder that `save_to_disk` wrote"):
        digest(folder)


@pytest.mark.parametrize("content", ["", "{}", '{"splits": 7}'])
def test_damaged_index_of_splits_is_an_error(splits: str, content: str) -> None:
    (Path(splits) / "dataset_dict.json").write_text(content)
    assert message_of(splits).startswith(f"data.train must name a folder that `save_to_disk` wrote, got '{splits}'")


def test_hub_name_gives_config_split_and_column(hub: str) -> None:
    assert read(hub + ":en") == read(hub + ":en#train") == ["en one", "en two"]
    assert read(hub + ":en#test") == ["test one", "test two"]
    assert read(hub + ":fr#train[1:]", hub + ":en") == ["fr two", "en one", "en two"]
    documents = read(hub + ":en", text_column="ids")
    assert documents == [[5], [6]]
    assert documents[1].place == f"data.train: column 'ids' in record 2 of '{hub}:en'"
    assert TextSource((hub + ":en",)).paths() == []


def test_digest_of_a_hub_name_follows_config_split_and_content(hub: str) -> None:
    names = [hub + end for end in (":en", ":en#test", ":fr", ":fr#train[1:]")]
    before = [digest(name) for name in names]
    assert len(set(before)) == 4
    assert [digest(name) for name in names] == before


def test_digest_of_a_hub_name_is_the_same_when_it_is_loaded_anew(hub: str) -> None:
    from lit_encoders.data.tables import _from_hub

    before = digest(hub + ":en")
    _from_hub.cache_clear()
    assert digest(hub + ":en") == before


def test_hub_is_asked_once(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So digest and documents are of one revision."""
    before = digest(hub + ":fr")

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("asked again")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    assert digest(hub + ":fr") == before
    assert read(hub + ":fr") == ["fr one", "fr two"]


@pytest.mark.parametrize("name", ["hub:", "hub:a/b:", "hub:a/b#", "hub::en", "hub:a/b#x:y#z"])
def test_hub_name_of_another_form_is_an_error(name: str) -> None:
    assert message_of(name) == f"data.train must be hub:OWNER/NAME or hub:OWNER/NAME:CONFIG#SPLIT, got {name!r}"


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (":de", "'de' not found. Available: ['en', 'fr']"),
        ("", "Please pick one among the available configs: ['en', 'fr']"),
        (":fr#test", "Unknown split \"test\". Should be one of ['train']"),
        (":en#tr ain", "Split name should match"),
    ],
)
def test_unknown_config_or_split_of_a_hub_name_is_said(hub: str, end: str, reason: str) -> None:
    message = message_of(hub + end)
    assert message.startswith(f"data.train must name a dataset of the hub that can be loaded, got '{hub}{end}' (")
    assert reason in message


def test_hub_that_cannot_be_reached_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert message_of("hub:nobody/nothing").startswith(
        "data.train must name a dataset of the hub that can be loaded, got 'hub:nobody/nothing' (Couldn't reach"
    )


def test_hub_dataset_of_broken_files_is_an_error(hub: str) -> None:
    (Path(hub.removeprefix("hub:")) / "fr.jsonl").write_text('{"text": "cut\n')
    assert message_of(hub + ":fr").startswith("data.train must name a dataset of the hub that can be loaded, got")
