"""Averages of models: exact where they have to be, the float64 mean elsewhere, and models that load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_encoders.weights import combine
from lit_encoders.weights.checkpoint import open_stored
from lit_encoders.weights.combine import digest_of
from lit_encoders.weights.soup import soup, soup_verb, soup_weights

MakeModel = Callable[..., Path]
Tensors = Callable[[Path], dict[str, Tensor]]
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DECODER = "cls.predictions.decoder.weight"
TABLE = "bert.embeddings.word_embeddings.weight"
KEY = "bert.encoder.layer.1.output.dense.weight"


def mean(states: list[dict[str, Tensor]], weights: list[float]) -> dict[str, Tensor]:
    """The float64 formula, on whole tensors, cast once."""
    return {
        name: sum(w * state[name].double() for w, state in zip(weights, states, strict=True)).to(first.dtype)  # type: ignore[union-attr]
        for name, first in states[0].items()
    }


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return got.keys() == expected.keys() and all(
        got[name].dtype == tensor.dtype and torch.equal(got[name], tensor) for name, tensor in expected.items()
    )


@pytest.mark.parametrize(
    ("weights", "normalise", "expected"),
    [
        (None, None, [1 / 3] * 3),
        ([0.5, 0.3, 0.2], None, [0.5, 0.3, 0.2]),
        ([0.5, 0.3, 0.2], False, [0.5, 0.3, 0.2]),
        ([2.0, 1.0, 1.0], True, [0.5, 0.25, 0.25]),
        ([2.0, 1.0, 1.0], False, [2.0, 1.0, 1.0]),
        ([0.0, 1.0, 0.0], None, [0.0, 1.0, 0.0]),
        ([1.5, -0.5, 0.0], None, [1.5, -0.5, 0.0]),
        ([0.3333333, 0.3333333, 0.3333333], None, [1 / 3] * 3),
    ],
)
def test_weights(weights: list[float] | None, normalise: bool | None, expected: list[float]) -> None:
    assert soup_weights(3, weights, normalise) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("weights", "normalise", "message"),
    [
        ([0.5, 0.5], None, "weights must be one for each of the 3 models, got 2"),
        ([0.1, 1.0, 0.0], None, "weights must sum to 1, or --normalise or --no-normalise say what is meant, got 1.1"),
        ([0.3, 0.3, 0.3], None, "weights must sum to 1"),
        ([1.0, -1.0, 0.0], True, "nor sum to 0 where they are normalised"),
        ([0.0, 0.0, 0.0], False, "weights must not be all 0"),
    ],
)
def test_weights_that_do_not_make_sense(weights: list[float], normalise: bool | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        soup_weights(3, weights, normalise)


def test_w01_weights_that_do_not_sum_to_one(base: Path, tensors: Tensors, content: Any, tmp_path: Path) -> None:
    twice = [str(base), str(base)]
    with pytest.raises(ValueError, match="weights must sum to 1, or --normalise or --no-normalise"):
        soup_verb(twice, tmp_path / "out", [0.1, 1.0])
    assert list(tmp_path.iterdir()) == []
    soup_verb(twice, tmp_path / "on", [0.1, 1.0], normalise=True)
    assert content(tmp_path / "on") == content(base)
    soup_verb(twice, tmp_path / "off", [0.1, 1.0], normalise=False)
    assert same(tensors(tmp_path / "off"), mean([tensors(base)], [1.1]))


@pytest.mark.parametrize("dtype", FLOATS)
def test_w01_identical_models_give_the_model(make_model: MakeModel, content: Any, tmp_path: Path, dtype: Any) -> None:
    folder = make_model(dtype=dtype)
    for number, weights in enumerate([None, [0.6, 0.3, 0.1]]):
        soup_verb([str(folder)] * 3, tmp_path / str(number), weights)
        assert content(tmp_path / str(number)) == content(folder)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("workers", [1, 4])
def test_mean_is_the_float64_mean(
    make_model: MakeModel,
    tensors: Tensors,
    load: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: Any,
    workers: int,
) -> None:
    monkeypatch.setattr(combine, "BLOCK", 500)
    monkeypatch.setattr(combine, "WORKERS", workers)
    folders = [make_model(seed=seed, dtype=dtype, shards=seed == 2) for seed in range(3)]
    states = [tensors(folder) for folder in folders]
    for place, weights in (("uniform", None), ("weighted", [0.5, 0.3, 0.2])):
        soup_verb([str(folder) for folder in folders], tmp_path / place, weights)
        assert same(tensors(tmp_path / place), mean(states, weights or [1 / 3] * 3))
        model = load(tmp_path / place)
        assert model.dtype == dtype
        expected = mean(states, weights or [1 / 3] * 3)
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in expected.items())


def test_logits_are_those_of_the_mean_of_live_models(
    base: Path, tuned: Path, load: Any, tmp_path: Path, tokenizer: Any
) -> None:
    soup_verb([str(base), str(tuned)], tmp_path / "out")
    live, other = load(base), load(tuned)
    with torch.no_grad():
        for a, b in zip(live.parameters(), other.parameters(), strict=True):
            a.copy_((a.double() + b.double()) / 2)
        ids = tokenizer("w1 w2 w3", return_tensors="pt")
        assert torch.equal(load(tmp_path / "out")(**ids).logits, live(**ids).logits)


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0, 1.5])
def test_step_from_a_base_toward_the_mean(
    make_model: MakeModel, base: Path, tensors: Tensors, content: Any, tmp_path: Path, alpha: float
) -> None:
    folders = [make_model(seed=seed) for seed in (7, 8)]
    soup_verb([str(f) for f in folders], tmp_path / "out", base=str(base), alpha=alpha)
    if alpha == 0:
        assert content(tmp_path / "out") == content(base)
        return
    states = [*map(tensors, folders), tensors(base)]
    weights = [alpha / 2, alpha / 2, 1 - alpha]
    if alpha == 1:
        states, weights = states[:2], weights[:2]
    assert same(tensors(tmp_path / "out"), mean(states, weights))


def test_one_model_and_a_base(base: Path, tuned: Path, tensors: Tensors, tmp_path: Path) -> None:
    soup_verb([str(tuned)], tmp_path / "out", base=str(base), alpha=0.5)
    assert same(tensors(tmp_path / "out"), mean([tensors(tuned), tensors(base)], [0.5, 0.5]))


def test_w03_tied_head_that_one_input_stores(
    base: Path, tuned: Path, tensors: Tensors, edited: Any, load: Any, tmp_path: Path
) -> None:
    with_head = edited(base, {DECODER: tensors(base)[TABLE].clone()})
    for number, folders in enumerate([(with_head, tuned), (tuned, with_head)]):
        soup_verb([str(folder) for folder in folders], tmp_path / str(number))
        assert DECODER not in tensors(tmp_path / str(number))
        model = load(tmp_path / str(number))
        table = model.bert.embeddings.word_embeddings.weight
        assert model.cls.predictions.decoder.weight.data_ptr() == table.data_ptr()
        expected = mean([tensors(folder) for folder in folders if folder is not with_head] + [tensors(base)], [0.5] * 2)
        assert torch.equal(table, expected[TABLE])


def test_w04_prefix_and_renamed_key(
    base: Path, make_model: MakeModel, tensors: Tensors, edited: Any, content: Any, tmp_path: Path
) -> None:
    encoder = make_model(seed=9, architecture="BertModel")
    other = tensors(encoder)
    other["encoder.layer.1.output.dense.kernel"] = other.pop(KEY.removeprefix("bert."))
    renamed = edited(encoder, {**dict.fromkeys(tensors(encoder)), **other})
    with pytest.raises(ValueError, match=r"lacks 6 tensors: bert\.encoder\.layer\.1\.output\.dense\.weight"):
        soup_verb([str(base), str(renamed)], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    text = soup_verb([str(base), str(renamed)], tmp_path / "out", strict=False)
    ours, got = tensors(base), tensors(tmp_path / "out")
    apart = {name for name in ours if name.startswith("cls.")} | {KEY}
    for name, tensor in got.items():
        if name in apart:
            assert torch.equal(tensor, ours[name])
        else:
            expected = ((ours[name].double() + other[name.removeprefix("bert.")].double()) / 2).float()
            assert torch.equal(tensor, expected)
    recipe = json.loads((tmp_path / "out" / "recipe.json").read_text())
    lacking = ["encoder.layer.1.output.dense.kernel", "pooler.dense.bias", "pooler.dense.weight"]
    assert set(recipe["of_the_first_alone"]) == apart
    assert recipe["left_out"] == lacking
    assert f"Not in every model, taken from the first: {len(apart)} tensors: " in text
    assert f"Not in the first model, left out: 3 tensors: {', '.join(lacking)}" in text


def test_not_strict_still_refuses_other_shapes(base: Path, make_model: MakeModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tensors of the same shapes, got \[64, 32\] and \[48, 32\] for"):
        soup_verb([str(base), str(make_model(intermediate_size=48))], tmp_path / "out", strict=False)


def test_w06_counters_and_masks_are_the_first_models(
    base: Path, tuned: Path, tensors: Tensors, edited: Any, tmp_path: Path
) -> None:
    folders = [
        edited(folder, {"bert.counter": torch.tensor(number), "bert.mask": torch.tensor([True, number > 3])})
        for number, folder in ((3, base), (4, tuned))
    ]
    soup_verb([str(folder) for folder in folders], tmp_path / "out")
    got = tensors(tmp_path / "out")
    assert (got["bert.counter"].dtype, got["bert.counter"].item()) == (torch.int64, 3)
    assert (got["bert.mask"].dtype, got["bert.mask"].tolist()) == (torch.bool, [True, False])
    assert torch.equal(got[KEY], mean([tensors(base), tensors(tuned)], [0.5, 0.5])[KEY])


def test_w08_tied_model_is_stored_once_and_tied_again(
    base: Path, tuned: Path, tensors: Tensors, load: Any, tmp_path: Path
) -> None:
    soup_verb([str(base), str(tuned)], tmp_path / "out")
    assert DECODER not in tensors(tmp_path / "out")
    model = load(tmp_path / "out")
    assert model.cls.predictions.decoder.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert model.cls.predictions.decoder.bias.data_ptr() == model.cls.predictions.bias.data_ptr()


def test_untied_model_keeps_both(make_model: MakeModel, tensors: Tensors, load: Any, tmp_path: Path) -> None:
    folders = [make_model(seed=seed, tie_word_embeddings=False) for seed in (1, 2)]
    soup_verb([str(folder) for folder in folders], tmp_path / "out")
    expected = mean([tensors(folder) for folder in folders], [0.5, 0.5])
    assert not torch.equal(expected[DECODER], expected[TABLE])
    assert same(tensors(tmp_path / "out"), expected)
    model = load(tmp_path / "out")
    assert model.cls.predictions.decoder.weight.data_ptr() != model.get_input_embeddings().weight.data_ptr()


def test_checkpoint_of_a_run_with_a_folder(
    checkpoint: Path, bert_folder: Path, tensors: Tensors, load: Any, tmp_path: Path
) -> None:
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    ours = tensors(bert_folder)
    expected = mean([ours, {name: state[f"backbone.model.{name}"] for name in ours}], [0.5, 0.5])
    for number, sources in enumerate([(bert_folder, checkpoint), (checkpoint, bert_folder), (checkpoint, checkpoint)]):
        soup_verb([str(source) for source in sources], tmp_path / str(number))
        load(tmp_path / str(number))
        if number < 2:
            assert same(tensors(tmp_path / str(number)), expected)


def test_checkpoint_whose_tokenizer_is_gone(checkpoint: Path, bert_folder: Path, tmp_path: Path) -> None:
    saved = torch.load(checkpoint, weights_only=True)
    saved["lit_encoders"]["tokenizer"] = str(tmp_path / "gone")
    torch.save(saved, tmp_path / "moved.ckpt")
    with pytest.raises(ValueError, match=r"models must be a checkpoint whose tokenizer is still there, got .*gone"):
        soup_verb([str(tmp_path / "moved.ckpt"), str(bert_folder)], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["moved.ckpt"]


def test_torch_file(base: Path, tuned: Path, tensors: Tensors, load: Any, tmp_path: Path) -> None:
    """With its tied decoder in it, as torch.save wrote it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tuned / name).read_bytes())
    torch.save(load(tuned).state_dict(), folder / "pytorch_model.bin")
    soup_verb([str(folder), str(base)], tmp_path / "out")
    assert same(tensors(tmp_path / "out"), mean([tensors(base), tensors(tuned)], [0.5, 0.5]))
    load(tmp_path / "out")


