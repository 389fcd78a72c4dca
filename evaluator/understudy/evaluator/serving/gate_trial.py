"""The decision of a gate on one checkpoint: the values of its conditions are measured, then judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.percentiles import bounds
from understudy.evaluator.records.recorder import Recorder
from understudy.evaluator.serving.gates import ACCEPTED, PERCENT, REFUSED, RESOLUTION, UNDECIDED, Condition
from understudy.evaluator.serving.ranking import LOSS, Ranking
from understudy.evaluator.types import (
    Array,
    Arrays,
    CheckpointInfo,
    CheckpointKey,
    EvaluationOutcome,
    EvaluationRecord,
    GateCondition,
    Interval,
)

_NAMED_SLICES = 10

_NO_INTERVALS = "no intervals"
"""What a note on a score says if the model, its metrics or the slices are why there are none."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a condition is decided on.

    Attributes:
        value: The checkpoint's value; NaN if it has none.
        baseline_step: The step to compare with; None for a bound, and if there is none.
        baseline_value: The value of that step on the same examples.
        resampled: The value, or its difference from the baseline's, in each resample, ``[resamples]``; None if there
            are none. NaN marks a resample in which it is undefined.
        lacks: Why there are none, or why there is nothing to decide by.
        undefined: Why the checkpoint's value or the baseline's is undefined; empty if neither is.
    """

    value: float
    baseline_step: int | None = None
    baseline_value: float | None = None
    resampled: Array | None = None
    lacks: str = ""
    undefined: str = ""


def judge(measured: Sequence[tuple[Condition, Measured]]) -> list[GateCondition]:
    """Decide on all conditions of a gate, with Holm's correction for those at a confidence."""
    decided = [_without_interval(condition, on) for condition, on in measured]
    waiting = [place for place, result in enumerate(decided) if result is None]
    results = {place: result for place, result in enumerate(decided) if result is not None}
    while waiting:
        # Holm's method in terms of intervals: those that are decided at the widest ones no longer count for the rest.
        tried = {place: _with_interval(*measured[place], among=len(waiting)) for place in waiting}
        rest = [place for place in waiting if tried[place].outcome is UNDECIDED]
        is_last = len(rest) == len(waiting)
        results |= {place: tried[place] for place in waiting if is_last or place not in rest}
        waiting = [] if is_last else rest
    return [results[place] for place in range(len(measured))]


def outcome_of(conditions: Sequence[GateCondition]) -> EvaluationOutcome:
    """Return the outcome of the gate: refused if any condition is, else undecided if any is, else accepted."""
    outcomes = {condition.outcome for condition in conditions}
    return next((outcome for outcome in (REFUSED, UNDECIDED) if outcome in outcomes), ACCEPTED)


def _without_interval(condition: Condition, on: Measured) -> GateCondition | None:
    """Decide by the values alone; return None if the condition needs an interval and there is one."""
    result = GateCondition(
        text=condition.text,
        outcome=ACCEPTED,
        value=on.value,
        baseline_step=on.baseline_step,
        baseline_value=on.baseline_value,
    )
    if on.undefined or not math.isfinite(on.value):
        return replace(result, outcome=UNDECIDED if on.undefined else REFUSED, reason=on.undefined or on.lacks)
    if condition.baseline is not None and on.baseline_value is None:
        is_undecided = on.baseline_step is not None and condition.confidence is not None
        reason = f"{_said(condition, on)}; {on.lacks}" if on.lacks else _said(condition, on)
        return replace(result, outcome=UNDECIDED if is_undecided else ACCEPTED, reason=reason)
    if condition.confidence is not None:
        usable = None if on.resampled is None else int(np.isfinite(on.resampled).sum())
        if usable:
            return None
        return replace(result, outcome=UNDECIDED, reason=f"{_said(condition, on)}; {on.lacks or 'no resample has it'}")
    merit, scale = _merit(condition, on)
    if _reaches(merit, condition.threshold, scale):
        return replace(result, reason=_said(condition, on))
    return replace(result, outcome=REFUSED, reason=f"{_said(condition, on)}; {condition.required()} is required")


