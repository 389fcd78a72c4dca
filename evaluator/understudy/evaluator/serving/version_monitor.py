"""The state of every version: waiting, loaded, or failed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from understudy.checkpoints.checkpoint_errors import CheckpointGoneError, UnsupportedFormatError
from understudy.evaluator.evaluator_errors import EvaluatorError, LoadError, OutOfResourcesError
from understudy.evaluator.observer import Milestone, Observer
from understudy.evaluator.records.life_log import LifeLog
from understudy.evaluator.serving.quarantine import Failure, Quarantine
from understudy.evaluator.types import CheckpointInfo, LifeEvent, VersionState, VersionStatus

_log = logging.getLogger(__name__)

_PERMANENT = (CheckpointGoneError, UnsupportedFormatError)

ENDED_KEPT = 1000
"""How many versions in the state END are remembered."""


class VersionStateMonitor:
    """Keeps the state of every version, and notifies the quarantine, the observer and the log. Thread-safe.

    Args:
        quarantine: Notified of checkpoints that fail to load and of those that load.
        observer: Notified of what happens to each checkpoint, of every finished attempt, and of how long checkpoints
            took to be scored and served.
        life: Receives what happens to each checkpoint.
        is_offered: Whether the source has a checkpoint of a step.
        on_quarantined: Called with each checkpoint that failed, and its failures; must be quick and must not raise.
        clock: Returns the time in seconds since the epoch.
    """

    def __init__(
        self,
        *,
        quarantine: Quarantine,
        observer: Observer,
        life: LifeLog,
        is_offered: Callable[[int], bool],
        on_quarantined: Callable[[CheckpointInfo, Failure], None] = lambda _info, _failure: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._quarantine = quarantine
        self._observer = observer
        self._life = life
        self._is_offered = is_offered
        self._on_quarantined = on_quarantined
        self._lock = threading.Lock()
        self._states: dict[int, tuple[VersionState, str]] = {}
        self._ended: dict[int, None] = {}
        self._latest: CheckpointInfo | None = None
        self._served: CheckpointInfo | None = None
        self._clock = clock
        self._started_at = clock()
        self._newest_served = self._started_at

    @property
    def latest_step(self) -> int | None:
        """The step of the newest checkpoint that was ever loaded.

        It is the highest one, unless that is gone and a lower one was written later, by a training that began again.
        """
        with self._lock:
            return None if self._latest is None else self._latest.step

    def discovered(self, step: int) -> None:
        """Add a version that waits to be loaded; a known version does not change."""
        with self._lock:
            self._states.setdefault(step, (VersionState.START, ""))

    def seen(self, infos: Iterable[CheckpointInfo]) -> None:
        """Record that checkpoints were discovered that are still to be evaluated."""
        infos = list(infos)
        self._life.record_seen(infos)
        for info in infos:
            self._observer.life_changed(info, LifeEvent.SEEN)

    def loading(self, step: int) -> None:
        """Record that an attempt has begun."""
        self._set(step, VersionState.LOADING)

    def reached(self, info: CheckpointInfo, event: LifeEvent) -> None:
        """Record that a checkpoint has come this far."""
        self._life.record(info, event)
        self._observer.life_changed(info, event)

    def interrupted(self, step: int) -> None:
        """Record that an attempt ended for an external cause and is repeated at once."""
        self._set(step, VersionState.START)

    def postponed(self, info: CheckpointInfo, error: Exception, *, seconds: float) -> EvaluatorError:
        """Record that the machine lacked resources for a checkpoint; return the error for the caller.

        It is tried again later, and the attempt does not count.
        """
        wrapped = _as_evaluator_error(info.step, error)
        reason = OutOfResourcesError(f"step {info.step} is to be loaded later, as the machine cannot now: {wrapped}")
        failure = self._quarantine.postpone(info.key, str(reason))
        self._set(info.step, VersionState.START, error=failure.reason)
        self._observer.checkpoint_loaded("postponed", seconds=seconds)
        _log.warning("load put off", extra={"step": info.step, "reason": str(reason), "postponed": failure.postponed})
        return reason

    def loaded(self, info: CheckpointInfo, *, seconds: float) -> None:
        """Record a success."""
        self.reached(info, LifeEvent.WARMED_UP)
        with self._lock:
            if self._latest is None or self._is_newer(info, self._latest):
                self._latest = info
        self._set(info.step, VersionState.AVAILABLE)
        self._quarantine.clear(info.key)
        self._observer.checkpoint_loaded("loaded", seconds=seconds)
        _log.info("loaded", extra={"step": info.step, "seconds": seconds})

    def _is_newer(self, info: CheckpointInfo, than: CheckpointInfo) -> bool:
        higher, lower = (info, than) if info.step >= than.step else (than, info)
        is_begun_again = lower.created_at > higher.created_at and not self._is_offered(higher.step)
        return (lower if is_begun_again else higher) is info

    def failed(self, info: CheckpointInfo, error: Exception, *, seconds: float) -> EvaluatorError:
        """Record a failure; return the error for the caller."""
        reason = _as_evaluator_error(info.step, error)
        failure = self._quarantine.add(info.key, str(reason), permanent=_is_permanent(error))
        self._set(info.step, VersionState.END, error=failure.reason)
        self._observer.checkpoint_loaded("failed", seconds=seconds)
        self._on_quarantined(info, failure)
        _log.warning(
            "checkpoint in quarantine",
            extra={
                "step": info.step,
                "reason": str(reason),
                "attempts": failure.attempts,
                "given_up": failure.given_up,
            },
        )
        return reason

    def scored(self, info: CheckpointInfo) -> None:
        """Record that a checkpoint has a result on every dataset."""
        self._report_delay("scored", info)

    def served(self, info: CheckpointInfo) -> None:
        """Record that a checkpoint serves, and the one before no longer does.

        For the observer, a return to an older checkpoint does not count.
        """
        with self._lock:
            replaced, self._served = self._served, info
        if replaced is not None:
            self.reached(replaced, LifeEvent.REPLACED)
        self.reached(info, LifeEvent.SERVED)
        with self._lock:
            is_new = info.created_at > self._newest_served
            self._newest_served = max(self._newest_served, info.created_at)
        if is_new:
            self._report_delay("served", info)

    def _report_delay(self, milestone: Milestone, info: CheckpointInfo) -> None:
        """Notify the observer, except of checkpoints that were there before: they waited for the evaluator."""
        if info.created_at >= self._started_at:
            self._observer.checkpoint_reached(milestone, seconds=max(0.0, self._clock() - info.created_at))

    def unloaded(self, step: int) -> None:
        """Record that a version was evicted."""
        self._set(step, VersionState.END)
        _log.info("unloaded", extra={"step": step})

    def statuses(self, *, serving: int | None) -> list[VersionStatus]:
        """Return the state of every version, newest first."""
        with self._lock:
            states = sorted(self._states.items(), reverse=True)
        return [
            VersionStatus(step=step, state=state, error=error, serving=step == serving)
            for step, (state, error) in states
        ]

    def _set(self, step: int, state: VersionState, *, error: str = "") -> None:
        with self._lock:
            self._states[step] = (state, error)
            self._ended.pop(step, None)
            if state is VersionState.END:
                self._ended[step] = None
                if len(self._ended) > ENDED_KEPT:
                    forgotten = next(iter(self._ended))
                    del self._ended[forgotten], self._states[forgotten]


def _is_permanent(error: Exception) -> bool:
    """Return whether a retry cannot succeed."""
    return isinstance(error, _PERMANENT)


def _as_evaluator_error(step: int, error: Exception) -> EvaluatorError:
    """Return the error as one that the caller may see."""
    if isinstance(error, EvaluatorError):
        return error
    text = str(error).strip().split("\n", maxsplit=1)[0] or type(error).__name__
    wrapped = LoadError(f"step {step} cannot be loaded: {text}")
    wrapped.__cause__ = error
    return wrapped
