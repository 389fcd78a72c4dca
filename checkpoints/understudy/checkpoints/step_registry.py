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
_FILE, _NAME = "file:", "name:"
"""The prefixes of a file's identity and of its name in the stored registry."""

_BASE, _SINCE, _NEWEST = "base", "since", "newest"
"""The keys of three numbers in the stored registry; all others are digests."""


class StepRegistry:
    """Assigns each digest a unique, permanent step from 0 to `MAX_STEP`. For one thread at a time.

    The number of a checkpoint is its optimizer's count, else the last integer in its file's name; integers of more than
    12 digits are dates or hashes. Its step is this number, unless a training has begun again: then it is the number
    plus the highest step before. A training has begun again if the number of the checkpoint that was written last of
    all belongs to another digest, or its file held another digest and the number is not above all steps; but a file
    that held the highest step gets the next one.

    Args:
        path: The JSON file that stores the steps; its folder exists.

    Raises:
        DamagedCheckpointError: The file is not a step registry.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        stored = _read(path)
        self._base, self._since, self._newest = (stored.pop(key, 0) for key in (_BASE, _SINCE, _NEWEST))
        self._held = {key: stored.pop(key) for key in [*stored] if key.startswith(_NAME)}
        self._reserved = {key: stored.pop(key) for key in [*stored] if key.startswith(_FILE)}
        self._steps = stored
        self._assigned = set(self._steps.values())
        self._highest = max([*self._assigned, *self._reserved.values()], default=0)
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

    def assign(
        self, digest: str, *, iterations: int | None, name: str, file: str, written_ns: int | None = None
    ) -> int:
        """Return the step of a digest, chosen when it is first seen.

        A file whose number is taken, or that was written over a later one, gets the step that is reserved for it.
        Without a reservation it gets a step above all if it was written last, else the next free one below its number.
        A file without a number gets the step that is reserved for it, else the one after the highest.

        Args:
            digest: The checkpoint's content.
            iterations: The number of steps that its optimizer has taken, if it has one.
            name: The name of its file.
            file: The identity of the file, as in `reserve`.
            written_ns: When it was written, in ns since the epoch; None for a file that cannot be read.
        """
        key = _FILE + file
        if digest not in self._steps:
            step = self._choose(iterations, name, self._reserved.get(key), written_ns)
            self._note(self._steps, digest, step)
            self._assigned.add(step)
        step = self._steps[digest]
        if key in self._reserved and self._reserved[key] != step:
            self._note(self._reserved, key, step)
        if written_ns is not None and (self._held.get(_NAME + name) != step or written_ns > self._newest):
            self._newest = max(self._newest, written_ns)
            self._note(self._held, _NAME + name, step)
        return step

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
            numbers = {_BASE: self._base, _SINCE: self._since, _NEWEST: self._newest}
            write_json(self._path, {**self._steps, **self._reserved, **self._held, **numbers})
            self._is_saved = True

    def _note(self, steps: dict[str, int], name: str, step: int) -> None:
        steps[name] = step
        self._highest = max(self._highest, step)
        self._is_saved = False

    def _choose(self, iterations: int | None, name: str, reserved: int | None, written_ns: int | None) -> int:
        number = iterations if iterations is not None or reserved is not None else last_integer(name)
        is_last = written_ns is not None and written_ns > self._newest
        if number is not None:
            step = number + (self._base if written_ns is not None and written_ns > self._since else 0)
            overwrites_later = is_last and _NAME + name in self._held and step <= self._highest
            if step <= MAX_STEP and step not in self._assigned and not overwrites_later:
                return step
        if reserved is not None and reserved not in self._assigned:
            return reserved
        if number is None or written_ns is None or self._held.get(_NAME + name) == self._highest:
            return self._next()
        return self._after_all(number) if is_last else self._free_below(step)

    def _after_all(self, number: int) -> int:
        """Begin to count anew after the highest step."""
        self._base, self._since = self._highest, self._newest
        step = self._base + max(number, 1)
        return step if step <= MAX_STEP else self._next()

    def _free_below(self, step: int) -> int:
        """Return the highest step below that is free, else the one after all."""
        return next((free for free in range(min(step, MAX_STEP), -1, -1) if free not in self._assigned), self._next())

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
