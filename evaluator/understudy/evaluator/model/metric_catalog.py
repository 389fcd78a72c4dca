"""The metrics that a caller may name, and the arguments of each.

Keras would create any object from a caller's configuration, and call functions to do so. Therefore Keras never gets the
configuration: a metric is one of a fixed list of classes, its arguments are checked scalars and flat lists, and its
class is called directly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import MetricSpec

MAX_METRICS: Final = 32
MAX_THRESHOLDS: Final = 10_000
"""The limit for evenly spaced thresholds, whose cost does not grow with the batch."""
MAX_LISTED_THRESHOLDS: Final = 200
"""The limit for a list of thresholds: every element of a batch is compared with each."""
MAX_MULTI_LABEL_THRESHOLDS: Final = 200
MAX_CLASSES: Final = 1000

_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_AXES: Final = 8


@dataclass(frozen=True)
class Parameter:
    """An argument: a description of the expected values, and a check of a value."""

    expected: str
    accepts: Callable[[Any], bool]


def _number(low: float = -math.inf, high: float = math.inf) -> Parameter:
    bounds = "a finite number" if math.isinf(high) else f"a number from {low:g} to {high:g}"
    return Parameter(bounds, lambda value: _is_number(value) and low <= value <= high)


def _integer(low: int, high: int) -> Parameter:
    return Parameter(f"a whole number from {low} to {high}", lambda value: _is_integer(value) and low <= value <= high)


def _choice(*words: str) -> Parameter:
    return Parameter(f"one of {', '.join(words)}", lambda value: isinstance(value, str) and value in words)


def _list(of: Parameter, longest: int) -> Parameter:
    expected = f"a list of 1 to {longest}, each {of.expected}"
    return Parameter(
        expected, lambda value: _is_list(value) and 0 < len(value) <= longest and all(map(of.accepts, value))
    )


def _or(first: Parameter, second: Parameter) -> Parameter:
    return Parameter(
        f"{first.expected}, or {second.expected}", lambda value: first.accepts(value) or second.accepts(value)
    )


def _optional(parameter: Parameter) -> Parameter:
    return Parameter(f"{parameter.expected}, or null", lambda value: value is None or parameter.accepts(value))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST_NUMBER


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


_LARGEST_NUMBER: Final = 1e30
_FLAG: Final = Parameter("true or false", lambda value: isinstance(value, bool))
_FRACTION: Final = _number(0, 1)
_CLASS: Final = _integer(0, MAX_CLASSES - 1)
_COUNT: Final = _integer(1, MAX_CLASSES)
_AXIS: Final = _integer(-_AXES, _AXES - 1)
_THRESHOLDS: Final = _integer(2, MAX_THRESHOLDS)
_AVERAGE: Final = _optional(_choice("micro", "macro", "weighted"))

_COMMON: Final = {
    "name": Parameter(
        "up to 64 letters, digits, '_', '.' and '-'",
        lambda value: isinstance(value, str) and bool(_NAME.fullmatch(value)),
    ),
    "dtype": _optional(_choice("float16", "bfloat16", "float32", "float64")),
}
_COUNTS: Final = {"thresholds": _optional(_or(_FRACTION, _list(_FRACTION, MAX_LISTED_THRESHOLDS)))}
_RATIO: Final = {
    **_COUNTS,
    "top_k": _optional(_COUNT),
    "class_id": _optional(_CLASS),
}
_AT: Final = {"num_thresholds": _THRESHOLDS, "class_id": _optional(_CLASS)}
_CLASSES: Final = {"num_classes": _COUNT, "ignore_class": _optional(_integer(-1, MAX_CLASSES)), "axis": _AXIS}
_CLASS_IDS: Final = _list(_CLASS, MAX_CLASSES)
_CROSSENTROPY: Final = {"from_logits": _FLAG, "axis": _AXIS}

CATALOG: Final[Mapping[str, Mapping[str, Parameter]]] = MappingProxyType({
    "AUC": {
        "num_thresholds": _THRESHOLDS,
        "curve": _choice("ROC", "PR"),
        "summation_method": _choice("interpolation", "minoring", "majoring"),
        "thresholds": _optional(_list(_FRACTION, MAX_LISTED_THRESHOLDS)),
        "multi_label": _FLAG,
        "num_labels": _optional(_COUNT),
        "label_weights": _optional(_list(_number(0, _LARGEST_NUMBER), MAX_CLASSES)),
        "from_logits": _FLAG,
    },
    "Accuracy": {},
    "BinaryAccuracy": {"threshold": _number()},
    "BinaryCrossentropy": {"from_logits": _FLAG, "label_smoothing": _FRACTION},
    "BinaryIoU": {"target_class_ids": _list(_integer(0, 1), 2), "threshold": _number()},
    "CategoricalAccuracy": {},
    "CategoricalCrossentropy": {**_CROSSENTROPY, "label_smoothing": _FRACTION},
    "CategoricalHinge": {},
    "ConcordanceCorrelation": {"axis": _AXIS},
    "CosineSimilarity": {"axis": _AXIS},
    "F1Score": {"average": _AVERAGE, "threshold": _optional(_FRACTION)},
    "FBetaScore": {"average": _AVERAGE, "beta": _number(0, 1000), "threshold": _optional(_FRACTION)},
    "FalseNegatives": _COUNTS,
    "FalsePositives": _COUNTS,
    "Hinge": {},
    "IoU": {**_CLASSES, "target_class_ids": _CLASS_IDS, "sparse_y_true": _FLAG, "sparse_y_pred": _FLAG},
    "KLDivergence": {},
    "LogCoshError": {},
    "MeanAbsoluteError": {},
    "MeanAbsolutePercentageError": {},
    "MeanIoU": {**_CLASSES, "sparse_y_true": _FLAG, "sparse_y_pred": _FLAG},
    "MeanSquaredError": {},
    "MeanSquaredLogarithmicError": {},
    "OneHotIoU": {**_CLASSES, "target_class_ids": _CLASS_IDS, "sparse_y_pred": _FLAG},
    "OneHotMeanIoU": {**_CLASSES, "sparse_y_pred": _FLAG},
    "PearsonCorrelation": {"axis": _AXIS},
    "Poisson": {},
    "Precision": _RATIO,
    "PrecisionAtRecall": {"recall": _FRACTION, **_AT},
    "R2Score": {
        "class_aggregation": _optional(_choice("uniform_average", "variance_weighted_average")),
        "num_regressors": _integer(0, 2**31 - 1),
    },
    "Recall": _RATIO,
    "RecallAtPrecision": {"precision": _FRACTION, **_AT},
    "RootMeanSquaredError": {},
    "SensitivityAtSpecificity": {"specificity": _FRACTION, **_AT},
    "SparseCategoricalAccuracy": {},
    "SparseCategoricalCrossentropy": {**_CROSSENTROPY, "ignore_class": _optional(_integer(-1, MAX_CLASSES))},
    "SparseTopKCategoricalAccuracy": {"k": _COUNT, "from_sorted_ids": _FLAG},
    "SpecificityAtSensitivity": {"sensitivity": _FRACTION, **_AT},
    "SquaredHinge": {},
    "TopKCategoricalAccuracy": {"k": _COUNT},
    "TrueNegatives": _COUNTS,
    "TruePositives": _COUNTS,
})  # fmt: skip
"""The classes of `keras.metrics` and their arguments besides ``name`` and ``dtype``."""

CHOSEN_BY_SHAPE: Final = frozenset({"accuracy", "acc", "crossentropy", "ce"})
"""Names for which Keras chooses a class by the shapes of targets and outputs; they take no arguments."""

_SHORT: Final = {
    "mse": "MeanSquaredError",
    "mae": "MeanAbsoluteError",
    "mape": "MeanAbsolutePercentageError",
    "msle": "MeanSquaredLogarithmicError",
    "bce": "BinaryCrossentropy",
}


def _snake_case(name: str) -> str:
    """Return Keras's snake-case form of a class name."""
    words = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()


