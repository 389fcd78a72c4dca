"""The known checkpoints, and the leases that keep them from being deleted."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Self

from sortedcontainers import SortedDict, SortedSet

from understudy.checkpoints.checkpoint_errors import (
    CheckpointError,
    CheckpointGoneError,
    DamagedCheckpointError,
    LocationGoneError,
)
from understudy.checkpoints.detached import INNER_NAME
from understudy.checkpoints.fs import open_within, remove_folder, sweep
from understudy.checkpoints.layout import MANIFEST_FILE, parse_step, step_name
from understudy.checkpoints.local_checkpoint import LocalCheckpoint, open_local_checkpoint, read_private_manifest
from understudy.checkpoints.manifest import LATEST_TIME, SIGNATURE_FILE
from understudy.checkpoints.signing import AcceptedKeys
from understudy.checkpoints.source import Changes, Checkpoint, CheckpointSource
from understudy.evaluator.evaluator_errors import NotReadyError, VersionNotFoundError, available_steps
from understudy.evaluator.step_changes import StepChanges
from understudy.evaluator.types import CheckpointInfo, CheckpointKey

_log = logging.getLogger(__name__)

_ADOPTED_AT_ONCE = 512


@dataclass
class _Item:
    """One step: the source's current checkpoint, and the private folder if it is leased."""

    info: CheckpointInfo
    offered: Checkpoint | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    checkpoint: LocalCheckpoint | None = None
    leases: int = 0


