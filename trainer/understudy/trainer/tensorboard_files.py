"""What a training writes for TensorBoard: scalars, and a profile of some steps for its profile plugin."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Self

import tensorflow as tf

from understudy.trainer.progress import ProgressUpdate

FOLDER = Path("tensorboard", "train")
"""The folder of the event files within a run folder."""


class TrainingSummaries:
    """Writes the loss and the metrics by step, the examples per second, and the share of time spent on input.

    A context manager.

    Args:
        run_dir: The run folder's root.
    """

    def __init__(self, run_dir: Path) -> None:
        self._writer = tf.summary.create_file_writer(str(run_dir / FOLDER))

    def write(self, update: ProgressUpdate) -> None:
        """Write one point of every curve."""
        with self._writer.as_default(step=update.step):
            for name, value in update.metrics.items():
                tf.summary.scalar(name, value)
            tf.summary.scalar("examples_per_second", update.examples_per_second)
            tf.summary.scalar("input_wait_share", update.input_wait_share)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the event file."""
        self._writer.close()


_log = logging.getLogger(__name__)


def boundaries(steps: tuple[int, int] | None) -> tuple[int, ...]:
    """Return the steps at which a call of the graph must end, so that exactly these steps are profiled."""
    return () if steps is None else (steps[0] - 1, steps[1])


class StepProfiler:
    """Profiles this process from one step to another. A context manager.

    The file is ``RUN/tensorboard/train/plugins/profile/<time>/<host>.xplane.pb``. A training that begins within the
    range profiles the rest of it; if the block ends first, the profile ends with it.

    Args:
        run_dir: The run folder's root.
        steps: The first and the last step, counted from 1.
        first_step: Steps done by earlier starts.
    """

    def __init__(self, run_dir: Path, steps: tuple[int, int], *, first_step: int) -> None:
        self._folder = run_dir / FOLDER
        self._first, self._last = steps
        self._done = first_step
        self._is_on = False

    def reached(self, step: int) -> None:
        """Start or stop the profile if due after ``step`` steps."""
        self._done = step
        if self._is_on and step >= self._last:
            self._stop()
        elif not self._is_on and self._first - 1 <= step < self._last:
            tf.profiler.experimental.start(str(self._folder))
            self._is_on = True

    def __enter__(self) -> Self:
        self.reached(self._done)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_on:
            self._stop()

    def _stop(self) -> None:
        self._is_on = False
        tf.profiler.experimental.stop()
        _log.info("wrote a profile up to step %d to %s", self._done, self._folder)
