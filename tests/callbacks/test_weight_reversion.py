"""WeightReversion: a second export with ranges back at their start; the run itself is as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from safetensors.torch import load_file
from torch import Tensor

from lit_encoders import LitMLM, TextDataModule
from lit_encoders.callbacks import ExactResume, HFExport, RunSummary, WeightReversion
from lit_encoders.callbacks.weight_reversion import reverted

MakeTrainer = Callable[..., Trainer]
LAYER = "bert.encoder.layer."


@pytest.fixture
def data(text_file: Path) -> TextDataModule:
    return TextDataModule(str(text_file), sequence_length=48, slots=96, val_share=0.2)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.fixture
def fit(bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer) -> Callable[..., tuple[Trainer, LitMLM]]:
    def run(*callbacks: Any, steps: int = 3, ckpt: Path | None = None, **settings: Any) -> tuple[Trainer, LitMLM]:
        module = LitMLM(str(bert_folder), learning_rate=1e-2)
        settings.setdefault("enable_checkpointing", any(isinstance(c, ExactResume) for c in callbacks))
        trainer = make_trainer(max_steps=steps, callbacks=list(callbacks), **settings)
        trainer.fit(module, data, ckpt_path=ckpt)
        return trainer, module

    return run


def check_export(root: Path, base: Path, is_reverted: Callable[[str], bool]) -> None:
    """Byte for byte the base's in the range, and the export's elsewhere."""
    back, trained, start = (
        load_file(p / "model.safetensors") for p in (root / "export-reverted", root / "export", base)
    )
    assert set(back) == set(trained) == set(start)
    for name, tensor in back.items():
        assert same_bits(tensor, (start if is_reverted(name) else trained)[name]), name
        if name.startswith(LAYER):
            assert not torch.equal(trained[name], start[name]), name


@pytest.mark.parametrize("order", list(permutations(range(4)))[::5])
def test_a_second_export_wherever_it_stands(
    fit: Any, bert_folder: Path, tmp_path: Path, order: tuple[int, ...]
) -> None:
    made = [WeightReversion("1:3"), HFExport(), ExactResume(), RunSummary()]
    _, module = fit(*(made[number] for number in order))
    check_export(tmp_path, bert_folder, lambda name: name.startswith((f"{LAYER}1.", f"{LAYER}2.")))
    trained = load_file(tmp_path / "export" / "model.safetensors")
    last = torch.load(tmp_path / "checkpoints" / "step-00000003.ckpt", weights_only=True)["state_dict"]
    for name, tensor in trained.items():
        assert same_bits(last[f"backbone.model.{name}"], tensor), name
        assert same_bits(module.state_dict()[f"backbone.model.{name}"], tensor), name
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["export"] == str(tmp_path / "export")
    assert summary["reverted"]["export"] == str(tmp_path / "export-reverted")


def test_what_the_summary_says_is_so(
    fit: Any, bert_folder: Path, data: TextDataModule, make_trainer: MakeTrainer, tmp_path: Path, capsys: Any
) -> None:
    """Drift before and after by range; losses of both, as a validation of the two folders measures them."""
    fit(
        WeightReversion(["0:1", "2:3,embeddings"], base=str(bert_folder)), HFExport(), RunSummary(), limit_val_batches=3
    )
    report = json.loads((tmp_path / "summary.json").read_text())["reverted"]
    trained, start = (load_file(folder / "model.safetensors") for folder in (tmp_path / "export", bert_folder))
    prefixes = {"0:1": f"{LAYER}0.", "2:3": f"{LAYER}2.", "embeddings": "bert.embeddings."}
    assert set(report["drift"]) == set(prefixes)
    for text, prefix in prefixes.items():
        a, b = (torch.cat([x[n].double().flatten() for n in start if n.startswith(prefix)]) for x in (start, trained))
        before = report["drift"][text]["before"]
        assert before["relative_l2"] == pytest.approx(float((b - a).norm() / a.norm()), rel=1e-9)
        assert before["cosine"] == pytest.approx(float(torch.cosine_similarity(a, b, dim=0)), rel=1e-9)
        assert before["rms"] == pytest.approx(float((b - a).square().mean().sqrt()), rel=1e-9)
        assert report["drift"][text]["after"] == {"relative_l2": 0.0, "cosine": 1.0, "rms": 0.0}
    for which, folder in (("reverted", "export-reverted"), ("trained", "export")):
        trainer = make_trainer(limit_val_batches=3)
        (measured,) = trainer.validate(LitMLM(str(tmp_path / folder)), data, verbose=False)
        assert set(report["losses"]) == {"val/mlm_loss", "val/clm_loss"}
        for name, losses in report["losses"].items():
            assert losses[which] == pytest.approx(measured[name], abs=1e-6), (which, name)
        card = (tmp_path / folder / "README.md").read_text()
        assert f"`val/mlm_loss`: {measured['val/mlm_loss']:.4f} nats" in card or which == "trained"
        assert ("Set back to" in card) == (which == "reverted")
    losses = report["losses"]["val/mlm_loss"]
    assert abs(losses["trained"] - losses["reverted"]) > 1e-3
    printed = capsys.readouterr().out
    assert f'from_pretrained("{tmp_path / "export-reverted"}")' in printed
    assert f"{losses['reverted']:.3f}" in printed


def test_a_run_that_never_validated(fit: Any, tmp_path: Path) -> None:
    fit(WeightReversion("0:1"), RunSummary(), steps=1, check_val_every_n_epoch=50)
    report = json.loads((tmp_path / "summary.json").read_text())["reverted"]
    assert report["losses"]["val/mlm_loss"]["reverted"] > 0


@pytest.mark.parametrize("part", ["attention", "mlp"])
def test_parts_of_layers(fit: Any, bert_folder: Path, tmp_path: Path, part: Any) -> None:
    fit(WeightReversion("0:2", part=part), HFExport(), limit_val_batches=0)

    def is_reverted(name: str) -> bool:
        # BERT's norms stand inside the part that they follow.
        return name.startswith((f"{LAYER}0.", f"{LAYER}1.")) and (".attention." in name) == (part == "attention")

    check_export(tmp_path, bert_folder, is_reverted)
    report = json.loads((tmp_path / "export-reverted" / "config.json").read_text())
    assert report["architectures"] == ["BertForMaskedLM"]


def test_a_resume_is_unaffected(fit: Any, bert_folder: Path, tmp_path: Path) -> None:
    """The checkpoint of a run's end goes on as one of a run without it, and is set back to the first run's start."""
    fit(WeightReversion("0:2"), HFExport(), ExactResume(), steps=2)
    first = tmp_path / "checkpoints" / "step-00000002.ckpt"
    kept = first.rename(tmp_path / "with.ckpt")
    fit(ExactResume(), steps=2)
    ours, theirs = (torch.load(p, weights_only=True) for p in (kept, first))
    for name, tensor in theirs["state_dict"].items():
        assert same_bits(ours["state_dict"][name], tensor), name
    for number, moments in theirs["optimizer_states"][0]["state"].items():
        mine = ours["optimizer_states"][0]["state"][number]
        assert all(torch.equal(mine[key], moments[key]) for key in moments)
    _, whole = fit(steps=4)
    _, resumed = fit(WeightReversion("0:2"), HFExport(), ckpt=kept, steps=4)
    for name, tensor in whole.state_dict().items():
        assert same_bits(resumed.state_dict()[name], tensor), name
    check_export(tmp_path, bert_folder, lambda name: name.startswith((f"{LAYER}0.", f"{LAYER}1.")))


def test_another_base_on_a_resume_is_refused(fit: Any, bert_folder: Path, tmp_path: Path) -> None:
    fit(WeightReversion("0:2", base=str(bert_folder)), HFExport(), ExactResume(), steps=1)
    last = tmp_path / "checkpoints" / "step-00000001.ckpt"
    with pytest.raises(ValueError, match=r"WeightReversion.base must be the checkpoint's \(content"):
        fit(WeightReversion("0:2", base=str(tmp_path / "export")), ckpt=last, steps=2)


def test_a_module_without_a_hugging_face_model(run: Any, stack: Any, tmp_path: Path) -> None:
    module = stack()
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    run(module, [1.0, 1.0], WeightReversion("0:2"), RunSummary())
    written = load_file(tmp_path / "export-reverted" / "model.safetensors")
    assert set(written) == set(module.state_dict())
    for name, tensor in written.items():
        back = name.startswith(("blocks.0", "blocks.1"))
        assert same_bits(tensor, start[name] if back else module.state_dict()[name]), name
    report = json.loads((tmp_path / "summary.json").read_text())["reverted"]
    assert report["losses"] == {}
    assert report["drift"]["0:2"]["before"]["rms"] > 0


def test_a_hugging_face_model_in_a_plain_module(bert_folder: Path, run: Any, tmp_path: Path) -> None:
    from lightning.pytorch import LightningModule
    from transformers import AutoModelForMaskedLM

    class Plain(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = AutoModelForMaskedLM.from_pretrained(bert_folder)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            ids = torch.tensor([[2, 7, 8, 3]])
            return self.network(ids, labels=ids).loss  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Plain()
    run(module, [1.0, 1.0], WeightReversion("-1:", base=str(bert_folder)))
    model, report = AutoModelForMaskedLM.from_pretrained(tmp_path / "export-reverted", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    start = load_file(bert_folder / "model.safetensors")
    for name, tensor in model.state_dict().items():
        if name in start:
            trained = module.network.state_dict()[name]
            assert same_bits(tensor, start[name] if name.startswith(f"{LAYER}2.") else trained), name


def test_an_error_inside_leaves_the_trained_weights(stack: Any) -> None:
    module = stack()
    parameters = dict(module.named_parameters())
    trained = {name: p.detach().clone() for name, p in parameters.items()}

    def fail() -> None:
        with reverted(module, parameters, {n: 0 * w for n, w in trained.items()}):
            assert not module.head.weight.any()
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert all(same_bits(parameters[name].data, weight) for name, weight in trained.items())


def test_fast_dev_run_writes_nothing(run: Any, stack: Any, tmp_path: Path) -> None:
    run(stack(), [1.0], WeightReversion("0:1"), fast_dev_run=1)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be(run: Any, stack: Any) -> None:
    with pytest.raises(ValueError, match="part must be one of all, attention, mlp, got 'heads'"):
        WeightReversion("0:1", part="heads")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must lie within the model's 3 layers"):
        run(stack(), [1.0], WeightReversion("0:9"))
    with pytest.raises(ValueError, match=r"WeightReversion must stand once .*, got 2"):
        run(stack(), [1.0], WeightReversion("0:1"), WeightReversion("1:2"))
    with pytest.raises(ValueError, match=r"^WeightReversion.base must be a Hugging Face folder.* \(no such folder\)$"):
        run(stack(), [1.0], WeightReversion("0:1", base="/no/such/folder"))
