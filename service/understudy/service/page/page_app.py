"""The paths of the page, their headers, and who may see them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Final

from google.protobuf.empty_pb2 import Empty
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from understudy.evaluator.evaluation.training_end import read_training
from understudy.evaluator.evaluator_errors import InvalidInputError, VersionNotFoundError
from understudy.evaluator.settings import EvaluatorSettings
from understudy.service.calls.call_limits import BodyBudget, DisconnectMonitor
from understudy.service.calls.caller import Group, only
from understudy.service.calls.methods import CallContext, MessageCodec, Method
from understudy.service.calls.metrics import MethodMetrics, RpcMethod, samples_of
from understudy.service.calls.served_call import Guard, ServedMethod, ServedMethods
from understudy.service.calls.status import UnsupportedError
from understudy.service.live_numbers import LiveReader
from understudy.service.page.acts import FIRST, SECOND, Act, Confirmations
from understudy.service.page.acts_app import ActsApp
from understudy.service.page.change_feed import ChangeFeed
from understudy.service.page.comparing import recorded, recorded_tables
from understudy.service.page.history import History
from understudy.service.page.page_call import PageCall
from understudy.service.page.rendering import Renderer, root_of, with_headers
from understudy.service.page.requests import asked, number
from understudy.service.page.views import Views
from understudy.service.readiness import Notifier, Readiness
from understudy.service.served_model import ServedModel

FRESH_SECONDS: Final = 0.5
"""How long what was rendered for one browser is sent to others, unless something changes."""
MAX_RENDERED: Final = 64
"""How many rendered parts are kept."""
MAX_STREAMS: Final = 256
"""The most pages that are updated live, and no more than half of the connections to the HTTP port."""

PARTS: Final = ("state", "traffic", "curves", "checkpoints")
"""The parts of the overview, which are updated each by itself."""

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
        methods: The gRPC methods, of which some do what callers do on the page.
        read_only: Whether nothing may be changed.
        run: The run folder of the training; None if there is none.
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
        methods: ServedMethods,
        read_only: bool,
        run: Path | None,
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
        self._live = LiveReader(lambda: samples_of(registry))
        self._training_run = run
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
        self._renderer = Renderer(model.name, readiness)
        self._acts = ActsApp(
            methods,
            Confirmations(model.evaluator, self._views, str(settings.version_policy)),
            self._renderer,
            note_change=self._feed.note_change,
            has_callers=guard is not None,
            read_only=read_only,
            executor=executor,
        )
        self._rendering = asyncio.Lock()
        self._rendered: dict[tuple[object, ...], tuple[float, int, str]] = {}

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            self._route("/", self.overview),
            self._route("/parts/{part}", self.part),
            self._route("/checkpoints/{step}", self.checkpoint),
            self._route("/checkpoints/{step}/life", self.life),
            self._route("/compare", self.compare),
            self._route("/tables", self.tables),
            self._route("/acts/{act}", self._acts.confirm),
            *self._acts.routes(),
            self._route("/static/{name}", self.static),
            Route("/events", _Endpoint(self._stream_events), methods=["GET"]),
        ]

    async def overview(self, call: PageCall) -> Response:
        """Return the whole page."""
        parts = {part: await self._part(call, part) for part in PARTS}
        return HTMLResponse(self._renderer.page("overview.html", call, parts=parts, query=_query(call)))

    async def part(self, call: PageCall) -> Response:
        """Return one part of the overview."""
        part = call.request.path_params["part"]
        if part not in PARTS:
            raise VersionNotFoundError(f"the page has no part {part!r}; it has {', '.join(PARTS)}")
        return HTMLResponse(await self._part(call, part))

    async def checkpoint(self, call: PageCall) -> Response:
        """Return the page of one checkpoint."""
        content = await self._checkpoint(call)
        return HTMLResponse(self._renderer.page("checkpoint.html", call, step=_step(call), content=content))

    async def life(self, call: PageCall) -> Response:
        """Return what the page of one checkpoint says."""
        return HTMLResponse(await self._checkpoint(call))

    async def _checkpoint(self, call: PageCall) -> str:
        step, root, acts = _step(call), root_of(call), self._acts.allowed(call)

        def render() -> str:
            view, serving = self._views.checkpoint(step), self._model.evaluator.serving_step
            return self._renderer.part("life.html", {"root": root, "view": view, "acts": acts, "serving": serving})

        return await self._shared(("checkpoint", root, step, acts), render)

    async def compare(self, call: PageCall) -> Response:
        """Return two versions beside each other, as the ledger has them."""
        first, second = asked(call, FIRST), asked(call, SECOND)
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
        steps = [step for step in (asked(call, FIRST), asked(call, SECOND)) if step is not None]
        if not dataset or not steps:
            raise InvalidInputError("a dataset and a step are needed, such as /tables?dataset=test&first=100")
        content = await self._run(partial(recorded_tables, self._model.evaluator, dataset, steps))
        return HTMLResponse(self._renderer.page("tables.html", call, steps=steps, **content))

    async def static(self, call: PageCall) -> Response:
        """Return a file of the package."""
        return self._renderer.static(call.request.path_params["name"])

    async def _part(self, call: PageCall, part: str) -> str:
        before, first = asked(call, "before"), asked(call, "charts") or 0
        acts = self._acts.allowed(call) if part == "state" else frozenset()
        root = root_of(call)
        render = partial(self._render, part, root, before, first, acts)
        return await self._shared((part, root, before, first, acts), render)

    async def _shared(self, key: tuple[object, ...], render: Callable[[], str]) -> str:
        """Return what is rendered: one for all browsers, unless it is older than half a second or than a change."""
        async with self._rendering:
            rendered = self._rendered.get(key)
            generation = self._feed.generation
            if rendered is not None and rendered[1] == generation and monotonic() - rendered[0] < FRESH_SECONDS:
                return rendered[2]
            began = monotonic()
            content: str = await self._run(render)
            self._rendered.pop(key, None)
            self._rendered[key] = (began, generation, content)
            if len(self._rendered) > MAX_RENDERED:
                del self._rendered[next(iter(self._rendered))]
            return content

    def _render(self, part: str, root: str, before: int | None, first: int, acts: frozenset[Act]) -> str:
        """Read and render a part. Blocks."""
        views = self._views
        values: dict[str, Any] = {"root": root}
        if part == "state":
            views.catch_up()
            values |= {"served": views.served(), "next": views.next(), "acts": acts}
        elif part == "traffic":
            training = None if self._training_run is None else read_training(self._training_run)
            values |= {"live": self._live.read(), "training": training}
        elif part == "curves":
            views.catch_up()
            values |= {"curves": views.curves(first)}
        else:
            values |= {"checkpoints": views.checkpoints(before)}
        return self._renderer.part(f"{part}.html", values)

    async def _run(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _route(self, path: str, answer: _Answer) -> Route:
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
                await with_headers(response, call)(scope, receive, send_on)
            return response

        if await self._watch.serve(call, answer) is None and not has_begun:
            await self._renderer.failed(call)(scope, receive, send)


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


def _step(call: PageCall) -> int:
    return number("the step", call.request.path_params["step"])


def _query(call: PageCall) -> str:
    """Return the known parameters as a query, for the parts' own requests."""
    found = ((name, asked(call, name)) for name in ("before", "charts"))
    return "&".join(f"{name}={value}" for name, value in found if value is not None)
