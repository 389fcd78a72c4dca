"""The paths of the page, their headers, and who may see them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Final
from urllib.parse import urlencode

from google.protobuf.empty_pb2 import Empty
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from understudy.evaluator.evaluation.training_end import read_training
from understudy.evaluator.evaluator_errors import InvalidInputError
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
from understudy.service.page.parts import Part, RenderedPart, SharedParts, state_of
from understudy.service.page.rendering import Renderer, root_of, with_headers
from understudy.service.page.requests import asked, number
from understudy.service.page.views import Views
from understudy.service.readiness import Notifier, Readiness
from understudy.service.served_model import ServedModel

FRESH_SECONDS: Final = 0.5
"""How long what was rendered for one browser is in the pages that others load, unless something changes."""
TRAFFIC_SECONDS: Final = 10.0
"""How often the traffic is updated."""
MAX_STREAMS: Final = 256
"""The most pages that are updated live, and no more than half of the connections to the HTTP port."""

SEEN: Final = "seen"
"""The parameter of a stream of events that says what the page shows."""

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
            self._fingerprints,
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
        self._parts = SharedParts(self._feed, executor)

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            self._route("/", self.overview),
            self._stream("/events", self._overview),
            self._route("/checkpoints/{step}", self.checkpoint),
            self._stream("/checkpoints/{step}/events", self._life),
            self._route("/compare", self.compare),
            self._route("/tables", self.tables),
            self._route("/acts/{act}", self._acts.confirm),
            *self._acts.routes(),
            self._route("/static/{name}", self.static),
        ]

    async def overview(self, call: PageCall) -> Response:
        """Return the whole page."""
        parts = self._overview(call)
        rendered = await self._fresh(parts)
        stream = "/events?" + urlencode({**_paging(call), SEEN: state_of(rendered)})
        contents = {part.name: now.html for part, now in zip(parts, rendered, strict=True)}
        return HTMLResponse(self._renderer.page("overview.html", call, parts=contents, stream=stream))

    def _overview(self, call: PageCall) -> Sequence[Part]:
        root, acts = root_of(call), self._acts.allowed(call)
        before, first = asked(call, "before"), asked(call, "charts") or 0
        render = partial(self._render, root)
        return [
            Part(name="state", key=("state", root, acts), render=partial(render, "state", partial(self._state, acts))),
            Part(name="traffic", key=("traffic",), render=partial(render, "traffic", self._traffic)),
            Part(
                name="curves",
                key=("curves", root, first),
                render=partial(render, "curves", partial(self._curves, first)),
            ),
            Part(
                name="checkpoints",
                key=("checkpoints", root, before),
                render=partial(render, "checkpoints", partial(self._checkpoints, before)),
            ),
        ]

    async def checkpoint(self, call: PageCall) -> Response:
        """Return the page of one checkpoint."""
        rendered = await self._fresh(self._life(call))
        stream = f"/checkpoints/{_step(call)}/events?" + urlencode({SEEN: state_of(rendered)})
        content = rendered[0].html
        return HTMLResponse(
            self._renderer.page("checkpoint.html", call, step=_step(call), content=content, stream=stream)
        )

    def _life(self, call: PageCall) -> Sequence[Part]:
        step, root, acts = _step(call), root_of(call), self._acts.allowed(call)

        def read() -> dict[str, Any]:
            return {"view": self._views.checkpoint(step), "acts": acts, "serving": self._model.evaluator.serving_step}

        return [Part(name="life", key=("life", root, step, acts), render=partial(self._render, root, "life", read))]

    async def _fresh(self, parts: Sequence[Part]) -> list[RenderedPart]:
        return [await self._parts.get(part, fresh_seconds=FRESH_SECONDS) for part in parts]

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

    def _fingerprints(self) -> Mapping[str, object]:
        return {**self._views.fingerprints(), "traffic": int(monotonic() / TRAFFIC_SECONDS)}

    def _render(self, root: str, part: str, read: Callable[[], Mapping[str, Any]]) -> str:
        """Read and render a part. Blocks."""
        return self._renderer.part(f"{part}.html", {"root": root, **read()})

    def _state(self, acts: frozenset[Act]) -> Mapping[str, Any]:
        self._views.catch_up()
        return {"served": self._views.served(), "next": self._views.next(), "acts": acts}

    def _traffic(self) -> Mapping[str, Any]:
        training = None if self._training_run is None else read_training(self._training_run)
        return {"live": self._live.read(), "training": training}

    def _curves(self, first: int) -> Mapping[str, Any]:
        self._views.catch_up()
        return {"curves": self._views.curves(first)}

    def _checkpoints(self, before: int | None) -> Mapping[str, Any]:
        return {"checkpoints": self._views.checkpoints(before)}

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
                    response = StreamingResponse(self._parts.events(parts, seen), media_type="text/event-stream")
                    await with_headers(response, call)(scope, receive, send_on)
                return response

            if await self._watch.serve(call, answer) is None and not has_begun:
                await self._renderer.failed(call)(scope, receive, send)

        return Route(path, _Endpoint(endpoint), methods=["GET"])


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


def _paging(call: PageCall) -> dict[str, int]:
    """Return the parameters that say which of many checkpoints and charts are shown."""
    found = ((name, asked(call, name)) for name in ("before", "charts"))
    return {name: value for name, value in found if value is not None}
