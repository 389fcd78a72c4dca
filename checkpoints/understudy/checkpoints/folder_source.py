"""Checkpoints that another program writes: a folder of files, without manifest, lock or atomic rename.

The writer overwrites files in place and deletes them at any time. A reader that opens its files in place may see a
partial write, and may even make the writer's save fail (an HDF5 lock). Therefore each file is only read once, from
front to back, into a private copy. The copy is used if the file did not change meanwhile and the format's checks find
the copy complete.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from understudy.checkpoints.checkpoint_errors import (
    CheckpointError,
    CheckpointGoneError,
    DamagedCheckpointError,
    LocationGoneError,
    UnsupportedFormatError,
    UntrustedCheckpointError,
)
from understudy.checkpoints.foreign import ForeignFiles, Stamps, WholeCopy
from understudy.checkpoints.formats import FORMATS, Content, unread_reason
from understudy.checkpoints.found_checkpoints import FoundCheckpoints, not_there_yet, unread_now
from understudy.checkpoints.fs import has_nothing
from understudy.checkpoints.layout import MAX_STEP
from understudy.checkpoints.pauses import doubling_pause
from understudy.checkpoints.signing import AcceptedKeys
from understudy.checkpoints.source import Changes, Checkpoint, UnreadableCheckpoint, is_refused
from understudy.checkpoints.stable_copy import FileChangedError
from understudy.checkpoints.staging import ForeignCheckpoint, Staging
from understudy.checkpoints.step_registry import StepRegistry, last_integer, number_beyond_steps

_log = logging.getLogger(__name__)

_SETTLING_SECONDS = 5.0
"""How long files that do not parse, or to which their writer may add one, must stay unchanged before they count as they
are rather than as half written."""

_STAGED_COPIES = 4
"""How many private copies are kept for a later `Checkpoint.fetch`; older checkpoints are copied again."""

_READING_SECONDS = 0.5
"""How long a poll reads. The first poll reads at most `_STAGED_COPIES` files, so that the newest is served early."""

_RETRY_SECONDS = 0.5
_LONGEST_RETRY_SECONDS = 30.0
"""How long a file is left alone that this machine could not read, at first and at most."""


_Listed = tuple[ForeignFiles, Stamps]
"""A checkpoint in the folder, and its status when it was listed."""


class FolderSource:
    """The checkpoints of one folder, which need not exist yet: all of one format, see `understudy.checkpoints.formats`.

    A checkpoint's step is its optimizer's iteration count, else the last integer in its name, else a counter; those of
    a training that begins again follow those of the one before (see `StepRegistry`). The staging folder stores the
    steps. Two files with the same model are one checkpoint. Overwriting a file gives a new checkpoint; the old one can
    be fetched until the new one is found.

    Each file is read once, newest first, and again when it or the accepted keys change. A `poll` reads for about
    `_READING_SECONDS`. Files whose names have no integer of their own get their steps from the counter: a few are read
    in order; more have their steps reserved in order before any is read. A file that is deleted before it is read gives
    a checkpoint whose `fetch` raises CheckpointGoneError, and one whose step would be above `MAX_STEP` or negative one
    whose `fetch` raises DamagedCheckpointError.

    Args:
        directory: The writer's folder. This source never writes to it.
        staging: A private folder of this source, ideally on the file system that checkpoints are fetched to. The first
            `poll` creates it, or empties it of the copies of an earlier process.
        takes_variables: Whether the caller can build the model for checkpoints that hold only variables.
        accepted: The keys of which one must have signed each checkpoint, in a file of its own beside it; None if they
            need not be signed.
        is_mirror: Whether the folder is a copy, so that it is empty if all checkpoints were deleted. Otherwise it may
            be the mount point of a mount that is lost.
        clock: Monotonic clock, in seconds.

    Raises:
        DamagedCheckpointError: The staging folder's record of steps cannot be read.
    """

    def __init__(
        self,
        directory: Path,
        staging: Path,
        *,
        takes_variables: bool = False,
        accepted: AcceptedKeys | None = None,
        is_mirror: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._takes_variables = takes_variables
        self._accepted = accepted
        self._is_mirror = is_mirror
        self._clock = clock
        self._files: dict[Path, _WatchedFile] = {}
        self._found = FoundCheckpoints()
        self._staged: dict[str, float] = {}
        self._is_complete = True
        self._is_missing = False
        self._polls = 0
        self._staging = Staging(staging)
        self._steps_file = staging / "steps.json"
        self._book = StepRegistry(self._steps_file)
        self._keys = self._accepted_now()

    @property
    def is_complete(self) -> bool:
        """See `CheckpointSource`."""
        return self._is_complete

    @property
    def missing(self) -> str:
        """See `CheckpointSource`."""
        return not_there_yet(self._directory) if self._is_missing else ""

    @property
    def unread(self) -> str:
        """See `CheckpointSource`."""
        put_off = [file for file in self._files.values() if file.problem]
        if not put_off:
            return ""
        newest = max(put_off, key=lambda file: file.stamps.modified_ns)
        return unread_now(newest.origin.path, newest.problem, count=len(put_off))

    @property
    def found(self) -> Sequence[Checkpoint]:
        """See `CheckpointSource`."""
        return self._found.in_order()

    def poll(self, wanted: Collection[int] = ()) -> Changes:
        """See `CheckpointSource`. A file that is being written appears once it is complete."""
        if self._polls == 0:
            self._staging.clear()
            self._book = StepRegistry(self._steps_file)
        found = {origin.path: (origin, stamps) for origin, stamps in self._list()}
        gone = [self._gone(file) for path, file in self._files.items() if path not in found and file.waits]
        self._files = {path: file for path, file in self._files.items() if path in found}
        self._unsettle_decided()
        unread = [item for item in found.values() if self._note(*item)]
        self._is_complete = self._read(unread, wanted)
        self._book.keep_reserved([file.identity for file in self._files.values()])
        self._book.save()
        self._polls += 1
        checkpoints = self._latest()
        for digest in self._staged.keys() - {checkpoint.digest for checkpoint in checkpoints}:
            self._drop_copy(digest)
        self._found.replace([*checkpoints, *gone])
        return self._found.take_changes()

    def _note(self, origin: ForeignFiles, stamps: Stamps) -> bool:
        """Record the current status of a checkpoint's files; return whether to read them."""
        file = self._files.get(origin.path)
        if file is None or file.stamps != stamps:
            last = None if file is None else file.checkpoint
            file = _WatchedFile(origin=origin, stamps=stamps, since=self._clock(), checkpoint=last)
            self._files[origin.path] = file
        return not file.settled and self._clock() >= file.retry_at

    def _read(self, unread: Sequence[_Listed], wanted: Collection[int]) -> bool:
        """Read checkpoints until the time is up; return whether all were read.

        Those that were read get their steps in the order of writing.
        """
        until = time.monotonic() + (_READING_SECONDS if self._polls else 0.0)
        in_order, newest_first = self._reading_order(unread, wanted)
        read = [(origin, self._copied(origin, stamps)) for origin, stamps in in_order]
        left: Sequence[_Listed] = ()
        for place, (origin, stamps) in enumerate(newest_first):
            if place >= _STAGED_COPIES and time.monotonic() > until:
                left = newest_first[place:]
                break
            read.append((origin, self._copied(origin, stamps)))
        for later, _ in left:
            self._files[later.path].waits = True
        whole = [(origin, copy) for origin, copy in read if copy is not None]
        for origin, copy in sorted(whole, key=lambda item: (item[1].stamps.modified_ns, item[0].path)):
            self._settle(origin, copy)
        return not left

    def _reading_order(self, unread: Sequence[_Listed], wanted: Collection[int]) -> tuple[list[_Listed], list[_Listed]]:
        """Return the checkpoints to read in the order of writing, and those to read afterwards, the newest first."""
        alike = Counter(_number(origin) for origin, _ in unread)
        unnumbered = [item for item in unread if _number(item[0]) is None or alike[_number(item[0])] > 1]
        in_order = unnumbered if len(unnumbered) <= _STAGED_COPIES else []
        later = [item for item in unread if item not in in_order]
        steps = {origin.path: _number(origin) for origin, _ in later}
        if not in_order:
            files = [(self._files[origin.path].identity, _stem(origin)) for origin, _ in unnumbered]
            steps |= zip((origin.path for origin, _ in unnumbered), self._book.reserve(files), strict=True)
        later.sort(key=lambda item: (steps[item[0].path] in wanted, item[1].modified_ns, item[0].path), reverse=True)
        return in_order, later

    def peek(self) -> object:
        """See `CheckpointSource`. It differs only if the accepted keys do: no check of files is cheaper than a poll."""
        return self._accepted_now()

    def _accepted_now(self) -> frozenset[str]:
        return frozenset() if self._accepted is None else self._accepted.identifiers

    def _unsettle_decided(self) -> None:
        """Have those read again that were refused without a new key, or accepted by one that was removed."""
        before, self._keys = self._keys, self._accepted_now()
        if self._keys == before:
            return
        for file in self._files.values():
            file.settled &= not (before - self._keys or is_refused(file.checkpoint))

    def check(self) -> None:
        """Raise UnsupportedFormatError if the folder's content is not supported; see `poll`."""
        self._list_paths()

    def _latest(self) -> Collection[Checkpoint]:
        """Return the latest checkpoint of each file, without duplicate models."""
        checkpoints = (file.checkpoint for file in self._files.values())
        return {checkpoint.digest: checkpoint for checkpoint in checkpoints if checkpoint}.values()

    def _staged_copy(self, checkpoint: Checkpoint) -> None:
        """Keep only the private copies of the newest checkpoints."""
        self._staged[checkpoint.digest] = checkpoint.created_at
        if len(self._staged) > _STAGED_COPIES:
            self._drop_copy(min(self._staged, key=self._staged.__getitem__))

    def _drop_copy(self, digest: str) -> None:
        del self._staged[digest]
        self._staging.drop(digest)

    def _list(self) -> list[_Listed]:
        """Return the checkpoints to read, in the order of their last change."""
        found = []
        for origin in self._list_paths():
            known = self._files.get(origin.path)
            try:
                found.append((origin, origin.stamps()))
            except FileNotFoundError:
                continue  # Deleted after it was listed.
            except OSError:
                found += [] if known is None else [(origin, known.stamps)]
        return sorted(found, key=lambda item: (item[1].modified_ns, item[0].path))

    def _list_paths(self) -> list[ForeignFiles]:
        try:
            unread = unread_reason(self._directory)
            by_format = {format_: [*format_.find(self._directory)] for format_ in FORMATS}
        except FileNotFoundError:
            if self._files:
                raise LocationGoneError(self._directory) from None
            self._is_missing = True
            return []
        self._is_missing = False
        if unread is not None:
            raise UnsupportedFormatError(unread)
        present = [format_ for format_, paths in by_format.items() if paths]
        if self._files and not self._is_mirror and has_nothing(self._directory):
            raise LocationGoneError(self._directory)
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
        return [
            ForeignFiles(format=format_, path=path, root=self._directory, accepted=self._accepted)
            for format_ in present
            for path in by_format[format_]
        ]

    def _copied(self, origin: ForeignFiles, stamps: Stamps) -> WholeCopy | None:
        """Copy and read a checkpoint; return None, and record why, if that cannot be done now."""
        file = self._files[origin.path]
        file.waits, file.problem = False, ""
        is_settling = self._clock() - file.since < _SETTLING_SECONDS
        try:
            whole = self._staging.stage(origin)
        except (FileNotFoundError, FileChangedError):
            return None
        except (DamagedCheckpointError, UntrustedCheckpointError) as error:
            if not is_settling:
                file.checkpoint = self._unreadable(origin, stamps, error)
                file.settled = True
            return None
        except OSError as error:  # It says nothing about the checkpoint.
            file.put_off(self._clock(), str(error))
            _log.warning("a checkpoint is to be read again", extra={"path": str(origin.path), "reason": str(error)})
            return None
        if is_settling and whole.content.may_grow:
            self._staging.drop(whole.content.digest)
            return None
        return whole

    def _settle(self, origin: ForeignFiles, whole: WholeCopy) -> None:
        """Record a checkpoint that was read."""
        file = self._files[origin.path]
        if isinstance(file.checkpoint, UnreadableCheckpoint):
            self._book.release(file.checkpoint.digest)
        mismatch = _mismatch(origin, whole.content)
        if mismatch:
            self._staging.drop(whole.content.digest)
            checkpoint = self._unreadable(origin, whole.stamps, DamagedCheckpointError(mismatch))
        else:
            checkpoint = self._foreign(origin, whole)
            self._staged_copy(checkpoint)
        self._files[origin.path] = _WatchedFile(
            origin=origin, stamps=whole.stamps, since=file.since, settled=True, checkpoint=checkpoint
        )

    def _gone(self, file: _WatchedFile) -> Checkpoint:
        error = CheckpointGoneError(f"{file.origin.path} was deleted before it could be read")
        return self._unreadable(file.origin, file.stamps, error)

    def _foreign(self, origin: ForeignFiles, whole: WholeCopy) -> Checkpoint:
        digest, iterations = whole.content.digest, whole.content.iterations
        file = _identity(origin, whole.stamps)
        return ForeignCheckpoint(
            step=self._book.assign(
                digest, iterations=iterations, name=_stem(origin), file=file, written_ns=whole.stamps.modified_ns
            ),
            digest=digest,
            created_at=whole.stamps.modified_ns / 1e9,
            origin=origin,
            staging=self._staging,
        )

    def _unreadable(self, origin: ForeignFiles, stamps: Stamps, error: CheckpointError) -> Checkpoint:
        identity = _identity(origin, stamps)
        return UnreadableCheckpoint(
            step=self._book.assign(identity, iterations=None, name=_stem(origin), file=identity),
            digest=identity,
            created_at=stamps.modified_ns / 1e9,
            error=error,
        )


