"""Folders that appear and disappear atomically."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from understudy.checkpoints.layout import TEMPORARY_PREFIX

_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP)


@contextlib.contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder beside ``target`` to fill. It is deleted at the end if it still exists.

    To keep it, rename it to ``target`` inside the ``with`` block.
    """
    folder = _temporary_name(target)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)


def remove_folder(folder: Path) -> None:
    """Delete a folder so that no reader sees a part of it: it is renamed first. A missing folder is no error."""
    doomed = _temporary_name(folder)
    try:
        folder.rename(doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed)


def sweep(parent: Path) -> None:
    """Delete the leftovers of dead processes in a folder. Only its owner may call this, while holding its lock."""
    for leftover in parent.glob(f"{TEMPORARY_PREFIX}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link ``source`` to ``target``, or copy it. ``target`` outlives ``source``.

    Raises:
        FileNotFoundError: ``source`` does not exist.
        OSError: Copying failed.
    """
    try:
        _link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, target)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        if target.parent.is_dir():
            raise
        target.parent.mkdir(parents=True)
        os.link(source, target)


def _temporary_name(target: Path) -> Path:
    return target.with_name(f"{TEMPORARY_PREFIX}{target.name}-{uuid.uuid4().hex}")
