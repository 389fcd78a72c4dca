"""The interface between gRPC transports and the service."""

from __future__ import annotations

from typing import Protocol

from prometheus_client import CollectorRegistry

from understudy.service.handlers.request_handlers import RequestHandlers
from understudy.service.predictor import CoalescingOptions
from understudy.service.readiness import Readiness


class FrontEnd(Protocol):
    """Answers calls on one port. Belongs to the event loop on which it is created."""

    @property
    def coalescing(self) -> CoalescingOptions:
        """How long simultaneous calls wait for each other."""

    def bind(self, host: str, port: int) -> int:
        """Bind a port, or any free port for 0, and return it.

        Raises:
            PortInUseError: The port is not available.
        """

    async def start(self, handlers: RequestHandlers) -> None:
        """Start to serve calls.

        Raises:
            FrontEndError: The front end does not start.
        """

    async def drain(self, seconds: float) -> None:
        """Refuse new calls, let running ones finish, and cancel the rest when the time is up.

        Endless streams end when the service's readiness changes to draining.
        """


class MakeFrontEnd(Protocol):
    """Creates a front end."""

    def __call__(self, *, registry: CollectorRegistry, readiness: Readiness, max_message_bytes: int) -> FrontEnd:
        """Create a front end on the running event loop.

        Args:
            registry: Where to register the ``grpc_server_*`` metrics.
            readiness: The state that health reports.
            max_message_bytes: The largest message to receive or send.
        """
