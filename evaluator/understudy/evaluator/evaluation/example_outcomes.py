"""What is kept of single examples: the hardest, which were decided rightly, and the classes that were predicted."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from understudy.evaluator.evaluation.class_decisions import Decisions
from understudy.evaluator.evaluator_errors import LedgerError
from understudy.evaluator.types import Array

HARDEST = 100
"""How many of the examples with the greatest losses are kept."""

MAX_OUTCOMES = 2**24
"""Whether examples were decided rightly is kept for datasets of at most so many, in 2 MiB."""


class HardestExamples:
    """The examples with the greatest losses; of equal ones the first. A loss that is not a number counts as greatest.

    Args:
        limit: How many are kept.
    """

    def __init__(self, limit: int = HARDEST) -> None:
        self._limit = limit
        self._kept: list[tuple[float, int, dict[str, Any]]] = []

    def add(self, first: int, losses: Array, describe: Callable[[int], dict[str, Any]]) -> None:
        """Consider a batch.

        Args:
            first: The index of its first example in the dataset.
            losses: Float64 ``[examples]``.
            describe: Returns what to keep about an example of the batch, by its index there.
        """
        ranks = np.where(np.isnan(losses), np.inf, losses)
        order = np.argsort(-ranks, kind="stable")[: self._limit]
        least = self._kept[-1][0] if len(self._kept) == self._limit else -np.inf
        new = [
            (float(ranks[index]), first + int(index), {"loss": float(losses[index]), **describe(int(index))})
            for index in order
            if ranks[index] > least
        ]
        if new:
            self._kept = sorted([*self._kept, *new], key=lambda one: (-one[0], one[1]))[: self._limit]

    def document(self) -> list[dict[str, Any]]:
        """Return them as JSON values, the hardest first."""
        return [{"index": index, **described} for _, index, described in self._kept]


class Outcomes:
    """Which examples of a dataset were decided rightly. For one thread; it grows by one byte an example."""

    def __init__(self) -> None:
        self._parts: list[Array] = []
        self.examples = 0

    def add(self, right: Array) -> None:
        """Add a batch, bool ``[examples]``."""
        self.examples += len(right)
        if self.examples <= MAX_OUTCOMES:
            self._parts.append(right)
        else:
            self._parts.clear()

    def document(self) -> dict[str, Any] | None:
        """Return them as JSON values; None if there are none or too many."""
        if not self._parts:
            return None
        right = np.concatenate(self._parts)
        return {
            "examples": len(right),
            "right": int(right.sum()),
            "bits": base64.b64encode(zlib.compress(np.packbits(right).tobytes())).decode(),
        }


def outcomes_of(document: Mapping[str, Any]) -> Array:
    """Return the outcomes of a document, bool ``[examples]``.

    Raises:
        LedgerError: The document is damaged.
    """
    try:
        packed = np.frombuffer(zlib.decompress(base64.b64decode(document["bits"])), np.uint8)
        return np.unpackbits(packed, count=int(document["examples"])).astype(bool)
    except (KeyError, ValueError, zlib.error) as error:
        raise LedgerError(f"the tables of an evaluation are damaged: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Flips:
    """How the decisions of a version differ from those of a baseline on the same examples.

    Attributes:
        newly_wrong: The indices of the examples that only the baseline decided rightly, ascending.
        newly_right: Those that only the version decided rightly.
        both_right: How many examples both decided rightly.
        both_wrong: How many examples neither decided rightly.
        p_value: The probability of so uneven a number of changes if both versions were equally good: McNemar's test,
            exact and two-sided.
        described: What both versions predicted for the first examples of either kind, as JSON values with the
            ``index``; empty if that is not known.
    """

    newly_wrong: Array
    newly_right: Array
    both_right: int
    both_wrong: int
    p_value: float
    described: Sequence[Mapping[str, Any]] = ()


def flips(right: Array, baseline: Array) -> Flips:
    """Compare the outcomes of a version with those of a baseline, both bool ``[examples]``."""
    wrong, gained = np.flatnonzero(baseline & ~right), np.flatnonzero(right & ~baseline)
    return Flips(
        newly_wrong=wrong,
        newly_right=gained,
        both_right=int((right & baseline).sum()),
        both_wrong=int((~right & ~baseline).sum()),
        p_value=mcnemar(len(wrong), len(gained)),
    )


def mcnemar(newly_wrong: int, newly_right: int) -> float:
    """Return the two-sided p-value of McNemar's exact test, which is 1 without a change."""
    from scipy.special import bdtr  # takes a while, and a service may never need it

    changes = newly_wrong + newly_right
    return min(1.0, 2.0 * float(bdtr(min(newly_wrong, newly_right), changes, 0.5))) if changes else 1.0


