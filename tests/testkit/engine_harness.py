"""An engine with a puppet for a slot."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from testkit.engine_calls import predict_on
from understudy.evaluator.batching.engine import Engine, EngineSettings
from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.types import Array, Arrays, FutureSink, Prediction

TIMEOUT = 60.0


class ControlledSlot:
    """Doubles its examples when it is told to, and remembers the size of each batch."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.began = threading.Semaphore(0)
        self.batches: list[int] = []
        self.launched: list[int] = []
        self.threads: list[int] = []

    def forward(self, inputs: Arrays) -> dict[str, Array]:
        self.batches.append(len(inputs["x"]))
        self.threads.append(threading.get_ident())
        self.began.release()
        assert self.go.wait(TIMEOUT)
        if np.any(inputs["x"] < 0):
            raise InvalidInputError("the model refused the values")
        return {"y": inputs["x"] * 2}

    def launch(self, inputs: Arrays) -> Callable[[], dict[str, Array]]:
        """Begin at once; be done when told to."""
        self.launched.append(len(inputs["x"]))
        return lambda: self.forward(inputs)

    def try_out(self) -> None:
        """Succeed."""

    def wait_until_busy(self) -> None:
        assert self.began.acquire(timeout=TIMEOUT)


class CountedHandle:
    def __init__(self, slot: ControlledSlot, step: int = 7) -> None:
        self.slot = slot
        self.step = step
        self.released = 0

    def release(self) -> None:
        self.released += 1


class Recorder(SilentObserver):
    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.computed: list[dict[str, Any]] = []
        self.queue_examples: list[int] = []

    def rejected(self, reason: str) -> None:
        self.reasons.append(reason)

    def queue_changed(self, rows: int) -> None:
        self.queue_examples.append(rows)

    def batch_computed(self, operation: Any, **values: Any) -> None:
        self.computed.append({"operation": operation, **values})


class EngineHarness:
    """An engine with a puppet for a slot."""

    def __init__(self, **settings: Any) -> None:
        self.observer = Recorder()
        self.slot = ControlledSlot()
        self.handles: list[CountedHandle] = []
        self.engine = Engine(EngineSettings(**settings), self.observer)

    def borrow(self) -> CountedHandle:
        self.handles.append(CountedHandle(self.slot))
        return self.handles[-1]

    def predict(
        self, *values: float, key: Any = 1, deadline: float | None = None, width: int = 1, caller: str = ""
    ) -> Future[Prediction]:
        rows = np.repeat(np.array(values, np.float32)[:, None], width, axis=1)
        inputs = {"x": rows}
        return predict_on(self.engine, inputs, borrow=self.borrow, key=key, deadline=deadline, caller=lambda: caller)

    def submit(self, value: float) -> Future[Prediction]:
        """Queue one example without waking the device."""
        token: Future[Prediction] = Future()
        inputs = {"x": np.array([[value]], np.float32)}
        sink = FutureSink()
        self.engine.submit(inputs, borrow=self.borrow, key=1, deadline=None, token=token, sink=sink, dispatch=False)
        return token

    def batches_take(self, seconds: float, *, rows: int = 1) -> None:
        """Have the engine believe so of batches like those that `submit` makes."""
        group = (1, ("x", np.dtype(np.float32), (1,)))
        for _ in range(8):
            self.engine._judge.observe(group, rows, seconds, inline=False)

    def occupy(self) -> Future[Prediction]:
        """Keep the device busy until `go`."""
        first = self.predict(0.0)
        self.slot.wait_until_busy()
        return first

    def go(self) -> None:
        self.slot.go.set()

    def close(self) -> None:
        self.go()
        self.engine.close(TIMEOUT)


def outputs(future: Future[Prediction]) -> list[float]:
    return [float(value) for value in future.result(TIMEOUT).outputs["y"][:, 0]]
