"""The scores of the ledger over steps, in bounded memory however long the ledger is."""

from __future__ import annotations

import enum
import math
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Final, NamedTuple

from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.types import (
    UNKNOWN_CONFIGURATION,
    WHOLE_CHECKPOINT,
    EvaluationOutcome,
    EvaluationRecord,
    Interval,
    MetricConfiguration,
)

MAX_POINTS: Final = 500
"""The most points of a series that a page shows. Up to twice as many are held."""
MAX_SERIES: Final = 200
"""The most series, each of one metric of one dataset; further ones are counted only."""
MAX_MARKS: Final = 200
"""How many marks are held: the newest."""

_PAGE: Final = 500
_step_of = attrgetter("step")


class Point(NamedTuple):
    """A value at a step, and the interval around it if it was recorded."""

    step: int
    value: float
    interval: Interval | None


@dataclass(frozen=True, kw_only=True)
class Series:
    """The finite values of one metric of one dataset.

    Attributes:
        dataset: The dataset.
        metric: The metric.
        points: At most `MAX_POINTS`, by ascending step.
        values: How many values there are, drawn or not.
        not_finite: How many more are not finite numbers.
    """

    dataset: str
    metric: str
    points: Sequence[Point]
    values: int
    not_finite: int


class MarkKind(enum.StrEnum):
    """What became of a checkpoint."""

    SERVED = "served"
    ROLLED_BACK = "rolled back"
    REFUSED = "refused"
    UNDECIDED = "undecided"
    FAILED = "failed"


