from __future__ import annotations

from understudy.evaluator.serving.backlog import Failure, Quarantine


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_whoever_never_failed_is_admitted() -> None:
    quarantine = Quarantine(attempts=3, retry_seconds=1, clock=Clock())

    assert quarantine.admits("a")
    assert quarantine.failure("a") is None
    assert quarantine.seconds_to_next_retry() is None


def test_the_wait_doubles_until_it_is_given_up() -> None:
    clock = Clock()
    quarantine = Quarantine(attempts=3, retry_seconds=1, clock=clock)

    assert quarantine.add("a", "torn") == Failure(reason="torn", attempts=1, retry_at=101.0)
    assert not quarantine.admits("a")
    assert quarantine.seconds_to_next_retry() == 1.0
    clock.now = 101.0
    assert quarantine.admits("a")
    assert quarantine.add("a", "torn").retry_at == 103.0
    clock.now = 103.0
    assert quarantine.add("a", "still torn") == Failure(reason="still torn", attempts=3, retry_at=None)
    clock.now = 1e9
    assert not quarantine.admits("a")
    assert quarantine.seconds_to_next_retry() is None


def test_the_permanent_are_given_up_at_once() -> None:
    quarantine = Quarantine(attempts=3, retry_seconds=1, clock=Clock())

    assert quarantine.add("a", "gone", permanent=True).given_up
    assert quarantine.admits("b")


def test_a_success_clears_the_record() -> None:
    quarantine = Quarantine(attempts=3, retry_seconds=1, clock=Clock())
    quarantine.add("a", "torn")

    quarantine.clear("a")

    assert quarantine.admits("a")
