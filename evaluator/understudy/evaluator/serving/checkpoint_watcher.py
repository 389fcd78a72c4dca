"""The thread that watches the source of checkpoints."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator

from sortedcontainers import SortedSet

from understudy.checkpoints.checkpoint_errors import CheckpointError
from understudy.checkpoints.pauses import doubling_pause
from understudy.evaluator.evaluator_errors import DrainingError, LedgerError, VersionNotFoundError, exhausted_resource
from understudy.evaluator.records.recorder import Recorder
from understudy.evaluator.serving.backlog import Backlog
from understudy.evaluator.serving.checkpoint_store import CheckpointStore
from understudy.evaluator.serving.decision_file import DecisionFile
from understudy.evaluator.serving.event_buffer import EventBuffer
from understudy.evaluator.serving.promotion import BestFile
from understudy.evaluator.serving.quarantine import Quarantine
from understudy.evaluator.serving.ranking import Ranking
from understudy.evaluator.serving.servable_manager import ServableManager
from understudy.evaluator.serving.serving_controller import ServingController
from understudy.evaluator.serving.serving_target import ServingTarget
from understudy.evaluator.serving.unsettled import UnsettledCheckpoints
from understudy.evaluator.serving.version_monitor import VersionStateMonitor
from understudy.evaluator.settings import EvaluationPolicy
from understudy.evaluator.step_changes import ChangedSteps
from understudy.evaluator.threads import join
from understudy.evaluator.types import CheckpointInfo, CheckpointKey, EvaluationOutcome

_log = logging.getLogger(__name__)

_LONGEST_PAUSE_SECONDS = 30.0
_PEEK_SECONDS = 0.05

_FIRST_LOAD_SECONDS = 10.0
"""How long the first load runs undisturbed before the other checkpoints are read."""

_PASS_SECONDS = 0.5
"""How long one pass may lease or skip checkpoints before it polls for newer ones."""

_FAILED = "following the source failed, to be tried again"
_SUPERSEDED = "a newer checkpoint was published before this one was evaluated, and the policy is to evaluate the latest"


class CheckpointWatcher:
    """Discovers checkpoints, leases those that are needed, and keeps the serving version and the backlog up to date.

    The checkpoint that should be serving is found, leased and loaded first. Then the others are found, leased, and
    added to the backlog in step order. A checkpoint is leased until it is settled (every dataset has a score or a
    recorded reason), and while it is serving, the previous serving version, pinned or best. If a lease needs a copy, a
    checkpoint that waits long is leased only when its turn comes; if it is deleted before, that reason is recorded.
    Only the ledger decides what is settled, so a restart continues where the last process stopped.

    A pass looks only at the checkpoints that changed since the last one, so it takes as long with many as with few.
    Files are hashed when they are loaded, or, under the policy ``latest``, before a checkpoint supersedes others.

    Args:
        store: The checkpoints.
        manager: Provides the serving version.
        version_monitor: Notified of new checkpoints, and of those that cannot be leased.
        quarantine: The checkpoints that failed.
        recorder: Provides what is settled, and records reasons.
        ranking: Provides the best checkpoint.
        target: Decides which version should be serving.
        controller: Has it served.
        backlog: Receives the checkpoints to evaluate.
        best_file: Receives the best checkpoint, once it is leased.
        decision_file: Receives what is serving, for other servers.
        events: Receives what is committed, and is flushed in every pass.
        policy: Which checkpoints to evaluate.
        poll_interval_seconds: The poll interval, unless woken or `peek` changes.

    Attributes:
        failures: How many passes in a row failed, or left out checkpoints that cannot be read.
        problem: Why the last pass did; empty if it did not.
        is_trained_anew: Whether the ledger is gone, and other checkpoints are where those of this evaluator were.
            Nothing is decided any more.
    """

    def __init__(
        self,
        *,
        store: CheckpointStore,
        manager: ServableManager,
        version_monitor: VersionStateMonitor,
        quarantine: Quarantine,
        recorder: Recorder,
        ranking: Ranking,
        target: ServingTarget,
        controller: ServingController,
        backlog: Backlog,
        best_file: BestFile,
        decision_file: DecisionFile,
        events: EventBuffer,
        policy: EvaluationPolicy | int,
        poll_interval_seconds: float,
    ) -> None:
        self._store = store
        self._manager = manager
        self._version_monitor = version_monitor
        self._quarantine = quarantine
        self._recorder = recorder
        self._ranking = ranking
        self._target = target
        self._controller = controller
        self._backlog = backlog
        self._best_file = best_file
        self._decision_file = decision_file
        self._events = events
        self._policy = policy
        self._poll_interval_seconds = poll_interval_seconds
        self._changed = ChangedSteps(store.changes, quarantine.changes, recorder.changes)
        self._unsettled = UnsettledCheckpoints(store, quarantine)
        self._settled: set[CheckpointKey] = set()
        self._failed: set[CheckpointKey] = set()
        self._to_fail: dict[CheckpointKey, CheckpointInfo] = {}
        self._stored_steps = ranking.subset()
        self._leased_steps = ranking.subset()
        self._new: list[CheckpointInfo] = []
        self._all_steps: SortedSet[int] | None = None
        self._verified: set[CheckpointKey] = set()
        self._is_done = False
        self._caught_up_at = -math.inf
        self.failures = 0
        self.problem = ""
        self._failed_passes = 0
        self.is_trained_anew = False
        self._lost: set[CheckpointKey] | None = None
        self._woken = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="understudy-watcher")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Trigger a pass now."""
        self._woken.set()

    def is_caught_up(self, since: float) -> bool:
        """Return whether a pass that began after ``since``, on the `time.monotonic` clock, left nothing to evaluate."""
        return self._caught_up_at > since

    def close(self, timeout_seconds: float) -> None:
        """End the thread. Leased checkpoints stay on disk for the next process. Idempotent.

        Raises:
            TimeoutError: The source did not answer in time.
        """
        self._closing = True
        self._woken.set()
        join(self._thread, timeout_seconds, error="the source of checkpoints did not answer within")

    def _run(self) -> None:
        while not self._closing:
            self._woken.clear()
            seen = self._store.peek()
            try:
                self._pass()
                self._note(self._store.unread)
                self._failed_passes = 0
                pause = self._pause_seconds()
            except DrainingError:
                return
            except (CheckpointError, LedgerError, OSError) as error:  # its text says it all
                pause = self._note_failure(str(error))
                _log.warning("%s", _FAILED, extra={"failures": self.failures, "reason": self.problem})
            except Exception as error:  # noqa: BLE001 - the thread must survive any error of a disk or a source
                pause = self._note_failure(f"{type(error).__name__}: {error}")
                _log.exception("%s", _FAILED, extra={"failures": self.failures})
            self._pause(pause, seen)

    def _note(self, problem: str) -> None:
        self.problem = problem
        self.failures = self.failures + 1 if problem else 0

    def _note_failure(self, problem: str) -> float:
        """Note why a pass failed; return how long to wait before the next one, in seconds."""
        self._note(problem)
        self._failed_passes += 1
        return doubling_pause(self._failed_passes, first=self._poll_interval_seconds, longest=_LONGEST_PAUSE_SECONDS)

    def _pass(self) -> None:
        """Find out what has changed, act on it, and tell other servers what is serving."""
        self._check_state()
        try:
            self._reconcile()
            self._events.flush()
        finally:
            self._publish_serving()

    def _check_state(self) -> None:
        """Raise LedgerError if the ledger is gone: another evaluator's files might be where this one's were.

        A server that follows goes on with what the evaluator decides, as far as it can without its state folder.
        """
        try:
            self._recorder.check_present()
        except LedgerError:
            if self._lost is None:
                self._lost = {info.key for info in self._store.checkpoints()}
            self.is_trained_anew = self._has_only_others(self._lost)
            if self._target.followed is None:
                raise
        else:
            self._lost = None

    def _has_only_others(self, lost: set[CheckpointKey]) -> bool:
        """Return whether the source has checkpoints, and none of these."""
        try:
            self._store.refresh()
        except (CheckpointError, OSError):
            return False
        offered = self._store.offered()
        return bool(offered) and offered.isdisjoint(lost)

    def _pause(self, seconds: float, seen: object) -> None:
        """Wait until the next pass is due, `wake` is called, `peek` differs from ``seen``, or a decision is read."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            is_woken = self._woken.wait(min(left, _PEEK_SECONDS))
            if is_woken or self._store.peek() != seen or self._controller.has_news():
                return

    def _pause_seconds(self) -> float:
        if not self._is_done:
            is_first_load = self._manager.serving is None and self._controller.is_changing
            return _FIRST_LOAD_SECONDS if is_first_load else 0.0
        if self._changed:  # since the pass began, also by a retry that became due
            return 0.0
        retry = self._quarantine.seconds_to_next_retry()
        return self._poll_interval_seconds if retry is None else min(self._poll_interval_seconds, retry)

    def _reconcile(self) -> None:
        began = time.monotonic()
        try:
            self._store.refresh(self._target.steps_to_find())
        except OSError:  # What was decided is carried out all the same, with what is known.
            self._controller.reconcile(all_known=False)
            raise
        all_known = self._store.is_complete
        self._read_changes()
        self._acquire_leases(self._always_kept())
        self._controller.reconcile(all_known=all_known)
        self._is_done = False
        if not all_known:
            return
        self._events.flush()  # before the first entry of a new checkpoint, and after what a full disk must not stop
        if not self._skip_by_policy():
            return
        if self._policy == "latest":
            self._verify_latest()
        self._is_done = self._acquire_leases(self._in_turn())
        self._read_changes()
        self._record_failures()
        self._controller.reconcile()
        self._is_done &= self._fill_backlog()
        if self._read_changes():
            self.wake()  # to have them scored
        self._release_leases()
        self._publish_best()
        if self._is_done:
            self._store.discard_leftovers()
        self._caught_up_at = -math.inf if self._unsettled else began
        self._recorder.remove_old(self._remembered)

    def _remembered(self) -> set[int]:
        """Return the steps whose entries must stay: without them, a checkpoint would be evaluated again."""
        steps = {info.step for info in self._store.checkpoints()} | self._unsettled.steps()
        return steps | self._target.steps_to_find()

    def _read_changes(self) -> bool:
        """Apply what changed since the last call; return whether any checkpoint is to be scored on one more dataset."""
        self._quarantine.note_due()
        new: list[CheckpointInfo] = []
        is_requested = False
        with self._changed.read() as steps:
            for step in steps:
                info = self._store.find(step)
                self._stored_steps.include(step, is_member=info is not None)
                if info is not None and info.key not in self._unsettled:
                    if info.key not in self._settled:
                        self._discover(info)
                        new.append(info)
                    elif self._recorder.is_requested(*info.key):
                        self._settled.discard(info.key)
                        self._unsettled.add(info)
                        is_requested = True
                self._classify(step, info)
        self._version_monitor.seen(info for info in new if self._is_open(info))
        return is_requested

    def _discover(self, info: CheckpointInfo) -> None:
        self._version_monitor.discovered(info.step)
        self._events.committed(info)
        self._ranking.replaced(*info.key)
        self._new.append(info)
        self._unsettled.add(info)

    def _classify(self, step: int, stored: CheckpointInfo | None) -> None:
        """Settle the checkpoints of a step that are scored, and note those that never will be."""
        self._unsettled.refresh(step)
        for info in self._unsettled.of_step(step):
            if not self._recorder.remaining(info.step, info.digest):
                self._settle(info)
            elif stored is None or info.key != stored.key or self._quarantine.is_given_up(info.key):
                self._to_fail[info.key] = info
        if stored is not None and not self._recorder.datasets and self._quarantine.is_given_up(stored.key):
            self._to_fail[stored.key] = stored

    def _is_open(self, info: CheckpointInfo) -> bool:
        """Whether a checkpoint remains to be scored, or is never scored; else an earlier process saw it."""
        return not self._recorder.datasets or bool(self._recorder.remaining(info.step, info.digest))

    def _skip_by_policy(self) -> bool:
        """Skip new checkpoints that the policy excludes; the choice is the same after a restart.

        Returns False if the time was up before the last one.
        """
        if isinstance(self._policy, int) and self._new:
            steps = self._known_steps()
            self._new = [info for info in self._new if info.key in self._unsettled]
            left_out = [info for info in self._new if steps.index(info.step) % self._policy and not info.final]
            if not self._record_skip(left_out, f"the policy is to evaluate one checkpoint in {self._policy}"):
                return False
        self._new = []
        return True

    def _known_steps(self) -> SortedSet[int]:
        """Return all steps that have an entry in the ledger or are new."""
        if self._all_steps is None:
            self._all_steps = SortedSet(self._recorder.steps())
        self._all_steps.update(info.step for info in self._new)
        return self._all_steps

    def _settle(self, info: CheckpointInfo) -> None:
        self._unsettled.remove(info.key)
        self._settled.add(info.key)

    def _always_kept(self) -> list[CheckpointInfo]:
        """Return the checkpoints to keep even when they are settled, in step order."""
        serving = self._manager.serving
        steps = {
            None if serving is None else serving.step,
            self._manager.predecessor_step,
            *self._target.steps_to_keep(),
            self._stored_steps.best(),
        }
        found = (self._store.find(step) for step in sorted(step for step in steps if step is not None))
        return [info for info in found if info is not None]

    def _in_turn(self) -> Iterable[CheckpointInfo]:
        """Return the unsettled checkpoints to lease, in this order; under the policy ``latest``, only the newest."""
        if self._policy != "latest":
            return self._unsettled.to_lease()
        newest = self._unsettled.newest
        return [] if newest is None else [newest]

    def _fill_backlog(self) -> bool:
        """Offer what may be evaluated; return False if the time was up before all others were skipped."""
        if self._policy != "latest":
            self._unsettled.offer(self._backlog)
            return True
        newest = self._unsettled.newest
        is_whole = newest is not None and newest.key in self._verified
        evaluating = self._backlog.replace([newest] if newest is not None and is_whole else [])
        if newest is None or not is_whole:
            return True
        superseded = self._superseded(newest, evaluating)
        return self._record_skip(superseded, _SUPERSEDED)

    def _superseded(self, newest: CheckpointInfo, evaluating: CheckpointInfo | None) -> Iterator[CheckpointInfo]:
        step = newest.step if evaluating is None else max(newest.step, evaluating.step)
        return (info for info in self._unsettled.in_order() if info != evaluating and info.step != step)

    def _acquire_leases(self, needed: Iterable[CheckpointInfo]) -> bool:
        """Lease checkpoints, in this order; return False if the time was up before the last one."""
        until = time.monotonic() + _PASS_SECONDS
        for info in needed:
            if self._unsettled.lease_of(info.key) is not None or not self._quarantine.admits(info.key):
                continue
            if time.monotonic() > until:
                return False
            try:
                self._unsettled.acquire(info)
            except (CheckpointError, VersionNotFoundError, OSError) as error:
                self._failed_to_lease(info, error)
            else:
                self._leased_steps.include(info.step, is_member=True)
        return True

    def _verify_latest(self) -> None:
        """Find the newest undamaged checkpoint: only such a checkpoint supersedes others."""
        while (newest := self._unsettled.newest) is not None:
            self._acquire_leases([newest])
            lease = self._unsettled.lease_of(newest.key)
            if lease is None:
                continue  # it is in quarantine now
            if newest.key in self._verified:
                return
            try:
                lease.verify()
            except (CheckpointError, OSError) as error:
                self._release(newest.key)
                self._failed_to_lease(newest, error)
            else:
                self._verified = {newest.key}
                return

    def _failed_to_lease(self, info: CheckpointInfo, error: Exception) -> None:
        note = self._version_monitor.postponed if exhausted_resource(error) else self._version_monitor.failed
        note(info, error, seconds=0.0)
        self._unsettled.refresh(info.step)

    def _release_leases(self) -> None:
        for key in self._unsettled.idle({info.key for info in self._always_kept()}):
            if not self._recorder.is_requested(*key):
                self._release(key)

    def _release(self, key: CheckpointKey) -> None:
        self._unsettled.release(key)
        self._leased_steps.include(key[0], is_member=self._unsettled.is_leased(key[0]))

    def _record_failures(self) -> None:
        """Record why abandoned or deleted checkpoints have no score."""
        for key, info in list(self._to_fail.items()):
            if reason := self._why_failed(info):
                self._record_failure(info, reason)
            del self._to_fail[key]

    def _why_failed(self, info: CheckpointInfo) -> str:
        """Return why a checkpoint will not be scored; empty if it may be, or if that is recorded."""
        is_unscored = not self._recorder.datasets and info.key not in self._failed
        if not (info.key in self._unsettled or is_unscored):
            return ""
        failure = self._quarantine.failure(info.key)
        if failure is not None and failure.given_up:
            return failure.reason
        stored = self._store.find(info.step)
        if stored is not None and stored.key == info.key:
            return ""
        before = f"; before that: {failure.reason}" if failure else ""
        return f"step {info.step} was deleted before it could be evaluated{before}"

    def _record_failure(self, info: CheckpointInfo, reason: str) -> None:
        self._recorder.record_reason(info.step, info.digest, EvaluationOutcome.FAILED, reason)
        self._failed.add(info.key)
        self._settle(info)

    def _record_skip(self, infos: Iterable[CheckpointInfo], reason: str) -> bool:
        """Record why checkpoints are not evaluated; return False if the time was up before the last one."""
        until = time.monotonic() + _PASS_SECONDS
        for info in infos:
            if time.monotonic() > until:
                return False
            self._recorder.record_reason(info.step, info.digest, EvaluationOutcome.SKIPPED, reason)
            self._settle(info)
        return True

    def _publish_serving(self) -> None:
        self._decision_file.publish(self._target.serving_key, followed=self._target.followed)
        self._controller.keep_history()
        self._controller.report_to_evaluator()

    def _publish_best(self) -> None:
        best = self._leased_steps.best()
        value = None if best is None else self._ranking.value(best)
        if best is not None and value is not None:
            self._best_file.publish(best, value)
