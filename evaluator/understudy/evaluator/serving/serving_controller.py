"""Serves the version that should be serving, and carries out what an operator decides."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future

from understudy.evaluator.evaluator_errors import (
    CancelledError,
    NoEarlierVersionError,
    NotReadyError,
    VersionNotFoundError,
)
from understudy.evaluator.serving.checkpoint_store import CheckpointStore
from understudy.evaluator.serving.decision_file import FollowedEvaluator, ServingReport
from understudy.evaluator.serving.promotion import Pin
from understudy.evaluator.serving.ranking import Ranking
from understudy.evaluator.serving.servable import Handle
from understudy.evaluator.serving.servable_manager import ServableManager
from understudy.evaluator.serving.serving_history import ServingHistory, why_no_earlier
from understudy.evaluator.serving.serving_target import ServingTarget
from understudy.evaluator.types import CheckpointKey, ServingChange, VersionLabel


class ServingController:
    """Serves the step that should be serving, and carries out what an operator decides. Thread-safe.

    Args:
        target: Which step should be serving.
        store: The known checkpoints.
        ranking: Provides the best checkpoint.
        manager: Promotes checkpoints.
        pin: What an operator pinned. It takes precedence over the version policy.
        history: What served before.
        followed: Another evaluator that decides; None to decide here.
        latest_step: Returns the newest step that was ever loaded, or None.
        on_settled: Called after each attempted change; must be quick and must not raise.
    """

    def __init__(
        self,
        *,
        target: ServingTarget,
        store: CheckpointStore,
        ranking: Ranking,
        manager: ServableManager,
        pin: Pin,
        history: ServingHistory,
        followed: FollowedEvaluator | None = None,
        latest_step: Callable[[], int | None],
        on_settled: Callable[[], None],
    ) -> None:
        self._target = target
        self._store = store
        self._ranking = ranking
        self._manager = manager
        self._latest_step = latest_step
        self._on_settled = on_settled
        self._lock = threading.Lock()
        self._deciding = threading.RLock()  # held from a decision until its promotion is queued
        self._pin = pin
        self._history = history
        self._followed = followed
        self._under_way: Future[Handle] | None = None

    @property
    def pinned_step(self) -> int | None:
        """The step pinned at run time, or None."""
        return self._pin.step

    def resolve(self, label: VersionLabel) -> int:
        """Return the step that a label currently stands for.

        Raises:
            NotReadyError: Nothing is serving yet.
            VersionNotFoundError: No version is best yet.
        """
        if label == "serving":
            return self._manager.servable().step
        step = self._ranking.best() if label == "best" else self._latest_step()
        if step is None and label == "best":
            raise VersionNotFoundError("no version is best yet; wait for the first result of the monitored metric")
        if step is None:
            raise NotReadyError("no checkpoint is serving yet; wait for the first to be published and loaded")
        return step

    def keep_history(self) -> None:
        """Write what served, for rollbacks, if it has changed. Call it again if the disk was full."""
        self._note_serving()
        self._history.try_to_write()

    def _note_serving(self) -> None:
        self._history.note(self._target.serving_key)

    def report_to_evaluator(self) -> None:
        """Report to the evaluator that is followed, if any, what is served here, and why not what it decided."""
        if self._followed is None:
            return
        serving, decision = self._manager.serving, self._followed.current
        step, digest = (None, "") if serving is None else (serving.step, serving.digest)
        follows = decision is None or decision.key == (step, digest)
        reason = "" if follows or decision is None else self._target.why_not(decision, self._followed)
        self._followed.report(ServingReport(step=step, digest=digest, reason=reason))

    def has_news(self) -> bool:
        """Return whether there is something new to carry out.

        Reads what another evaluator decided, if one is followed, and compares the servers of a rollout. For the thread
        that calls `reconcile`.
        """
        if self._followed is not None:
            return self._followed.refresh()
        rollout = self._target.rollout
        return rollout is not None and rollout.is_due()

    @property
    def is_changing(self) -> bool:
        """Whether a promotion is under way."""
        with self._lock:
            return self._under_way is not None and not self._under_way.done()

    def reconcile(self, *, all_known: bool = True) -> None:
        """Promote the step that should be serving, unless a change is in progress. For one thread at a time.

        Does not block.

        Args:
            all_known: Whether the checkpoint store is complete. If not, nothing is promoted if an unknown checkpoint
                might have to be served, or might be the one that the gate compares with.

        Raises:
            LedgerError: The gate's decisions cannot be recorded.
        """
        if all_known:
            self._target.advance()
        decided = self._pin.decided
        if self.is_changing:
            return
        step = self._target.step()
        if step is None or self._is_serving(step) or not (all_known or self._target.is_certain(step)):
            return
        with self._deciding:
            if self._pin.decided != decided or self.is_changing:
                return  # an operator has decided meanwhile; once that is settled, this is called again
            promoting = self._promote(step, None)
        promoting.add_done_callback(self._settled)

    def pin(self, step: int, *, deadline: float | None = None) -> Future[ServingChange]:
        """Promote a step and keep it serving. If that fails, the previous pin stays.

        Raises:
            VersionNotFoundError: There is no such checkpoint.
            DrainingError: The evaluator is being closed.
        """
        return self._pin_now(step, deadline, rollback=None)

    def _pin_now(
        self, step: int, deadline: float | None, *, rollback: tuple[CheckpointKey, CheckpointKey] | None
    ) -> Future[ServingChange]:
        before = self._serving_step()
        with self._deciding:
            self._history.expect(rollback)
            number = self._pin.decide(step)
            try:
                promoting = self._promote(step, deadline)
            except BaseException:
                self._pin.undo(number)
                raise
        return self._change(promoting, before, number, step)

    def unpin(self, *, deadline: float | None = None) -> Future[ServingChange]:
        """Follow the policy again. Without a pin, nothing changes.

        Raises:
            NotReadyError: Nothing is serving; the pin is removed nevertheless.
            StorageError: The change cannot be written to disk.
        """
        with self._deciding:
            self._history.expect(None)
            number = self._pin.remove()
            before = self._serving_step()
            step = self._target.step()
            if step is None:
                step = before
            if step is None:
                raise NotReadyError("the pin was removed; no checkpoint is serving yet")
            promoting = self._promote(step, deadline)
        return self._change(promoting, before, number, None)

    @property
    def roll_back_step(self) -> int | None:
        """The step that `roll_back` serves, or None if there is none."""
        key = self._target.earlier()
        return None if key is None else key[0]

    def roll_back(self, *, deadline: float | None = None) -> Future[ServingChange]:
        """Serve and pin the version that served before; during a rollout, the one that is serving here, which ends it.

        The version that is left is not returned to unless it serves again by another decision: the next rollback goes
        further back. Versions that are gone, cannot be loaded, have a score that is not finite, or were rejected by a
        rollout, are passed over.

        Raises:
            NoEarlierVersionError: There is none.
            DrainingError: The evaluator is being closed.
        """
        with self._deciding:
            serving, key = self._target.serving_key(), self._target.earlier()
            if key is None or serving is None:
                known = [info.step for info in self._store.checkpoints()]
                raise NoEarlierVersionError(why_no_earlier(None if serving is None else serving[0], known))
            return self._pin_now(key[0], deadline, rollback=None if serving == key else (serving, key))

    def _promote(self, step: int, deadline: float | None) -> Future[Handle]:
        """Begin a change; it supersedes one in progress, which must not take effect afterwards."""
        with self._lock:
            superseded = self._under_way
        if superseded is not None:
            superseded.cancel()
        promoting = self._manager.promote(step, deadline=deadline)
        with self._lock:
            self._under_way = promoting
        return promoting

    def _change(
        self, promoting: Future[Handle], before: int | None, number: int, pinned: int | None
    ) -> Future[ServingChange]:
        """Return the outcome of the promotion of a decision in the caller's form."""
        change: Future[ServingChange] = Future()
        change.add_done_callback(lambda done: done.cancelled() and promoting.cancel())

        def finish(promoted: Future[Handle]) -> None:
            try:
                with promoted.result() as handle:
                    self._note_serving()
                    self._history.write()
                    now = self._pin.keep(number, pinned)
                    outcome = ServingChange(serving_step=handle.step, previous_step=before, pinned_step=now)
            except FutureCancelledError:
                self._pin.undo(number)
                _fail(change, CancelledError(f"the decision was superseded by another; {before} was serving before it"))
            except Exception as error:  # noqa: BLE001 - the change carries it
                self._pin.undo(number)
                _fail(change, error)
            else:
                if change.set_running_or_notify_cancel():
                    change.set_result(outcome)
            self._on_settled()

        promoting.add_done_callback(finish)
        return change

    def _settled(self, promoted: Future[Handle]) -> None:
        if not promoted.cancelled() and promoted.exception() is None:
            promoted.result().release()
            self._note_serving()
        self._on_settled()

    def _is_serving(self, step: int) -> bool:
        serving, info = self._manager.serving, self._store.find(step)
        return serving is not None and info is not None and (serving.step, serving.digest) == (step, info.digest)

    def _serving_step(self) -> int | None:
        serving = self._manager.serving
        return None if serving is None else serving.step


def _fail(change: Future[ServingChange], error: Exception) -> None:
    if change.set_running_or_notify_cancel():
        change.set_exception(error)
