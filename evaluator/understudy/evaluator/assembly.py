"""Assembles the components of an evaluator. Imports TensorFlow."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from understudy.checkpoints.layout import LEASES_DIR, RESULTS_DIR
from understudy.checkpoints.local_checkpoint import LocalCheckpoint
from understudy.checkpoints.signing import AcceptedKeys
from understudy.checkpoints.source import CheckpointSource
from understudy.evaluator.batching.engine import Engine, EngineSettings
from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.evaluation.breakdown import BreakdownOptions
from understudy.evaluator.evaluation.evaluation_stream import OpenStreams
from understudy.evaluator.evaluation.evaluation_worker import DatasetScorer, EvaluationWorker
from understudy.evaluator.evaluation.example_queries import ExampleQueries
from understudy.evaluator.evaluation.on_demand import OnDemandEvaluations
from understudy.evaluator.evaluation.slices import check_columns, parse_slices
from understudy.evaluator.evaluator_errors import ConfigurationError, InvalidInputError
from understudy.evaluator.model.devices import DeviceSettings, build_strategy, has_gpu, user_name
from understudy.evaluator.model.loaders import BuildModel, loader_for
from understudy.evaluator.model.slot import Slot
from understudy.evaluator.model.traced_call import reclaim_memory
from understudy.evaluator.observer import Observer
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.records.ledger_file import LEDGER_FILE
from understudy.evaluator.records.life_log import LIFE_FILE, LifeLog
from understudy.evaluator.records.outbox import Outbox, Subscription
from understudy.evaluator.records.recorder import Recorder
from understudy.evaluator.records.result_files import ResultFiles, TableFiles
from understudy.evaluator.records.summaries import Summaries
from understudy.evaluator.serving.checkpoint_store import CheckpointStore
from understudy.evaluator.serving.checkpoint_watcher import CheckpointWatcher
from understudy.evaluator.serving.decision_file import DecisionFile, FollowedDecision
from understudy.evaluator.serving.event_buffer import EventBuffer
from understudy.evaluator.serving.following import NetworkFollowing
from understudy.evaluator.serving.freezer import SETTLING_SECONDS, Freezer
from understudy.evaluator.serving.gatekeeper import Gatekeeper
from understudy.evaluator.serving.gates import Gate, build_gate, further_dataset
from understudy.evaluator.serving.promotion import BestFile, Monitor, Ranking, parse_monitor
from understudy.evaluator.serving.servable_manager import ServableManager
from understudy.evaluator.serving.serving_controller import PinFile, ServingController
from understudy.evaluator.serving.version_monitor import Backlog, Quarantine, VersionStateMonitor
from understudy.evaluator.settings import DEFAULT_MAX_BATCH_SIZE, EvaluatorSettings
from understudy.evaluator.tuning.choice import FoundSettings, Threads
from understudy.evaluator.tuning.self_tuner import TUNING_SETTLING_SECONDS, SelfTuner, TunedModel
from understudy.evaluator.tuning.trial import TrialRequest
from understudy.evaluator.tuning.tuning_file import TuningStart
from understudy.evaluator.types import DeviceListener, EvaluationOutcome, EvaluationRecord

SUMMARIES_DIR = "tensorboard"
TABLES_DIR = "tables"

_MILLISECONDS = 1000.0


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
    controller: ServingController
    backlog: Backlog
    watcher: CheckpointWatcher
    decisions: DecisionFile
    on_demand: OnDemandEvaluations
    example_queries: ExampleQueries


@dataclass(frozen=True, kw_only=True)
class Records:
    """The results so far, and the objects that record them."""

    ledger: Ledger
    recorder: Recorder
    ranking: Ranking
    tables: TableFiles
    life: LifeLog
    outbox: Outbox | None


def start_components(
    settings: EvaluatorSettings,
    *,
    source: CheckpointSource,
    accepted: AcceptedKeys | None,
    datasets: Sequence[EvaluationDataset],
    build_model: BuildModel | None,
    tuning: TuningStart | None,
    observer: Observer,
    subscriptions: Sequence[Subscription],
    on_promoted: Callable[[int], None],
    on_device_state: DeviceListener,
    remaining_seconds: Callable[[], float],
    following: NetworkFollowing | None,
    stack: ExitStack,
) -> Components:
    """Build all components and start their threads. The caller holds the lock of the state folder.

    Args:
        settings: The operator's settings.
        source: The source of checkpoints.
        accepted: The keys of which one must have signed each checkpoint; None if they need not be signed.
        datasets: The datasets to score them on.
        build_model: Builds the model for checkpoints that hold only variables; None if there is no such function.
        tuning: What was found at earlier starts; None for no self-tuning.
        observer: Receives events.
        subscriptions: Who receives events from the outbox; without any, there is no outbox.
        on_promoted: Called with each step that starts serving.
        on_device_state: Called when the devices begin to fail, recover, or fail permanently.
        remaining_seconds: Called when a component is closed; returns how long that may take.
        following: The evaluator that is followed over the network, which is the source as well; None if there is none.
        stack: Closes the components in reverse order, even if some could not be started.

    Raises:
        ConfigurationError: The settings contradict each other.
        DeviceError: The devices are not available.
        LedgerError: The ledger cannot be read.
    """
    further = further_dataset(settings, _unique_names(datasets))
    scored = [dataset for dataset in datasets if dataset.name != further]
    names = [dataset.name for dataset in scored]
    monitor = parse_monitor(settings.monitor, settings.monitor_mode, names)
    breakdown = breakdown_options(settings)
    _check_slices(breakdown, datasets)
    sliced = [frozenset(feature.name for feature in setting.features) for setting in breakdown.slices]
    gate = build_gate(settings, monitor, names, slices=sliced)
    if gate is not None:
        breakdown = dataclasses.replace(breakdown, resamples=gate.resamples(breakdown.resamples))
    strategy = build_strategy(device_settings(settings, tuning))
    if has_gpu(strategy):
        tuning = None
    found = FoundSettings() if tuning is None or tuning.found is None else tuning.found
    wake = _WatcherWaker()
    records = _open_records(settings, monitor, scored, observer, stack, subscriptions=subscriptions, wake=wake)
    events = EventBuffer(None if records.outbox is None else records.ledger, wake=wake)
    stack.callback(events.close)

    quarantine = _new_quarantine(settings)
    store = CheckpointStore(source, settings.state_dir / LEASES_DIR, accepted=accepted)
    version_monitor = VersionStateMonitor(
        quarantine=quarantine, observer=observer, life=records.life, on_quarantined=events.quarantined
    )
    streams = OpenStreams()

    decisions = DecisionFile(settings.state_dir)

    def tell_promoted(step: int) -> None:
        if (serving := manager.serving) is not None:
            decisions.publish(step=serving.step, digest=serving.digest)
        controller.tell_evaluator()
        if (info := store.find(step)) is not None:
            version_monitor.served(info)
            events.promoted(info)
        freezer.promoted(step)
        if tuner is not None:
            tuner.promoted(step)
        on_promoted(step)

    manager = _build_manager(
        settings,
        slots=_SlotFactory(
            strategy,
            max_batch_size=settings.max_batch_size or max(found.max_batch_size, DEFAULT_MAX_BATCH_SIZE),
            on_trace=observer.function_traced,
            build_model=build_model,
            allow_unsafe_models=settings.allow_unsafe_models,
        ),
        store=store,
        version_monitor=version_monitor,
        streams=streams,
        on_promoted=tell_promoted,
    )
    freezer = Freezer(
        manager=manager,
        limit_mib=settings.frozen_memory_mib,
        observer=observer,
        settling_seconds=SETTLING_SECONDS,
    )
    engine = Engine(
        engine_settings(settings, strategy.extended.worker_devices, found), observer, on_device_state=on_device_state
    )
    tuner = (
        None
        if tuning is None
        else _build_tuner(settings, tuning, strategy, manager=manager, store=store, engine=engine)
    )
    scorer = DatasetScorer(
        engine=engine,
        recorder=records.recorder,
        observer=observer,
        batch_size=settings.evaluation_batch_size,
        with_tables=settings.tables,
        breakdown=breakdown,
    )
    on_demand = OnDemandEvaluations(
        store=store, manager=manager, engine=engine, scorer=scorer, recorder=records.recorder, streams=streams
    )
    _close_in_order(
        stack,
        on_demand=on_demand,
        engine=engine,
        streams=streams,
        freezer=freezer,
        tuner=tuner,
        manager=manager,
        remaining_seconds=remaining_seconds,
    )

    controller = ServingController(
        policy=settings.version_policy,
        store=store,
        quarantine=quarantine,
        ranking=records.ranking,
        gatekeeper=None if gate is None else _gatekeeper(gate, records, datasets),
        manager=manager,
        pin_file=PinFile(settings.state_dir),
        followed=following or (None if settings.follow_folder is None else FollowedDecision(settings.follow_folder)),
        latest_step=lambda: version_monitor.latest_step,
        on_settled=wake,
    )
    backlog = Backlog(settings.evaluation_policy)
    worker = EvaluationWorker(
        backlog=backlog,
        manager=manager,
        recorder=records.recorder,
        scoring=scorer,
        quarantine=quarantine,
        failures=_new_quarantine(settings),
        on_progress=wake,
        on_scored=version_monitor.scored,
    )
    wake.watcher = watcher = CheckpointWatcher(
        store=store,
        manager=manager,
        version_monitor=version_monitor,
        quarantine=quarantine,
        recorder=records.recorder,
        ranking=records.ranking,
        controller=controller,
        backlog=backlog,
        best_file=BestFile(settings.state_dir, monitor),
        decision_file=decisions,
        events=events,
        policy=settings.evaluation_policy,
        poll_interval_seconds=settings.poll_interval_seconds,
    )
    _start_following(stack, following, wake, quarantine)
    _start_threads(stack, (manager, freezer, tuner), (worker, watcher), remaining_seconds=remaining_seconds)
    return Components(
        replicas=int(strategy.num_replicas_in_sync),
        devices=tuple(map(user_name, strategy.extended.worker_devices)),
        records=records,
        engine=engine,
        store=store,
        version_monitor=version_monitor,
        manager=manager,
        controller=controller,
        backlog=backlog,
        watcher=watcher,
        decisions=decisions,
        on_demand=on_demand,
        example_queries=ExampleQueries(
            ledger=records.ledger,
            tables=records.tables,
            datasets={dataset.name: dataset for dataset in datasets},
            batch_size=settings.evaluation_batch_size,
        ),
    )


def _start_following(
    stack: ExitStack, following: NetworkFollowing | None, wake: Callable[[], None], quarantine: Quarantine
) -> None:
    if following is not None:
        stack.callback(following.close)
        following.start(on_decision=wake, on_downloaded=quarantine.clear)


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


class _SlotFactory:
    """An `understudy.evaluator.serving.loading.SlotFactory` of slots that share the replicas of one strategy.

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


