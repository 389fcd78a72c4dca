"""The handler of evaluations: streams to score, datasets, and the pages and watches of the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from testkit.caller_stream import CallerStream
from testkit.scripted_evaluator import ScriptedEvaluator, ScriptedStream
from understudy.evaluator.evaluator_errors import (
    DrainingError,
    InvalidInputError,
    OverloadedError,
    StreamIdleError,
)
from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord, Signature
from understudy.service.calls.methods import CallContext
from understudy.service.handlers.compare_stream import Spools, StreamedBatches
from understudy.service.handlers.evaluate_stream import BatchStream, StreamLimits
from understudy.service.handlers.evaluation_handler import MAX_COMPARISONS, MAX_EVALUATIONS, EvaluationHandler
from understudy.service.readiness import Notifier, Readiness
from understudy.v1 import evaluation_pb2
from understudy.wire import encode

CALL = CallContext(deadline=None)
SECONDS = 60
LIMITS = StreamLimits(idle_seconds=1.0, total_seconds=60.0)
RECORD = EvaluationRecord(
    sequence=1, step=10, checkpoint_digest="d", dataset="test", outcome=EvaluationOutcome.SCORED, metrics={"loss": 0.1}
)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.fixture
async def recorded() -> Notifier:
    return Notifier()


@pytest.fixture
async def readiness() -> Readiness:
    return Readiness()


@pytest.fixture
async def evaluation(
    evaluator: ScriptedEvaluator, executor: ThreadPoolExecutor, recorded: Notifier, readiness: Readiness
) -> EvaluationHandler:
    return EvaluationHandler(
        evaluator.as_model,
        recorded=recorded,
        readiness=readiness,
        executor=executor,
        limits=LIMITS,
        spools=Spools(None, max_bytes=1 << 20),
    )


class CountingCall(CallContext):
    """A call that counts the messages that are done."""

    def __init__(self) -> None:
        super().__init__(deadline=None)
        self.done: asyncio.Queue[int] = asyncio.Queue()
        self._count = 0

    def message_done(self) -> None:
        self._count += 1
        self.done.put_nowait(self._count)


def batch(rows: int = 1) -> evaluation_pb2.EvaluateRequest:
    ones = encode(np.ones((rows, 1), np.float32))
    return evaluation_pb2.EvaluateRequest(
        batch=evaluation_pb2.EvaluateBatch(inputs={"x": ones}, targets={"targets": ones})
    )


def options() -> evaluation_pb2.EvaluateRequest:
    message = evaluation_pb2.EvaluateRequest()
    message.options.version.step = 7
    message.options.metrics.add(name="AUC", config_json='{"num_thresholds": 5}')
    return message


async def test_a_stream_is_scored_with_its_options(evaluator: ScriptedEvaluator, evaluation: EvaluationHandler) -> None:
    stream = ScriptedStream()
    evaluator.opening.set_result(stream)
    call = asyncio.create_task(evaluation.evaluate(CallerStream(options(), batch(2), batch(3), end=True), CALL))
    for _ in range(2):
        (await stream.arrived.get()).set_result(None)
    score = (await call).score
    assert (score.examples, score.batches, dict(score.metrics)) == (5, 2, {"loss": 0.5})
    assert evaluator.asked["version"] == 7
    (metric,) = evaluator.asked["metrics"]
    assert (metric.name, metric.config) == ("AUC", {"num_thresholds": 5})
    assert stream.closed.is_set()


async def test_the_options_can_be_left_out(evaluator: ScriptedEvaluator, evaluation: EvaluationHandler) -> None:
    stream = ScriptedStream()
    evaluator.opening.set_result(stream)
    call = asyncio.create_task(evaluation.evaluate(CallerStream(batch(4), end=True), CALL))
    (await stream.arrived.get()).set_result(None)
    assert (await call).score.examples == 4
    assert (evaluator.asked["version"], evaluator.asked["metrics"]) == ("serving", [])


async def test_each_message_of_an_evaluation_makes_room_when_it_is_done(
    evaluator: ScriptedEvaluator, evaluation: EvaluationHandler
) -> None:
    """The next one may wait for that room, so a batch makes it as soon as it is scored."""
    stream, requests, counted = ScriptedStream(), CallerStream(options(), batch(), batch()), CountingCall()
    evaluator.opening.set_result(stream)
    call = asyncio.create_task(evaluation.evaluate(requests, counted))
    first, second = [await stream.arrived.get() for _ in range(2)]
    assert await counted.done.get() == 1  # the options
    for number, arrived in ((2, first), (3, second)):
        arrived.set_result(None)
        assert await asyncio.wait_for(counted.done.get(), SECONDS) == number
    requests.end()
    await call


async def test_a_batch_of_a_comparison_makes_room_when_it_is_no_longer_in_memory() -> None:
    request = evaluation_pb2.CompareRequest(batch=batch().batch)
    incoming, counted = BatchStream(CallerStream(request, request), LIMITS), CountingCall()
    batches = StreamedBatches(incoming, asyncio.get_running_loop(), Spools(None, max_bytes=0), counted)
    taking: Any = batches.first(Signature(inputs=(), outputs=()), keep=False)
    taken = [await asyncio.to_thread(next, taking) for _ in range(2)]
    assert counted.done.empty()
    taken.pop()
    assert await asyncio.wait_for(counted.done.get(), SECONDS) == 1
    taken.clear()
    assert await asyncio.wait_for(counted.done.get(), SECONDS) == 2


async def test_no_more_than_two_batches_are_under_way(
    evaluator: ScriptedEvaluator, evaluation: EvaluationHandler
) -> None:
    stream, requests = ScriptedStream(), CallerStream(*[batch()] * 5, end=True)
    evaluator.opening.set_result(stream)
    call = asyncio.create_task(evaluation.evaluate(requests, CALL))
    first, _ = [await stream.arrived.get() for _ in range(2)]
    await asyncio.sleep(0)
    assert requests.taken == 2
    first.set_result(None)
    await stream.arrived.get()
    assert requests.taken == 3
    call.cancel()
    await asyncio.wait([call])
    assert stream.closed.is_set()


async def test_a_full_queue_holds_a_stream_back_and_does_not_end_it(
    evaluator: ScriptedEvaluator, evaluation: EvaluationHandler
) -> None:
    stream = ScriptedStream()
    stream.refusals = [OverloadedError("full", retry_after_seconds=0.01)] * 2
    evaluator.opening.set_result(stream)
    call = asyncio.create_task(evaluation.evaluate(CallerStream(batch(), end=True), CALL))
    (await stream.arrived.get()).set_result(None)
    assert (await call).score.batches == 1


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "without a batch"),
        ([batch(), options()], "got options after the first message"),
        ([options(), options()], "got options after the first message"),
        ([evaluation_pb2.EvaluateRequest()], "got an empty message"),
        ([evaluation_pb2.EvaluateRequest(batch=evaluation_pb2.EvaluateBatch())], "no inputs"),
    ],
)
async def test_a_malformed_stream_is_the_callers_error(
    evaluator: ScriptedEvaluator, evaluation: EvaluationHandler, messages: list[Any], words: str
) -> None:
    stream = ScriptedStream()
    evaluator.opening.set_result(stream)
    with pytest.raises(InvalidInputError, match=words):
        await evaluation.evaluate(CallerStream(*messages, end=True), CALL)


@pytest.mark.parametrize(
    ("shape", "words"),
    [((2**40, 0), "every axis of a batch"), ((4, 0), "every axis of a batch"), ((65_537, 1), "65537 examples")],
)
@pytest.mark.parametrize("part", ["inputs", "targets", "sample_weights"])
async def test_the_examples_of_a_batch_are_bounded(
    evaluator: ScriptedEvaluator, evaluation: EvaluationHandler, shape: tuple[int, int], words: str, part: str
) -> None:
    evaluator.opening.set_result(ScriptedStream())
    message = batch(4)
    rows = encode(np.zeros(65_537 * shape[1], np.uint8).reshape(-1, 1) if shape[0] == 65_537 else np.zeros(0, np.uint8))
    rows.shape[:] = shape
    getattr(message.batch, part)["x"].CopyFrom(rows)
    with pytest.raises(InvalidInputError, match=words):
        await evaluation.evaluate(CallerStream(message, end=True), CALL)


async def test_the_metrics_of_a_request_are_bounded(evaluation: EvaluationHandler) -> None:
    message = options()
    for _ in range(40):
        message.options.metrics.add(name="mae")
    with pytest.raises(InvalidInputError, match="got 41 metrics; at most 32"):
        await evaluation.evaluate(CallerStream(message, batch(), end=True), CALL)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "holds list"),
        ("[" * 60_000, "not JSON"),
        ('{"k": ' + "9" * 5000 + "}", "not JSON"),
        (" " * 70_000, "70000 characters"),
    ],
)
async def test_a_metrics_configuration_must_be_an_object(
    evaluation: EvaluationHandler, config: str, words: str
) -> None:
    message = options()
    message.options.metrics[0].config_json = config
    with pytest.raises(InvalidInputError, match=f"AUC.*{words}"):
        await evaluation.evaluate(CallerStream(message, batch(), end=True), CALL)


async def test_a_silent_stream_is_ended_and_lets_go_of_its_version(
    evaluator: ScriptedEvaluator, evaluation: EvaluationHandler
) -> None:
    stream = ScriptedStream()
    evaluator.opening.set_result(stream)
    with pytest.raises(StreamIdleError, match=r"idle for 1 s"):
        await evaluation.evaluate(CallerStream(options()), CALL)
    assert stream.closed.is_set()


async def test_a_stream_that_is_never_silent_for_long_ends_all_the_same() -> None:
    limits = StreamLimits(idle_seconds=30.0, total_seconds=1.0)
    incoming = BatchStream(CallerStream(*[batch()] * 3), limits)
    assert await incoming.first() is None
    with pytest.raises(StreamIdleError, match=r"longer than 1 s.*--stream-timeout-seconds"):
        await _read_on(incoming)


async def _read_on(incoming: BatchStream[evaluation_pb2.EvaluateRequest]) -> None:
    while await incoming.next_batch() is not None:  # noqa: ASYNC110 - so that the timeout can happen
        await asyncio.sleep(0)


async def test_the_streams_under_way_are_bounded(evaluation: EvaluationHandler) -> None:
    evaluating = [
        asyncio.create_task(evaluation.evaluate(CallerStream(options()), CALL)) for _ in range(MAX_EVALUATIONS)
    ]
    comparing = [asyncio.create_task(evaluation.compare(CallerStream(), CALL)) for _ in range(MAX_COMPARISONS)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="64 Evaluate streams are open"):
        await evaluation.evaluate(CallerStream(options()), CALL)
    with pytest.raises(OverloadedError, match="4 Compare streams are open"):
        await evaluation.compare(CallerStream(), CALL)
    for call in (*evaluating, *comparing):
        call.cancel()
    await asyncio.gather(*evaluating, *comparing, return_exceptions=True)
    with pytest.raises(InvalidInputError, match="without a batch"):
        await evaluation.compare(CallerStream(end=True), CALL)


async def test_a_stream_that_opens_after_its_caller_left_is_closed(
    evaluator: ScriptedEvaluator, evaluation: EvaluationHandler
) -> None:
    evaluator.opening.set_running_or_notify_cancel()  # it can no longer be taken back
    call = asyncio.create_task(evaluation.evaluate(CallerStream(options()), CALL))
    await evaluator.opening_began.wait()
    call.cancel()
    await asyncio.wait([call])
    stream = ScriptedStream()
    evaluator.opening.set_result(stream)
    assert stream.closed.is_set()


async def test_progress_comes_before_the_record(evaluator: ScriptedEvaluator, evaluation: EvaluationHandler) -> None:
    events = evaluation.evaluate_dataset(evaluation_pb2.EvaluateDatasetRequest(dataset="test"), CALL)
    first = asyncio.create_task(anext(events))
    await evaluator.scoring_began.wait()
    evaluator.asked["progress"](64, 300)
    progress = (await first).progress
    assert (progress.examples, progress.total_examples) == (64, 300)
    evaluator.scoring.set_result(RECORD)
    (last,) = [event async for event in events]
    assert last.record.metrics["loss"] == 0.1


async def test_scoring_a_dataset_is_removed_when_its_caller_goes_away(
    evaluator: ScriptedEvaluator, evaluation: EvaluationHandler
) -> None:
    events = evaluation.evaluate_dataset(evaluation_pb2.EvaluateDatasetRequest(dataset="test"), CALL)
    first = asyncio.create_task(anext(events))
    await evaluator.scoring_began.wait()
    taken_back = asyncio.wrap_future(evaluator.scoring)
    first.cancel()
    await asyncio.wait([first])
    await asyncio.wait([taken_back])
    assert evaluator.scoring.cancelled()


async def test_a_watcher_gets_what_there_is_and_what_comes(
    evaluator: ScriptedEvaluator, evaluation: EvaluationHandler, recorded: Notifier
) -> None:
    evaluator.ledger.entries = [replace(RECORD, sequence=number) for number in (1, 2, 3)]
    watch = evaluation.watch_evaluations(evaluation_pb2.WatchEvaluationsRequest(after_sequence=1), CALL)
    assert [(await anext(watch)).evaluation.sequence for _ in range(2)] == [2, 3]
    to_come = asyncio.create_task(anext(watch))
    evaluator.ledger.entries.append(replace(RECORD, sequence=4))
    recorded.notify_threadsafe()
    assert (await to_come).evaluation.sequence == 4
    await watch.aclose()


async def test_a_watcher_is_sent_on_when_the_service_drains(
    evaluator: ScriptedEvaluator, evaluation: EvaluationHandler, recorded: Notifier, readiness: Readiness
) -> None:
    evaluator.ledger.entries = [RECORD]
    watch = evaluation.watch_evaluations(evaluation_pb2.WatchEvaluationsRequest(), CALL)
    await anext(watch)
    waiting = asyncio.create_task(anext(watch))
    readiness.start_draining()
    recorded.notify()
    with pytest.raises(DrainingError, match="resume watching from sequence 1"):
        await waiting


async def test_the_ledger_is_paged_through_without_a_gap(
    evaluator: ScriptedEvaluator, evaluation: EvaluationHandler
) -> None:
    evaluator.ledger.entries = [
        replace(RECORD, sequence=number, dataset="test" if number % 2 else "train") for number in range(1, 12)
    ]
    seen: list[int] = []
    token = ""
    while True:
        request = evaluation_pb2.ListEvaluationsRequest(page_size=2, page_token=token, dataset="test")
        page = await evaluation.list_evaluations(request, CALL)
        seen += [entry.sequence for entry in page.evaluations]
        token = page.next_page_token
        if not token:
            break
    assert seen == [1, 3, 5, 7, 9, 11]


async def test_a_page_token_is_good_for_its_own_filters_only(
    evaluator: ScriptedEvaluator, evaluation: EvaluationHandler
) -> None:
    evaluator.ledger.entries = [replace(RECORD, sequence=number) for number in (1, 2, 3)]
    page = await evaluation.list_evaluations(evaluation_pb2.ListEvaluationsRequest(page_size=1), CALL)
    other = evaluation_pb2.ListEvaluationsRequest(page_size=1, page_token=page.next_page_token, min_step=5)
    with pytest.raises(InvalidInputError, match="other filters"):
        await evaluation.list_evaluations(other, CALL)
