"""Summaries for TensorBoard: event files with the metrics of each checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from understudy.evaluator.types import EvaluationRecord

Point = tuple[int, str]
"""A step and the name of a metric."""


class Summaries:
    """Event files with one scalar per metric at the checkpoint's step. For one thread at a time.

    Args:
        directory: The folder of the runs, one subfolder for each dataset, and one for each later content of it and each
            later configuration of a metric, so that no curve mixes what cannot be compared; created at the first write.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writers: dict[str, Any] = {}
        self._first_contents: dict[str, str] = {}
        self._first_configurations: dict[tuple[str, str], str] = {}

    def begin_with(self, contents: Mapping[str, str], configurations: Mapping[tuple[str, str], str]) -> None:
        """Set the first content of each dataset, and the first configuration of each dataset's metrics.

        Their run has the dataset's name.
        """
        self._first_contents = dict(contents)
        self._first_configurations = dict(configurations)

    def write(self, record: EvaluationRecord) -> None:
        """Write the metrics of a record and flush them; a record without metrics writes nothing."""
        for run, metrics in self.runs_of(record).items():
            self._write(run, record.step, metrics)

    def points(self, run: str) -> set[Point]:
        """Return the points that the event files of a run hold. On any thread."""
        return set(_points_in(self._directory / run))

    def complete(self, records: Iterable[EvaluationRecord], known: Mapping[str, set[Point]]) -> None:
        """Write the points of these records that their runs lack, for example after a process was killed."""
        for record in records:
            for run, metrics in self.runs_of(record).items():
                missing = {name: value for name, value in metrics.items() if (record.step, name) not in known[run]}
                self._write(run, record.step, missing)
                known[run].update((record.step, name) for name in missing)

    def close(self) -> None:
        """Close every event file. Idempotent."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def runs_of(self, record: EvaluationRecord) -> dict[str, dict[str, float]]:
        """Return the metrics of a record by the names of the runs that they belong to."""
        content = record.dataset_digest
        is_first = self._first_contents.setdefault(record.dataset, content) == content
        of_content = record.dataset if is_first else f"{record.dataset}-{content[:8]}"
        runs: dict[str, dict[str, float]] = {}
        for name, value in record.metrics.items():
            own = record.metric_digests.get(name, "")
            is_later = own != "" and self._first_configurations.setdefault((record.dataset, name), own) != own
            runs.setdefault(f"{of_content}-{own[:8]}" if is_later else of_content, {})[name] = value
        return runs

    def _write(self, run: str, step: int, metrics: Mapping[str, float]) -> None:
        if not metrics:
            return
        import tensorflow as tf

        with self._writer(run).as_default(step=step):
            for name, value in metrics.items():
                tf.summary.scalar(name, value)
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
