"""What is around every call, whatever its transport: an id, metrics, admission, errors and the access log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

import structlog
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.service.calls.audit import audit_call
from understudy.service.calls.call import REQUEST_ID, Call
from understudy.service.calls.methods import Method, Service
from understudy.service.calls.status import CALLER_GONE, Code, Failure, failure_of
from understudy.service.metrics.rpc_metrics import MethodMetrics, RpcMetrics

_log = structlog.get_logger(__name__)
_threshold: Final = logging.getLogger(__name__)
"""Checks whether a line would be written, at a tenth of the cost."""

_Call = TypeVar("_Call", bound=Call)
_Response = TypeVar("_Response")


class ServedMethod:
    """One method as every front end serves it. Belongs to the event loop's thread.

    Args:
        method: The method.
        metrics: Counts and times its calls.

    Attributes:
        method: The method.
        encode: Returns the bytes of a response.
    """

    def __init__(self, method: Method, metrics: MethodMetrics) -> None:
        self.method = method
        self._metrics = metrics
        self._path = method.rpc.path
        self._admit = method.admit
        self._decode = method.codec.decode
        self.encode = method.codec.encode

    async def serve(self, call: _Call, answer: Callable[[_Call], Awaitable[_Response]]) -> _Response | None:
        """Serve a call.

        Args:
            call: The call.
            answer: The transport's part: reads the request, calls the handler, and sends or returns the response.

        Returns:
            What ``answer`` returns, or None if the call failed and its caller was told.
        """
        self._metrics.started_calls += 1
        REQUEST_ID.set(call.request_id)
        try:
            call.open()
            if self._admit is not None:
                self._admit(call)
            response = await answer(call)
        except asyncio.CancelledError:
            failure = self._why_cancelled(call)
        except Exception as error:  # noqa: BLE001 - failure_of logs unexpected errors
            failure = failure_of(error)
        except BaseException:  # the event loop ends, and closes its coroutines
            self._end(call, CALLER_GONE)
            raise
        else:
            call.close()
            self._end(call, None)
            return response
        call.close()
        try:
            await call.fail(failure)
        finally:
            self._end(call, failure)
        return None

    def received(self, call: Call, size: int) -> None:
        """Count a request message of this many bytes, which has arrived."""
        self._metrics.received_messages += 1
        call.received_bytes += size

    def sent(self) -> None:
        """Count a sent message."""
        self._metrics.sent_messages += 1

    def decode(self, call: Call, data: bytes, begin: int = 0) -> Any:
        """Return the request in ``data[begin:]``, which has arrived.

        Raises:
            InvalidInputError: The bytes cannot be parsed.
        """
        self.received(call, len(data) - begin)
        try:
            return self._decode(data, begin)
        except DecodeError as error:
            raise InvalidInputError(
                f"cannot parse {len(data) - begin} bytes as a request of {self._path}; encode it as its .proto says"
            ) from error

    def _why_cancelled(self, call: Call) -> Failure:
        try:
            return call.why_cancelled()
        except asyncio.CancelledError:
            call.close()
            self._end(call, CALLER_GONE)
            raise

    def _end(self, call: Call, failure: Failure | None) -> None:
        """Count the call, and log it: at debug if it succeeded, since there may be thousands a second, else at info."""
        seconds = time.monotonic() - call.started
        self._metrics.handled(Code.OK if failure is None else failure.code, seconds=seconds)
        if failure is not None or call.audited is not None:
            audit_call(call, self._path, failure)
        if failure is not None:
            self._write(_log.info, call, failure.code, failure.message, seconds)
        elif _threshold.isEnabledFor(logging.DEBUG):
            self._write(_log.debug, call, Code.OK, "", seconds)

    def _write(self, log: Callable[..., Any], call: Call, code: Code, message: str, seconds: float) -> None:
        log(
            "call ended",
            method=self._path,
            peer=call.peer,
            code=code.name,
            message=message,
            seconds=seconds,
            received_bytes=call.received_bytes,
        )


ServedMethods = Mapping[str, ServedMethod]
"""The methods that front ends serve, by path, such as ``/package.Service/Method``."""


def served_methods(services: Iterable[Service], registry: CollectorRegistry) -> ServedMethods:
    """Return the methods of services as front ends serve them.

    Args:
        services: The services.
        registry: Where to register the ``grpc_server_*`` metrics.
    """
    methods = [method for service in services for method in service.methods]
    metrics = RpcMetrics(registry, [method.rpc for method in methods])
    return {method.rpc.path: ServedMethod(method, metrics.of(method.rpc.path)) for method in methods}
