"""Predictions of any protocol, alone and in streams, and the RPCs of PredictionService.

Streams are pipelined and answered in order, and the requests fail independently.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Final, Generic, Protocol, TypeVar

from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.types import Arrays, Outcome, Prediction, Version
from understudy.service.calls.methods import NO_COALESCING, CallContext, CoalescingOptions
from understudy.service.calls.served_call import owner_of
from understudy.service.calls.status import Failure, failure_of
from understudy.service.handlers.predict_codec import PredictRequest
from understudy.service.served_model import ServedModel, abandon


class PredictionSampler(Protocol):
    """Follows a sample of the predictions. Belongs to the event loop's thread; must be quick and must not raise."""

    def wants_next(self) -> bool:
        """Return whether the next prediction is in the sample."""

    def follow(self, future: asyncio.Future[Prediction], inputs: Arrays, call: CallContext) -> None:
        """Take a prediction that has begun, whose outcome the future receives."""


class Predictor:
    """Starts predictions.

    One wake-up of the event loop delivers all outcomes of a batch. Requests that arrive in one loop iteration are
    dispatched together, so that they share a batch, which runs on the loop's thread if it is brief.

    A transport may pass on simultaneous requests one by one. So while several requests arrive at a time, dispatch waits
    some loop iterations for the rest; an idle iteration takes microseconds. A single request after a single request
    does not wait.

    Belongs to the event loop on which it is first used.

    Args:
        evaluator: Runs the predictions.
        coalescing: How long requests wait for each other.
        samplers: Each follows a sample of the predictions.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        coalescing: CoalescingOptions = NO_COALESCING,
        samplers: Sequence[PredictionSampler] = (),
    ) -> None:
        self._evaluator = evaluator
        self._coalescing = coalescing
        self._samplers = tuple(samplers)
        self._sink: EventLoopSink | None = None
        self._requests = 0
        self._requests_before = 0
        self._examples = 0
        self._loop_turns = 0

    def begin(
        self, inputs: Arrays, call: CallContext, *, version: Version = "serving", deadline: float | None = None
    ) -> asyncio.Future[Prediction]:
        """Start a prediction for a call; cancelling the future cancels it unless it has reached a device.

        The other arguments, the errors raised at once and the exceptions of the future are those of
        `Evaluator.predict_for`.
        """
        if self._sink is None:
            self._sink = EventLoopSink(asyncio.get_running_loop())
        inputs = _copied_if_small(inputs)
        future = self._sink.new_future() if call.trace is None else call.trace.new_future(self._sink.loop)
        self._evaluator.predict_for(
            future,
            self._sink,
            inputs,
            version=version,
            deadline=deadline,
            caller=call.caller_key,
            dispatch=False,
        )
        self._requests += 1
        self._examples += len(next(iter(inputs.values())))
        if self._requests == 1:
            self._loop_turns = 0
            future.get_loop().call_soon(self._dispatch_or_coalesce, future.get_loop())
        for sampler in self._samplers:
            if sampler.wants_next():
                sampler.follow(future, inputs, call)
        return future

    def _dispatch_or_coalesce(self, loop: asyncio.AbstractEventLoop) -> None:
        in_company = max(self._requests, self._requests_before) > 1
        if in_company and self._examples < self._coalescing.examples and self._loop_turns < self._coalescing.loop_turns:
            self._loop_turns += 1
            loop.call_soon(self._dispatch_or_coalesce, loop)
            return
        self._requests, self._requests_before, self._examples = 0, self._requests, 0
        self._evaluator.dispatch()


_BRIEF_BYTES: Final = 1 << 16


def _copied_if_small(inputs: Arrays) -> Arrays:
    """Return inputs; copies of them if they are small views of a large message, which would wait with them."""
    kept = sum({id(owner): size for owner, size in map(owner_of, inputs.values())}.values())
    if kept <= _BRIEF_BYTES or kept <= 2 * sum(array.nbytes for array in inputs.values()):
        return inputs
    return {name: array.copy() for name, array in inputs.items()}


class EventLoopSink:
    """Resolves futures of one event loop, as an `understudy.evaluator.types.ResultSink`.

    Create it on the loop's thread.

    Args:
        loop: The event loop.

    Attributes:
        loop: The event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._thread = threading.get_ident()
        self.new_future = loop.create_future

    def begin(self, token: asyncio.Future[Prediction]) -> bool:
        """See `ResultSink`. A future that is cancelled later gets no outcome, though it is computed."""
        return not token.cancelled()

    def is_cancelled(self, token: asyncio.Future[Prediction]) -> bool:
        """See `ResultSink`."""
        return token.cancelled()

    def deliver(self, outcomes: Sequence[tuple[asyncio.Future[Prediction], Outcome]]) -> None:
        """See `ResultSink`."""
        if threading.get_ident() == self._thread:
            _resolve(outcomes)
            return
        with suppress(RuntimeError):  # the loop is closed, so nothing waits
            self.loop.call_soon_threadsafe(_resolve, outcomes)


def _resolve(outcomes: Sequence[tuple[asyncio.Future[Prediction], Outcome]]) -> None:
    for future, outcome in outcomes:
        if future.done():
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


