"""Reads from the evaluator, when Prometheus asks, what is a state and not an event."""

from __future__ import annotations

import math
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from understudy.evaluator.evaluator import Evaluator


class EvaluatorCollector(Collector):
    """Shows steps, ages, replicas and memory as they are at the moment of the scrape. Thread-safe.

    A step or age that does not exist yet is NaN, so that the series is there from the start.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield every gauge."""
        evaluator = self._evaluator
        yield _gauge("understudy_replicas", "Replicas that a batch is split over.", evaluator.replicas)
        yield _gauge("understudy_serving_step", "The step on stage.", evaluator.serving_step)
        yield _gauge("understudy_latest_step", "The newest step that has been loaded.", evaluator.latest_step)
        yield _gauge("understudy_best_step", "The best step by the monitored metric.", evaluator.best_step)
        yield _gauge(
            "understudy_checkpoint_age_seconds",
            "Seconds since the checkpoint on stage was written.",
            evaluator.checkpoint_age_seconds(),
        )
        memory = GaugeMetricFamily(
            "understudy_device_memory_bytes", "Memory in use on each device.", labels=["device", "kind"]
        )
        for (device, kind), used in evaluator.device_memory().items():
            memory.add_metric([device, kind], used)
        yield memory


def _gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=math.nan if value is None else value)
