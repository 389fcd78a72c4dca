"""Large tensors are neither copied nor built while they would hold other calls up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tensorflow_serving.apis import predict_pb2

from understudy.evaluator.types import Prediction
from understudy.oip import inference_pb2
from understudy.service.calls import parsing
from understudy.service.calls.methods import ZeroCopyCodec, at_once
from understudy.service.calls.parsing import ZeroCopyMessage, parse_zero_copy
from understudy.service.calls.status import Code, Failure
from understudy.service.handlers import messages
from understudy.service.handlers.infer_codec import InferCodec, InferResponse, InferStreamCodec, ResponseSpec
from understudy.service.handlers.predict_codec import PredictCodec, PredictStreamCodec
from understudy.service.handlers.tfserving_handler import (
    PredictedOutputs,
    TfPredictCodec,
    decode_tensor,
    encode_tensor,
)
from understudy.service.templates.codecs import template_codecs
from understudy.v1 import evaluation_pb2, prediction_pb2
from understudy.wire import decode_all, encode, encode_all

ROWS, WIDTH = 5, 1 << 18
LARGE = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
"""5 MiB."""


def infer_request() -> inference_pb2.ModelInferRequest:
    request = inference_pb2.ModelInferRequest(model_name="m", raw_input_contents=[LARGE.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=LARGE.shape)
    return request


def is_within(array: Any, data: bytes) -> bool:
    return np.shares_memory(array, np.frombuffer(data, np.uint8))


def test_a_large_tensor_is_decoded_without_a_copy() -> None:
    predict = prediction_pb2.PredictRequest(inputs=encode_all({"x": LARGE, "z": LARGE[:1]}))
    streamed = prediction_pb2.PredictStreamRequest(request=predict)
    for codec in (template_codecs(), None):
        for request, decode in (
            (predict, (codec.predict if codec else PredictCodec()).decode),
            (streamed, (codec.predict_stream if codec else PredictStreamCodec()).decode),
        ):
            data = b"12345" + request.SerializeToString()
            inputs, version = decode(data, 5).arguments()
            assert version == "serving"
            assert inputs.keys() == {"x", "z"}
            assert np.array_equal(inputs["x"], LARGE)
            assert np.array_equal(inputs["z"], LARGE[:1])
            if codec is None:
                assert is_within(inputs["x"], data)


def test_large_raw_contents_are_decoded_without_a_copy() -> None:
    data = infer_request().SerializeToString()
    request = InferCodec().decode(data)
    assert not request.spec.typed
    inference = request.inference()
    assert np.array_equal(inference.inputs["x"], LARGE)
    assert is_within(inference.inputs["x"], data)


def test_a_large_tensor_of_tensorflow_serving_is_decoded_without_a_copy() -> None:
    request = predict_pb2.PredictRequest(model_spec={"name": "m"}, inputs={"x": encode_tensor(LARGE)})
    data = request.SerializeToString()
    parsed = TfPredictCodec().decode(data)
    found = decode_tensor(parsed.message.inputs["x"], max_bytes=len(data), name="x", contents=parsed.contents)
    assert np.array_equal(found, LARGE)
    assert is_within(found, data)


def test_large_text_in_raw_contents_is_decoded() -> None:
    text = b"a" * len(LARGE.tobytes())
    request = inference_pb2.ModelInferRequest(raw_input_contents=[len(text).to_bytes(4, "little") + text])
    request.inputs.add(name="x", datatype="BYTES", shape=[1])
    (found,) = InferCodec().decode(request.SerializeToString()).inference().inputs["x"]
    assert found == text
    assert isinstance(found, bytes)


def test_a_large_batch_is_decoded_without_a_copy() -> None:
    batch = evaluation_pb2.EvaluateBatch(inputs=encode_all({"x": LARGE}), targets=encode_all({"y": LARGE[:, :1]}))
    data = evaluation_pb2.EvaluateRequest(batch=batch).SerializeToString()
    parsed = ZeroCopyCodec(evaluation_pb2.EvaluateRequest).decode(data)
    found = messages.batch(parsed.message.batch, parsed.contents)
    assert is_within(found.inputs["x"], data)
    assert np.array_equal(found.inputs["x"], LARGE)
    assert np.array_equal(found.targets["y"], LARGE[:, :1])


def test_a_placeholder_of_another_message_stands_for_nothing() -> None:
    data = prediction_pb2.PredictRequest(inputs=encode_all({"x": LARGE})).SerializeToString()
    first, second = (parse_zero_copy(prediction_pb2.PredictRequest, data) for _ in range(2))
    assert first.contents.keys().isdisjoint(second.contents)


def test_large_unknown_fields_are_left_out_and_damage_is_refused() -> None:
    known = prediction_pb2.PredictRequest(model_name="m").SerializeToString()
    unknown = bytes([15 << 3 | 2, *parsing.varint_bytes(LARGE.nbytes)]) + LARGE.tobytes()
    assert PredictCodec().decode(unknown + known).message.SerializeToString() == known
    with pytest.raises(DecodeError):
        PredictCodec().decode(unknown[:-1])


TENSORS = st.builds(
    lambda rows, value: encode(np.full((rows, 3), value, np.uint8)), st.integers(0, 3), st.integers(0, 255)
)
REQUESTS = st.builds(
    lambda inputs, name: prediction_pb2.PredictRequest(inputs=inputs, model_name=name),
    st.dictionaries(st.sampled_from("xyz"), TENSORS, max_size=3),
    st.sampled_from(["", "m"]),
)


@given(st.lists(REQUESTS.map(lambda request: request.SerializeToString()), max_size=3), st.binary(max_size=3))
def test_what_is_parsed_apart_is_what_protobuf_parses(parts: list[bytes], damage: bytes) -> None:
    data = b"".join(parts) + damage  # fields and keys may occur several times, of which the last counts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parsing, "LARGE_BYTES", -1)
        patch.setattr(parsing, "_LARGE_FIELD_BYTES", 0)
        try:
            expected = prediction_pb2.PredictRequest.FromString(data)
        except DecodeError:
            with pytest.raises(DecodeError):
                parse_zero_copy(prediction_pb2.PredictRequest, data)
            return
        parsed: ZeroCopyMessage = parse_zero_copy(prediction_pb2.PredictRequest, data)
    assert parsed.message.model_name == expected.model_name
    found, wanted = decode_all(parsed.message.inputs, parsed.contents), decode_all(expected.inputs)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array)


def spec(*, typed: bool) -> ResponseSpec:
    return ResponseSpec("m", "7", (), typed=typed, says_final=True)


TEXT = np.array([b"a"] * 9000 + [None], dtype=object)[:-1]


@pytest.mark.parametrize(
    "array", [LARGE, LARGE.T, LARGE.astype(">f4"), LARGE.astype(bool), LARGE.astype(np.int16), TEXT]
)
def test_a_large_response_is_built_on_another_thread_and_is_what_its_message_is(array: Any) -> None:
    prediction = Prediction(outputs={"large": array, "small": np.ones((2, 1))}, step=9)
    wanted = messages.predict_response(prediction)
    alone, streamed = PredictCodec().encode(prediction), PredictStreamCodec().encode(prediction)
    if array.nbytes > parsing.LARGE_BYTES or array is TEXT:
        assert not isinstance(alone, bytes)
        assert not isinstance(streamed, bytes)
    assert prediction_pb2.PredictResponse.FromString(at_once(alone)) == wanted
    assert prediction_pb2.PredictStreamResponse.FromString(at_once(streamed)).response == wanted


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("array", [LARGE, LARGE.T, LARGE[0, :9000].astype(np.int64), TEXT])
def test_a_large_inferred_response_is_what_its_message_is(array: Any, *, typed: bool) -> None:
    prediction = Prediction(outputs={"large": array, "small": np.ones((2, 1))}, step=9)
    response = InferResponse(spec(typed=typed), prediction)
    alone, streamed = InferCodec().encode(response), InferStreamCodec().encode(response)
    assert isinstance(alone, bytes) == isinstance(streamed, bytes)
    found = inference_pb2.ModelInferResponse.FromString(at_once(alone))
    again = inference_pb2.ModelStreamInferResponse.FromString(at_once(streamed)).infer_response
    assert found == again
    assert (found.model_name, found.model_version, found.id) == ("m", "9", "7")
    assert [tuple(output.shape) for output in found.outputs] == [array.shape, (2, 1)]
    if not typed and array is not TEXT:
        assert found.raw_output_contents == [array.tobytes(), np.ones((2, 1)).tobytes()]
    elif typed and array.dtype == np.float32:
        assert np.array_equal(found.outputs[0].contents.fp32_contents, array.ravel())
        assert not isinstance(alone, bytes)


@pytest.mark.parametrize("array", [LARGE, LARGE.T, LARGE.astype(bool), LARGE[:1], TEXT])
def test_a_large_response_of_tensorflow_serving_is_what_its_message_is(array: Any) -> None:
    outputs = {"large": array, "small": np.ones((2, 1))}
    spec = predict_pb2.PredictResponse(model_spec={"name": "m", "version": {"value": 9}}).model_spec
    encoded = TfPredictCodec().encode(PredictedOutputs(spec, Prediction(outputs=outputs, step=9)))
    assert isinstance(encoded, bytes) == (array.nbytes <= parsing.LARGE_BYTES and array is not TEXT)
    found = predict_pb2.PredictResponse.FromString(at_once(encoded))
    tensors = {name: encode_tensor(output) for name, output in outputs.items()}
    assert found == predict_pb2.PredictResponse(model_spec=spec, outputs=tensors)


def test_pieces_of_every_kind_and_size_are_joined_in_their_order() -> None:
    data = LARGE.tobytes()
    pieces: list[Any] = [b"", data[:3], memoryview(data)[3:-5], memoryview(data)[:0], bytearray(data[-5:])]
    assert parsing.joined(pieces) == data
    assert parsing.joined([]) == b""


def test_failures_on_streams_are_messages_of_their_own() -> None:
    failure = Failure(code=Code.INVALID_ARGUMENT, message="no")
    assert (
        prediction_pb2.PredictStreamResponse.FromString(at_once(PredictStreamCodec().encode(failure))).error.code == 3
    )
