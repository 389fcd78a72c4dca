"""The slots, their servables, and the choice of a slot for a new checkpoint."""

from __future__ import annotations

import enum
from collections.abc import Callable

from understudy.evaluator.evaluator_errors import NotReadyError, VersionNotFoundError
from understudy.evaluator.serving.servable import Handle, ModelSlot, Servable
from understudy.evaluator.settings import MIN_SLOTS


class Purpose(enum.Enum):
    """The purpose of loading a checkpoint."""

    SERVING = "serving"
    ON_DEMAND = "on_demand"


class NewSlot(enum.Enum):
    """Stands for a slot that is still to be created."""

    NEW = "new"


class SlotPool:
    """Bookkeeping of at most ``limit`` slots. Not thread-safe: the manager guards it with its lock.

    A servable is the serving version, its predecessor, or an on-demand version. Idle on-demand versions are evicted
    first, in least recently used order, and the predecessor last. The serving version is never evicted. On-demand
    versions use at most ``limit - 2`` slots, but at least one, so that there is always a slot for the next serving
    version once the predecessor is idle.

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
        """The number of slots, including those that are being created or loaded."""
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
        """Borrow a servable of the pool, and mark it as recently used."""
        self.servables.remove(servable)
        self.servables.append(servable)
        return servable.borrow()

    def flip(self, servable: Servable) -> bool:
        """Promote a loaded servable; return whether that changed anything.

        The previous serving version becomes the predecessor, whose step is remembered even after its eviction.
        """
        if servable is self.serving:
            return False
        self.predecessor = self.serving
        self.predecessor_step = None if self.predecessor is None else self.predecessor.step
        self.serving = servable
        return True

    def allocate(self, purpose: Purpose, evict: Callable[[Servable], None]) -> ModelSlot | NewSlot | None:
        """Return a slot for a new checkpoint, evicting a servable if necessary, or None if no slot is available."""
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
        """Complete `allocate`: with the loaded servable, with a slot that is free again, or without a slot."""
        self._being_loaded -= 1
        if isinstance(outcome, Servable):
            self.servables.append(outcome)
        elif outcome is not None:
            self.free.append(outcome)

    def retreat(self, target: ModelSlot | NewSlot, evict: Callable[[Servable], None]) -> bool:
        """Complete `allocate` after an out-of-memory error; return whether memory was freed or less is needed.

        For a new slot, the limit is lowered to the current number of slots if these suffice. Otherwise slots are
        dropped: the target, the free ones, and that of an idle on-demand version or of the predecessor.
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
        """Remove a retired, idle servable; its slot is free."""
        self.servables.remove(servable)
        self.free.append(servable.slot)
        if servable is self.predecessor:
            self.predecessor = None

    def _start(self, slot: ModelSlot | NewSlot) -> ModelSlot | NewSlot:
        self._being_loaded += 1
        return slot

    def _on_demand_limit(self) -> int:
        return max(1, self.limit - 2)
