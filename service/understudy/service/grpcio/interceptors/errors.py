"""Ends calls that raise with the status from the table of failures."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc

from understudy.service.dataplane.failures import failure_of
from understudy.service.grpcio.interceptors.base import Answer, Context, Handler, Interceptor, Stream, with_behavior
from understudy.service.grpcio.status import abort


class ErrorInterceptor(Interceptor):
    """Turns exceptions into a status. Cancellation and what was aborted already go through."""

    def wrap(self, path: str, handler: Handler) -> Handler:
        """See `Interceptor`."""
        del path
        return with_behavior(handler, answer=_around_answer, stream=_around_stream)


def _around_answer(proceed: Answer) -> Answer:
    async def answer(request: Any, context: Context) -> Any:
        try:
            return await proceed(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - failure_of logs what is not expected
            await abort(context, failure_of(error))

    return answer


def _around_stream(proceed: Stream) -> Stream:
    async def stream(request: Any, context: Context) -> AsyncGenerator[Any, None]:
        try:
            async with aclosing(proceed(request, context)) as responses:
                async for response in responses:
                    yield response
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - failure_of logs what is not expected
            await abort(context, failure_of(error))

    return stream
