"""A new version that computes a sample of the requests once more, before it answers any."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import structlog
import tensorflow as tf
from click.testing import CliRunner

from testkit.checkpoints import OUTPUTS, WIDTH, Chief, ones, step_model
from testkit.fleet import Fleet, evaluator_process, serving_step, traffic, unfinished_rollouts
from testkit.in_process import RunningService, running_service, until
from understudy.cli.main import main
from understudy.clients import Client
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.records.recorder import Recorder
from understudy.evaluator.types import EvaluationOutcome
from understudy.service.fleet import fleet_handler
from understudy.service.traffic import traffic_sample

pytestmark = pytest.mark.long

SOON = "shadow=100%,after=1s,requests=20,disagreement=5%"
LATE = "shadow=100%,after=1h,requests=20,disagreement=5%"
BLOCKED_SECONDS = 100.0
LONGEST_SECONDS = BLOCKED_SECONDS / 2
"""A call that waited for the blocked shadow would take longer."""


Serve = Callable[..., RunningService]


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_handler, "TRAFFIC_SECONDS", 0.1)
    monkeypatch.setattr(traffic_sample, "TICK_SECONDS", 0.05)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def fleet(tmp_path: Path, replicas: tuple[str, ...]) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, replicas)
    fleet.chief.publish(10)
    try:
        yield fleet
    finally:
        fleet.close()


@pytest.fixture
def serve(chief: Chief, replicas: tuple[str, ...], tmp_path: Path, stack: ExitStack) -> Serve:
    """Serve step 10 of a run, without any server that follows."""

    def serve(rollout: str) -> RunningService:
        chief.publish(10)
        running = stack.enter_context(
            running_service(
                {"run_dir": tmp_path / "run"},
                {"rollout": rollout},
                replicas=replicas,
                state_dir=tmp_path / "run" / "evaluator",
            )
        )
        assert running.wait_ready() == 10
        return running

    return serve


def outcomes(client: Client) -> list[tuple[int, str]]:
    return [
        (entry.step, entry.outcome.removeprefix("rollout_"))
        for entry in client.list_evaluations()
        if entry.outcome.startswith("rollout_")
    ]


def answers_until(client: Client, expected: Sequence[tuple[int, str]]) -> list[int]:
    """Call all the time until the ledger has these steps; return the steps of the answers."""
    answered: list[int] = []

    def is_there() -> bool:
        answered.extend(client.predict(ones(2)).step for _ in range(5))
        return outcomes(client) == list(expected)

    until(is_there)
    return answered


def test_a_version_that_agrees_is_promoted_after_the_time_on_one_server(chief: Chief, serve: Serve) -> None:
    client = serve(SOON).client()
    chief.publish_other(20, step_model(10))
    answered = answers_until(client, [(20, "started"), (20, "promoted")])
    assert answered[0] == 10
    assert client.status().serving_step == 20
    started, promoted = client.list_evaluations()
    assert (
        started.reason == "a shadow that computes 100% of the requests once more for 1 s; step 10 answers all requests"
    )
    assert re.match(r"promoted to all: nothing spoke against it in [1-9]", promoted.reason)
    assert promoted.metrics["compared_requests"] >= 20
    assert promoted.metrics["elapsed_seconds"] >= 1
    assert (promoted.metrics["disagreement"], promoted.metrics["failed_requests"]) == (0, 0)
    assert promoted.metrics["latency_ratio"] > 0


def test_a_serving_version_that_changes_state_computes_no_request_twice(
    chief: Chief, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slot, "may_overlap", False)
    client = serve(SOON).client()
    chief.publish_other(20, step_model(10))
    answers_until(client, [(20, "started"), (20, "promoted")])
    _, promoted = client.list_evaluations()
    assert promoted.metrics["compared_requests"] >= 20
    assert np.isnan(promoted.metrics.get("latency_ratio", np.nan))


class Counting(tf.Module):  # type: ignore[misc]
    """Answers ones with 10, and counts its calls in a variable."""

    def __init__(self) -> None:
        self.kernel = tf.Variable(np.full((WIDTH, OUTPUTS), 10 / WIDTH, np.float32))
        self.calls = tf.Variable(0.0, name="calls")

    @tf.function(input_signature=[tf.TensorSpec((None, WIDTH), tf.float32, name="x")])  # type: ignore[untyped-decorator]
    def __call__(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"y": tf.matmul(x, self.kernel) + 0.0 * self.calls.assign_add(1.0)}


def test_a_version_that_changes_its_variables_keeps_them_until_it_serves(
    replicas: tuple[str, ...], stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[float] = []
    forward = Slot.forward

    def spied(slot: Slot, inputs: Any) -> Any:
        if threading.current_thread().name == "understudy-shadow":
            calls.extend(float(keras.ops.convert_to_numpy(each)) for each in slot._model.variables if each.shape == ())
        return forward(slot, inputs)

    monkeypatch.setattr(Slot, "forward", spied)
    folder = tmp_path / "models"
    tf.saved_model.save(Counting(), folder / "10")
    settings = {"checkpoints": folder}
    service = stack.enter_context(
        running_service(settings, {"rollout": LATE}, replicas=replicas[:1], state_dir=tmp_path / "state")
    )
    service.wait_ready()
    client = service.client()
    tf.saved_model.save(Counting(), tmp_path / "20")
    (tmp_path / "20").rename(folder / "20")
    until(lambda: client.predict(ones(2)).step == 10 and compared(client) >= 20)
    assert len(calls) >= 20
    assert {*calls} == {0.0}


def test_one_that_answers_otherwise_goes_back_by_itself_and_the_next_good_one_is_promoted(
    chief: Chief, serve: Serve
) -> None:
    service = serve(SOON)
    client = service.client()
    chief.publish(20)
    assert set(answers_until(client, [(20, "started"), (20, "rolled_back")])) == {10}
    *_, back = client.list_evaluations()
    assert "100.00% of the answers" in back.reason
    assert "at most 5.00% may" in back.reason
    assert back.metrics["largest_difference"] == pytest.approx(1.0)
    chief.publish_other(30, step_model(10))
    answers_until(client, [(20, "started"), (20, "rolled_back"), (30, "started"), (30, "promoted")])


def nan_model() -> Any:
    model = step_model(10)
    model.layers[-1].set_weights([np.full((WIDTH, OUTPUTS), np.nan, np.float32)])
    return model


def wider_model() -> Any:
    x = keras.Input((WIDTH + 1,), name="x")
    wider = keras.Model(x, keras.layers.Dense(OUTPUTS, use_bias=False, name="y")(x))
    wider.compile(optimizer="sgd", loss="mse")
    return wider


@pytest.mark.parametrize(
    ("model", "counted"), [(nan_model, "not_finite_answers"), (wider_model, "failed_requests")], ids=["nan", "inputs"]
)
def test_one_whose_answers_are_no_numbers_or_that_fails_goes_back_and_no_call_fails(
    chief: Chief, serve: Serve, model: Any, counted: str
) -> None:
    service = serve("shadow=100%,after=1h")
    client = service.client()
    chief.publish_other(20, model())
    assert set(answers_until(client, [(20, "started"), (20, "rolled_back")])) == {10}
    *_, back = client.list_evaluations()
    assert back.metrics[counted] >= 20


def test_versions_without_a_loss_are_compared_by_their_classes_in_the_format_of_others(
    replicas: tuple[str, ...], tmp_path: Path, stack: ExitStack
) -> None:
    """Every output of a version is its step, so the class is the first one of all; only another bias changes it."""

    def export(step: int, best: int) -> None:
        model = step_model(step)
        model.layers[-1].set_weights([model.layers[-1].get_weights()[0] + np.eye(OUTPUTS, dtype=np.float32)[best]])
        model.export(tmp_path / "staged" / str(step), verbose=False)
        (tmp_path / "staged" / str(step)).rename(tmp_path / "theirs" / str(step))

    (tmp_path / "theirs").mkdir()
    export(10, best=3)
    running = stack.enter_context(
        running_service(
            {"checkpoints": tmp_path / "theirs"}, {"rollout": SOON}, replicas=replicas, state_dir=tmp_path / "state"
        )
    )
    assert running.wait_ready() == 10
    client = running.client()
    export(20, best=4)
    answers_until(client, [(20, "started"), (20, "rolled_back")])
    assert "100.00% of the answers" in [*client.list_evaluations()][-1].reason
    export(30, best=3)
    answers_until(client, [(20, "started"), (20, "rolled_back"), (30, "started"), (30, "promoted")])


def test_a_call_does_not_wait_for_a_version_that_takes_long(
    chief: Chief, serve: Serve, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the shadow computes is held while calls go on, as by a model that takes as long."""
    blocked, may_go_on = threading.Event(), threading.Event()
    forward = Slot.forward

    def held(slot: Slot, inputs: Any) -> Any:
        if threading.current_thread().name == "understudy-shadow":
            blocked.set()
            may_go_on.wait(BLOCKED_SECONDS)
        return forward(slot, inputs)

    monkeypatch.setattr(Slot, "forward", held)
    stack.callback(may_go_on.set)
    service = serve(LATE)
    client = service.client()
    chief.publish_other(20, step_model(10))

    def calls() -> bool:
        client.predict({"x": ones(1)})
        return blocked.is_set()

    until(calls)
    for _ in range(200):
        began = time.monotonic()
        assert client.predict({"x": ones(1)}).step == 10
        assert time.monotonic() - began < LONGEST_SECONDS
    may_go_on.set()
    until(lambda: calls() and compared(client) > 0)


