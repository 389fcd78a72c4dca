"""The evaluation streams that are open, and which of them gives its slot up to a checkpoint that waits for one."""

from __future__ import annotations

import logging
import threading
import weakref

from understudy.evaluator.evaluation_stream import EvaluationStream
from understudy.evaluator.evaluator_errors import StreamIdleError

RECALL_SILENT_SECONDS = 10.0
"""A stream that its caller left without a batch for so long, in all, gives its slot up to whoever waits for one."""
RECALL_STARVED_SECONDS = 30.0
"""After so long, the oldest stream gives its slot up to the next serving version, however busy it is."""

_log = logging.getLogger(__name__)


class OpenStreams:
    """Remembers streams as long as others do. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: weakref.WeakSet[EvaluationStream] = weakref.WeakSet()

    def add(self, stream: EvaluationStream) -> None:
        """Remember a stream."""
        with self._lock:
            self._streams.add(stream)

    def close(self) -> None:
        """Close them all."""
        for stream in self._open():
            stream.close()

    def recall(self, step: int, *, waiting_seconds: float, to_serve: bool, serving_step: int | None) -> None:
        """Close a stream whose slot a checkpoint waits for: the most silent one, or at last the oldest.

        Streams on the serving version hold no slot that would be free without them.

        Args:
            step: The checkpoint that waits.
            waiting_seconds: For how long.
            to_serve: Whether it is to be served.
            serving_step: The version that is served.
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
                f"step {step} waited for a slot, and this stream on step {stream.step} gave its own up: it is "
                f"{stream.age_seconds:.0f} s old, {silent:.0f} s of them without a batch; begin again, and send "
                "batches without pauses"
            )
        )

    def _open(self) -> list[EvaluationStream]:
        with self._lock:
            return [stream for stream in self._streams if not stream.is_closed]
