"""What carries gRPC between the network and the handlers."""

from __future__ import annotations

from typing import Protocol

from prometheus_client import CollectorRegistry

from understudy.service.handlers.predictor import CoalescingOptions
from understudy.service.handlers.request_handlers import RequestHandlers
from understudy.service.readiness import Readiness


class FrontEnd(Protocol):
    """Answers calls on one port. Belongs to the event loop that it was made on."""

    @property
    def coalescing(self) -> CoalescingOptions:
        """How long calls that came at one time wait for each other."""

    def bind(self, host: str, port: int) -> int:
        """Take a port, any free one for 0, and return it.

        Raises:
            PortInUseError: It cannot be had.
        """

    async def start(self, handlers: RequestHandlers) -> None:
        """Begin to answer.

        Raises:
            FrontEndError: It cannot.
        """

    async def drain(self, seconds: float) -> None:
        """Refuse new calls and let those under way finish; cut off what is left when the time is up.

        Streams without an end of their own end when the service's readiness says that it drains.
        """


class MakeFrontEnd(Protocol):
    """Makes a front end."""

    def __call__(self, *, registry: CollectorRegistry, readiness: Readiness, max_message_bytes: int) -> FrontEnd:
        """Make it on the running event loop.

        Args:
            registry: Where to register the ``grpc_server_*`` metrics.
            readiness: What health tells.
            max_message_bytes: The largest message to take or send.
        """
