"""What pruning and a teacher are worth after 200 steps: MiniLM with a warmed head, cut to 3 layers, three seeds.

Prints a table. The losses are of held-out definitions, nats per target at 15 % masking, the same masks for all.
"""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from lit_encoders import LitKD, LitMLM
from lit_encoders.analysis.pruning import prune_verb
from lit_encoders.callbacks import LayerFreezing, Phase
from lit_encoders.data.examples import find_example
from lit_encoders.evaluation.statistics import t_interval
from lit_encoders.studies.parallel_text import write_pieces
from lit_encoders.studies.runs import measure, train

SEEDS = (0, 1, 2)
STEPS = 200
SLOTS, LENGTH = 512, 96
ENOUGH = 5.5


def write_text(folder: Path) -> tuple[Path, Path]:
    """Definitions to train on, and 300 held-out ones."""
    example, path = find_example("hpo")
    assert example.documents is not None
    documents = list(example.documents(path))
    random.Random(0).shuffle(documents)
    files = folder / "train.jsonl", folder / "held-out.jsonl"
    for file, part in zip(files, (documents[300:], documents[:300]), strict=True):
        write_pieces(part, file)  # type: ignore[arg-type]
    return files


@pytest.mark.slow
def test_a_teacher_and_the_choice_of_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, held_out = write_text(tmp_path)
    settings: dict[str, Any] = {"piece_tokens": LENGTH, "slots": SLOTS, "cache": tmp_path / "tokens"}

    def loss(model: Path) -> float:
        return measure(model, {"held": held_out}, LENGTH, tmp_path / "tokens")["held"]

    phases = [
        Phase("head", "mlm", steps=60, peak=2.0),
        Phase("whole", "mlm", steps=400, warmup_steps=20, shape="cosine"),
    ]
    rests = LayerFreezing(["all", "embeddings"], phases=["head"])
    warm = LitMLM("example:minilm", learning_rate=5e-4, mask_ratio=0.3, seed=0)
    train(warm, text, tmp_path / "teacher", phases, [rests], seed=0, **settings)
    teacher = tmp_path / "teacher" / "export"
    prune_verb(str(teacher), tmp_path / "chosen", str(text), layers="3", tokens=20_000)
    found: dict[str, list[float]] = {"with KD": [], "without KD": [], "with KD, random layers": []}
    before: dict[str, list[float]] = {"chosen layers": [loss(tmp_path / "chosen")], "random layers": []}
    choices = random.Random(0).sample(list(combinations(range(6), 3)), len(SEEDS))
    for seed, layers in zip(SEEDS, choices, strict=True):
        cut = tmp_path / f"random-{seed}"
        prune_verb(str(teacher), cut, layers=",".join(map(str, layers)))
        before["random layers"].append(loss(cut))
        shared: dict[str, Any] = {"learning_rate": 5e-4, "mask_ratio": 0.15, "seed": seed}
        students: dict[str, LitMLM | LitKD] = {
            "with KD": LitKD(str(tmp_path / "chosen"), str(teacher), **shared),
            "without KD": LitMLM(str(tmp_path / "chosen"), **shared),
            "with KD, random layers": LitKD(str(cut), str(teacher), **shared),
        }
        for name, student in students.items():
            folder = tmp_path / f"{name}-{seed}"
            folder.mkdir()
            train(student, text, folder, [Phase("run", "mlm", steps=STEPS, warmup_steps=20)], [], seed=seed, **settings)
            found[name].append(loss(folder / "export"))
    of_teacher = loss(teacher)
    with capsys.disabled():
        print(f"\nteacher {of_teacher:.3f}; pruned, untrained: {before}; random layers {choices}")
        for name, losses in found.items():
            interval = t_interval(losses)
            print(f"{name:<24} {interval.mean:.3f} +- {interval.half_width:.3f}  {[round(x, 3) for x in losses]}")
        for name in list(found)[1:]:
            apart = t_interval([a - b for a, b in zip(found[name], found["with KD"], strict=True)])
            print(f"{name} - with KD: {apart.mean:+.3f} +- {apart.half_width:.3f}")
    assert of_teacher < ENOUGH
    # Whatever a teacher is worth: training has to make up for the layers that are gone.
    assert all(after < before["chosen layers"][0] for after in found["with KD"] + found["without KD"])
