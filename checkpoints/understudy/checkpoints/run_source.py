"""The source of a run folder: finds what a `CheckpointPublisher` commits there."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from understudy.checkpoints.checkpoint_errors import (
    CheckpointError,
    CheckpointGoneError,
    DamagedCheckpointError,
    UntrustedCheckpointError,
)
from understudy.checkpoints.layout import MANIFEST_FILE, RunDir
from understudy.checkpoints.manifest import SIGNATURE_FILE
from understudy.checkpoints.run_listing import FolderStamp, RunListing
from understudy.checkpoints.signing import AcceptedKeys
from understudy.checkpoints.source import Checkpoint, PublishedCheckpoint, UnreadableCheckpoint, is_refused

_log = logging.getLogger(__name__)

_Stamp = tuple[int, int, int] | None
"""Inode, size in bytes and modification time in nanoseconds. They change when a file is replaced. None for no file."""

_READ_AT_FIRST = 16
_READ_AT_ONCE = 512
_READ_SHARE = 4
"""How many manifests a poll reads: few at first, so that it finds the newest checkpoint at once; then `_READ_AT_ONCE`,
or this share of those that are known. What follows a poll takes time for each known checkpoint, so polls of a fixed
size would take quadratic time together."""

_RETRIED_AT_ONCE = 64
"""How many checkpoints that could not be read a poll tries again, in turn."""

_COARSE_NS = 2_000_000_000
"""The coarsest tick of a file system's clock. A folder that changed longer ago has no later change in the same tick."""

_LISTING_SECONDS = 10.0
_LISTING_SHARE = 0.01
"""How long a folder that seems unchanged is not listed again, and the largest share of the time that this may take."""


