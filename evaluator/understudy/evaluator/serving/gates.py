"""The conditions of a gate: their language, and the decision on measured values.

A condition compares a metric with a number, or with another version's value on the same examples::

    test/accuracy >= 0.9
    test/loss <= 0.3 at 99%
    test/accuracy not worse by 0.01 at 95%
    test/accuracy[label=3] not worse by 0.02 than best at 95%
    test/accuracy better by 0.002
    test/lift not worse by 0.1, more is better

Without a confidence a condition is accepted or refused by the values alone, and a value on the bound is accepted. With
one it is accepted if the whole two-sided percentile interval meets it, refused if none of the interval does, and
undecided otherwise. Several conditions at a confidence are corrected by Holm's method, so that the confidence holds for
all of them together: Holm, "A simple sequentially rejective multiple test procedure", 1979.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.settings import MonitorMode
from understudy.evaluator.types import Array, EvaluationOutcome, GateCondition, Interval

Baseline = Literal["serving", "best"]
Rule = Literal["at least", "at most", "not worse", "better"]

ACCEPTED, REFUSED, UNDECIDED = EvaluationOutcome.ACCEPTED, EvaluationOutcome.REFUSED, EvaluationOutcome.UNDECIDED

RESOLUTION = 2.0**-23
"""The relative difference of neighbouring float32 values. Metrics are float32, so values this close are equal."""

EXAMPLES = (
    "'test/accuracy >= 0.9', 'test/accuracy not worse by 0.01 at 95%' or 'test/accuracy[label=3] better by 0.01 than "
    "best'"
)

_CONDITION = re.compile(
    r"(?P<dataset>[^/\s]+)/(?P<metric>[^\[\s]+)(?:\[(?P<slice>.+)\])?\s*(?P<rule>>=|<=|\bnot\s+worse\b|\bbetter\b)(?P<rest>.*)"
)
_FEATURE = re.compile(r"(?:^|,)([^,=<>]+)(?:>=|=|<)")
"""A feature in the name of a slice, such as ``country=FR,age=[18,30)``."""
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_BOUND = re.compile(rf"\s*({_NUMBER})(?![\w.])")
_CLAUSES: Mapping[str, re.Pattern[str]] = {
    "margin": re.compile(rf"\s*by\s+({_NUMBER})(?![\w.])"),
    "baseline": re.compile(r"\s*than\s+(serving|best)\b"),
    "confidence": re.compile(r"\s*at\s+([^\s,%]+)\s*%"),
    "direction": re.compile(r"\s*,\s*(more|less)\s+is\s+better\b"),
}

_LESS_IS_BETTER = (
    *("loss", "error", "mse", "mae", "mape", "msle", "rmse", "logcosh", "log_cosh", "hinge", "crossentropy"),
    *("divergence", "poisson", "false_positives", "false_negatives", "brier"),
)
_MORE_IS_BETTER = (
    *(
        "accuracy",
        "acc",
        "auc",
        "precision",
        "recall",
        "f1",
        "f1_score",
        "fbeta_score",
        "iou",
        "io_u",
        "r2",
        "r2_score",
    ),
    *("specificity", "sensitivity", "true_positives", "true_negatives", "cosine_similarity", "correlation"),
)
_PERCENT = 100.0


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One condition of a gate.

    Attributes:
        text: The condition as it was written.
        dataset: The dataset of the value.
        metric: Its metric.
        slice_name: Its slice; None for the whole dataset.
        rule: How it compares: with a number, or with the baseline.
        number: The bound, or the margin, which is at least 0.
        baseline: The version to compare with; None for a bound.
        mode: Whether less (``min``) or more (``max``) is better.
        confidence: The confidence level, between 0 and 1; None to decide by the values alone.
        setting: The setting that it is a shorthand of; None for one of ``gate``.
    """

    text: str
    dataset: str
    metric: str
    slice_name: str | None = None
    rule: Rule
    number: float
    baseline: Baseline | None = None
    mode: MonitorMode
    confidence: float | None = None
    setting: Literal["min_value", "min_improvement"] | None = None

    @property
    def key(self) -> str:
        """The metric and the slice, as in `understudy.evaluator.records.ledger.Ledger.resampled`."""
        return self.metric if self.slice_name is None else f"{self.metric}[{self.slice_name}]"

    @property
    def threshold(self) -> float:
        """The least merit that meets the condition; see `merit`."""
        if self.baseline is not None:
            return 0.0 - self.number if self.rule == "not worse" else self.number
        return self._sign * self.number

    @property
    def _sign(self) -> float:
        if self.baseline is None:
            return 1.0 if self.rule == "at least" else -1.0
        return 1.0 if self.mode == "max" else -1.0

    def merit(self, value: float | Array, held: float | Array = 0.0) -> float | Array:
        """Return how good a value is, more being better: itself for a bound, else its improvement over the baseline."""
        return self._sign * (value - held)

    def required(self) -> str:
        """Return what is required of the value or of its improvement."""
        if self.baseline is None:
            return f"{self.rule} {self.number!r}"
        return f"{'' if self.setting else 'at least '}{self.threshold!r}"


