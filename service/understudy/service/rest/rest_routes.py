"""Routes of HTTP, each of which is a form of one gRPC method and counts as its call."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from understudy.service.calls.body_budget import BodyBudget
from understudy.service.calls.call_limits import DisconnectMonitor
from understudy.service.calls.served_call import REQUEST_ID_HEADER, ServedMethods
from understudy.service.calls.status import UnsupportedError
from understudy.service.rest.rest_call import RestCall

Answer = Callable[[RestCall], Awaitable[Response]]


class RestRoutes:
    """Makes routes. Belongs to the event loop's thread.

    Args:
        methods: The methods of the gRPC forms.
        max_body_bytes: The largest body to accept.
        bodies: Bounds the memory of unfinished bodies.
        executor: Decompresses bodies, and parses and renders large ones, with one thread.
    """

    def __init__(self, methods: ServedMethods, *, max_body_bytes: int, bodies: BodyBudget, executor: Executor) -> None:
        self._methods = methods
        self._new_call = functools.partial(
            RestCall, monitor=DisconnectMonitor(), max_body_bytes=max_body_bytes, bodies=bodies, executor=executor
        )

    def get(self, path: str, method: str, answer: Answer) -> Route:
        """Return the route of a path that is read; a body is not."""
        return self._route(path, method, _without_body(answer), ["GET"])

    def post(self, path: str, method: str, answer: Answer) -> Route:
        """Return the route of a path to which a body is sent."""
        return self._route(path, method, answer, ["POST"])

    def refusal(self, path: str, method: str, reason: str) -> Route:
        """Return the route of a path that is not supported."""

        async def refuse(_call: RestCall) -> Response:
            raise UnsupportedError(reason)

        return self._route(path, method, refuse, ["GET", "POST"])

    def _route(self, path: str, method: str, answer: Answer, http_methods: list[str]) -> Route:
        served = self._methods[method]

        async def respond_to_call(call: RestCall) -> Response:
            response = await answer(call)
            call.status = response.status_code
            return response

        async def respond(request: Request) -> Response:
            call = self._new_call(request, served, route=path)
            response = await served.serve(call, respond_to_call)
            if response is None:
                response = call.failure_response()
            else:
                served.sent(call)
            response.headers[REQUEST_ID_HEADER] = call.request_id
            return response

        return Route(path, respond, methods=http_methods)


def _without_body(answer: Answer) -> Answer:
    async def count_and_answer(call: RestCall) -> Response:
        call.has_no_body()
        return await answer(call)

    return count_and_answer
