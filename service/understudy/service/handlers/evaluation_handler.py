"""The RPCs of EvaluationService."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import Executor
from contextlib import aclosing
from functools import partial
from typing import Any

from understudy.evaluator.evaluator_errors import DrainingError, InvalidInputError, OverloadedError
from understudy.evaluator.types import EvaluationRecord
from understudy.service.calls.methods import CallContext
from understudy.service.calls.parsing import ZeroCopyMessage
from understudy.service.handlers import messages
from understudy.service.handlers.compare_stream import Spools, compare_stream
from understudy.service.handlers.evaluate_stream import ConcurrencyLimit, StreamLimits, score_stream
from understudy.service.handlers.paging import DEFAULT_PAGE_SIZE, Place, decode_token, encode_token, fitting, page_size
from understudy.service.handlers.replay_stream import Answer, replay_stream
from understudy.service.readiness import Notifier, Readiness, ReadinessState
from understudy.service.served_model import ServedModel, abandon, begun
from understudy.v1 import evaluation_pb2

WATCH_PAGE_SIZE = 256
WATCH_POLL_SECONDS = 5.0
"""How often to poll the ledger without a notification."""

MAX_EVALUATIONS = 64
"""The limit of concurrent Evaluate streams. Each holds a handle, and two batches at most."""
MAX_COMPARISONS = 4
"""The limit of concurrent Compare streams. Each occupies a thread; one more would wait for an unbounded time."""
MAX_REPLAYS = 16
"""The limit of concurrent Replay streams. Each holds a handle, and one batch at most."""
MAX_READING_EXAMPLES = 2
"""The limit of concurrent GetExamples calls. Each occupies a thread while it reads a dataset."""


class EvaluationHandler:
    """Scores versions and reads the ledger. Belongs to the event loop's thread.

    Args:
        model: The served model, whose evaluator scores versions and keeps the ledger.
        recorded: Notifies of new entries of the ledger, and of the start of draining.
        readiness: The state of the service.
        executor: Runs blocking calls.
        limits: The limits of Evaluate, Compare and Replay streams.
        spools: Store the batches of comparisons.
        records: Whether the scores of EvaluateDataset become entries of the ledger.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        recorded: Notifier,
        readiness: Readiness,
        executor: Executor,
        limits: StreamLimits,
        spools: Spools,
        records: bool = True,
    ) -> None:
        self._model = model
        self._evaluator = model.evaluator
        self._recorded = recorded
        self._readiness = readiness
        self._executor = executor
        self._limits = limits
        self._spools = spools
        self._records = records
        self._evaluations = ConcurrencyLimit(
            MAX_EVALUATIONS, "Evaluate streams", lambda limits: limits.max_evaluate_streams
        )
        self._replays = ConcurrencyLimit(MAX_REPLAYS, "Replay streams", lambda limits: limits.max_evaluate_streams)
        self._reading_examples = 0
        self._comparisons = ConcurrencyLimit(
            MAX_COMPARISONS, "Compare streams", lambda limits: limits.max_compare_streams
        )

    async def evaluate(
        self, requests: AsyncIterator[evaluation_pb2.EvaluateRequest | ZeroCopyMessage], call: CallContext
    ) -> evaluation_pb2.EvaluateResponse:
        """Score one version on the batches of a stream."""
        with self._evaluations.acquired(call.caller):
            result = await score_stream(self._model, requests, call, executor=self._executor, limits=self._limits)
        return evaluation_pb2.EvaluateResponse(score=messages.score(result))

    async def compare(
        self, requests: AsyncIterator[evaluation_pb2.CompareRequest], call: CallContext
    ) -> evaluation_pb2.CompareResponse:
        """Score versions on the same batches and compare each with the first."""
        with self._comparisons.acquired(call.caller):
            comparison = await compare_stream(
                self._model, requests, call, executor=self._executor, limits=self._limits, spools=self._spools
            )
        return messages.compare_response(comparison)

    async def replay(
        self, requests: AsyncIterator[evaluation_pb2.ReplayRequest | ZeroCopyMessage], call: CallContext
    ) -> AsyncGenerator[Answer, None]:
        """Answer batches with one version, apart from live requests."""
        answers = replay_stream(self._model, requests, call, limits=self._limits)
        with self._replays.acquired(call.caller):
            async with aclosing(answers):
                async for answer in answers:
                    yield answer

    async def evaluate_dataset(
        self, request: evaluation_pb2.EvaluateDatasetRequest, call: CallContext
    ) -> AsyncGenerator[evaluation_pb2.EvaluateDatasetResponse, None]:
        """Score one version on a dataset of the server; yield the latest progress, and finally the record."""
        self._model.check_optional_name(request.model_name)
        if not request.dataset:
            raise InvalidInputError("the request names no dataset; GetModelMetadata lists the datasets")
        progress = _Progress()
        score = partial(
            self._evaluator.score_dataset,
            request.dataset,
            version=messages.version(request.version),
            deadline=call.deadline,
            progress=progress.report,
            record=self._records,
            rescore=request.rescore,
        )
        scoring = await begun(self._executor, score)
        scoring.add_done_callback(lambda _: progress.changed.notify())
        try:
            async for event in progress.events_until(scoring):
                yield evaluation_pb2.EvaluateDatasetResponse(progress=event)
            yield evaluation_pb2.EvaluateDatasetResponse(record=messages.record(await scoring))
        finally:
            abandon(scoring)

    async def list_evaluations(
        self, request: evaluation_pb2.ListEvaluationsRequest, call: CallContext
    ) -> evaluation_pb2.ListEvaluationsResponse:
        """Return one page of the ledger."""
        del call
        self._model.check_optional_name(request.model_name)
        size = page_size(request.page_size if request.HasField("page_size") else None)
        filters = _filters_of(request)
        entries = await self._page(
            await self._place("page_token", decode_token(request.page_token, filters)),
            "page_token",
            limit=size + 1,
            dataset=request.dataset or None,
            min_step=request.min_step if request.HasField("min_step") else None,
            max_step=request.max_step if request.HasField("max_step") else None,
            outcome=messages.outcome(request.outcome) if request.HasField("outcome") else None,
        )
        page = await asyncio.get_running_loop().run_in_executor(  # with many slices it takes long
            self._executor, lambda: fitting(map(messages.record, entries[:size]))
        )
        token = ""
        if len(entries) > len(page):
            last = Place(sequence=page[-1].sequence, recorded_at=page[-1].recorded_at)
            token = encode_token(last, filters)
        return evaluation_pb2.ListEvaluationsResponse(evaluations=page, next_page_token=token)

    async def watch_evaluations(
        self, request: evaluation_pb2.WatchEvaluationsRequest, call: CallContext
    ) -> AsyncGenerator[evaluation_pb2.WatchEvaluationsResponse, None]:
        """Yield every existing and new entry after a sequence number, until the service drains."""
        del call
        self._model.check_optional_name(request.model_name)
        after = request.after_sequence  # 0, and so before the first entry, if absent
        if after < 0:
            raise InvalidInputError(f"after_sequence is {after}; give the last sequence seen, or leave it out for all")
        if request.HasField("after_recorded_at"):
            await self._place("after_sequence", Place(sequence=after, recorded_at=request.after_recorded_at))
        while True:
            recorded = self._recorded.subscribe()
            entries = await self._page(after, "after_sequence", limit=WATCH_PAGE_SIZE)
            for entry in entries:
                yield evaluation_pb2.WatchEvaluationsResponse(evaluation=messages.record(entry))
                after = entry.sequence
            if entries:
                continue
            if self._readiness.state is ReadinessState.DRAINING:
                raise DrainingError(f"{ReadinessState.DRAINING.value}; resume watching from sequence {after}")
            await _wait(recorded, WATCH_POLL_SECONDS)

    async def get_evaluation_tables(
        self, request: evaluation_pb2.GetEvaluationTablesRequest, call: CallContext
    ) -> evaluation_pb2.GetEvaluationTablesResponse:
        """Return the tables of an evaluation."""
        del call
        self._model.check_optional_name(request.model_name)
        version = messages.version(request.version)
        read = partial(self._evaluator.tables, request.dataset, version=version)
        return messages.evaluation_tables(await asyncio.get_running_loop().run_in_executor(self._executor, read))

    async def get_examples(
        self, request: evaluation_pb2.GetExamplesRequest, call: CallContext
    ) -> evaluation_pb2.GetExamplesResponse:
        """Return the hardest or the changed examples of a dataset."""
        self._model.check_optional_name(request.model_name)
        cancellation = _CancellationToken(call.deadline)
        read = partial(
            self._evaluator.examples,
            messages.example_kind(request.kind),
            request.dataset,
            version=messages.version(request.version),
            baseline=messages.version(request.baseline),
            limit=request.max_examples if request.HasField("max_examples") else DEFAULT_PAGE_SIZE,
            is_wanted=cancellation.is_wanted,
        )
        if self._reading_examples >= MAX_READING_EXAMPLES:
            raise OverloadedError(f"{MAX_READING_EXAMPLES} calls read examples, which is the limit; try again later")
        self._reading_examples += 1
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._executor, read)
        finally:
            self._reading_examples -= 1
            cancellation.cancel()
        return messages.example_list(found)

    async def _place(self, field: str, place: Place | None) -> int:
        """Return the sequence number of a place that a field gives; 0 for none, the place before the first entry.

        Raises:
            InvalidInputError: The entry with that number, unless it was removed, is another one.
        """
        if place is None:
            return 0
        read = partial(self._evaluator.ledger.page, after_sequence=place.sequence - 1, limit=1)
        for entry in await asyncio.get_running_loop().run_in_executor(self._executor, read):
            if entry.sequence == place.sequence and messages.timestamp(entry.recorded_at) != place.recorded_at:
                raise InvalidInputError(
                    f"{field} goes on after entry {entry.sequence}, which is another one now: the ledger was restored "
                    "from a backup or begun anew; start with its first entry"
                )
        return place.sequence

    async def _page(self, after: int, field: str, **filters: Any) -> list[EvaluationRecord]:
        """Return entries after a sequence number, which a field of the request gives."""
        ledger = self._evaluator.ledger

        def read() -> list[EvaluationRecord]:
            if after > (last := ledger.last_sequence):
                raise InvalidInputError(
                    f"{field} goes on after entry {after}, and the newest entry of the ledger is {last}: it was "
                    "restored from a backup or begun anew, so entries with the numbers seen are others now; start with "
                    "its first entry"
                )
            return ledger.page(after_sequence=after, **filters)

        return await asyncio.get_running_loop().run_in_executor(self._executor, read)


