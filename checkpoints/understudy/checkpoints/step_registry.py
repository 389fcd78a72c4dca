"""Assigns steps to foreign checkpoints, and remembers them across restarts."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from understudy.checkpoints.atomic import write_json
from understudy.checkpoints.checkpoint_errors import DamagedCheckpointError
from understudy.checkpoints.layout import MAX_STEP

_MOST_DIGITS = 12
_FILE = "file:"
"""The prefix of a file's identity in the stored registry; all other names are digests."""


class StepRegistry:
    """Assigns each digest a unique, permanent step from 0 to `MAX_STEP`. For one thread at a time.

    Args:
        path: The JSON file that stores the steps; its folder exists.

    Raises:
        DamagedCheckpointError: The file is not a step registry.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        stored = _read(path)
        self._steps = {name: step for name, step in stored.items() if not name.startswith(_FILE)}
        self._reserved = {name: step for name, step in stored.items() if name.startswith(_FILE)}
        self._assigned = set(self._steps.values())
        self._highest = max(stored.values(), default=0)
        self._is_saved = True

    def reserve(self, files: Iterable[tuple[str, str]]) -> list[int]:
        """Return the steps that files get unless their content says otherwise, so that they may be read in any order.

        A reservation lasts until `keep_reserved`. Once the file's step is assigned, that is its reservation.

        Args:
            files: The identity (which changes with the content) and the name of each file, the oldest first.
        """
        taken = {*self._assigned, *self._reserved.values()}
        steps = []
        for file, name in files:
            key = _FILE + file
            if key not in self._reserved:
                number = last_integer(name)
                self._note(self._reserved, key, self._next() if number is None or number in taken else number)
                taken.add(self._reserved[key])
            steps.append(self._reserved[key])
        return steps

    def assign(self, digest: str, *, iterations: int | None, name: str, file: str) -> int:
        """Return the step of a digest, chosen when it is first seen.

        It is the optimizer's count, else the step reserved for the file, else the last integer in the file's name, else
        the number after the highest step so far. A step that is already assigned to another digest is not used again.
        Integers of more than 12 digits are dates or hashes, not steps.
        """
        key = _FILE + file
        if digest not in self._steps:
            step = self._choose(iterations, self._reserved.get(key, last_integer(name)))
            self._note(self._steps, digest, step)
            self._assigned.add(step)
        if key in self._reserved and self._reserved[key] != self._steps[digest]:
            self._note(self._reserved, key, self._steps[digest])
        return self._steps[digest]

    def release(self, digest: str) -> None:
        """Drop the assignment of a digest that no checkpoint has any more, so that its step can be assigned again."""
        step = self._steps.pop(digest, None)
        if step is not None:
            self._assigned.discard(step)
            self._is_saved = False

    def keep_reserved(self, files: Collection[str]) -> None:
        """Drop the reservations of all other files."""
        kept = {_FILE + file for file in files}
        if not self._reserved.keys() <= kept:
            self._reserved = {key: step for key, step in self._reserved.items() if key in kept}
            self._is_saved = False

    def save(self) -> None:
        """Write the steps to disk. Call this before the steps are published.

        Raises:
            OSError: The file could not be written; the next call tries again.
        """
        if not self._is_saved:
            write_json(self._path, {**self._steps, **self._reserved})
            self._is_saved = True

    def _note(self, steps: dict[str, int], name: str, step: int) -> None:
        steps[name] = step
        self._highest = max(self._highest, step)
        self._is_saved = False

    def _choose(self, *candidates: int | None) -> int:
        for step in candidates:
            if step is not None and step not in self._assigned:
                return step
        return self._next()

    def _next(self) -> int:
        if self._highest < MAX_STEP:
            return self._highest + 1
        taken = {*self._assigned, *self._reserved.values()}
        return next(step for step in range(MAX_STEP, 0, -1) if step not in taken)


def last_integer(name: str) -> int | None:
    """Return the last run of at most 12 digits in a name, or None."""
    digits = re.findall(rf"(?<![0-9])[0-9]{{1,{_MOST_DIGITS}}}(?![0-9])", name)
    return int(digits[-1]) if digits else None


def number_beyond_steps(name: str) -> str | None:
    """Return a number in a name that stands alone, between other signs than letters, and is above `MAX_STEP`."""
    numbers = re.findall(r"(?<![0-9A-Za-z])[0-9]+(?![0-9A-Za-z])", name)
    return next((number for number in numbers if int(number) > MAX_STEP), None)


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
