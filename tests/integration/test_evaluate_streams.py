"""Many Evaluate streams over a real channel: exact, in turns, of any length, and gone without a trace."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import grpc
import keras
import numpy as np
import pytest

from testkit.checkpoints import OUTPUTS, WIDTH, ones, step_model
from testkit.front_ends import FRONT_ENDS
from testkit.in_process import RunningService
from testkit.scarce_slots import (
    BEST,
    SERVING,
    absent_steps,
    loaded_steps,
    service_short_of_slots,
    until_given_back,
    until_taken,
)
from understudy.clients import Client, InvalidArgumentError, Metric
from understudy.v1 import evaluation_pb2, evaluation_pb2_grpc, tensor_pb2
from understudy.wire import encode

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=FRONT_ENDS)
def service(
    request: pytest.FixtureRequest, replicas: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningService]:
    with service_short_of_slots(tmp_path_factory.mktemp("run"), replicas, request.param) as service:
        yield service


@pytest.fixture
def client(service: RunningService) -> Client:
    return service.client()


def draw(seed: int, sizes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [
        (
            rng.normal(size=(size, WIDTH)).astype(np.float32),
            rng.normal(size=(size, OUTPUTS)).astype(np.float32),
            rng.uniform(0, 2, size).astype(np.float32),
        )
        for size in sizes
    ]


@cache
def keras_model(step: int) -> keras.Model:
    """Return a version as Keras has it, for all tests, as its first evaluation traces it."""
    return step_model(step)


def keras_score(step: int, batches: list[Any]) -> dict[str, float]:
    """Return what one device gives for the same examples; neither metric of the model knows batches."""
    x, y, weights = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    scores: dict[str, float] = keras_model(step).evaluate(
        x, y, sample_weight=weights, batch_size=len(x), verbose=0, return_dict=True
    )
    return scores


def test_eight_streams_on_three_versions_each_score_as_one_device_does(client: Client, service: RunningService) -> None:
    absent = absent_steps(client)[:2]
    versions = [*absent, SERVING, *absent, SERVING, *absent]
    streams = [draw(seed, (7, 1, 2, 31, 64, 3)) for seed in range(len(versions))]
    loads = service.metric("understudy_checkpoint_loads_total", outcome="loaded")
    with ThreadPoolExecutor(len(versions)) as pool:
        results = list(pool.map(lambda version, batches: client.evaluate(batches, version=version), versions, streams))
    for version, batches, result in zip(versions, streams, results, strict=True):
        assert (result.step, result.examples, result.batches) == (version, 108, 6)
        assert dict(result.metrics) == pytest.approx(keras_score(version, batches), rel=1e-6)
    assert service.metric("understudy_checkpoint_loads_total", outcome="loaded") >= loads + len(absent)
    assert len(loaded_steps(client)) <= 3
    until_given_back(service)


@pytest.mark.parametrize(("version", "step"), [("serving", SERVING), ("latest", SERVING), ("best", BEST), (10, 10)])
def test_a_label_or_a_step_says_what_is_scored(client: Client, version: Any, step: int) -> None:
    batches = draw(9, (12, 5))
    result = client.evaluate(batches, version=version)
    assert result.step == step
    assert dict(result.metrics) == pytest.approx(keras_score(step, batches), rel=1e-6)
    assert result.computing_seconds > 0
    assert result.waiting_seconds >= 0


def test_a_metric_is_asked_for_by_its_keras_name_and_configuration(client: Client) -> None:
    metrics: list[str | Metric] = [
        "mae",
        Metric(name="R2Score", config={"class_aggregation": "variance_weighted_average", "name": "r2"}),
    ]
    result = client.evaluate(draw(10, (40,)), metrics=metrics)
    assert set(result.metrics) == {"loss", "mae", "r2"}


def test_a_loss_that_is_not_a_number_is_told_as_such(client: Client) -> None:
    result = client.evaluate([(np.full((3, WIDTH), np.nan, np.float32), np.zeros((3, OUTPUTS), np.float32))])
    assert np.isnan(result.metrics["loss"])
    assert result.examples == 3


@pytest.mark.parametrize(
    ("batch", "options", "words"),
    [
        ((ones(4), np.ones((3, OUTPUTS), np.float32)), {}, "target 'targets' has 3 examples; 4 were expected"),
        ((ones(4), np.ones((4, 3), np.float32)), {}, r"do not fit the model's loss 'mse' \(targets: float32\[exam"),
        (
            (ones(4), np.ones((4, OUTPUTS), np.float32)),
            {"metrics": ["mae", "SparseCategoricalAccuracy"]},
            "targets of 'y' do not fit the metric 'SparseCategoricalAccuracy' .* it takes class numbers",
        ),
        ((ones(4), {"z": np.ones((4, OUTPUTS), np.float32)}), {}, "got the targets 'z'; expected 'y', 'targets'"),
        ((ones(4), np.ones((4, OUTPUTS), np.float32), np.ones(5, np.float32)), {}, "sample_weights' has 5 examples; 4"),
        ((ones(4), np.ones((4, OUTPUTS), np.float32)), {"metrics": ["nonsense"]}, "nonsense"),
        ((ones(4), np.ones((4, OUTPUTS), np.float32)), {"metrics": [Metric(name="AUC", config={"x": 1})]}, "AUC"),
        (
            (ones(4), np.ones((4, OUTPUTS), np.float32), np.array([1, np.nan, 1, 1], np.float32)),
            {},
            "nan for example 1",
        ),
        ((ones(4), np.ones((4, OUTPUTS), np.float32)), {"slices": ["age:30,18"]}, "the edges 30,18 do not ascend"),
        ((ones(4), np.ones((4, OUTPUTS), np.float32)), {"slices": ["age:18,30"]}, "no feature 'age' to slice by"),
    ],
)
def test_what_cannot_be_scored_is_the_callers_error(
    service: RunningService, client: Client, batch: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        client.evaluate([batch], **options)
    until_given_back(service)


@pytest.mark.parametrize("broken", [False, True])
def test_a_stream_that_is_cancelled_or_broken_gives_its_handle_back(
    service: RunningService, client: Client, *, broken: bool
) -> None:
    absent = absent_steps(client)[0]
    over = threading.Event()

    def messages() -> Iterator[evaluation_pb2.EvaluateRequest]:
        version = tensor_pb2.VersionSelector(step=absent)
        yield evaluation_pb2.EvaluateRequest(options=evaluation_pb2.EvaluateOptions(version=version))
        x, y, _ = draw(11, (8,))[0]
        batch = evaluation_pb2.EvaluateBatch(inputs={"x": encode(x)}, targets={"targets": encode(y)})
        yield evaluation_pb2.EvaluateRequest(batch=batch)
        over.wait(60)

    channel = grpc.insecure_channel(service.grpc)
    call = evaluation_pb2_grpc.EvaluationServiceStub(channel).Evaluate.future(messages())
    until_taken(service, client, absent)
    if broken:
        channel.close()
    else:
        call.cancel()  # type: ignore[no-untyped-call]
    until_given_back(service)
    over.set()
    channel.close()
    another = next(step for step in absent_steps(client) if step != absent)
    assert client.evaluate(draw(12, (8,)), version=another, timeout_seconds=30).step == another
