"""What streams of batches on one checkpoint have in common, and how they give their slots up."""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from understudy.evaluator.batching.engine import Engine
from understudy.evaluator.evaluator_errors import CancelledError, EvaluatorError, StreamIdleError
from understudy.evaluator.serving.servable import Handle

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

RECALL_SILENT_SECONDS = 10.0
RECALL_TO_SERVE_SECONDS = 1.0
"""A stream that was idle for so long in total is closed if a checkpoint waits for its slot: to be scored, to serve."""

RECALL_STARVED_SECONDS = 30.0
"""After this wait of the next serving version, the streams on the version of the oldest are closed, even if busy."""


class ServableStream:
    """Runs batches, one after another, on the checkpoint of one handle, and finally releases it. Thread-safe.

    A context manager that closes it.

    Args:
        handle: The checkpoint, borrowed for the duration of the stream.
        engine: Runs the batches.
    """

    def __init__(self, handle: Handle, engine: Engine) -> None:
        self._handle = handle
        self._engine = engine
        self._lock = threading.Lock()
        self._under_way: list[_BatchUnderWay] = []
        self._failure: BaseException | None = None
        self._closed = False
        self._opened = self._active = time.monotonic()
        self._silent_seconds = 0.0
        # Raised in copies, as the frames of a traceback hold the refused batch.
        self._reason: EvaluatorError = CancelledError("the stream was closed; open another one")

    @property
    def age_seconds(self) -> float:
        """The time since it was opened."""
        return time.monotonic() - self._opened

    @property
    def is_closed(self) -> bool:
        """Whether it accepts no more batches."""
        return self._closed

    @property
    def step(self) -> int:
        """The step of the checkpoint that is scored."""
        return self._handle.step

    @property
    def silent_seconds(self) -> float:
        """The total time during which no batch was in progress."""
        with self._lock:
            self._settle()
            return self._silent_seconds + (0.0 if self._under_way else time.monotonic() - self._active)

    @property
    def idle_seconds(self) -> float:
        """The time since the last batch was in progress; 0 while one is."""
        with self._lock:
            self._settle()
            return 0.0 if self._under_way else time.monotonic() - self._active

    def close(self, reason: EvaluatorError | None = None) -> None:
        """Cancel the waiting batches, and release the handle once no batch is in progress. Idempotent.

        Args:
            reason: The error that `add` and `finish` raise from now on.
        """
        with self._lock:
            if reason is not None and not self._closed:
                self._reason = reason
            self._closed = True
            waiting = [batch.future for batch in self._under_way]
        for future in waiting:
            future.cancel()
        self._release_if_over()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        work: Callable[[], _T],
        *,
        examples: int,
        deadline: float | None,
        prepare: Callable[[], object] | None = None,
        is_prepared: bool = True,
    ) -> Future[_T]:
        """Queue the work of a batch; raise as `EvaluationStream.add`.

        Args:
            work: The function to run.
            examples: The number of examples that it computes.
            deadline: When it is no longer wanted.
            prepare: What comes first for this batch, on another thread, and for those that are added meanwhile.
            is_prepared: Whether this batch needs no preparation.
        """
        added = time.monotonic()
        with self._lock:
            if self._closed:
                raise copy.copy(self._reason)
            self._settle()
            if not self._under_way:
                self._silent_seconds += added - self._active
                self._active = added
            prepares = not is_prepared or any(other.prepares for other in self._under_way)
            future = self._engine.run(
                work,
                examples=examples,
                deadline=deadline,
                prepare=prepare if prepares else None,
                trial=self._handle.slot.try_out,
            )
            self._under_way.append(_BatchUnderWay(future=future, prepares=prepares))
        future.add_done_callback(self._done)
        return future

    def _released(self) -> None:
        """Free what the stream holds beside its handle, which it has just released."""

    def _between_pieces(self) -> None:
        """Yield to predictions, and stop if the stream was closed."""
        if self._closed:
            raise copy.copy(self._reason)
        self._engine.yield_to_predict()

    def _done(self, _: Future[Any]) -> None:
        with self._lock:
            self._active = time.monotonic()
        self._release_if_over()

    def _release_if_over(self) -> None:
        with self._lock:
            self._settle()
            over = self._closed and not self._under_way
        if over:
            self._handle.release()
            self._released()

    def _settle(self) -> None:
        """Forget the batches that are done, except for the first failure."""
        for batch in self._under_way:
            if batch.future.done() and self._failure is None:
                self._failure = batch.failure()
        self._under_way = [batch for batch in self._under_way if not batch.future.done()]


@dataclass(frozen=True, kw_only=True)
class _BatchUnderWay:
    future: Future[Any]
    prepares: bool

    def failure(self) -> BaseException | None:
        """Return why the batch was not scored, or None. It must be done."""
        if self.future.cancelled():
            return CancelledError("a batch of the stream was cancelled, so its score would not be whole")
        return self.future.exception()


class OpenStreams:
    """Weak references to the open streams. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: weakref.WeakSet[ServableStream] = weakref.WeakSet()

    def add(self, stream: ServableStream) -> None:
        """Add a stream."""
        with self._lock:
            self._streams.add(stream)

    def close(self) -> None:
        """Close all streams."""
        for stream in self._open():
            stream.close()

    def recall(self, step: int, *, waiting_seconds: float, to_serve: bool, serving_step: int | None) -> None:
        """Close all streams on a version whose slot a checkpoint waits for: one on which all were idle for long.

        Finally it is the version of the oldest stream. Closing those on the serving version would free no slot.

        Args:
            step: The checkpoint that waits.
            waiting_seconds: How long it has waited.
            to_serve: Whether it becomes the serving version.
            serving_step: The current serving version.
        """
        holding = [stream for stream in self._open() if stream.step != serving_step]
        if not holding:
            return
        least = {stream.step: math.inf for stream in holding}
        for stream in holding:
            least[stream.step] = min(least[stream.step], stream.silent_seconds)
        chosen = max(least, key=least.__getitem__)
        if least[chosen] < (RECALL_TO_SERVE_SECONDS if to_serve else RECALL_SILENT_SECONDS):
            if not (to_serve and waiting_seconds >= RECALL_STARVED_SECONDS):
                return
            chosen = max(holding, key=lambda stream: stream.age_seconds).step
        for stream in holding:
            if stream.step == chosen:
                self._close(stream, step)

    def _close(self, stream: ServableStream, step: int) -> None:
        silent = stream.silent_seconds
        _log.warning("a stream gave its slot up", extra={"step": stream.step, "waiting": step, "silent": silent})
        stream.close(
            StreamIdleError(
                f"step {step} waited for a slot, and this stream on step {stream.step} was closed to free its slot: "
                f"it is {stream.age_seconds:.0f} s old and was idle for {silent:.0f} s; start again, and send batches "
                "without pauses"
            )
        )

    def _open(self) -> list[ServableStream]:
        with self._lock:
            return [stream for stream in self._streams if not stream.is_closed]
