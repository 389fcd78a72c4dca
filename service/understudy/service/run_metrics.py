"""Metrics of the training whose checkpoints are served, read from its run folder at each scrape."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from understudy.evaluator.evaluation.training_end import read_training

STATES = ("running", "finished", "failed")


class RunCollector(Collector):
    """Shows how far the training is, by its journal. Thread-safe; each scrape reads one small file.

    What is not known is NaN, so that the series exists from the start.

    Args:
        run: The run folder.
    """

    def __init__(self, run: Path) -> None:
        self._run = run

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield every metric."""
        status = read_training(self._run)
        progress = None if status is None else status.progress
        state = GaugeMetricFamily("understudy_run_state", "1 for the state of the training.", labels=["state"])
        for name in STATES:
            state.add_metric([name], float(status is not None and status.state == name))
        yield state
        yield _gauge("step", "Training steps taken.", None if status is None else status.step)
        yield _gauge("steps", "Training steps when done.", None if progress is None else progress.steps)
        yield _gauge(
            "examples_per_second",
            "Examples that the training takes in a second.",
            None if progress is None else progress.examples_per_second,
        )
        yield _gauge(
            "input_wait_ratio",
            "Share of the time in which the training waits for its input.",
            None if progress is None else progress.input_wait_share,
        )
        yield _gauge(
            "remaining_seconds",
            "Seconds that the training takes at this rate.",
            None if progress is None else progress.remaining_seconds,
        )
        metrics = GaugeMetricFamily("understudy_run_metric", "Loss and metrics of the training.", labels=["metric"])
        for name, value in ({} if progress is None else progress.metrics).items():
            metrics.add_metric([name], value)
        yield metrics


def _gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"understudy_run_{name}", text, value=math.nan if value is None else value)
