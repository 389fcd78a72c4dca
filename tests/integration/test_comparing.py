"""Comparisons over a real channel: versions on the same batches, loaded or not, with intervals."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from click.testing import CliRunner

from testkit.checkpoints import OUTPUTS, WIDTH, ones, step_model, write_dataset
from testkit.in_process import RunningService
from testkit.scarce_slots import (
    BEST,
    DATASET_FILE,
    SERVING,
    absent_steps,
    loaded_steps,
    service_short_of_slots,
    until_given_back,
    until_taken,
)
from understudy.cli.main import main
from understudy.clients import (
    AsyncClient,
    Client,
    CompareResult,
    InvalidArgumentError,
    Metric,
    NotFoundError,
)
from understudy.evaluator.evaluation import bootstrap
from understudy.v1 import evaluation_pb2, evaluation_pb2_grpc, tensor_pb2


@pytest.fixture(scope="module")
def service(replicas: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with service_short_of_slots(tmp_path_factory.mktemp("run"), replicas) as service:
        yield service


@pytest.fixture
def dataset_file(tmp_path: Path) -> Path:
    """Return a copy of the service's dataset."""
    file = tmp_path / DATASET_FILE
    write_dataset(file, best_step=BEST)
    return file


@pytest.fixture
def client(service: RunningService) -> Client:
    return service.client()


@pytest.fixture
def unloaded(client: Client) -> tuple[int, int]:
    """Return two steps that are not loaded."""
    first, second, *_ = absent_steps(client)
    return first, second


def draw(seed: int, sizes: tuple[int, ...], *, weighted: bool = False) -> list[Any]:
    """Draw examples that step `BEST` fits best."""
    rng = np.random.default_rng(seed)
    batches = []
    for size in sizes:
        x = rng.normal(size=(size, WIDTH)).astype(np.float32)
        y = x.sum(axis=1, keepdims=True) * np.float32(BEST / WIDTH) + rng.normal(size=(size, OUTPUTS)).astype("f4")
        weights = rng.uniform(0, 2, size).astype(np.float32)
        batches.append((x, y, weights) if weighted else (x, y))
    return batches


def test_versions_whose_loss_is_undefined_have_no_difference_of_it(client: Client) -> None:
    x, y, _ = draw(1, (8,), weighted=True)[0]
    result = client.compare([(x, y, np.zeros(8, np.float32))], versions=[SERVING, BEST], resamples=20)

    for version in result.versions:
        assert "loss" in version.score.undefined
        assert "loss" not in version.differences
        assert version.loss_difference is None


def example_losses(step: int, batches: list[Any]) -> Any:
    model = step_model(step)
    losses = []
    for x, y, *weights in batches:
        errors = np.mean(np.square(np.asarray(model(x)) - y), axis=1, dtype=np.float64)
        losses.append(errors * weights[0] if weights else errors)
    return np.concatenate(losses)


def assert_compares(result: CompareResult, steps: list[int], batches: list[Any], *, seed: int = 0) -> None:
    """Hold a comparison against evaluations of each step alone and a bootstrap in NumPy."""
    baseline = example_losses(steps[0], batches)
    weights = bootstrap.draw(seed, result.resamples, 0, len(baseline)).T.astype(np.float64)
    tail = (1 - result.confidence) / 2
    assert [version.score.step for version in result.versions] == steps
    for step, version in zip(steps, result.versions, strict=True):
        losses = example_losses(step, batches)
        assert version.score.examples == len(losses)
        assert version.score.metrics["loss"] == pytest.approx(losses.mean(), rel=1e-6)
        assert version.differences["loss"] == pytest.approx(
            version.score.metrics["loss"] - result.versions[0].score.metrics["loss"]
        )
        if version is not result.versions[0]:
            low, high = np.quantile(((losses - baseline) @ weights) / weights.sum(axis=0), [tail, 1 - tail])
            paired = version.loss_difference
            assert paired is not None
            assert (paired.mean, paired.low, paired.high) == pytest.approx(
                ((losses - baseline).mean(), low, high), rel=1e-4, abs=1e-6
            )
    assert result.versions[0].loss_difference is None


