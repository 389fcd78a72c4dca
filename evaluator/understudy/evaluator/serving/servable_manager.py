"""Loads, unloads and promotes servables."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from understudy.checkpoints.local_checkpoint import LocalCheckpoint
from understudy.evaluator.evaluator_errors import DrainingError, OverloadedError, Resource, exhausted_resource
from understudy.evaluator.serving.checkpoint_store import CheckpointStore
from understudy.evaluator.serving.loading import LoadQueue, LoadRequest, SlotFactory, build, forget_frames, reload
from understudy.evaluator.serving.servable import Handle, ModelSlot, NewSlot, Purpose, Servable, SlotPool
from understudy.evaluator.serving.version_monitor import VersionStateMonitor
from understudy.evaluator.threads import join
from understudy.evaluator.types import CheckpointInfo, HeldBack, LifeEvent

_log = logging.getLogger(__name__)

_STARVED_SECONDS = 0.5
"""The interval of `on_starved` calls while a checkpoint waits for a slot."""

_Completion = Callable[[], None]
"""Resolves a future. Call it without the lock, because it runs the future's callbacks."""


@dataclass
class _Load:
    """A checkpoint to load, and its target, which changes if the checkpoint does not fit the slot."""

    info: CheckpointInfo
    target: ModelSlot | NewSlot


