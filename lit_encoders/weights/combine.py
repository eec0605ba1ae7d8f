"""Arithmetic on the weights of whole models, block by block: float64 inside a block, one cast at its end."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import struct
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128_digest

from lit_encoders.weights.checkpoint import TYPE_NAMES, StoredModel
from lit_encoders.weights.stored_tensor import StoredTensor, as_bytes

# Elements of a block: 4 MB in float64, so that sums are made inside the caches.
BLOCK = 1 << 19
# Threads that read, compute and hash blocks; more would only wait for memory.
WORKERS = min(4, os.cpu_count() or 1)
# Files of a model folder that are weights, or about them, and so are not carried over.
_NOT_CARRIED = (".safetensors", ".bin", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".ckpt", ".index.json", ".md")


def weighted_sum(
    blocks: Sequence[Tensor],
    weights: Sequence[float],
    dtype: torch.dtype | None = None,
    buffers: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Sum tensors with weights, in float64 and with one cast at the end.

    Exact where it has to be, in every type and down to the sign of zero: weights of which one is 1 and the others 0
    give that tensor, and identical tensors under weights that sum to 1 give that tensor. Integers and booleans are
    not summed: the first tensor's are taken.

    Args:
        blocks: tensors of one shape.
        weights: one for each; a tensor with weight 0 is not looked at.
        dtype: of the result; None takes the type that holds all of the blocks' types.
        buffers: two float64 tensors of at least the blocks' size to compute in; None makes them. Flat blocks only.

    >>> weighted_sum([torch.tensor([1.0]), torch.tensor([2.0])], [0.75, 0.25])
    tensor([1.2500])
    """
    dtype = dtype or result_type([block.dtype for block in blocks])
    if not blocks[0].is_floating_point():
        return blocks[0]
    terms = [(block, weight) for block, weight in zip(blocks, weights, strict=True) if weight != 0]
    if not terms:
        return torch.zeros_like(blocks[0], dtype=dtype)
    first, weight = terms[0]
    if all(_same(first, block) for block, _ in terms[1:]):
        # The same numbers throughout: 0.1 and 1 of them are 1.1 of them, with one rounding.
        terms, weight = terms[:1], math.fsum(weights)
        if math.isclose(weight, 1.0, rel_tol=0, abs_tol=1e-12):
            return first.to(dtype)
    if buffers is None:
        total, term = (torch.empty_like(first, dtype=torch.float64) for _ in range(2))
    else:
        total, term = (buffer[: len(first)] for buffer in buffers)
    total.copy_(first).mul_(weight)
    for block, weight in terms[1:]:
        # Not add_(alpha=): it fuses the two roundings on some processors, and on others not.
        total.add_(term.copy_(block).mul_(weight))
    return total.to(dtype)


def result_type(types: Sequence[torch.dtype]) -> torch.dtype:
    """The smallest type that holds every value of some types; of integers and booleans the first.

    >>> result_type([torch.bfloat16, torch.float16]), result_type([torch.float32, torch.bfloat16])
    (torch.float32, torch.float32)
    """
    result = types[0]
    if result.is_floating_point:
        for dtype in types[1:]:
            result = torch.promote_types(result, dtype)
    return result


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes, whatever the numbers are."""
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@dataclass
class Digest:
    """A digest of a model's content, the same in one file or several and in any order of tensors.

    It tells models apart and is no signature: each block of ``BLOCK`` elements has its 128-bit XXH3; a tensor's is the
    SHA-256 of its blocks'; the model's is the SHA-256 of the sorted lines "name type shape tensor's".
    """

    blocks: dict[tuple[str, int], bytes] = field(default_factory=dict)

    def add(self, name: str, start: int, block: Tensor) -> None:
        """Take in a block that starts at an element of a tensor."""
        self.blocks[name, start] = xxh3_128_digest(as_bytes(block))

    def hexdigest(self, tensors: Mapping[str, StoredTensor]) -> str:
        """The digest of a model whose tensors have all been taken in, in 64 hexadecimal digits."""
        whole = hashlib.sha256()
        for name in sorted(tensors):
            blocks = b"".join(self.blocks[name, start] for start, _ in spans(tensors[name].numel))
            of_tensor, dtype = hashlib.sha256(blocks).hexdigest(), TYPE_NAMES[tensors[name].dtype]
            whole.update(f"{name} {dtype} {list(tensors[name].shape)} {of_tensor}\n".encode())
        return whole.hexdigest()


def spans(numel: int) -> Iterator[tuple[int, int]]:
    """Blocks of a flattened tensor, as (start, stop); one empty block for an empty tensor.

    >>> list(spans(3)), list(spans(0))
    ([(0, 3)], [(0, 0)])
    """
    for start in range(0, max(numel, 1), BLOCK):
        yield start, min(start + BLOCK, numel)


@contextmanager
def block_workers() -> Iterator[ThreadPoolExecutor]:
    """Threads for work on blocks; each computes alone, since they are as many as the processors."""
    with ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield pool


class _Buffers(threading.local):
    """Memory that a worker uses again and again: fresh pages for each block would cost as much as the sums."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, torch.dtype], Tensor] = {}
        self.sums = (torch.empty(BLOCK, dtype=torch.float64), torch.empty(BLOCK, dtype=torch.float64))

    def block(self, number: int, dtype: torch.dtype) -> Tensor:
        if (number, dtype) not in self.blocks:
            self.blocks[number, dtype] = torch.empty(BLOCK, dtype=dtype)
        return self.blocks[number, dtype]


