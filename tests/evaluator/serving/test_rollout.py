"""The steps of a rollout, told when to look and with servers that report as told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit.rollout_harness import NAMES, NEW, NEWER, OLD, Harness
from understudy.evaluator.evaluator_errors import LedgerError
from understudy.evaluator.serving.rollout import FOLLOWERS_SECONDS
from understudy.evaluator.serving.rollout_file import ROLLOUT_FILE
from understudy.evaluator.serving.rollout_health import Traffic
from understudy.evaluator.serving.rollout_watch import FAILING_SECONDS, FIRST_SERVED_SECONDS, LOST_SECONDS
from understudy.evaluator.types import CheckpointKey


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
    harness.decisions.publish(lambda: NEW, followed=None)
    harness.rollout.advance(harness.wishes)
    assert harness.decided() == [20, 20, 20]
    assert harness.ledger.page()[-1].reason == "promoted to all: an operator pinned it"


def test_it_is_promoted_once_the_servers_are_told_of_it_and_none_is_sent_back_before(harness: Harness) -> None:
    harness.start()
    harness.wishes.pinned = harness.wishes.serving = NEW  # before the decision file
    harness.rollout.advance(harness.wishes)
    assert harness.rollout.running is not None
    assert sorted(harness.decided()) == [10, 10, 20]
    harness.decisions.publish(lambda: NEW, followed=None)
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
        harness.decisions.publish(lambda: NEW, followed=None)
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
