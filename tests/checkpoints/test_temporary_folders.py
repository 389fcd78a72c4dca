"""Temporary folders of killed processes are deleted by the next, and no others."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from understudy.checkpoints.temporary_folders import LOCK_FILE, TemporaryFolder, delete_abandoned

SECONDS = 60


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    folder = tmp_path / "place"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def abandoned(folder: Path) -> Path:
    """Make what a killed process leaves: a folder with a lock that no process holds."""
    (folder / "model" / "variables").mkdir(parents=True)
    (folder / "model" / "variables" / "data").write_bytes(b"weights")
    (folder / LOCK_FILE).touch()
    return folder


def owner_of_a_folder(place: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a process that makes a folder and then waits."""
    program = (
        "import sys; from understudy.checkpoints.temporary_folders import TemporaryFolder\n"
        "folder = TemporaryFolder(); (folder.path / 'file').touch(); print(folder.path, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    assert path.parent == place
    return process, path


def test_the_folder_of_a_killed_process_is_deleted_by_the_next_and_that_of_a_living_one_is_not(place: Path) -> None:
    process, theirs = owner_of_a_folder(place)
    with process, TemporaryFolder() as mine:
        assert (theirs / "file").exists()
        process.kill()
        process.wait(SECONDS)
        assert theirs.exists()
        with TemporaryFolder() as next_one:
            assert set(place.iterdir()) == {mine.path, next_one.path}
            assert mine.path.stat().st_mode & 0o077 == 0
    assert not list(place.iterdir())


def test_a_folder_is_deleted_with_all_that_is_in_it_and_only_once(place: Path) -> None:
    folder = TemporaryFolder()
    (folder.path / "a" / "b").mkdir(parents=True)
    (folder.path / "a" / "b" / "file").touch()
    folder.delete()
    folder.delete()
    assert not list(place.iterdir())


def test_no_symbolic_link_is_followed(place: Path, tmp_path: Path) -> None:
    elsewhere = abandoned(tmp_path / "elsewhere")
    (place / "understudy-link").symlink_to(elsewhere)
    by_link = place / "understudy-lock"
    by_link.mkdir()
    (by_link / LOCK_FILE).symlink_to(elsewhere / LOCK_FILE)
    left = abandoned(place / "understudy-left")
    (left / "folder").symlink_to(elsewhere)
    (left / "model" / "file").symlink_to(elsewhere / "model" / "variables" / "data")
    delete_abandoned()
    assert not left.exists()
    assert by_link.exists()
    assert (elsewhere / "model" / "variables" / "data").read_bytes() == b"weights"
    assert (elsewhere / LOCK_FILE).exists()


def test_folders_without_the_lock_or_with_another_name_are_a_users_own(place: Path) -> None:
    (place / "understudy-run" / "checkpoints").mkdir(parents=True)
    (place / "understudy-pipe").mkdir()
    os.mkfifo(place / "understudy-pipe" / LOCK_FILE)
    abandoned(place / "run")
    delete_abandoned()
    assert {path.name for path in place.iterdir()} == {"understudy-run", "understudy-pipe", "run"}


def test_the_folders_of_other_users_are_left(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = abandoned(place / "understudy-theirs")
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    delete_abandoned()
    assert (left / "model" / "variables" / "data").exists()
    monkeypatch.setattr(os, "geteuid", lambda: mine)
    delete_abandoned()
    assert not left.exists()


def test_one_call_deletes_no_more_than_sixteen(place: Path) -> None:
    for number in range(20):
        abandoned(place / f"understudy-{number}")
    delete_abandoned()
    assert len(list(place.iterdir())) == 4
    delete_abandoned()
    assert not list(place.iterdir())


def test_a_folder_that_is_deleted_before_its_owner_has_the_lock_is_made_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    met: list[int] = []

    def meet(descriptor: int, operation: int) -> Any:
        if not met and list(place.iterdir()):  # threads of other tests may lock files elsewhere
            met.append(descriptor)
            assert len(list(place.iterdir())) == 1
            delete_abandoned()  # another process, between the making of the file and its lock
            assert not list(place.iterdir())
        return flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", meet)
    with TemporaryFolder() as folder:
        assert met
        assert (folder.path / LOCK_FILE).exists()
        delete_abandoned()
        assert folder.path.exists()


def test_a_place_where_files_cannot_be_locked_is_named_and_keeps_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match=r"No locks available.*set TMPDIR to a folder on a local disk.*understudy-"):
        TemporaryFolder()
    assert not list(place.iterdir())
