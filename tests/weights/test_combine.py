"""Sums of weights: exact where they have to be, float64 elsewhere, whole or not there at all."""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lit_encoders.weights import combine as combine_module
from lit_encoders.weights.checkpoint import StoredModel, open_stored, read_safetensors
from lit_encoders.weights.combine import (
    Digest,
    combine,
    digest_of,
    new_folder,
    result_type,
    spans,
    weighted_sum,
    write_model,
)
from lit_encoders.weights.stored_tensor import StoredTensor

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OF_SIZE = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def any_bits(dtype: torch.dtype, count: int = 3000, seed: int = 0) -> Tensor:
    """Numbers of every kind: any bit pattern, so NaNs with payloads, infinities, denormals; and both zeros first."""
    draw = torch.Generator().manual_seed(seed)
    integer = OF_SIZE[dtype.itemsize]
    limits = torch.iinfo(integer)
    bits = torch.randint(limits.min, limits.max, (count,), dtype=integer, generator=draw)
    numbers = bits.view(dtype)
    tiny = torch.finfo(dtype).smallest_normal
    special = [-0.0, 0.0, torch.inf, -torch.inf, torch.nan, tiny / 2, -tiny / 2, torch.finfo(dtype).max]
    numbers[: len(special)] = torch.tensor(special, dtype=dtype)
    assert numbers.isnan().any()
    return numbers


def raw(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def stored(path: Path, tensors: dict[str, Tensor], **settings: Any) -> StoredModel:
    save_file(tensors, path)
    return StoredModel(path.stem, "models", None, settings, read_safetensors(path), "none")


@pytest.mark.parametrize("dtype", FLOATS)
def test_w01_weights_of_0_and_1_give_a_tensor_byte_for_byte(dtype: torch.dtype) -> None:
    a, b = any_bits(dtype), any_bits(dtype, seed=1)
    assert raw(weighted_sum([a, b], [1.0, 0.0])) == raw(a)
    assert raw(weighted_sum([a, b], [0.0, 1.0])) == raw(b)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weights", [[0.5, 0.5], [1 / 3] * 3, [0.1 / 1.1, 1.0 / 1.1], [0.1] * 10, [1.5, -0.5]])
def test_w01_identical_tensors_give_the_tensor_byte_for_byte(dtype: torch.dtype, weights: list[float]) -> None:
    a = any_bits(dtype)
    assert raw(weighted_sum([a.clone() for _ in weights], weights)) == raw(a)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("alpha", [0.1, 0.25, 0.5, 0.9, 1.5, -0.3])
def test_between_is_the_float64_formula_cast_once(dtype: torch.dtype, alpha: float) -> None:
    torch.manual_seed(0)
    # Exponents from 2^-40 to 2^40 against each other, signs mixed.
    scales = 2.0 ** torch.randint(-40, 40, (2, 5000)).double()
    scales = scales.clamp(2.0**-12, 2.0**12) if dtype == torch.float16 else scales
    a, b = (torch.randn(2, 5000, dtype=torch.float64) * scales).to(dtype)
    expected = ((1 - alpha) * a.double() + alpha * b.double()).to(dtype)
    assert torch.equal(weighted_sum([a, b], [1 - alpha, alpha]), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_w01_weights_that_sum_to_more_are_taken_as_they_are(dtype: torch.dtype) -> None:
    a = torch.randn(4000, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = weighted_sum([a, a], [0.1, 1.0])
    assert torch.equal(got, (1.1 * a.double()).to(dtype))


def test_float32_sums_would_not_be_exact() -> None:
    """What float64 is for: a mean of three in float32 misses some of the numbers themselves."""
    a = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    b = a.clone()
    b[0] += 1  # Not the same block, so that the sum is really made.
    got = weighted_sum([a, b, a], [1 / 3] * 3)
    assert torch.equal(got[1:], a[1:])
    third = torch.tensor(1 / 3)
    assert not torch.equal((a * third + b * third + a * third)[1:], a[1:])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3), (4, 1, 2)])
def test_shapes_are_kept(shape: tuple[int, ...]) -> None:
    a, b = torch.randn(shape), torch.randn(shape)
    assert torch.equal(weighted_sum([a, b], [0.5, 0.5]), ((a.double() + b.double()) / 2).float())
    assert torch.equal(weighted_sum([a, a.clone()], [0.5, 0.5]), a)
    assert torch.equal(weighted_sum([a, b], [0.0, 0.0]), torch.zeros(shape))


