"""A foreign checkpoint in its writer's folder, and private copies of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from understudy.checkpoints.checkpoint_errors import DamagedCheckpointError
from understudy.checkpoints.detached import INNER_NAME, LARGEST_BYTES, check_detached, detached_file
from understudy.checkpoints.formats import Content, Format
from understudy.checkpoints.fs import read_within
from understudy.checkpoints.manifest import describe_file
from understudy.checkpoints.signing import AcceptedKeys
from understudy.checkpoints.stable_copy import FileChangedError, Stamp, stable_copy


@dataclass(frozen=True, kw_only=True)
class Stamps:
    """The status of each file of a checkpoint, by the file's name in a copy. A write changes it."""

    files: tuple[tuple[str, Stamp], ...]

    @classmethod
    def of(cls, files: Mapping[str, Path]) -> Self:
        """Read the status of the files; raise FileNotFoundError if one is missing."""
        return cls(files=tuple((name, Stamp.of(path.stat())) for name, path in sorted(files.items())))

    @property
    def modified_ns(self) -> int:
        """The latest modification time of the files, in nanoseconds since the Unix epoch."""
        return max(stamp.modified_ns for _, stamp in self.files)


@dataclass(frozen=True, kw_only=True)
class ForeignFiles:
    """A checkpoint in a writer's folder.

    Attributes:
        format: Its format.
        path: Its file, its folder or the common prefix of its files.
        root: The writer's folder. Symbolic links out of it are not followed.
        accepted: The keys of which one must have signed it; None if it need not be signed.
    """

    format: Format
    path: Path
    root: Path
    accepted: AcceptedKeys | None = None

    def stamps(self) -> Stamps:
        """Return the current status of its files; raise FileNotFoundError if it no longer exists."""
        return Stamps.of(self._files())

    def copy_into(self, folder: Path) -> WholeCopy:
        """Copy it and inspect the copy. The writer's files are only opened for reading, front to back, without locks.

        Raises:
            FileNotFoundError: It no longer exists.
            FileChangedError: It changed meanwhile, or just before.
            UntrustedCheckpointError: It did not change, but it is not signed as required. Then nothing was parsed.
            DamagedCheckpointError: It did not change, but it is incomplete or damaged.
            OSError: Copying failed for another reason. After any error, a partial copy may remain.
        """
        files = self._files()
        stamps = Stamps.of(files)
        if self.format.settle_seconds:
            time.sleep(self.format.settle_seconds)  # its age would be by the clock of another machine
            if self.stamps() != stamps:
                raise FileChangedError(f"{self.path} was written just now")
        for name, stamp in stamps.files:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if stable_copy(files[name], target, root=self.root) != stamp:
                raise FileChangedError(f"{files[name]} changed before it was copied")
        if self.stamps() != stamps:
            raise FileChangedError(f"{self.path} changed while it was being copied")
        if self.accepted is not None:
            self._check_signature(folder, [name for name, _ in stamps.files], self.accepted)
        try:
            content = self.format.inspect(folder / self.format.kind.file_name)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"{self.path}: {error}") from error
        return WholeCopy(content=content, stamps=stamps)

    def _files(self) -> dict[str, Path]:
        """Return its files by their names in a copy; among them its signature, if that is required and there."""
        signature = detached_file(self.path)
        files = {name: path for name, path in self.format.files(self.path).items() if path != signature}
        if self.accepted is not None and signature.exists():
            files[INNER_NAME] = signature
        return files

    def _check_signature(self, folder: Path, names: Iterable[str], accepted: AcceptedKeys) -> None:
        found = {name: describe_file(folder, name).sha256 for name in names if name != INNER_NAME}
        signed = (folder / INNER_NAME).exists()
        content = read_within(folder / INNER_NAME, folder, limit=LARGEST_BYTES) if signed else None
        check_detached(content, found, accepted, origin=self.path, name=self.path.name)


@dataclass(frozen=True, kw_only=True)
class WholeCopy:
    """The content of a complete copy, and the status of the files when they were copied."""

    content: Content
    stamps: Stamps