class RunSource:
    """The checkpoints of a run folder, which need not exist yet.

    A poll lists the folder once, as `RunListing` does, and opens only the manifests of new names. If nothing has
    changed, it does not list the folder, however many checkpoints there are: it looks again only at those that could
    not be read. When the accepted keys have changed, a poll
    reads again what they may decide otherwise.

    Args:
        run_dir: The run folder.
        accepted: The keys of which one must have signed each manifest; None if they need not be signed.
        is_private: Whether its folders are copies of an evaluator's private ones.
    """

    def __init__(self, run_dir: RunDir, *, accepted: AcceptedKeys | None = None, is_private: bool = False) -> None:
        self._run = run_dir
        self._accepted = accepted
        self._is_private = is_private
        self._lister = RunListing(run_dir)
        self._known: dict[int, tuple[FolderStamp, Checkpoint]] = {}
        self._unreadable: dict[int, tuple[tuple[_Stamp, _Stamp], Checkpoint]] = {}
        self._uncommitted: dict[int, FolderStamp] = {}
        self._retries: deque[int] = deque()
        self._unread: Sequence[int] = ()
        self._folders: dict[int, FolderStamp] = {}
        self._listing: _Listing | None = None
        self._found: list[Checkpoint] = []
        self._keys = self._accepted_now()

    @property
    def is_complete(self) -> bool:
        """See `CheckpointSource`."""
        return not self._unread

    def poll(self, wanted: Collection[int] = ()) -> Sequence[Checkpoint]:
        """See `CheckpointSource`."""
        self._forget_decided()
        if self._listing is None or not self._listing.is_still_true(self._changed_at()) or self._unread:
            self._refresh(wanted)
        elif self._retries:
            self._retry()
        return self._found

    def peek(self) -> object:
        """See `CheckpointSource`."""
        return self._changed_at(), self._accepted_now()

    def _accepted_now(self) -> frozenset[str]:
        return frozenset() if self._accepted is None else self._accepted.identifiers

    def _forget_decided(self) -> None:
        """Forget what was refused without a new key, or accepted by one that was removed, so that it is read again."""
        before, self._keys = self._keys, self._accepted_now()
        if self._keys == before:
            return
        refused = [step for step, known in self._unreadable.items() if is_refused(known[1])]
        for step in refused:
            del self._unreadable[step]
        if before - self._keys:
            self._known.clear()
        self._listing = None

    def _changed_at(self) -> int | None:
        """Return when the folder was changed. Committing a checkpoint renames a folder in it, which changes that."""
        try:
            return self._run.checkpoints.stat().st_mtime_ns
        except OSError:
            return None

    def _refresh(self, wanted: Collection[int]) -> None:
        limit = _READ_AT_FIRST if self._listing is None else max(_READ_AT_ONCE, len(self._known) // _READ_SHARE)
        began = time.monotonic()
        changed_at = self._changed_at()
        is_known = self._listing is not None and bool(self._unread) and self._listing.is_still_true(changed_at)
        folders = self._folders if is_known else self._lister.list()
        seconds = time.monotonic() - began
        gone = [_gone(self._run, step) for step in self._unread if step not in folders]
        self._known = {step: known for step, known in self._known.items() if folders.get(step) == known[0]}
        self._unreadable = {step: known for step, known in self._unreadable.items() if step in folders}
        self._uncommitted = {step: folders[step] for step in self._uncommitted if step in folders}
        untried = folders.keys() - self._known.keys() - self._unreadable.keys() - self._uncommitted.keys()
        unread = sorted(untried, key=lambda step: (step not in wanted, -step))
        limit += len(wanted)
        self._unread = unread[limit:]
        again = [*self._unreadable, *self._uncommitted]
        now = (*unread[:limit], *again[:_RETRIED_AT_ONCE])
        gone += [_gone(self._run, step) for step in now if not self._read(step, folders[step])]
        self._publish(gone)
        self._folders = folders if self._unread else {}
        if not is_known:
            self._listing = _Listing.of(changed_at, seconds=seconds)
        if gone:
            self._listing = self._listing and self._listing.expired()

    def _retry(self) -> None:
        """Look again at some of the checkpoints that could not be read."""
        changed = False
        for _ in range(min(len(self._retries), _RETRIED_AT_ONCE)):
            step = self._retries.popleft()
            self._retries.append(step)
            before = self._unreadable.get(step)
            folder = self._folder_stamp(step)
            if folder is None or not self._read(step, folder):
                self._listing = None if self._listing is None else self._listing.expired()
            changed |= step in self._known or self._unreadable.get(step) != before
        if changed:
            self._publish([])

    def _publish(self, gone: Iterable[Checkpoint]) -> None:
        found = [checkpoint for _, checkpoint in (*self._known.values(), *self._unreadable.values())]
        self._found = sorted((*found, *gone), key=attrgetter("step"))
        waiting = self._unreadable.keys() | self._uncommitted.keys()
        kept = [step for step in self._retries if step in waiting]
        self._retries = deque([*sorted(waiting.difference(kept), reverse=True), *kept])

    def _folder_stamp(self, step: int) -> FolderStamp | None:
        try:
            stat = self._run.checkpoint(step).stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns

    def _read(self, step: int, folder: FolderStamp) -> bool:
        """Read the manifest of a step, unless it is known to be unreadable and has not changed.

        Returns False if the folder is gone.
        """
        directory = self._run.checkpoint(step)
        known = self._unreadable.pop(step, None)
        self._uncommitted.pop(step, None)
        try:
            stamps = _stamp(directory / MANIFEST_FILE), _stamp(directory / SIGNATURE_FILE)
            if known is not None and known[0] == stamps:
                self._unreadable[step] = known
                return True
            self._known[step] = folder, self._published(step)
        except FileNotFoundError:
            if not directory.exists():
                return False
            self._uncommitted[step] = folder
        except CheckpointError as error:
            self._unreadable[step] = stamps, _unreadable(directory, step, stamps, error)
        except OSError as error:  # It says nothing about the checkpoint.
            self._uncommitted[step] = folder
            _log.warning("a checkpoint is to be read again", extra={"step": step, "reason": str(error)})
        return True

    def _published(self, step: int) -> PublishedCheckpoint:
        directory = self._run.checkpoint(step)
        checkpoint = PublishedCheckpoint.read(directory, self._accepted, is_private=self._is_private)
        if checkpoint.step != step:
            error = DamagedCheckpointError if self._accepted is None else UntrustedCheckpointError
            raise error(f"{directory / MANIFEST_FILE} is the manifest of step {checkpoint.step}")
        return checkpoint


@dataclass(frozen=True, kw_only=True)
class _Listing:
    """A listing of a folder: the folder's modification time, None if there is none, and until when it is valid."""

    changed_at: int | None
    expires_at: float

    @classmethod
    def of(cls, changed_at: int | None, *, seconds: float) -> _Listing:
        """Return a listing that took this time. It stays valid for some time."""
        is_old = changed_at is not None and time.time_ns() - changed_at > _COARSE_NS
        valid = max(_LISTING_SECONDS, seconds / _LISTING_SHARE) if is_old else 0.0
        return cls(changed_at=changed_at, expires_at=time.monotonic() + valid)

    def expired(self) -> _Listing:
        """Return the listing, to be made again."""
        return _Listing(changed_at=self.changed_at, expires_at=0.0)

    def is_still_true(self, changed_at: int | None) -> bool:
        return changed_at == self.changed_at and time.monotonic() < self.expires_at


def _gone(run: RunDir, step: int) -> UnreadableCheckpoint:
    """Return a placeholder for a checkpoint that was listed and then deleted."""
    now = time.time()
    text = f"{run.checkpoint(step)} was deleted before it could be read"
    digest = hashlib.sha256(f"{text} {now}".encode()).hexdigest()
    return UnreadableCheckpoint(step=step, digest=digest, created_at=now, error=CheckpointGoneError(text))


def _unreadable(
    directory: Path, step: int, stamps: tuple[_Stamp, _Stamp], error: CheckpointError
) -> UnreadableCheckpoint:
    """Return a checkpoint that cannot be read; its digest changes when its manifest or its signature does."""
    stamp = stamps[0] or stamps[1]
    return UnreadableCheckpoint(
        step=step,
        digest=hashlib.sha256(f"{directory.name} {stamps} {error}".encode()).hexdigest(),
        created_at=stamp[2] / 1e9 if stamp else time.time(),
        error=error,
    )


def _stamp(path: Path) -> _Stamp:
    try:
        stat = path.lstat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
