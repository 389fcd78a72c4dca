"""The paths of TensorFlow Serving's REST API, and their endpoints."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.message import Message
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tensorflow_serving.apis import get_model_metadata_pb2, get_model_status_pb2, model_pb2

from understudy.evaluator.evaluator_errors import DrainingError
from understudy.service.handlers.tfserving_handler import SIGNATURE_FIELD, UNSUPPORTED, TfServingHandler
from understudy.service.readiness import Readiness, ReadinessState
from understudy.service.rest.rest_call import RestCall
from understudy.service.rest.rest_routes import RestRoutes
from understudy.service.rest.tfserving_json import parse_predict, render_predict
from understudy.service.served_model import version_of

_PREDICTIONS: Final = "/tensorflow.serving.PredictionService"
_MODELS: Final = "/tensorflow.serving.ModelService"
_PLACES: Final = ("/v1/models/{model}", "/v1/models/{model}/versions/{version}", "/v1/models/{model}/labels/{label}")


class TfServingRestApp:
    """Serves ``/v1/models``. Belongs to the event loop's thread.

    Args:
        handler: Handles the requests.
        routes: Makes the routes.
        readiness: The state of the service.
    """

    def __init__(self, handler: TfServingHandler, routes: RestRoutes, *, readiness: Readiness) -> None:
        self._handler = handler
        self._routes = routes
        self._readiness = readiness

    def routes(self) -> list[Route]:
        """Return the routes."""
        found = []
        for model in _PLACES:
            found += [
                self._routes.post(f"{model}:predict", f"{_PREDICTIONS}/Predict", self.predict),
                *(
                    self._routes.refusal(f"{model}:{name.lower()}", f"{_PREDICTIONS}/{name}", UNSUPPORTED[name])
                    for name in ("Classify", "Regress")
                ),
                self._routes.get(f"{model}/metadata", f"{_PREDICTIONS}/GetModelMetadata", self.metadata),
                self._routes.get(model, f"{_MODELS}/GetModelStatus", self.status),
            ]
        return found

    async def predict(self, call: RestCall) -> Response:
        """Predict one batch."""
        if self._readiness.state is ReadinessState.DRAINING:
            raise DrainingError(ReadinessState.DRAINING.value)
        spec = _model_spec(call)
        specs = self._handler.inputs(spec)
        body = await call.body()
        check_forms = functools.partial(self._handler.check_forms, spec)
        parse = functools.partial(parse_predict, body, specs, check_forms)
        values = await call.brief_or_on_a_thread(parse, size=len(body))
        by_example = values.by_example
        spec.signature_name = values.signature_name
        begun = self._handler.predict_arrays(values.inputs, spec, call)
        del body, parse, values  # they do not wait with the call
        outputs = (await begun).outputs
        render = functools.partial(render_predict, outputs, by_example=by_example)
        content = await call.brief_or_on_a_thread(render, size=sum(array.nbytes for array in outputs.values()))
        return Response(content, media_type="application/json")

    async def status(self, call: RestCall) -> Response:
        """Return the state of one version, or of every version."""
        request = get_model_status_pb2.GetModelStatusRequest(model_spec=_model_spec(call))
        answer = await self._handler.get_model_status(request, call)
        for version in answer.model_version_status:
            version.status.SetInParent()  # it is there for versions without an error, too
        return JSONResponse(_as_json(answer))

    async def metadata(self, call: RestCall) -> Response:
        """Return the signature of a version."""
        request = get_model_metadata_pb2.GetModelMetadataRequest(
            model_spec=_model_spec(call), metadata_field=[SIGNATURE_FIELD]
        )
        answer = await self._handler.get_model_metadata(request, call)
        signatures = get_model_metadata_pb2.SignatureDefMap()
        answer.metadata[SIGNATURE_FIELD].Unpack(signatures)
        return JSONResponse(
            {"model_spec": _as_json(answer.model_spec), "metadata": {SIGNATURE_FIELD: _as_json(signatures)}}
        )


def _model_spec(call: RestCall) -> model_pb2.ModelSpec:
    """Return the model and the version in the path."""
    path: Mapping[str, str] = call.request.path_params
    spec = model_pb2.ModelSpec(name=path["model"])
    if "label" in path:
        spec.version_label = path["label"]
    elif "version" in path:
        version = version_of(path["version"])
        if isinstance(version, int):
            spec.version.value = version
        else:
            spec.version_label = version
    return spec


def _as_json(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return found
