"""When a broken watch is resumed."""

from __future__ import annotations

import pytest

from understudy.clients.client_errors import DeadlineExceededError, NotFoundError, UnavailableError
from understudy.clients.reconnection import Reconnection


class Clock:
    """A clock that tests set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_pauses_double_up_to_five_seconds_and_begin_anew_after_an_answer() -> None:
    reconnection = Reconnection(1000.0, clock=Clock())

    pauses = [reconnection.pause_after(UnavailableError("away")) for _ in range(8)]
    reconnection.connected()

    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert reconnection.pause_after(UnavailableError("away")) == 0.1


def test_it_gives_up_when_the_server_was_away_for_too_long_without_a_break() -> None:
    clock = Clock()
    reconnection = Reconnection(60.0, clock=clock)
    reconnection.pause_after(UnavailableError("away"))
    clock.now = 59.0
    reconnection.pause_after(UnavailableError("away"))
    reconnection.connected()
    clock.now = 100.0
    reconnection.pause_after(UnavailableError("away"))
    clock.now = 160.0

    with pytest.raises(UnavailableError, match="away for good"):
        reconnection.pause_after(UnavailableError("away for good"))


def test_a_long_silence_is_no_absence() -> None:
    assert Reconnection(0.0, clock=Clock()).pause_after(DeadlineExceededError("nothing was recorded")) == 0.0


def test_other_errors_are_final() -> None:
    with pytest.raises(NotFoundError):
        Reconnection(60.0, clock=Clock()).pause_after(NotFoundError("no such method"))
