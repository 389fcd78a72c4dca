"""The classes that a version predicted for each example, to say how two versions differ where only one is right."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from understudy.evaluator.evaluation.class_decisions import Decisions
from understudy.evaluator.evaluator_errors import LedgerError
from understudy.evaluator.types import Array

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
