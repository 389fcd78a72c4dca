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
        directory: The folder of the runs, one subfolder for each dataset; created at the first write.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writers: dict[str, Any] = {}

    def write(self, record: EvaluationRecord) -> None:
        """Write the metrics of a record and flush them; a record without metrics writes nothing."""
        self._write(record.dataset, record.step, record.metrics)

    def complete(self, records: Iterable[EvaluationRecord]) -> None:
        """Write the points of these records that the event files lack, for example after a process was killed."""
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
    """Yield the points in the event files of a run. A truncated file is read up to its end, as TensorBoard does."""
    import tensorflow as tf

    for file in folder.glob("events.out.tfevents.*"):
        try:
            for content in tf.data.TFRecordDataset(str(file)).as_numpy_iterator():
                event = tf.compat.v1.Event.FromString(content)
                yield from ((event.step, value.tag) for value in event.summary.value)
        except tf.errors.DataLossError:
            continue