class _Bounded:
    """Hand tasks to workers without letting finished and waiting ones pile up in memory."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.pool = pool
        self.waiting: list[Future[None]] = []

    def submit(self, function: Any, *arguments: Any) -> None:
        self.waiting.append(self.pool.submit(function, *arguments))
        if len(self.waiting) >= 4 * WORKERS:
            self.waiting.pop(0).result()

    def finish(self) -> None:
        for task in self.waiting:
            task.result()


def digest_of(weights: StoredModel) -> str:
    """The digest of a model's content; reads all of it."""
    digest, buffers = Digest(), _Buffers()

    def one(name: str, tensor: StoredTensor, start: int, stop: int) -> None:
        digest.add(name, start, tensor.read(start, stop, buffers.block(0, tensor.dtype)))

    with block_workers() as pool:
        tasks = _Bounded(pool)
        for name, tensor in weights.tensors.items():
            for start, stop in spans(tensor.numel):
                tasks.submit(one, name, tensor, start, stop)
        tasks.finish()
    return digest.hexdigest(weights.tensors)


# Of each tensor of the result: models, by number, and their weights in the sum.
Plan = Mapping[str, Sequence[tuple[int, float]]]


def result_types(models: Sequence[StoredModel], plan: Plan) -> dict[str, torch.dtype]:
    """The type of each tensor of a result: the one that holds all that it is summed from."""
    return {name: result_type([models[m].tensors[name].dtype for m, _ in terms]) for name, terms in plan.items()}


