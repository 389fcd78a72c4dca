"""Answers that a client cannot read are the server's fault, and typed as such."""

from __future__ import annotations

import pytest

from understudy.clients import ExampleList, InternalError, OverloadedError, responses
from understudy.v1 import evaluation_pb2, model_pb2, prediction_pb2, tensor_pb2

CUT_SHORT = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[2], content=b"\0")


def test_a_tensor_that_is_cut_short_is_named() -> None:
    with pytest.raises(InternalError, match=r"cannot read: y: float32 of shape \[2\] needs 8 bytes"):
        responses.prediction(prediction_pb2.PredictResponse(outputs={"y": CUT_SHORT}))


def test_an_outcome_or_a_state_that_only_a_newer_server_has_hides_nothing_else() -> None:
    record = evaluation_pb2.EvaluationRecord.FromString(b"\x28\x63")  # outcome: 99
    status = model_pb2.GetModelStatusResponse.FromString(b"\x12\x02\x10\x63")  # versions { state: 99 }

    assert responses.evaluation(record).outcome == "unknown"
    assert [version.state for version in responses.status(status).versions] == ["UNKNOWN"]


def test_a_data_type_that_only_a_newer_server_has_is_an_error_with_a_type() -> None:
    dtype = model_pb2.GetModelMetadataResponse.FromString(b"\x1a\x02\x10\x63")  # inputs { dtype: 99 }

    with pytest.raises(InternalError, match="data type number 99 is unknown"):
        responses.metadata(dtype)


def test_step_0_is_a_step_and_none_is_none() -> None:
    first = model_pb2.PromoteResponse(serving_step=5)
    second = model_pb2.PromoteResponse(serving_step=5, previous_step=0, pinned_step=0)

    assert (responses.promotion(first).previous_step, responses.promotion(first).pinned_step) == (None, None)
    assert (responses.promotion(second).previous_step, responses.promotion(second).pinned_step) == (0, 0)


def test_the_details_of_an_error_that_cannot_be_read_are_left_out() -> None:
    response = prediction_pb2.PredictStreamResponse()
    response.error.code = 8
    response.error.message = "the queue is full"
    response.error.details.add(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff")

    error = responses.streamed_prediction(response)

    assert isinstance(error, OverloadedError)
    assert (str(error), error.retry_after_seconds) == ("the queue is full", None)


def test_lists_of_examples_are_equal_where_their_arrays_are() -> None:
    def listed(*keys: str) -> ExampleList:
        keyed = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_STRING, shape=[2], strings=[key.encode() for key in keys])
        return responses.example_list(evaluation_pb2.GetExamplesResponse(inputs={"key": keyed}))

    assert listed("a", "b") == listed("a", "b")
    assert listed("a", "b") != listed("a", "c")
