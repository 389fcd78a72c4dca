"""Applies the conditions of a gate to the scores in the ledger, and records the decisions."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.records.recorder import Recorder
from understudy.evaluator.serving.gate_trial import Baselines, GateTrial, outcome_of
from understudy.evaluator.serving.gates import ACCEPTED, REFUSED, SERVE, UNDECIDED, Condition, Gate
from understudy.evaluator.serving.ranking import Ranking
from understudy.evaluator.step_changes import StepChanges
from understudy.evaluator.types import (
    WHOLE_CHECKPOINT,
    CheckpointKey,
    EvaluationOutcome,
    EvaluationRecord,
    GateCondition,
    HeldBack,
)

_log = logging.getLogger(__name__)

_PAGE = 1000
_DECISIONS = (ACCEPTED, REFUSED, UNDECIDED)


class Gatekeeper:
    """Applies a gate to every score in the ledger, in the order in which they were recorded, once for each checkpoint.

    Decisions are entries of the ledger themselves, so they outlive a restart. An undecided checkpoint is decided again
    when it, or the version it was compared with, has a new score. `admits` is thread-safe, `catch_up` is for one thread
    at a time.

    Args:
        gate: The conditions.
        datasets: The datasets of the conditions, and the further one.
        ranking: Provides the best checkpoint.
        ledger: Holds the scores and the decisions.
        recorder: Records the decisions, and has undecided checkpoints scored on the further dataset.

    Attributes:
        changes: Notes the steps that are admitted.
    """

    def __init__(
        self,
        gate: Gate,
        *,
        datasets: Sequence[EvaluationDataset],
        ranking: Ranking,
        ledger: Ledger,
        recorder: Recorder,
    ) -> None:
        self._gate = gate
        self._datasets = {dataset.name: dataset for dataset in datasets}
        self._ranking = ranking
        self._ledger = ledger
        self._recorder = recorder
        self._read_up_to = 0
        self._open: dict[CheckpointKey, None] = {}
        self._pending: set[CheckpointKey] = set()
        self._decided: set[CheckpointKey] = set()
        self._undecided: set[CheckpointKey] = set()
        self._reopened_by: dict[int, set[CheckpointKey]] = {}
        self._admitted: set[CheckpointKey] = set()
        self._held_back: HeldBack | None = None
        self._warned: set[str] = set()
        self.changes = StepChanges()

    def admits(self, key: CheckpointKey) -> bool:
        """Return whether a checkpoint, by step and digest, may be served."""
        return key in self._admitted

    def held_back(self) -> HeldBack | None:
        """Return the last checkpoint that the gate did not admit, or cannot decide on; None if it admitted a later one.

        Thread-safe.
        """
        return self._held_back

    @property
    def read_up_to(self) -> int:
        """The sequence number of the last entry that `catch_up` read."""
        return self._read_up_to

    def refuses(self, key: CheckpointKey, serving: Callable[[], Baselines]) -> str:
        """Return why a checkpoint would be refused by its newest scores; empty if it would not, or if one is missing.

        What was decided stays so. For the thread that calls `catch_up`.

        Raises:
            LedgerError: The ledger cannot be read.
        """
        trial = GateTrial(key, serving(), self._datasets, self._ranking, self._recorder)
        if not all(trial.score(key, name) for name in self._gate.datasets):
            return ""
        results = trial.results(self._gate.conditions)
        return _reason(results) if outcome_of(results) is REFUSED else ""

    def catch_up(self, serving: Callable[[], Baselines]) -> None:
        """Decide on all scores without a decision.

        Args:
            serving: Called before each decision; returns the checkpoint that should be serving.

        Raises:
            LedgerError: A decision cannot be recorded. The next call repeats it.
        """
        read_before = self._read_up_to
        for record in self._unread():
            self._read(record)
        for key in list(self._open):
            if self._read_up_to > read_before or key not in self._pending:
                self._decide(key, serving())

    def _unread(self) -> Iterator[EvaluationRecord]:
        while self._ledger.last_sequence > self._read_up_to:
            page = self._ledger.page(after_sequence=self._read_up_to, limit=_PAGE)
            self._read_up_to = page[-1].sequence
            yield from page

    def _read(self, record: EvaluationRecord) -> None:
        key = (record.step, record.checkpoint_digest)
        if record.outcome is EvaluationOutcome.SCORED:
            self._read_score(record, key)
        elif record.outcome in _DECISIONS and record.dataset in (self._decision_dataset, self._gate.further_dataset):
            self._read_decision(record, key)
        elif record.outcome is EvaluationOutcome.FAILED:
            self._read_failure(record, key)

    def _read_failure(self, record: EvaluationRecord, key: CheckpointKey) -> None:
        dataset = self._datasets.get(record.dataset)
        is_decided = key in self._decided or key in self._undecided
        if dataset is not None and record.dataset_digest == dataset.digest and not is_decided:
            reason = (
                f"the gate cannot decide on step {record.step}, as its evaluation on {record.dataset!r} failed: "
                f"{record.reason}"
            )
            self._held_back = HeldBack(step=record.step, reason=reason)

    def _read_score(self, record: EvaluationRecord, key: CheckpointKey) -> None:
        dataset = self._datasets.get(record.dataset)
        if dataset is None or record.dataset_digest != dataset.digest:
            return
        if key not in self._decided and key not in self._undecided:
            self._open[key] = None
        for waiting in self._reopened_by.pop(record.step, set()) & self._undecided:
            self._undecided.discard(waiting)
            self._open[waiting] = None

    def _read_decision(self, record: EvaluationRecord, key: CheckpointKey) -> None:
        is_final = record.outcome is not UNDECIDED
        may_go_on = self._gate.further_dataset is not None and record.dataset != self._gate.further_dataset
        if is_final or not may_go_on:
            self._open.pop(key, None)
            self._pending.discard(key)
        if is_final:
            self._decided.add(key)
            self._undecided.discard(key)
        elif not may_go_on:
            self._undecided.add(key)
            for step in (record.step, *(condition.baseline_step for condition in record.conditions)):
                if step is not None:
                    self._reopened_by.setdefault(step, set()).add(key)
        if self._is_admitted(record.outcome):
            self._admitted.add(key)
            self.changes.note(key[0])
        self._explain(record.step, record.outcome, record.reason)

    def _is_admitted(self, outcome: EvaluationOutcome) -> bool:
        return outcome is ACCEPTED or (outcome is UNDECIDED and self._gate.when_undecided == SERVE)

    def _explain(self, step: int, outcome: EvaluationOutcome, reason: str) -> None:
        """Keep why a checkpoint is held back."""
        said = "is undecided on" if outcome is UNDECIDED else "refused"
        held_back = HeldBack(step=step, reason=f"the gate {said} step {step}: {reason}")
        self._held_back = None if self._is_admitted(outcome) else held_back

    @property
    def _decision_dataset(self) -> str:
        """The dataset of the entries of decisions: that of the conditions if they have one in common."""
        return next(iter(self._gate.datasets)) if len(self._gate.datasets) == 1 else WHOLE_CHECKPOINT

    def _decide(self, key: CheckpointKey, serving: Baselines) -> None:
        """Decide on a checkpoint if it has all scores, else leave it open."""
        trial = GateTrial(key, serving, self._datasets, self._ranking, self._recorder)
        if not all(trial.score(key, name) for name in self._gate.datasets):
            return
        results = trial.results(self._gate.conditions)
        self._warn(trial)
        further = self._gate.further_dataset
        if further is None or outcome_of(results) is not UNDECIDED:
            self._record(trial, results, self._decision_dataset)
            return
        open_conditions = [
            condition
            for condition, result in zip(self._gate.conditions, results, strict=True)
            if result.outcome is UNDECIDED
        ]
        if trial.request(further, open_conditions):
            self._record(trial, results, self._decision_dataset)
            self._pending.add(key)
            return
        if trial.score(key, further):
            again = iter(trial.results(open_conditions, dataset=further))
            results = [next(again) if result.outcome is UNDECIDED else result for result in results]
        else:
            failed = f"; there is no score on {further!r}, as that evaluation failed"
            results = [
                replace(each, reason=each.reason + failed) if each.outcome is UNDECIDED else each for each in results
            ]
        self._record(trial, results, further)

    def _warn(self, trial: GateTrial) -> None:
        """Log once for each condition that it cannot be decided, as it may be so for every checkpoint."""
        for text in trial.undecidable.keys() - self._warned:
            self._warned.add(text)
            _log.warning(
                "a condition of the gate cannot be decided",
                extra={"gate": text, "step": trial.key[0], "reason": trial.undecidable[text]},
            )

    def _record(self, trial: GateTrial, results: Sequence[GateCondition], dataset: str) -> None:
        outcome, reason = outcome_of(results), _reason(results)
        self._explain(trial.key[0], outcome, reason)  # before the entry is known
        decided = self._recorder.record_decision(
            *trial.key,
            outcome,
            reason,
            dataset=dataset,
            dataset_digest=self._digest(dataset),
            metrics=_numbers(self._gate.conditions, results),
            conditions=results,
            decided_on=trial.used,
        )
        self._read_decision(decided, trial.key)

    def _digest(self, dataset: str) -> str:
        if dataset:
            return self._datasets[dataset].digest
        contents = "\n".join(f"{name}:{self._datasets[name].digest}" for name in sorted(self._gate.datasets))
        return hashlib.sha256(contents.encode()).hexdigest()


def _reason(results: Sequence[GateCondition]) -> str:
    """Return the reason of the first condition that decides; of an accepted checkpoint, all reasons."""
    outcome = outcome_of(results)
    reasons = [result.reason for result in results if result.outcome is outcome]
    if outcome is not ACCEPTED:
        return reasons[0]
    # The reason of a bound begins that of a comparison of the same value.
    return "; ".join(
        reason for reason in dict.fromkeys(reasons) if not any(other.startswith(f"{reason},") for other in reasons)
    )


def _numbers(conditions: Sequence[Condition], results: Sequence[GateCondition]) -> dict[str, float]:
    """Return the numbers that ``min_value`` and ``min_improvement`` compared, by their names."""
    numbers: dict[str, float] = {}
    for condition, result in zip(conditions, results, strict=True):
        if condition.setting is None or not math.isfinite(result.value):
            continue
        numbers["value"] = result.value
        if condition.setting == "min_value":
            numbers["min_value"] = condition.number
        elif result.baseline_value is not None:
            numbers["serving_value"] = result.baseline_value
            numbers["improvement"] = float(condition.merit(result.value, result.baseline_value))
            numbers["min_improvement"] = condition.number
    return numbers
