"""What a refused or failed request holds is freed with it, not when Python next looks for cycles."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from testkit.engine_calls import predict_on
from testkit.engine_harness import TIMEOUT, EngineHarness
from understudy.evaluator.evaluator_errors import InvalidInputError, OverloadedError
from understudy.evaluator.types import Array


@pytest.fixture(autouse=True)
def _without_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def failing_work(array: Array) -> Callable[[], Any]:
    def work() -> None:
        raise InvalidInputError(f"refused {array}")

    return work


def test_a_prediction_that_is_refused_leaves_nothing_behind(harness: EngineHarness) -> None:
    harness.occupy()
    harness.predict(*[1.0] * 16)
    inputs = {"x": np.ones((16, 1), np.float32)}
    kept = weakref.ref(inputs["x"])
    with pytest.raises(OverloadedError):
        predict_on(harness.engine, inputs, borrow=harness.borrow)
    del inputs
    assert kept() is None


def test_work_of_an_evaluation_that_is_refused_leaves_nothing_behind(harness: EngineHarness) -> None:
    harness.occupy()
    harness.engine.run(lambda: None, examples=16)
    array = np.ones(16)
    kept = weakref.ref(array)
    with pytest.raises(OverloadedError):
        harness.engine.run(failing_work(array), examples=16)
    del array
    assert kept() is None


def test_work_of_an_evaluation_that_fails_leaves_nothing_behind(harness: EngineHarness) -> None:
    array = np.ones(16)
    kept = weakref.ref(array)
    failed: Future[Any] = harness.engine.run(failing_work(array), examples=16)
    assert isinstance(failed.exception(TIMEOUT), InvalidInputError)
    del array
    harness.engine.run(lambda: None, examples=1).result(TIMEOUT)  # the thread has let go of the failed work
    assert kept() is None
    assert failed.exception() is not None


def test_a_prediction_that_fails_leaves_nothing_behind(harness: EngineHarness) -> None:
    harness.go()
    inputs = {"x": -np.ones((1, 1), np.float32)}
    kept = weakref.ref(inputs["x"])
    failed = predict_on(harness.engine, inputs, borrow=harness.borrow)
    assert isinstance(failed.exception(TIMEOUT), InvalidInputError)
    del inputs
    harness.engine.run(lambda: None, examples=1).result(TIMEOUT)
    assert kept() is None
    assert failed.exception() is not None