def test_w06_integers_and_booleans_are_the_first_tensors() -> None:
    got = weighted_sum([torch.tensor([3]), torch.tensor([4])], [0.5, 0.5])
    assert got.dtype == torch.int64
    assert got.item() == 3
    mask = weighted_sum([torch.tensor([True, False]), torch.tensor([False, False])], [0.5, 0.5])
    assert mask.dtype == torch.bool
    assert mask.tolist() == [True, False]


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ([torch.bfloat16, torch.bfloat16], torch.bfloat16),
        ([torch.bfloat16, torch.float32], torch.float32),
        ([torch.float16, torch.bfloat16], torch.float32),
        ([torch.float32, torch.float64], torch.float64),
        ([torch.int64, torch.int32], torch.int64),
        ([torch.bool], torch.bool),
    ],
)
def test_mixed_types_take_the_one_that_holds_them_all(types: list[torch.dtype], expected: torch.dtype) -> None:
    assert result_type(types) == expected
    if expected.is_floating_point:
        total = weighted_sum([torch.ones(2, dtype=dtype) for dtype in types], [1 / len(types)] * len(types))
        assert total.dtype == expected
        assert total.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 1000])
def test_spans_cover_each_element_once(monkeypatch: pytest.MonkeyPatch, numel: int) -> None:
    monkeypatch.setattr(combine_module, "BLOCK", 64)
    covered = [place for start, stop in spans(numel) for place in range(start, stop)]
    assert covered == list(range(numel))
    assert all(stop - start <= 64 for start, stop in spans(numel))


@pytest.fixture(params=[1, 4])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of many blocks, with one thread and with several."""
    monkeypatch.setattr(combine_module, "BLOCK", 64)
    monkeypatch.setattr(combine_module, "WORKERS", request.param)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", FLOATS)
def test_files_are_summed_as_whole_tensors_would_be(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"b": (37, 29), "a": (1,), "scalar": (), "empty": (0, 3), "long": (4096,)}
    states = [{name: torch.randn(shape).to(dtype) for name, shape in shapes.items()} for _ in range(3)]
    for number, state in enumerate(states):
        state["counter"] = torch.tensor(number + 3)
        state["mask"] = torch.arange(5) > number
    models = [stored(tmp_path / f"{number}.safetensors", state) for number, state in enumerate(states)]
    terms = [(0, 0.5), (1, 0.3), (2, 0.2)]
    digests = combine(models, dict.fromkeys(states[0], terms), tmp_path / "out.safetensors")
    out = load_file(tmp_path / "out.safetensors")
    assert out.keys() == states[0].keys()
    for name in shapes:
        expected = sum(weight * states[m][name].double() for m, weight in terms).to(dtype)  # type: ignore[union-attr]
        assert torch.equal(out[name], expected)
    assert out["counter"].item() == 3
    assert out["counter"].dtype == torch.int64
    assert out["mask"].tolist() == [False, True, True, True, True]
    assert digests == [digest_of(model) for model in models]


@pytest.mark.usefixtures("small_blocks")
def test_each_type_lies_at_a_multiple_of_its_size(tmp_path: Path) -> None:
    state = {
        "odd": torch.arange(3) > 1,
        "half": any_bits(torch.float16, 33),
        "wide": any_bits(torch.float64, 65),
        "single": any_bits(torch.float32, 129),
        "brain": any_bits(torch.bfloat16, 7777),
    }
    model = stored(tmp_path / "in.safetensors", state)
    combine([model], {name: [(0, 1.0)] for name in state}, tmp_path / "out.safetensors")
    assert {name: raw(tensor) for name, tensor in load_file(tmp_path / "out.safetensors").items()} == {
        name: raw(tensor) for name, tensor in state.items()
    }
    with (tmp_path / "out.safetensors").open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(length))
    assert length % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    assert all(entry["data_offsets"][0] % state[name].element_size() == 0 for name, entry in header.items())


@pytest.mark.usefixtures("small_blocks")
def test_plan_takes_tensors_from_several_models_and_leaves_out_others(tmp_path: Path) -> None:
    torch.manual_seed(0)
    states = [{name: torch.randn(200) for name in "abc"} for _ in range(2)]
    states[1]["a"] = states[1]["a"].bfloat16()
    models = [stored(tmp_path / f"{number}.safetensors", state) for number, state in enumerate(states)]
    plan = {"a": [(1, 1.0)], "b": [(0, 0.5), (1, 0.5)]}
    digests = combine(models, plan, tmp_path / "out.safetensors")
    out = load_file(tmp_path / "out.safetensors")
    assert out.keys() == {"a", "b"}
    assert out["a"].dtype == torch.bfloat16
    assert torch.equal(out["a"], states[1]["a"])
    assert torch.equal(out["b"], ((states[0]["b"].double() + states[1]["b"].double()) / 2).float())
    assert digests == [digest_of(model) for model in models], "what is not used is part of the digest"


def test_partial_writes_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system may take a part of what it is given to write."""
    model = stored(tmp_path / "in.safetensors", {"a": torch.randn(1000)})
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, view, place: write(file, view[:97], place))
    combine([model], {"a": [(0, 1.0)]}, tmp_path / "out.safetensors")
    monkeypatch.undo()
    assert torch.equal(load_file(tmp_path / "out.safetensors")["a"], load_file(tmp_path / "in.safetensors")["a"])


