"""Builds what finds checkpoints, loads them into slots, serves them, and decides which of them serves."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from understudy.checkpoints.layout import LEASES_DIR
from understudy.checkpoints.local_checkpoint import LocalCheckpoint
from understudy.evaluator.assembly.component_options import ScoringPlan, device_settings, engine_settings, trial_request
from understudy.evaluator.assembly.evaluator_inputs import EvaluatorInputs
from understudy.evaluator.assembly.recording import Records
from understudy.evaluator.batching.engine import Engine
from understudy.evaluator.evaluation.servable_stream import OpenStreams
from understudy.evaluator.model.devices import has_gpu
from understudy.evaluator.model.loaders import BuildModel, loader_for
from understudy.evaluator.model.reclaiming import reclaim_memory
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.serving.backlog import Backlog
from understudy.evaluator.serving.checkpoint_store import CheckpointStore
from understudy.evaluator.serving.checkpoint_watcher import CheckpointWatcher
from understudy.evaluator.serving.decision_file import DecisionFile, FollowedDecision
from understudy.evaluator.serving.event_buffer import EventBuffer
from understudy.evaluator.serving.freezer import SETTLING_SECONDS, Freezer
from understudy.evaluator.serving.gatekeeper import Gatekeeper
from understudy.evaluator.serving.gates import Gate
from understudy.evaluator.serving.promotion import BestFile, Pin, PinFile
from understudy.evaluator.serving.quarantine import Quarantine
from understudy.evaluator.serving.rollout import Rollout, open_rollout
from understudy.evaluator.serving.servable_manager import ServableManager
from understudy.evaluator.serving.serving_controller import ServingController
from understudy.evaluator.serving.serving_history import ServingHistory
from understudy.evaluator.serving.serving_target import ServingTarget
from understudy.evaluator.serving.version_monitor import VersionStateMonitor
from understudy.evaluator.settings import DEFAULT_MAX_BATCH_SIZE, EvaluatorSettings
from understudy.evaluator.tuning.choice import FoundSettings, Threads
from understudy.evaluator.tuning.self_tuner import TUNING_SETTLING_SECONDS, SelfTuner, TunedModel
from understudy.evaluator.tuning.tuning_file import TuningStart
from understudy.evaluator.types import DeviceListener


class MirroredSlotFactory:
    """An `understudy.evaluator.serving.loading.SlotFactory` of slots on the replicas of one strategy.

    Args:
        strategy: A `tf.distribute.MirroredStrategy`.
        max_batch_size: The maximum number of examples of one call.
        on_trace: Called each time a function is traced.
        build_model: Builds the model for checkpoints that hold only variables; None if there is no such function.
        allow_unsafe_models: Whether a stored model may name any class, function and operation.
    """

    def __init__(
        self,
        strategy: Any,
        *,
        max_batch_size: int,
        on_trace: Callable[[], None],
        build_model: BuildModel | None,
        allow_unsafe_models: bool,
    ) -> None:
        self._strategy = strategy
        self._max_batch_size = max_batch_size
        self._on_trace = on_trace
        self._loader_for = functools.partial(
            loader_for, build_model=build_model, allow_unsafe_models=allow_unsafe_models
        )

    def build(self, checkpoint: LocalCheckpoint) -> Slot:
        """See `SlotFactory`."""
        loader = self._loader_for(checkpoint.kind)
        return Slot(
            self._strategy,
            checkpoint.model_file,
            max_batch_size=self._max_batch_size,
            loader=loader,
            on_trace=self._on_trace,
        )

    def architecture_of(self, checkpoint: LocalCheckpoint) -> str:
        """See `SlotFactory`."""
        return self._loader_for(checkpoint.kind).architecture_of(checkpoint.model_file)

    def reclaim(self) -> bool:
        """See `SlotFactory`."""
        return reclaim_memory()


@dataclass(frozen=True, kw_only=True)
class KnownCheckpoints:
    """What is known of the checkpoints."""

    store: CheckpointStore
    quarantine: Quarantine
    version_monitor: VersionStateMonitor
    decisions: DecisionFile
    rollout: Rollout | None


@dataclass(frozen=True, kw_only=True)
class ServingComponents:
    """What loads the checkpoints and runs requests with them."""

    manager: ServableManager
    engine: Engine
    streams: OpenStreams
    freezer: Freezer
    tuner: SelfTuner | None


def known_checkpoints(inputs: EvaluatorInputs, records: Records) -> KnownCheckpoints:
    """Build the store of checkpoints, and what notes how each of them fares."""
    state_dir = inputs.settings.state_dir
    quarantine = new_quarantine(inputs.settings)
    decisions = DecisionFile(state_dir, replaces=inputs.settings.replaces_evaluator)
    store = CheckpointStore(inputs.source, state_dir / LEASES_DIR, accepted=inputs.accepted)
    return KnownCheckpoints(
        store=store,
        quarantine=quarantine,
        version_monitor=VersionStateMonitor(
            quarantine=quarantine,
            observer=inputs.observer,
            life=records.life,
            is_offered=store.is_offered,
            on_quarantined=records.events.quarantined,
        ),
        decisions=decisions,
        rollout=open_rollout(
            inputs.settings.rollout,
            directory=state_dir,
            decisions=decisions,
            recorder=records.recorder,
            ledger=records.ledger,
        ),
    )


def examples_per_pass(inputs: EvaluatorInputs, strategy: Any) -> int:
    """Return the most examples of one call of a model on one replica; larger batches run in pieces."""
    return inputs.settings.max_batch_size or max(_found(inputs, strategy).max_batch_size, DEFAULT_MAX_BATCH_SIZE)


def _found(inputs: EvaluatorInputs, strategy: Any) -> FoundSettings:
    """Return the settings that an earlier process found for models on CPUs."""
    tuning = None if has_gpu(strategy) else inputs.tuning
    return FoundSettings() if tuning is None or tuning.found is None else tuning.found


def build_serving(
    inputs: EvaluatorInputs,
    known: KnownCheckpoints,
    strategy: Any,
    *,
    on_promoted: Callable[[int], None],
    on_device_state: DeviceListener,
) -> ServingComponents:
    """Build what loads checkpoints and runs requests with them.

    Args:
        inputs: What the evaluator is built from.
        known: What is known of the checkpoints.
        strategy: A `tf.distribute.MirroredStrategy`.
        on_promoted: Called with each step that starts serving.
        on_device_state: Called when the devices begin to fail, recover, or fail permanently.
    """
    settings = inputs.settings
    tuning = None if has_gpu(strategy) else inputs.tuning
    streams = OpenStreams()

    def recall(step: int, waiting_seconds: float, to_serve: bool) -> None:  # noqa: FBT001 - the manager's callback
        serving = manager.serving
        serving_step = None if serving is None else serving.step
        streams.recall(step, waiting_seconds=waiting_seconds, to_serve=to_serve, serving_step=serving_step)

    manager = ServableManager(
        store=known.store,
        slots=MirroredSlotFactory(
            strategy,
            max_batch_size=examples_per_pass(inputs, strategy),
            on_trace=inputs.observer.function_traced,
            build_model=inputs.build_model,
            allow_unsafe_models=settings.allow_unsafe_models,
        ),
        limit=settings.slots,
        version_monitor=known.version_monitor,
        on_promoted=on_promoted,
        on_starved=recall,
    )
    freezer = Freezer(
        manager=manager,
        limit_mib=settings.frozen_memory_mib,
        observer=inputs.observer,
        settling_seconds=SETTLING_SECONDS,
    )
    engine = Engine(
        engine_settings(settings, strategy.extended.worker_devices, _found(inputs, strategy)),
        inputs.observer,
        on_device_state=on_device_state,
    )
    tuner = (
        None
        if tuning is None
        else _tuner(settings, tuning, strategy, manager=manager, store=known.store, engine=engine)
    )
    return ServingComponents(manager=manager, engine=engine, streams=streams, freezer=freezer, tuner=tuner)


def _tuner(
    settings: EvaluatorSettings,
    tuning: TuningStart,
    strategy: Any,
    *,
    manager: ServableManager,
    store: CheckpointStore,
    engine: Engine,
) -> SelfTuner:
    devices = strategy.extended.worker_devices

    def serving(step: int) -> TunedModel:
        architecture = manager.servable(step).slot.architecture
        return TunedModel(architecture=architecture, lease=functools.partial(_leased, store, step))

    def apply(found: FoundSettings) -> None:
        batching = engine_settings(settings, devices, found)
        engine.set_batching(
            max_batch_size=batching.max_batch_size,
            gathering_seconds=batching.gathering_seconds,
            concurrent_batches=batching.concurrent_batches,
        )

    in_effect = device_settings(settings, tuning)
    return SelfTuner(
        file=tuning.file,
        serving=serving,
        apply=apply,
        request=functools.partial(trial_request, settings, tuning.experiment),
        given=Threads(intra_op=settings.intra_op_threads, inter_op=settings.inter_op_threads),
        in_effect=Threads(
            intra_op=in_effect.intra_op_threads or in_effect.default_intra_op_threads,
            inter_op=in_effect.inter_op_threads or in_effect.default_inter_op_threads,
        ),
        replicas=len(devices),
        settling_seconds=TUNING_SETTLING_SECONDS,
    )


@contextmanager
def _leased(store: CheckpointStore, step: int) -> Iterator[LocalCheckpoint]:
    with store.lease(store.info(step)) as lease:
        yield lease.checkpoint


def build_controller(
    inputs: EvaluatorInputs,
    plan: ScoringPlan,
    records: Records,
    known: KnownCheckpoints,
    *,
    manager: ServableManager,
    wake: Callable[[], None],
) -> tuple[ServingTarget, ServingController]:
    """Build what decides which checkpoint serves, and what has it served.

    ``wake`` is called when a pin or its removal is settled.
    """
    settings = inputs.settings
    folder = settings.follow_folder
    followed = inputs.following or (None if folder is None else FollowedDecision(folder))
    gatekeeper = None if plan.gate is None else _gatekeeper(plan.gate, inputs, records)
    pin = Pin(PinFile(settings.state_dir), is_used=followed is None)
    history = ServingHistory(settings.state_dir, is_used=followed is None)
    target = ServingTarget(
        policy=settings.version_policy,
        store=known.store,
        quarantine=known.quarantine,
        ranking=records.ranking,
        gatekeeper=gatekeeper,
        manager=manager,
        pin=pin,
        history=history,
        followed=followed,
        rollout=known.rollout,
    )
    manager.explain_with(target.held_back)
    controller = ServingController(
        target=target,
        store=known.store,
        ranking=records.ranking,
        manager=manager,
        pin=pin,
        history=history,
        followed=followed,
        latest_step=lambda: known.version_monitor.latest_step,
        on_settled=wake,
    )
    return target, controller


def _gatekeeper(gate: Gate, inputs: EvaluatorInputs, records: Records) -> Gatekeeper:
    names = gate.datasets | {gate.further_dataset}
    return Gatekeeper(
        gate,
        datasets=[dataset for dataset in inputs.datasets if dataset.name in names],
        ranking=records.ranking,
        ledger=records.ledger,
        recorder=records.recorder,
    )


def build_watcher(
    settings: EvaluatorSettings,
    plan: ScoringPlan,
    records: Records,
    known: KnownCheckpoints,
    *,
    manager: ServableManager,
    target: ServingTarget,
    controller: ServingController,
    backlog: Backlog,
) -> CheckpointWatcher:
    """Build what finds checkpoints and has them served and evaluated."""
    return CheckpointWatcher(
        store=known.store,
        manager=manager,
        version_monitor=known.version_monitor,
        quarantine=known.quarantine,
        recorder=records.recorder,
        ranking=records.ranking,
        target=target,
        controller=controller,
        backlog=backlog,
        best_file=BestFile(settings.state_dir, plan.monitor),
        decision_file=known.decisions,
        events=records.events,
        policy=settings.evaluation_policy,
        poll_interval_seconds=settings.poll_interval_seconds,
    )


def new_quarantine(settings: EvaluatorSettings) -> Quarantine:
    """Return an empty quarantine with the settings' attempts and pauses."""
    return Quarantine(attempts=settings.load_attempts, retry_seconds=settings.load_retry_seconds, clock=time.monotonic)


class PromotionNotifier:
    """Called by the manager with each step that starts serving; notifies components that are built after it."""

    def __init__(self) -> None:
        self._notify: Callable[[int], None] = lambda _step: None

    def __call__(self, step: int) -> None:
        """Notify them of a step that starts serving."""
        self._notify(step)

    def notify(
        self,
        known: KnownCheckpoints,
        events: EventBuffer,
        *,
        target: ServingTarget,
        controller: ServingController,
        serving: ServingComponents,
        on_promoted: Callable[[int], None],
    ) -> None:
        """Notify these from now on; before the manager starts."""

        def promoted(step: int) -> None:
            known.decisions.publish(target.serving_key, followed=target.followed)
            controller.report_to_evaluator()
            if (info := known.store.find(step)) is not None:
                known.version_monitor.served(info)
                events.promoted(info)
            serving.freezer.promoted(step)
            if serving.tuner is not None:
                serving.tuner.promoted(step)
            on_promoted(step)

        self._notify = promoted
