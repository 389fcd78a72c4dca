"""TensorFlow Serving's Predict over an evaluator that does what a test tells it to."""

from __future__ import annotations

import asyncio
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tensorflow.core.framework import types_pb2
from tensorflow_serving.apis import predict_pb2

from testkit.in_process import WAIT_SECONDS
from testkit.scripted_evaluator import ScriptedEvaluator, prediction
from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import Prediction
from understudy.service.calls.methods import CallContext
from understudy.service.handlers.inference import MAX_KEPT
from understudy.service.handlers.prediction_handler import Predictor
from understudy.service.handlers.tfserving_handler import TfServingHandler
from understudy.wire import WireError

FOREVER = CallContext(deadline=None)
MAX_BYTES = 1 << 24


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, thread_name_prefix="builder") as executor:
        yield executor


@pytest.fixture
async def handlers(evaluator: ScriptedEvaluator, executor: ThreadPoolExecutor) -> TfServingHandler:
    predictor = Predictor(evaluator.as_evaluator)
    return TfServingHandler(evaluator.as_model, predictor, max_tensor_bytes=MAX_BYTES, executor=executor)


def filled(inputs: int, *, elements: int) -> predict_pb2.PredictRequest:
    """Return a request whose every input has one value, which stands for all of its elements."""
    request = predict_pb2.PredictRequest(model_spec={"name": "model"})
    for number in range(inputs):
        tensor = request.inputs[f"x{number}"]
        tensor.dtype = types_pb2.DT_FLOAT
        tensor.tensor_shape.dim.add(size=elements)
        tensor.float_val.append(1)
    return request


async def peak_bytes_of_refusal(handlers: TfServingHandler, request: Any, error: type[Exception], words: str) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(error, match=words):
            await handlers.predict(request, FOREVER)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


async def test_a_request_that_waits_keeps_no_message(evaluator: ScriptedEvaluator, handlers: TfServingHandler) -> None:
    request = filled(1, elements=1)
    before = sys.getrefcount(request)
    waiting = asyncio.create_task(handlers.predict(request, FOREVER))
    answer = await evaluator.predictions.get()
    assert sys.getrefcount(request) == before
    answer.set_result(Prediction(outputs={"y": np.ones((1, 1), np.float32)}, step=3))
    assert (await waiting).prediction.step == 3


async def test_names_of_outputs_are_bounded_as_they_wait_with_the_request(handlers: TfServingHandler) -> None:
    request = filled(1, elements=1)
    request.output_filter.append("y" * (MAX_KEPT + 1))
    with pytest.raises(InvalidInputError, match="65536"):
        await asyncio.wait_for(handlers.predict(request, FOREVER), WAIT_SECONDS)


async def test_inputs_that_do_not_fit_are_refused_before_they_are_filled(
    evaluator: ScriptedEvaluator, handlers: TfServingHandler
) -> None:
    evaluator.form_refusals.append(InvalidInputError("got the inputs 'x0'; expected 'x'"))
    request = filled(20, elements=1 << 21)
    peak = await peak_bytes_of_refusal(handlers, request, InvalidInputError, "expected 'x'")
    assert peak < 1 << 20
    assert evaluator.forms["forms"]["x19"] == ("float32", (1 << 21,))


async def test_one_bound_holds_for_all_inputs_together(handlers: TfServingHandler) -> None:
    peak = await peak_bytes_of_refusal(
        handlers, filled(3, elements=1 << 21), InvalidInputError, "the inputs have 25165824 bytes; at most 16777216"
    )
    assert peak < 1 << 20


async def test_more_elements_than_the_shape_has_are_refused_before_they_are_built(handlers: TfServingHandler) -> None:
    request = filled(1, elements=1)
    request.inputs["x0"].float_val.extend([1] * 300_000)
    peak = await peak_bytes_of_refusal(handlers, request, WireError, "needs 1 elements in float_val, but got 300001")
    assert peak < 1 << 20


async def test_large_requests_are_built_on_another_thread(
    evaluator: ScriptedEvaluator, handlers: TfServingHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    decoded = handlers._decoded

    def noted(request: Any) -> Any:
        threads.append(threading.current_thread().name)
        return decoded(request)

    monkeypatch.setattr(handlers, "_decoded", noted)
    for elements in (2, 50_000):
        answering = asyncio.create_task(handlers.predict(filled(1, elements=elements), FOREVER))
        (await evaluator.predictions.get()).set_result(prediction(1))
        await answering
        np.testing.assert_array_equal(evaluator.asked["inputs"]["x0"], np.ones(elements, np.float32))
    assert threads == [threading.current_thread().name, "builder_0"]
