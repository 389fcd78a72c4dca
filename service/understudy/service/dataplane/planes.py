"""The data plane as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from understudy.service.dataplane.evaluation import EvaluationPlane
from understudy.service.dataplane.metrics import MetricsPlane
from understudy.service.dataplane.model import ModelPlane
from understudy.service.dataplane.prediction import PredictionPlane


@dataclass(frozen=True, kw_only=True)
class DataPlane:
    """What every front end serves."""

    prediction: PredictionPlane
    evaluation: EvaluationPlane
    model: ModelPlane
    metrics: MetricsPlane
