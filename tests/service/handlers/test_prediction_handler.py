"""The handler of predictions: alone, and in streams."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import numpy as np
import pytest
from google.rpc.error_details_pb2 import RetryInfo

from testkit.caller_stream import CallerStream
from testkit.scripted_evaluator import ScriptedEvaluator, prediction
from testkit.through_codecs import MessagesToPredict
from understudy.evaluator.evaluator_errors import (
    InvalidInputError,
    OverloadedError,
    VersionNotFoundError,
)
from understudy.service.calls.methods import CallContext
from understudy.service.calls.parsing import varint_bytes
from understudy.service.calls.status import Code
from understudy.service.handlers.predict_codec import PredictCodec
from understudy.service.handlers.prediction_handler import PredictionHandler, Predictor
from understudy.service.services import Codecs
from understudy.v1 import prediction_pb2
from understudy.wire import encode, encode_all

CALL = CallContext(deadline=None)
STREAM_DEPTH = 3


@pytest.fixture
async def handlers(evaluator: ScriptedEvaluator, codecs: Codecs) -> MessagesToPredict:
    handler = PredictionHandler(evaluator.as_model, Predictor(evaluator.as_evaluator), stream_depth=STREAM_DEPTH)
    return MessagesToPredict(handler, codecs)


async def test_a_request_that_waits_keeps_neither_its_message_nor_the_bytes_around_its_tensors(
    evaluator: ScriptedEvaluator,
) -> None:
    handler = PredictionHandler(evaluator.as_model, Predictor(evaluator.as_evaluator), stream_depth=STREAM_DEPTH)
    message = prediction_pb2.PredictRequest(inputs=encode_all({"x": np.ones((1, 1 << 17), np.float32)}))
    unknown = b"\xfa\xff\x01" + varint_bytes(8 << 20) + bytes(8 << 20)
    data = message.SerializeToString() + unknown
    request = PredictCodec().decode(data)
    assert request.contents, "the tensor is a view of the data"
    before = sys.getrefcount(request)
    waiting = asyncio.create_task(handler.predict(request, CALL))
    answer = await evaluator.predictions.get()
    assert sys.getrefcount(request) == before
    (kept,) = evaluator.asked["inputs"].values()
    assert not np.shares_memory(kept, np.frombuffer(data, np.uint8))
    assert np.array_equal(kept, np.ones((1, 1 << 17), np.float32))
    answer.set_result(prediction(3))
    assert (await waiting).step == 3


def item() -> prediction_pb2.PredictStreamRequest:
    return prediction_pb2.PredictStreamRequest(request=prediction_pb2.PredictRequest(inputs={"x": encode([[1.0]])}))


async def test_a_prediction_whose_caller_goes_away_is_taken_back(
    evaluator: ScriptedEvaluator, handlers: MessagesToPredict
) -> None:
    call = asyncio.create_task(handlers.predict(item().request, CALL))
    future = await evaluator.predictions.get()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert future.cancelled()


async def test_the_callers_deadline_reaches_the_evaluator(
    evaluator: ScriptedEvaluator, handlers: MessagesToPredict
) -> None:
    call = asyncio.create_task(handlers.predict(item().request, CallContext(deadline=123.0)))
    (await evaluator.predictions.get()).set_result(prediction(1))
    assert (await call).step == 1
    assert evaluator.asked["deadline"] == 123.0
    assert evaluator.asked["version"] == "serving"


async def test_answers_of_a_stream_come_in_the_order_of_its_requests(
    evaluator: ScriptedEvaluator, handlers: MessagesToPredict
) -> None:
    answers = handlers.predict_stream(CallerStream(item(), item(), item(), end=True), CALL)
    first = asyncio.create_task(anext(answers))
    futures = [await evaluator.predictions.get() for _ in range(3)]
    for step in (2, 1, 0):
        futures[step].set_result(prediction(step))
    steps = [(await first).response.step, *[answer.response.step async for answer in answers]]
    assert steps == [0, 1, 2]


async def test_a_stream_has_no_more_requests_under_way_than_it_may(
    evaluator: ScriptedEvaluator, handlers: MessagesToPredict
) -> None:
    requests = CallerStream(*[item()] * 10, end=True)
    answers = handlers.predict_stream(requests, CALL)
    first = asyncio.create_task(anext(answers))
    futures = [await evaluator.predictions.get() for _ in range(STREAM_DEPTH)]
    futures[0].set_result(prediction(0))
    await first
    assert (requests.taken, evaluator.predictions.qsize()) == (STREAM_DEPTH, 0)
    second = asyncio.create_task(anext(answers))
    await evaluator.predictions.get()
    assert requests.taken == STREAM_DEPTH + 1
    second.cancel()
    await asyncio.wait([second])
    await answers.aclose()


async def test_one_bad_request_does_not_end_its_stream(
    evaluator: ScriptedEvaluator, handlers: MessagesToPredict
) -> None:
    evaluator.refusals = [InvalidInputError("x: wrong")]
    answers = handlers.predict_stream(CallerStream(item(), item(), item(), end=True), CALL)
    refused = await anext(answers)
    (await evaluator.predictions.get()).set_exception(VersionNotFoundError("no version 3"))
    (await evaluator.predictions.get()).set_result(prediction(5))
    failed, answered = [answer async for answer in answers]
    assert (refused.error.code, refused.error.message) == (Code.INVALID_ARGUMENT, "x: wrong")
    assert (failed.error.code, failed.error.message) == (Code.NOT_FOUND, "no version 3")
    assert answered.response.step == 5


async def test_what_a_broken_stream_has_under_way_is_taken_back(
    evaluator: ScriptedEvaluator, handlers: MessagesToPredict
) -> None:
    answers = handlers.predict_stream(CallerStream(item(), item()), CALL)
    first = asyncio.create_task(anext(answers))
    futures = [await evaluator.predictions.get() for _ in range(2)]
    first.cancel()
    await asyncio.wait([first])
    assert [future.cancelled() for future in futures] == [True, True]


async def test_a_stream_tells_of_one_request_what_a_unary_call_would_have_told(
    evaluator: ScriptedEvaluator, handlers: MessagesToPredict
) -> None:
    evaluator.refusals = [OverloadedError("the queue is full", retry_after_seconds=0.25)]
    answers = handlers.predict_stream(CallerStream(item(), end=True), CALL)
    (error,) = [answer.error async for answer in answers]
    assert (error.code, error.message) == (Code.RESOURCE_EXHAUSTED, "the queue is full")
    retry_info = RetryInfo()
    assert error.details[0].Unpack(retry_info)
    assert retry_info.retry_delay.ToTimedelta().total_seconds() == 0.25


async def test_step_0_is_a_step(evaluator: ScriptedEvaluator, handlers: MessagesToPredict) -> None:
    request = item().request
    request.version.step = 0
    call = asyncio.create_task(handlers.predict(request, CALL))
    (await evaluator.predictions.get()).set_result(prediction(0))
    assert (await call).step == 0
    assert evaluator.asked["version"] == 0


async def test_a_stream_that_breaks_while_it_is_read_ends_with_the_reason(
    evaluator: ScriptedEvaluator, handlers: MessagesToPredict
) -> None:
    async def broken() -> AsyncIterator[prediction_pb2.PredictStreamRequest]:
        yield item()
        raise InvalidInputError("no message")

    answers = handlers.predict_stream(broken(), CALL)
    first = asyncio.create_task(anext(answers))
    (await evaluator.predictions.get()).set_result(prediction(1))
    assert (await first).response.step == 1
    with pytest.raises(InvalidInputError, match="no message"):
        await anext(answers)
