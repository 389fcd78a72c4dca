"""A second evaluator of a run, which waits for the first one's state folder."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

from testkit.checkpoints import Chief, ones
from testkit.front_ends import FRONT_ENDS, GRPCIO
from testkit.in_process import RunningService, running_service, until
from understudy.cli.main import main
from understudy.clients import UnavailableError
from understudy.evaluator.evaluation.training_end import ExitReason, ServiceExit
from understudy.evaluator.serving.decision_file import DECISION_FILE
from understudy.evaluator.settings import EvaluatorSettings
from understudy.service.grpcio.grpc_server import server_of
from understudy.service.server import Service
from understudy.service.service_errors import SettingsError
from understudy.service.settings import ServeSettings

pytestmark = pytest.mark.long


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(folder: Path, replicas: tuple[str, ...], stack: ExitStack, front_end: str = GRPCIO) -> RunningService:
    settings: dict[str, Any] = {"run_dir": folder / "run", "standby": True}
    state_dir = folder / "run" / "evaluator"
    return stack.enter_context(
        running_service(settings, {}, replicas=replicas, state_dir=state_dir, front_end=front_end)
    )


def health(service: RunningService, name: str = "understudy.v1.PredictionService") -> int:
    with grpc.insecure_channel(service.grpc) as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=60).status)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_the_second_evaluator_says_that_it_stands_by_and_takes_over_when_the_first_ends(
    chief: Chief, replicas: tuple[str, ...], tmp_path: Path, stack: ExitStack, front_end: str
) -> None:
    chief.publish(10)
    with ExitStack() as first_stack:
        first = start(tmp_path, replicas, first_stack)
        assert first.wait_ready() == 10
        second = start(tmp_path, replicas, stack, front_end)
        ready = httpx.get(f"http://{second.http}/readyz")
        assert (ready.status_code, second.answers("/healthz")) == (503, 200)
        assert "standing by" in ready.text
        assert "is in use by process" in ready.text
        assert health(second) == health_pb2.HealthCheckResponse.NOT_SERVING
        refused = second.client()
        for call in (refused.status, refused.fleet, lambda: refused.predict({"x": ones(1)})):
            with pytest.raises(UnavailableError, match=r"standing by: .* is in use by process"):
                call()
        assert first.client().predict({"x": ones(1)}).step == 10
    assert second.wait_ready() == 10
    assert health(second) == health_pb2.HealthCheckResponse.SERVING
    assert second.client().predict({"x": ones(1)}).step == 10
    assert second.answers("/metrics") == 200


def test_an_evaluator_whose_run_is_moved_and_trained_anew_leaves_it_to_the_one_that_has_taken_over(
    chief: Chief, replicas: tuple[str, ...], tmp_path: Path, stack: ExitStack
) -> None:
    chief.publish(10)
    first = start(tmp_path, replicas, stack)
    assert first.wait_ready() == 10
    second = start(tmp_path, replicas, stack)
    (tmp_path / "run").rename(tmp_path / "away")
    until(lambda: "standing by" not in httpx.get(f"http://{second.http}/readyz").text)
    assert first.client().predict({"x": ones(1)}).step == 10
    until(lambda: "was deleted, moved or replaced" in first.client().status().problem)
    assert "New checkpoints may be missing: the ledger" in httpx.get(f"http://{first.http}/").text
    said = CliRunner().invoke(main, ["status", "--target", first.grpc]).output
    assert "new checkpoints may be missing: the ledger" in said
    identity = json.loads((tmp_path / "away" / "evaluator" / DECISION_FILE).read_bytes())["evaluator_id"]
    Chief(tmp_path / "run").publish(20)
    assert second.wait_ready() == 20
    decided = tmp_path / "run" / "evaluator" / DECISION_FILE
    until(lambda: decided.exists() and json.loads(decided.read_bytes())["replaces"] == [identity])
    first.join()  # `understudy serve` then starts again, and stands by


def test_one_that_stands_by_goes_on_while_the_storage_of_the_state_folder_does_not_answer(
    chief: Chief, replicas: tuple[str, ...], tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    chief.publish(10)
    answers = threading.Event()
    flock = fcntl.flock

    def as_nfs(descriptor: int, operation: int) -> None:
        if not answers.is_set():
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", as_nfs)
    stack.callback(answers.set)
    service = start(tmp_path, replicas, stack)
    assert "the state folder cannot be locked now" in httpx.get(f"http://{service.http}/readyz").text
    answers.set()
    assert service.wait_ready() == 10


def test_one_that_stands_by_ends_when_it_is_told_to(
    chief: Chief, replicas: tuple[str, ...], tmp_path: Path, stack: ExitStack
) -> None:
    chief.publish(10)
    first = start(tmp_path, replicas, stack)
    first.wait_ready()
    with ExitStack() as second_stack:
        start(tmp_path, replicas, second_stack)
    assert first.client().predict({"x": ones(1)}).step == 10


@pytest.mark.parametrize("standby", [False, True])
def test_a_server_that_is_told_to_end_while_it_starts_does_not_begin_to_serve(
    replicas: tuple[str, ...], tmp_path: Path, *, standby: bool
) -> None:
    state_dir = tmp_path / "run" / "evaluator"
    settings = ServeSettings(run_dir=tmp_path / "run", standby=standby, grpc_port=0, http_port=0)
    lines: list[str] = []

    async def run() -> ServiceExit:
        stop = asyncio.Event()
        stop.set()
        evaluator = EvaluatorSettings(state_dir=state_dir, devices=replicas)
        make = partial(server_of, settings)
        return await Service(settings, evaluator, announce=lines.append, make_front_end=make).run(stop)

    assert asyncio.run(run()).reason is ExitReason.SIGNALLED
    assert lines == []
    assert not (state_dir / "ledger.sqlite").exists()


def test_a_server_that_follows_does_not_stand_by() -> None:
    with pytest.raises(SettingsError, match=r"^standby goes without follow"):
        ServeSettings(follow="127.0.0.1:8500", standby=True)
