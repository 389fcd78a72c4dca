"""Files are replaced as a whole or not at all."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest

from understudy.checkpoints.atomic import write_json


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    write_json(path, {"step": 1})
    write_json(path, {"step": 2})
    assert json.loads(path.read_text()) == {"step": 2}
    assert list(tmp_path.iterdir()) == [path]


def test_numbers_that_json_lacks_come_back_through_float(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    write_json(path, {"loss": math.nan, "bounds": [math.inf, -math.inf]})
    value = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert math.isnan(float(value["loss"]))
    assert [float(bound) for bound in value["bounds"]] == [math.inf, -math.inf]


def test_a_full_disk_leaves_the_old_content_and_nothing_beside_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "value.json"
    write_json(path, {"step": 1})
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {"step": 2})
    assert json.loads(path.read_text()) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]
