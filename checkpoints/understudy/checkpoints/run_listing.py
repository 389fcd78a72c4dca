"""The listing of a run's checkpoints: which there are, and what changes when one of them is replaced."""

from __future__ import annotations

import heapq
import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from understudy.checkpoints.checkpoint_errors import LocationGoneError
from understudy.checkpoints.layout import MAX_STEP, RunDir, parse_number

_log = logging.getLogger(__name__)

FolderStamp = tuple[int, int]
"""Inode and modification time in nanoseconds."""

_COMPLETE_SECONDS = 10.0
_COMPLETE_SHARE = 0.01
"""How long ago a complete listing may be, at least, and the largest share of the time that these may take."""

_NEWEST = 64
"""The highest steps, whose status every listing reads: these are the ones that are written again after a restart."""

_Folder = tuple[int, FolderStamp]
"""A step, and the status of its folder. A tuple, as there may be 100,000 of them."""


class FolderChanges(NamedTuple):
    """What has changed in a folder of checkpoints.

    Attributes:
        present: The folders that are new, or were replaced or changed, by their steps.
        gone: The steps of the folders that are gone.
    """

    present: Mapping[int, FolderStamp]
    gone: Collection[int]


class RunListing:
    """Lists the folders of a run's checkpoints, committed or not. For one thread at a time.

    A complete listing reads the status of every folder. Between complete ones, it is read only for folders that are
    new, have another inode, or are among the newest. So an older folder that is replaced by another with the same inode
    is noticed later. A folder with a number above `MAX_STEP` is named in the log once.

    Args:
        run: The run folder, which need not exist yet.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._folders: dict[str, _Folder] = {}
        self._refused: set[str] = set()
        self._complete_from = 0.0

    def changes(self) -> FolderChanges:
        """List the folders; return what has changed since the last call.

        Raises:
            FileNotFoundError: The run's checkpoints are gone as a whole, like those of a mount that is lost.
            OSError: The folder could not be read.
        """
        began = time.monotonic()
        is_complete = began >= self._complete_from
        before = self._folders
        newest = min(heapq.nlargest(_NEWEST, (step for step, _ in before.values())), default=0)
        found: dict[str, _Folder] = {}
        present: dict[int, FolderStamp] = {}
        with self._scanned() as entries:
            for entry in entries:
                known = folder = before.get(name := entry.name)
                if is_complete or known is None or known[0] >= newest or known[1][0] != entry.inode():
                    folder = self._read(entry)
                if folder is None:
                    continue
                found[name] = folder
                if folder != known:
                    present[folder[0]] = folder[1]
        self._folders = found
        if is_complete:
            ended = time.monotonic()
            self._complete_from = ended + max(_COMPLETE_SECONDS, (ended - began) / _COMPLETE_SHARE)
        return FolderChanges(present, [before[name][0] for name in before.keys() - found.keys()])

    def _scanned(self) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
        try:
            return os.scandir(self._run.checkpoints)
        except FileNotFoundError:
            if not self._folders:
                return nullcontext(iter(()))
            raise LocationGoneError(self._run.checkpoints) from None

    def forget(self, step: int) -> None:
        """Have the next call of `changes` return a folder again if it is there."""
        self._folders.pop(self._run.checkpoint(step).name, None)

    def _read(self, entry: os.DirEntry[str]) -> _Folder | None:
        step = parse_number(entry.name)
        if step is None:
            return None
        if step > MAX_STEP:
            self._refuse(entry.name)
            return None
        try:
            status = entry.stat()
        except FileNotFoundError:  # Deleted after it was listed.
            return None
        return step, (status.st_ino, status.st_mtime_ns)

    def _refuse(self, name: str) -> None:
        if name not in self._refused:
            self._refused.add(name)
            _log.error(
                "%s is ignored: its number is above the highest step, %d", self._run.checkpoints / name, MAX_STEP
            )
