"""Hugging Face folders out of live models and of checkpoints, whole or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lit_encoders.weights.checkpoint import open_weights
from lit_encoders.weights.combine import combine, new_folder, write_companions
from lit_encoders.weights.sharded import is_sharded, read_meta, read_sharded

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ExportDtype = Literal["float32", "bfloat16", "float16"]

# Names that wrappers put before those of the model: this library, Lightning projects, DDP, torch.compile.
WRAPPERS = ("backbone", "model", "module", "_orig_mod", "_forward_module")


def export_folder(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    card: str | None = None,
    dtype: ExportDtype | None = None,
    state: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write a model, its tokenizer and a model card as a folder that ``from_pretrained`` loads.

    Args:
        model: tied weights are stored once, the full LM head always.
        tokenizer: of the model.
        folder: where; made if needed; files of the same names are replaced.
        card: text of ``README.md``.
        dtype: of the stored weights; None keeps the model's.
        state: the model's weights, where its own are sharded; None takes those.

    Returns:
        The folder.
    """
    with _written_whole(folder) as beside:
        state = model.state_dict() if state is None else state
        model.save_pretrained(beside, state_dict=dict(state) if dtype is None else _cast(state, getattr(torch, dtype)))
        if dtype is not None:
            # transformers writes the live model's type, which would be wrong for what is stored.
            config = json.loads((beside / "config.json").read_text())
            (beside / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n")
        tokenizer.save_pretrained(beside)
        if card is not None:
            (beside / "README.md").write_text(card, encoding="utf-8")
    return folder


def export_state(state: Mapping[str, Tensor], folder: Path, model: PreTrainedModel | None = None) -> Path:
    """Write weights without a tokenizer: a Hugging Face model's as its folder, others' as ``model.safetensors``.

    Args:
        state: whole tensors by name; those that share memory are stored once.
        folder: where; made if needed; files of the same names are replaced.
        model: the Hugging Face model that the state is of, if it is one's.

    Returns:
        The folder.
    """
    from safetensors.torch import save_file

    with _written_whole(folder) as beside:
        if model is not None:
            model.save_pretrained(beside, state_dict=dict(state))
        else:
            once = {(tensor.data_ptr(), tensor.shape): name for name, tensor in reversed(list(state.items()))}
            kept = {name: state[name].contiguous() for name in once.values()}
            save_file(kept, beside / "model.safetensors", metadata={"format": "pt"})
    return folder


@contextmanager
def _written_whole(folder: Path) -> Iterator[Path]:
    """A folder beside; its files are moved in when all are there, so that no half-written model has its name."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=".export-", dir=folder))
    try:
        yield beside
        # The configuration comes last: a folder without it is no model.
        for file in sorted(beside.iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _cast(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Cast floating tensors; those that share memory (tied weights) share it afterwards too, and are stored once."""
    done: dict[tuple[int, torch.Size], Tensor] = {}
    for tensor in state.values():
        if tensor.is_floating_point():
            done.setdefault((tensor.data_ptr(), tensor.shape), tensor.to(dtype))
    return {name: done.get((tensor.data_ptr(), tensor.shape), tensor) for name, tensor in state.items()}


def model_card(
    base: str,
    data: Iterable[str],
    phases: Iterable[Mapping[str, Any]],
    tokens: int,
    losses: Mapping[str, float],
) -> str:
    """Write down where a model comes from, as a Hugging Face model card.

    Args:
        base: the model that training began with.
        data: names of the training files.
        phases: of each phase name, objective and steps.
        tokens: real tokens trained on.
        losses: held-out figures by name, nats per target.
    """
    lines = ["---", "library_name: transformers"]
    if "/" in base and not base.startswith((".", "/")):
        lines.append(f"base_model: {base}")
    lines += ["tags: [continued-pretraining, lit_encoders]", "---", "", "# Continued pretraining with lit_encoders", ""]
    lines += [f"- Base model: {base}", f"- Data: {', '.join(data)}", f"- Tokens trained on: {tokens:,}"]
    lines += [f"- Phase `{p['name']}`: {p['objective']}, {p['steps']:,} optimizer steps" for p in phases]
    lines += [f"- Held out, `{name}`: {value:.4f} nats per target" for name, value in losses.items()]
    return "\n".join(lines) + "\n"


def strip_wrappers(state: Mapping[str, Tensor], expected: Iterable[str]) -> dict[str, Tensor]:
    """Take the names of wrappers off a state, so that it fits a model.

    Args:
        state: tensors under names such as ``backbone.model.bert...`` or ``module._orig_mod.bert...``.
        expected: the model's own names.

    Returns:
        The tensors under the expected names.

    Raises:
        ValueError: names are missing, or begin with something that is no known wrapper.
    """
    expected = set(expected)
    wrapper = re.compile(rf"^(?:{'|'.join(WRAPPERS)})\.")
    found: dict[str, Tensor] = {}
    foreign: list[str] = []
    for name, tensor in state.items():
        # A model's own names may begin like a wrapper's ("model."), so take off one at a time and look.
        inner = name.replace("_orig_mod.", "")
        while inner not in expected and wrapper.match(inner):
            inner = wrapper.sub("", inner, count=1)
        if inner in expected:
            found[inner] = tensor
        else:
            foreign.append(name)
    missing = sorted(expected - set(found))
    if missing or foreign:
        names = ", ".join([*missing, *foreign][:10])
        raise ValueError(
            f"checkpoint must hold the model's tensors under its names or those of {', '.join(WRAPPERS)}: "
            f"{len(missing)} missing, {len(foreign)} unknown ({names})"
        )
    return found


def export_checkpoint(
    checkpoint: Path,
    output: Path,
    tokenizer: str | None = None,
    dtype: ExportDtype | None = None,
    head: str | None = None,
) -> Path:
    """Turn a training checkpoint into a Hugging Face folder; the folder that training began from is not needed.

    Args:
        checkpoint: a file that a run kept, such as ``runs/quickstart/checkpoints/decay.ckpt``, or the folder that a
            sharded one did; that one is never held whole in memory, unless ``dtype`` or ``head`` are given.
        output: folder to make.
        tokenizer: folder or hub name, where the one that the run used is gone.
        dtype: of the stored weights; None keeps the run's.
        head: name of the LM head to export with; None is the model's own, which with several is the distilled one's.

    Raises:
        ValueError: no such file or head, no checkpoint of this library, names that do not fit, or the output exists.
    """
    from transformers import AutoConfig

    from lit_encoders.models.backbone import Backbone, load_language_model
    from lit_encoders.models.vocabulary import load_tokenizer

    if not checkpoint.exists():
        raise ValueError(f"checkpoint must be a file that exists, got '{checkpoint}'")
    if not (zipfile.is_zipfile(checkpoint) or is_sharded(checkpoint)):
        raise ValueError(f"checkpoint must be readable as a checkpoint of a run, got '{checkpoint}'")
    if output.exists():
        raise ValueError(f"output must be a folder that does not exist yet, got '{output}'")
    if is_sharded(checkpoint) and head is None and dtype is None:
        return _export_streamed(checkpoint, output, tokenizer)
    try:
        saved = _read_whole(checkpoint)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"checkpoint must be readable, got '{checkpoint}' ({reason:.120})") from error
    facts = saved.get("lit_encoders") if isinstance(saved, dict) else None
    if facts is None:
        raise ValueError(f"checkpoint must come from a LitEncoder, got '{checkpoint}'")
    settings = json.loads(facts["config"])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    first = next(value for value in saved["state_dict"].values() if value.is_floating_point())
    model = load_language_model(settings, config, first.dtype)
    state = saved["state_dict"]
    heads = {name.split(".")[2]: None for name in state if name.startswith("backbone.heads.")}
    own = facts.get("main_head")
    if head is not None and head not in [own, *heads]:
        known = ", ".join(name for name in [own, *heads] if name is not None) or "only the model's own"
        raise ValueError(f"head must be one that the run trained ({known}), got {head!r}")
    prefix = f"backbone.heads.{head}."
    further = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    if any(name.startswith("backbone.model.") for name in state):
        # Heads and parts that a run or a subclass added beside the model are no part of it.
        state = {name: value for name, value in state.items() if name.startswith("backbone.model.")}
    model.load_state_dict(strip_wrappers(state, model.state_dict()))
    if further:
        extra = Backbone(model).add_head("exported", own_decoder="weight" in further)
        extra.load_state_dict(further)
        extra.write_to(model)
    source = tokenizer or facts["tokenizer"]
    return export_folder(model, load_tokenizer(source, "tokenizer"), output, _card_of(facts), dtype)


