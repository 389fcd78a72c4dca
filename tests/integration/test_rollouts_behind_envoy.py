"""Clients of a fleet behind a stock Envoy, and evaluators in processes of their own, during a rollout."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from testkit.envoy import proxied
from testkit.fleet import Fleet, evaluator_process, serving_step, traffic, unfinished_rollouts
from testkit.front_ends import needs_envoy
from testkit.in_process import WAIT_SECONDS, until
from understudy.clients import Client
from understudy.service.fleet import fleet_handler

pytestmark = pytest.mark.long


@pytest.fixture
def fleet(tmp_path: Path, replicas: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr(fleet_handler, "TRAFFIC_SECONDS", 0.1)
    fleet = Fleet(tmp_path, replicas)
    fleet.chief.publish(10)
    try:
        yield fleet
    finally:
        fleet.close()


@needs_envoy
def test_no_call_through_envoy_fails_during_a_canary_and_its_share_is_that_of_the_servers(fleet: Fleet) -> None:
    fleet.evaluate(rollout="canary=30%,after=4s").wait_ready()
    fleet.follow()
    with proxied([server.grpc for server in fleet.servers.values()]) as client:
        with traffic({"all": client}) as (answered, failed):
            with unfinished_rollouts():
                fleet.begin()
                until(lambda: fleet.served() == [10, 10, 20])
                begin = len(answered)
                until(lambda: len(answered) >= begin + 90)
                during = answered[begin : begin + 90]
            until(lambda: fleet.served() == [20, 20, 20])
            end = len(answered)
            until(lambda: len(answered) >= end + 10)
        assert failed == []
        assert during.count(20) == pytest.approx(30, abs=3)
        assert set(answered[end + 3 :]) == {20}


def test_a_rollout_goes_on_where_it_was_when_the_evaluator_is_killed_and_another_takes_over(
    fleet: Fleet, tmp_path: Path
) -> None:
    options = ("--rollout=canary=30%,after=20s", "--standby")  # the time is saved each second
    with (
        ExitStack() as stack,
        evaluator_process(tmp_path, 0, *options) as (first, one),
        evaluator_process(tmp_path, 0, *options) as (_, two),
    ):
        fleet.address, fleet.client = f"{one},{two}", stack.enter_context(Client(one))
        fleet.follow()
        fleet.begin()
        until(lambda: fleet.served() == [10, 10, 20])

        def spent() -> float:
            rollout = fleet.client.fleet().rollout
            return 0.0 if rollout is None else rollout.elapsed_seconds

        until(lambda: spent() >= 4)
        before, name = spent(), fleet.part_of(20)
        first.send_signal(signal.SIGKILL)
        first.wait(WAIT_SECONDS)
        assert fleet.served() == [10, 10, 20]
        fleet.client = stack.enter_context(Client(two))
        until(lambda: serving_step(fleet.client) == 10)
        assert fleet.part_of(20) == name
        assert before - 2 <= spent()
        assert fleet.served() == [10, 10, 20]
        until(lambda: fleet.served() == [20, 20, 20])
        until(lambda: fleet.outcomes() == [(20, "started"), (20, "promoted")])
        (promoted,) = fleet.client.list_evaluations(outcome="rollout_promoted")
        assert promoted.metrics["elapsed_seconds"] >= 20
