"""One process at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from understudy.checkpoints import DirectoryLock, LockHeldError

_HOLDER = """
import sys
from pathlib import Path
from understudy.checkpoints import DirectoryLock
with DirectoryLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_holder_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path), pytest.raises(LockHeldError, match=f"in use by process {os.getpid()}"):
        DirectoryLock(tmp_path).acquire()


def test_a_lock_can_be_had_again_after_its_release(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path / "made")
    for _ in range(2):
        with lock:
            assert (tmp_path / "made").is_dir()
    lock.release()


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LockHeldError, match=f"process {holder.pid}"):
            DirectoryLock(tmp_path).acquire()
        holder.kill()
    with DirectoryLock(tmp_path):
        pass
