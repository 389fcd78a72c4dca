"""Publishes the best checkpoint in a file, for programs that do not query the server."""

from __future__ import annotations

from pathlib import Path

from understudy.checkpoints.atomic import write_json
from understudy.checkpoints.layout import BEST_FILE
from understudy.evaluator.serving.promotion import Monitor


class BestFile:
    """The file ``best.json`` in the state folder. For one thread at a time.

    It holds ``step`` and ``value``, and the criterion: ``dataset``, ``metric`` and ``mode``. The checkpoint itself is
    in the state folder's ``leases/`` while it is the best.

    Args:
        directory: The state folder.
        monitor: The criterion for the best checkpoint; None if there is none.
    """

    def __init__(self, directory: Path, monitor: Monitor | None) -> None:
        self._path = directory / BEST_FILE
        self._monitor = monitor
        self._written: tuple[int, float] | None = None

    def publish(self, step: int, value: float) -> None:
        """Write the best step and its value if they have changed; raise OSError if that fails."""
        if self._monitor is None or (step, value) == self._written:
            return
        by = {"dataset": self._monitor.dataset, "metric": self._monitor.metric, "mode": self._monitor.mode}
        write_json(self._path, {"step": step, "value": value, **by})
        self._written = (step, value)
