from __future__ import annotations

import contextlib
import json
import math
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.evaluator.evaluator_errors import LedgerError
from understudy.evaluator.records.events import Event, EventType
from understudy.evaluator.records.ledger import Announcement, LastServed, Ledger
from understudy.evaluator.records.outbox import Delivery, DeliveryCounts, Outbox, Subscription, evaluator_id
from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord, GateCondition, Interval

WAIT_SECONDS = 30.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Book:
    """A ledger with its outbox."""

    def __init__(self, path: Path, *subscriptions: Subscription, **options: Any) -> None:
        self.clock = Clock()
        self.outbox = Outbox(path, subscriptions or (Subscription(destination="a"),), clock=self.clock, **options)
        self.ledger = Ledger(path, clock=self.clock, outbox=self.outbox)

    def score(self, step: int, **fields: Any) -> None:
        defaults: dict[str, Any] = {"dataset": "test", "outcome": EvaluationOutcome.SCORED, "metrics": {"loss": 0.5}}
        self.ledger.append(EvaluationRecord(step=step, checkpoint_digest=f"d{step}", **(defaults | fields)))

    def next(self, destination: str = "a") -> Delivery:
        delivery = self.outbox.next(destination)
        assert delivery is not None
        return delivery

    def close(self) -> None:
        self.outbox.close()
        self.ledger.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def book(path: Path) -> Iterator[Book]:
    book = Book(path)
    yield book
    book.close()


def steps_due(book: Book, destination: str = "a") -> list[int]:
    """Deliver all that is due, and return its steps."""
    steps = []
    while (delivery := book.outbox.next(destination)) is not None:
        steps.append(delivery.event.step)
        book.outbox.delivered(delivery)
    return steps


def test_a_score_becomes_an_event_with_its_numbers(book: Book) -> None:
    book.score(
        3,
        metrics={"loss": math.nan, "accuracy": 0.5},
        intervals={"accuracy": Interval(low=0.4, high=math.inf)},
        examples=9,
        dataset='<script>alert("x")</script>\r\n',
    )

    event = book.next().event
    assert (event.type, event.step, event.checkpoint_digest, event.occurred_at) == (EventType.SCORED, 3, "d3", 1000.0)
    assert event.data["metrics"] == {"loss": "nan", "accuracy": 0.5}
    assert event.data["intervals"] == {"accuracy": [0.4, "inf"]}
    assert event.data["dataset"] == '<script>alert("x")</script>\r\n'
    assert (event.data["examples"], event.data["sequence"]) == (9, 1)


@pytest.mark.parametrize(
    "outcome", [EvaluationOutcome.ACCEPTED, EvaluationOutcome.REFUSED, EvaluationOutcome.UNDECIDED]
)
def test_a_decision_becomes_an_event_with_its_conditions(book: Book, outcome: EvaluationOutcome) -> None:
    condition = GateCondition(text="test/loss <= 1", outcome=outcome, value=0.5, baseline_step=2, baseline_value=0.4)
    book.score(3, outcome=outcome, reason="it is so", conditions=(condition,))

    event = book.next().event
    assert event.type.value == outcome.value
    assert event.data["reason"] == "it is so"
    assert event.data["conditions"][0]["text"] == "test/loss <= 1"
    assert event.data["conditions"][0]["baseline_step"] == 2


@pytest.mark.parametrize("outcome", [EvaluationOutcome.FAILED, EvaluationOutcome.SKIPPED])
def test_other_entries_have_no_event(book: Book, outcome: EvaluationOutcome) -> None:
    book.score(3, outcome=outcome, reason="it is broken")

    assert book.outbox.next("a") is None


def test_an_event_says_which_values_do_not_belong_to_the_curves_of_the_first(path: Path) -> None:
    def curves(book: Book) -> Any:
        delivery = book.next()
        book.outbox.delivered(delivery)
        return delivery.event.data["curves"]

    first = Book(path)
    first.score(1, dataset_digest="a" * 64, metric_digests={"top": "3" * 64}, metrics={"loss": 0.5, "top": 0.5})
    assert curves(first) == {}
    first.close()

    book = Book(path)
    refused = {"outcome": EvaluationOutcome.REFUSED, "metrics": {"new": 1.0}, "metric_digests": {"new": "1" * 64}}
    book.score(1, **refused)
    assert curves(book) == {}, "no score"
    book.score(2, dataset_digest="a" * 64, metric_digests={"top": "5" * 64}, metrics={"loss": 0.5, "top": 0.5})
    assert curves(book) == {"top": "test-55555555"}
    book.score(3, dataset_digest="b" * 64, metric_digests={"top": "3" * 64}, metrics={"loss": 0.5, "top": 0.5})
    assert curves(book) == {"loss": "test-bbbbbbbb", "top": "test-bbbbbbbb"}
    book.score(4, dataset_digest="a" * 64, metric_digests={"top": "3" * 64}, metrics={"loss": 0.5, "top": 0.5})
    assert curves(book) == {}
    book.close()


def test_the_same_entry_has_one_event(book: Book) -> None:
    book.score(3)
    book.score(3)

    assert book.outbox.counts() == {"a": DeliveryCounts(waiting=1)}


