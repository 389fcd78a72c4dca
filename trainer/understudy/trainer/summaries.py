"""TensorBoard scalars of a training."""

from __future__ import annotations

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
