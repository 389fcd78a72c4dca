"""Predictions on an engine without an evaluator."""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Future

from understudy.evaluator.batching.engine import Engine
from understudy.evaluator.batching.request_queue import Borrow
from understudy.evaluator.types import Arrays, CallerKey, FutureSink, Prediction, this_process

_SINK = FutureSink()


def predict_on(
    engine: Engine,
    inputs: Arrays,
    *,
    borrow: Borrow,
    key: Hashable = 1,
    deadline: float | None = None,
    caller: CallerKey = this_process,
) -> Future[Prediction]:
    """Queue examples and wake the device; return the future of their prediction."""
    future: Future[Prediction] = Future()
    engine.submit(inputs, borrow=borrow, key=key, deadline=deadline, token=future, sink=_SINK, caller=caller)
    return future
