"""Copying a file that somebody may be writing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from understudy.checkpoints.stable_copy import FileChangedError, stable_copy

_copy = shutil.copyfileobj


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def _rewrite(path: Path) -> None:
    os.utime(path, ns=(0, 0))
    path.write_bytes(b"other")


@pytest.fixture
def during_copy(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Make something happen when the content has been copied, before the file's status is compared."""

    def arrange(happen: Callable[[], None]) -> None:
        def copy(reader: IO[bytes], writer: IO[bytes], length: int) -> None:
            _copy(reader, writer, length)
            happen()

        monkeypatch.setattr(shutil, "copyfileobj", copy)

    return arrange


def test_a_file_at_rest_is_copied(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"whole")
    stamp = stable_copy(tmp_path / "source", tmp_path / "copy", root=tmp_path)
    assert (tmp_path / "copy").read_bytes() == b"whole"
    assert stamp.size_bytes == 5


@pytest.mark.parametrize("change", [_append, _rewrite])
def test_a_file_that_changes_meanwhile_is_refused(
    tmp_path: Path,
    during_copy: Callable[[Callable[[], None]], None],
    change: Callable[[Path], None],
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"whole")
    during_copy(lambda: change(source))
    with pytest.raises(FileChangedError, match="changed while it was being copied"):
        stable_copy(source, tmp_path / "copy", root=tmp_path)


def test_a_file_that_is_deleted_or_replaced_meanwhile_is_still_whole(
    tmp_path: Path,
    during_copy: Callable[[Callable[[], None]], None],
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"whole")
    during_copy(source.unlink)
    stable_copy(source, tmp_path / "copy", root=tmp_path)
    assert (tmp_path / "copy").read_bytes() == b"whole"
