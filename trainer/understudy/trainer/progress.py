"""Progress events of a training, and two reporters: lines for people, JSON lines for programs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TextIO


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The training that is about to start.

    Attributes:
        experiment: The experiment's name.
        strategy: The strategy's name.
        replicas: Replicas over all workers.
        task: This task, such as ``worker 1``, or empty outside a cluster.
        first_step: Steps done by earlier starts.
        steps: Steps when done.
        steps_per_epoch: Steps that one pass over the data takes.
        global_batch_size: Examples per step.
        devices: A description of each device of this task, as ``key=value`` pairs.
    """

    experiment: str
    strategy: str
    replicas: int
    task: str
    first_step: int
    steps: int
    steps_per_epoch: int
    global_batch_size: int
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProgressUpdate:
    """The progress of a training.

    Attributes:
        step: Steps done.
        steps: Steps when done.
        epoch: Passes over the data, including a fraction of the current one.
        metrics: The loss (as ``loss``) and the compiled metrics, over all replicas and the steps since the last
            checkpoint.
        examples_per_second: Over all replicas, since this start, without the first call; 0 while unknown.
        remaining_seconds: Time left at this rate; None while unknown.
        input_wait_seconds: Wait for batches since the last update, in this task.
        input_wait_share: The wait's share of the time since the last update, 0 to 1.
    """

    step: int
    steps: int
    epoch: float
    metrics: Mapping[str, float]
    examples_per_second: float
    remaining_seconds: float | None
    input_wait_seconds: float
    input_wait_share: float


class ProgressReporter(Protocol):
    """Receives events on the training thread, in order. Must be quick and must not raise."""

    def started(self, plan: TrainingPlan) -> None:
        """The model is built, and restored if a checkpoint exists."""

    def advanced(self, update: ProgressUpdate) -> None:
        """Some steps were done."""

    def published(self, step: int, metrics: Mapping[str, float]) -> None:
        """A checkpoint was committed. Called on the chief only."""

    def stopped(self, step: int, reason: str) -> None:
        """Training stops early, for this reason. Called on the chief only."""

    def finished(self, step: int) -> None:
        """The last step is done, and published."""


class SilentReporter:
    """Ignores all events."""

    def started(self, plan: TrainingPlan) -> None:
        """Do nothing."""

    def advanced(self, update: ProgressUpdate) -> None:
        """Do nothing."""

    def published(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing."""

    def stopped(self, step: int, reason: str) -> None:
        """Do nothing."""

    def finished(self, step: int) -> None:
        """Do nothing."""


class LineReporter:
    """Writes plain lines for people.

    Args:
        stream: The output.
        every_seconds: The shortest time between two progress lines.
        clock: Seconds from any origin, never going back.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        every_seconds: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._every_seconds = every_seconds
        self._clock = clock
        self._last = -math.inf

    def started(self, plan: TrainingPlan) -> None:
        """Write what is about to start."""
        task = f" as {plan.task}" if plan.task else ""
        resumed = f", resuming after step {plan.first_step}" if plan.first_step else ""
        self._write(
            f"training {plan.experiment}{task}: {plan.steps} steps of {plan.global_batch_size} examples, "
            f"{plan.strategy}, {_count(plan.replicas, 'replica')}{resumed}",
        )
        for device in plan.devices:
            self._write(f"  {device}")

    def advanced(self, update: ProgressUpdate) -> None:
        """Write the progress, unless the last such line is too recent."""
        now = self._clock()
        if now - self._last < self._every_seconds:
            return
        self._last = now
        rate = f"  {update.examples_per_second:.0f} examples/s" if update.examples_per_second else ""
        remaining = "" if update.remaining_seconds is None else f"  {_duration(update.remaining_seconds)} left"
        self._write(
            f"step {update.step}/{update.steps}  epoch {update.epoch:.1f}  {_metrics(update.metrics)}{rate}{remaining}",
        )

    def published(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write that a checkpoint was published."""
        self._write(f"published step {step}  {_metrics(metrics)}")

    def stopped(self, step: int, reason: str) -> None:
        """Write why training stops early."""
        self._write(f"stopping early at step {step}: {reason}")

    def finished(self, step: int) -> None:
        """Write that training has finished."""
        self._write(f"finished at step {step}")

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class JsonLinesReporter:
    """Writes one JSON object per event: its fields, and ``event`` with its name. NaN is written as null.

    Args:
        stream: The output.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def started(self, plan: TrainingPlan) -> None:
        """Write ``{"event": "started", ...}``."""
        self._write("started", **asdict(plan))

    def advanced(self, update: ProgressUpdate) -> None:
        """Write ``{"event": "advanced", ...}``."""
        self._write("advanced", **{**asdict(update), "metrics": _finite(update.metrics)})

    def published(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write ``{"event": "published", "step": ..., "metrics": ...}``."""
        self._write("published", step=step, metrics=_finite(metrics))

    def stopped(self, step: int, reason: str) -> None:
        """Write ``{"event": "stopped", "step": ..., "reason": ...}``."""
        self._write("stopped", step=step, reason=reason)

    def finished(self, step: int) -> None:
        """Write ``{"event": "finished", "step": ...}``."""
        self._write("finished", step=step)

    def _write(self, event: str, **fields: Any) -> None:
        self._stream.write(json.dumps({"event": event, **fields}, allow_nan=False) + "\n")
        self._stream.flush()


def _metrics(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
