"""How outcomes come to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest

from understudy.evaluator.batching.engine import Engine, EngineSettings
from understudy.evaluator.batching.request_queue import BorrowedHandle
from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.evaluator_errors import DeadlineExceededError
from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.types import Arrays, Outcome, Prediction, ResultSink
from understudy.service.calls.methods import CallContext, CoalescingOptions
from understudy.service.handlers.prediction_handler import EventLoopSink, Predictor

TIMEOUT = 60.0


class Rejections(SilentObserver):
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def rejected(self, reason: str) -> None:
        self.reasons.append(reason)


class EngineAlone:
    """As much of an evaluator as there is to its engine; the device is busy with each batch until it is told."""

    step = 7

    def __init__(self) -> None:
        self.observer = Rejections()
        self.engine = Engine(EngineSettings(), self.observer)
        self.began = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.batches: list[int] = []
        self.deliveries: list[int] = []

    @property
    def slot(self) -> EngineAlone:
        return self

    def forward(self, inputs: Arrays) -> Arrays:
        self.batches.append(len(inputs["x"]))
        self.began.release()
        assert self.go.acquire(timeout=TIMEOUT)
        return {"y": inputs["x"] * 2}

    def release(self) -> None:
        pass

    def predict_for(
        self,
        token: asyncio.Future[Prediction],
        sink: EventLoopSink,
        inputs: Arrays,
        *,
        version: Any,
        deadline: Any,
        caller: Any,
        dispatch: bool,
    ) -> None:
        counting = cast("ResultSink[Any]", Counting(sink, self.deliveries))
        self.engine.submit(
            inputs,
            borrow=lambda: cast("BorrowedHandle", self),
            key=version,
            deadline=deadline,
            token=token,
            sink=counting,
            caller=caller,
            dispatch=dispatch,
        )

    def dispatch(self) -> None:
        self.engine.dispatch()

    async def wait_until_busy(self) -> None:
        assert await asyncio.to_thread(self.began.acquire, timeout=TIMEOUT)


class Counting:
    """Counts the wake-ups of a sink. All that are made for one sink are equal."""

    def __init__(self, sink: EventLoopSink, deliveries: list[int]) -> None:
        self._sink = sink
        self._deliveries = deliveries
        self.begin, self.is_cancelled = sink.begin, sink.is_cancelled

    def deliver(self, outcomes: Sequence[tuple[asyncio.Future[Prediction], Outcome]]) -> None:
        self._deliveries.append(len(outcomes))
        self._sink.deliver(outcomes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counting) and other._sink is self._sink

    def __hash__(self) -> int:
        return hash(self._sink)


@pytest.fixture
def alone() -> Iterator[EngineAlone]:
    alone = EngineAlone()
    yield alone
    alone.go.release(100)
    alone.engine.close(TIMEOUT)


@pytest.fixture
def predictor(alone: EngineAlone) -> Predictor:
    return Predictor(cast("Evaluator", alone))


def begin(predictor: Predictor, value: float, *, deadline: float | None = None) -> asyncio.Future[Prediction]:
    return predictor.begin({"x": np.full((1, 1), value, np.float32)}, CallContext(deadline=deadline), deadline=deadline)


async def test_the_outcomes_of_a_batch_come_with_one_wake_up(alone: EngineAlone, predictor: Predictor) -> None:
    first = begin(predictor, 0)
    await alone.wait_until_busy()
    rest = [begin(predictor, value) for value in range(1, 6)]
    alone.go.release(2)
    predictions = await asyncio.wait_for(asyncio.gather(first, *rest), TIMEOUT)
    assert [float(prediction.outputs["y"][0, 0]) for prediction in predictions] == [0, 2, 4, 6, 8, 10]
    assert (alone.batches, alone.deliveries) == ([1, 5], [1, 5])


async def test_what_the_loop_takes_in_at_one_time_shares_a_batch(alone: EngineAlone, predictor: Predictor) -> None:
    together = [begin(predictor, value) for value in range(4)]
    alone.go.release()
    await asyncio.wait_for(asyncio.gather(*together), TIMEOUT)
    assert alone.batches == [4]


async def test_requests_that_come_in_company_wait_some_turns_for_the_rest(alone: EngineAlone) -> None:
    predictor = Predictor(cast("Evaluator", alone), CoalescingOptions(loop_turns=8, examples=16))
    together = [begin(predictor, 0), begin(predictor, 1)]
    for value in range(2, 5):
        await asyncio.sleep(0)
        together.append(begin(predictor, value))
    alone.go.release()
    await asyncio.wait_for(asyncio.gather(*together), TIMEOUT)
    assert alone.batches == [5]


async def test_a_request_that_comes_alone_waits_for_nobody(alone: EngineAlone) -> None:
    predictor = Predictor(cast("Evaluator", alone), CoalescingOptions(loop_turns=1_000_000, examples=16))
    alone.go.release()
    await asyncio.wait_for(begin(predictor, 0), TIMEOUT)
    assert alone.batches == [1]


async def test_examples_that_fill_a_batch_wait_for_no_others(alone: EngineAlone) -> None:
    predictor = Predictor(cast("Evaluator", alone), CoalescingOptions(loop_turns=1_000_000, examples=16))
    together = [begin(predictor, value) for value in range(16)]
    alone.go.release()
    await asyncio.wait_for(asyncio.gather(*together), TIMEOUT)
    assert alone.batches == [16]


async def test_what_is_cancelled_on_the_loop_never_reaches_a_device(alone: EngineAlone, predictor: Predictor) -> None:
    first = begin(predictor, 0)
    await alone.wait_until_busy()
    unwanted, wanted = begin(predictor, 1), begin(predictor, 2)
    unwanted.cancel()
    alone.go.release(2)
    await asyncio.wait_for(asyncio.gather(first, wanted), TIMEOUT)
    assert (alone.batches, alone.observer.reasons) == ([1, 1], ["cancelled"])


async def test_what_is_cancelled_on_a_device_is_not_resolved(alone: EngineAlone, predictor: Predictor) -> None:
    unwanted = begin(predictor, 0)
    await alone.wait_until_busy()
    unwanted.cancel()
    wanted = begin(predictor, 1)
    alone.go.release(2)
    await asyncio.wait_for(wanted, TIMEOUT)
    assert (unwanted.cancelled(), alone.batches, alone.observer.reasons) == (True, [1, 1], [])


async def test_a_deadline_that_passes_in_the_queue_is_told_on_the_loop(
    alone: EngineAlone, predictor: Predictor
) -> None:
    first = begin(predictor, 0)
    await alone.wait_until_busy()
    late = begin(predictor, 1, deadline=asyncio.get_running_loop().time() + 0.02)
    await asyncio.sleep(0.03)
    alone.go.release(2)
    await asyncio.wait_for(first, TIMEOUT)
    with pytest.raises(DeadlineExceededError):
        await asyncio.wait_for(late, TIMEOUT)


def test_outcomes_for_a_loop_that_was_closed_are_dropped() -> None:
    loop = asyncio.new_event_loop()
    sink = EventLoopSink(loop)
    future = sink.new_future()
    loop.close()
    with ThreadPoolExecutor(1) as device:
        device.submit(sink.deliver, [(future, Prediction(outputs={}, step=1))]).result(TIMEOUT)
    assert not future.done()
