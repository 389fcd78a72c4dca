"""Applies the conditions of a gate to the scores in the ledger, and records the decisions."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.records.ledger import WHOLE_CHECKPOINT, Ledger
from understudy.evaluator.records.recorder import Recorder
from understudy.evaluator.serving.gates import (
    ACCEPTED,
    REFUSED,
    UNDECIDED,
    Condition,
    Measured,
    judge,
    least_resamples,
    outcome_of,
    parse_gate,
)
from understudy.evaluator.serving.promotion import LOSS, Monitor, Ranking
from understudy.evaluator.settings import EvaluatorSettings
from understudy.evaluator.types import Arrays, CheckpointInfo, EvaluationOutcome, EvaluationRecord, GateCondition

KEEP, SERVE = "keep", "serve"
"""What to do with an undecided checkpoint, unless it is scored on one more dataset."""

GATE_RESAMPLES = 1000
"""The resamples for a gate at a confidence, unless the settings say how many."""

_PAGE = 1000
_DECISIONS = (ACCEPTED, REFUSED, UNDECIDED)

_Key = tuple[int, str]


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The conditions that a checkpoint must meet before it is served.

    Attributes:
        conditions: All must be met.
        when_undecided: ``keep`` (the present version), ``serve`` (the new one), or the name of a dataset to decide on.
    """

    conditions: tuple[Condition, ...]
    when_undecided: str = KEEP

    @property
    def datasets(self) -> frozenset[str]:
        """The datasets that the conditions are decided on at first."""
        return frozenset(condition.dataset for condition in self.conditions)

    @property
    def further_dataset(self) -> str | None:
        """The dataset that undecided checkpoints are scored on in addition, or None."""
        return None if self.when_undecided in (KEEP, SERVE) else self.when_undecided

    def resamples(self, given: int) -> int:
        """Return how many resamples to draw, from the number in the settings.

        Raises:
            ConfigurationError: The number is too small for the confidence of the conditions.
        """
        least = least_resamples(self.conditions)
        if not given:
            return max(GATE_RESAMPLES, least) if least else 0
        if given < least:
            raise ConfigurationError(
                f"resamples is {given}; the gates at a confidence need at least {least}, so that a resample or more "
                "lies beyond each bound of the widest interval"
            )
        return given


def further_dataset(settings: EvaluatorSettings, names: Sequence[str]) -> str | None:
    """Return the name of the dataset that only undecided checkpoints are scored on, or None.

    Raises:
        ConfigurationError: There is no such dataset, or it is the only one.
    """
    name = settings.when_undecided
    if name in (KEEP, SERVE):
        return None
    if name not in names or len(names) == 1:
        raise ConfigurationError(
            f"when_undecided is {name!r}; give serve, keep, or one of several datasets; there are {list(names)}"
        )
    if settings.evaluation_policy == "latest":
        raise ConfigurationError(
            f"when_undecided is {name!r}, and evaluation_policy is latest, which skips the checkpoints to compare "
            "with; give every or a number"
        )
    return name


def build_gate(
    settings: EvaluatorSettings, monitor: Monitor | None, datasets: Sequence[str], slices: Sequence[frozenset[str]]
) -> Gate | None:
    """Return the gate of the settings, or None if they have none.

    Args:
        settings: The operator's settings.
        monitor: The monitored metric; None without datasets.
        datasets: The names of the datasets that every checkpoint is scored on.
        slices: The configured slices, each by the names of its features.

    Raises:
        ConfigurationError: There is no dataset to decide by, or a condition cannot be read.
    """
    given = [name for name in ("gate", "min_value", "min_improvement") if getattr(settings, name) not in (None, ())]
    if given and monitor is None:
        raise ConfigurationError(
            f"{' and '.join(given)} decide by a score, and there is no dataset to score on; name an experiment or a "
            "file of data"
        )
    modes = {f"{monitor.dataset}/{monitor.metric}": monitor.mode} if monitor and settings.monitor_mode else {}
    conditions = [*(_shorthands(settings, monitor) if monitor else ())]
    conditions += [parse_gate(text, datasets=datasets, modes=modes, slices=slices) for text in settings.gate]
    if settings.when_undecided != KEEP and all(condition.confidence is None for condition in conditions):
        raise ConfigurationError(
            f"when_undecided is {settings.when_undecided!r}, and no gate has a confidence; write one such as "
            "'test/accuracy not worse by 0.01 at 95%'"
        )
    return Gate(conditions=tuple(conditions), when_undecided=settings.when_undecided) if conditions else None


