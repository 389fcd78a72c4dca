"""A request for the page, whose token may come from a browser's dialog, and what is around those of each kind."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable
from typing import Any, Final

from google.protobuf.empty_pb2 import Empty
from starlette.types import Receive, Scope, Send

from understudy.service.calls.caller import Group, only
from understudy.service.calls.methods import CallContext, MessageCodec, Method
from understudy.service.calls.metrics import MethodMetrics, RpcMethod
from understudy.service.calls.served_call import Guard, ServedMethod
from understudy.service.calls.status import Failure, UnsupportedError
from understudy.service.page.working import LONGEST_SECONDS
from understudy.service.rest.rest_call import RestCall

_AUTHORIZATION: Final = "authorization"
_BASIC: Final = "basic"


class PageCall(RestCall):
    """A request for the page.

    Browsers cannot send bearer tokens, so the password of HTTP Basic (RFC 7617) is taken for one; any user name will
    do. From there on the token is checked like every other.
    """

    __slots__ = ()

    def header(self, name: str) -> str | None:
        """See `Call`."""
        value = super().header(name)
        return value if value is None or name != _AUTHORIZATION else _as_bearer(value)

    @property
    def failure(self) -> Failure:
        """Why the call failed."""
        return self._failure


class ActCall(PageCall):
    """A form that acts.

    Attributes:
        progress: See `CallContext`.
    """

    __slots__ = ("progress",)

    default_timeout_seconds = LONGEST_SECONDS
    progress: Callable[[int, int | None], None] | None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.progress = None


def _as_bearer(value: str) -> str:
    """Return Basic credentials as a bearer token; other and malformed ones stay as they are, and are refused."""
    scheme, _, credentials = value.partition(" ")
    if scheme.lower() != _BASIC:
        return value
    try:
        _, colon, token = base64.b64decode(credentials.strip(), validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return value
    return f"Bearer {token}" if colon else value


def page_method(name: str, rpc_type: Any, group: Group, guard: Guard | None) -> ServedMethod:
    """Return what is around the requests of one kind: admission, limits of the caller, and the logs.

    Args:
        name: Its name in the logs.
        rpc_type: Its kind of call, which says which limits count.
        group: The group that its callers need.
        guard: Checks who calls; None to admit every caller.
    """
    rpc = RpcMethod(service="understudy.Page", name=name, rpc_type=rpc_type)

    async def answer(_request: Any, _call: CallContext) -> Any:
        raise UnsupportedError("the page is not served over gRPC")

    method = Method(rpc=rpc, access=only(group), codec=MessageCodec(Empty), answer=answer)
    return ServedMethod(method, MethodMetrics(rpc), guard)


class Endpoint:
    """An ASGI application as the endpoint of a route; Starlette calls functions with a request."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await self._app(scope, receive, send)