def parse_gate(
    text: str, *, datasets: Collection[str], modes: Mapping[str, MonitorMode], slices: Collection[frozenset[str]]
) -> Condition:
    """Parse one condition.

    Args:
        text: The condition.
        datasets: The names of the datasets that checkpoints are scored on.
        modes: Whether less or more is better, by ``dataset/metric``, where that is known from elsewhere.
        slices: The configured slices, each by the names of its features.

    Raises:
        ConfigurationError: It cannot be read, or names a dataset or a slice that there is not, or the direction of the
            metric is unknown.
    """
    found = _CONDITION.fullmatch(text.strip())
    if found is None:
        raise _unreadable(text, "a value and a rule are expected")
    dataset, metric, slice_name = found["dataset"], found["metric"], found["slice"]
    if dataset not in datasets:
        raise _unreadable(text, f"there is no dataset {dataset!r}; there are {sorted(datasets)}")
    if slice_name is not None:
        _check_slice(text, slice_name, slices)
    clauses = _clauses(text, found["rest"], is_bound=found["rule"] in (">=", "<="))
    rule = _rule(found["rule"])
    confidence = clauses.get("confidence")
    direction = clauses.get("direction")
    return Condition(
        text=text.strip(),
        dataset=dataset,
        metric=metric,
        slice_name=slice_name,
        rule=rule,
        number=_number(text, clauses, rule),
        baseline=None if rule in ("at least", "at most") else _baseline(clauses),
        mode=_mode(text, rule, metric, direction, modes.get(f"{dataset}/{metric}")),
        confidence=None if confidence is None else _confidence(text, confidence),
    )


def known_direction(metric: str) -> MonitorMode | None:
    """Return whether less or more of a metric is better, by its name; None if the name does not tell.

    The names are those of Keras's losses and metrics, and names that end with one after an underscore, such as
    ``val_loss``; a number at the end, such as in ``auc_1``, does not count.
    """
    name = re.sub(r"_\d+$", "", metric.lower())

    def ends(known: str) -> bool:
        return name == known or name.endswith(f"_{known}")

    if any(map(ends, _LESS_IS_BETTER)):
        return "min"
    named_after = ("top_", "precision_at_", "recall_at_", "sensitivity_at_", "specificity_at_", "mean_io_u")
    return "max" if any(map(ends, _MORE_IS_BETTER)) or name.startswith(named_after) else None


