from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testkit.text_lifecycle import WAIT_SECONDS
from testkit.watcher_harness import WatcherHarness
from understudy.evaluator.evaluator_errors import LedgerError
from understudy.evaluator.records.events import EventType
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.records.outbox import Outbox, Subscription
from understudy.evaluator.serving import event_buffer
from understudy.evaluator.serving.event_buffer import EventBuffer
from understudy.evaluator.serving.quarantine import Failure
from understudy.evaluator.types import CheckpointInfo, EvaluationOutcome, EvaluationRecord

pytestmark = pytest.mark.usefixtures("logical_cpus")

COMMITTED, SCORED, PROMOTED = EventType.COMMITTED, EventType.SCORED, EventType.PROMOTED
ROLLED_BACK, QUARANTINED = EventType.ROLLED_BACK, EventType.QUARANTINED


def events_of(harness: WatcherHarness) -> list[tuple[EventType, int]]:
    harness.events.flush()
    return [(each.event.type, each.event.step) for each in harness.outbox.entries()]


def info(step: int) -> CheckpointInfo:
    return CheckpointInfo(step=step, created_at=float(step), digest=f"d{step}", final=False)


class Buffer(EventBuffer):
    """A buffer over a ledger of its own."""

    def __init__(self, folder: Path) -> None:
        path = folder / "ledger.sqlite"
        self.outbox = Outbox(path, [Subscription(destination="a")])
        self.ledger = Ledger(path, outbox=self.outbox)
        self.woken = 0
        super().__init__(self.ledger, wake=self._count)

    def _count(self) -> None:
        self.woken += 1

    def events(self) -> list[tuple[EventType, int]]:
        self.flush()
        return [(each.event.type, each.event.step) for each in self.outbox.entries(limit=10_000)]

    def end(self) -> None:
        self.outbox.close()
        self.ledger.close()


def test_a_life_of_a_checkpoint_is_told_in_order(make_harness: Callable[..., WatcherHarness]) -> None:
    harness = make_harness(serve="best", min_value=0.6)
    harness.lifecycle.publish(1)
    harness.reconcile()
    harness.evaluate_next(loss=0.5)
    harness.reconcile()

    assert events_of(harness) == [(COMMITTED, 1), (SCORED, 1), (EventType.ACCEPTED, 1), (PROMOTED, 1)]
    committed, *_, promoted = harness.outbox.entries()
    (stored,) = harness.lifecycle.store.checkpoints()
    assert committed.event.occurred_at == committed.event.data["created_at"] == stored.created_at
    assert committed.event.data["final"] is False
    assert promoted.event.data["previous_step"] is None


def test_a_training_that_goes_on_where_the_clock_is_an_hour_behind_is_promoted(
    harness: WatcherHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.lifecycle.publish(1)
    harness.reconcile()
    there = time.time() - 3600
    monkeypatch.setattr(time, "time", lambda: there)
    harness.lifecycle.publish(2)
    harness.reconcile()
    assert [event for event in events_of(harness) if event[0] is not COMMITTED] == [(PROMOTED, 1), (PROMOTED, 2)]


def test_a_roll_back_is_told_apart_from_a_promotion(harness: WatcherHarness) -> None:
    for step in (1, 2):
        harness.lifecycle.publish(step)
        harness.reconcile()
    harness.controller.roll_back().result(WAIT_SECONDS)
    harness.controller.unpin().result(WAIT_SECONDS)

    served = [event for event in events_of(harness) if event[0] is not COMMITTED]
    assert served == [(PROMOTED, 1), (PROMOTED, 2), (ROLLED_BACK, 1), (PROMOTED, 2)]
    rolled_back = next(each.event for each in harness.outbox.entries() if each.event.type is ROLLED_BACK)
    assert rolled_back.data["previous_step"] == 2


def test_a_restart_tells_nothing_again(make_harness: Callable[..., WatcherHarness]) -> None:
    harness = make_harness()
    harness.lifecycle.publish(1)
    harness.reconcile()
    before = events_of(harness)
    harness.close()

    harness = make_harness()
    harness.lifecycle.store.refresh()
    harness.reconcile()
    assert events_of(harness) == before == [(COMMITTED, 1), (PROMOTED, 1)]


def test_a_damaged_checkpoint_is_told_when_it_fails_and_when_it_is_given_up(harness: WatcherHarness) -> None:
    harness.lifecycle.publish(1, text="damaged")
    for _ in range(4):
        harness.reconcile()
        harness.lifecycle.clock.now += 60

    harness.events.flush()
    events = [each for each in harness.outbox.entries() if each.event.type is QUARANTINED]
    assert [(each.event.data["attempts"], each.event.data["given_up"]) for each in events] == [(1, False), (3, True)]
    assert "is not a model" in events[0].event.data["reason"]


def test_checkpoints_with_entries_from_before_are_no_news(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    ledger.append(EvaluationRecord(step=1, checkpoint_digest="d1", dataset="test", outcome=EvaluationOutcome.SCORED))
    ledger.close()

    buffer = Buffer(tmp_path)
    buffer.committed(info(1))
    buffer.committed(info(2))
    assert buffer.events() == [(COMMITTED, 2)]
    buffer.end()


def test_what_cannot_be_written_is_written_later_in_order(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path)
    pages = buffer.ledger._connection.execute("PRAGMA page_count").fetchone()[0]
    buffer.ledger._connection.execute(f"PRAGMA max_page_count = {pages}")
    for step in range(2000):
        buffer.committed(info(step))
    buffer.promoted(info(7))
    with pytest.raises(LedgerError, match="full"):
        buffer.flush()
    buffer.close()  # says so

    buffer.ledger._connection.execute("PRAGMA max_page_count = 1000000")
    assert buffer.events() == [*((COMMITTED, step) for step in range(2000)), (PROMOTED, 7)]
    buffer.end()


def test_what_does_not_fit_is_lost_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_buffer, "_MOST_HELD", 2)
    buffer = Buffer(tmp_path)
    for step in range(5):
        buffer.committed(info(step))

    assert buffer.events() == [(COMMITTED, 0), (COMMITTED, 1)]
    (line,) = [record for record in caplog.records if record.message.startswith("events lost")]
    assert line.__dict__["lost"] == 3
    buffer.end()


def test_events_of_other_threads_wake_the_one_that_writes(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path)
    thread = threading.Thread(target=buffer.promoted, args=(info(1),))
    thread.start()
    thread.join(WAIT_SECONDS)
    buffer.quarantined(info(2), Failure(reason="it is broken", attempts=1, retry_at=5.0))

    assert buffer.woken == 2
    assert buffer.events() == [(PROMOTED, 1), (QUARANTINED, 2)]
    buffer.end()


def test_without_an_outbox_nothing_is_held() -> None:
    woken: list[Any] = []
    buffer = EventBuffer(None, wake=lambda: woken.append(1))
    buffer.committed(info(1))
    buffer.promoted(info(1))
    buffer.quarantined(info(1), Failure(reason="", attempts=1, retry_at=None))
    buffer.flush()
    buffer.close()

    assert not woken
    assert not buffer._held
