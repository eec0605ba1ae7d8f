import json
from pathlib import Path

import torch
from model import VOCABULARY, ProteinLM
from train import main

import callbacks
from callbacks import WeightDistance


def test_logits_have_one_score_per_residue():
    assert ProteinLM()(torch.full((2, 5), 7)).shape == (2, 5, VOCABULARY)


def test_callbacks_are_this_projects():
    assert Path(callbacks.__file__).parent == Path(__file__).parents[1] / "callbacks"


def test_training_moves_weights(tmp_path):
    cli = main(["fit", "--config", "config.yaml", "--trainer.callbacks.init_args.path", str(tmp_path / "moved.json")])
    assert any(isinstance(callback, WeightDistance) for callback in cli.trainer.callbacks)
    assert cli.trainer.global_step == 12
    assert min(json.loads((tmp_path / "moved.json").read_text()).values()) > 0
