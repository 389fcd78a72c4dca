"""Checkpoints loaded into slots, their reference-counted handles, and the pool of the slots."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, Self

from understudy.checkpoints.signature import Signature
from understudy.evaluator.evaluator_errors import NotReadyError, VersionNotFoundError
from understudy.evaluator.settings import MIN_SLOTS
from understudy.evaluator.types import Array, ArrayForm, Arrays, HeldBack, MetricSpec


class ModelSlot(Protocol):
    """One set of (mirrored) variables with its traced functions; see `understudy.evaluator.model.slot.Slot`."""

    @property
    def architecture(self) -> str:
        """The fingerprint of the model and its compile configuration."""

    @property
    def signature(self) -> Signature:
        """The names, dtypes and shapes of the inputs and outputs."""

    @property
    def metric_digest(self) -> str:
        """Identifies the configuration of the compiled losses and metrics."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Why evaluations may differ from a single device's, or why they run on one replica."""

    def load(self, model_file: Path) -> bool:
        """Assign the file's weights to the variables; raise LoadError if that fails.

        Returns:
            Whether the previous model was dropped.
        """

    def warm_up(self) -> None:
        """Run every function with every kind of batch, so that no request is delayed by a first call."""

    def freeze(self, *, limit_mib: int, check_wanted: Callable[[], None]) -> int:
        """Use constants for the weights in `forward` and `launch`; return their memory in bytes, about.

        Raises:
            understudy.evaluator.model.frozen.NotFrozenError: It keeps the variables, for this reason.
        """

    def thaw(self) -> None:
        """Use the variables again."""

    @property
    def predict_note(self) -> str:
        """Whether `forward` uses constants for the weights, and why not."""

    def try_out(self) -> None:
        """Run one generated example on every replica; raise the runtime's errors."""

    def check_inputs(self, inputs: Arrays) -> int:
        """Return the number of examples; raise InvalidInputError if the inputs do not fit the signature."""

    def check_forms(self, forms: Mapping[str, ArrayForm]) -> int:
        """As `check_inputs`, for inputs that need not be built yet."""

    def forward(self, inputs: Arrays) -> dict[str, Array]:
        """Run the model on ``[examples, ...]`` inputs and return its outputs, ``[examples, ...]`` each."""

    @property
    def may_overlap(self) -> bool:
        """Whether `forward` changes nothing and runs no Python, so that it may be called beside other calls."""

    def keeping_variables(self) -> AbstractContextManager[None]:
        """Undo at the end of the ``with`` block what its calls of `forward` did to the variables of the model."""

    def launch(self, inputs: Arrays) -> Callable[[], dict[str, Array]]:
        """Launch the model; return a function that waits for the outputs."""

    @property
    def output_tasks(self) -> Mapping[str, Any]:
        """What each output is for, by its name."""

    @property
    def nested_outputs(self) -> tuple[str, ...]:
        """The names of the outputs that are nested deeper than in a list or a dict."""

    def scorer(self, metrics: Sequence[MetricSpec], *, example_losses: bool = False, increments: bool = False) -> Any:
        """Return a scorer for these metrics, or for the compiled ones if empty.

        With ``example_losses``, it also computes the loss of each example, ``[examples]``; with ``increments``, what
        each of them adds to the state of the loss and the metrics.
        """

    def scorer_of_outputs(
        self, metrics: Sequence[MetricSpec], *, example_losses: bool = False, increments: bool = False
    ) -> Any:
        """Return a scorer of batches whose inputs are outputs that were computed elsewhere; see `scorer`."""

    @property
    def scores_whole(self) -> tuple[str, ...]:
        """Why the score needs more than the outputs, so that they cannot be computed elsewhere; empty if they can."""


