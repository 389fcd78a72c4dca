"""Every RPC, over a real channel, to a service with real checkpoints on three replicas."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from testkit.checkpoints import OUTPUTS, WIDTH, ones, step_model
from testkit.in_process import RunningService
from understudy.clients import (
    Client,
    InvalidArgumentError,
    MessageTooLargeError,
    Metric,
    NotFoundError,
    PredictResult,
    UnderstudyError,
)
from understudy.oip import inference_pb2, inference_pb2_grpc
from understudy.v1 import (
    evaluation_pb2,
    evaluation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    prediction_pb2,
    prediction_pb2_grpc,
    tensor_pb2,
)
from understudy.wire import encode

SERVING = 30
STEPS = (10, 20, 30)


UNSPECIFIED = tensor_pb2.VersionSelector(label=tensor_pb2.VERSION_LABEL_UNSPECIFIED)
STEP_10 = tensor_pb2.VersionSelector(step=10)


@pytest.fixture(scope="module")
def channel(service: RunningService) -> Iterator[Any]:
    with grpc.insecure_channel(service.grpc) as channel:
        yield channel


@pytest.fixture(scope="module")
def predictions(channel: Any) -> Any:
    return prediction_pb2_grpc.PredictionServiceStub(channel)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 257])
def test_examples_come_back_from_the_serving_version(client: Client, rows: int) -> None:
    result = client.predict(ones(rows))
    assert result.step == SERVING
    assert np.array_equal(result.output, np.full((rows, OUTPUTS), SERVING, np.float32))


def test_requests_that_differ_in_their_examples_only_get_their_own_answers(client: Client, channel: Any) -> None:
    values = [np.full((5, WIDTH), value, np.float32) for value in range(12)]
    expected = [np.full((5, OUTPUTS), value * SERVING, np.float32) for value in range(12)]
    infer = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
    requests = [infer_request(rows) for rows in values]
    streamed = [reply.infer_response for reply in infer.ModelStreamInfer(iter(requests), timeout=60)]
    for answers in (
        [client.predict(rows).output for rows in values],
        [result.output for result in client.predict_many(values) if isinstance(result, PredictResult)],
        [array_of(infer.ModelInfer(request, timeout=60)) for request in requests],
        [array_of(response) for response in streamed],
    ):
        assert np.array_equal(answers, expected)


def infer_request(rows: Any) -> inference_pb2.ModelInferRequest:
    request = inference_pb2.ModelInferRequest(model_name="model", raw_input_contents=[rows.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=rows.shape)
    return request


def array_of(response: inference_pb2.ModelInferResponse) -> Any:
    return np.frombuffer(response.raw_output_contents[0], np.float32).reshape(response.outputs[0].shape)


def test_a_label_and_a_step_choose_the_version(client: Client) -> None:
    assert client.predict(ones(1), version="latest").step == SERVING
    assert client.predict(ones(1), version=SERVING).step == SERVING
    assert client.predict(ones(1), version="best").step == SERVING


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"image": ones(1)}, ["image", "x"]),
        ({"x": ones(1), "z": ones(1)}, ["z"]),
        ({}, ["x"]),
        ({"x": ones(1).astype(np.float64)}, ["x", "float64", "float32"]),
        ({"x": np.ones((1, WIDTH + 1), np.float32)}, ["x", "5", "4"]),
        ({"x": np.ones(WIDTH, np.float32)}, ["x"]),
        ({"x": np.ones((0, WIDTH), np.float32)}, ["x", "no examples"]),
    ],
)
def test_inputs_that_do_not_fit_are_named_with_what_was_expected(
    client: Client, inputs: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        client.predict(inputs)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[1, WIDTH], content=b"123"), "x: .*16 bytes.*3"),
        (tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[-1, WIDTH]), "x: .*negative"),
        (tensor_pb2.Tensor(shape=[1, WIDTH], content=b"1234" * WIDTH), "x: .*number 0"),
    ],
)
def test_a_malformed_tensor_is_the_callers_error(predictions: Any, tensor: tensor_pb2.Tensor, words: str) -> None:
    with pytest.raises(grpc.RpcError, match=words) as caught:
        predictions.Predict(prediction_pb2.PredictRequest(inputs={"x": tensor}))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_an_unknown_version_is_not_found_and_names_those_there_are(client: Client) -> None:
    with pytest.raises(NotFoundError, match=str(SERVING)):
        client.predict(ones(1), version=999)


def test_a_negative_step_is_the_callers_error(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="-1"):
        client.predict(ones(1), version=-1)


def test_a_message_that_is_too_large_is_refused_and_the_next_one_answered(client: Client) -> None:
    too_many = 2**20 // (4 * WIDTH) + 1
    with pytest.raises(MessageTooLargeError, match="larger than max"):
        client.predict(ones(too_many))
    assert client.predict(ones(1)).step == SERVING


def test_more_examples_than_the_queue_holds_are_the_callers_error(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match=r"4097.*4096"):
        client.predict(ones(4097))


def test_a_stream_of_predictions_keeps_its_order_and_survives_a_bad_item(client: Client) -> None:
    items: list[Any] = [ones(rows) for rows in range(1, 40)]
    items[7] = {"x": ones(1).astype(np.int32)}
    outcomes = list(client.predict_many(items))
    assert isinstance(outcomes.pop(7), InvalidArgumentError)
    rows = [outcome.output.shape[0] for outcome in outcomes if isinstance(outcome, PredictResult)]
    assert rows == [rows for rows in range(1, 40) if rows != 8]


def test_a_version_is_scored_as_keras_scores_it(client: Client) -> None:
    batches = batches_of(sizes=(5, 1, 13, 2), seed=1)
    result = client.evaluate(batches)
    assert (result.step, result.examples, result.batches) == (SERVING, 21, 4)
    assert dict(result.metrics) == pytest.approx(keras_score(SERVING, batches), rel=1e-6)


def test_metrics_can_be_chosen(client: Client) -> None:
    result = client.evaluate(batches_of(sizes=(8,), seed=2), metrics=[Metric(name="RootMeanSquaredError")])
    assert set(result.metrics) == {"loss", "RootMeanSquaredError"}


def test_an_unknown_metric_is_the_callers_error(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="no_such_metric"):
        client.evaluate(batches_of(sizes=(8,), seed=2), metrics=["no_such_metric"])


def test_a_step_that_does_not_exist_cannot_be_scored(client: Client) -> None:
    with pytest.raises(NotFoundError, match="999"):
        client.evaluate(batches_of(sizes=(8,), seed=2), version=999)


def test_targets_that_do_not_fit_are_the_callers_error(client: Client) -> None:
    with pytest.raises(InvalidArgumentError):
        client.evaluate([(ones(4), np.ones((3, OUTPUTS), np.float32))])


def test_a_stream_without_a_batch_is_the_callers_error(channel: Any) -> None:
    stub = evaluation_pb2_grpc.EvaluationServiceStub(channel)
    options = evaluation_pb2.EvaluateRequest(options=evaluation_pb2.EvaluateOptions())
    for messages in ([], [options]):
        with pytest.raises(grpc.RpcError, match="batch") as caught:
            stub.Evaluate(iter(messages))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_streams_on_several_versions_at_once_each_get_their_own_score(client: Client) -> None:
    versions = [10, 20, 30, 10, 20, 30, 20, 10]
    streams = [batches_of(sizes=(7, 3, 16), seed=seed) for seed in range(len(versions))]
    with ThreadPoolExecutor(len(versions)) as pool:
        results = list(pool.map(lambda version, batches: client.evaluate(batches, version=version), versions, streams))
    for version, batches, result in zip(versions, streams, results, strict=True):
        assert result.step == version
        assert dict(result.metrics) == pytest.approx(keras_score(version, batches), rel=1e-6)


def test_a_dataset_of_the_servers_is_scored_as_keras_scores_it(client: Client, dataset_file: Path) -> None:
    with np.load(dataset_file) as arrays:
        expected = keras_score(20, [(arrays["x"], arrays["y"])])
    evaluation = client.evaluate_dataset("test", version=20)
    assert (evaluation.step, evaluation.dataset, evaluation.examples) == (20, "test", 50)
    assert dict(evaluation.metrics) == pytest.approx(expected, rel=1e-6)


def test_an_unknown_dataset_is_not_found_and_names_those_there_are(client: Client) -> None:
    with pytest.raises(NotFoundError, match=r"validation.*test"):
        client.evaluate_dataset("validation")


def test_the_ledger_can_be_paged_filtered_and_watched(client: Client) -> None:
    listed = list(client.list_evaluations(dataset="test", min_step=10, max_step=20))
    assert sorted(evaluation.step for evaluation in listed) == [10, 20]
    watch = client.watch_evaluations()
    assert [next(watch).sequence for _ in range(3)] == [1, 2, 3]


def test_a_page_token_of_nobodys_is_the_callers_error(channel: Any) -> None:
    stub = evaluation_pb2_grpc.EvaluationServiceStub(channel)
    with pytest.raises(grpc.RpcError, match="page_token") as caught:
        stub.ListEvaluations(evaluation_pb2.ListEvaluationsRequest(page_token="garbage"))  # noqa: S106 - no secret
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_model_is_described(client: Client) -> None:
    metadata = client.metadata()
    assert (metadata.model_name, metadata.step, metadata.replicas) == ("model", SERVING, 3)
    assert [(spec.name, spec.dtype, spec.shape) for spec in metadata.inputs] == [("x", "float32", (None, WIDTH))]
    assert [(spec.name, spec.dtype, spec.shape) for spec in metadata.outputs] == [("y", "float32", (None, OUTPUTS))]
    assert metadata.datasets == ("test",)
    assert len(metadata.devices) == 3


def test_the_state_of_versions_and_the_checkpoints_are_told(client: Client) -> None:
    status = client.status()
    assert (status.serving_step, status.latest_step) == (SERVING, SERVING)
    assert [version.step for version in status.versions if version.serving] == [SERVING]
    assert [checkpoint.step for checkpoint in client.checkpoints()] == list(STEPS)


def test_the_metrics_over_grpc_are_those_over_http(client: Client, service: RunningService) -> None:
    over_http = httpx.get(f"http://{service.http}/metrics")
    names = [
        {family.name for family in text_string_to_metric_families(text)} for text in (client.metrics(), over_http.text)
    ]
    assert names[0] == names[1]
    assert names[0] >= {
        "grpc_server_started",
        "understudy_batch_examples",
        "understudy_best_step",
        "understudy_checkpoint_age_seconds",
        "understudy_checkpoint_loads",
        "understudy_device_memory_bytes",
        "understudy_evaluation_metric",
        "understudy_latest_step",
        "understudy_replicas",
        "understudy_serving_step",
    }
    assert service.metric("understudy_replicas") == 3
    assert service.metric("understudy_serving_step") == SERVING
    assert service.metric("understudy_evaluation_step", dataset="test") > 0


def test_the_service_says_it_is_ready(service: RunningService, client: Client) -> None:
    assert httpx.get(f"http://{service.http}/readyz").json() == {"ready": True, "reason": "ready"}
    for name in ("", "understudy.v1.PredictionService", "understudy.v1.MetricsService"):
        assert client.is_serving(name)


def test_reflection_lists_every_service(channel: Any) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (response,) = list(stub.ServerReflectionInfo(iter([request])))
    assert {service.name for service in response.list_services_response.service} == {
        "understudy.v1.PredictionService",
        "understudy.v1.EvaluationService",
        "understudy.v1.ModelService",
        "understudy.v1.MetricsService",
        "understudy.v1.FleetService",
        "inference.GRPCInferenceService",
        "tensorflow.serving.PredictionService",
        "tensorflow.serving.ModelService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "grpc.reflection.v1.ServerReflection",
    }


def test_a_version_can_be_pinned_rolled_back_to_and_unpinned(client: Client) -> None:
    try:
        pinned = client.promote(10)
        assert (pinned.serving_step, pinned.pinned_step, client.predict(ones(2)).step) == (10, 10, 10)
        back = client.roll_back()
        assert (back.serving_step, client.predict(ones(2)).step) == (SERVING, SERVING)
    finally:
        unpinned = client.unpin()
    assert (unpinned.serving_step, unpinned.pinned_step) == (SERVING, None)


@pytest.mark.parametrize(
    ("request_fields", "words"),
    [
        ({}, "action is UNSPECIFIED; give PIN, UNPIN or ROLL_BACK"),
        ({"action": 99}, "action is number 99; give PIN, UNPIN or ROLL_BACK"),
        ({"action": model_pb2.PROMOTE_ACTION_PIN}, "action is PIN without a version"),
        ({"action": model_pb2.PROMOTE_ACTION_PIN, "version": UNSPECIFIED}, "version.label 0 is unknown"),
        ({"action": model_pb2.PROMOTE_ACTION_UNPIN, "version": STEP_10}, "action is UNPIN with a version"),
        ({"action": model_pb2.PROMOTE_ACTION_ROLL_BACK, "version": STEP_10}, "action is ROLL_BACK with a version"),
    ],
)
def test_a_promotion_that_says_too_little_or_too_much_is_the_callers_error(
    channel: Any, client: Client, request_fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(grpc.RpcError, match=words) as caught:
        model_pb2_grpc.ModelServiceStub(channel).Promote(model_pb2.PromoteRequest(**request_fields))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert client.status().serving_step == SERVING


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ({"page_size": 0}, "page_size is 0"),
        ({"outcome": evaluation_pb2.EVALUATION_OUTCOME_UNSPECIFIED}, "outcome 0 is unknown"),
    ],
)
def test_a_zero_that_was_sent_is_not_taken_for_an_absent_value(
    channel: Any, filters: dict[str, int], words: str
) -> None:
    stub = evaluation_pb2_grpc.EvaluationServiceStub(channel)
    with pytest.raises(grpc.RpcError, match=words) as caught:
        stub.ListEvaluations(evaluation_pb2.ListEvaluationsRequest(**filters))  # type: ignore[arg-type]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(("bootstrap", "words"), [({"resamples": 0}, "0 resamples"), ({"confidence": 0.0}, "is 0.0")])
def test_a_bootstrap_of_zero_is_the_callers_error(client: Client, bootstrap: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        client.compare(dataset="test", versions=[10, SERVING], **bootstrap)


CALLS: dict[str, Callable[[Client], object]] = {
    "predict": lambda client: client.predict({"x": ones(1)}),
    "predict_many": lambda client: [raised(outcome) for outcome in client.predict_many([{"x": ones(1)}] * 5)],
    "evaluate": lambda client: client.evaluate([({"x": ones(1)}, np.ones((1, OUTPUTS), np.float32))]),
    "compare": lambda client: client.compare(dataset="test", versions=[SERVING, SERVING], resamples=1),
    "evaluate_dataset": lambda client: client.evaluate_dataset("test"),
    "list_evaluations": lambda client: list(client.list_evaluations()),
    "watch_evaluations": lambda client: next(client.watch_evaluations()),
    "metadata": lambda client: client.metadata(),
    "status": lambda client: client.status(),
    "checkpoints": lambda client: client.checkpoints(),
    "unpin": lambda client: client.unpin(),
}


def raised(outcome: PredictResult | UnderstudyError) -> PredictResult:
    if isinstance(outcome, UnderstudyError):
        raise outcome
    return outcome


@pytest.mark.parametrize("name", CALLS)
def test_a_call_may_name_the_model_and_no_other(service: RunningService, name: str) -> None:
    call = CALLS[name]
    with Client(service.grpc, model_name="model") as naming, Client(service.grpc, model_name="modem") as mistaken:
        for _ in range(4):  # so that the server knows the bytes of a request, where it keeps them
            call(naming)
            with pytest.raises(NotFoundError, match="there is no model 'modem'; this server serves 'model'"):
                call(mistaken)


def test_predictions_and_streams_at_once_do_not_disturb_one_another(client: Client) -> None:
    batches = batches_of(sizes=(16,) * 20, seed=3)
    expected = keras_score(SERVING, batches)
    over = threading.Event()
    wrong: list[UnderstudyError | int] = []

    def predict() -> None:
        while not over.is_set():
            try:
                step = client.predict(ones(2)).step
            except UnderstudyError as error:
                wrong.append(error)
            else:
                wrong.extend([step] if step != SERVING else [])

    threads = [threading.Thread(target=predict) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        results = [client.evaluate(batches) for _ in range(3)]
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    for result in results:
        assert dict(result.metrics) == pytest.approx(expected, rel=1e-6)


def test_every_tensor_of_a_batch_must_have_as_many_examples(predictions: Any) -> None:
    inputs = {"x": encode(ones(2)), "y": encode(ones(3))}
    with pytest.raises(grpc.RpcError) as caught:
        predictions.Predict(prediction_pb2.PredictRequest(inputs=inputs))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def batches_of(*, sizes: tuple[int, ...], seed: int) -> list[tuple[Any, Any]]:
    random = np.random.default_rng(seed)
    return [
        (
            random.normal(size=(size, WIDTH)).astype(np.float32),
            random.normal(size=(size, OUTPUTS)).astype(np.float32),
        )
        for size in sizes
    ]


def keras_score(step: int, batches: list[tuple[Any, Any]]) -> dict[str, float]:
    """Return what a single device gives for the same examples; mean squared and absolute errors do not know batches."""
    x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    model = step_model(step)
    model.run_eagerly = True  # tracing takes longer
    scores: dict[str, float] = model.evaluate(x, y, batch_size=len(x), verbose=0, return_dict=True)
    return scores
