"""Builds the components of an evaluator, starts them, and sets the order in which they are closed. Imports TensorFlow.

A component is built after those that it uses: records, known checkpoints, what serves, what evaluates, what decides.
Threads start last. Components are closed by an `ExitStack`, which calls what was put on it last first. The order is not
that of building, reversed: each part ends before the parts that it waits for or writes to.

1. The watcher and the evaluation worker, so that nothing new is leased, loaded or scored.
2. The connection to an evaluator that is followed, whose news only the watcher acts on.
3. The work on the devices, in the order of `_close_serving`.
4. The events that wait to be written, the recorder, the outbox, the life log and the ledger: what ended before is
   still recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from understudy.evaluator.assembly.component_options import ScoringPlan, breakdown_options, device_settings
from understudy.evaluator.assembly.evaluator_inputs import EvaluatorInputs
from understudy.evaluator.assembly.recording import Records, open_records
from understudy.evaluator.assembly.serving_parts import (
    KnownCheckpoints,
    PromotionNotifier,
    ServingComponents,
    build_controller,
    build_serving,
    build_watcher,
    examples_per_pass,
    known_checkpoints,
    new_quarantine,
)
from understudy.evaluator.batching.engine import Engine
from understudy.evaluator.evaluation.dataset_scorer import DatasetScorer, OutputSource
from understudy.evaluator.evaluation.evaluation_worker import EvaluationWorker
from understudy.evaluator.evaluation.example_queries import ExampleQueries
from understudy.evaluator.evaluation.on_demand import OnDemandEvaluations
from understudy.evaluator.evaluation.shadow_comparer import ShadowComparer
from understudy.evaluator.model.devices import build_strategy, user_name
from understudy.evaluator.rollout_plan import ShadowPlan
from understudy.evaluator.serving.backlog import Backlog
from understudy.evaluator.serving.checkpoint_store import CheckpointStore
from understudy.evaluator.serving.checkpoint_watcher import CheckpointWatcher
from understudy.evaluator.serving.decision_file import DecisionFile
from understudy.evaluator.serving.servable_manager import ServableManager
from understudy.evaluator.serving.serving_controller import ServingController
from understudy.evaluator.serving.serving_target import ServingTarget
from understudy.evaluator.serving.version_monitor import VersionStateMonitor
from understudy.evaluator.settings import EvaluatorSettings
from understudy.evaluator.sharding.cluster_scoring import ClusterScoring
from understudy.evaluator.types import DeviceListener


@dataclass(frozen=True, kw_only=True)
class Components:
    """The components of a running evaluator."""

    replicas: int
    devices: tuple[str, ...]
    records: Records
    engine: Engine
    store: CheckpointStore
    version_monitor: VersionStateMonitor
    manager: ServableManager
    target: ServingTarget
    controller: ServingController
    backlog: Backlog
    watcher: CheckpointWatcher
    decisions: DecisionFile
    on_demand: OnDemandEvaluations
    example_queries: ExampleQueries
    shadow: ShadowComparer | None


def start_components(
    inputs: EvaluatorInputs,
    *,
    on_promoted: Callable[[int], None],
    on_device_state: DeviceListener,
    remaining_seconds: Callable[[], float],
    stack: ExitStack,
) -> Components:
    """Build all components and start their threads. The caller holds the lock of the state folder.

    Args:
        inputs: What the evaluator is built from.
        on_promoted: Called with each step that starts serving.
        on_device_state: Called when the devices begin to fail, recover, or fail permanently.
        remaining_seconds: Called when a component is closed; returns how long that may take.
        stack: Closes the components, even if some could not be started.

    Raises:
        ConfigurationError: The settings contradict each other.
        DeviceError: The devices are not available.
        LedgerError: The ledger cannot be read.
    """
    settings = inputs.settings
    plan = ScoringPlan.of(settings, inputs.datasets)
    strategy = build_strategy(device_settings(settings, inputs.tuning))
    wake = _WatcherWaker()
    promotions = PromotionNotifier()

    records = open_records(inputs, plan, wake, stack)
    known = known_checkpoints(inputs, records)
    serving = build_serving(inputs, known, strategy, on_promoted=promotions, on_device_state=on_device_state)
    scorer = _scorer(inputs, plan, records, serving)
    cluster = _cluster_scoring(inputs, known, strategy)
    if cluster is not None:
        stack.callback(cluster.close)
    on_cluster = _scorer(inputs, plan, records, serving, outputs=cluster)
    on_demand = _on_demand(scorer, records, known, serving)
    _close_serving(stack, serving, on_demand, remaining_seconds)
    target, controller = build_controller(inputs, plan, records, known, manager=serving.manager, wake=wake)
    promotions.notify(
        known, records.events, target=target, controller=controller, serving=serving, on_promoted=on_promoted
    )
    backlog = Backlog()
    worker = _worker(settings, on_cluster, records, known, manager=serving.manager, backlog=backlog, on_progress=wake)
    wake.watcher = watcher = build_watcher(
        settings, plan, records, known, manager=serving.manager, target=target, controller=controller, backlog=backlog
    )

    shadow = _shadow(inputs, known, serving, target)
    if inputs.following is not None:
        stack.callback(inputs.following.close)
        inputs.following.start(on_decision=wake, on_downloaded=known.quarantine.clear)
    _start_threads(
        stack,
        (serving.manager, serving.freezer, serving.tuner),
        (worker, watcher),
        remaining_seconds=remaining_seconds,
    )
    return Components(
        replicas=int(strategy.num_replicas_in_sync),
        devices=tuple(map(user_name, strategy.extended.worker_devices)),
        records=records,
        engine=serving.engine,
        store=known.store,
        version_monitor=known.version_monitor,
        manager=serving.manager,
        target=target,
        controller=controller,
        backlog=backlog,
        watcher=watcher,
        decisions=known.decisions,
        on_demand=on_demand,
        example_queries=_example_queries(inputs, records),
        shadow=shadow,
    )


def _example_queries(inputs: EvaluatorInputs, records: Records) -> ExampleQueries:
    slices = breakdown_options(inputs.settings).slices
    return ExampleQueries(
        ledger=records.ledger,
        tables=records.tables,
        datasets={dataset.name: dataset for dataset in inputs.datasets},
        batch_size=inputs.settings.evaluation_batch_size,
        sliced={feature.name for setting in slices for feature in setting.features},
    )


def _shadow(
    inputs: EvaluatorInputs, known: KnownCheckpoints, serving: ServingComponents, target: ServingTarget
) -> ShadowComparer | None:
    """Return what compares versions on live requests, if this server may be asked to."""
    rollout, following = known.rollout, inputs.following
    if following is None and (rollout is None or not isinstance(rollout.plan, ShadowPlan)):
        return None
    shadow = ShadowComparer(
        manager=serving.manager,
        engine=serving.engine,
        find=known.store.find,
        wanted=lambda: target.shadow,
        problem=lambda: "" if following is None else following.problem,
    )
    if rollout is not None:
        rollout.use_shadow(shadow.report)
    return shadow


def _cluster_scoring(inputs: EvaluatorInputs, known: KnownCheckpoints, strategy: Any) -> ClusterScoring | None:
    if inputs.cluster is None:
        return None
    settings = device_settings(inputs.settings, inputs.tuning)
    return ClusterScoring(
        inputs.cluster,
        store=known.store,
        observer=inputs.observer,
        allow_unsafe_models=inputs.settings.allow_unsafe_models,
        examples_per_pass=examples_per_pass(inputs, strategy),
        threads=settings.intra_op_threads or settings.default_intra_op_threads,
    )


def _scorer(
    inputs: EvaluatorInputs,
    plan: ScoringPlan,
    records: Records,
    serving: ServingComponents,
    *,
    outputs: OutputSource | None = None,
) -> DatasetScorer:
    return DatasetScorer(
        engine=serving.engine,
        recorder=records.recorder,
        observer=inputs.observer,
        batch_size=inputs.settings.evaluation_batch_size,
        with_tables=inputs.settings.tables,
        breakdown=plan.breakdown,
        outputs=outputs,
    )


def _on_demand(
    scorer: DatasetScorer, records: Records, known: KnownCheckpoints, serving: ServingComponents
) -> OnDemandEvaluations:
    return OnDemandEvaluations(
        store=known.store,
        manager=serving.manager,
        engine=serving.engine,
        scorer=scorer,
        recorder=records.recorder,
        streams=serving.streams,
    )


def _worker(
    settings: EvaluatorSettings,
    scorer: DatasetScorer,
    records: Records,
    known: KnownCheckpoints,
    *,
    manager: ServableManager,
    backlog: Backlog,
    on_progress: Callable[[], None],
) -> EvaluationWorker:
    return EvaluationWorker(
        backlog=backlog,
        manager=manager,
        recorder=records.recorder,
        scoring=scorer,
        quarantine=known.quarantine,
        failures=new_quarantine(settings),
        on_progress=on_progress,
        on_scored=known.version_monitor.scored,
    )


def _close_serving(
    stack: ExitStack, serving: ServingComponents, on_demand: OnDemandEvaluations, remaining_seconds: Callable[[], float]
) -> None:
    """Have the stack end the work on the devices, each part before the parts that it waits for."""
    freezer, tuner, manager = serving.freezer, serving.tuner, serving.manager
    steps: Sequence[Callable[[], None]] = (
        on_demand.stop,  # evaluations end at their next batch
        lambda: serving.engine.close(remaining_seconds()),  # the queued batches run, and their handles are released
        serving.streams.close,  # the streams release their handles
        lambda: freezer.close(remaining_seconds()),  # it releases its handle
        *([] if tuner is None else [lambda: tuner.close(remaining_seconds())]),  # it ends its trial and its lease
        lambda: manager.close(remaining_seconds()),  # refuses waiting evaluations, and waits for all handles
        on_demand.close,  # its threads wait for nothing any more
    )
    for step in reversed(steps):  # the stack calls the last one first
        stack.callback(step)


class _WatcherWaker:
    """Wakes a checkpoint watcher that is created after its callers."""

    def __init__(self) -> None:
        self.watcher: CheckpointWatcher | None = None

    def __call__(self) -> None:
        if self.watcher is not None:
            self.watcher.wake()


class _Startable(Protocol):
    """A component with a thread."""

    def start(self) -> None:
        """Start the thread."""


class _Closable(_Startable, Protocol):
    """A component whose thread ends on its own."""

    def close(self, timeout_seconds: float) -> None:
        """End the thread."""


def _start_threads(
    stack: ExitStack,
    closed_later: Sequence[_Startable | None],
    closed_first: Sequence[_Closable],
    *,
    remaining_seconds: Callable[[], float],
) -> None:
    """Start components, and have the stack close the second ones."""
    for component in filter(None, closed_later):
        component.start()
    for thread in closed_first:
        stack.callback(lambda thread=thread: thread.close(remaining_seconds()))  # type: ignore[misc] # bound now
        thread.start()
