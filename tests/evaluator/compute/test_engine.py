"""The batcher: what it merges, what goes first, what it drops and what it refuses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.evaluator.compute.engine import Engine, EngineSettings
from understudy.evaluator.compute.inline import Cost
from understudy.evaluator.compute.pace import Pace
from understudy.evaluator.compute.turns import MAX_PREDICTS_BEFORE_EVALUATE
from understudy.evaluator.errors import (
    DeadlineExceededError,
    DrainingError,
    InvalidInputError,
    NotReadyError,
    OverloadedError,
)
from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.outbox import FutureOutbox
from understudy.evaluator.types import Array, Arrays, Prediction

TIMEOUT = 10.0


class PuppetSlot:
    """Doubles its rows when it is told to, and remembers the size of each batch."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.began = threading.Semaphore(0)
        self.batches: list[int] = []
        self.launched: list[int] = []
        self.threads: list[int] = []

    def forward(self, inputs: Arrays) -> dict[str, Array]:
        self.batches.append(len(inputs["x"]))
        self.threads.append(threading.get_ident())
        self.began.release()
        assert self.go.wait(TIMEOUT)
        if np.any(inputs["x"] < 0):
            raise InvalidInputError("the model refused the values")
        return {"y": inputs["x"] * 2}

    def launch(self, inputs: Arrays) -> Callable[[], dict[str, Array]]:
        """Begin at once; be done when told to."""
        self.launched.append(len(inputs["x"]))
        return lambda: self.forward(inputs)

    def wait_until_busy(self) -> None:
        assert self.began.acquire(timeout=TIMEOUT)


class CountedHandle:
    def __init__(self, slot: PuppetSlot, step: int = 7) -> None:
        self.slot = slot
        self.step = step
        self.released = 0

    def release(self) -> None:
        self.released += 1


class Recorder(SilentObserver):
    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.computed: list[dict[str, Any]] = []
        self.queue_rows: list[int] = []

    def rejected(self, reason: str) -> None:
        self.reasons.append(reason)

    def queue_changed(self, rows: int) -> None:
        self.queue_rows.append(rows)

    def batch_computed(self, operation: Any, **values: Any) -> None:
        self.computed.append({"operation": operation, **values})


class Stand:
    """An engine with a puppet for a slot."""

    def __init__(self, **settings: Any) -> None:
        self.observer = Recorder()
        self.slot = PuppetSlot()
        self.handles: list[CountedHandle] = []
        self.engine = Engine(EngineSettings(**settings), self.observer)

    def borrow(self) -> CountedHandle:
        self.handles.append(CountedHandle(self.slot))
        return self.handles[-1]

    def predict(
        self, *values: float, key: Any = 1, deadline: float | None = None, width: int = 1
    ) -> Future[Prediction]:
        rows = np.repeat(np.array(values, np.float32)[:, None], width, axis=1)
        return self.engine.predict({"x": rows}, borrow=self.borrow, key=key, deadline=deadline)

    def submit(self, value: float) -> Future[Prediction]:
        """Queue one row without waking the device."""
        waiter: Future[Prediction] = Future()
        inputs = {"x": np.array([[value]], np.float32)}
        outbox = FutureOutbox()
        self.engine.submit(inputs, borrow=self.borrow, key=1, deadline=None, waiter=waiter, outbox=outbox, wake=False)
        return waiter

    def batches_take(self, seconds: float, *, rows: int = 1) -> None:
        """Have the engine believe so of batches like those that `submit` makes."""
        group = (1, ("x", np.dtype(np.float32), (1,)))
        for _ in range(8):
            self.engine._judge.observe(group, rows, Cost(seconds, seconds), inline=False)

    def occupy(self) -> Future[Prediction]:
        """Keep the device busy until `go`."""
        first = self.predict(0.0)
        self.slot.wait_until_busy()
        return first

    def go(self) -> None:
        self.slot.go.set()

    def close(self) -> None:
        self.go()
        self.engine.close(TIMEOUT)


@pytest.fixture
def stand() -> Iterator[Stand]:
    built = Stand(max_batch_rows=8, max_queue_rows=16)
    yield built
    built.close()


def outputs(future: Future[Prediction]) -> list[float]:
    return [float(value) for value in future.result(TIMEOUT).outputs["y"][:, 0]]


def test_a_request_runs_at_once_where_nothing_else_does(stand: Stand) -> None:
    stand.go()
    future = stand.predict(1.0, 2.0)
    assert outputs(future) == [2.0, 4.0]
    assert future.result().step == 7


