"""Tries a new version on a part of the servers, or of the requests, and then gives it to all, or takes it back."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.records.recorder import Recorder
from understudy.evaluator.rollout_plan import LEAST_FOLLOWERS, CanaryPlan, RolloutPlan, in_words, parse_rollout
from understudy.evaluator.serving.decision_file import Canary, DecisionFile, Shadow
from understudy.evaluator.serving.rollout_file import RolloutFile, RunningRollout
from understudy.evaluator.serving.rollout_health import ServerReport
from understudy.evaluator.serving.rollout_watch import OWN_NAME, watch_of
from understudy.evaluator.serving.shadow_health import ShadowCounts, ShadowReport
from understudy.evaluator.step_changes import StepChanges
from understudy.evaluator.types import CheckpointKey, EvaluationOutcome

FOLLOWERS_SECONDS: Final = 30.0
"""How long a new version waits for servers that follow before it is promoted without them."""

OBSERVE_SECONDS: Final = 0.5
"""How often the reports of the servers are compared."""

_SAVE_SECONDS: Final = 5.0
_SAVES: Final = 20
"""The time spent is saved this many times in a rollout at least."""

_LONGEST_PAUSE_SECONDS: Final = 5.0
"""The most time that counts between two readings; after a longer pause this process was suspended."""

_PAGE: Final = 1000
_ENDS: Final = (
    EvaluationOutcome.ROLLOUT_PROMOTED,
    EvaluationOutcome.ROLLOUT_ROLLED_BACK,
    EvaluationOutcome.ROLLOUT_STOPPED,
)
_REJECTED: Final = (EvaluationOutcome.ROLLOUT_ROLLED_BACK, EvaluationOutcome.ROLLOUT_STOPPED)

_log = logging.getLogger(__name__)


class Candidates(Protocol):
    """What the version policy and an operator want. Thread-safe."""

    def chosen_key(self) -> CheckpointKey | None:
        """The checkpoint that the policy and the gate choose, of those that `Rollout.rejects` does not exclude."""

    def pinned_key(self) -> CheckpointKey | None:
        """The checkpoint that an operator pinned."""

    def serving_key(self) -> CheckpointKey | None:
        """The checkpoint that this evaluator serves."""

    def may_stay(self, key: CheckpointKey) -> bool:
        """Whether a checkpoint may be served if there were no other."""

    def refusal(self, key: CheckpointKey, serving: CheckpointKey) -> str:
        """Why a checkpoint may no longer take the place of the serving one; empty if it may."""


class Rollout:
    """Decides which of two versions each server serves or computes requests with, and records each step in the ledger.

    While a rollout is under way this evaluator itself serves the version before. A checkpoint that becomes due
    meanwhile waits. A rejected one is not rolled out again; only an operator's pin serves it.

    `serves`, `rejects` and `running` are thread-safe; the others are for one thread at a time.

    Args:
        plan: Which part of the servers or requests, and for how long.
        directory: The state folder.
        decisions: Publishes what the servers are to serve.
        recorder: Records the steps.
        ledger: Holds them.
        clock: Monotonic clock, in seconds.

    Attributes:
        changes: Notes the steps that are rejected.

    Raises:
        LedgerError: The ledger cannot be read.
    """

    def __init__(
        self,
        plan: RolloutPlan,
        *,
        directory: Path,
        decisions: DecisionFile,
        recorder: Recorder,
        ledger: Ledger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self._file = RolloutFile(directory)
        self._decisions = decisions
        self._recorder = recorder
        self._ledger = ledger
        self._clock = clock
        self._followers: Callable[[], Sequence[ServerReport]] = tuple
        self._own: Callable[[], ShadowReport | None] = lambda: None
        self._rejected = frozenset(
            (record.step, record.checkpoint_digest) for outcome in _REJECTED for record in _entries(ledger, outcome)
        )
        self.changes = StepChanges()
        self._running: RunningRollout | None = None
        self._released: CheckpointKey | None = None
        self._waiting: tuple[CheckpointKey, float] | None = None
        self._objection = ""
        self._begin_watch(None)
        self._resume()

    def use_fleet(self, followers: Callable[[], Sequence[ServerReport]]) -> None:
        """Set what returns the connected servers."""
        self._followers = followers

    def use_shadow(self, own: Callable[[], ShadowReport | None]) -> None:
        """Set what returns the report of this evaluator as a server."""
        self._own = own

    @property
    def shadow(self) -> Shadow | None:
        """What computes a part of the requests once more; None if nothing does."""
        current = self._decisions.current
        return None if current is None else current.shadow

    @property
    def running(self) -> RunningRollout | None:
        """The rollout that is under way; None if there is none."""
        return self._running

    def rejects(self, key: CheckpointKey) -> bool:
        """Return whether a version was rolled back or stopped."""
        return key in self._rejected

    @property
    def before(self) -> CheckpointKey | None:
        """The version that all but the part serve; None before the first."""
        current = self._decisions.current
        return None if current is None else current.key

    def serves(self, chosen: CheckpointKey, may_stay: Callable[[CheckpointKey], bool]) -> CheckpointKey:
        """Return what this evaluator serves, given what the policy chooses."""
        before = self.before
        if before is None or chosen == before:
            return chosen
        if self._released is not None:
            return self._released
        return before if may_stay(before) else chosen

    def is_due(self) -> bool:
        """Return whether `advance` would take a step. Compares the servers' reports, and counts the time."""
        now = self._clock()
        running = self._running
        if running is None:
            return self._waiting is not None and (
                now - self._waiting[1] >= FOLLOWERS_SECONDS or len(self._names()) >= LEAST_FOLLOWERS
            )
        if now < self._observed_at + OBSERVE_SECONDS:
            return False
        running = self._count(running, now)
        if not self._objection:
            self._objection = self._watch.objection(running, now)
        return bool(self._objection) or (self._released is None and running.is_over)

    def advance(self, candidates: Candidates) -> None:
        """Take the step that is due, if any: begin a rollout, or end the one that is under way.

        Raises:
            LedgerError: The step cannot be recorded. The next call repeats it.
        """
        if self._running is not None:
            self._continue(self._running, candidates)
        else:
            self._consider(candidates)

    def _continue(self, running: RunningRollout, candidates: Candidates) -> None:
        pinned, before = candidates.pinned_key(), self.before
        if candidates.serving_key() == running.key:
            if before != running.key:
                return  # the decision file follows in a moment; an end before it would send its part back
            why = "an operator pinned it" if pinned == running.key else f"nothing spoke against it in {self._spent()}"
            self._end(running, EvaluationOutcome.ROLLOUT_PROMOTED, f"promoted to all: {why}")
        elif pinned is not None:
            if pinned != running.key:
                self._end(running, EvaluationOutcome.ROLLOUT_STOPPED, f"stopped: an operator pinned step {pinned[0]}")
        elif before is not None and (refusal := candidates.refusal(running.key, before) or self._objection):
            self._end(running, EvaluationOutcome.ROLLOUT_ROLLED_BACK, f"rolled back: {refusal}")
        elif running.is_over or before is None or not candidates.may_stay(before):
            self._released = running.key

    def _consider(self, candidates: Candidates) -> None:
        before, chosen = self.before, candidates.chosen_key()
        if self._released is not None and self._released != chosen:
            self._released = None  # it cannot be loaded here, so it is no longer chosen
        is_held = candidates.pinned_key() is None and None not in (before, chosen) and before != chosen
        if chosen is None or before is None or not is_held or not candidates.may_stay(before):
            self._waiting = self._released = None
            return
        if self._released is not None:
            return
        names = self._names()
        if len(names) >= LEAST_FOLLOWERS or not isinstance(self.plan, CanaryPlan):
            self._start(chosen, names)
            return
        if self._waiting is None or self._waiting[0] != chosen:
            self._waiting = (chosen, self._clock())
        if self._clock() - self._waiting[1] >= FOLLOWERS_SECONDS:
            self._promote_at_once(chosen, len(names))

    def _start(self, key: CheckpointKey, names: Sequence[str]) -> None:
        plan, current = self.plan, self._decisions.current
        running = RunningRollout(
            number=1 if current is None else current.sequence + 1,
            step=key[0],
            digest=key[1],
            servers=plan.part_of(names) if isinstance(plan, CanaryPlan) else (),
            followers=len(names),
            elapsed_seconds=0.0,
            after_seconds=plan.after_seconds,
            shadow=None if isinstance(plan, CanaryPlan) else ShadowCounts(),
            shadow_servers=None if isinstance(plan, CanaryPlan) else {},
            least_requests=0 if isinstance(plan, CanaryPlan) else plan.least_requests,
        )
        self._file.write(running)
        self._begin(running)

    def _begin(self, running: RunningRollout, *, goes_on: bool = False) -> None:
        """Record that a rollout began, and publish it to the servers, unless that was done before."""
        before = "none" if self.before is None else f"step {self.before[0]}"
        plan = self.plan
        if isinstance(plan, CanaryPlan):
            trial: Canary | Shadow = Canary(step=running.step, digest=running.digest, servers=running.servers)
            what = f"a canary on {len(running.servers)} of {running.followers} servers"
            others = f"the others serve {before}"
        else:
            trial = Shadow(step=running.step, digest=running.digest, share=plan.share, tolerance=plan.tolerance)
            what = f"a shadow that computes {100 * plan.share:.3g}% of the requests once more"
            others = f"{before} answers all requests"
        self._begin_watch(running if goes_on else None)
        self._running = running  # before the ledger has it: who reads of a rollout may end it
        try:
            self._record(
                running, EvaluationOutcome.ROLLOUT_STARTED, f"{what} for {in_words(running.after_seconds)}; {others}"
            )
        except BaseException:
            self._running = None
            raise
        self._waiting = None
        self._decisions.set_trial(trial)

    def _begin_watch(self, running: RunningRollout | None) -> None:
        """Watch a new rollout from now on, or one that goes on."""
        self._observed_at = self._saved_at = now = self._clock()
        self._watch = watch_of(self.plan, running, now)
        self._objection = ""

    def _promote_at_once(self, key: CheckpointKey, followers: int) -> None:
        current = self._decisions.current
        running = RunningRollout(
            number=0 if current is None else current.sequence,
            step=key[0],
            digest=key[1],
            servers=(),
            followers=followers,
            elapsed_seconds=0.0,
            after_seconds=self.plan.after_seconds,
        )
        reason = f"promoted to all at once: a canary needs {LEAST_FOLLOWERS} servers that follow, and {followers} did"
        self._record(running, EvaluationOutcome.ROLLOUT_PROMOTED, reason)
        self._released, self._waiting = key, None

    def _end(self, running: RunningRollout, outcome: EvaluationOutcome, reason: str) -> None:
        former, self._running = self._rejected, None  # before the ledger has it: who reads of its end may decide again
        if outcome in _REJECTED:
            self._rejected |= {running.key}
            self.changes.note(running.step)
        try:
            self._record(running, outcome, reason)
        except BaseException:
            self._rejected, self._running = former, running
            self.changes.note(running.step)
            raise
        self._released = None
        self._decisions.set_trial(None)
        self._file.remove()

    def _resume(self) -> None:
        """Go on with the rollout of an earlier process, or finish its end."""
        running = self._file.read(self.plan)
        if running is None:
            self._decisions.set_trial(None)
            return
        for outcome in _ENDS:
            if self._find(running, outcome):
                self._decisions.set_trial(None)
                self._file.remove()
                return
        _log.info(
            "going on with a rollout",
            extra={"step": running.step, "servers": list(running.servers), "elapsed_seconds": running.elapsed_seconds},
        )
        self._begin(running, goes_on=True)

    def _find(self, running: RunningRollout, outcome: EvaluationOutcome) -> bool:
        return any(
            (record.step, record.checkpoint_digest) == running.key and record.metrics.get("rollout") == running.number
            for record in self._ledger.of_step(running.step)
            if record.outcome is outcome
        )

    def _names(self) -> list[str]:
        return sorted({server.name for server in self._followers()})

    def _count(self, running: RunningRollout, now: float) -> RunningRollout:
        """Take the reports of the servers, and add the time in which one of them used the version."""
        passed, self._observed_at = min(now - self._observed_at, _LONGEST_PAUSE_SECONDS), now
        is_used = self._watch.observe(running, self.before, self._reports(), now)
        running = self._watch.counted(running)
        if is_used:
            running = replace(running, elapsed_seconds=running.elapsed_seconds + passed)
            if now - self._saved_at >= min(_SAVE_SECONDS, running.after_seconds / _SAVES):
                self._save(running, now)
        self._running = running
        return running

    def _reports(self) -> Sequence[ServerReport]:
        """Return the reports of the connected servers, and of this evaluator if it computes requests once more."""
        own = self._own()
        if own is None:
            return self._followers()
        return [*self._followers(), ServerReport(name=OWN_NAME, key=self.before or (None, ""), reason="", shadow=own)]

    def _save(self, running: RunningRollout, now: float) -> None:
        self._saved_at = now
        try:
            self._file.write(running)
        except OSError as error:
            _log.warning("cannot save the time of a rollout; a restart would repeat it", extra={"reason": str(error)})

    def _spent(self) -> str:
        running = self._running
        if running is None:
            return in_words(0.0)
        compared = "" if running.shadow is None else f", and {running.shadow.compared} requests were compared"
        return f"{in_words(running.elapsed_seconds)}{compared}"

    def _record(self, running: RunningRollout, outcome: EvaluationOutcome, reason: str) -> None:
        if self._find(running, outcome):
            return
        numbers = {
            "rollout": running.number,
            "servers": running.followers,
            "elapsed_seconds": running.elapsed_seconds,
            "after_seconds": running.after_seconds,
            **self._watch.numbers(running),
        }
        named = (f"canary servers: {', '.join(running.servers)}",) if running.servers else ()
        self._recorder.record_rollout(
            running.step,
            running.digest,
            outcome,
            reason,
            rollout=str(running.number),
            metrics={name: float(value) for name, value in numbers.items() if math.isfinite(value)},
            notes=named,
        )
        log = _log.warning if outcome is EvaluationOutcome.ROLLOUT_ROLLED_BACK else _log.info
        log(
            outcome.value.replace("_", " "),
            extra={"step": running.step, "servers": list(running.servers), "reason": reason},
        )


def open_rollout(
    setting: str | None, *, directory: Path, decisions: DecisionFile, recorder: Recorder, ledger: Ledger
) -> Rollout | None:
    """Return the rollout of a setting, which goes on with that of an earlier process.

    Without a setting all servers serve what this evaluator serves, also those to which an earlier process gave another
    version.

    Raises:
        LedgerError: The ledger cannot be read or written.
    """
    if setting is not None:
        plan = parse_rollout(setting)
        return Rollout(plan, directory=directory, decisions=decisions, recorder=recorder, ledger=ledger)
    if RolloutFile(directory).remove():
        _log.warning("a rollout was under way, and this evaluator has no --rollout; all servers serve the same again")
    decisions.set_trial(None)
    return None


def _entries(ledger: Ledger, outcome: EvaluationOutcome) -> Sequence[Any]:
    found: list[Any] = []
    while page := ledger.page(after_sequence=found[-1].sequence if found else 0, limit=_PAGE, outcome=outcome):
        found += page
    return found
