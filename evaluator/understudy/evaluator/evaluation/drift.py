"""How far two distributions are apart: the Population Stability Index and the Kolmogorov-Smirnov distance.

Values are counted in sketches of Apache DataSketches, in bounded memory: numbers in a KLL sketch, whose quantiles have
a known error; strings in a sketch of frequent items, which is exact up to some thousand values.

- PSI: the sum over bins of (a - e) ln(a / e), with the shares e of the reference and a of the other sample, each at
  least `LEAST_SHARE` (Siddiqi, Credit Risk Scorecards, 2006; it is Jeffreys' symmetric Kullback-Leibler divergence).
  The bins of numbers lie between the reference's deciles, each with its upper edge; values that are not finite have
  a bin of their own. The bins of strings are the reference's most frequent ones, and all others. Without any drift, the
  expected value is about (bins - 1)(1/n + 1/m) for n and m examples (Yurdakul, Statistical Properties of Population
  Stability Index, 2018).
- KS: the largest distance between the two cumulative distribution functions of the finite numbers. The sum of both
  sketches' rank errors bounds its error, with 99 % confidence (Karnin, Lang, Liberty, Optimal Quantile Approximation in
  Streams, 2016).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np

from understudy.evaluator.evaluation.class_decisions import decided, task_by_values
from understudy.evaluator.types import Array, Arrays, OutputTask

Kind = Literal["input", "target", "score", "class"]
"""An input of the model, a target, an output, or what an output decides: a class, or which labels hold."""
_OF_OUTPUTS: Final[frozenset[Kind]] = frozenset({"score", "class"})

LONE_INPUT: Final = "x"
"""The name of the only input of a model in data that has no other name for it."""

LEAST_SHARE: Final = 1e-4
"""The least share of a bin, so that an empty one does not make the index infinite."""

MAX_FEATURES: Final = 32
DECILES: Final = tuple(tenth / 10 for tenth in range(1, 10))
MAX_CATEGORIES: Final = 20
OTHERS: Final = "(other)"
MISSING: Final = "(not finite)"

_KLL_K: Final = 1000  # a rank error of 0.4 % at 99 % confidence, in about 40 KB
_FREQUENT_LG_SIZE: Final = 12  # exact up to 3,072 different strings
_LONGEST_STRING: Final = 100
_DIGITS: Final = 6


def population_stability(reference: Sequence[float] | Array, shares: Sequence[float] | Array) -> float:
    """Return the PSI of the shares of two samples in the same bins, ``[bins]``."""
    expected = np.maximum(np.asarray(reference, np.float64), LEAST_SHARE)
    actual = np.maximum(np.asarray(shares, np.float64), LEAST_SHARE)
    return float(np.sum((actual - expected) * np.log(actual / expected)))


@dataclass(frozen=True, kw_only=True)
class Bin:
    """A bin, and the shares of both samples in it."""

    label: str
    reference: float
    share: float


@dataclass(frozen=True, kw_only=True)
class FeatureDrift:
    """How far a feature's distribution is from the reference.

    Attributes:
        name: The name of the tensor, with the place of the value in an example if it has several: ``x[3]``, the last
            axis varying fastest. Without a place, all values of the tensor are one feature.
        kind: What the tensor is.
        psi: The Population Stability Index.
        psi_by_chance: Its expected value without any drift.
        ks: The Kolmogorov-Smirnov distance; None for strings and classes.
        ks_error: The bound of its error.
        reference_count: The reference's values.
        count: The values.
        bins: The distributions.
    """

    name: str
    kind: Kind
    psi: float
    psi_by_chance: float
    ks: float | None
    ks_error: float | None
    reference_count: int
    count: int
    bins: tuple[Bin, ...]


@dataclass(frozen=True, kw_only=True)
class DriftReport:
    """The drift of every feature, the largest index first.

    Attributes:
        features: The features that both samples have.
        unmatched: The names of tensors that only one of them has.
        left_out: The names of tensors beyond the bound of features.
        pooled: The tensors whose columns are one feature together, because they are more than features were left, with
            the number of their columns.
    """

    features: tuple[FeatureDrift, ...]
    unmatched: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    pooled: Mapping[str, int] = field(default_factory=dict)


class NumberSketch:
    """The distribution of a stream of numbers. For one thread at a time."""

    def __init__(self) -> None:
        from datasketches import kll_doubles_sketch

        self._sketch = kll_doubles_sketch(_KLL_K)
        self.missing = 0

    @property
    def count(self) -> int:
        """The number of values, with those that are not finite."""
        return int(self._sketch.n) + self.missing

    @property
    def rank_error(self) -> float:
        """The bound of the error of a rank, as a share of the values, with 99 % confidence."""
        return float(self._sketch.normalized_rank_error(True)) if self._sketch.is_estimation_mode() else 0.0

    def update(self, values: Array) -> None:
        """Add values ``[n]`` of any dtype of numbers."""
        numbers = np.ascontiguousarray(values, np.float64)
        finite = np.isfinite(numbers)
        self.missing += int(numbers.size - finite.sum())
        self._sketch.update(numbers[finite])

    def merge(self, other: NumberSketch) -> None:
        """Add another sketch's values."""
        self._sketch.merge(other._sketch)
        self.missing += other.missing

    def distribution(self) -> tuple[Array, Array]:
        """Return the distinct finite values that are kept, ascending, and the share of values up to each."""
        kept = sorted(self._sketch)
        values = np.array([value for value, _ in kept], np.float64)
        weights = np.cumsum([weight for _, weight in kept], dtype=np.float64)
        last = np.append(values[1:] != values[:-1], True) if len(values) else np.zeros(0, bool)
        return values[last], weights[last] / max(1.0, float(self._sketch.n))

    def compare(self, other: NumberSketch) -> Comparison:
        """Return how far another sample is from this reference."""
        reference, sample = self.distribution(), other.distribution()
        edges = np.unique(_quantiles(reference))
        bounds = [-math.inf, *edges.tolist(), math.inf]
        labels = [f"({low:.{_DIGITS}g}, {high:.{_DIGITS}g}]" for low, high in pairwise(bounds)]
        shares = [
            np.append(np.diff(_share_up_to(found, edges), prepend=0.0, append=1.0) * (1 - missing), missing)
            for found, missing in (
                (reference, self.missing / max(1, self.count)),
                (sample, other.missing / max(1, other.count)),
            )
        ]
        keep = slice(None) if self.missing or other.missing else slice(-1)
        points = np.union1d(reference[0], sample[0])
        distances = np.abs(_share_up_to(reference, points) - _share_up_to(sample, points))
        return Comparison(
            labels=(*labels, MISSING)[keep],
            reference=shares[0][keep],
            shares=shares[1][keep],
            ks=float(distances.max(initial=0.0)),
            ks_error=self.rank_error + other.rank_error,
        )


