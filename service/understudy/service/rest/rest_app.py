"""The paths of the REST form and their endpoints."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from understudy.evaluator.evaluator_errors import DrainingError, InvalidInputError
from understudy.oip import inference_pb2
from understudy.service.calls.call import REQUEST_ID, REQUEST_ID_HEADER, CallContext, accept_id
from understudy.service.calls.status import UnsupportedError, failure_of
from understudy.service.handlers.oip.inference_handler import UNSUPPORTED, InferenceHandler
from understudy.service.readiness import Readiness, ReadinessState
from understudy.service.rest.http_messages import (
    CLIENT_CLOSED_REQUEST,
    BodyTooLargeError,
    BodyTooSlowError,
    as_json,
    coding_of,
    decoded,
    failure_response,
    read_body,
)
from understudy.service.rest.infer_json import parse_infer, parse_json, render

HEADER_LENGTH = "inference-header-content-length"
TOO_SLOW = 408
TOO_LARGE = 413
NOT_READY = 400
"""The protocol's status for a server or a model that is not ready."""

MAX_BYTES_AT_ONCE = 32_768
"""Bodies up to this size are parsed and rendered on the event loop; larger ones on another thread."""

_T = TypeVar("_T")

_Endpoint = Callable[[Request], Awaitable[Response]]
_CALL = CallContext(deadline=None)

_REFUSED: Mapping[str, str] = {
    "/v2/repository/models/{model}/load": "RepositoryModelLoad",
    "/v2/repository/models/{model}/unload": "RepositoryModelUnload",
    "/v2/systemsharedmemory/{rest:path}": "SystemSharedMemoryStatus",
    "/v2/cudasharedmemory/{rest:path}": "CudaSharedMemoryStatus",
    "/v2/trace/setting": "TraceSetting",
    "/v2/models/{model}/trace/setting": "TraceSetting",
    "/v2/logging": "LogSettings",
}
"""Unsupported paths, and the gRPC call whose entry in `UNSUPPORTED` applies."""


