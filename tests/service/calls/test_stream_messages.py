"""What the messages of all streams hold together is bounded, over both front ends."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import grpc
import pytest

from testkit.server_harness import MAX_BODY_BYTES, MAX_MESSAGE_BYTES, ServerHarness
from understudy.service.calls import body_budget
from understudy.v1 import prediction_pb2

PATH = "/understudy.v1.PredictionService/PredictStream"
TIMEOUT = 60.0
FITTING = 3
"""How many large messages have room."""


def large(step: int) -> Any:
    request = prediction_pb2.PredictStreamRequest()
    request.request.version.step = step
    request.request.inputs["x"].content = bytes(MAX_MESSAGE_BYTES - 1000)
    return request


class Gate:
    """Answers requests when the test allows it."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[int] = asyncio.Queue()
        self.go = asyncio.Event()

    async def behave(self, request: Any) -> Any:
        self.arrived.put_nowait(request.version.step)
        await asyncio.wait_for(self.go.wait(), TIMEOUT)
        return prediction_pb2.PredictResponse(step=request.version.step)

    async def arrive(self, count: int) -> set[int]:
        return {await asyncio.wait_for(self.arrived.get(), TIMEOUT) for _ in range(count)}


async def started(harness: ServerHarness, count: int) -> list[Any]:
    """Begin streams that each send a large message, one after the other, as many as there is room for."""
    streams = []
    for step in range(count):
        streams.append(harness.stub.PredictStream(timeout=TIMEOUT))
        await streams[-1].write(large(step))
    return streams


async def test_streams_wait_for_room_and_are_answered(harness: ServerHarness) -> None:
    gate = Gate()
    harness.handlers.behave = gate.behave
    streams = await started(harness, FITTING)
    assert await gate.arrive(FITTING) == set(range(FITTING))
    late = harness.stub.PredictStream(timeout=TIMEOUT)
    await late.write(large(7))
    small = harness.stub.PredictStream(timeout=TIMEOUT)
    await small.write(prediction_pb2.PredictStreamRequest())
    assert await gate.arrive(1) == {0}  # the small one passes
    assert gate.arrived.empty()
    gate.go.set()
    for stream in (*streams, late, small):
        assert (await stream.read()).response is not None
        await stream.done_writing()
        assert await stream.code() is grpc.StatusCode.OK


async def test_a_stream_that_finds_no_room_in_time_is_told_when_to_try_again(
    harness: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_budget, "ROOM_SECONDS", 0.05)
    gate = Gate()
    harness.handlers.behave = gate.behave
    streams = await started(harness, FITTING)
    await gate.arrive(FITTING)
    refused = harness.stub.PredictStream(timeout=TIMEOUT)
    await refused.write(large(7))
    assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "--max-body-mib" in await refused.details()
    assert "grpc-status-details-bin" in dict(await refused.trailing_metadata())
    gate.go.set()
    for stream in streams:
        assert (await stream.read()).response is not None
        await stream.done_writing()
    again = harness.stub.PredictStream(timeout=TIMEOUT)
    await again.write(large(8))
    assert (await again.read()).response.step == 8


async def test_decompressed_messages_count_with_all_their_bytes(harness: ServerHarness) -> None:
    """A thousand times as many as arrive."""
    gate = Gate()
    harness.handlers.behave = gate.behave
    raw: Any = harness.channel
    call = raw.stream_stream(PATH)
    message = large(1).SerializeToString()
    assert len(gzip.compress(message)) < MAX_BODY_BYTES // 1000
    streams = []
    for _ in range(FITTING + 1):
        streams.append(call(timeout=TIMEOUT, compression=grpc.Compression.Gzip))
        await streams[-1].write(message)
    await gate.arrive(FITTING)
    small = harness.stub.PredictStream(timeout=TIMEOUT)
    await small.write(prediction_pb2.PredictStreamRequest())
    assert await gate.arrive(1) == {0}
    gate.go.set()
    await gate.arrive(1)
    for stream in streams:
        assert await stream.read() is not grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs
