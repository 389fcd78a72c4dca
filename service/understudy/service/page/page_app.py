"""The paths of the page, their headers, and who may see them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final
from urllib.parse import urlencode

from prometheus_client import CollectorRegistry
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from understudy.evaluator.evaluation.training_end import TrainingWatch
from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.evaluator.settings import EvaluatorSettings
from understudy.service.calls.body_budget import BodyBudget
from understudy.service.calls.call_limits import DisconnectMonitor
from understudy.service.calls.caller import Group
from understudy.service.calls.metrics import samples_of
from understudy.service.calls.served_call import Guard, ServedMethods
from understudy.service.fleet.fleet_state import Fleet
from understudy.service.live_numbers import LiveReader
from understudy.service.page.acts import FIRST, SECOND, Confirmations
from understudy.service.page.acts_app import ActsApp
from understudy.service.page.change_feed import ChangeFeed
from understudy.service.page.comparing import recorded, recorded_tables
from understudy.service.page.contents import Contents
from understudy.service.page.forms import number, requested
from understudy.service.page.history import History
from understudy.service.page.operations import Operations
from understudy.service.page.page_call import Endpoint, PageCall, page_method
from understudy.service.page.parts import GzipStream, Part, PlainStream, RenderedPart, SharedParts, state_of
from understudy.service.page.rendering import UNBUFFERED, Renderer, root_of, with_headers
from understudy.service.page.views import Views
from understudy.service.readiness import Notifier, Readiness
from understudy.service.served_model import ServedModel

FRESH_SECONDS: Final = 0.5
"""How long what was rendered for one browser is in the pages that others load, unless something changes."""
MAX_STREAMS: Final = 256
"""The most pages that are updated live, and no more than half of the connections to the HTTP port."""

SEEN: Final = "seen"
"""The parameter of a stream of events that says what the page shows."""

_COMPRESSED: Final = (Middleware(GZipMiddleware, minimum_size=1024, compresslevel=5),)
"""For what holds no token: the length of a compressed answer tells something of a secret in it."""

_Answer = Callable[[PageCall], Awaitable[Response]]


class PageApp:
    """Serves the page, for callers in the group ``observe``. Belongs to the event loop's thread.

    One thread of the executor at most reads and renders for all browsers. The requests are no calls of gRPC methods,
    so ``grpc_server_*`` does not count them; the access log and the audit log have them.

    Args:
        model: The served model.
        settings: The operator's settings of the evaluator.
        history: The scores of the evaluator's ledger.
        fleet: The servers that follow.
        guard: Checks who calls; None to admit every caller.
        methods: The gRPC methods, of which some do what callers do on the page.
        read_only: Whether nothing may be changed.
        training: Reads the journal of the training; None if there is none.
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
        fleet: Fleet,
        guard: Guard | None,
        methods: ServedMethods,
        read_only: bool,
        training: TrainingWatch | None,
        registry: CollectorRegistry,
        readiness: Readiness,
        recorded: Notifier,
        executor: Executor,
        max_connections: int,
    ) -> None:
        self._model = model
        self._executor = executor
        self._renderer = Renderer(model.name, readiness)
        views = Views(model.evaluator, settings, history)
        operations = Operations(model.evaluator.outbox, fleet)
        self._contents = Contents(
            model.evaluator,
            views=views,
            operations=operations,
            live=LiveReader(lambda: samples_of(registry)),
            training=training,
            renderer=self._renderer,
        )
        self._feed = ChangeFeed(
            self._contents.fingerprints,
            recorded=recorded,
            readiness=readiness,
            executor=executor,
            max_streams=min(MAX_STREAMS, max_connections // 2),
        )
        self._parts = SharedParts(self._feed, executor)
        self._view = page_method("View", "unary", Group.OBSERVE, guard)
        self._watch = page_method("Watch", "server_stream", Group.OBSERVE, guard)
        monitor = DisconnectMonitor()
        self._new_call = partial(PageCall, monitor=monitor, max_body_bytes=0, bodies=BodyBudget(0), executor=executor)
        self._acts = ActsApp(
            methods,
            Confirmations(model.evaluator, views, operations, str(settings.version_policy)),
            operations,
            self._renderer,
            note_change=self._feed.note_change,
            guard=guard,
            read_only=read_only,
            executor=executor,
        )

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            self._route("/", self.overview, middleware=_COMPRESSED),
            self._stream("/events", self._overview),
            self._route("/checkpoints/{step}", self.checkpoint, middleware=_COMPRESSED),
            self._stream("/checkpoints/{step}/events", self._life),
            self._route("/compare", self.compare, middleware=_COMPRESSED),
            self._route("/tables", self.tables, middleware=_COMPRESSED),
            self._route("/acts/{act}", self._acts.confirm),
            *self._acts.routes(),
            self._route("/static/{name}", self.static, middleware=_COMPRESSED),
        ]

    async def overview(self, call: PageCall) -> Response:
        """Return the whole page."""
        parts = self._overview(call)
        rendered = await self._fresh(parts)
        stream = "/events?" + urlencode({**_paging(call), SEEN: state_of(rendered)})
        contents = {part.name: now.html for part, now in zip(parts, rendered, strict=True)}
        return HTMLResponse(self._renderer.page("overview.html", call, parts=contents, stream=stream))

    def _overview(self, call: PageCall) -> Sequence[Part]:
        before, first = requested(call, "before"), requested(call, "charts") or 0
        return self._contents.overview(root_of(call), self._acts.allowed(call), before=before, first=first)

    async def checkpoint(self, call: PageCall) -> Response:
        """Return the page of one checkpoint."""
        rendered = await self._fresh(self._life(call))
        stream = f"/checkpoints/{_step(call)}/events?" + urlencode({SEEN: state_of(rendered)})
        content = rendered[-1].html
        return HTMLResponse(
            self._renderer.page("checkpoint.html", call, step=_step(call), content=content, stream=stream)
        )

    def _life(self, call: PageCall) -> Sequence[Part]:
        return self._contents.life(root_of(call), self._acts.allowed(call), _step(call))

    async def _fresh(self, parts: Sequence[Part]) -> list[RenderedPart]:
        return [await self._parts.get(part, fresh_seconds=FRESH_SECONDS) for part in parts]

    async def compare(self, call: PageCall) -> Response:
        """Return two versions beside each other, as the ledger has them."""
        first, second = requested(call, FIRST), requested(call, SECOND)
        if first is None or second is None or first == second:
            raise InvalidInputError("two different steps are needed, such as /compare?first=100&second=200")
        compared = await self._run(partial(recorded, self._model.evaluator, first, second))
        acts = self._acts.allowed(call)
        return HTMLResponse(
            self._renderer.page("comparison.html", call, first=first, second=second, compared=compared, acts=acts)
        )

    async def tables(self, call: PageCall) -> Response:
        """Return the tables that were recorded with the evaluations of one version, or of two beside each other."""
        dataset = call.request.query_params.get("dataset", "")
        steps = [step for step in (requested(call, FIRST), requested(call, SECOND)) if step is not None]
        if not dataset or not steps:
            raise InvalidInputError("a dataset and a step are needed, such as /tables?dataset=test&first=100")
        content = await self._run(partial(recorded_tables, self._model.evaluator, dataset, steps))
        return HTMLResponse(self._renderer.page("tables.html", call, steps=steps, **content))

    async def static(self, call: PageCall) -> Response:
        """Return a file of the package."""
        return self._renderer.static(call.request.path_params["name"])

    async def _run(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _route(self, path: str, answer: _Answer, middleware: Sequence[Middleware] = ()) -> Route:
        async def without_body(call: PageCall) -> Response:
            call.has_no_body()
            return await answer(call)

        async def respond(request: Request) -> Response:
            call = self._new_call(request, self._view)
            response = await self._view.serve(call, without_body)
            if response is None:
                return self._renderer.failed(call)
            self._view.sent(call)
            return with_headers(response, call)

        return Route(path, respond, methods=["GET"], middleware=middleware)

    def _stream(self, path: str, parts_of: Callable[[PageCall], Sequence[Part]]) -> Route:
        """Return the route of the events that keep a page as it would be if it were loaded again."""

        async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
            call = self._new_call(Request(scope, receive), self._watch)
            has_begun = False

            async def send_on(message: Message) -> None:
                nonlocal has_begun
                has_begun = True
                await send(message)

            async def answer(call: PageCall) -> Response:
                call.has_no_body()
                parts = parts_of(call)
                with self._feed.place():
                    for part in parts:  # a failure is an answer of its own
                        await self._parts.get(part)
                    seen = call.header("last-event-id") or call.request.query_params.get(SEEN, "")
                    in_gzip = "gzip" in (call.header("accept-encoding") or "")
                    events = self._parts.events(parts, seen, GzipStream() if in_gzip else PlainStream())
                    response = StreamingResponse(events, media_type="text/event-stream", headers=UNBUFFERED)
                    response.headers["vary"] = "Accept-Encoding"
                    if in_gzip:
                        response.headers["content-encoding"] = "gzip"
                    await with_headers(response, call)(scope, receive, send_on)
                return response

            if await self._watch.serve(call, answer) is None and not has_begun:
                await self._renderer.failed(call)(scope, receive, send)

        return Route(path, Endpoint(endpoint), methods=["GET"])


def _step(call: PageCall) -> int:
    return number("the step", call.request.path_params["step"])


def _paging(call: PageCall) -> dict[str, int]:
    """Return the parameters that say which of many checkpoints and charts are shown."""
    found = ((name, requested(call, name)) for name in ("before", "charts"))
    return {name: value for name, value in found if value is not None}
