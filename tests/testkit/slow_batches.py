"""The batches of comparisons on a dataset, which come when a test lets them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from understudy.checkpoints.signature import Signature
from understudy.evaluator.evaluation.comparison import DatasetBatches
from understudy.evaluator.types import Batch

PARTS = 4
WAIT_SECONDS = 100.0


class SlowBatches:
    """Divides each batch of a dataset into quarters, and holds the third back until `released`.

    Args:
        patch: Undoes that.

    Attributes:
        read: How many quarters were read.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.read = 0
        self._released = threading.Event()
        original = DatasetBatches.again

        def again(batches: DatasetBatches, signature: Signature) -> Iterator[Batch]:
            for batch in original(batches, signature):
                for number in range(PARTS):
                    if number == PARTS // 2:
                        assert self._released.wait(WAIT_SECONDS)
                    self.read += 1
                    yield _part(batch, number)

        patch.setattr(DatasetBatches, "again", again)

    def release(self) -> None:
        """Let all batches come."""
        self._released.set()


def _part(batch: Batch, number: int) -> Batch:
    size = batch.examples // PARTS
    end = batch.examples if number == PARTS - 1 else (number + 1) * size

    def of(arrays: Any) -> Any:
        return {name: array[number * size : end] for name, array in arrays.items()}

    return dataclasses.replace(
        batch,
        inputs=of(batch.inputs),
        targets=of(batch.targets),
        sample_weights=of(batch.sample_weights),
        features=of(batch.features),
    )
