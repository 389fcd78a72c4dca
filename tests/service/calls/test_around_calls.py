from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import pytest
import structlog
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc

from testkit.server_harness import ServerHarness
from understudy.evaluator.evaluator_errors import InvalidInputError, OverloadedError, VersionNotFoundError
from understudy.service.calls import served_call, status
from understudy.service.calls.served_call import REQUEST_ID, REQUEST_ID_HEADER
from understudy.service.calls.status import DETAILS_KEY, Code
from understudy.v1 import prediction_pb2

PATH = "/understudy.v1.PredictionService/Predict"
TIMEOUT = 60.0


def raising(error: Exception) -> Any:
    async def behave(request: object) -> None:
        del request
        raise error

    return behave


def asking_for(step: int) -> prediction_pb2.PredictRequest:
    request = prediction_pb2.PredictRequest()
    request.version.step = step
    return request


async def failure_of(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def raw(harness: ServerHarness) -> Any:
    """Return the channel as what sends and takes plain bytes."""
    return harness.channel


async def test_an_expected_error_becomes_its_status_with_its_own_words(harness: ServerHarness) -> None:
    harness.handlers.behave = raising(InvalidInputError("x: got float64, expected float32"))
    error = await failure_of(harness.stub.Predict(asking_for(1)))
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "x: got float64, expected float32")


