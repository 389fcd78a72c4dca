"""The sample of the predictions: how many it draws, and what happens when its consumer is slow or fails."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from understudy.evaluator.datasets.request_records import LoggedRequest
from understudy.evaluator.types import Arrays, Prediction
from understudy.service.calls.caller import Caller
from understudy.service.calls.methods import CallContext
from understudy.service.calls.parsing import LARGE_BYTES, varint_bytes
from understudy.service.handlers.predict_codec import PredictCodec
from understudy.service.traffic.traffic_sample import TrafficSample
from understudy.v1 import prediction_pb2
from understudy.wire import encode

PATIENCE_SECONDS = 60


class Consumer:
    """Keeps what it takes, when the test lets it."""

    def __init__(self) -> None:
        self.taken: list[LoggedRequest] = []
        self.closed = False
        self.ticked = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.failing: Callable[[LoggedRequest], bool] = lambda _: False

    def take(self, request: LoggedRequest) -> None:
        assert self.may_go_on.wait(PATIENCE_SECONDS)
        if self.failing(request):
            raise RuntimeError("the consumer failed")
        self.taken.append(request)

    def tick(self) -> None:
        self.ticked.set()

    def close(self) -> None:
        self.closed = True


def call() -> CallContext:
    context = CallContext(deadline=None)
    context.method = "/a.Service/Predict"
    context.caller = Caller(name="shop", groups=frozenset())
    return context


def inputs(value: float, width: int = 2) -> Arrays:
    return {"x": np.full((1, width), value, np.float32)}


async def answered(sample: TrafficSample, values: list[float], *, width: int = 2) -> None:
    for value in values:
        assert sample.wants_next()
        future: asyncio.Future[Prediction] = asyncio.get_running_loop().create_future()
        sample.follow(future, inputs(value, width), call())
        future.set_result(Prediction(outputs={"y": np.full((1, 1), -value)}, step=7))
    await asyncio.sleep(0)


@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_each_request_is_drawn_with_the_same_probability(share: float) -> None:
    generator = random.Random(3)  # noqa: S311 - not a secret
    sample = TrafficSample(Consumer(), share=share, dropped=lambda _: None, name="sample", generator=generator)
    count, drawn = 40_000, []
    for number in range(count):
        if sample.wants_next():
            drawn.append(number)
            sample._others = sample._gaps.draw()  # what `follow` does
    expected = share * count
    spread = 4 * np.sqrt(expected * (1 - share)) + 1e-9
    assert abs(len(drawn) - expected) <= spread
    if share < 1:
        first_half = sum(number < count / 2 for number in drawn)
        assert abs(first_half - expected / 2) <= spread
        # Independent draws: the probability of a neighbour is that of any other request.
        neighbours = sum(after - before == 1 for before, after in itertools.pairwise(drawn))
        assert abs(neighbours - share * expected) <= 4 * np.sqrt(share * expected) + 1


def test_what_was_answered_arrives_with_all_that_is_known_of_it() -> None:
    consumer = Consumer()
    sample = TrafficSample(consumer, share=1.0, dropped=lambda _: None, name="sample")
    sample.start()
    asyncio.run(answered(sample, [1.0, 2.0]))
    sample.close()

    assert consumer.closed
    assert [request.inputs["x"].tolist() for request in consumer.taken] == [[[1, 1]], [[2, 2]]]
    first = consumer.taken[0]
    assert (first.outputs["y"].tolist(), first.step) == ([[-1]], 7)
    assert (first.method, first.caller) == ("/a.Service/Predict", "shop")


def test_a_failed_or_cancelled_prediction_is_not_in_the_sample() -> None:
    consumer = Consumer()
    sample = TrafficSample(consumer, share=1.0, dropped=lambda _: None, name="sample")
    sample.start()

    async def fail() -> None:
        failed, cancelled = (asyncio.get_running_loop().create_future() for _ in range(2))
        for future in (failed, cancelled):
            sample.follow(future, inputs(1), call())
        failed.set_exception(RuntimeError())
        cancelled.cancel()
        await asyncio.sleep(0)

    asyncio.run(fail())
    sample.close()
    assert consumer.taken == []


@pytest.mark.parametrize(("limits", "kept"), [({"max_requests": 3}, 3), ({"max_bytes": 4 * 4000 + 100}, 4)])
def test_a_slow_consumer_costs_requests_of_the_sample_and_no_time(limits: dict[str, Any], kept: int) -> None:
    consumer, dropped = Consumer(), Counter[str]()
    sample = TrafficSample(
        consumer, share=1.0, dropped=lambda reason: dropped.update([reason]), name="sample", **limits
    )
    asyncio.run(answered(sample, [float(number) for number in range(10)], width=1000))  # nothing takes them yet
    sample.start()
    sample.close()

    assert [request.inputs["x"][0, 0] for request in consumer.taken] == list(range(kept))
    assert dropped == {"queue": 10 - kept}


def test_a_slice_counts_as_the_whole_batch_that_it_keeps_in_memory() -> None:
    consumer, dropped = Consumer(), Counter[str]()
    sample = TrafficSample(
        consumer, share=1.0, dropped=lambda reason: dropped.update([reason]), name="sample", max_bytes=1_000_000
    )
    batch = np.zeros((1000, 1000), np.float32)

    async def answer() -> None:
        future: asyncio.Future[Prediction] = asyncio.get_running_loop().create_future()
        sample.follow(future, inputs(1), call())
        future.set_result(Prediction(outputs={"y": batch[3:4]}, step=1))
        await asyncio.sleep(0)

    asyncio.run(answer())
    assert dropped == {"queue": 1}


def test_a_tensor_counts_as_the_whole_message_that_it_keeps_in_memory() -> None:
    consumer, dropped = Consumer(), Counter[str]()
    sample = TrafficSample(
        consumer, share=1.0, dropped=lambda reason: dropped.update([reason]), name="sample", max_bytes=1_000_000
    )
    tensor = encode(np.zeros((1, 1 << 16), np.float32))
    unknown = bytes([15 << 3 | 2, *varint_bytes(LARGE_BYTES)]) + bytes(LARGE_BYTES)
    message = prediction_pb2.PredictRequest(inputs={"x": tensor}).SerializeToString() + unknown
    sent, _ = PredictCodec().decode(message).arguments()

    async def answer() -> None:
        future: asyncio.Future[Prediction] = asyncio.get_running_loop().create_future()
        sample.follow(future, sent, call())
        future.set_result(Prediction(outputs={"y": np.zeros((1, 1))}, step=1))
        await asyncio.sleep(0)

    asyncio.run(answer())
    assert dropped == {"queue": 1}


def test_a_consumer_that_fails_loses_that_request_only() -> None:
    consumer, dropped = Consumer(), Counter[str]()
    consumer.failing = lambda request: request.inputs["x"][0, 0] == 1
    sample = TrafficSample(consumer, share=1.0, dropped=lambda reason: dropped.update([reason]), name="sample")
    sample.start()
    asyncio.run(answered(sample, [0.0, 1.0, 2.0]))
    sample.close()
    assert [request.inputs["x"][0, 0] for request in consumer.taken] == [0, 2]
    assert dropped == {"error": 1}


def test_the_consumer_is_called_in_time_also_while_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.service.traffic.traffic_sample.TICK_SECONDS", 0.0)
    consumer = Consumer()
    waiting: list[bool] = []

    def note(_: LoggedRequest) -> bool:
        waiting.append(consumer.ticked.is_set())
        return False

    consumer.failing = note
    sample = TrafficSample(consumer, share=1.0, dropped=lambda _: None, name="sample")
    asyncio.run(answered(sample, [0.0, 1.0]))
    sample.start()
    sample.close()
    assert waiting == [True, True]


def test_a_share_that_changes_is_followed_and_zero_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.service.traffic.traffic_sample.TICK_SECONDS", 0.0)
    share = 0.0
    consumer = Consumer()
    sample = TrafficSample(consumer, share=lambda: share, dropped=lambda _: None, name="sample")
    assert not any(sample.wants_next() for _ in range(1000))
    sample.start()
    share = 1.0
    ends = time.monotonic() + PATIENCE_SECONDS
    while not sample.wants_next():
        assert time.monotonic() < ends
        consumer.ticked.wait(PATIENCE_SECONDS)
    share = 0.0
    while sample.wants_next():
        assert time.monotonic() < ends
    sample.close()
    assert consumer.closed
