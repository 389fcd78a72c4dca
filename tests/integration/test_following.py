"""Servers that serve what an evaluator decides, whose state folder they read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from testkit.checkpoints import Chief, ones
from testkit.in_process import RunningService, running_service, until
from understudy.clients import Client, PermissionDeniedError
from understudy.evaluator.evaluator_errors import ConfigurationError
from understudy.evaluator.factory import create_evaluator
from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.settings import CheckpointLocation, EvaluatorSettings

pytestmark = pytest.mark.long

Start = Callable[..., RunningService]


@pytest.fixture
def evaluator_stack() -> Iterator[ExitStack]:
    """Ends the evaluator, before the test does or with it."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def evaluate(replicas: tuple[str, ...], tmp_path: Path, dataset_file: Path, evaluator_stack: ExitStack) -> Start:
    """Return a function that starts the evaluator of the run."""

    def start(**evaluator: Any) -> RunningService:
        settings = {"run_dir": tmp_path / "run", "eval_data": {"test": dataset_file}}
        state_dir = tmp_path / "run" / "evaluator"
        return evaluator_stack.enter_context(
            running_service(settings, evaluator, replicas=replicas, state_dir=state_dir)
        )

    return start


@pytest.fixture
def follow(replicas: tuple[str, ...], tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a server that follows the evaluator."""
    with ExitStack() as stack:

        def start(name: str) -> RunningService:
            evaluator = {"follow": str(tmp_path / "run" / "evaluator"), "poll_interval_seconds": 3600.0}
            settings = {"run_dir": tmp_path / "run"}
            running = running_service(settings, evaluator, replicas=replicas, state_dir=tmp_path / name)
            return stack.enter_context(running)

        yield start


def serves(client: Client, step: int) -> Callable[[], bool]:
    return lambda: client.status().serving_step == step


def test_promotions_pins_and_rollbacks_reach_every_server(chief: Chief, evaluate: Start, follow: Start) -> None:
    """And nothing else does: step 30 is the newest, and is not served before the evaluator promotes it."""
    servers = [follow("one"), follow("two")]
    for server in servers:
        answer = httpx.get(f"http://{server.http}/readyz")
        assert answer.status_code == 503
        assert answer.json()["reason"] == (
            "no checkpoint is serving yet; the evaluator to follow has decided nothing yet"
        )
    chief.publish(10)
    chief.publish(20)
    evaluator = evaluate(version_policy=10)
    evaluator.wait_ready()
    assert [server.wait_ready() for server in servers] == [10, 10]

    clients = [server.client() for server in servers]
    client = evaluator.client()
    chief.publish(30)
    until(lambda: 30 in {checkpoint.step for checkpoint in client.checkpoints()})
    for step in (30, 20, 30, 10):
        assert client.promote(step).serving_step == step
        for each in clients:
            until(serves(each, step))
            assert each.predict({"x": ones(1)}).step == step
    for step in (30, 20):
        assert client.roll_back().serving_step == step
        for each in clients:
            until(serves(each, step))
    with pytest.raises(PermissionDeniedError, match="so Promote is refused; call that evaluator"):
        clients[0].promote(10)
    assert clients[0].status().pinned_step is None
    assert not [*clients[0].list_evaluations()]


def test_a_server_whose_state_is_in_a_run_that_is_trained_anew_ends_to_start_again(
    chief: Chief, evaluate: Start, follow: Start, evaluator_stack: ExitStack, tmp_path: Path
) -> None:
    chief.publish(10)
    evaluate().wait_ready()
    server = follow("run/server")
    assert server.wait_ready() == 10
    evaluator_stack.close()
    (tmp_path / "run").rename(tmp_path / "away")
    until(lambda: "checkpoints is gone" in server.client().status().problem)
    assert server.client().predict({"x": ones(1)}).step == 10
    Chief(tmp_path / "run").publish(20)
    server.join()


def test_what_the_gate_refuses_is_served_nowhere(chief: Chief, evaluate: Start, follow: Start) -> None:
    evaluator = evaluate(min_improvement=0.0)
    watch = evaluator.client().watch_evaluations()
    server = follow("one")
    chief.publish(30)
    assert server.wait_ready() == 30
    chief.publish(50)
    while next(watch).outcome != "refused":
        pass
    assert evaluator.client().status().serving_step == 30
    until(lambda: 50 in {checkpoint.step for checkpoint in server.client().checkpoints()})
    assert server.client().predict({"x": ones(1)}).step == 30


def test_servers_go_on_without_the_evaluator_and_new_ones_join_them(
    chief: Chief, evaluate: Start, follow: Start, evaluator_stack: ExitStack
) -> None:
    chief.publish(10)
    evaluate(version_policy=10).wait_ready()
    first = follow("one")
    assert first.wait_ready() == 10
    evaluator_stack.close()

    chief.publish(20)
    second = follow("two")
    assert second.wait_ready() == 10
    assert first.client().predict({"x": ones(1)}).step == 10

    evaluate(version_policy=20).wait_ready()
    for server in (first, second):
        until(serves(server.client(), 20))


def test_another_checkpoint_of_the_same_step_is_not_served(chief: Chief, follow: Start, tmp_path: Path) -> None:
    chief.publish(10)
    state_dir = tmp_path / "run" / "evaluator"
    state_dir.mkdir(exist_ok=True)
    decision = state_dir / "serving.json"
    decision.write_text(json.dumps({"step": 10, "digest": "0" * 64}))
    server = follow("one")
    until(lambda: bool(server.client().checkpoints()))
    assert server.answers("/readyz") == 503

    (checkpoint,) = server.client().checkpoints()
    digest = checkpoint.digest
    decision.write_text(json.dumps({"step": 10, "digest": digest}))
    assert server.wait_ready() == 10


@pytest.mark.parametrize(
    ("location", "settings", "message"),
    [
        ({"is_run": False}, {}, "^follow goes with run_dir"),
        ({"eval_data": {"test": Path("test.npz")}}, {}, "^follow goes without eval_data and experiment"),
        ({"experiment": "digits"}, {}, "^follow goes without eval_data and experiment"),
        ({}, {"follow": "own"}, "^follow is own, the state folder of this server; .*--state-dir"),
        ({}, {"version_policy": "best"}, "^version_policy goes without follow"),
        ({}, {"cluster": "127.0.0.1:6379"}, "^cluster goes without follow"),
        ({}, {"gate": ("test/loss < 1",)}, "^gate goes without follow"),
        ({}, {"replaces_evaluator": "a" * 32}, "^replaces_evaluator goes without follow"),
        ({}, {"replaces_evaluator": "the old one"}, "^replaces_evaluator is 'the old one'; give .*32 hexadecimal"),
    ],
)
def test_what_would_decide_beside_the_evaluator_is_refused(
    location: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        create_evaluator(
            CheckpointLocation(**{"folder": Path("run"), "is_run": True, **location}),
            EvaluatorSettings(**{"state_dir": Path("own"), "follow": "run/evaluator", **settings}),
            SilentObserver(),
        )
