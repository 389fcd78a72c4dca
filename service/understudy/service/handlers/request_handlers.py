"""All handlers of the service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from understudy.service.handlers.evaluation_handler import EvaluationHandler
from understudy.service.handlers.metrics_handler import MetricsHandler
from understudy.service.handlers.model_handler import ModelHandler
from understudy.service.handlers.oip.inference_handler import InferenceHandler
from understudy.service.handlers.prediction_handler import PredictionHandler

if TYPE_CHECKING:
    from understudy.service.handlers.tfserving.tfserving_handler import TfServingHandler


@dataclass(frozen=True, kw_only=True)
class RequestHandlers:
    """The handlers that every front end serves."""

    prediction: PredictionHandler
    evaluation: EvaluationHandler
    model: ModelHandler
    metrics: MetricsHandler
    inference: InferenceHandler
    tf_serving: TfServingHandler
