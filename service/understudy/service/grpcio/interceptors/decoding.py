"""Turns bytes into messages inside the call, so that what is no message is the caller's error and not the server's."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from google.protobuf.message import DecodeError

from understudy.evaluator.errors import InvalidInputError
from understudy.service.grpcio.interceptors.base import Answer, Context, Handler, Interceptor, Stream, with_behavior


class DecodingInterceptor(Interceptor):
    """Decodes requests. It is the innermost one; the others are handed bytes."""

    def wrap(self, path: str, handler: Handler) -> Handler:
        """See `Interceptor`."""
        decoder = _Decoder(path, handler)

        def around_answer(proceed: Answer) -> Answer:
            async def answer(request: Any, context: Context) -> Any:
                return await proceed(decoder.decode(request), context)

            return answer

        def around_stream(proceed: Stream) -> Stream:
            async def stream(request: Any, context: Context) -> AsyncGenerator[Any, None]:
                async with aclosing(proceed(decoder.decode(request), context)) as responses:
                    async for response in responses:
                        yield response

            return stream

        wrapped = with_behavior(handler, answer=around_answer, stream=around_stream)
        wrapped.request_deserializer = None
        return wrapped


class _Decoder:
    def __init__(self, path: str, handler: Handler) -> None:
        if handler.request_deserializer is None:
            raise TypeError(f"{path} has no deserializer; register it by its generated function")
        self._path = path
        self._parse: Callable[[bytes], Any] = handler.request_deserializer
        self.decode = self._decode_each if handler.request_streaming else self._decode_one

    def _decode_one(self, data: bytes) -> Any:
        try:
            return self._parse(data)
        except DecodeError as error:
            raise InvalidInputError(
                f"{len(data)} bytes came that are no request message of {self._path}; encode it as its .proto says"
            ) from error

    async def _decode_each(self, requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in requests:
            yield self._decode_one(data)
