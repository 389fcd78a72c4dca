"""Scores for TensorBoard, one run per dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from understudy.evaluator.types import EvaluationRecord


class Summaries:
    """Event files with one scalar per metric at the checkpoint's step. For one thread at a time.

    Args:
        directory: The folder of runs, one below it for each dataset; made when first written to.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writers: dict[str, Any] = {}

    def write(self, record: EvaluationRecord) -> None:
        """Write the metrics of a record and flush them; a record without metrics writes nothing."""
        if not record.metrics:
            return
        import tensorflow as tf

        with self._writer(record.dataset).as_default(step=record.step):
            for name, value in record.metrics.items():
                tf.summary.scalar(name, value)
        self._writer(record.dataset).flush()

    def close(self) -> None:
        """Close every event file. Idempotent."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _writer(self, dataset: str) -> Any:
        import tensorflow as tf

        if dataset not in self._writers:
            self._writers[dataset] = tf.summary.create_file_writer(str(self._directory / dataset))
        return self._writers[dataset]
