"""The checkpoints that are still to be evaluated."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from understudy.evaluator.settings import EvaluationPolicy
from understudy.evaluator.types import CheckpointInfo


class Backlog:
    """Returns checkpoints in step order, one at a time. Thread-safe.

    Args:
        policy: ``latest`` skips waiting checkpoints when a newer one arrives; any other policy returns all of them.
    """

    def __init__(self, policy: EvaluationPolicy | int) -> None:
        self._policy = policy
        self._changed = threading.Condition()
        self._waiting: dict[int, CheckpointInfo] = {}
        self._given_out: CheckpointInfo | None = None
        self._closed = False

    def offer(self, checkpoints: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
        """Replace the waiting checkpoints; return the skipped ones, which `next` will not return."""
        with self._changed:
            waiting = {info.step: info for info in checkpoints if info != self._given_out}
            passed_over: list[CheckpointInfo] = []
            if self._policy == "latest" and waiting:
                newest = max(waiting)
                passed_over = [waiting.pop(step) for step in sorted(waiting) if step != newest]
            self._waiting = waiting
            self._changed.notify_all()
            return passed_over

    def next(self) -> CheckpointInfo | None:
        """Wait for the lowest step and return it; None once closed. `finished` must follow."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            if self._closed:
                return None
            self._given_out = self._waiting.pop(min(self._waiting))
            return self._given_out

    def finished(self) -> None:
        """Mark the checkpoint from `next` as done, for now or permanently."""
        with self._changed:
            self._given_out = None

    def close(self) -> None:
        """Return no more checkpoints."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
