"""Makes constants of the serving version's weights, behind the requests."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from understudy.compat.error_texts import first_line
from understudy.evaluator.evaluator_errors import EvaluatorError, FreezingCancelledError, NotFrozenError
from understudy.evaluator.observer import FreezeOutcome, Observer
from understudy.evaluator.serving.servable import Handle, ModelSlot
from understudy.evaluator.threads import Promotion, PromotionThread

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
        self._frozen: ModelSlot | None = None
        self._thread = PromotionThread("understudy-freeze", self._follow)

    def start(self) -> None:
        """Start the thread, unless constants may take no memory."""
        if self._limit_mib:
            self._thread.start()

    def promoted(self, step: int) -> None:
        """Drop the constants of the version before, and freeze this one later. Does not block."""
        self._thread.promoted(step)

    def close(self, timeout_seconds: float) -> None:
        """Cancel the work and end the thread. Idempotent.

        Raises:
            TimeoutError: The thread did not end in time.
        """
        self._thread.close(timeout_seconds, error="a version was still being frozen after")

    def _follow(self, promotion: Promotion) -> None:
        self._thaw()
        if self._thread.has_settled(lambda: self._is_wanted(promotion), self._settling_seconds):
            self._freeze(promotion)

    def _is_wanted(self, promotion: Promotion) -> bool:
        return self._thread.newest == promotion

    def _check_wanted(self, promotion: Promotion) -> None:
        if not self._is_wanted(promotion):
            raise FreezingCancelledError("another version is serving")

    def _freeze(self, promotion: Promotion) -> None:
        """Freeze the serving version, and record what came of it."""
        began = time.monotonic()
        step = promotion.step
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
