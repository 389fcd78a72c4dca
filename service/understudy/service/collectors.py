"""Metrics that are read at each scrape: those of the evaluator, and of the training from its run folder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from understudy.evaluator.evaluation.training_end import read_training
from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.types import GpuReading

STATES = ("running", "finished", "failed")


class EvaluatorCollector(Collector):
    """Shows steps, ages, replicas and memory at the time of the scrape. Thread-safe.

    A step or age that does not exist yet is NaN, so that the series exists from the start.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield every metric; those of GPUs only if NVML reports them."""
        evaluator = self._evaluator
        yield _gauge("understudy_replicas", "Replicas that a batch is split over.", evaluator.replicas)
        yield _gauge("understudy_serving_step", "The serving step.", evaluator.serving_step)
        yield _gauge("understudy_latest_step", "The newest step that has been loaded.", evaluator.latest_step)
        yield _gauge("understudy_best_step", "The best step by the monitored metric.", evaluator.best_step)
        yield _gauge(
            "understudy_checkpoint_age_seconds",
            "Seconds since the serving checkpoint was written.",
            evaluator.checkpoint_age_seconds(),
        )
        yield _gauge(
            "understudy_checkpoints_waiting",
            "Checkpoints that wait to be scored, with the one being scored.",
            evaluator.checkpoints_waiting(),
        )
        rollout = evaluator.rollout
        yield _gauge(
            "understudy_rollout_step",
            "The step of a rollout, which a part of the servers that follow serves, or computes requests once more.",
            None if rollout is None else rollout.step,
        )
        yield _gauge(
            "understudy_rollout_seconds",
            "Seconds in which they have served the step of a rollout, or had it loaded.",
            None if rollout is None else rollout.elapsed_seconds,
        )
        shadow = None if rollout is None else rollout.shadow
        yield _gauge(
            "understudy_rollout_compared_requests",
            "Requests that the step of a rollout has computed once more, for comparison.",
            None if shadow is None else shadow.compared,
        )
        yield _gauge(
            "understudy_rollout_disagreement",
            "Mean share of the examples of these requests whose answers differ.",
            None if shadow is None or not shadow.compared else shadow.disagreement,
        )
        memory = GaugeMetricFamily(
            "understudy_device_memory_bytes", "Memory in use on each device.", labels=["device", "kind"]
        )
        for (device, kind), used in evaluator.device_memory().items():
            memory.add_metric([device, kind], used)
        yield memory
        yield from _of_gpus(evaluator.gpu_readings())


def _gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=math.nan if value is None else value)


def _of_gpus(readings: Mapping[str, GpuReading]) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    """Yield the GPUs' readings from NVML. A GPU without a reading has no series for it."""
    if not readings:
        return
    memory = GaugeMetricFamily(
        "understudy_device_nvml_memory_bytes",
        "Memory of each GPU: used by all processes, and total (NVML).",
        labels=["device", "kind"],
    )
    utilization = GaugeMetricFamily(
        "understudy_device_utilization_ratio",
        "Share of the time in which a GPU ran anything (NVML).",
        labels=["device"],
    )
    errors = CounterMetricFamily(
        "understudy_device_ecc_errors",
        "Errors of a GPU's memory since the driver was loaded (NVML).",
        labels=["device", "kind"],
    )
    for device, reading in readings.items():
        _add(memory, [device, "used"], reading.memory_used_bytes)
        _add(memory, [device, "total"], reading.memory_total_bytes)
        _add(utilization, [device], reading.utilization)
        _add(errors, [device, "corrected"], reading.corrected_errors)
        _add(errors, [device, "uncorrected"], reading.uncorrected_errors)
    yield memory
    yield utilization
    yield errors


def _add(family: GaugeMetricFamily | CounterMetricFamily, labels: list[str], value: float | None) -> None:
    if value is not None:
        family.add_metric(labels, value)


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
        yield _gauge("understudy_run_step", "Training steps taken.", None if status is None else status.step)
        yield _gauge("understudy_run_steps", "Training steps when done.", None if progress is None else progress.steps)
        yield _gauge(
            "understudy_run_examples_per_second",
            "Examples that the training takes in a second.",
            None if progress is None else progress.examples_per_second,
        )
        yield _gauge(
            "understudy_run_input_wait_ratio",
            "Share of the time in which the training waits for its input.",
            None if progress is None else progress.input_wait_share,
        )
        yield _gauge(
            "understudy_run_remaining_seconds",
            "Seconds that the training takes at this rate.",
            None if progress is None else progress.remaining_seconds,
        )
        metrics = GaugeMetricFamily("understudy_run_metric", "Loss and metrics of the training.", labels=["metric"])
        for name, value in ({} if progress is None else progress.metrics).items():
            metrics.add_metric([name], value)
        yield metrics
