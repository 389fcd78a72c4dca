"""The RPCs of PredictionService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from understudy.evaluator.types import Prediction
from understudy.service.calls.call import CallContext
from understudy.service.calls.status import Failure
from understudy.service.handlers.pipeline import StreamProtocol, predict_in_order
from understudy.service.handlers.predict_codec import PredictRequest
from understudy.service.handlers.served_model import ServedModel
from understudy.service.predictor import Predictor


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

    async def predict(self, request: PredictRequest, call: CallContext) -> Prediction:
        """Predict one batch; cancel it if the caller disconnects before it reaches a device."""
        return await self._begin(request, call)

    def predict_stream(
        self, requests: AsyncIterator[PredictRequest], call: CallContext
    ) -> AsyncGenerator[Prediction | Failure, None]:
        """Predict every request of a stream; responses are in order, and a failure ends its own request only."""
        protocol = StreamProtocol[PredictRequest, None, Prediction | Failure](
            note=lambda _: None,
            begin=lambda request: self._begin_next(request, call),
            answer=lambda _, prediction: prediction,
            fail=lambda _, failure: failure,
        )
        return predict_in_order(requests, protocol, depth=self._stream_depth)

    def check_admission(self, call: CallContext) -> None:
        """Refuse a prediction before it is parsed, if the refusal is certain; see `Predictor.check_admission`."""
        self._predictor.check_admission(call.deadline)

    def _begin_next(self, request: PredictRequest, call: CallContext) -> asyncio.Future[Prediction]:
        self.check_admission(call)  # each message of a stream is a request
        return self._begin(request, call)

    def _begin(self, request: PredictRequest, call: CallContext) -> asyncio.Future[Prediction]:
        self._model.check_optional_name(request.model_name)
        inputs, version = request.arguments()
        return self._predictor.begin(inputs, version=version, deadline=call.deadline)
