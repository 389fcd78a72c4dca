"""Discovery of checkpoints: the interface of a source, and the source of a run folder."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from understudy.checkpoints.checkpoint_errors import (
    CheckpointError,
    CheckpointGoneError,
    DamagedCheckpointError,
    UnsupportedFormatError,
)
from understudy.checkpoints.fs import link_or_copy
from understudy.checkpoints.layout import MANIFEST_FILE, MAX_STEP, RunDir, parse_step
from understudy.checkpoints.local_checkpoint import LocalCheckpoint, fetch_once
from understudy.checkpoints.manifest import Manifest, decode_manifest, read_manifest, verify_files, verify_sizes

_log = logging.getLogger(__name__)

_Stamp = tuple[int, int, int]
"""Inode, size in bytes and modification time in nanoseconds. They change when a file is replaced."""

_FolderStamp = tuple[int, int]
"""Inode and modification time in nanoseconds."""

_READ_AT_FIRST = 16
_READ_AT_ONCE = 512
"""How many manifests a poll reads. The first poll reads few, so that it finds the newest checkpoint at once."""

_COARSE_NS = 2_000_000_000
"""The coarsest tick of a file system's clock. A folder that changed longer ago has no later change in the same tick."""

_LISTING_SECONDS = 10.0
"""How long a folder that seems unchanged is not listed again."""


class Checkpoint(Protocol):
    """A committed checkpoint that a source found. Immutable; `fetch` may be called from any thread."""

    @property
    def step(self) -> int:
        """Its training step. Within one source, different models have different steps."""

    @property
    def digest(self) -> str:
        """The digest that identifies the model: equal digests mean equal models."""

    @property
    def created_at(self) -> float:
        """When it was written, in seconds since the Unix epoch."""

    @property
    def final(self) -> bool:
        """Whether training ended with it."""

    @property
    def manifest(self) -> Manifest | None:
        """Its writer's manifest; None if there is none or it cannot be read."""

    @property
    def copies(self) -> bool:
        """Whether `fetch` copies files, which is expensive, rather than linking them."""

    def fetch(self, into: Path, *, verify: bool = True) -> LocalCheckpoint:
        """Link or copy the checkpoint's files into a private folder.

        A folder that already holds this checkpoint is returned; one that holds something else is replaced. After an
        error, no part of it remains.

        Args:
            into: The private folder.
            verify: Whether to read linked files and check their hashes. Otherwise only their sizes are checked; call
                `LocalCheckpoint.verify` before using them.

        Raises:
            DamagedCheckpointError: It is incomplete or damaged.
            UnsupportedFormatError: Another version wrote it.
            CheckpointGoneError: Its writer has deleted or overwritten it.
            OSError: Its files could not be read, or the private folder could not be written.
        """


class CheckpointSource(Protocol):
    """A place where checkpoints appear. `poll` is for one thread at a time."""

    @property
    def is_complete(self) -> bool:
        """Whether the last `poll` returned all checkpoints. If not, the next one returns more."""

    def poll(self, wanted: Collection[int] = ()) -> Sequence[Checkpoint]:
        """Return the committed checkpoints in step order, including damaged ones, whose `fetch` raises the error.

        If many are new, the first call returns the newest and later calls return the others. A checkpoint that was
        listed, and deleted before it could be read, is returned once.

        Args:
            wanted: The steps to return first.

        Raises:
            UnsupportedFormatError: The location holds only unsupported formats.
            OSError: The location could not be read.
        """

    def peek(self) -> object:
        """Return a value that differs from the last one if a checkpoint may have been committed since.

        The call is cheap. A source without a cheap check always returns the same value.
        """


@dataclass(frozen=True, kw_only=True)
class PublishedCheckpoint:
    """A checkpoint that a `CheckpointPublisher` committed."""

    directory: Path
    step: int
    digest: str
    created_at: float
    final: bool
    copies: bool = False

    @classmethod
    def of(cls, directory: Path, manifest: Manifest) -> Self:
        """Return the checkpoint of a folder with this manifest."""
        return cls(
            directory=directory,
            step=manifest.step,
            digest=manifest.digest,
            created_at=manifest.created_at,
            final=manifest.final,
        )

    @property
    def manifest(self) -> Manifest | None:
        """See `Checkpoint`. Reads from disk."""
        try:
            return read_manifest(self.directory)
        except (FileNotFoundError, CheckpointError):
            return None

    def fetch(self, into: Path, *, verify: bool = True) -> LocalCheckpoint:
        """See `Checkpoint`."""
        fill = self._link_verified if verify else self._link
        return fetch_once(into, digest=self.digest, fill=fill, verify=verify)

    def _link(self, folder: Path) -> Manifest:
        gone = f"{self.directory} was deleted before it could be fetched"
        try:
            manifest = read_manifest(self.directory)
        except FileNotFoundError as error:
            raise CheckpointGoneError(gone) from error
        if manifest.digest != self.digest:
            raise CheckpointGoneError(f"{self.directory} was replaced before it could be fetched")
        for path in (*(entry.path for entry in manifest.files), MANIFEST_FILE):
            try:
                link_or_copy(self.directory / path, folder / path)
            except FileNotFoundError as error:
                if not (self.directory / MANIFEST_FILE).exists():
                    raise CheckpointGoneError(gone) from error
                raise DamagedCheckpointError(f"{self.directory / path} is missing, its manifest lists it") from error
        verify_sizes(folder, manifest)
        return manifest

    def _link_verified(self, folder: Path) -> Manifest:
        manifest = self._link(folder)
        verify_files(folder, manifest)
        return manifest


