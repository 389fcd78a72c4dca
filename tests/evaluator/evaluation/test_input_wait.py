"""How long an evaluation waits for its examples."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit.real_run import dataset
from understudy.evaluator.evaluation.dataset_scorer import InputWait
from understudy.evaluator.types import Batch

BATCH = Batch(inputs={"x": np.zeros((1, 1), np.float32)}, targets={}, sample_weights={})
SECONDS = st.integers(0, 100).map(float)


class Clock:
    """A clock that goes only when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def evaluated(times: list[tuple[float, float]]) -> tuple[InputWait, Clock]:
    """Evaluate batches, each with the time to read it and then that to compute it, while the next is read."""
    clock = Clock()
    wait = InputWait(clock)
    ends: list[tuple[float, Future[None]]] = []

    def pass_time(seconds: float) -> None:
        until = clock.now + seconds
        while ends and ends[0][0] <= until:
            clock.now, future = ends.pop(0)
            future.set_result(None)
        clock.now = until

    def read() -> Iterator[Batch]:
        for seconds, _ in times:
            pass_time(seconds)
            yield BATCH

    computing = iter(times)
    for _ in wait.timed(read()):
        if ends:  # the one before is waited for
            pass_time(ends[0][0] - clock.now)
        future: Future[None] = Future()
        ends.append((clock.now + next(computing)[1], future))
        wait.computing(future)
    return wait, clock


@given(st.lists(st.tuples(SECONDS, SECONDS), max_size=8))
def test_what_reading_takes_beyond_the_computing_beside_it_is_waited(times: list[tuple[float, float]]) -> None:
    wait, _ = evaluated(times)
    beyond = [max(0.0, read - computed) for (read, _), (_, computed) in zip(times[1:], times, strict=False)]
    assert wait.seconds == pytest.approx(sum(beyond))


@pytest.mark.parametrize(("read", "warns"), [(5.0, True), (1.5, False)])
def test_a_slow_pipeline_is_named_with_what_helps(
    caplog: pytest.LogCaptureFixture, *, read: float, warns: bool
) -> None:
    wait, _ = evaluated([(read, 1.0)] * 10)
    with caplog.at_level(logging.WARNING):
        wait.warn(dataset("test"))
    assert ["num_parallel_calls" in record.getMessage() for record in caplog.records] == [True] * warns
