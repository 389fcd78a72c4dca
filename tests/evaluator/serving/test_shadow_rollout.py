"""A rollout by shadow: a version is compared on live requests before it serves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.rollout_harness import NEW, NEWER, OLD, PLAN, SHADOW, Harness
from understudy.evaluator.serving.rollout_file import ROLLOUT_FILE
from understudy.evaluator.serving.rollout_health import ServerReport
from understudy.evaluator.serving.rollout_watch import FAILING_SECONDS
from understudy.evaluator.serving.shadow_health import ShadowCounts, ShadowReport


@pytest.fixture
def shadow(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path, SHADOW)
    harness.rollout.advance(harness.wishes)
    yield harness
    harness.close()


def reported(counts: ShadowCounts, *, loaded: bool = True, reason: str = "") -> ShadowReport:
    return ShadowReport(step=NEW[0], digest=NEW[1], loaded=loaded, reason=reason, counts=counts)


def test_a_shadow_begins_without_servers_and_is_promoted_after_the_time_and_the_requests(shadow: Harness) -> None:
    assert shadow.steps == [(20, "started")]
    decision = shadow.decisions.current
    assert decision is not None
    assert decision.shadow is not None
    assert (decision.key, decision.shadow.key, decision.shadow.share) == (OLD, NEW, 0.05)
    assert decision.of("one").shadow == decision.shadow
    for second in range(102):
        shadow.own = reported(ShadowCounts(compared=second // 4))
        shadow.look()
    assert shadow.rollout.serves(NEW, shadow.wishes.may_stay) == OLD  # the time is over, and 25 requests are too few
    shadow.servers["one"] = ServerReport(
        name="one", key=OLD, reason="", shadow=reported(ShadowCounts(compared=40, disagreeing=3.0))
    )
    shadow.look()
    shadow.end()
    assert shadow.steps == [(20, "started"), (20, "promoted")]
    promoted = shadow.ledger.page()[-1]
    assert promoted.reason == "promoted to all: nothing spoke against it in 1.72 m, and 65 requests were compared"
    assert promoted.metrics["disagreement"] == pytest.approx(3 / 65)
    assert shadow.decisions.current is not None
    assert shadow.decisions.current.shadow is None


def test_a_shadow_that_differs_too_much_is_taken_back(shadow: Harness) -> None:
    shadow.own = reported(ShadowCounts(compared=50, disagreeing=30.0))
    shadow.look()
    assert shadow.steps == [(20, "started"), (20, "rolled_back")]
    assert "60.00% of the answers to 50 requests differ" in shadow.ledger.page()[-1].reason
    assert shadow.rollout.rejects(NEW)


def test_a_shadow_that_a_server_cannot_load_is_taken_back(shadow: Harness) -> None:
    shadow.servers["one"] = ServerReport(
        name="one", key=OLD, reason="", shadow=reported(ShadowCounts(), loaded=False, reason="it is damaged")
    )
    shadow.own = reported(ShadowCounts(compared=10))
    shadow.look()
    shadow.look(FAILING_SECONDS)
    assert shadow.ledger.page()[-1].reason == "rolled back: server one does not compute with it: it is damaged"


def test_the_counts_and_the_time_of_a_shadow_outlive_a_restart(shadow: Harness) -> None:
    for second in range(60):
        shadow.own = reported(ShadowCounts(compared=second))
        shadow.look()
    shadow.own = None
    shadow.restart()
    running = shadow.rollout.running
    assert running is not None
    assert running.shadow is not None
    assert 54 <= running.shadow.compared <= 59
    assert 55 <= running.elapsed_seconds <= 60
    assert shadow.steps == [(20, "started")]
    shadow.plan = PLAN
    shadow.restart()
    assert shadow.rollout.running is None  # of another kind


def test_what_servers_compared_while_the_evaluator_was_away_counts(shadow: Harness) -> None:
    def compared(name: str, requests: int) -> None:
        report = reported(ShadowCounts(compared=requests, disagreeing=requests / 100))
        shadow.servers[name] = ServerReport(name=name, key=OLD, reason="", shadow=report)

    def total() -> int:
        running = shadow.rollout.running
        assert running is not None
        assert running.shadow is not None
        return running.shadow.compared

    compared("one", 10)
    compared("two", 40)
    shadow.own = reported(ShadowCounts(compared=5))
    for _ in range(6):
        shadow.look()
    assert total() == 55
    compared("one", 13)
    shadow.look()
    assert total() == 58  # and this process is killed before it writes that
    shadow.restart()
    assert total() == 55
    shadow.servers.clear()
    compared("one", 30)
    shadow.own = reported(ShadowCounts(compared=6))  # counts anew, as it is in the process that was killed
    shadow.look()
    assert total() == 55 + 20 + 6
    compared("two", 4)  # was started again, too
    compared("three", 7)  # was never reported before
    for _ in range(4):
        shadow.look()
    assert total() == 55 + 20 + 6 + 4 + 7
    shadow.restart()
    shadow.look()
    assert total() == 55 + 20 + 6 + 4 + 7 + 6


def test_a_file_of_an_older_version_has_servers_count_from_their_first_report_on(shadow: Harness) -> None:
    shadow.own = reported(ShadowCounts(compared=10))
    for _ in range(6):
        shadow.look()
    file = shadow.folder / ROLLOUT_FILE
    values = json.loads(file.read_bytes())
    del values["shadow_servers"]
    file.write_text(json.dumps(values))
    shadow.own = None
    shadow.restart()
    for requests in (50, 53):
        report = reported(ShadowCounts(compared=requests))
        shadow.servers["one"] = ServerReport(name="one", key=OLD, reason="", shadow=report)
        shadow.look()
    assert shadow.rollout.running is not None
    assert shadow.rollout.running.shadow is not None
    assert shadow.rollout.running.shadow.compared == 13


def test_a_second_rollout_begins_with_numbers_of_its_own(shadow: Harness) -> None:
    shadow.own = reported(ShadowCounts(compared=50, disagreeing=30.0))
    shadow.look()
    shadow.wishes.chosen = NEWER
    shadow.rollout.advance(shadow.wishes)
    assert shadow.steps[-1] == (30, "started")
    assert shadow.ledger.page()[-1].metrics["compared_requests"] == 0
