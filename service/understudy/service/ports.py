"""The two ports of a service: from the bind, over what answers on them, to the end of the last call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from starlette.routing import Route
from starlette.types import ASGIApp

from understudy.service.addresses import host_and_port
from understudy.service.calls.served_call import ServedMethods
from understudy.service.front_end import FrontEnd, write_address_file
from understudy.service.http_app import ReplaceableApp, build_app
from understudy.service.http_server import HttpServer, bind
from understudy.service.readiness import DRAIN_NOTICE_SECONDS, Readiness
from understudy.service.settings import ServeSettings
from understudy.service.tls import ServerCertificates

Announce = Callable[[str], None]
"""Prints a line that scripts wait for."""


class Ports:
    """The gRPC port and the HTTP port. Belongs to the event loop on which it is created.

    Args:
        settings: The settings of the service.
        front_end: The gRPC front end.
        certificates: The certificates of the HTTP port; None to serve HTTP.
        stack: Closes the HTTP port, if it is never served.
        readiness: The state that both ports report.
        announce: Prints the addresses when both ports accept calls.
        on_draining: Called when no more calls should come; ends the calls that would last.

    Attributes:
        grpc: The number of the gRPC port.
        addresses: Both addresses, as they are printed.

    Raises:
        ServiceError: A port is not available.
    """

    def __init__(
        self,
        settings: ServeSettings,
        front_end: FrontEnd,
        certificates: ServerCertificates | None,
        stack: AsyncExitStack,
        *,
        readiness: Readiness,
        announce: Announce,
        on_draining: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._front_end = front_end
        self._readiness = readiness
        self._announce = announce
        self._on_draining = on_draining
        self._announced = False
        self._app = ReplaceableApp(self._app_with(()))
        self._http: HttpServer | None = None
        self.grpc = front_end.bind(settings.host, settings.grpc_port)
        self._listener = stack.enter_context(bind(settings.host, settings.http_port))
        self._certificates = certificates
        http_port = self._listener.getsockname()[1]
        self.addresses = (
            f"grpc={host_and_port(settings.host, self.grpc)} http={host_and_port(settings.host, http_port)}"
        )

    async def serve(self, stack: AsyncExitStack, methods: ServedMethods, routes: Sequence[Route] = ()) -> None:
        """Serve these methods and routes until the stack is closed; called again, serve others from now on.

        The address file exists meanwhile, and the addresses are printed the first time.

        Raises:
            ServiceError: The front end does not start, or the address file cannot be written.
        """
        self._app.app = self._app_with(routes)
        if self._http is None:
            limit = self._settings.max_http_connections
            server = HttpServer(self._app, self._listener, self._certificates, max_connections=limit)
            await server.start()
            self._http = server
        stack.push_async_callback(self._http.stop)
        await self._front_end.start(methods)
        stack.push_async_callback(self._drain)
        self._announce_addresses(stack)

    def _app_with(self, routes: Sequence[Route]) -> ASGIApp:
        return build_app(
            readiness=self._readiness,
            routes=routes,
            root_path=self._settings.root_path,
            allowed_hosts=self._settings.http_names,
        )

    def _announce_addresses(self, stack: AsyncExitStack) -> None:
        file = self._settings.address_file
        if file is not None:
            write_address_file(file, self.addresses, tls=self._settings.tls_files is not None)
            stack.callback(file.unlink, missing_ok=True)
        if not self._announced:
            self._announce(f"LISTENING {self.addresses}")
        self._announced = True

    async def _drain(self) -> None:
        self._readiness.start_draining()
        self._on_draining()
        if self._readiness.watchers:
            await asyncio.sleep(DRAIN_NOTICE_SECONDS)
        await self._front_end.drain(self._settings.drain_seconds)
