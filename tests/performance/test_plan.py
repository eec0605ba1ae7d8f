"""`plan` says what a run will take: against arithmetic by hand, and against what `fit` says of the same mistakes."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_encoders.data.sources import TextSource
from lit_encoders.performance.flops import attended_pairs

MODERNBERT_BASE = {
    "model_type": "modernbert",
    "num_hidden_layers": 22,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_attention_heads": 12,
    "vocab_size": 50368,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
    "max_position_embeddings": 8192,
}
GEMMA_4B = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
}
TINY = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
TINY |= {"intermediate_size": 64, "vocab_size": 95, "max_position_embeddings": 128, "pad_token_id": 0}


@pytest.fixture
def write(tmp_path: Path, text_file: Path, tokenizer_folder: Path) -> Any:
    """Write a configuration; give its path."""

    def config(backbone: dict[str, Any], schedule: dict[str, Any] | None = None, **settings: Any) -> Path:
        kind = settings.pop("kind", "LitMLM")
        model = {"backbone": backbone, "tokenizer": str(tokenizer_folder), **settings.pop("model", {})}
        whole = {
            "model": {"class_path": f"lit_encoders.{kind}", "init_args": model},
            "data": {"train": str(text_file), "val_share": 0.2, "sequence_length": 48, "slots": 96},
            "trainer": {"accelerator": "cpu"},
        }
        if schedule is not None:
            whole["schedule"] = {"class_path": "lit_encoders.callbacks.CLMDetour", "init_args": schedule}
        for key, value in settings.items():
            whole[key] = {**whole.get(key, {}), **value}
        path = tmp_path / "tiny.yaml"
        path.write_text(yaml.safe_dump(whole))
        return path

    return config


@pytest.fixture
def tiny(write: Any) -> Path:
    return write(TINY, {"steps": 100, "decay_share": 0.5})  # type: ignore[no-any-return]


def row(out: str, name: str) -> list[str]:
    """The cells of a table's row."""
    return re.split(r"\s{2,}", next(line for line in out.splitlines() if line.startswith(f"{name} ")).strip())


def bytes_of(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]


def test_modernbert_base_by_hand(run: Any, write: Any) -> None:
    """50B tokens of detour: steps, tokens, FLOPs, hours and bytes from the published sizes alone."""
    data = {"sequence_length": 8192, "slots": 32768}
    config = write(MODERNBERT_BASE, {"tokens": "50B"}, data=data, trainer={"accumulate_grad_batches": 12})
    code, out, err = run("plan", "--config", config, "--devices", 8, "--tokens-per-second", "400K")
    assert code == 0, err
    step = 32768 * 12 * 8
    layer = 4 * 768 * 768 + 3 * 768 * 1152
    head = 768 * 768 + 768 * 50368
    for name, budget, causal, share in (("detour", 50e9, True, 1.0), ("decay", 5e9, False, 0.15)):
        steps = math.ceil(budget / step)
        # Layers 0, 3, ..., 21 see everything, the others 64 tokens to each side.
        pairs = 8 * attended_pairs(8192, None, causal) + 14 * attended_pairs(8192, 65, causal)
        per_token = 6 * 22 * layer + 12 * 768 * pairs / 8192 + share * 6 * head
        cells = row(out, name)
        assert cells[2:4] == [f"{steps:,}", f"{steps * step:,}"]
        assert float(cells[4]) == pytest.approx(steps * step * per_token, rel=1e-3)
        assert float(cells[5]) == pytest.approx(steps * step / 400_000 / 3600, abs=0.06)
    weights = 50368 * 768 + 22 * layer + 768 * 768 + 50368 + (1 + 21 + 22 + 1 + 1) * 768
    assert f"22 layers, {weights:,} weights in float32" in out
    assert [bytes_of(cell) for cell in row(out, "total")[1:]] == pytest.approx(
        [16 * weights, 16 * weights, 2 * weights], rel=0.05
    )
    assert bytes_of(row(out, "checkpoint")[1]) == pytest.approx(12 * weights, rel=0.03)
    assert "step   3,145,728 tokens: 32,768 slots x 12 micro-batches x 8 ranks" in out


