from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry

from testkit.webhook_receiver import SECRET, Receiver, status
from understudy.evaluator.records.events import Event
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.records.outbox import DeliveryCounts, Outbox, Subscription
from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord
from understudy.service.events.deliveries import Deliveries, EventMetrics, RetryOptions, have_left_exporters
from understudy.service.events.exporter import Exporter
from understudy.service.events.webhook import Webhook

WAIT_SECONDS = 30.0
QUICK = RetryOptions(for_seconds=3600, first_seconds=0.01, longest_seconds=0.05)


class Taken:
    """An exporter that keeps what it takes, and fails as often as it is set to."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.events: queue.Queue[Event] = queue.Queue()
        self.attempts: list[str] = []
        self.threads: set[str] = set()
        self.closed = 0

    def export(self, event: Event) -> None:
        self.attempts.append(event.id)
        self.threads.add(threading.current_thread().name)
        if len(self.attempts) <= self.failures:
            raise OSError("the disk is full")
        self.events.put(event)

    def close(self) -> None:
        self.closed += 1

    def next(self) -> Event:
        return self.events.get(timeout=WAIT_SECONDS)


class Delivering:
    """A ledger whose events are delivered."""

    def __init__(self, folder: Path, makers: Mapping[str, Callable[[], Exporter]], **options: Any) -> None:
        path = folder / "ledger.sqlite"
        self.outbox = Outbox(path, [Subscription(destination=name) for name in makers])
        self.ledger = Ledger(path, outbox=self.outbox)
        self.registry = CollectorRegistry()
        metrics = EventMetrics(self.registry, makers, self.outbox)
        self.deliveries = Deliveries(self.outbox, makers, observer=metrics, **({"retry": QUICK} | options))

    def score(self, step: int, **fields: Any) -> None:
        entry = {"checkpoint_digest": "d", "dataset": "test", "outcome": EvaluationOutcome.SCORED, **fields}
        self.ledger.append(EvaluationRecord(step=step, **entry))

    def metric(self, name: str, destination: str = "a") -> float | None:
        return self.registry.get_sample_value(f"understudy_events_{name}", {"destination": destination})

    def until(self, condition: Callable[[], bool]) -> None:
        ends = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < ends
            time.sleep(0.01)

    def close(self) -> None:
        self.deliveries.close()
        self.outbox.close()
        self.ledger.close()


@pytest.fixture
def deliver(tmp_path: Path) -> Iterator[Callable[..., Delivering]]:
    with contextlib.ExitStack() as stack:

        def make(**exporters: Any) -> Delivering:
            options = {name: exporters.pop(name) for name in ("retry", "close_seconds") if name in exporters}
            makers = {name: (each if callable(each) else partial(_same, each)) for name, each in exporters.items()}
            delivering = Delivering(tmp_path, makers, **options)
            stack.callback(delivering.close)
            delivering.deliveries.start()
            return delivering

        yield make


def _same(exporter: Exporter) -> Exporter:
    return exporter


def test_events_arrive_in_order_on_one_thread_and_the_exporter_is_closed(deliver: Callable[..., Delivering]) -> None:
    taken = Taken()
    delivering = deliver(a=taken)
    for step in (1, 2, 3):
        delivering.score(step)

    assert [taken.next().step for _ in range(3)] == [1, 2, 3]
    delivering.close()
    assert taken.threads == {"understudy-events-a"}
    assert taken.closed == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "understudy-events-a"]


def test_what_fails_is_tried_again_with_the_same_id_and_counted(deliver: Callable[..., Delivering]) -> None:
    taken = Taken(failures=3)
    delivering = deliver(a=taken)
    assert (delivering.metric("sent_total"), delivering.metric("failed_total")) == (0, 0)
    delivering.score(1)

    event = taken.next()
    assert taken.attempts == [event.id] * 4
    delivering.until(lambda: delivering.metric("sent_total") == 1)
    assert (delivering.metric("failed_total"), delivering.metric("waiting")) == (3, 0)


def test_what_fails_for_too_long_is_a_dead_letter(deliver: Callable[..., Delivering]) -> None:
    taken = Taken(failures=2)
    delivering = deliver(a=taken, retry=RetryOptions(for_seconds=0, first_seconds=0.01))
    delivering.score(1)
    delivering.score(1, dataset="other")

    assert taken.next().data["dataset"] == "other"
    (dead,) = delivering.outbox.entries(dead=True)
    assert (dead.error, dead.attempts, dead.event.id) == ("OSError: the disk is full", 2, taken.attempts[0])
    assert delivering.metric("dead") == 1


def test_a_dead_letter_is_delivered_once_it_is_sent_again(deliver: Callable[..., Delivering]) -> None:
    taken = Taken(failures=2)
    delivering = deliver(a=taken, retry=RetryOptions(for_seconds=0, first_seconds=0.01))
    delivering.score(1)
    delivering.until(lambda: delivering.metric("dead") == 1)
    assert len(taken.attempts) == 2

    with contextlib.closing(Outbox(delivering.ledger._path)) as other:  # as the command line does
        assert other.resend() == 1
    assert taken.next().id == taken.attempts[0]
    delivering.until(lambda: delivering.outbox.counts() == {"a": DeliveryCounts()})


def test_an_exporter_that_cannot_be_made_is_made_later(deliver: Callable[..., Delivering]) -> None:
    taken = Taken()
    made: list[int] = []

    def make() -> Exporter:
        made.append(1)
        if len(made) < 3:
            raise ConnectionRefusedError("nothing listens")
        return taken

    delivering = deliver(a=make)
    delivering.score(1)

    assert taken.next().step == 1
    assert len(made) == 3


def test_a_password_in_the_url_of_an_error_is_neither_kept_nor_logged(
    deliver: Callable[..., Delivering], caplog: pytest.LogCaptureFixture
) -> None:
    class Unreachable(Taken):
        def export(self, event: Event) -> None:
            super().export(event)
            raise ConnectionError("API request to https://user:hunter2@mlflow.example/api failed at 2 @ 3")

    delivering = deliver(a=Unreachable(), retry=RetryOptions(for_seconds=0, first_seconds=0.01))
    with structlog.testing.capture_logs() as lines:
        delivering.score(1)
        delivering.until(lambda: delivering.metric("dead") == 1)
        (dead,) = delivering.outbox.entries(dead=True)
        delivering.close()

    assert dead.error == "ConnectionError: API request to https://mlflow.example/api failed at 2 @ 3"
    assert [line["reason"] for line in lines if "reason" in line] == [dead.error] * 2
    assert "hunter2" not in caplog.text


def test_a_slow_exporter_delays_no_other_and_no_entry(deliver: Callable[..., Delivering]) -> None:
    release = threading.Event()

    class Slow(Taken):
        def export(self, event: Event) -> None:
            assert release.wait(WAIT_SECONDS)
            super().export(event)

    slow, quick = Slow(), Taken()
    delivering = deliver(slow=slow, quick=quick)
    began = time.monotonic()
    for step in range(1, 51):
        delivering.score(step)
    recorded_seconds = time.monotonic() - began

    assert [quick.next().step for _ in range(50)] == list(range(1, 51))
    assert slow.events.empty()
    assert recorded_seconds < WAIT_SECONDS / 3
    release.set()
    assert [slow.next().step for _ in range(50)] == list(range(1, 51))


def test_what_waits_is_delivered_before_the_end(tmp_path: Path) -> None:
    taken = Taken()
    delivering = Delivering(tmp_path, {"a": partial(_same, taken)})
    for step in range(20):
        delivering.score(step)
    delivering.deliveries.start()
    delivering.close()

    assert taken.events.qsize() == 20


def test_the_end_does_not_wait_for_what_fails(tmp_path: Path) -> None:
    taken = Taken(failures=1000)
    delivering = Delivering(tmp_path, {"a": partial(_same, taken)}, retry=RetryOptions(for_seconds=3600))
    delivering.score(1)
    delivering.deliveries.start()
    began = time.monotonic()
    delivering.close()

    assert time.monotonic() - began < WAIT_SECONDS
    assert taken.closed == 1


def test_the_end_waits_for_an_exporter_that_does_not_return_for_a_while_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.service.events.deliveries._LONGEST_CALL_SECONDS", 0.1)
    begun, release = threading.Event(), threading.Event()

    class Stuck(Taken):
        def export(self, event: Event) -> None:
            begun.set()
            release.wait(WAIT_SECONDS)
            super().export(event)

    delivering = Delivering(tmp_path, {"a": Stuck})
    delivering.score(1)
    delivering.deliveries.start()
    assert begun.wait(WAIT_SECONDS)
    began = time.monotonic()
    delivering.close()
    assert time.monotonic() - began < 10
    assert have_left_exporters()
    release.set()
    delivering.until(lambda: not have_left_exporters())


def test_the_pause_doubles_up_to_the_longest() -> None:
    retry = RetryOptions(for_seconds=1, first_seconds=1, longest_seconds=100)
    for failures, most in ((1, 1), (2, 2), (3, 4), (8, 100), (10_000, 100)):
        assert most / 2 <= retry.pause(failures) <= most
    assert retry.pause(10_000, longest=30) <= 30
    assert len({retry.pause(8) for _ in range(10)}) > 1


def webhook_to(receiver: Receiver, timeout_seconds: float = 20.0) -> Callable[[], Exporter]:
    return lambda: Webhook(receiver.url, source="/t", secrets=lambda: [SECRET], timeout_seconds=timeout_seconds)


def test_a_webhook_that_answers_500_hangs_or_redirects_gets_the_event_again(
    deliver: Callable[..., Delivering], receiver: Receiver
) -> None:
    for answer in (status(500), receiver.hang, status(302, location=receiver.url)):
        receiver.answers.append(answer)
    delivering = deliver(a=webhook_to(receiver, timeout_seconds=1.5))
    delivering.score(1, dataset="</td><script>alert(1)</script>")
    delivering.score(1, dataset="other")

    delivering.until(lambda: delivering.metric("sent_total") == 2)
    *again, other = receiver.received
    assert len(again) == 4
    assert len({each.id for each in again}) == len({each.body for each in again}) == 1
    assert again[-1].verified().get_data()["dataset"] == "</td><script>alert(1)</script>"
    assert other.verified().get_data()["dataset"] == "other"
    assert delivering.metric("failed_total") == 3


_SENDER = """
import sys, threading
from pathlib import Path
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.records.outbox import Outbox, Subscription
from understudy.evaluator.types import EvaluationOutcome, EvaluationRecord
from understudy.service.events.deliveries import Deliveries, RetryOptions
from understudy.service.events.webhook import Webhook