def test_versions_that_are_not_loaded_take_turns_on_the_same_batches(
    service: RunningService, client: Client, unloaded: tuple[int, int]
) -> None:
    batches = draw(1, (31, 1, 64, 2), weighted=True)
    steps = [*unloaded, SERVING]
    result = client.compare(batches, versions=steps, seed=3)
    assert_compares(result, steps, batches, seed=3)
    assert any("took turns" in note for note in result.notes)
    until_given_back(service)


def test_slices_of_features_are_scored_and_compared(client: Client) -> None:
    loaded = loaded_steps(client)[:2]
    group = np.arange(300) % 2
    batches = [(x, y, None, {"group": group}) for x, y in draw(5, (300,))]
    options: dict[str, Any] = {"slices": ["group"], "resamples": 50}
    alone = client.evaluate(batches, version=loaded[1], **options)
    result = client.compare(batches, versions=loaded, **options)
    for part, apart in zip(alone.slices, result.versions[1].slice_differences, strict=True):
        x, y, *_ = batches[0]
        rows = group == int(part.name.removeprefix("group="))
        first, second = (example_losses(step, [(x[rows], y[rows])]).mean() for step in loaded)
        assert (part.examples, apart.examples, apart.name) == (150, 150, part.name)
        assert part.metrics["loss"] == pytest.approx(second, rel=1e-5)
        assert part.intervals["loss"].low < second < part.intervals["loss"].high
        found = apart.differences["loss"]
        assert found.value == pytest.approx(second - first, rel=1e-4)
        assert found.low < found.value < found.high
        assert 0 <= found.p_value <= 1
    with pytest.raises(
        InvalidArgumentError, match="no feature 'grp' to slice by; there are label, predicted, x, group"
    ):
        client.evaluate(batches, slices=["grp"])
    with pytest.raises(InvalidArgumentError, match="the edges 3,1 do not ascend"):
        client.compare(batches, versions=loaded, slices=["group:3,1"])


def test_versions_that_are_loaded_are_scored_side_by_side(client: Client) -> None:
    loaded = loaded_steps(client)[:2]
    batches = draw(2, (300, 7))
    result = client.compare(batches, versions=loaded, resamples=200, confidence=0.9)
    assert_compares(result, loaded, batches)
    assert result.notes == ()
    assert result.versions[1].metric_differences["loss"].value == result.versions[1].differences["loss"]
    assert (result.resamples, result.confidence, result.seed) == (200, 0.9, 0)


def test_labels_metrics_and_a_dataset_of_the_servers_can_be_chosen(client: Client, dataset_file: Path) -> None:
    with np.load(dataset_file) as arrays:
        batches = [(arrays["x"], arrays["y"])]
    result = client.compare(versions=["serving", "best"], dataset="test", metrics=[Metric(name="RootMeanSquaredError")])
    assert_compares(result, [SERVING, BEST], batches)
    assert set(result.versions[1].differences) == {"loss", "RootMeanSquaredError"}
    assert result.versions[1].loss_difference is not None
    assert result.versions[1].loss_difference.conclusion == "better"


def test_versions_that_stand_for_the_same_step_do_not_differ(client: Client) -> None:
    result = client.compare(draw(3, (9,)), versions=["serving", "latest"])
    paired = result.versions[1].loss_difference
    assert paired is not None
    assert (paired.mean, paired.low, paired.high, paired.conclusion) == (0.0, 0.0, 0.0, "undecided")


def test_one_example_decides_nothing(client: Client) -> None:
    result = client.compare(draw(3, (1,)), versions=["serving", "best"])
    apart = result.versions[1].loss_difference
    assert apart is not None
    assert (apart.low, apart.high, apart.conclusion) == (-np.inf, np.inf, "undecided")
    assert any("too many resamples draw no example" in note for note in result.notes)


async def test_the_asyncio_client_compares_too(service: RunningService) -> None:
    batches = draw(4, (5, 6))
    async with AsyncClient(service.grpc) as client:
        result = await client.compare(batches, versions=[SERVING, BEST])
        assert_compares(result, [SERVING, BEST], batches)
        with pytest.raises(InvalidArgumentError, match="got 1 versions"):
            await client.compare(batches, versions=[SERVING])