def _build_manager(
    settings: EvaluatorSettings,
    *,
    slots: _SlotFactory,
    store: CheckpointStore,
    version_monitor: VersionStateMonitor,
    streams: OpenStreams,
    on_promoted: Callable[[int], None],
) -> ServableManager:
    def recall(step: int, waiting_seconds: float, to_serve: bool) -> None:  # noqa: FBT001 - the manager's callback
        serving = manager.serving
        serving_step = None if serving is None else serving.step
        streams.recall(step, waiting_seconds=waiting_seconds, to_serve=to_serve, serving_step=serving_step)

    manager = ServableManager(
        store=store,
        slots=slots,
        limit=settings.slots,
        version_monitor=version_monitor,
        on_promoted=on_promoted,
        on_starved=recall,
    )
    return manager


def _close_in_order(
    stack: ExitStack,
    *,
    on_demand: OnDemandEvaluations,
    engine: Engine,
    streams: OpenStreams,
    freezer: Freezer,
    tuner: SelfTuner | None,
    manager: ServableManager,
    remaining_seconds: Callable[[], float],
) -> None:
    """Have the stack end all work, each part before the parts that it waits for.

    The watcher and the worker are closed before, so that nothing new is loaded or scored. The records are closed after,
    because the last evaluations are recorded meanwhile.
    """
    steps: Sequence[Callable[[], None]] = (
        on_demand.stop,  # evaluations end at their next batch
        lambda: engine.close(remaining_seconds()),  # the queued batches run, and their handles are released
        streams.close,  # the streams release their handles
        lambda: freezer.close(remaining_seconds()),
        *([] if tuner is None else [lambda: tuner.close(remaining_seconds())]),
        lambda: manager.close(remaining_seconds()),  # refuses waiting evaluations, and waits for all handles
        on_demand.close,  # its threads wait for nothing any more
    )
    for step in reversed(steps):  # the stack calls the last one first
        stack.callback(step)