def _card_of(facts: Mapping[str, Any]) -> str:
    return model_card(facts["base"], facts["data"], facts["phases"], facts["tokens"], facts["losses"])


def _read_whole(checkpoint: Path) -> Any:
    if not is_sharded(checkpoint):
        return torch.load(checkpoint, map_location="cpu", weights_only=True)
    state = {name: tensor.load() for name, tensor in read_sharded(checkpoint).items()}
    return {**read_meta(checkpoint), "state_dict": state}


def _export_streamed(checkpoint: Path, output: Path, tokenizer: str | None) -> Path:
    """Write the model's own tensors block by block."""
    weights = open_weights(str(checkpoint), "checkpoint")
    with new_folder(output) as folder:
        write_companions(folder, replace(weights, tokenizer=tokenizer or weights.tokenizer))
        combine([weights], {name: [(0, 1.0)] for name in weights.tensors}, folder / "model.safetensors")
        (folder / "README.md").write_text(_card_of(read_meta(checkpoint)["lit_encoders"]), encoding="utf-8")
    return output


def export_verb(
    checkpoint: Path,
    output: Path,
    tokenizer: str | None = None,
    dtype: ExportDtype | None = None,
    head: str | None = None,
) -> str:
    """`export_checkpoint` for the command line.

    Args:
        checkpoint: a file that a run kept, such as runs/quickstart/checkpoints/decay.ckpt.
        output: folder to make.
        tokenizer: folder or hub name, where the one that the run used is gone.
        dtype: of the stored weights; the run's if not given.
        head: name of the LM head to export with, where streams have several; the distilled one's if not given.
    """
    return load_lines(export_checkpoint(checkpoint, output, tokenizer, dtype, head))


def load_lines(folder: Path) -> str:
    """Say where a model lies, and the line that loads it.

    >>> print(load_lines(Path("runs/a/export")))
    Export: runs/a/export
    Load:   safetensors.torch.load_model(module, "runs/a/export/model.safetensors")
    """
    if not (folder / "config.json").is_file():  # The state of a module that is no Hugging Face model.
        return f'Export: {folder}\nLoad:   safetensors.torch.load_model(module, "{folder / "model.safetensors"}")'
    settings = json.loads((folder / "config.json").read_text())
    causal = any("Causal" in name or "LMHead" in name for name in settings.get("architectures") or [])
    kind = "AutoModelForCausalLM" if causal else "AutoModelForMaskedLM"
    if any(name.endswith("Model") and not causal for name in settings.get("architectures") or []):
        kind = "AutoModel"  # An encoder without an LM head.
    return f'Export: {folder}\nLoad:   transformers.{kind}.from_pretrained("{folder}")'
