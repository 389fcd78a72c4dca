"""Callers in a closed loop tell whether two batches at the same time gain."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import pytest

from understudy.evaluator.batching.engine import EngineSettings
from understudy.evaluator.tuning import closed_loop
from understudy.evaluator.tuning.closed_loop import TURNS, Load, measure_loads
from understudy.evaluator.types import Array, Arrays

CALL_SECONDS = 0.005
INPUTS = {"x": np.zeros((2, 3), np.float32)}


class SleepingSlot:
    """A model whose calls take a while for each example, and use no core. With a lock, one waits for the other."""

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        self._lock = lock

    def forward(self, inputs: Arrays) -> dict[str, Array]:
        with self._lock:
            time.sleep(CALL_SECONDS * len(inputs["x"]))
        return {"y": inputs["x"]}

    def launch(self, inputs: Arrays) -> Callable[[], dict[str, Array]]:
        raise NotImplementedError(inputs)

    def try_out(self) -> None:
        raise NotImplementedError


def gain_of(slot: SleepingSlot) -> float:
    """Return the median ratio of two batches at the same time over one."""
    (turns,) = measure_loads(slot, {2: INPUTS}, EngineSettings(max_batch_size=4), batch_seconds=4 * CALL_SECONDS)
    assert len(turns) == TURNS
    return float(np.median([turn.two_batches / turn.one_batch for turn in turns]))


def test_two_batches_gain_if_they_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_loop, "LOADS", (Load(callers=6, examples=2),))

    assert gain_of(SleepingSlot(contextlib.nullcontext())) > gain_of(SleepingSlot(threading.Lock()))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("understudy-device")]


def test_a_model_that_fails_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_loop, "LOADS", (Load(callers=2, examples=2),))

    class FailingSlot(SleepingSlot):
        def forward(self, inputs: Arrays) -> dict[str, Array]:
            raise ValueError(f"no {len(inputs)}")

    with pytest.raises(ValueError, match="no 1"):
        gain_of(FailingSlot(contextlib.nullcontext()))
