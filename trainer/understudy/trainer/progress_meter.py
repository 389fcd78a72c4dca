"""What is measured while a training runs: its rate, its remaining time, and how long it waits for its input."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from understudy.trainer.data import DataPlan
from understudy.trainer.job import ProgressEvent
from understudy.trainer.progress import ProgressUpdate

_log = logging.getLogger(__name__)

_TOO_MUCH = 0.4
_WINDOW_SECONDS = 30.0


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


class InputWatch:
    """Warns once when the input took more than 40 % of 30 seconds of training.

    Not counted: the first call, which also traces the graph, and the epoch that fills the cache.

    Args:
        plan: How the data is read.
        first_step: Steps done by earlier starts.
    """

    def __init__(self, plan: DataPlan, *, first_step: int) -> None:
        self._plan = plan
        self._skip_until = first_step + (plan.steps_per_epoch if plan.cache else 0)
        self._has_traced = False
        self._seconds = self._waited = 0.0
        self._has_warned = False

    def saw(self, event: ProgressEvent) -> None:
        """Count the time of the last steps, and warn if due."""
        counts = self._has_traced and event.step > self._skip_until
        self._has_traced = True
        if self._has_warned or not counts:
            return
        self._seconds += event.seconds
        self._waited += event.input_wait_seconds
        if self._seconds < _WINDOW_SECONDS:
            return
        if self._waited > _TOO_MUCH * self._seconds:
            self._has_warned = True
            _log.warning("%s", self._advice())
        self._seconds = self._waited = 0.0

    def _advice(self) -> str:
        cache = "" if self._plan.cache else "keep it in memory with --cache, if it fits; "
        return (
            f"training waited for its input {self._waited / self._seconds:.0%} of the last {self._seconds:.0f} s: "
            f"{cache}in training_data(), give map() num_parallel_calls=tf.data.AUTOTUNE, read a few large files rather "
            "than many small ones, several at once, and precompute work that is the same in every epoch"
        )
