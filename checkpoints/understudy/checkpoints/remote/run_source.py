"""Run folders on remote storage: what `RemotePublisher` wrote, or a copy of a local run folder.

What the run folder says is mirrored to a local one: the manifests, their signatures, and how training ended. The files
of a checkpoint are copied when it is fetched.
"""

from __future__ import annotations

import functools
import logging
import math
import re
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from understudy.checkpoints.checkpoint_errors import CheckpointGoneError, DamagedCheckpointError
from understudy.checkpoints.found_checkpoints import FoundCheckpoints, not_there_yet
from understudy.checkpoints.fs import remove_folder, sweep, temporary_folder
from understudy.checkpoints.layout import MANIFEST_FILE, RunDir, parse_number
from understudy.checkpoints.low_priority import at_low_priority
from understudy.checkpoints.manifest import LARGEST_BYTES, SIGNATURE_FILE, FileEntry, describe_file
from understudy.checkpoints.remote.files import FileStatus, RemoteFiles, local_status, mirror_file
from understudy.checkpoints.run_source import RunSource
from understudy.checkpoints.signing import AcceptedKeys
from understudy.checkpoints.source import Changes, Checkpoint, PublishedCheckpoint

_log = logging.getLogger(__name__)

_MIRRORED = re.compile(rf"checkpoints/(\d+)/({re.escape(MANIFEST_FILE)}|{re.escape(SIGNATURE_FILE)})")
"""The files of a checkpoint that are mirrored."""

_READ_AT_FIRST = 16
_READING_SECONDS = 2.0
"""A poll mirrors this many checkpoints, and more for this long."""

_LISTING_SHARE = 0.05
"""The largest share of the time that listing may take."""


class RemoteRunSource:
    """The checkpoints of a remote run folder, which need not exist yet; see `RunSource`.

    Args:
        files: The run folder.
        mirror: A private local run folder of this source. The first poll creates it if it is missing.
        accepted: The keys of which one must have signed each manifest; None if they need not be signed.
    """

    def __init__(self, files: RemoteFiles, mirror: RunDir, *, accepted: AcceptedKeys | None = None) -> None:
        self._files = files
        self._mirror = mirror
        self._local = RunSource(mirror, accepted=accepted)
        self._is_swept = False
        self._is_mirrored = True
        self._is_missing = False
        self._refused: set[str] = set()
        self._list_from = -math.inf
        self._found = FoundCheckpoints()

    @property
    def is_complete(self) -> bool:
        """See `CheckpointSource`."""
        return self._is_mirrored and self._local.is_complete

    def check(self) -> None:
        """Raise StorageRefusalError or another RemoteStorageError if the folder cannot be read now."""
        if not self._files.list(_chosen):
            _log.warning("there is no run folder %s; waiting for it to appear", self._files.url)

    @property
    def missing(self) -> str:
        """See `CheckpointSource`."""
        return not_there_yet(self._files.url) if self._is_missing else ""

    @property
    def unread(self) -> str:
        """See `CheckpointSource`."""
        return self._local.unread

    @property
    def found(self) -> Sequence[Checkpoint]:
        """See `CheckpointSource`."""
        return self._found.in_order()

    def poll(self, wanted: Collection[int] = ()) -> Changes:
        """See `CheckpointSource`."""
        if not self._is_mirrored or time.monotonic() >= self._list_from:
            self._refresh(wanted)
        for step, checkpoint in self._local.poll(wanted).items():
            self._found.set(step, checkpoint and _RemoteCheckpoint.of(checkpoint, self._files))
        return self._found.take_changes()

    def peek(self) -> object:
        """See `CheckpointSource`, and that of the mirror."""
        return self._local.peek()

    def _refresh(self, wanted: Collection[int]) -> None:
        began = time.monotonic()
        listed = self._files.list(_chosen)
        self._is_missing = not listed
        self._list_from = time.monotonic() + (time.monotonic() - began) / _LISTING_SHARE
        self._mirror.checkpoints.mkdir(parents=True, exist_ok=True)
        if not self._is_swept:
            sweep(self._mirror.checkpoints)
            self._is_swept = True
        folders = self._by_folder(listed)
        for folder in self._mirror.checkpoints.iterdir():
            if folder.name not in folders:
                remove_folder(folder)
        changed = [name for name, statuses in folders.items() if self._differs(name, statuses)]
        changed.sort(key=lambda name: (int(name) in wanted, int(name)), reverse=True)
        for place, name in enumerate(changed):
            if place >= _READ_AT_FIRST and time.monotonic() - began > _READING_SECONDS:
                self._is_mirrored = False
                return
            self._mirror_folder(name, folders[name])
        self._is_mirrored = True
        journal = self._mirror.training_json
        status = listed.get(journal.name)
        if status is None:
            journal.unlink(missing_ok=True)
        elif local_status(journal) != status and self._is_acceptable(journal.name, status):
            mirror_file(self._files, journal.name, status, journal)

    def _by_folder(self, listed: Mapping[str, FileStatus]) -> Mapping[str, Mapping[str, FileStatus]]:
        """Return the mirrored files of each checkpoint that has a manifest, by the names of their folders."""
        found: dict[str, dict[str, FileStatus]] = defaultdict(dict)
        for name, status in listed.items():
            match = _MIRRORED.fullmatch(name)
            if match and self._is_acceptable(name, status):
                found[match[1]][match[2]] = status
        return {folder: files for folder, files in found.items() if MANIFEST_FILE in files}

    def _is_acceptable(self, name: str, status: FileStatus) -> bool:
        if status.size_bytes <= LARGEST_BYTES:
            return True
        if name not in self._refused:
            self._refused.add(name)
            _log.error("%s/%s is ignored: it has more than %d bytes", self._files.url, name, LARGEST_BYTES)
        return False

    def _differs(self, folder: str, statuses: Mapping[str, FileStatus]) -> bool:
        local = {
            name: local_status(self._mirror.checkpoints / folder / name) for name in (MANIFEST_FILE, SIGNATURE_FILE)
        }
        return {name: status for name, status in local.items() if status is not None} != dict(statuses)

    def _mirror_folder(self, folder: str, statuses: Mapping[str, FileStatus]) -> None:
        target = self._mirror.checkpoints / folder
        with temporary_folder(target) as temporary:
            for name, status in statuses.items():
                if not mirror_file(self._files, f"checkpoints/{folder}/{name}", status, temporary / name):
                    return  # It has changed since it was listed; the next poll lists it again.
            remove_folder(target)
            temporary.rename(target)