def test_a_destination_receives_the_types_that_it_wants(path: Path) -> None:
    few = Subscription(destination="few", types=frozenset({EventType.REFUSED}))
    book = Book(path, few, Subscription(destination="all"))
    book.score(1)
    book.score(1, outcome=EvaluationOutcome.REFUSED, reason="worse")

    assert book.next("few").event.type is EventType.REFUSED
    assert book.next("all").event.type is EventType.SCORED
    assert steps_due(book, "few") == [1]
    assert steps_due(book, "all") == [1, 1]
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT COUNT(*) FROM events").fetchone() == (0,)
    book.close()


def test_an_entry_that_cannot_be_written_leaves_no_event(book: Book) -> None:
    (pages,) = book.ledger._connection.execute("PRAGMA page_count").fetchone()
    book.ledger._connection.execute(f"PRAGMA max_page_count = {pages}")

    with pytest.raises(LedgerError, match="full"):
        book.score(2, reason="x" * 100_000)

    assert book.outbox.counts() == {"a": DeliveryCounts()}


def test_the_events_of_a_checkpoint_wait_for_the_one_before_and_those_of_others_do_not(book: Book) -> None:
    book.score(1)
    book.score(1, dataset="other")
    book.score(2)
    first = book.next()
    book.outbox.failed(first, "refused", retry_after_seconds=60)

    assert steps_due(book) == [2]
    book.clock.now += 60
    again = book.next()
    assert (again.event, again.attempts, again.error, again.first_attempt_at) == (first.event, 1, "refused", 1000.0)
    assert steps_due(book) == [1, 1]


def test_a_dead_letter_holds_up_nothing_and_is_sent_again_with_the_same_id(book: Book) -> None:
    book.score(1)
    book.score(1, dataset="other")
    dead = book.next()
    book.outbox.failed(dead, "gone", retry_after_seconds=None)

    assert steps_due(book) == [1]
    assert book.outbox.counts() == {"a": DeliveryCounts(dead=1)}
    (listed,) = book.outbox.entries(dead=True)
    assert (listed.event, listed.error, listed.dead_at, listed.attempts) == (dead.event, "gone", 1000.0, 1)
    assert book.outbox.resend(ids=["another"]) == 0
    assert book.outbox.resend(ids=[dead.event.id]) == 1
    assert book.next().event == dead.event
    assert (book.next().attempts, book.next().first_attempt_at) == (0, None)


def test_dead_letters_are_dropped_by_id_by_destination_or_all(path: Path) -> None:
    book = Book(path, Subscription(destination="a"), Subscription(destination="b"))
    for step in (1, 2, 3):
        book.score(step)
    for destination in ("a", "b"):
        for _ in range(2):
            book.outbox.failed(book.next(destination), "gone", retry_after_seconds=None)

    first = book.outbox.entries(dead=True, destination="a")[0].event.id
    assert book.outbox.drop(ids=[first], destination="a") == 1
    assert book.outbox.counts() == {"a": DeliveryCounts(waiting=1, dead=1), "b": DeliveryCounts(waiting=1, dead=2)}
    assert book.outbox.drop(destination="b", waiting=True) == 3
    assert book.outbox.drop() == 1
    assert book.outbox.counts() == {"a": DeliveryCounts(waiting=1), "b": DeliveryCounts()}
    book.close()


