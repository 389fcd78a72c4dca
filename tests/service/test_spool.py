"""Batches on disk: they come back as they went, and no more than may be are kept."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from understudy.evaluator.errors import OverloadedError
from understudy.service.dataplane.spool import Spool
from understudy.v1 import evaluation_pb2
from understudy.wire import encode_all


def batch(rows: int) -> evaluation_pb2.EvaluateBatch:
    return evaluation_pb2.EvaluateBatch(inputs=encode_all({"x": np.full((rows, 3), rows, np.float32)}))


def test_batches_come_back_in_order_as_often_as_they_are_read() -> None:
    batches = [batch(rows) for rows in (1, 400, 7)]
    with closing(Spool()) as spool:
        for item in batches:
            spool.write(item)
        assert list(spool.read()) == batches
        assert list(spool.read()) == batches


def test_an_empty_batch_is_a_batch_too() -> None:
    with closing(Spool()) as spool:
        spool.write(evaluation_pb2.EvaluateBatch())
        assert list(spool.read()) == [evaluation_pb2.EvaluateBatch()]


def test_what_is_too_much_is_refused_with_the_remedy() -> None:
    with closing(Spool(max_bytes=100)) as spool:
        spool.write(batch(1))
        with pytest.raises(OverloadedError, match="exceed 100 bytes; compare versions that are loaded"):
            spool.write(batch(10))
