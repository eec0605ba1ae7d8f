"""Models larger than memory: what a soup of five models of 2 GB needs, as the command that a user types."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

MODELS, LAYERS, VOCAB, HIDDEN, INNER, SHARD = 5, 12, 262_144, 2560, 3328, 400_000_000
# The peak of the child's children: a process that pytest itself starts would begin with pytest's own memory.
PEAK = (
    "import resource, subprocess, sys; code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode; "
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"
)
COMMAND = [sys.executable, "-c", "import sys; from lit_encoders.cli import main; sys.exit(main())"]


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for number in range(LAYERS):
        place = f"model.layers.{number}."
        yield f"{place}self_attn.q_proj.weight", (HIDDEN, HIDDEN)
        yield f"{place}self_attn.k_proj.weight", (256, HIDDEN)
        yield f"{place}self_attn.v_proj.weight", (256, HIDDEN)
        yield f"{place}self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield f"{place}mlp.gate_proj.weight", (INNER, HIDDEN)
        yield f"{place}mlp.up_proj.weight", (INNER, HIDDEN)
        yield f"{place}mlp.down_proj.weight", (HIDDEN, INNER)
        yield f"{place}input_layernorm.weight", (HIDDEN,)
        yield f"{place}post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)


def make_model(folder: Path, seed: int, noise: Tensor) -> int:
    """Write a model of noise in shards; give its number of bytes."""
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS, head_dim=128,
        num_attention_heads=20, num_key_value_heads=2, tie_word_embeddings=True, architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(folder)  # fmt: skip
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())):05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in shapes():
        numel = torch.Size(shape).numel()
        moved = noise.roll(seed * 17 + len(weight_map))
        shard[name] = moved.repeat(-(-numel // len(moved)))[:numel].reshape(shape)
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.fixture
def models(tmp_path: Path) -> Iterator[list[Path]]:
    noise = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    folders = [tmp_path / f"model{number}" for number in range(MODELS)]
    try:
        for number, folder in enumerate(folders):
            size = make_model(folder, number, noise)
            assert size > 2e9
        yield folders
    finally:
        for path in tmp_path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.slow
def test_soup_of_models_larger_than_its_memory(models: list[Path], tmp_path: Path) -> None:
    inputs = [str(file) for folder in models for file in sorted(folder.glob("*.safetensors"))]
    output, copy = tmp_path / "out", tmp_path / "copy"
    subprocess.run(["cat", *inputs], stdout=subprocess.DEVNULL, check=True)  # Now in the page cache, as later.
    walls: list[float] = []
    floors: list[float] = []
    peaks: list[float] = []
    for _ in range(3):
        shutil.rmtree(output, ignore_errors=True)
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", PEAK, *COMMAND, "soup", *map(str, models), "--output", str(output)],
            capture_output=True, text=True,
        )  # fmt: skip
        walls.append(time.perf_counter() - begin)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout) / 1024)
        copy.unlink(missing_ok=True)
        begin = time.perf_counter()
        subprocess.run(["cat", *inputs], stdout=subprocess.DEVNULL, check=True)
        with copy.open("wb") as file:
            subprocess.run(["cat", str(output / "model.safetensors")], stdout=file, check=True)
        floors.append(time.perf_counter() - begin)
    ratio = median(walls) / median(floors)
    size = sum(Path(file).stat().st_size for file in inputs)
    print(
        f"\nsoup of {MODELS} models in {len(inputs)} files, {size / 1e9:.1f} GB: "
        f"{', '.join(f'{wall:.2f}' for wall in walls)} s, digests included; reading and writing alone: "
        f"{', '.join(f'{floor:.2f}' for floor in floors)} s; {ratio:.2f} times; "
        f"peak memory {', '.join(f'{peak:.0f}' for peak in peaks)} MiB"
    )
    assert max(peaks) < 900
    assert ratio <= 4
    recipe = json.loads((output / "recipe.json").read_text())
    assert len({entry["digest"] for entry in recipe["inputs"]}) == MODELS