def test_what_is_beyond_the_limit_is_dropped_the_oldest_first_and_said(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    book = Book(path, most_waiting=3, most_dead=2)
    for step in range(1, 6):
        book.score(step)

    assert [each.event.step for each in book.outbox.entries()] == [3, 4, 5]
    assert book.outbox.dropped() == {"a": 2}
    for _ in range(3):
        book.outbox.failed(book.next(), "gone", retry_after_seconds=None)
    assert [each.event.step for each in book.outbox.entries(dead=True)] == [4, 5]
    assert book.outbox.dropped() == {"a": 3}
    assert [record.message for record in caplog.records] == ["events dropped: too many are undelivered"] * 3
    book.close()


def test_a_clock_that_was_set_back_delays_nothing(book: Book) -> None:
    book.score(1)
    book.outbox.failed(book.next(), "down", retry_after_seconds=60)
    assert book.outbox.next("a") is None

    book.clock.now -= 3600
    assert book.next().attempts == 1


def test_events_and_attempts_survive_a_restart_and_so_do_those_of_a_destination_that_is_gone(path: Path) -> None:
    before = Book(path)
    before.score(1)
    before.outbox.failed(before.next(), "down", retry_after_seconds=1)
    waiting = before.outbox.entries()
    before.close()

    after = Book(path, Subscription(destination="b"))
    after.score(2)
    assert after.outbox.entries(destination="a") == waiting
    assert after.outbox.counts() == {"a": DeliveryCounts(waiting=1), "b": DeliveryCounts(waiting=1)}
    after.close()


def announcement(step: int, once: str = "committed") -> Announcement:
    event = Event(type=EventType.COMMITTED, step=step, checkpoint_digest=f"d{step}", occurred_at=5.0)
    return Announcement(event, once)


def test_what_is_announced_once_is_no_event_again_also_after_a_restart(path: Path) -> None:
    book = Book(path)
    book.ledger.announce([announcement(1), announcement(2)])
    assert steps_due(book) == [1, 2]
    book.close()

    book = Book(path)
    book.ledger.announce([announcement(1), announcement(3), announcement(1, once="quarantined")])
    assert steps_due(book) == [3, 1]
    book.close()


def test_what_was_announced_is_forgotten_with_the_entries_of_the_step(book: Book) -> None:
    book.ledger.announce([announcement(step) for step in (1, 2, 3)])
    for step in (1, 2, 3):
        book.score(step)
    book.ledger.remove_oldest(keep=1, protected=[2])

    rows = book.ledger._connection.execute("SELECT step FROM announced").fetchall()
    assert rows == [(2,), (3,)]


def test_what_serves_is_announced_when_it_changes_also_over_a_restart(path: Path) -> None:
    def serve(book: Book, step: int) -> None:
        book.ledger.announce_serving(
            lambda last: Event(
                type=EventType.PROMOTED,
                step=step,
                checkpoint_digest=f"d{step}",
                occurred_at=5.0,
                data={"previous_step": last and last.step},
            ),
            LastServed(step, f"d{step}", 1.0),
        )

    book = Book(path)
    for step in (1, 1, 2):
        serve(book, step)
    book.close()
    book = Book(path)
    for step in (2, 1):
        serve(book, step)

    served = [(each.event.step, each.event.data["previous_step"]) for each in book.outbox.entries()]
    assert served == [(1, None), (2, 1), (1, 2)]
    book.close()


def test_a_ledger_without_an_outbox_writes_no_events(path: Path) -> None:
    ledger = Ledger(path)
    ledger.append(EvaluationRecord(step=1, checkpoint_digest="d1", dataset="test", outcome=EvaluationOutcome.SCORED))
    ledger.announce([announcement(1)])
    assert ledger._connection.execute("SELECT COUNT(*) FROM announced").fetchone() == (0,)
    ledger.close()


def test_a_thread_that_waits_is_woken_by_an_event_and_by_closing(book: Book) -> None:
    woken: list[int] = []

    def wait(seen: int) -> None:
        woken.append(book.outbox.wait(seen, WAIT_SECONDS))

    seen = book.outbox.wait(0, 0)
    acts: list[Callable[[], None]] = [lambda: book.score(1), book.outbox.close]
    for act in acts:
        thread = threading.Thread(target=wait, args=(seen,))
        thread.start()
        act()
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
        seen = woken[-1]

    with pytest.raises(LedgerError, match="closed"):
        book.outbox.next("a")


def test_an_outbox_creates_no_file(path: Path) -> None:
    with pytest.raises(LedgerError, match=r"ledger\.sqlite cannot be used"):
        Outbox(path).counts()

    assert not path.exists()


_WRITER = """
import sys
from pathlib import Path
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.records.outbox import Outbox, Subscription
from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord

path = Path(sys.argv[1])
ledger = Ledger(path, outbox=Outbox(path, [Subscription(destination="a")]))
for step in range(1, 1_000_000):
    ledger.append(EvaluationRecord(step=step, checkpoint_digest="d", dataset="test", outcome=EvaluationOutcome.SCORED))
    print(step, flush=True)
"""


def test_a_killed_process_leaves_an_event_for_every_entry_and_no_other(path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) == 20:
                writer.send_signal(signal.SIGKILL)
                break
        writer.wait(WAIT_SECONDS)

    book = Book(path)
    recorded = [record.step for record in book.ledger.page(limit=100_000)]
    assert len(recorded) >= 20
    assert [each.event.step for each in book.outbox.entries(limit=100_000)] == recorded
    book.close()


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["delivered", "failed", "dead", "put"])), max_size=30))
def test_the_events_of_a_checkpoint_arrive_in_their_order(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[int, str]]
) -> None:
    book = Book(tmp_path_factory.mktemp("book") / "ledger.sqlite")
    arrived: list[Event] = []
    put: list[int] = []
    dead = 0
    for step, action in actions:
        if action == "put":
            book.score(step, dataset=f"{len(put)}")
            put.append(step)
            continue
        delivery = book.outbox.next("a")
        if delivery is None:
            book.clock.now += 1
        elif action == "delivered":
            book.outbox.delivered(delivery)
            arrived.append(delivery.event)
        else:
            dead += action == "dead"
            book.outbox.failed(delivery, "no", retry_after_seconds=None if action == "dead" else step)

    for step in (1, 2, 3):
        order = [int(event.data["dataset"]) for event in arrived if event.step == step]
        assert order == sorted(order)
    assert book.outbox.counts() == {"a": DeliveryCounts(waiting=len(put) - len(arrived) - dead, dead=dead)}
    assert json.dumps([event.data for event in arrived])
    book.close()


def test_the_identifier_of_a_state_folder_stays(tmp_path: Path) -> None:
    first = evaluator_id(tmp_path)

    assert len(first) == 32
    assert evaluator_id(tmp_path) == first
