"""The served model, as handlers see it: its name, its versions as text, and its predictions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.evaluator_errors import InvalidInputError, VersionNotFoundError
from understudy.evaluator.types import Arrays, Outcome, Prediction, Version, VersionLabel, VersionState
from understudy.service.calls.methods import CallContext
from understudy.service.calls.status import UnknownModelError

LABELS: tuple[VersionLabel, ...] = ("serving", "latest", "best")


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The one model of this server.

    Attributes:
        name: The name the model is served under.
        evaluator: Runs the model.
    """

    name: str
    evaluator: Evaluator

    def check_name(self, name: str) -> None:
        """Raise UnknownModelError unless this is the model's name."""
        if name != self.name:
            raise UnknownModelError(f"there is no model {name!r}; this server serves {self.name!r}")

    def check_optional_name(self, name: str) -> None:
        """Raise UnknownModelError unless this is the model's name, or empty."""
        if name:
            self.check_name(name)

    def loaded_steps(self) -> list[int]:
        """Return the loaded steps, in ascending order."""
        return sorted(status.step for status in self.evaluator.status() if status.state is VersionState.AVAILABLE)

    def step_of(self, version: Version) -> int:
        """Return the step of a version.

        Raises:
            VersionNotFoundError: The label has no step yet.
        """
        if isinstance(version, int):
            return version
        evaluator = self.evaluator
        steps = {"serving": evaluator.serving_step, "latest": evaluator.latest_step, "best": evaluator.best_step}
        step = steps[version]
        if step is None:
            raise VersionNotFoundError(f"no version is {version!r} yet; the loaded ones are {self.loaded_steps()}")
        return step


def label_of(text: str) -> VersionLabel:
    """Return a version's label.

    Raises:
        InvalidInputError: There is no such label.
    """
    for label in LABELS:
        if text == label:
            return label
    raise InvalidInputError(f"the version label {text!r} is unknown; give {', '.join(LABELS)}")


def version_of(text: str) -> Version:
    """Return the version that a text names: a step or a label; the serving version if it is empty.

    Raises:
        InvalidInputError: It is neither.
    """
    if not text:
        return "serving"
    if text.isascii() and text.isdigit() and len(text) < len(str(2**63)):
        return int(text)
    try:
        return label_of(text)
    except InvalidInputError:
        raise InvalidInputError(
            f"the version is {text!r}; give a step as a number from 0 up, or {', '.join(LABELS)}"
        ) from None


def wanted_outputs(prediction: Prediction, names: tuple[str, ...]) -> Arrays:
    """Return the requested outputs, in that order, or all.

    Raises:
        InvalidInputError: The model has no such output.
    """
    if not names:
        return prediction.outputs
    unknown = [name for name in names if name not in prediction.outputs]
    if unknown:
        known = ", ".join(map(repr, prediction.outputs))
        raise InvalidInputError(f"there is no output {unknown[0]!r}; there is {known}")
    return {name: prediction.outputs[name] for name in names}


_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class CoalescingOptions:
    """How long simultaneous requests wait for each other.

    Attributes:
        loop_turns: The most event-loop iterations to wait while the transport passes on simultaneous requests.
        examples: Dispatch immediately at this many examples.
    """

    loop_turns: int
    examples: int


NO_COALESCING = CoalescingOptions(loop_turns=0, examples=0)


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
        future = self._sink.new_future() if call.trace is None else call.trace.new_future(self._sink.loop)
        self._evaluator.predict_for(future, self._sink, inputs, version=version, deadline=deadline, dispatch=False)
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


async def begun(executor: Executor, begin: Callable[[], Future[_T]]) -> asyncio.Future[_T]:
    """Start work on an executor, since starting may block; if the caller disconnects first, cancel the work."""
    beginning = asyncio.get_running_loop().run_in_executor(executor, begin)
    try:
        return asyncio.wrap_future(await asyncio.shield(beginning))
    except asyncio.CancelledError:
        beginning.add_done_callback(_take_back)
        raise


def abandon(future: asyncio.Future[Any]) -> None:
    """Cancel work that has not begun, and ignore its outcome."""
    future.add_done_callback(_look_at)
    future.cancel()


def _take_back(beginning: asyncio.Future[Future[Any]]) -> None:
    if beginning.exception() is None:
        beginning.result().cancel()


def _look_at(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()