class Servable:
    """A checkpoint in a slot. Thread-safe.

    Handles are counted: the slot may be used for another checkpoint once the servable is retired and idle.

    Args:
        step: The training step, which is the version.
        digest: The SHA-256 that identifies the checkpoint's content.
        slot: The slot that it is loaded in.
        created_at: When the checkpoint was written, in seconds since the Unix epoch.
        on_idle: Called each time the last handle is released, on the releasing thread; must be quick.
    """

    def __init__(
        self,
        *,
        step: int,
        digest: str,
        slot: ModelSlot,
        created_at: float = 0.0,
        on_idle: Callable[[], None] | None = None,
    ) -> None:
        self.step = step
        self.digest = digest
        self.slot = slot
        self.created_at = created_at
        self._on_idle = on_idle
        self._idle = threading.Condition()
        self._handles = 0
        self._retired = False

    @property
    def handles(self) -> int:
        """The number of open handles."""
        with self._idle:
            return self._handles

    def borrow(self) -> Handle:
        """Return a handle; the caller must release it.

        Raises:
            VersionNotFoundError: The servable was retired.
        """
        with self._idle:
            if self._retired:
                raise VersionNotFoundError(f"version {self.step} is being unloaded; ask for a version that is loaded")
            self._handles += 1
        return Handle(self)

    @property
    def is_retired(self) -> bool:
        """Whether it refuses new handles."""
        return self._retired

    def retire(self) -> None:
        """Refuse new handles. Open handles stay valid."""
        with self._idle:
            self._retired = True

    def retire_if_idle(self) -> bool:
        """Retire the servable unless a handle is open; return whether it is retired and idle now."""
        with self._idle:
            if self._handles == 0:
                self._retired = True
            return self._retired and self._handles == 0

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until no handle is open; return False on timeout."""
        with self._idle:
            return self._idle.wait_for(lambda: self._handles == 0, timeout_seconds)

    def _release(self) -> None:
        with self._idle:
            self._handles -= 1
            is_idle = self._handles == 0
            if is_idle:
                self._idle.notify_all()
        if is_idle and self._on_idle is not None:
            self._on_idle()


class Handle:
    """A counted borrow of a servable, which stays loaded while any handle is open. A context manager. Thread-safe.

    Attributes:
        servable: The servable.
        step: The training step of its checkpoint.
        slot: The slot that it is loaded in. Do not use it after `release`.
    """

    def __init__(self, servable: Servable) -> None:
        self.servable = servable
        self.step = servable.step
        self.slot = servable.slot
        self._lock = threading.Lock()
        self._released = False

    def release(self) -> None:
        """Release the handle. Idempotent."""
        with self._lock:
            if self._released:
                return
            self._released = True
        self.servable._release()  # noqa: SLF001 - the two halves of one count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Purpose(enum.Enum):
    """The purpose of loading a checkpoint."""

    SERVING = "serving"
    ON_DEMAND = "on_demand"


class NewSlot(enum.Enum):
    """Stands for a slot that is still to be created."""

    NEW = "new"


class SlotPool:
    """Bookkeeping of at most ``limit`` slots. `servable` and `borrow` are thread-safe; all else needs ``changed``.

    A servable is the serving version, its predecessor, or an on-demand version. Idle on-demand versions are evicted
    first, in least recently used order, and the predecessor last. The serving version is never evicted. While the next
    serving version waits for a slot, the first of them gives no more handles, so that it becomes idle. On-demand
    versions use at most ``limit - 2`` slots, but at least one, so that there is always a slot for the next serving
    version once the predecessor is idle.

    Args:
        limit: The number of slots, at least 2.
        changed: The lock of the pool, which is notified when a slot becomes idle that is waited for.
        waiting: What waits for a slot; empty if nothing does.
    """

    def __init__(self, limit: int, changed: threading.Condition, waiting: Sequence[object]) -> None:
        self.limit = limit
        self._changed = changed
        self._waiting = waiting
        self.serving: Servable | None = None
        self.predecessor: Servable | None = None
        self.predecessor_step: int | None = None
        self.servables: list[Servable] = []
        self.free: list[ModelSlot] = []
        self.held_back: Callable[[], HeldBack | None] = lambda: None
        self._being_loaded = 0

    @property
    def slots(self) -> int:
        """The number of slots, including those that are being created or loaded."""
        return len(self.servables) + len(self.free) + self._being_loaded

    def find(self, step: int, digest: str | None = None) -> Servable | None:
        """Return the newest servable of this step (and content) that gives handles, or None."""
        matching = (s for s in reversed(self.servables) if s.step == step and digest in (None, s.digest))
        return next((s for s in matching if not s.is_retired), None)

    def servable(self, step: int | None = None) -> Servable:
        """Return a loaded servable, which may be unloaded at any time; None stands for the serving version.

        Raises:
            NotReadyError: Nothing is serving yet.
            VersionNotFoundError: The step is not loaded.
        """
        with self._changed:
            return self._loaded(step)

    def borrow(self, step: int | None = None) -> Handle:
        """Borrow a loaded servable; None stands for the serving version. Does not block.

        Raises:
            NotReadyError: Nothing is serving yet.
            VersionNotFoundError: The step is not loaded.
        """
        with self._changed:
            return self.lend(self._loaded(step))

    def _loaded(self, step: int | None) -> Servable:
        servable = self.serving if step is None else self.find(step)
        if servable is None and step is None:
            raise NotReadyError(f"no checkpoint is serving yet; {_remedy(self.held_back())}")
        if servable is None:
            loaded = sorted(other.step for other in self.servables if not other.is_retired)
            raise VersionNotFoundError(f"version {step} is not loaded; loaded are {loaded}")
        return servable

    def lend(self, servable: Servable) -> Handle:
        """Borrow a servable of the pool, and mark it as recently used."""
        self.servables.remove(servable)
        self.servables.append(servable)
        return servable.borrow()

    def promote(self, servable: Servable) -> bool:
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
            if purpose is Purpose.SERVING and not any(s.is_retired for s in candidates):
                candidates[0].retire()  # else others that follow each other could keep it from ever being idle
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

    def shrink(self, target: ModelSlot | NewSlot, evict: Callable[[Servable], None]) -> bool:
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

    def notify_idle(self) -> None:
        """Notify of an idle servable, if anything waits for a slot. Called after every batch, without the lock."""
        if self._waiting:  # what begins to wait after this check finds the handle released
            with self._changed:
                self._changed.notify_all()

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


def _remedy(held_back: HeldBack | None) -> str:
    """Return why nothing is serving, and what to do about it."""
    if held_back is None:
        return "wait for the first to be published and loaded"
    if held_back.step is None:
        return held_back.reason
    return (
        f"{held_back.reason}. Name the step to use it all the same, {held_back.step}, or have it served "
        f"(promote --pin {held_back.step})"
    )