def _shorthands(settings: EvaluatorSettings, monitor: Monitor) -> Iterator[Condition]:
    """Yield the conditions that ``min_value`` and ``min_improvement`` stand for."""
    value, improvement = settings.min_value, settings.min_improvement
    name = f"{monitor.dataset}/{monitor.metric}"
    if value is not None:
        yield Condition(
            text=f"{name} {'>=' if monitor.mode == 'max' else '<='} {value!r}",
            dataset=monitor.dataset,
            metric=monitor.metric,
            rule="at least" if monitor.mode == "max" else "at most",
            number=value,
            mode=monitor.mode,
            setting="min_value",
        )
    if improvement is not None:
        yield Condition(
            text=f"{name} better by {improvement!r}",
            dataset=monitor.dataset,
            metric=monitor.metric,
            rule="better",
            number=improvement,
            baseline="serving",
            mode=monitor.mode,
            setting="min_improvement",
        )


class Serving(NamedTuple):
    """The checkpoint that should be serving, and a function that finds known checkpoints by their steps."""

    info: CheckpointInfo | None
    find: Callable[[int], CheckpointInfo | None]


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
        self._open: dict[_Key, None] = {}
        self._pending: set[_Key] = set()
        self._decided: set[_Key] = set()
        self._undecided: set[_Key] = set()
        self._reopened_by: dict[int, set[_Key]] = {}
        self._admitted: frozenset[_Key] = frozenset()

    def admits(self, key: tuple[int, str]) -> bool:
        """Return whether a checkpoint, by step and digest, may be served."""
        return key in self._admitted

    def catch_up(self, serving: Callable[[], Serving]) -> None:
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

    def _read_score(self, record: EvaluationRecord, key: _Key) -> None:
        dataset = self._datasets.get(record.dataset)
        if dataset is None or record.dataset_digest != dataset.digest:
            return
        if key not in self._decided and key not in self._undecided:
            self._open[key] = None
        for waiting in self._reopened_by.pop(record.step, set()) & self._undecided:
            self._undecided.discard(waiting)
            self._open[waiting] = None

    def _read_decision(self, record: EvaluationRecord, key: _Key) -> None:
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
        if record.outcome is ACCEPTED or (record.outcome is UNDECIDED and self._gate.when_undecided == SERVE):
            self._admitted |= {key}

    @property
    def _decision_dataset(self) -> str:
        """The dataset of the entries of decisions: that of the conditions if they have one in common."""
        return next(iter(self._gate.datasets)) if len(self._gate.datasets) == 1 else WHOLE_CHECKPOINT

    def _decide(self, key: _Key, serving: Serving) -> None:
        """Decide on a checkpoint if it has all scores, else leave it open."""
        trial = _Trial(key, serving, self._datasets, self._ranking, self._recorder)
        if not all(trial.score(key, name) for name in self._gate.datasets):
            return
        results = trial.results(self._gate.conditions)
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
        self._record(trial, results, further)

    def _record(self, trial: _Trial, results: Sequence[GateCondition], dataset: str) -> None:
        decided = self._recorder.record_decision(
            *trial.key,
            outcome_of(results),
            _reason(results),
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


class _Trial:
    """The values of one checkpoint and of what it is compared with, for one decision."""

    def __init__(
        self,
        key: _Key,
        serving: Serving,
        datasets: Mapping[str, EvaluationDataset],
        ranking: Ranking,
        recorder: Recorder,
    ) -> None:
        self.key = key
        self._serving = serving
        self._datasets = datasets
        self._ranking = ranking
        self._recorder = recorder
        self._used: dict[int, Arrays] = {}

    @property
    def used(self) -> str:
        """Identifies the scores that were used."""
        return ",".join(map(str, sorted(self._used)))

    def score(self, key: _Key, dataset: str) -> EvaluationRecord | None:
        """Return the newest score of a checkpoint on the present content of a dataset, or None."""
        return self._recorder.score(*key, self._datasets[dataset])

    def request(self, dataset: str, conditions: Sequence[Condition]) -> bool:
        """Have the checkpoint, and what it is compared with, scored on a further dataset; return False if they were."""
        baselines = {self._baseline(condition) for condition in conditions}
        keys = {self.key, *(key for key in baselines if key is not None and self._serving.find(key[0]) is not None)}
        return sum(self._recorder.request(*key, self._datasets[dataset]) for key in keys) > 0

    def results(self, conditions: Sequence[Condition], *, dataset: str | None = None) -> list[GateCondition]:
        """Decide on conditions, on their own datasets or on another."""
        return judge([(each, self._measure(each, dataset or each.dataset)) for each in conditions])

    def _baseline(self, condition: Condition) -> _Key | None:
        if condition.baseline is None:
            return None
        info = self._serving.info
        if condition.baseline == "best":
            best = self._ranking.best(but=self.key[0])
            info = None if best is None else self._serving.find(best)
        return None if info is None else info.key

    def _measure(self, condition: Condition, dataset: str) -> Measured:
        record = self.score(self.key, dataset)
        assert record is not None  # noqa: S101 - `Gatekeeper._decide` looked
        resampled = self._resampled(record).get(condition.key)
        value, lacks = _value(record, condition)
        if lacks:
            return Measured(value=math.nan, lacks=lacks)
        lacks = _without_resamples(record, condition) if resampled is None else ""
        baseline = self._baseline(condition)
        if baseline is None:
            return Measured(value=value, resampled=resampled, lacks=lacks)
        held = self.score(baseline, dataset)
        reason = _incomparable(record, held, condition, baseline[0], dataset)
        if held is None or reason:
            return Measured(value=value, baseline_step=baseline[0], lacks=reason)
        other = self._resampled(held).get(condition.key)
        if other is None:
            lacks = lacks or _without_resamples(held, condition)
        elif resampled is not None and len(other) != len(resampled):
            lacks = f"step {held.step} has {len(other)} resamples, this one {len(resampled)}; {_rescore(held.step)}"
        is_paired = resampled is not None and other is not None and not lacks
        return Measured(
            value=value,
            baseline_step=baseline[0],
            baseline_value=_value(held, condition)[0],
            resampled=resampled - other if is_paired else None,  # type: ignore[operator] # neither is None
            lacks=lacks,
        )

    def _resampled(self, record: EvaluationRecord) -> Arrays:
        if record.sequence not in self._used:
            self._used[record.sequence] = self._recorder.resampled(record)
        return self._used[record.sequence]


def _value(record: EvaluationRecord, condition: Condition) -> tuple[float, str]:
    """Return the value that a condition is about, and why it cannot be decided by; empty if it can."""
    metrics, where = record.metrics, ""
    if condition.slice_name is not None:
        slices = {each.name: each for each in record.slices}
        part = slices.get(condition.slice_name)
        if part is None:
            return (
                math.nan,
                f"there is no slice {condition.slice_name!r} in {record.dataset!r}; there are {sorted(slices)}",
            )
        if not part.metrics:
            reason = ", ".join(part.notes) or "it has no metrics"
            return math.nan, f"slice {part.name!r} of {record.dataset!r} has {part.examples} examples: {reason}"
        metrics, where = part.metrics, f" of slice {part.name!r}"
    if condition.metric not in metrics:
        return math.nan, f"there is no metric {condition.metric}{where}; there are {sorted(metrics)}"
    value, loss = metrics[condition.metric], record.metrics.get(LOSS, 0.0)
    if math.isfinite(value) and math.isfinite(loss):
        return value, ""
    return value, f"{condition.key} is {value!r}, the loss {record.metrics.get(LOSS)!r}; finite numbers are required"


def _incomparable(
    record: EvaluationRecord, held: EvaluationRecord | None, condition: Condition, step: int, dataset: str
) -> str:
    """Return why a score cannot be compared with that of another step; empty if it can."""
    if held is None:
        return f"step {step} has no score on the present content of {dataset!r}; {_rescore(step)}"
    if record.metric_digest != held.metric_digest:
        return f"step {step} was scored with metrics of another configuration; {_rescore(step)}"
    _, lacks = _value(held, condition)
    return lacks and f"of step {step}, {lacks}"


def _without_resamples(record: EvaluationRecord, condition: Condition) -> str:
    reason = next((note for note in record.notes if "interval" in note), "")
    return f"step {record.step} has no resamples of {condition.key}; {reason or _rescore(record.step)}"


def _rescore(step: int) -> str:
    return f"score it again with 'understudy rescore --since {step}'"


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
