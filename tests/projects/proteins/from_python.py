"""Our callbacks in this project, from Python; what each of them did or refused goes into from_python.json."""

import json
from pathlib import Path
from typing import Any

from data import Proteins
from lightning.pytorch import Callback, Trainer, seed_everything
from model import ProteinLM
from switching import SwitchingLM, Watch
from train import main as train

import callbacks
import lit_encoders.callbacks
from callbacks import WeightDistance
from lit_encoders.callbacks import HFExport, LayerFreezing, ObjectiveSchedule, Phase, Throughput, TrainingProgress


def fit(module: ProteinLM, *parts: Callback, **settings: Any) -> Trainer:
    seed_everything(0, verbose=False)
    defaults = {"accelerator": "cpu", "max_epochs": 2, "logger": False, "enable_checkpointing": False}
    quiet = {"enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = Trainer(**{**defaults, **quiet, **settings}, callbacks=[*parts, TrainingProgress()])
    trainer.fit(module, Proteins())
    return trainer


def refusal(module: ProteinLM, *parts: Callback, **settings: Any) -> dict[str, Any]:
    steps: list[int] = []
    module.on_train_batch_start = lambda batch, batch_idx: steps.append(batch_idx)
    try:
        fit(module, *parts, **settings)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "steps": len(steps)}
    return {"error": None, "steps": len(steps)}


def phases() -> list[Phase]:
    return [
        Phase("detour", "clm", steps=5, warmup_steps=2),
        Phase("decay", "mlm", steps=5, shape="linear"),
    ]


class SchedulerBeside(SwitchingLM):
    configure_optimizers = ProteinLM.configure_optimizers


def main() -> None:
    fit(ProteinLM(), WeightDistance("python_distance.json"), LayerFreezing(["0:2", "embeddings"]))
    watch = Watch()
    schedule = ObjectiveSchedule(phases())
    trainer = fit(
        SwitchingLM(), schedule, LayerFreezing("2:", phases=["detour"]), Throughput(), watch, log_every_n_steps=2
    )
    result = {
        "folders": [callbacks.__file__, lit_encoders.callbacks.__file__],
        "steps": watch.steps,
        "global_step": trainer.global_step,
        "tokens_per_second": trainer.callback_metrics["train/tokens_per_second"].item(),
        "seconds": trainer.callback_metrics["train/seconds"].item(),
        "refusals": {
            "no objective": refusal(ProteinLM(), ObjectiveSchedule(phases())),
            "no LitEncoder": refusal(ProteinLM(), HFExport()),
            "no tokens": refusal(ProteinLM(), Throughput()),
            "scheduler": refusal(SchedulerBeside(), ObjectiveSchedule(phases())),
            "no such layers": refusal(ProteinLM(), LayerFreezing("4:9")),
            "no schedule": refusal(ProteinLM(), LayerFreezing("0:2", phases=["detour"])),
        },
    }
    train(["fit", "--config", "config.yaml", "--config", "detour.yaml"])
    Path("from_python.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