def _gatekeeper(gate: Gate, records: Records, datasets: Sequence[EvaluationDataset]) -> Gatekeeper:
    names = gate.datasets | {gate.further_dataset}
    return Gatekeeper(
        gate,
        datasets=[dataset for dataset in datasets if dataset.name in names],
        ranking=records.ranking,
        ledger=records.ledger,
        recorder=records.recorder,
    )


def _unique_names(datasets: Sequence[EvaluationDataset]) -> list[str]:
    names = [dataset.name for dataset in datasets]
    if len(set(names)) < len(names):
        raise ConfigurationError(f"the datasets are called {names}; give each a name of its own")
    return names


def _open_records(
    settings: EvaluatorSettings,
    monitor: Monitor | None,
    datasets: Sequence[EvaluationDataset],
    observer: Observer,
    stack: ExitStack,
    *,
    subscriptions: Sequence[Subscription],
    wake: Callable[[], None],
) -> Records:
    """Open the ledger and the files derived from it, and rank the scores that it holds."""

    def ranked(record: EvaluationRecord) -> None:
        ranking.observe([record])
        if record.outcome is EvaluationOutcome.SCORED:
            wake()

    content = next((dataset.digest for dataset in datasets if monitor and dataset.name == monitor.dataset), "")
    ranking = Ranking(monitor, content)
    path = settings.state_dir / LEDGER_FILE
    outbox = Outbox(path, subscriptions) if subscriptions else None
    ledger = Ledger(path, outbox=outbox)
    stack.callback(ledger.close)
    life = LifeLog(settings.state_dir / LIFE_FILE)
    stack.callback(life.close)
    if outbox is not None:
        stack.callback(outbox.close)
    tables = TableFiles(settings.state_dir / TABLES_DIR)
    recorder = Recorder(
        ledger=ledger,
        keep=settings.keep_evaluations,
        results=ResultFiles(settings.state_dir / RESULTS_DIR),
        summaries=Summaries(settings.state_dir / SUMMARIES_DIR),
        tables=tables,
        datasets=datasets,
        observer=observer,
        listener=ranked,
    )
    stack.callback(recorder.close)
    recorder.start_recovering()
    if monitor is not None:
        ranking.observe(ledger.scored(monitor.dataset))
    return Records(ledger=ledger, recorder=recorder, ranking=ranking, tables=tables, life=life, outbox=outbox)


