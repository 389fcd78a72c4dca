"""The application of the HTTP port: ``/healthz``, ``/readyz``, additional routes, and the requests it refuses."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from understudy.service.addresses import host_and_port
from understudy.service.calls.audit import audit_refused_request
from understudy.service.calls.caller import host_name, is_direct
from understudy.service.calls.served_call import check_headers
from understudy.service.calls.status import CallEndedError
from understudy.service.readiness import Readiness, ReadinessState
from understudy.service.rest.rest_call import CERTIFICATE_NAMES

BAD_REQUEST: Final = 400
HEADERS_TOO_LARGE: Final = 431
_LENGTHS: Final = frozenset({b"content-length", b"transfer-encoding"})

PROBES: Final = frozenset({"/healthz", "/readyz"})
"""The paths that callers without a certificate reach always, because Kubernetes' probes have none."""


def build_app(
    *,
    readiness: Readiness,
    routes: Sequence[Route] = (),
    root_path: str = "",
    allowed_hosts: Collection[str] | None = None,
) -> ASGIApp:
    """Return the ASGI application.

    Args:
        readiness: The state under ``/readyz``, with status 503 unless it is ready.
        routes: Additional routes.
        root_path: The path under which a proxy serves this port, such as ``/models/digits``. Requests may have it
            before their own path, or not, if the proxy removes it.
        allowed_hosts: The names in the Host header that are served, besides addresses and ``localhost``; None for all.
    """

    async def healthz(_request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_request: Request) -> Response:
        ready = readiness.state is ReadinessState.READY
        return JSONResponse({"ready": ready, "reason": readiness.reason}, status_code=200 if ready else 503)

    own = (Route("/healthz", healthz), Route("/readyz", readyz))
    app = _rooted(Starlette(routes=[*own, *routes]), root_path)
    return _unambiguous(app if allowed_hosts is None else _for_hosts(app, allowed_hosts))


def _for_hosts(app: ASGIApp, allowed_hosts: Collection[str]) -> ASGIApp:
    """Refuse requests under other names: a page on the web may have its own name lead to this machine, and read this.

    A request without a name comes from no browser.
    """
    allowed = {name.lower() for name in allowed_hosts}

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        for key, value in scope["headers"]:
            if key == b"host" and value and scope["path"] not in PROBES:
                host = value.decode("latin-1")
                if not is_direct(host) and host_name(host) not in allowed:
                    await _refuse_name(scope, host)(scope, receive, send)
                    return
        await app(scope, receive, send)

    return answer


def _refuse_name(scope: Scope, host: str) -> JSONResponse:
    message = (
        f"this port is not served under the name {host_name(host)!r} of the Host header, as it listens on this machine "
        "only and has no callers: use an address or localhost, or give the name with --allowed-hosts"
    )
    return _forbidden(scope, message)


def _unambiguous(app: ASGIApp) -> ASGIApp:
    """Refuse requests with two lengths or large headers, and end their connection.

    A proxy may take the other length, and what here would be the next request for a body (RFC 9112, 6.1).
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope["headers"]
        try:
            check_headers(headers)
        except CallEndedError as error:
            await refusal(HEADERS_TOO_LARGE, error.failure.message)(scope, receive, send)
            return
        if {name for name, _ in headers} >= _LENGTHS:
            message = "a request with both Content-Length and Transfer-Encoding is not served; send one of them"
            await refusal(BAD_REQUEST, message)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return answer


def refusal(status: int, message: str) -> JSONResponse:
    """Return a response that ends its connection."""
    return JSONResponse({"error": message}, status_code=status, headers={"connection": "close"})


def _rooted(app: ASGIApp, root_path: str) -> ASGIApp:
    """Serve requests with and without this path before their own."""
    if not root_path:
        return app

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        scope["root_path"] = root_path
        await app(scope, receive, send)

    return answer


def with_certificate_names(app: ASGIApp, names: tuple[str, ...]) -> ASGIApp:
    """Return an application whose requests carry the names in their caller's certificate."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        scope[CERTIFICATE_NAMES] = names
        await app(scope, receive, send)

    return answer


def probes_only(app: ASGIApp) -> ASGIApp:
    """Return an application that serves `PROBES` only, for a caller without a certificate."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PROBES:
            await app(scope, receive, send)
        else:
            message = f"{scope['path']} needs a client certificate"
            await _forbidden(scope, message)(scope, receive, send)

    return answer


def _forbidden(scope: Scope, message: str) -> JSONResponse:
    """Return the response to a request that may not be made, and write its line in the audit log."""
    host, port = scope["client"] or ("", 0)
    audit_refused_request(host_and_port(host, port), scope["path"], message)
    return JSONResponse({"error": message}, status_code=403)


class ReplaceableApp:
    """An ASGI application that passes requests on to another one, which can be replaced.

    Attributes:
        app: The other one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request as an ASGI application."""
        await self.app(scope, receive, send)
