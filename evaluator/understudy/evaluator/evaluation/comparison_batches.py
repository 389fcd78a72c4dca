"""The batches of a comparison."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from understudy.checkpoints.signature import Signature
from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.types import Batch


class ReplayableBatches(Protocol):
    """Batches that can be read more than once, if that is known before the first read. Read on one thread."""

    def first(self, signature: Signature, *, keep: bool) -> Iterator[Batch]:
        """Yield the batches; keep them for `again` if ``keep`` is true."""

    def again(self, signature: Signature) -> Iterator[Batch]:
        """Yield the batches again from the beginning."""

    def close(self) -> None:
        """Drop the kept batches. Called on the same thread, after the last read."""


class DatasetBatches:
    """The batches of a dataset, which can be read any number of times.

    Args:
        dataset: The dataset.
        batch_size: Examples per batch.
    """

    def __init__(self, dataset: EvaluationDataset, *, batch_size: int) -> None:
        self._dataset = dataset
        self._batch_size = batch_size

    def first(self, signature: Signature, *, keep: bool) -> Iterator[Batch]:
        """See `ReplayableBatches`."""
        del keep
        return self.again(signature)

    def again(self, signature: Signature) -> Iterator[Batch]:
        """See `ReplayableBatches`."""
        return self._dataset.batches(signature, self._batch_size)

    def close(self) -> None:
        """See `ReplayableBatches`."""