class CategorySketch:
    """The frequent values of a stream of strings. For one thread at a time."""

    def __init__(self) -> None:
        from datasketches import frequent_strings_sketch

        self._sketch = frequent_strings_sketch(_FREQUENT_LG_SIZE)

    @property
    def count(self) -> int:
        """The number of values."""
        return int(self._sketch.total_weight)

    def update(self, values: Array) -> None:
        """Add values ``[n]``: text, bytes or whole numbers."""
        found: dict[str, int] = {}
        for value in values.tolist():
            text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
            found[text] = found.get(text, 0) + 1
        for text, count in found.items():
            self._sketch.update(text[:_LONGEST_STRING], count)

    def merge(self, other: CategorySketch) -> None:
        """Add another sketch's values."""
        self._sketch.merge(other._sketch)

    def frequent(self) -> list[str]:
        """Return the most frequent values, the most frequent first."""
        from datasketches import frequent_items_error_type

        found = self._sketch.get_frequent_items(frequent_items_error_type.NO_FALSE_POSITIVES)
        ordered = sorted(found, key=lambda item: (-item[1], item[0]))
        return [str(item[0]) for item in ordered[:MAX_CATEGORIES]]

    def shares(self, labels: Sequence[str]) -> Array:
        """Return the share of each value, and of all others."""
        known = np.array([self._sketch.get_estimate(label) for label in labels], np.float64)
        known /= max(1, self.count)
        shares: Array = np.append(known, max(0.0, 1.0 - float(known.sum())))
        return shares

    def compare(self, other: CategorySketch) -> Comparison:
        """Return how far another sample is from this reference."""
        labels = self.frequent()
        return Comparison(
            labels=(*labels, OTHERS), reference=self.shares(labels), shares=other.shares(labels), ks=None, ks_error=None
        )