def test_encoders_without_head_and_tokenizer(
    make_model: MakeModel, tensors: Tensors, load: Any, tmp_path: Path
) -> None:
    folders = [make_model(seed=seed, architecture="BertModel", with_tokenizer=False) for seed in (1, 2)]
    soup_verb([str(folder) for folder in folders], tmp_path / "out")
    assert same(tensors(tmp_path / "out"), mean([tensors(folder) for folder in folders], [0.5, 0.5]))
    load(tmp_path / "out", with_tokenizer=False)


def test_types_are_promoted(make_model: MakeModel, tensors: Tensors, load: Any, tmp_path: Path) -> None:
    folders = [make_model(seed=1, dtype=torch.bfloat16), make_model(seed=2, dtype=torch.float16)]
    soup_verb([str(folder) for folder in folders], tmp_path / "out")
    first, second = map(tensors, folders)
    expected = {name: ((first[name].double() + second[name].double()) / 2).float() for name in first}
    assert same(tensors(tmp_path / "out"), expected)
    assert load(tmp_path / "out").dtype == torch.float32


def test_modernbert(make_model: MakeModel, tensors: Tensors, load: Any, tmp_path: Path) -> None:
    ends = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    folders = [
        make_model(seed=seed, architecture="ModernBertForMaskedLM", vocab_size=95, **sizes, **ends) for seed in (1, 2)
    ]
    soup_verb([str(folder) for folder in folders], tmp_path / "out")
    assert same(tensors(tmp_path / "out"), mean([tensors(folder) for folder in folders], [0.5, 0.5]))
    load(tmp_path / "out")


