"""Decides which checkpoint is best, which may be served, and which should be serving."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from understudy.checkpoints.atomic import write_json
from understudy.checkpoints.layout import BEST_FILE
from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.records.recorder import Recorder
from understudy.evaluator.settings import MonitorMode, VersionPolicy
from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord

_log = logging.getLogger(__name__)

LOSS = "loss"
_PAGE = 1000


@dataclass(frozen=True, kw_only=True)
class Monitor:
    """The metric of a dataset that ranks checkpoints, and whether less (``min``) or more (``max``) is better."""

    dataset: str
    metric: str
    mode: MonitorMode

    def value_of(self, record: EvaluationRecord) -> float | None:
        """Return the monitored value of a record, or None if it is missing or not comparable."""
        if not self.concerns(record) or self.is_unfit(record):
            return None
        return record.metrics.get(self.metric)

    def is_unfit(self, record: EvaluationRecord) -> bool:
        """Return whether a score on the monitored dataset has a loss or monitored value that is not finite."""
        values = (record.metrics.get(name, 0.0) for name in (LOSS, self.metric))
        return self.concerns(record) and not all(map(math.isfinite, values))

    def misses(self, record: EvaluationRecord) -> bool:
        """Return whether a score on the monitored dataset lacks the monitored metric."""
        return self.concerns(record) and self.metric not in record.metrics

    def is_better(self, value: float, than: float) -> bool:
        """Return whether a value is strictly better than another."""
        return value < than if self.mode == "min" else value > than

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

    A step whose loss or monitored value is not a finite number is unfit: it is never the best.
    """

    def __init__(self, monitor: Monitor | None) -> None:
        self._monitor = monitor
        self._lock = threading.Lock()
        self._values: dict[int, float] = {}
        self._unfit: set[int] = set()
        self._digests: dict[int, str] = {}

    def observe(self, records: Iterable[EvaluationRecord]) -> None:
        """Add records; a later record of a step replaces an earlier one."""
        if self._monitor is None:
            return
        for record in filter(self._monitor.concerns, records):
            if self._monitor.misses(record):
                _log.warning(
                    "monitored metric missing", extra={"metric": self._monitor.metric, "found": sorted(record.metrics)}
                )
            self._take(record, self._monitor)

    def _take(self, record: EvaluationRecord, monitor: Monitor) -> None:
        value = monitor.value_of(record)
        with self._lock:
            self._forget(record.step)
            self._digests[record.step] = record.checkpoint_digest
            if value is not None:
                self._values[record.step] = value
            elif monitor.is_unfit(record):
                self._unfit.add(record.step)

    def replaced(self, step: int, digest: str) -> None:
        """Forget the score of a step if it was another checkpoint's, as after a new training in the same folder."""
        with self._lock:
            if self._digests.get(step) not in (None, digest):
                self._forget(step)

    def _forget(self, step: int) -> None:
        self._values.pop(step, None)
        self._unfit.discard(step)
        self._digests.pop(step, None)

    def value(self, step: int) -> float | None:
        """Return the monitored value of a step, or None if it has none."""
        with self._lock:
            return self._values.get(step)

    def unfit(self) -> frozenset[int]:
        """Return the steps that were scored and are unfit."""
        with self._lock:
            return frozenset(self._unfit)

    def best(self, among: Collection[int] | None = None) -> int | None:
        """Return the best step (among those given), the earliest of equals, or None if none has a value."""
        best: tuple[int, float] | None = None
        with self._lock:
            for step, value in sorted(self._values.items()):
                if among is not None and step not in among:
                    continue
                if best is None or (self._monitor and self._monitor.is_better(value, best[1])):
                    best = (step, value)
        return None if best is None else best[0]


def choose(
    policy: VersionPolicy | int, *, pinned: int | None, loadable: Collection[int], ranking: Ranking
) -> int | None:
    """Return the step that should be serving, or None to keep the current one.

    Args:
        policy: The version policy.
        pinned: The step pinned at run time, which takes precedence over the policy.
        loadable: The steps that may be served: available, not in quarantine, and admitted by the gate.
        ranking: The scores so far.
    """
    if pinned is not None:
        return pinned if pinned in loadable else None
    if policy == "latest":
        return max(set(loadable) - ranking.unfit(), default=None)
    if policy == "best":
        return ranking.best(among=loadable)
    return policy if policy in loadable else None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Whether a checkpoint may be served, the reason, and the numbers behind it."""

    admitted: bool
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The condition on the monitored value of a checkpoint.

    Attributes:
        monitor: The monitored value, and whether less or more of it is better.
        min_value: The worst value that passes, or None for no such bound.
        min_improvement: The required improvement over the serving checkpoint, or None if none is required.
    """

    monitor: Monitor
    min_value: float | None = None
    min_improvement: float | None = None

    def judge(self, record: EvaluationRecord, *, incumbent: tuple[int, float] | None) -> Decision:
        """Decide on a checkpoint that was scored on the monitored dataset.

        Args:
            record: Its score.
            incumbent: The step that should be serving and its monitored value, or None if there is nothing to compare
                with.
        """
        name, value = self.monitor.metric, self.monitor.value_of(record)
        if value is None:
            return Decision(admitted=False, reason=self._without_a_value(record))
        numbers = {"value": value}
        if self.min_value is not None:
            numbers["min_value"] = self.min_value
            if self.monitor.is_better(self.min_value, value):
                bound = "at most" if self.monitor.mode == "min" else "at least"
                reason = f"{name} is {value!r}; {bound} {self.min_value!r} is required"
                return Decision(admitted=False, reason=reason, numbers=numbers)
        if self.min_improvement is None or incumbent is None:
            return Decision(admitted=True, reason=f"{name} is {value!r}", numbers=numbers)
        step, held = incumbent
        improvement = held - value if self.monitor.mode == "min" else value - held
        numbers |= {"serving_value": held, "improvement": improvement, "min_improvement": self.min_improvement}
        reason = f"{name} is {value!r}, {improvement!r} better than the {held!r} of the serving step {step}"
        if improvement < self.min_improvement:
            reason += f"; {self.min_improvement!r} is required"
            return Decision(admitted=False, reason=reason, numbers=numbers)
        return Decision(admitted=True, reason=reason, numbers=numbers)

    def _without_a_value(self, record: EvaluationRecord) -> str:
        name = self.monitor.metric
        if name not in record.metrics:
            return f"there is no metric {name}; there are {sorted(record.metrics)}"
        return (
            f"{name} is {record.metrics[name]!r}, the loss {record.metrics.get('loss')!r}; finite numbers are required"
        )


