"""The Open Inference Protocol's handler over an evaluator that does what a test tells it to."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from testkit.in_process import WAIT_SECONDS
from testkit.scripted_evaluator import ScriptedEvaluator, inference_handler, prediction
from testkit.through_codecs import MessagesToInfer
from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import Prediction
from understudy.oip import inference_pb2
from understudy.service.calls.methods import CallContext
from understudy.service.calls.status import UnknownModelError, UnsupportedError
from understudy.service.handlers.infer_codec import InferMessage
from understudy.service.handlers.inference import MAX_ELEMENTS_AT_ONCE, Inference
from understudy.service.readiness import Readiness
from understudy.service.services import Codecs
from understudy.service.templates.string_templates import TemplatedStrings
from understudy.wire import WireError

FOREVER = CallContext(deadline=None)
MICROSECONDS = 1_000_000
FULL = b"\0\0\x80?\0\0\0@"


@pytest.fixture
async def handler(evaluator: ScriptedEvaluator, executor: ThreadPoolExecutor, codecs: Codecs) -> MessagesToInfer:
    handler = inference_handler(evaluator, Readiness(), executor)
    return MessagesToInfer(handler, codecs)


def raw_request(*contents: bytes, **more: Any) -> inference_pb2.ModelInferRequest:
    request = inference_pb2.ModelInferRequest(**{"model_name": "model", **more})
    request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    request.raw_input_contents.extend(contents or (FULL,))
    return request


def typed_request() -> inference_pb2.ModelInferRequest:
    request = inference_pb2.ModelInferRequest(model_name="model")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend([1.0, 2.0])
    return request


def with_parameter(request: Any, owner: Any, name: str, **value: Any) -> Any:
    owner.parameters[name].CopyFrom(inference_pb2.InferParameter(**value))
    return request


async def answered(
    handler: MessagesToInfer, evaluator: ScriptedEvaluator, request: Any, outputs: dict[str, Any]
) -> inference_pb2.ModelInferResponse:
    asking = asyncio.create_task(handler.model_infer(request, FOREVER))
    future = await evaluator.predictions.get()
    future.set_result(Prediction(outputs=outputs, step=5))
    return await asking


async def test_a_request_that_waits_keeps_no_message(
    evaluator: ScriptedEvaluator, executor: ThreadPoolExecutor
) -> None:
    handler = inference_handler(evaluator, Readiness(), executor)
    large = inference_pb2.ModelInferRequest(model_name="model")
    elements = MAX_ELEMENTS_AT_ONCE + 1
    large.inputs.add(name="x", datatype="FP32", shape=[1, elements]).contents.fp32_contents.extend([1.0] * elements)
    for message in (raw_request(), typed_request(), large):
        request = InferMessage(message, {})
        before = sys.getrefcount(request)
        waiting = asyncio.create_task(handler.model_infer(request, FOREVER))
        answer = await evaluator.predictions.get()
        await asyncio.to_thread(executor.submit(int).result)  # the thread has let go of its last work
        assert sys.getrefcount(request) == before
        answer.set_result(Prediction(outputs={"y": np.ones((1, 2), np.float32)}, step=5))
        assert (await waiting).prediction.step == 5


@pytest.mark.parametrize("more", [{"id": "i" * 65_537}, {"outputs": [{"name": "y" * 65_536}, {"name": "z"}]}])
async def test_what_responses_repeat_is_bounded_as_it_waits_with_the_request(
    handler: MessagesToInfer, more: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInputError, match="65536"):
        await asyncio.wait_for(handler.model_infer(raw_request(**more), FOREVER), WAIT_SECONDS)


async def test_raw_contents_are_answered_with_raw_contents(
    handler: MessagesToInfer, evaluator: ScriptedEvaluator
) -> None:
    response = await answered(handler, evaluator, raw_request(), {"y": np.ones((1, 2), np.float32)})
    np.testing.assert_array_equal(evaluator.asked["inputs"]["x"], [[1.0, 2.0]])
    assert list(response.raw_output_contents) == [b"\0\0\x80?" * 2]
    assert response.model_version == "5"


async def test_typed_contents_are_answered_with_typed_contents(
    handler: MessagesToInfer, evaluator: ScriptedEvaluator
) -> None:
    response = await answered(handler, evaluator, typed_request(), {"y": np.ones((1, 2), np.int8)})
    assert not response.raw_output_contents
    assert list(response.outputs[0].contents.int_contents) == [1, 1]


async def test_typed_contents_are_answered_raw_where_an_output_has_no_typed_ones(
    handler: MessagesToInfer, evaluator: ScriptedEvaluator
) -> None:
    outputs = {"half": np.ones((1, 1), np.float16), "y": np.ones((1, 1), np.int8)}
    response = await answered(handler, evaluator, typed_request(), outputs)
    assert list(response.raw_output_contents) == [b"\0<", b"\1"]


async def test_a_timeout_in_microseconds_is_a_deadline_and_the_earlier_one_counts(
    handler: MessagesToInfer, evaluator: ScriptedEvaluator
) -> None:
    request = raw_request()
    with_parameter(request, request, "timeout", int64_param=5 * MICROSECONDS)
    with_parameter(request, request, "priority", uint64_param=1)
    now = time.monotonic()
    for callers, expected in ((None, 5.0), (now + 1.0, 1.0), (now + 60.0, 5.0)):
        asking = asyncio.create_task(handler.model_infer(request, CallContext(deadline=callers)))
        (await evaluator.predictions.get()).cancel()
        assert evaluator.asked["deadline"] == pytest.approx(now + expected, abs=0.5)
        with pytest.raises(asyncio.CancelledError):
            await asking


@pytest.mark.parametrize(
    ("request_", "error", "sentence"),
    [
        (raw_request(model_name="other"), UnknownModelError, "there is no model 'other'; this server serves 'model'"),
        (raw_request(model_version="newest"), InvalidInputError, "the version is 'newest'"),
        (raw_request(model_version="9" * 19), InvalidInputError, "give a step as a number"),
        (raw_request(FULL, FULL), InvalidInputError, "got 2 raw contents for 1 inputs"),
        (raw_request(FULL[:7]), WireError, "input 'x': float32 of shape .* needs 8 bytes of content, but got 7"),
        (
            with_parameter(request := raw_request(), request, "timeout", int64_param=-1),
            InvalidInputError,
            "parameter 'timeout' is -1; give microseconds",
        ),
        (
            with_parameter(request := raw_request(), request, "timeout", bool_param=True),
            InvalidInputError,
            "parameter 'timeout' is True",
        ),
        (
            with_parameter(request := raw_request(), request, "priority", string_param="high"),
            InvalidInputError,
            "parameter 'priority' is 'high'",
        ),
        (
            with_parameter(request := raw_request(), request, "sequence_id", string_param="a"),
            UnsupportedError,
            "sequences are not supported",
        ),
        (
            with_parameter(request := raw_request(), request.inputs[0], "shared_memory_region", string_param="r"),
            UnsupportedError,
            "tensor 'x'.*shared memory",
        ),
    ],
)
async def test_what_is_wrong_is_said_before_anything_is_computed(
    handler: MessagesToInfer, request_: Any, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        await handler.model_infer(request_, FOREVER)


async def test_both_kinds_of_contents_are_refused(handler: MessagesToInfer) -> None:
    request = typed_request()
    request.raw_input_contents.append(FULL)
    with pytest.raises(WireError, match="input 'x': got both raw and typed contents"):
        await handler.model_infer(request, FOREVER)


async def test_an_input_that_comes_twice_is_refused(handler: MessagesToInfer) -> None:
    request = raw_request(FULL, FULL)
    request.inputs.add().CopyFrom(request.inputs[0])
    with pytest.raises(InvalidInputError, match="input 'x' is present twice"):
        await handler.model_infer(request, FOREVER)


async def test_a_stream_stops_reading_while_too_many_requests_are_unanswered(
    handler: MessagesToInfer, evaluator: ScriptedEvaluator
) -> None:
    read = []

    async def requests() -> AsyncIterator[inference_pb2.ModelInferRequest]:
        for number in range(4):
            read.append(number)
            yield raw_request(id=str(number))

    answers = handler.model_stream_infer(requests(), FOREVER)
    first = asyncio.ensure_future(anext(answers))
    futures = [await evaluator.predictions.get() for _ in range(2)]
    assert read == [0, 1]
    futures[0].set_result(prediction(1))
    assert (await first).infer_response.id == "0"
    futures[1].set_result(prediction(1))
    assert (await anext(answers)).infer_response.id == "1"
    await answers.aclose()


def words_request(count: int, *, raw: bool) -> inference_pb2.ModelInferRequest:
    request = inference_pb2.ModelInferRequest(model_name="model")
    tensor = request.inputs.add(name="x", datatype="BYTES", shape=[count])
    if raw:
        request.raw_input_contents.append(b"\0\0\0\0" * count)
    else:
        tensor.contents.bytes_contents.extend([b""] * count)
    return request


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("count", [2, 50_000])
async def test_what_does_not_fit_is_refused_before_a_single_element_is_built(
    evaluator: ScriptedEvaluator, handler: MessagesToInfer, monkeypatch: pytest.MonkeyPatch, count: int, *, raw: bool
) -> None:
    monkeypatch.setattr("understudy.service.handlers.inference.strings", lambda _: pytest.fail("it was built"))
    evaluator.form_refusals.append(InvalidInputError("got the inputs 'x'; expected 'y'"))
    with pytest.raises(InvalidInputError, match="expected 'y'"):
        await handler.model_infer(words_request(count, raw=raw), FOREVER)
    assert evaluator.forms == {"forms": {"x": ("string", (count,))}, "version": "serving"}


@pytest.mark.parametrize("raw", [False, True])
async def test_large_requests_are_built_on_another_thread(
    evaluator: ScriptedEvaluator, handler: MessagesToInfer, monkeypatch: pytest.MonkeyPatch, *, raw: bool
) -> None:
    threads: list[str] = []
    for kind in (InferMessage, TemplatedStrings):

        def inference(request: Any, original: Callable[[Any], Inference] = kind.inference) -> Inference:
            threads.append(threading.current_thread().name)
            return original(request)

        monkeypatch.setattr(kind, "inference", inference)
    for count in (2, 50_000):
        answering = asyncio.create_task(handler.model_infer(words_request(count, raw=raw), FOREVER))
        (await evaluator.predictions.get()).set_result(prediction(1))
        await answering
        assert evaluator.asked["inputs"]["x"].tolist() == [b""] * count
    assert threads[0] == threading.current_thread().name
    assert threads[1].startswith("ThreadPoolExecutor")