def compared(client: Client) -> int:
    rollout = client.fleet().rollout
    return 0 if rollout is None or rollout.shadow is None else rollout.shadow.compared


def test_servers_that_follow_compare_and_the_evaluator_adds_up_and_goes_on_after_a_restart(fleet: Fleet) -> None:
    plan = "shadow=100%,after=2s,requests=20,disagreement=5%"
    with structlog.testing.capture_logs() as lines:
        evaluator = fleet.evaluate(rollout=plan)
        assert evaluator.wait_ready() == 10
        fleet.follow()
        with traffic(fleet.clients, answer=10) as (answered, failed):
            with unfinished_rollouts():
                fleet.chief.publish_other(20, step_model(10))
                until(lambda: compared(fleet.client) >= 30)
                assert evaluator.metric("understudy_rollout_compared_requests") >= 30
                assert evaluator.metric("understudy_rollout_disagreement") == 0
                shown = CliRunner().invoke(main, ["status", "--fleet", "--target", evaluator.grpc]).output
                assert "decided: step 10; comparing step 20 (" in shown
                assert "of 20 requests compared, 0.00% differ)" in shown
                until(lambda: fleet.client.fleet().rollout.elapsed_seconds >= 2)  # type: ignore[union-attr]
                fleet.end_evaluator()
                until(lambda: len(answered) > 100)
                assert fleet.evaluate(rollout=plan).wait_ready() == 10
                rollout = fleet.client.fleet().rollout
                assert rollout is not None
                assert rollout.shadow is not None
                assert rollout.shadow.compared >= 20
                assert rollout.elapsed_seconds >= 1
            until(lambda: fleet.served() == [20, 20, 20])
        assert failed == []
        until(lambda: fleet.outcomes() == [(20, "started"), (20, "promoted")])
        fleet.chief.publish(30)
        with traffic({"one": fleet.clients["one"]}, answer=10):
            until(lambda: fleet.outcomes()[2:] == [(30, "started"), (30, "rolled_back")])
        assert fleet.served() == [20, 20, 20]
        until(lambda: sum(line["event"] == "rollout" for line in lines) == 4)  # each follows its entry in the ledger
    audited = [line for line in lines if line["event"] == "rollout"]
    said = [(line["step"], line["outcome"].removeprefix("rollout_")) for line in audited]
    assert said == [(20, "started"), (20, "promoted"), (30, "started"), (30, "rolled_back")]
    assert all(line["message"] and line["sequence"] for line in audited)


