"""Makes constants of the serving version's weights, behind the requests."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

from understudy.evaluator.evaluator_errors import EvaluatorError, FreezingCancelledError, NotFrozenError, first_line
from understudy.evaluator.observer import FreezeOutcome, Observer
from understudy.evaluator.serving.servable import Handle, ModelSlot

_log = logging.getLogger(__name__)

SETTLING_SECONDS = 2.0
"""How long a version must have been serving before it is frozen."""


class ServingVersions(Protocol):
    """What the freezer needs of `understudy.evaluator.serving.servable_manager.ServableManager`."""

    def borrow(self, step: int | None = None) -> Handle:
        """Borrow a loaded servable."""

    def reclaim(self) -> None:
        """Free the memory of dropped functions."""


class Freezer:
    """Freezes each serving version once it has been serving for a moment. Thread-safe.

    One thread does the work while the version answers requests with its variables; the change is one reference, between
    two batches. A newer version cancels the work, and the constants of the one before are dropped. So at most one
    version has constants. A version that cannot be frozen, or does not gain by it, keeps its variables; the log says
    why.

    Args:
        manager: Has the serving version.
        limit_mib: The memory that the constants may take; 0 for no constants.
        observer: Notified of the end of each attempt, and of the memory of the constants.
        settling_seconds: How long a version must have been serving.
    """

    def __init__(
        self,
        *,
        manager: ServingVersions,
        limit_mib: int,
        observer: Observer,
        settling_seconds: float,
    ) -> None:
        self._manager = manager
        self._limit_mib = limit_mib
        self._observer = observer
        self._settling_seconds = settling_seconds
        self._changed = threading.Condition()
        self._wanted: int | None = None
        self._promotions = 0
        self._frozen: ModelSlot | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="understudy-freeze")

    def start(self) -> None:
        """Start the thread, unless constants may take no memory."""
        if self._limit_mib:
            self._thread.start()

    def promoted(self, step: int) -> None:
        """Drop the constants of the version before, and freeze this one later. Does not block."""
        with self._changed:
            self._wanted = step
            self._promotions += 1
            self._changed.notify_all()

    def close(self, timeout_seconds: float) -> None:
        """Cancel the work and end the thread. Idempotent.

        Raises:
            TimeoutError: The thread did not end in time.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"a version was still being frozen after {timeout_seconds} s")

    def _run(self) -> None:
        last = 0
        while (promotion := self._await_promotion(last)) is not None:
            last = promotion
            self._thaw()
            if self._has_settled(promotion):
                self._freeze(promotion)

    def _await_promotion(self, last: int) -> int | None:
        """Wait for a promotion after the last one; return its number, or None if the freezer is being closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._promotions != last)
            return None if self._closing else self._promotions

    def _has_settled(self, promotion: int) -> bool:
        """Wait a moment; return whether this promotion is still the last."""
        with self._changed:
            return not self._changed.wait_for(lambda: not self._is_wanted(promotion), self._settling_seconds)

    def _is_wanted(self, promotion: int) -> bool:
        return not self._closing and self._promotions == promotion

    def _check_wanted(self, promotion: int) -> None:
        if not self._is_wanted(promotion):
            raise FreezingCancelledError("another version is serving")

    def _freeze(self, promotion: int) -> None:
        """Freeze the serving version, and record what came of it."""
        began = time.monotonic()
        step = self._wanted
        outcome: FreezeOutcome = "failed"
        try:
            with self._manager.borrow(step) as handle:
                needed = handle.slot.freeze(
                    limit_mib=self._limit_mib, check_wanted=lambda: self._check_wanted(promotion)
                )
                self._frozen = handle.slot
        except (FreezingCancelledError, EvaluatorError):  # it is unloaded already
            outcome = "cancelled"
        except NotFrozenError as error:
            outcome = "left"
            _log.info("the weights stay variables", extra={"step": step, "reason": str(error)})
        except Exception as error:  # noqa: BLE001 - requests are served without constants
            _log.warning("the weights stay variables", extra={"step": step, "reason": first_line(error)}, exc_info=True)
        else:
            outcome = "frozen"
            self._observer.frozen_memory_changed(needed)
            _log.info("the weights are constants", extra={"step": step, "seconds": time.monotonic() - began})
        self._observer.freezing_ended(outcome, seconds=time.monotonic() - began)
        if outcome != "frozen":
            self._manager.reclaim()

    def _thaw(self) -> None:
        """Drop the constants of the version that was serving before."""
        if self._frozen is not None:
            self._frozen.thaw()
            self._frozen = None
            self._observer.frozen_memory_changed(0)
            self._manager.reclaim()
