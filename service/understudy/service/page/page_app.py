"""The paths of the page, their headers, and who may see them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from datetime import UTC, datetime
from functools import partial
from importlib import resources
from time import monotonic
from typing import Any, Final

from google.protobuf.empty_pb2 import Empty
from jinja2 import Environment, PackageLoader, StrictUndefined
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from understudy.evaluator.evaluator_errors import InvalidInputError, VersionNotFoundError
from understudy.evaluator.settings import EvaluatorSettings
from understudy.service.calls.call_limits import BodyBudget, DisconnectMonitor
from understudy.service.calls.caller import Group, only
from understudy.service.calls.methods import CallContext, MessageCodec, Method
from understudy.service.calls.metrics import MethodMetrics, RpcMethod
from understudy.service.calls.served_call import REQUEST_ID_HEADER, Guard, ServedMethod
from understudy.service.calls.status import Code, Failure, UnsupportedError
from understudy.service.page import chart
from understudy.service.page.change_feed import ChangeFeed
from understudy.service.page.history import History
from understudy.service.page.live_numbers import LiveReader
from understudy.service.page.page_call import PageCall
from understudy.service.page.views import Views
from understudy.service.readiness import Notifier, Readiness
from understudy.service.rest.rest_call import response_to_failure
from understudy.service.served_model import ServedModel

FRESH_SECONDS: Final = 0.5
"""How long what was rendered for one browser is sent to others, unless something changes."""
MAX_RENDERED: Final = 64
"""How many rendered parts are kept."""
MAX_STREAMS: Final = 256
"""The most pages that are updated live, and no more than half of the connections to the HTTP port."""

PARTS: Final = ("state", "traffic", "curves", "checkpoints")
"""The parts of the overview, which are updated each by itself."""

_POLICY: Final = (
    "default-src 'none'; style-src 'self'; img-src 'self' data:; script-src 'self'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_STATIC_CACHE: Final = "private, max-age=86400"
"""The links to these files change with their contents."""
_STATIC: Final[Mapping[str, tuple[str, str]]] = {
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
    "htmx.js": ("vendor/htmx.min.js", "text/javascript"),
    "sse.js": ("vendor/sse.min.js", "text/javascript"),
}
_PACKAGE: Final = "understudy.service.page"
_LARGEST: Final = 2**63 - 1

_Answer = Callable[[PageCall], Awaitable[Response]]


class PageApp:
    """Serves the page, for callers in the group ``observe``. Belongs to the event loop's thread.

    One thread of the executor at most reads and renders for all browsers. The requests are no calls of gRPC methods,
    so ``grpc_server_*`` does not count them; the access log and the audit log have them.

    Args:
        model: The served model.
        settings: The operator's settings of the evaluator.
        history: The scores of the evaluator's ledger.
        guard: Checks who calls; None to admit every caller.
        registry: The metrics.
        readiness: The state of the service.
        recorded: Notifies of new entries of the ledger.
        executor: Runs blocking calls.
        max_connections: The most connections to the HTTP port.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        settings: EvaluatorSettings,
        history: History,
        guard: Guard | None,
        registry: CollectorRegistry,
        readiness: Readiness,
        recorded: Notifier,
        executor: Executor,
        max_connections: int,
    ) -> None:
        self._model = model
        self._readiness = readiness
        self._executor = executor
        self._views = Views(model.evaluator, settings, history)
        self._live = LiveReader(registry)
        self._feed = ChangeFeed(
            self._views.fingerprint,
            recorded=recorded,
            readiness=readiness,
            executor=executor,
            max_streams=min(MAX_STREAMS, max_connections // 2),
        )
        self._view = _served("View", "unary", guard)
        self._watch = _served("Watch", "server_stream", guard)
        monitor = DisconnectMonitor()
        self._new_call = partial(PageCall, monitor=monitor, max_body_bytes=0, bodies=BodyBudget(0), executor=executor)
        self._static = {name: _packaged(file) for name, (file, _) in _STATIC.items()}
        self._templates = _templates(self._static)
        self._rendering = asyncio.Lock()
        self._rendered: dict[tuple[object, ...], tuple[float, int, str]] = {}

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            self._route("/", self.overview),
            self._route("/parts/{part}", self.part),
            self._route("/checkpoints/{step}", self.checkpoint),
            self._route("/static/{name}", self.static),
            Route("/events", _Endpoint(self._stream_events), methods=["GET"]),
        ]

    async def overview(self, call: PageCall) -> Response:
        """Return the whole page."""
        parts = {part: await self._part(call, part) for part in PARTS}
        return HTMLResponse(self._page("overview.html", call, parts=parts, query=_query(call)))

    async def part(self, call: PageCall) -> Response:
        """Return one part of the overview."""
        part = call.request.path_params["part"]
        if part not in PARTS:
            raise VersionNotFoundError(f"the page has no part {part!r}; it has {', '.join(PARTS)}")
        return HTMLResponse(await self._part(call, part))

    async def checkpoint(self, call: PageCall) -> Response:
        """Return the page of one checkpoint."""
        step = _number("the step", call.request.path_params["step"])
        view = await self._run(partial(self._views.checkpoint, step))
        return HTMLResponse(self._page("checkpoint.html", call, view=view))

    async def static(self, call: PageCall) -> Response:
        """Return a file of the package."""
        name = call.request.path_params["name"]
        if name not in _STATIC:
            raise VersionNotFoundError(f"the page has no file {name!r}")
        return Response(self._static[name], media_type=_STATIC[name][1], headers={"cache-control": _STATIC_CACHE})

    async def _part(self, call: PageCall, part: str) -> str:
        """Return a rendered part; one for all browsers, unless it is older than half a second or than a change."""
        before, first = _asked(call, "before"), _asked(call, "charts") or 0
        key = (part, _root(call), before, first)
        async with self._rendering:
            rendered = self._rendered.get(key)
            generation = self._feed.generation
            if rendered is not None and rendered[1] == generation and monotonic() - rendered[0] < FRESH_SECONDS:
                return rendered[2]
            began = monotonic()
            content: str = await self._run(partial(self._render, part, _root(call), before, first))
            self._rendered.pop(key, None)
            self._rendered[key] = (began, generation, content)
            if len(self._rendered) > MAX_RENDERED:
                del self._rendered[next(iter(self._rendered))]
            return content

    def _render(self, part: str, root: str, before: int | None, first: int) -> str:
        """Read and render a part. Blocks."""
        views = self._views
        values: dict[str, Any] = {"root": root}
        if part == "state":
            views.catch_up()
            values |= {"served": views.served(), "next": views.next()}
        elif part == "traffic":
            values |= {"live": self._live.read()}
        elif part == "curves":
            views.catch_up()
            values |= {"curves": views.curves(first)}
        else:
            values |= {"checkpoints": views.checkpoints(before)}
        return self._templates.get_template(f"{part}.html").render(values)

    async def _run(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _page(self, name: str, call: PageCall, **values: Any) -> str:
        """Return a rendered page, which is brief beside its parts."""
        frame = {"root": _root(call), "model": self._model.name, "readiness": self._readiness.reason}
        return self._templates.get_template(name).render(frame | values)

    def _route(self, path: str, answer: _Answer) -> Route:
        async def without_body(call: PageCall) -> Response:
            call.has_no_body()
            return await answer(call)

        async def respond(request: Request) -> Response:
            call = self._new_call(request, self._view)
            response = await self._view.serve(call, without_body)
            if response is None:
                return self._failed(call)
            self._view.sent(call)
            return _with_headers(response, call)

        return Route(path, respond, methods=["GET"])

    async def _stream_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._new_call(Request(scope, receive), self._watch)
        has_begun = False

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        async def answer(call: PageCall) -> Response:
            call.has_no_body()
            with self._feed.place():
                response = StreamingResponse(self._feed.events(), media_type="text/event-stream")
                await _with_headers(response, call)(scope, receive, send_on)
            return response

        if await self._watch.serve(call, answer) is None and not has_begun:
            await self._failed(call)(scope, receive, send)

    def _failed(self, call: PageCall) -> Response:
        """Return the page of a failure."""
        failure: Failure = call.failure
        plain = response_to_failure(failure)
        content = self._page("failure.html", call, status=plain.status_code, message=failure.message)
        response = HTMLResponse(content, status_code=plain.status_code)
        if "retry-after" in plain.headers:
            response.headers["retry-after"] = plain.headers["retry-after"]
        if failure.code is Code.UNAUTHENTICATED:
            response.headers["www-authenticate"] = 'Basic realm="understudy", charset="UTF-8"'
        return _with_headers(response, call)


class _Endpoint:
    """An ASGI application as the endpoint of a route; Starlette calls functions with a request."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _served(name: str, rpc_type: Any, guard: Guard | None) -> ServedMethod:
    """Return what is around the requests of one kind: admission, limits of the caller, and the logs."""
    rpc = RpcMethod(service="understudy.Page", name=name, rpc_type=rpc_type)

    async def answer(_request: Any, _call: CallContext) -> Any:
        raise UnsupportedError("the page is not served over gRPC")

    method = Method(rpc=rpc, access=only(Group.OBSERVE), codec=MessageCodec(Empty), answer=answer)
    return ServedMethod(method, MethodMetrics(rpc), guard)


def _templates(static: Mapping[str, bytes]) -> Environment:
    environment = Environment(
        loader=PackageLoader(_PACKAGE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": _shown, "utc": _utc, "iso": _iso, "mib": _mib, "duration": _duration}
    digests = {name: hashlib.sha256(content).hexdigest()[:16] for name, content in static.items()}
    environment.globals |= {"digests": digests, "chart": chart}
    return environment


def _packaged(file: str) -> bytes:
    return resources.files(_PACKAGE).joinpath("static", *file.split("/")).read_bytes()


def _with_headers(response: Response, call: PageCall) -> Response:
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers[REQUEST_ID_HEADER] = call.request_id
    return response


def _root(call: PageCall) -> str:
    return str(call.request.scope.get("root_path", ""))


def _query(call: PageCall) -> str:
    """Return the known parameters as a query, for the parts' own requests."""
    found = ((name, _asked(call, name)) for name in ("before", "charts"))
    return "&".join(f"{name}={value}" for name, value in found if value is not None)


def _asked(call: PageCall, name: str) -> int | None:
    value = call.request.query_params.get(name)
    return None if value is None else _number(f"the parameter {name}", value)


def _number(what: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < len(str(_LARGEST))):
        raise InvalidInputError(f"{what} is {text!r}; give a number from 0 up")
    return int(text)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _mib(size: float) -> str:
    return f"{size / 1024 / 1024:,.0f} MiB"


def _utc(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
