"""The RPCs of PredictionService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from understudy.evaluator.types import Prediction
from understudy.service.calls.call import CallContext
from understudy.service.calls.status import Failure, status_message
from understudy.service.handlers import messages, predict_requests
from understudy.service.handlers.pipeline import StreamProtocol, predict_in_order
from understudy.service.handlers.response_templates import ResponseTemplateCache, Serializable
from understudy.service.handlers.served_model import ServedModel
from understudy.service.predictor import Predictor
from understudy.v1 import prediction_pb2


class PredictionHandler:
    """Runs the model on examples. Belongs to the event loop's thread.

    Args:
        model: The served model.
        predictor: Starts predictions.
        stream_depth: The largest number of unanswered requests of one stream.
    """

    def __init__(self, model: ServedModel, predictor: Predictor, *, stream_depth: int) -> None:
        self._model = model
        self._predictor = predictor
        self._stream_depth = stream_depth
        self._responses = ResponseTemplateCache(messages.predict_response)
        self._stream_responses = ResponseTemplateCache(_stream_response)

    async def predict(self, request: predict_requests.PredictRequest, call: CallContext) -> Serializable:
        """Predict one batch; cancel it if the caller disconnects before it reaches a device."""
        return self._responses.of(await self._begin(request, call))

    def predict_stream(
        self, requests: AsyncIterator[predict_requests.PredictStreamRequest], call: CallContext
    ) -> AsyncGenerator[Serializable, None]:
        """Predict every request of a stream; responses are in order, and a failure ends its own request only."""
        protocol = StreamProtocol[predict_requests.PredictStreamRequest, None, Serializable](
            note=lambda _: None,
            begin=lambda message: self._begin_next(predict_requests.streamed(message), call),
            answer=lambda _, prediction: self._stream_responses.of(prediction),
            fail=lambda _, failure: _error_response(failure),
        )
        return predict_in_order(requests, protocol, depth=self._stream_depth)

    def check_admission(self, call: CallContext) -> None:
        """Refuse a prediction before it is parsed, if the refusal is certain; see `Predictor.check_admission`."""
        self._predictor.check_admission(call.deadline)

    def _begin_next(self, request: predict_requests.PredictRequest, call: CallContext) -> asyncio.Future[Prediction]:
        self.check_admission(call)  # each message of a stream is a request
        return self._begin(request, call)

    def _begin(self, request: predict_requests.PredictRequest, call: CallContext) -> asyncio.Future[Prediction]:
        self._model.check_optional_name(request.model_name)
        inputs, version = predict_requests.arguments(request)
        return self._predictor.begin(inputs, version=version, deadline=call.deadline)


def _stream_response(prediction: Prediction) -> prediction_pb2.PredictStreamResponse:
    return prediction_pb2.PredictStreamResponse(response=messages.predict_response(prediction))


def _error_response(failure: Failure) -> prediction_pb2.PredictStreamResponse:
    return prediction_pb2.PredictStreamResponse(error=status_message(failure))