def test_gemma_4b_for_a_trillion_tokens_is_a_matter_of_seconds(run: Any, write: Any) -> None:
    config = write(GEMMA_4B, kind="LitCLM", data={"sequence_length": 2048, "slots": 8192})
    whole = yaml.safe_load(config.read_text())
    phases = [{"name": "clm", "objective": "clm", "share": 1.0, "warmup_share": 0.01}]
    init_args = {"tokens": "1T", "phases": phases}
    whole["schedule"] = {"class_path": "lit_encoders.callbacks.ObjectiveSchedule", "init_args": init_args}
    whole["trainer"]["callbacks+"] = [
        {"class_path": "lit_encoders.callbacks.LayerFreezing", "init_args": {"layers": "9:28"}},
        {"class_path": "lit_encoders.callbacks.L2SP", "init_args": {"strength": {"0:9": 0.05}}},
    ]
    config.write_text(yaml.safe_dump(whole))
    before = time.process_time()
    code, out, err = run("plan", "--config", config, "--devices", 64)
    assert time.process_time() - before < 10
    assert code == 0, err
    assert "gemma3_text, 34 layers, 3,880,263,168 weights in float32, 1,793," in out
    steps = math.ceil(1e12 / (8192 * 64))
    assert row(out, "clm")[2:4] == [f"{steps:,}", f"{steps * 8192 * 64:,}"]
    assert bytes_of(row(out, "weights")[3]) == pytest.approx(4 * 3_880_263_168 / 64, rel=0.01)
    # Nine of 34 layers are anchored.
    assert bytes_of(row(out, "anchors")[1]) == pytest.approx(9 * 4 * (1_793_000_000 / 19), rel=0.01)


def test_nothing_is_read_or_made(run: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the text was read")

    for name in ("documents", "digest"):
        monkeypatch.setattr(TextSource, name, refuse)
    code, out, err = run("plan", "--config", tiny)
    assert code == 0, err
    assert row(out, "detour")[2] == "100"
    assert row(out, "decay")[1:4] == ["mlm, mask ratio 0.15", "50", "4,800"]
    assert "would go wrong" not in out
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("flags", [("--devices=4",), ("--trainer.devices=2", "--trainer.num_nodes=2")])
def test_ranks(run: Any, tiny: Path, flags: tuple[str, ...]) -> None:
    """Ranks of a machine that has none of them, under a strategy that would need them."""
    code, out, err = run("plan", "--config", tiny, *flags, "--trainer.strategy=fsdp2", "--trainer.accelerator=gpu")
    assert code == 0, err
    assert "step   384 tokens: 96 slots x 1 micro-batches x 4 ranks" in out
    assert row(out, "on a device")[1:] == ["one device", "DDP, each of 4", "FSDP2, each of 4"]


def test_the_schedule_s_flags_are_those_of_fit(run: Any, tiny: Path) -> None:
    code, out, err = run("plan", "--config", tiny, "--schedule.steps=null", "--schedule.tokens=1e6")
    assert code == 0, err
    assert row(out, "detour")[2] == f"{math.ceil(1e6 / 96):,}"


# What fit refuses, plan says in the same words.
REFUSED = [
    ["--data.sequence_length=200", "--data.slots=200"],
    ["--data.sequence_length=2", "--data.slots=96"],
    ["--data.train=none.txt"],
    ["--data.train={a: TEXT, b: TEXT}", "--trainer.max_epochs=2", "--schedule=null"],
    ["--trainer.max_steps=7"],
    ["--schedule.steps=null", "--schedule.tokens=9600", "--schedule.warmup_tokens=50_000"],
    ['--model.no_decay=["5:9"]'],
    ["--trainer.precision=bf16-true"],
    ["--model.streams=[{name: all, mask_ratio: 0.3, share: 1.0}]"],
    ["--model.lr_scheduler=torch.optim.lr_scheduler.ConstantLR"],
    ["--trainer.callbacks+=lit_encoders.callbacks.LayerFreezing", "--trainer.callbacks.layers=5:9"],
    [
        "--trainer.callbacks+=lit_encoders.callbacks.LayerFreezing",
        "--trainer.callbacks.layers=0:1",
        "--trainer.callbacks.phases=[none]",
    ],
    ["--trainer.callbacks+=lit_encoders.callbacks.HFExport", "--trainer.callbacks.at_phases=[none]"],
]


@pytest.mark.parametrize("flags", REFUSED, ids=lambda flags: flags[-1])
def test_what_fit_refuses(run: Any, tiny: Path, text_file: Path, flags: list[str]) -> None:
    flags = [flag.replace("TEXT", str(text_file)) for flag in flags]
    code, _, err = run("fit", "--config", tiny, *flags)
    assert code == 2
    refused = err.splitlines()[-1].removeprefix("lit-encoders: error: ")
    code, out, err = run("plan", "--config", tiny, *flags)
    assert code == 2
    assert out.split("would go wrong\n")[1] == f"- {refused}\n"
    assert err.splitlines()[-1] == "lit-encoders: error: the run would go wrong in 1 way (listed above)"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            ["--schedule.steps=null", "--schedule.tokens=90"],
            "schedule.tokens must be at least one step of 96 tokens, got 90",
        ),
        (
            ["--schedule.steps=null", "--schedule.tokens=100"],
            "schedule phase 'decay' must be at least one step of 96 tokens, got 50 tokens",
        ),
        (
            ["--schedule.steps=1"],
            "schedule phase 'decay' must be at least one step of 96 tokens, got 48 tokens",
        ),
        (
            ["--trainer.devices=2", "--trainer.accumulate_grad_batches=2", "--devices=3"],
            "trainer.accumulate_grad_batches must give the 3 ranks as many packs each to keep the step of "
            "trainer.devices, got 2 x 2 packs",
        ),
        (
            [
                "--trainer.strategy=ModelParallelStrategy",
                "--trainer.strategy.data_parallel_size=4",
                "--trainer.strategy.tensor_parallel_size=1",
                "--devices=8",
            ],
            "trainer.strategy.data_parallel_size x tensor_parallel_size must be the 8 ranks, got 4 x 1",
        ),
        (
            ["--trainer.callbacks+=lit_encoders.callbacks.L2SP", '--trainer.callbacks.strength={"7:9": 0.1}'],
            "layers must lie within the model's 3 layers (0:3), got '7:9'",
        ),
        (["--schedule=null"], "schedule or trainer.max_steps must end the run, got neither"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_only_a_plan_says(run: Any, tiny: Path, flags: list[str], line: str) -> None:
    code, out, _ = run("plan", "--config", tiny, *flags)
    assert code == 2
    assert out.split("would go wrong\n")[1] == f"- {line}\n"


def test_several_mistakes_at_once(run: Any, tiny: Path) -> None:
    """A plan does not stop at the first, and still says what it can."""
    flags = ["--data.train=none.txt", "--schedule.warmup_steps=null", "--schedule.warmup_tokens=96_000"]
    flags += ["--trainer.max_steps=7"]
    code, out, err = run("plan", "--config", tiny, *flags)
    assert code == 2
    assert len(out.split("would go wrong\n")[1].splitlines()) == 3
    assert err.splitlines()[-1].endswith("in 3 ways (listed above)")
    assert row(out, "detour")[2] == "100"


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--devices=0", "devices must be at least 1, got 0"),
        ("--tokens-per-second=0", "tokens_per_second must be above 0, got 0"),
        ("--tokens-per-second=fast", "tokens_per_second must be a number of tokens such as 10e9 or 10B, got 'fast'"),
        ("--model.mask_ratio=2", "model.mask_ratio must be in (0, 1], got 2"),
        ("--schedule.warmup_steps=150", "schedule phase 'detour': warm-up must fit in the phase's 100 steps, got 150"),
    ],
)
def test_settings_that_leave_nothing_to_plan(run: Any, tiny: Path, flag: str, line: str) -> None:
    """What a constructor refuses is the error of the command, as with `fit`."""
    code, out, err = run("plan", "--config", tiny, flag)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"lit-encoders: error: {line}")


