"""The slots and the requests for them: which slot a checkpoint is loaded into, and how."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from understudy.checkpoints.local_checkpoint import LocalCheckpoint
from understudy.evaluator.evaluator_errors import (
    EvaluatorError,
    LoadError,
    NotReadyError,
    VersionNotFoundError,
    exhausted_resource,
)
from understudy.evaluator.serving.servable import Handle, ModelSlot, Servable
from understudy.evaluator.settings import MIN_SLOTS
from understudy.evaluator.types import CheckpointInfo

_log = logging.getLogger(__name__)


class Purpose(enum.Enum):
    """The purpose of loading a checkpoint."""

    SERVING = "serving"
    ON_DEMAND = "on_demand"


class NewSlot(enum.Enum):
    """Stands for a slot that is still to be created."""

    NEW = "new"


@dataclass(eq=False)
class Request:
    """A request for a handle on a checkpoint.

    ``deadline`` is on the manager's clock, ``since`` on the `time.monotonic` clock.
    """

    info: CheckpointInfo
    purpose: Purpose
    deadline: float | None
    future: Future[Handle] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)

    def refuse(self, error: EvaluatorError) -> None:
        """Resolve the future with an error unless it was cancelled."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class LoadQueue:
    """Requests in the order of arrival. Not thread-safe: the manager guards it with its lock."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._requests))

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Append a request."""
        self._requests.append(request)

    def remove(self, request: Request) -> None:
        """Remove one request."""
        self._requests.remove(request)

    def remove_if(self, wanted: Callable[[Request], bool]) -> list[Request]:
        """Remove and return the requests for which ``wanted`` is true."""
        removed = [request for request in self._requests if wanted(request)]
        self._requests = [request for request in self._requests if request not in removed]
        return removed

    def heads(self) -> Iterator[Request]:
        """Yield the first request of each purpose: serving versions before on-demand versions."""
        for purpose in Purpose:
            head = next((request for request in self._requests if request.purpose is purpose), None)
            if head is not None:
                yield head

    def next_deadline(self) -> float | None:
        """Return the earliest deadline, or None if there is none."""
        return min((request.deadline for request in self._requests if request.deadline is not None), default=None)


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


class SlotFactory(Protocol):
    """Creates slots. Used only by the manager's thread."""

    def build(self, checkpoint: LocalCheckpoint) -> ModelSlot:
        """Create a slot that holds the model and weights of a checkpoint.

        Raises:
            LoadError: The checkpoint cannot be loaded. If the machine lacked a resource,
                `understudy.evaluator.evaluator_errors.exhausted_resource` returns it.
        """

    def architecture_of(self, checkpoint: LocalCheckpoint) -> str:
        """Return the architecture fingerprint of a checkpoint; raise LoadError if it has none."""

    def reclaim(self) -> bool:
        """Free the memory of dropped models; return whether the next call of every function will be slower."""


def reload(slot: ModelSlot, checkpoint: LocalCheckpoint, *, slots: SlotFactory) -> bool | None:
    """Load and warm up a checkpoint in a slot that holds another one.

    Returns:
        Whether a model was dropped for it; None if it does not fit this slot, which is then not to be used again.

    Raises:
        LoadError: It cannot be loaded. The slot may be used for another checkpoint.
    """
    if slot.architecture != slots.architecture_of(checkpoint):
        return None
    try:
        dropped = slot.load(checkpoint.model_file)
    except LoadError as error:
        if exhausted_resource(error) is not None:
            raise
        _log.warning("the slot does not fit, a new one is built", extra={"step": checkpoint.step, "reason": str(error)})
        return None
    slot.warm_up()
    return dropped


def build(checkpoint: LocalCheckpoint, *, slots: SlotFactory) -> ModelSlot:
    """Load and warm up a checkpoint in a new slot; raise LoadError if that fails."""
    slot = slots.build(checkpoint)
    slot.warm_up()
    return slot


def forget_frames(error: BaseException) -> None:
    """Clear the frames of an error and of its causes, so that keeping the error does not keep models alive."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
