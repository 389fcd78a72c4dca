"""The engine tells at which step batches were computed, and at which a computation failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from testkit.engine_calls import predict_on
from understudy.evaluator.batching.engine import Engine, EngineSettings
from understudy.evaluator.observer import SilentObserver

TIMEOUT = 60.0
STEP = 7


class Steps(SilentObserver):
    def __init__(self) -> None:
        self.computed: list[int | None] = []
        self.failed: list[tuple[int, float]] = []

    def batch_computed(self, operation: Any, **values: Any) -> None:
        del operation
        self.computed.append(values.get("step"))

    def request_failed(self, *, step: int, seconds: float) -> None:
        self.failed.append((step, seconds))


class DividingHandle:
    """Stands for a checkpoint that cannot take zeros, and is its own slot."""

    step = STEP

    @property
    def slot(self) -> DividingHandle:
        return self

    def launch(self, inputs: Any) -> Callable[[], dict[str, Any]]:
        result = self.forward(inputs)
        return lambda: result

    def forward(self, inputs: Any) -> dict[str, Any]:
        if not inputs["x"].all():
            raise ZeroDivisionError
        return {"y": 1 / inputs["x"]}

    def try_out(self) -> None:
        """Succeed."""

    def release(self) -> None:
        """Do nothing: handles are not counted here."""


@pytest.fixture
def observer() -> Steps:
    return Steps()


@pytest.fixture
def engine(observer: Steps) -> Iterator[Engine]:
    engine = Engine(EngineSettings(), observer)
    yield engine
    engine.close(TIMEOUT)


def predict(engine: Engine, value: float) -> Any:
    inputs = {"x": np.full((1, 1), value, np.float32)}
    return predict_on(engine, inputs, borrow=DividingHandle, key=STEP)


def test_a_batch_of_predict_is_told_with_its_step_and_one_of_evaluate_without(engine: Engine, observer: Steps) -> None:
    predict(engine, 2.0).result(TIMEOUT)
    engine.run(lambda: None, examples=1).result(TIMEOUT)
    engine.run(lambda: None, examples=1).result(TIMEOUT)  # then the one before has been told
    assert observer.computed[:2] == [STEP, None]
    assert observer.failed == []


def test_a_computation_that_fails_is_told_with_its_step(engine: Engine, observer: Steps) -> None:
    with pytest.raises(ZeroDivisionError):
        predict(engine, 0.0).result(TIMEOUT)
    ((step, seconds),) = observer.failed
    assert step == STEP
    assert seconds > 0
    assert observer.computed == []