class _CancellationToken:
    """Cancels the work of a call when the call or its deadline has ended. Thread-safe."""

    def __init__(self, deadline: float | None) -> None:
        self._deadline = deadline
        self._cancelled = False

    def is_wanted(self) -> bool:
        return not self._cancelled and (self._deadline is None or time.monotonic() < self._deadline)

    def cancel(self) -> None:
        self._cancelled = True


class _Progress:
    """The latest progress of one scoring, with notification of changes."""

    def __init__(self) -> None:
        self.changed = Notifier()
        self._latest: evaluation_pb2.EvaluationProgress | None = None

    def report(self, examples: int, total: int | None) -> None:
        """Record progress, on any thread."""
        self._latest = evaluation_pb2.EvaluationProgress(examples=examples, total_examples=total)
        self.changed.notify_threadsafe()

    async def events_until(
        self, scoring: asyncio.Future[EvaluationRecord]
    ) -> AsyncIterator[evaluation_pb2.EvaluationProgress]:
        sent = None
        while not scoring.done():
            changed = self.changed.subscribe()
            latest = self._latest
            if latest is not None and latest is not sent:
                yield latest
                sent = latest
            elif not scoring.done():
                await changed.wait()


def _filters_of(request: evaluation_pb2.ListEvaluationsRequest) -> bytes:
    filters = evaluation_pb2.ListEvaluationsRequest()
    filters.CopyFrom(request)
    filters.ClearField("page_size")
    filters.ClearField("page_token")
    return filters.SerializeToString(deterministic=True)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
