"""Which requests the engine refuses, and with which error."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from contextlib import AbstractContextManager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit.engine_harness import TIMEOUT, EngineHarness, outputs
from understudy.evaluator.batching.request_queue import LatencyEstimator, size_of
from understudy.evaluator.evaluator_errors import (
    DeadlineExceededError,
    DrainingError,
    InvalidInputError,
    OverloadedError,
)


def test_a_request_larger_than_the_queue_is_invalid(harness: EngineHarness) -> None:
    with pytest.raises(InvalidInputError, match="got 17 examples in one request; at most 16"):
        harness.predict(*range(17))
    assert harness.observer.reasons == ["invalid"]


def test_a_full_queue_refuses_at_once(harness: EngineHarness) -> None:
    harness.occupy()
    harness.predict(*range(15))
    with pytest.raises(OverloadedError, match="15 examples are waiting and at most 16 may"):
        harness.predict(1.0, 2.0)
    assert harness.observer.reasons == ["queue_full"]


def test_requests_that_would_hold_too_much_memory_are_refused_with_the_wait() -> None:
    harness = EngineHarness(max_batch_size=4, max_queue_examples=64, max_queue_bytes=1000)
    try:
        harness.occupy()
        large = harness.predict(1.0, width=500)
        with pytest.raises(
            OverloadedError, match="hold 2000 bytes, and 80 more would exceed the 1000 of --max-queue-mib"
        ):
            harness.predict(2.0, width=20)
        assert harness.observer.reasons == ["queue_full"]
        harness.go()
        large.result(TIMEOUT)
        assert outputs(harness.predict(3.0)) == [6.0]
    finally:
        harness.close()


def test_abandoned_requests_make_room_for_the_memory_of_others() -> None:
    harness = EngineHarness(max_batch_size=4, max_queue_examples=64, max_queue_bytes=1000)
    try:
        harness.occupy()
        assert harness.predict(1.0, width=250).cancel()
        future = harness.predict(5.0)
        harness.go()
        assert outputs(future) == [10.0]
    finally:
        harness.close()


def test_the_strings_of_waiting_requests_count_as_well() -> None:
    strings = np.array([[b"x" * 1000], [b""]], object)
    assert size_of({"x": np.zeros((2, 3), np.float32), "s": strings}) == 24 + 2 * (8 + 33) + 1000


def test_what_nobody_wants_makes_room_in_a_full_queue(harness: EngineHarness) -> None:
    harness.occupy()
    abandoned = harness.predict(*range(16))
    assert abandoned.cancel()
    future = harness.predict(5.0)
    harness.go()
    assert outputs(future) == [10.0]
    assert harness.observer.reasons == ["cancelled"]


def test_a_deadline_that_has_passed_is_refused_at_once(harness: EngineHarness) -> None:
    with pytest.raises(DeadlineExceededError):
        harness.predict(1.0, deadline=time.monotonic() - 1)


def test_a_deadline_that_those_ahead_leave_no_time_for_is_refused_at_once(harness: EngineHarness) -> None:
    harness.engine._admission._latency = slow = LatencyEstimator(8)
    slow.observe(8, 16.0)
    harness.occupy()
    waiting = harness.predict(*range(8))
    with pytest.raises(
        OverloadedError, match=r"8 examples are waiting: the estimated wait 16\.000 s exceeds"
    ) as refusal:
        harness.predict(1.0, deadline=time.monotonic() + 10)
    assert refusal.value.retry_after_seconds == pytest.approx(16.0)
    enough = harness.predict(1.0, deadline=time.monotonic() + TIMEOUT)
    assert waiting.cancel()
    threading.Event().wait(0.06)  # sweeps are as far apart
    just_enough = harness.predict(1.0, deadline=time.monotonic() + 18)
    harness.go()
    assert (outputs(enough), outputs(just_enough)) == ([2.0], [2.0])
    assert harness.observer.reasons == ["unmeetable", "cancelled"]


def test_nothing_is_refused_for_its_deadline_while_nothing_waits(harness: EngineHarness) -> None:
    harness.engine._admission._latency = slow = LatencyEstimator(8)
    slow.observe(8, 100.0)
    harness.go()
    assert outputs(harness.predict(1.0, deadline=time.monotonic() + TIMEOUT)) == [2.0]
    harness.engine.check_admission(time.monotonic() + TIMEOUT)
    assert harness.observer.reasons == []


def test_whoever_asks_for_room_is_told_what_a_request_would_be(harness: EngineHarness) -> None:
    harness.occupy()
    harness.engine.check_admission(None)
    with pytest.raises(DeadlineExceededError):
        harness.predict(1.0, deadline=time.monotonic())
    abandoned = harness.predict(*range(16))
    harness.engine.check_admission(None)  # there may be room after a sweep
    with pytest.raises(OverloadedError):
        harness.predict(1.0)
    with pytest.raises(OverloadedError, match="16 examples are waiting"):
        harness.engine.check_admission(None)
    abandoned.cancel()
    harness.close()
    with pytest.raises(DrainingError):
        harness.engine.check_admission(None)


@pytest.mark.parametrize(
    ("examples", "refused"), [(1, None), (2, "queue_full"), (17, "invalid")], ids=["fits", "does not", "never would"]
)
def test_the_check_before_a_request_exists_refuses_what_the_queue_would(
    harness: EngineHarness, examples: int, refused: str | None
) -> None:
    harness.occupy()
    harness.predict(*range(15))
    harness.engine._swept_at = math.inf  # no sweep may make room

    def outcome() -> AbstractContextManager[object]:
        return pytest.raises((OverloadedError, InvalidInputError)) if refused else contextlib.nullcontext()

    with outcome():
        harness.engine.check_admission(None, examples=examples)
    with outcome():
        harness.predict(*range(examples))
    assert harness.observer.reasons == ([refused, refused] if refused else [])


@given(seconds=st.floats(1e-5, 1.0), sizes=st.lists(st.integers(1, 64), max_size=100), rows=st.integers(0, 10_000))
def test_where_every_batch_takes_as_long_the_pace_is_exact(seconds: float, sizes: list[int], rows: int) -> None:
    latency = LatencyEstimator(64)
    for size in sizes:
        latency.observe(size, seconds)
    assert latency.estimate(rows) == pytest.approx(-(-rows // 64) * seconds if sizes else 0.0)


def test_full_batches_are_judged_by_large_ones() -> None:
    latency = LatencyEstimator(64)
    for rows, seconds in ((64, 0.8), (32, 0.6), *[(1, 0.1)] * 16):
        latency.observe(rows, seconds)
    assert latency.estimate(1) == pytest.approx(0.1)
    assert latency.estimate(128) == pytest.approx(1.4)
    assert latency.estimate(129) == pytest.approx(1.5)
