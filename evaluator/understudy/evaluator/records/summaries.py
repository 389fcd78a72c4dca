"""Scores for TensorBoard, one run per dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from understudy.evaluator.types import EvaluationRecord

_Point = tuple[int, str]
"""A step and the name of a metric."""


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
        self._write(record.dataset, record.step, record.metrics)

    def complete(self, records: Iterable[EvaluationRecord]) -> None:
        """Write what the event files lack of these records, as a process that was killed leaves it."""
        known: dict[str, set[_Point]] = {}
        for record in records:
            if record.dataset not in known:
                known[record.dataset] = set(_points_in(self._directory / record.dataset))
            points = known[record.dataset]
            missing = {name: value for name, value in record.metrics.items() if (record.step, name) not in points}
            self._write(record.dataset, record.step, missing)
            points.update((record.step, name) for name in missing)

    def close(self) -> None:
        """Close every event file. Idempotent."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _write(self, dataset: str, step: int, metrics: Mapping[str, float]) -> None:
        if not metrics:
            return
        import tensorflow as tf

        with self._writer(dataset).as_default(step=step):
            for name, value in metrics.items():
                tf.summary.scalar(name, value)
        self._writer(dataset).flush()

    def _writer(self, dataset: str) -> Any:
        import tensorflow as tf

        if dataset not in self._writers:
            self._writers[dataset] = tf.summary.create_file_writer(str(self._directory / dataset))
        return self._writers[dataset]


def _points_in(folder: Path) -> Iterator[_Point]:
    """Give what the event files of a run hold. A file that breaks off is read up to there, as TensorBoard does."""
    import tensorflow as tf

    for file in folder.glob("events.out.tfevents.*"):
        try:
            for content in tf.data.TFRecordDataset(str(file)).as_numpy_iterator():
                event = tf.compat.v1.Event.FromString(content)
                yield from ((event.step, value.tag) for value in event.summary.value)
        except tf.errors.DataLossError:
            continue
