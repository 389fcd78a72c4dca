"""Ranks checkpoints by a metric of a dataset."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sortedcontainers import SortedDict, SortedList

from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.settings import MonitorMode
from understudy.evaluator.step_changes import StepChanges
from understudy.evaluator.types import UNKNOWN_CONFIGURATION, EvaluationOutcome, EvaluationRecord, MetricConfiguration

_log = logging.getLogger(__name__)

LOSS = "loss"


@dataclass(frozen=True, kw_only=True)
class Monitor:
    """The metric of a dataset that ranks checkpoints, and whether less (``min``) or more (``max``) is better."""

    dataset: str
    metric: str
    mode: MonitorMode

    def value_of(self, record: EvaluationRecord) -> float | None:
        """Return the monitored value of a record, or None if it is missing, undefined or not comparable."""
        if not self.concerns(record) or self.is_unfit(record):
            return None
        return record.metrics.get(self.metric)

    def is_unfit(self, record: EvaluationRecord) -> bool:
        """Return whether a score on the monitored dataset has a loss or monitored value that is not finite."""
        values = (record.metrics.get(name, 0.0) for name in (LOSS, self.metric))
        return self.concerns(record) and not all(map(math.isfinite, values))

    def misses(self, record: EvaluationRecord) -> bool:
        """Return whether a score on the monitored dataset lacks the monitored metric, which is not undefined either."""
        return self.concerns(record) and self.metric not in {*record.metrics, *record.undefined}

    def demerit(self, value: float) -> float:
        """Return a number that is lower the better a value is."""
        return value if self.mode == "min" else -value

    def concerns(self, record: EvaluationRecord) -> bool:
        """Return whether a record is a score on the monitored dataset."""
        return record.outcome is EvaluationOutcome.SCORED and record.dataset == self.dataset


def parse_monitor(text: str | None, mode: MonitorMode | None, datasets: Sequence[str]) -> Monitor | None:
    """Parse ``DATASET/METRIC``; the default is the first dataset's loss, or None if there is no dataset.

    Raises:
        ConfigurationError: There is no such dataset, or the mode is missing for a metric other than a loss.
    """
    if text is None:
        return Monitor(dataset=datasets[0], metric=LOSS, mode=mode or "min") if datasets else None
    dataset, _, metric = text.partition("/")
    if dataset not in datasets or not metric:
        raise ConfigurationError(
            f"monitor is {text!r}; expected DATASET/METRIC with one of the datasets {list(datasets)}"
        )
    if mode is None and metric != LOSS:
        raise ConfigurationError(f"monitor is {text!r}; say with monitor_mode whether its min or max is best")
    return Monitor(dataset=dataset, metric=metric, mode=mode or "min")


class Ranking:
    """The monitored value of every step that was scored. Thread-safe.

    A step whose loss or monitored value is not a finite number is unfit: it is never the best. Scores on other content
    of the monitored dataset are not compared with those on the present one. The best of the former content counts only
    for `best_to_serve`, until it is scored on the present one. Only steps whose monitored metric is configured as that
    of the newest step are compared; a score that does not say how counts with any.

    The values are kept in order: finding the best takes as long with many steps as with few.

    Args:
        monitor: The criterion; None if there is none.
        content: The digest of the monitored dataset.

    Attributes:
        changes: Notes the steps whose score changes.
    """

    def __init__(self, monitor: Monitor | None, content: str = "") -> None:
        self._monitor = monitor
        self._lock = threading.Lock()
        self._subsets: list[RankedSubset] = []
        self._present = _Scores(content, self._subsets)
        self._former: _Scores | None = None
        self._warned_of: set[MetricConfiguration] = set()
        self.changes = StepChanges()

    def observe(self, records: Iterable[EvaluationRecord]) -> None:
        """Add records; a later record of a step replaces an earlier one."""
        if self._monitor is None:
            return
        for record in filter(self._monitor.concerns, records):
            if record.dataset_digest == self._present.content and self._monitor.misses(record):
                _log.warning(
                    "monitored metric missing", extra={"metric": self._monitor.metric, "found": sorted(record.metrics)}
                )
            with self._lock:
                self._take(record, self._monitor)
            self.changes.note(record.step)

    def _take(self, record: EvaluationRecord, monitor: Monitor) -> None:
        scores = self._scores_on(record.dataset_digest)
        scores.forget(record.step)
        scores.digests[record.step] = record.checkpoint_digest
        value = monitor.value_of(record)
        if value is not None:
            configuration = record.configuration(monitor.metric)
            scores.put(record.step, _Value(value, monitor.demerit(value), configuration))
            self._warn_of_others(record.step, configuration, scores)
        elif monitor.is_unfit(record):
            scores.unfit.add(record.step)

    def _scores_on(self, content: str) -> _Scores:
        if content == self._present.content:
            return self._present
        if self._former is None or self._former.content != content:
            self._former = _Scores(content, self._subsets)
        return self._former

    def replaced(self, step: int, digest: str) -> None:
        """Forget the score of a step if it was another checkpoint's, as after a new training in the same folder."""
        with self._lock:
            others = [scores for scores in self._contents() if scores.digests.get(step) not in (None, digest)]
            for scores in others:
                scores.forget(step)
        if others:
            self.changes.note(step)

    def _contents(self) -> list[_Scores]:
        return [self._present] if self._former is None else [self._present, self._former]

    def _warn_of_others(self, step: int, own: MetricConfiguration, scores: _Scores) -> None:
        """Log the first score of each further configuration of the monitored metric."""
        known = set(scores.order.configurations)
        if own not in self._warned_of and any(own.is_other_than(other) for other in known):
            self._warned_of |= known
            _log.warning("scores of differently configured metrics are not ranked together", extra={"step": step})

    @property
    def monitor(self) -> Monitor | None:
        """The criterion; None if there is none."""
        return self._monitor

    def value(self, step: int) -> float | None:
        """Return the monitored value of a step, or None if it has none."""
        with self._lock:
            found = self._present.values.get(step)
        return None if found is None else found.value

    def is_unfit(self, step: int) -> bool:
        """Return whether a step was scored and is unfit."""
        with self._lock:
            return step in self._present.unfit

    def best(self, *, but: int | None = None) -> int | None:
        """Return the best step (but not one), the earliest of equals, or None without a value."""
        with self._lock:
            return self._present.best(self._present.order, but=but)

    def best_to_serve(self) -> int | None:
        """Return the best step; that of the former content while it has no score on the present one."""
        return self._best_to_serve(lambda scores: scores.best(scores.order))

    def best_to_serve_among(self, steps: Collection[int]) -> int | None:
        """Return the best of some steps, as `best_to_serve` does. Looks at each of them."""
        return self._best_to_serve(lambda scores: scores.best_among(steps))

    def subset(self) -> RankedSubset:
        """Return a set of steps, at first empty, whose best is kept up to date."""
        subset = RankedSubset(self)
        with self._lock:
            self._subsets.append(subset)
            for scores in self._contents():
                scores.orders[subset] = _Order()
        return subset

    def _best_to_serve(self, best: Callable[[_Scores], int | None]) -> int | None:
        with self._lock:
            former = None if self._former is None else best(self._former)
            is_scored = former in self._present.values or former in self._present.unfit
            return best(self._present) if former is None or is_scored else former

    def _best_of(self, subset: RankedSubset) -> int | None:
        with self._lock:
            return self._present.best(self._present.orders[subset])

    def _best_of_to_serve(self, subset: RankedSubset) -> int | None:
        return self._best_to_serve(lambda scores: scores.best(scores.orders[subset]))

    def _include(self, subset: RankedSubset, step: int, *, is_member: bool) -> None:
        with self._lock:
            if is_member == (step in subset.steps):
                return
            (subset.steps.add if is_member else subset.steps.discard)(step)
            for scores in self._contents():
                if (value := scores.values.get(step)) is not None:
                    order = scores.orders[subset]
                    (order.add if is_member else order.remove)(step, value)


