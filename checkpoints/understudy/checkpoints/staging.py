"""Private copies of foreign checkpoints, made when they are discovered and handed over when they are fetched."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from understudy.checkpoints.checkpoint_errors import (
    CheckpointGoneError,
    DamagedCheckpointError,
    UntrustedCheckpointError,
    gone_error,
)
from understudy.checkpoints.detached import INNER_NAME
from understudy.checkpoints.foreign import ForeignFiles, WholeCopy
from understudy.checkpoints.fs import has_nothing, link_or_copy, remove_folder, sweep, temporary_folder
from understudy.checkpoints.kinds import ModelKind
from understudy.checkpoints.local_checkpoint import LocalCheckpoint, fetch_once
from understudy.checkpoints.manifest import Manifest, describe_file
from understudy.checkpoints.stable_copy import FileChangedError


class Staging:
    """A folder of private copies, each a folder named by its digest. Thread-safe.

    Args:
        folder: A private folder, for which `clear` is called first.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Create the folder if it is missing, and delete the copies of an earlier process."""
        self._folder.mkdir(parents=True, exist_ok=True)
        sweep(self._folder)
        with self._lock:
            for copy in self._folder.glob("[!.]*"):
                if copy.is_dir():
                    remove_folder(copy)

    def stage(self, origin: ForeignFiles) -> WholeCopy:
        """Copy a writer's checkpoint into this folder. Raises as `ForeignFiles.copy_into`; then no copy remains."""
        with temporary_folder(self._folder / origin.format.kind.file_name) as folder:
            whole = origin.copy_into(folder)
            with self._lock:
                target = self._folder / whole.content.digest
                remove_folder(target)
                folder.rename(target)
        return whole

    def hand_over(self, digest: str, target: Path) -> bool:
        """Move the files of the copy with a digest into ``target``; return False if there is none."""
        with self._lock:
            copy = self._folder / digest
            if not copy.is_dir():
                return False
            for name in _files_in(copy):
                link_or_copy(copy / name, target / name, root=copy)
            remove_folder(copy)
            return True

    def drop(self, digest: str) -> None:
        """Delete the copy with a digest, if there is one."""
        with self._lock:
            remove_folder(self._folder / digest)


@dataclass(frozen=True, kw_only=True)
class ForeignCheckpoint:
    """A checkpoint in another program's folder, at ``origin``. See `Checkpoint`."""

    step: int
    digest: str
    created_at: float
    origin: ForeignFiles
    staging: Staging
    final: bool = False
    manifest: Manifest | None = None
    copies: bool = True

    @property
    def kind(self) -> ModelKind | None:
        """See `Checkpoint`."""
        return self.origin.format.kind

    def fetch(self, into: Path, *, verify: bool = True) -> LocalCheckpoint:
        """See `Checkpoint`."""
        return fetch_once(
            into, step=self.step, digest=self.digest, fill=self._fill, verify=verify, accepted=self.origin.accepted
        )

    def _fill(self, folder: Path) -> Manifest:
        if not self.staging.hand_over(self.digest, folder):
            self._copy_again(folder)
        return Manifest(
            step=self.step,
            epoch=None,
            created_at=self.created_at,
            final=self.final,
            digest=self.digest,
            kind=self.origin.format.kind,
            files=tuple(describe_file(folder, name) for name in _files_in(folder) if name != INNER_NAME),
        )

    def _copy_again(self, folder: Path) -> None:
        gone = f"{self.origin.path} was overwritten or deleted before step {self.step} could be fetched"
        try:
            whole = self.origin.copy_into(folder)
        except (FileNotFoundError, FileChangedError, DamagedCheckpointError, UntrustedCheckpointError) as error:
            root = self.origin.root
            raise gone_error(gone, folder=root, is_gone=has_nothing(root)) from error
        if whole.content.digest != self.digest:
            raise CheckpointGoneError(gone)


def _files_in(folder: Path) -> list[str]:
    """Return the paths of all files below a folder, relative to it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
