"""Requests known to write files, falsify answers, exhaust memory or block, in sizes that the server refuses at once."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any, Final

from google.protobuf.message import Message
from tensorflow.core.framework import types_pb2
from tensorflow_serving.apis import predict_pb2

from understudy.oip import inference_pb2
from understudy.v1 import evaluation_pb2, prediction_pb2, tensor_pb2

_FUNCTION: Final = {"module": "keras.config", "class_name": "function", "config": "set_epsilon"}
_CONFIGURATIONS: Final[tuple[tuple[str, Any], ...]] = (
    ("MeanMetricWrapper", {"fn": _FUNCTION}),
    ("MeanMetricWrapper", {"fn": {"module": "keras.utils", "class_name": "function", "config": "get_file"}}),
    ("AUC", {"num_thresholds": 60_000_000}),
    ("AUC", {"thresholds": [0.5] * 10_000}),
    ("AUC", {"dtype": {"module": "keras", "class_name": "DTypePolicy", "config": {"name": "float16"}}}),
    ("AUC", {"multi_label": True, "num_labels": 10**9}),
    ("MeanIoU", {"num_classes": 10**6}),
    ("function", {}),
    ("5", {}),
    ("mae", {"name": "x" * 1000}),
)
_HUGE: Final = 2**40


def hostile_requests(model: str, inputs: Mapping[str, Any]) -> Iterator[Message]:
    """Yield gRPC requests.

    Args:
        model: The name of the model.
        inputs: Valid inputs of the model, by name.
    """
    for name, config in _CONFIGURATIONS:
        spec = evaluation_pb2.MetricSpec(name=name, config_json=json.dumps(config))
        yield evaluation_pb2.EvaluateRequest(options=evaluation_pb2.EvaluateOptions(metrics=[spec] * 3))
        versions = [tensor_pb2.VersionSelector(label=tensor_pb2.VERSION_LABEL_SERVING)] * 2
        yield evaluation_pb2.CompareRequest(
            options=evaluation_pb2.CompareOptions(versions=versions, dataset="test", metrics=[spec])
        )
    endless = {name: tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[_HUGE, 0]) for name in inputs}
    yield evaluation_pb2.EvaluateRequest(batch=evaluation_pb2.EvaluateBatch(inputs=endless))
    yield prediction_pb2.PredictRequest(inputs=endless)
    yield evaluation_pb2.ListEvaluationsRequest(page_token="__________8AAAAA")  # noqa: S106 - not a secret
    yield _filled(model, [*inputs, *(f"more_{number}" for number in range(20))])
    yield _filled(model, inputs)
    for raw in (False, True):
        yield _empty_strings(model, inputs, raw=raw)


def hostile_body(inputs: Mapping[str, Any], chance: random.Random) -> tuple[bytes, dict[str, str]]:
    """Return the body of a REST request, and its headers."""
    name = chance.choice(list(inputs))
    datatype, data = chance.choice(
        (("FP32", "0,"), ("BYTES", '"",'), ("FP32", "[],"), ("INT64", "9,"), ("FP32", "{},"))
    )
    count = chance.choice((100, 30_000, 200_000))
    shape = json.dumps(chance.choice(([1, 1], [count], [_HUGE, 0], [2, count // 2])))
    tensor = f'{{"name": "{name}", "datatype": "{datatype}", "shape": {shape}, "data": [{data * count}0]}}'
    return _perhaps_compressed(f'{{"inputs": [{tensor}]}}', chance)


def hostile_values(inputs: Mapping[str, Any], chance: random.Random) -> tuple[bytes, dict[str, str]]:
    """Return the body of a request to TensorFlow Serving's REST API, and its headers."""
    name, count = chance.choice(list(inputs)), chance.choice((100, 30_000, 200_000))
    value, end = chance.choice(
        (("0,", "0"), ('"",', '""'), ("[],", "[]"), ("{},", "{}"), ('{"b64": ""},', "0"), ("[", ""))
    )
    values = f"[{value * count}{end}]"
    body = chance.choice((f'{{"instances": {values}}}', f'{{"inputs": {{"{name}": {values}}}}}'))
    return _perhaps_compressed(body, chance)


def _perhaps_compressed(body: str, chance: random.Random) -> tuple[bytes, dict[str, str]]:
    if chance.random() < 0.5:
        return gzip.compress(body.encode(), 1), {"content-encoding": "gzip"}
    return body.encode(), {}


def _filled(model: str, names: Any) -> predict_pb2.PredictRequest:
    """Return a request in which one value stands for all elements of each input."""
    request = predict_pb2.PredictRequest(model_spec={"name": model})
    for name in names:
        tensor = request.inputs[name]
        tensor.dtype = types_pb2.DT_FLOAT
        for length in (4096, 16_384):
            tensor.tensor_shape.dim.add(size=length)
        tensor.float_val.append(1)
    return request


def _empty_strings(model: str, inputs: Mapping[str, Any], *, raw: bool) -> inference_pb2.ModelInferRequest:
    request = inference_pb2.ModelInferRequest(model_name=model)
    for name in inputs:
        tensor = request.inputs.add(name=name, datatype="BYTES", shape=[60_000])
        if raw:
            request.raw_input_contents.append(bytes(4) * 60_000)
        else:
            tensor.contents.bytes_contents.extend([b""] * 60_000)
    return request