class RankedSubset:
    """Steps of which the best is found at once, with many as with few. Thread-safe. Made by `Ranking.subset`."""

    def __init__(self, ranking: Ranking) -> None:
        self._ranking = ranking
        self.steps: set[int] = set()

    def include(self, step: int, *, is_member: bool) -> None:
        """Add a step, which need not have a value, or remove it."""
        self._ranking._include(self, step, is_member=is_member)  # noqa: SLF001 - under the ranking's lock, as below

    def best(self) -> int | None:
        """Return the best of these steps; see `Ranking.best`."""
        return self._ranking._best_of(self)  # noqa: SLF001

    def best_to_serve(self) -> int | None:
        """Return the best of these steps; see `Ranking.best_to_serve`."""
        return self._ranking._best_of_to_serve(self)  # noqa: SLF001


class _Value(NamedTuple):
    """A monitored value, a number that is lower the better it is, and how its metric is configured."""

    value: float
    demerit: float
    configuration: MetricConfiguration


class _Order:
    """Steps of each configuration in the order of their values, the earliest of equals first."""

    def __init__(self) -> None:
        self.configurations: dict[MetricConfiguration, SortedList[tuple[float, int]]] = {}

    def add(self, step: int, value: _Value) -> None:
        self.configurations.setdefault(value.configuration, SortedList()).add((value.demerit, step))

    def remove(self, step: int, value: _Value) -> None:
        places = self.configurations[value.configuration]
        places.remove((value.demerit, step))
        if not places:
            del self.configurations[value.configuration]


class _Scores:
    """The scores on one content of the monitored dataset."""

    def __init__(self, content: str, subsets: Iterable[RankedSubset]) -> None:
        self.content = content
        self.values: dict[int, _Value] = {}
        self.unfit: set[int] = set()
        self.digests: dict[int, str] = {}
        self.order = _Order()
        self.orders = {subset: _Order() for subset in subsets}
        self._configured: SortedDict[int, MetricConfiguration] = SortedDict()

    def put(self, step: int, value: _Value) -> None:
        self.values[step] = value
        if any(value.configuration):
            self._configured[step] = value.configuration
        for order in self._orders_with(step):
            order.add(step, value)

    def forget(self, step: int) -> None:
        self.unfit.discard(step)
        self.digests.pop(step, None)
        self._configured.pop(step, None)
        if (value := self.values.pop(step, None)) is not None:
            for order in self._orders_with(step):
                order.remove(step, value)

    def _orders_with(self, step: int) -> list[_Order]:
        return [self.order, *(order for subset, order in self.orders.items() if step in subset.steps)]

    def best(self, order: _Order, *, but: int | None = None) -> int | None:
        newest = self._newest_configuration()
        places = (
            place
            for configuration, places in order.configurations.items()
            if not newest.is_other_than(configuration)
            for place in places[:2]
            if place[1] != but
        )
        return min(places, default=(0.0, None))[1]

    def best_among(self, steps: Iterable[int]) -> int | None:
        newest = self._newest_configuration()
        found = ((self.values[step], step) for step in steps if step in self.values)
        places = ((value.demerit, step) for value, step in found if not newest.is_other_than(value.configuration))
        return min(places, default=(0.0, None))[1]

    def _newest_configuration(self) -> MetricConfiguration:
        return self._configured.peekitem()[1] if self._configured else UNKNOWN_CONFIGURATION
