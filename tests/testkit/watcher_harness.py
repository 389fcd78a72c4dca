"""A checkpoint watcher over checkpoints of text, with the real controller, ledger and gate."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np

from testkit.text_lifecycle import WAIT_SECONDS, TextLifecycle
from understudy.checkpoints import RunDir
from understudy.evaluator.datasets.dataset import ArrayDataset, EvaluationDataset
from understudy.evaluator.observer import SilentObserver
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.records.outbox import Outbox, Subscription
from understudy.evaluator.records.recorder import Recorder
from understudy.evaluator.records.result_files import ResultFiles
from understudy.evaluator.records.summaries import Summaries
from understudy.evaluator.serving.backlog import Backlog
from understudy.evaluator.serving.checkpoint_watcher import CheckpointWatcher
from understudy.evaluator.serving.decision_file import DecisionFile
from understudy.evaluator.serving.event_buffer import EventBuffer
from understudy.evaluator.serving.gatekeeper import Gatekeeper
from understudy.evaluator.serving.gates import Gate, build_gate, further_dataset
from understudy.evaluator.serving.promotion import BestFile, Pin, PinFile
from understudy.evaluator.serving.ranking import Ranking, parse_monitor
from understudy.evaluator.serving.serving_controller import ServingController
from understudy.evaluator.serving.serving_history import ServingHistory
from understudy.evaluator.serving.serving_target import ServingTarget
from understudy.evaluator.settings import EvaluationPolicy, EvaluatorSettings, VersionPolicy
from understudy.evaluator.types import Array, CheckpointInfo, EvaluationOutcome, EvaluationResult

DATASET = ArrayDataset("test", {"x": np.zeros((1, 1), np.float32), "y": np.zeros(1, np.float32)})


class WatcherHarness:
    """A checkpoint watcher over a text lifecycle, reconciled by the test, which also plays the evaluation worker."""

    def __init__(
        self,
        folder: Path,
        *,
        policy: EvaluationPolicy | int = "every",
        datasets: tuple[EvaluationDataset, ...] = (DATASET,),
        serve: VersionPolicy | int = "latest",
        **gate: Any,
    ) -> None:
        state = RunDir(folder / "run").evaluator
        settings = EvaluatorSettings(state_dir=state, evaluation_policy=policy, **gate)
        further = further_dataset(settings, [dataset.name for dataset in datasets])
        self.datasets = {dataset.name: dataset for dataset in datasets}
        scored = [dataset for dataset in datasets if dataset.name != further]
        names = [dataset.name for dataset in scored]
        self.monitor = parse_monitor(None, None, names)
        wanted = build_gate(settings, self.monitor, names, slices=[("label",)])
        self.lifecycle = lifecycle = TextLifecycle(folder)
        self.outbox = Outbox(state / "ledger.sqlite", [Subscription(destination="test")])
        self.ledger = Ledger(state / "ledger.sqlite", outbox=self.outbox)
        self.events = EventBuffer(self.ledger, wake=self.wake)
        lifecycle.version_monitor._on_quarantined = self.events.quarantined
        lifecycle.on_promoted = self.promoted
        self.ranking = Ranking(self.monitor, scored[0].digest if scored else "")
        self.ranking.observe(self.ledger.scored(DATASET.name))
        self.recorder = Recorder(
            ledger=self.ledger,
            results=ResultFiles(state / "results"),
            summaries=Summaries(state / "tensorboard", self.ledger.curves),
            datasets=scored,
            observer=SilentObserver(),
            listener=lambda record: self.ranking.observe([record]),
        )
        self.backlog = Backlog()
        pin, history = Pin(PinFile(state)), ServingHistory(state)
        self.gatekeeper = None if wanted is None else self._gatekeeper(wanted)
        self.target = ServingTarget(
            policy=serve,
            store=lifecycle.store,
            quarantine=lifecycle.quarantine,
            ranking=self.ranking,
            gatekeeper=self.gatekeeper,
            manager=lifecycle.manager,
            pin=pin,
            history=history,
        )
        self.controller = ServingController(
            target=self.target,
            store=lifecycle.store,
            ranking=self.ranking,
            manager=lifecycle.manager,
            pin=pin,
            history=history,
            latest_step=lambda: lifecycle.version_monitor.latest_step,
            on_settled=self.wake,
        )
        self.watcher = CheckpointWatcher(
            store=lifecycle.store,
            manager=lifecycle.manager,
            version_monitor=lifecycle.version_monitor,
            quarantine=lifecycle.quarantine,
            recorder=self.recorder,
            ranking=self.ranking,
            target=self.target,
            controller=self.controller,
            backlog=self.backlog,
            best_file=BestFile(state, self.monitor),
            decision_file=DecisionFile(state),
            events=self.events,
            policy=policy,
            poll_interval_seconds=3600,
        )
        lifecycle.manager.start()

    def _gatekeeper(self, gate: Gate) -> Gatekeeper:
        return Gatekeeper(
            gate,
            datasets=list(self.datasets.values()),
            ranking=self.ranking,
            ledger=self.ledger,
            recorder=self.recorder,
        )

    def promoted(self, step: int) -> None:
        if (info := self.lifecycle.store.find(step)) is not None:
            self.events.promoted(info)

    def wake(self) -> None:
        self.watcher.wake()

    def reconcile(self) -> None:
        """Look once, and wait for what that put under way."""
        try:
            self.look()
        finally:
            promoting = self.controller._under_way
            if promoting is not None:
                promoting.exception(WAIT_SECONDS)

    def look(self) -> None:
        self.watcher._reconcile()

    @property
    def is_done(self) -> bool:
        """Whether the watcher has taken in everything that it found."""
        return self.watcher._is_done

    def evaluate_next(self, loss: float) -> int:
        """Score what the backlog gives out."""
        info = self.backlog.next()
        assert info is not None
        self.score(info, loss)
        self.backlog.finished()
        return info.step

    def score(
        self,
        info: CheckpointInfo,
        loss: float,
        *,
        dataset: EvaluationDataset = DATASET,
        resampled: Array | None = None,
        undefined: str = "",
        **details: Any,
    ) -> None:
        """Record a score, and the values of the loss in each resample; or why the loss is undefined."""
        result = EvaluationResult(
            metrics={} if undefined else {"loss": loss},
            undefined={"loss": undefined} if undefined else {},
            examples=1,
            batches=1,
            step=info.step,
            waiting_seconds=0,
            computing_seconds=0,
            resampled={} if resampled is None else {"loss": resampled},
            **details,
        )
        self.recorder.record_score(info.digest, dataset, result, duration_seconds=0)

    def serving_step(self) -> int | None:
        harness = self.lifecycle.manager.serving
        return None if harness is None else harness.step

    def started_serving(self, step: int) -> bool:
        return any(
            stop.wait(0.01) or self.serving_step() == step for stop in [threading.Event()] * int(WAIT_SECONDS * 100)
        )

    def leased(self) -> list[int]:
        return sorted(int(folder.name) for folder in self.lifecycle.run.leases.iterdir())

    def entries(self) -> list[tuple[int, EvaluationOutcome]]:
        return [(record.step, record.outcome) for record in self.ledger.page()]

    def close(self) -> None:
        self.watcher.close(WAIT_SECONDS)
        self.lifecycle.close()
        self.recorder.close()
        self.outbox.close()
        self.ledger.close()
