"""Monitors the state of every version."""

from __future__ import annotations

import logging
import threading

from understudy.checkpoints.checkpoint_errors import CheckpointGoneError, UnsupportedFormatError
from understudy.evaluator.evaluator_errors import EvaluatorError, LoadError, OutOfResourcesError
from understudy.evaluator.observer import Observer
from understudy.evaluator.serving.backlog import Quarantine
from understudy.evaluator.types import CheckpointInfo, VersionState, VersionStatus

_log = logging.getLogger(__name__)

_PERMANENT = (CheckpointGoneError, UnsupportedFormatError)

ENDED_KEPT = 1000
"""How many versions in the state END are remembered."""


class VersionStateMonitor:
    """Keeps the state of every version, and notifies the quarantine, the observer and the log. Thread-safe.

    Args:
        quarantine: Notified of checkpoints that fail to load and of those that load.
        observer: Notified of every finished attempt.
    """

    def __init__(self, *, quarantine: Quarantine, observer: Observer) -> None:
        self._quarantine = quarantine
        self._observer = observer
        self._lock = threading.Lock()
        self._states: dict[int, tuple[VersionState, str]] = {}
        self._latest_step: int | None = None

    @property
    def latest_step(self) -> int | None:
        """The newest step that was ever loaded."""
        with self._lock:
            return self._latest_step

    def discovered(self, step: int) -> None:
        """Add a version that waits to be loaded; a known version does not change."""
        with self._lock:
            self._states.setdefault(step, (VersionState.START, ""))

    def loading(self, step: int) -> None:
        """Record that an attempt has begun."""
        self._set(step, VersionState.LOADING)

    def interrupted(self, step: int) -> None:
        """Record that an attempt ended for an external cause and is repeated at once."""
        self._set(step, VersionState.START)

    def postponed(self, info: CheckpointInfo, error: Exception, *, seconds: float) -> EvaluatorError:
        """Record that the machine lacked resources for a checkpoint; return the error for the caller.

        It is tried again later, and the attempt does not count.
        """
        wrapped = _as_evaluator_error(info.step, error)
        reason = OutOfResourcesError(f"step {info.step} waits until the machine has room for it: {wrapped}")
        failure = self._quarantine.postpone(info.key, str(reason))
        self._set(info.step, VersionState.START, error=str(reason))
        self._observer.checkpoint_loaded("postponed", seconds=seconds)
        _log.warning("load put off", extra={"step": info.step, "reason": str(reason), "postponed": failure.postponed})
        return reason

    def loaded(self, info: CheckpointInfo, *, seconds: float) -> None:
        """Record a success."""
        with self._lock:
            self._latest_step = max(info.step, self._latest_step or info.step)
        self._set(info.step, VersionState.AVAILABLE)
        self._quarantine.clear(info.key)
        self._observer.checkpoint_loaded("loaded", seconds=seconds)
        _log.info("loaded", extra={"step": info.step, "seconds": seconds})

    def failed(self, info: CheckpointInfo, error: Exception, *, seconds: float) -> EvaluatorError:
        """Record a failure; return the error for the caller."""
        reason = _as_evaluator_error(info.step, error)
        failure = self._quarantine.add(info.key, str(reason), permanent=_is_permanent(error))
        self._set(info.step, VersionState.END, error=str(reason))
        self._observer.checkpoint_loaded("failed", seconds=seconds)
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
            self._states.pop(step, None)
            self._states[step] = (state, error)
            ended = [step for step, (known, _) in self._states.items() if known is VersionState.END]
            for forgotten in ended[:-ENDED_KEPT]:
                del self._states[forgotten]


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
