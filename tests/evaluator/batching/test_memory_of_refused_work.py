"""What a refused or failed request holds is freed with it, not when Python next looks for cycles."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
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


def test_work_of_an_evaluation_that_is_cancelled_leaves_nothing_behind_and_is_not_prepared(
    harness: EngineHarness,
) -> None:
    """Else a caller that begins evaluations and cancels them could fill the memory behind a slow preparation."""
    began, go = threading.Event(), threading.Event()

    def slowly() -> None:
        began.set()
        assert go.wait(TIMEOUT)

    first = harness.engine.run(lambda: None, examples=1, prepare=slowly)
    assert began.wait(TIMEOUT)
    array = np.ones(16)
    kept = weakref.ref(array)
    prepared: list[Array] = []
    second = harness.engine.run(failing_work(array), examples=16, prepare=partial(prepared.append, array))
    del array
    second.cancel()
    assert kept() is None
    go.set()
    first.result(TIMEOUT)
    harness.engine.run(lambda: None, examples=1, prepare=lambda: None).result(TIMEOUT)
    assert prepared == []


def test_queued_work_of_an_evaluation_that_is_cancelled_leaves_nothing_behind(harness: EngineHarness) -> None:
    harness.occupy()
    array = np.ones(16)
    kept = weakref.ref(array)
    queued = harness.engine.run(failing_work(array), examples=16)
    del array
    queued.cancel()
    assert kept() is None
