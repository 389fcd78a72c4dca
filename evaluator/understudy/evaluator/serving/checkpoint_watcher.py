"""The thread that watches the source of checkpoints."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter

from understudy.checkpoints.checkpoint_errors import CheckpointError
from understudy.checkpoints.pauses import doubling_pause
from understudy.evaluator.evaluator_errors import DrainingError, VersionNotFoundError, exhausted_resource
from understudy.evaluator.records.recorder import Recorder
from understudy.evaluator.serving.checkpoint_store import CheckpointStore, Lease
from understudy.evaluator.serving.decision_file import DecisionFile
from understudy.evaluator.serving.event_buffer import EventBuffer
from understudy.evaluator.serving.promotion import BestFile, Ranking
from understudy.evaluator.serving.servable_manager import ServableManager
from understudy.evaluator.serving.serving_controller import ServingController
from understudy.evaluator.serving.version_monitor import Backlog, Quarantine, VersionStateMonitor
from understudy.evaluator.settings import EvaluationPolicy
from understudy.evaluator.threads import join
from understudy.evaluator.types import CheckpointInfo, CheckpointKey, EvaluationOutcome

_log = logging.getLogger(__name__)

_LONGEST_PAUSE_SECONDS = 30.0
_PEEK_SECONDS = 0.05

_FIRST_LOAD_SECONDS = 10.0
"""How long the first load runs undisturbed before the other checkpoints are read."""

_LOOK_SECONDS = 0.5
"""How long one pass may lease or skip checkpoints before it polls for newer ones."""

_NEXT_COPIES = 4
_MOST_COPIES = 64
"""The maximum number of leases that need a copy, besides the next checkpoints to evaluate."""

_SUPERSEDED = "a newer checkpoint was published before this one was evaluated, and the policy is to evaluate the latest"


class CheckpointWatcher:
    """Discovers checkpoints, leases those that are needed, and keeps the serving version and the backlog up to date.

    The checkpoint that should be serving is found, leased and loaded first. Then the others are found, leased, and
    added to the backlog in step order. A checkpoint is leased until it is settled (every dataset has a score or a
    recorded reason), and while it is serving, the previous serving version, pinned or best. If a lease needs a copy, a
    checkpoint that waits long is leased only when its turn comes; if it is deleted before, that reason is recorded.
    Only the ledger decides what is settled, so a restart continues where the last process stopped.

    Files are hashed when they are loaded, or, under the policy ``latest``, before a checkpoint supersedes others.

    Args:
        store: The checkpoints.
        manager: Provides the serving version.
        version_monitor: Notified of new checkpoints, and of those that cannot be leased.
        quarantine: The checkpoints that failed.
        recorder: Provides what is settled, and records reasons.
        ranking: Provides the best checkpoint.
        controller: Decides which version is serving.
        backlog: Receives the checkpoints to evaluate.
        best_file: Receives the best checkpoint, once it is leased.
        decision_file: Receives what is serving, for other servers.
        events: Receives what is committed, and is flushed in every pass.
        policy: Which checkpoints to evaluate.
        poll_interval_seconds: The poll interval, unless woken or `peek` changes.
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
        self._controller = controller
        self._backlog = backlog
        self._best_file = best_file
        self._decision_file = decision_file
        self._events = events
        self._policy = policy
        self._poll_interval_seconds = poll_interval_seconds
        self._unsettled: dict[CheckpointKey, CheckpointInfo] = {}
        self._settled: set[CheckpointKey] = set()
        self._failed: set[CheckpointKey] = set()
        self._leases: dict[CheckpointKey, Lease] = {}
        self._new: list[CheckpointInfo] = []
        self._verified: set[CheckpointKey] = set()
        self._is_done = False
        self._caught_up_at = -math.inf
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
        failures = 0
        while not self._closing:
            woken = self._woken.is_set()
            self._woken.clear()
            seen = self._store.peek()
            try:
                self._reconcile(only_if_changed=failures == 0 and self._is_done and not woken)
                self._events.flush()
                failures = 0
            except DrainingError:
                return
            except Exception:  # noqa: BLE001 - the thread must survive any error of a disk or a source
                failures += 1
                _log.exception("following the source failed, to be tried again", extra={"failures": failures})
            self._publish_serving()
            self._pause(self._pause_seconds(failures), seen)

    def _pause(self, seconds: float, seen: object) -> None:
        """Wait until the next pass is due, `wake` is called, `peek` differs from ``seen``, or a decision is read."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._woken.wait(min(left, _PEEK_SECONDS)) or self._store.peek() != seen:
                return
            if self._controller.has_news():
                self._woken.set()
                return

    def _pause_seconds(self, failures: int) -> float:
        if failures:
            return doubling_pause(failures, first=self._poll_interval_seconds, longest=_LONGEST_PAUSE_SECONDS)
        if not self._is_done:
            is_first_load = self._manager.serving is None and self._controller.is_changing
            return _FIRST_LOAD_SECONDS if is_first_load else 0.0
        retry = self._quarantine.seconds_to_next_retry()
        return self._poll_interval_seconds if retry is None else min(self._poll_interval_seconds, retry)

    def _reconcile(self, *, only_if_changed: bool = False) -> None:
        began = time.monotonic()
        try:
            changed = self._store.refresh(self._controller.wanted())
        except OSError:  # What was decided is carried out all the same, with what is known.
            self._controller.reconcile(all_known=False)
            raise
        if only_if_changed and not changed and self._quarantine.seconds_to_next_retry() is None:
            self._caught_up_at = -math.inf if self._unsettled else began
            return
        stored = self._store.checkpoints()
        all_known = self._store.is_complete
        self._classify(stored)
        self._acquire_leases(self._to_serve(stored))
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
        self._record_failures(stored)
        self._controller.reconcile()
        self._is_done &= self._record_skip(self._backlog.offer(self._evaluable()), _SUPERSEDED)
        requested = {info.key for info in stored if self._recorder.is_requested(*info.key)}
        self._release_leases({info.key for info in self._to_serve(stored)} | self._unsettled.keys() | requested)
        if requested - self._unsettled.keys():
            self.wake()  # to have them scored
        self._publish_best()
        if self._is_done:
            self._store.discard_leftovers()
        self._caught_up_at = -math.inf if self._unsettled or requested else began
        self._recorder.remove_old(self._remembered(stored))

    def _remembered(self, stored: Iterable[CheckpointInfo]) -> set[int]:
        """Return the steps whose entries must stay: without them, a checkpoint would be evaluated again."""
        steps = {info.step for info in stored} | {step for step, _ in self._unsettled | self._leases}
        return steps | self._controller.wanted()

    def _classify(self, stored: Iterable[CheckpointInfo]) -> None:
        """Determine which checkpoints are unsettled."""
        seen = []
        for info in stored:
            key = info.key
            if key in self._settled and not self._recorder.is_requested(*key):
                continue
            if key in self._settled:
                self._settled.discard(key)
                self._unsettled[key] = info
            if key not in self._unsettled:
                self._version_monitor.discovered(info.step)
                self._events.committed(info)
                self._ranking.replaced(*key)
                self._new.append(info)
                self._unsettled[key] = info
                seen.append(info)
        self._version_monitor.seen(info for info in seen if self._is_open(info))
        for info in list(self._unsettled.values()):
            if not self._recorder.remaining(info.step, info.digest):
                self._settle(info)

    def _is_open(self, info: CheckpointInfo) -> bool:
        """Whether a checkpoint remains to be scored, or is never scored; else an earlier process saw it."""
        return not self._recorder.datasets or bool(self._recorder.remaining(info.step, info.digest))

    def _skip_by_policy(self) -> bool:
        """Skip new checkpoints that the policy excludes; the choice is the same after a restart.

        Returns False if the time was up before the last one.
        """
        new, self._new = self._new, []
        if not isinstance(self._policy, int):
            return True
        steps = sorted({*self._recorder.steps(), *(info.step for info in self._unsettled.values())})
        places = {step: place for place, step in enumerate(steps)}
        new = [info for info in new if info.key in self._unsettled]
        left_out = [info for info in new if places[info.step] % self._policy and not info.final]
        if self._record_skip(left_out, f"the policy is to evaluate one checkpoint in {self._policy}"):
            return True
        self._new = [info for info in new if info.key in self._unsettled]
        return False

    def _settle(self, info: CheckpointInfo) -> None:
        self._unsettled.pop(info.key, None)
        self._settled.add(info.key)

    def _to_serve(self, stored: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        """Return the checkpoints to keep even when they are settled, in step order."""
        serving = self._manager.serving
        steps = {
            None if serving is None else serving.step,
            self._manager.predecessor_step,
            self._controller.pinned_step,
            self._controller.target(),
            *self._controller.tried_steps(),
            *self._controller.returnable_steps(),
            self._ranking.best(among={info.step for info in stored}),
        }
        return [info for info in stored if info.step in steps]

    def _waiting(self) -> list[CheckpointInfo]:
        """Return the unsettled checkpoints that may be tried now, in step order."""
        admitted = (info for info in self._unsettled.values() if self._quarantine.admits(info.key))
        return sorted(admitted, key=attrgetter("step"))

    def _in_turn(self) -> list[CheckpointInfo]:
        """Return the unsettled checkpoints to lease, in this order.

        Under the policy ``latest``, this is the newest. Otherwise, if a lease is a link, these are all. If it is a
        copy, these are the next ones to evaluate, and the newest while few are leased.
        """
        waiting = self._waiting()
        if self._policy == "latest":
            return waiting[-1:]
        dear = [info for info in waiting if info.key not in self._leases and self._store.is_dear(info)]
        if not dear:
            return waiting
        later = dear[_NEXT_COPIES:]
        postponed = {info.key for info in later[: max(0, len(later) - max(0, _MOST_COPIES - len(self._leases)))]}
        return [info for info in waiting if info.key not in postponed]

    def _evaluable(self) -> list[CheckpointInfo]:
        """Return the checkpoints for the backlog: the leased ones before the first that is still to be leased."""
        waiting = self._waiting()
        if self._policy == "latest":
            return waiting if waiting and waiting[-1].key in self._verified else []
        return list(itertools.takewhile(lambda info: info.key in self._leases, waiting))

    def _acquire_leases(self, needed: Iterable[CheckpointInfo]) -> bool:
        """Lease checkpoints, in this order; return False if the time was up before the last one."""
        until = time.monotonic() + _LOOK_SECONDS
        for info in needed:
            if info.key in self._leases or not self._quarantine.admits(info.key):
                continue
            if time.monotonic() > until:
                return False
            try:
                self._leases[info.key] = self._store.lease(info)
            except (CheckpointError, VersionNotFoundError, OSError) as error:
                self._failed_to_lease(info, error)
        return True

    def _verify_latest(self) -> None:
        """Find the newest undamaged checkpoint: only such a checkpoint supersedes others."""
        while waiting := self._waiting():
            newest = waiting[-1]
            self._acquire_leases([newest])
            lease = self._leases.get(newest.key)
            if lease is None:
                continue  # it is in quarantine now
            if newest.key in self._verified:
                return
            try:
                lease.verify()
            except (CheckpointError, OSError) as error:
                self._leases.pop(newest.key).release()
                self._failed_to_lease(newest, error)
            else:
                self._verified = {newest.key}
                return

    def _failed_to_lease(self, info: CheckpointInfo, error: Exception) -> None:
        note = self._version_monitor.postponed if exhausted_resource(error) else self._version_monitor.failed
        note(info, error, seconds=0.0)

    def _release_leases(self, needed: Collection[CheckpointKey]) -> None:
        for key in self._leases.keys() - needed:
            self._leases.pop(key).release()

    def _record_failures(self, stored: Iterable[CheckpointInfo]) -> None:
        """Record why abandoned or deleted checkpoints have no score."""
        present = {info.key for info in stored}
        for info in [*self._unsettled.values(), *self._unscored(stored)]:
            failure = self._quarantine.failure(info.key)
            if failure is not None and failure.given_up:
                self._record_failure(info, failure.reason)
            elif info.key not in present:
                before = f"; before that: {failure.reason}" if failure else ""
                self._record_failure(info, f"step {info.step} was deleted before it could be evaluated{before}")

    def _unscored(self, stored: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
        """Return the checkpoints that are settled only because there is no dataset to score them on."""
        if self._recorder.datasets:
            return []
        return [info for info in stored if info.key not in self._failed]

    def _record_failure(self, info: CheckpointInfo, reason: str) -> None:
        self._recorder.record_reason(info.step, info.digest, EvaluationOutcome.FAILED, reason)
        self._failed.add(info.key)
        self._settle(info)

    def _record_skip(self, infos: Iterable[CheckpointInfo], reason: str) -> bool:
        """Record why checkpoints are not evaluated; return False if the time was up before the last one."""
        until = time.monotonic() + _LOOK_SECONDS
        for info in infos:
            if time.monotonic() > until:
                return False
            self._recorder.record_reason(info.step, info.digest, EvaluationOutcome.SKIPPED, reason)
            self._settle(info)
        return True

    def _publish_serving(self) -> None:
        self._decision_file.publish(self._controller.serving_key)
        self._controller.keep_history()
        self._controller.tell_evaluator()

    def _publish_best(self) -> None:
        best = self._ranking.best(among={step for step, _ in self._leases})
        value = None if best is None else self._ranking.value(best)
        if best is not None and value is not None:
            self._best_file.publish(best, value)
