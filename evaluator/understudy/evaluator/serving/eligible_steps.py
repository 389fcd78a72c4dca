"""The steps that may serve, and which of them a version policy chooses."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable

from sortedcontainers import SortedSet

from understudy.evaluator.serving.checkpoint_store import CheckpointStore
from understudy.evaluator.serving.gatekeeper import Gatekeeper
from understudy.evaluator.serving.quarantine import Quarantine
from understudy.evaluator.serving.ranking import Ranking
from understudy.evaluator.serving.rollout import Rollout
from understudy.evaluator.settings import VersionPolicy
from understudy.evaluator.step_changes import ChangedSteps
from understudy.evaluator.types import CheckpointInfo, CheckpointKey


class EligibleSteps:
    """The steps that may serve: known, not in quarantine, and excluded neither by the gate nor by a rollout's end.

    A choice looks only at the steps that changed since the last one. Thread-safe.

    Args:
        store: The known checkpoints.
        quarantine: The checkpoints that failed to load.
        ranking: The scores so far.
        gatekeeper: Decides which checkpoints may be served; None if there is no gate.
        rollout: Excludes versions that were rolled back or stopped; None if there are no rollouts.
    """

    def __init__(
        self,
        *,
        store: CheckpointStore,
        quarantine: Quarantine,
        ranking: Ranking,
        gatekeeper: Gatekeeper | None,
        rollout: Rollout | None,
    ) -> None:
        self._store = store
        self._quarantine = quarantine
        self._ranking = ranking
        self._gatekeeper = gatekeeper
        self._rollout = rollout
        self._lock = threading.Lock()
        deciding = [each.changes for each in (gatekeeper, rollout) if each is not None]
        self._changed = ChangedSteps(store.changes, quarantine.changes, ranking.changes, *deciding)
        self._changed.add(info.step for info in store.checkpoints())
        self._fit: SortedSet[int] = SortedSet()
        self._ranked = ranking.subset()

    def choose(self, policy: VersionPolicy | int) -> int | None:
        """Return the step that should be serving by a version policy, or None to keep the current one."""
        if isinstance(policy, int):
            return policy if self.includes(policy) else None
        self._update()
        if policy == "best":
            return self._ranked.best_to_serve()
        with self._lock:
            return self._newest(reversed(self._fit))

    def _newest(self, steps: Iterable[int]) -> int | None:
        """Return the first of some descending steps, unless a lower one was written later and the higher one is gone.

        A training that begins again, or from an earlier step, has deleted what it did not go on from.
        """
        newest: CheckpointInfo | None = None
        for step in steps:
            info, is_offered = self._store.find(step), self._store.is_offered(step)
            if info is not None and (newest is None or (is_offered and info.created_at > newest.created_at)):
                newest = info
            if is_offered:
                break
        return None if newest is None else newest.step

    def includes(self, step: int) -> bool:
        """Return whether a step may serve."""
        return self.is_loadable(step) and self.is_admitted(step)

    def is_loadable(self, step: int) -> bool:
        """Return whether the checkpoint of a step is known and not in quarantine."""
        info = self._store.find(step)
        return info is not None and self._quarantine.admits(info.key)

    def is_admitted(self, step: int) -> bool:
        """Return whether the checkpoint of a step is known and excluded neither by the gate nor by a rollout's end."""
        info = self._store.find(step)
        return info is not None and self._admits(info.key)

    def _admits(self, key: CheckpointKey) -> bool:
        return (self._gatekeeper is None or self._gatekeeper.admits(key)) and (
            self._rollout is None or not self._rollout.rejects(key)
        )

    def _update(self) -> None:
        self._quarantine.note_due()
        with self._lock, self._changed.read() as steps:
            for step in steps:
                is_eligible = self.includes(step)
                self._ranked.include(step, is_member=is_eligible)
                (self._fit.add if is_eligible and not self._ranking.is_unfit(step) else self._fit.discard)(step)


def choose_among(policy: VersionPolicy | int, steps: Collection[int], ranking: Ranking) -> int | None:
    """Return which of some steps should be serving by a version policy. Looks at each of them.

    Args:
        policy: The version policy.
        steps: Steps that may serve.
        ranking: The scores so far.
    """
    if policy == "latest":
        return max((step for step in steps if not ranking.is_unfit(step)), default=None)
    if policy == "best":
        return ranking.best_to_serve_among(steps)
    return policy if policy in steps else None
