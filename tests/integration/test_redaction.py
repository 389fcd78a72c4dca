"""Nothing of a redacted input is kept: by no protocol, in no file, in no log line and in no trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

from testkit.front_ends import FRONT_ENDS
from testkit.in_process import running_service
from testkit.otlp_receiver import otlp_receiver
from testkit.served import Served, serving
from understudy.cli.main import main
from understudy.clients import Client, InvalidArgumentError, Metric
from understudy.evaluator.datasets.dataset_files import find_records
from understudy.oip import inference_pb2, inference_pb2_grpc
from understudy.service.callers.callers_file import hash_text
from understudy.service.handlers.inference import encode_raw
from understudy.service.logging import WITHHELD

pytestmark = pytest.mark.long

MODEL = "secretive"
STEP = 7
TOKEN = "key"  # noqa: S105 - of a test
CANARY = "73918465"
"""Part of every value of a redacted input, as text; it is in nothing else."""
ACCEPTED, REFUSED = f"{CANARY}.25".encode(), f"{CANARY}-no-number".encode()
NUMBER = int(CANARY)
KEPT = 4096.03125
"""A value of an input that is not redacted."""
PATH = f"/v2/models/{MODEL}/infer"


def save_model(folder: Path) -> None:
    """Save a model whose own errors quote its inputs."""
    module = tf.Module()

    def serve(secret: Any, number: Any, small: Any, x: Any) -> dict[str, Any]:
        parsed = tf.strings.to_number(tf.strings.join(["0", secret]))
        looked_up = tf.gather(tf.zeros(10), number)
        return {"score": tf.reduce_sum(x, axis=1) + 0 * (parsed + looked_up + tf.cast(small, tf.float32))}

    specs = [
        tf.TensorSpec([None], tf.string, name="secret"),
        tf.TensorSpec([None], tf.int64, name="number"),
        tf.TensorSpec([None], tf.int8, name="small"),
        tf.TensorSpec([None, 2], tf.float32, name="x"),
    ]
    module.serve = tf.function(serve, input_signature=specs)
    tf.saved_model.save(module, str(folder), signatures={"serving_default": module.serve})


def inputs_with(secret: bytes, number: int) -> dict[str, Any]:
    return {
        "secret": np.array([secret], object),
        "number": np.array([number], np.int64),
        "small": np.array([5], np.int8),
        "x": np.full((1, 2), KEPT, np.float32),
    }


SENT = (inputs_with(ACCEPTED, 3), inputs_with(REFUSED, 3), inputs_with(ACCEPTED, NUMBER))
"""One request that the model answers, and two that it refuses."""
_TYPES = {"secret": "BYTES", "number": "INT64", "small": "INT8", "x": "FP32"}


def infer_request(inputs: dict[str, Any]) -> Any:
    request = inference_pb2.ModelInferRequest(model_name=MODEL)
    for name, array in inputs.items():
        request.inputs.add(name=name, datatype=_TYPES[name], shape=array.shape)
        request.raw_input_contents.append(encode_raw(array))
    return request


def serving_request(inputs: dict[str, Any]) -> Any:
    request = predict_pb2.PredictRequest(inputs={name: tf.make_tensor_proto(array) for name, array in inputs.items()})
    request.model_spec.name = MODEL
    return request


def json_body(inputs: dict[str, Any], *, binary: bool) -> tuple[bytes, dict[str, str]]:
    tensors, tail = [], b""
    for name, array in inputs.items():
        tensor: dict[str, Any] = {"name": name, "datatype": _TYPES[name], "shape": array.shape}
        if binary:
            raw = encode_raw(array)
            tensor["parameters"] = {"binary_data_size": len(raw)}
            tail += raw
        else:
            tensor["data"] = [each.decode() if isinstance(each, bytes) else each for each in array.ravel().tolist()]
        tensors.append(tensor)
    header = json.dumps({"inputs": tensors}).encode()
    return header + tail, {"inference-header-content-length": str(len(header))} if binary else {}


def is_answered(call: Callable[[], object]) -> bool:
    """Call; return whether it was answered, and not refused as invalid."""
    try:
        call()
    except InvalidArgumentError:
        return False
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
            raise
        return False
    return True


def call_every_method(served: Served) -> None:
    """Send each request by every method, and bodies that are no requests."""
    metadata = (("authorization", f"Bearer {TOKEN}"),)
    whole, _ = json_body(SENT[0], binary=False)
    damaged = [
        whole[: whole.index(CANARY.encode()) + len(CANARY)],
        *(whole.replace(b"[5]", content.encode()) for content in (f"[{CANARY}]", f'["{CANARY}"]', f"[{CANARY}.5]")),
    ]
    with (
        Client(served.grpc, token=TOKEN) as client,
        served.channel() as channel,
        httpx.Client(base_url=f"http://{served.http}", headers=dict(metadata), timeout=60) as http,
    ):
        inference = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        tf_serving = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        for place, inputs in enumerate(SENT):
            infer, predict = infer_request(inputs), serving_request(inputs)
            (outcome,) = client.predict_many([inputs])
            (reply,) = inference.ModelStreamInfer(iter([infer]), timeout=60, metadata=metadata)
            calls = (
                partial(client.predict, inputs),
                partial(inference.ModelInfer, infer, timeout=60, metadata=metadata),
                partial(tf_serving.Predict, predict, timeout=60, metadata=metadata),
                partial(client.evaluate, [(inputs, np.ones(1, np.float32))], metrics=[Metric(name="mae")]),
            )
            answered = [not isinstance(outcome, Exception), not reply.error_message, *map(is_answered, calls)]
            for binary in (False, True):
                body, headers = json_body(inputs, binary=binary)
                answered.append(http.post(PATH, content=body, headers=headers).status_code == 200)
            assert answered == [place == 0] * 8
        assert [http.post(PATH, content=body).status_code for body in damaged] == [400] * len(damaged)
        assert CANARY not in http.get("/metrics").text


def holds_canary(content: bytes) -> bool:
    """Return whether content holds a redacted value, as text or as the log writes numbers."""
    return CANARY.encode() in content or NUMBER.to_bytes(8, "little") in content


@pytest.fixture(scope="module", params=FRONT_ENDS)
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a server that has received everything and ended, with all that it wrote."""
    folder = tmp_path_factory.mktemp("redaction")
    save_model(folder / "models" / str(STEP))
    (folder / "callers.toml").write_text(
        '[[callers]]\nname = "shop"\ngroups = ["predict", "observe", "evaluate", "promote"]\n'
        f'tokens = ["{hash_text(TOKEN)}"]\n'
    )
    home = folder / "home"
    home.mkdir()
    flags = (
        *("--frontend", request.param, "--log-level", "debug", "--callers", str(folder / "callers.toml")),
        *("--request-log", str(home / "log"), "--request-log-sample", "1"),
        *("--request-log-redact", "secret,number,small", "--state-dir", str(home / "state")),
        *("--tracing", "--tracing-sample", "1"),
    )
    with otlp_receiver() as receiver, (home / "errors").open("wb") as errors:
        traced = ("--tracing-endpoint", receiver.url)
        quick = {"OTEL_BSP_SCHEDULE_DELAY": "50", "TF_CPP_MIN_LOG_LEVEL": "0"}
        files: dict[str, Any] = {"source": "--checkpoints", "errors": errors, "home": home}
        with serving(folder / "models", MODEL, *flags, *traced, environ=quick, **files) as served:
            call_every_method(served)
    (home / "spans").write_text(repr(receiver.spans))
    return home


