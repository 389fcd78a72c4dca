"""Logged requests are sent again to any checkpoint, apart from the live ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner, Result
from google.protobuf import json_format

from testkit.checkpoints import OUTPUTS, WIDTH, Chief, ones, write_dataset
from testkit.front_ends import FRONT_ENDS, GRPCIO
from testkit.in_process import RunningService, running_service
from understudy.cli.main import main
from understudy.clients import PredictResult
from understudy.clients.replaying import Replay
from understudy.evaluator.datasets.dataset_files import find_records
from understudy.evaluator.datasets.request_records import LoggedRequest, encode_request
from understudy.v1 import evaluation_pb2, evaluation_pb2_grpc

STEPS = (10, 20, 30)
REQUESTS = 5


@dataclass
class Site:
    """A service that logs every request, whose serving version alone is loaded, and a log of another server."""

    service: RunningService
    own_log: Path
    log: Path
    dataset: Path

    def run(self, command: str, *arguments: str) -> Result:
        return CliRunner().invoke(main, [command, *arguments, "--target", self.service.grpc, "--json"])

    def replay(self, *arguments: str) -> dict[str, Any]:
        result = self.run("replay", str(self.log), "--max-requests-per-second", "1000", *arguments)
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(
            result.stdout.splitlines()[-1]
        )  # below the log of a stream that lost its slot
        return found


@pytest.fixture(scope="module", params=FRONT_ENDS)
def site(
    request: pytest.FixtureRequest, replicas: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("replays")
    chief = Chief(folder / "run")
    for step in STEPS:
        chief.publish(step)
    log, own_log, dataset = folder / "other", folder / "own", folder / "test.npz"
    log.mkdir()
    write_log(log)
    write_dataset(dataset, best_step=30)
    settings: dict[str, Any] = {"run_dir": folder / "run", "request_log": own_log, "request_log_sample": 1.0}
    with running_service(
        settings, {}, replicas=replicas, state_dir=folder / "state", front_end=request.param
    ) as service:
        assert service.wait_ready() == STEPS[-1]
        yield Site(service, own_log, log, dataset)


with_grpcio = pytest.mark.parametrize("site", [GRPCIO], indirect=True)
"""For tests of what lies behind the transport."""


def write_log(folder: Path) -> None:
    with tf.io.TFRecordWriter(str(folder / "requests-1.tfrecord")) as writer:
        for index in range(REQUESTS):
            inputs = {"x": np.full((1, WIDTH), index, np.float32)}
            outputs = {"y": np.full((1, OUTPUTS), index * 20, np.float32)}
            request = LoggedRequest(inputs=inputs, outputs=outputs, step=20, recorded_at=0, method="/a/B", caller="")
            for record in encode_request(request):
                writer.write(record)


def test_a_checkpoint_that_is_not_loaded_is_loaded_for_a_replay(site: Site) -> None:
    found = site.replay("--version", "20")
    assert (found["step"], found["examples"]) == (20, REQUESTS)
    assert found["outputs"]["y"]["differing_examples"] == 0


def test_two_checkpoints_that_are_not_loaded_are_compared(site: Site) -> None:
    found = site.replay("--version", "10", "--against", "20", "--batch-size", "2")
    assert (found["step"], found["against"], found["requests"]) == (10, 20, 3)
    assert found["outputs"]["y"]["differing_examples"] == REQUESTS - 1  # the first is of zeros
    assert found["outputs"]["y"]["largest_difference"] == pytest.approx((REQUESTS - 1) * 10)


def test_a_checkpoint_that_does_not_exist_is_named_with_those_that_do(site: Site) -> None:
    refused = site.run("replay", str(site.log), "--version", "11")
    assert refused.exit_code == 1
    assert "step 11" in refused.output
    assert "10, 20, 30" in refused.output


@with_grpcio
def test_a_replay_whose_slot_is_needed_in_between_goes_on_afterwards(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.evaluator.evaluation.servable_stream.RECALL_SILENT_SECONDS", 0.1)
    predict = Replay.predict
    taken: list[int] = []

    def predict_once_the_slot_was_taken(replay: Replay, inputs: Any) -> PredictResult:
        if not taken:
            with site.service.client().replay(version=10) as other:  # waits until the first was idle for too long
                taken.append(other.model.step)
        return predict(replay, inputs)

    monkeypatch.setattr(Replay, "predict", predict_once_the_slot_was_taken)
    found = site.replay("--version", "20")
    assert taken == [10]
    assert (found["step"], found["outputs"]["y"]["differing_examples"]) == (20, 0)


@with_grpcio
def test_a_timeout_is_that_of_a_request_not_of_all(site: Site) -> None:
    slowly = ("--max-requests-per-second", "1.5", "--batch-size", "1", "--timeout-seconds", "2")
    result = site.run("replay", str(site.log), "--version", "serving", *slowly)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["requests"] == REQUESTS


@with_grpcio
@pytest.mark.parametrize(
    ("messages", "refusal"),
    [
        ([], "the stream ended without a batch"),
        ([{"batch": {}}], "the first message is a batch; send options first"),
        ([{"options": {}}, {"options": {}}], "got options after the first message"),
        ([{"options": {}}, {"batch": {}}], "the batch has no inputs"),
        ([{"options": {"model_name": "other"}}], "no model 'other'"),
    ],
)
def test_a_stream_out_of_order_is_refused(site: Site, messages: list[dict[str, Any]], refusal: str) -> None:
    requests = [json_format.ParseDict(message, evaluation_pb2.ReplayRequest()) for message in messages]
    with grpc.insecure_channel(site.service.grpc) as channel:
        stub = evaluation_pb2_grpc.EvaluationServiceStub(channel)
        with pytest.raises(grpc.RpcError, match=refusal):
            list(stub.Replay(iter(requests), timeout=60))


@with_grpcio
def test_a_large_batch_is_answered_in_pieces(site: Site) -> None:
    inputs = np.random.default_rng(1).normal(size=(3000, WIDTH)).astype(np.float32)
    with site.service.client().replay() as replay:
        np.testing.assert_allclose(
            replay.predict(inputs).output[:, 0], inputs.sum(axis=1) * 30 / WIDTH, rtol=1e-4, atol=1e-4
        )


def test_only_live_requests_are_logged(site: Site) -> None:
    assert site.run("drift", str(site.log), "--against", str(site.dataset), "--version", "20").exit_code == 0
    site.replay("--version", "serving")
    site.service.client().predict(ones(1))
    site.service.start_stopping()
    site.service.join()
    records = [record for file in find_records(site.own_log) for record in tf.data.TFRecordDataset(str(file))]
    assert len(records) == 1
