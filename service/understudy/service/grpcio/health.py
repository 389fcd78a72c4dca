"""``grpc.health.v1.Health`` from the service's readiness.

The servicer that comes with grpcio-health-checking 1.81 forgets a service's other watchers when one of them leaves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from understudy.service.grpcio.interceptors.base import Context
from understudy.service.readiness import Readiness, ReadinessState

SERVICE_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no types
    """Tells whether the server as a whole (``""``) and each of its services can answer.

    Args:
        readiness: Whether they can; they do so together.
        services: Full names of the services.
    """

    def __init__(self, readiness: Readiness, services: Iterable[str]) -> None:
        self._readiness = readiness
        self._services = frozenset(services) | {""}

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:  # noqa: N802
        """Return a service's status; NOT_FOUND if there is no such service."""
        if request.service not in self._services:
            known = ", ".join(sorted(self._services - {""}))
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here; there are {known}")
        return health_pb2.HealthCheckResponse(status=self._status(request.service, self._readiness.state))

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Yield a service's status now and whenever it changes, until the caller goes away or the server drains."""
        del context
        last = None
        while True:
            changed = self._readiness.changed.listen()
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
