"""A file system of its own, of 1 MiB, that tests fill."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

DISK_BYTES = 1 << 20


@contextmanager
def mounted(disk: Path) -> Iterator[Path]:
    """Mount a file system of 1 MiB at a new folder; skip the test where that is not possible."""
    disk.mkdir()
    mount = [shutil.which("mount") or "mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True, text=True, timeout=60)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        pytest.skip(f"a small file system cannot be mounted here: {reason}")
    try:
        yield disk
    finally:
        subprocess.run([shutil.which("umount") or "umount", "--lazy", str(disk)], check=True, timeout=60)


def fill(disk: Path, *, leave: int) -> Path:
    """Write a file that takes all room but so many bytes; return it."""
    filler = disk / "filler"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    filler.write_bytes(bytes(free - leave))
    return filler
