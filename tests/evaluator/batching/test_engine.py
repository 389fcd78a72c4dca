"""The batcher: what it merges, what goes first, and what it drops."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testkit.engine_calls import predict_on
from testkit.engine_harness import TIMEOUT, CountedHandle, EngineHarness, outputs
from understudy.evaluator.batching.request_queue import MAX_PREDICTS_BEFORE_EVALUATE
from understudy.evaluator.evaluator_errors import (
    DeadlineExceededError,
    DrainingError,
    InvalidInputError,
    NotReadyError,
    OverloadedError,
)
from understudy.evaluator.types import Array, Arrays


def test_a_request_runs_at_once_where_nothing_else_does(harness: EngineHarness) -> None:
    harness.go()
    future = harness.predict(1.0, 2.0)
    assert outputs(future) == [2.0, 4.0]
    assert future.result().step == 7


def test_what_arrives_during_a_batch_forms_the_next(harness: EngineHarness) -> None:
    first = harness.occupy()
    futures = [harness.predict(float(index), index + 0.5) for index in range(1, 4)]
    harness.go()
    assert outputs(first) == [0.0]
    assert [outputs(future) for future in futures] == [[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    assert harness.slot.batches == [1, 6]


def test_a_batch_is_never_larger_than_the_largest(harness: EngineHarness) -> None:
    harness.occupy()
    futures = [harness.predict(1.0, 2.0, 3.0) for _ in range(5)]
    harness.go()
    for future in futures:
        future.result(TIMEOUT)
    assert harness.slot.batches == [1, 6, 6, 3]


def test_a_brief_batch_runs_on_the_thread_that_wakes_the_device(harness: EngineHarness) -> None:
    harness.go()
    harness.batches_take(1e-4, rows=2)
    futures = [harness.submit(1.0), harness.submit(2.0)]
    harness.engine.dispatch()
    assert [future.done() for future in futures] == [True, True]
    assert (harness.slot.batches, harness.slot.threads) == ([2], [threading.get_ident()])


def test_a_brief_batch_that_is_too_large_runs_in_several(harness: EngineHarness) -> None:
    harness.go()
    harness.batches_take(1e-4, rows=8)
    futures = [harness.submit(float(index)) for index in range(10)]
    harness.engine.dispatch()
    assert [outputs(future) for future in futures] == [[2.0 * index] for index in range(10)]
    assert harness.slot.batches == [8, 2]


@pytest.mark.parametrize(
    ("seconds", "settings"),
    [(0.1, {}), (1e-4, {"max_batch_delay_seconds": 1e-6}), (1e-4, {"inline_batches": False})],
    ids=["long", "held_back", "switched_off"],
)
def test_other_batches_run_on_the_engines_thread(seconds: float, settings: dict[str, Any]) -> None:
    harness = EngineHarness(**settings)
    harness.go()
    harness.batches_take(seconds)
    future = harness.submit(1.0)
    harness.engine.dispatch()
    assert outputs(future) == [2.0]
    assert threading.get_ident() not in harness.slot.threads
    harness.close()


def test_whoever_wakes_a_busy_device_does_not_wait_for_it(harness: EngineHarness) -> None:
    harness.occupy()
    harness.batches_take(1e-4)
    future = harness.submit(1.0)
    harness.engine.dispatch()
    assert not future.done()
    harness.go()
    assert outputs(future) == [2.0]
    assert threading.get_ident() not in harness.slot.threads


def test_versions_and_shapes_are_never_mixed(harness: EngineHarness) -> None:
    harness.occupy()
    futures = [harness.predict(1.0, key=1), harness.predict(1.0, key=2), harness.predict(1.0, width=3)]
    futures.append(harness.predict(1.0, key=1))
    harness.go()
    for future in futures:
        future.result(TIMEOUT)
    assert harness.slot.batches == [1, 2, 1, 1]


def test_a_request_larger_than_a_batch_runs_alone_and_whole(harness: EngineHarness) -> None:
    harness.go()
    assert outputs(harness.predict(*range(12))) == [2.0 * index for index in range(12)]
    assert harness.slot.batches == [12]


def test_the_handle_is_borrowed_once_for_each_batch_and_returned(harness: EngineHarness) -> None:
    harness.occupy()
    futures = [harness.predict(1.0) for _ in range(5)]
    harness.go()
    for future in futures:
        future.result(TIMEOUT)
    harness.close()
    assert [handle.released for handle in harness.handles] == [1, 1]


def test_a_handle_that_cannot_be_borrowed_fails_the_batch(harness: EngineHarness) -> None:
    def refuse() -> CountedHandle:
        raise NotReadyError("nothing is serving yet")

    future = predict_on(harness.engine, {"x": np.ones((1, 1), np.float32)}, borrow=refuse, key=1)
    with pytest.raises(NotReadyError):
        future.result(TIMEOUT)


def test_a_cancelled_request_never_reaches_the_device(harness: EngineHarness) -> None:
    harness.occupy()
    cancelled, kept = harness.predict(1.0, 2.0), harness.predict(3.0)
    assert cancelled.cancel()
    harness.go()
    assert outputs(kept) == [6.0]
    assert harness.slot.batches == [1, 1]
    with pytest.raises(CancelledError):
        cancelled.result(TIMEOUT)
    assert harness.observer.reasons == ["cancelled"]


def test_a_deadline_that_passes_in_the_queue_drops_the_request(harness: EngineHarness) -> None:
    harness.occupy()
    deadline = time.monotonic() + 0.5
    late, kept = harness.predict(1.0, deadline=deadline), harness.predict(3.0)
    while time.monotonic() < deadline:
        threading.Event().wait(deadline - time.monotonic())
    harness.go()
    assert outputs(kept) == [6.0]
    with pytest.raises(DeadlineExceededError, match="before the work began"):
        late.result(TIMEOUT)
    assert harness.slot.batches == [1, 1]


def test_one_callers_bad_values_do_not_fail_anothers(harness: EngineHarness) -> None:
    harness.occupy()
    good, bad, better = harness.predict(1.0), harness.predict(-1.0), harness.predict(2.0)
    harness.go()
    assert outputs(good) == [2.0]
    assert outputs(better) == [4.0]
    with pytest.raises(InvalidInputError):
        bad.result(TIMEOUT)


def test_predict_goes_first_but_does_not_starve_evaluate(harness: EngineHarness) -> None:
    order: list[str] = []
    harness.occupy()
    evaluations = [harness.engine.run(lambda: order.append("evaluate"), examples=1) for _ in range(2)]
    predicts = [harness.predict(1.0, key=index) for index in range(MAX_PREDICTS_BEFORE_EVALUATE + 1)]
    for future in predicts:
        future.add_done_callback(lambda _: order.append("predict"))
    harness.go()
    for evaluation in evaluations:
        evaluation.result(TIMEOUT)
    for future in predicts:
        future.result(TIMEOUT)
    harness.close()
    before = order.index("evaluate")
    assert 1 <= before <= MAX_PREDICTS_BEFORE_EVALUATE
    assert order[before + 1 :] == ["predict"] * (len(predicts) - before) + ["evaluate"]


def test_what_must_be_prepared_is_prepared_off_the_devices_thread(harness: EngineHarness) -> None:
    threads: list[str] = []
    harness.occupy()
    prepared = threading.Event()

    def prepare() -> None:
        threads.append(threading.current_thread().name)
        prepared.set()

    future = harness.engine.run(lambda: threads.append(threading.current_thread().name), examples=1, prepare=prepare)
    assert prepared.wait(TIMEOUT)
    harness.go()
    future.result(TIMEOUT)
    assert threads[0].startswith("understudy-prepare")
    assert threads[1] == "understudy-device"


def test_what_fails_in_preparation_fails_the_future(harness: EngineHarness) -> None:
    def prepare() -> None:
        raise InvalidInputError("the targets do not fit")

    future = harness.engine.run(lambda: None, examples=1, prepare=prepare)
    with pytest.raises(InvalidInputError):
        future.result(TIMEOUT)


def test_what_was_prepared_waits_for_room_in_a_full_queue(harness: EngineHarness) -> None:
    harness.occupy()
    ahead = harness.engine.run(lambda: "ahead", examples=1000)
    prepared = threading.Event()
    first = harness.engine.run(lambda: "first", examples=1, prepare=prepared.set)
    unwanted = harness.engine.run(lambda: "unwanted", examples=1, prepare=lambda: None)
    assert prepared.wait(TIMEOUT)
    assert unwanted.cancel()
    assert not first.done()
    harness.go()
    assert ahead.result(TIMEOUT) == "ahead"
    assert first.result(TIMEOUT) == "first"


def test_what_waits_for_room_ends_with_its_deadline_and_with_the_engine(harness: EngineHarness) -> None:
    harness.occupy()
    harness.engine.run(lambda: None, examples=1000)
    late = harness.engine.run(lambda: None, examples=1, prepare=lambda: None, deadline=time.monotonic() + 0.5)
    with pytest.raises(DeadlineExceededError):
        late.result(TIMEOUT)
    waiting = harness.engine.run(lambda: None, examples=1, prepare=lambda: None)
    closer = threading.Thread(target=harness.engine.close, args=(TIMEOUT,))
    closer.start()
    with pytest.raises(DrainingError):
        waiting.result(TIMEOUT)
    harness.go()
    closer.join(TIMEOUT)


def test_what_waits_for_room_waits_for_an_event_and_does_not_poll(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    harness.occupy()
    harness.engine.run(lambda: None, examples=1000)
    late = harness.engine.run(lambda: None, examples=1, prepare=lambda: None, deadline=time.monotonic() + 0.5)
    with pytest.raises(DeadlineExceededError):
        late.result(TIMEOUT)
    assert not naps


def test_what_is_cancelled_while_it_waits_for_room_lets_the_next_be_prepared(harness: EngineHarness) -> None:
    harness.occupy()
    ahead = harness.engine.run(lambda: "ahead", examples=1000)
    first_prepared, second_prepared = threading.Event(), threading.Event()
    first = harness.engine.run(lambda: "first", examples=1, prepare=first_prepared.set)
    second = harness.engine.run(lambda: "second", examples=1, prepare=second_prepared.set)
    assert first_prepared.wait(TIMEOUT)
    assert not second_prepared.is_set()
    assert first.cancel()
    assert second_prepared.wait(TIMEOUT)
    harness.go()
    assert ahead.result(TIMEOUT) == "ahead"
    assert second.result(TIMEOUT) == "second"


def test_an_evaluation_that_fails_leaves_the_engine_running(harness: EngineHarness) -> None:
    def work() -> None:
        raise InvalidInputError("the batch cannot be scored")

    with pytest.raises(InvalidInputError):
        harness.engine.run(work, examples=1).result(TIMEOUT)
    assert harness.engine.run(lambda: 42, examples=1).result(TIMEOUT) == 42


def test_an_evaluation_larger_than_the_queue_is_taken_where_it_waits_alone(harness: EngineHarness) -> None:
    harness.occupy()
    large = harness.engine.run(lambda: "done", examples=1000)
    with pytest.raises(OverloadedError):
        harness.engine.run(lambda: None, examples=1)
    harness.go()
    assert large.result(TIMEOUT) == "done"


def test_closing_finishes_what_waits_and_takes_no_more(harness: EngineHarness) -> None:
    first = harness.occupy()
    waiting, evaluation = harness.predict(1.0), harness.engine.run(lambda: "scored", examples=1)
    closer = threading.Thread(target=harness.engine.close, args=(TIMEOUT,))
    closer.start()
    harness.go()
    closer.join(TIMEOUT)
    assert outputs(first) == [0.0]
    assert outputs(waiting) == [2.0]
    assert evaluation.result(0) == "scored"
    for more in (lambda: harness.predict(1.0), lambda: harness.engine.run(lambda: None, examples=1)):
        with pytest.raises(DrainingError):
            more()


def test_what_cannot_be_finished_in_time_fails_as_draining(harness: EngineHarness) -> None:
    harness.occupy()
    waiting = harness.predict(1.0)
    closer = threading.Thread(target=harness.engine.close, args=(0.05,))
    closer.start()
    with pytest.raises(DrainingError):
        waiting.result(TIMEOUT)
    harness.go()
    closer.join(TIMEOUT)


def test_a_batch_is_held_open_for_more_no_longer_than_allowed() -> None:
    harness = EngineHarness(max_batch_size=4, max_queue_examples=16, max_batch_delay_seconds=6 * TIMEOUT)
    harness.go()
    futures = [harness.predict(1.0) for _ in range(4)]
    for future in futures:
        future.result(TIMEOUT)
    assert harness.slot.batches == [4]
    harness.close()
    short = EngineHarness(max_batch_size=4, max_queue_examples=16, max_batch_delay_seconds=0.05)
    short.go()
    short.predict(1.0).result(TIMEOUT)
    assert 0.0 < short.observer.computed[0]["fill_seconds"] < TIMEOUT
    short.close()


def test_the_observer_learns_of_every_batch(harness: EngineHarness) -> None:
    harness.occupy()
    futures = [harness.predict(1.0, 2.0), harness.predict(3.0)]
    harness.go()
    for future in futures:
        future.result(TIMEOUT)
    harness.engine.run(lambda: None, examples=9).result(TIMEOUT)
    _, merged, evaluated = harness.observer.computed
    assert merged["operation"] == "predict"
    assert merged["examples"] == 3
    assert len(merged["queue_seconds"]) == 2
    assert evaluated["operation"] == "evaluate"
    assert evaluated["examples"] == 9
    assert harness.observer.queue_examples[-1] == 0
    assert max(harness.observer.queue_examples) == 3


@settings(max_examples=25, derandomize=True)
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=30), threads=st.integers(1, 3))
def test_every_request_gets_its_own_examples_whatever_it_shared_a_batch_with(sizes: list[int], threads: int) -> None:
    harness = EngineHarness(max_batch_size=16, max_queue_examples=1000, concurrent_batches=threads)
    harness.occupy()
    futures: list[tuple[Callable[[], list[float]], list[float]]] = []
    for index, rows in enumerate(sizes):
        values = [1000.0 * index + row for row in range(rows)]
        future = harness.predict(*values)
        futures.append((lambda future=future: outputs(future), [2 * value for value in values]))  # type: ignore[misc]
    harness.go()
    for answer, expected in futures:
        assert answer() == expected
    assert max(harness.slot.batches) <= 16
    harness.close()


@pytest.fixture
def overlapping() -> Iterator[EngineHarness]:
    built = EngineHarness(max_batch_size=8, max_queue_examples=64, overlap_batches=True, inline_batches=False)
    yield built
    built.close()


def test_the_next_batch_is_launched_before_one_is_fetched_but_no_third(overlapping: EngineHarness) -> None:
    under_way: list[int] = []
    slot = overlapping.slot
    forward = slot.forward

    def counted(inputs: Arrays) -> dict[str, Array]:
        under_way.append(len(slot.launched) - len(slot.batches))
        return forward(inputs)

    slot.forward = counted  # type: ignore[method-assign]
    first = overlapping.occupy()
    waiting = [overlapping.predict(float(key), key=key) for key in range(6)]
    overlapping.go()
    assert outputs(first) == [0.0]
    assert [outputs(future) for future in waiting] == [[2.0 * key] for key in range(6)]
    assert max(under_way) == 2
    overlapping.close()
    assert [handle.released for handle in overlapping.handles] == [1] * 7


def test_where_batches_overlap_one_callers_bad_values_do_not_fail_anothers(overlapping: EngineHarness) -> None:
    overlapping.occupy()
    good, bad, better = overlapping.predict(1.0), overlapping.predict(-1.0), overlapping.predict(2.0)
    overlapping.go()
    assert (outputs(good), outputs(better)) == ([2.0], [4.0])
    with pytest.raises(InvalidInputError):
        bad.result(TIMEOUT)


def test_an_evaluation_waits_for_what_was_launched_before_it(overlapping: EngineHarness) -> None:
    order: list[str] = []
    overlapping.occupy().add_done_callback(lambda _: order.append("predict"))
    evaluation = overlapping.engine.run(lambda: order.append("evaluate"), examples=1)
    overlapping.go()
    evaluation.result(TIMEOUT)
    assert order == ["predict", "evaluate"]


@pytest.fixture
def gathering() -> Iterator[EngineHarness]:
    built = EngineHarness(max_batch_size=8, max_queue_examples=16, gathering_seconds=1000.0)
    yield built
    built.close()


def test_a_batch_waits_for_as_many_requests_as_there_were_before(gathering: EngineHarness) -> None:
    first = gathering.occupy()
    queued = [gathering.predict(1.0), gathering.predict(2.0)]
    gathering.go()
    assert outputs(first) == [0.0]

    last = gathering.predict(3.0)

    assert [outputs(future) for future in [*queued, last]] == [[2.0], [4.0], [6.0]]
    assert gathering.slot.batches == [1, 3]


def test_a_lone_request_after_a_lone_request_waits_for_no_company(gathering: EngineHarness) -> None:
    gathering.go()
    assert [outputs(gathering.predict(value)) for value in (1.0, 2.0, 3.0)] == [[2.0], [4.0], [6.0]]
    assert gathering.slot.batches == [1, 1, 1]


def test_a_full_batch_waits_for_no_company(gathering: EngineHarness) -> None:
    gathering.occupy()
    full = [gathering.predict(1.0, 2.0, 3.0, 4.0) for _ in range(2)]
    gathering.go()
    assert [len(outputs(future)) for future in full] == [4, 4]


def test_company_that_does_not_come_is_waited_for_no_longer_than_set() -> None:
    harness = EngineHarness(gathering_seconds=0.05)
    harness.occupy()
    queued = [harness.predict(1.0), harness.predict(2.0)]
    harness.go()
    assert [outputs(future) for future in queued] == [[2.0], [4.0]]
    harness.close()


def test_an_evaluation_does_not_wait_for_company(gathering: EngineHarness) -> None:
    first = gathering.occupy()
    queued = gathering.predict(1.0)
    gathering.go()
    assert outputs(first) == [0.0]

    scored = gathering.engine.run(lambda: "scored", examples=1)

    assert outputs(queued) == [2.0]
    assert scored.result(TIMEOUT) == "scored"


def test_batches_follow_a_change_of_their_settings(harness: EngineHarness) -> None:
    harness.occupy()
    futures = [harness.predict(1.0) for _ in range(4)]
    harness.engine.set_batching(max_batch_size=2, gathering_seconds=0.0, concurrent_batches=1)
    harness.go()
    for future in futures:
        future.result(TIMEOUT)
    assert harness.slot.batches == [1, 2, 2]
    assert harness.engine.settings.max_batch_size == 2
