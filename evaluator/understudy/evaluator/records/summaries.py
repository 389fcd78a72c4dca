"""Summaries for TensorBoard: event files with the metrics of each checkpoint."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from understudy.evaluator.records.comparable_curves import ComparableCurves
from understudy.evaluator.types import EvaluationRecord

Point = tuple[int, str]
"""A step and the name of a metric."""


_FILE_VERSION = "brain.Event:2"
_READ_AT_ONCE = 1000


class Summaries:
    """Event files with one scalar per metric at the checkpoint's step. For one thread at a time.

    They are written as records of their own: 100,000 entries take `tf.summary.scalar` minutes.

    Args:
        directory: The folder of the runs, one subfolder for each name of a curve; created at the first write.
        curves: Names the curves.
    """

    def __init__(self, directory: Path, curves: ComparableCurves) -> None:
        self._directory = directory
        self._curves = curves
        self._writers: dict[str, Any] = {}

    def write(self, record: EvaluationRecord) -> None:
        """Write the metrics of a record and flush them; raise OSError if that fails."""
        with _reporting():
            for run, metrics in self.runs_of(record).items():
                self._write(run, record, metrics)
                self._writers[run].flush()

    def points(self, run: str) -> set[Point]:
        """Return the points that the event files of a run hold. On any thread."""
        return set(_points_in(self._directory / run))

    def complete(self, records: Iterable[EvaluationRecord], known: Mapping[str, set[Point]]) -> None:
        """Write the points of these records that their runs lack, for example after a process was killed.

        They are flushed once, at the end.

        Raises:
            OSError: They cannot be written.
        """
        with _reporting():
            for record in records:
                for run, metrics in self.runs_of(record).items():
                    missing = {name: value for name, value in metrics.items() if (record.step, name) not in known[run]}
                    if missing:
                        self._write(run, record, missing)
                        known[run].update((record.step, name) for name in missing)
            for writer in self._writers.values():
                writer.flush()

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

    def _write(self, run: str, record: EvaluationRecord, metrics: Mapping[str, float]) -> None:
        import tensorflow as tf
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb

        event = tf.compat.v1.Event(step=record.step, wall_time=record.recorded_at)
        for name, value in metrics.items():
            event.summary.MergeFromString(scalar_pb(name, value).SerializeToString())
        self._writer(run).write(event.SerializeToString())

    def _writer(self, run: str) -> Any:
        import tensorflow as tf

        if run not in self._writers:
            folder = self._directory / run
            folder.mkdir(parents=True, exist_ok=True)
            seconds, nanoseconds = divmod(time.time_ns(), 10**9)
            file = folder / f"events.out.tfevents.{seconds:010}.{nanoseconds:09}.{socket.gethostname()}"
            self._writers[run] = tf.io.TFRecordWriter(str(file))
            first = tf.compat.v1.Event(file_version=_FILE_VERSION, wall_time=seconds)
            self._writers[run].write(first.SerializeToString())
        return self._writers[run]


@contextmanager
def _reporting() -> Iterator[None]:
    """Raise TensorFlow's errors about files as OSError."""
    import tensorflow as tf

    try:
        yield
    except tf.errors.OpError as error:
        raise OSError(f"an event file cannot be written: {error}") from error


def _points_in(folder: Path) -> Iterator[Point]:
    """Yield the points in the event files of a run. A truncated file is read up to its end, as TensorBoard does."""
    import tensorflow as tf

    for file in folder.glob("events.out.tfevents.*"):
        records = tf.data.TFRecordDataset(str(file)).ignore_errors().batch(_READ_AT_ONCE)
        for content in itertools.chain.from_iterable(records.as_numpy_iterator()):
            event = tf.compat.v1.Event.FromString(content)
            yield from ((event.step, value.tag) for value in event.summary.value)
