"""Which slices the examples of a batch belong to."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from understudy.evaluator.evaluation.slice_names import NOT_A_NUMBER, shown
from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import Array, Arrays, OutputTask

LABEL = "label"
"""The class of an example, or its value, by its target; ``label/NAME`` for one of several outputs."""

PREDICTED = "predicted"
"""The class that the model predicts for an example; ``predicted/NAME`` for one of several outputs."""

MAX_SLICES = 1000
"""The most values of one setting, and the most slices of an evaluation."""

_ESCAPED = re.compile(r"\\([*:;])")
"""What separates features, buckets and settings, as it is written in the name of a feature."""

_COUNTED = 4096
"""Classes and buckets below this are counted, which is faster than sorting them."""

MAX_SETTINGS = 100

_OF_CLASSES = frozenset({"categorical", "multilabel", "unknown"})
"""The tasks whose targets may have a value for each class."""

_COUNTED_VALUES = 100_000
"""Distinct values are counted up to this number."""

_QUANTILES = re.compile(r"q([1-9]\d*)")
_MAX_QUANTILES = 100
_SAMPLE = 1_000_000
"""The most values that quantiles are computed from."""


class SliceError(InvalidInputError):
    """A slice setting cannot be used. The text gives the setting, what is wrong with it, and what there is."""


@dataclass(frozen=True, kw_only=True)
class SliceFeature:
    """One feature of a slice setting.

    Attributes:
        name: The feature, ``label`` or ``predicted``.
        edges: The edges of its buckets, ascending; empty to slice by single values.
        quantiles: The number of buckets with equally many examples; 0 for none.
    """

    name: str
    edges: tuple[float, ...] = ()
    quantiles: int = 0

    @property
    def is_prediction(self) -> bool:
        """Whether it depends on the model."""
        return _is(self.name, PREDICTED)

    @property
    def is_column(self) -> bool:
        """Whether it is a feature of the examples, not a target or a prediction."""
        return not (self.is_prediction or _is(self.name, LABEL))

    def named(self, values: Array) -> tuple[list[str], Array]:
        """Return the names of the slices that these values fall into, and the index of each value's.

        Args:
            values: One value for each example, ``[examples]``.
        """
        if self.edges:
            return self._bucketed(values)
        found, indices = _distinct(values)
        values_found = found if found.dtype.kind == "f" else found.tolist()  # single precision has fewer digits
        return [f"{self.name}={shown(value)}" for value in values_found], indices

    def _bucketed(self, values: Array) -> tuple[list[str], Array]:
        numbers = values.astype(values.dtype if values.dtype == np.float32 else np.float64)
        edges = np.asarray(self.edges, numbers.dtype)  # so that 0.3 is not below 0.3 in single precision
        places = np.where(np.isnan(numbers), len(edges) + 1, np.searchsorted(edges, numbers, side="right"))
        found, indices = _distinct(places)
        return [self._bucket(place) for place in found.tolist()], indices

    def _bucket(self, place: int) -> str:
        texts = [shown(edge) for edge in self.edges]
        if place > len(texts):
            return f"{self.name}={NOT_A_NUMBER}"
        if place == 0:
            return f"{self.name}<{texts[0]}"
        return (
            f"{self.name}>={texts[-1]}" if place == len(texts) else f"{self.name}=[{texts[place - 1]},{texts[place]})"
        )


@dataclass(frozen=True, kw_only=True)
class SliceSetting:
    """One slice setting: a feature, or two that are crossed."""

    text: str
    features: tuple[SliceFeature, ...]

    def named(self, values: Mapping[str, Array]) -> tuple[list[str], Array]:
        """Return the names of the slices that examples belong to, and the index of each example's.

        Args:
            values: The values of all features by name, ``[examples]`` each.
        """
        named = [feature.named(values[feature.name]) for feature in self.features]
        if len(named) == 1:
            return named[0]
        (left, left_indices), (right, right_indices) = named
        pairs, indices = _distinct(left_indices * len(right) + right_indices)
        return [f"{left[pair // len(right)]},{right[pair % len(right)]}" for pair in pairs.tolist()], indices


def _distinct(values: Array) -> tuple[Array, Array]:
    """Return the distinct values, ascending, and the index of each value's; small integers are not sorted."""
    if values.dtype.kind in "iu" and len(values) and values.min() >= 0 and values.max() < _COUNTED:
        places = values.astype(np.int64, copy=False)
        present = np.bincount(places) > 0
        return np.flatnonzero(present), (np.cumsum(present) - 1)[places]
    found, indices = np.unique(values, return_inverse=True)
    return found, indices.reshape(-1)


