"""The gate that the settings describe: its conditions, and their language.

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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.serving.ranking import Monitor
from understudy.evaluator.settings import EvaluatorSettings, MonitorMode
from understudy.evaluator.types import Array, EvaluationOutcome

Baseline = Literal["serving", "best"]
Rule = Literal["at least", "at most", "not worse", "better"]

ACCEPTED, REFUSED, UNDECIDED = EvaluationOutcome.ACCEPTED, EvaluationOutcome.REFUSED, EvaluationOutcome.UNDECIDED


EXAMPLES = (
    "'test/accuracy >= 0.9', 'test/accuracy not worse by 0.01 at 95%' or 'test/accuracy[label=3] better by 0.01 than "
    "best'"
)

_CONDITION = re.compile(
    r"(?P<dataset>[^/\s]+)/(?P<metric>[^\[\s](?:[^\[]*?[^\[\s])??)(?:\[(?P<slice>.+)\])?"
    r"\s*(?P<rule>>=|<=|\bnot\s+worse\b|\bbetter\b)(?P<rest>.*)",
    re.DOTALL,
)
_VALUE = r"(?:>=|=|<)"
_FEATURE = re.compile(rf"(?:^|,)([^,=<>]+){_VALUE}")
"""What looks like a feature in the name of a slice, such as ``country=FR,age=[18,30)``."""
_QUOTED = re.compile(rf'({_VALUE})"(?:[^"\\]|\\.)*"')
"""A value that is written as in JSON."""
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
    *("accuracy", "acc", "auc", "precision", "recall", "f1", "f1_score", "fbeta_score"),
    *("iou", "io_u", "r2", "r2_score"),
    *("specificity", "sensitivity", "true_positives", "true_negatives", "cosine_similarity", "correlation"),
)
PERCENT = 100.0

KEEP, SERVE = "keep", "serve"
"""What to do with an undecided checkpoint, unless it is scored on one more dataset."""

GATE_RESAMPLES = 1000
"""The resamples for a gate at a confidence, unless the settings say how many."""

RESOLUTION = 2.0**-23
"""The relative difference of neighbouring float32 values. Metrics are float32, so values this close are equal."""


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
    text: str, *, datasets: Collection[str], modes: Mapping[str, MonitorMode], slices: Collection[tuple[str, ...]]
) -> Condition:
    """Parse one condition.

    Args:
        text: The condition.
        datasets: The names of the datasets that checkpoints are scored on.
        modes: Whether less or more is better, by ``dataset/metric``, where that is known from elsewhere.
        slices: The configured slices, each by the names of its features, in the order of the names of slices.

    Raises:
        ConfigurationError: It cannot be read, or names a dataset or a slice that there is not, or the direction of the
            metric is unknown.
    """
    found = _CONDITION.fullmatch(text.strip())
    if found is None:
        is_cut = "[" in text and "]" not in text
        hint = r"; a slice ends with ], write a semicolon within it as \;" if is_cut else ""
        raise _unreadable(text, f"a value and a rule are expected{hint}")
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
        confidence = float(percent) / PERCENT
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


def _check_slice(text: str, name: str, slices: Collection[tuple[str, ...]]) -> None:
    found = _FEATURE.findall(_QUOTED.sub(r"\1", name))
    known = {feature for features in slices for feature in features}
    if any(_is_named(name, features) and not {*found} & known - {*features} for features in slices):
        return
    there = sorted("*".join(features) for features in slices)
    configured = f"there are slices by {', '.join(there)}" if there else "no slices are configured"
    wanted = "*".join(found) or name
    raise _unreadable(text, f"there are no slices by {wanted!r}; {configured}; add --slice {wanted!r}")


def _is_named(name: str, features: Sequence[str]) -> bool:
    """Return whether a slice by these features may have a name; their values may be any text."""
    pattern = ",".join(f"{re.escape(feature)}{_VALUE}.*" for feature in features)
    return re.fullmatch(pattern, name, re.DOTALL) is not None


def _unreadable(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"gate is {text!r}: {why}; a gate is written as {EXAMPLES}")


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
    settings: EvaluatorSettings, monitor: Monitor | None, datasets: Sequence[str], slices: Sequence[tuple[str, ...]]
) -> Gate | None:
    """Return the gate of the settings, or None if they have none.

    Args:
        settings: The operator's settings.
        monitor: The monitored metric; None without datasets.
        datasets: The names of the datasets that every checkpoint is scored on.
        slices: The configured slices, each by the names of its features, in the order of the names of slices.

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
    if settings.when_undecided != KEEP and not conditions:
        raise ConfigurationError(
            f"when_undecided is {settings.when_undecided!r}, and there is no gate; write one such as "
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