_CLASSES_BY_NAME: Final[Mapping[str, str]] = {
    **{name: name for name in CATALOG},
    **{_snake_case(name): name for name in CATALOG},
    **_SHORT,
    **{name.upper(): full for name, full in _SHORT.items()},
}


def class_named(name: str) -> str | None:
    """Return the class of `keras.metrics` that a name stands for, or None."""
    return _CLASSES_BY_NAME.get(name)


def check_configuration(spec: MetricSpec) -> None:
    """Raise InvalidInputError for an argument that a metric of the catalog does not accept."""
    known = {**_COMMON, **CATALOG[_CLASSES_BY_NAME[spec.name]]}
    for name, value in spec.config.items():
        parameter = known.get(name)
        if parameter is None:
            raise InvalidInputError(f"metric {spec.name!r} takes no {name[:64]!r}; it takes {', '.join(known)}")
        if not parameter.accepts(value):
            raise InvalidInputError(
                f"metric {spec.name!r}: {name} is {_shown(value)}; {parameter.expected} was expected"
            )
    thresholds = _listed_thresholds(spec) or spec.config.get("num_thresholds", 0)
    if spec.config.get("multi_label") and thresholds > MAX_MULTI_LABEL_THRESHOLDS:
        raise InvalidInputError(
            f"metric {spec.name!r} has {thresholds} thresholds for each label; at most {MAX_MULTI_LABEL_THRESHOLDS} "
            "go with multi_label"
        )


def check_count(metrics: Sequence[object]) -> None:
    """Raise InvalidInputError for more metrics than one request may name."""
    if len(metrics) > MAX_METRICS:
        raise InvalidInputError(f"got {len(metrics)} metrics; at most {MAX_METRICS} are computed at once")


def comparisons(metrics: Sequence[MetricSpec]) -> int:
    """Return the maximum number of thresholds that a metric compares with each element of a batch."""
    return max((_listed_thresholds(spec) for spec in metrics), default=0) or 1


def _listed_thresholds(spec: MetricSpec) -> int:
    listed = spec.config.get("thresholds")
    return len(listed) if isinstance(listed, list | tuple) else 0


def _shown(value: object) -> str:
    if isinstance(value, bool | int | float | str):
        text = repr(value) if not isinstance(value, int) or abs(value) < _LARGEST_NUMBER else "a larger number"
        return text if len(text) <= 64 else f"{text[:64]}…"  # noqa: PLR2004 - enough to recognise it
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return "an object" if isinstance(value, dict) else "null"