_KIND_OF_OUTCOME: Final[Mapping[EvaluationOutcome, MarkKind]] = {
    EvaluationOutcome.REFUSED: MarkKind.REFUSED,
    EvaluationOutcome.UNDECIDED: MarkKind.UNDECIDED,
    EvaluationOutcome.FAILED: MarkKind.FAILED,
    EvaluationOutcome.ROLLOUT_ROLLED_BACK: MarkKind.ROLLED_BACK,
}


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What became of a checkpoint. ``dataset`` is empty if it is about all datasets."""

    step: int
    dataset: str
    kind: MarkKind


def serving_marks(served: Sequence[int]) -> list[Mark]:
    """Return a mark for each step that served: rolled back if an older one followed it the last time.

    Args:
        served: The steps in the order in which they came to serve.
    """
    kinds = dict.fromkeys(served[-1:], MarkKind.SERVED)
    for step, following in reversed(list(pairwise(served))):
        kinds.setdefault(step, MarkKind.ROLLED_BACK if following < step else MarkKind.SERVED)
    return [Mark(step=step, dataset=WHOLE_CHECKPOINT, kind=kind) for step, kind in kinds.items()]


class History:
    """The scores and the marks of the ledger, of which only new entries are read. Thread-safe.

    Values on earlier content of a dataset are dropped, as they cannot be compared with those on the present content.
    So are those of a metric that is configured otherwise than at the newest step.

    Args:
        ledger: The ledger.
        monitored: The dataset and the metric whose values are held whatever else there is; None for none.
    """

    def __init__(self, ledger: Ledger, monitored: tuple[str, str] | None = None) -> None:
        self._ledger = ledger
        self._monitored = monitored
        self._lock = threading.Lock()
        self._read_up_to = 0
        self._series: dict[tuple[str, str], _HeldSeries] = {}
        self._contents: dict[str, str] = {}
        self._left_out: set[tuple[str, str]] = set()
        self._marks: OrderedDict[tuple[int, str], MarkKind] = OrderedDict()

    def add(self, entry: EvaluationRecord) -> None:
        """Take an entry that was read for another purpose. Entries come in their order, before `catch_up`."""
        with self._lock:
            self._read(entry)
            self._read_up_to = entry.sequence

    def catch_up(self) -> None:
        """Read the new entries. Blocks; a page of the ledger at a time, so that others use it in between.

        Raises:
            LedgerError: The ledger cannot be read.
        """
        with self._lock:
            while self._ledger.last_sequence > self._read_up_to:
                entries = self._ledger.page(after_sequence=self._read_up_to, limit=_PAGE)
                if not entries:  # they were removed meanwhile
                    return
                for entry in entries:
                    self._read(entry)
                self._read_up_to = entries[-1].sequence

    def series(self) -> list[Series]:
        """Return every series, by the order in which datasets and metrics were recorded first."""
        with self._lock:
            return [
                Series(
                    dataset=dataset,
                    metric=metric,
                    points=thinned(held.points, MAX_POINTS),
                    values=held.values,
                    not_finite=held.not_finite,
                )
                for (dataset, metric), held in self._series.items()
            ]

    def marks(self) -> list[Mark]:
        """Return the newest marks, by ascending step."""
        with self._lock:
            marks = [Mark(step=step, dataset=dataset, kind=kind) for (step, dataset), kind in self._marks.items()]
        return sorted(marks, key=_step_of)

    @property
    def left_out(self) -> int:
        """How many series there are beyond `MAX_SERIES`; counted up to as many again."""
        return len(self._left_out)

    def _read(self, record: EvaluationRecord) -> None:
        self._mark(record)
        if record.outcome is not EvaluationOutcome.SCORED:
            return
        if self._contents.setdefault(record.dataset, record.dataset_digest) != record.dataset_digest:
            self._contents[record.dataset] = record.dataset_digest
            for key in [key for key in self._series if key[0] == record.dataset]:
                self._series[key] = _HeldSeries()
        for metric, value in record.metrics.items():
            held = self._held((record.dataset, metric))
            if held is not None:
                held.add(Point(record.step, value, record.intervals.get(metric)), record.configuration(metric))

    def _mark(self, record: EvaluationRecord) -> None:
        key, whole = (record.step, record.dataset), (record.step, WHOLE_CHECKPOINT)
        if record.outcome in _KIND_OF_OUTCOME:
            self._marks[key] = _KIND_OF_OUTCOME[record.outcome]
            self._marks.move_to_end(key)
            if len(self._marks) > MAX_MARKS:
                self._marks.popitem(last=False)
        elif record.outcome in (EvaluationOutcome.ACCEPTED, EvaluationOutcome.ROLLOUT_PROMOTED):
            self._clear(key, *MarkKind)
        if record.outcome in (EvaluationOutcome.ACCEPTED, EvaluationOutcome.SCORED):
            self._clear(key, MarkKind.FAILED)
            self._clear(whole, MarkKind.FAILED)

    def _clear(self, key: tuple[int, str], *kinds: MarkKind) -> None:
        if self._marks.get(key) in kinds:
            del self._marks[key]

    def _held(self, key: tuple[str, str]) -> _HeldSeries | None:
        held = self._series.get(key)
        if held is None and (len(self._series) < MAX_SERIES or key == self._monitored):
            held = self._series[key] = _HeldSeries()
        if held is None and len(self._left_out) < MAX_SERIES:
            self._left_out.add(key)
        return held


class _HeldSeries:
    """The points of one series, by ascending step, all of the metric's configuration at the newest one."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.values = 0
        self.not_finite = 0
        self._configuration = UNKNOWN_CONFIGURATION
        self._newest = -1

    def add(self, point: Point, configuration: MetricConfiguration) -> None:
        """Add a point; it replaces one of the same step. Ignore one of an earlier configuration."""
        is_other = configuration.is_other_than(self._configuration)
        if is_other and point.step < self._newest:
            return
        if is_other:
            self.points, self.values, self.not_finite = [], 0, 0
        if any(configuration) and point.step >= self._newest:
            self._configuration, self._newest = configuration, point.step
        if not math.isfinite(point.value):
            self.not_finite += 1
            return
        is_newest = not self.points or point.step > self.points[-1].step  # as most are
        place = len(self.points) if is_newest else bisect_left(self.points, point.step, key=_step_of)
        if place < len(self.points) and self.points[place].step == point.step:
            self.points[place] = point
            return
        self.points.insert(place, point)
        self.values += 1
        if len(self.points) > 2 * MAX_POINTS:
            self.points = thinned(self.points, MAX_POINTS)


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most this many of the points: of each of equally wide ranges of steps, the lowest and the highest.

    The first and the last point are kept.

    Args:
        points: Points by ascending step.
        most: How many to return at most; at least 4.
    """
    if len(points) <= most:
        return list(points)
    first, last = points[0], points[-1]
    ranges = most // 2 - 1
    width = (last.step - first.step) / ranges
    extremes: dict[int, tuple[Point, Point]] = {}
    for point in points[1:-1]:
        index = int((point.step - first.step) / width)
        low, high = extremes.get(index, (point, point))
        extremes[index] = (
            point if point.value < low.value else low,
            point if point.value > high.value else high,
        )
    inner = {point for pair in extremes.values() for point in pair}
    return [first, *sorted(inner, key=_step_of), last]
