"""The endpoints of a server: each sends a fuzzed request and reports the answer."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc
import httpx
import numpy as np
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from tensorflow_serving.apis import get_model_metadata_pb2, get_model_status_pb2, model_pb2, predict_pb2

from soak.fuzz_messages import WORDS, fuzzed
from soak.hostile import hostile_body, hostile_requests, hostile_values
from understudy.oip import inference_pb2
from understudy.service.handlers import inference_handler as oip
from understudy.service.handlers import tfserving_handler as tf_plane
from understudy.service.handlers.infer_codec import datatype_of
from understudy.service.handlers.inference import encode_raw
from understudy.service.services import LIGHT_SERVICES, tf_serving_services
from understudy.v1 import evaluation_pb2, prediction_pb2
from understudy.v1 import model_pb2 as own_model_pb2
from understudy.wire import encode_all

PATIENCE_SECONDS: Final = 30.0
"""A longer call counts as a hang."""
GLANCE_SECONDS: Final = 0.05
"""How long to read a stream that has no end."""

REFUSED: Final = frozenset({*oip.UNSUPPORTED, *tf_plane.UNSUPPORTED})
ENDLESS: Final = frozenset({"WatchEvaluations", "Watch", "ServerReflectionInfo"})
SERVICES: Final = (*LIGHT_SERVICES, *tf_serving_services())
UNTOLD: Final = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE})
"""Statuses that no fuzzed request may get: a defect, a crash."""

HOSTILE_SHARE: Final = 0.03
"""The JSON values for bodies of REST requests."""

_SERVER_ERROR: Final = 500
_HTTP_ALLOWED: Final = frozenset({501, 503, 504})

Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """The answer to a request: the endpoint, the status, and whether that status is allowed."""

    endpoint: str
    status: str
    allowed: bool
    detail: str = ""


class Endpoint(Protocol):
    """One endpoint of a server.

    Attributes:
        name: Its name.
        weight: How often to call it, relative to the others.
    """

    name: str
    weight: int

    def knock(self, chance: random.Random) -> Answer:
        """Send one fuzzed request."""


class RpcDoor:
    """One method of one service."""

    def __init__(self, channel: grpc.Channel, service: Any, method: Any, right: Sequence[Message]) -> None:
        self.name = f"{service.full_name}/{method.name}"
        self.weight = 1 if method.name in REFUSED else 4
        self._kind = GetMessageClass(method.input_type)
        self._right = [message for message in right if isinstance(message, self._kind)]
        self._streams_in: bool = method.client_streaming
        self._streams_out: bool = method.server_streaming
        self._endless = method.name in ENDLESS
        way = f"{'stream' if self._streams_in else 'unary'}_{'stream' if self._streams_out else 'unary'}"
        self._call: Any = getattr(channel, way)(f"/{self.name}")

    def knock(self, chance: random.Random) -> Answer:
        """See `Endpoint`."""
        contents = [fuzzed(self._kind, self._right, chance) for _ in range(chance.choice((1, 1, 2, 4)))]
        hurried = chance.random() < 0.02
        timeout = GLANCE_SECONDS if self._endless else 0.001 if hurried else PATIENCE_SECONDS
        try:
            answer = self._call(iter(contents) if self._streams_in else contents[0], timeout=timeout)
            if self._streams_out:
                for _ in answer:
                    pass
        except grpc.RpcError as error:
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not (self._endless or hurried)
            late = late and "before the work began" not in (error.details() or "")
            allowed = error.code() not in UNTOLD and not late
            detail = "" if allowed else f"{error.details()} for {[content.hex()[:2000] for content in contents]}"
            return Answer(self.name, error.code().name, allowed, detail)
        return Answer(self.name, "OK", allowed=True)


class RestEndpoint:
    """The REST form of the Open Inference Protocol, and the other paths of the HTTP port."""

    name = "REST"
    weight = 40

    def __init__(self, client: httpx.Client, model: str, inputs: Arrays) -> None:
        self._client = client
        self._model = model
        self._inputs = inputs

    def knock(self, chance: random.Random) -> Answer:
        """See `Endpoint`."""
        path = self._path(chance)
        natural = "POST" if path.endswith(("infer", "index", "load", ":predict", ":regress")) else "GET"
        method = natural if chance.random() < 0.95 else chance.choice(("POST", "GET", "PUT"))
        content, headers = self._body(chance) if method == "POST" else (b"", {})
        try:
            response = self._client.request(method, path, content=content, headers=headers)
        except httpx.HTTPError as error:
            return Answer(self.name, type(error).__name__, allowed=False, detail=f"{error} for {path}")
        allowed = response.status_code < _SERVER_ERROR or response.status_code in _HTTP_ALLOWED
        detail = "" if allowed else f"{method} {path} {headers} {content[:1000]!r}: {response.text}"
        return Answer(self.name, str(response.status_code), allowed, detail)

    def _path(self, chance: random.Random) -> str:
        model = self._model if chance.random() < 0.8 else chance.choice(WORDS)
        version = f"/versions/{chance.choice(WORDS)}" if chance.random() < 0.3 else ""
        end = chance.choice(("/infer", "/infer", "/infer", "/infer", "", "/ready", "/config", "/stats", "/load"))
        whole = chance.choice(("/v2", "/v2/health/ready", "/v2/repository/index", "/v2/logging", "/metrics", "/readyz"))
        return _quoted(f"/v2/models/{model}{version}{end}" if chance.random() < 0.85 else whole)

    def _body(self, chance: random.Random) -> tuple[bytes, dict[str, str]]:
        if chance.random() < HOSTILE_SHARE:
            return self._hostile_body(chance)
        request, binary = self._right(chance)
        for _ in range(chance.choice((0, 0, 1, 1, 2))):
            _change_a_value(request, chance)
        header = json.dumps(request).encode()
        content, headers = header + binary, {}
        if binary or chance.random() < 0.1:
            headers["inference-header-content-length"] = str(len(header))
        if chance.random() < 0.1:
            headers["inference-header-content-length"] = chance.choice(("-1", "x", "0", "10", "9" * 25))
        if chance.random() < 0.1:
            content = content[: chance.randrange(len(content) + 1)]
        if chance.random() < 0.1:
            content = zlib.compress(content) if chance.random() < 0.7 else content
            headers["content-encoding"] = chance.choice(("deflate", "gzip", "br"))
        return content, headers

    def _hostile_body(self, chance: random.Random) -> tuple[bytes, dict[str, str]]:
        return hostile_body(self._inputs, chance)

    def _right(self, chance: random.Random) -> tuple[dict[str, Any], bytes]:
        binary = b""
        inputs = []
        for name, array in self._inputs.items():
            tensor: dict[str, Any] = {"name": name, "datatype": datatype_of(array), "shape": list(array.shape)}
            if array.dtype.kind == "O" or chance.random() < 0.5:
                raw = encode_raw(array)
                tensor["parameters"] = {"binary_data_size": len(raw)}
                binary += raw
            else:
                tensor["data"] = _numbers(array)
            inputs.append(tensor)
        return {"id": "1", "inputs": inputs, "parameters": {"binary_data_output": chance.random() < 0.5}}, binary


class TfServingRestEndpoint(RestEndpoint):
    """TensorFlow Serving's REST API."""

    name = "REST/v1"
    weight = 20

    def _path(self, chance: random.Random) -> str:
        model = self._model if chance.random() < 0.8 else chance.choice(WORDS)
        version = f"/{chance.choice(('versions', 'labels'))}/{chance.choice(WORDS)}" if chance.random() < 0.3 else ""
        end = chance.choice((":predict", ":predict", ":predict", ":predict", "", "/metadata", ":regress"))
        return _quoted(f"/v1/models/{model}{version}{end}")

    def _hostile_body(self, chance: random.Random) -> tuple[bytes, dict[str, str]]:
        return hostile_values(self._inputs, chance)

    def _right(self, chance: random.Random) -> tuple[dict[str, Any], bytes]:
        columns = {
            name: [{"b64": ""}] * len(array) if array.dtype.kind == "O" else _numbers(array)
            for name, array in self._inputs.items()
        }
        if chance.random() < 0.5:
            return {"inputs": columns}, b""
        return {"instances": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]}, b""


