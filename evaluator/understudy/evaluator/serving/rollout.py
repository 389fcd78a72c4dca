"""Gives a new version to a part of the servers that follow, and after a time to all, or takes it back."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from understudy.checkpoints.atomic import write_json
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.records.recorder import Recorder
from understudy.evaluator.rollout_plan import LEAST_FOLLOWERS, RolloutPlan, in_words, parse_rollout
from understudy.evaluator.serving.decision_file import Canary, DecisionFile
from understudy.evaluator.serving.rollout_health import ServerReport, Tally, Traffic, complaint
from understudy.evaluator.types import CheckpointKey, EvaluationOutcome

ROLLOUT_FILE: Final = "rollout.json"
"""In the state folder: the rollout that is under way, with the time that it has taken."""

FOLLOWERS_SECONDS: Final = 30.0
"""How long a new version waits for servers that follow before it is promoted without them."""

LOOK_SECONDS: Final = 0.5
"""How often the reports of the servers are compared."""

FAILING_SECONDS: Final = 10.0
"""How long a server of the part may say that it cannot serve the version."""

FIRST_SERVED_SECONDS: Final = 900.0
"""How long the part may take until one of its servers serves the version."""

LOST_SECONDS: Final = 60.0
"""How long no server of the part may serve the version after one did."""

_SAVE_SECONDS: Final = 5.0
_SAVES: Final = 20
"""The time spent is saved this many times in a rollout at least."""

_LONGEST_LOOK_SECONDS: Final = 5.0
"""The most time that counts between two looks; after a longer one this process was suspended."""

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


@dataclass(frozen=True, kw_only=True)
class RunningRollout:
    """A rollout that is under way.

    Attributes:
        number: Identifies it in the state folder.
        step: The step of the new version.
        digest: The digest of its checkpoint.
        servers: The names of the servers that serve it.
        followers: How many servers there were when it began.
        elapsed_seconds: For how long one of them has served it.
        after_seconds: After how long all serve it.
    """

    number: int
    step: int
    digest: str
    servers: tuple[str, ...]
    followers: int
    elapsed_seconds: float
    after_seconds: float

    @property
    def key(self) -> CheckpointKey:
        """The step and digest of the new version."""
        return self.step, self.digest


class Rollout:
    """Decides which of two versions each server that follows serves, and records each step in the ledger.

    While a rollout is under way this evaluator itself serves the version before. A checkpoint that becomes due
    meanwhile waits. A rejected one is not rolled out again; only an operator's pin serves it.

    `serves`, `rejects` and `running` are thread-safe; the others are for one thread at a time.

    Args:
        plan: Which part, and for how long.
        directory: The state folder.
        decisions: Tells the servers.
        recorder: Records the steps.
        ledger: Holds them.
        clock: Monotonic clock, in seconds.

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
        self._path = directory / ROLLOUT_FILE
        self._decisions = decisions
        self._recorder = recorder
        self._ledger = ledger
        self._clock = clock
        self._followers: Callable[[], Sequence[ServerReport]] = tuple
        self._rejected = frozenset(
            (record.step, record.checkpoint_digest) for outcome in _REJECTED for record in _entries(ledger, outcome)
        )
        self._running: RunningRollout | None = None
        self._released: CheckpointKey | None = None
        self._waiting: tuple[CheckpointKey, float] | None = None
        self._verdict = ""
        self._begin_watch()
        self._resume()

    def use_fleet(self, followers: Callable[[], Sequence[ServerReport]]) -> None:
        """Set what returns the connected servers."""
        self._followers = followers

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
        if now < self._looked_at + LOOK_SECONDS:
            return False
        running = self._count(running, now)
        if not self._verdict:
            self._verdict = self._judge(running, now)
        return bool(self._verdict) or (self._released is None and running.elapsed_seconds >= running.after_seconds)

    def advance(self, candidates: Candidates) -> None:
        """Take the step that is due, if any: begin a rollout, or end the one that is under way.

        Raises:
            LedgerError: The step cannot be recorded. The next call repeats it.
        """
        if self._running is not None:
            self._go_on(self._running, candidates)
        else:
            self._consider(candidates)

    def _go_on(self, running: RunningRollout, candidates: Candidates) -> None:
        pinned, before = candidates.pinned_key(), self.before
        if candidates.serving_key() == running.key:
            why = "an operator pinned it" if pinned == running.key else f"nothing spoke against it in {self._spent()}"
            self._end(running, EvaluationOutcome.ROLLOUT_PROMOTED, f"promoted to all: {why}")
        elif pinned is not None:
            if pinned != running.key:
                self._end(running, EvaluationOutcome.ROLLOUT_STOPPED, f"stopped: an operator pinned step {pinned[0]}")
        elif before is not None and (refusal := candidates.refusal(running.key, before) or self._verdict):
            self._end(running, EvaluationOutcome.ROLLOUT_ROLLED_BACK, f"rolled back: {refusal}")
        elif running.elapsed_seconds >= running.after_seconds or before is None or not candidates.may_stay(before):
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
        if len(names) >= LEAST_FOLLOWERS:
            self._start(chosen, names)
            return
        if self._waiting is None or self._waiting[0] != chosen:
            self._waiting = (chosen, self._clock())
        if self._clock() - self._waiting[1] >= FOLLOWERS_SECONDS:
            self._promote_at_once(chosen, len(names))

    def _start(self, key: CheckpointKey, names: Sequence[str]) -> None:
        current = self._decisions.current
        running = RunningRollout(
            number=1 if current is None else current.sequence + 1,
            step=key[0],
            digest=key[1],
            servers=self.plan.part_of(names),
            followers=len(names),
            elapsed_seconds=0.0,
            after_seconds=self.plan.after_seconds,
        )
        write_json(self._path, asdict(running))
        self._begin(running)

    def _begin(self, running: RunningRollout) -> None:
        """Record that a rollout began, and tell the servers, unless that was done before."""
        before = self.before
        self._record(
            running,
            EvaluationOutcome.ROLLOUT_STARTED,
            f"a canary on {len(running.servers)} of {running.followers} servers for {in_words(running.after_seconds)}; "
            f"the others serve step {None if before is None else before[0]}",
        )
        self._waiting = None
        self._begin_watch()
        self._running = running
        self._decisions.set_canary(Canary(step=running.step, digest=running.digest, servers=running.servers))

    def _begin_watch(self) -> None:
        now = self._clock()
        self._looked_at = self._saved_at = now
        self._served_at = now
        self._was_served = False
        self._failing_since: dict[str, float] = {}
        self._verdict = ""
        self._part, self._others = Tally(), Tally()

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
        self._record(running, outcome, reason)
        if outcome in _REJECTED:
            self._rejected |= {running.key}
        self._running = self._released = None
        self._decisions.set_canary(None)
        self._path.unlink(missing_ok=True)

    def _resume(self) -> None:
        """Go on with the rollout of an earlier process, or finish its end."""
        running = _read(self._path, self.plan)
        if running is None:
            self._decisions.set_canary(None)
            return
        for outcome in _ENDS:
            if self._find(running, outcome):
                self._decisions.set_canary(None)
                self._path.unlink(missing_ok=True)
                return
        _log.info(
            "going on with a rollout",
            extra={"step": running.step, "servers": list(running.servers), "elapsed_seconds": running.elapsed_seconds},
        )
        self._begin(running)

    def _find(self, running: RunningRollout, outcome: EvaluationOutcome) -> bool:
        return any(
            (record.step, record.checkpoint_digest) == running.key and record.metrics.get("rollout") == running.number
            for record in self._ledger.of_step(running.step)
            if record.outcome is outcome
        )

    def _names(self) -> list[str]:
        return sorted({server.name for server in self._followers()})

    def _count(self, running: RunningRollout, now: float) -> RunningRollout:
        """Take the reports of the servers, and add the time in which one of the part served the version."""
        passed, self._looked_at = min(now - self._looked_at, _LONGEST_LOOK_SECONDS), now
        followers = {server.name: server for server in self._followers()}
        is_served = False
        for server in followers.values():
            is_part = server.name in running.servers
            is_served |= is_part and server.key == running.key
            if server.traffic is None or server.key != (running.key if is_part else self.before):
                continue
            (self._part if is_part else self._others).add(server.name, server.traffic, from_zero=is_part)
        self._note_failures(running, followers, now)
        if is_served or not any(name not in running.servers for name in followers):
            self._served_at, self._was_served = now, self._was_served or is_served
        if is_served:
            running = replace(running, elapsed_seconds=running.elapsed_seconds + passed)
            self._running = running
            if now - self._saved_at >= min(_SAVE_SECONDS, running.after_seconds / _SAVES):
                self._save(running, now)
        return running

    def _note_failures(self, running: RunningRollout, followers: Mapping[str, ServerReport], now: float) -> None:
        failing = {name for name in running.servers if name in followers and followers[name].reason}
        self._failing_since = {name: self._failing_since.get(name, now) for name in failing}

    def _save(self, running: RunningRollout, now: float) -> None:
        self._saved_at = now
        try:
            write_json(self._path, asdict(running))
        except OSError as error:
            _log.warning("cannot save the time of a rollout; a restart would repeat it", extra={"reason": str(error)})

    def _judge(self, running: RunningRollout, now: float) -> str:
        """Return why the version is rolled back; empty if it is not."""
        for name, since in self._failing_since.items():
            if now - since >= FAILING_SECONDS:
                reasons = {server.name: server.reason for server in self._followers()}
                return f"server {name} does not serve it: {reasons.get(name, 'it left')}"
        patience = LOST_SECONDS if self._was_served else FIRST_SERVED_SECONDS
        if now - self._served_at >= patience:
            return f"none of the servers {', '.join(running.servers)} has served it for {in_words(patience)}"
        return complaint(self._part.total, self._others.total)

    def _spent(self) -> str:
        running = self._running
        return in_words(0.0 if running is None else running.elapsed_seconds)

    def _record(self, running: RunningRollout, outcome: EvaluationOutcome, reason: str) -> None:
        if self._find(running, outcome):
            return
        numbers = {
            "rollout": running.number,
            "servers": running.followers,
            "canary_servers": len(running.servers),
            "elapsed_seconds": running.elapsed_seconds,
            "after_seconds": running.after_seconds,
            **_numbers("canary", self._part.total),
            **_numbers("other", self._others.total),
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

    Without a setting all servers serve what this evaluator serves, also those that an earlier process told otherwise.

    Raises:
        LedgerError: The ledger cannot be read or written.
    """
    if setting is not None:
        plan = parse_rollout(setting)
        return Rollout(plan, directory=directory, decisions=decisions, recorder=recorder, ledger=ledger)
    path = directory / ROLLOUT_FILE
    if path.exists():
        _log.warning("a rollout was under way, and this evaluator has no --rollout; all servers serve the same again")
        path.unlink()
    decisions.set_canary(None)
    return None


def _entries(ledger: Ledger, outcome: EvaluationOutcome) -> Sequence[Any]:
    found: list[Any] = []
    while page := ledger.page(after_sequence=found[-1].sequence if found else 0, limit=_PAGE, outcome=outcome):
        found += page
    return found


def _numbers(whose: str, traffic: Traffic) -> dict[str, float]:
    return {
        f"{whose}_requests": traffic.requests,
        f"{whose}_errors": traffic.errors,
        f"{whose}_p99_seconds": traffic.p99_seconds,
    }


def _read(path: Path, plan: RolloutPlan) -> RunningRollout | None:
    """Return the rollout in a file, with the time of the present plan; None if there is none."""
    try:
        values = json.loads(path.read_bytes())
        return RunningRollout(
            number=int(values["number"]),
            step=int(values["step"]),
            digest=str(values["digest"]),
            servers=tuple(map(str, values["servers"])),
            followers=int(values["followers"]),
            elapsed_seconds=float(values["elapsed_seconds"]),
            after_seconds=plan.after_seconds,
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("cannot read the rollout of an earlier process; it begins anew", extra={"reason": str(error)})
        return None
