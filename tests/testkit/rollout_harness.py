"""A rollout whose clock, servers and wishes tests control."""

from __future__ import annotations

from pathlib import Path

from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.records.outbox import Outbox, Subscription
from understudy.evaluator.records.recorder import Recorder
from understudy.evaluator.records.result_files import ResultFiles
from understudy.evaluator.records.summaries import Summaries
from understudy.evaluator.rollout_plan import CanaryPlan, RolloutPlan, ShadowPlan
from understudy.evaluator.serving.decision_file import DecisionFile
from understudy.evaluator.serving.rollout import Rollout
from understudy.evaluator.serving.rollout_health import ServerReport, Traffic
from understudy.evaluator.serving.shadow_health import ShadowReport
from understudy.evaluator.types import CheckpointKey

OLD, NEW, NEWER = (10, "a" * 64), (20, "b" * 64), (30, "c" * 64)
PLAN = CanaryPlan(share=0.3, after_seconds=100.0)
SHADOW = ShadowPlan(share=0.05, after_seconds=100.0, least_requests=50, most_disagreement=0.1)
NAMES = ("one", "two", "three")


class Wishes:
    """What the policy and the operator want."""

    def __init__(self) -> None:
        self.chosen: CheckpointKey | None = NEW
        self.pinned: CheckpointKey | None = None
        self.serving: CheckpointKey | None = OLD
        self.refused = ""
        self.stays = True

    def chosen_key(self) -> CheckpointKey | None:
        return self.chosen

    def pinned_key(self) -> CheckpointKey | None:
        return self.pinned

    def serving_key(self) -> CheckpointKey | None:
        return self.serving

    def may_stay(self, key: CheckpointKey) -> bool:
        return self.stays and key in (OLD, NEW)

    def refusal(self, key: CheckpointKey, serving: CheckpointKey) -> str:
        assert (key, serving) == (NEW, OLD)
        return self.refused


class Harness:
    """An evaluator that serves `OLD`, in a folder that outlives it."""

    def __init__(self, folder: Path, plan: RolloutPlan = PLAN) -> None:
        self.folder = folder
        self.plan = plan
        self.own: ShadowReport | None = None
        self.now = 1000.0
        self.wishes = Wishes()
        self.servers: dict[str, ServerReport] = {}
        self.ledger = self._open()

    def _open(self) -> Ledger:
        path = self.folder / "ledger.sqlite"
        self.outbox = Outbox(path, [Subscription(destination="test")])
        self.ledger = Ledger(path, outbox=self.outbox)
        self.recorder = Recorder(
            ledger=self.ledger,
            results=ResultFiles(self.folder / "results"),
            summaries=Summaries(self.folder / "tensorboard", self.ledger.curves),
            datasets=[],
            observer=SilentObserver(),
            listener=lambda _: None,
        )
        self.decisions = DecisionFile(self.folder)
        if self.decisions.current is None:
            self.decisions.publish(lambda: OLD, followed=None)
        self.rollout = Rollout(
            self.plan,
            directory=self.folder,
            decisions=self.decisions,
            recorder=self.recorder,
            ledger=self.ledger,
            clock=lambda: self.now,
        )
        self.rollout.use_fleet(lambda: list(self.servers.values()))
        self.rollout.use_shadow(lambda: self.own)
        return self.ledger

    def restart(self) -> None:
        """Begin anew with what is on disk, as after SIGKILL."""
        self.close()
        self._open()

    def close(self) -> None:
        self.recorder.close()
        self.outbox.close()
        self.ledger.close()

    def serve(
        self, *names: str, key: CheckpointKey | None = None, reason: str = "", traffic: Traffic | None = None
    ) -> None:
        """Have servers report what is decided for them, or this."""
        for name in names or NAMES:
            decision = self.decisions.current
            assert decision is not None
            self.servers[name] = ServerReport(
                name=name, key=key or decision.of(name).key, reason=reason, traffic=traffic
            )

    def look(self, seconds: float = 1.0) -> None:
        """Let time pass, and take the steps that are due."""
        self.now += seconds
        if self.rollout.is_due():
            self.rollout.advance(self.wishes)

    def start(self) -> tuple[str, ...]:
        """Begin a rollout, whose part serves it; return the part."""
        self.serve()
        self.rollout.advance(self.wishes)
        self.serve()
        assert self.rollout.running is not None
        return self.rollout.running.servers

    def end(self) -> None:
        """Do as the controller does: serve what the rollout says."""
        key = self.rollout.serves(self.wishes.chosen or OLD, self.wishes.may_stay)
        self.wishes.serving = key
        self.decisions.publish(lambda: key, followed=None)
        self.rollout.advance(self.wishes)

    @property
    def steps(self) -> list[tuple[int, str]]:
        return [(record.step, record.outcome.value.removeprefix("rollout_")) for record in self.ledger.page()]

    def events(self) -> list[str]:
        """Deliver the events that wait, and return their types."""
        types = []
        while (delivery := self.outbox.next("test")) is not None:
            types.append(delivery.event.type.value)
            self.outbox.delivered(delivery)
        return types

    def decided(self) -> list[int]:
        decision = self.decisions.current
        assert decision is not None
        return [decision.of(name).step for name in NAMES]