def test_an_operator_stops_it_with_a_rollback(fleet: Fleet) -> None:
    fleet.evaluate(rollout=LATE).wait_ready()
    fleet.chief.publish_other(20, step_model(10))
    until(lambda: outcomes(fleet.client) == [(20, "started")])
    assert fleet.client.roll_back().serving_step == 10
    until(lambda: outcomes(fleet.client) == [(20, "started"), (20, "stopped")])
    until(lambda: fleet.client.fleet().rollout is None)


@pytest.fixture
def stop_at(
    monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> Callable[[EvaluationOutcome], tuple[threading.Event, threading.Event]]:
    """Let a rollout wait once the ledger has an outcome of it: what tells that it has, and what lets it go on."""

    def stop_at(outcome: EvaluationOutcome) -> tuple[threading.Event, threading.Event]:
        record, recorded, go_on = Recorder.record_rollout, threading.Event(), threading.Event()
        stack.callback(go_on.set)

        def slow(self: Recorder, step: int, digest: str, said: EvaluationOutcome, *args: Any, **more: Any) -> None:
            record(self, step, digest, said, *args, **more)
            if said is outcome:
                recorded.set()
                go_on.wait(LONGEST_SECONDS)

        monkeypatch.setattr(Recorder, "record_rollout", slow)
        return recorded, go_on

    return stop_at


@pytest.mark.parametrize("outcome", [EvaluationOutcome.ROLLOUT_STARTED, EvaluationOutcome.ROLLOUT_PROMOTED])
def test_a_rollback_serves_the_version_before_as_soon_as_the_ledger_has_the_step(
    chief: Chief,
    serve: Serve,
    stop_at: Callable[[EvaluationOutcome], tuple[threading.Event, threading.Event]],
    outcome: EvaluationOutcome,
) -> None:
    recorded, go_on = stop_at(outcome)
    client = serve(LATE if outcome is EvaluationOutcome.ROLLOUT_STARTED else SOON).client()
    chief.publish_other(20, step_model(10))

    def calls_until_recorded() -> bool:
        client.predict(ones(2))
        return recorded.is_set()

    until(calls_until_recorded)
    assert client.roll_back().serving_step == 10
    go_on.set()


def test_it_goes_on_where_it_was_when_the_evaluator_is_killed_and_another_takes_over(
    chief: Chief, tmp_path: Path, stack: ExitStack
) -> None:
    """It ends by the number of requests, which only this test sends."""
    chief.publish(10)
    options = ("--rollout=shadow=100%,after=1s,requests=300,disagreement=5%", "--standby")
    first, one = stack.enter_context(evaluator_process(tmp_path, 0, *options))
    client = stack.enter_context(Client(one))
    until(lambda: serving_step(client) == 10)
    _, two = stack.enter_context(evaluator_process(tmp_path, 0, *options))
    chief.publish_other(20, step_model(10))

    def calls(client: Client, least: int, seconds: float) -> bool:
        client.predict({"x": ones(1)})
        rollout = client.fleet().rollout
        return rollout is not None and compared(client) >= least and rollout.elapsed_seconds >= seconds

    until(lambda: calls(client, 40, 1))
    first.send_signal(signal.SIGKILL)
    second = stack.enter_context(Client(two))
    until(lambda: serving_step(second) == 10)
    assert compared(second) >= 20
    answers_until(second, [(20, "started"), (20, "promoted")])
    (promoted,) = second.list_evaluations(outcome="rollout_promoted")
    assert promoted.metrics["compared_requests"] >= 300
    assert promoted.metrics["elapsed_seconds"] >= 1
