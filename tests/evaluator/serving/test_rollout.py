"""The steps of a rollout, told when to look and with servers that report as told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from understudy.evaluator.evaluator_errors import LedgerError
from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.records.outbox import Outbox, Subscription
from understudy.evaluator.records.recorder import Recorder
from understudy.evaluator.records.result_files import ResultFiles
from understudy.evaluator.records.summaries import Summaries
from understudy.evaluator.rollout_plan import CanaryPlan, RolloutPlan, ShadowPlan
from understudy.evaluator.serving.decision_file import DecisionFile
from understudy.evaluator.serving.rollout import FOLLOWERS_SECONDS, Rollout
from understudy.evaluator.serving.rollout_file import ROLLOUT_FILE
from understudy.evaluator.serving.rollout_health import ServerReport, Traffic
from understudy.evaluator.serving.rollout_watch import FAILING_SECONDS, FIRST_SERVED_SECONDS, LOST_SECONDS
from understudy.evaluator.serving.shadow_health import ShadowCounts, ShadowReport
from understudy.evaluator.types import CheckpointKey

OLD, NEW, NEWER = (10, "a" * 64), (20, "b" * 64), (30, "c" * 64)
PLAN = CanaryPlan(share=0.3, after_seconds=100.0)
SHADOW = ShadowPlan(share=0.05, after_seconds=100.0, least_requests=50, most_disagreement=0.1)
NAMES = ("one", "two", "three")


class Wishes:
    """What the policy and the operator want."""

    def __init__(self) -> None:
        self.chosen: CheckpointKey | None = NEW
        self.pinned: CheckpointKey | None = None
        self.serving: CheckpointKey | None = OLD
        self.refused = ""
        self.stays = True

    def chosen_key(self) -> CheckpointKey | None:
        return self.chosen

    def pinned_key(self) -> CheckpointKey | None:
        return self.pinned

    def serving_key(self) -> CheckpointKey | None:
        return self.serving

    def may_stay(self, key: CheckpointKey) -> bool:
        return self.stays and key in (OLD, NEW)

    def refusal(self, key: CheckpointKey, serving: CheckpointKey) -> str:
        assert (key, serving) == (NEW, OLD)
        return self.refused


class Harness:
    """An evaluator that serves `OLD`, in a folder that outlives it."""

    def __init__(self, folder: Path, plan: RolloutPlan = PLAN) -> None:
        self.folder = folder
        self.plan = plan
        self.own: ShadowReport | None = None
        self.now = 1000.0
        self.wishes = Wishes()
        self.servers: dict[str, ServerReport] = {}
        self.ledger = self._open()

    def _open(self) -> Ledger:
        path = self.folder / "ledger.sqlite"
        self.outbox = Outbox(path, [Subscription(destination="test")])
        self.ledger = Ledger(path, outbox=self.outbox)
        self.recorder = Recorder(
            ledger=self.ledger,
            results=ResultFiles(self.folder / "results"),
            summaries=Summaries(self.folder / "tensorboard", self.ledger.curves),
            datasets=[],
            observer=SilentObserver(),
            listener=lambda _: None,
        )
        self.decisions = DecisionFile(self.folder)
        if self.decisions.current is None:
            self.decisions.publish(lambda: OLD)
        self.rollout = Rollout(
            self.plan,
            directory=self.folder,
            decisions=self.decisions,
            recorder=self.recorder,
            ledger=self.ledger,
            clock=lambda: self.now,
        )
        self.rollout.use_fleet(lambda: list(self.servers.values()))
        self.rollout.use_shadow(lambda: self.own)
        return self.ledger

    def restart(self) -> None:
        """Begin anew with what is on disk, as after SIGKILL."""
        self.close()
        self._open()

    def close(self) -> None:
        self.recorder.close()
        self.outbox.close()
        self.ledger.close()

    def serve(
        self, *names: str, key: CheckpointKey | None = None, reason: str = "", traffic: Traffic | None = None
    ) -> None:
        """Have servers report what is decided for them, or this."""
        for name in names or NAMES:
            decision = self.decisions.current
            assert decision is not None
            self.servers[name] = ServerReport(
                name=name, key=key or decision.of(name).key, reason=reason, traffic=traffic
            )

    def look(self, seconds: float = 1.0) -> None:
        """Let time pass, and take the steps that are due."""
        self.now += seconds
        if self.rollout.is_due():
            self.rollout.advance(self.wishes)

    def start(self) -> tuple[str, ...]:
        """Begin a rollout, whose part serves it; return the part."""
        self.serve()
        self.rollout.advance(self.wishes)
        self.serve()
        assert self.rollout.running is not None
        return self.rollout.running.servers

    def end(self) -> None:
        """Do as the controller does: serve what the rollout says."""
        key = self.rollout.serves(self.wishes.chosen or OLD, self.wishes.may_stay)
        self.wishes.serving = key
        self.decisions.publish(lambda: key)
        self.rollout.advance(self.wishes)

    @property
    def steps(self) -> list[tuple[int, str]]:
        return [(record.step, record.outcome.value.removeprefix("rollout_")) for record in self.ledger.page()]

    def events(self) -> list[str]:
        """Deliver the events that wait, and return their types."""
        types = []
        while (delivery := self.outbox.next("test")) is not None:
            types.append(delivery.event.type.value)
            self.outbox.delivered(delivery)
        return types

    def decided(self) -> list[int]:
        decision = self.decisions.current
        assert decision is not None
        return [decision.of(name).step for name in NAMES]


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path)
    yield harness
    harness.close()


def test_a_part_serves_it_first_and_all_after_the_time(harness: Harness) -> None:
    part = harness.start()
    assert len(part) == 1
    assert sorted(harness.decided()) == [10, 10, 20]
    assert harness.rollout.serves(NEW, harness.wishes.may_stay) == OLD
    for _ in range(99):
        harness.look()
    assert harness.rollout.serves(NEW, harness.wishes.may_stay) == OLD
    harness.look(2)
    assert harness.rollout.serves(NEW, harness.wishes.may_stay) == NEW
    assert sorted(harness.decided()) == [10, 10, 20]  # until this evaluator has loaded it
    harness.end()
    assert harness.decided() == [20, 20, 20]
    assert harness.steps == [(20, "started"), (20, "promoted")]
    started, promoted = harness.ledger.page()
    assert started.notes == (f"canary servers: {part[0]}",)
    assert (started.metrics["servers"], started.metrics["canary_servers"]) == (3, 1)
    assert promoted.metrics["elapsed_seconds"] == pytest.approx(101)
    assert promoted.reason == "promoted to all: nothing spoke against it in 1.68 m"
    assert not (harness.folder / ROLLOUT_FILE).exists()
    assert harness.events() == ["rollout_started", "rollout_promoted"]


def test_the_time_passes_only_while_one_of_the_part_serves_it(harness: Harness) -> None:
    (name,) = harness.start()
    harness.serve(name, key=OLD)
    for _ in range(30):
        harness.look(4)
    assert harness.rollout.running is not None
    assert harness.rollout.running.elapsed_seconds == 0
    harness.serve()
    harness.look(3600)  # suspended: an hour of which no report tells
    assert harness.rollout.running.elapsed_seconds < 10


def test_the_time_and_the_part_outlive_a_restart_and_nothing_is_recorded_twice(harness: Harness) -> None:
    part = harness.start()
    for _ in range(60):
        harness.look()
    harness.restart()
    running = harness.rollout.running
    assert running is not None
    assert running.servers == part
    assert 55 <= running.elapsed_seconds <= 60
    assert sorted(harness.decided()) == [10, 10, 20]
    harness.servers.pop(next(name for name in NAMES if name not in part))
    harness.serve("another")  # servers that come and go do not change the part
    for _ in range(46):
        harness.look()
    harness.end()
    assert harness.steps == [(20, "started"), (20, "promoted")]


def test_a_version_that_fails_is_taken_back_and_not_tried_again(harness: Harness) -> None:
    (name,) = harness.start()
    harness.serve(traffic=Traffic(requests=1000, latencies=(1000,)))
    harness.serve(name, traffic=Traffic(requests=60, errors=40, latencies=(60,)))
    harness.look()
    harness.serve(*(set(NAMES) - {name}), traffic=Traffic(requests=1100, latencies=(1100,)))
    harness.look()
    assert harness.decided() == [10, 10, 10]
    assert harness.steps == [(20, "started"), (20, "rolled_back")]
    record = harness.ledger.page()[-1]
    assert record.reason == "rolled back: 40 of its 100 requests failed, and 0 of 200 at the others"
    assert (record.metrics["canary_errors"], record.metrics["other_requests"]) == (40, 200)
    harness.restart()
    assert harness.rollout.rejects(NEW)
    assert not harness.rollout.rejects(NEWER)


@pytest.mark.parametrize(
    ("seconds", "reason"),
    [(FAILING_SECONDS, "step 20 could not be loaded"), (FIRST_SERVED_SECONDS, "")],
)
def test_a_version_that_the_part_cannot_serve_is_taken_back(harness: Harness, seconds: float, reason: str) -> None:
    (name,) = harness.start()
    harness.serve(name, key=OLD, reason=reason)
    harness.look()
    harness.look(seconds - 2)
    assert harness.steps == [(20, "started")]
    harness.look(4)
    assert harness.steps == [(20, "started"), (20, "rolled_back")]
    assert (reason or f"none of the servers {name} has served it for 15 m") in harness.ledger.page()[-1].reason


def test_a_version_whose_servers_die_of_it_is_taken_back_but_not_if_all_servers_are_away(harness: Harness) -> None:
    (name,) = harness.start()
    harness.look()
    others = {server: harness.servers[server] for server in NAMES if server != name}
    harness.servers.clear()
    harness.look(2 * LOST_SECONDS)
    assert harness.steps == [(20, "started")]
    harness.servers.update(others)
    harness.look(LOST_SECONDS + 1)
    assert harness.steps == [(20, "started"), (20, "rolled_back")]
    assert f"none of the servers {name} has served it for 1 m" in harness.ledger.page()[-1].reason


def test_a_later_score_that_refuses_it_takes_it_back(harness: Harness) -> None:
    harness.start()
    harness.wishes.refused = "the gate refuses its newest score: test/loss is 3"
    harness.rollout.advance(harness.wishes)
    assert harness.decided() == [10, 10, 10]
    assert harness.ledger.page()[-1].reason == "rolled back: the gate refuses its newest score: test/loss is 3"


@pytest.mark.parametrize("pinned", [OLD, NEWER])
def test_a_pin_of_another_version_stops_it(harness: Harness, pinned: CheckpointKey) -> None:
    harness.start()
    harness.wishes.pinned = pinned
    harness.rollout.advance(harness.wishes)
    assert harness.steps == [(20, "started"), (20, "stopped")]
    assert harness.rollout.rejects(NEW)
    assert harness.decided() == [10, 10, 10]


def test_a_pin_of_the_new_version_gives_it_to_all(harness: Harness) -> None:
    harness.start()
    harness.wishes.pinned = harness.wishes.serving = NEW
    harness.decisions.publish(lambda: NEW)
    harness.rollout.advance(harness.wishes)
    assert harness.decided() == [20, 20, 20]
    assert harness.ledger.page()[-1].reason == "promoted to all: an operator pinned it"


def test_it_is_promoted_once_the_servers_are_told_of_it_and_none_is_sent_back_before(harness: Harness) -> None:
    harness.start()
    harness.wishes.pinned = harness.wishes.serving = NEW  # before the decision file
    harness.rollout.advance(harness.wishes)
    assert harness.rollout.running is not None
    assert sorted(harness.decided()) == [10, 10, 20]
    harness.decisions.publish(lambda: NEW)
    harness.rollout.advance(harness.wishes)
    assert harness.decided() == [20, 20, 20]
    assert harness.steps == [(20, "started"), (20, "promoted")]


@pytest.mark.parametrize("is_refused", [False, True])
def test_who_reads_of_its_end_in_the_ledger_finds_it_ended(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, *, is_refused: bool
) -> None:
    found: list[tuple[object, bool]] = []
    record = harness.recorder.record_rollout

    def read_at_once(*args: Any, **more: Any) -> None:
        record(*args, **more)
        found.append((harness.rollout.running, harness.rollout.rejects(NEW)))

    harness.start()
    monkeypatch.setattr(harness.recorder, "record_rollout", read_at_once)
    if is_refused:
        harness.wishes.refused = "the gate refuses its newest score"
        harness.rollout.advance(harness.wishes)
    else:
        harness.look(101)
        harness.wishes.serving = NEW
        harness.decisions.publish(lambda: NEW)
        harness.rollout.advance(harness.wishes)
    assert found == [(None, is_refused)]


def test_an_end_that_cannot_be_recorded_is_none(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise LedgerError("no space left")

    harness.start()
    harness.wishes.refused = "the gate refuses its newest score"
    with monkeypatch.context() as patch:
        patch.setattr(harness.recorder, "record_rollout", fail)
        with pytest.raises(LedgerError):
            harness.rollout.advance(harness.wishes)
    assert harness.rollout.running is not None
    assert not harness.rollout.rejects(NEW)
    harness.rollout.advance(harness.wishes)
    assert harness.steps == [(20, "started"), (20, "rolled_back")]


def test_a_newer_version_waits_for_the_end_and_begins_then(harness: Harness) -> None:
    harness.start()
    harness.wishes.chosen = NEWER
    for _ in range(101):
        harness.look()
    assert harness.rollout.serves(NEWER, harness.wishes.may_stay) == NEW
    harness.end()
    harness.rollout.advance(harness.wishes)
    assert harness.steps == [(20, "started"), (20, "promoted"), (30, "started")]
    assert sorted(harness.decided()) == [20, 20, 30]


@pytest.mark.parametrize("count", [0, 1])
def test_without_two_servers_a_version_waits_a_moment_and_is_then_promoted_with_a_note(
    harness: Harness, count: int
) -> None:
    harness.serve("one") if count else None
    harness.rollout.advance(harness.wishes)
    harness.look(FOLLOWERS_SECONDS - 1)
    assert harness.rollout.serves(NEW, harness.wishes.may_stay) == OLD
    harness.look(2)
    assert harness.rollout.serves(NEW, harness.wishes.may_stay) == NEW
    assert harness.steps == [(20, "promoted")]
    assert f"a canary needs 2 servers that follow, and {count} did" in harness.ledger.page()[-1].reason
    assert not harness.rollout.is_due()
    harness.end()
    assert harness.steps == [(20, "promoted")]


def test_servers_that_come_in_that_moment_are_waited_for(harness: Harness) -> None:
    harness.rollout.advance(harness.wishes)
    harness.look(FOLLOWERS_SECONDS / 2)
    harness.serve()
    harness.look()
    assert harness.steps == [(20, "started")]


def test_a_version_that_may_not_be_served_any_more_is_replaced_at_once(harness: Harness) -> None:
    harness.wishes.stays = False
    harness.serve()
    harness.rollout.advance(harness.wishes)
    assert harness.rollout.serves(NEW, harness.wishes.may_stay) == NEW
    assert harness.steps == []


def test_an_end_that_was_recorded_and_not_told_is_told_after_a_restart(harness: Harness) -> None:
    harness.start()
    content = (harness.folder / ROLLOUT_FILE).read_bytes()
    decided = (harness.folder / "serving.json").read_bytes()
    harness.wishes.refused = "worse"
    harness.rollout.advance(harness.wishes)
    harness.close()
    (harness.folder / ROLLOUT_FILE).write_bytes(content)
    (harness.folder / "serving.json").write_bytes(decided)
    harness._open()
    assert harness.rollout.running is None
    assert harness.decided() == [10, 10, 10]
    assert harness.steps == [(20, "started"), (20, "rolled_back")]


def test_a_start_that_was_written_and_not_recorded_is_recorded_after_a_restart(harness: Harness) -> None:
    part = harness.start()
    content = json.loads((harness.folder / ROLLOUT_FILE).read_bytes())
    harness.close()
    for name in ("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm", "serving.json"):
        (harness.folder / name).unlink(missing_ok=True)
    harness._open()
    assert harness.steps == [(20, "started")]
    assert tuple(content["servers"]) == part
    harness.restart()
    assert harness.steps == [(20, "started")]


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
