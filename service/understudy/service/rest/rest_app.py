"""The paths of the REST form and of the metrics, and their endpoints."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from understudy.evaluator.evaluator_errors import DrainingError, InvalidInputError
from understudy.oip import inference_pb2
from understudy.service.handlers.inference_handler import UNSUPPORTED, InferenceHandler
from understudy.service.handlers.status_handlers import MetricsHandler
from understudy.service.readiness import Readiness, ReadinessState
from understudy.service.rest.infer_json import parse_infer, render
from understudy.service.rest.json_values import as_json, parse_json
from understudy.service.rest.rest_call import RestCall
from understudy.service.rest.rest_routes import Answer, RestRoutes
from understudy.v1 import metrics_pb2

HEADER_LENGTH: Final = "inference-header-content-length"
NOT_READY: Final = 400
"""The protocol's status for a server or a model that is not ready."""

_SERVICE: Final = inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
_METRICS: Final = metrics_pb2.DESCRIPTOR.services_by_name["MetricsService"].full_name

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
    """Serves ``/v2`` and ``/metrics``. Belongs to the event loop's thread.

    Args:
        handler: Handles the requests.
        metrics: Returns the metrics.
        routes: Makes the routes.
        readiness: The state of the service.
    """

    def __init__(
        self, handler: InferenceHandler, metrics: MetricsHandler, routes: RestRoutes, *, readiness: Readiness
    ) -> None:
        self._handler = handler
        self._metrics = metrics
        self._routes = routes
        self._readiness = readiness

    def routes(self) -> list[Route]:
        """Return the routes."""
        routes = [
            self._routes.get("/metrics", f"/{_METRICS}/GetMetrics", self.metrics),
            self._get("/v2", "ServerMetadata", self.server_metadata),
            self._get("/v2/health/live", "ServerLive", self.live),
            self._get("/v2/health/ready", "ServerReady", self.ready),
            self._get("/v2/models/stats", "ModelStatistics", self.statistics),
            self._post("/v2/repository/index", "RepositoryIndex", self.index),
            *(self._routes.refusal(path, f"/{_SERVICE}/{name}", UNSUPPORTED[name]) for path, name in _REFUSED.items()),
        ]
        for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            routes += [
                self._get(model, "ModelMetadata", self.model_metadata),
                self._get(f"{model}/ready", "ModelReady", self.model_ready),
                self._get(f"{model}/config", "ModelConfig", self.config),
                self._get(f"{model}/stats", "ModelStatistics", self.statistics),
                self._post(f"{model}/infer", "ModelInfer", self.infer),
            ]
        return routes

    async def metrics(self, call: RestCall) -> Response:
        """Return the metrics, in OpenMetrics if the caller accepts it."""
        content, content_type = await self._metrics.exposition(call.header("accept") or "")
        return Response(content, headers={"content-type": content_type})

    async def live(self, call: RestCall) -> Response:
        """Report that the process responds."""
        del call
        return Response()

    async def ready(self, call: RestCall) -> Response:
        """Report whether a version is serving."""
        answer = await self._handler.server_ready(inference_pb2.ServerReadyRequest(), call)
        return Response(status_code=200 if answer.ready else NOT_READY)

    async def server_metadata(self, call: RestCall) -> Response:
        """Describe the server."""
        answer = await self._handler.server_metadata(inference_pb2.ServerMetadataRequest(), call)
        return JSONResponse(as_json(answer))

    async def model_ready(self, call: RestCall) -> Response:
        """Report whether a version is loaded."""
        answer = await self._handler.model_ready(inference_pb2.ModelReadyRequest(**_model(call)), call)
        return Response(status_code=200 if answer.ready else NOT_READY)

    async def model_metadata(self, call: RestCall) -> Response:
        """Describe the inputs and outputs of a version."""
        answer = await self._handler.model_metadata(inference_pb2.ModelMetadataRequest(**_model(call)), call)
        return JSONResponse(as_json(answer))

    async def config(self, call: RestCall) -> Response:
        """Return the configuration of a version."""
        answer = await self._handler.model_config(inference_pb2.ModelConfigRequest(**_model(call)), call)
        return JSONResponse(as_json(answer.config))

    async def statistics(self, call: RestCall) -> Response:
        """Return the statistics of inferences."""
        answer = await self._handler.model_statistics(inference_pb2.ModelStatisticsRequest(**_model(call)), call)
        return JSONResponse(as_json(answer))

    async def index(self, call: RestCall) -> Response:
        """List every version."""
        body = await call.body()
        asked = await call.brief_or_on_a_thread(functools.partial(parse_json, body), size=len(body))
        message = inference_pb2.RepositoryIndexRequest(ready=asked.get("ready") is True)
        answer = await self._handler.repository_index(message, call)
        return JSONResponse(as_json(answer)["models"])

    async def infer(self, call: RestCall) -> Response:
        """Predict one batch."""
        if self._readiness.state is ReadinessState.DRAINING:
            raise DrainingError(ReadinessState.DRAINING.value)
        path = _model(call)
        self._handler.check_model(path["name"])
        body = await call.body()
        parse = functools.partial(
            parse_infer,
            body,
            _json_bytes(call),
            model_name=path["name"],
            model_version=path.get("version", ""),
            check_forms=self._handler.check_forms,
        )
        parsed = await call.brief_or_on_a_thread(parse, size=len(body))
        begun = self._handler.infer(parsed.inference, call)
        parsed = dataclasses.replace(parsed, inference=parsed.inference._replace(inputs={}))
        del body, parse  # they do not wait with the call
        prediction = await begun
        size = sum(output.nbytes for output in prediction.outputs.values())
        content, json_bytes = await call.brief_or_on_a_thread(functools.partial(render, parsed, prediction), size=size)
        if json_bytes is None:
            return Response(content, media_type="application/json")
        return Response(content, media_type="application/octet-stream", headers={HEADER_LENGTH: str(json_bytes)})

    def _get(self, path: str, name: str, answer: Answer) -> Route:
        return self._routes.get(path, f"/{_SERVICE}/{name}", answer)

    def _post(self, path: str, name: str, answer: Answer) -> Route:
        return self._routes.post(path, f"/{_SERVICE}/{name}", answer)


def _model(call: RestCall) -> dict[str, Any]:
    """Return the model and the version in the path, if present."""
    names = {"name": "model", "version": "version"}
    path = call.request.path_params
    return {field: path[name] for field, name in names.items() if name in path}


def _json_bytes(call: RestCall) -> int | None:
    header = call.header(HEADER_LENGTH)
    if header is None:
        return None
    if not (header.isascii() and header.isdigit() and len(header) < len(str(2**63))):
        raise InvalidInputError(f"Inference-Header-Content-Length is {header!r}; a number of bytes was expected")
    return int(header)