def least_resamples(conditions: Sequence[Condition]) -> int:
    """Return the fewest resamples with which every condition can be decided; 0 if none has a confidence.

    One resample or more must lie beyond each bound of the widest interval.
    """
    levels = [1.0 - condition.confidence for condition in conditions if condition.confidence is not None]
    return math.ceil(2 * len(levels) / min(levels) - RESOLUTION) if levels else 0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a condition is decided on.

    Attributes:
        value: The checkpoint's value.
        baseline_step: The step to compare with; None for a bound, and if there is none.
        baseline_value: The value of that step on the same examples.
        resampled: The value, or its difference from the baseline's, in each resample, ``[resamples]``; None if there
            are none. NaN marks a resample without any example.
        lacks: Why there are none, or why there is nothing to decide by.
    """

    value: float
    baseline_step: int | None = None
    baseline_value: float | None = None
    resampled: Array | None = None
    lacks: str = ""


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
    if not math.isfinite(on.value):
        return replace(result, outcome=REFUSED, reason=on.lacks)
    if condition.baseline is not None and on.baseline_value is None:
        is_undecided = on.baseline_step is not None and condition.confidence is not None
        reason = f"{_said(condition, on)}; {on.lacks}" if is_undecided else _said(condition, on)
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
    tail = (1.0 - condition.confidence) / (2 * among)
    drawn = on.resampled[np.isfinite(on.resampled)]
    low, high = (float(bound) for bound in np.quantile(drawn.astype(np.float64), [tail, 1.0 - tail]))
    merits = sorted((float(condition.merit(low)), float(condition.merit(high))))
    _, scale = _merit(condition, on)
    worst, best = (_reaches(merit, condition.threshold, scale) for merit in merits)
    outcome = ACCEPTED if worst else UNDECIDED if best else REFUSED
    corrected = "" if among == 1 else f", corrected for {among} conditions"
    shown = f", between {low:.6g} and {high:.6g}"
    if condition.baseline is not None:
        shown = f"; the improvement is between {merits[0]:.6g} and {merits[1]:.6g}"
    reason = f"{_said(condition, on)}{shown} at {condition.confidence * _PERCENT:.6g}%{corrected}"
    if outcome is not ACCEPTED:
        reason += f"; {condition.required()} is required"
    return GateCondition(
        text=condition.text,
        outcome=outcome,
        value=on.value,
        baseline_step=on.baseline_step,
        baseline_value=on.baseline_value,
        interval=Interval(low=low, high=high),
        reason=reason,
    )


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


def _rule(written: str) -> Rule:
    if written in (">=", "<="):
        return "at least" if written == ">=" else "at most"
    return "better" if written == "better" else "not worse"


def _clauses(text: str, rest: str, *, is_bound: bool) -> dict[str, str]:
    """Return the clauses after the rule, each at most once, in any order; the bound as ``bound``."""
    found: dict[str, str] = {}
    if is_bound:
        bound = _BOUND.match(rest)
        if bound is None:
            raise _unreadable(text, "a number is expected after the comparison")
        found["bound"], rest = bound[1], rest[bound.end() :]
    possible = ("confidence",) if is_bound else tuple(_CLAUSES)
    while rest.strip():
        name, match = next(
            ((name, match) for name in possible if name not in found and (match := _CLAUSES[name].match(rest))),
            ("", None),
        )
        if match is None:
            raise _unreadable(text, f"{rest.strip()!r} is not understood there")
        found[name], rest = match[1], rest[match.end() :]
    return found


def _number(text: str, clauses: Mapping[str, str], rule: Rule) -> float:
    if rule in ("at least", "at most"):
        return float(clauses["bound"])
    if rule == "better" and "margin" not in clauses:
        raise _unreadable(text, "say by how much, such as 'better by 0.01'")
    margin = float(clauses.get("margin", "0"))
    if margin < 0:
        raise _unreadable(text, f"the margin is {margin}; give a number from 0 up")
    return margin


def _baseline(clauses: Mapping[str, str]) -> Baseline:
    return "best" if clauses.get("baseline") == "best" else "serving"


def _confidence(text: str, percent: str) -> float:
    try:
        confidence = float(percent) / _PERCENT
    except ValueError:
        confidence = math.nan
    if not 0 < confidence < 1:
        raise _unreadable(text, f"the confidence is {percent}%; give a number between 0 and 100, such as 95%")
    return confidence


def _mode(text: str, rule: Rule, metric: str, direction: str | None, given: MonitorMode | None) -> MonitorMode:
    if rule in ("at least", "at most"):
        return "max" if rule == "at least" else "min"
    if direction is not None:
        return "max" if direction == "more" else "min"
    mode = given or known_direction(metric)
    if mode is None:
        raise _unreadable(
            text, f"its name does not tell whether more or less of {metric!r} is better; end it with ', more is better'"
        )
    return mode


def _check_slice(text: str, name: str, slices: Collection[frozenset[str]]) -> None:
    features = frozenset(_FEATURE.findall(name))
    if features in slices:
        return
    there = sorted("*".join(sorted(each)) for each in slices)
    configured = f"there are slices by {', '.join(there)}" if there else "no slices are configured"
    wanted = "*".join(sorted(features)) or name
    raise _unreadable(text, f"there are no slices by {wanted!r}; {configured}; add --slice {wanted!r}")


def _unreadable(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"gate is {text!r}: {why}; a gate is written as {EXAMPLES}")
