"""What an evaluator is built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from understudy.checkpoints.signing import AcceptedKeys
from understudy.checkpoints.source import CheckpointSource
from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.observer import Observer
from understudy.evaluator.records.outbox import Subscription
from understudy.evaluator.settings import EvaluatorSettings

if TYPE_CHECKING:
    from understudy.evaluator.serving.following import NetworkFollowing
    from understudy.evaluator.sharding.cluster_scoring import Cluster
    from understudy.evaluator.tuning.tuning_file import TuningStart


@dataclass(frozen=True, kw_only=True)
class EvaluatorInputs:
    """What an evaluator is built from; the arguments of `understudy.evaluator.evaluator.Evaluator` say what each is."""

    settings: EvaluatorSettings
    source: CheckpointSource
    datasets: tuple[EvaluationDataset, ...]
    build_model: Callable[[], Any] | None
    accepted: AcceptedKeys | None
    following: NetworkFollowing | None
    cluster: Cluster | None
    tuning: TuningStart | None
    observer: Observer
    subscriptions: tuple[Subscription, ...]
