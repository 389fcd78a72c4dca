"""The evaluator: watches checkpoints, loads them onto replicas, scores them, and serves one of them.

Independent of gRPC and Prometheus. TensorFlow is imported when an `Evaluator` starts, not before.
"""

from understudy.evaluator.datasets.dataset import ArrayDataset, EvaluationDataset, load_npz
from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.observer import Observer, SilentObserver
from understudy.evaluator.settings import EvaluatorSettings

__all__ = [
    "ArrayDataset",
    "EvaluationDataset",
    "Evaluator",
    "EvaluatorSettings",
    "Observer",
    "SilentObserver",
    "load_npz",
]