class RestApp:
    """Serves ``/v2``. Belongs to the event loop's thread.

    Args:
        handler: Handles the requests.
        readiness: The state of the service.
        max_body_bytes: The largest body to accept.
        executor: Parses and renders large bodies, with one thread.
    """

    def __init__(
        self, handler: InferenceHandler, *, readiness: Readiness, max_body_bytes: int, executor: Executor
    ) -> None:
        self._handler = handler
        self._readiness = readiness
        self._max_body_bytes = max_body_bytes
        self._executor = executor

    def routes(self) -> list[Route]:
        """Return the routes."""
        routes = [
            _get("/v2", self.server_metadata),
            _get("/v2/health/live", self.live),
            _get("/v2/health/ready", self.ready),
            _get("/v2/models/stats", self.statistics),
            _post("/v2/repository/index", self.index),
            *(Route(path, _guarded(_refusal(call)), methods=["GET", "POST"]) for path, call in _REFUSED.items()),
        ]
        for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            routes += [
                _get(model, self.model_metadata),
                _get(f"{model}/ready", self.model_ready),
                _get(f"{model}/config", self.config),
                _get(f"{model}/stats", self.statistics),
                _post(f"{model}/infer", self.infer),
            ]
        return routes

    async def live(self, request: Request) -> Response:
        """Report that the process responds."""
        del request
        return Response()

    async def ready(self, request: Request) -> Response:
        """Report whether a version is serving."""
        del request
        answer = await self._handler.server_ready(inference_pb2.ServerReadyRequest(), _CALL)
        return Response(status_code=200 if answer.ready else NOT_READY)

    async def server_metadata(self, request: Request) -> Response:
        """Describe the server."""
        del request
        answer = await self._handler.server_metadata(inference_pb2.ServerMetadataRequest(), _CALL)
        return JSONResponse(as_json(answer))

    async def model_ready(self, request: Request) -> Response:
        """Report whether a version is loaded."""
        answer = await self._handler.model_ready(inference_pb2.ModelReadyRequest(**_model(request)), _CALL)
        return Response(status_code=200 if answer.ready else NOT_READY)

    async def model_metadata(self, request: Request) -> Response:
        """Describe the inputs and outputs of a version."""
        answer = await self._handler.model_metadata(inference_pb2.ModelMetadataRequest(**_model(request)), _CALL)
        return JSONResponse(as_json(answer))

    async def config(self, request: Request) -> Response:
        """Return the configuration of a version."""
        answer = await self._handler.model_config(inference_pb2.ModelConfigRequest(**_model(request)), _CALL)
        return JSONResponse(as_json(answer.config))

    async def statistics(self, request: Request) -> Response:
        """Return the statistics of inferences."""
        answer = await self._handler.model_statistics(inference_pb2.ModelStatisticsRequest(**_model(request)), _CALL)
        return JSONResponse(as_json(answer))

    async def index(self, request: Request) -> Response:
        """List every version."""
        asked = await self._json(request)
        message = inference_pb2.RepositoryIndexRequest(ready=asked.get("ready") is True)
        answer = await self._handler.repository_index(message, _CALL)
        return JSONResponse(as_json(answer)["models"])

    async def infer(self, request: Request) -> Response:
        """Predict one batch."""
        if self._readiness.state is ReadinessState.DRAINING:
            raise DrainingError(ReadinessState.DRAINING.value)
        path = _model(request)
        self._handler.check_model(path["name"])
        body = await self._body(request)
        parse = functools.partial(
            parse_infer,
            body,
            _json_bytes(request),
            model_name=path["name"],
            model_version=path.get("version", ""),
            check_forms=self._handler.check_forms,
        )
        parsed = await self._brief_or_on_a_thread(parse, size=len(body))
        prediction = await self._handler.infer(parsed.inference, _CALL)
        size = sum(output.nbytes for output in prediction.outputs.values())
        content, json_bytes = await self._brief_or_on_a_thread(functools.partial(render, parsed, prediction), size=size)
        if json_bytes is None:
            return Response(content, media_type="application/json")
        return Response(content, media_type="application/octet-stream", headers={HEADER_LENGTH: str(json_bytes)})

    async def _json(self, request: Request) -> Mapping[str, Any]:
        body = await self._body(request)
        return await self._brief_or_on_a_thread(functools.partial(parse_json, body), size=len(body))

    async def _body(self, request: Request) -> bytes:
        body = await read_body(request, max_bytes=self._max_body_bytes)
        coding = coding_of(request)
        decode = functools.partial(decoded, body, coding, max_bytes=self._max_body_bytes)
        return (
            decode()
            if coding == "identity"
            else await asyncio.get_running_loop().run_in_executor(self._executor, decode)
        )

    async def _brief_or_on_a_thread(self, work: Callable[[], _T], *, size: int) -> _T:
        """Run work on this many bytes: here, or on another thread if there are many."""
        if size <= MAX_BYTES_AT_ONCE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def _get(path: str, endpoint: _Endpoint) -> Route:
    return Route(path, _guarded(endpoint), methods=["GET"])


def _post(path: str, endpoint: _Endpoint) -> Route:
    return Route(path, _guarded(endpoint), methods=["POST"])


def _guarded(endpoint: _Endpoint) -> _Endpoint:
    """Set an id for every request, and turn exceptions into responses."""

    @functools.wraps(endpoint)
    async def guarded(request: Request) -> Response:
        identifier = accept_id(request.headers.get(REQUEST_ID_HEADER))
        REQUEST_ID.set(identifier)
        response = await _answer(endpoint, request)
        response.headers[REQUEST_ID_HEADER] = identifier
        return response

    return guarded


async def _answer(endpoint: _Endpoint, request: Request) -> Response:
    try:
        return await endpoint(request)
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except BodyTooSlowError as error:
        return JSONResponse({"error": str(error)}, status_code=TOO_SLOW, headers={"connection": "close"})
    except BodyTooLargeError as error:
        return JSONResponse({"error": str(error)}, status_code=TOO_LARGE)
    except Exception as error:  # noqa: BLE001 - failure_of logs unexpected errors
        return failure_response(failure_of(error))


def _refusal(call: str) -> _Endpoint:
    async def refuse(_request: Request) -> Response:
        raise UnsupportedError(UNSUPPORTED[call])

    return refuse


def _model(request: Request) -> dict[str, Any]:
    """Return the model and the version in the path, if present."""
    names = {"name": "model", "version": "version"}
    return {field: request.path_params[name] for field, name in names.items() if name in request.path_params}


def _json_bytes(request: Request) -> int | None:
    header = request.headers.get(HEADER_LENGTH)
    if header is None:
        return None
    if not (header.isascii() and header.isdigit() and len(header) < len(str(2**63))):
        raise InvalidInputError(f"Inference-Header-Content-Length is {header!r}; a number of bytes was expected")
    return int(header)
