"""Discovering checkpoints: what a source is, and the source of a run folder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from understudy.checkpoints.errors import (
    CheckpointError,
    CheckpointGoneError,
    DamagedCheckpointError,
    UnsupportedFormatError,
)
from understudy.checkpoints.folders import link_or_copy
from understudy.checkpoints.layout import MANIFEST_FILE, RunDir
from understudy.checkpoints.manifest import Manifest, decode_manifest, verify_files
from understudy.checkpoints.taken import TakenCheckpoint, take_once

_Stamp = tuple[int, int, int]
"""Inode, size in bytes and time of last change in nanoseconds: what changes when a file is replaced."""


class Checkpoint(Protocol):
    """A committed checkpoint, as a source found it. Immutable; `take` may be called from any thread."""

    @property
    def step(self) -> int:
        """Its training step. Within one source, different models have different steps."""

    @property
    def digest(self) -> str:
        """What identifies the model: equal digests, equal model."""

    @property
    def created_at(self) -> float:
        """When it was written, in seconds since the epoch of Unix."""

    @property
    def final(self) -> bool:
        """Whether training ended with it."""

    @property
    def manifest(self) -> Manifest | None:
        """What its writer said about it; None if it said nothing or what it said cannot be read."""

    def take(self, into: Path) -> TakenCheckpoint:
        """Pin the checkpoint: link or copy its files into a private folder and verify them.

        A folder that holds this checkpoint already is verified and returned; one that holds something else is replaced.
        After an error there is no part of it.

        Raises:
            DamagedCheckpointError: It is not whole.
            UnsupportedFormatError: It was written by another version.
            CheckpointGoneError: Its writer has deleted or overwritten it.
            OSError: Its files could not be read, or the private folder not be written.
        """


class CheckpointSource(Protocol):
    """A place where checkpoints appear. `poll` is for one thread at a time."""

    def poll(self) -> Sequence[Checkpoint]:
        """Return everything that is committed now, in step order; damaged ones too, whose `take` says what is wrong.

        Raises:
            UnsupportedFormatError: The place holds only what is not read here.
            OSError: The place could not be read.
        """

    def glance(self) -> object:
        """Return something that differs from last time if something may have been committed since.

        It costs next to nothing. Where nothing cheap tells, it is always the same.
        """


@dataclass(frozen=True, kw_only=True)
class PublishedCheckpoint:
    """A checkpoint that a `CheckpointPublisher` committed."""

    directory: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """See `Checkpoint`."""
        return self.manifest.step

    @property
    def digest(self) -> str:
        """See `Checkpoint`."""
        return self.manifest.digest

    @property
    def created_at(self) -> float:
        """See `Checkpoint`."""
        return self.manifest.created_at

    @property
    def final(self) -> bool:
        """See `Checkpoint`."""
        return self.manifest.final

    def take(self, into: Path) -> TakenCheckpoint:
        """See `Checkpoint`."""
        return take_once(into, digest=self.digest, fill=self._fill)

    def _fill(self, folder: Path) -> Manifest:
        for entry in self.manifest.files:
            try:
                link_or_copy(self.directory / entry.path, folder / entry.path)
            except FileNotFoundError as error:
                if not (self.directory / MANIFEST_FILE).exists():
                    raise CheckpointGoneError(f"{self.directory} was deleted before it could be taken") from error
                raise DamagedCheckpointError(
                    f"{self.directory / entry.path} is missing, its manifest lists it",
                ) from error
        verify_files(folder, self.manifest)
        return self.manifest


@dataclass(frozen=True, kw_only=True)
class UnreadableCheckpoint:
    """A committed checkpoint of which nothing more can be said; ``digest`` stands for it as it is."""

    step: int
    digest: str
    created_at: float
    error: CheckpointError
    final: bool = False
    manifest: Manifest | None = None

    def take(self, into: Path) -> TakenCheckpoint:
        """Raise what was wrong with it. See `Checkpoint`."""
        del into
        raise type(self.error)(str(self.error)) from self.error


class RunSource:
    """The checkpoints of a run folder, which need not exist yet."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run = run_dir
        self._known: dict[int, tuple[_Stamp, PublishedCheckpoint]] = {}

    def poll(self) -> Sequence[Checkpoint]:
        """See `CheckpointSource`. Manifests that have not changed since the last call are not read again."""
        steps = self._run.committed_steps()
        self._known = {step: known for step, known in self._known.items() if step in steps}
        found = []
        for step in steps:
            try:
                found.append(self._find(step))
            except FileNotFoundError:
                continue  # Deleted since it was listed.
        return found

    def glance(self) -> object:
        """See `CheckpointSource`. Committing a checkpoint puts a folder into place, which changes the one around it."""
        try:
            return self._run.checkpoints.stat().st_mtime_ns
        except OSError:
            return None

    def _find(self, step: int) -> Checkpoint:
        directory = self._run.checkpoint(step)
        path = directory / MANIFEST_FILE
        stat = path.stat()
        stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        known = self._known.get(step)
        if known is not None and known[0] == stamp:
            return known[1]
        content = path.read_bytes()
        try:
            manifest = _decode(content, path, step)
        except (DamagedCheckpointError, UnsupportedFormatError) as error:
            digest = hashlib.sha256(content).hexdigest()
            return UnreadableCheckpoint(step=step, digest=digest, created_at=stat.st_mtime, error=error)
        checkpoint = PublishedCheckpoint(directory=directory, manifest=manifest)
        self._known[step] = (stamp, checkpoint)
        return checkpoint


def _decode(content: bytes, path: Path, step: int) -> Manifest:
    manifest = decode_manifest(content, origin=path)
    if manifest.step != step:
        raise DamagedCheckpointError(f"{path} speaks of step {manifest.step}")
    return manifest