@dataclass(kw_only=True)
class _WatchedFile:
    """A checkpoint: its status when last listed, since when, whether that was read, and the last result.

    ``waits`` means that the last poll had no time to read it. ``identity`` changes with its name and status.
    ``put_offs`` counts the failures of this machine to read it, of which ``problem`` is the last; after them it is read
    again from ``retry_at`` on.
    """

    origin: ForeignFiles
    stamps: Stamps
    since: float
    settled: bool = False
    waits: bool = False
    checkpoint: Checkpoint | None = None
    put_offs: int = 0
    problem: str = ""
    retry_at: float = -math.inf
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        self.identity = _identity(self.origin, self.stamps)

    def put_off(self, now: float, problem: str) -> None:
        """Read it again later, each time after a longer wait."""
        self.problem = problem
        self.retry_at = now + doubling_pause(self.put_offs, first=_RETRY_SECONDS, longest=_LONGEST_RETRY_SECONDS)
        self.put_offs += 1


def _identity(origin: ForeignFiles, stamps: Stamps) -> str:
    """Return a hash that changes with the name and status of a checkpoint's files."""
    return hashlib.sha256(os.fsencode(f"{origin.path.name}\0{stamps}")).hexdigest()


def _mismatch(origin: ForeignFiles, content: Content) -> str:
    """Say why a checkpoint has no step; empty if it has one."""
    iterations = content.iterations
    if iterations is not None and not 0 <= iterations <= MAX_STEP:
        return f"{origin.path}: its optimizer has taken {iterations} steps, expected 0 to {MAX_STEP}; save it again"
    number = number_beyond_steps(_stem(origin)) if iterations is None else None
    if number is not None:
        return f"{origin.path}: the number {number} is above the highest step, {MAX_STEP}; rename it"
    return ""


def _stem(origin: ForeignFiles) -> str:
    return origin.format.stem(origin.path)


def _number(origin: ForeignFiles) -> int | None:
    return last_integer(_stem(origin))
