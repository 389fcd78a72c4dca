"""Memory that is lent to one set of weights after another."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from understudy.evaluator.model.weights import ALIGNMENT_BYTES, BufferPool


def test_memory_is_lent_again_only_when_nothing_refers_to_it() -> None:
    spare = BufferPool()
    lent = spare.borrow(4000)
    address = lent.ctypes.data
    tensor = tf.experimental.dlpack.from_dlpack(lent.view(np.float32).reshape(100, 10).__dlpack__())
    part = lent[8:].view(np.float64)
    del lent
    assert spare.borrow(4000).ctypes.data != address
    del part
    others = [spare.borrow(4000) for _ in range(3)]
    assert address not in {other.ctypes.data for other in others}
    del tensor, others
    assert spare.borrow(4000).ctypes.data == address


def test_memory_is_aligned_and_of_the_size_asked_for() -> None:
    spare = BufferPool()
    for size in (1, 63, 64, 4097):
        lent = spare.borrow(size)
        assert lent.ctypes.data % ALIGNMENT_BYTES == 0
        assert lent.nbytes == size


def test_one_piece_of_each_size_is_kept() -> None:
    spare = BufferPool()
    lent = [spare.borrow(1000) for _ in range(3)]
    del lent
    first, second = spare.borrow(1000), spare.borrow(1000)
    assert not np.shares_memory(first, second)
