"""A writer's checkpoint as it lies in the writer's folder, and private copies of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from understudy.checkpoints.checkpoint_errors import DamagedCheckpointError
from understudy.checkpoints.formats import Content, Format
from understudy.checkpoints.stable_copy import FileChangedError, Stamp, stable_copy


@dataclass(frozen=True, kw_only=True)
class Stamps:
    """The status of each of a checkpoint's files, by the name that its copy has: what changes when one is written."""

    files: tuple[tuple[str, Stamp], ...]

    @classmethod
    def of(cls, files: Mapping[str, Path]) -> Self:
        """Read them; raise FileNotFoundError if a file is not there any more."""
        return cls(files=tuple((name, Stamp.of(path.stat())) for name, path in sorted(files.items())))

    @property
    def modified_ns(self) -> int:
        """When the last of them was written, in nanoseconds since the epoch of Unix."""
        return max(stamp.modified_ns for _, stamp in self.files)


@dataclass(frozen=True, kw_only=True)
class ForeignFiles:
    """A checkpoint in a writer's folder. ``path`` is its file, its folder or the common beginning of its files."""

    format: Format
    path: Path

    def stamps(self) -> Stamps:
        """Return the status of its files now; raise FileNotFoundError if it is not there any more."""
        return Stamps.of(self.format.files(self.path))

    def copy_into(self, folder: Path) -> WholeCopy:
        """Copy it and look into the copy. Nothing of the writer's is opened but for reading, front to back, unlocked.

        Raises:
            FileNotFoundError: It is not there any more.
            FileChangedError: It changed meanwhile, or just before.
            DamagedCheckpointError: It did not change, but it is not whole.
            OSError: Copying failed otherwise. After any error there may be a part of the copy.
        """
        files = self.format.files(self.path)
        stamps = Stamps.of(files)
        if 0 <= time.time() - stamps.modified_ns / 1e9 < self.format.settle_seconds:
            raise FileChangedError(f"{self.path} was written just now")
        for name, stamp in stamps.files:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if stable_copy(files[name], target) != stamp:
                raise FileChangedError(f"{files[name]} changed before it was copied")
        if self.stamps() != stamps:
            raise FileChangedError(f"{self.path} changed while it was being copied")
        try:
            content = self.format.inspect(folder / self.format.kind.file_name)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"{self.path}: {error}") from error
        return WholeCopy(content=content, stamps=stamps)


@dataclass(frozen=True, kw_only=True)
class WholeCopy:
    """What a copy that was found whole says, and the status of the files when they were copied."""

    content: Content
    stamps: Stamps
