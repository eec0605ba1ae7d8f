"""Tiny models on disk, and what transformers and safetensors themselves say of what was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Content = dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, as the safetensors library reads them."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def content_of(folder: Path) -> Content:
    """Type, shape and bytes of all tensors of a folder: NaN equals itself, and -0.0 is not 0.0."""
    return {
        name: (tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors_of(folder).items()
    }


@pytest.fixture(scope="session")
def tensors() -> Callable[[Path], dict[str, Tensor]]:
    return tensors_of


@pytest.fixture(scope="session")
def content() -> Callable[[Path], Content]:
    return content_of


@pytest.fixture(scope="session")
def make_model(bert_folder: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Save a tiny model: of ``bert_folder``'s sizes unless settings say otherwise, with random norms and biases."""
    own = json.loads((bert_folder / "config.json").read_text())
    numbers = count()

    def make(
        seed: int = 1,
        dtype: torch.dtype = torch.float32,
        architecture: str = "BertForMaskedLM",
        shards: bool = False,
        with_tokenizer: bool = True,
        **settings: Any,
    ) -> Path:
        import transformers

        kind = getattr(transformers, architecture)
        torch.manual_seed(seed)
        model = kind(kind.config_class(**{**(own if architecture.startswith("Bert") else {}), **settings}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        folder = tmp_path_factory.mktemp("made") / f"model{next(numbers)}"
        model.to(dtype).save_pretrained(folder, max_shard_size="20KB" if shards else "5GB")
        if with_tokenizer:
            tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def base(make_model: Callable[..., Path]) -> Path:
    return make_model(seed=1)


@pytest.fixture(scope="session")
def tuned(make_model: Callable[..., Path]) -> Path:
    return make_model(seed=2)


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """Copy a model's folder with tensors changed, added, or (None) taken out."""
    numbers = count()

    def edit(folder: Path, changes: dict[str, Tensor | None], settings: dict[str, Any] | None = None) -> Path:
        copy = tmp_path / f"edited{next(numbers)}"
        copy.mkdir()
        for file in folder.iterdir():
            if not file.name.endswith((".safetensors", ".index.json")):
                (copy / file.name).write_bytes(file.read_bytes())
        kept = {name: tensor for name, tensor in {**tensors_of(folder), **changes}.items() if tensor is not None}
        save_file(kept, copy / "model.safetensors", metadata={"format": "pt"})
        if settings:
            config = json.loads((copy / "config.json").read_text())
            (copy / "config.json").write_text(json.dumps({**config, **settings}))
        return copy

    return edit


@pytest.fixture(scope="session")
def checkpoint(bert_folder: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run of one step from ``bert_folder`` keeps."""
    from lightning.pytorch import Trainer

    from lit_encoders import LitMLM, TextDataModule

    folder = tmp_path_factory.mktemp("run")
    trainer = Trainer(
        default_root_dir=folder, accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    data = TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.1)
    trainer.fit(LitMLM(str(bert_folder), learning_rate=1e-2), data)
    trainer.save_checkpoint(folder / "one.ckpt")
    return folder / "one.ckpt"


@pytest.fixture(scope="session")
def load() -> Callable[[Path], Any]:
    """Load a folder with transformers: nothing is missing, unexpected or of another shape; the tokenizer loads too."""

    def load_whole(folder: Path, with_tokenizer: bool = True) -> Any:
        import transformers

        config = json.loads((folder / "config.json").read_text())
        kind = getattr(transformers, config["architectures"][0])
        model, report = kind.from_pretrained(folder, output_loading_info=True)
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        if with_tokenizer:
            assert transformers.AutoTokenizer.from_pretrained(folder).mask_token == "[MASK]"
        return model.eval()

    return load_whole
