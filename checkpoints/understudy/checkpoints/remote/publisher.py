"""Publishes what a trainer commits to a local run folder in a bucket as well."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Self

from understudy.checkpoints.atomic import write_json
from understudy.checkpoints.checkpoint_errors import (
    AlreadyPublishedError,
    CheckpointError,
    RemoteStorageError,
    StorageRefusalError,
    UnsupportedLocationError,
    gone_error,
)
from understudy.checkpoints.fs import link_or_copy, sweep, temporary_folder
from understudy.checkpoints.layout import MANIFEST_FILE, RunDir, parse_step, step_name
from understudy.checkpoints.locks import DirectoryLock
from understudy.checkpoints.manifest import LARGEST_BYTES, SIGNATURE_FILE, Manifest, read_manifest, verify_files
from understudy.checkpoints.pauses import doubling_pause
from understudy.checkpoints.remote.files import RemoteStore

_log = logging.getLogger(__name__)

OWNER_FILE = "publisher.json"
"""Names the run that publishes to a bucket; its local folder and the bucket hold the same content."""

_POLL_SECONDS = 0.5
_HEARTBEAT_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 30.0


class RemotePublisher:
    """Copies the newest checkpoints of a run folder to a bucket, with the same layout.

    The files of a checkpoint go first, and its manifest last, if there is none yet: it commits the checkpoint. What
    is deleted loses its manifest first. A new publisher goes on where another one ended.

    Use it as a context manager, which locks the run folder against a second publisher. For one thread.

    Args:
        run: The run folder; the trainer may be writing to it.
        store: The remote run folder.
        keep: How many of the newest checkpoints to keep there, at least 1.
        on_published: Called with each step that has been committed there.

    Raises:
        LockHeldError: Entering it: another process publishes this run folder.
    """

    def __init__(
        self, run: RunDir, store: RemoteStore, *, keep: int, on_published: Callable[[int], None] = lambda _: None
    ) -> None:
        self._run = run
        self._store = store
        self._keep = keep
        self._on_published = on_published
        self._folder = run.root / "publishing"
        self._lock = DirectoryLock(self._folder, alternative="let it publish")
        self._published: dict[int, set[str]] | None = None
        self._settled: set[int] = set()
        self._journal_lock = threading.Lock()
        self._journal: bytes | None = None

    def __enter__(self) -> Self:
        self._lock.acquire()
        sweep(self._folder)
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def claim_once_it_answers(self, stopped: threading.Event) -> None:
        """Claim the remote folder; try again while the store does not answer, until ``stopped`` is set.

        Raises:
            RemoteStorageError: The store refuses, or did not answer the last attempt.
            Exception: See `claim`.
        """
        failures = 0
        while True:
            is_last = stopped.is_set()
            try:
                return self.claim()
            except StorageRefusalError:
                raise
            except RemoteStorageError as error:
                if is_last:
                    raise
                failures += 1
                _log.warning("%s; waiting for it to answer", error)
            stopped.wait(doubling_pause(failures, first=_POLL_SECONDS, longest=_LONGEST_PAUSE_SECONDS))

    def claim(self) -> None:
        """Make the remote folder this run's, so that no other run writes or deletes there.

        Raises:
            AlreadyPublishedError: Another run publishes there.
            UnsupportedLocationError: The store writes over what exists although asked not to.
            RemoteStorageError: The store does not answer, or refuses.
            OSError: The run folder cannot be written.
        """
        file = self._run.root / OWNER_FILE
        if not file.exists():
            write_json(file, {"run": uuid.uuid4().hex})
        mine = file.read_bytes()
        if self._store.create(OWNER_FILE, mine) and self._store.create(OWNER_FILE, mine):
            raise UnsupportedLocationError(
                f"{self._store.url}: this store ignores the condition that there be no such object, without which two "
                "publishers could commit the same step; publish to another store"
            )
        if self._store.read(OWNER_FILE, limit=LARGEST_BYTES) != mine:
            raise AlreadyPublishedError(
                f"{self._store.url} holds the checkpoints of another run; give another URL, or the run folder whose "
                f"{OWNER_FILE} is the one there"
            )

    def follow(self, stopped: threading.Event) -> None:
        """Publish until training has finished; or, once ``stopped`` is set, what is committed by then.

        A store that does not answer is tried again, until ``stopped`` is set.

        Raises:
            OSError: The last attempt failed.
        """
        ended = threading.Event()
        heart = threading.Thread(target=self._beat, args=(ended,), name="understudy-publish-heartbeat")
        heart.start()
        try:
            failures = 0
            while True:
                is_last = stopped.is_set()
                try:
                    if self.publish() or is_last:
                        return
                    failures = 0
                except OSError as error:
                    if is_last:
                        raise
                    failures += 1
                    self._published = None
                    _log.warning("publishing failed, to be tried again: %s", error)
                stopped.wait(doubling_pause(failures, first=_POLL_SECONDS, longest=_LONGEST_PAUSE_SECONDS))
        finally:
            ended.set()
            heart.join()

    def publish(self) -> bool:
        """Publish what is committed now; return whether training has finished and all of it is published.

        Raises:
            OSError: The store does not answer or refuses, or the run folder cannot be read.
        """
        journal = self._read_journal()
        if self._published is None:
            self._published = self._remote_steps()
        local = self._run.committed_steps()
        kept = sorted({*local, *(step for step, paths in self._published.items() if MANIFEST_FILE in paths)})[
            -self._keep :
        ]
        for step in kept:
            if step in local and step not in self._settled:
                self._settle(step)
        for step in sorted(self._published.keys() - {*kept}):
            self._delete(step)
        if journal is None or _state(journal) == "running":
            return False
        with self._journal_lock:
            self._write_journal(journal)
        return _state(journal) == "finished"

    def _remote_steps(self) -> dict[int, set[str]]:
        """Return the files of every step that has any there, committed or not."""
        found: dict[int, set[str]] = {}
        for name in self._store.list(lambda names: names):
            folder, _, path = name.removeprefix("checkpoints/").partition("/")
            step = parse_step(folder) if name.startswith("checkpoints/") else None
            if step is not None and path:
                found.setdefault(step, set()).add(path)
        return found

    def _settle(self, step: int) -> None:
        """Publish a step, unless it was deleted or is damaged, which is logged."""
        try:
            with temporary_folder(self._folder / step_name(step)) as copy:
                manifest = self._lease(step, copy)
                verify_files(copy, manifest)
                self._upload(step, copy, manifest)
        except CheckpointError as error:
            _log.error("step %d is not published: %s", step, error)
        self._settled.add(step)

    def _lease(self, step: int, folder: Path) -> Manifest:
        """Link the files of a checkpoint, which the trainer may delete meanwhile."""
        source = self._run.checkpoint(step)
        try:
            link_or_copy(source / MANIFEST_FILE, folder / MANIFEST_FILE, root=self._run.checkpoints)
            manifest = read_manifest(folder, origin=source / MANIFEST_FILE)
            for entry in manifest.files:
                link_or_copy(source / entry.path, folder / entry.path, root=self._run.checkpoints)
            with contextlib.suppress(FileNotFoundError):
                link_or_copy(source / SIGNATURE_FILE, folder / SIGNATURE_FILE, root=self._run.checkpoints)
            (source / MANIFEST_FILE).stat()  # It was there all the time.
        except FileNotFoundError as error:
            gone = f"{source} was deleted before it could be published; have the trainer keep more checkpoints"
            checkpoints = self._run.checkpoints
            raise gone_error(gone, folder=checkpoints, is_gone=not checkpoints.exists()) from error
        return manifest

    def _upload(self, step: int, folder: Path, manifest: Manifest) -> None:
        at = f"checkpoints/{step_name(step)}"
        known = (self._published or {}).setdefault(step, set())
        content = (folder / MANIFEST_FILE).read_bytes()
        if MANIFEST_FILE in known:
            self._compare(step, content)
            return
        for entry in manifest.files:
            self._store.upload(folder / entry.path, f"{at}/{entry.path}", sha256=entry.sha256)
            known.add(entry.path)
        if (folder / SIGNATURE_FILE).exists():
            self._store.write(f"{at}/{SIGNATURE_FILE}", (folder / SIGNATURE_FILE).read_bytes())
            known.add(SIGNATURE_FILE)
        if not self._store.create(f"{at}/{MANIFEST_FILE}", content):
            self._compare(step, content)
        known.add(MANIFEST_FILE)
        self._on_published(step)

    def _compare(self, step: int, content: bytes) -> None:
        """Check that a committed manifest is the local one."""
        name = f"checkpoints/{step_name(step)}/{MANIFEST_FILE}"
        if self._store.read(name, limit=LARGEST_BYTES) != content:
            raise AlreadyPublishedError(
                f"{self._store.url}/{name} is of another checkpoint of this step; a committed checkpoint never changes"
            )

    def _delete(self, step: int) -> None:
        """Delete a step: first its manifest, after which no reader takes the rest."""
        at = f"checkpoints/{step_name(step)}"
        paths = (self._published or {}).get(step, set())
        if MANIFEST_FILE in paths:
            self._store.delete([f"{at}/{MANIFEST_FILE}"])
        self._store.delete([f"{at}/{path}" for path in sorted(paths - {MANIFEST_FILE})])
        (self._published or {}).pop(step, None)
        self._settled.discard(step)

    def _beat(self, ended: threading.Event) -> None:
        """Publish how the training is going while it runs, also while a checkpoint is uploaded."""
        while True:
            with self._journal_lock, contextlib.suppress(OSError):
                journal = self._read_journal()
                if journal is not None and _state(journal) == "running":
                    self._write_journal(journal)
            if ended.wait(_HEARTBEAT_SECONDS):
                return

    def _read_journal(self) -> bytes | None:
        try:
            return self._run.training_json.read_bytes()
        except FileNotFoundError:
            return None

    def _write_journal(self, content: bytes) -> None:
        if content != self._journal:
            self._store.write(self._run.training_json.name, content)
            self._journal = content


def _state(journal: bytes) -> str:
    try:
        return str(json.loads(journal)["state"])
    except (ValueError, KeyError, TypeError):
        return ""  # Readers tell what is wrong with it.
