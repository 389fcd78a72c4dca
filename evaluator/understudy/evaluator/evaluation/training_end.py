"""Detects when the evaluator may exit: training is over, and all its checkpoints are evaluated."""

from __future__ import annotations

import enum
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from understudy.checkpoints.checkpoint_errors import UnsupportedFormatError
from understudy.checkpoints.layout import RunDir
from understudy.checkpoints.training import STALE_SECONDS, TrainingStatus, read_training_status

_log = logging.getLogger(__name__)

_LOOKED_SECONDS = 300.0
"""A heartbeat that changed since one looked so long ago is a sign of life."""

_SURE_SECONDS = 15.0
"""A trainer whose heartbeat has been the same for so long may be silent: it writes one every 5 s."""


class ExitReason(enum.Enum):
    """Why a service that follows a training run ended."""

    SIGNALLED = "signalled"
    FINISHED = "finished"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    DEVICE_FAILED = "device failed"
    TRAINED_ANEW = "trained anew"


@dataclass(frozen=True, kw_only=True)
class ServiceExit:
    """The reason for the exit, and a message for the user."""

    reason: ExitReason
    message: str = ""


TRAINED_ANEW = ServiceExit(
    reason=ExitReason.TRAINED_ANEW,
    message="another training is where the ledger and the checkpoints were; starting again with that",
)


class EvaluatorProgress(Protocol):
    """The part of the evaluator that the monitor queries."""

    def is_caught_up(self, since: float) -> bool:
        """Return whether a poll after ``since``, on the `time.monotonic` clock, found nothing left to evaluate."""

    @property
    def last_sequence(self) -> int:
        """The sequence number of the newest entry of the ledger."""


class TrainingEndMonitor:
    """Watches the training journal, then the remaining evaluations. For one thread at a time; `check` blocks.

    The timeout applies while there is no progress: no training has begun, or training is over and the ledger gets no
    new entry. A training that a start again mends, or that is silent, has failed if it was not started again in that
    time.

    Args:
        run: The run folder.
        evaluator: Reports the progress of evaluation.
        timeout_seconds: How long there may be no progress.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        run: Path,
        evaluator: EvaluatorProgress,
        *,
        timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir = RunDir(run)
        self._evaluator = evaluator
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._last_sign = clock()
        self._last_sequence = 0
        self._ended: tuple[TrainingStatus, float] | None = None
        self._heartbeat: tuple[float, float] | None = None

    def check(self) -> ServiceExit | None:
        """Return the reason to exit now, or None to continue.

        Raises:
            UnsupportedFormatError: The file has another version, or is not a training journal.
        """
        now = self._clock()
        status = self._status()
        if status is not None and status.state == "running":
            self._ended, self._last_sign = None, now
            return None
        if status is not None and (self._ended is None or _kind(self._ended[0]) != _kind(status)):
            self._ended, self._last_sign = (status, now), now
            if status.may_resume:
                _log.warning(
                    "training ended at step %d (%s); waiting for up to %g s for it to start again",
                    status.step,
                    status.reason,
                    self._timeout_seconds,
                )
        may_resume = status is not None and status.may_resume
        if self._ended is not None and not may_resume and self._evaluator.is_caught_up(self._ended[1]):
            # A journal that is mirrored may have become newer since it was read.
            return _exit_after(self._ended[0]) if self._status() == status else None
        return self._out_of_time(now, status)

    def _status(self) -> TrainingStatus | None:
        try:
            status = read_training_status(self._run_dir, now=0.0, stale_after_seconds=math.inf)
        except OSError as error:
            _log.warning("the training journal could not be read: %s", error)
            return None if self._ended is None else self._ended[0]
        return None if status is None else status.after_silence(self._silence(status))

    def _silence(self, status: TrainingStatus) -> float:
        """Return for how long the heartbeat has been the same, by this machine's clock: the trainer's may differ."""
        now = self._clock()
        if self._heartbeat is None or self._heartbeat[0] != status.heartbeat_at:
            self._heartbeat = (status.heartbeat_at, now)
        return now - self._heartbeat[1]

    def _out_of_time(self, now: float, status: TrainingStatus | None) -> ServiceExit | None:
        sequence = self._evaluator.last_sequence
        if self._ended is not None and sequence != self._last_sequence:
            self._last_sequence, self._last_sign = sequence, now
        if now - self._last_sign < self._timeout_seconds:
            return None
        if status is not None and status.may_resume:
            return _exit_after(status)
        missing = "no training began" if self._ended is None else "training is over, but nothing more was evaluated"
        return ServiceExit(reason=ExitReason.TIMED_OUT, message=f"{missing} for {self._timeout_seconds:g} s")


class TrainingWatch:
    """Reads a training journal again and again, for those who show it. Thread-safe.

    A heartbeat that changes is a sign of life, whatever the clock of its machine says. Only one that was there before
    this process looked, and that no other one follows soon, is compared with this machine's clock.

    Args:
        run: The run folder.
        clock: Monotonic clock, in seconds.
        wall_clock: Seconds since the Unix epoch.
    """

    def __init__(
        self, run: Path, *, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._run_dir = RunDir(run)
        self._clock = clock
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._read_at = -math.inf
        self._heartbeat_at: float | None = None
        self._last_sign = self._seen_at = 0.0
        self._is_told = False

    def read(self) -> TrainingStatus | None:
        """Return the status of the training; None if there is none that can be read."""
        try:
            status = read_training_status(self._run_dir, now=0.0, stale_after_seconds=math.inf)
        except (OSError, UnsupportedFormatError):
            return None
        if status is None:
            return None
        with self._lock:
            return status.after_silence(self._silence(status))

    def _silence(self, status: TrainingStatus) -> float:
        now = self._clock()
        looked_before, self._read_at = now - self._read_at < _LOOKED_SECONDS, now
        if status.heartbeat_at != self._heartbeat_at:
            age = self._wall_clock() - status.heartbeat_at
            is_alive = looked_before and self._heartbeat_at is not None
            self._last_sign = now if is_alive else now - max(0.0, age)
            self._heartbeat_at, self._seen_at = status.heartbeat_at, now
            if is_alive and status.state == "running":
                self._compare_clocks(age)
        watched = now - self._seen_at
        return now - self._last_sign if watched >= _SURE_SECONDS else watched

    def _compare_clocks(self, age: float) -> None:
        """Say once that the clock of the trainer's machine is another one than this machine's."""
        if self._is_told or -STALE_SECONDS <= age <= STALE_SECONDS + _LOOKED_SECONDS:
            return
        self._is_told = True
        _log.warning(
            "the trainer's clock is %.0f s %s this machine's: the ages of checkpoints are wrong by that",
            abs(age),
            "behind" if age > 0 else "ahead of",
        )


def _kind(status: TrainingStatus) -> tuple[str, bool]:
    return status.state, status.may_resume


def _exit_after(status: TrainingStatus) -> ServiceExit:
    if status.state == "failed":
        return ServiceExit(reason=ExitReason.FAILED, message=f"training failed at step {status.step}: {status.reason}")
    return ServiceExit(
        reason=ExitReason.FINISHED, message=f"training finished at step {status.final_step}, all is evaluated"
    )
