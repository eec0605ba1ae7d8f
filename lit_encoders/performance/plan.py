"""What a run will take: steps, FLOPs, hours, bytes, and what would stop it. No text is read, no weight is made."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from torch import nn
from torch.optim import AdamW

from lit_encoders.callbacks.anchored import AnchoredCallback
from lit_encoders.callbacks.hf_export import HFExport
from lit_encoders.callbacks.layer_freezing import LayerFreezing
from lit_encoders.callbacks.objective_schedule import ObjectiveSchedule, Phase, find_schedule, resolve_phases
from lit_encoders.data.tokens import affixes
from lit_encoders.mistakes import one_line
from lit_encoders.modules.lit_encoder import LitEncoder
from lit_encoders.modules.lit_kd import LitKD
from lit_encoders.objectives import Objective
from lit_encoders.performance.flops import Pieces, Work, encoder_shape, full_pieces, head_shape, pack_work
from lit_encoders.performance.memory import (
    DeviceBytes,
    bytes_per_device,
    checkpoint_bytes,
    export_bytes,
    moments_per_weight,
)
from lit_encoders.performance.tables import aligned, readable

if TYPE_CHECKING:
    from lit_encoders.data.datamodule import TextDataModule
