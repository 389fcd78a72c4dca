"""A request for the page, whose token may come from a browser's dialog, and the progress of long work."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

from google.protobuf.empty_pb2 import Empty
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from understudy.service.calls.caller import Group, only
from understudy.service.calls.methods import CallContext, MessageCodec, Method, RpcMethod
from understudy.service.calls.metrics import MethodMetrics
from understudy.service.calls.served_call import Guard, ServedMethod
from understudy.service.calls.status import Failure, UnsupportedError
from understudy.service.rest.rest_call import RestCall

QUICK_SECONDS = 0.5
"""What takes no longer than this is answered at once, without such a page."""
TELL_SECONDS = 1.0
"""How often the page shows the progress."""
LONGEST_SECONDS: Final = 3600.0
"""How long it may take in all."""

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


class Progress:
    """How many examples are scored, and the time left. Thread-safe.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, int] | None = None
        self._latest: tuple[float, int, int | None] | None = None

    def report(self, examples: int, total: int | None) -> None:
        """Take how many examples are scored, of how many if that is known."""
        now = self._clock()
        if self._first is None:
            self._first = now, examples
        self._latest = now, examples, total

    @property
    def examples(self) -> int:
        """How many examples are scored."""
        return 0 if self._latest is None else self._latest[1]

    @property
    def total(self) -> int | None:
        """How many there are; None if that is not known."""
        return None if self._latest is None else self._latest[2]

    @property
    def remaining_seconds(self) -> float | None:
        """How long the others take at the rate since the first report; None if that is not known."""
        if self._first is None or self._latest is None:
            return None
        (began, before), (now, examples, total) = self._first, self._latest
        if total is None or examples <= before:
            return None
        rate = (examples - before) / max(now - began, 1e-9)
        return max(0.0, (total - examples) / rate)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was computed: as an answer of its own, and as the end of a page that showed the progress."""

    response: Response
    html: str


Work = Callable[[Progress], Awaitable[Outcome]]
"""Computes something, and reports how far it is."""


class Working:
    """Something that is computed on a task of its own, and is cancelled at the end of a ``with`` block.

    Args:
        work: Computes it.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self.progress = Progress()
        self._task: asyncio.Task[Outcome] | None = None

    async def __aenter__(self) -> asyncio.Task[Outcome]:
        """Begin, and wait for a moment, which may be long enough."""
        self._task = asyncio.ensure_future(self._begun())
        try:
            await asyncio.wait([self._task], timeout=QUICK_SECONDS)
        except asyncio.CancelledError:
            await self._end(self._task)
            raise
        return self._task

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            await self._end(self._task)

    async def lines(self, task: asyncio.Task[Outcome], line: Callable[[Progress], str]) -> AsyncGenerator[str, None]:
        """Yield a line at the start and whenever something is done, until it has ended."""
        said = ""
        while not task.done():
            text = line(self.progress)
            if text != said:
                said = text
                yield text
            await asyncio.wait([task], timeout=TELL_SECONDS)

    async def _begun(self) -> Outcome:
        return await self._work(self.progress)

    @staticmethod
    async def _end(task: asyncio.Task[Outcome]) -> None:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