def test_no_file_no_log_line_and_no_trace_holds_a_redacted_value(home: Path) -> None:
    files = [file for file in home.rglob("*") if file.is_file()]
    assert {"errors", "spans"} <= {file.name for file in files}
    assert [file.name for file in files if holds_canary(file.read_bytes())] == []


def test_refused_calls_are_still_in_the_access_log_with_their_code_and_caller(home: Path) -> None:
    lines = [json.loads(line) for line in (home / "errors").read_text().splitlines() if line.startswith("{")]
    ended = [line for line in lines if line["event"] == "call ended" and line["code"] == "INVALID_ARGUMENT"]
    assert len(ended) == 2 * 6 + 4
    assert {(line["caller"], line["message"]) for line in ended} == {("shop", WITHHELD)}
    assert {line["method"].rpartition("/")[2] for line in ended} == {
        "Predict",
        "ModelInfer",
        "Evaluate",
    }


def test_answered_requests_are_logged_without_the_values_and_replayed_without_them(
    home: Path, replicas: tuple[str, ...], tmp_path: Path
) -> None:
    log = b"".join(file.read_bytes() for file in find_records(home / "log"))
    assert log.count(b"request/redacted") == 7
    assert np.full(2, KEPT, np.float32).tobytes() in log
    settings = {"checkpoints": home.parent / "models"}
    with running_service(settings, {}, replicas=replicas, state_dir=tmp_path) as service:
        service.wait_ready()
        arguments = ["replay", str(home / "log"), "--target", service.grpc, "--version", str(STEP)]
        for more in ([], ["--against", str(STEP)], ["--against", str(STEP), "--json"]):
            result = CliRunner().invoke(main, [*arguments, *more])
            assert (result.exit_code == 0) is bool(more), result.output
            assert not holds_canary(result.output.encode())
