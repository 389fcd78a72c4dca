"""Checkpoints that somebody else's program writes: a folder of files, without manifest, lock or atomic rename.

The writer knows nothing of us: it overwrites files in place and deletes them when it likes. A reader that opened its
files in place could see them torn, and could even make its saving fail (an HDF5 lock). So a file is only ever read,
from front to back, into a private copy, which is used if the file did not change meanwhile and the copy is whole, as
far as its format can tell.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from understudy.checkpoints.errors import DamagedCheckpointError, UnsupportedFormatError
from understudy.checkpoints.foreign import ForeignFiles, Stamps, WholeCopy
from understudy.checkpoints.formats import FORMATS
from understudy.checkpoints.source import Checkpoint, UnreadableCheckpoint
from understudy.checkpoints.stable_copy import FileChangedError
from understudy.checkpoints.staging import ForeignCheckpoint, Staging
from understudy.checkpoints.step_book import StepBook

_SETTLING_SECONDS = 5.0
"""How long a file that does not parse must stay as it is before it counts as damaged, not as being written."""

_STAGED_COPIES = 4
"""How many private copies are kept for a `take` to come; older files are copied again then."""


class FolderSource:
    """The checkpoints of one folder, which need not exist yet: all of one format, see `understudy.checkpoints.formats`.

    A checkpoint's step is its optimizer's count of iterations, else the last integer in its name, else a counter; it is
    remembered in the staging folder. Two that hold the same model are one checkpoint. One that is overwritten gives a
    new checkpoint; the old one can be taken until the new one is found. The first `poll` reads every file.

    Args:
        directory: The writer's folder. Nothing is ever written to it.
        staging: A folder of this source's own, best on the file system of the folders to take into; made if missing.
        takes_variables: Whether somebody can build the model of checkpoints that hold variables alone.
        clock: Seconds, monotonic.

    Raises:
        DamagedCheckpointError: The staging folder's record of steps cannot be read.
    """

    def __init__(
        self,
        directory: Path,
        staging: Path,
        *,
        takes_variables: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._takes_variables = takes_variables
        self._clock = clock
        self._files: dict[Path, _WatchedFile] = {}
        self._staging = Staging(staging)
        self._book = StepBook(staging / "steps.json")

    def poll(self) -> Sequence[Checkpoint]:
        """See `CheckpointSource`. A file that is just being written appears once it is whole."""
        found = self._list()
        self._files = {path: file for path, file in self._files.items() if path in {item.path for item, _ in found}}
        for origin, stamps in found:
            self._watch(origin, stamps)
        self._drop_old_copies()
        return sorted(self._found(), key=lambda checkpoint: checkpoint.step)

    def glance(self) -> object:
        """See `CheckpointSource`. Nothing tells that costs less than looking."""
        return None

    def check(self) -> None:
        """Raise UnsupportedFormatError if the folder holds what cannot be read; see `poll`."""
        self._list_paths()

    def _found(self) -> Collection[Checkpoint]:
        """Return the last checkpoint of every file, each model once."""
        checkpoints = (file.checkpoint for file in self._files.values())
        return {checkpoint.digest: checkpoint for checkpoint in checkpoints if checkpoint}.values()

    def _drop_old_copies(self) -> None:
        newest_first = sorted(self._found(), key=lambda checkpoint: checkpoint.created_at, reverse=True)
        self._staging.keep({checkpoint.digest for checkpoint in newest_first[:_STAGED_COPIES]})

    def _list(self) -> list[tuple[ForeignFiles, Stamps]]:
        """Return the checkpoints to read, in the order of their last change."""
        found = []
        for origin in self._list_paths():
            with contextlib.suppress(FileNotFoundError):  # Deleted since it was listed.
                found.append((origin, origin.stamps()))
        return sorted(found, key=lambda item: (item[1].modified_ns, item[0].path))

    def _list_paths(self) -> list[ForeignFiles]:
        try:
            by_format = {format_: [*format_.find(self._directory)] for format_ in FORMATS}
        except FileNotFoundError:
            return []
        present = [format_ for format_, paths in by_format.items() if paths]
        if len(present) > 1:
            examples = ", ".join(by_format[format_][0].name for format_ in present)
            raise UnsupportedFormatError(
                f"{self._directory} holds {' and '.join(format_.description for format_ in present)} ({examples}); put "
                "the checkpoints to read into a folder of their own",
            )
        for format_ in present:
            if not (format_.kind.is_whole or self._takes_variables):
                raise UnsupportedFormatError(
                    f"{self._directory} holds {format_.description} ({by_format[format_][0].name}), which hold "
                    "variables without their model; give the experiment that builds it, or save whole models",
                )
        return [ForeignFiles(format=format_, path=path) for format_ in present for path in by_format[format_]]

    def _watch(self, origin: ForeignFiles, stamps: Stamps) -> None:
        """Copy and read a checkpoint if it changed since it was last read, and note what came of it."""
        file = self._files.setdefault(origin.path, _WatchedFile(stamps=stamps, since=self._clock()))
        if file.stamps != stamps:
            file.stamps, file.since, file.settled = stamps, self._clock(), False
        if file.settled:
            return
        try:
            whole = self._staging.stage(origin)
        except (FileNotFoundError, FileChangedError):
            return
        except DamagedCheckpointError as error:
            if self._clock() - file.since >= _SETTLING_SECONDS:
                file.checkpoint = self._unreadable(origin, stamps, error)
                file.settled = True
            return
        file.checkpoint = self._foreign(origin, whole)
        file.stamps, file.settled = whole.stamps, True
        self._drop_old_copies()

    def _foreign(self, origin: ForeignFiles, whole: WholeCopy) -> Checkpoint:
        digest = whole.content.digest
        return ForeignCheckpoint(
            step=self._book.assign(digest, iterations=whole.content.iterations, name=origin.format.stem(origin.path)),
            digest=digest,
            created_at=whole.stamps.modified_ns / 1e9,
            origin=origin,
            staging=self._staging,
        )

    def _unreadable(self, origin: ForeignFiles, stamps: Stamps, error: DamagedCheckpointError) -> Checkpoint:
        digest = hashlib.sha256(f"{origin.path.name}\0{stamps}".encode()).hexdigest()
        return UnreadableCheckpoint(
            step=self._book.assign(digest, iterations=None, name=origin.format.stem(origin.path)),
            digest=digest,
            created_at=stamps.modified_ns / 1e9,
            error=error,
        )


@dataclass(kw_only=True)
class _WatchedFile:
    """A checkpoint: how it looked when last listed, since when, whether that was read, and what it gave last."""

    stamps: Stamps
    since: float
    settled: bool = False
    checkpoint: Checkpoint | None = None
