"""Decides what is serving."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future

from understudy.evaluator.evaluator_errors import CancelledError, NotReadyError, VersionNotFoundError
from understudy.evaluator.lifecycle.checkpoint_store import CheckpointStore
from understudy.evaluator.lifecycle.gate import Gatekeeper
from understudy.evaluator.lifecycle.pin_file import PinFile
from understudy.evaluator.lifecycle.promotion import Ranking, choose
from understudy.evaluator.lifecycle.quarantine import Quarantine
from understudy.evaluator.lifecycle.servable import Handle
from understudy.evaluator.lifecycle.servable_manager import ServableManager
from understudy.evaluator.settings import VersionPolicy
from understudy.evaluator.types import ServingChange


class ServingController:
    """Follows the serving policy, or the pin that goes before it. Thread-safe.

    Args:
        policy: What the operator chose.
        store: The checkpoints there are.
        quarantine: Knows which of them are bad.
        ranking: Knows which is best.
        gatekeeper: Says which may be served, unless there is no gate.
        manager: Promotes them.
        pin_file: Keeps the pin over a restart.
        on_settled: Called after each change that was tried; must be quick and must not raise.

    Raises:
        ConfigurationError: The pin file is damaged.
    """

    def __init__(
        self,
        *,
        policy: VersionPolicy | int,
        store: CheckpointStore,
        quarantine: Quarantine,
        ranking: Ranking,
        gatekeeper: Gatekeeper | None,
        manager: ServableManager,
        pin_file: PinFile,
        on_settled: Callable[[], None],
    ) -> None:
        self._policy = policy
        self._store = store
        self._quarantine = quarantine
        self._ranking = ranking
        self._gatekeeper = gatekeeper
        self._manager = manager
        self._pin_file = pin_file
        self._on_settled = on_settled
        self._lock = threading.Lock()
        self._pinned = pin_file.read()
        self._under_way: Future[Handle] | None = None

    @property
    def pinned_step(self) -> int | None:
        """The step pinned at run time, or None."""
        with self._lock:
            return self._pinned

    def target(self) -> int | None:
        """Return the step that should be serving, or None if what is there should stay."""
        loadable = {info.step for info in self._store.checkpoints() if self._quarantine.admits(info.key)}
        pinned = self.pinned_step
        if pinned is None and self._gatekeeper is not None:
            loadable = self._admitted(loadable, self._gatekeeper)
        return choose(self._policy, pinned=pinned, loadable=loadable, ranking=self._ranking)

    def wanted(self) -> set[int]:
        """Return the steps that may should be serving although they are not the newest."""
        steps = {self.pinned_step, self._ranking.best(), self._policy if isinstance(self._policy, int) else None}
        return {step for step in steps if step is not None}

    def reconcile(self, *, all_known: bool = True) -> None:
        """Promote what should be serving, unless a change is under way. For one thread at a time. Does not block.

        Args:
            all_known: Whether the checkpoint store has every checkpoint. If not, nothing happens where one that is
                still unknown could should be serving, or be what the gate compares with.

        Raises:
            LedgerError: The gate's decisions cannot be written down.
        """
        if self._gatekeeper is not None and all_known:
            self._gatekeeper.catch_up(self.target)
        with self._lock:
            if self._under_way is not None and not self._under_way.done():
                return
        step = self.target()
        if step is None or self._is_serving(step) or not (all_known or self._is_certain(step)):
            return
        self._promote(step, None).add_done_callback(self._settled)

    def pin(self, step: int, *, deadline: float | None = None) -> Future[ServingChange]:
        """Promote a step and keep it there. A pin that fails leaves the one before it.

        Raises:
            VersionNotFoundError: There is no such checkpoint.
            DrainingError: The evaluator is being closed.
        """
        before = self._serving_step()
        with self._lock:
            former, self._pinned = self._pinned, step
        try:
            promoting = self._promote(step, deadline)
        except BaseException:
            self._restore_pin(step, former)
            raise
        return self._change(promoting, before, on_failure=lambda: self._restore_pin(step, former))

    def unpin(self, *, deadline: float | None = None) -> Future[ServingChange]:
        """Follow the policy again. Without a pin, nothing changes.

        Raises:
            NotReadyError: Nothing is serving; the pin is removed all the same.
            StorageError: That cannot be written down.
        """
        with self._lock:
            self._pinned = None
            self._pin_file.write(None)
        before = self._serving_step()
        step = self.target()
        if step is None:
            step = before
        if step is None:
            raise NotReadyError("the pin was removed; no checkpoint is serving yet")
        return self._change(self._promote(step, deadline), before, on_failure=lambda: None)

    def roll_back(self, *, deadline: float | None = None) -> Future[ServingChange]:
        """Pin the step that was serving before the present one.

        Raises:
            VersionNotFoundError: Nothing was serving before, or it is gone.
        """
        step = self._manager.predecessor_step
        if step is None:
            known = [info.step for info in self._store.checkpoints()]
            raise VersionNotFoundError(
                f"nothing was serving before since the evaluator was started; pin one of the steps {known}"
            )
        return self.pin(step, deadline=deadline)

    def _promote(self, step: int, deadline: float | None) -> Future[Handle]:
        """Begin a change; one that is under way is superseded and must not come after it."""
        with self._lock:
            superseded = self._under_way
        if superseded is not None:
            superseded.cancel()
        promoting = self._manager.promote(step, deadline=deadline)
        with self._lock:
            self._under_way = promoting
        return promoting

    def _change(
        self, promoting: Future[Handle], before: int | None, *, on_failure: Callable[[], None]
    ) -> Future[ServingChange]:
        """Return what becomes of a promotion as the caller is to see it."""
        change: Future[ServingChange] = Future()
        change.add_done_callback(lambda done: done.cancelled() and promoting.cancel())

        def finish(promoted: Future[Handle]) -> None:
            try:
                with promoted.result() as handle:
                    outcome = self._commit(handle.step, before)
            except FutureCancelledError:
                on_failure()
                _fail(change, CancelledError(f"the decision was superseded by another; {before} was serving before it"))
            except Exception as error:  # noqa: BLE001 - the change carries it
                on_failure()
                _fail(change, error)
            else:
                if change.set_running_or_notify_cancel():
                    change.set_result(outcome)
            self._on_settled()

        promoting.add_done_callback(finish)
        return change

    def _commit(self, step: int, before: int | None) -> ServingChange:
        with self._lock:
            self._pin_file.write(self._pinned)
            return ServingChange(serving_step=step, previous_step=before, pinned_step=self._pinned)

    def _restore_pin(self, step: int, former: int | None) -> None:
        with self._lock:
            if self._pinned == step:
                self._pinned = former

    def _settled(self, promoted: Future[Handle]) -> None:
        if not promoted.cancelled() and promoted.exception() is None:
            promoted.result().release()
        self._on_settled()

    def _admitted(self, steps: Collection[int], gatekeeper: Gatekeeper) -> set[int]:
        infos = filter(None, map(self._store.find, steps))
        return {info.step for info in infos if gatekeeper.admits(info.key)}

    def _is_certain(self, step: int) -> bool:
        """Whether a step should be serving whatever older checkpoints there are."""
        return self._policy != "best" or step in (self.pinned_step, self._ranking.best())

    def _is_serving(self, step: int) -> bool:
        serving, info = self._manager.serving, self._store.find(step)
        return serving is not None and info is not None and (serving.step, serving.digest) == (step, info.digest)

    def _serving_step(self) -> int | None:
        serving = self._manager.serving
        return None if serving is None else serving.step


def _fail(change: Future[ServingChange], error: Exception) -> None:
    if change.set_running_or_notify_cancel():
        change.set_exception(error)
