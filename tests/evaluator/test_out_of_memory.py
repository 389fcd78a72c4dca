"""An evaluator on a machine that runs out of memory, and has enough of it again later."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.real_run import WAIT_SECONDS, RealRun, dataset, outcomes, wait_for_records
from understudy.checkpoints.signature import Signature
from understudy.evaluator.datasets.dataset import ArrayDataset
from understudy.evaluator.types import Batch, EvaluationOutcome

SCORED = EvaluationOutcome.SCORED
MORE_THAN_ITS_ATTEMPTS = 5

pytestmark = pytest.mark.usefixtures("logical_cpus")


class Postponed(threading.Event):
    """Set once it was told often enough."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def note(self) -> None:
        self.count += 1
        if self.count >= MORE_THAN_ITS_ATTEMPTS:
            self.set()


class LargeDataset(ArrayDataset):
    """A dataset that there is no memory for at first."""

    def __init__(self, small: ArrayDataset, postponed: Postponed) -> None:
        vars(self).update(vars(small))
        self._postponed = postponed

    def batches(self, signature: Signature, batch_size: int, *, first_example: int = 0) -> Iterator[Batch]:
        if not self._postponed.is_set():
            self._postponed.note()
            raise MemoryError("cannot allocate 8 GiB")
        yield from super().batches(signature, batch_size, first_example=first_example)


def test_a_score_that_there_is_no_memory_for_is_put_off_and_never_recorded_as_failed(tmp_path: Path) -> None:
    run = RealRun(tmp_path)
    run.publish(1)
    postponed = Postponed()
    with run.running(datasets=[LargeDataset(dataset(), postponed)]) as evaluator:
        assert postponed.wait(WAIT_SECONDS)

        assert outcomes(wait_for_records(evaluator, 1)) == [(1, "test", SCORED)]
