"""The RPCs about the server: ``grpc.health.v1.Health`` and MetricsService.

The servicer of grpcio-health-checking 1.81 drops a service's other watchers when one of them disconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from concurrent.futures import Executor
from typing import Any

from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry

from understudy.service.calls.call import CallContext
from understudy.service.calls.status import UnknownServiceError
from understudy.service.metrics.registry import exposition
from understudy.service.readiness import Readiness, ReadinessState
from understudy.v1 import metrics_pb2


class HealthHandler:
    """Reports whether the server as a whole (``""``) and each of its services can serve calls.

    Args:
        readiness: The state that all of them share.
        services: Full names of the services.
    """

    def __init__(self, readiness: Readiness, services: Iterable[str]) -> None:
        self._readiness = readiness
        self._services = frozenset(services) | {""}

    async def check(self, request: health_pb2.HealthCheckRequest, call: CallContext) -> health_pb2.HealthCheckResponse:
        """Return a service's status; raise UnknownServiceError if there is no such service."""
        del call
        if request.service not in self._services:
            known = ", ".join(sorted(self._services - {""}))
            raise UnknownServiceError(f"no service {request.service!r} here; there are {known}")
        return health_pb2.HealthCheckResponse(status=self._status(request.service, self._readiness.state))

    async def list(self, request: Any, call: CallContext) -> Any:
        """Return the status of the server and of each service; grpcio-health-checking has this RPC from 1.85 on."""
        del request, call
        state = self._readiness.state
        return health_pb2.HealthListResponse(
            statuses={
                service: health_pb2.HealthCheckResponse(status=self._status(service, state))
                for service in sorted(self._services)
            }
        )

    async def watch(
        self, request: health_pb2.HealthCheckRequest, call: CallContext
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """Yield a service's status now and at each change, until the caller disconnects or the server drains."""
        del call
        last = None
        while True:
            changed = self._readiness.changed.subscribe()
            state = self._readiness.state
            status = self._status(request.service, state)
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
                last = status
            if state is ReadinessState.DRAINING:
                return
            await changed.wait()

    def _status(self, service: str, state: ReadinessState) -> int:
        if service not in self._services:
            return int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        ready = state is ReadinessState.READY
        return int(health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING)


class MetricsHandler:
    """Returns the metrics.

    Args:
        registry: The registry of the metrics.
        executor: Runs blocking calls.
    """

    def __init__(self, registry: CollectorRegistry, *, executor: Executor) -> None:
        self._registry = registry
        self._executor = executor

    async def get_metrics(
        self, request: metrics_pb2.GetMetricsRequest, call: CallContext
    ) -> metrics_pb2.GetMetricsResponse:
        """Return what ``GET /metrics`` returns."""
        del request, call
        loop = asyncio.get_running_loop()
        content, content_type = await loop.run_in_executor(self._executor, exposition, self._registry)
        return metrics_pb2.GetMetricsResponse(exposition=content, content_type=content_type)
