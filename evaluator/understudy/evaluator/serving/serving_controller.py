"""Decides which version is serving, and carries out what an operator decides."""

from __future__ import annotations

import itertools
import logging
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
from understudy.evaluator.serving.decision_file import (
    FollowedDecision,
    FollowedEvaluator,
    ServingDecision,
    ServingReport,
    Shadow,
)
from understudy.evaluator.serving.eligible_steps import EligibleSteps, choose_among
from understudy.evaluator.serving.gate_trial import Serving
from understudy.evaluator.serving.gatekeeper import Gatekeeper
from understudy.evaluator.serving.promotion import Pin, PinFile
from understudy.evaluator.serving.quarantine import Quarantine
from understudy.evaluator.serving.ranking import Ranking
from understudy.evaluator.serving.rollout import Rollout
from understudy.evaluator.serving.servable import Handle
from understudy.evaluator.serving.servable_manager import ServableManager
from understudy.evaluator.serving.serving_history import ServingHistory, why_no_earlier
from understudy.evaluator.settings import VersionPolicy
from understudy.evaluator.types import CheckpointKey, ServingChange, VersionLabel

_log = logging.getLogger(__name__)


class ServingController:
    """Follows the version policy, or the pin, which takes precedence. Thread-safe.

    Args:
        policy: The version policy.
        store: The known checkpoints.
        quarantine: The checkpoints that failed to load.
        ranking: Provides the best checkpoint.
        gatekeeper: Decides which checkpoints may be served; None if there is no gate.
        manager: Promotes checkpoints.
        pin_file: Keeps the pin across restarts.
        history: What served before.
        followed: Another evaluator's decision, which then replaces policy, gate and pin; None to decide here.
        rollout: Gives new versions to a part of the servers that follow first; None to give them to all at once.
        latest_step: Returns the newest step that was ever loaded, or None.
        on_settled: Called after each attempted change; must be quick and must not raise.

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
        history: ServingHistory,
        followed: FollowedEvaluator | None = None,
        rollout: Rollout | None = None,
        latest_step: Callable[[], int | None],
        on_settled: Callable[[], None],
    ) -> None:
        self._policy = policy
        self._store = store
        self._quarantine = quarantine
        self._ranking = ranking
        self._gatekeeper = gatekeeper
        self._manager = manager
        self._latest_step = latest_step
        self._on_settled = on_settled
        self._lock = threading.Lock()
        self._deciding = threading.RLock()  # held from a decision until its promotion is queued
        self._pin = Pin(pin_file, is_used=followed is None)
        self._history = history
        self._followed = followed
        self.rollout = rollout
        self._eligible = EligibleSteps(
            store=store, quarantine=quarantine, ranking=ranking, gatekeeper=gatekeeper, rollout=rollout
        )
        self._rechecked: tuple[CheckpointKey, int, str] | None = None
        self._missing: ServingDecision | None = None
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

    def target(self) -> int | None:
        """Return the step that should be serving, or None to keep the current one."""
        if self._followed is not None:
            return self._followed_step(self._followed.current)
        pinned = self.pinned_step
        return self.target_without_pin() if pinned is None else self._chosen(pinned)

    def target_without_pin(self) -> int | None:
        """Return the step that would be serving without a pin, or None to keep the current one."""
        chosen = self._chosen(None)
        return chosen if self.rollout is None else self._held(chosen, self.rollout)

    def _chosen(self, pinned: int | None) -> int | None:
        if pinned is None:
            return self._eligible.choose(self._policy)
        return pinned if self._eligible.is_loadable(pinned) else None

    def _held(self, chosen: int | None, rollout: Rollout) -> int | None:
        """Return what this evaluator serves of what the policy chooses: the version before, during a rollout."""
        before = rollout.before
        if before is not None and self._store.find(before[0]) is None and not self._store.is_complete:
            return None  # it may still be found
        key = self._key(chosen)
        if key is None:
            return chosen
        step, digest = rollout.serves(key, self.may_stay)
        return step if self._quarantine.admits((step, digest)) else None

    @property
    def rollout_step(self) -> int | None:
        """The step that is being rolled out, or None."""
        running = None if self.rollout is None else self.rollout.running
        return None if running is None else running.step

    @property
    def shadow(self) -> Shadow | None:
        """What computes a sample of the requests once more on this server, or None."""
        if self._followed is not None:
            decision = self._followed.current
            return None if decision is None else decision.shadow
        return None if self.rollout is None else self.rollout.shadow

    def tried_steps(self) -> set[int]:
        """Return the steps that are not serving here and must be kept for a rollout."""
        shadow = self.shadow
        return {step for step in (self.rollout_step, None if shadow is None else shadow.step) if step is not None}

    def chosen_key(self) -> CheckpointKey | None:
        """See `understudy.evaluator.serving.rollout.Candidates`."""
        return self._key(self._chosen(None))

    def pinned_key(self) -> CheckpointKey | None:
        """See `understudy.evaluator.serving.rollout.Candidates`."""
        return self._key(self.pinned_step)

    def serving_key(self) -> CheckpointKey | None:
        """See `understudy.evaluator.serving.rollout.Candidates`."""
        serving = self._manager.serving
        return None if serving is None else (serving.step, serving.digest)

    def may_stay(self, key: CheckpointKey) -> bool:
        """See `understudy.evaluator.serving.rollout.Candidates`."""
        if self._key(key[0]) != key or self._quarantine.is_given_up(key) or not self._eligible.is_admitted(key[0]):
            return False
        return choose_among(self._policy, [key[0]], self._ranking) == key[0]

    def refusal(self, key: CheckpointKey, serving: CheckpointKey) -> str:
        """See `understudy.evaluator.serving.rollout.Candidates`. For the thread that calls `reconcile`."""
        if self._key(key[0]) != key:
            return "its checkpoint is gone"
        if (failure := self._quarantine.failure(key)) is not None and failure.given_up:
            return failure.reason
        if choose_among(self._policy, [key[0], serving[0]], self._ranking) != key[0]:
            return f"by its newest score the version policy {self._policy} prefers step {serving[0]}"
        reason = self._refused_by_gate(key)
        return reason and f"the gate refuses its newest score: {reason}"

    def _refused_by_gate(self, key: CheckpointKey) -> str:
        """Return why the gate would refuse a checkpoint now; looks again only when there are new entries."""
        if self._gatekeeper is None:
            return ""
        sequence = self._gatekeeper.read_up_to
        if self._rechecked is None or self._rechecked[:2] != (key, sequence):
            self._rechecked = (key, sequence, self._gatekeeper.refuses(key, self._should_be_serving))
        return self._rechecked[2]

    def _key(self, step: int | None) -> CheckpointKey | None:
        info = None if step is None else self._store.find(step)
        return None if info is None else info.key

    def wanted(self) -> set[int]:
        """Return the steps that may have to be served although they are not the newest."""
        decision = None if self._followed is None else self._followed.current
        steps = {
            self.pinned_step,
            self._ranking.best(),
            self._ranking.best_to_serve(),
            self._policy if isinstance(self._policy, int) else None,
            *self.tried_steps(),
            *self.returnable_steps(),
        }
        if self.rollout is not None and self.rollout.before is not None:
            steps.add(self.rollout.before[0])
        steps.add(None if decision is None else decision.step)
        return {step for step in steps if step is not None}

    def keep_history(self) -> None:
        """Write what served, for rollbacks, if it has changed. Call it again if the disk was full."""
        self._note_serving()
        self._history.try_to_write()

    def _note_serving(self) -> None:
        self._history.note(self.serving_key)

    def tell_evaluator(self) -> None:
        """Tell the evaluator that is followed, if any, what is served, and why not what it decided."""
        if self._followed is None:
            return
        serving, decision = self._manager.serving, self._followed.current
        step, digest = (None, "") if serving is None else (serving.step, serving.digest)
        follows = decision is None or decision.key == (step, digest)
        reason = "" if follows or decision is None else self._why_not(decision, self._followed)
        self._followed.tell(ServingReport(step=step, digest=digest, reason=reason))

    def has_news(self) -> bool:
        """Return whether there is something new to carry out.

        Reads what another evaluator decided, if one is followed, and compares the servers of a rollout. For the thread
        that calls `reconcile`.
        """
        if self._followed is not None:
            return self._followed.refresh()
        return self.rollout is not None and self.rollout.is_due()

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
        if self._gatekeeper is not None and all_known:
            self._gatekeeper.catch_up(self._should_be_serving)
        if self.rollout is not None and all_known:
            self.rollout.advance(self)
        decided = self._pin.decided
        if self.is_changing:
            return
        step = self.target()
        if step is None or self._is_serving(step) or not (all_known or self._is_certain(step)):
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
            step = self.target()
            if step is None:
                step = before
            if step is None:
                raise NotReadyError("the pin was removed; no checkpoint is serving yet")
            promoting = self._promote(step, deadline)
        return self._change(promoting, before, number, None)

    @property
    def roll_back_step(self) -> int | None:
        """The step that `roll_back` serves, or None if there is none."""
        key = self._earlier()
        return None if key is None else key[0]

    def returnable_steps(self) -> set[int]:
        """Return the steps of the last two versions that served and may serve again, to keep them for a rollback.

        While the store is not complete, these may be steps that are still to be found.
        """
        may_be_found = not self._store.is_complete
        keys = (
            key
            for key in self._history.newest_first()
            if not self._is_bad(key) and (self._key(key[0]) == key or (may_be_found and self._key(key[0]) is None))
        )
        return {step for step, _ in itertools.islice(keys, 2)}

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
            serving, key = self.serving_key(), self._earlier()
            if key is None or serving is None:
                known = [info.step for info in self._store.checkpoints()]
                raise NoEarlierVersionError(why_no_earlier(None if serving is None else serving[0], known))
            return self._pin_now(key[0], deadline, rollback=None if serving == key else (serving, key))

    def _earlier(self) -> CheckpointKey | None:
        """Return the version that a rollback serves, or None if there is none."""
        serving = self.serving_key()
        if serving is None:
            return None
        if self.rollout_step not in (None, serving[0]):
            return serving
        self._note_serving()
        others = (key for key in self._history.newest_first() if key != serving)
        return next((key for key in others if self._key(key[0]) == key and not self._is_bad(key)), None)

    def _is_bad(self, key: CheckpointKey) -> bool:
        """Whether a version that served was found to be bad since."""
        is_rejected = self.rollout is not None and self.rollout.rejects(key)
        return is_rejected or self._quarantine.is_given_up(key) or self._ranking.is_unfit(key[0])

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

    def _followed_step(self, decision: ServingDecision | None) -> int | None:
        """Return the step of a decision, if exactly that checkpoint is here; log once if it is not."""
        if decision is None:
            return None
        info = self._store.find(decision.step)
        if info is not None and info.digest == decision.digest:
            self._missing = None
            return decision.step if self._quarantine.admits(info.key) else None
        if decision != self._missing:
            self._missing = decision
            other = "is another checkpoint" if info is not None else "is not"
            log = _log.warning if isinstance(self._followed, FollowedDecision) else _log.info  # the others download it
            log(f"the evaluator serves step {decision.step}, which {other} here; serving on what is loaded")
        return None

    def _why_not(self, decision: ServingDecision, followed: FollowedEvaluator) -> str:
        """Return why a decision is not carried out; empty if it is being carried out."""
        info = self._store.find(decision.step)
        if info is None or info.digest != decision.digest:
            return followed.problem
        failure = self._quarantine.failure(info.key)
        return "" if failure is None else failure.reason

    def _should_be_serving(self) -> Serving:
        step = self.target()
        return Serving(info=None if step is None else self._store.find(step), find=self._store.find)

    def _is_certain(self, step: int) -> bool:
        """Whether a step should be serving regardless of older checkpoints."""
        return (
            self._followed is not None
            or self._policy != "best"
            or step in (self.pinned_step, self._ranking.best_to_serve())
        )

    def _is_serving(self, step: int) -> bool:
        serving, info = self._manager.serving, self._store.find(step)
        return serving is not None and info is not None and (serving.step, serving.digest) == (step, info.digest)

    def _serving_step(self) -> int | None:
        serving = self._manager.serving
        return None if serving is None else serving.step


def _fail(change: Future[ServingChange], error: Exception) -> None:
    if change.set_running_or_notify_cancel():
        change.set_exception(error)