def _quoted(path: str) -> str:
    return "".join(character if character.isalnum() or character in "/-_:" else "%25" for character in path)


def _numbers(array: Any) -> Any:
    return array.astype(float).tolist() if array.dtype.kind not in "biu" else array.tolist()


def endpoints_of(channel: grpc.Channel, http: httpx.Client, model: str, inputs: Arrays) -> Iterator[Endpoint]:
    """Yield every endpoint of a server.

    Args:
        channel: A channel to the gRPC port.
        http: A client of the HTTP port.
        model: The name of the model.
        inputs: Valid inputs of the model, by name.
    """
    right = [*right_requests(model, inputs), *hostile_requests(model, inputs)]
    for service in SERVICES:
        for method in service.methods:
            yield RpcDoor(channel, service, method, right)
    yield RestEndpoint(http, model, inputs)
    yield TfServingRestEndpoint(http, model, inputs)


def right_requests(model: str, inputs: Arrays) -> Iterator[Message]:
    """Yield valid requests."""
    own = prediction_pb2.PredictRequest(inputs=encode_all(inputs))
    yield own
    yield prediction_pb2.PredictStreamRequest(request=own)
    yield evaluation_pb2.EvaluateRequest(
        batch=evaluation_pb2.EvaluateBatch(inputs=own.inputs, targets=encode_all({"targets": np.ones((2, 3), "f4")}))
    )
    yield evaluation_pb2.EvaluateRequest(options=evaluation_pb2.EvaluateOptions())
    yield own_model_pb2.GetModelMetadataRequest()
    yield _raw_infer(model, inputs)
    yield inference_pb2.ModelReadyRequest(name=model)
    yield inference_pb2.ModelMetadataRequest(name=model)
    yield inference_pb2.ModelConfigRequest(name=model)
    yield inference_pb2.ModelStatisticsRequest(name=model)
    spec = model_pb2.ModelSpec(name=model)
    encoded = {name: tf_plane.encode_tensor(array) for name, array in inputs.items()}
    yield predict_pb2.PredictRequest(model_spec=spec, inputs=encoded)
    yield get_model_metadata_pb2.GetModelMetadataRequest(model_spec=spec, metadata_field=["signature_def"])
    yield get_model_status_pb2.GetModelStatusRequest(model_spec=spec)


def _raw_infer(model: str, inputs: Arrays) -> inference_pb2.ModelInferRequest:
    request = inference_pb2.ModelInferRequest(model_name=model, id="1")
    for name, array in inputs.items():
        request.inputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
        request.raw_input_contents.append(encode_raw(array))
    return request


def _change_a_value(value: Any, chance: random.Random) -> None:
    """Change one random value within JSON."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = chance.choice(keys)
        if isinstance(value[key], dict | list) and chance.random() < 0.7:
            value = value[key]
            continue
        value[key] = chance.choice(
            (
                None,
                True,
                -1,
                0,
                3,
                2**63,
                10**400,
                1.5,
                float("nan"),
                1e300,
                "",
                "FP64",
                "\ud800",
                [],
                [[1]],
                {},
                [None],
            )
        )
        return
