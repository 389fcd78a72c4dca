"""What is put together from an earlier reply is what the message would be."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from understudy.evaluator.types import Prediction
from understudy.oip import inference_pb2
from understudy.service.handlers import messages
from understudy.service.handlers.oip import infer_messages
from understudy.service.handlers.response_templates import ResponseTemplateCache, Serialized

FORMS = {
    "OIP": lambda prediction: infer_messages.response_of(
        infer_messages.ResponseSpec("m", "7", (), typed=False, says_final=True), prediction
    ),
    "native": messages.predict_response,
}
SHAPES = st.lists(st.integers(0, 3), min_size=1, max_size=2).map(tuple)
ELEMENTS = st.sampled_from([0, 1, 5, 7])
"""So few that contents look like what is around them."""


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = draw(st.sampled_from(["<f4", ">f4", "i1", "u2", "?", "<f8"]))
    return draw(nps.arrays(np.dtype(dtype), draw(SHAPES), elements=st.booleans() if dtype == "?" else ELEMENTS))


@given(
    name=st.sampled_from(sorted(FORMS)),
    outputs=st.lists(st.dictionaries(st.sampled_from("ab"), arrays(), min_size=1, max_size=2), min_size=1),
    steps=st.lists(st.sampled_from([0, 1, 7, 300]), min_size=1),
)
def test_a_reply_is_what_its_message_is(name: str, outputs: list[dict[str, Any]], steps: list[int]) -> None:
    message_of = FORMS[name]
    responses = ResponseTemplateCache(message_of)
    for step in steps:
        for arrays_ in outputs:
            prediction = Prediction(outputs=arrays_, step=step)
            message = message_of(prediction)
            told = type(message).FromString(responses.of(prediction).SerializeToString())
            assert told == message


def test_replies_that_differ_in_their_examples_only_are_put_together() -> None:
    responses = ResponseTemplateCache(messages.predict_response)
    for value in (1.0, 2.0):
        reply = responses.of(Prediction(outputs={"y": np.full((2, 3), value, np.float32)}, step=9))
        assert isinstance(reply, Serialized)


def test_text_is_told_by_messages() -> None:
    form = infer_messages.ResponseSpec("m", "", (), typed=False, says_final=False)
    responses = ResponseTemplateCache(lambda prediction: infer_messages.response_of(form, prediction))
    reply = responses.of(Prediction(outputs={"y": np.array([b"a"], dtype=object)}, step=9))
    assert isinstance(reply, inference_pb2.ModelInferResponse)
