"""The training journal: whether training is running, and how it ended.

``training.json`` holds a heartbeat, so that a reader can distinguish a running trainer from one that was killed. One
that reads it once compares it with its own clock: on different machines, the clocks must agree to a few seconds. One
that reads it again and again finds out by its own clock alone for how long it has been the same.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from understudy.checkpoints.atomic import write_json
from understudy.checkpoints.checkpoint_errors import DamagedCheckpointError, UnsupportedFormatError
from understudy.checkpoints.fs import read_within
from understudy.checkpoints.layout import MAX_STEP, RunDir

_log = logging.getLogger(__name__)

FORMAT_VERSION = 1

STALE_SECONDS = 60.0
"""A trainer whose heartbeat is older counts as failed."""

_HEARTBEAT_SECONDS = 5.0

_LARGEST_BYTES = 2**20

TrainingState = Literal["running", "finished", "failed"]
_STATES = ("running", "finished", "failed")


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """How far a training is, as far as its trainer knows.

    Attributes:
        steps: Steps when done.
        metrics: The loss (as ``loss``) and other metrics of the training, since the last checkpoint or of this epoch.
        examples_per_second: Over all replicas.
        input_wait_share: Which share of the time the training waits for batches, 0 to 1.
        remaining_seconds: Time left at this rate.
    """

    steps: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    examples_per_second: float | None = None
    input_wait_share: float | None = None
    remaining_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingStatus:
    """The status of a training.

    Attributes:
        state: A trainer without a recent heartbeat counts as failed.
        step: Training steps taken at the last heartbeat.
        final_step: The last step of a training that finished, else None.
        reason: Why it failed, else empty.
        heartbeat_at: The time of the last heartbeat, in seconds since the Unix epoch.
        progress: How far it was at the last heartbeat.
        may_resume: Whether it failed in a way that a start again mends, which whatever started it may do by itself.
    """

    state: TrainingState
    step: int
    final_step: int | None
    reason: str
    heartbeat_at: float
    progress: TrainingProgress = TrainingProgress()
    may_resume: bool = False

    def after_silence(self, seconds: float, *, stale_after_seconds: float = STALE_SECONDS) -> TrainingStatus:
        """Return the status for a reader that knows for how long the heartbeat has been this one."""
        if self.state != "running" or seconds <= stale_after_seconds:
            return self
        reason = f"the trainer has been silent for {seconds:.0f} s"
        return replace(self, state="failed", final_step=None, reason=reason, may_resume=True)


class TrainingJournal:
    """Records that training is running while the ``with`` block runs, then how it ended.

    Leaving the block normally means finished, at the step last recorded; leaving it with an exception means failed. A
    thread writes the heartbeat. One trainer, the chief, keeps the journal of a run folder.

    Args:
        run_dir: The run folder; created if missing.
        mended_by_restart: The exceptions after which the training is to be started again.
    """

    def __init__(self, run_dir: RunDir, *, mended_by_restart: tuple[type[BaseException], ...] = ()) -> None:
        self._path = run_dir.training_json
        self._mended_by_restart = mended_by_restart
        self._step = 0
        self._progress = TrainingProgress()
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="training-heartbeat", daemon=True)

    def record_step(self, step: int, progress: TrainingProgress | None = None) -> None:
        """Set the number of steps taken, and how far that is, for the next heartbeat. Does no I/O. Thread-safe."""
        self._step = step
        if progress is not None:
            self._progress = progress

    def __enter__(self) -> Self:
        """Record that training is running. Raise OSError if that cannot be written."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._write("running")
        self._heart.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Record how training ended. Raise OSError if that cannot be written."""
        self._ended.set()
        # Without a timeout: a heartbeat written after the end would overwrite the final state.
        self._heart.join()
        if exc is None:
            self._write("finished")
        else:
            may_resume = isinstance(exc, self._mended_by_restart)
            reason = "interrupted" if isinstance(exc, KeyboardInterrupt) else f"{type(exc).__name__}: {exc}"
            self._write("failed", reason=reason, may_resume=may_resume)

    def _beat(self) -> None:
        while not self._ended.wait(_HEARTBEAT_SECONDS):
            try:
                self._write("running")
            except OSError as error:
                # A failed write must not stop training, and the disk may recover.
                _log.warning("could not write the heartbeat: %s", error)

    def _write(self, state: TrainingState, *, reason: str = "", may_resume: bool = False) -> None:
        write_json(
            self._path,
            {
                "format_version": FORMAT_VERSION,
                "state": state,
                "step": self._step,
                "final_step": self._step if state == "finished" else None,
                "reason": reason,
                "may_resume": may_resume,
                "heartbeat_at": time.time(),
                "progress": _encoded(self._progress),
                "pid": os.getpid(),
            },
        )


def read_training_status(
    run_dir: RunDir,
    *,
    now: float,
    stale_after_seconds: float = STALE_SECONDS,
) -> TrainingStatus | None:
    """Return the status of a training, or None if none was started in this run folder.

    Args:
        run_dir: The run folder.
        now: Seconds since the Unix epoch.
        stale_after_seconds: A trainer whose last heartbeat is older counts as failed.

    Raises:
        UnsupportedFormatError: The file has another version, or is not a training journal.
        OSError: It could not be read.
    """
    path = run_dir.training_json
    try:
        status = _decode(read_within(path, run_dir.root, limit=_LARGEST_BYTES), path)
    except FileNotFoundError:
        return None
    except DamagedCheckpointError as error:
        raise UnsupportedFormatError(f"{path} is not a training journal ({error})") from error
    return status.after_silence(now - status.heartbeat_at, stale_after_seconds=stale_after_seconds)


def _encoded(progress: TrainingProgress) -> dict[str, Any]:
    """Return progress as JSON values; numbers that JSON lacks are texts, such as ``"nan"``."""
    fields = asdict(progress)
    fields["metrics"] = {
        name: float(value) if math.isfinite(value) else str(float(value)) for name, value in progress.metrics.items()
    }
    return fields


def _decoded(fields: Mapping[str, Any]) -> TrainingProgress:
    """Return progress; what a trainer of another version did not write is not known."""

    def known(name: str) -> float | None:
        value = fields.get(name)
        return None if value is None else float(value)

    steps = fields.get("steps")
    return TrainingProgress(
        steps=None if steps is None else _step(steps),
        metrics={str(name): float(value) for name, value in dict(fields.get("metrics", {})).items()},
        examples_per_second=known("examples_per_second"),
        input_wait_share=known("input_wait_share"),
        remaining_seconds=known("remaining_seconds"),
    )


def _step(value: Any) -> int:
    step = int(value)
    if step > MAX_STEP:
        raise ValueError(f"a step is above {MAX_STEP}")
    return step


def _decode(content: bytes, path: Path) -> TrainingStatus:
    try:
        fields: dict[str, Any] = json.loads(content)
        version, state, final_step = fields["format_version"], fields["state"], fields["final_step"]
        status = TrainingStatus(
            state=state,
            step=_step(fields["step"]),
            final_step=None if final_step is None else _step(final_step),
            reason=str(fields["reason"]),
            heartbeat_at=float(fields["heartbeat_at"]),
            progress=_decoded(fields.get("progress", {})),
            may_resume=bool(fields.get("may_resume", False)),
        )
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise UnsupportedFormatError(f"{path} is not a training journal ({type(error).__name__}: {error})") from error
    if version != FORMAT_VERSION or state not in _STATES:
        raise UnsupportedFormatError(
            f"{path} has format version {version!r} and state {state!r}; this program reads version {FORMAT_VERSION} "
            f"and the states {', '.join(_STATES)}",
        )
    return status
