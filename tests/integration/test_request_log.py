"""Requests of every protocol are logged, read as a dataset, and sent again to another version."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner
from integration.conftest import Run
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

from testkit.checkpoints import OUTPUTS, WIDTH, Chief, ones
from testkit.front_ends import FRONT_ENDS
from testkit.in_process import RunningService, running_service, until
from understudy.checkpoints.signature import Signature, TensorSpec
from understudy.cli.main import main
from understudy.evaluator.datasets.dataset_files import find_records, open_dataset
from understudy.evaluator.datasets.request_records import LoggedExample, LoggedRequest, encode_request, read_logged
from understudy.evaluator.evaluator_errors import DatasetNotFoundError
from understudy.oip import inference_pb2, inference_pb2_grpc
from understudy.service.callers.callers_file import hash_text

STEPS = (10, 30)
TOKEN = "key"  # noqa: S105 - of a test
METHODS = {
    "/understudy.v1.PredictionService/Predict": 3,
    "/understudy.v1.PredictionService/PredictStream": 2,
    "/inference.GRPCInferenceService/ModelInfer": 1 + 2,  # REST is a form of it
    "/inference.GRPCInferenceService/ModelStreamInfer": 1,
    "/tensorflow.serving.PredictionService/Predict": 1,
}
"""The methods and the examples that `call_every_method` sends to each."""


SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", dtype="float32", shape=(None, WIDTH)),),
    outputs=(TensorSpec(name="y", dtype="float32", shape=(None, OUTPUTS)),),
)


def call_every_method(service: RunningService) -> None:
    client = service.client()
    client.predict(np.arange(3 * WIDTH, dtype=np.float32).reshape(3, WIDTH))
    assert len(list(client.predict_many([ones(1), ones(1)]))) == 2
    infer = inference_pb2.ModelInferRequest(model_name="model", raw_input_contents=[ones(1).tobytes()])
    infer.inputs.add(name="x", datatype="FP32", shape=(1, WIDTH))
    serving = predict_pb2.PredictRequest(inputs={"x": tf.make_tensor_proto(ones(1))})
    serving.model_spec.name = "model"
    with grpc.insecure_channel(service.grpc) as channel:
        inference = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        inference.ModelInfer(infer, timeout=60)
        assert len(list(inference.ModelStreamInfer(iter([infer]), timeout=60))) == 1
        prediction_service_pb2_grpc.PredictionServiceStub(channel).Predict(serving, timeout=60)
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, WIDTH], "data": ones(2).tolist()}
    httpx.post(f"http://{service.http}/v2/models/model/infer", json={"inputs": [tensor]}).raise_for_status()


@pytest.fixture(scope="module", params=FRONT_ENDS)
def logged(
    request: pytest.FixtureRequest,
    replicas: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
    dataset_file: Path,
) -> Iterator[tuple[RunningService, Path]]:
    """A service that watches drift, and the folder where one before it, of either front end, logged every method."""
    run = tmp_path_factory.mktemp("run")
    chief = Chief(run)
    for step in STEPS:
        chief.publish(step)
    log = {"request_log": run / "log", "request_log_sample": 1.0, "request_log_targets": "classes"}
    settings: dict[str, Any] = {"run_dir": run}
    options: dict[str, Any] = {"replicas": replicas, "state_dir": run / "evaluator"}
    with running_service(settings | log, {}, front_end=request.param, **options) as service:
        assert service.wait_ready() == STEPS[-1]
        call_every_method(service)
    settings |= {"eval_data": {"test": dataset_file}, "drift_reference": "test", "drift_sample": 1.0}
    with running_service(settings, {}, **options) as service:
        service.wait_ready()
        service.client().promote(STEPS[0])  # loads it; the one before stays loaded
        yield service, run / "log"


def test_every_method_is_logged_once(logged: tuple[RunningService, Path]) -> None:
    _, folder = logged
    examples: list[LoggedExample] = list(read_logged(find_records(folder), SIGNATURE))
    assert Counter(example.method for example in examples) == METHODS
    assert {example.step for example in examples} == {STEPS[-1]}
    for example in examples:
        expected = example.inputs["x"].sum() * STEPS[-1] / WIDTH
        assert np.allclose(example.answers["y"], expected)


def test_the_log_is_a_dataset_whose_targets_are_the_answers_where_they_are_numbers(
    logged: tuple[RunningService, Path],
) -> None:
    _, folder = logged
    (batch,) = open_dataset("live", folder).batches(SIGNATURE, 100)
    assert batch.inputs["x"].shape == (sum(METHODS.values()), WIDTH)
    assert np.allclose(batch.targets["targets"], batch.inputs["x"].sum(axis=1, keepdims=True) * STEPS[-1] / WIDTH)


def replay(service: RunningService, folder: Path, *more: str) -> dict[str, Any]:
    arguments = ["replay", str(folder), "--target", service.grpc, "--json", "--max-requests-per-second", "1000"]
    result = CliRunner().invoke(main, [*arguments, *more])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_same_version_answers_the_same_again(logged: tuple[RunningService, Path]) -> None:
    service, folder = logged
    found = replay(service, folder, "--version", "30", "--batch-size", "4")
    assert (found["step"], found["against"], found["examples"]) == (30, None, sum(METHODS.values()))
    assert found["requests"] == 3
    assert found["logged_steps"] == {"30": sum(METHODS.values())}
    assert found["outputs"]["y"]["differing_examples"] == 0


@pytest.mark.parametrize("against", [(), ("--against", "30")])
def test_another_version_differs_by_as_much_as_it_does(
    logged: tuple[RunningService, Path], against: tuple[str, ...]
) -> None:
    service, folder = logged
    found = replay(service, folder, "--version", "10", *against)
    assert found["against"] == (30 if against else None)
    difference = found["outputs"]["y"]
    assert difference["differing_examples"] == sum(METHODS.values())
    assert difference["differing_share"] == 1.0
    largest_sum = float(np.arange(2 * WIDTH, 3 * WIDTH).sum())
    assert difference["largest_difference"] == pytest.approx(largest_sum * 20 / WIDTH)
    assert difference["class_flips"] is None  # it is a regression


def test_a_version_that_is_not_loaded_is_named(logged: tuple[RunningService, Path]) -> None:
    service, folder = logged
    result = CliRunner().invoke(main, ["replay", str(folder), "--target", service.grpc, "--version", "11"])
    assert result.exit_code == 1
    assert "11" in result.output


def test_a_service_redacts_names_callers_and_keeps_within_its_bounds(
    run_service: Run, chief: Chief, tmp_path: Path
) -> None:
    chief.publish(10)
    callers = tmp_path / "callers.toml"
    callers.write_text(
        f'[[callers]]\nname = "shop"\ngroups = ["predict", "observe"]\ntokens = ["{hash_text(TOKEN)}"]\n'
    )
    folder = tmp_path / "log"
    log = {"request_log": folder, "request_log_sample": 1.0, "request_log_redact": ("x",), "request_log_mib": 0.125}
    service = run_service({"callers": callers, **log})
    service.wait_ready()
    client = service.client(token=TOKEN)
    secret = np.full((40, WIDTH), 7.654321, np.float32)
    for _ in range(60):  # 40 examples of 8 outputs, logged twice: some 20 KiB
        client.predict(secret)
    assert client.status().serving_step == 10
    service.start_stopping()
    service.join()

    files = find_records(folder)
    assert sum(file.stat().st_size for file in files) <= 128 * 1024
    assert files
    assert not any(secret[0, 0].tobytes() in file.read_bytes() for file in files)
    examples = list(read_logged(files, SIGNATURE))
    assert {(example.caller, example.redacted) for example in examples} == {("shop", ("x",))}
    assert not any(example.inputs["x"].any() for example in examples)
    assert len(examples) % 40 == 0


def test_logged_answers_to_redacted_values_are_not_compared(
    logged: tuple[RunningService, Path], tmp_path: Path
) -> None:
    service, _ = logged
    x = np.zeros((1, WIDTH), np.float32)
    request = LoggedRequest(
        inputs={"x": x}, outputs={"y": np.ones((1, OUTPUTS), np.float32)}, step=30, recorded_at=0, method="", caller=""
    )
    with tf.io.TFRecordWriter(str(tmp_path / "requests-1.tfrecord")) as writer:
        for record in encode_request(request, redacted_names=("x",)):
            writer.write(record)
    arguments = ["replay", str(tmp_path), "--target", service.grpc, "--version", "10"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert "the values of 'x' were redacted" in result.output
    assert CliRunner().invoke(main, [*arguments, "--against", "30"]).exit_code == 0


@pytest.mark.parametrize("damage", ["cut", "longer", "bomb"])
def test_a_damaged_log_ends_a_replay_before_a_request_is_sent(
    logged: tuple[RunningService, Path], tmp_path: Path, damage: str
) -> None:
    service, folder = logged
    content = find_records(folder)[0].read_bytes()
    file = tmp_path / ("requests-1.tfrecord.gz" if damage == "bomb" else "requests-1.tfrecord")
    if damage == "cut":
        file.write_bytes(content[:-1])
    elif damage == "longer":
        file.write_bytes(content + (2**40).to_bytes(8, "little") + bytes(8))
    else:
        file.write_bytes(gzip.compress(content + (2**30).to_bytes(8, "little") + bytes(2**22)))
    result = CliRunner().invoke(main, ["replay", str(tmp_path), "--target", service.grpc, "--version", "30"])
    assert result.exit_code == 1
    assert f"request log: {file} is not a whole TFRecord file" in result.output


def test_live_requests_that_drifted_from_the_reference_are_shown(logged: tuple[RunningService, Path]) -> None:
    service, folder = logged
    client = service.client()
    examples = np.zeros((200, WIDTH), np.float32)  # the reference is normal, so nearly none is zero

    def drift_is_shown() -> bool:
        client.predict(examples)
        return 'kind="score"' in client.metrics()

    until(drift_is_shown)
    assert service.metric("understudy_drift_examples") > 0
    assert service.metric("understudy_drift", kind="input", feature="x[0]", statistic="psi") > 0.25
    assert service.metric("understudy_drift", kind="input", feature="x[0]", statistic="ks") > 0.3
    assert service.metric("understudy_drift", kind="score", feature=f"y[{OUTPUTS - 1}]", statistic="psi") > 0.25
    written = json.loads((folder.parent / "evaluator" / "drift.json").read_text())
    assert (written["dataset"], written["step"]) == ("test", STEPS[0])


def test_a_log_and_a_dataset_are_compared_with_the_outputs_of_one_version(
    logged: tuple[RunningService, Path], dataset_file: Path
) -> None:
    service, folder = logged
    arguments = ["drift", str(folder), "--against", str(dataset_file), "--version", "10", "--target", service.grpc]
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    features = {(each["kind"], each["name"]): each for each in json.loads(result.stdout)["features"]}
    assert features["input", "x[0]"]["psi"] > 0.25
    assert features["score", "y[0]"]["count"] == sum(METHODS.values())


def test_a_reference_that_does_not_exist_is_named(replicas: tuple[str, ...], tmp_path: Path) -> None:
    settings = {"run_dir": tmp_path, "drift_reference": "nothing"}
    with (
        pytest.raises(DatasetNotFoundError, match="no dataset 'nothing'"),
        running_service(settings, {}, replicas=replicas, state_dir=tmp_path / "state"),
    ):
        pass
