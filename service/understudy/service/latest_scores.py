"""The gauges of the newest score of each dataset."""

from __future__ import annotations

import threading

from prometheus_client import CollectorRegistry, Gauge

from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord

_DIGEST_LENGTH = 8


class LatestScores:
    """Shows the newest score of each dataset. Thread-safe.

    Labels say what a value is computed on and with: the beginnings of the digests that the ledger has of the dataset's
    content and of the metric's configuration. So values that cannot be compared are never one series. A metric has one
    series at a time; that of an earlier content or configuration ends.

    Args:
        registry: Where the gauges are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._metric = Gauge(
            "understudy_evaluation_metric",
            "The latest value of each metric of each dataset. The digests, shortened, are of the dataset's content and "
            "of the metric's configuration.",
            ["dataset", "metric", "dataset_digest", "metric_digest"],
            registry=registry,
        )
        self._step = Gauge(
            "understudy_evaluation_step", "The step that was scored last.", ["dataset"], registry=registry
        )
        self._lock = threading.Lock()
        self._newest: dict[str, int] = {}
        self._series: dict[str, set[tuple[str, ...]]] = {}

    def show(self, record: EvaluationRecord) -> None:
        """Show an entry, unless it is no score or a newer score of its dataset is shown."""
        if record.outcome is not EvaluationOutcome.SCORED:
            return
        with self._lock:
            if record.sequence <= self._newest.get(record.dataset, 0):
                return
            self._newest[record.dataset] = record.sequence
            self._step.labels(record.dataset).set(record.step)
            values = {_labels(record, metric): value for metric, value in record.metrics.items()}
            for series in self._series.get(record.dataset, set()) - values.keys():
                self._metric.remove(*series)
            self._series[record.dataset] = set(values)
            for series, value in values.items():
                self._metric.labels(*series).set(value)


def _labels(record: EvaluationRecord, metric: str) -> tuple[str, ...]:
    configuration = record.configuration(metric)
    digests = record.dataset_digest, configuration.own or configuration.of_all
    return record.dataset, metric, *(digest[:_DIGEST_LENGTH] for digest in digests)