class CheckpointStore:
    """The checkpoints that can be loaded: those of the source, and those in private folders. Thread-safe.

    The private folder of a checkpoint is kept while any `Lease` on it is open, and then deleted. Folders of an earlier
    process count as checkpoints until `discard_leftovers`. Only `Lease.verify` hashes files.

    Args:
        source: The source of checkpoints. Polled only by `refresh`.
        directory: The parent of the private folders, ``leases/``; created if missing.
        accepted: The keys of which one must have signed what an earlier process left; None if it need not be signed.
            The source itself checks what it fetches.

    Attributes:
        changes: Notes the steps whose checkpoint appears, disappears, is replaced, or gets a private folder.
    """

    def __init__(self, source: CheckpointSource, directory: Path, *, accepted: AcceptedKeys | None = None) -> None:
        self._source = source
        self._accepted = accepted
        self._directory = directory
        self._lock = threading.Lock()
        self._items: SortedDict[int, _Item] = SortedDict()
        self._failure = ""
        self._unread = ""
        self._is_refreshed = False
        self.changes = StepChanges()
        directory.mkdir(parents=True, exist_ok=True)
        sweep(directory)
        steps = {parse_step(folder.name) for folder in directory.iterdir()}
        self._leftovers = {step for step in steps if step is not None}
        self._unread_leftovers: SortedSet[int] = SortedSet(self._leftovers)

    @property
    def is_complete(self) -> bool:
        """Whether `refresh` has found all checkpoints. If not, the next one finds more."""
        return self._is_refreshed and self._source.is_complete and not self._unread_leftovers

    @property
    def is_lost(self) -> bool:
        """Whether the private folders are gone, as with a mount: what is read of them fails in any way."""
        try:
            self._directory.stat()
        except OSError:
            return True
        return False

    @property
    def missing(self) -> str:
        """Why the last `refresh` found none: the location does not exist, or could not be read; else empty."""
        return self._failure or self._source.missing

    @property
    def unread(self) -> str:
        """Why the last `refresh` could not read some checkpoints; empty if it could read all."""
        return self._unread

    def refresh(self, wanted: Collection[int] = ()) -> None:
        """Poll the source for its current checkpoints, newest first. For one thread at a time.

        Args:
            wanted: The steps to find first.

        Raises:
            understudy.checkpoints.checkpoint_errors.UnsupportedFormatError: The source holds only unsupported formats.
            OSError: The source could not be read.
        """
        try:
            changes = self._source.poll(wanted)
        except (CheckpointError, OSError) as error:
            self._failure = str(error)
            raise
        self._failure, self._unread = "", self._source.unread
        self._apply(changes)
        self._adopt_leftovers(wanted)
        self._is_refreshed = True

    def _apply(self, changes: Changes) -> None:
        with self._lock:
            for step, checkpoint in changes.items():
                if checkpoint is None:
                    self._withdraw(step)
                else:
                    self._offer(checkpoint)
        self.changes.note(*changes)

    def _offer(self, checkpoint: Checkpoint) -> None:
        step = checkpoint.step
        self._unread_leftovers.discard(step)
        item = self._items.get(step)
        if item is None or item.info.digest != checkpoint.digest:
            self._items[step] = _Item(info=_info(checkpoint), offered=checkpoint)
        else:
            item.offered = checkpoint

    def _withdraw(self, step: int) -> None:
        item = self._items.get(step)
        if item is not None:
            item.offered = None
            if not item.leases and step not in self._leftovers:
                del self._items[step]

    def peek(self) -> object:
        """Return a value that differs from the last one if `refresh` may find something new. Cheap."""
        return self._source.peek()

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return every checkpoint by ascending step."""
        with self._lock:
            return [item.info for item in self._items.values()]

    def offered(self) -> set[CheckpointKey]:
        """Return the checkpoints that the source has, as of the last `refresh`."""
        with self._lock:
            return {item.info.key for item in self._items.values() if item.offered is not None}

    def is_offered(self, step: int) -> bool:
        """Return whether the source has the checkpoint of a step, as of the last `refresh`."""
        with self._lock:
            item = self._items.get(step)
            return item is not None and item.offered is not None

    def newest(self) -> CheckpointInfo | None:
        """Describe the checkpoint of the highest step, or return None if there is none."""
        with self._lock:
            return self._items.peekitem()[1].info if self._items else None

    def find(self, step: int) -> CheckpointInfo | None:
        """Describe one checkpoint, or return None if there is none of this step."""
        with self._lock:
            item = self._items.get(step)
        return None if item is None else item.info

    def info(self, step: int) -> CheckpointInfo:
        """Describe one checkpoint.

        Raises:
            VersionNotFoundError: There is none of this step.
            NotReadyError: None of this step was found, and `refresh` has not found all checkpoints yet.
        """
        is_complete = self.is_complete  # before the look, as what is found meanwhile may complete it
        try:
            return self._item(step).info
        except VersionNotFoundError:
            if is_complete:
                raise
        read = f"cannot be read ({self._failure})" if self._failure else "have not all been read yet"
        raise NotReadyError(f"step {step} is not known; the checkpoints {read}; try again in a moment")

    def lease(self, info: CheckpointInfo) -> Lease:
        """Lease a checkpoint; the first lease fetches it into its private folder. Call `Lease.verify` before use.

        Raises:
            VersionNotFoundError: There is none of this step.
            understudy.checkpoints.checkpoint_errors.CheckpointError: It is damaged, unreadable, deleted or replaced.
            OSError: The private folder could not be written.
        """
        item = self._item(info.step)
        if item.info.key != info.key:
            raise CheckpointGoneError(f"step {info.step} was replaced by another checkpoint of this step")
        with item.lock:
            is_new = item.checkpoint is None
            if item.checkpoint is None:
                item.checkpoint = self._fetch(item)
            item.leases += 1
            with self._lock:
                self._items.setdefault(info.step, item)  # A refresh may have dropped it during the fetch.
        if is_new:
            self.changes.note(info.step)
        return Lease(self, item, item.checkpoint)

    def needs_copy(self, info: CheckpointInfo) -> bool:
        """Return whether a lease would copy the checkpoint, rather than link it or open its private folder."""
        with self._lock:
            item = self._items.get(info.step)
            may_be_there = info.step in self._leftovers
        return (
            item is not None
            and item.checkpoint is None
            and not may_be_there
            and bool(item.offered and item.offered.copies)
        )

    def holds_metrics(self, info: CheckpointInfo) -> bool:
        """Return whether a checkpoint is known to hold its own losses and metrics, which no code of a user changes."""
        with self._lock:
            item = self._items.get(info.step)
        if item is None or item.info.key != info.key:
            return False
        holder = item.checkpoint or item.offered
        kind = None if holder is None else holder.kind
        return kind is not None and kind.holds_metrics

    def discard_leftovers(self) -> None:
        """Delete the folders of an earlier process that have no lease."""
        with self._lock:
            leftovers, self._leftovers = self._leftovers, set()
            items = [self._items[step] for step in leftovers if step in self._items]
        for item in items:
            with item.lock:
                if item.leases == 0 and self._is_current(item):
                    remove_folder(self._folder(item.info.step))
        self.changes.note(*leftovers)

    def _verify(self, item: _Item) -> LocalCheckpoint:
        """Verify a leased checkpoint; fetch it again if it is damaged and the source still has it."""
        with item.lock:
            if item.checkpoint is not None:
                try:
                    item.checkpoint.verify()
                except DamagedCheckpointError:
                    if item.offered is None:
                        raise
                    item.checkpoint.release()
                    item.checkpoint = None
                else:
                    return item.checkpoint
            item.checkpoint = self._fetch(item)
            item.checkpoint.verify()
            return item.checkpoint

    def _release(self, item: _Item) -> None:
        with item.lock:
            item.leases -= 1
            if item.leases or item.checkpoint is None:
                return
            checkpoint, item.checkpoint = item.checkpoint, None
            if self._is_current(item):
                checkpoint.release()
        self.changes.note(item.info.step)

    def _is_current(self, item: _Item) -> bool:
        """Return whether the private folder of the step is still this item's; drop the item if it is obsolete."""
        with self._lock:
            step = item.info.step
            if self._items.get(step) is not item:
                return False
            if item.offered is None:
                del self._items[step]
            return True

    def _item(self, step: int) -> _Item:
        with self._lock:
            item: _Item | None = self._items.get(step)
            if item is not None:
                return item
            known = list(self._items)
        raise VersionNotFoundError(f"there is no checkpoint of step {step}; {available_steps(known, step)}")

    def _fetch(self, item: _Item) -> LocalCheckpoint:
        folder = self._folder(item.info.step)
        if self.is_lost:  # it is not made again: the folder around it is being deleted, too
            raise LocationGoneError(self._directory)
        if item.offered is not None:
            return item.offered.fetch(folder, verify=False)
        try:
            return open_local_checkpoint(folder, verify=False, accepted=self._accepted)
        except FileNotFoundError as error:
            raise CheckpointGoneError(f"step {item.info.step} was deleted before it could be fetched") from error

    def _folder(self, step: int) -> Path:
        return self._directory / step_name(step)

    def _adopt_leftovers(self, wanted: Collection[int]) -> None:
        """Identify some folders of an earlier process, newest first, once the source is complete."""
        if not self._unread_leftovers or not (self._source.is_complete or self._newest_is_left_over()):
            return
        first = [step for step in wanted if step in self._unread_leftovers]
        newest = itertools.islice(reversed(self._unread_leftovers), _ADOPTED_AT_ONCE)
        for step in dict.fromkeys((*first, *newest)):
            self._unread_leftovers.discard(step)
            self._adopt_leftover(step)

    def _newest_is_left_over(self) -> bool:
        with self._lock:
            return not self._items or self._unread_leftovers[-1] > self._items.peekitem()[0]

    def _adopt_leftover(self, step: int) -> None:
        folder = self._folder(step)
        try:
            manifest = read_private_manifest(folder, self._accepted)
            if manifest.step != step:
                raise DamagedCheckpointError(f"{folder} holds step {manifest.step}")
        except (FileNotFoundError, CheckpointError) as error:
            _log.warning("leftover of an earlier process deleted", extra={"folder": str(folder), "error": str(error)})
            remove_folder(folder)
            with self._lock:
                self._leftovers.discard(step)
            return
        info = CheckpointInfo(step=step, created_at=manifest.created_at, digest=manifest.digest, final=manifest.final)
        with self._lock:
            self._items.setdefault(step, _Item(info=info, offered=None))
        self.changes.note(step)


