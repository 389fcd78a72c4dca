"""What happens to requests while checkpoints are swapped, queues are full, callers leave and servers end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from integration.conftest import REPLICAS

from testkit.checkpoints import OUTPUTS, Chief, ones, step_model
from testkit.front_ends import FRONT_ENDS
from testkit.in_process import RunningService, running_service, until
from understudy.clients import (
    AbortedError,
    AsyncClient,
    DeadlineExceededError,
    OverloadedError,
    UnavailableError,
    UnderstudyError,
)
from understudy.evaluator.evaluator_errors import DeviceError
from understudy.v1 import prediction_pb2, prediction_pb2_grpc
from understudy.wire import encode

pytestmark = pytest.mark.long

PREDICTIONS = 3_000
SWAPS = 20
FIRST_STEP = 5
IN_FLIGHT = 32

STREAM_IDLE_SECONDS = 3.0
FULL = 3 * REPLICAS
HELD_BACK = {"max_batch_size": FULL // REPLICAS, "max_queue_examples": FULL, "max_batch_delay_ms": 6_000.0}
"""A batch that is not full waits six seconds for more examples, so that a request can be caught in the queue."""

WIDE = 1_000
"""The features of an example of 4 kB."""
LARGE = 262
"""The examples of a request that fills a queue of 1 MiB, but for 576 bytes."""
RESERVED_EACH = 3
"""The examples of 4 kB of one caller that may wait beside a full queue of 1 MiB."""

Run = Callable[..., RunningService]


@pytest.fixture(scope="module", params=FRONT_ENDS)
def unserved(
    request: pytest.FixtureRequest, replicas: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningService, Chief]]:
    """A service that starts without a checkpoint, and who publishes some."""
    run = tmp_path_factory.mktemp("run")
    settings = {"run_dir": run}
    with running_service(
        settings, {}, replicas=replicas, state_dir=run / "evaluator", front_end=request.param
    ) as service:
        yield service, Chief(run)


@pytest.fixture(scope="module", params=FRONT_ENDS)
def loaded(
    request: pytest.FixtureRequest, replicas: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningService]:
    """A service that holds requests back, and no version for a silent stream."""
    run = tmp_path_factory.mktemp("run")
    Chief(run).publish(10)
    with running_service(
        {"run_dir": run},
        {**HELD_BACK, "stream_idle_timeout_seconds": STREAM_IDLE_SECONDS},
        replicas=replicas,
        state_dir=run / "evaluator",
        front_end=request.param,
    ) as service:
        service.wait_ready()
        yield service


async def test_before_the_first_checkpoint_the_service_is_unavailable(
    unserved: tuple[RunningService, Chief],
) -> None:
    service, chief = unserved
    stub_channel = grpc.aio.insecure_channel(service.grpc)  # without the client's retries
    stub = prediction_pb2_grpc.PredictionServiceStub(stub_channel)
    request = prediction_pb2.PredictRequest(inputs={"x": encode(ones(1))})
    client = service.client()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Predict(request)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not client.is_serving()
    assert service.answers("/readyz") == 503
    assert service.answers("/healthz") == 200
    assert "nan" in client.metrics().lower()
    chief.publish(FIRST_STEP)
    assert service.wait_ready() == FIRST_STEP
    assert (await stub.Predict(request)).step == FIRST_STEP
    assert client.is_serving()
    await stub_channel.close(None)


async def test_thousands_of_predictions_during_twenty_swaps_fail_never_and_tear_never(
    unserved: tuple[RunningService, Chief],
) -> None:
    service, chief = unserved
    if not service.client().is_serving():
        chief.publish(FIRST_STEP)
        service.wait_ready()
    done = threading.Event()
    publishing = threading.Thread(target=publish_until, args=(chief, service, done))
    async with AsyncClient(service.grpc) as client:
        publishing.start()
        try:
            steps = await predict_while(client, publishing)
        finally:
            done.set()
            publishing.join()
    assert len(steps) >= PREDICTIONS
    assert len(set(steps)) > SWAPS


async def predict_while(client: AsyncClient, publishing: threading.Thread) -> list[int]:
    """Predict until there are enough answers and every checkpoint is published; return the step of each."""
    steps: list[int] = []

    async def worker(rows: int) -> None:
        while len(steps) < PREDICTIONS or publishing.is_alive():
            result = await client.predict({"x": ones(rows)})
            assert np.array_equal(result.outputs["y"], np.full((rows, OUTPUTS), result.step, np.float32))
            steps.append(result.step)

    async with asyncio.TaskGroup() as group:
        for index in range(IN_FLIGHT):
            group.create_task(worker(1 + index % 3))
    return steps


def publish_until(chief: Chief, service: RunningService, done: threading.Event) -> None:
    """Publish checkpoints, each as soon as the one before it is serving."""
    client = service.client()
    for step in range(FIRST_STEP + 1, FIRST_STEP + SWAPS + 2):
        chief.publish(step)
        until(lambda step=step: done.is_set() or client.status().serving_step == step)  # type: ignore[misc]


async def test_a_request_whose_deadline_passes_in_the_queue_never_reaches_a_device(loaded: RunningService) -> None:
    before = loaded.metric("understudy_examples_total", operation="predict")
    async with AsyncClient(loaded.grpc) as client:
        with pytest.raises(DeadlineExceededError):
            await client.predict({"x": ones(1)}, timeout_seconds=0.2)
        answered = await client.predict({"x": ones(2)})
    assert answered.step == 10
    assert loaded.metric("understudy_examples_total", operation="predict") == before + 2


async def test_a_request_whose_caller_leaves_never_reaches_a_device(loaded: RunningService) -> None:
    rejected = loaded.metric("understudy_rejected_total", reason="cancelled")
    before = loaded.metric("understudy_examples_total", operation="predict")
    async with AsyncClient(loaded.grpc) as client:
        left = asyncio.create_task(client.predict({"x": ones(1)}))
        await until_waiting(loaded, rows=1)
        left.cancel()
        answered = await client.predict({"x": ones(2)})
    assert answered.step == 10
    assert loaded.metric("understudy_examples_total", operation="predict") == before + 2
    assert loaded.metric("understudy_rejected_total", reason="cancelled") == rejected + 1


async def test_a_full_queue_says_when_to_try_again(loaded: RunningService) -> None:
    async with AsyncClient(loaded.grpc) as client:
        waiting = asyncio.create_task(client.predict({"x": ones(FULL - 1)}))
        await until_waiting(loaded, rows=FULL - 1)
        with pytest.raises(OverloadedError) as caught:
            await client.predict({"x": ones(2)})
        assert caught.value.retry_after_seconds is not None
        assert caught.value.retry_after_seconds > 0
        assert (await client.predict({"x": ones(1)})).step == 10  # the batch is full
        assert (await waiting).step == 10
    assert loaded.metric("understudy_rejected_total", reason="queue_full") == 1


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.usefixtures("front_end")
async def test_requests_that_would_hold_too_much_memory_while_they_wait_are_refused_and_small_ones_of_others_are_not(
    run_service: Run, chief: Chief
) -> None:
    chief.publish_other(10, step_model(10, width=WIDE))
    queue = {"max_queue_mib": 1, "max_queue_examples": 2 * LARGE, "max_batch_size": 2 * LARGE}
    service = run_service({}, {**queue, "max_batch_delay_ms": 200_000.0})
    service.wait_ready()
    large, small = ({"x": np.ones((examples, WIDE), np.float32)} for examples in (LARGE, 1))
    own_connection = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        AsyncClient(service.grpc) as greedy,
        AsyncClient(service.grpc, options=own_connection) as honest,
        httpx.AsyncClient(base_url=f"http://{service.http}", timeout=60) as http,
        asyncio.TaskGroup() as calls,
    ):
        waiting: list[asyncio.Task[Any]] = [calls.create_task(greedy.predict(large))]
        await until_waiting(service, rows=LARGE)
        with pytest.raises(OverloadedError, match="the 1048576 of --max-queue-mib") as caught:
            await greedy.predict(large)
        (outcome,) = [each async for each in greedy.predict_many([large])]
        refused = await http.post("/v2/models/model/infer", json=rest_body(large["x"]))
        waiting += [calls.create_task(greedy.predict(small)) for _ in range(RESERVED_EACH)]
        await until_waiting(service, rows=LARGE + RESERVED_EACH)
        with pytest.raises(OverloadedError, match="--max-queue-mib"):
            await greedy.predict(small)
        waiting += [
            calls.create_task(honest.predict(small)),
            calls.create_task(all_of(honest.predict_many([small]))),
            calls.create_task(http.post("/v2/models/model/infer", json=rest_body(small["x"]))),
        ]
        await until_waiting(service, rows=LARGE + RESERVED_EACH + 3)
        for call in waiting:
            call.cancel()
    assert (caught.value.retry_after_seconds or 0) > 0
    assert isinstance(outcome, OverloadedError)
    assert (refused.status_code, "--max-queue-mib" in refused.text) == (429, True)
    assert service.metric("understudy_rejected_total", reason="queue_full") == 4


def rest_body(x: np.ndarray) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": x.shape, "data": x.ravel().tolist()}]}


async def all_of(outcomes: AsyncIterator[Any]) -> list[Any]:
    return [each async for each in outcomes]


def test_devices_that_do_not_exist_keep_the_service_from_starting(run_service: Run) -> None:
    with pytest.raises(DeviceError, match="GPU:7"):
        run_service(evaluator={"devices": ("GPU:7",)})


def test_a_silent_stream_is_aborted_and_its_version_let_go(loaded: RunningService) -> None:
    over = threading.Event()

    def batches() -> Iterator[tuple[Any, Any]]:
        yield ones(2), np.ones((2, OUTPUTS), np.float32)
        over.wait()

    try:
        with pytest.raises(AbortedError, match=r"\b3(\.0)? s"):
            loaded.client().evaluate(batches())
    finally:
        over.set()
    assert loaded.client().evaluate([(ones(2), np.ones((2, OUTPUTS), np.float32))]).examples == 2


def test_a_damaged_checkpoint_is_told_and_the_serving_version_keeps_serving(run_service: Run, chief: Chief) -> None:
    chief.publish(5)
    service = run_service(evaluator={"load_attempts": 1})
    service.wait_ready()
    client = service.client()
    chief.publish_damaged(6, lambda model: model.write_bytes(model.read_bytes()[:1000]))
    until(lambda: any(version.step == 6 and version.error for version in client.status().versions))
    assert client.predict(ones(1)).step == 5
    assert service.metric("understudy_checkpoint_loads_total", outcome="failed") >= 1
    with pytest.raises(UnderstudyError, match="6"):
        client.evaluate([(ones(2), np.ones((2, OUTPUTS), np.float32))], version=6)
    chief.publish(7)
    until(lambda: client.predict(ones(1)).step == 7)


async def until_waiting(service: RunningService, *, rows: int) -> None:
    await asyncio.to_thread(until, lambda: service.metric("understudy_queue_examples") == rows)


async def until_started(service: RunningService, method: str) -> None:
    await asyncio.to_thread(until, lambda: service.metric("grpc_server_started_total", grpc_method=method) == 1)


async def test_stopping_answers_what_is_under_way_ends_watches_and_refuses_the_rest(
    loaded: RunningService,
) -> None:
    """It comes last in this file, as it ends the service."""
    channel = grpc.aio.insecure_channel(loaded.grpc)
    stub = prediction_pb2_grpc.PredictionServiceStub(channel)
    request = prediction_pb2.PredictRequest(inputs={"x": encode(ones(1))})
    async with AsyncClient(loaded.grpc) as client:
        watch = client.watch_evaluations(give_up_after_seconds=0.1)
        watching = asyncio.ensure_future(anext(watch))
        await until_started(loaded, "WatchEvaluations")
        calls = [stub.Predict(request) for _ in range(6)]
        await until_waiting(loaded, rows=6)
        loaded.start_stopping()
        assert [(await call).step for call in calls] == [10] * 6
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Predict(request)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await channel.close(None)
        await asyncio.to_thread(loaded.join)
        with pytest.raises(UnavailableError):
            await watching