def test_the_command_compares_on_a_file_and_on_a_dataset(service: RunningService, dataset_file: Path) -> None:
    shared = ["--versions", "50,best", "--target", service.grpc]
    told = CliRunner().invoke(main, ["compare", str(dataset_file), *shared])
    assert told.exit_code == 0, told.output
    assert "step 40 is better than step 50" in told.stdout
    as_json = CliRunner().invoke(main, ["compare", "--dataset", "test", *shared, "--json", "--resamples", "50"])
    result = json.loads(as_json.stdout.splitlines()[-1])  # the service in this process logs, too
    assert [version["score"]["step"] for version in result["versions"]] == [SERVING, BEST]
    assert result["resamples"] == 50


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"versions": [SERVING]}, "got 1 versions; 2 to 16"),
        ({"versions": [SERVING] * 17}, "got 17 versions"),
        ({"versions": [SERVING, BEST], "confidence": 2.0}, "confidence is 2.0"),
        ({"versions": [SERVING, BEST], "resamples": 10**6}, "1000000 resamples"),
        ({"versions": [SERVING, BEST], "seed": -1}, "seed is -1"),
        ({"versions": [SERVING, BEST], "metrics": ["no_such_metric"]}, "no_such_metric"),
        ({"versions": [SERVING, BEST], "metrics": ["SparseCategoricalAccuracy"]}, "do not fit the metric 'Sparse"),
        ({"versions": [SERVING, BEST], "dataset": "test"}, "got a batch beside the dataset"),
    ],
)
def test_what_cannot_be_compared_is_the_callers_error(
    service: RunningService, client: Client, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        client.compare(draw(5, (4,)), **options)
    until_given_back(service)


def test_what_does_not_exist_is_not_found(client: Client) -> None:
    with pytest.raises(NotFoundError, match="999"):
        client.compare(draw(5, (4,)), versions=[SERVING, 999])
    with pytest.raises(NotFoundError, match="validation"):
        client.compare(versions=[SERVING, BEST], dataset="validation")


def test_a_comparison_without_options_or_batches_is_the_callers_error(service: RunningService) -> None:
    batch = evaluation_pb2.CompareRequest(batch=evaluation_pb2.EvaluateBatch())
    versions = [tensor_pb2.VersionSelector(step=step) for step in (SERVING, BEST)]
    options = evaluation_pb2.CompareRequest(options=evaluation_pb2.CompareOptions(versions=versions))
    with grpc.insecure_channel(service.grpc) as channel:
        stub = evaluation_pb2_grpc.EvaluationServiceStub(channel)
        for messages, words in (
            ([batch], "send options with the versions to compare first"),
            ([options], "at least one"),
            ([], "at least one"),
        ):
            with pytest.raises(grpc.RpcError, match=words) as caught:
                stub.Compare(iter(messages))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    until_given_back(service)


def test_a_batch_that_does_not_fit_ends_the_comparison(
    service: RunningService, client: Client, unloaded: tuple[int, int]
) -> None:
    batches = [*draw(6, (4,)), (ones(4), np.ones((3, OUTPUTS), np.float32))]
    with pytest.raises(InvalidArgumentError, match="3 examples"):
        client.compare(batches, versions=[SERVING, unloaded[0]])
    until_given_back(service)


def test_a_cancelled_comparison_gives_everything_back(
    service: RunningService, client: Client, unloaded: tuple[int, int]
) -> None:
    over = threading.Event()
    versions = [tensor_pb2.VersionSelector(step=step) for step in unloaded]

    def messages() -> Iterator[evaluation_pb2.CompareRequest]:
        yield evaluation_pb2.CompareRequest(options=evaluation_pb2.CompareOptions(versions=versions))
        over.wait(60)

    with grpc.insecure_channel(service.grpc) as channel:
        call = evaluation_pb2_grpc.EvaluationServiceStub(channel).Compare.future(messages())
        until_taken(service, client, unloaded[0])
        call.cancel()  # type: ignore[no-untyped-call]
        until_given_back(service)
        over.set()
    another = next(step for step in absent_steps(client) if step not in unloaded)
    assert client.evaluate(draw(7, (8,)), version=another, timeout_seconds=30).step == another
