"""Private copies of foreign checkpoints, made when they are discovered and handed over when they are taken."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from understudy.checkpoints.errors import CheckpointGoneError, DamagedCheckpointError
from understudy.checkpoints.folders import link_or_copy, sweep
from understudy.checkpoints.keras_file import KerasFile, inspect
from understudy.checkpoints.layout import MODEL_FILE, TEMPORARY_PREFIX
from understudy.checkpoints.manifest import Manifest, describe_file
from understudy.checkpoints.stable_copy import FileChangedError, Stamp, stable_copy
from understudy.checkpoints.taken import TakenCheckpoint, take_once

_SUFFIX = ".keras"


@dataclass(frozen=True, kw_only=True)
class WholeFile:
    """A foreign file that was copied and found whole: what it says, and its status when it was copied."""

    content: KerasFile
    stamp: Stamp


def copy_whole(origin: Path, copy: Path) -> WholeFile:
    """Copy a writer's file and look into the copy.

    Raises:
        FileNotFoundError: There is no such file.
        FileChangedError: It changed while it was being copied.
        DamagedCheckpointError: It did not change, but it is not a whole ``.keras`` file.
        OSError: Copying failed otherwise. After any error there may be a part of the copy.
    """
    stamp = stable_copy(origin, copy)
    try:
        return WholeFile(content=inspect(copy), stamp=stamp)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{origin}: {error}") from error


class Staging:
    """A folder of private copies, named by digest. Thread-safe.

    Args:
        folder: Its own; emptied of copies, as nobody knows them after a restart.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
        self._folder = folder
        self._lock = threading.Lock()
        self.keep(())

    def stage(self, origin: Path) -> WholeFile:
        """Copy a writer's file into this folder. Raises as `copy_whole` does; then no copy is left."""
        copy = self._folder / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}{_SUFFIX}"
        try:
            whole = copy_whole(origin, copy)
            with self._lock:
                copy.rename(self._path(whole.content.digest))
        finally:
            copy.unlink(missing_ok=True)
        return whole

    def hand_over(self, digest: str, target: Path) -> bool:
        """Give away the copy with a digest as ``target``; return False if there is none."""
        with self._lock:
            copy = self._path(digest)
            try:
                link_or_copy(copy, target)
            except FileNotFoundError:
                return False
            copy.unlink()
            return True

    def keep(self, digests: Collection[str]) -> None:
        """Delete every copy but those with these digests."""
        with self._lock:
            for copy in self._folder.glob(f"[!.]*{_SUFFIX}"):
                if copy.stem not in digests:
                    copy.unlink()

    def _path(self, digest: str) -> Path:
        return self._folder / f"{digest}{_SUFFIX}"


@dataclass(frozen=True, kw_only=True)
class ForeignCheckpoint:
    """A checkpoint that was found in somebody else's file, ``origin``. See `Checkpoint`."""

    step: int
    digest: str
    created_at: float
    origin: Path
    staging: Staging
    final: bool = False
    manifest: Manifest | None = None

    def take(self, into: Path) -> TakenCheckpoint:
        """See `Checkpoint`."""
        return take_once(into, digest=self.digest, fill=self._fill)

    def _fill(self, folder: Path) -> Manifest:
        model_file = folder / MODEL_FILE
        if not self.staging.hand_over(self.digest, model_file):
            self._copy_again(model_file)
        return Manifest(
            step=self.step,
            epoch=None,
            created_at=self.created_at,
            final=self.final,
            digest=self.digest,
            files=(describe_file(folder, MODEL_FILE),),
        )

    def _copy_again(self, model_file: Path) -> None:
        gone = f"{self.origin} was overwritten or deleted before step {self.step} could be taken"
        try:
            whole = copy_whole(self.origin, model_file)
        except (FileNotFoundError, FileChangedError, DamagedCheckpointError) as error:
            raise CheckpointGoneError(gone) from error
        if whole.content.digest != self.digest:
            raise CheckpointGoneError(gone)
