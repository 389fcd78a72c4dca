"""The training journal: whether training is running, and how it ended.

``training.json`` holds a heartbeat, so that a reader can distinguish a running trainer from one that was killed. The
reader compares it with its own clock: on different machines, the clocks must agree to a few seconds.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from understudy.checkpoints.atomic import write_json
from understudy.checkpoints.checkpoint_errors import UnsupportedFormatError
from understudy.checkpoints.layout import RunDir

_log = logging.getLogger(__name__)

FORMAT_VERSION = 1

_HEARTBEAT_SECONDS = 5.0

TrainingState = Literal["running", "finished", "failed"]
_STATES = ("running", "finished", "failed")


@dataclass(frozen=True, kw_only=True)
class TrainingStatus:
    """The status of a training.

    Attributes:
        state: A trainer without a recent heartbeat counts as failed.
        step: Training steps taken at the last heartbeat.
        final_step: The last step of a training that finished, else None.
        reason: Why it failed, else empty.
        heartbeat_at: The time of the last heartbeat, in seconds since the Unix epoch.
    """

    state: TrainingState
    step: int
    final_step: int | None
    reason: str
    heartbeat_at: float


class TrainingJournal:
    """Records that training is running while the ``with`` block runs, then how it ended.

    Leaving the block normally means finished, at the step last recorded; leaving it with an exception means failed. A
    thread writes the heartbeat. One trainer, the chief, keeps the journal of a run folder.

    Args:
        run_dir: The run folder; created if missing.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._path = run_dir.training_json
        self._step = 0
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="training-heartbeat", daemon=True)

    def record_step(self, step: int) -> None:
        """Set the number of steps taken for the next heartbeat. Does no I/O. Thread-safe."""
        self._step = step

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
            self._write("failed", reason=f"{type(exc).__name__}: {exc}")

    def _beat(self) -> None:
        while not self._ended.wait(_HEARTBEAT_SECONDS):
            try:
                self._write("running")
            except OSError as error:
                # A failed write must not stop training, and the disk may recover.
                _log.warning("could not write the heartbeat: %s", error)

    def _write(self, state: TrainingState, *, reason: str = "") -> None:
        write_json(
            self._path,
            {
                "format_version": FORMAT_VERSION,
                "state": state,
                "step": self._step,
                "final_step": self._step if state == "finished" else None,
                "reason": reason,
                "heartbeat_at": time.time(),
                "pid": os.getpid(),
            },
        )


def read_training_status(
    run_dir: RunDir,
    *,
    now: float,
    stale_after_seconds: float = 60.0,
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
        status = _decode(path.read_bytes(), path)
    except FileNotFoundError:
        return None
    silence = now - status.heartbeat_at
    if status.state != "running" or silence <= stale_after_seconds:
        return status
    return TrainingStatus(
        state="failed",
        step=status.step,
        final_step=None,
        reason=f"the trainer has been silent for {silence:.0f} s",
        heartbeat_at=status.heartbeat_at,
    )


def _decode(content: bytes, path: Path) -> TrainingStatus:
    try:
        fields: dict[str, Any] = json.loads(content)
        version, state, final_step = fields["format_version"], fields["state"], fields["final_step"]
        status = TrainingStatus(
            state=state,
            step=int(fields["step"]),
            final_step=None if final_step is None else int(final_step),
            reason=str(fields["reason"]),
            heartbeat_at=float(fields["heartbeat_at"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedFormatError(f"{path} is not a training journal ({type(error).__name__}: {error})") from error
    if version != FORMAT_VERSION or state not in _STATES:
        raise UnsupportedFormatError(
            f"{path} has format version {version!r} and state {state!r}; this program reads version {FORMAT_VERSION} "
            f"and the states {', '.join(_STATES)}",
        )
    return status
