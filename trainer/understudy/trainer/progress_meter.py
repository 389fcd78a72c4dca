"""The rate of a training, and its remaining time."""

from __future__ import annotations

import time
from collections.abc import Callable

from understudy.trainer.data import DataPlan
from understudy.trainer.job import ProgressEvent
from understudy.trainer.progress import ProgressUpdate


class ProgressMeter:
    """Makes progress updates. It measures from the end of the first call, which also traces the graph.

    Args:
        steps: Steps when done.
        plan: Gives the examples per step and the steps per epoch.
        clock: Seconds from any origin, never going back.
    """

    def __init__(self, steps: int, plan: DataPlan, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps = steps
        self._plan = plan
        self._clock = clock
        self._origin: tuple[int, float] | None = None

    def measure(self, event: ProgressEvent) -> ProgressUpdate:
        """Return an update for the current progress."""
        step = event.step
        steps_per_second = self._steps_per_second(step)
        return ProgressUpdate(
            step=step,
            steps=self._steps,
            epoch=step * self._plan.global_batch_size / self._plan.examples_per_epoch,
            metrics=event.metrics,
            examples_per_second=steps_per_second * self._plan.global_batch_size,
            remaining_seconds=(self._steps - step) / steps_per_second if steps_per_second else None,
            input_wait_seconds=event.input_wait_seconds,
            input_wait_share=min(1.0, event.input_wait_seconds / event.seconds) if event.seconds else 0.0,
        )

    def _steps_per_second(self, step: int) -> float:
        now = self._clock()
        if self._origin is None:
            self._origin = (step, now)
        first_step, began = self._origin
        return (step - first_step) / (now - began) if now > began else 0.0
