"""The thread that follows the source."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter

from understudy.checkpoints.checkpoint_errors import CheckpointError
from understudy.evaluator.evaluator_errors import DrainingError, VersionNotFoundError
from understudy.evaluator.exhaustion import exhausted_resource
from understudy.evaluator.lifecycle.backlog import Backlog
from understudy.evaluator.lifecycle.best_file import BestFile
from understudy.evaluator.lifecycle.checkpoint_store import CheckpointStore, Lease
from understudy.evaluator.lifecycle.promotion import Ranking
from understudy.evaluator.lifecycle.quarantine import Quarantine
from understudy.evaluator.lifecycle.servable_manager import ServableManager
from understudy.evaluator.lifecycle.serving_controller import ServingController
from understudy.evaluator.lifecycle.version_monitor import VersionStateMonitor
from understudy.evaluator.records.recorder import Recorder
from understudy.evaluator.settings import EvaluationPolicy
from understudy.evaluator.types import CheckpointInfo, EvaluationOutcome

_log = logging.getLogger(__name__)

_LONGEST_PAUSE_SECONDS = 30.0
_PEEK_SECONDS = 0.05

_LOOK_SECONDS = 0.5
"""How long a look may take to hold checkpoints, or to pass over some, before it looks for newer ones."""

_NEXT_COPIES = 4
_MOST_COPIES = 64
"""How many checkpoints are held where that takes copies, besides the next ones to evaluate."""

_SUPERSEDED = "a newer checkpoint was published before this one was evaluated, and the policy is to evaluate the latest"

_Key = tuple[int, str]


class CheckpointWatcher:
    """Discovers checkpoints, holds those that are needed, and keeps the serving version and the backlog up to date.

    What should be serving is found, held and loaded first; then the others are found, held, and given to the backlog in
    step order. A checkpoint is held from then until it is settled (scored on every dataset, or a reason is recorded why
    not), and while it is serving, the one before that, pinned or best. If holding takes a copy, those that wait long
    are held when their turn comes; what is deleted before is recorded with that reason. The ledger alone says what is
    settled, so a restart goes on where the last process was.

    Files are hashed when they are loaded, or, where only the latest is evaluated, before it overtakes the others.

    Args:
        store: The checkpoints.
        manager: Knows what is serving.
        version_monitor: Told of checkpoints that are new, and of those that cannot be held.
        quarantine: Knows which are bad.
        recorder: Knows what is settled, and takes the reasons.
        ranking: Knows which is best.
        controller: Decides what is serving.
        backlog: Given what is to be evaluated.
        best_file: Told which is best, once it is held.
        policy: Which checkpoints to evaluate.
        poll_interval_seconds: How often to look, unless woken or a peek shows something new.
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
        self._policy = policy
        self._poll_interval_seconds = poll_interval_seconds
        self._unsettled: dict[_Key, CheckpointInfo] = {}
        self._settled: set[_Key] = set()
        self._failed: set[_Key] = set()
        self._leases: dict[_Key, Lease] = {}
        self._new: list[CheckpointInfo] = []
        self._verified: set[_Key] = set()
        self._is_done = False
        self._caught_up_at = -math.inf
        self._woken = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="understudy-watcher")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Have it look now."""
        self._woken.set()

    def is_caught_up(self, since: float) -> bool:
        """Return whether a look that began after a moment, by `time.monotonic`, found nothing left to evaluate."""
        return self._caught_up_at > since

    def close(self, timeout_seconds: float) -> None:
        """End the thread. What is held stays on disk for the next process. Idempotent.

        Raises:
            TimeoutError: The source did not answer in time.
        """
        self._closing = True
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"the source of checkpoints did not answer within {timeout_seconds} s")

    def _run(self) -> None:
        failures = 0
        while not self._closing:
            woken = self._woken.is_set()
            self._woken.clear()
            seen = self._store.peek()
            try:
                self._reconcile(only_if_changed=failures == 0 and self._is_done and not woken)
                failures = 0
            except DrainingError:
                return
            except Exception:  # noqa: BLE001 - the thread must outlive whatever a disk or a source does
                failures += 1
                _log.exception("following the source failed, to be tried again", extra={"failures": failures})
            self._pause(self._pause_seconds(failures), seen)

    def _pause(self, seconds: float, seen: object) -> None:
        """Wait until it is time to look again, or woken, or what a peek shows is not what was seen."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._woken.wait(min(left, _PEEK_SECONDS)) or self._store.peek() != seen:
                return

    def _pause_seconds(self, failures: int) -> float:
        if failures:
            return min(self._poll_interval_seconds * 2.0 ** min(failures, 10), _LONGEST_PAUSE_SECONDS)
        if not self._is_done:
            return 0.0
        retry = self._quarantine.seconds_to_next_retry()
        return self._poll_interval_seconds if retry is None else min(self._poll_interval_seconds, retry)

    def _reconcile(self, *, only_if_changed: bool = False) -> None:
        began = time.monotonic()
        changed = self._store.refresh(self._controller.wanted())
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
        if not self._skip_by_policy():
            return
        if self._policy == "latest":
            self._verify_latest()
        self._is_done = self._acquire_leases(self._in_turn())
        self._record_failures(stored)
        self._controller.reconcile()
        self._is_done &= self._record_skip(self._backlog.offer(self._evaluable()), _SUPERSEDED)
        self._release_leases({info.key for info in self._to_serve(stored)} | self._unsettled.keys())
        self._publish_best()
        if self._is_done:
            self._store.discard_leftovers()
        self._caught_up_at = -math.inf if self._unsettled else began

    def _classify(self, stored: Iterable[CheckpointInfo]) -> None:
        """Find out what is unsettled."""
        for info in stored:
            key = info.key
            if key in self._settled:
                continue
            if key not in self._unsettled:
                self._version_monitor.discovered(info.step)
                self._ranking.replaced(*key)
                self._new.append(info)
                self._unsettled[key] = info
        for info in list(self._unsettled.values()):
            if not self._recorder.remaining(info.step, info.digest):
                self._settle(info)

    def _skip_by_policy(self) -> bool:
        """Pass over new checkpoints that the policy leaves out; restarted, it leaves out the same ones.

        Returns False if the time was up before the last.
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
        """Return what must not be deleted even when it is settled, in step order."""
        serving = self._manager.serving
        steps = {
            None if serving is None else serving.step,
            self._manager.predecessor_step,
            self._controller.pinned_step,
            self._controller.target(),
            self._ranking.best(among={info.step for info in stored}),
        }
        return [info for info in stored if info.step in steps]

    def _waiting(self) -> list[CheckpointInfo]:
        """Return what is unsettled and may be tried now, in step order."""
        admitted = (info for info in self._unsettled.values() if self._quarantine.admits(info.key))
        return sorted(admitted, key=attrgetter("step"))

    def _in_turn(self) -> list[CheckpointInfo]:
        """Return what of the unsettled to hold, in this order.

        Where that costs a link, it is all. Where it costs a copy, it is the next ones to evaluate, and the newest as
        long as few are held.
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
        """Return what the backlog may give out: all that is held and not preceded by what has still to be."""
        waiting = self._waiting()
        if self._policy == "latest":
            return waiting if waiting and waiting[-1].key in self._verified else []
        return list(itertools.takewhile(lambda info: info.key in self._leases, waiting))

    def _acquire_leases(self, needed: Iterable[CheckpointInfo]) -> bool:
        """Hold checkpoints, in this order; return False if the time was up before the last."""
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
        """Find the newest checkpoint that is whole: only such a one overtakes others."""
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

    def _release_leases(self, needed: Collection[_Key]) -> None:
        for key in self._leases.keys() - needed:
            self._leases.pop(key).release()

    def _record_failures(self, stored: Iterable[CheckpointInfo]) -> None:
        """Record why those who were given up, or are gone, have no score."""
        present = {info.key for info in stored}
        for info in [*self._unsettled.values(), *self._unscored(stored)]:
            failure = self._quarantine.failure(info.key)
            if failure is not None and failure.given_up:
                self._record_failure(info, failure.reason)
            elif info.key not in present:
                before = f"; before that: {failure.reason}" if failure else ""
                self._record_failure(info, f"step {info.step} was deleted before it could be evaluated{before}")

    def _unscored(self, stored: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
        """Return what is settled only because there is no dataset to score it on."""
        if self._recorder.datasets:
            return []
        return [info for info in stored if info.key not in self._failed]

    def _record_failure(self, info: CheckpointInfo, reason: str) -> None:
        self._recorder.record_reason(info.step, info.digest, EvaluationOutcome.FAILED, reason)
        self._failed.add(info.key)
        self._settle(info)

    def _record_skip(self, infos: Iterable[CheckpointInfo], reason: str) -> bool:
        """Record why checkpoints are not evaluated; return False if the time was up before the last."""
        until = time.monotonic() + _LOOK_SECONDS
        for info in infos:
            if time.monotonic() > until:
                return False
            self._recorder.record_reason(info.step, info.digest, EvaluationOutcome.SKIPPED, reason)
            self._settle(info)
        return True

    def _publish_best(self) -> None:
        best = self._ranking.best(among={step for step, _ in self._leases})
        value = None if best is None else self._ranking.value(best)
        if best is not None and value is not None:
            self._best_file.publish(best, value)