class ServableManager:
    """Keeps servables in a pool of slots. Thread-safe.

    One thread loads and unloads. A servable that is already loaded is promoted at once, between two batches, on the
    calling thread. Checkpoints of several architectures may be loaded side by side, each in its own slot. Therefore
    inputs that were checked against one servable must be checked again before another runs them.

    Args:
        store: The checkpoints that can be loaded.
        slots: Creates slots.
        limit: The maximum number of slots, at least 2.
        version_monitor: Notified of every attempt.
        on_promoted: Called with the step after each promotion; must be quick and must not raise.
        clock: Monotonic clock for deadlines, in seconds.
        on_starved: Called repeatedly while a checkpoint waits for a slot and none is free: with its step, the seconds
            it has waited, and whether it becomes the serving version. Must not raise.

    Attributes:
        servable: Returns a loaded servable; see `SlotPool.servable`.
        borrow: Borrows a loaded servable; see `SlotPool.borrow`.
    """

    def __init__(
        self,
        *,
        store: CheckpointStore,
        slots: SlotFactory,
        limit: int,
        version_monitor: VersionStateMonitor,
        on_promoted: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
        on_starved: Callable[[int, float, bool], None] = lambda *_: None,
    ) -> None:
        self._on_starved = on_starved
        self._store = store
        self._slots = slots
        self._version_monitor = version_monitor
        self._on_promoted = on_promoted
        self._clock = clock
        self._changed = threading.Condition()
        self._queue = LoadQueue()
        self._pool = SlotPool(limit, self._changed, self._queue)
        self.servable = self._pool.servable
        self.borrow = self._pool.borrow
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="understudy-manager")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def serving(self) -> Servable | None:
        """The serving version, or None. To run it, borrow it."""
        with self._changed:
            return self._pool.serving

    @property
    def predecessor_step(self) -> int | None:
        """The previous serving step, loaded or not, or None."""
        with self._changed:
            return self._pool.predecessor_step

    def explain_with(self, held_back: Callable[[], HeldBack | None]) -> None:
        """Have errors say which checkpoint is held back, and why, while none is serving."""
        self._pool.held_back = held_back

    @property
    def held_back(self) -> HeldBack | None:
        """The checkpoint that is held back; None if there is none."""
        return self._pool.held_back()

    def acquire(self, step: int, *, deadline: float | None = None) -> Future[Handle]:
        """Borrow a servable, loading it on demand if necessary.

        A request for a loaded step is granted at once; others wait in the queue for a slot. The future's exception may
        be OverloadedError (the deadline passed in the queue; raised once a running load ends), LoadError or
        DrainingError. Cancelling the future leaves the queue. Callbacks run on the manager's or the caller's thread.

        Raises:
            VersionNotFoundError: There is no such checkpoint.
            DrainingError: The manager is being closed.
        """
        return self._request(step, Purpose.ON_DEMAND, deadline)

    def promote(self, step: int, *, deadline: float | None = None) -> Future[Handle]:
        """Promote a step, loading it if necessary, and return a handle on it. Takes precedence over `acquire`.

        A step that is already loaded is serving when this returns. Errors are as in `acquire`.
        """
        return self._request(step, Purpose.SERVING, deadline)

    def reclaim(self) -> None:
        """Free the memory of dropped models and functions, then run the loaded functions once.

        So no request is the first to run a function whose kernels were freed.
        """
        if not self._slots.reclaim():
            return
        with self._changed:
            handles = [servable.borrow() for servable in self._pool.servables if not servable.is_retired]
        for handle in handles:
            with handle:
                try:
                    handle.slot.warm_up()
                except Exception:  # noqa: BLE001 - later requests will report it as well
                    _log.exception("a loaded version does not run", extra={"step": handle.step})

    def close(self, timeout_seconds: float) -> None:
        """Refuse all queued requests, end the thread and wait until all handles are released. Idempotent.

        Raises:
            TimeoutError: A load did not end, or a handle was not released, in time.
        """
        give_up_at = self._clock() + timeout_seconds
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        join(self._thread, timeout_seconds, error="a checkpoint was still being loaded after")
        for servable in self._pool.servables:
            servable.retire()
            if not servable.wait_idle(max(0.0, give_up_at - self._clock())):
                raise TimeoutError(f"{servable.handles} handles on step {servable.step} did not come back in time")

    def _request(self, step: int, purpose: Purpose, deadline: float | None) -> Future[Handle]:
        info = self._store.find(step)
        with self._changed:
            if self._closing:
                raise DrainingError("the evaluator is shutting down")
            servable = self._pool.find(step, info.digest if info else None)
            if servable is None:
                request = LoadRequest(info or self._store.info(step), purpose, deadline)
                self._queue.append(request)
                self._changed.notify_all()
                return request.future
            future: Future[Handle] = Future()
            complete = self._grant(future, servable, purpose)
        complete()
        return future

    def _grant(self, future: Future[Handle], servable: Servable, purpose: Purpose) -> _Completion:
        """Borrow a servable for a request, and promote it if that is the purpose."""
        if not future.set_running_or_notify_cancel():
            return lambda: None
        handle = self._pool.lend(servable)
        is_promoted = purpose is Purpose.SERVING and self._pool.promote(servable)

        def complete() -> None:
            if is_promoted:
                _log.info("serving", extra={"step": servable.step})
                self._on_promoted(servable.step)
            future.set_result(handle)

        return complete

    def _run(self) -> None:
        while True:
            completions, load = self._await_work()
            for complete in completions:
                complete()
            if load is not None:
                dropped = self._load(load)
                load = None  # it may reference the dropped slot
                if dropped:
                    self.reclaim()
            elif not completions:
                return

    def _await_work(self) -> tuple[list[_Completion], _Load | None]:
        """Wait until there is work. Returns no work if the manager is being closed."""
        with self._changed:
            while True:
                completions = self._settle()
                load = None if self._closing else self._pick()
                if completions or load or self._closing:
                    return completions, load
                if not self._changed.wait(self._seconds_to_wait()) and (starved := next(self._queue.heads(), None)):
                    return [partial(self._report_starved, starved)], None

    def _seconds_to_wait(self) -> float | None:
        """Return how long to wait for a change: until the next deadline, and only briefly while requests wait."""
        if not self._queue:
            return None
        deadline = self._queue.next_deadline()
        left = _STARVED_SECONDS if deadline is None else deadline - self._clock()
        return min(max(0.0, left), _STARVED_SECONDS)

    def _report_starved(self, request: LoadRequest) -> None:
        waiting = time.monotonic() - request.since
        self._on_starved(request.info.step, waiting, request.purpose is Purpose.SERVING)

    def _settle(self) -> list[_Completion]:
        """Remove the requests that need not wait: granted, cancelled, past the deadline, or refused."""
        settled = []
        for request in tuple(self._queue):
            complete = self._answer(request)
            if complete is not None:
                self._queue.remove(request)
                settled.append(complete)
        return settled

    def _answer(self, request: LoadRequest) -> _Completion | None:
        servable = self._pool.find(request.info.step, request.info.digest)
        if servable is not None:
            return self._grant(request.future, servable, request.purpose)
        if self._closing:
            return lambda: request.refuse(DrainingError("the evaluator is shutting down"))
        is_late = request.deadline is not None and request.deadline <= self._clock()
        if is_late or request.future.cancelled():
            error = self._overloaded(request.info.step)
            return lambda: request.refuse(error)
        return None

    def _overloaded(self, step: int) -> OverloadedError:
        loaded = sorted(servable.step for servable in self._pool.servables)
        return OverloadedError(
            f"no slot became free for step {step} before the deadline; of {self._pool.limit} slots, {len(loaded)} hold "
            f"the steps {loaded}",
            retry_after_seconds=1.0,
        )

    def _pick(self) -> _Load | None:
        """Find the first queued request for which a slot is available."""
        for request in self._queue.heads():
            target = self._pool.allocate(request.purpose, self._unloaded)
            if target is not None:
                return _Load(request.info, target)
        return None

    def _unloaded(self, servable: Servable) -> None:
        self._version_monitor.unloaded(servable.step)

    def _load(self, load: _Load) -> bool:
        """Load a checkpoint, or handle the failure; return whether a model was dropped."""
        began = self._clock()
        self._version_monitor.loading(load.info.step)
        verified = False
        try:
            with self._store.lease(load.info) as lease:
                lease.verify()
                verified = True
                self._version_monitor.reached(load.info, LifeEvent.VERIFIED)
                slot, dropped = self._load_into_slot(load, lease.checkpoint)
        except Exception as error:  # noqa: BLE001 - a checkpoint may raise anything; it is recorded
            resource = exhausted_resource(error) or (Resource.OTHER if self._store.is_lost else None)
            if resource is None or not self._shrink(load, error, resource):
                self._give_up(load, error, resource, seconds=self._clock() - began)
            forget_frames(error)
            return verified  # Before that, nothing of a model exists.
        self._admit(load.info, slot, seconds=self._clock() - began)
        return dropped

    def _load_into_slot(self, load: _Load, checkpoint: LocalCheckpoint) -> tuple[ModelSlot, bool]:
        """Return the slot that holds the checkpoint now, and whether the memory of a model is still to be freed.

        A slot that the checkpoint does not fit is dropped, and its memory freed, before a new one is built.
        """
        on_loaded = partial(self._version_monitor.reached, load.info, LifeEvent.LOADED)
        if not isinstance(load.target, NewSlot):
            dropped = reload(load.target, checkpoint, slots=self._slots, on_loaded=on_loaded)
            if dropped is not None:
                return load.target, dropped
            load.target = NewSlot.NEW
            self.reclaim()
        return build(checkpoint, slots=self._slots, on_loaded=on_loaded), False

    def _admit(self, info: CheckpointInfo, slot: ModelSlot, *, seconds: float) -> None:
        servable = Servable(
            step=info.step, digest=info.digest, slot=slot, created_at=info.created_at, on_idle=self._pool.notify_idle
        )
        with self._changed:
            self._pool.finish(servable)
        self._version_monitor.loaded(info, seconds=seconds)

    def _shrink(self, load: _Load, error: Exception, resource: Resource) -> bool:
        """Free memory after an out-of-memory error and retry the first request; return whether any was freed."""
        with self._changed:
            if resource is not Resource.MEMORY or not self._pool.shrink(load.target, self._unloaded):
                return False
            slots = self._pool.slots
        self._version_monitor.interrupted(load.info.step)
        _log.warning("out of memory, going on with fewer slots", extra={"slots": slots, "reason": str(error)})
        return True

    def _give_up(self, load: _Load, error: Exception, resource: Resource | None, *, seconds: float) -> None:
        """Refuse all requests for this checkpoint, and free the slot unless an out-of-memory error removed it."""
        if resource is None:
            reason = self._version_monitor.failed(load.info, error, seconds=seconds)
        else:
            reason = self._version_monitor.postponed(load.info, error, seconds=seconds)
        with self._changed:
            if resource is not Resource.MEMORY:
                self._pool.finish(None if isinstance(load.target, NewSlot) else load.target)
            waiting = self._queue.remove_if(lambda request: request.info == load.info)
        for request in waiting:
            request.refuse(reason)
