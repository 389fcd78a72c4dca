"""Decides which checkpoint is best, and which of those that may be served should be serving."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from understudy.checkpoints.atomic import write_json
from understudy.checkpoints.layout import BEST_FILE
from understudy.evaluator.evaluator_errors import ConfigurationError, StorageError
from understudy.evaluator.settings import MonitorMode, VersionPolicy
from understudy.evaluator.types import UNKNOWN_CONFIGURATION, EvaluationOutcome, EvaluationRecord, MetricConfiguration

_log = logging.getLogger(__name__)

LOSS = "loss"

PIN_FILE = "pin.json"


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

    A step whose loss or monitored value is not a finite number is unfit: it is never the best. Scores on other content
    of the monitored dataset are not compared with those on the present one. The best of the former content counts only
    for `best_to_serve`, until it is scored on the present one. Only steps whose monitored metric is configured as that
    of the newest step are compared; a score that does not say how counts with any.

    Args:
        monitor: The criterion; None if there is none.
        content: The digest of the monitored dataset.
    """

    def __init__(self, monitor: Monitor | None, content: str = "") -> None:
        self._monitor = monitor
        self.content = content
        self._lock = threading.Lock()
        self._values: dict[int, float] = {}
        self._configurations: dict[int, MetricConfiguration] = {}
        self._warned_of: set[MetricConfiguration] = set()
        self._unfit: set[int] = set()
        self._digests: dict[int, str] = {}
        self._former: Ranking | None = None

    def observe(self, records: Iterable[EvaluationRecord]) -> None:
        """Add records; a later record of a step replaces an earlier one."""
        if self._monitor is None:
            return
        for record in filter(self._monitor.concerns, records):
            if record.dataset_digest != self.content:
                self._take_former(record, self._monitor)
                continue
            if self._monitor.misses(record):
                _log.warning(
                    "monitored metric missing", extra={"metric": self._monitor.metric, "found": sorted(record.metrics)}
                )
            self._take(record, self._monitor)

    def _take_former(self, record: EvaluationRecord, monitor: Monitor) -> None:
        if self._former is None or self._former.content != record.dataset_digest:
            self._former = Ranking(monitor, record.dataset_digest)
        self._former.observe([record])

    def _take(self, record: EvaluationRecord, monitor: Monitor) -> None:
        value = monitor.value_of(record)
        with self._lock:
            self._forget(record.step)
            self._digests[record.step] = record.checkpoint_digest
            if value is not None:
                self._values[record.step] = value
                self._configurations[record.step] = record.configuration(monitor.metric)
                self._warn_of_others(record.step)
            elif monitor.is_unfit(record):
                self._unfit.add(record.step)

    def replaced(self, step: int, digest: str) -> None:
        """Forget the score of a step if it was another checkpoint's, as after a new training in the same folder."""
        with self._lock:
            if self._digests.get(step) not in (None, digest):
                self._forget(step)
        if self._former is not None:
            self._former.replaced(step, digest)

    def _warn_of_others(self, step: int) -> None:
        """Log the first score of each further configuration of the monitored metric."""
        own, known = self._configurations[step], set(self._configurations.values())
        if own not in self._warned_of and any(own.is_other_than(other) for other in known):
            self._warned_of |= known
            _log.warning("scores of differently configured metrics are not ranked together", extra={"step": step})

    def _comparable(self) -> dict[int, float]:
        """Return the values of the steps that are configured as the newest one."""
        known = (step for step, configuration in self._configurations.items() if any(configuration))
        newest = self._configurations.get(max(known, default=-1), UNKNOWN_CONFIGURATION)
        return {
            step: value for step, value in self._values.items() if not newest.is_other_than(self._configurations[step])
        }

    def _forget(self, step: int) -> None:
        self._values.pop(step, None)
        self._configurations.pop(step, None)
        self._unfit.discard(step)
        self._digests.pop(step, None)

    @property
    def monitor(self) -> Monitor | None:
        """The criterion; None if there is none."""
        return self._monitor

    def value(self, step: int) -> float | None:
        """Return the monitored value of a step, or None if it has none."""
        with self._lock:
            return self._values.get(step)

    def unfit(self) -> frozenset[int]:
        """Return the steps that were scored and are unfit."""
        with self._lock:
            return frozenset(self._unfit)

    def best_to_serve(self, among: Collection[int] | None = None) -> int | None:
        """Return the best step (among those given); that of the former content while it has no score on the present."""
        former = None if self._former is None else self._former.best(among)
        with self._lock:
            is_scored = former in self._values or former in self._unfit
        return self.best(among) if former is None or is_scored else former

    def best(self, among: Collection[int] | None = None, *, but: int | None = None) -> int | None:
        """Return the best step (among those given, but not one), the earliest of equals, or None without a value."""
        best: tuple[int, float] | None = None
        with self._lock:
            for step, value in sorted(self._comparable().items()):
                if step == but or (among is not None and step not in among):
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
        return ranking.best_to_serve(among=loadable)
    return policy if policy in loadable else None


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


class PinFile:
    """A file that holds the pinned step or null. For one thread at a time.

    Args:
        directory: The state folder.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / PIN_FILE

    def read(self) -> int | None:
        """Return the pinned step.

        Raises:
            ConfigurationError: The file is damaged.
        """
        try:
            step = json.loads(self._path.read_bytes())["step"]
            return None if step is None else int(step)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{self._path} is damaged ({error}); delete it to serve without a pin") from error

    def write(self, step: int | None) -> None:
        """Replace the pin durably.

        Raises:
            StorageError: The file cannot be written, for example on a full disk. The old pin stays.
        """
        try:
            write_json(self._path, {"step": step})
        except OSError as error:
            raise StorageError(f"the pin {self._path} cannot be written: {error}; check the disk's space") from error


class Pin:
    """The pin that an operator decided last, and the one to return to if that cannot be carried out. Thread-safe.

    Decisions are numbered, from 1 on; a return to the pin before is one as well.

    Args:
        file: Keeps the pin across restarts.
        is_used: Whether there may be a pin; otherwise the file is not read.

    Raises:
        ConfigurationError: The file is damaged.
    """

    def __init__(self, file: PinFile, *, is_used: bool = True) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._step = self._kept = file.read() if is_used else None
        self._decided = self._kept_by = 0

    @property
    def step(self) -> int | None:
        """The pinned step, or None."""
        with self._lock:
            return self._step

    @property
    def decided(self) -> int:
        """The number of the last decision; 0 before the first."""
        with self._lock:
            return self._decided

    def decide(self, step: int) -> int:
        """Pin a step; return the number of the decision."""
        with self._lock:
            self._step = step
            self._decided += 1
            return self._decided

    def remove(self) -> int:
        """Remove the pin, also from the file; return the number of the decision. Raise StorageError if that fails."""
        with self._lock:
            self._file.write(None)
            self._step = self._kept = None
            self._decided += 1
            self._kept_by = self._decided
            return self._decided

    def keep(self, number: int, step: int | None) -> int | None:
        """Write what was decided, once it is carried out, unless a later decision was; return the pin now.

        Raises:
            StorageError: The file cannot be written.
        """
        with self._lock:
            if number > self._kept_by:
                self._file.write(step)
                self._kept, self._kept_by = step, number
            return self._step

    def undo(self, number: int) -> None:
        """Return to the pin that was kept last, if there was no later decision."""
        with self._lock:
            if self._decided == number:
                self._step = self._kept
                self._decided += 1
