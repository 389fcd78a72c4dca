"""What is put together from an earlier reply is what the message would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from understudy.evaluator.types import Prediction
from understudy.oip import inference_pb2
from understudy.service.calls.methods import at_once
from understudy.service.handlers.infer_codec import InferCodec, InferResponse, ResponseSpec
from understudy.service.handlers.predict_codec import PredictCodec
from understudy.service.services import plain_codecs
from understudy.service.templates.codecs import ResponseTemplateCache, template_codecs
from understudy.v1 import prediction_pb2

SPEC = ResponseSpec("m", "7", (), typed=False, says_final=True)
ENCODERS: dict[str, tuple[Callable[[Prediction], bytes], Any]] = {
    "OIP": (
        lambda prediction: at_once(InferCodec().encode(InferResponse(SPEC, prediction))),
        inference_pb2.ModelInferResponse,
    ),
    "native": (lambda prediction: at_once(PredictCodec().encode(prediction)), prediction_pb2.PredictResponse),
}
SHAPES = st.lists(st.integers(0, 3), min_size=1, max_size=2).map(tuple)
ELEMENTS = st.sampled_from([0, 1, 5, 7])
"""So few that contents look like what is around them."""


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = draw(st.sampled_from(["<f4", ">f4", "i1", "u2", "?", "<f8"]))
    return draw(nps.arrays(np.dtype(dtype), draw(SHAPES), elements=st.booleans() if dtype == "?" else ELEMENTS))


@given(
    name=st.sampled_from(sorted(ENCODERS)),
    outputs=st.lists(st.dictionaries(st.sampled_from("ab"), arrays(), min_size=1, max_size=2), min_size=1),
    steps=st.lists(st.sampled_from([0, 1, 7, 300]), min_size=1),
)
def test_a_reply_is_what_its_message_is(name: str, outputs: list[dict[str, Any]], steps: list[int]) -> None:
    encode, message_type = ENCODERS[name]
    responses = ResponseTemplateCache(encode)
    for step in steps:
        for arrays_ in outputs:
            prediction = Prediction(outputs=arrays_, step=step)
            told = message_type.FromString(at_once(responses.bytes_of(prediction)))
            assert told == message_type.FromString(encode(prediction))


def test_replies_that_differ_in_their_examples_only_are_put_together() -> None:
    encoded: list[Prediction] = []

    def encode(prediction: Prediction) -> bytes:
        encoded.append(prediction)
        return at_once(PredictCodec().encode(prediction))

    responses = ResponseTemplateCache(encode)
    for value in (1.0, 2.0, 3.0):
        responses.bytes_of(Prediction(outputs={"y": np.full((2, 3), value, np.float32)}, step=9))
    assert len(encoded) == 2  # the first, and its complement


def test_text_is_told_by_messages() -> None:
    text = Prediction(outputs={"y": np.array([b"a"], dtype=object)}, step=9)
    encode, message_type = ENCODERS["OIP"]
    assert message_type.FromString(ResponseTemplateCache(encode).bytes_of(text)).raw_output_contents == [b"\1\0\0\0a"]


def test_a_matched_request_is_answered_as_a_parsed_one() -> None:
    request = inference_pb2.ModelInferRequest(model_name="m", raw_input_contents=[b"\0\0\x80?"])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    plain, fast = plain_codecs().infer, template_codecs().infer
    prediction = Prediction(outputs={"y": np.ones((1, 2), np.float32)}, step=3)
    for _ in range(5):
        answers = [
            codec.encode(InferResponse(codec.decode(request.SerializeToString()).spec, prediction))
            for codec in (plain, fast)
        ]
        assert answers[0] == answers[1]
