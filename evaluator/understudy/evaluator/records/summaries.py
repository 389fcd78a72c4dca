"""Summaries for TensorBoard: event files with the metrics of each checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from understudy.evaluator.records.comparable_curves import ComparableCurves
from understudy.evaluator.types import EvaluationRecord

Point = tuple[int, str]
"""A step and the name of a metric."""


class Summaries:
    """Event files with one scalar per metric at the checkpoint's step. For one thread at a time.

    Args:
        directory: The folder of the runs, one subfolder for each name of a curve; created at the first write.
        curves: Names the curves.
    """

    def __init__(self, directory: Path, curves: ComparableCurves) -> None:
        self._directory = directory
        self._curves = curves
        self._writers: dict[str, Any] = {}

    def write(self, record: EvaluationRecord) -> None:
        """Write the metrics of a record and flush them; a record without metrics writes nothing."""
        runs = self.runs_of(record)
        for run, metrics in runs.items():
            self._write(run, record.step, metrics)
        self._flush(runs)

    def points(self, run: str) -> set[Point]:
        """Return the points that the event files of a run hold. On any thread."""
        return set(_points_in(self._directory / run))

    def complete(self, records: Iterable[EvaluationRecord], known: Mapping[str, set[Point]]) -> None:
        """Write the points of these records that their runs lack, for example after a process was killed.

        They are flushed once, at the end.
        """
        written = set()
        for record in records:
            for run, metrics in self.runs_of(record).items():
                missing = {name: value for name, value in metrics.items() if (record.step, name) not in known[run]}
                if missing:
                    self._write(run, record.step, missing)
                    known[run].update((record.step, name) for name in missing)
                    written.add(run)
        self._flush(written)

    def close(self) -> None:
        """Close every event file. Idempotent."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def runs_of(self, record: EvaluationRecord) -> dict[str, dict[str, float]]:
        """Return the metrics of a record by the names of the runs that they belong to."""
        runs: dict[str, dict[str, float]] = {}
        for name, curve in self._curves.names(record).items():
            runs.setdefault(curve, {})[name] = record.metrics[name]
        return runs

    def _write(self, run: str, step: int, metrics: Mapping[str, float]) -> None:
        """Write the values as one summary, which takes a fraction of the time of one for each."""
        import tensorflow as tf
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb

        summary = tf.compat.v1.Summary()
        for name, value in metrics.items():
            summary.MergeFromString(scalar_pb(name, value).SerializeToString())
        with self._writer(run).as_default():
            tf.summary.experimental.write_raw_pb(summary.SerializeToString(), step=step)

    def _flush(self, runs: Iterable[str]) -> None:
        for run in runs:
            self._writer(run).flush()

    def _writer(self, run: str) -> Any:
        import tensorflow as tf

        if run not in self._writers:
            self._writers[run] = tf.summary.create_file_writer(str(self._directory / run))
        return self._writers[run]


def _points_in(folder: Path) -> Iterator[Point]:
    """Yield the points in the event files of a run. A truncated file is read up to its end, as TensorBoard does."""
    import tensorflow as tf

    for file in folder.glob("events.out.tfevents.*"):
        try:
            for content in tf.data.TFRecordDataset(str(file)).as_numpy_iterator():
                event = tf.compat.v1.Event.FromString(content)
                yield from ((event.step, value.tag) for value in event.summary.value)
        except tf.errors.DataLossError:
            continue
