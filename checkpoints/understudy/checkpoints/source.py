"""Checkpoints that a source finds, and the interface of a source."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from understudy.checkpoints.checkpoint_errors import (
    CheckpointError,
    CheckpointGoneError,
    DamagedCheckpointError,
    UntrustedCheckpointError,
    gone_error,
)
from understudy.checkpoints.detached import INNER_NAME
from understudy.checkpoints.fs import link_or_copy
from understudy.checkpoints.kinds import ModelKind
from understudy.checkpoints.layout import MANIFEST_FILE
from understudy.checkpoints.local_checkpoint import LocalCheckpoint, fetch_once, read_private_manifest
from understudy.checkpoints.manifest import (
    SIGNATURE_FILE,
    FileEntry,
    Manifest,
    read_manifest,
    read_published_manifest,
    verify_files,
    verify_sizes,
)
from understudy.checkpoints.signing import AcceptedKeys


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
    def kind(self) -> ModelKind | None:
        """How it stores its model; None if it cannot be read."""

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
            UntrustedCheckpointError: It is not signed as required.
            UnsupportedFormatError: Another version wrote it.
            CheckpointGoneError: Its writer has deleted or overwritten it.
            LocationGoneError: It is gone with all others.
            OSError: Its files could not be read, or the private folder could not be written.
        """


Changes = Mapping[int, Checkpoint | None]
"""The steps whose checkpoint is another one than before, or gone: None."""


class CheckpointSource(Protocol):
    """A place where checkpoints appear. For one thread at a time."""

    @property
    def is_complete(self) -> bool:
        """Whether the last `poll` found all checkpoints. If not, the next one finds more."""

    @property
    def missing(self) -> str:
        """What the last `poll` found that there is not, if the location does not exist; else empty."""

    @property
    def unread(self) -> str:
        """Why this machine cannot read some checkpoints now, the newest first of all; empty if it can read all."""

    @property
    def found(self) -> Sequence[Checkpoint]:
        """The checkpoints that the last `poll` left, in step order."""

    def poll(self, wanted: Collection[int] = ()) -> Changes:
        """Look for committed checkpoints; return what has changed since the last call.

        Damaged ones are among them; their `fetch` raises the error. If many are new, the first call finds the newest
        and later calls find the others. A checkpoint that was listed, and deleted before it could be read, is there
        until the next call.

        Args:
            wanted: The steps to find first.

        Raises:
            UnsupportedFormatError: The location holds only unsupported formats.
            LocationGoneError: The location is gone with all checkpoints, or empty, as after the loss of a mount.
            OSError: The location could not be read.
        """

    def peek(self) -> object:
        """Return a value that differs from the last one if a checkpoint may have been committed since.

        The call is cheap. A source without a cheap check always returns the same value.
        """


@dataclass(frozen=True, kw_only=True)
class PublishedCheckpoint:
    """A checkpoint that a `CheckpointPublisher` committed.

    If it must be signed, `fetch` copies it: through a hard link its writer could change it after the check.

    Attributes:
        directory: Its folder.
        accepted: The keys of which one must have signed it; None if it need not be signed.
        is_private: Whether the folder is an evaluator's private one.
    """

    directory: Path
    step: int
    digest: str
    created_at: float
    final: bool
    kind: ModelKind
    accepted: AcceptedKeys | None = None
    is_private: bool = False

    @classmethod
    def read(cls, directory: Path, accepted: AcceptedKeys | None = None, *, is_private: bool = False) -> Self:
        """Return the checkpoint of a folder. Raises as `read_manifest` does."""
        manifest = (read_private_manifest if is_private else read_published_manifest)(directory, accepted)
        return cls(
            directory=directory,
            step=manifest.step,
            digest=manifest.digest,
            created_at=manifest.created_at,
            final=manifest.final,
            kind=manifest.kind,
            accepted=accepted,
            is_private=is_private,
        )

    @property
    def copies(self) -> bool:
        """See `Checkpoint`."""
        return self.accepted is not None

    @property
    def manifest(self) -> Manifest | None:
        """See `Checkpoint`. Reads from disk."""
        try:
            return read_manifest(self.directory, self.accepted)
        except (FileNotFoundError, CheckpointError):
            return None

    def fetch(self, into: Path, *, verify: bool = True) -> LocalCheckpoint:
        """See `Checkpoint`."""
        fill = self._link_verified if verify else self._link
        return fetch_once(into, step=self.step, digest=self.digest, fill=fill, verify=verify, accepted=self.accepted)

    def _link(self, folder: Path) -> Manifest:
        take = functools.partial(self._take, folder=folder)
        try:
            take(MANIFEST_FILE)
        except FileNotFoundError as error:
            raise self._gone_error() from error
        if self.accepted is not None:
            for signature in (SIGNATURE_FILE, *([INNER_NAME] if self.is_private else [])):
                with contextlib.suppress(FileNotFoundError):
                    take(signature)
        read = read_private_manifest if self.is_private else read_published_manifest
        manifest = read(folder, self.accepted, origin=self.directory / MANIFEST_FILE)
        if (manifest.step, manifest.digest) != (self.step, self.digest):
            raise CheckpointGoneError(f"{self.directory} was replaced before it could be fetched")
        for entry in manifest.files:
            path = entry.path
            try:
                self._take_listed(entry, folder)
            except FileNotFoundError as error:
                if not (self.directory / MANIFEST_FILE).exists():
                    raise self._gone_error() from error
                raise DamagedCheckpointError(f"{self.directory / path} is missing, its manifest lists it") from error
            except FileExistsError as error:
                raise DamagedCheckpointError(f"{self.directory}: its manifest lists {path} twice") from error
        verify_sizes(folder, manifest)
        return manifest

    def _gone_error(self) -> Exception:
        gone, folder = f"{self.directory} was deleted before it could be fetched", self.directory.parent
        return gone_error(gone, folder=folder, is_gone=not folder.exists())

    def _take_listed(self, entry: FileEntry, folder: Path) -> None:
        """Link or copy a file that the manifest lists."""
        self._take(entry.path, folder)

    def _take(self, path: str, folder: Path) -> None:
        """Link or copy one file."""
        root = self.directory.parent
        link_or_copy(self.directory / path, folder / path, root=root, link=self.accepted is None)

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
    kind: ModelKind | None = None
    manifest: Manifest | None = None
    copies: bool = False

    def fetch(self, into: Path, *, verify: bool = True) -> LocalCheckpoint:
        """Raise the error that was found. See `Checkpoint`."""
        del into, verify
        raise type(self.error)(str(self.error)) from self.error


def is_refused(checkpoint: Checkpoint | None) -> bool:
    """Return whether a checkpoint was not signed as required."""
    return isinstance(checkpoint, UnreadableCheckpoint) and isinstance(checkpoint.error, UntrustedCheckpointError)
