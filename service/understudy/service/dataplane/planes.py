"""The data plane as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from understudy.service.dataplane.evaluation import EvaluationPlane
from understudy.service.dataplane.metrics import MetricsPlane
from understudy.service.dataplane.model import ModelPlane
from understudy.service.dataplane.oip.plane import InferencePlane
from understudy.service.dataplane.prediction import PredictionPlane

if TYPE_CHECKING:
    from understudy.service.dataplane.tfserving.plane import TfServingPlane


@dataclass(frozen=True, kw_only=True)
class DataPlane:
    """What every front end serves."""

    prediction: PredictionPlane
    evaluation: EvaluationPlane
    model: ModelPlane
    metrics: MetricsPlane
    inference: InferencePlane
    tf_serving: TfServingPlane