def test_digest_does_not_depend_on_files_or_order(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(combine_module, "BLOCK", 512)
    whole, sharded = (open_stored(str(make_model(seed=5, shards=shards)), "models") for shards in (False, True))
    assert len({tensor.path for tensor in sharded.tensors.values()}) > 2
    assert len({tensor.path for tensor in whole.tensors.values()}) == 1
    assert digest_of(whole) == digest_of(sharded)


def test_digest_tells_content_names_types_and_shapes_apart(tmp_path: Path) -> None:
    a = torch.arange(6.0)
    flipped = a.clone()
    flipped.view(torch.int32)[3] ^= 1
    variants = [
        {"a": a}, {"b": a}, {"a": flipped}, {"a": a.reshape(2, 3)}, {"a": a.view(torch.int32)}, {"a": a, "b": a[:0]},
    ]  # fmt: skip
    models = [stored(tmp_path / f"{number}.safetensors", state) for number, state in enumerate(variants)]
    digests = {digest_of(model) for model in models}
    assert len(digests) == len(variants)
    assert all(len(digest) == 64 for digest in digests)


def test_digest_of_a_tensor_that_was_not_taken_in_is_an_error(tmp_path: Path) -> None:
    model = stored(tmp_path / "in.safetensors", {"a": torch.zeros(2)})
    with pytest.raises(KeyError):
        Digest().hexdigest(model.tensors)


def test_new_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    with new_folder(tmp_path / "deep" / "out") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "deep" / "out").exists()
    assert (tmp_path / "deep" / "out" / "file").read_text() == "x"
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "deep" / "out").stat().st_mode) == 0o777 & ~umask


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_new_folder_leaves_nothing_behind(tmp_path: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with new_folder(tmp_path / "out") as folder:
            (folder / "file").write_text("x")
            raise error

    with pytest.raises(error):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_new_folder_refuses_what_exists_and_what_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for output in (tmp_path, tmp_path / "file"):
        with (
            pytest.raises(ValueError, match="output must be a folder that does not exist yet, got"),
            new_folder(output),
        ):
            pass
    with (
        pytest.raises(ValueError, match="output must be a folder that can be made, got"),
        new_folder(tmp_path / "file" / "out"),
    ):
        pass


def written(output: Path, models: list[StoredModel], weights: list[float]) -> dict[str, Any]:
    output.mkdir()
    plan = {name: list(enumerate(weights)) for name in models[0].tensors}
    return write_model(output, models[0], models, plan, {"operation": "mean", "layers": ["0:1"]})


def test_model_comes_with_configuration_tokenizer_and_recipe(
    base: Path, tuned: Path, tmp_path: Path, load: Callable[..., Any]
) -> None:
    import safetensors
    import transformers

    import lit_encoders

    models = [open_stored(str(folder), "models") for folder in (base, tuned)]
    recipe = written(tmp_path / "out", models, [0.5, 0.5])
    load(tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "README.md", "config.json", "model.safetensors", "recipe.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert json.loads((tmp_path / "out" / "recipe.json").read_text()) == recipe
    assert recipe == {
        "operation": "mean",
        "layers": ["0:1"],
        "inputs": [{"source": model.source, "digest": digest_of(model)} for model in models],
        "versions": {
            "lit_encoders": lit_encoders.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "safetensors": safetensors.__version__,
        },
    }
    assert str(tuned) in (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


def test_what_is_not_carried_over(base: Path, edited: Callable[..., Path], tmp_path: Path) -> None:
    """Other forms of the old weights would be taken for the new model's."""
    folder = edited(base, {})
    stale = ("pytorch_model.bin", "tf_model.h5", "model.onnx", "model.safetensors.index.json", ".hidden", "README.md")
    for name in stale:
        (folder / name).write_text("{}")
    (folder / "vocab.txt").write_text("kept")
    (folder / "onnx").mkdir()
    written(tmp_path / "out", [open_stored(str(folder), "models")], [1.0])
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert "vocab.txt" in names
    assert names & {*stale, "onnx"} == {"README.md"}, "and that one is our own"


@pytest.mark.parametrize(
    ("types", "entry"),
    [
        (("bfloat16",), "bfloat16"),
        (("float16", "float16"), "float16"),
        (("bfloat16", "float32"), "float32"),
        (("float16", "bfloat16"), "float32"),
    ],
)
def test_entry_of_the_type_is_what_is_stored(
    make_model: Callable[..., Path],
    tensors: Callable[[Path], dict[str, Tensor]],
    load: Callable[..., Any],
    tmp_path: Path,
    types: tuple[str, ...],
    entry: str,
) -> None:
    folders = [make_model(seed=seed, dtype=getattr(torch, dtype)) for seed, dtype in enumerate(types)]
    models = [open_stored(str(folder), "models") for folder in folders]
    written(tmp_path / "out", models, [1 / len(models)] * len(models))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == entry
    assert {tensor.dtype for tensor in tensors(tmp_path / "out").values()} == {getattr(torch, entry)}
    assert load(tmp_path / "out").dtype == getattr(torch, entry)


def test_entry_of_a_model_of_several_types_loses_nothing(
    base: Path, tuned: Path, edited: Callable[..., Path], tensors: Callable[[Path], dict[str, Tensor]], tmp_path: Path
) -> None:
    """Layers of a float32 model in a bfloat16 one: loaded as float32. A mixed model as it was keeps its entry."""
    half = edited(tuned, {n: t.bfloat16() for n, t in tensors(tuned).items()}, {"dtype": "bfloat16"})
    models = [open_stored(str(folder), "models") for folder in (half, base)]
    plan = {name: [(int(".layer.0." in name), 1.0)] for name in models[0].tensors}
    for place, model in (("once", models[0]), ("again", None)):
        (tmp_path / place).mkdir()
        if model is None:
            model = open_stored(str(tmp_path / "once"), "models")
            config = json.loads((tmp_path / "once" / "config.json").read_text())
            assert config["dtype"] == "float32"
            (tmp_path / "once" / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
            models, plan = [open_stored(str(tmp_path / "once"), "models")], {name: [(0, 1.0)] for name in plan}
        write_model(tmp_path / place, models[0], models, plan, {"operation": "mixed"})
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "bfloat16"


def test_old_entry_of_the_type_is_replaced(base: Path, edited: Callable[..., Path], tmp_path: Path) -> None:
    folder = edited(base, {}, {"torch_dtype": "float16", "dtype": None})
    written(tmp_path / "out", [open_stored(str(folder), "models")], [1.0])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert "torch_dtype" not in config


def test_file_cut_off_while_it_is_read_leaves_nothing(base: Path, edited: Callable[..., Path], tmp_path: Path) -> None:
    folder = edited(base, {})
    model = open_stored(str(folder), "models")
    os.truncate(folder / "model.safetensors", 50_000)
    plan = {name: [(0, 1.0)] for name in model.tensors}
    with (
        pytest.raises(ValueError, match="weights must be whole, got a file that is cut off"),
        new_folder(tmp_path / "out") as output,
    ):
        write_model(output, model, [model], plan, {"operation": "copy"})
    assert [file.name for file in tmp_path.iterdir()] == [folder.name]


def test_read_into_memory_that_is_there(tmp_path: Path) -> None:
    save_file({"a": torch.arange(100.0)}, tmp_path / "a.safetensors")
    tensor: StoredTensor = read_safetensors(tmp_path / "a.safetensors")["a"]
    memory = torch.full((50,), -1.0)
    assert torch.equal(tensor.read(10, 40, memory), torch.arange(10.0, 40.0))
    assert memory[30:].tolist() == [-1.0] * 20
