"""The slots there are, what is loaded in them, and which one to give to a new checkpoint."""

from __future__ import annotations

import enum
from collections.abc import Callable

from understudy.evaluator.evaluator_errors import NotReadyError, VersionNotFoundError
from understudy.evaluator.lifecycle.servable import Handle, ModelSlot, Servable
from understudy.evaluator.settings import MIN_SLOTS


class Purpose(enum.Enum):
    """What a checkpoint is loaded for."""

    SERVING = "serving"
    ON_DEMAND = "on_demand"


class NewSlot(enum.Enum):
    """Says that a slot is to be made."""

    NEW = "new"


class SlotPool:
    """Bookkeeping of at most ``limit`` slots. Not thread-safe: the manager guards it with its lock.

    A servable is serving, the version that served before it, or an on-demand version. To make room, idle on-demand
    versions go first, the one unused for longest before the others, and the predecessor last. The serving version never
    goes. On-demand versions take at most ``limit - 2`` slots, but at least one, so that there is always room for the
    next serving version once its predecessor is idle.

    Args:
        limit: The number of slots, at least 2.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.serving: Servable | None = None
        self.predecessor: Servable | None = None
        self.predecessor_step: int | None = None
        self.servables: list[Servable] = []
        self.free: list[ModelSlot] = []
        self._being_loaded = 0

    @property
    def slots(self) -> int:
        """How many slots there are, those that are being made or filled included."""
        return len(self.servables) + len(self.free) + self._being_loaded

    def find(self, step: int, digest: str | None = None) -> Servable | None:
        """Return the newest servable of this step (and content), or None."""
        matching = (s for s in reversed(self.servables) if s.step == step and digest in (None, s.digest))
        return next(matching, None)

    def servable(self, step: int | None) -> Servable:
        """Return a loaded servable; None stands for the serving version.

        Raises:
            NotReadyError: Nothing is serving yet.
            VersionNotFoundError: The step is not loaded.
        """
        servable = self.serving if step is None else self.find(step)
        if servable is None and step is None:
            raise NotReadyError("no checkpoint is serving yet; wait for the first to be published and loaded")
        if servable is None:
            loaded = sorted(other.step for other in self.servables)
            raise VersionNotFoundError(f"version {step} is not loaded; loaded are {loaded}")
        return servable

    def borrow(self, servable: Servable) -> Handle:
        """Borrow a servable of the pool, and note that it was used."""
        self.servables.remove(servable)
        self.servables.append(servable)
        return servable.borrow()

    def flip(self, servable: Servable) -> bool:
        """Promote a loaded servable; return whether that changed anything.

        What was there becomes the predecessor, whose step is remembered even after it was evicted.
        """
        if servable is self.serving:
            return False
        self.predecessor = self.serving
        self.predecessor_step = None if self.predecessor is None else self.predecessor.step
        self.serving = servable
        return True

    def allocate(self, purpose: Purpose, evict: Callable[[Servable], None]) -> ModelSlot | NewSlot | None:
        """Return a slot for a new checkpoint, evicting what has to go, or None if there is none at the moment."""
        on_demand = [s for s in self.servables if s is not self.serving and s is not self.predecessor]
        candidates = list(on_demand)
        if purpose is Purpose.SERVING or len(on_demand) < self._on_demand_limit():
            if self.free:
                return self._start(self.free.pop())
            if self.slots < self.limit:
                return self._start(NewSlot.NEW)
            if self.predecessor is not None:
                candidates.append(self.predecessor)
        victim = next((s for s in candidates if s.retire_if_idle()), None)
        if victim is None:
            return None
        evict(victim)
        self.remove(victim)
        return self._start(self.free.pop())

    def finish(self, outcome: Servable | ModelSlot | None) -> None:
        """End what `allocate` began: with what was loaded, with a slot that is free again, or with no slot at all."""
        self._being_loaded -= 1
        if isinstance(outcome, Servable):
            self.servables.append(outcome)
        elif outcome is not None:
            self.free.append(outcome)

    def retreat(self, target: ModelSlot | NewSlot, evict: Callable[[Servable], None]) -> bool:
        """End what `allocate` began, for want of memory; return whether there is more of it now, or a smaller need.

        First, no more slots are made than there are. Then slots are given up: the one that was to be filled, those that
        are free, and an idle on-demand version's or the predecessor's.
        """
        self.finish(None)
        if isinstance(target, NewSlot) and self.slots >= MIN_SLOTS:
            self.limit = self.slots
            return True
        others = [s for s in self.servables if s is not self.serving and s is not self.predecessor]
        candidates = [*others, self.predecessor] if self.predecessor else others
        victim = next((s for s in candidates if s.retire_if_idle()), None)
        if victim is not None:
            evict(victim)
            self.remove(victim)
        gave_up = bool(self.free) or not isinstance(target, NewSlot)
        self.free.clear()
        return gave_up

    def remove(self, servable: Servable) -> None:
        """Take a retired, idle servable out; its slot is free."""
        self.servables.remove(servable)
        self.free.append(servable.slot)
        if servable is self.predecessor:
            self.predecessor = None

    def _start(self, slot: ModelSlot | NewSlot) -> ModelSlot | NewSlot:
        self._being_loaded += 1
        return slot

    def _on_demand_limit(self) -> int:
        return max(1, self.limit - 2)
