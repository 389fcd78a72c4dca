"""The thread that follows the source."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter

from understudy.checkpoints.errors import CheckpointError
from understudy.evaluator.errors import DrainingError, VersionNotFoundError
from understudy.evaluator.exhaustion import exhausted_resource
from understudy.evaluator.lifecycle.backlog import Backlog
from understudy.evaluator.lifecycle.best_file import BestFile
from understudy.evaluator.lifecycle.director import StageDirector
from understudy.evaluator.lifecycle.loads import LoadHistory
from understudy.evaluator.lifecycle.manager import ServableManager
from understudy.evaluator.lifecycle.promotion import Ranking
from understudy.evaluator.lifecycle.quarantine import Quarantine
from understudy.evaluator.lifecycle.shelf import Hold, Shelf
from understudy.evaluator.records.recorder import Recorder
from understudy.evaluator.settings import EvaluationPolicy
from understudy.evaluator.types import CheckpointInfo, EvaluationOutcome

_log = logging.getLogger(__name__)

_LONGEST_PAUSE_SECONDS = 30.0
_GLANCE_SECONDS = 0.05

_LOOK_SECONDS = 0.5
"""How long a look may take to hold checkpoints, or to pass over some, before it looks for newer ones."""

_NEXT_COPIES = 4
_MOST_COPIES = 64
"""How many checkpoints are held where that takes copies, besides the next ones to evaluate."""

_OVERTAKEN = "a newer checkpoint was published before this one was evaluated, and the policy is to evaluate the latest"

_Key = tuple[int, str]


class Follower:
    """Discovers checkpoints, holds those that are needed, and keeps the stage and the backlog up to date.

    What belongs on stage is found, held and loaded first; then the others are found, held, and given to the backlog in
    step order. A checkpoint is held from then until it is settled (scored on every dataset, or a reason is recorded why
    not), and while it is on stage, the one before that, pinned or best. If holding takes a copy, those that wait long
    are held when their turn comes; what is deleted before is recorded with that reason. The ledger alone says what is
    settled, so a restart goes on where the last process was.

    Files are hashed when they are loaded, or, where only the latest is evaluated, before it overtakes the others.

    Args:
        shelf: The checkpoints.
        manager: Knows what is on stage.
        history: Told of checkpoints that are new, and of those that cannot be held.
        quarantine: Knows which are bad.
        recorder: Knows what is settled, and takes the reasons.
        ranking: Knows which is best.
        director: Decides what is on stage.
        backlog: Given what is to be evaluated.
        best_file: Told which is best, once it is held.
        policy: Which checkpoints to evaluate.
        poll_interval_seconds: How often to look, unless poked or at a glance there is something new.
    """

    def __init__(
        self,
        *,
        shelf: Shelf,
        manager: ServableManager,
        history: LoadHistory,
        quarantine: Quarantine,
        recorder: Recorder,
        ranking: Ranking,
        director: StageDirector,
        backlog: Backlog,
        best_file: BestFile,
        policy: EvaluationPolicy | int,
        poll_interval_seconds: float,
    ) -> None:
        self._shelf = shelf
        self._manager = manager
        self._history = history
        self._quarantine = quarantine
        self._recorder = recorder
        self._ranking = ranking
        self._director = director
        self._backlog = backlog
        self._best_file = best_file
        self._policy = policy
        self._poll_interval_seconds = poll_interval_seconds
        self._unsettled: dict[_Key, CheckpointInfo] = {}
        self._settled: set[_Key] = set()
        self._failed: set[_Key] = set()
        self._holds: dict[_Key, Hold] = {}
        self._new: list[CheckpointInfo] = []
        self._verified: set[_Key] = set()
        self._is_done = False
        self._caught_up_at = -math.inf
        self._poked = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="understudy-follower")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def poke(self) -> None:
        """Have it look now."""
        self._poked.set()

    def is_caught_up(self, since: float) -> bool:
        """Return whether a look that began after a moment, by `time.monotonic`, found nothing left to evaluate."""
        return self._caught_up_at > since

    def close(self, timeout_seconds: float) -> None:
        """End the thread. What is held stays on disk for the next process. Idempotent.

        Raises:
            TimeoutError: The source did not answer in time.
        """
        self._closing = True
        self._poked.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"the source of checkpoints did not answer within {timeout_seconds} s")

    def _run(self) -> None:
        failures = 0
        while not self._closing:
            poked = self._poked.is_set()
            self._poked.clear()
            seen = self._shelf.glance()
            try:
                self._look(only_if_changed=failures == 0 and self._is_done and not poked)
                failures = 0
            except DrainingError:
                return
            except Exception:  # noqa: BLE001 - the thread must outlive whatever a disk or a source does
                failures += 1
                _log.exception("following the source failed, to be tried again", extra={"failures": failures})
            self._pause(self._pause_seconds(failures), seen)

    def _pause(self, seconds: float, seen: object) -> None:
        """Wait until it is time to look again, or poked, or what a glance shows is not what was seen."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._poked.wait(min(left, _GLANCE_SECONDS)) or self._shelf.glance() != seen:
                return

    def _pause_seconds(self, failures: int) -> float:
        if failures:
            return min(self._poll_interval_seconds * 2.0 ** min(failures, 10), _LONGEST_PAUSE_SECONDS)
        if not self._is_done:
            return 0.0
        retry = self._quarantine.seconds_to_next_retry()
        return self._poll_interval_seconds if retry is None else min(self._poll_interval_seconds, retry)

    def _look(self, *, only_if_changed: bool = False) -> None:
        began = time.monotonic()
        changed = self._shelf.refresh(self._director.wanted())
        if only_if_changed and not changed and self._quarantine.seconds_to_next_retry() is None:
            self._caught_up_at = -math.inf if self._unsettled else began
            return
        on_shelf = self._shelf.checkpoints()
        all_known = self._shelf.is_complete
        self._sort_out(on_shelf)
        self._hold(self._to_serve(on_shelf))
        self._director.reconsider(all_known=all_known)
        self._is_done = False
        if not all_known:
            return
        if not self._leave_out():
            return
        if self._policy == "latest":
            self._verify_latest()
        self._is_done = self._hold(self._in_turn())
        self._record_failures(on_shelf)
        self._director.reconsider()
        self._is_done &= self._pass_over(self._backlog.offer(self._evaluable()), _OVERTAKEN)
        self._let_go({info.key for info in self._to_serve(on_shelf)} | self._unsettled.keys())
        self._publish_best()
        if self._is_done:
            self._shelf.discard_leftovers()
        self._caught_up_at = -math.inf if self._unsettled else began

    def _sort_out(self, on_shelf: Iterable[CheckpointInfo]) -> None:
        """Find out what is unsettled."""
        for info in on_shelf:
            key = info.key
            if key in self._settled:
                continue
            if key not in self._unsettled:
                self._history.discovered(info.step)
                self._ranking.replaced(*key)
                self._new.append(info)
                self._unsettled[key] = info
        for info in list(self._unsettled.values()):
            if not self._recorder.remaining(info.step, info.digest):
                self._settle(info)

    def _leave_out(self) -> bool:
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
        if self._pass_over(left_out, f"the policy is to evaluate one checkpoint in {self._policy}"):
            return True
        self._new = [info for info in new if info.key in self._unsettled]
        return False

    def _settle(self, info: CheckpointInfo) -> None:
        self._unsettled.pop(info.key, None)
        self._settled.add(info.key)

    def _to_serve(self, on_shelf: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        """Return what must not be deleted even when it is settled, in step order."""
        stage = self._manager.stage
        steps = {
            None if stage is None else stage.step,
            self._manager.predecessor_step,
            self._director.pinned_step,
            self._director.target(),
            self._ranking.best(among={info.step for info in on_shelf}),
        }
        return [info for info in on_shelf if info.step in steps]

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
        dear = [info for info in waiting if info.key not in self._holds and self._shelf.is_dear(info)]
        if not dear:
            return waiting
        later = dear[_NEXT_COPIES:]
        postponed = {info.key for info in later[: max(0, len(later) - max(0, _MOST_COPIES - len(self._holds)))]}
        return [info for info in waiting if info.key not in postponed]

    def _evaluable(self) -> list[CheckpointInfo]:
        """Return what the backlog may give out: all that is held and not preceded by what has still to be."""
        waiting = self._waiting()
        if self._policy == "latest":
            return waiting if waiting and waiting[-1].key in self._verified else []
        return list(itertools.takewhile(lambda info: info.key in self._holds, waiting))

    def _hold(self, needed: Iterable[CheckpointInfo]) -> bool:
        """Hold checkpoints, in this order; return False if the time was up before the last."""
        until = time.monotonic() + _LOOK_SECONDS
        for info in needed:
            if info.key in self._holds or not self._quarantine.admits(info.key):
                continue
            if time.monotonic() > until:
                return False
            try:
                self._holds[info.key] = self._shelf.hold(info)
            except (CheckpointError, VersionNotFoundError, OSError) as error:
                self._failed_to_hold(info, error)
        return True

    def _verify_latest(self) -> None:
        """Find the newest checkpoint that is whole: only such a one overtakes others."""
        while waiting := self._waiting():
            newest = waiting[-1]
            self._hold([newest])
            hold = self._holds.get(newest.key)
            if hold is None:
                continue  # it is in quarantine now
            if newest.key in self._verified:
                return
            try:
                hold.verify()
            except (CheckpointError, OSError) as error:
                self._holds.pop(newest.key).release()
                self._failed_to_hold(newest, error)
            else:
                self._verified = {newest.key}
                return

    def _failed_to_hold(self, info: CheckpointInfo, error: Exception) -> None:
        note = self._history.postponed if exhausted_resource(error) else self._history.failed
        note(info, error, seconds=0.0)

    def _let_go(self, needed: Collection[_Key]) -> None:
        for key in self._holds.keys() - needed:
            self._holds.pop(key).release()

    def _record_failures(self, on_shelf: Iterable[CheckpointInfo]) -> None:
        """Record why those who were given up, or are gone, have no score."""
        present = {info.key for info in on_shelf}
        for info in [*self._unsettled.values(), *self._unscored(on_shelf)]:
            failure = self._quarantine.failure(info.key)
            if failure is not None and failure.given_up:
                self._record_failure(info, failure.reason)
            elif info.key not in present:
                before = f"; before that: {failure.reason}" if failure else ""
                self._record_failure(info, f"step {info.step} was deleted before it could be evaluated{before}")

    def _unscored(self, on_shelf: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
        """Return what is settled only because there is no dataset to score it on."""
        if self._recorder.datasets:
            return []
        return [info for info in on_shelf if info.key not in self._failed]

    def _record_failure(self, info: CheckpointInfo, reason: str) -> None:
        self._recorder.record_reason(info.step, info.digest, EvaluationOutcome.FAILED, reason)
        self._failed.add(info.key)
        self._settle(info)

    def _pass_over(self, infos: Iterable[CheckpointInfo], reason: str) -> bool:
        """Record why checkpoints are not evaluated; return False if the time was up before the last."""
        until = time.monotonic() + _LOOK_SECONDS
        for info in infos:
            if time.monotonic() > until:
                return False
            self._recorder.record_reason(info.step, info.digest, EvaluationOutcome.SKIPPED, reason)
            self._settle(info)
        return True

    def _publish_best(self) -> None:
        best = self._ranking.best(among={step for step, _ in self._holds})
        value = None if best is None else self._ranking.value(best)
        if best is not None and value is not None:
            self._best_file.publish(best, value)
