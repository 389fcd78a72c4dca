"""A new version on a part of the servers that follow, over the network, before all serve it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from click.testing import CliRunner

from testkit.checkpoints import OUTPUTS, WIDTH, ones, write_dataset
from testkit.fleet import Fleet, traffic, unfinished_rollouts
from testkit.in_process import until
from understudy.cli.main import main
from understudy.evaluator.model.slot import Slot
from understudy.service.fleet import fleet_handler

pytestmark = pytest.mark.long

SOON = "canary=30%,after=3s"
LATE = "canary=30%,after=1h"


@pytest.fixture
def fleet(tmp_path: Path, replicas: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr(fleet_handler, "TRAFFIC_SECONDS", 0.1)
    write_dataset(tmp_path / "test.npz", best_step=30)
    fleet = Fleet(tmp_path, replicas)
    fleet.chief.publish(10)
    try:
        yield fleet
    finally:
        fleet.close()


def test_a_part_answers_with_the_new_version_first_and_after_the_time_all_do(fleet: Fleet) -> None:
    evaluator = fleet.evaluate(rollout=SOON, gate=("test/loss not worse by 0.0 than serving",))
    assert evaluator.wait_ready() == 10
    fleet.follow()
    with traffic(fleet.clients) as (answered, failed):
        with unfinished_rollouts():
            name = fleet.begin()
            until(lambda: fleet.served() == [10, 10, 20])
            assert fleet.clients[name].predict({"x": ones(1)}).step == 20
            assert fleet.client.predict({"x": ones(1)}).step == 10  # the evaluator itself
            assert evaluator.metric("understudy_rollout_step") == 20
            shown = CliRunner().invoke(main, ["status", "--fleet", "--target", evaluator.grpc])
            assert f"decided: step 10; rolling out step 20 on {name} (" in shown.output
        until(lambda: fleet.served() == [20, 20, 20])
    assert failed == []
    assert {10, 20} == set(answered)
    until(lambda: fleet.outcomes() == [(20, "started"), (20, "promoted")])
    (promoted,) = fleet.client.list_evaluations(outcome="rollout_promoted")
    assert promoted.metrics["canary_requests"] > 20
    assert promoted.metrics["other_requests"] > 20
    assert promoted.metrics["elapsed_seconds"] >= 3
    assert fleet.client.status().serving_step == 20
    assert fleet.client.fleet().rollout is None
    assert evaluator.metric("understudy_evaluations_total", outcome="rollout_promoted") == 1


def test_one_whose_calls_fail_is_taken_back_and_the_next_good_one_is_rolled_out(fleet: Fleet) -> None:
    """Step 20 takes other inputs than the callers send, which no score tells."""
    fleet.evaluate(rollout=LATE).wait_ready()
    fleet.follow()
    x = keras.Input((WIDTH + 1,), name="x")
    wider = keras.Model(x, keras.layers.Dense(OUTPUTS, use_bias=False, name="y")(x))
    wider.compile(optimizer="sgd", loss="mse")
    with traffic(fleet.clients) as (_, failed):
        fleet.chief.publish_other(20, wider)
        name = fleet.part_of(20)
        until(lambda: fleet.outcomes() == [(20, "started"), (20, "rolled_back")])
        until(lambda: all(server.serving_step == 10 for server in fleet.client.fleet().servers))
    assert fleet.served() == [10, 10, 10]
    assert failed
    assert "requests failed, and 0 of" in fleet.last_reason()
    fleet.chief.publish(30)
    assert fleet.part_of(30) == name
    until(lambda: fleet.served() == [10, 10, 30])


def test_one_that_takes_much_longer_is_taken_back(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleeping stands for a larger model, so that the others, on the same cores, are no slower for it."""
    forward = Slot.forward

    def slow(slot: Slot, inputs: Any) -> Any:
        outputs = forward(slot, inputs)
        if np.allclose(outputs["y"], 20):
            time.sleep(0.2)
        return outputs

    monkeypatch.setattr(Slot, "forward", slow)
    fleet.evaluate(rollout=LATE).wait_ready()
    fleet.follow()
    with ExitStack() as stack:
        failures = [stack.enter_context(traffic({name: client}))[1] for name, client in fleet.clients.items()]
        fleet.begin()
        until(lambda: fleet.outcomes() == [(20, "started"), (20, "rolled_back")])
        until(lambda: fleet.served() == [10, 10, 10])
    assert failures == [[], [], []]
    assert "requests took longer than" in fleet.last_reason()