def build_gate(monitor: Monitor | None, *, min_value: float | None, min_improvement: float | None) -> Gate | None:
    """Return the gate of the settings, or None if they have none.

    Raises:
        ConfigurationError: There is no dataset to decide by.
    """
    if min_value is None and min_improvement is None:
        return None
    if monitor is None:
        raise ConfigurationError(
            "min_value and min_improvement decide by a score, and there is no dataset to score on; name an experiment "
            "or a file of data"
        )
    return Gate(monitor=monitor, min_value=min_value, min_improvement=min_improvement)


class Gatekeeper:
    """Applies a gate to every score in the ledger, in the order in which they were recorded, once for each checkpoint.

    Decisions are entries of the ledger themselves, so they outlive a restart. `admits` is thread-safe, `catch_up` is
    for one thread at a time.

    Args:
        gate: Decides.
        dataset: The monitored dataset.
        ranking: Provides the value of the serving checkpoint.
        ledger: Holds the scores and the decisions.
        recorder: Records the decisions.
    """

    def __init__(
        self, gate: Gate, *, dataset: EvaluationDataset, ranking: Ranking, ledger: Ledger, recorder: Recorder
    ) -> None:
        self._gate = gate
        self._dataset = dataset
        self._ranking = ranking
        self._ledger = ledger
        self._recorder = recorder
        self._read_up_to = 0
        self._undecided: dict[tuple[int, str], EvaluationRecord] = {}
        self._admitted: frozenset[tuple[int, str]] = frozenset()

    def admits(self, key: tuple[int, str]) -> bool:
        """Return whether a checkpoint, by step and digest, was admitted."""
        return key in self._admitted

    def catch_up(self, incumbent: Callable[[], int | None]) -> None:
        """Decide on all scores without a decision.

        Args:
            incumbent: Called before each decision; returns the step that should be serving.

        Raises:
            LedgerError: A decision cannot be recorded. The next call repeats it.
        """
        for record in self._unread():
            self._read(record)
        for key, record in list(self._undecided.items()):
            decision = self._gate.judge(record, incumbent=self._comparable(incumbent()))
            outcome = EvaluationOutcome.ACCEPTED if decision.admitted else EvaluationOutcome.REFUSED
            decided = self._recorder.record_reason(
                *key, outcome, decision.reason, dataset=self._dataset, metrics=decision.numbers
            )
            self._read(decided)

    def _unread(self) -> Iterator[EvaluationRecord]:
        while self._ledger.last_sequence > self._read_up_to:
            page = self._ledger.page(after_sequence=self._read_up_to, limit=_PAGE)
            self._read_up_to = page[-1].sequence
            yield from page

    def _read(self, record: EvaluationRecord) -> None:
        if record.dataset != self._dataset.name:
            return
        key = (record.step, record.checkpoint_digest)
        if record.outcome is EvaluationOutcome.SCORED:
            self._undecided[key] = record
        elif record.outcome in (EvaluationOutcome.ACCEPTED, EvaluationOutcome.REFUSED):
            self._undecided.pop(key, None)
            if record.outcome is EvaluationOutcome.ACCEPTED:
                self._admitted |= {key}

    def _comparable(self, step: int | None) -> tuple[int, float] | None:
        value = None if step is None else self._ranking.value(step)
        return None if step is None or value is None else (step, value)


class BestFile:
    """The file ``best.json`` in the state folder. For one thread at a time.

    It holds ``step`` and ``value``, and the criterion: ``dataset``, ``metric`` and ``mode``. The checkpoint itself is
    in the state folder's ``leases/`` while it is the best.

    Args:
        directory: The state folder.
        monitor: The criterion for the best checkpoint; None if there is none.
    """

    def __init__(self, directory: Path, monitor: Monitor | None) -> None:
        self._path = directory / BEST_FILE
        self._monitor = monitor
        self._written: tuple[int, float] | None = None

    def publish(self, step: int, value: float) -> None:
        """Write the best step and its value if they have changed; raise OSError if that fails."""
        if self._monitor is None or (step, value) == self._written:
            return
        by = {"dataset": self._monitor.dataset, "metric": self._monitor.metric, "mode": self._monitor.mode}
        write_json(self._path, {"step": step, "value": value, **by})
        self._written = (step, value)
