"""Makes every call of TensorFlow Serving's stubs, and prints the outcomes. Runs in their environment.

tfserving.py HOST:PORT HOST:PORT...    (pairs of a server of the model "every" and one of "plain")

The outcomes are those of each pair, by the address of its first server.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import numpy as np
import tensorflow as tf
from google.protobuf import json_format
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    inference_pb2,
    model_management_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
    regression_pb2,
)

from testkit.values import DTYPES, EVERY, PLAIN, packed, values

REPORT: dict[str, Any] = {}
SECONDS = 30


def note(name: str, call: Callable[[], Any]) -> None:
    """Make a call and record its result or error."""
    try:
        REPORT[name] = {"value": json_format.MessageToDict(call(), preserving_proto_field_name=True)}
    except grpc.RpcError as error:
        REPORT[name] = {"status": error.code().name, "message": error.details()}


def plain(rows: int = 2, **spec: Any) -> Any:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = spec.pop("name", PLAIN)
    for field, value in spec.items():
        if field == "version":
            request.model_spec.version.value = value
        else:
            setattr(request.model_spec, field, value)
    request.inputs["x"].CopyFrom(tf.make_tensor_proto(np.ones((rows, 3), np.float32)))
    return request


def predict_every_datatype(stub: Any) -> None:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = EVERY
    for dtype in DTYPES:
        request.inputs[f"in_{dtype}"].CopyFrom(tf.make_tensor_proto(values(dtype)))
    response = stub.Predict(request, timeout=SECONDS)
    REPORT["every"] = {dtype: packed(tf.make_ndarray(response.outputs[f"out_{dtype}"])) for dtype in DTYPES}
    for dtype in DTYPES:
        array = values(dtype)
        filled = tf.make_tensor_proto(array[2, 2], shape=(1, 3), dtype=tf.as_dtype(array.dtype))
        request.inputs[f"in_{dtype}"].CopyFrom(filled)
    response = stub.Predict(request, timeout=SECONDS)
    REPORT["filled"] = {dtype: packed(tf.make_ndarray(response.outputs[f"out_{dtype}"])) for dtype in DTYPES}
    request.output_filter.extend(["out_int8", "out_bool"])
    REPORT["filtered"] = sorted(stub.Predict(request, timeout=SECONDS).outputs)


def predict_with_options(stub: Any) -> None:
    note("predict", lambda: stub.Predict(plain(), timeout=SECONDS))
    note("signature", lambda: stub.Predict(plain(signature_name="serving_default"), timeout=SECONDS))
    note("another signature", lambda: stub.Predict(plain(signature_name="train"), timeout=SECONDS))
    note("another model", lambda: stub.Predict(plain(name="nobody"), timeout=SECONDS))
    for version in (1, 99, -1):
        note(f"version {version}", partial(stub.Predict, plain(version=version), timeout=SECONDS))
    for label in ("latest", "best", "stable"):
        note(f"label {label}", partial(stub.Predict, plain(version_label=label), timeout=SECONDS))
    wanting = plain()
    wanting.output_filter.append("z")
    note("unknown output", lambda: stub.Predict(wanting, timeout=SECONDS))
    note("no examples", lambda: stub.Predict(plain(rows=0), timeout=SECONDS))


def describe(stub: Any) -> None:
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = EVERY
    response = stub.GetModelMetadata(request, timeout=SECONDS)
    signatures = get_model_metadata_pb2.SignatureDefMap()
    response.metadata["signature_def"].Unpack(signatures)
    REPORT["signatures"] = json_format.MessageToDict(signatures, preserving_proto_field_name=True)
    REPORT["described version"] = response.model_spec.version.value
    request.metadata_field[:] = ["weights"]
    note("another field", lambda: stub.GetModelMetadata(request, timeout=SECONDS))


def ask_for_the_status(stub: Any) -> None:
    request = get_model_status_pb2.GetModelStatusRequest()
    request.model_spec.name = PLAIN
    note("status", lambda: stub.GetModelStatus(request, timeout=SECONDS))
    request.model_spec.version.value = 2
    note("status of 2", lambda: stub.GetModelStatus(request, timeout=SECONDS))
    request.model_spec.version.value = 99
    note("status of 99", lambda: stub.GetModelStatus(request, timeout=SECONDS))
    reload = model_management_pb2.ReloadConfigRequest()
    note("HandleReloadConfigRequest", lambda: stub.HandleReloadConfigRequest(reload, timeout=SECONDS))


def ask_for_what_is_not_there(stub: Any) -> None:
    note("Classify", lambda: stub.Classify(classification_pb2.ClassificationRequest(), timeout=SECONDS))
    note("Regress", lambda: stub.Regress(regression_pb2.RegressionRequest(), timeout=SECONDS))
    note("MultiInference", lambda: stub.MultiInference(inference_pb2.MultiInferenceRequest(), timeout=SECONDS))


def report(every_target: str, plain_target: str) -> dict[str, Any]:
    REPORT.clear()
    with grpc.insecure_channel(every_target) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        predict_every_datatype(stub)
        describe(stub)
    with grpc.insecure_channel(plain_target) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        predict_with_options(stub)
        ask_for_what_is_not_there(stub)
        ask_for_the_status(model_service_pb2_grpc.ModelServiceStub(channel))
    return dict(REPORT)


print(json.dumps({every: report(every, plain) for every, plain in zip(sys.argv[1::2], sys.argv[2::2], strict=True)}))