@dataclass(frozen=True, kw_only=True)
class _RemoteCheckpoint(PublishedCheckpoint):
    """A checkpoint whose folder is a mirror of its manifest; its other files are remote."""

    files: RemoteFiles

    @classmethod
    def of(cls, checkpoint: Checkpoint, files: RemoteFiles) -> Checkpoint:
        """Return a mirrored checkpoint as a remote one; one that cannot be read stays what it is."""
        if not isinstance(checkpoint, PublishedCheckpoint):
            return checkpoint
        return cls(**{field.name: getattr(checkpoint, field.name) for field in fields(checkpoint)}, files=files)

    @property
    def copies(self) -> bool:
        """See `Checkpoint`."""
        return True

    def _take_listed(self, entry: FileEntry, folder: Path) -> None:
        """Copy one file and check it: a writer may be replacing or deleting the checkpoint."""
        target = folder / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            copied = self.files.copy(self._name(entry.path), target, size_bytes=entry.size_bytes)
        except FileNotFoundError:
            self._check_current()
            raise
        if copied.size_bytes != entry.size_bytes:
            self._check_current()
            raise DamagedCheckpointError(
                f"{self.files.url}/{self._name(entry.path)} has {copied.size_bytes} bytes, its manifest says "
                f"{entry.size_bytes}"
            )
        found = at_low_priority(functools.partial(describe_file, folder, entry.path))
        if found != entry:
            self._check_current()
            raise DamagedCheckpointError(
                f"{self.files.url}/{self._name(entry.path)} has SHA-256 {found.sha256}, its manifest says "
                f"{entry.sha256}"
            )

    def _check_current(self) -> None:
        """Raise CheckpointGoneError if the manifest is no longer the mirrored one."""
        manifest = self._name(MANIFEST_FILE)
        now = self.files.list(lambda names: [manifest] if manifest in names else [])
        if now.get(manifest) != local_status(self.directory / MANIFEST_FILE):
            raise CheckpointGoneError(f"{self.files.url}/{manifest} was deleted or replaced before it could be fetched")

    def _name(self, path: str) -> str:
        return f"checkpoints/{self.directory.name}/{path}"


def _chosen(names: Collection[str]) -> list[str]:
    journal = RunDir(Path()).training_json.name
    return [name for name in names if name == journal or _is_mirrored(name)]


def _is_mirrored(name: str) -> bool:
    match = _MIRRORED.fullmatch(name)
    return match is not None and parse_number(match[1]) is not None
