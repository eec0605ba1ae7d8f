"""Callbacks, imported as ``lit_encoders.callbacks``: each works on any LightningModule that has what it names."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_encoders.callbacks.downstream_probe import DownstreamProbe as DownstreamProbe
    from lit_encoders.callbacks.exact_resume import ExactResume as ExactResume
    from lit_encoders.callbacks.gradient_probe import GradientProbe as GradientProbe
    from lit_encoders.callbacks.hf_export import HFExport as HFExport
    from lit_encoders.callbacks.l2sp import L2SP as L2SP
    from lit_encoders.callbacks.layer_freezing import FreezeWindow as FreezeWindow
    from lit_encoders.callbacks.layer_freezing import LayerFreezing as LayerFreezing
    from lit_encoders.callbacks.numerics_guard import NumericsGuard as NumericsGuard
    from lit_encoders.callbacks.objective_schedule import CLMDetour as CLMDetour
    from lit_encoders.callbacks.objective_schedule import ObjectiveSchedule as ObjectiveSchedule
    from lit_encoders.callbacks.objective_schedule import Phase as Phase
    from lit_encoders.callbacks.representation_cka import RepresentationCKA as RepresentationCKA
    from lit_encoders.callbacks.run_summary import RunSummary as RunSummary
    from lit_encoders.callbacks.throughput import Throughput as Throughput
    from lit_encoders.callbacks.training_progress import TrainingProgress as TrainingProgress
    from lit_encoders.callbacks.weight_drift import WeightDrift as WeightDrift
    from lit_encoders.callbacks.weight_reversion import WeightReversion as WeightReversion

_HOMES = {
    "CLMDetour": "objective_schedule",
    "DownstreamProbe": "downstream_probe",
    "FreezeWindow": "layer_freezing",
    "ExactResume": "exact_resume",
    "GradientProbe": "gradient_probe",
    "HFExport": "hf_export",
    "L2SP": "l2sp",
    "LayerFreezing": "layer_freezing",
    "NumericsGuard": "numerics_guard",
    "ObjectiveSchedule": "objective_schedule",
    "Phase": "objective_schedule",
    "RepresentationCKA": "representation_cka",
    "RunSummary": "run_summary",
    "Throughput": "throughput",
    "TrainingProgress": "training_progress",
    "WeightDrift": "weight_drift",
    "WeightReversion": "weight_reversion",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