def parse_slices(texts: Iterable[str]) -> tuple[SliceSetting, ...]:
    """Return slice settings from their texts.

    A setting is a feature or two with ``*`` between them. A feature is ``NAME``, ``NAME:18,30,65`` with the edges of
    buckets, or ``NAME:q4`` with the number of quantiles. In a name, a backslash goes before ``*``, ``:`` and ``;``.

    Raises:
        SliceError: A text has another form, or edges do not ascend.
    """
    unique = list(dict.fromkeys(text.strip() for text in texts))
    if len(unique) > MAX_SETTINGS:
        raise SliceError(f"got {len(unique)} slice settings; give at most {MAX_SETTINGS}")
    return tuple(_parse(text) for text in unique)


def _parse(text: str) -> SliceSetting:
    parts = [part.strip() for part in re.split(r"(?<!\\)\*", text)]
    if len(parts) > 2 or not all(parts):  # noqa: PLR2004 - two features
        raise SliceError(
            f"slice {text!r} is not a feature or two; give one such as 'label', 'age:18,30,65' or 'country*label', and "
            r"write an asterisk of a name as \*"
        )
    features = tuple(_parse_feature(text, part) for part in parts)
    if len({feature.name for feature in features}) < len(features):
        raise SliceError(f"slice {text!r} crosses {features[0].name!r} with itself; give two features")
    return SliceSetting(text=text, features=features)


def _parse_feature(text: str, part: str) -> SliceFeature:
    *names, buckets = re.split(r"(?<!\\):", part)
    if not names:
        return SliceFeature(name=_ESCAPED.sub(r"\1", part))
    name, buckets = _ESCAPED.sub(r"\1", ":".join(names).strip()), buckets.strip()
    quantiles = _QUANTILES.fullmatch(buckets)
    if quantiles is not None:
        count = int(quantiles[1])
        if not 1 < count <= _MAX_QUANTILES:
            raise SliceError(f"slice {text!r} has {count} quantiles; give 2 to {_MAX_QUANTILES}")
        if _is(name, PREDICTED):
            raise SliceError(f"slice {text!r}: the quantiles of {name!r} differ from version to version; give edges")
        return SliceFeature(name=name, quantiles=count)
    try:
        edges = tuple(float(edge) for edge in buckets.split(","))
    except ValueError:
        raise SliceError(
            f"slice {text!r}: the buckets {buckets!r} are neither edges such as 18,30,65 nor quantiles such as q4; "
            r"write a colon of a name as \:"
        ) from None
    if not all(map(math.isfinite, edges)) or any(high <= low for low, high in itertools.pairwise(edges)):
        raise SliceError(f"slice {text!r}: the edges {buckets} do not ascend; give finite numbers in ascending order")
    return SliceFeature(name=name, edges=edges)


def columns_of(settings: Iterable[SliceSetting]) -> frozenset[str]:
    """Return the names of the features of examples that settings name."""
    return frozenset(feature.name for setting in settings for feature in setting.features if feature.is_column)


def check_columns(settings: Iterable[SliceSetting], columns: Iterable[frozenset[str] | None]) -> None:
    """Refuse slices by features that no dataset has, as far as the datasets know them.

    Args:
        settings: The slice settings.
        columns: The names of the features of each dataset; None if they are not known.

    Raises:
        SliceError: No dataset has a feature.
    """
    of_datasets = list(columns)
    known = [each for each in of_datasets if each is not None]
    if len(known) < len(of_datasets) or not known:
        return
    there = frozenset[str]().union(*known)
    for setting in settings:
        missing = [feature.name for feature in setting.features if feature.is_column and feature.name not in there]
        if missing:
            raise SliceError(
                f"slice {setting.text!r}: no dataset has a feature {missing[0]!r}; there are "
                f"{', '.join((LABEL, PREDICTED, *sorted(there)))}"
            )


@dataclass(frozen=True, kw_only=True)
class Members:
    """The examples of one batch that belong to the slices of one setting.

    Attributes:
        setting: The text of the setting.
        names: The slices that have examples in this batch.
        indices: The index of each example's slice, ``[examples]``.
    """

    setting: str
    names: Sequence[str]
    indices: Array

    def rows(self) -> Iterator[tuple[str, Array]]:
        """Yield each slice with the indices of its examples, ascending."""
        order = np.argsort(self.indices, kind="stable")
        ends = np.cumsum(np.bincount(self.indices, minlength=len(self.names)))
        yield from zip(self.names, np.split(order, ends[:-1]), strict=True)


Values = Mapping[str, Arrays]
"""By the text of a setting the values of its features by name, ``[examples]`` each."""