Sketch = NumberSketch | CategorySketch


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The shares ``[bins]`` of two samples, and their KS distance, for numbers."""

    labels: tuple[str, ...]
    reference: Array
    shares: Array
    ks: float | None
    ks_error: float | None


def _quantiles(distribution: tuple[Array, Array]) -> Array:
    values, shares = distribution
    if not len(values):
        return values
    places: Array = values[np.minimum(np.searchsorted(shares, DECILES, side="left"), len(values) - 1)]
    below: Array = places[places < values[-1]]  # above the largest value, a bin of the reference would be empty
    return below


def _share_up_to(distribution: tuple[Array, Array], points: Array) -> Array:
    values, shares = distribution
    found: Array = np.append(0.0, shares)[np.searchsorted(values, points, side="right")]
    return found


@dataclass(frozen=True, kw_only=True)
class _Feature:
    """A feature of a tensor: one place of its examples, or all of them."""

    kind: Kind
    tensor: str
    place: int | None

    @property
    def name(self) -> str:
        return self.tensor if self.place is None else f"{self.tensor}[{self.place}]"


@dataclass
class DriftSketches:
    """The distributions of the features of a stream of examples, in bounded memory. For one thread at a time.

    A tensor of at most as many values an example as features are left has a feature for each of them; all values of a
    larger one are one feature. The first examples decide: later ones with other numbers of values add to those
    that they have.

    Attributes:
        max_features: The most features of inputs and targets, and the most of outputs.
        left_out: The tensors for which no feature was left, of the reference.
        pooled: The number of columns of those whose columns are one feature together.
    """

    max_features: int = MAX_FEATURES
    left_out: list[str] = field(default_factory=list)
    pooled: dict[str, int] = field(default_factory=dict)
    _sketches: dict[_Feature, Sketch] = field(default_factory=dict)
    _layout: dict[tuple[Kind, str], list[_Feature]] = field(default_factory=dict)
    _tasks: dict[str, OutputTask] = field(default_factory=dict)

    def like_this(self) -> DriftSketches:
        """Return empty sketches of the same features, which add no others."""
        return DriftSketches(
            max_features=0,
            left_out=list(self.left_out),
            pooled=dict(self.pooled),
            _sketches={feature: type(sketch)() for feature, sketch in self._sketches.items()},
            _layout=dict(self._layout),
            _tasks=dict(self._tasks),
        )

    def add(self, kind: Kind, tensors: Arrays) -> None:
        """Add examples: tensors ``[examples, ...]`` by name."""
        for name in sorted(tensors):
            self._add(kind, name, tensors[name])

    def add_scores(self, outputs: Arrays, tasks: Mapping[str, OutputTask]) -> None:
        """Add a model's outputs ``[examples, ...]`` by name, and what they decide.

        Args:
            outputs: The outputs.
            tasks: Their tasks, as far as they are known; else the first examples decide by `task_by_values`.
        """
        for name in outputs.keys() - self._tasks.keys():
            self._tasks[name] = task_by_values(tasks.get(name), outputs[name])
        classes = {name: decided(self._tasks[name], array) for name, array in outputs.items()}
        self.add("class", {name: _numbers_of(found) for name, found in classes.items() if found is not None})
        self.add("score", outputs)

    def merge(self, other: DriftSketches) -> None:
        """Add the examples of other sketches of the same features."""
        for feature, sketch in self._sketches.items():
            sketch.merge(other._sketches[feature])  # type: ignore[arg-type] # of the same class, as the layout is

    def count(self, kind: Kind) -> int:
        """Return the largest number of values of a feature of a kind."""
        return max((sketch.count for feature, sketch in self._sketches.items() if feature.kind == kind), default=0)

    def compare(self, other: DriftSketches) -> DriftReport:
        """Return how far another sample is from this reference."""
        both = [
            feature
            for feature, sketch in self._sketches.items()
            if sketch.count and type(found := other._sketches.get(feature)) is type(sketch) and found.count
        ]
        features = [_drift(feature, self._sketches[feature], other._sketches[feature]) for feature in both]
        matched = {(feature.kind, feature.tensor) for feature in both}
        tensors = {*self._layout, *other._layout}
        return DriftReport(
            features=tuple(sorted(features, key=lambda each: (-each.psi, each.kind, each.name))),
            unmatched=tuple(sorted({name for _, name in tensors - matched} - {*self.left_out})),
            left_out=tuple(sorted({*self.left_out})),
            pooled=dict(sorted(self.pooled.items())),
        )

    def _add(self, kind: Kind, name: str, array: Array) -> None:
        layout = self._layout.get((kind, name))
        if layout is None:
            layout = self._layout[kind, name] = self._lay_out(kind, name, array)
        flat = array.reshape(len(array), math.prod(array.shape[1:]))
        for feature in layout:
            if feature.place is None:
                self._sketches[feature].update(flat.reshape(-1))
            elif feature.place < flat.shape[1]:
                self._sketches[feature].update(flat[:, feature.place])

    def _lay_out(self, kind: Kind, name: str, array: Array) -> list[_Feature]:
        places = math.prod(array.shape[1:])
        left = self.max_features - sum((each.kind in _OF_OUTPUTS) == (kind in _OF_OUTPUTS) for each in self._sketches)
        if left <= 0:
            self.left_out.append(name)
            return []
        each = range(places) if array.ndim > 1 and places <= left else (None,)
        if places > left and array.ndim == 2:  # noqa: PLR2004 - columns; the values of more axes are alike
            self.pooled[name] = places
        sketch: type[Sketch] = CategorySketch if kind == "class" or array.dtype.kind in "OSU" else NumberSketch
        layout = [_Feature(kind=kind, tensor=name, place=place) for place in each]
        self._sketches |= {feature: sketch() for feature in layout}
        return layout


def _numbers_of(decisions: Array) -> Array:
    """Return classes or labels as numbers; of an output of one label without its last axis."""
    numbers: Array = decisions.astype(np.int64)
    return numbers[..., 0] if decisions.dtype == np.bool_ and numbers.ndim > 1 and numbers.shape[-1] == 1 else numbers


def _drift(feature: _Feature, reference: Any, sample: Any) -> FeatureDrift:
    found: Comparison = reference.compare(sample)
    shares: list[tuple[str, float, float]] = list(
        zip(found.labels, found.reference.tolist(), found.shares.tolist(), strict=True)
    )
    counts = (reference.count, sample.count)
    return FeatureDrift(
        name=feature.name,
        kind=feature.kind,
        psi=population_stability(found.reference, found.shares),
        psi_by_chance=(len(shares) - 1) * sum(1 / count for count in counts if count),
        ks=found.ks,
        ks_error=found.ks_error,
        reference_count=counts[0],
        count=counts[1],
        bins=tuple(Bin(label=label, reference=before, share=now) for label, before, now in shares),
    )


def renamed_to_match(tensors: Mapping[str, Array], names: Collection[str]) -> Arrays:
    """Return tensors with the lone input under the name that it has in the other sample, of which these are the names.

    A model with one input needs no names. Beside features, its input is called ``x``.
    """
    own, other = _lone(tensors), _lone(names)
    if own is None or other is None or own in names or other in tensors:
        return tensors
    return {other if name == own else name: array for name, array in tensors.items()}


def _lone(names: Collection[str]) -> str | None:
    if len(names) == 1:
        return next(iter(names))
    return LONE_INPUT if LONE_INPUT in names else None
