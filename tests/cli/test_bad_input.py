"""Mistakes stop before training: exit code 2, one line with key, rule and value, nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Texts and folders that something is wrong with."""
    (tmp_path / "empty.txt").write_text("\n  \n")
    (tmp_path / "broken.jsonl").write_text('{"text": "w1 w2"}\n{"text": "w3"\n')
    (tmp_path / "column.jsonl").write_text('{"body": "w1 w2"}\n')
    (tmp_path / "number.jsonl").write_text('{"text": 7}\n')
    (tmp_path / "vit").mkdir()
    (tmp_path / "vit" / "config.json").write_text(json.dumps({"model_type": "vit"}))
    (tmp_path / "deberta").mkdir()
    (tmp_path / "deberta" / "config.json").write_text(json.dumps({"model_type": "deberta-v2"}))
    return tmp_path


CASES: dict[str, tuple[list[str], str]] = {
    "missing file": (
        ["--data.train={files}/none.txt"],
        "data.train must name files that exist, got '{files}/none.txt'",
    ),
    "unknown kind of file": (["--data.train={files}/vit/config.yaml"], "data.train must name files that exist"),
    "empty corpus": (
        ["--data.train={files}/empty.txt"],
        "data.train must hold at least one document that is not blank",
    ),
    "broken json line": (["--data.train={files}/broken.jsonl"], "line 2 of '{files}/broken.jsonl' must be JSON"),
    "missing column": (["--data.train={files}/column.jsonl"], "must have the column 'text'"),
    "not a text": (["--data.train={files}/number.jsonl"], "must be text or a list of token ids, got 7"),
    "unknown model": (["--model.backbone={files}/no-model"], "model.backbone must be a folder or hub name"),
    "not a language model": (["--model.backbone={files}/vit"], "must be a masked or causal LM, got model type 'vit'"),
    "no packing": (["--model.backbone={files}/deberta"], "whose documents can be packed"),
    "other vocabulary": (["--model.tokenizer={files}/tokenizer"], "model.tokenizer must have the model's vocabulary"),
    "positions": (["--data.sequence_length=129", "--data.slots=256"], "at most the model's 128 positions, got 129"),
    "slots": (["--data.slots=10"], "data.slots must be at least data.sequence_length (48), got 10"),
    "mask ratio of 0": (["--model.mask_ratio=0"], "model.mask_ratio must be in (0, 1], got 0.0"),
    "mask ratio above 1": (["--model.mask_ratio=1.01"], "model.mask_ratio must be in (0, 1], got 1.01"),
    "negative budget": (["--schedule.steps=-3"], "schedule.steps must be above 0, got -3"),
    "decay share": (["--schedule.decay_share=1"], "schedule.decay_share must be in [0, 1), got 1.0"),
    "unknown objective": (["--model.objective=rtd"], "model.objective must be one of 'mlm', 'clm', got 'rtd'"),
    "unknown detour": (["--schedule.detour=rtd"], "schedule.detour must be one of 'mlm', 'clm', got 'rtd'"),
    "scheduler beside a schedule": (
        ["--model.lr_scheduler=torch.optim.lr_scheduler.ConstantLR"],
        "model.lr_scheduler must be unset beside a schedule, which sets the rate",
    ),
    "optimizer beside the module's": (["--optimizer=AdamW"], "--optimizer"),
    "max_steps": (["--trainer.max_steps=50"], "equal the schedule's 4 steps, got 50"),
    "unknown option": (["--model.mask_ration=0.2"], "model.mask_ration is no option of LitMLM"),
    "unknown trainer option": (["--trainer.max_stps=3"], "--trainer.max_stps"),
    "wrong type": (["--data.slots=many"], "data.slots must be int, got 'many'"),
    "attention that is not there": (["--model.attention=varlen"], "model.attention: 'varlen' is not available"),
    "accumulation": (
        ["--trainer.accumulate_grad_batches=0"],
        "accumulate_grad_batches must be at least 1, got 0",
    ),
    "no accelerator": (["--trainer.accelerator=gpu"], "No supported gpu backend found"),
    "no checkpoint": (["--ckpt_path=last"], "ckpt_path must be a checkpoint that exists, got 'last'"),
    "learning rate": (["--model.learning_rate=.nan"], "model.learning_rate must be at least 0 and finite, got nan"),
    "precision of weights": (["--trainer.precision=bf16-true"], "trainer.precision must be 32-true, bf16-mixed or"),
    "nothing left to train": (["--data.val_share=0.9999"], "data.val_share must leave documents to train on"),
    "run folder that cannot be": (
        ["--trainer.default_root_dir=/proc/x"],
        "must be a folder that can be made",
    ),
    "cache that cannot be": (["--data.cache_dir=/proc/x"], "data.cache_dir must be a folder that can be made"),
    "budget without end": (["--schedule.tokens=.inf"], "schedule.tokens must be"),
    "no such config": (["--config=none.yaml"], "none.yaml"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_before_training(run: Any, recipe: Path, files: Path, bert_folder: Path, case: str) -> None:
    if "{files}/tokenizer" in CASES[case][0][0]:
        _other_tokenizer(bert_folder, files / "tokenizer")
    flags, message = ([text.format(files=files) for text in part] for part in (CASES[case][0], [CASES[case][1]]))
    code, out, err = run("fit", "--config", recipe, *flags)
    lines = [line for line in err.splitlines() if line.startswith("lit-encoders: error: ")]
    assert code == 2
    assert len(lines) == 1
    assert lines[0] == err.splitlines()[-1], "the error is the last thing said"
    assert message[0] in lines[0]
    assert "Traceback" not in err + out
    assert list(Path.cwd().iterdir()) == [], "nothing is left behind"


def _other_tokenizer(bert_folder: Path, folder: Path) -> None:
    """As many tokens as the model's, two of them under each other's ids."""
    folder.mkdir()
    rules = json.loads((bert_folder / "tokenizer.json").read_text())
    words = rules["model"]["vocab"]
    words["w1"], words["w2"] = words["w2"], words["w1"]
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    (folder / "tokenizer_config.json").write_text((bert_folder / "tokenizer_config.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fti"], "got 'fti'; fit?"),
        (
            ["export", "--checkpoint=none.ckpt", "--output=out"],
            "checkpoint must be a file that exists, got 'none.ckpt'",
        ),
        (["export", "--checkpoint=none.ckpt"], "output"),
    ],
)
def test_other_verbs(run: Any, arguments: list[str], message: str) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert err.startswith("lit-encoders: error: ")
    assert len(err.splitlines()) == 1
    assert message in err


def test_debug_shows_the_traceback(run: Any, recipe: Path) -> None:
    from lit_encoders.mistakes import UsageError

    with pytest.raises(UsageError) as caught:
        run("fit", "--config", recipe, "--model.mask_ratio=0", "--debug")
    assert isinstance(caught.value.__cause__, ValueError)
