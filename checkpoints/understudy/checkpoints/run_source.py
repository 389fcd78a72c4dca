"""The source of a run folder: finds what a `CheckpointPublisher` commits there."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from understudy.checkpoints.checkpoint_errors import (
    CheckpointError,
    CheckpointGoneError,
    DamagedCheckpointError,
    LocationGoneError,
    UntrustedCheckpointError,
)
from understudy.checkpoints.found_checkpoints import FoundCheckpoints, not_there_yet, unread_now
from understudy.checkpoints.layout import MANIFEST_FILE, RunDir
from understudy.checkpoints.manifest import SIGNATURE_FILE
from understudy.checkpoints.run_listing import FolderStamp, RunListing
from understudy.checkpoints.signing import AcceptedKeys
from understudy.checkpoints.source import Changes, Checkpoint, PublishedCheckpoint, UnreadableCheckpoint, is_refused

_log = logging.getLogger(__name__)

_Stamp = tuple[int, int, int] | None
"""Inode, size in bytes and modification time in nanoseconds. They change when a file is replaced. None for no file."""

_READ_AT_FIRST = 16
_READ_AT_ONCE = 512
"""How many manifests a poll reads: few at first, so that it finds the newest checkpoint at once."""

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
    not be read. When the accepted keys have changed, a poll reads again what they may decide otherwise.

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
        self._folders: dict[int, FolderStamp] = {}
        self._unread: set[int] = set()
        self._unread_heap: list[int] = []  # negated steps, of which some may have been read
        self._known: dict[int, tuple[FolderStamp, Checkpoint]] = {}
        self._unreadable: dict[int, tuple[tuple[_Stamp, _Stamp], Checkpoint]] = {}
        self._uncommitted: dict[int, str] = {}  # with why this machine cannot read them; empty if nothing is there
        self._retries: OrderedDict[int, None] = OrderedDict()
        self._gone: set[int] = set()
        self._listing: _Listing | None = None
        self._found = FoundCheckpoints()
        self._keys = self._accepted_now()

    @property
    def is_complete(self) -> bool:
        """See `CheckpointSource`."""
        return not self._unread

    @property
    def missing(self) -> str:
        """See `CheckpointSource`."""
        is_missing = self._listing is not None and self._listing.changed_at is None
        return not_there_yet(self._run.checkpoints) if is_missing else ""

    @property
    def unread(self) -> str:
        """See `CheckpointSource`."""
        put_off = {step: reason for step, reason in self._uncommitted.items() if reason}
        if not put_off:
            return ""
        newest = max(put_off)
        return unread_now(self._run.checkpoint(newest), put_off[newest], count=len(put_off))

    @property
    def found(self) -> Sequence[Checkpoint]:
        """See `CheckpointSource`."""
        return self._found.in_order()

    def poll(self, wanted: Collection[int] = ()) -> Changes:
        """See `CheckpointSource`."""
        self._clear_gone()
        self._forget_decided()
        is_current = self._listing is not None and self._listing.is_still_true(self._changed_at())
        if not is_current or self._unread:
            self._refresh(wanted, is_current=is_current)
        else:
            self._retry()
        return self._found.take_changes()

    def find(self, step: int) -> Checkpoint | None:
        """Return the checkpoint of a step that the last `poll` left, or None."""
        return self._found.get(step)

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
        forgotten = [step for step, known in self._unreadable.items() if is_refused(known[1])]
        if before - self._keys:
            forgotten += self._known
        for step in forgotten:
            self._forget(step)
        self._add_unread(forgotten)
        self._listing = None

    def _forget(self, step: int) -> None:
        self._known.pop(step, None)
        self._unreadable.pop(step, None)
        self._uncommitted.pop(step, None)
        self._note(step)

    def _changed_at(self) -> int | None:
        """Return when the folder was changed. Committing a checkpoint renames a folder in it, which changes that."""
        try:
            return self._run.checkpoints.stat().st_mtime_ns
        except OSError:
            return None

    def _refresh(self, wanted: Collection[int], *, is_current: bool) -> None:
        limit = _READ_AT_FIRST if self._listing is None else _READ_AT_ONCE
        if not is_current:
            self._list()
        unread = {step for step in wanted if step in self._unread} | self._newest_unread(limit)
        again = itertools.islice(itertools.chain(self._unreadable, self._uncommitted), _RETRIED_AT_ONCE)
        try:
            for step in sorted((*unread, *again)):
                if not self._read(step, self._folders[step]):
                    self._check_location()
                    self._note_gone(step)
                    self._have_listed_again(step)
                self._unread.discard(step)
                self._note(step)
        finally:
            self._add_unread(unread & self._unread)

    def _check_location(self) -> None:
        """Raise LocationGoneError if the folder of all checkpoints is gone."""
        if not self._run.checkpoints.exists():
            self._listing = self._listing and self._listing.expired()
            raise LocationGoneError(self._run.checkpoints)

    def _add_unread(self, steps: Iterable[int]) -> None:
        for step in steps:
            self._unread.add(step)
            heapq.heappush(self._unread_heap, -step)

    def _newest_unread(self, limit: int) -> set[int]:
        """Remove the newest steps from the heap, at most this many; return those that are still unread."""
        newest: set[int] = set()
        while self._unread_heap and len(newest) < limit:
            step = -heapq.heappop(self._unread_heap)
            if step in self._unread:
                newest.add(step)
        return newest

    def _list(self) -> None:
        """List the folder, and take in what has changed there."""
        changed_at, began = self._changed_at(), time.monotonic()
        changes = self._lister.changes()
        self._listing = _Listing.of(changed_at, seconds=time.monotonic() - began)
        for step in changes.gone:
            del self._folders[step]
            if step in self._unread:
                self._unread.remove(step)
                self._note_gone(step)
            self._forget(step)
        for step, folder in changes.present.items():
            self._folders[step] = folder
            known = self._known.get(step)
            if known is not None and known[0] != folder:
                self._forget(step)
            if not (step in self._known or self._is_retried(step)):
                self._add_unread([step])

    def _retry(self) -> None:
        """Look again at some of the checkpoints that could not be read."""
        for step in list(itertools.islice(self._retries, _RETRIED_AT_ONCE)):
            self._retries.move_to_end(step)
            folder = self._folder_stamp(step)
            if folder is None:
                self._listing = self._listing and self._listing.expired()
            elif not self._read(step, folder):
                self._have_listed_again(step)
            self._note(step)

    def _have_listed_again(self, step: int) -> None:
        """List the folder in the next poll, which finds this step anew if it is there."""
        self._listing = self._listing and self._listing.expired()
        self._lister.forget(step)
        del self._folders[step]
        self._forget(step)

    def _is_retried(self, step: int) -> bool:
        """Whether a checkpoint could not be read, and is tried again."""
        return step in self._unreadable or step in self._uncommitted

    def _note(self, step: int) -> None:
        """Take over what is known of a step now: the newest that could not be read is tried again first."""
        if not self._is_retried(step):
            self._retries.pop(step, None)
        elif step not in self._retries:
            self._retries[step] = None
            self._retries.move_to_end(step, last=False)
        if step not in self._gone:
            known = self._known.get(step) or self._unreadable.get(step)
            self._found.set(step, known and known[1])

    def _note_gone(self, step: int) -> None:
        """Have a checkpoint that was listed and then deleted there until the next poll."""
        self._gone.add(step)
        self._found.set(step, _gone(self._run, step))

    def _clear_gone(self) -> None:
        gone, self._gone = self._gone, set()
        for step in gone:
            self._note(step)

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
            self._uncommitted[step] = ""
        except CheckpointError as error:
            self._unreadable[step] = stamps, _unreadable(directory, step, stamps, error)
        except OSError as error:  # It says nothing about the checkpoint.
            self._uncommitted[step] = str(error)
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
