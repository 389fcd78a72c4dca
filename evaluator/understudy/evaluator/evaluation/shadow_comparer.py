"""Computes requests once more with another version, after they were answered, and compares both answers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from understudy.compat.error_texts import first_line
from understudy.evaluator.batching.engine import Engine
from understudy.evaluator.datasets.request_records import LoggedRequest
from understudy.evaluator.evaluation.answer_differences import compare_answers
from understudy.evaluator.evaluator_errors import EvaluatorError, VersionNotFoundError, exhausted_resource
from understudy.evaluator.serving.decision_file import Shadow
from understudy.evaluator.serving.servable import Handle, ModelSlot
from understudy.evaluator.serving.servable_manager import ServableManager
from understudy.evaluator.serving.shadow_health import ShadowCounts, ShadowReport
from understudy.evaluator.types import Arrays, CheckpointInfo

SETTLING_SECONDS: Final = 0.01
"""How long after its answer a request is computed once more at the earliest: until then it is encoded and sent."""

PATIENCE_SECONDS: Final = 1.0
"""How long after its answer a request may wait until the devices are idle; then it is dropped."""

TIMED_REQUESTS: Final = 8
"""One in so many requests is computed by the serving version, too, to compare how long both take."""

_LOOK_SECONDS: Final = 0.002
_RETRY_SECONDS: Final = 5.0

_log = logging.getLogger(__name__)


class ShadowComparer:
    """Takes a sample of the answered requests, and compares the answers with those of another version.

    It runs that version on the thread that calls `take`, when no request is queued or computed. One that arrives
    meanwhile is computed beside it. The version is loaded as any other that is asked for, and may be unloaded for
    others; then it is loaded again.

    `share` and `report` are thread-safe; the others are for one thread.

    Args:
        manager: Loads versions.
        engine: Runs the requests.
        find: Describes the checkpoint of a step, or returns None.
        wanted: Returns the version to compare with, if any.
        problem: Returns why its checkpoint is not here; empty if that is not known.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        *,
        manager: ServableManager,
        engine: Engine,
        find: Callable[[int], CheckpointInfo | None],
        wanted: Callable[[], Shadow | None],
        problem: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager = manager
        self._engine = engine
        self._find = find
        self._wanted = wanted
        self._problem = problem
        self._clock = clock
        self._lock = threading.Lock()
        self._shadow: Shadow | None = None
        self._counts = ShadowCounts()
        self._loaded = False
        self._reason = ""
        self._loading: Future[Handle] | None = None
        self._retry_at = 0.0
        self._logged = ""

    @property
    def share(self) -> float:
        """The share of the requests to take at present; 0 for none."""
        with self._lock:
            return self._shadow.share if self._shadow is not None and self._loaded else 0.0

    def report(self) -> ShadowReport | None:
        """Return what was found so far; None if nothing is compared."""
        with self._lock:
            shadow = self._shadow
            if shadow is None:
                return None
            return ShadowReport(
                step=shadow.step,
                digest=shadow.digest,
                loaded=self._loaded,
                reason=self._reason,
                counts=self._counts,
            )

    def take(self, request: LoggedRequest) -> None:
        """Compute a request once more, once the devices are idle."""
        shadow = self._shadow
        if shadow is None or not self._is_served_beside(shadow, request.step):
            return
        if not self._is_idle_in_time(request.recorded_at):
            self.dropped("busy")
            return
        if not self._is_served_beside(shadow, request.step):
            return
        try:
            handle = self._manager.borrow(shadow.step)
        except EvaluatorError:  # it is unloaded; `tick` loads it again
            self.dropped("unloaded")
            return
        with handle:
            if handle.servable.digest == shadow.digest:
                self._compare(handle.slot, request, shadow)

    def dropped(self, reason: str) -> None:
        """Count a request of the sample that was not computed."""
        del reason
        self._add(ShadowCounts(dropped=1))

    def tick(self) -> None:
        """Follow which version is wanted, and have it loaded."""
        shadow = self._wanted()
        if shadow != self._shadow:
            self._give_up_loading()
            with self._lock:
                self._shadow, self._counts, self._loaded, self._reason = shadow, ShadowCounts(), False, ""
            self._retry_at = 0.0
        if shadow is not None:
            loaded, reason = self._check(shadow)
            with self._lock:
                self._loaded, self._reason = loaded, reason

    def close(self) -> None:
        """Compare nothing any more."""
        self._give_up_loading()
        with self._lock:
            self._shadow, self._loaded = None, False

    def _check(self, shadow: Shadow) -> tuple[bool, str]:
        """Return whether the version is loaded, and why it cannot be; have it loaded if it is not."""
        reason = self._reason
        if self._loading is not None and self._loading.done():
            loading, self._loading = self._loading, None
            try:
                loading.result().release()
                reason = ""
            except Exception as error:  # noqa: BLE001 - a checkpoint may raise anything; it is reported
                self._retry_at = self._clock() + _RETRY_SECONDS
                reason = self._failed(error)
        try:
            if self._manager.servable(shadow.step).digest == shadow.digest:
                return True, ""
        except VersionNotFoundError:
            pass
        if self._loading is None and self._clock() >= self._retry_at:
            info = self._find(shadow.step)
            if info is None or info.digest != shadow.digest:
                return False, self._problem()
            try:
                self._loading = self._manager.acquire(shadow.step)
            except EvaluatorError:  # it has just gone, or the evaluator is being closed
                return False, self._problem()
        return False, reason

    def _failed(self, error: Exception) -> str:
        """Log why the version cannot be loaded; return it unless this machine is the cause."""
        text = first_line(error)
        if text != self._logged:
            self._logged = text
            _log.warning("the version to compare with cannot be loaded: %s", text)
        return "" if exhausted_resource(error) is not None else text

    def _give_up_loading(self) -> None:
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.cancel()
            loading.add_done_callback(_release)

    def _is_served_beside(self, shadow: Shadow, step: int) -> bool:
        """Return whether the step is served, and is not the version to compare with."""
        serving = self._manager.serving
        return serving is not None and serving.step == step and shadow.key != (serving.step, serving.digest)

    def _is_idle_in_time(self, answered_at: float) -> bool:
        """Wait until the devices are idle, for a while after a request was answered; return whether they are."""
        age = time.time() - answered_at
        if age > PATIENCE_SECONDS:
            return False
        until = self._clock() + min(PATIENCE_SECONDS - age, PATIENCE_SECONDS)
        time.sleep(min(max(0.0, SETTLING_SECONDS - age), SETTLING_SECONDS))
        while self._engine.is_busy:
            if self._clock() >= until:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def _compare(self, slot: ModelSlot, request: LoggedRequest, shadow: Shadow) -> None:
        began = time.perf_counter()
        try:
            slot.check_inputs(request.inputs)
            with slot.keeping_variables():
                outputs = slot.forward(request.inputs)
        except Exception as error:  # noqa: BLE001 - a model may raise anything; it is counted
            if exhausted_resource(error) is not None:
                self.dropped("error")
                return
            self._add(ShadowCounts(errors=1))
            _log.debug("a request fails with step %d: %s", shadow.step, type(error).__name__)  # the text may quote it
            return
        seconds = time.perf_counter() - began
        serving_seconds = None
        if self._counts.compared % TIMED_REQUESTS == 0:
            serving_seconds = self._serving_seconds(request.inputs, request.step)
        found = compare_answers(slot.output_tasks, outputs, request.outputs, tolerance=shadow.tolerance)
        self._add(
            ShadowCounts(
                compared=1,
                disagreeing=found.share,
                not_finite=0 if found.is_finite else 1,
                largest_difference=found.largest,
                seconds=0.0 if serving_seconds is None else seconds,
                serving_seconds=serving_seconds or 0.0,
            )
        )

    def _serving_seconds(self, inputs: Arrays, step: int) -> float | None:
        """Return how long the serving version takes for inputs; None if it is another one now, or may not run twice."""
        try:
            with self._manager.borrow() as serving:
                if serving.step != step or not serving.slot.may_overlap:
                    return None
                began = time.perf_counter()
                serving.slot.forward(inputs)
                return time.perf_counter() - began
        except Exception:  # noqa: BLE001 - it answered them before; the time is missing then
            return None

    def _add(self, counts: ShadowCounts) -> None:
        with self._lock:
            self._counts = self._counts.plus(counts)


def _release(done: Future[Handle]) -> None:
    if not done.cancelled() and done.exception() is None:
        done.result().release()
