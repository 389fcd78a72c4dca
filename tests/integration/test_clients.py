"""The asyncio client and the commands against the whole service. The other tests here use the synchronous client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.conftest import STEPS

from testkit.checkpoints import OUTPUTS, ones
from testkit.in_process import WAIT_SECONDS, RunningService
from understudy.clients import AsyncClient, InvalidArgumentError, PredictResult

NEWEST = STEPS[-1]

Result = subprocess.CompletedProcess[str]
Run = Callable[..., Result]


@pytest.fixture
def run(service: RunningService) -> Run:
    """Run ``understudy`` with arguments, the service being the server to ask."""

    def invoke(*arguments: str) -> Result:
        return subprocess.run(
            [sys.executable, "-m", "understudy.cli", *arguments],
            env={**os.environ, "UNDERSTUDY_TARGET": service.grpc},
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )

    return invoke


def answers(result: Result) -> list[dict[str, Any]]:
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


async def test_the_asyncio_client_predicts_and_scores(service: RunningService, dataset_file: Path) -> None:
    with np.load(dataset_file) as arrays:
        x, y = arrays["x"], arrays["y"]
    async with AsyncClient(service.grpc) as client:
        lone = await client.predict(ones(3))
        named = await client.predict({"x": ones(3)}, version=STEPS[1])
        scored = await client.evaluate(((x[i : i + 7], y[i : i + 7]) for i in range(0, 50, 7)), version="latest")
        recorded = [each async for each in client.list_evaluations(dataset="test", min_step=NEWEST)]

    np.testing.assert_allclose(lone.output, np.full((3, OUTPUTS), NEWEST))
    np.testing.assert_allclose(named.output, np.full((3, OUTPUTS), STEPS[1]))
    assert (scored.step, scored.examples, scored.batches) == (NEWEST, 50, 8)
    assert scored.metrics == pytest.approx(recorded[-1].metrics, rel=1e-6)


async def test_the_asyncio_client_streams_in_order_and_past_a_bad_item(service: RunningService) -> None:
    items: list[Any] = [{"x": index * ones(2)} for index in range(100)]
    items[50] = {"z": ones(1)}
    async with AsyncClient(service.grpc) as client:
        outcomes = [outcome async for outcome in client.predict_many(items)]

    bad = outcomes.pop(50)
    assert isinstance(bad, InvalidArgumentError)
    values = [outcome.output[0, 0] for outcome in outcomes if isinstance(outcome, PredictResult)]
    np.testing.assert_allclose(values, [NEWEST * index for index in range(100) if index != 50])


async def test_the_asyncio_client_is_told_everything_else(service: RunningService) -> None:
    async with AsyncClient(service.grpc) as client:
        metadata = await client.metadata()
        status = await client.status()
        checkpoints = await client.checkpoints()
        evaluation = await client.evaluate_dataset("test", version="serving")
        async with aclosing(client.watch_evaluations()) as watch:
            first = await anext(watch)
        metrics = await client.metrics()
        serving = await client.is_serving("understudy.v1.PredictionService")

    assert ([spec.name for spec in metadata.inputs], metadata.datasets) == (["x"], ("test",))
    assert status.serving_step == evaluation.step == NEWEST
    assert [checkpoint.step for checkpoint in checkpoints] == list(STEPS)
    assert first.sequence == 1
    assert f"understudy_serving_step {NEWEST}" in metrics
    assert serving


async def test_the_asyncio_client_decides_what_is_served(service: RunningService) -> None:
    async with AsyncClient(service.grpc) as client:
        pinned = await client.promote(STEPS[0])
        rolled_back = await client.roll_back()
        unpinned = await client.unpin()

    assert (pinned.serving_step, pinned.previous_step, pinned.pinned_step) == (STEPS[0], NEWEST, STEPS[0])
    assert rolled_back.serving_step == NEWEST
    assert (unpinned.serving_step, unpinned.pinned_step) == (NEWEST, None)


def test_the_commands_predict_and_score(run: Run, dataset_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.npz"

    written = run("predict", str(dataset_file), "--batch-size", "16", "--output", str(output))
    (file_score,) = answers(run("evaluate", str(dataset_file), "--json"))
    dataset_scores = answers(run("evaluate", "--dataset", "test", "--step", "10,30", "--json"))

    assert written.returncode == 0, written.stderr
    with np.load(output) as arrays, np.load(dataset_file) as rows:
        expected = rows["x"].sum(axis=1, keepdims=True) * NEWEST / 4
        np.testing.assert_allclose(arrays["y"], np.broadcast_to(expected, (50, OUTPUTS)), rtol=1e-4, atol=1e-4)
        assert set(arrays["step"].tolist()) == {NEWEST}
    assert [score["step"] for score in dataset_scores] == [10, 30]
    assert file_score["metrics"] == pytest.approx(dataset_scores[1]["metrics"], rel=1e-6)


def test_the_commands_tell_what_is_serving_and_change_it(run: Run) -> None:
    (before,) = answers(run("status", "--json"))
    (pinned,) = answers(run("promote", "--pin", "10", "--json"))
    (unpinned,) = answers(run("promote", "--unpin", "--json"))

    assert before["serving_step"] == NEWEST
    assert {each["step"] for each in before["evaluations"]} == set(STEPS)
    assert pinned == {"serving_step": 10, "previous_step": NEWEST, "pinned_step": 10}
    assert unpinned["serving_step"] == NEWEST
    assert run("health").stdout == "SERVING\n"


def test_a_command_says_what_the_server_says(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "examples.npz"
    np.savez(file, x=np.ones((2, 5), np.float32))

    result = run("predict", str(file))

    assert result.returncode == 1
    assert result.stderr.startswith("Error: ")
    assert "'x'" in result.stderr
    assert result.stderr.count("\n") == 1
