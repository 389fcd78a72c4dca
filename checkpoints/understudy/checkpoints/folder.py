"""Checkpoints that a plain Keras script writes: a folder of ``*.keras`` files, without manifest, lock or atomic rename.

The writer knows nothing of us: it overwrites files in place and deletes them when it likes. A reader that opened its
files in place could see them torn, and could even make its saving fail (an HDF5 lock). So a file is only ever read,
from front to back, into a private copy, which is used if the file did not change meanwhile and every checksum in it is
right.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from understudy.checkpoints.errors import DamagedCheckpointError, UnsupportedFormatError
from understudy.checkpoints.source import Checkpoint, UnreadableCheckpoint
from understudy.checkpoints.stable_copy import FileChangedError, Stamp
from understudy.checkpoints.staging import ForeignCheckpoint, Staging, WholeFile
from understudy.checkpoints.step_book import StepBook

_SETTLING_SECONDS = 5.0
"""How long a file that does not parse must stay as it is before it counts as damaged, not as being written."""

_STAGED_COPIES = 4
"""How many private copies are kept for a `take` to come; older files are copied again then."""

_OTHER_FORMATS = ("*.h5", "*.index", "saved_model.pb", "*/saved_model.pb")


class FolderSource:
    """The ``*.keras`` files of one folder, which need not exist yet.

    A file's step is its optimizer's count of iterations, else the last integer in its name, else a counter; it is
    remembered in the staging folder. Two files that hold the same model are one checkpoint. A file that is overwritten
    gives a new checkpoint; the old one can be taken until the new one is found. The first `poll` reads every file.

    Args:
        directory: The writer's folder. Nothing is ever written to it.
        staging: A folder of this source's own, best on the file system of the folders to take into; made if missing.
        clock: Seconds, monotonic.

    Raises:
        DamagedCheckpointError: The staging folder's record of steps cannot be read.
    """

    def __init__(self, directory: Path, staging: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._files: dict[Path, _WatchedFile] = {}
        self._staging = Staging(staging)
        self._book = StepBook(staging / "steps.json")

    def poll(self) -> Sequence[Checkpoint]:
        """See `CheckpointSource`. A file that is just being written appears once it is whole."""
        stamps = self._list()
        self._files = {path: file for path, file in self._files.items() if path in stamps}
        for path, stamp in stamps.items():
            self._watch(path, stamp)
        self._drop_old_copies()
        return sorted(self._found(), key=lambda checkpoint: checkpoint.step)

    def _found(self) -> Collection[Checkpoint]:
        """Return the last checkpoint of every file, each model once."""
        checkpoints = (file.checkpoint for file in self._files.values())
        return {checkpoint.digest: checkpoint for checkpoint in checkpoints if checkpoint}.values()

    def _drop_old_copies(self) -> None:
        newest_first = sorted(self._found(), key=lambda checkpoint: checkpoint.created_at, reverse=True)
        self._staging.keep({checkpoint.digest for checkpoint in newest_first[:_STAGED_COPIES]})

    def _list(self) -> dict[Path, Stamp]:
        """Return the files to read, in the order of their last change."""
        try:
            paths = [path for path in self._directory.iterdir() if _is_candidate(path)]
        except FileNotFoundError:
            return {}
        stamps = {}
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # Deleted since it was listed.
                stamps[path] = Stamp.of(path.stat())
        if not stamps:
            self._refuse_other_formats()
        return dict(sorted(stamps.items(), key=lambda item: (item[1].modified_ns, item[0])))

    def _refuse_other_formats(self) -> None:
        for pattern in _OTHER_FORMATS:
            for path in self._directory.glob(pattern):
                raise UnsupportedFormatError(
                    f"{self._directory} holds {path.relative_to(self._directory)} and no *.keras file; only whole "
                    "models are read: save them with ModelCheckpoint('....keras'), without save_weights_only",
                )

    def _watch(self, path: Path, stamp: Stamp) -> None:
        """Copy and read a file if it changed since it was last read, and note what came of it."""
        file = self._files.setdefault(path, _WatchedFile(stamp=stamp, since=self._clock()))
        if file.stamp != stamp:
            file.stamp, file.since, file.settled = stamp, self._clock(), False
        if file.settled:
            return
        try:
            whole = self._staging.stage(path)
        except (FileNotFoundError, FileChangedError):
            return
        except DamagedCheckpointError as error:
            if self._clock() - file.since >= _SETTLING_SECONDS:
                file.checkpoint = self._unreadable(path, stamp, error)
                file.settled = True
            return
        file.checkpoint = self._foreign(path, whole)
        file.stamp, file.settled = whole.stamp, True
        self._drop_old_copies()

    def _foreign(self, path: Path, whole: WholeFile) -> Checkpoint:
        digest = whole.content.digest
        return ForeignCheckpoint(
            step=self._book.assign(digest, iterations=whole.content.iterations, name=path.name),
            digest=digest,
            created_at=whole.stamp.modified_ns / 1e9,
            origin=path,
            staging=self._staging,
        )

    def _unreadable(self, path: Path, stamp: Stamp, error: DamagedCheckpointError) -> Checkpoint:
        digest = hashlib.sha256(f"{path.name}\0{stamp}".encode()).hexdigest()
        return UnreadableCheckpoint(
            step=self._book.assign(digest, iterations=None, name=path.name),
            digest=digest,
            created_at=stamp.modified_ns / 1e9,
            error=error,
        )


@dataclass(kw_only=True)
class _WatchedFile:
    """A file: how it looked when last listed, since when, whether that was read, and the last checkpoint it gave."""

    stamp: Stamp
    since: float
    settled: bool = False
    checkpoint: Checkpoint | None = None


def _is_candidate(path: Path) -> bool:
    return path.suffix == ".keras" and not path.name.startswith(".") and path.is_file()