def test_another_step_than_the_configuration_s(run: Any, tiny: Path) -> None:
    flags = ["--trainer.devices=2", "--trainer.accumulate_grad_batches=8", "--devices=4"]
    code, out, err = run("plan", "--config", tiny, *flags)
    assert code == 0, err
    assert "a step has 2 times the tokens" in out
    assert "trainer.accumulate_grad_batches 4 would keep it" in " ".join(out.split())


def test_a_run_of_steps_and_one_of_epochs(run: Any, write: Any) -> None:
    config = write(TINY)
    code, out, err = run("plan", "--config", config, "--trainer.max_steps=11")
    assert code == 0, err
    assert row(out, "run")[1:4] == ["mlm, mask ratio 0.15", "11", "1,056"]
    code, out, err = run("plan", "--config", config, "--trainer.max_epochs=3")
    assert code == 0, err
    assert row(out, "each step")[2:4] == ["1", "96"]
    assert "trainer.max_epochs 3: how many steps these are depends on the text" in out
    code, out, err = run("plan", "--config", config, "--trainer.max_time=00:01:00:00")
    assert code == 0, err
    assert row(out, "each step")[2:4] == ["1", "96"]


def flops(out: str, name: str) -> float:
    return float(row(out, name)[4])


def test_what_freezing_saves_is_seen(run: Any, tiny: Path) -> None:
    """In phases gradients are computed and dropped; for the whole run they are not computed."""
    freeze = ["--trainer.callbacks+=lit_encoders.callbacks.LayerFreezing", "--trainer.callbacks.layers=embeddings,0:2"]
    _, all_train, _ = run("plan", "--config", tiny)
    _, whole_run, _ = run("plan", "--config", tiny, *freeze)
    _, in_phase, _ = run("plan", "--config", tiny, *freeze, "--trainer.callbacks.phases=[detour]")
    layer = 4 * 32 * 32 + 2 * 32 * 64
    saved = 2 * 4 * layer + 2 * 8 * 32 * attended_pairs(48, causal=True) / 48 + 2 * 32 * 95
    assert flops(all_train, "detour") - flops(whole_run, "detour") == pytest.approx(9600 * saved, rel=0.01)
    assert flops(in_phase, "detour") == flops(all_train, "detour")
    assert "of them frozen for the whole run" in whole_run
    assert bytes_of(row(in_phase, "gradients")[1]) > bytes_of(row(whole_run, "gradients")[1])


