"""Files that say which checkpoint is the best, and which one is pinned."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from understudy.checkpoints.atomic import write_json
from understudy.checkpoints.layout import BEST_FILE
from understudy.evaluator.evaluator_errors import ConfigurationError, StorageError
from understudy.evaluator.serving.ranking import Monitor

PIN_FILE = "pin.json"


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


class PinFile:
    """A file that holds the pinned step or null. For one thread at a time.

    Args:
        directory: The state folder.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / PIN_FILE

    def read(self) -> int | None:
        """Return the pinned step.

        Raises:
            ConfigurationError: The file is damaged.
        """
        try:
            step = json.loads(self._path.read_bytes())["step"]
            return None if step is None else int(step)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{self._path} is damaged ({error}); delete it to serve without a pin") from error

    def write(self, step: int | None) -> None:
        """Replace the pin durably.

        Raises:
            StorageError: The file cannot be written, for example on a full disk. The old pin stays.
        """
        try:
            write_json(self._path, {"step": step})
        except OSError as error:
            raise StorageError(f"the pin {self._path} cannot be written: {error}; check the disk's space") from error


class Pin:
    """The pin that an operator decided last, and the one to return to if that cannot be carried out. Thread-safe.

    Decisions are numbered, from 1 on; a return to the pin before is one as well.

    Args:
        file: Keeps the pin across restarts.
        is_used: Whether there may be a pin; otherwise the file is not read.

    Raises:
        ConfigurationError: The file is damaged.
    """

    def __init__(self, file: PinFile, *, is_used: bool = True) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._step = self._kept = file.read() if is_used else None
        self._decided = self._kept_by = 0

    @property
    def step(self) -> int | None:
        """The pinned step, or None."""
        with self._lock:
            return self._step

    @property
    def decided(self) -> int:
        """The number of the last decision; 0 before the first."""
        with self._lock:
            return self._decided

    def decide(self, step: int) -> int:
        """Pin a step; return the number of the decision."""
        with self._lock:
            self._step = step
            self._decided += 1
            return self._decided

    def remove(self) -> int:
        """Remove the pin, also from the file; return the number of the decision. Raise StorageError if that fails."""
        with self._lock:
            self._file.write(None)
            self._step = self._kept = None
            self._decided += 1
            self._kept_by = self._decided
            return self._decided

    def keep(self, number: int, step: int | None) -> int | None:
        """Write what was decided, once it is carried out, unless a later decision was; return the pin now.

        Raises:
            StorageError: The file cannot be written.
        """
        with self._lock:
            if number > self._kept_by:
                self._file.write(step)
                self._kept, self._kept_by = step, number
            return self._step

    def undo(self, number: int) -> None:
        """Return to the pin that was kept last, if there was no later decision."""
        with self._lock:
            if self._decided == number:
                self._step = self._kept
                self._decided += 1