def _with_interval(condition: Condition, on: Measured, *, among: int) -> GateCondition:
    """Decide by the interval at the level for one of ``among`` conditions."""
    assert condition.confidence is not None  # noqa: S101 - _without_interval decided the others
    assert on.resampled is not None  # noqa: S101
    corrected = "" if among == 1 else f", corrected for {among} conditions"
    level = f"at {condition.confidence * PERCENT:.6g}%{corrected}"
    found = bounds(on.resampled, (1.0 - condition.confidence) / (2 * among))
    result = GateCondition(
        text=condition.text,
        outcome=UNDECIDED,
        value=on.value,
        baseline_step=on.baseline_step,
        baseline_value=on.baseline_value,
    )
    if found is None:
        return replace(result, reason=f"{_said(condition, on)}; {_unbounded(condition, on.resampled)} {level}")
    low, high = found
    merits = sorted((float(condition.merit(low)), float(condition.merit(high))))
    _, scale = _merit(condition, on)
    worst, best = (_reaches(merit, condition.threshold, scale) for merit in merits)
    outcome = ACCEPTED if worst else UNDECIDED if best else REFUSED
    shown = f", between {low:.6g} and {high:.6g}"
    if condition.baseline is not None:
        shown = f"; the improvement is between {merits[0]:.6g} and {merits[1]:.6g}"
    reason = f"{_said(condition, on)}{shown} {level}"
    if outcome is not ACCEPTED:
        reason += f"; {condition.required()} is required"
    return replace(result, outcome=outcome, interval=Interval(low=low, high=high), reason=reason)


def _unbounded(condition: Condition, resampled: Array) -> str:
    """Return why there is no interval, to be followed by its level."""
    what = "it" if condition.baseline is None else "the improvement"
    missing = int((~np.isfinite(resampled)).sum())
    return f"{what} has no value in {missing} of {len(resampled)} resamples, too many for an interval"


def _merit(condition: Condition, on: Measured) -> tuple[float, float]:
    """Return the merit of the value, and the size of the numbers that it is computed from."""
    held = on.baseline_value if condition.baseline is not None else None
    if held is None:
        return float(condition.merit(on.value)), max(abs(on.value), abs(condition.number))
    return float(condition.merit(on.value, held)), max(abs(on.value), abs(held))


def _reaches(merit: float, threshold: float, scale: float) -> bool:
    return merit >= threshold - RESOLUTION * scale


def _name(condition: Condition) -> str:
    return condition.metric if condition.setting else f"{condition.dataset}/{condition.key}"


def _said(condition: Condition, on: Measured) -> str:
    """Return the value, and its improvement over the baseline's, in words; for a shorthand with all digits."""
    digits: Callable[[float], str] = repr if condition.setting else "{:.6g}".format
    said = f"{_name(condition)} is {digits(on.value)}"
    if condition.baseline is None or on.baseline_value is None:
        return said
    merit, _ = _merit(condition, on)
    is_worse = merit < 0 and not condition.setting
    apart = f"{digits(-merit)} worse" if is_worse else f"{digits(merit)} better"
    return f"{said}, {apart} than the {digits(on.baseline_value)} of the {condition.baseline} step {on.baseline_step}"


class Baselines(NamedTuple):
    """The checkpoint that should be serving, and a function that finds known checkpoints by their steps."""

    info: CheckpointInfo | None
    find: Callable[[int], CheckpointInfo | None]


