"""``lit-encoders cka`` as a user types it: what it prints and writes, and that each mistake is one line."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_encoders.analysis.cka import FORMS, LayerDistance, known, layer_distances
from lit_encoders.analysis.cka_verb import as_csv, distance_table
from lit_encoders.cli import main
from lit_encoders.evaluation.embeddings import embed_layers
from lit_encoders.evaluation.texts import first_texts, texts_digest
from lit_encoders.modules.open_module import open_module

FILES = {"cka.csv", "cka.json", "cka.png"}
ALL_FORMS = ["plain", "debiased", "standardised", "debiased, standardised"]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in an empty folder; give exit code, standard output and standard error."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def command(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["cka", *(str(argument) for argument in arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, bert_folder: Path, tokenizer: Any) -> Path:
    """Models of three layers: ``one``, ``other``, ``control``, ``wordless``; and ``shallow`` of two."""
    from transformers import BertConfig, BertForMaskedLM

    folder = tmp_path_factory.mktemp("cka")
    config = BertConfig.from_pretrained(bert_folder)
    for seed, name in enumerate(("one", "other", "control", "wordless", "shallow")):
        torch.manual_seed(seed)
        config.num_hidden_layers = 2 if name == "shallow" else 3
        BertForMaskedLM(config).save_pretrained(folder / name)
        if name != "wordless":
            tokenizer.save_pretrained(folder / name)
    return folder


def cells(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1, "columns are aligned"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def stored(folder: str = "out") -> dict[str, Any]:
    assert {file.name for file in Path(folder).iterdir()} == FILES
    found = json.loads((Path(folder) / "cka.json").read_text(), parse_constant=refuse_constant)
    assert isinstance(found, dict)
    return found


def lines(folder: str = "out") -> list[dict[str, str]]:
    return list(csv.DictReader((Path(folder) / "cka.csv").open()))


def test_distances_and_how_many_times_the_controls(run: Run, models: Path, text_file: Path) -> None:
    sources = [str(models / name) for name in ("one", "other", "control")]
    options = ["--text", text_file, "--texts=40", "--sequence_length=24", "--output=out"]
    code, out, err = run(*sources[:2], "--control", sources[2], *options)
    assert (code, err) == (0, "")
    texts = first_texts(str(text_file), 40, "text", asked_by="texts")
    features = [embed_layers(open_module(s), texts, sequence_length=24, causal=False) for s in sources]
    expected = layer_distances(features[0], features[1], features[2])

    rows = lines()
    assert [(row["layer"], row["form"]) for row in rows] == [(str(n), form) for form in ALL_FORMS for n in range(3)]
    for row, item in zip(rows, expected, strict=True):
        numbers = [item.distance, item.control, item.ratio]
        assert [float(row[key]) for key in ("distance", "control", "ratio")] == pytest.approx(numbers, rel=1e-6)
    head, *table = cells(out)
    assert head == ["layer", *ALL_FORMS]
    by_place = {(item.layer, item.form): f"{item.distance:.4f} ({item.ratio:.1f}x)" for item in expected}
    assert table == [[str(n), *(by_place[n, form] for form in ALL_FORMS)] for n in range(3)]
    assert out.startswith("Distance 1 - CKA; in brackets, how many times that of the seed control\n\n|")
    assert out.endswith("\n\nWritten: out/cka.csv, out/cka.json, out/cka.png\n")

    found = stored()
    pairs = found.pop("layer_pairs")
    assert found == {
        "one": sources[0],
        "other": sources[1],
        "control": sources[2],
        "text": str(text_file),
        "texts": 40,
        "sequence_length": 24,
        "texts_digest": texts_digest(texts),
    }
    assert set(pairs) == set(FORMS)
    diagonal = [1 - pairs[item.form][item.layer][item.layer] for item in expected]
    assert diagonal == pytest.approx([item.distance for item in expected], abs=1e-6)
    assert Path("out/cka.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_is_at_0_from_itself(run: Run, models: Path, text_file: Path) -> None:
    code, out, err = run(models / "one", models / "one", "--text", text_file, "--texts=20", "--output=out")
    assert (code, err) == (0, "")
    assert cells(out)[1:] == [[str(layer), *["0.0000"] * 4] for layer in range(3)]
    assert all(abs(float(row["distance"])) < 1e-12 and not row["control"] + row["ratio"] for row in lines())
    # What the model has positions for, below 512.
    assert (stored()["control"], stored()["sequence_length"]) == (None, 128)


def test_a_control_that_is_the_model_itself_gives_no_ratio(run: Run, models: Path, text_file: Path) -> None:
    same = models / "other"
    options = ["--control", same, "--text", text_file, "--texts=20", "--output=out"]
    code, out, err = run(models / "one", same, *options)
    assert (code, err) == (0, "")
    assert "x)" not in out
    assert {row["ratio"] for row in lines()} == {""}


def test_models_of_other_depth_have_a_picture_of_all_pairs(run: Run, models: Path, text_file: Path) -> None:
    code, out, err = run(models / "one", models / "shallow", "--text", text_file, "--texts=20", "--output=out")
    assert (code, err) == (0, "")
    assert out.startswith("The models' depths differ: the picture has all pairs of layers.\nWritten: out/cka.csv")
    assert lines() == []
    assert [len(row) for row in stored()["layer_pairs"]["debiased, standardised"]] == [2, 2, 2]


def test_picture_has_a_row_for_each_layer_of_the_first(
    run: Run, models: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lit_encoders.plots import heat_map

    drawn: list[tuple[Any, ...]] = []

    def record(*arguments: Any) -> Any:
        drawn.append(arguments)
        return heat_map(*arguments)

    monkeypatch.setattr("lit_encoders.analysis.cka_verb.heat_map", record)
    assert run(models / "one", models / "shallow", "--text", text_file, "--texts=20", "--output=out")[0] == 0
    ((values, rows, columns, title),) = drawn
    assert (rows, columns) == (["A 0", "A 1", "A 2"], ["B 0", "B 1"])
    assert values == stored()["layer_pairs"]["debiased, standardised"]
    assert title == "CKA of all pairs of layers (debiased, standardised)"


def test_texts_that_are_all_alike_have_no_distance(run: Run, models: Path, tmp_path: Path) -> None:
    """No layer varies, so there is no CKA: said with a dash, and no number that JSON has not."""
    alike = tmp_path / "alike.txt"
    alike.write_text("w1 w2 w3\n" * 9)
    control = ["--control", models / "control"]
    code, out, err = run(models / "one", models / "other", *control, "--text", alike, "--texts=9", "--output=out")
    assert (code, err) == (0, "")
    assert cells(out)[1:] == [[str(layer), *["-"] * 4] for layer in range(3)]
    assert {row[key] for row in lines() for key in ("distance", "control", "ratio")} == {""}
    assert stored()["layer_pairs"]["plain"] == [[None] * 3] * 3


def test_numbers_that_are_none() -> None:
    values = {(0, "plain"): (-2e-16, 0.5), (0, "debiased"): (math.nan, 0.5), (1, "plain"): (0.25, math.nan)}
    found = [
        LayerDistance(layer, form, *values.get((layer, form), (0.5, 0.25))) for form in ALL_FORMS for layer in range(2)
    ]
    table = cells(distance_table(found))
    assert table[1] == ["0", "0.0000 (0.0x)", "-", *["0.5000 (2.0x)"] * 2]
    assert table[2] == ["1", "0.2500", *["0.5000 (2.0x)"] * 3]
    rows = as_csv(found).splitlines()
    assert rows[2:4] == ["1,plain,0.25,,", "0,debiased,,0.5,"]
    assert known(-math.inf) is None


MISTAKES: dict[str, tuple[str, str]] = {
    "fewer texts": ("{m}/one {m}/other --text {t}", "text must hold at least 500 texts (texts), got 200 in '{t}'"),
    "too few texts": ("{m}/one {m}/other --text {t} --texts=3", "texts must be at least 4, got 3"),
    "no texts": ("{m}/one {m}/other --text {t} --texts=0", "texts must be at least 4, got 0"),
    "output exists": ("{m}/one {m}/other --text {t} --output={m}", "output must be a folder that does not exist yet"),
    "output that cannot be": (
        "{m}/one {m}/other --text {t} --texts=9 --output=/proc/x",
        "output must be a folder that",
    ),
    "no tokenizer": (
        "{m}/one {m}/wordless --text {t} --texts=9",
        "model.tokenizer must be a folder or hub name with a tokenizer, got '{m}/wordless' (no tokenizer files)",
    ),
    "no text": ("{m}/one {m}/other --text none.txt", "text must name files that exist, got 'none.txt'"),
    "no model": ("{m}/one {m}/none --text {t} --texts=9", "model.backbone must be a folder or hub name of a Hugging F"),
    "no control": ("{m}/one {m}/other --control {m}/none --text {t} --texts=9", "model.backbone must be a folder or"),
    "control of other depth": (
        "{m}/one {m}/other --control {m}/shallow --text {t} --texts=9",
        "control must have models of one depth, got [3, 3, 2] layers",
    ),
    "models of other depth": (
        "{m}/one {m}/shallow --control {m}/other --text {t} --texts=9",
        "control must have models of one depth, got [3, 2, 3] layers",
    ),
    "length 0": (
        "{m}/one {m}/other --text {t} --texts=9 --sequence_length=0",
        "sequence_length must be above a text's 2 special tokens, got 0",
    ),
    "length beyond positions": (
        "{m}/one {m}/other --text {t} --texts=9 --sequence_length=129",
        "sequence_length must be at most the model's 128, got 129",
    ),
    "one model": ("{m}/one --text {t}", "other"),
    "without text": ("{m}/one {m}/other", "text"),
    "unknown option": ("{m}/one {m}/other --text {t} --layers=0:2", "--layers"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_line_and_leave_nothing(run: Run, models: Path, text_file: Path, case: str) -> None:
    line, message = (text.replace("{m}", str(models)).replace("{t}", str(text_file)) for text in MISTAKES[case])
    before = sorted(models.rglob("*"))
    code, out, err = run(*line.split(), *([] if "--output" in line else ["--output=out"]))
    assert (code, out) == (2, "")
    assert err.startswith("lit-encoders: error: ")
    assert len(err.splitlines()) == 1
    assert message in err
    assert list(Path.cwd().iterdir()) == []
    assert sorted(models.rglob("*")) == before