class Lease:
    """Keeps one checkpoint from being deleted. A context manager. Thread-safe."""

    def __init__(self, store: CheckpointStore, item: _Item, checkpoint: LocalCheckpoint) -> None:
        self._store = store
        self._item = item
        self._lock = threading.Lock()
        self._released = False
        self.checkpoint = checkpoint

    def verify(self) -> None:
        """Read the whole checkpoint, and check that it is undamaged and still the leased one.

        A damaged checkpoint is first fetched again if the source still has it.

        Raises:
            understudy.checkpoints.checkpoint_errors.CheckpointError: It is damaged, deleted or replaced.
            OSError: It could not be read, or the private folder could not be written.
        """
        self.checkpoint = self._store._verify(self._item)  # noqa: SLF001 - as below

    def release(self) -> None:
        """Release the checkpoint. Idempotent."""
        with self._lock:
            if self._released:
                return
            self._released = True
        self._store._release(self._item)  # noqa: SLF001 - the two halves of one count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def open_leased(store: CheckpointStore, path: str, *, step: int, digest: str) -> BinaryIO:
    """Open a file of a checkpoint, which can be read to its end even if the checkpoint is deleted. Blocks.

    Args:
        store: Has the checkpoint.
        path: The manifest, a signature, or a path that the manifest lists.
        step: The step of the checkpoint.
        digest: Its digest.

    Raises:
        VersionNotFoundError: There is no such checkpoint, or no such file in it.
        understudy.checkpoints.checkpoint_errors.CheckpointError: The checkpoint is damaged, deleted or replaced.
        OSError: It cannot be read.
    """
    info = store.info(step)
    if info.digest != digest:
        raise VersionNotFoundError(f"step {step} has the digest {info.digest}, not {digest}")
    with store.lease(info) as lease:
        listed = {entry.path for entry in lease.checkpoint.manifest.files}
        try:
            if path in listed | {MANIFEST_FILE, SIGNATURE_FILE, INNER_NAME}:
                return open_within(lease.checkpoint.directory / path, lease.checkpoint.directory)
        except FileNotFoundError:
            pass
    raise VersionNotFoundError(f"step {step} has no file {path!r}")


def _info(checkpoint: Checkpoint) -> CheckpointInfo:
    created_at = min(max(checkpoint.created_at, 0.0), LATEST_TIME)  # file systems have other times, too
    return CheckpointInfo(step=checkpoint.step, created_at=created_at, digest=checkpoint.digest, final=checkpoint.final)
