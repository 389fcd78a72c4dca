"""What the page shows, read from the evaluator."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from understudy.evaluator.evaluator import Evaluator
from understudy.evaluator.evaluator_errors import VersionNotFoundError
from understudy.evaluator.settings import EvaluatorSettings
from understudy.evaluator.types import (
    CheckpointInfo,
    EvaluationOutcome,
    EvaluationRecord,
    LifeEvent,
    LifeRecord,
    VersionState,
    VersionStatus,
)
from understudy.service.page.chart import Chart, draw
from understudy.service.page.history import MAX_MARKS, History, MarkKind, serving_marks

CHECKPOINTS: Final = 100
"""How many checkpoints a page lists."""
CHARTS: Final = 12
"""How many charts a page shows."""
LISTED: Final = 10
"""How many versions each list of what comes next names."""

_DECISIONS: Final = frozenset({EvaluationOutcome.ACCEPTED, EvaluationOutcome.REFUSED, EvaluationOutcome.UNDECIDED})
_ROLLOUT_ENDS: Final = frozenset(
    {
        EvaluationOutcome.ROLLOUT_PROMOTED,
        EvaluationOutcome.ROLLOUT_ROLLED_BACK,
        EvaluationOutcome.ROLLOUT_STOPPED,
    }
)
_STATE_OF_VERSION: Final[Mapping[VersionState, str]] = {
    VersionState.LOADING: "loading",
    VersionState.AVAILABLE: "loaded",
    VersionState.START: "waiting",
}


@dataclass(frozen=True, kw_only=True)
class ServedView:
    """What is served and why.

    Attributes:
        step: The serving step; None before the first.
        why: Why it is served, or why nothing is.
        written_at: When its checkpoint was written, in seconds since the epoch; None if it is not known any more.
        decision: The gate's newest decision on it; None without one.
        pinned_step: The pinned step; None without a pin.
        previous_step: The step that a rollback serves; None if there is none.
        latest_step: The newest step that was ever loaded.
        best_step: The step with the best monitored value.
        best_value: That value.
        monitor: The monitored metric, and which of its values is best; empty if there is none.
    """

    step: int | None
    why: str
    written_at: float | None
    decision: EvaluationRecord | None
    pinned_step: int | None
    previous_step: int | None
    latest_step: int | None
    best_step: int | None
    best_value: float | None
    monitor: str


@dataclass(frozen=True, kw_only=True)
class NextView:
    """What comes next.

    Attributes:
        loading: The versions that are being loaded.
        waiting: The newest versions after the serving one that wait to be loaded.
        more_waiting: How many more wait.
        to_score: How many checkpoints wait to be scored, or are being scored.
        held_back: The newest decision of the gate or end of a rollout against a step after the serving one; None if
            there is none.
        problem: Why checkpoints may be missing now; empty if nothing is known.
    """

    loading: Sequence[VersionStatus]
    waiting: Sequence[VersionStatus]
    more_waiting: int
    to_score: int
    held_back: EvaluationRecord | None
    problem: str


@dataclass(frozen=True, kw_only=True)
class CheckpointRow:
    """One checkpoint in the table.

    Attributes:
        step: Its step.
        state: Its state in a word.
        written_at: When it was written; None if it does not exist any more.
        scores: Its newest score on each dataset.
        reason: Why it is in that state; may be empty.
    """

    step: int
    state: str
    written_at: float | None
    scores: Sequence[EvaluationRecord]
    reason: str


@dataclass(frozen=True, kw_only=True)
class CheckpointsView:
    """One page of the table of checkpoints; ``next_before`` begins the next one, None if there is none."""

    rows: Sequence[CheckpointRow]
    next_before: int | None


@dataclass(frozen=True, kw_only=True)
class CurvesView:
    """The charts of one page.

    Attributes:
        charts: The charts, that of the monitored metric first.
        first: How many charts come before.
        total: How many charts there are.
        left_out: How many metrics of datasets have no chart, because there are too many.
    """

    charts: Sequence[Chart]
    first: int
    total: int
    left_out: int

    @property
    def next_first(self) -> int | None:
        """Where the next page of charts begins; None if there is none."""
        after = self.first + len(self.charts)
        return after if after < self.total else None


@dataclass(frozen=True, kw_only=True)
class LifeLine:
    """Something that happened to a checkpoint.

    Attributes:
        at: When, in seconds since the epoch.
        what: What, in a word or two.
        dataset: The dataset that it is about; empty for none.
        since_committed: The seconds since the checkpoint was committed; None if that is not known.
    """

    at: float
    what: str
    dataset: str
    since_committed: float | None


@dataclass(frozen=True, kw_only=True)
class CheckpointView:
    """Everything about one checkpoint.

    Attributes:
        row: Its row in the table.
        digest: Its digest; empty if that is not known.
        life: What happened to it, in this order.
        entries: Every entry of the ledger about its step, the newest first.
        exists: Whether it can be loaded.
        tables: The datasets with tables that were recorded with its score.
    """

    row: CheckpointRow
    digest: str
    life: Sequence[LifeLine]
    entries: Sequence[EvaluationRecord]
    exists: bool
    tables: Sequence[str]


class Views:
    """Reads what the page shows. Its methods block, and are for one thread at a time.

    Args:
        evaluator: The evaluator.
        settings: The operator's settings of the evaluator.
        history: The scores of the evaluator's ledger.
    """

    def __init__(self, evaluator: Evaluator, settings: EvaluatorSettings, history: History) -> None:
        self._evaluator = evaluator
        self._policy = settings.version_policy
        self._has_gate = bool(settings.gate) or (settings.min_value, settings.min_improvement) != (None, None)
        self._history = history

    def catch_up(self) -> None:
        """Read the new entries of the ledger; see `History.catch_up`."""
        self._history.catch_up()

    def fingerprints(self) -> dict[str, object]:
        """Return a value for each part of a page about checkpoints, which changes when what it shows does."""
        evaluator = self._evaluator
        sequence, serving = evaluator.last_sequence, evaluator.serving_step
        waiting, problem = evaluator.checkpoints_waiting(), evaluator.source_problem
        versions = (sequence, serving, evaluator.pinned_step, waiting, evaluator.status(), problem)
        curves = (sequence, serving, evaluator.served_steps(MAX_MARKS))
        return {"state": versions, "curves": curves, "checkpoints": versions, "life": versions}

    def served(self) -> ServedView:
        """Return what is served and why."""
        evaluator, monitor = self._evaluator, self._evaluator.monitor
        step, best = evaluator.serving_step, evaluator.best_step
        info = None if step is None else self._infos().get(step)
        return ServedView(
            step=step,
            why=self._why(step),
            written_at=None if info is None else info.created_at,
            decision=None if step is None else _decision(evaluator.ledger.of_step(step)),
            pinned_step=evaluator.pinned_step,
            previous_step=evaluator.previous_step,
            latest_step=evaluator.latest_step,
            best_step=best,
            best_value=None if best is None else evaluator.monitored_value(best),
            monitor="" if monitor is None else f"{monitor.mode} of {monitor.dataset}/{monitor.metric}",
        )

    def _why(self, step: int | None) -> str:
        if step is None:
            return "No checkpoint is serving yet."
        pinned = self._evaluator.pinned_step
        gate = "that the gate lets through" if self._has_gate else "that can be loaded"
        if pinned is not None:
            said = "An operator pinned it" if pinned == step else f"Step {pinned} is pinned and not serving yet"
            return f"{said}; the version policy ({self._policy}) and the gate do not apply until it is unpinned."
        if self._policy == "latest":
            return f"The version policy is latest: it is the newest checkpoint {gate}, or that one is still loading."
        if self._policy == "best":
            monitor = self._evaluator.monitor
            by = "" if monitor is None else f" by the {monitor.mode} of {monitor.dataset}/{monitor.metric}"
            return f"The version policy is best: it is the best checkpoint{by} {gate}, or that one is still loading."
        return f"The version policy is step {self._policy}."

    def next(self) -> NextView:
        """Return what comes next."""
        statuses, serving = self._evaluator.status(), self._evaluator.serving_step
        waiting = [
            status
            for status in statuses
            if status.state is VersionState.START and (serving is None or status.step > serving)
        ]
        return NextView(
            loading=[status for status in statuses if status.state is VersionState.LOADING],
            waiting=waiting[:LISTED],
            more_waiting=max(0, len(waiting) - LISTED),
            to_score=self._evaluator.checkpoints_waiting(),
            held_back=self._held_back(),
            problem=self._evaluator.source_problem,
        )

    def _held_back(self) -> EvaluationRecord | None:
        serving = self._evaluator.serving_step
        for mark in reversed(self._history.marks()):
            if serving is not None and mark.step <= serving:
                return None
            if mark.kind is not MarkKind.FAILED:
                return _newest(self._evaluator.ledger.of_step(mark.step), _DECISIONS | _ROLLOUT_ENDS)
        return None

    def curves(self, first: int) -> CurvesView:
        """Return the charts from a place in their order on."""
        monitor = self._evaluator.monitor
        key = None if monitor is None else (monitor.dataset, monitor.metric)
        series = [one for one in self._history.series() if one.points]
        series.sort(key=lambda one: (one.dataset, one.metric) != key)
        marks = [*serving_marks(self._evaluator.served_steps(MAX_MARKS)), *self._history.marks()]
        serving = self._evaluator.serving_step
        return CurvesView(
            charts=[draw(one, marks, serving) for one in series[first : first + CHARTS]],
            first=first,
            total=len(series),
            left_out=self._history.left_out,
        )

    def checkpoints(self, before: int | None) -> CheckpointsView:
        """Return the newest checkpoints, or the newest before a step."""
        evaluator = self._evaluator
        infos = self._infos()
        statuses = {status.step: status for status in evaluator.status()}
        known = {step for step in (*infos, *statuses) if before is None or step < before}
        known.update(evaluator.ledger.newest_steps(before=before, limit=CHECKPOINTS + 1))
        steps = heapq.nlargest(CHECKPOINTS + 1, known)
        rows = [
            _row(step, infos.get(step), statuses.get(step), evaluator.ledger.of_step(step))
            for step in steps[:CHECKPOINTS]
        ]
        return CheckpointsView(rows=rows, next_before=rows[-1].step if len(steps) > CHECKPOINTS else None)

    def checkpoint(self, step: int) -> CheckpointView:
        """Return everything about one checkpoint.

        Raises:
            VersionNotFoundError: There never was one, as far as is known.
        """
        info = self._infos().get(step)
        status = next((status for status in self._evaluator.status() if status.step == step), None)
        entries = self._evaluator.ledger.of_step(step)
        if info is None and status is None and not entries:
            raise VersionNotFoundError(f"there is no checkpoint of step {step}, and no entry about one")
        digest = info.digest if info is not None else entries[-1].checkpoint_digest if entries else ""
        life = self._evaluator.life_of(step)
        row = _row(step, info, status, entries)
        return CheckpointView(
            row=row,
            digest=digest,
            life=_life(digest, life, entries),
            entries=entries[::-1],
            exists=info is not None,
            tables=[score.dataset for score in row.scores if self._evaluator.has_tables(score)],
        )

    def row(self, step: int) -> CheckpointRow:
        """Return one checkpoint as the table shows it."""
        statuses = (status for status in self._evaluator.status() if status.step == step)
        return _row(step, self._infos().get(step), next(statuses, None), self._evaluator.ledger.of_step(step))

    def _infos(self) -> Mapping[int, CheckpointInfo]:
        return {info.step: info for info in self._evaluator.checkpoints()}


def _row(
    step: int, info: CheckpointInfo | None, status: VersionStatus | None, entries: Sequence[EvaluationRecord]
) -> CheckpointRow:
    digest = info.digest if info is not None else entries[-1].checkpoint_digest if entries else ""
    own = [entry for entry in entries if entry.checkpoint_digest == digest]
    scores = {entry.dataset: entry for entry in own if entry.outcome is EvaluationOutcome.SCORED}
    state, reason = _state(status, own)
    return CheckpointRow(
        step=step,
        state=state,
        written_at=None if info is None else info.created_at,
        scores=list(scores.values()),
        reason=reason,
    )


def _life(digest: str, life: Sequence[LifeRecord], entries: Sequence[EvaluationRecord]) -> list[LifeLine]:
    """Return what happened to the checkpoint of a digest, by ascending time."""
    own = [(record.at, record.event.value, "") for record in life if record.checkpoint_digest == digest]
    committed = next((at for at, what, _ in own if what == LifeEvent.COMMITTED), None)
    own += [
        (entry.recorded_at, entry.outcome.value, entry.dataset)
        for entry in entries
        if entry.checkpoint_digest == digest
    ]
    return [
        LifeLine(at=at, what=what, dataset=dataset, since_committed=None if committed is None else at - committed)
        for at, what, dataset in sorted(own, key=itemgetter(0))
    ]


def _state(status: VersionStatus | None, entries: Sequence[EvaluationRecord]) -> tuple[str, str]:
    """Return the state of a checkpoint in a word, and the reason."""
    decision = _decision(entries)
    decided = "" if decision is None else decision.reason
    if status is not None and status.serving:
        return "serving", decided
    if status is not None and status.error:
        return ("waiting" if status.state is VersionState.START else "failed"), status.error
    loaded = None if status is None else _STATE_OF_VERSION.get(status.state)
    if loaded == "waiting" and entries:  # as all are after a restart
        loaded = None
    if loaded == "loading":
        return loaded, decided
    return _state_by_entries(entries, decision) or (loaded or ("scored" if entries else "unloaded"), decided)


def _state_by_entries(entries: Sequence[EvaluationRecord], decision: EvaluationRecord | None) -> tuple[str, str] | None:
    """Return the state of a checkpoint that was held back, failed or was left out, else None."""
    rollout = _newest(entries, _ROLLOUT_ENDS)
    if rollout is not None and rollout.outcome is EvaluationOutcome.ROLLOUT_ROLLED_BACK:
        return MarkKind.ROLLED_BACK.value, rollout.reason
    if decision is not None and decision.outcome is not EvaluationOutcome.ACCEPTED:
        return decision.outcome.value, decision.reason
    if entries and entries[-1].outcome in (EvaluationOutcome.FAILED, EvaluationOutcome.SKIPPED):
        return entries[-1].outcome.value, entries[-1].reason
    return None


def _decision(entries: Sequence[EvaluationRecord]) -> EvaluationRecord | None:
    """Return the gate's newest decision."""
    return _newest(entries, _DECISIONS)


def _newest(entries: Sequence[EvaluationRecord], outcomes: frozenset[EvaluationOutcome]) -> EvaluationRecord | None:
    return next((entry for entry in reversed(entries) if entry.outcome in outcomes), None)
