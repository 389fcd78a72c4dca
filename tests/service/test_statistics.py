from __future__ import annotations

import pytest

from understudy.service.calls.metrics import REMEMBERED_STEPS, InferenceStatistics


def test_batches_and_requests_are_counted_by_step_and_size() -> None:
    statistics = InferenceStatistics(clock=lambda: 100.0)
    statistics.batch_computed(1, examples=3, queue_seconds=[0.1, 0.2], compute_seconds=0.5)
    statistics.batch_computed(1, examples=3, queue_seconds=[0.3], compute_seconds=0.25)
    statistics.batch_computed(1, examples=8, queue_seconds=[0.0], compute_seconds=1.0)
    statistics.batch_computed(2, examples=1, queue_seconds=[0.0], compute_seconds=1.0)
    statistics.request_failed(1, seconds=0.125)

    one = statistics.of(1)

    assert one.examples == 14
    assert one.last_at == 100.0
    assert {rows: (times.count, times.seconds) for rows, times in one.batches.items()} == {3: (2, 0.75), 8: (1, 1.0)}
    assert one.queued.count == 4
    assert one.queued.seconds == pytest.approx(0.6)
    assert (one.computed.count, one.computed.seconds) == (4, 0.5 * 2 + 0.25 + 1.0)
    assert one.succeeded.count == 4
    assert one.succeeded.seconds == pytest.approx(0.6 + 2.25)
    assert (one.failed.count, one.failed.seconds) == (1, 0.125)
    assert statistics.of(2).examples == 1
    assert statistics.of(3).last_at == 0


def test_what_was_returned_does_not_change_any_more() -> None:
    statistics = InferenceStatistics()
    before = statistics.of(1)
    statistics.batch_computed(1, examples=3, queue_seconds=[0.1], compute_seconds=0.5)
    assert before.batches == {}


def test_the_versions_that_computed_last_are_remembered() -> None:
    statistics = InferenceStatistics()
    for step in range(REMEMBERED_STEPS + 1):
        statistics.batch_computed(step, examples=1, queue_seconds=[0.0], compute_seconds=0.0)
        statistics.batch_computed(0, examples=1, queue_seconds=[0.0], compute_seconds=0.0)
    assert statistics.of(0).examples > 0
    assert statistics.of(1).examples == 0
    assert statistics.of(REMEMBERED_STEPS).examples == 1
