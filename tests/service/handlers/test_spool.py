"""Batches on disk: they come back as they went, and no more than may be are kept."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from understudy.evaluator.evaluator_errors import OverloadedError, StorageError
from understudy.service.calls.caller import Caller
from understudy.service.handlers.compare_stream import Spools
from understudy.v1 import evaluation_pb2
from understudy.wire import encode_all


def batch(rows: int) -> evaluation_pb2.EvaluateBatch:
    return evaluation_pb2.EvaluateBatch(inputs=encode_all({"x": np.full((rows, 3), rows, np.float32)}))


def test_batches_come_back_in_order_as_often_as_they_are_read() -> None:
    batches = [batch(rows) for rows in (1, 400, 7)]
    with closing(Spools(None, max_bytes=1 << 20).open()) as spool:
        for item in batches:
            spool.write(item)
        assert list(spool.read()) == batches
        assert list(spool.read()) == batches


def test_an_empty_batch_is_a_batch_too() -> None:
    with closing(Spools(None, max_bytes=1 << 20).open()) as spool:
        spool.write(evaluation_pb2.EvaluateBatch())
        assert list(spool.read()) == [evaluation_pb2.EvaluateBatch()]


def test_all_spools_share_one_quota(tmp_path: Path) -> None:
    spools = Spools(tmp_path, max_bytes=200)
    with closing(spools.open()) as first, closing(spools.open()) as second:
        first.write(batch(1))
        with pytest.raises(OverloadedError, match="exceed 200 bytes; compare versions that are loaded"):
            second.write(batch(12))
        second.write(batch(1))
    with closing(spools.open()) as third:
        third.write(batch(10))
        third.close()
        third.close()
    with closing(spools.open()) as fourth:
        fourth.write(batch(10))


def test_one_caller_has_half_of_the_quota(tmp_path: Path) -> None:
    ada, bob = (Caller(name=name, groups=frozenset()) for name in ("ada", "bob"))
    spools = Spools(tmp_path, max_bytes=400)
    with closing(spools.open(ada)) as first, closing(spools.open(ada)) as second, closing(spools.open(bob)) as other:
        first.write(batch(10))
        with pytest.raises(OverloadedError, match=r"ada's comparisons.* exceed 200 bytes"):
            second.write(batch(10))
        other.write(batch(10))
    assert not spools._bytes_of


def test_a_folder_that_is_not_there_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"No such file.*--spool-dir"):
        Spools(tmp_path / "missing", max_bytes=1).open()


def test_a_full_disk_is_told_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spools(tmp_path, max_bytes=1000).open()
    spool.close()
    with Path("/dev/full").open("r+b", buffering=0) as full:
        monkeypatch.setattr(spool, "_file", full)
        with pytest.raises(StorageError, match="No space left on device"):
            spool.write(batch(1))
