"""Says on disk which checkpoint is best, for those who do not ask the server."""

from __future__ import annotations

from pathlib import Path

from understudy.checkpoints.atomic import write_json
from understudy.checkpoints.layout import BEST_FILE
from understudy.evaluator.lifecycle.promotion import Monitor


class BestFile:
    """The file ``best.json`` in the state folder. For one thread at a time.

    It holds ``step``, ``value``, and by what it is best: ``dataset``, ``metric`` and ``mode``. The checkpoint itself is
    in the state folder's ``leases/``, for as long as it is the best.

    Args:
        directory: The state folder.
        monitor: What makes a checkpoint the best; None if nothing does.
    """

    def __init__(self, directory: Path, monitor: Monitor | None) -> None:
        self._path = directory / BEST_FILE
        self._monitor = monitor
        self._written: tuple[int, float] | None = None

    def publish(self, step: int, value: float) -> None:
        """Write down the best step and its value, if they are news; raise OSError if that is not possible."""
        if self._monitor is None or (step, value) == self._written:
            return
        by = {"dataset": self._monitor.dataset, "metric": self._monitor.metric, "mode": self._monitor.mode}
        write_json(self._path, {"step": step, "value": value, **by})
        self._written = (step, value)