def test_a_teacher_and_streams_with_heads(run: Any, write: Any) -> None:
    streams = [
        {"name": "low", "mask_ratio": 0.1, "share": 0.8, "head": "low", "distill": True},
        {"name": "high", "mask_ratio": 0.5, "share": 0.2, "head": "high"},
    ]
    model = {"teacher": {**TINY, "num_hidden_layers": 6}, "streams": streams, "teacher_dtype": "bfloat16"}
    schedule = {"steps": 100, "decay_mask_ratio": None, "decay_share": 0.5}
    code, out, err = run("plan", "--config", write(TINY, schedule, model=model, kind="LitKD"), "--devices=2")
    assert code == 0, err
    layer = 4 * 32 * 32 + 2 * 32 * 64
    head, pairs = 32 * 32 + 32 * 95, attended_pairs(48) / 48
    student = 6 * 3 * layer + 12 * 3 * 32 * pairs + (0.8 * 0.1 + 0.2 * 0.5) * 6 * head
    teacher = 2 * 6 * layer + 4 * 6 * 32 * pairs + 0.8 * 0.1 * 2 * head
    assert flops(out, "decay") == pytest.approx(50 * 192 * (student + teacher), rel=1e-3)
    assert row(out, "decay")[1] == "mlm, mask ratio low 0.1, high 0.5"
    weights, teachers = (bytes_of(row(out, part)[1]) for part in ("weights", "teacher"))
    base = (95 + 128 + 2 + 2) * 32 + 3 * (layer + 9 * 32 + 64) + 32 * 32 + 3 * 32 + 95
    assert weights == pytest.approx(4 * (base + 32 * 32 + 3 * 32 + 95 + 95 * 32), rel=0.01)
    assert teachers == pytest.approx(2 * (base + 3 * (layer + 9 * 32 + 64)), rel=0.01)
    # Replicated under FSDP2, unless it is asked to be sharded.
    assert row(out, "teacher")[1] == row(out, "teacher")[3]


def test_a_clm_head_and_another_optimizer(run: Any, tiny: Path) -> None:
    flags = ["--model.clm_head=copy", "--model.optimizer=torch.optim.SGD", "--model.optimizer.momentum=0.9"]
    code, out, err = run("plan", "--config", tiny, *flags)
    assert code == 0, err
    assert row(out, "moments")[1] == row(out, "gradients")[1]
    assert "moments: 1 per weight" in out
    _, without, _ = run("plan", "--config", tiny)
    more = bytes_of(row(out, "weights")[1]) - bytes_of(row(without, "weights")[1])
    assert more == pytest.approx(4 * (32 * 32 + 3 * 32 + 95), rel=0.1)
    assert row(out, "export")[1] == row(without, "export")[1]


def test_anchors_that_are_kept_elsewhere(run: Any, tiny: Path) -> None:
    flags = ["--trainer.callbacks+=lit_encoders.callbacks.L2SP", "--trainer.callbacks.strength=0.1"]
    code, out, err = run("plan", "--config", tiny, *flags)
    assert code == 0, err
    assert row(out, "anchors")[1] == row(out, "weights")[1]
    # Two callbacks with the same start share one copy.
    both = [*flags, "--trainer.callbacks+=lit_encoders.callbacks.WeightDrift"]
    assert row(run("plan", "--config", tiny, *both)[1], "anchors")[1] == row(out, "weights")[1]
    code, out, err = run("plan", "--config", tiny, *flags, "--trainer.callbacks.device=cpu")
    assert "anchors of" in out
    assert "\nanchors " not in out
