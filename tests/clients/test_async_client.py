"""The asyncio client against the same peer."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest

from testkit.peer_server import STEP, Failure, Peer, Script, scored_inputs
from understudy import clients
from understudy.clients import AsyncClient, InvalidArgumentError, PredictResult, Progress
from understudy.wire import decode

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
PATIENCE_SECONDS = 60
PATIENCE_CALLS = 1000

Inputs = dict[str, npt.NDArray[np.float32]]


async def test_many_tasks_predict_at_once_and_ask_for_the_name_of_a_lone_array_once(
    async_client: AsyncClient, script: Script
) -> None:
    first = await async_client.predict(ROWS)
    others = await asyncio.gather(*(async_client.predict(ROWS + index) for index in range(20)))

    np.testing.assert_array_equal(first.output, 2 * ROWS)
    assert [result.output[0, 0] for result in others] == [2 * index for index in range(20)]
    assert script.calls == {"GetModelMetadata": 1, "Predict": 21}


async def test_the_name_of_a_lone_array_is_asked_for_again_after_a_refusal(
    async_client: AsyncClient, script: Script
) -> None:
    await async_client.predict(ROWS)
    script.input_names = ("picture",)
    with pytest.raises(InvalidArgumentError, match="got image; expected picture"):
        await async_client.predict(ROWS)

    assert set((await async_client.predict(ROWS)).outputs) == {"doubled_picture"}


async def test_a_list_goes_to_several_inputs_in_the_models_order(async_client: AsyncClient, script: Script) -> None:
    script.input_names = ("left", "right")

    result = await async_client.predict([ROWS, ROWS + 1])

    np.testing.assert_array_equal(result.outputs["doubled_right"], 2 * ROWS + 2)
    assert script.calls == {"GetModelMetadata": 1, "Predict": 1}


async def test_lists_of_numbers_get_the_models_dtype(async_client: AsyncClient, script: Script) -> None:
    rows = {"image": ROWS.tolist()}

    results = [await async_client.predict(rows), *[streamed async for streamed in async_client.predict_many([rows])]]
    await async_client.evaluate([(rows, 2 * ROWS)])

    assert results == [await async_client.predict(ROWS)] * 2
    assert script.calls["GetModelMetadata"] == 1
    assert [decode(tensor).dtype for tensor in scored_inputs(script)] == [np.float32]


async def test_errors_are_typed_and_carry_what_the_server_says(async_client: AsyncClient, script: Script) -> None:
    script.failures.append(Failure(code=grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after_seconds=0.25))

    with pytest.raises(clients.OverloadedError, match="told to fail") as failure:
        await async_client.predict({"image": ROWS})

    assert failure.value.retry_after_seconds == 0.25


async def test_a_call_ends_at_its_deadline(async_client: AsyncClient, script: Script) -> None:
    script.gate.clear()

    with pytest.raises(clients.DeadlineExceededError):
        await async_client.predict({"image": ROWS}, timeout_seconds=0.1)


async def test_a_cancelled_task_is_cancelled_in_asyncio_s_own_way(async_client: AsyncClient, script: Script) -> None:
    script.gate.clear()
    task = asyncio.create_task(async_client.predict({"image": ROWS}))
    assert await asyncio.to_thread(script.entered.wait, PATIENCE_SECONDS)

    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    script.gate.set()
    assert (await async_client.status()).serving_step == STEP
    assert script.calls["Predict"] == 1


async def test_what_may_be_repeated_is_tried_again_and_a_promotion_is_not(
    async_client: AsyncClient, script: Script
) -> None:
    script.failures.extend([Failure(code=grpc.StatusCode.UNAVAILABLE)] * 2)
    assert (await async_client.predict({"image": ROWS})).step == STEP

    script.failures.append(Failure(code=grpc.StatusCode.UNAVAILABLE))
    with pytest.raises(clients.UnavailableError):
        await async_client.promote("latest")

    assert (script.calls["Predict"], script.calls["Promote"]) == (3, 1)


async def test_watching_resumes_after_a_server_cancelled_it(async_client: AsyncClient, script: Script) -> None:
    script.failures.append(Failure(code=grpc.StatusCode.CANCELLED))
    script.record(1)

    async with aclosing(async_client.watch_evaluations()) as watch:
        assert (await anext(watch)).step == 1
    await async_client.close()


async def test_watching_ends_when_the_client_is_closed_before_it_resumes(peer: Peer, script: Script) -> None:
    script.failures.append(Failure(code=grpc.StatusCode.UNAVAILABLE))
    client = AsyncClient(peer.target)
    watching = asyncio.ensure_future(anext(client.watch_evaluations()))
    assert await asyncio.to_thread(script.entered.wait, PATIENCE_SECONDS)
    await asyncio.sleep(0)
    await client.close()

    with pytest.raises((clients.CancelledError, asyncio.CancelledError)):
        await watching


async def test_several_servers_take_turns() -> None:
    with Peer() as one, Peer() as other:
        async with AsyncClient([one.target, other.target]) as client:
            for _ in range(PATIENCE_CALLS):
                await client.predict({"image": ROWS})
                if one.script.calls["Predict"] and other.script.calls["Predict"]:
                    break
    assert one.script.calls["Predict"]
    assert other.script.calls["Predict"]


async def counted(count: int) -> AsyncIterator[Inputs]:
    for value in range(count):
        yield {"image": np.full((2, 4), value, np.float32)}


async def test_many_predictions_keep_their_order(async_client: AsyncClient) -> None:
    synchronous = [{"image": np.full((2, 4), value, np.float32)} for value in range(100)]

    for items in (counted(100), synchronous):
        results = [result async for result in async_client.predict_many(items)]
        assert [prediction(result).output[0, 0] for result in results] == [2 * value for value in range(100)]


@pytest.mark.parametrize(
    ("items", "in_flight", "complaint"),
    [({"image": ROWS}, 1, "items is one mapping, of image"), ([ROWS], 0, "in_flight is 0; at least 1 was expected")],
)
async def test_items_or_a_limit_that_no_server_could_take_are_refused(
    async_client: AsyncClient, items: Any, in_flight: int, complaint: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=complaint):
        await anext(async_client.predict_many(items, in_flight=in_flight))


async def test_one_bad_item_fails_alone(async_client: AsyncClient) -> None:
    items: list[Any] = [ROWS, {"picture": ROWS}, {"image": ROWS.astype(complex)}, ROWS]

    first, refused, unsent, last = [result async for result in async_client.predict_many(items)]

    assert prediction(first).step == prediction(last).step == STEP
    assert isinstance(refused, InvalidArgumentError)
    assert isinstance(unsent, InvalidArgumentError)


async def test_items_are_drawn_no_further_ahead_than_allowed(async_client: AsyncClient) -> None:
    drawn = 0

    async def items() -> AsyncIterator[Inputs]:
        nonlocal drawn
        async for item in counted(50):
            drawn += 1
            yield item

    taken = 0
    async for _ in async_client.predict_many(items(), in_flight=4):
        taken += 1
        assert drawn <= taken + 4 + 1
    assert drawn == taken == 50


async def test_a_stream_left_early_leaves_nothing_running(async_client: AsyncClient) -> None:
    async with aclosing(async_client.predict_many(counted(1_000_000), in_flight=2)) as results:
        async for _ in results:
            break

    assert [task for task in asyncio.all_tasks() if "_write_requests" in str(task.get_coro())] == []
    assert (await async_client.predict({"image": ROWS})).step == STEP


async def test_what_the_items_raise_is_raised_after_the_results_before_it(async_client: AsyncClient) -> None:
    async def items() -> AsyncIterator[Inputs]:
        yield {"image": ROWS}
        raise LookupError("no more examples")

    results = async_client.predict_many(items())

    assert prediction(await anext(results)).step == STEP
    with pytest.raises(LookupError, match="no more examples"):
        await anext(results)


async def test_a_stream_whose_call_fails_does_not_wait_for_its_items(async_client: AsyncClient, script: Script) -> None:
    script.failures.append(Failure(code=grpc.StatusCode.FAILED_PRECONDITION, message="not now"))

    async def items() -> AsyncIterator[Inputs]:
        await asyncio.Event().wait()
        yield {}

    with pytest.raises(clients.FailedPreconditionError, match="not now"):
        async with asyncio.timeout(PATIENCE_SECONDS):
            await anext(async_client.predict_many(items()))


def endless(*, rows: int) -> Iterator[tuple[Any, ...]]:
    batch = np.ones((rows, 4), np.float32)
    while True:
        yield {"image": batch}, batch


@pytest.mark.parametrize("rows", [1, 1000, 100_000])
async def test_the_server_s_status_survives_the_write_it_interrupts(
    async_client: AsyncClient, script: Script, rows: int
) -> None:
    for _ in range(20):
        script.failures.append(Failure(code=grpc.StatusCode.NOT_FOUND, message="no such step"))
        with pytest.raises(clients.NotFoundError, match="no such step"):
            await async_client.evaluate(endless(rows=rows))
        script.failures.append(Failure(code=grpc.StatusCode.NOT_FOUND, message="no such step"))
        with pytest.raises(clients.NotFoundError, match="no such step"):
            await anext(async_client.predict_many(inputs for inputs, _ in endless(rows=rows)))


def batches(count: int) -> Iterator[tuple[Any, ...]]:
    for index in range(count):
        x = np.full((2, 4), index, np.float32)
        yield x, 2 * x + 1


async def test_batches_are_scored_whether_they_come_synchronously_or_not(async_client: AsyncClient) -> None:
    async def asynchronous() -> AsyncIterator[tuple[Any, ...]]:
        for batch in batches(3):
            yield batch

    for source in (batches(3), asynchronous()):
        result = await async_client.evaluate(source, version="serving", metrics=["accuracy"])
        assert (result.examples, result.batches, result.metrics) == (6, 3, {"loss": 1.0})


async def test_what_the_batches_raise_reaches_the_caller(async_client: AsyncClient) -> None:
    def damaged() -> Iterator[tuple[Any, ...]]:
        yield from batches(2)
        raise LookupError("the file ends here")

    with pytest.raises(LookupError, match="the file ends here"):
        await async_client.evaluate(damaged())


async def test_a_refused_stream_says_why_however_much_there_is_to_send(
    async_client: AsyncClient, script: Script
) -> None:
    script.failures.append(Failure(code=grpc.StatusCode.NOT_FOUND, message="no such step"))

    with pytest.raises(clients.NotFoundError, match="no such step"):
        await async_client.evaluate(endless(rows=3))
    with pytest.raises(InvalidArgumentError, match="a stream without a batch"):
        await async_client.evaluate([])


async def test_a_dataset_of_the_server_is_scored_with_progress(async_client: AsyncClient) -> None:
    seen: list[Progress] = []

    evaluation = await async_client.evaluate_dataset("test", on_progress=seen.append)

    assert [progress.total_examples for progress in seen] == [20, 20]
    assert (evaluation.step, evaluation.metrics) == (STEP, {"loss": 0.5})


async def test_watching_misses_and_repeats_nothing_over_breaks(async_client: AsyncClient, script: Script) -> None:
    script.watch_breaks_after.extend([2, 0, 1])
    for step in range(1, 6):
        script.record(step)

    async with aclosing(async_client.watch_evaluations(after=1)) as watch:
        seen = [(await anext(watch)).sequence for _ in range(4)]

    assert seen == [2, 3, 4, 5]


async def test_everything_else_is_told_in_plain_objects(async_client: AsyncClient, script: Script) -> None:
    for step in range(1, 6):
        script.record(step)

    assert [each.step async for each in async_client.list_evaluations()] == [1, 2, 3, 4, 5]
    assert (await async_client.metadata()).model_name == "doubler"
    assert (await async_client.status()).serving_step == STEP
    assert [checkpoint.step for checkpoint in await async_client.checkpoints()] == [STEP]
    assert (await async_client.promote(40)).pinned_step == 40
    assert (await async_client.unpin()).pinned_step is None
    assert (await async_client.roll_back()).previous_step == STEP
    assert await async_client.metrics() == "understudy_replicas 2\n"
    assert await async_client.is_serving()


def prediction(outcome: PredictResult | clients.UnderstudyError) -> PredictResult:
    assert isinstance(outcome, PredictResult)
    return outcome


def test_a_client_connects_in_the_loop_of_its_first_call_and_anew_in_the_next_one(peer: Peer) -> None:
    client = AsyncClient(peer.target, timeout_seconds=PATIENCE_SECONDS)

    async def step() -> int:
        return (await client.predict({"image": ROWS})).step

    assert [asyncio.run(step()) for _ in range(2)] == [STEP, STEP]
    asyncio.run(client.close())


async def test_a_loop_beside_the_one_that_uses_a_client_is_told_to_create_its_own(async_client: AsyncClient) -> None:
    await async_client.status()

    with pytest.raises(RuntimeError, match=r"used by another event loop.*; create one client in each event loop"):
        await asyncio.to_thread(lambda: asyncio.run(async_client.status()))


async def test_calls_of_a_closed_client_say_so(peer: Peer) -> None:
    client = AsyncClient(peer.target)
    await client.close()

    for call in (client.predict({"image": ROWS}), client.evaluate([(ROWS, ROWS)]), client.evaluate_dataset("test")):
        with pytest.raises(clients.CancelledError, match="the client was closed; create another one"):
            await call
    for stream in (client.predict_many([{"image": ROWS}]), client.list_evaluations(), client.watch_evaluations()):
        with pytest.raises(clients.CancelledError, match="the client was closed; create another one"):
            await anext(stream)


@pytest.mark.parametrize("call", ["predict", "predict_many", "evaluate"])
async def test_closing_a_client_ends_its_calls_with_its_own_error(peer: Peer, script: Script, call: str) -> None:
    script.gate.clear()
    client = AsyncClient(peer.target, timeout_seconds=PATIENCE_SECONDS, stream_timeout_seconds=PATIENCE_SECONDS)
    begun: dict[str, Any] = {
        "predict": lambda: client.predict({"image": ROWS}),
        "predict_many": lambda: anext(client.predict_many([{"image": ROWS}])),
        "evaluate": lambda: client.evaluate([({"image": ROWS}, ROWS)]),
    }
    calling = asyncio.ensure_future(begun[call]())
    assert await asyncio.to_thread(script.entered.wait, PATIENCE_SECONDS)

    await client.close()

    with pytest.raises(clients.CancelledError, match="closed"):
        await calling


async def test_closing_a_client_ends_a_stream_that_waits_for_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        client = AsyncClient(f"127.0.0.1:{silent.getsockname()[1]}")
        scoring = asyncio.ensure_future(client.evaluate([({"image": ROWS}, ROWS)]))
        accepted, _ = await asyncio.get_running_loop().sock_accept(silent)
        with accepted:
            await client.close()

            with pytest.raises(clients.CancelledError, match="closed"):
                await asyncio.wait_for(scoring, PATIENCE_SECONDS)


def test_clients_are_not_pickled(peer: Peer) -> None:
    with pytest.raises(TypeError, match=r"AsyncClient holds connections.*; create one in each process"):
        pickle.dumps(AsyncClient(peer.target))