@contextmanager
def _leased(store: CheckpointStore, step: int) -> Iterator[LocalCheckpoint]:
    with store.lease(store.info(step)) as lease:
        yield lease.checkpoint


def _build_tuner(
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
        engine.set_batching(max_batch_size=batching.max_batch_size, gathering_seconds=batching.gathering_seconds)

    def request(checkpoint: LocalCheckpoint, threads: Threads) -> TrialRequest:
        return TrialRequest(
            model_file=str(checkpoint.model_file),
            kind=checkpoint.kind.value,
            experiment=tuning.experiment,
            allow_unsafe_models=settings.allow_unsafe_models,
            devices=settings.devices,
            logical_cpus=settings.logical_cpus,
            frozen_memory_mib=settings.frozen_memory_mib,
            threads=threads,
        )

    in_effect = device_settings(settings, tuning)
    return SelfTuner(
        file=tuning.file,
        serving=serving,
        apply=apply,
        request=request,
        given=Threads(intra_op=settings.intra_op_threads, inter_op=settings.inter_op_threads),
        in_effect=Threads(
            intra_op=in_effect.intra_op_threads or in_effect.default_intra_op_threads,
            inter_op=in_effect.inter_op_threads or in_effect.default_inter_op_threads,
        ),
        replicas=len(devices),
        settling_seconds=TUNING_SETTLING_SECONDS,
    )


def device_settings(settings: EvaluatorSettings, tuning: TuningStart | None = None) -> DeviceSettings:
    """Return the device settings, with the threads that were found where none are given.

    They are for `understudy.evaluator.model.devices.build_strategy`.
    """
    found = Threads() if tuning is None or tuning.found is None else tuning.found.threads
    return DeviceSettings(
        devices=settings.devices,
        logical_cpus=settings.logical_cpus,
        gpu_memory_limit_mib=settings.gpu_memory_limit_mib,
        precision=settings.precision,
        intra_op_threads=settings.intra_op_threads,
        inter_op_threads=settings.inter_op_threads,
        default_intra_op_threads=found.intra_op,
        default_inter_op_threads=found.inter_op,
    )


class _WatcherWaker:
    """Wakes a checkpoint watcher that is created after its callers."""

    def __init__(self) -> None:
        self.watcher: CheckpointWatcher | None = None

    def __call__(self) -> None:
        if self.watcher is not None:
            self.watcher.wake()


def breakdown_options(settings: EvaluatorSettings) -> BreakdownOptions:
    """Return what recorded evaluations compute besides the metrics.

    Raises:
        ConfigurationError: A slice setting cannot be used, or a number is out of its range.
    """
    try:
        return BreakdownOptions(
            slices=parse_slices(settings.slice),
            slice_min_examples=settings.slice_min_examples,
            resamples=settings.resamples,
            confidence=settings.confidence,
            lenient=True,
        )
    except InvalidInputError as error:
        raise ConfigurationError(str(error)) from error


def _check_slices(breakdown: BreakdownOptions, datasets: Iterable[EvaluationDataset]) -> None:
    try:
        check_columns(breakdown.slices, (dataset.columns for dataset in datasets))
    except InvalidInputError as error:
        raise ConfigurationError(str(error)) from error


def engine_settings(
    settings: EvaluatorSettings, devices: Sequence[str], found: FoundSettings | None = None
) -> EngineSettings:
    """Return the batch settings for these devices, which have the names of `tf.distribute`.

    What was found counts where nothing is given.
    """
    found = found or FoundSettings()
    cpus_only = all(tf.DeviceSpec.from_string(name).device_type == "CPU" for name in devices)
    given_delay = settings.max_batch_delay_ms
    return EngineSettings(
        max_batch_size=min(settings.max_batch_size or found.max_batch_size, settings.max_queue_examples) * len(devices),
        max_queue_examples=settings.max_queue_examples,
        max_batch_delay_seconds=(given_delay or 0.0) / _MILLISECONDS,
        gathering_seconds=found.gathering_seconds if given_delay is None and cpus_only else 0.0,
        max_device_failures=settings.max_device_failures,
        inline_batches=settings.inline_batches and cpus_only,
        overlap_batches=not cpus_only,
    )


def _new_quarantine(settings: EvaluatorSettings) -> Quarantine:
    return Quarantine(attempts=settings.load_attempts, retry_seconds=settings.load_retry_seconds, clock=time.monotonic)
