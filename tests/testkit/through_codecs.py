"""The handlers that predict, from messages to messages, as front ends call them: through codecs and bytes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from understudy.oip import inference_pb2
from understudy.service.calls.methods import CallContext, Codec
from understudy.service.handlers.inference_handler import InferenceHandler
from understudy.service.handlers.prediction_handler import PredictionHandler
from understudy.service.services import Codecs, plain_codecs
from understudy.service.templates.codecs import template_codecs
from understudy.v1 import prediction_pb2

CODECS = {"plain codecs": plain_codecs, "template codecs": template_codecs}
"""All sets of codecs; each must answer the same."""

ENOUGH = 3
"""How often the same bytes must be decoded until a template matches them."""


def decoded(codec: Codec[Any, Any], message: Any) -> Any:
    """Return the request in a message, matched by a template if the codec can do that."""
    data = message.SerializeToString()
    requests = [codec.decode(data) for _ in range(ENOUGH)]
    return requests[-1]


class MessagesToPredict:
    """`PredictionHandler` on messages."""

    def __init__(self, handler: PredictionHandler, codecs: Codecs) -> None:
        self._handler = handler
        self._codecs = codecs

    async def predict(self, message: Any, call: CallContext) -> prediction_pb2.PredictResponse:
        codec = self._codecs.predict
        response = await self._handler.predict(decoded(codec, message), call)
        return prediction_pb2.PredictResponse.FromString(codec.encode(response))

    async def predict_stream(
        self, messages: AsyncIterator[Any], call: CallContext
    ) -> AsyncGenerator[prediction_pb2.PredictStreamResponse, None]:
        codec = self._codecs.predict_stream
        requests = (decoded(codec, message) async for message in messages)
        async with aclosing(self._handler.predict_stream(requests, call)) as responses:
            async for response in responses:
                yield prediction_pb2.PredictStreamResponse.FromString(codec.encode(response))


class MessagesToInfer:
    """`InferenceHandler` on messages."""

    def __init__(self, handler: InferenceHandler, codecs: Codecs) -> None:
        self._handler = handler
        self._codecs = codecs

    async def model_infer(self, message: Any, call: CallContext) -> inference_pb2.ModelInferResponse:
        codec = self._codecs.infer
        response = await self._handler.model_infer(decoded(codec, message), call)
        return inference_pb2.ModelInferResponse.FromString(codec.encode(response))

    async def model_stream_infer(
        self, messages: AsyncIterator[Any], call: CallContext
    ) -> AsyncGenerator[inference_pb2.ModelStreamInferResponse, None]:
        codec = self._codecs.infer_stream
        requests = (decoded(codec, message) async for message in messages)
        async with aclosing(self._handler.model_stream_infer(requests, call)) as responses:
            async for response in responses:
                yield inference_pb2.ModelStreamInferResponse.FromString(codec.encode(response))
