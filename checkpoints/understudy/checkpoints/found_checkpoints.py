"""What a source of checkpoints found, and what has changed since it was polled last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from understudy.checkpoints.source import Changes, Checkpoint


def not_there_yet(folder: Path | str) -> str:
    """Return what to say about a folder of checkpoints that does not exist."""
    return f"there is no folder {folder} yet; if nothing is to create it, the path is mistyped"


def unread_now(newest: Path, reason: str, *, count: int) -> str:
    """Return what to say about checkpoints that this machine cannot read now, of which this is the newest."""
    others = f", nor can {count - 1} more" if count > 1 else ""
    return f"{newest} cannot be read{others}: {reason}"


class FoundCheckpoints:
    """The checkpoints of one source by their steps. For one thread at a time."""

    def __init__(self) -> None:
        self._found: dict[int, Checkpoint] = {}
        self._changed: dict[int, Checkpoint | None] = {}

    def set(self, step: int, checkpoint: Checkpoint | None) -> None:
        """Set the checkpoint of a step; None for none. Another object is a change."""
        if self._found.get(step) is checkpoint:
            return
        if checkpoint is None:
            del self._found[step]
        else:
            self._found[step] = checkpoint
        self._changed[step] = checkpoint

    def update(self, changes: Mapping[int, Checkpoint | None]) -> None:
        """Set the checkpoints of several steps."""
        for step, checkpoint in changes.items():
            self.set(step, checkpoint)

    def replace(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Set the checkpoints of all steps."""
        present = {checkpoint.step: checkpoint for checkpoint in checkpoints}
        for step in [step for step in self._found if step not in present]:
            self.set(step, None)
        self.update(present)

    def take_changes(self) -> Changes:
        """Return what has changed since the last call."""
        changes, self._changed = self._changed, {}
        return changes

    def get(self, step: int) -> Checkpoint | None:
        """Return the checkpoint of a step, or None."""
        return self._found.get(step)

    def in_order(self) -> Sequence[Checkpoint]:
        """Return all checkpoints in step order."""
        return [self._found[step] for step in sorted(self._found)]
