"""Checkpoints made ready beside a run folder, so that committing one is a rename and nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from understudy.checkpoints import CheckpointPublisher, RunDir
from understudy.checkpoints.atomic import sync
from understudy.checkpoints.layout import MODEL_FILE


class StagedCheckpoints:
    """Checkpoints of one model, which take turns with the contents of a few files.

    They are published into a folder nobody watches, and moved into the run folder, which a service follows, one by one.

    Args:
        folder: Where both folders are made, on one file system.
        files: The ``.keras`` files whose contents take turns.
        count: How many.
    """

    def __init__(self, folder: Path, files: Sequence[Path], *, count: int) -> None:
        self.run = RunDir(folder / "run")
        self._staged = RunDir(folder / "staged")
        self._next = 1
        self._count = count
        self.run.checkpoints.mkdir(parents=True)
        publisher = CheckpointPublisher(self._staged, keep=count)
        for step in range(1, count + 1):
            source = files[step % len(files)]

            def link(into: Path, source: Path = source) -> None:
                os.link(source, into / MODEL_FILE)

            publisher.publish(step, link, epoch=None, final=False, metrics={}, signature=None)

    @property
    def left(self) -> int:
        """How many are not committed yet."""
        return self._count - self._next + 1

    def commit(self) -> tuple[int, float]:
        """Commit the next one; return its step and the moment, in seconds since the epoch, at which it was there."""
        step = self._next
        self._next += 1
        self._staged.checkpoint(step).rename(self.run.checkpoint(step))
        committed = time.time()
        sync(self.run.checkpoints)
        return step, committed