async def test_a_full_queue_says_when_to_try_again(harness: ServerHarness) -> None:
    harness.handlers.behave = raising(OverloadedError("the queue is full", retry_after_seconds=1.25))
    error = await failure_of(harness.stub.Predict(asking_for(1)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status = Status.FromString(dict(error.trailing_metadata())[DETAILS_KEY])
    retry = RetryInfo()
    assert status.details[0].Unpack(retry)
    assert (status.code, status.message) == (Code.RESOURCE_EXHAUSTED, "the queue is full")
    assert retry.retry_delay.ToNanoseconds() == 1_250_000_000


async def test_streams_of_one_method_are_limited_and_one_that_ends_makes_room(
    harness: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_call, "MAX_OPEN_STREAMS", 2)
    health, serving = health_pb2_grpc.HealthStub(harness.channel), health_pb2.HealthCheckRequest()
    first, second = health.Watch(serving), health.Watch(serving)
    for watch in (first, second):
        await watch.read()
    error = await failure_of(health.Watch(serving).read())
    assert (error.code(), "2 streams of" in error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    await harness.ended.get()
    await health.Check(serving)
    await harness.stub.Predict(asking_for(1))
    for _ in range(2):
        await harness.ended.get()
    first.cancel()
    await harness.ended.get()
    third = health.Watch(serving)
    assert (await third.read()).status == (await health.Check(serving)).status
    for watch in (second, third):
        watch.cancel()


async def test_a_defect_gives_the_caller_an_id_and_the_log_the_traceback(harness: ServerHarness) -> None:
    defect = RuntimeError("the secret path /srv/model")
    harness.handlers.behave = raising(defect)
    with structlog.testing.capture_logs() as lines:
        error = await failure_of(harness.stub.Predict(asking_for(1)))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (error.details() or "")
    (line,) = [line for line in lines if line["log_level"] == "error"]
    assert line["incident"] in (error.details() or "")
    assert line["exc_info"] is defect


async def test_bytes_that_are_no_message_are_the_callers_error(harness: ServerHarness) -> None:
    error = await failure_of(raw(harness).unary_unary(PATH)(b"\xff\xff\xff"))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert PATH in (error.details() or "")


async def test_bytes_that_are_no_message_end_a_stream(harness: ServerHarness) -> None:
    stream = raw(harness).stream_stream("/understudy.v1.PredictionService/PredictStream")(iter([b"\xff\xff\xff"]))
    error = await failure_of(stream.read())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_unknown_method_is_unimplemented(harness: ServerHarness) -> None:
    error = await failure_of(raw(harness).unary_unary("/understudy.v1.PredictionService/Guess")(b""))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_callers_request_id_comes_back(harness: ServerHarness) -> None:
    call = harness.stub.Predict(asking_for(1), metadata=((REQUEST_ID_HEADER, "my-id-1"),))
    await call
    assert (await call.trailing_metadata())[REQUEST_ID_HEADER] == "my-id-1"


async def test_a_call_that_ends_well_gets_no_request_id_it_did_not_send(harness: ServerHarness) -> None:
    call = harness.stub.Predict(asking_for(1))
    await call
    assert REQUEST_ID_HEADER not in (await call.trailing_metadata())


async def test_a_call_that_fails_is_told_its_request_id(harness: ServerHarness) -> None:
    harness.handlers.behave = raising(VersionNotFoundError("no version 3; there are 1, 2"))
    error = await failure_of(harness.stub.Predict(asking_for(3)))
    assert len(error.trailing_metadata()[REQUEST_ID_HEADER]) == 32


async def test_the_request_id_is_in_the_context_of_the_call(harness: ServerHarness) -> None:
    seen: list[str] = []

    async def behave(request: object) -> prediction_pb2.PredictResponse:
        del request
        seen.append(REQUEST_ID.get())
        return prediction_pb2.PredictResponse()

    harness.handlers.behave = behave
    await asyncio.gather(
        *(harness.stub.Predict(asking_for(1), metadata=((REQUEST_ID_HEADER, name),)) for name in ("a", "b"))
    )
    assert sorted(seen) == ["a", "b"]


async def test_calls_and_messages_are_counted(harness: ServerHarness) -> None:
    await harness.stub.Predict(asking_for(1))
    await harness.ended.get()
    requests = [prediction_pb2.PredictStreamRequest(request=asking_for(step)) for step in range(3)]
    steps = [answer.response.step async for answer in harness.stub.PredictStream(iter(requests))]
    assert steps == [0, 1, 2]
    await harness.ended.get()
    assert harness.handled("PredictStream", Code.OK) == 1
    labels = {"grpc_service": "understudy.v1.PredictionService", "grpc_method": "PredictStream"}
    labels["grpc_type"] = "bidi_stream"
    for name in ("grpc_server_msg_received_total", "grpc_server_msg_sent_total"):
        assert harness.registry.get_sample_value(name, labels) == 3
    assert harness.registry.get_sample_value("grpc_server_started_total", labels) == 1
    assert harness.registry.get_sample_value("grpc_server_handling_seconds_count", labels) == 1
    assert harness.handled("Predict", Code.OK) == 1


async def test_failures_are_counted_by_their_code(harness: ServerHarness) -> None:
    harness.handlers.behave = raising(VersionNotFoundError("no version 3"))
    await failure_of(harness.stub.Predict(asking_for(3)))
    await harness.ended.get()
    assert harness.handled("Predict", Code.NOT_FOUND) == 1
    assert harness.handled("Predict", Code.OK) == 0


async def test_a_call_whose_caller_goes_away_is_cancelled_and_counted(harness: ServerHarness) -> None:
    entered, left = asyncio.Event(), asyncio.Event()
    harness.handlers.behave = until_cancelled(entered, left)
    call = harness.stub.Predict(asking_for(1))
    await entered.wait()
    call.cancel()
    await left.wait()
    await harness.ended.get()
    assert harness.handled("Predict", Code.CANCELLED) == 1


async def test_a_call_whose_deadline_passes_is_cancelled_and_counted_as_that(
    harness: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "EARLY_SECONDS", 10.0)  # on a busy machine a request may take long to arrive
    entered, left = asyncio.Event(), asyncio.Event()
    harness.handlers.behave = until_cancelled(entered, left)
    error = await failure_of(harness.stub.Predict(asking_for(1), timeout=2))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await left.wait()
    await harness.ended.get()
    assert harness.handled("Predict", Code.DEADLINE_EXCEEDED) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_computation_that_is_cancelled_from_within_ends_the_call(
    harness: ServerHarness, *, stream: bool
) -> None:
    harness.handlers.behave = raising(asyncio.CancelledError())  # type: ignore[arg-type]  # a BaseException
    if stream:
        call = harness.stub.PredictStream(iter([prediction_pb2.PredictStreamRequest()]), timeout=100).read()
    else:
        call = harness.stub.Predict(asking_for(1), timeout=100)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert (caught.value.code(), caught.value.details()) == (
        grpc.StatusCode.CANCELLED,
        "the computation was cancelled",
    )


async def test_a_failed_call_is_written_to_the_access_log_with_its_peer_and_size(harness: ServerHarness) -> None:
    harness.handlers.behave = raising(VersionNotFoundError("no version 3"))
    with structlog.testing.capture_logs() as lines:
        await failure_of(harness.stub.Predict(asking_for(3)))
        await harness.ended.get()
    (line,) = [line for line in lines if line["event"] == "call ended"]
    assert (line["method"], line["code"], line["message"]) == (PATH, "NOT_FOUND", "no version 3")
    assert line["received_bytes"] == asking_for(3).ByteSize()
    assert "127.0.0.1:" in line["peer"]
    assert line["seconds"] > 0


async def test_a_call_that_ends_well_is_logged_at_debug_only(
    harness: ServerHarness, caplog: pytest.LogCaptureFixture
) -> None:
    for level, count in ((logging.INFO, 0), (logging.DEBUG, 1)):
        with caplog.at_level(level, "understudy"), structlog.testing.capture_logs() as lines:
            await harness.stub.Predict(asking_for(3))
            await harness.ended.get()
        assert [line["log_level"] for line in lines if line["event"] == "call ended"] == ["debug"] * count


async def test_a_call_that_is_not_admitted_is_not_parsed(harness: ServerHarness) -> None:
    harness.handlers.refusal = OverloadedError("the queue is full")
    error = await failure_of(raw(harness).unary_unary(PATH)(b"\xff\xff\xff"))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_call_that_is_not_admitted_is_refused_before_its_request_is_there(harness: ServerHarness) -> None:
    harness.handlers.refusal = OverloadedError("the queue is full")
    call = raw(harness).stream_unary(PATH)()
    assert await asyncio.wait_for(call.code(), TIMEOUT) is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_call_without_a_request_is_invalid(harness: ServerHarness) -> None:
    call = raw(harness).stream_unary(PATH)()
    await call.done_writing()
    assert await asyncio.wait_for(call.code(), TIMEOUT) is grpc.StatusCode.INVALID_ARGUMENT
    assert f"got no message; {PATH} takes one" in await call.details()


async def test_series_are_there_before_the_first_call(harness: ServerHarness) -> None:
    for code in Code:
        assert harness.handled("Predict", code) == 0


def until_cancelled(entered: asyncio.Event, left: asyncio.Event) -> Any:
    async def behave(request: object) -> None:
        del request
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    return behave
