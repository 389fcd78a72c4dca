"""Work on a thread of low priority."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from understudy.checkpoints.low_priority import NICENESS, at_low_priority

_LEAST_FAVOURED = 19


def test_the_result_comes_back_from_a_thread_that_has_ended() -> None:
    before = threading.active_count()
    assert at_low_priority(threading.current_thread) is not threading.current_thread()
    assert threading.active_count() == before


def test_an_error_comes_back() -> None:
    with pytest.raises(ZeroDivisionError):
        at_low_priority(lambda: 1 // 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
def test_only_the_thread_that_works_has_a_low_priority() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    assert at_low_priority(niceness) == min(before + NICENESS, _LEAST_FAVOURED)
    assert niceness() == before