def test_what_arrives_during_a_batch_forms_the_next(stand: Stand) -> None:
    first = stand.occupy()
    futures = [stand.predict(float(index), index + 0.5) for index in range(1, 4)]
    stand.go()
    assert outputs(first) == [0.0]
    assert [outputs(future) for future in futures] == [[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    assert stand.slot.batches == [1, 6]


def test_a_batch_is_never_larger_than_the_largest(stand: Stand) -> None:
    stand.occupy()
    futures = [stand.predict(1.0, 2.0, 3.0) for _ in range(5)]
    stand.go()
    for future in futures:
        future.result(TIMEOUT)
    assert stand.slot.batches == [1, 6, 6, 3]


def test_a_brief_batch_runs_on_the_thread_that_wakes_the_device(stand: Stand) -> None:
    stand.go()
    stand.batches_take(1e-4, rows=2)
    futures = [stand.submit(1.0), stand.submit(2.0)]
    stand.engine.wake()
    assert [future.done() for future in futures] == [True, True]
    assert (stand.slot.batches, stand.slot.threads) == ([2], [threading.get_ident()])


def test_a_brief_batch_that_is_too_large_runs_in_several(stand: Stand) -> None:
    stand.go()
    stand.batches_take(1e-4, rows=8)
    futures = [stand.submit(float(index)) for index in range(10)]
    stand.engine.wake()
    assert [outputs(future) for future in futures] == [[2.0 * index] for index in range(10)]
    assert stand.slot.batches == [8, 2]


@pytest.mark.parametrize(
    ("seconds", "settings"),
    [(0.1, {}), (1e-4, {"max_batch_delay_seconds": 1e-6}), (1e-4, {"inline_batches": False})],
    ids=["long", "held_back", "switched_off"],
)
def test_other_batches_run_on_the_engines_thread(seconds: float, settings: dict[str, Any]) -> None:
    stand = Stand(**settings)
    stand.go()
    stand.batches_take(seconds)
    future = stand.submit(1.0)
    stand.engine.wake()
    assert outputs(future) == [2.0]
    assert threading.get_ident() not in stand.slot.threads
    stand.close()


def test_whoever_wakes_a_busy_device_does_not_wait_for_it(stand: Stand) -> None:
    stand.occupy()
    stand.batches_take(1e-4)
    future = stand.submit(1.0)
    stand.engine.wake()
    assert not future.done()
    stand.go()
    assert outputs(future) == [2.0]
    assert threading.get_ident() not in stand.slot.threads


def test_versions_and_shapes_are_never_mixed(stand: Stand) -> None:
    stand.occupy()
    futures = [stand.predict(1.0, key=1), stand.predict(1.0, key=2), stand.predict(1.0, width=3)]
    futures.append(stand.predict(1.0, key=1))
    stand.go()
    for future in futures:
        future.result(TIMEOUT)
    assert stand.slot.batches == [1, 2, 1, 1]


def test_a_request_larger_than_a_batch_runs_alone_and_whole(stand: Stand) -> None:
    stand.go()
    assert outputs(stand.predict(*range(12))) == [2.0 * index for index in range(12)]
    assert stand.slot.batches == [12]


def test_a_request_larger_than_the_queue_is_invalid(stand: Stand) -> None:
    with pytest.raises(InvalidInputError, match="17 rows came in one request; at most 16"):
        stand.predict(*range(17))
    assert stand.observer.reasons == ["invalid"]


def test_a_full_queue_refuses_at_once(stand: Stand) -> None:
    stand.occupy()
    stand.predict(*range(15))
    with pytest.raises(OverloadedError, match="15 rows are waiting and at most 16 may"):
        stand.predict(1.0, 2.0)
    assert stand.observer.reasons == ["queue_full"]


def test_what_nobody_wants_makes_room_in_a_full_queue(stand: Stand) -> None:
    stand.occupy()
    abandoned = stand.predict(*range(16))
    assert abandoned.cancel()
    future = stand.predict(5.0)
    stand.go()
    assert outputs(future) == [10.0]
    assert stand.observer.reasons == ["cancelled"]


def test_the_handle_is_borrowed_once_for_each_batch_and_returned(stand: Stand) -> None:
    stand.occupy()
    futures = [stand.predict(1.0) for _ in range(5)]
    stand.go()
    for future in futures:
        future.result(TIMEOUT)
    stand.close()
    assert [handle.released for handle in stand.handles] == [1, 1]


def test_a_handle_that_cannot_be_borrowed_fails_the_batch(stand: Stand) -> None:
    def refuse() -> CountedHandle:
        raise NotReadyError("nothing is on stage yet")

    future = stand.engine.predict({"x": np.ones((1, 1), np.float32)}, borrow=refuse, key=1)
    with pytest.raises(NotReadyError):
        future.result(TIMEOUT)


def test_a_cancelled_request_never_reaches_the_device(stand: Stand) -> None:
    stand.occupy()
    cancelled, kept = stand.predict(1.0, 2.0), stand.predict(3.0)
    assert cancelled.cancel()
    stand.go()
    assert outputs(kept) == [6.0]
    assert stand.slot.batches == [1, 1]
    with pytest.raises(CancelledError):
        cancelled.result(TIMEOUT)
    assert stand.observer.reasons == ["cancelled"]


def test_a_deadline_that_passes_in_the_queue_drops_the_request(stand: Stand) -> None:
    stand.occupy()
    deadline = time.monotonic() + 0.05
    late, kept = stand.predict(1.0, deadline=deadline), stand.predict(3.0)
    while time.monotonic() < deadline:
        threading.Event().wait(deadline - time.monotonic())
    stand.go()
    assert outputs(kept) == [6.0]
    with pytest.raises(DeadlineExceededError, match="before the work began"):
        late.result(TIMEOUT)
    assert stand.slot.batches == [1, 1]


def test_a_deadline_that_has_passed_is_refused_at_once(stand: Stand) -> None:
    with pytest.raises(DeadlineExceededError):
        stand.predict(1.0, deadline=time.monotonic() - 1)


def test_a_deadline_that_those_ahead_leave_no_time_for_is_refused_at_once(stand: Stand) -> None:
    stand.engine._admission._pace = slow = Pace(8)
    slow.observe(8, 0.8)
    stand.occupy()
    waiting = stand.predict(*range(8))
    with pytest.raises(OverloadedError, match=r"8 rows are waiting, which takes 0\.800 s") as refusal:
        stand.predict(1.0, deadline=time.monotonic() + 0.5)
    assert refusal.value.retry_after_seconds == pytest.approx(0.8)
    enough = stand.predict(1.0, deadline=time.monotonic() + TIMEOUT)
    assert waiting.cancel()
    threading.Event().wait(0.06)  # sweeps are as far apart
    just_enough = stand.predict(1.0, deadline=time.monotonic() + 0.9)
    stand.go()
    assert (outputs(enough), outputs(just_enough)) == ([2.0], [2.0])
    assert stand.observer.reasons == ["unmeetable", "cancelled"]


def test_nothing_is_refused_for_its_deadline_while_nothing_waits(stand: Stand) -> None:
    stand.engine._admission._pace = slow = Pace(8)
    slow.observe(8, 100.0)
    stand.go()
    assert outputs(stand.predict(1.0, deadline=time.monotonic() + 1.0)) == [2.0]
    stand.engine.check_room(time.monotonic() + 1.0)
    assert stand.observer.reasons == []


def test_whoever_asks_for_room_is_told_what_a_request_would_be(stand: Stand) -> None:
    stand.occupy()
    stand.engine.check_room(None)
    with pytest.raises(DeadlineExceededError):
        stand.predict(1.0, deadline=time.monotonic())
    abandoned = stand.predict(*range(16))
    stand.engine.check_room(None)  # there may be room after a sweep
    with pytest.raises(OverloadedError):
        stand.predict(1.0)
    with pytest.raises(OverloadedError, match="16 rows are waiting"):
        stand.engine.check_room(None)
    abandoned.cancel()
    stand.close()
    with pytest.raises(DrainingError):
        stand.engine.check_room(None)


@given(seconds=st.floats(1e-5, 1.0), sizes=st.lists(st.integers(1, 64), max_size=100), rows=st.integers(0, 10_000))
def test_where_every_batch_takes_as_long_the_pace_is_exact(seconds: float, sizes: list[int], rows: int) -> None:
    pace = Pace(64)
    for size in sizes:
        pace.observe(size, seconds)
    assert pace.seconds(rows) == pytest.approx(-(-rows // 64) * seconds if sizes else 0.0)


def test_full_batches_are_judged_by_large_ones() -> None:
    pace = Pace(64)
    for rows, seconds in ((64, 0.8), (32, 0.6), *[(1, 0.1)] * 16):
        pace.observe(rows, seconds)
    assert pace.seconds(1) == pytest.approx(0.1)
    assert pace.seconds(128) == pytest.approx(1.4)
    assert pace.seconds(129) == pytest.approx(1.5)


def test_one_callers_bad_values_do_not_fail_anothers(stand: Stand) -> None:
    stand.occupy()
    good, bad, better = stand.predict(1.0), stand.predict(-1.0), stand.predict(2.0)
    stand.go()
    assert outputs(good) == [2.0]
    assert outputs(better) == [4.0]
    with pytest.raises(InvalidInputError):
        bad.result(TIMEOUT)


def test_predict_goes_first_but_does_not_starve_evaluate(stand: Stand) -> None:
    order: list[str] = []
    stand.occupy()
    evaluations = [stand.engine.run(lambda: order.append("evaluate"), rows=1) for _ in range(2)]
    predicts = [stand.predict(1.0, key=index) for index in range(MAX_PREDICTS_BEFORE_EVALUATE + 1)]
    for future in predicts:
        future.add_done_callback(lambda _: order.append("predict"))
    stand.go()
    for evaluation in evaluations:
        evaluation.result(TIMEOUT)
    for future in predicts:
        future.result(TIMEOUT)
    stand.close()
    before = order.index("evaluate")
    assert 1 <= before <= MAX_PREDICTS_BEFORE_EVALUATE
    assert order[before + 1 :] == ["predict"] * (len(predicts) - before) + ["evaluate"]


def test_what_must_be_prepared_is_prepared_off_the_devices_thread(stand: Stand) -> None:
    threads: list[str] = []
    stand.occupy()
    prepared = threading.Event()

    def prepare() -> None:
        threads.append(threading.current_thread().name)
        prepared.set()

    future = stand.engine.run(lambda: threads.append(threading.current_thread().name), rows=1, prepare=prepare)
    assert prepared.wait(TIMEOUT)
    stand.go()
    future.result(TIMEOUT)
    assert threads[0].startswith("understudy-prepare")
    assert threads[1] == "understudy-device"


def test_what_fails_in_preparation_fails_the_future(stand: Stand) -> None:
    def prepare() -> None:
        raise InvalidInputError("the targets do not fit")

    future = stand.engine.run(lambda: None, rows=1, prepare=prepare)
    with pytest.raises(InvalidInputError):
        future.result(TIMEOUT)


def test_what_was_prepared_waits_for_room_in_a_full_queue(stand: Stand) -> None:
    stand.occupy()
    ahead = stand.engine.run(lambda: "ahead", rows=1000)
    prepared = threading.Event()
    first = stand.engine.run(lambda: "first", rows=1, prepare=prepared.set)
    unwanted = stand.engine.run(lambda: "unwanted", rows=1, prepare=lambda: None)
    assert prepared.wait(TIMEOUT)
    assert unwanted.cancel()
    assert not first.done()
    stand.go()
    assert ahead.result(TIMEOUT) == "ahead"
    assert first.result(TIMEOUT) == "first"


def test_what_waits_for_room_ends_with_its_deadline_and_with_the_engine(stand: Stand) -> None:
    stand.occupy()
    stand.engine.run(lambda: None, rows=1000)
    late = stand.engine.run(lambda: None, rows=1, prepare=lambda: None, deadline=time.monotonic() + 0.1)
    with pytest.raises(DeadlineExceededError):
        late.result(TIMEOUT)
    waiting = stand.engine.run(lambda: None, rows=1, prepare=lambda: None)
    closer = threading.Thread(target=stand.engine.close, args=(TIMEOUT,))
    closer.start()
    with pytest.raises(DrainingError):
        waiting.result(TIMEOUT)
    stand.go()
    closer.join(TIMEOUT)


def test_an_evaluation_that_fails_leaves_the_engine_running(stand: Stand) -> None:
    def work() -> None:
        raise InvalidInputError("the batch cannot be scored")

    with pytest.raises(InvalidInputError):
        stand.engine.run(work, rows=1).result(TIMEOUT)
    assert stand.engine.run(lambda: 42, rows=1).result(TIMEOUT) == 42


def test_an_evaluation_larger_than_the_queue_is_taken_where_it_waits_alone(stand: Stand) -> None:
    stand.occupy()
    large = stand.engine.run(lambda: "done", rows=1000)
    with pytest.raises(OverloadedError):
        stand.engine.run(lambda: None, rows=1)
    stand.go()
    assert large.result(TIMEOUT) == "done"


def test_closing_finishes_what_waits_and_takes_no_more(stand: Stand) -> None:
    first = stand.occupy()
    waiting, evaluation = stand.predict(1.0), stand.engine.run(lambda: "scored", rows=1)
    closer = threading.Thread(target=stand.engine.close, args=(TIMEOUT,))
    closer.start()
    stand.go()
    closer.join(TIMEOUT)
    assert outputs(first) == [0.0]
    assert outputs(waiting) == [2.0]
    assert evaluation.result(0) == "scored"
    for more in (lambda: stand.predict(1.0), lambda: stand.engine.run(lambda: None, rows=1)):
        with pytest.raises(DrainingError):
            more()


def test_what_cannot_be_finished_in_time_fails_as_draining(stand: Stand) -> None:
    stand.occupy()
    waiting = stand.predict(1.0)
    closer = threading.Thread(target=stand.engine.close, args=(0.05,))
    closer.start()
    with pytest.raises(DrainingError):
        waiting.result(TIMEOUT)
    stand.go()
    closer.join(TIMEOUT)


def test_a_batch_is_held_open_for_more_no_longer_than_allowed() -> None:
    stand = Stand(max_batch_rows=4, max_queue_rows=16, max_batch_delay_seconds=5.0)
    stand.go()
    began = time.monotonic()
    futures = [stand.predict(1.0) for _ in range(4)]
    for future in futures:
        future.result(TIMEOUT)
    assert stand.slot.batches == [4]
    assert time.monotonic() - began < 5.0
    stand.close()
    short = Stand(max_batch_rows=4, max_queue_rows=16, max_batch_delay_seconds=0.05)
    short.go()
    short.predict(1.0).result(TIMEOUT)
    assert 0.0 < short.observer.computed[0]["fill_seconds"] < TIMEOUT
    short.close()


def test_the_observer_learns_of_every_batch(stand: Stand) -> None:
    stand.occupy()
    futures = [stand.predict(1.0, 2.0), stand.predict(3.0)]
    stand.go()
    for future in futures:
        future.result(TIMEOUT)
    stand.engine.run(lambda: None, rows=9).result(TIMEOUT)
    _, merged, evaluated = stand.observer.computed
    assert merged["operation"] == "predict"
    assert merged["rows"] == 3
    assert len(merged["queue_seconds"]) == 2
    assert evaluated["operation"] == "evaluate"
    assert evaluated["rows"] == 9
    assert stand.observer.queue_rows[-1] == 0
    assert max(stand.observer.queue_rows) == 3


@settings(max_examples=25, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=30))
def test_every_request_gets_its_own_rows_whatever_it_shared_a_batch_with(sizes: list[int]) -> None:
    stand = Stand(max_batch_rows=16, max_queue_rows=1000)
    stand.occupy()
    futures: list[tuple[Callable[[], list[float]], list[float]]] = []
    for index, rows in enumerate(sizes):
        values = [1000.0 * index + row for row in range(rows)]
        future = stand.predict(*values)
        futures.append((lambda future=future: outputs(future), [2 * value for value in values]))  # type: ignore[misc]
    stand.go()
    for answer, expected in futures:
        assert answer() == expected
    assert max(stand.slot.batches) <= 16
    stand.close()


@pytest.fixture
def overlapping() -> Iterator[Stand]:
    built = Stand(max_batch_rows=8, max_queue_rows=64, overlap_batches=True, inline_batches=False)
    yield built
    built.close()


def test_the_next_batch_is_launched_before_one_is_fetched_but_no_third(overlapping: Stand) -> None:
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


def test_where_batches_overlap_one_callers_bad_values_do_not_fail_anothers(overlapping: Stand) -> None:
    overlapping.occupy()
    good, bad, better = overlapping.predict(1.0), overlapping.predict(-1.0), overlapping.predict(2.0)
    overlapping.go()
    assert (outputs(good), outputs(better)) == ([2.0], [4.0])
    with pytest.raises(InvalidInputError):
        bad.result(TIMEOUT)


def test_an_evaluation_waits_for_what_was_launched_before_it(overlapping: Stand) -> None:
    order: list[str] = []
    overlapping.occupy().add_done_callback(lambda _: order.append("predict"))
    evaluation = overlapping.engine.run(lambda: order.append("evaluate"), rows=1)
    overlapping.go()
    evaluation.result(TIMEOUT)
    assert order == ["predict", "evaluate"]