@dataclass(frozen=True, kw_only=True)
class UnreadableCheckpoint:
    """A committed checkpoint that cannot be read; ``digest`` identifies its current content."""

    step: int
    digest: str
    created_at: float
    error: CheckpointError
    final: bool = False
    manifest: Manifest | None = None
    copies: bool = False

    def fetch(self, into: Path, *, verify: bool = True) -> LocalCheckpoint:
        """Raise the error that was found. See `Checkpoint`."""
        del into, verify
        raise type(self.error)(str(self.error)) from self.error


class RunSource:
    """The checkpoints of a run folder, which need not exist yet.

    A poll lists the folder once and opens only the manifests of new names. If nothing has changed, it does not list
    the folder. A folder with a number above `MAX_STEP` is no checkpoint; it is named in the log once.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._run = run_dir
        self._refused: set[str] = set()
        self._known: dict[int, tuple[_FolderStamp, Checkpoint]] = {}
        self._unreadable: dict[int, tuple[_Stamp, Checkpoint]] = {}
        self._uncommitted: set[int] = set()
        self._unread: Sequence[int] = ()
        self._listing: _Listing | None = None
        self._found: list[Checkpoint] = []

    @property
    def is_complete(self) -> bool:
        """See `CheckpointSource`."""
        return not self._unread

    def poll(self, wanted: Collection[int] = ()) -> Sequence[Checkpoint]:
        """See `CheckpointSource`."""
        if self._listing is None or not self._listing.is_still_true(self.peek()) or self._unread:
            self._refresh(wanted)
        return self._found

    def peek(self) -> object:
        """See `CheckpointSource`. Committing a checkpoint renames its folder, which changes the parent's time."""
        try:
            return self._run.checkpoints.stat().st_mtime_ns
        except OSError:
            return None

    def _refresh(self, wanted: Collection[int]) -> None:
        limit = _READ_AT_FIRST if self._listing is None else _READ_AT_ONCE
        peek = self.peek()
        folders = self._list()
        gone = [_gone(self._run, step) for step in self._unread if step not in folders]
        self._known = {step: known for step, known in self._known.items() if folders.get(step) == known[0]}
        self._unreadable = {step: known for step, known in self._unreadable.items() if step in folders}
        self._uncommitted &= folders.keys()
        tried = self._known.keys() | self._unreadable.keys() | self._uncommitted
        unread = sorted(folders.keys() - tried, key=lambda step: (step not in wanted, -step))
        limit += len(wanted)
        self._unread = unread[limit:]
        for step in (*unread[:limit], *self._unreadable, *self._uncommitted):
            self._uncommitted.discard(step)
            try:
                self._read(step, folders[step])
            except FileNotFoundError:
                if self._run.checkpoint(step).exists():
                    self._uncommitted.add(step)
                else:
                    gone.append(_gone(self._run, step))
        found = [checkpoint for _, checkpoint in (*self._known.values(), *self._unreadable.values())]
        self._found = sorted((*found, *gone), key=lambda checkpoint: checkpoint.step)
        self._listing = _Listing.of(peek, settled=not (gone or self._uncommitted or self._unreadable))

    def _list(self) -> dict[int, _FolderStamp]:
        found = {}
        for name, stamp in self._run.listed_folders().items():
            step = parse_step(name)
            if step is not None:
                found[step] = stamp
            elif name not in self._refused:
                self._refused.add(name)
                _log.error(
                    "%s is ignored: its number is above the highest step, %d", self._run.checkpoints / name, MAX_STEP
                )
        return found

    def _read(self, step: int, folder: _FolderStamp) -> None:
        """Read the manifest of a step, unless it is known to be unreadable and has not changed."""
        directory = self._run.checkpoint(step)
        path = directory / MANIFEST_FILE
        stat = path.stat()
        stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if step in self._unreadable and self._unreadable[step][0] == stamp:
            return
        self._unreadable.pop(step, None)
        content = path.read_bytes()
        try:
            manifest = _decode(content, path, step)
        except (DamagedCheckpointError, UnsupportedFormatError) as error:
            digest = hashlib.sha256(content).hexdigest()
            checkpoint = UnreadableCheckpoint(step=step, digest=digest, created_at=stat.st_mtime, error=error)
            self._unreadable[step] = (stamp, checkpoint)
            return
        self._known[step] = (folder, PublishedCheckpoint.of(directory, manifest))


@dataclass(frozen=True, kw_only=True)
class _Listing:
    """When a folder was listed, and its `peek` at that time."""

    peek: object
    expires_at: float

    @classmethod
    def of(cls, peek: object, *, settled: bool) -> _Listing:
        """Return a listing that was made after a peek. It stays valid for some time if the folder is settled."""
        is_old = isinstance(peek, int) and time.time_ns() - peek > _COARSE_NS
        return cls(peek=peek, expires_at=time.monotonic() + (_LISTING_SECONDS if settled and is_old else 0.0))

    def is_still_true(self, peek: object) -> bool:
        return peek == self.peek and time.monotonic() < self.expires_at


def _gone(run: RunDir, step: int) -> UnreadableCheckpoint:
    """Return a placeholder for a checkpoint that was listed and then deleted."""
    now = time.time()
    text = f"{run.checkpoint(step)} was deleted before it could be read"
    digest = hashlib.sha256(f"{text} {now}".encode()).hexdigest()
    return UnreadableCheckpoint(step=step, digest=digest, created_at=now, error=CheckpointGoneError(text))


def _decode(content: bytes, path: Path, step: int) -> Manifest:
    manifest = decode_manifest(content, origin=path)
    if manifest.step != step:
        raise DamagedCheckpointError(f"{path} is the manifest of step {manifest.step}")
    return manifest
