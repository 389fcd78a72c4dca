"""The checkpoints that wait to be evaluated."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from sortedcontainers import SortedDict

from understudy.evaluator.types import CheckpointInfo, CheckpointKey


class Backlog:
    """Returns checkpoints in step order, one at a time. Thread-safe.

    A checkpoint that is offered waits until it is withdrawn; when `next` has returned it, from the next `update` or
    `replace` after `finished` on.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._offered: dict[CheckpointKey, CheckpointInfo] = {}
        self._waiting: SortedDict[CheckpointKey, CheckpointInfo] = SortedDict()
        self._before: CheckpointKey | None = None
        self._evaluating: CheckpointInfo | None = None
        self._finished: list[CheckpointKey] = []
        self._closed = False

    def update(
        self, *, offered: Iterable[CheckpointInfo], withdrawn: Iterable[CheckpointKey], before: CheckpointKey | None
    ) -> None:
        """Offer and withdraw checkpoints. The others stay.

        Args:
            offered: Wait from now on.
            withdrawn: Do not wait any more.
            before: The first checkpoint that `next` must not reach; None if there is none.
        """
        with self._changed:
            for key in withdrawn:
                self._offered.pop(key, None)
                self._waiting.pop(key, None)
            self._offer(offered)
            self._before = before
            self._changed.notify_all()

    def replace(self, offered: Iterable[CheckpointInfo]) -> CheckpointInfo | None:
        """Offer only these checkpoints; return the one that is being evaluated, or None."""
        with self._changed:
            self._offered.clear()
            self._waiting.clear()
            self._offer(offered)
            self._changed.notify_all()
            return self._evaluating

    def _offer(self, offered: Iterable[CheckpointInfo]) -> None:
        evaluating = None if self._evaluating is None else self._evaluating.key
        new = {info.key: info for info in offered}
        self._offered.update(new)
        for key in (*self._finished, *new):
            if key in self._offered and key != evaluating:
                self._waiting[key] = self._offered[key]
        self._finished.clear()

    def __len__(self) -> int:
        """The number of checkpoints that wait or are being evaluated."""
        with self._changed:
            before = self._before
            waiting = len(self._waiting) if before is None else self._waiting.bisect_left(before)
            return waiting + (self._evaluating is not None)

    def next(self) -> CheckpointInfo | None:
        """Wait for the lowest step and return it; None once closed. `finished` must follow."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._is_ready())
            if self._closed:
                return None
            _, info = self._waiting.popitem(0)
            self._evaluating = info
            return self._evaluating

    def _is_ready(self) -> bool:
        return bool(self._waiting) and (self._before is None or self._waiting.peekitem(0)[0] < self._before)

    def finished(self) -> None:
        """Mark the checkpoint from `next` as done, for now or permanently."""
        with self._changed:
            if self._evaluating is not None:
                self._finished.append(self._evaluating.key)
            self._evaluating = None

    def close(self) -> None:
        """Return no more checkpoints."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