def test_one_that_the_part_cannot_load_is_taken_back(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.evaluator.serving.rollout_watch.FAILING_SECONDS", 0.5)
    fleet.evaluate(rollout=LATE).wait_ready()
    fleet.follow(follow_download_mib=1)
    x = keras.Input((WIDTH,), name="x")
    hidden = keras.layers.Dense(2**16, use_bias=False)(x)
    large = keras.Model(x, keras.layers.Dense(OUTPUTS, use_bias=False, name="y")(hidden))
    large.compile(optimizer="sgd", loss="mse")
    fleet.chief.publish_other(20, large)
    until(lambda: fleet.outcomes() == [(20, "started"), (20, "rolled_back")])
    assert "follow_download_mib is 1" in fleet.last_reason()
    assert fleet.served() == [10, 10, 10]


def test_one_whose_later_score_is_refused_is_taken_back(fleet: Fleet, tmp_path: Path) -> None:
    """The dataset changes while the evaluator is away, so that it is scored again, and is worse on the new content."""
    gate = {"gate": ("test/loss not worse by 0.0 than serving",)}
    fleet.evaluate(rollout=LATE, **gate).wait_ready()
    fleet.follow()
    fleet.begin()
    until(lambda: fleet.served() == [10, 10, 20])
    fleet.end_evaluator()
    assert fleet.served() == [10, 10, 20]
    write_dataset(tmp_path / "test.npz", best_step=0)
    assert fleet.evaluate(rollout=LATE, **gate).wait_ready() == 10
    until(lambda: fleet.outcomes() == [(20, "started"), (20, "rolled_back")])
    assert "the gate refuses its newest score" in fleet.last_reason()
    until(lambda: fleet.served() == [10, 10, 10])


def test_it_goes_on_where_it_was_when_the_evaluator_is_started_again(fleet: Fleet) -> None:
    def spent() -> float:
        rollout = fleet.client.fleet().rollout
        return 0.0 if rollout is None else rollout.elapsed_seconds

    with unfinished_rollouts():
        fleet.evaluate(rollout="canary=30%,after=4s").wait_ready()
        fleet.follow()
        name = fleet.begin()
        until(lambda: fleet.served() == [10, 10, 20])
        until(lambda: spent() >= 2)
        before = spent()
        fleet.end_evaluator()
        assert fleet.evaluate(rollout="canary=30%,after=4s").wait_ready() == 10
        assert fleet.part_of(20) == name
        assert spent() >= before - 1
        assert fleet.served() == [10, 10, 20]
    until(lambda: fleet.served() == [20, 20, 20])
    until(lambda: fleet.outcomes() == [(20, "started"), (20, "promoted")])


def test_an_operator_stops_it_with_a_rollback(fleet: Fleet) -> None:
    fleet.evaluate(rollout=LATE).wait_ready()
    fleet.follow()
    fleet.begin()
    until(lambda: fleet.served() == [10, 10, 20])
    assert fleet.client.roll_back().serving_step == 10
    until(lambda: fleet.served() == [10, 10, 10])
    until(lambda: fleet.outcomes() == [(20, "started"), (20, "stopped")])
    assert fleet.client.unpin().serving_step == 10
    fleet.chief.publish(30)
    fleet.part_of(30)
    assert fleet.client.promote(30).serving_step == 30
    until(lambda: fleet.served() == [30, 30, 30])
    until(lambda: fleet.outcomes()[2:] == [(30, "started"), (30, "promoted")])
