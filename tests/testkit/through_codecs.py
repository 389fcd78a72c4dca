"""The handlers that predict, from messages to messages, as front ends call them: through codecs and bytes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from google.protobuf.message import Message

from understudy.oip import inference_pb2
from understudy.service.calls.methods import CallContext, Codec, at_once
from understudy.service.handlers.inference_handler import InferenceHandler
from understudy.service.handlers.prediction_handler import PredictionHandler
from understudy.service.services import Codecs, plain_codecs
from understudy.service.templates.codecs import template_codecs
from understudy.v1 import prediction_pb2

_Message = TypeVar("_Message", bound=Message)

CODECS = {"plain codecs": plain_codecs, "template codecs": template_codecs}
"""All sets of codecs; each must answer the same."""

ENOUGH = 3
"""How often the same bytes must be decoded until a template matches them."""


def decoded(codec: Codec[Any, Any], message: Any) -> Any:
    """Return the request in a message, matched by a template if the codec can do that."""
    data = message.SerializeToString()
    requests = [codec.decode(data) for _ in range(ENOUGH)]
    return requests[-1]


async def _answer(
    codec: Codec[Any, Any],
    handle: Callable[[Any, CallContext], Awaitable[Any]],
    message: Any,
    call: CallContext,
    response: type[_Message],
) -> _Message:
    return response.FromString(at_once(codec.encode(await handle(decoded(codec, message), call))))


async def _answers(
    codec: Codec[Any, Any],
    handle: Callable[[AsyncIterator[Any], CallContext], AsyncGenerator[Any, None]],
    messages: AsyncIterator[Any],
    call: CallContext,
    response: type[_Message],
) -> AsyncGenerator[_Message, None]:
    requests = (decoded(codec, message) async for message in messages)
    async with aclosing(handle(requests, call)) as answers:
        async for answer in answers:
            yield response.FromString(at_once(codec.encode(answer)))


class MessagesToPredict:
    """`PredictionHandler` on messages."""

    def __init__(self, handler: PredictionHandler, codecs: Codecs) -> None:
        self._handler = handler
        self._codecs = codecs

    async def predict(self, message: Any, call: CallContext) -> prediction_pb2.PredictResponse:
        return await _answer(self._codecs.predict, self._handler.predict, message, call, prediction_pb2.PredictResponse)

    def predict_stream(
        self, messages: AsyncIterator[Any], call: CallContext
    ) -> AsyncGenerator[prediction_pb2.PredictStreamResponse, None]:
        response = prediction_pb2.PredictStreamResponse
        return _answers(self._codecs.predict_stream, self._handler.predict_stream, messages, call, response)


class MessagesToInfer:
    """`InferenceHandler` on messages."""

    def __init__(self, handler: InferenceHandler, codecs: Codecs) -> None:
        self._handler = handler
        self._codecs = codecs

    async def model_infer(self, message: Any, call: CallContext) -> inference_pb2.ModelInferResponse:
        return await _answer(
            self._codecs.infer, self._handler.model_infer, message, call, inference_pb2.ModelInferResponse
        )

    def model_stream_infer(
        self, messages: AsyncIterator[Any], call: CallContext
    ) -> AsyncGenerator[inference_pb2.ModelStreamInferResponse, None]:
        response = inference_pb2.ModelStreamInferResponse
        return _answers(self._codecs.infer_stream, self._handler.model_stream_infer, messages, call, response)
