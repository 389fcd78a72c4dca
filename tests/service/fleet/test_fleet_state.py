"""What an evaluator knows of the servers that follow it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from understudy.evaluator.evaluator_errors import OverloadedError
from understudy.evaluator.serving.decision_file import ServingDecision
from understudy.service.fleet import fleet_state
from understudy.service.fleet.fleet_state import REMEMBERED_SECONDS, Fleet, FleetServer

FIRST = ServingDecision(step=10, digest="a", sequence=1, evaluator_id="e")
SECOND = ServingDecision(step=20, digest="b", sequence=2, evaluator_id="e")


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def only(fleet: Fleet) -> FleetServer:
    (server,) = fleet.status().servers
    return server


def test_a_lag_is_the_time_from_a_decision_to_the_report_and_grows_while_a_server_is_behind() -> None:
    clock, lags = Clock(), list[float]()
    fleet = Fleet(clock=clock, on_carried_out=lags.append)
    fleet.decided(FIRST)
    with fleet.joined("one", "ipv4:1", "0.1") as member:
        fleet.report(member, 10, "a", "")
        assert (only(fleet).current, only(fleet).lag_seconds) == (True, None)
        fleet.decided(SECOND)
        clock.now += 3
        fleet.report(member, 10, "a", "no room")
        behind = only(fleet)
        assert (behind.current, behind.lag_seconds, behind.reason, fleet.status().behind) == (False, 3, "no room", 1)
        clock.now += 2
        fleet.report(member, 20, "b", "")
        clock.now += 7
        served = only(fleet)
        assert (served.current, served.lag_seconds, served.serving_seconds, served.reason) == (True, 5, 7, "")
    assert lags == [5]


def test_a_server_that_left_is_listed_for_an_hour_or_until_it_is_back() -> None:
    clock = Clock()
    fleet = Fleet(clock=clock)
    fleet.decided(FIRST)
    for name in ("one", "two"):
        with fleet.joined(name, "ipv4:1", "0.1") as member:
            fleet.report(member, None, "", "")
    assert [(each.name, each.connected, each.reason) for each in fleet.status().servers] == [
        ("one", False, "it is not connected"),
        ("two", False, "it is not connected"),
    ]
    with fleet.joined("one", "ipv4:2", "0.1"):
        assert [each.connected for each in fleet.status().servers] == [True, False]
        clock.now += REMEMBERED_SECONDS + 1
        assert [each.name for each in fleet.status().servers] == ["one"]


def test_there_is_a_limit_of_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_state, "MAX_SERVERS", 1)
    fleet = Fleet()
    with fleet.joined("one", "ipv4:1", "0.1"), pytest.raises(OverloadedError), fleet.joined("two", "ipv4:2", "0.1"):
        pass


def test_servers_that_left_take_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_state, "MAX_SERVERS", 2)
    clock = Clock()
    fleet = Fleet(clock=clock)
    with fleet.joined("stays", "ipv4:1", "0.1"):
        for name in ("first", "second", "third"):
            with fleet.joined(name, "ipv4:2", "0.1"):
                pass
            clock.now += 1
        assert [each.name for each in fleet.status().servers] == ["stays", "third"]
