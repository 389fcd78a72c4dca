"""TensorFlow Serving's protocol: the RPCs of its PredictionService and ModelService, and its TensorProtos.

Its messages are in ``tensorflow-serving-api``, which imports TensorFlow. `tensorflow.make_ndarray` trusts its argument
and would fill a shape of terabytes from one value without a check; so this module decodes messages from the network.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from google.protobuf.any_pb2 import Any as AnyMessage
from tensorflow.core.framework import tensor_pb2, tensor_shape_pb2, types_pb2
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow_serving.apis import get_model_metadata_pb2, get_model_status_pb2, model_pb2, predict_pb2

from understudy.evaluator.evaluator_errors import InvalidInputError, VersionNotFoundError, available_steps
from understudy.evaluator.types import Array, ArrayForm, Arrays, Prediction, TensorSpec, Version, VersionStatus
from understudy.service.calls.methods import CallContext, Encoded, ZeroCopyCodec
from understudy.service.calls.parsing import ZeroCopyMessage, joined, nested
from understudy.service.calls.status import Code
from understudy.service.handlers.inference import MAX_ELEMENTS_AT_ONCE, check_kept, elements_in
from understudy.service.handlers.predict_codec import bytes_in, is_large
from understudy.service.handlers.prediction_handler import Predictor
from understudy.service.served_model import ServedModel, label_of, wanted_outputs
from understudy.wire import (
    Contents,
    WireError,
    check_shape,
    fixed_size_dtype,
    from_content,
    from_elements,
    numbers,
    strings,
)

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


class PredictedOutputs(NamedTuple):
    """The response to a request: what it says of the model, and the requested outputs."""

    spec: model_pb2.ModelSpec
    prediction: Prediction


class TfPredictCodec(ZeroCopyCodec):
    """The codec of Predict."""

    def __init__(self) -> None:
        super().__init__(predict_pb2.PredictRequest)

    def encode(self, response: PredictedOutputs) -> Encoded:  # type: ignore[override]  # of this method only
        """See `understudy.service.calls.methods.Codec`."""
        if is_large(response.prediction):
            return lambda: joined(_pieces_of(response))
        outputs = {name: encode_tensor(array) for name, array in response.prediction.outputs.items()}
        data: bytes = predict_pb2.PredictResponse(model_spec=response.spec, outputs=outputs).SerializeToString()
        return data


def _pieces_of(response: PredictedOutputs) -> list[bytes | memoryview]:
    """Return the bytes of a response without copying arrays of numbers."""
    pieces: list[bytes | memoryview] = [predict_pb2.PredictResponse(model_spec=response.spec).SerializeToString()]
    for name, array in response.prediction.outputs.items():
        if array.dtype.kind == "O":
            tensor: list[bytes | memoryview] = [encode_tensor(array).SerializeToString()]
        else:
            form = tensor_pb2.TensorProto(dtype=_TYPES[array.dtype.name], tensor_shape=_message_of(array.shape))
            tensor = [form.SerializeToString(), *nested(_CONTENT, [bytes_in(array)])]
        pieces += nested(_OUTPUTS, [*nested(_KEY, [name.encode()]), *nested(_VALUE, tensor)])
    return pieces


_KEY: Final = 1
_VALUE: Final = 2
_OUTPUTS: Final = predict_pb2.PredictResponse.OUTPUTS_FIELD_NUMBER
_CONTENT: Final = tensor_pb2.TensorProto.TENSOR_CONTENT_FIELD_NUMBER


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

    async def predict(
        self, received: predict_pb2.PredictRequest | ZeroCopyMessage, call: CallContext
    ) -> PredictedOutputs:
        """Predict one batch; cancel it if the caller disconnects before it reaches a device."""
        parsed = received if isinstance(received, ZeroCopyMessage) else ZeroCopyMessage(received, {})
        request: predict_pb2.PredictRequest = parsed.message
        version = self._version_of(request.model_spec)
        _check_signature(request.model_spec)
        inputs = await self._inputs_of(parsed, version)
        names = tuple(request.output_filter)
        check_kept("", names)
        begun = self._predictor.begin(inputs, call, version=version, deadline=call.deadline)
        del received, parsed, request, inputs  # the message does not wait with the call
        prediction = await begun
        outputs = wanted_outputs(prediction, names)
        spec = self._spec(prediction.step, signature_name=SIGNATURE_NAME)
        return PredictedOutputs(spec, prediction._replace(outputs=outputs))

    def inputs(self, spec: model_pb2.ModelSpec) -> Sequence[TensorSpec]:
        """Return the inputs of a version.

        Raises:
            UnknownModelError: The model has another name.
            VersionNotFoundError: The version does not exist or is not loaded.
            NotReadyError: Nothing is serving yet.
        """
        return self._model.evaluator.metadata(self._version_of(spec)).signature.inputs

    def check_forms(self, spec: model_pb2.ModelSpec, forms: Mapping[str, ArrayForm]) -> None:
        """Raise InvalidInputError if inputs, before they are built, do not fit a version. Thread-safe."""
        self._model.evaluator.check_forms(forms, version=self._version_of(spec))

    def predict_arrays(
        self, inputs: Arrays, spec: model_pb2.ModelSpec, call: CallContext
    ) -> asyncio.Future[Prediction]:
        """Start a prediction of arrays ``[examples, ...]``; cancelling the future cancels it."""
        _check_signature(spec)
        return self._predictor.begin(inputs, call, version=self._version_of(spec), deadline=call.deadline)

    async def _inputs_of(self, parsed: ZeroCopyMessage, version: Version) -> dict[str, Array]:
        """Check that the inputs fit the model, then decode them, on another thread if they are large."""
        sent = parsed.message.inputs
        forms = {name: form_of(sent[name], name=f"input {name!r}") for name in sent}
        self._model.evaluator.check_forms(forms, version=version)
        size = sum(map(size_of, forms.values()))
        if size > self._max_tensor_bytes:
            raise InvalidInputError(f"the inputs have {size} bytes; at most {self._max_tensor_bytes} are taken at once")
        if elements_in(forms) <= MAX_ELEMENTS_AT_ONCE:
            return self._decoded(parsed)
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._decoded, parsed)

    def _decoded(self, parsed: ZeroCopyMessage) -> dict[str, Array]:
        sent, contents = parsed.message.inputs, parsed.contents
        return {
            name: decode_tensor(sent[name], max_bytes=self._max_tensor_bytes, name=f"input {name!r}", contents=contents)
            for name in sorted(sent)
        }

    def check_admission(self, call: CallContext) -> None:
        """Refuse a prediction before it is parsed, if the refusal is certain; see `Evaluator.check_admission`."""
        self._model.evaluator.check_admission(call.deadline, caller=call.caller_key)

    async def get_model_metadata(
        self, request: get_model_metadata_pb2.GetModelMetadataRequest, call: CallContext
    ) -> get_model_metadata_pb2.GetModelMetadataResponse:
        """Return the one signature of a version."""
        del call
        version = self._version_of(request.model_spec)
        fields = list(request.metadata_field)
        if fields != [SIGNATURE_FIELD]:
            raise InvalidInputError(f"metadata_field is {fields}; there is {[SIGNATURE_FIELD]}")
        described = self._model.evaluator.metadata(version)
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
        statuses = self._model.evaluator.status()
        if request.model_spec.WhichOneof("version_choice") is not None:
            step = self._model.step_of(version)
            statuses = [status for status in statuses if status.step == step]
            if not statuses:
                known = [status.step for status in self._model.evaluator.status()]
                raise VersionNotFoundError(f"there is no version {step}; {available_steps(known, step)}")
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
            dtype=type_of(spec),
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


STRING = "string"
_POINTER_BYTES = 8

_TYPES: Mapping[str, int] = {
    "bool": types_pb2.DT_BOOL,
    "uint8": types_pb2.DT_UINT8,
    "uint16": types_pb2.DT_UINT16,
    "uint32": types_pb2.DT_UINT32,
    "uint64": types_pb2.DT_UINT64,
    "int8": types_pb2.DT_INT8,
    "int16": types_pb2.DT_INT16,
    "int32": types_pb2.DT_INT32,
    "int64": types_pb2.DT_INT64,
    "float16": types_pb2.DT_HALF,
    "bfloat16": types_pb2.DT_BFLOAT16,
    "float32": types_pb2.DT_FLOAT,
    "float64": types_pb2.DT_DOUBLE,
    STRING: types_pb2.DT_STRING,
}
_NAMES: Mapping[int, str] = {number: name for name, number in _TYPES.items()}

_VALUE_FIELDS: Mapping[str, str] = {
    "bool": "bool_val",
    "uint32": "uint32_val",
    "uint64": "uint64_val",
    "int64": "int64_val",
    "float16": "half_val",
    "bfloat16": "half_val",
    "float32": "float_val",
    "float64": "double_val",
    STRING: "string_val",
}
_SMALL_INTEGERS_FIELD = "int_val"
_BITS = "uint16"
_SCALAR_FIELDS = frozenset({*_VALUE_FIELDS.values(), _SMALL_INTEGERS_FIELD})


def decode_tensor(
    tensor: tensor_pb2.TensorProto, *, max_bytes: int, name: str, contents: Contents = MappingProxyType({})
) -> Array:
    """Return a message as a read-only array.

    Elements are in ``tensor_content`` or in the field of their type. In that field, as in TensorFlow, the last element
    fills in for missing ones, or zero if there is none.

    Args:
        tensor: The tensor as received.
        max_bytes: The largest array to build.
        name: What to call the tensor in errors.
        contents: The contents of tensors that stand elsewhere; see `understudy.wire.decode`.

    Raises:
        WireError: The type is unknown, the shape is impossible or too large, or elements are in two fields, in another
            type's field, too many for the shape, or out of range.
    """
    dtype = _dtype_of(tensor, name)
    shape = _shape_of(tensor, name)
    field = _VALUE_FIELDS.get(dtype, _SMALL_INTEGERS_FIELD)
    came = {other.name for other, _ in tensor.ListFields()} & _SCALAR_FIELDS
    if tensor.tensor_content:
        if came:
            raise WireError(f"{name}: got both tensor_content and {', '.join(sorted(came))}; send one of them")
        if dtype == STRING:
            raise WireError(f"{name}: DT_STRING elements belong in {field}, but got tensor_content")
        content = tensor.tensor_content
        return from_content(contents.get(content, content) if contents else content, dtype, shape, name=name)
    if came - {field}:
        raise WireError(f"{name}: {_type_name(dtype)} elements belong in {field}, but got {', '.join(sorted(came))}")
    values = getattr(tensor, field)
    if len(values) > math.prod(shape):
        raise WireError(
            f"{name}: shape {list(shape)} needs {math.prod(shape)} elements in {field}, but got {len(values)}"
        )
    return _filled(_elements(values, dtype, name), shape, max_bytes, name=name, field=field)


def form_of(tensor: tensor_pb2.TensorProto, *, name: str) -> ArrayForm:
    """Return the declared form of a message; raise WireError if the type is unknown or the shape impossible."""
    return ArrayForm(_dtype_of(tensor, name), _shape_of(tensor, name))


def size_of(form: ArrayForm) -> int:
    """Return the size in bytes of the array that `decode_tensor` builds, without the contents of strings."""
    return math.prod(form.shape) * (_POINTER_BYTES if form.dtype == STRING else fixed_size_dtype(form.dtype).itemsize)


def encode_tensor(array: Array) -> tensor_pb2.TensorProto:
    """Return an array as a message: strings in ``string_val``, all else in ``tensor_content``."""
    shape = _message_of(array.shape)
    if array.dtype.kind == "O":
        return tensor_pb2.TensorProto(dtype=_TYPES[STRING], tensor_shape=shape, string_val=array.ravel().tolist())
    content = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return tensor_pb2.TensorProto(dtype=_TYPES[array.dtype.name], tensor_shape=shape, tensor_content=content)


def _message_of(shape: Sequence[int]) -> tensor_shape_pb2.TensorShapeProto:
    return tensor_shape_pb2.TensorShapeProto(
        dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=length) for length in shape]
    )


def type_of(spec: TensorSpec) -> int:
    """Return TensorFlow's DataType of a signature's dtype."""
    return _TYPES[spec.dtype]


def _dtype_of(tensor: tensor_pb2.TensorProto, name: str) -> str:
    try:
        return _NAMES[tensor.dtype]
    except KeyError:
        known = ", ".join(_type_name(dtype) for dtype in _TYPES)
        raise WireError(f"{name}: data type number {tensor.dtype} cannot be served; expected one of {known}") from None


def _type_name(dtype: str) -> str:
    return str(types_pb2.DataType.Name(_TYPES[dtype]))


def _shape_of(tensor: tensor_pb2.TensorProto, name: str) -> tuple[int, ...]:
    if tensor.tensor_shape.unknown_rank:
        raise WireError(f"{name}: the shape is of unknown rank; say the length of every axis")
    shape = tuple(dimension.size for dimension in tensor.tensor_shape.dim)
    check_shape(shape, name=name)
    return shape


def _elements(values: Sequence[Any], dtype: str, name: str) -> Array:
    if dtype == STRING:
        return strings(values)
    try:
        if _VALUE_FIELDS.get(dtype) == "half_val":
            return numbers(values, _BITS).view(fixed_size_dtype(dtype))  # 16-bit patterns are encoded as integers
        return numbers(values, dtype)
    except OverflowError as error:
        raise WireError(f"{name}: an element does not fit {_type_name(dtype)}: {error}") from None


def _filled(flat: Array, shape: tuple[int, ...], max_bytes: int, *, name: str, field: str) -> Array:
    expected = math.prod(shape)
    if len(flat) < expected:
        needed = expected * flat.dtype.itemsize
        if needed > max_bytes:
            raise WireError(f"{name}: shape {list(shape)} needs {needed} bytes; at most {max_bytes} are taken")
        last = flat[-1:] if len(flat) else _zero(flat.dtype)
        flat = np.concatenate([flat, np.broadcast_to(last, expected - len(flat))])
    return from_elements(flat, shape, noun=f"elements in {field}", name=name)


def _zero(dtype: np.dtype[Any]) -> Array:
    return strings([b""]) if dtype.kind == "O" else np.zeros(1, dtype)