class GateTrial:
    """The values of one checkpoint and of what it is compared with, for one decision.

    Attributes:
        undecidable: Why conditions cannot be decided, perhaps for no checkpoint, by their texts.
    """

    def __init__(
        self,
        key: CheckpointKey,
        serving: Baselines,
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
        self.undecidable: dict[str, str] = {}

    @property
    def used(self) -> str:
        """Identifies the scores that were used."""
        return ",".join(map(str, sorted(self._used)))

    def score(self, key: CheckpointKey, dataset: str) -> EvaluationRecord | None:
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

    def _baseline(self, condition: Condition) -> CheckpointKey | None:
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
        if undefined := _undefined(record, condition):
            self.undecidable[condition.text] = undefined
            return Measured(value=math.nan, undefined=undefined)
        resampled = self._resampled(record).get(condition.key)
        value, lacks = _value(record, condition)
        if lacks:
            return Measured(value=math.nan, lacks=lacks)
        baseline = self._baseline(condition)
        is_first = condition.baseline is not None and baseline is None
        lacks = "" if resampled is not None else self._without_resamples(record, condition, is_first=is_first)
        if baseline is None:
            return Measured(value=value, resampled=resampled, lacks=lacks)
        held = self.score(baseline, dataset)
        reason = _incomparable(record, held, condition, baseline[0], dataset)
        if held is None or reason:
            return Measured(value=value, baseline_step=baseline[0], lacks=reason)
        if undefined := _undefined(held, condition):
            return Measured(value=value, baseline_step=baseline[0], undefined=f"of step {baseline[0]}, {undefined}")
        other = self._resampled(held).get(condition.key)
        if other is None:
            lacks = lacks or self._without_resamples(held, condition)
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

    def _without_resamples(self, record: EvaluationRecord, condition: Condition, *, is_first: bool = False) -> str:
        """Return why there are no resamples, and what helps; empty if it does not matter."""
        if condition.confidence is None:
            return ""
        why = next((note for note in record.notes if _NO_INTERVALS in note), "")
        if not why:
            return "" if is_first else f"{_lacking(record, condition)}; {_rescore(record.step)}"
        helps = f"leave out 'at {condition.confidence * PERCENT:.6g}%' to decide by the value alone"
        said = f"{_lacking(record, condition)}; {why}; {helps}"
        self.undecidable[condition.text] = said
        return said

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
            left_out = [note for note in record.notes if note.startswith("slice ")]
            there = "; ".join(left_out) or _slices_that_are(record)
            return math.nan, f"there is no slice {condition.slice_name!r} in {record.dataset!r}; {there}"
        if not part.metrics:
            reason = ", ".join(part.notes) or "it has no metrics"
            return math.nan, f"slice {part.name!r} of {record.dataset!r} has {part.examples} examples: {reason}"
        metrics, where = part.metrics, f" of slice {part.name!r}"
    if condition.metric not in metrics:
        return math.nan, f"there is no metric {condition.metric}{where}; there are {sorted(metrics)}"
    value, loss = metrics[condition.metric], record.metrics.get(LOSS, 0.0)
    if math.isfinite(value) and math.isfinite(loss):
        return value, ""
    with_loss = "" if condition.key == LOSS else f", the loss {record.metrics.get(LOSS)!r}"
    return value, f"{condition.key} is {value!r}{with_loss}; finite numbers are required"


def _slices_that_are(record: EvaluationRecord) -> str:
    names = [part.name for part in record.slices]
    more = len(names) - _NAMED_SLICES
    return f"there are {names[:_NAMED_SLICES]}" + (f" and {more} more" if more > 0 else "")


def _undefined(record: EvaluationRecord, condition: Condition) -> str:
    """Return why the value that a condition is about is undefined; empty if it is defined, or if there is none."""
    parts = [part for part in record.slices if part.name == condition.slice_name]
    undefined = record.undefined if condition.slice_name is None else parts[0].undefined if parts else {}
    where = "" if condition.slice_name is None else f" of slice {condition.slice_name!r}"
    reason = undefined.get(condition.metric)
    return f"{condition.metric}{where} of {record.dataset!r} is undefined: {reason}" if reason else ""


def _incomparable(
    record: EvaluationRecord, held: EvaluationRecord | None, condition: Condition, step: int, dataset: str
) -> str:
    """Return why a score cannot be compared with that of another step; empty if it can."""
    if held is None:
        return f"step {step} has no score on the present content of {dataset!r}; {_rescore(step)}"
    if record.configuration(condition.metric).is_other_than(held.configuration(condition.metric)):
        return f"in the score of step {step}, {condition.metric} has another configuration; {_rescore(step)}"
    if _undefined(held, condition):
        return ""
    _, lacks = _value(held, condition)
    return lacks and f"of step {step}, {lacks}"


def _lacking(record: EvaluationRecord, condition: Condition) -> str:
    return f"step {record.step} has no resamples of {condition.key}"


def _rescore(step: int) -> str:
    return f"score it again with 'understudy rescore --since {step}'"
