"""What an evaluator knows: the checkpoints, what serves, and what was recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, BinaryIO

from understudy.checkpoints.checkpoint_errors import CheckpointError
from understudy.checkpoints.signing import AcceptedKeys
from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.evaluator_errors import DatasetNotFoundError, LoadError, VersionNotFoundError
from understudy.evaluator.lifecycle import EvaluatorLifecycle
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.records.outbox import Outbox
from understudy.evaluator.serving.checkpoint_store import open_leased
from understudy.evaluator.serving.decision_file import OnDecision
from understudy.evaluator.serving.ranking import Monitor
from understudy.evaluator.serving.rollout_file import RunningRollout
from understudy.evaluator.serving.rollout_health import ServerReport
from understudy.evaluator.serving.servable import Servable
from understudy.evaluator.types import (
    CheckpointInfo,
    EvaluationRecord,
    GpuReading,
    HeldBack,
    LifeRecord,
    Signature,
    Version,
    VersionStatus,
)

if TYPE_CHECKING:
    from understudy.evaluator.evaluation.example_outcomes import Flips
    from understudy.evaluator.evaluation.example_queries import EvaluationTables, ExampleKind, ExampleList
    from understudy.evaluator.evaluation.shadow_comparer import ShadowComparer
    from understudy.evaluator.model.devices import MemoryKind


_LOAD_SECONDS = 60.0
"""How long to wait for a slot to load a version into, of which only the signature is needed."""


class EvaluatorState(EvaluatorLifecycle):
    """Answers what there is, what serves, and what was recorded. Thread-safe, from `start` to `close`."""

    def status(self) -> list[VersionStatus]:
        """Return the state of every version discovered, newest first."""
        return self._components.version_monitor.statuses(serving=self.serving_step)

    @property
    def accepted_keys(self) -> AcceptedKeys | None:
        """The keys of which one must have signed each checkpoint; None if they need not be signed."""
        return self._inputs.accepted

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return the checkpoints that can be requested, by ascending step."""
        return self._components.store.checkpoints()

    def checkpoints_waiting(self) -> int:
        """Return how many checkpoints wait to be scored or are being scored."""
        return len(self._components.backlog)

    @property
    def source_failures(self) -> int:
        """How often in a row the checkpoints of the source could not be followed."""
        return self._components.watcher.failures

    @property
    def source_problem(self) -> str:
        """Why the checkpoints of the source cannot be followed now; empty if they can."""
        return self._components.watcher.problem

    @property
    def is_trained_anew(self) -> bool:
        """Whether the ledger is gone, and other checkpoints are where those of this evaluator were."""
        return self._components.watcher.is_trained_anew

    @property
    def has_no_ledger(self) -> bool:
        """Whether nothing is where the ledger was opened, not even one of another evaluator."""
        return self._components.records.recorder.has_no_ledger

    def is_caught_up(self, since: float) -> bool:
        """Return whether a poll after ``since``, on the `time.monotonic` clock, found nothing left to evaluate."""
        return self._components.watcher.is_caught_up(since)

    def open_file(self, path: str, *, step: int, digest: str) -> BinaryIO:
        """Open a file of a checkpoint: its manifest, a signature, or a path that the manifest lists. Blocks.

        It can be read to its end even if the checkpoint is deleted meanwhile.

        Raises:
            VersionNotFoundError: There is no such checkpoint, or no such file in it.
            LoadError: The checkpoint cannot be used.
        """
        try:
            return open_leased(self._started_components().store, path, step=step, digest=digest)
        except (CheckpointError, OSError) as error:
            raise LoadError(f"step {step} cannot be read: {error}") from error

    @property
    def serving_step(self) -> int | None:
        """The serving step, or None before the first."""
        serving = self._serving()
        return None if serving is None else serving.step

    def checkpoint_age_seconds(self) -> float | None:
        """Return the age of the serving checkpoint, or None if there is none."""
        serving = self._serving()
        return None if serving is None else max(0.0, time.time() - serving.created_at)

    @property
    def latest_step(self) -> int | None:
        """The step of the newest checkpoint that was ever loaded, or None before the first."""
        return self._components.version_monitor.latest_step

    @property
    def best_step(self) -> int | None:
        """The step with the best value of the monitored metric, or None before the first result."""
        return self._components.records.ranking.best()

    @property
    def held_back(self) -> HeldBack | None:
        """See `understudy.evaluator.serving.serving_target.ServingTarget.held_back`."""
        return None if self._running is None else self._running.manager.held_back

    @property
    def pinned_step(self) -> int | None:
        """The step pinned at run time, or None."""
        return self._components.controller.pinned_step

    @property
    def previous_step(self) -> int | None:
        """The step that `roll_back` serves, or None if there is none."""
        return self._components.controller.roll_back_step

    def step_without_pin(self) -> int | None:
        """Return the step that `unpin` serves, or None if that keeps the serving one."""
        return self._components.target.step_without_pin()

    def hand_over(self) -> None:
        """Have servers that follow go over to the evaluator that starts next where this state folder was.

        Blocks while it writes a file there. Does nothing while there is a ledger, and in a server that follows itself.
        """
        if self.has_no_ledger and self._inputs.settings.follow is None:
            self._components.decisions.hand_over()

    def on_decision(self, listener: OnDecision) -> None:
        """Call back with the present decision, if it has a number, and each later one, on a thread of the evaluator.

        It must be quick and must not raise.
        """
        self._components.decisions.listen(listener)

    def use_fleet(self, reports: Callable[[], Sequence[ServerReport]]) -> None:
        """Set what returns the connected servers that follow this evaluator, for rollouts. It must be quick."""
        if (rollout := self._components.target.rollout) is not None:
            rollout.use_fleet(reports)

    @property
    def shadow(self) -> ShadowComparer | None:
        """What compares another version with the serving one on live requests; None if there never is one."""
        return self._components.shadow

    @property
    def rollout(self) -> RunningRollout | None:
        """The rollout that is under way; None if there is none."""
        rollout = self._components.target.rollout
        return None if rollout is None else rollout.running

    @property
    def dataset_names(self) -> tuple[str, ...]:
        """The names of the datasets that are known to the evaluator, in their order."""
        return tuple(self._datasets)

    def dataset(self, name: str) -> EvaluationDataset:
        """Return a dataset that is known to the evaluator; raise DatasetNotFoundError if there is none of the name."""
        if name not in self._datasets:
            raise DatasetNotFoundError(f"there is no dataset {name!r}; there are {list(self._datasets)}")
        return self._datasets[name]

    @property
    def monitor(self) -> Monitor | None:
        """The metric that ranks the checkpoints; None if there is no dataset to score."""
        return self._components.records.ranking.monitor

    def monitored_value(self, step: int) -> float | None:
        """Return the monitored value of a step, or None if it has none."""
        return self._components.records.ranking.value(step)

    @property
    def ledger(self) -> Ledger:
        """The ledger of every evaluation. Open from `start` to `close`."""
        return self._components.records.ledger

    @property
    def last_sequence(self) -> int:
        """The sequence number of the newest entry of the ledger, 0 if there is none."""
        return self._components.records.ledger.last_sequence

    @property
    def outbox(self) -> Outbox | None:
        """The events that wait to be delivered; None without subscriptions. Open from `start` to `close`."""
        return self._components.records.outbox

    def life_of(self, step: int) -> list[LifeRecord]:
        """Return what happened to the checkpoints of one step, by ascending time, besides what the ledger records."""
        return self._components.records.life.of_step(step)

    def served_steps(self, limit: int) -> list[int]:
        """Return the steps that came to serve, in this order, as far as they are remembered; only the newest."""
        return self._components.records.life.served_steps(limit)

    def tables(self, dataset: str = "", *, version: Version = "serving") -> EvaluationTables:
        """Return what was recorded with the last evaluation of a version on a dataset, by default the first. Blocks.

        Raises:
            VersionNotFoundError: There is no such version or evaluation, or it has no tables.
            DatasetNotFoundError: There is no such dataset, and no evaluation on one of that name.
            LedgerError: The tables cannot be read.
        """
        queries = self._started_components().example_queries
        return queries.tables(self._resolve(version), self._scored_dataset(dataset))

    def has_tables(self, record: EvaluationRecord) -> bool:
        """Return whether tables were recorded with an evaluation."""
        return self._started_components().example_queries.has_tables(record)

    def examples(
        self,
        kind: ExampleKind,
        dataset: str = "",
        *,
        version: Version = "serving",
        baseline: Version = "serving",
        limit: int,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> ExampleList:
        """Return examples of a dataset, by default the first. Blocks while it reads the dataset.

        Args:
            kind: Which examples.
            dataset: The dataset.
            version: The version whose evaluation says which examples.
            baseline: The version to compare with; not for the hardest.
            limit: How many to return at most.
            is_wanted: Called between batches; returns whether to continue.

        Raises:
            EvaluatorError: As `tables` and `understudy.evaluator.evaluation.example_queries.ExampleQueries.examples`;
                or no version is serving, and this one cannot be loaded.
        """
        components = self._started_components()
        step = self._resolve(version)
        return components.example_queries.examples(
            kind,
            step,
            self._scored_dataset(dataset),
            baseline_step=None if kind == "hardest" else self._resolve(baseline),
            limit=limit,
            signature=self._signature_like(step),
            is_wanted=lambda: is_wanted() and not self._closing,
        )

    def flips(self, dataset: str, *, version: int, baseline: int) -> Flips:
        """Return how many examples only one of two versions decided rightly, as was recorded with their evaluations.

        Raises:
            VersionNotFoundError: There is no such evaluation, or it has no tables.
            NotEvaluableError: The evaluations lack this, or are on different content of the dataset.
            LedgerError: The tables cannot be read.
        """
        return self._started_components().example_queries.flips(version, dataset, baseline_step=baseline)

    @property
    def replicas(self) -> int:
        """The number of replicas that a batch is split over."""
        return self._components.replicas

    def device_memory(self) -> Mapping[tuple[str, MemoryKind], int]:
        """Return bytes by device and kind (``current``, ``peak``); ``CPU`` stands for the whole process."""
        from understudy.evaluator.model.devices import device_memory

        return device_memory()

    def gpu_readings(self) -> Mapping[str, GpuReading]:
        """Return NVML's readings of each GPU in use, by name; empty without GPUs or NVML."""
        from understudy.evaluator.model.devices import gpu_readings

        return gpu_readings()

    def _serving(self) -> Servable | None:
        return self._components.manager.serving

    def _resolve(self, version: Version) -> int:
        """Return the step that a version currently stands for."""
        return version if isinstance(version, int) else self._components.controller.resolve(version)

    def _scored_dataset(self, name: str) -> str:
        """Return the name of a dataset that exists or existed; that of the first one if it is empty."""
        if not name and self._datasets:
            return next(iter(self._datasets))
        if name not in self._datasets and not self.ledger.scored(name):
            raise DatasetNotFoundError(f"there is no dataset {name!r}; there are {list(self._datasets)}")
        return name

    def _signature_like(self, step: int) -> Signature:
        """Return the signature of a step if it is loaded, else that of the serving version; load it if none serves."""
        manager = self._components.manager
        try:
            return manager.servable(step).slot.signature
        except VersionNotFoundError:
            if (serving := manager.serving) is not None:
                return serving.slot.signature
        with manager.acquire(step, deadline=time.monotonic() + _LOAD_SECONDS).result() as handle:
            return handle.slot.signature