def combine(models: Sequence[StoredModel], plan: Plan, path: Path) -> list[str]:
    """Write the weighted sums of models' tensors into a safetensors file, in one pass over all of them.

    Memory does not grow with the models: blocks of rows are read, summed, hashed and written at their place.

    Args:
        models: with the same names for the same tensors.
        plan: what each tensor of the result is the sum of.
        path: file to write.

    Returns:
        The digest of each model, hashed on the way; what the plan does not use is read for that too.
    """
    types = result_types(models, plan)
    shapes = {name: models[terms[0][0]].tensors[name].shape for name, terms in plan.items()}
    offsets: dict[str, int] = {}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # Widest types first: then every tensor lies at a multiple of its element size.
    for name in sorted(plan, key=lambda name: (-types[name].itemsize, name)):
        size = math.prod(shapes[name]) * types[name].itemsize
        offsets[name] = end
        header[name] = {"dtype": TYPE_NAMES[types[name]], "shape": shapes[name], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digests = [Digest() for _ in models]
    buffers = _Buffers()
    used = {(m, name) for name, terms in plan.items() for m, _ in terms}

    with path.open("wb") as file, block_workers() as pool:
        file.write(struct.pack("<Q", len(text)) + text)
        file.flush()
        begin = 8 + len(text)
        file.truncate(begin + end)

        def one(name: str, start: int, stop: int) -> None:
            blocks = []
            for number, (m, _) in enumerate(plan[name]):
                tensor = models[m].tensors[name]
                blocks.append(tensor.read(start, stop, buffers.block(number, tensor.dtype)))
                digests[m].add(name, start, blocks[-1])
            total = weighted_sum(blocks, [weight for _, weight in plan[name]], types[name], buffers.sums)
            place = begin + offsets[name] + start * types[name].itemsize
            _write(file.fileno(), as_bytes(total), place)

        def unused(m: int, name: str, start: int, stop: int) -> None:
            tensor = models[m].tensors[name]
            digests[m].add(name, start, tensor.read(start, stop, buffers.block(0, tensor.dtype)))

        tasks = _Bounded(pool)
        for name in offsets:
            for start, stop in spans(math.prod(shapes[name])):
                tasks.submit(one, name, start, stop)
        for m, model in enumerate(models):
            for name, tensor in model.tensors.items():
                if (m, name) not in used:
                    for start, stop in spans(tensor.numel):
                        tasks.submit(unused, m, name, start, stop)
        tasks.finish()
    return [digest.hexdigest(model.tensors) for digest, model in zip(digests, models, strict=True)]


def _write(file: int, view: memoryview, place: int) -> None:
    """Write all of it: a disk that fills up takes a part without an error, and refuses the rest."""
    while view:
        written = os.pwrite(file, view, place)
        view, place = view[written:], place + written


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Make a folder beside its place and move it there when all is written, so that nothing half-made has its name.

    Raises:
        ValueError: something of that name exists, or nothing can be made there.
    """
    if output.exists():
        raise ValueError(f"output must be a folder that does not exist yet, got '{output}'")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    except OSError as error:
        raise ValueError(f"output must be a folder that can be made, got '{output}' ({error.strerror})") from error
    try:
        # mkdtemp makes what only its owner can read.
        beside.chmod(0o777 & ~_umask())
        yield beside
        os.rename(beside, output)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise ValueError(f"output must have room and be writable, got '{output}' ({error.strerror})") from error
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_model(
    output: Path, template: StoredModel, models: Sequence[StoredModel], plan: Plan, recipe: Mapping[str, Any]
) -> dict[str, Any]:
    """Write a Hugging Face folder that loads: combined weights, and what the template has beside its own.

    Args:
        output: folder to fill.
        template: whose configuration and tokenizer it gets.
        models: that the plan sums.
        plan: what each tensor is the sum of.
        recipe: of the operation, for ``recipe.json``.

    Returns:
        The recipe, with the models' digests and the versions of what made it.
    """
    write_companions(output, template, result_types(models, plan))
    digests = combine(models, plan, output / "model.safetensors")
    inputs = [{"source": m.source, "digest": d} for m, d in zip(models, digests, strict=True)]
    versions = {name: version(name) for name in ("lit_encoders", "torch", "transformers", "safetensors")}
    full = {**recipe, "inputs": inputs, "versions": versions}
    (output / "recipe.json").write_text(json.dumps(full, indent=2) + "\n", encoding="utf-8")
    (output / "README.md").write_text(_card(full), encoding="utf-8")
    return full


def write_companions(output: Path, template: StoredModel, types: Mapping[str, torch.dtype] | None = None) -> None:
    """Write configuration and tokenizer, as the template has them; the entry of the type says what is stored.

    Args:
        output: folder to write into.
        template: whose they are.
        types: of the tensors that are stored; None takes the template's.

    Raises:
        ValueError: the tokenizer of a training checkpoint is gone.
    """
    types = {name: tensor.dtype for name, tensor in template.tensors.items()} if types is None else types
    settings = dict(template.settings)
    if template.folder is not None:
        for file in sorted(template.folder.iterdir()):
            if file.is_file() and not file.name.startswith(".") and not file.name.endswith(_NOT_CARRIED):
                shutil.copyfile(file, output / file.name)
    else:
        tokenizer = template.load_tokenizer()
        if tokenizer is None:
            raise ValueError(
                f"{template.key} must be a checkpoint whose tokenizer is still there, got '{template.source}' with "
                f"'{template.tokenizer}' (lit-encoders export --tokenizer=... makes a folder of it)"
            )
        tokenizer.save_pretrained(output)
    stored = {name: dtype for name, dtype in types.items() if dtype.is_floating_point}
    if stored and (len(set(stored.values())) == 1 or any(d != template.tensors[n].dtype for n, d in stored.items())):
        # Of several types the one that holds them all, so that loading loses nothing.
        settings.pop("torch_dtype", None)
        settings["dtype"] = str(result_type(list(stored.values()))).removeprefix("torch.")
    (output / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _card(recipe: Mapping[str, Any]) -> str:
    lines = ["---", "library_name: transformers", "tags: [merge, lit_encoders]", "---", ""]
    lines += [f"# {recipe['operation']}", ""]
    lines += [f"- `{entry['source']}`, content {entry['digest'][:12]}" for entry in recipe["inputs"]]
    lines += [f"- {key}: {value}" for key, value in recipe.items() if key not in ("operation", "inputs", "versions")]
    return "\n".join(lines) + "\n"
