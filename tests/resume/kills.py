"""A run that is killed again and again, beside the same run left alone: python kills.py FOLDER KILLS SEED SIGNAL DATA.

Prints what happened to each run as JSON. Each attempt is a fork of this process, so that nothing is imported anew, and
runs the very command that a user types.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

STEPS = 60
# Kinds of data: settings of the datamodule.
DATA: dict[str, dict[str, Any]] = {
    "map-0": {"num_workers": 0},
    "map-2": {"num_workers": 2},
    "stream-0": {"streaming": True},
    "stream-2": {"streaming": True, "num_workers": 2},
    "mixed-stream-0": {
        "streaming": True,
        "train": {"a": "train.txt", "b": "more.txt"},
        "weights": {"a": 0.7, "b": 0.3},
    },
    "mixed-0": {"train": {"a": "train.txt", "b": "more.txt"}, "weights": {"a": 0.7, "b": 0.3}},
}


def make_model(folder: Path) -> Path:
    """A tiny BERT with dropout and its tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {token: number for number, token in enumerate([*specials, *(f"w{n}" for n in range(90))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(**sizes, vocab_size=len(vocabulary), max_position_embeddings=64, pad_token_id=0)
    BertForMaskedLM(config).save_pretrained(folder)
    return folder


def make_text(path: Path, documents: int, seed: int = 0) -> Path:
    """One document a line."""
    draw = random.Random(seed)
    lines = [" ".join(f"w{draw.randrange(90)}" for _ in range(draw.randint(1, 30))) for _ in range(documents)]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_config(folder: Path, data: str) -> Path:
    """CLM and MLM, a freeze window across the switch, an anchor, accumulation, validations between the phases."""
    model = make_model(folder / "model")
    make_text(folder / "more.txt", 30, seed=2)
    callbacks = [
        {"class_path": "lit_encoders.callbacks.LayerFreezing", "init_args": {"layers": "0:1", "steps": "40:55"}},
        {"class_path": "lit_encoders.callbacks.L2SP", "init_args": {"strength": 0.01}},
        {"class_path": "lit_encoders.callbacks.HFExport"},
        {"class_path": "lit_encoders.callbacks.RunSummary"},
        {"class_path": "lit_encoders.callbacks.ExactResume", "init_args": {"every_n_steps": 3}},
    ]
    settings = {
        "model": {
            "class_path": "lit_encoders.LitMLM",
            "init_args": {"backbone": str(model), "learning_rate": 1e-3},
        },
        "data": {
            "train": str(make_text(folder / "train.txt", 120)),
            "val": str(make_text(folder / "val.txt", 10, seed=1)),
            "sequence_length": 32,
            "slots": 64,
            "cache_dir": str(folder / "cache"),
            **DATA[data],
        },
        "schedule": {
            "class_path": "lit_encoders.callbacks.CLMDetour",
            "init_args": {"steps": 50, "decay_share": 0.2, "warmup_steps": 5},
        },
        "validate_every": 10,
        "trainer": {
            "accelerator": "cpu",
            "precision": "32-true",
            "accumulate_grad_batches": 2,
            "logger": False,
            "callbacks": callbacks,
        },
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(settings))
    return path


def start(arguments: list[str], log: Path) -> int:
    """Run a command in a fork; its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with log.open("a") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        from lit_encoders.cli import main

        code = main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def finish(child: int, due: Callable[[], bool] = lambda: False, number: int = signal.SIGKILL) -> int:
    """Wait for a process, and send it a signal once that is due; its exit code, negative for a signal."""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if due():
            os.kill(child, number)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(0.002)


def moment(root: Path, steps: int, kind: int, wait: float) -> Callable[[], bool]:
    """When to send the signal: some steps further on, after a wait, or while a checkpoint is written, or early on."""
    first, began = newest_step(root), time.monotonic()
    reached: list[float] = []

    def due() -> bool:
        if kind == 0:
            return time.monotonic() - began > 5 * wait
        if not reached and newest_step(root) >= min(first + steps, STEPS - 6):
            reached.append(time.monotonic())
        if kind == 1 and reached:
            return any((root / "checkpoints").glob(".*"))
        return bool(reached) and time.monotonic() - reached[0] > wait

    return due


def newest_step(root: Path) -> int:
    """The step of the newest manifest."""
    steps = [0]
    for path in (root / "checkpoints").glob("[!.]*.json"):
        with suppress(FileNotFoundError):  # Old ones go while this looks.
            steps.append(json.loads(path.read_text())["step"])
    return max(steps)


def main() -> None:
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    number, data = signal.Signals[sys.argv[4]], sys.argv[5]
    folder.mkdir(parents=True)
    os.chdir(folder)
    import lit_encoders.trainer_cli  # noqa: F401  Once, for all forks.
    from lit_encoders.data import streaming

    streaming.WINDOW_DOCUMENTS = 32  # Several windows to an epoch.

    config = write_config(folder, data)

    def arguments(name: str) -> list[str]:
        return ["fit", "--config", str(config), f"--trainer.default_root_dir={folder / name}"]

    log = folder / "log"
    assert finish(start(arguments("warm"), log)) == 0, log.read_text()[-3000:]  # Fills the cache.
    assert finish(start(arguments("whole"), log)) == 0, log.read_text()[-3000:]
    draw = random.Random(seed)
    runs: list[dict[str, Any]] = []
    # A run may end before its last kill: another one is begun for those that are left.
    while sum(len(run["steps"]) for run in runs) < kills:
        name = f"killed-{len(runs)}"
        root = folder / name
        codes: list[int] = []
        steps: list[int] = []
        while sum(len(run["steps"]) for run in runs) + len(steps) < kills:
            # Spread over the run.
            gain = round(draw.uniform(0, 1.2 * STEPS / kills))
            due = moment(root, gain, draw.choice([0, 1, 1, 2, 2, 2]), draw.uniform(0, 0.3))
            code = finish(start(arguments(name), log), due, number)
            if code == 0:
                break
            assert code in (-number, 75), (code, log.read_text()[-3000:])
            codes.append(code)
            steps.append(newest_step(root))
        last = finish(start(arguments(name), log))
        assert last == 0, (last, log.read_text()[-3000:])
        ours, theirs = ((folder / one / "export" / "model.safetensors").read_bytes() for one in (name, "whole"))
        tables = [json.loads((folder / one / "summary.json").read_text()) for one in (name, "whole")]
        phases = [[(p["name"], p["steps"], p["tokens"], p["losses"]) for p in table["phases"]] for table in tables]
        runs.append(
            {
                "codes": codes,
                "steps": steps,
                "equal": ours == theirs,
                "same_table": phases[0] == phases[1],
                "leftovers": [path.name for path in (root / "checkpoints").glob(".*")],
            }
        )
    print(json.dumps(runs))


if __name__ == "__main__":
    main()