def test_recipe_says_what_was_done(base: Path, tuned: Path, tmp_path: Path) -> None:
    soup_verb([str(base), str(tuned)], tmp_path / "out", [1.0, 3.0], normalise=True, base=str(base), alpha=0.5)
    recipe = json.loads((tmp_path / "out" / "recipe.json").read_text())
    digests = [digest_of(open_stored(str(folder), "models")) for folder in (base, tuned, base)]
    assert recipe.pop("versions").keys() == {"lit_encoders", "torch", "transformers", "safetensors"}
    assert recipe == {
        "operation": "soup",
        "weights": [0.25, 0.75],
        "base": str(base),
        "alpha": 0.5,
        "of_the_first_alone": [],
        "left_out": [],
        "inputs": [{"source": str(f), "digest": d} for f, d in zip((base, tuned, base), digests, strict=True)],
    }


@pytest.mark.parametrize(
    ("count", "settings", "message"),
    [
        (1, {}, "models must be at least two, or one with a base, got 1"),
        (2, {"alpha": 0.5}, "alpha must come with a base to go from, got 0.5"),
        (2, {"normalise": True}, "normalise must come with weights to normalise, got none"),
        (2, {"weights": [1.0]}, "weights must be one for each of the 2 models, got 1"),
    ],
)
def test_mistakes(base: Path, tmp_path: Path, count: int, settings: dict[str, Any], message: str) -> None:
    models = [open_stored(str(base), "models")] * count
    with pytest.raises(ValueError, match=message):
        soup(models, tmp_path / "out", **settings)
    assert list(tmp_path.iterdir()) == []
