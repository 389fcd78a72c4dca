"""The gate: decides once for each checkpoint, by its score, whether it may be served, and records the decision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.records.recorder import Recorder
from understudy.evaluator.serving.promotion import Monitor, Ranking
from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord

_PAGE = 1000


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