def form_of(values: Values) -> tuple[Any, ...]:
    """Return what the values of batches must have in common to be joined without a change of their names."""
    return tuple(
        (text, name, array.dtype if array.dtype.kind in "biuf" else array.dtype.kind)
        for text, of_setting in values.items()
        for name, array in of_setting.items()
    )


def joined(parts: Sequence[Values]) -> Values:
    """Return the values of several batches of one form."""
    if len(parts) == 1:
        return parts[0]
    return {
        text: {name: np.concatenate([part[text][name] for part in parts]) for name in of_setting}
        for text, of_setting in parts[0].items()
    }


@dataclass(kw_only=True)
class Slicer:
    """Finds the slices of examples. For one thread.

    Attributes:
        settings: The slice settings; the quantiles of each are resolved.
        tasks: What each output of the model is for, by its name, as far as it is known.
        lenient: Whether settings that do not fit are left out with a note, instead of refused.
        notes: Why settings were left out.
    """

    settings: tuple[SliceSetting, ...]
    tasks: Mapping[str, OutputTask] = field(default_factory=dict)
    lenient: bool = False
    notes: list[str] = field(default_factory=list)
    _left_out: set[str] = field(default_factory=set)
    _seen: dict[str, set[str]] = field(default_factory=dict)

    def values(self, targets: Arrays, predictions: Arrays | None, columns: Arrays) -> Values:
        """Return what the settings slice a batch by.

        Args:
            targets: The targets by the names of outputs, ``[examples, ...]``.
            predictions: The predicted classes by the names of outputs, ``[examples]``; None without outputs.
            columns: The inputs and features by name, ``[examples, ...]``.

        Raises:
            SliceError: A feature does not exist, or has no single value for each example.
        """
        found: dict[str, Arrays] = {}
        for setting in self.settings:
            if setting.text in self._left_out:
                continue
            try:
                found[setting.text] = {
                    feature.name: _values(feature, targets, predictions, columns, self.tasks)
                    for feature in setting.features
                }
            except SliceError as error:
                if not self.lenient:
                    raise
                self._left_out.add(setting.text)
                self.notes.append(f"slice {setting.text!r} is left out: {error}")
        return found

    def members(self, values: Values) -> Iterator[Members]:
        """Yield the slices of a batch, except for those of settings that have too many values.

        Args:
            values: What `values` returned, of one batch or joined of several.
        """
        for setting in self.settings:
            if setting.text not in values:
                continue
            names, indices = setting.named(values[setting.text])
            seen = self._seen.setdefault(setting.text, set())
            if len(seen) < _COUNTED_VALUES:
                seen.update(names)
            if len(seen) <= MAX_SLICES:
                yield Members(setting=setting.text, names=names, indices=indices)

    def stored(self) -> dict[str, Any]:
        """Return what was seen, for `restore`: plain values."""
        seen = {text: sorted(names) for text, names in self._seen.items()}
        return {"notes": self.notes, "left_out": sorted(self._left_out), "seen": seen}

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Go on from what `stored` returned."""
        self.notes = list(stored["notes"])
        self._left_out = set(stored["left_out"])
        self._seen = {text: set(names) for text, names in stored["seen"].items()}

    def refused(self) -> dict[str, str]:
        """Return the settings that have too many values so far, with a sentence about each."""
        return {text: _too_many(text, len(names)) for text, names in self._seen.items() if len(names) > MAX_SLICES}


def _too_many(text: str, count: int) -> str:
    number = f"{count}" if count < _COUNTED_VALUES else f"at least {_COUNTED_VALUES}"
    return (
        f"slice {text!r} is left out: it has {number} values, and at most {MAX_SLICES} are scored; give edges of "
        "buckets, such as 'age:18,30,65', or another feature"
    )


def resolved(settings: Sequence[SliceSetting], samples: Mapping[str, QuantileSample]) -> tuple[SliceSetting, ...]:
    """Return settings whose quantiles are replaced by edges."""
    return tuple(
        SliceSetting(
            text=setting.text,
            features=tuple(
                SliceFeature(name=feature.name, edges=samples[feature.name].edges(feature.quantiles))
                if feature.quantiles
                else feature
                for feature in setting.features
            ),
        )
        for setting in settings
    )


class QuantileSample:
    """A sample of the values of one feature of a dataset, in constant memory: all of them, or every 2nd, 4th, ..."""

    def __init__(self) -> None:
        self._kept: list[Array] = []
        self._is_single = False
        self._stride = 1
        self._seen = 0

    def add(self, values: Array) -> None:
        """Add the values of a batch."""
        first = -self._seen % self._stride
        self._is_single = values.dtype == np.float32
        self._kept.append(values[first :: self._stride].astype(np.float64))
        self._seen += len(values)
        if sum(map(len, self._kept)) > _SAMPLE:
            together = np.concatenate(self._kept)
            self._kept, self._stride = [together[::2]], 2 * self._stride

    def edges(self, quantiles: int) -> tuple[float, ...]:
        """Return the edges between quantiles, without repetitions; 0 alone if there is no finite value."""
        values = np.concatenate([np.zeros(0), *self._kept])
        finite = values[np.isfinite(values)]
        if not len(finite):
            return (0.0,)
        edges = np.quantile(finite, np.arange(1, quantiles) / quantiles, method="higher")
        unique = np.unique(edges).astype(np.float32 if self._is_single else np.float64)
        return tuple(float(str(edge)) for edge in unique)  # 0.7 for the closest number of single precision


def _values(
    feature: SliceFeature, targets: Arrays, predictions: Arrays | None, columns: Arrays, tasks: Mapping[str, OutputTask]
) -> Array:
    """Return the values of a feature, ``[examples]``."""
    classes = predictions or {}
    source = columns if feature.is_column else classes if feature.is_prediction else targets
    name = feature.name
    if not feature.is_column:
        _, _, output = feature.name.partition("/")
        name = output or (next(iter(source)) if len(source) == 1 else "")
    found = source.get(name)
    if found is None:
        names, reason = available(targets, classes, columns), ""
        if feature.is_prediction and name not in classes:
            names = [name for name in names if name != PREDICTED or classes]
            reason = _without_class(name, tasks, predictions)
        if _is(feature.name, LABEL) and not targets:
            names = [name for name in names if name != LABEL]
            reason = ", because the examples have no targets"
        raise SliceError(f"there is no feature {feature.name!r} to slice by{reason}; there are {', '.join(names)}")
    if feature.is_column and math.prod(found.shape[1:]) == 1:
        found = found.reshape(-1)
    if _is(feature.name, LABEL):
        found = _classes(feature.name, found, tasks.get(name))
    if found.ndim != 1:
        raise SliceError(
            f"feature {feature.name!r} has shape [{', '.join(map(str, ('examples', *found.shape[1:])))}]; a slice "
            "needs one value for each example"
        )
    if (feature.edges or feature.quantiles) and found.dtype.kind not in "biuf":
        raise SliceError(f"feature {feature.name!r} holds text, not numbers, so it has no buckets")
    return found


def _without_class(output: str, tasks: Mapping[str, OutputTask], predictions: Collection[str] | None) -> str:
    """Return why an output has no predicted class; empty if that is not known and others have."""
    if predictions is None:
        return ", because the model scores each batch whole by itself, and its outputs are not kept"
    output = output or (next(iter(tasks)) if len(tasks) == 1 else "")
    if output not in tasks:
        return "" if predictions else ", because no output has one class for an example"
    kind = tasks[output].kind
    if kind == "regression":
        return f", because {output!r} has numbers, not classes"
    several = "labels" if kind == "multilabel" else "classes"
    return f", because {output!r} has several {several} for an example, not one class"


def number_values(feature: SliceFeature, targets: Arrays, columns: Arrays, tasks: Mapping[str, OutputTask]) -> Array:
    """Return the values of a feature whose quantiles are requested; see `Slicer.values`.

    Raises:
        SliceError: The feature does not exist, or has no single number for each example.
    """
    return _values(feature, targets, {}, columns, tasks)


def available(targets: Collection[str], predictions: Collection[str], columns: Collection[str]) -> list[str]:
    """Return the names that a slice can have."""
    several = len(targets) > 1
    kinds = [(LABEL, targets), (PREDICTED, predictions)]
    return [
        *(
            name
            for kind, outputs in kinds
            for name in ([f"{kind}/{output}" for output in outputs] if several else [kind])
        ),
        *columns,
    ]


def _classes(name: str, targets: Array, task: OutputTask | None) -> Array:
    """Return the class of each example, or its value: of one value, or of one 1 among zeros for the classes."""
    targets = targets[..., 0] if targets.ndim > 1 and targets.shape[-1] == 1 else targets
    has_value_for_each = task is None or task.kind in _OF_CLASSES
    if targets.ndim != 2 or targets.dtype.kind not in "biuf" or not has_value_for_each:  # noqa: PLR2004
        return targets
    if not np.array_equal(targets.astype(bool).sum(axis=1), np.ones(len(targets))):
        raise SliceError(f"the targets of {name!r} give an example several classes or none; a slice needs one")
    found: Array = targets.argmax(axis=1)
    return found


def _is(name: str, kind: str) -> bool:
    return name == kind or name.startswith(f"{kind}/")
