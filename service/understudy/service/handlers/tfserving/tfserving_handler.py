"""The RPCs of TensorFlow Serving's PredictionService and ModelService."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from google.protobuf.any_pb2 import Any as AnyMessage
from tensorflow.core.framework import tensor_shape_pb2
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_pb2,
    predict_pb2,
)

from understudy.evaluator.evaluator_errors import InvalidInputError, VersionNotFoundError
from understudy.evaluator.types import Array, TensorSpec, Version, VersionStatus
from understudy.service.calls.methods import CallContext
from understudy.service.calls.status import Code
from understudy.service.handlers.oip.inference import MAX_ELEMENTS_AT_ONCE, elements_in
from understudy.service.handlers.served_model import ServedModel, label_of, wanted_outputs
from understudy.service.handlers.tfserving import tensors
from understudy.service.predictor import Predictor

SIGNATURE_NAME = "serving_default"
METHOD_NAME = "tensorflow/serving/predict"
SIGNATURE_FIELD = "signature_def"

_EXAMPLES = "tf.Example inputs are not supported; send the model's own inputs to Predict"
_LOADING = "the evaluator decides what is loaded; see understudy.v1.ModelService.Promote and --version-policy"
UNSUPPORTED: Mapping[str, str] = {
    "Classify": _EXAMPLES,
    "Regress": _EXAMPLES,
    "MultiInference": _EXAMPLES,
    "HandleReloadConfigRequest": _LOADING,
}
"""The protocol's calls that this server does not support, and what to do instead."""

_ANY_LENGTH = -1


class TfServingHandler:
    """Runs and describes the model over TensorFlow Serving's protocol. Belongs to the event loop's thread.

    Args:
        model: The model.
        predictor: Starts its predictions.
        max_tensor_bytes: The limit of the decoded arrays of a request, in bytes.
        executor: Decodes the arrays of large requests, with one thread.
    """

    def __init__(self, model: ServedModel, predictor: Predictor, *, max_tensor_bytes: int, executor: Executor) -> None:
        self._model = model
        self._predictor = predictor
        self._max_tensor_bytes = max_tensor_bytes
        self._executor = executor

    async def predict(self, request: predict_pb2.PredictRequest, call: CallContext) -> predict_pb2.PredictResponse:
        """Predict one batch; cancel it if the caller disconnects before it reaches a device."""
        version = self._version_of(request.model_spec)
        _check_signature(request.model_spec)
        inputs = await self._inputs_of(request, version)
        prediction = await self._predictor.begin(inputs, version=version, deadline=call.deadline)
        outputs = wanted_outputs(prediction, tuple(request.output_filter))
        return predict_pb2.PredictResponse(
            model_spec=self._spec(prediction.step, signature_name=SIGNATURE_NAME),
            outputs={name: tensors.encode(array) for name, array in outputs.items()},
        )

    async def _inputs_of(self, request: predict_pb2.PredictRequest, version: Version) -> dict[str, Array]:
        """Check that the inputs fit the model, then decode them, on another thread if they are large."""
        forms = {name: tensors.form_of(request.inputs[name], name=f"input {name!r}") for name in request.inputs}
        self._predictor.check_forms(forms, version=version)
        size = sum(map(tensors.size_of, forms.values()))
        if size > self._max_tensor_bytes:
            raise InvalidInputError(f"the inputs have {size} bytes; at most {self._max_tensor_bytes} are taken at once")
        if elements_in(forms) <= MAX_ELEMENTS_AT_ONCE:
            return self._decoded(request)
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._decoded, request)

    def _decoded(self, request: predict_pb2.PredictRequest) -> dict[str, Array]:
        return {
            name: tensors.decode(request.inputs[name], max_bytes=self._max_tensor_bytes, name=f"input {name!r}")
            for name in sorted(request.inputs)
        }

    def check_admission(self, call: CallContext) -> None:
        """Refuse a prediction before it is parsed, if the refusal is certain; see `Predictor.check_admission`."""
        self._predictor.check_admission(call.deadline)

    async def get_model_metadata(
        self, request: get_model_metadata_pb2.GetModelMetadataRequest, call: CallContext
    ) -> get_model_metadata_pb2.GetModelMetadataResponse:
        """Return the one signature of a version."""
        del call
        version = self._version_of(request.model_spec)
        fields = list(request.metadata_field)
        if fields != [SIGNATURE_FIELD]:
            raise InvalidInputError(f"metadata_field is {fields}; there is {[SIGNATURE_FIELD]}")
        described = self._model.describe(version)
        signature = meta_graph_pb2.SignatureDef(
            inputs=_tensor_infos(described.signature.inputs),
            outputs=_tensor_infos(described.signature.outputs),
            method_name=METHOD_NAME,
        )
        packed = AnyMessage()
        packed.Pack(get_model_metadata_pb2.SignatureDefMap(signature_def={SIGNATURE_NAME: signature}))
        return get_model_metadata_pb2.GetModelMetadataResponse(
            model_spec=self._spec(described.step), metadata={SIGNATURE_FIELD: packed}
        )

    async def get_model_status(
        self, request: get_model_status_pb2.GetModelStatusRequest, call: CallContext
    ) -> get_model_status_pb2.GetModelStatusResponse:
        """Return the state of one version, or of every version, newest first."""
        del call
        version = self._version_of(request.model_spec)
        statuses = self._model.statuses()
        if request.model_spec.WhichOneof("version_choice") is not None:
            step = self._model.step_of(version)
            statuses = [status for status in statuses if status.step == step]
            if not statuses:
                known = [status.step for status in self._model.statuses()]
                raise VersionNotFoundError(f"there is no version {step}; there are {known}")
        return get_model_status_pb2.GetModelStatusResponse(
            model_version_status=[_version_status(status) for status in statuses]
        )

    def _version_of(self, spec: model_pb2.ModelSpec) -> Version:
        self._model.check_name(spec.name)
        match spec.WhichOneof("version_choice"):
            case "version":
                return _step_of(spec.version.value)
            case "version_label":
                return label_of(spec.version_label)
            case _:
                return "serving"

    def _spec(self, step: int, **more: str) -> model_pb2.ModelSpec:
        return model_pb2.ModelSpec(name=self._model.name, version={"value": step}, **more)


def _step_of(number: int) -> int:
    if number < 0:
        raise InvalidInputError(f"model_spec.version is {number}; a step is a number from 0 up")
    return number


def _check_signature(spec: model_pb2.ModelSpec) -> None:
    if spec.signature_name not in {"", SIGNATURE_NAME}:
        raise InvalidInputError(f"there is no signature {spec.signature_name!r}; there is {SIGNATURE_NAME!r}")


def _tensor_infos(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    return {
        spec.name: meta_graph_pb2.TensorInfo(
            name=spec.name,
            dtype=tensors.type_of(spec),
            tensor_shape=tensor_shape_pb2.TensorShapeProto(
                dim=[
                    tensor_shape_pb2.TensorShapeProto.Dim(size=_ANY_LENGTH if length is None else length)
                    for length in spec.shape
                ]
            ),
        )
        for spec in specs
    }


def _version_status(status: VersionStatus) -> Any:
    message = get_model_status_pb2.ModelVersionStatus(version=status.step, state=status.state.value)
    if status.error:
        message.status.error_code = Code.FAILED_PRECONDITION
        message.status.error_message = status.error
    return message
