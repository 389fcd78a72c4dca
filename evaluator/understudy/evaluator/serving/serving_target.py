"""Decides which step should be serving."""

from __future__ import annotations

import itertools
import logging

from understudy.evaluator.serving.checkpoint_store import CheckpointStore
from understudy.evaluator.serving.decision_file import FollowedDecision, FollowedEvaluator, ServingDecision, Shadow
from understudy.evaluator.serving.eligible_steps import EligibleSteps, choose_among
from understudy.evaluator.serving.gate_trial import Baselines
from understudy.evaluator.serving.gatekeeper import Gatekeeper
from understudy.evaluator.serving.promotion import Pin
from understudy.evaluator.serving.quarantine import Quarantine
from understudy.evaluator.serving.ranking import Ranking
from understudy.evaluator.serving.rollout import Rollout
from understudy.evaluator.serving.servable_manager import ServableManager
from understudy.evaluator.serving.serving_history import ServingHistory
from understudy.evaluator.settings import VersionPolicy
from understudy.evaluator.types import CheckpointKey, HeldBack

_log = logging.getLogger(__name__)


class ServingTarget:
    """The step that should be serving: by the pin, else by the version policy, the gate and the rollout. Thread-safe.

    It is the `understudy.evaluator.serving.rollout.Candidates`.

    Args:
        policy: The version policy.
        store: The known checkpoints.
        quarantine: The checkpoints that failed to load.
        ranking: Provides the best checkpoint.
        gatekeeper: Decides which checkpoints may be served; None if there is no gate.
        manager: Provides the serving version.
        pin: What an operator pinned.
        history: What served before.
        followed: Another evaluator's decision, which then replaces policy, gate and pin; None to decide here.
        rollout: Gives new versions to a part of the servers that follow first; None to give them to all at once.
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
        pin: Pin,
        history: ServingHistory,
        followed: FollowedEvaluator | None = None,
        rollout: Rollout | None = None,
    ) -> None:
        self._policy = policy
        self._store = store
        self._quarantine = quarantine
        self._ranking = ranking
        self._gatekeeper = gatekeeper
        self._manager = manager
        self._pin = pin
        self._history = history
        self.followed = followed
        self.rollout = rollout
        self._eligible = EligibleSteps(
            store=store, quarantine=quarantine, ranking=ranking, gatekeeper=gatekeeper, rollout=rollout
        )
        self._rechecked: tuple[CheckpointKey, int, str] | None = None
        self._missing: ServingDecision | None = None

    def step(self) -> int | None:
        """Return the step that should be serving, or None to keep the current one."""
        if self.followed is not None:
            return self._followed_step(self.followed.current)
        pinned = self._pin.step
        if pinned is None:
            return self.step_without_pin()
        return pinned if self._eligible.is_loadable(pinned) else None

    def held_back(self) -> HeldBack | None:
        """Return why nothing may serve, with the step to use all the same, if there is one; None if nothing is known.

        It calls nothing of the manager.
        """
        if (reason := self._lack()) or self.followed is not None:
            return HeldBack(step=None, reason=reason) if reason else None
        held_back = None if self._gatekeeper is None else self._gatekeeper.held_back()
        if held_back is None and (reason := self._failure() or self._store.missing or self._store.unread):
            return HeldBack(step=None, reason=reason)
        return held_back

    def _lack(self) -> str:
        """Return why the version to serve, if there is but one, is not here; empty if it is or may still be found."""
        if self.followed is not None:
            return self._lack_of_followed(self.followed)
        named = self._named_step()
        if named is None or self._store.find(named) is not None or not self._store.is_complete:
            return ""
        if self._pin.step is None:
            return f"version_policy is step {named}, and its checkpoint is not here"
        return f"step {named} is pinned, and its checkpoint is not here; pin another one, or none (promote --unpin)"

    def _failure(self) -> str:
        """Return why the version to serve, or else the newest, could not be loaded; empty if it was not tried."""
        named = self._named_step()
        info = self._store.newest() if named is None else self._store.find(named)
        failure = None if info is None else self._quarantine.failure(info.key)
        return "" if failure is None else failure.reason

    def _named_step(self) -> int | None:
        pinned = self._pin.step
        return self._policy if pinned is None and isinstance(self._policy, int) else pinned

    def _lack_of_followed(self, followed: FollowedEvaluator) -> str:
        decision = followed.current
        if decision is None:
            return followed.problem
        reason = self.why_not(decision, followed)
        return reason or (
            "" if self._is_here(decision) else f"the evaluator serves step {decision.step}, which is not here"
        )

    def _is_here(self, decision: ServingDecision) -> bool:
        info = self._store.find(decision.step)
        return info is not None and info.digest == decision.digest

    def step_without_pin(self) -> int | None:
        """Return the step that would be serving without a pin, or None to keep the current one."""
        chosen = self._eligible.choose(self._policy)
        return chosen if self.rollout is None else self._during_rollout(chosen, self.rollout)

    def advance(self) -> None:
        """Apply the gate to new scores, and take the step of a rollout that is due. For one thread at a time.

        Raises:
            LedgerError: A decision cannot be recorded.
        """
        if self._gatekeeper is not None:
            self._gatekeeper.catch_up(self._should_be_serving)
        if self.rollout is not None:
            self.rollout.advance(self)

    def _during_rollout(self, chosen: int | None, rollout: Rollout) -> int | None:
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
        if self.followed is not None:
            decision = self.followed.current
            return None if decision is None else decision.shadow
        return None if self.rollout is None else self.rollout.shadow

    def tried_steps(self) -> set[int]:
        """Return the steps that are not serving here and must be kept for a rollout."""
        shadow = self.shadow
        return {step for step in (self.rollout_step, None if shadow is None else shadow.step) if step is not None}

    def chosen_key(self) -> CheckpointKey | None:
        """See `understudy.evaluator.serving.rollout.Candidates`."""
        return self._key(self._eligible.choose(self._policy))

    def pinned_key(self) -> CheckpointKey | None:
        """See `understudy.evaluator.serving.rollout.Candidates`."""
        return self._key(self._pin.step)

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
        """See `understudy.evaluator.serving.rollout.Candidates`. For the thread that calls `advance`."""
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

    def steps_to_find(self) -> set[int]:
        """Return the steps that may have to be served although they are not the newest."""
        decision = None if self.followed is None else self.followed.current
        steps = {
            self._pin.step,
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

    def steps_to_keep(self) -> set[int]:
        """Return the steps to keep for what serves next: the target, a rollout's, and those of rollbacks."""
        steps = {self._pin.step, self.step(), *self.tried_steps(), *self.returnable_steps()}
        return {step for step in steps if step is not None}

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

    def earlier(self) -> CheckpointKey | None:
        """Return the version that a rollback serves, or None if there is none."""
        serving = self.serving_key()
        if serving is None:
            return None
        if self.rollout_step not in (None, serving[0]):
            return serving
        self._history.note(self.serving_key)
        others = (key for key in self._history.newest_first() if key != serving)
        return next((key for key in others if self._key(key[0]) == key and not self._is_bad(key)), None)

    def _is_bad(self, key: CheckpointKey) -> bool:
        """Whether a version that served was found to be bad since."""
        is_rejected = self.rollout is not None and self.rollout.rejects(key)
        return is_rejected or self._quarantine.is_given_up(key) or self._ranking.is_unfit(key[0])

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
            log = _log.warning if isinstance(self.followed, FollowedDecision) else _log.info  # the others download it
            log(f"the evaluator serves step {decision.step}, which {other} here; serving on what is loaded")
        return None

    def why_not(self, decision: ServingDecision, followed: FollowedEvaluator) -> str:
        """Return why another evaluator's decision is not carried out; empty if it is being carried out."""
        if not self._is_here(decision):
            return followed.problem
        failure = self._quarantine.failure(decision.key)
        return "" if failure is None else failure.reason

    def _should_be_serving(self) -> Baselines:
        step = self.step()
        return Baselines(info=None if step is None else self._store.find(step), find=self._store.find)

    def is_certain(self, step: int) -> bool:
        """Whether a step should be serving regardless of older checkpoints."""
        return (
            self.followed is not None
            or self._policy != "best"
            or step in (self._pin.step, self._ranking.best_to_serve())
        )
