"""Counts and times every call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from understudy.service.grpcio.interceptors.base import Answer, Context, Handler, Interceptor, Stream, with_behavior
from understudy.service.grpcio.status import code_of, code_when_cancelled
from understudy.service.metrics.rpc import MethodMetrics, RpcMetrics


class MetricsInterceptor(Interceptor):
    """Keeps the ``grpc_server_*`` metrics. It is the outermost one, to see how calls really end.

    Args:
        metrics: Made with every method that the server has.
    """

    def __init__(self, metrics: RpcMetrics) -> None:
        super().__init__()
        self._metrics = metrics

    def wrap(self, path: str, handler: Handler) -> Handler:
        """See `Interceptor`."""
        method = self._metrics.of(path)
        received = _count_each if handler.request_streaming else _count_one

        def around_answer(proceed: Answer) -> Answer:
            async def answer(request: Any, context: Context) -> Any:
                with _measured(method, context):
                    response = await proceed(received(method, request), context)
                    method.sent()
                    return response

            return answer

        def around_stream(proceed: Stream) -> Stream:
            async def stream(request: Any, context: Context) -> AsyncGenerator[Any, None]:
                with _measured(method, context):
                    async with aclosing(proceed(received(method, request), context)) as responses:
                        async for response in responses:
                            method.sent()
                            yield response

            return stream

        return with_behavior(handler, answer=around_answer, stream=around_stream)


@contextmanager
def _measured(method: MethodMetrics, context: Context) -> Iterator[None]:
    started = time.perf_counter()
    method.started()
    cancelled = False
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        cancelled = True
        raise
    finally:
        code = code_when_cancelled(context) if cancelled else code_of(context)
        method.handled(code, seconds=time.perf_counter() - started)


def _count_one(method: MethodMetrics, request: bytes) -> bytes:
    method.received()
    return request


async def _count_each(method: MethodMetrics, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for request in requests:
        method.received()
        yield request