MAX_ITEMS = 8
"""The items of an example that are kept: the first ones, of sequences."""

MAX_NUMBERS = 2**22
"""The classes of the examples of an output are kept if they are at most so many numbers."""


class PredictedClasses:
    """What was predicted for the examples of one output. For one thread; bounded by `MAX_NUMBERS`."""

    def __init__(self) -> None:
        self._counts: list[Array] = []
        self._values: list[Array] = []
        self._labels = 0
        self._numbers = 0

    def add(self, decided: Decisions, examples: int) -> None:
        """Add the decisions about a batch of this many examples."""
        counts = np.bincount(decided.examples, minlength=examples)
        places = np.arange(len(decided.examples)) - np.repeat(np.cumsum(counts) - counts, counts)
        values = decided.predicted[places < MAX_ITEMS]
        if values.ndim > 1:
            self._labels = values.shape[1]
            values = np.packbits(values, axis=1)
        self._numbers += len(counts) + values.size
        if self._numbers > MAX_NUMBERS:
            self._counts.clear()
            self._values.clear()
            return
        self._counts.append(np.minimum(counts, MAX_ITEMS).astype(np.uint8))
        self._values.append(values.astype(np.min_scalar_type(int(values.max(initial=0)))))

    def document(self) -> dict[str, Any] | None:
        """Return them as JSON values; None if there are too many."""
        if self._numbers > MAX_NUMBERS or not self._counts:
            return None
        values = np.concatenate(self._values)
        return {
            "labels": self._labels,
            "dtype": values.dtype.name,
            "counts": _encoded(np.concatenate(self._counts)),
            "values": _encoded(values),
        }


class PredictionReader:
    """Reads what was predicted for single examples of a document.

    Args:
        document: What `PredictedClasses.document` returned.

    Raises:
        LedgerError: The document is damaged.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        try:
            self._counts = _decoded(document["counts"], "uint8").astype(np.int64)
            self._values = _decoded(document["values"], document["dtype"])
            self._labels = int(document["labels"])
        except (KeyError, ValueError, TypeError, zlib.error) as error:
            raise LedgerError(f"the tables of an evaluation are damaged: {error}") from error
        self._ends = np.cumsum(self._counts)
        width = (self._labels + 7) // 8
        if self._labels:
            self._values = self._values.reshape(-1, width)
        if len(self._values) != self._counts.sum():
            raise LedgerError("the tables of an evaluation are damaged: the predicted classes are not whole")

    def of(self, example: int) -> list[Any]:
        """Return the class of each item, or of several labels at once those that hold; empty beyond the end."""
        if example >= len(self._counts):
            return []
        items = self._values[self._ends[example] - self._counts[example] : self._ends[example]]
        if not self._labels:
            return [int(item) for item in items]
        return [np.flatnonzero(np.unpackbits(item, count=self._labels))[:MAX_ITEMS].tolist() for item in items]


def _encoded(array: Array) -> str:
    return base64.b64encode(zlib.compress(array.tobytes())).decode()


def _decoded(text: str, dtype: str) -> Array:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype)
