"""Batches that run at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from testkit.engine_harness import TIMEOUT, EngineHarness, Recorder, outputs


@pytest.fixture
def harness() -> Iterator[EngineHarness]:
    built = EngineHarness(max_batch_size=8, max_queue_examples=64, concurrent_batches=2)
    yield built
    built.close()


def test_what_waits_while_a_batch_runs_runs_beside_it(harness: EngineHarness) -> None:
    first = harness.occupy()
    second = harness.predict(1.0)
    harness.slot.wait_until_busy()

    harness.go()

    assert (outputs(first), outputs(second)) == ([0.0], [2.0])
    assert len(set(harness.slot.threads)) == 2


def test_no_more_batches_run_than_set(harness: EngineHarness) -> None:
    harness.occupy()
    harness.occupy()
    queued = [harness.predict(float(value)) for value in (1, 2)]
    assert harness.observer.queue_examples[-1] == 2

    harness.go()

    assert [outputs(future) for future in queued] == [[2.0], [4.0]]
    assert harness.slot.batches[:2] == [1, 1]


def test_what_comes_together_is_shared_out_over_the_idle_threads(harness: EngineHarness) -> None:
    futures = [harness.submit(float(value)) for value in range(6)]
    harness.engine.dispatch()
    harness.slot.wait_until_busy()
    harness.slot.wait_until_busy()

    harness.go()

    assert [outputs(future) for future in futures] == [[2.0 * value] for value in range(6)]
    assert harness.slot.batches == [3, 3]


def test_a_lone_request_is_not_divided(harness: EngineHarness) -> None:
    harness.go()
    assert outputs(harness.predict(*range(5))) == [2.0 * value for value in range(5)]
    assert harness.slot.batches == [5]


@pytest.mark.parametrize("brief_rows", [2, 4], ids=["its shares are brief", "it is brief as a whole"])
def test_a_batch_with_brief_shares_is_not_shared_out(harness: EngineHarness, brief_rows: int) -> None:
    harness.batches_take(1e-4, rows=brief_rows)
    blocked = harness.occupy()
    harness.engine.set_batching(max_batch_size=8, gathering_seconds=0.0, concurrent_batches=1)
    futures = [harness.submit(float(value)) for value in range(4)]
    harness.go()
    outputs(blocked)
    harness.engine.set_batching(max_batch_size=8, gathering_seconds=0.0, concurrent_batches=2)
    harness.engine.dispatch()

    assert [outputs(future) for future in futures] == [[2.0 * value] for value in range(4)]
    assert harness.slot.batches == [1, 4]


def test_predictions_do_not_wait_for_an_evaluation(harness: EngineHarness) -> None:
    harness.go()
    began, may_end = threading.Event(), threading.Event()

    def work() -> bool:
        began.set()
        return may_end.wait(TIMEOUT)

    evaluation = harness.engine.run(work, examples=1)
    assert began.wait(TIMEOUT)

    assert outputs(harness.predict(1.0)) == [2.0]
    may_end.set()
    assert evaluation.result(TIMEOUT)


def test_evaluations_run_one_at_a_time_and_in_order(harness: EngineHarness) -> None:
    order: list[int] = []
    alone = threading.Lock()

    def work(number: int) -> None:
        with_nothing_beside = alone.acquire(blocking=False)
        order.append(number if with_nothing_beside else -1)
        if with_nothing_beside:
            alone.release()

    harness.occupy()
    futures = [harness.engine.run(lambda number=number: work(number), examples=1) for number in range(20)]  # type: ignore[misc]
    harness.go()
    for future in futures:
        future.result(TIMEOUT)
    assert order == list(range(20))


def test_the_number_changes_while_the_engine_runs() -> None:
    harness = EngineHarness(max_batch_size=8)
    first = harness.occupy()
    second = harness.predict(1.0)
    assert harness.observer.queue_examples[-1] == 1

    harness.engine.set_batching(max_batch_size=8, gathering_seconds=0.0, concurrent_batches=2)
    harness.slot.wait_until_busy()
    harness.engine.set_batching(max_batch_size=8, gathering_seconds=0.0, concurrent_batches=1)
    third = harness.predict(2.0)
    assert harness.observer.queue_examples[-1] == 1

    harness.go()
    assert [outputs(future) for future in (first, second, third)] == [[0.0], [2.0], [4.0]]
    harness.close()


def test_batches_are_reported_one_at_a_time() -> None:
    harness = EngineHarness(max_batch_size=1, max_queue_examples=1000, concurrent_batches=4)
    reporting, overlaps = threading.Lock(), []
    report = Recorder.batch_computed

    def reported(operation: Any, **values: Any) -> None:
        overlaps.append(not reporting.acquire(blocking=False))
        report(harness.observer, operation, **values)
        if reporting.locked():
            reporting.release()

    harness.observer.batch_computed = reported  # type: ignore[method-assign]
    harness.go()
    futures = [harness.predict(float(value)) for value in range(200)]
    assert [outputs(future) for future in futures] == [[2.0 * value] for value in range(200)]
    harness.close()
    assert len(overlaps) == 200
    assert not any(overlaps)


def test_one_callers_bad_values_do_not_fail_anothers(harness: EngineHarness) -> None:
    blocked = [harness.occupy(), harness.occupy()]
    good, bad, better = harness.predict(1.0), harness.predict(-1.0), harness.predict(2.0)
    harness.go()
    assert (outputs(good), outputs(better)) == ([2.0], [4.0])
    assert isinstance(bad.exception(TIMEOUT), Exception)
    assert [outputs(future) for future in blocked] == [[0.0], [0.0]]
    assert all(handle.released == 1 for handle in harness.handles)


def test_the_estimate_of_a_wait_counts_the_batches_that_run_at_the_same_time(harness: EngineHarness) -> None:
    latency = harness.engine._latency
    for _ in range(16):
        latency.observe(8, 1.0)
    assert latency.estimate(32) == pytest.approx(2.0)
    assert latency.estimate(1) == pytest.approx(1.0)


def test_closing_finishes_what_is_queued_and_ends_every_thread(harness: EngineHarness) -> None:
    blocked = [harness.occupy(), harness.occupy()]
    queued = [harness.predict(float(value)) for value in range(20)]
    names = {thread.name for thread in threading.enumerate() if thread.name.startswith("understudy-device")}
    assert {"understudy-device", "understudy-device-2"} <= names

    harness.close()

    assert [outputs(future) for future in (*blocked, *queued)] == [[0.0], [0.0], *([2.0 * n] for n in range(20))]
    threads = [harness.engine._thread, *harness.engine._extra_threads]
    assert not any(thread._thread.is_alive() for thread in threads)


def test_an_idle_engine_ends_at_once(harness: EngineHarness) -> None:
    harness.close()
    assert not any(thread._thread.is_alive() for thread in harness.engine._extra_threads)
