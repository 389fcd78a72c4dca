"""The paths that act: a confirmation of what will happen, and the form that does it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from contextlib import aclosing
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from understudy.evaluator.evaluator_errors import InvalidInputError, NotEvaluableError, VersionNotFoundError
from understudy.service.calls.body_budget import BodyBudget
from understudy.service.calls.call_limits import DisconnectMonitor
from understudy.service.calls.caller import Group, is_direct
from understudy.service.calls.methods import Method
from understudy.service.calls.served_call import Guard, ServedMethod, ServedMethods
from understudy.service.calls.status import PermissionDeniedError
from understudy.service.page.acts import (
    DATASET,
    DESTINATION,
    FIRST,
    FIRST_LETTER,
    LAST_LETTER,
    LETTER,
    METHOD_OF,
    OWN_METHODS,
    PINNED,
    SECOND,
    SERVING,
    STEP,
    Act,
    Confirmations,
)
from understudy.service.page.comparing import of_response
from understudy.service.page.forms import (
    MAX_FORM_BYTES,
    TOKEN,
    FormTokens,
    check_same_origin,
    fields_of,
    number,
    requested,
)
from understudy.service.page.operations import Operations
from understudy.service.page.page_call import ActCall, Endpoint, Outcome, PageCall, Progress, Work, Working, page_method
from understudy.service.page.rendering import Renderer, root_of, streamed, with_headers
from understudy.service.rest.rest_call import HTTP_OK
from understudy.v1 import evaluation_pb2, model_pb2, tensor_pb2

MAX_FORMS_BYTES: Final = 16 * MAX_FORM_BYTES
"""The most memory of all unfinished forms."""

_SEE_OTHER: Final = 303


class ActsApp:
    """Confirms and does what callers may do. Belongs to the event loop's thread.

    A form is served as a call of the gRPC method that does the same: its handler, the caller's groups and limits,
    ``grpc_server_*`` and the audit log apply to both. The form must come from this server's page, with a token that is
    bound to the caller, the act, and what was served when it was shown.

    Without a file of callers, everyone who reaches the port may act. Then the page must be opened by an address or as
    ``localhost``, as another site could have its own name lead to this port.

    Args:
        methods: The methods that do the acts.
        confirmations: Says what each act will do.
        operations: Does what concerns dead letters.
        renderer: Renders the pages.
        note_change: Called after each change.
        guard: Checks who calls; None if callers are not known.
        read_only: Whether nothing may be changed.
        executor: Runs blocking calls.
    """

    def __init__(
        self,
        methods: ServedMethods,
        confirmations: Confirmations,
        operations: Operations,
        renderer: Renderer,
        *,
        note_change: Callable[[], None],
        guard: Guard | None,
        read_only: bool,
        executor: Executor,
    ) -> None:
        self._served: Mapping[Act, ServedMethod] = {
            **{act: methods[path] for act, path in METHOD_OF.items()},
            **{act: page_method(name, "unary", Group.PROMOTE, guard) for act, name in OWN_METHODS.items()},
        }
        self._confirmations = confirmations
        self._operations = operations
        self._renderer = renderer
        self._note_change = note_change
        self._has_callers = guard is not None
        self._read_only = read_only
        self._executor = executor
        self._tokens = FormTokens()
        self._new_call = partial(
            ActCall,
            monitor=DisconnectMonitor(),
            max_body_bytes=MAX_FORM_BYTES,
            bodies=BodyBudget(MAX_FORMS_BYTES),
            executor=executor,
        )

    def routes(self) -> list[Route]:
        """Return the routes of the forms."""
        return [self._route(act) for act in Act]

    def allowed(self, call: PageCall) -> frozenset[Act]:
        """Return what the caller may do."""
        return frozenset(act for act in Act if self._refusal(call, act) is None)

    async def confirm(self, call: PageCall) -> Response:
        """Return what an act will do, with the form that does it."""
        act = _act(call.request.path_params["act"])
        refusal = self._refusal(call, act)
        if refusal is not None:
            raise PermissionDeniedError(refusal)
        describe = partial(
            self._confirmations.of,
            act,
            step=requested(call, STEP),
            first=requested(call, FIRST),
            second=requested(call, SECOND),
            destination=call.request.query_params.get(DESTINATION, ""),
            letter=requested(call, LETTER),
        )
        confirmation = await self._run(describe)
        token = self._tokens.issue(_name(call), act, confirmation.fields)
        return HTMLResponse(self._renderer.page("confirm.html", call, confirmation=confirmation, token=token))

    def _refusal(self, call: PageCall, act: Act) -> str | None:
        """Return why the caller may not do something; None if it may."""
        method = self._served[act].method
        if call.caller is not None and call.caller.groups.isdisjoint(method.access):
            return method.denial(call.caller)
        try:
            self._check_server(call, method)
        except PermissionDeniedError as error:
            return str(error)
        return None

    def _check_server(self, call: PageCall, method: Method) -> None:
        """Raise PermissionDeniedError if this server does not let anyone do that, or not from this address."""
        if method.admit is not None:
            method.admit(call)
        if self._read_only:
            raise PermissionDeniedError(
                f"this server is read-only, so {method.rpc.name} is refused on its page; restart it without --read-only"
            )
        if not self._has_callers and not is_direct(call.header("host")):
            raise PermissionDeniedError(
                "without a file of callers, the page acts only if it is opened by an address or as localhost; start "
                "the server with --callers to act under another name"
            )

    def _route(self, act: Act) -> Route:
        served = self._served[act]

        async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
            call = self._new_call(Request(scope, receive), served)
            page = _StreamedPage(send)

            async def answer(call: ActCall) -> Response:
                self._check_server(call, served.method)
                check_same_origin(call)
                return await self._do(act, served.method, call, await self._form(act, call), page)

            response = await served.serve(call, answer)
            if response is not None:
                served.sent(call)
            if page.has_begun:
                if response is None:
                    await page.end(self._renderer.failed_part(call))
                return
            whole = self._renderer.failed(call) if response is None else with_headers(response, call)
            await whole(scope, receive, send)

        return Route(f"/acts/{act}", Endpoint(endpoint), methods=["POST"])

    async def _form(self, act: Act, call: PageCall) -> dict[str, str]:
        """Return the checked fields of a form.

        Raises:
            PermissionDeniedError: Its token is not valid.
            NotEvaluableError: Something else is served or pinned than when it was shown.
        """
        fields = fields_of(call.header("content-type") or "", await call.body())
        hidden = {name: value for name, value in fields.items() if name not in (TOKEN, DATASET)}
        self._tokens.check(fields.get(TOKEN, ""), _name(call), act, hidden)
        now = self._confirmations.state()
        if SERVING in hidden and {name: hidden[name] for name in (SERVING, PINNED)} != now:
            raise NotEvaluableError(
                f"meanwhile the serving step is {now[SERVING]} and the pinned one {now[PINNED]}, instead of "
                f"{hidden[SERVING]} and {hidden[PINNED]}; look again and confirm what will happen now"
            )
        return fields

    async def _do(
        self, act: Act, method: Method, call: ActCall, fields: Mapping[str, str], page: _StreamedPage
    ) -> Response:
        if act is Act.EVALUATE:
            step = number(STEP, fields[STEP])
            work = partial(self._evaluate, method, call, fields.get(DATASET, ""), step)
            return await self._work(work, call, page, title=f"step {step} is evaluated", back=f"/checkpoints/{step}")
        if act is Act.COMPARE:
            first, second = number(FIRST, fields[FIRST]), number(SECOND, fields[SECOND])
            work = partial(self._compare, method, call, fields.get(DATASET, ""), (first, second))
            title = f"step {second} beside step {first}"
            return await self._work(work, call, page, title=title, back=f"/checkpoints/{second}")
        if act in OWN_METHODS:
            return await self._letters(act, call, fields)
        request = model_pb2.PromoteRequest(action=_ACTIONS[act])
        if act is Act.PIN:
            request.version.step = number(STEP, fields[STEP])
        await method.answer(request, call)  # type: ignore[misc]  # an `Answer`
        self._note_change()
        return RedirectResponse(f"{root_of(call)}/", _SEE_OTHER)

    async def _letters(self, act: Act, call: PageCall, fields: Mapping[str, str]) -> Response:
        destination = fields[DESTINATION]
        first, last = (number(name, fields[name]) for name in (FIRST_LETTER, LAST_LETTER))
        work = self._operations.resend if act is Act.RESEND else self._operations.drop
        call.audited = {"event": "dead letters", "action": act.value, "destination": destination}
        ids = await self._run(partial(work, destination, first, last))
        call.audited = {**call.audited, "events": len(ids), "first_id": ids[0]}
        self._note_change()
        return RedirectResponse(f"{root_of(call)}/", _SEE_OTHER)

    async def _work(self, work: Work, call: ActCall, page: _StreamedPage, *, title: str, back: str) -> Response:
        """Return the answer, or if it takes a while send a page that shows the progress and ends with the answer."""
        working = Working(work)
        async with working as task:
            if not task.done():
                halves = self._renderer.halves("working.html", call, title=title, back=back)
                await page.begin(streamed("text/html", call), halves)
                async with aclosing(working.lines(task, self._progress_text)) as lines:
                    async for each in lines:
                        await page.send(each)
            outcome = task.result()
            if page.has_begun:
                await page.end(outcome.html)
            return outcome.response

    def _progress_text(self, progress: Progress) -> str:
        return self._renderer.part("told.html", {"progress": progress})

    async def _evaluate(self, method: Method, call: ActCall, dataset: str, step: int, progress: Progress) -> Outcome:
        request = evaluation_pb2.EvaluateDatasetRequest(dataset=dataset, version=tensor_pb2.VersionSelector(step=step))
        async for response in method.answer(request, call):  # type: ignore[union-attr]  # a `Stream`
            if response.HasField("progress"):
                total = response.progress.total_examples if response.progress.HasField("total_examples") else None
                progress.report(response.progress.examples, total)
        root = root_of(call)
        return Outcome(
            response=RedirectResponse(f"{root}/checkpoints/{step}", _SEE_OTHER),
            html=self._renderer.part("evaluated.html", {"root": root, "step": step}),
        )

    async def _compare(
        self, method: Method, call: ActCall, dataset: str, steps: tuple[int, int], progress: Progress
    ) -> Outcome:
        if not dataset:
            raise InvalidInputError("the form names no dataset; choose one")
        options = evaluation_pb2.CompareOptions(
            dataset=dataset, versions=[tensor_pb2.VersionSelector(step=step) for step in steps]
        )
        call.progress = progress.report
        response = await method.answer(_one(evaluation_pb2.CompareRequest(options=options)), call)  # type: ignore[misc]
        compared = [of_response(dataset, response)]
        values = {"first": steps[0], "second": steps[1], "compared": compared, "acts": self.allowed(call)}
        return Outcome(
            response=HTMLResponse(self._renderer.page("comparison.html", call, **values)),
            html=self._renderer.part("compared.html", {"root": root_of(call), **values}),
        )

    async def _run(self, work: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


class _StreamedPage:
    """A page that is sent in pieces.

    Args:
        send: Sends the messages of ASGI.

    Attributes:
        has_begun: Whether its beginning was sent.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._rest = ""
        self.has_begun = False

    async def begin(self, response: Response, halves: tuple[str, str]) -> None:
        """Send the headers and what comes before the lines; keep what comes after them."""
        self.has_begun = True
        first, self._rest = halves
        await self._send({"type": "http.response.start", "status": HTTP_OK, "headers": response.raw_headers})
        await self.send(first)

    async def send(self, html: str) -> None:
        """Send a line."""
        await self._send({"type": "http.response.body", "body": html.encode(), "more_body": True})

    async def end(self, html: str) -> None:
        """Send what takes the place of the lines, and the end."""
        whole = f'</div>\n<div class="result">\n{html}</div>\n{self._rest}'
        await self._send({"type": "http.response.body", "body": whole.encode(), "more_body": False})


_ACTIONS: Final = {
    Act.PIN: model_pb2.PROMOTE_ACTION_PIN,
    Act.UNPIN: model_pb2.PROMOTE_ACTION_UNPIN,
    Act.ROLL_BACK: model_pb2.PROMOTE_ACTION_ROLL_BACK,
}


def _act(text: str) -> Act:
    if text not in set(Act):
        raise VersionNotFoundError(f"the page has no act {text!r}; it has {', '.join(Act)}")
    return Act(text)


def _name(call: PageCall) -> str:
    return "" if call.caller is None else call.caller.name


async def _one(request: evaluation_pb2.CompareRequest) -> AsyncIterator[evaluation_pb2.CompareRequest]:
    yield request
