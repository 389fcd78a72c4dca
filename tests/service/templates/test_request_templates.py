"""What is matched is what parsing gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.oip import inference_pb2
from understudy.service.calls.methods import Codec
from understudy.service.calls.parsing import span_of
from understudy.service.handlers.infer_codec import InferCodec, InferMessage, InferRequest
from understudy.service.handlers.predict_codec import PredictCodec, PredictMessage
from understudy.service.templates.codecs import (
    TemplateCodec,
    TemplatedInfer,
    TemplatedPredict,
    template_codecs,
)
from understudy.v1 import prediction_pb2, tensor_pb2
from understudy.wire import WireError, encode

ModelInferRequest = inference_pb2.ModelInferRequest
SIZES = {"FP32": 4, "INT8": 1, "UINT16": 2, "BOOL": 1, "FP64": 8}
FEW_BYTES = st.sampled_from([b"\x00", b"\x01", b":", b"\x04", b"\xff", b"B"])
"""So few that contents look like what is around them."""


@st.composite
def families(draw: st.DrawFn) -> list[bytes]:
    """Draw messages that are alike but for the elements of their tensors."""
    inputs = draw(st.integers(1, 2))
    shapes = [draw(st.lists(st.integers(0, 3), min_size=1, max_size=2)) for _ in range(inputs)]
    datatypes = [draw(st.sampled_from(sorted(SIZES))) for _ in range(inputs)]
    frame = ModelInferRequest(model_name=draw(st.sampled_from(["", "m", ":\x04"])), id=draw(st.sampled_from(["", "7"])))
    for number, (shape, datatype) in enumerate(zip(shapes, datatypes, strict=True)):
        frame.inputs.add(name=f"x{number}", datatype=datatype, shape=shape)
    ending = ModelInferRequest(model_version=draw(st.sampled_from(["", "latest", "8"])))
    if draw(st.booleans()):
        ending.outputs.add(name="y")
    sizes = [int(np.prod(shape)) * SIZES[kind] for shape, kind in zip(shapes, datatypes, strict=True)]
    family = []
    for _ in range(draw(st.integers(3, 9))):
        contents = [b"".join(draw(st.lists(FEW_BYTES, min_size=size, max_size=size))) for size in sizes]
        raw = ModelInferRequest(raw_input_contents=contents)
        family.append(b"".join(part.SerializeToString() for part in (frame, raw, ending)))
    return family


def taken_apart(request: InferRequest) -> Any:
    try:
        spec, inference = tuple(request.spec), request.inference()
    except (WireError, InvalidInputError) as error:
        return str(error)
    arrays = {name: (array.dtype, array.shape, array.tobytes()) for name, array in inference.inputs.items()}
    return spec, request.model_name, request.model_version, {**inference._asdict(), "inputs": arrays}


@pytest.mark.parametrize("method", ["infer", "infer_stream"])
@given(several=st.lists(families(), min_size=1, max_size=3))
def test_what_is_matched_is_what_parsing_gives(method: str, several: list[list[bytes]]) -> None:
    codec = getattr(template_codecs(), method)
    for family in several:
        for data in family:
            assert taken_apart(codec.decode(b"....." + data, 5)) == taken_apart(InferCodec().decode(data))


def predict_request(value: float, *, model_name: str = "", **version: Any) -> bytes:
    request = prediction_pb2.PredictRequest(
        model_name=model_name, version=tensor_pb2.VersionSelector(**version) if version else None
    )
    request.inputs["x"].CopyFrom(encode(np.full((2, 3), value, np.float32)))
    return request.SerializeToString()


def after(codec: Codec[Any, Any], *several: bytes) -> Any:
    """Return the last of several requests."""
    return [codec.decode(data) for data in several][-1]


@pytest.mark.parametrize("method", ["predict", "predict_stream"])
@pytest.mark.parametrize("version", [{}, {"step": 7}, {"label": tensor_pb2.VERSION_LABEL_BEST}])
def test_the_third_of_a_kind_is_matched_and_not_copied(version: dict[str, Any], method: str) -> None:
    codec = getattr(template_codecs(), method)
    requests = [predict_request(value, **version) for value in (1.0, 2.0, 3.0)]
    parsed = PredictCodec().decode(requests[2])
    if method == "predict_stream":
        requests = [field(prediction_pb2.PredictStreamRequest.REQUEST_FIELD_NUMBER, data) for data in requests]
    assert [type(codec.decode(data)) for data in requests[:2]] == [PredictMessage, PredictMessage]
    matched = codec.decode(requests[2])
    assert isinstance(matched, TemplatedPredict)
    inputs, asked = matched.arguments()
    assert asked == parsed.arguments()[1]
    assert np.array_equal(inputs["x"], parsed.arguments()[0]["x"])
    assert np.shares_memory(inputs["x"], np.frombuffer(requests[2], np.uint8))
    assert not inputs["x"].flags.writeable


def test_another_version_in_as_many_bytes_is_not_taken_for_the_same() -> None:
    codec = template_codecs().predict
    after(codec, *[predict_request(1.0, step=7)] * 4)
    assert isinstance(codec.decode(predict_request(1.0, step=7)), TemplatedPredict)
    assert isinstance(codec.decode(predict_request(1.0, step=8)), PredictMessage)
    with pytest.raises(DecodeError):
        codec.decode(predict_request(1.0, step=7)[:-1])


def test_a_matched_request_names_the_model_that_its_bytes_name() -> None:
    codec = template_codecs().predict
    for name in ("this", "that"):
        matched = after(codec, *[predict_request(1.0, model_name=name)] * 5)
        assert isinstance(matched, TemplatedPredict)
        assert matched.model_name == name
    assert isinstance(codec.decode(predict_request(2.0, model_name="this")), PredictMessage)


def test_what_is_around_the_examples_is_not_kept_if_it_is_large() -> None:
    for name, kind in (("m", TemplatedInfer), ("m" * 5000, InferMessage)):
        frame = ModelInferRequest(model_name=name, raw_input_contents=[b"\0\0\x80?"])
        frame.inputs.add(name="x", datatype="FP32", shape=[1, 1])
        assert type(after(template_codecs().infer, *[frame.SerializeToString()] * 5)) is kind


def test_messages_that_are_never_matched_are_seldom_parsed_for_it() -> None:
    parsed: list[bytes] = []

    def parse(data: bytes) -> bytes:
        parsed.append(data)
        return b"message"

    looked_at: list[Any] = []
    codec: TemplateCodec[bytes, object] = TemplateCodec(parse, looked_at.append, (1,), bytes)
    for _ in range(1000):
        codec.decode(b"0123456789")
    assert (len(looked_at), len(parsed)) == (9, 1000)


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2, len(content)]) + content


def shifting(content: bytes) -> bytes:
    """Return a request whose content stands there twice: as the content, and as the head of a field that hides another.

    With the complement of the content in the second place, the other field shows, and overrides the first with the
    complement.
    """
    hidden = field(tensor_pb2.Tensor.CONTENT_FIELD_NUMBER, bytes(255 - byte for byte in content))
    assert content[:2] == bytes([15 << 3 | 2, len(content) - 2 + len(hidden)])
    shown = field(tensor_pb2.Tensor.CONTENT_FIELD_NUMBER, CONTENT)
    header = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[1, 2]).SerializeToString()
    entry = field(1, b"x") + field(2, header + shown + content + hidden)
    return field(prediction_pb2.PredictRequest.INPUTS_FIELD_NUMBER, entry)


CONTENT = b"\x7a\x10\x7e\xfe\0\0\0\0"


def test_content_is_not_looked_for_where_it_is_structure() -> None:
    codec = template_codecs().predict
    data = shifting(CONTENT)
    assert prediction_pb2.PredictRequest.FromString(data).inputs["x"].content == CONTENT
    after(codec, *[data] * 9)
    before, _, rest = data.rpartition(CONTENT)
    with pytest.raises(DecodeError):
        codec.decode(before + b"\xff" * 8 + rest)


def test_a_field_is_found_where_it_is_the_only_one_of_its_number() -> None:
    inner = b"\x08\x96\x01" + field(3, b"abc") + b"\x25\0\0\0\0" + b"\x29" + b"\0" * 8
    data = field(2, b"xyz") + field(7, inner)
    span = span_of(data, (7, 3))
    assert span is not None
    assert data[slice(*span)] == b"abc"
    for missing in (data + field(7, inner), data[:-1], data + b"\x0b\x0c", data + b"\xff" * 11, field(7, inner * 2)):
        assert span_of(missing, (7, 3)) is None
    assert span_of(data, (7, 1)) is None
    assert span_of(data, (8,)) is None


@given(st.binary(max_size=60))
def test_any_bytes_may_be_looked_through(data: bytes) -> None:
    span = span_of(data, (1,))
    assert span is None or 0 <= span[0] <= span[1] <= len(data)
