"""Publishes checkpoints atomically: a reader sees all of a checkpoint or nothing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from understudy.checkpoints.atomic import sync, write_bytes
from understudy.checkpoints.checkpoint_errors import AlreadyPublishedError, LockHeldError
from understudy.checkpoints.fs import remove_folder, sweep, temporary_folder
from understudy.checkpoints.layout import MANIFEST_FILE, MODEL_FILE, RunDir, step_name, steps_in
from understudy.checkpoints.locks import DirectoryLock
from understudy.checkpoints.manifest import SIGNATURE_FILE, FileEntry, Manifest, describe_file, encode_manifest
from understudy.checkpoints.signature import Signature
from understudy.checkpoints.signing import MANIFEST, Signer

_log = logging.getLogger(__name__)

_LIBRARIES = ("understudy", "tensorflow", "keras", "numpy")


class CheckpointPublisher:
    """Writes checkpoints into a run folder and deletes the old ones.

    One process publishes into a run folder at a time, from one thread at a time. A new publisher deletes the leftovers
    of one that was killed.

    Args:
        run_dir: The run folder; created if missing.
        keep: How many of the newest checkpoints to keep, at least 1. Checkpoints that the evaluator leases are kept
            as well.
        signer: Signs each checkpoint; None if they are not signed.
    """

    def __init__(self, run_dir: RunDir, *, keep: int, signer: Signer | None = None) -> None:
        if keep < 1:
            raise ValueError(f"keep is the number of checkpoints to keep, at least 1, not {keep}")
        self._run = run_dir
        self._keep = keep
        self._signer = signer
        self._lock = DirectoryLock(run_dir.checkpoints)
        # If the lock is held, a publisher is alive and its temporary folder is in use.
        with contextlib.suppress(LockHeldError), self._lock:
            sweep(run_dir.checkpoints)

    def publish(
        self,
        step: int,
        write: Callable[[Path], None],
        *,
        epoch: int | None,
        final: bool,
        metrics: Mapping[str, float],
        signature: Signature | None,
        versions: Mapping[str, str] | None = None,
    ) -> Manifest:
        """Publish one checkpoint. When this returns, it is on disk and every reader sees it.

        Args:
            step: Training steps taken.
            write: Called with an empty folder, into which it writes ``model.keras`` and any other files of the
                checkpoint.
            epoch: Epochs completed, or None.
            final: Whether training ended with it.
            metrics: Training metrics by name.
            signature: The model's inputs and outputs, or None if unknown.
            versions: Versions of libraries by name; by default those of the installed libraries.

        Returns:
            The manifest as written.

        Raises:
            AlreadyPublishedError: This step is already committed. Nothing was written.
            LockHeldError: Another process is publishing into this run folder.
            ValueError: ``write`` wrote no ``model.keras``.
            Exception: Whatever ``write`` or the file system raised. After any error, the folder holds the same
                checkpoints as before and no part of this one.
        """
        target = self._run.checkpoint(step)
        with self._lock:
            if (target / MANIFEST_FILE).exists():
                raise AlreadyPublishedError(f"step {step} is committed already in {target}; a checkpoint never changes")
            with temporary_folder(target) as folder:
                write(folder)
                files = _settle(folder)
                manifest = Manifest(
                    step=step,
                    epoch=epoch,
                    created_at=time.time(),
                    final=final,
                    digest=_digest(files),
                    files=files,
                    metrics=dict(metrics),
                    signature=signature,
                    versions=library_versions() if versions is None else dict(versions),
                    run=None if self._signer is None else self._signer.run,
                )
                content = encode_manifest(manifest)
                if self._signer is not None:
                    write_bytes(folder / SIGNATURE_FILE, self._signer.key.sign(content, MANIFEST))
                write_bytes(folder / MANIFEST_FILE, content)
                # A folder without a manifest was never committed.
                remove_folder(target)
                folder.rename(target)
            sync(self._run.checkpoints)
            self._prune()
        return manifest

    def _prune(self) -> None:
        """Delete all checkpoints except the newest and the leased ones. Looks into none that stays but the newest.

        A failure is only logged: the new checkpoint is committed, and the next call tries again.
        """
        steps = steps_in(self._run.checkpoints)
        if len(steps) <= self._keep:
            return
        leased = set(steps_in(self._run.leases))
        kept = 0
        for step in reversed(steps):
            if kept < self._keep:
                kept += self._run.is_committed(step)
                continue
            if step in leased or not self._run.is_committed(step) or (self._run.leases / step_name(step)).exists():
                continue
            try:
                remove_folder(self._run.checkpoint(step))
            except OSError as error:
                _log.warning("could not delete the old checkpoint of step %d: %s", step, error)


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that a checkpoint depends on, without importing them."""
    versions = {"python": platform.python_version()}
    for library in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[library] = importlib.metadata.version(library)
    return versions


def _settle(folder: Path) -> tuple[FileEntry, ...]:
    """Wait until everything in a folder is on disk, and describe its files."""
    files = []
    for path in sorted(folder.rglob("*")):
        sync(path)
        if path.is_file():
            files.append(describe_file(folder, path.relative_to(folder).as_posix()))
    return tuple(files)


def _digest(files: tuple[FileEntry, ...]) -> str:
    for entry in files:
        if entry.path == MODEL_FILE:
            return entry.sha256
    names = ", ".join(entry.path for entry in files) or "nothing"
    raise ValueError(f"write() is to leave a file {MODEL_FILE}; it left {names}")
