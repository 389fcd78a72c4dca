"""The open evaluation streams, and which of them is closed when a checkpoint waits for a slot."""

from __future__ import annotations

import logging
import threading
import weakref

from understudy.evaluator.evaluation.evaluation_stream import EvaluationStream
from understudy.evaluator.evaluator_errors import StreamIdleError

RECALL_SILENT_SECONDS = 10.0
"""A stream that was idle for this long in total is closed if a checkpoint waits for its slot."""
RECALL_STARVED_SECONDS = 30.0
"""After this wait of the next serving version, the oldest stream is closed, even if it is busy."""

_log = logging.getLogger(__name__)


class OpenStreams:
    """Weak references to the open streams. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: weakref.WeakSet[EvaluationStream] = weakref.WeakSet()

    def add(self, stream: EvaluationStream) -> None:
        """Add a stream."""
        with self._lock:
            self._streams.add(stream)

    def close(self) -> None:
        """Close all streams."""
        for stream in self._open():
            stream.close()

    def recall(self, step: int, *, waiting_seconds: float, to_serve: bool, serving_step: int | None) -> None:
        """Close a stream whose slot a checkpoint waits for: the one with the most idle time, or finally the oldest.

        Closing a stream on the serving version would free no slot.

        Args:
            step: The checkpoint that waits.
            waiting_seconds: How long it has waited.
            to_serve: Whether it becomes the serving version.
            serving_step: The current serving version.
        """
        holding = [stream for stream in self._open() if stream.step != serving_step]
        silent = [stream for stream in holding if stream.silent_seconds >= RECALL_SILENT_SECONDS]
        if silent:
            self._close(max(silent, key=lambda stream: stream.silent_seconds), step)
        elif holding and to_serve and waiting_seconds >= RECALL_STARVED_SECONDS:
            self._close(max(holding, key=lambda stream: stream.age_seconds), step)

    def _close(self, stream: EvaluationStream, step: int) -> None:
        silent = stream.silent_seconds
        _log.warning("a stream gave its slot up", extra={"step": stream.step, "waiting": step, "silent": silent})
        stream.close(
            StreamIdleError(
                f"step {step} waited for a slot, and this stream on step {stream.step} was closed to free its slot: "
                f"it is {stream.age_seconds:.0f} s old and was idle for {silent:.0f} s; start again, and send batches "
                "without pauses"
            )
        )

    def _open(self) -> list[EvaluationStream]:
        with self._lock:
            return [stream for stream in self._streams if not stream.is_closed]
