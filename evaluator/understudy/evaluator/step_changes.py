"""Which steps changed, so that a reader of many steps looks only at these again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator


class StepChanges:
    """Notes which steps changed, for any number of `ChangedSteps`. Thread-safe, but for the construction of readers."""

    def __init__(self) -> None:
        self._readers: list[ChangedSteps] = []

    def add_reader(self, reader: ChangedSteps) -> None:
        """Add a reader of later changes."""
        self._readers.append(reader)

    def note(self, *steps: int) -> None:
        """Note steps. Call it after the change, so that a reader of the note finds the new state."""
        for reader in self._readers:
            reader.add(steps)


class ChangedSteps:
    """The steps that changed since they were read last. Thread-safe.

    Args:
        sources: Where the changes are noted.
    """

    def __init__(self, *sources: StepChanges) -> None:
        self._lock = threading.Lock()
        self._steps: set[int] = set()
        for source in sources:
            source.add_reader(self)

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, steps: Iterable[int]) -> None:
        """Add steps."""
        with self._lock:
            self._steps.update(steps)

    @contextlib.contextmanager
    def read(self) -> Iterator[list[int]]:
        """Take the steps, ascending. They stay changed if the body raises."""
        with self._lock:
            steps, self._steps = self._steps, set()
        try:
            yield sorted(steps)
        except BaseException:
            self.add(steps)
            raise