class PredictionHandler:
    """Runs the model on examples. Belongs to the event loop's thread.

    Args:
        model: The served model.
        predictor: Starts predictions.
        stream_depth: The largest number of unanswered requests of one stream.
    """

    def __init__(self, model: ServedModel, predictor: Predictor, *, stream_depth: int) -> None:
        self._model = model
        self._predictor = predictor
        self._stream_depth = stream_depth

    async def predict(self, request: PredictRequest, call: CallContext) -> Prediction:
        """Predict one batch; cancel it if the caller disconnects before it reaches a device."""
        begun = self._begin(request, call)
        del request  # its message does not wait with the call
        return await begun

    def predict_stream(
        self, requests: AsyncIterator[PredictRequest], call: CallContext
    ) -> AsyncGenerator[Prediction | Failure, None]:
        """Predict every request of a stream; responses are in order, and a failure ends its own request only."""
        protocol = StreamProtocol[PredictRequest, None, Prediction | Failure](
            note=lambda _: None,
            begin=lambda request: self._begin_next(request, call),
            answer=lambda _, prediction: prediction,
            fail=lambda _, failure: failure,
        )
        return predict_in_order(requests, protocol, depth=self._stream_depth)

    def check_admission(self, call: CallContext) -> None:
        """Refuse a prediction before it is parsed, if the refusal is certain; see `Evaluator.check_admission`."""
        self._model.evaluator.check_admission(call.deadline, caller=call.caller_key)

    def _begin_next(self, request: PredictRequest, call: CallContext) -> asyncio.Future[Prediction]:
        self.check_admission(call)  # each message of a stream is a request
        return self._begin(request, call)

    def _begin(self, request: PredictRequest, call: CallContext) -> asyncio.Future[Prediction]:
        if request.model_name:
            self._model.check_name(request.model_name)
        inputs, version = request.arguments()
        return self._predictor.begin(inputs, call, version=version, deadline=call.deadline)


_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Note = TypeVar("_Note")
_Begun = asyncio.Future[Prediction] | Failure


class StreamProtocol(Generic[_Request, _Note, _Response]):
    """Converts a protocol's messages into predictions and back.

    Args:
        note: Returns what the response needs from a request, so that the request itself can be released.
        begin: Starts a prediction; its error is the request's failure.
        answer: Builds the response; its error is the request's failure too.
        fail: Builds the response that reports a failure; never raises.
    """

    def __init__(
        self,
        *,
        note: Callable[[_Request], _Note],
        begin: Callable[[_Request], asyncio.Future[Prediction]],
        answer: Callable[[_Note, Prediction], _Response],
        fail: Callable[[_Note, Failure], _Response],
    ) -> None:
        self.note = note
        self._begin = begin
        self._answer = answer
        self._fail = fail

    def begin(self, request: _Request) -> _Begun:
        """Start a prediction, or return its failure."""
        try:
            return self._begin(request)
        except Exception as error:  # noqa: BLE001 - failure_of logs unexpected errors
            return failure_of(error)

    async def response(self, note: _Note, begun: _Begun) -> _Response:
        """Wait for a prediction, and return the response for it or its failure."""
        if isinstance(begun, Failure):
            return self._fail(note, begun)
        try:
            return self._answer(note, await begun)
        except Exception as error:  # noqa: BLE001 - failure_of logs unexpected errors
            return self._fail(note, failure_of(error))


async def predict_in_order(
    requests: AsyncIterator[_Request], protocol: StreamProtocol[_Request, _Note, _Response], *, depth: int
) -> AsyncGenerator[_Response, None]:
    """Answer every request in order, and read ahead while at most ``depth`` are unanswered."""
    pipeline: _Pipeline[_Note] = _Pipeline(depth)

    async def read() -> None:
        try:
            async for request in requests:
                pipeline.add(protocol.note(request), protocol.begin(request))
                del request
                if pipeline.is_full:
                    await pipeline.wait_for_room()
        finally:
            pipeline.end()

    reader = asyncio.create_task(read())
    try:
        while pipeline or await pipeline.wait_for_more():
            note, begun = pipeline.first
            yield await protocol.response(note, begun)
            pipeline.drop_first()
        await reader
    finally:
        reader.cancel()
        pipeline.cancel()


class _Pipeline(Generic[_Note]):
    """The unanswered requests of one stream, in order.

    Args:
        depth: The largest number of requests.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._begun: deque[tuple[_Note, _Begun]] = deque()
        self._more = asyncio.Event()
        self._room = asyncio.Event()
        self._ended = False

    def __bool__(self) -> bool:
        return bool(self._begun)

    @property
    def is_full(self) -> bool:
        return len(self._begun) >= self._depth

    @property
    def first(self) -> tuple[_Note, _Begun]:
        return self._begun[0]

    def add(self, note: _Note, begun: _Begun) -> None:
        self._begun.append((note, begun))
        self._more.set()

    def drop_first(self) -> None:
        self._begun.popleft()
        self._room.set()

    def end(self) -> None:
        """Mark the end: no more requests will be added."""
        self._ended = True
        self._more.set()

    async def wait_for_room(self) -> None:
        while self.is_full:
            self._room.clear()
            await self._room.wait()

    async def wait_for_more(self) -> bool:
        """Wait for a first request; return False if there will be none."""
        while not self._begun:
            if self._ended:
                return False
            self._more.clear()
            await self._more.wait()
        return True

    def cancel(self) -> None:
        """Cancel all unanswered requests."""
        for _, begun in self._begun:
            if isinstance(begun, asyncio.Future):
                abandon(begun)
