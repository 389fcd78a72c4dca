"""Assigns steps to foreign checkpoints, and remembers them across restarts."""

from __future__ import annotations

import json
import re
from pathlib import Path

from understudy.checkpoints.atomic import write_json
from understudy.checkpoints.checkpoint_errors import DamagedCheckpointError


class StepRegistry:
    """Assigns each digest a unique, permanent step. For one thread at a time.

    Args:
        path: The JSON file that stores the steps; its folder exists.

    Raises:
        DamagedCheckpointError: The file is not a step registry.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._steps = _read(path)
        self._given = set(self._steps.values())
        self._is_saved = True

    def assign(self, digest: str, *, iterations: int | None, name: str) -> int:
        """Return the step of a digest, chosen when it is first seen.

        It is the optimizer's count, else the last integer in the file's name, else the number after the highest step
        so far. A step that is already assigned to another digest is not used again. Integers of more than 12 digits
        are dates or hashes, not steps.
        """
        if digest not in self._steps:
            step = self._choose(iterations, name)
            self._steps[digest] = step
            self._given.add(step)
            self._is_saved = False
        return self._steps[digest]

    def save(self) -> None:
        """Write the assigned steps to disk. Call this before the steps are published.

        Raises:
            OSError: The file could not be written; the next call tries again.
        """
        if not self._is_saved:
            write_json(self._path, self._steps)
            self._is_saved = True

    def _choose(self, iterations: int | None, name: str) -> int:
        for step in (iterations, last_integer(name)):
            if step is not None and step not in self._given:
                return step
        return max(self._given, default=0) + 1


def last_integer(name: str) -> int | None:
    """Return the last run of at most 12 digits in a name, or None."""
    digits = re.findall(r"(?<![0-9])[0-9]{1,12}(?![0-9])", name)
    return int(digits[-1]) if digits else None


def _read(path: Path) -> dict[str, int]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    try:
        return {str(digest): int(step) for digest, step in json.loads(content).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(
            f"{path} is not a step registry ({error}); delete it to assign new steps"
        ) from error
