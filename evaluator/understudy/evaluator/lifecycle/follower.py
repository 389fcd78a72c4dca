"""The thread that follows the source."""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections.abc import Iterable, Sequence

from understudy.checkpoints.errors import CheckpointError
from understudy.evaluator.errors import DrainingError, VersionNotFoundError
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

_NOT_THE_CHECKPOINTS_FAULT = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
_LONGEST_PAUSE_SECONDS = 30.0
_GLANCE_SECONDS = 0.05
_OVERTAKEN = "a newer checkpoint was published before this one was evaluated, and the policy is to evaluate the latest"

_Key = tuple[int, str]


class Follower:
    """Discovers checkpoints, holds those that are needed, and keeps the stage and the backlog up to date.

    A checkpoint is held from the moment it is seen until it is settled (scored on every dataset, or a reason is
    recorded why not), and while it is on stage, the one before that, pinned or best. The ledger alone says what is
    settled, so a restart goes on where the last process was.

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
            self._poked.clear()
            seen = self._shelf.glance()
            try:
                self._look()
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
        retry = self._quarantine.seconds_to_next_retry()
        return self._poll_interval_seconds if retry is None else min(self._poll_interval_seconds, retry)

    def _look(self) -> None:
        began = time.monotonic()
        self._shelf.refresh()
        on_shelf = self._shelf.checkpoints()
        self._sort_out(on_shelf)
        self._hold(self._needed(on_shelf))
        self._record_failures(on_shelf)
        self._director.reconsider()
        ready = [info for info in self._unsettled.values() if info.key in self._holds]
        for info in self._backlog.offer(info for info in ready if self._quarantine.admits(info.key)):
            self._pass_over(info, _OVERTAKEN)
        self._let_go(self._needed(on_shelf))
        self._publish_best()
        self._shelf.discard_leftovers()
        self._caught_up_at = -math.inf if self._unsettled else began

    def _sort_out(self, on_shelf: Iterable[CheckpointInfo]) -> None:
        """Find out what is unsettled, and what of it is not to be evaluated at all."""
        new: list[CheckpointInfo] = []
        for info in on_shelf:
            if info.key in self._settled:
                continue
            if info.key not in self._unsettled:
                self._history.discovered(info.step)
                self._ranking.replaced(*info.key)
                new.append(info)
            self._unsettled[info.key] = info
        for info in list(self._unsettled.values()):
            if not self._recorder.remaining(info.step, info.digest):
                self._settle(info)
        self._leave_out(info for info in new if info.key in self._unsettled)

    def _leave_out(self, new: Iterable[CheckpointInfo]) -> None:
        """Pass over new checkpoints that the policy leaves out; restarted, it leaves out the same ones."""
        if not isinstance(self._policy, int):
            return
        known = sorted({*self._recorder.steps(), *(info.step for info in self._unsettled.values())})
        for info in list(new):
            if known.index(info.step) % self._policy and not info.final:
                self._pass_over(info, f"the policy is to evaluate one checkpoint in {self._policy}")

    def _settle(self, info: CheckpointInfo) -> None:
        self._unsettled.pop(info.key, None)
        self._settled.add(info.key)

    def _needed(self, on_shelf: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        """Return what must not be deleted, in step order."""
        stage = self._manager.stage
        steps = {
            None if stage is None else stage.step,
            self._manager.predecessor_step,
            self._director.pinned_step,
            self._director.target(),
            self._ranking.best(among={info.step for info in on_shelf}),
        }
        return [info for info in on_shelf if info.key in self._unsettled or info.step in steps]

    def _hold(self, needed: Iterable[CheckpointInfo]) -> None:
        for info in needed:
            if info.key in self._holds or not self._quarantine.admits(info.key):
                continue
            try:
                self._holds[info.key] = self._shelf.hold(info)
            except (CheckpointError, VersionNotFoundError, OSError) as error:
                if isinstance(error, OSError) and error.errno in _NOT_THE_CHECKPOINTS_FAULT:
                    raise
                self._history.failed(info, error, seconds=0.0)

    def _let_go(self, needed: Iterable[CheckpointInfo]) -> None:
        for key in self._holds.keys() - {info.key for info in needed}:
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

    def _pass_over(self, info: CheckpointInfo, reason: str) -> None:
        self._recorder.record_reason(info.step, info.digest, EvaluationOutcome.SKIPPED, reason)
        self._settle(info)

    def _publish_best(self) -> None:
        best = self._ranking.best(among={step for step, _ in self._holds})
        value = None if best is None else self._ranking.value(best)
        if best is not None and value is not None:
            self._best_file.publish(best, value)
