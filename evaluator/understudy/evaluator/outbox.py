"""How the outcomes of predictions reach those who wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from understudy.evaluator.types import Prediction

Outcome = Prediction | Exception

_Waiter_contra = TypeVar("_Waiter_contra", contravariant=True)


class Outbox(Protocol[_Waiter_contra]):
    """Tells those who wait what became of their predictions. Called on the device's thread, so it must be quick.

    A waiter is whatever the outbox knows who waits by.
    """

    def begin(self, waiter: _Waiter_contra) -> bool:
        """Return whether somebody still waits; called once, when the work begins."""

    def is_cancelled(self, waiter: _Waiter_contra) -> bool:
        """Return whether nobody waits any more, before the work has begun."""

    def deliver(self, outcomes: Sequence[tuple[_Waiter_contra, Outcome]]) -> None:
        """Tell the outcomes of one batch, each to its waiter."""


class FutureOutbox:
    """Resolves `concurrent.futures.Future`s. Thread-safe."""

    def begin(self, waiter: Future[Prediction]) -> bool:
        """See `Outbox`."""
        return waiter.set_running_or_notify_cancel()

    def is_cancelled(self, waiter: Future[Prediction]) -> bool:
        """See `Outbox`."""
        return waiter.cancelled()

    def deliver(self, outcomes: Sequence[tuple[Future[Prediction], Outcome]]) -> None:
        """See `Outbox`."""
        for waiter, outcome in outcomes:
            if isinstance(outcome, Exception):
                waiter.set_exception(outcome)
            else:
                waiter.set_result(outcome)
