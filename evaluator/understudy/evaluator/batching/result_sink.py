"""Delivers the outcomes of predictions to their callers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from understudy.evaluator.types import Prediction

Outcome = Prediction | Exception

_Token_contra = TypeVar("_Token_contra", contravariant=True)


class ResultSink(Protocol[_Token_contra]):
    """Delivers the outcomes of predictions. Called on the device's thread, so it must be quick.

    A token is opaque to the engine: it identifies the caller to the sink.
    """

    def begin(self, token: _Token_contra) -> bool:
        """Return whether the caller still waits; called once, when the work begins."""

    def is_cancelled(self, token: _Token_contra) -> bool:
        """Return whether the caller cancelled before the work began."""

    def deliver(self, outcomes: Sequence[tuple[_Token_contra, Outcome]]) -> None:
        """Deliver the outcomes of one batch, each to its caller."""


class FutureSink:
    """Resolves `concurrent.futures.Future`s. Thread-safe."""

    def begin(self, token: Future[Prediction]) -> bool:
        """See `ResultSink`."""
        return token.set_running_or_notify_cancel()

    def is_cancelled(self, token: Future[Prediction]) -> bool:
        """See `ResultSink`."""
        return token.cancelled()

    def deliver(self, outcomes: Sequence[tuple[Future[Prediction], Outcome]]) -> None:
        """See `ResultSink`."""
        for token, outcome in outcomes:
            if isinstance(outcome, Exception):
                token.set_exception(outcome)
            else:
                token.set_result(outcome)
