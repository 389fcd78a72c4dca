"""The implementation of Replay, and its codec."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Final

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.types import Prediction
from understudy.service.calls.methods import CallContext, Encoded, ZeroCopyCodec
from understudy.service.calls.parsing import ZeroCopyMessage
from understudy.service.handlers import messages
from understudy.service.handlers.evaluate_stream import BatchStream, StreamLimits, opened, queued
from understudy.service.handlers.predict_codec import is_large
from understudy.service.served_model import ServedModel
from understudy.v1 import evaluation_pb2

if TYPE_CHECKING:
    from understudy.evaluator.evaluation.replay_stream import ReplayStream

PATIENCE_SECONDS: Final = 60.0
"""How long a caller may take no answer, while its stream holds a slot."""

Answer = evaluation_pb2.ReplayModel | Prediction


class ReplayCodec(ZeroCopyCodec):
    """The codec of Replay."""

    def __init__(self) -> None:
        super().__init__(evaluation_pb2.ReplayRequest)

    def encode(self, response: Answer) -> Encoded:  # type: ignore[override] # a part of the message
        """See `understudy.service.calls.methods.Codec`."""
        if isinstance(response, evaluation_pb2.ReplayModel):
            return evaluation_pb2.ReplayResponse(model=response).SerializeToString()
        if is_large(response):
            return lambda: messages.replay_answer(response).SerializeToString()
        return messages.replay_answer(response).SerializeToString()


async def replay_stream(
    model: ServedModel,
    requests: AsyncIterator[evaluation_pb2.ReplayRequest | ZeroCopyMessage],
    call: CallContext,
    *,
    limits: StreamLimits,
) -> AsyncGenerator[Answer, None]:
    """Describe one version once it is loaded, then answer each batch of a stream with it.

    Args:
        model: The served model, whose evaluator runs the version.
        requests: Options, then batches.
        call: The call that the stream belongs to.
        limits: The limits of the stream.

    Raises:
        UnknownModelError: The options name another model.
        InvalidInputError: Options are not the first message or are sent twice, or a batch does not fit the model.
        StreamIdleError: The stream was idle for too long, or lasted too long.
    """
    incoming: BatchStream[evaluation_pb2.ReplayRequest] = BatchStream(requests, limits)
    first = await incoming.first()
    if first is None:
        raise InvalidInputError("the first message is a batch; send options first, empty ones for the serving version")
    model.check_optional_name(first.options.model_name)
    version = messages.version(first.options.version)
    stream = await opened(model.evaluator.open_replay(version=version, deadline=call.deadline))
    try:
        yield messages.replay_model(model.name, stream)
        while (received := await incoming.next_batch()) is not None:
            yield await _answer(stream, received, call)
            del received  # its message does not wait with the stream
    finally:
        stream.close()


async def _answer(stream: ReplayStream, received: ZeroCopyMessage, call: CallContext) -> Prediction:
    inputs = messages.replay_inputs(*received)
    return Prediction(await (await queued(lambda: stream.add(inputs, call.deadline))), stream.step)