folder, url, secret = sys.argv[1:]
path = Path(folder) / "ledger.sqlite"
outbox = Outbox(path, [Subscription(destination="a")])
ledger = Ledger(path, outbox=outbox)

class Nothing:
    def sent(self, destination): pass
    def failed(self, destination): pass

makers = {"a": lambda: Webhook(url, source="/t", secrets=lambda: [secret])}
Deliveries(outbox, makers, retry=RetryOptions(for_seconds=3600), observer=Nothing()).start()
for step in (1, 2, 3):
    ledger.append(EvaluationRecord(step=step, checkpoint_digest="d", dataset="test", outcome=EvaluationOutcome.SCORED))
threading.Event().wait(60)
"""


def test_a_process_that_is_killed_between_commit_and_delivery_delivers_again_with_the_same_ids(
    receiver: Receiver, tmp_path: Path
) -> None:
    def run() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", _SENDER, str(tmp_path), receiver.url, SECRET])

    receiver.answers.extend([status(204), receiver.hang])  # the second event arrives, and its answer never does
    with run() as sender:
        first, unanswered = receiver.wait_for(2)
        sender.send_signal(signal.SIGKILL)
        sender.wait(WAIT_SECONDS)
    with run() as sender:
        received = receiver.wait_for(4)
        sender.kill()

    assert [each.verified().get_subject() for each in received] == ["1", "2", "2", "3"]
    assert received[2].id == unanswered.id
    assert len({first.id, unanswered.id, received[3].id}) == 3
    assert received[2].body == unanswered.body
