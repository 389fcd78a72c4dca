"""The evaluator: watches checkpoints, scores them, serves one, and answers predictions and evaluations."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeVar

from understudy.checkpoints.checkpoint_errors import CheckpointError, LockHeldError
from understudy.checkpoints.locks import DirectoryLock
from understudy.checkpoints.signing import AcceptedKeys
from understudy.checkpoints.source import CheckpointSource
from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.evaluator_errors import (
    ConfigurationError,
    DatasetNotFoundError,
    DrainingError,
    InvalidInputError,
    LoadError,
    NotReadyError,
    VersionNotFoundError,
)
from understudy.evaluator.observer import Observer
from understudy.evaluator.records.ledger import Ledger
from understudy.evaluator.records.outbox import Outbox, Subscription
from understudy.evaluator.serving.checkpoint_store import open_leased
from understudy.evaluator.serving.decision_file import OnDecision, ServingDecision
from understudy.evaluator.serving.promotion import Monitor
from understudy.evaluator.serving.servable import ModelSlot, Servable, borrow_checked
from understudy.evaluator.serving.serving_controller import ReadySignal
from understudy.evaluator.settings import EvaluatorSettings
from understudy.evaluator.types import (
    ArrayForm,
    Arrays,
    CheckpointInfo,
    DeviceListener,
    DeviceState,
    EvaluationRecord,
    FutureSink,
    GpuReading,
    LifeRecord,
    MetricSpec,
    ModelDescription,
    Prediction,
    Progress,
    ResultSink,
    ServingChange,
    Version,
    VersionStatus,
)

if TYPE_CHECKING:
    from understudy.evaluator.assembly import Components
    from understudy.evaluator.evaluation.breakdown import BreakdownOptions
    from understudy.evaluator.evaluation.comparison import BootstrapOptions, Comparison, ReplayableBatches
    from understudy.evaluator.evaluation.evaluation_stream import EvaluationStream
    from understudy.evaluator.evaluation.example_outcomes import Flips
    from understudy.evaluator.evaluation.example_queries import EvaluationTables, ExampleKind, ExampleList
    from understudy.evaluator.model.devices import MemoryKind
    from understudy.evaluator.serving.following import NetworkFollowing
    from understudy.evaluator.tuning.tuning_file import TuningStart

_log = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0

_OWN_STATE_FOLDER = "give this one a state folder of its own with --state-dir (or UNDERSTUDY_STATE_DIR)"

_FUTURES = FutureSink()

_Token = TypeVar("_Token")


class Evaluator:
    """Scores and serves the checkpoints of one source. Thread-safe; a context manager that starts and closes it.

    Methods that return a `concurrent.futures.Future` do not block: they raise argument errors at once, and later errors
    are the future's exception. A ``deadline`` is a value of `time.monotonic`, or None for none. Cancelling a future
    before its work has begun cancels the work.

    Args:
        settings: The operator's settings.
        source: The source of checkpoints.
        accepted: The keys of which one must have signed each checkpoint, as for the source; None if they need not be
            signed.
        datasets: The datasets that each checkpoint is scored on, in this order; names are unique.
        build_model: Returns a new Keras model, for checkpoints that hold only variables.
        following: The evaluator that is followed over the network, which is the source as well; None if there is none.
        tuning: What was found at earlier starts; None for no self-tuning.
        observer: Receives an event for each batch, load and record.
        subscriptions: Who receives what happens to checkpoints from the `outbox`; without any, there is none.
    """

    def __init__(
        self,
        settings: EvaluatorSettings,
        *,
        source: CheckpointSource,
        datasets: Sequence[EvaluationDataset] = (),
        build_model: Callable[[], Any] | None = None,
        accepted: AcceptedKeys | None = None,
        following: NetworkFollowing | None = None,
        tuning: TuningStart | None = None,
        observer: Observer,
        subscriptions: Sequence[Subscription] = (),
    ) -> None:
        if settings.require_signature and accepted is None:
            raise ConfigurationError("require_signature is set, and no keys are given")
        self._settings = settings
        self._source = source
        self._accepted = accepted
        self._datasets = {dataset.name: dataset for dataset in datasets}
        self._all_datasets = tuple(datasets)
        self._build_model = build_model
        self._following = following
        self._tuning = tuning
        self._observer = observer
        self._subscriptions = tuple(subscriptions)
        self._ready = ReadySignal()
        self._device_listener: DeviceListener = lambda _state, _error: None
        self._stack = ExitStack()
        self._lock = DirectoryLock(settings.state_dir, alternative=_OWN_STATE_FOLDER)
        self._owns = False
        self._running: Components | None = None
        self._closing = False
        self._close_by = float("inf")

    def own_state_dir(self) -> str:
        """Lock the state folder before `start`, without waiting.

        Returns:
            Who uses it, if another evaluator does; empty if it is locked now.
        """
        if not self._owns:
            try:
                self._lock.acquire()
            except LockHeldError as error:
                return str(error)
            self._owns = True
        return ""

    def start(self) -> None:
        """Lock the state folder, open the ledger, build the replicas and start to watch the source.

        TensorFlow cannot change its devices after its first operation. If user code, such as an experiment, runs
        before, build the strategy first, with the same settings; see `understudy.evaluator.assembly`.

        Raises:
            ConfigurationError: The settings contradict each other, or the monitored dataset does not exist.
            DeviceError: The devices are not available.
            LedgerError: The ledger cannot be read.
            understudy.checkpoints.checkpoint_errors.LockHeldError: Another evaluator uses the state folder.
        """
        from understudy.evaluator.assembly import start_components

        with ExitStack() as undo:
            if not self._owns:
                self._lock.acquire()
                self._owns = True
            undo.callback(self._disown)
            self._running = start_components(
                self._settings,
                source=self._source,
                accepted=self._accepted,
                datasets=self._all_datasets,
                build_model=self._build_model,
                tuning=self._tuning,
                observer=self._observer,
                subscriptions=self._subscriptions,
                on_promoted=self._ready.give,
                on_device_state=self._tell_device_state,
                remaining_seconds=self._remaining_seconds,
                following=self._following,
                stack=undo,
            )
            self._stack = undo.pop_all()
        _log.info("evaluator started", extra={"replicas": self.replicas, "devices": list(self._components.devices)})

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Refuse new work, finish queued work, end all threads and unlock the state folder. Idempotent.

        Evaluations in progress are aborted; the next evaluator on the same state folder repeats them.

        Raises:
            TimeoutError: A thread did not end, or a handle was not released, in time. Everything else was closed.
        """
        self._closing = True
        self._close_by = time.monotonic() + timeout_seconds
        try:
            self._stack.close()
        finally:
            self._disown()

    def predict(
        self, inputs: Arrays, *, version: Version = "serving", deadline: float | None = None
    ) -> Future[Prediction]:
        """Run one loaded version on examples. Raises at once as `predict_for` does."""
        future: Future[Prediction] = Future()
        self.predict_for(future, _FUTURES, inputs, version=version, deadline=deadline)
        return future

    def predict_for(
        self,
        token: _Token,
        sink: ResultSink[_Token],
        inputs: Arrays,
        *,
        version: Version = "serving",
        deadline: float | None = None,
        dispatch: bool = True,
    ) -> None:
        """Run one loaded version on inputs ``[examples, ...]`` by name, merged into batches with other requests.

        Args:
            token: Opaque token that identifies the caller.
            sink: Receives the outcome: the prediction, or DeadlineExceededError, VersionNotFoundError,
                ModelChangedError or another error. It receives the outcomes of a batch in one call.
            inputs: Every input by name. Do not change them until the outcome is delivered.
            version: The version to run.
            deadline: When the answer is no longer wanted.
            dispatch: Whether to run the request at once if the devices are idle. If False, call `dispatch` soon, so
                that requests that arrive together share a batch.

        Raises:
            InvalidInputError: The inputs do not fit the model's signature, or have more examples than the queue holds.
            NotReadyError: Nothing is serving yet.
            VersionNotFoundError: The version does not exist or is not loaded.
            OverloadedError: The queue is full, or the deadline would pass before the queued requests are done.
            DeadlineExceededError: The deadline has passed.
            DrainingError: The evaluator is being closed.
        """
        components = self._started_components()
        step = None if version == "serving" else self._resolve(version)
        servable = components.manager.servable(step)
        self._check_inputs(servable.slot, inputs)
        architecture = servable.slot.architecture
        components.engine.submit(
            inputs,
            borrow=partial(borrow_checked, components.manager.borrow, step, inputs, servable.step, architecture),
            key=(step, architecture),
            deadline=deadline,
            token=token,
            sink=sink,
            dispatch=dispatch,
        )

    def check_admission(self, deadline: float | None) -> None:
        """Raise as `predict_for` does for overload, the deadline or shutdown, independent of the request.

        An admission check before the request is parsed.
        """
        self._started_components().engine.check_admission(deadline)

    def check_forms(self, forms: Mapping[str, ArrayForm], *, version: Version = "serving") -> None:
        """Raise as `predict_for` does for the names, dtypes and shapes of the inputs, the version, and overload.

        A check before the arrays are built.
        """
        from understudy.evaluator.model.inputs import check_forms

        components = self._started_components()
        step = None if version == "serving" else self._resolve(version)
        examples = check_forms(forms, components.manager.servable(step).slot.signature.inputs)
        components.engine.check_admission(None, examples=examples)

    @property
    def max_batch_size(self) -> int:
        """The most examples of one call on each replica at present."""
        return self._components.engine.settings.max_batch_size // self.replicas

    def dispatch(self) -> None:
        """Run the queued requests if the devices are idle."""
        self._components.engine.dispatch()

    def open_stream(
        self,
        *,
        version: Version = "serving",
        metrics: Sequence[MetricSpec] = (),
        breakdown: BreakdownOptions | None = None,
        deadline: float | None = None,
    ) -> Future[EvaluationStream]:
        """Open a stream of batches to score on one version, which is loaded on demand if necessary.

        With ``breakdown``, slices and intervals are computed, too. The caller must close the stream. The future's
        exception may be InvalidInputError (no such metric), NotEvaluableError, OverloadedError (the deadline passed
        while the request waited for a slot) or LoadError.

        Raises:
            InvalidInputError: A slice is by quantiles, which a stream does not have before its end.
            NotReadyError: Nothing is serving yet, and the version is ``serving``.
            VersionNotFoundError: There is no such checkpoint.
            DrainingError: The evaluator is being closed.
        """
        on_demand = self._started_components().on_demand
        return on_demand.open_stream(self._resolve(version), metrics, breakdown=breakdown, deadline=deadline)

    def score_dataset(
        self,
        dataset: str,
        *,
        version: Version = "serving",
        deadline: float | None = None,
        progress: Progress | None = None,
        record: bool = True,
        rescore: bool = False,
    ) -> Future[EvaluationRecord]:
        """Score one version on a dataset known to the evaluator, and record the result if ``record`` says so.

        If the ledger already holds a result for the same checkpoint and data, it is returned without computing; with
        ``rescore`` only if it was scored in the same way, with the same metrics, slices and resampling. A
        result that is not recorded has the sequence number 0, and decides nothing. The future's exceptions are those
        of `open_stream`, and DeadlineExceededError.

        Raises:
            VersionNotFoundError: There is no such checkpoint.
            DatasetNotFoundError: There is no such dataset.
        """
        on_demand, data = self._started_components().on_demand, self.dataset(dataset)
        return on_demand.score(
            self._resolve(version), data, deadline=deadline, progress=progress, record=record, rescore=rescore
        )

    def compare(
        self,
        versions: Sequence[Version],
        batches: ReplayableBatches | str,
        *,
        metrics: Sequence[MetricSpec] = (),
        bootstrap: BootstrapOptions | None = None,
        deadline: float | None = None,
    ) -> Future[Comparison]:
        """Score versions on the same batches and compare them with the first.

        Loaded versions are scored side by side. Then the others are loaded one after another into a slot for on-demand
        versions and scored on the same batches. The future's exceptions are those of `open_stream` and of the batches.
        The ledger records nothing.

        Args:
            versions: 2 to 16 versions.
            batches: The batches, which a thread of the evaluator reads, or the name of a dataset of the evaluator.
            metrics: The metrics to compute; by default the compiled ones.
            bootstrap: Options of the confidence intervals.
            deadline: When the result is no longer wanted.

        Raises:
            InvalidInputError: There are too few or too many versions.
            NotReadyError: Nothing is serving yet, and a version is ``serving``.
            VersionNotFoundError: There is no such checkpoint.
            DatasetNotFoundError: There is no such dataset.
            DrainingError: The evaluator is being closed.
        """
        return self._started_components().on_demand.compare(
            [self._resolve(version) for version in versions],
            self._batches_of(batches) if isinstance(batches, str) else batches,
            metrics=metrics,
            bootstrap=bootstrap,
            deadline=deadline,
        )

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
            EvaluatorError: As `tables` and `understudy.evaluator.evaluation.example_queries.ExampleQueries.examples`.
        """
        components = self._started_components()
        step = self._resolve(version)
        return components.example_queries.examples(
            kind,
            step,
            self._scored_dataset(dataset),
            baseline_step=None if kind == "hardest" else self._resolve(baseline),
            limit=limit,
            signature=self._slot_like(step).signature,
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

    def pin(self, version: Version, *, deadline: float | None = None) -> Future[ServingChange]:
        """Serve a version, loading it if necessary, and keep serving it until `unpin`, also after a restart."""
        return self._started_components().controller.pin(self._resolve(version), deadline=deadline)

    def unpin(self, *, deadline: float | None = None) -> Future[ServingChange]:
        """Remove the pin and follow the version policy again. Without a pin, nothing changes."""
        return self._started_components().controller.unpin(deadline=deadline)

    def roll_back(self, *, deadline: float | None = None) -> Future[ServingChange]:
        """Serve the previous serving version again, and pin it.

        Raises:
            VersionNotFoundError: Nothing was serving before.
        """
        return self._started_components().controller.roll_back(deadline=deadline)

    def metadata(self, version: Version = "serving") -> ModelDescription:
        """Describe one loaded version.

        Raises:
            NotReadyError: Nothing is serving yet.
            VersionNotFoundError: The version does not exist or is not loaded.
        """
        components = self._started_components()
        with components.manager.borrow(None if version == "serving" else self._resolve(version)) as handle:
            return ModelDescription(
                step=handle.step,
                signature=handle.slot.signature,
                replicas=components.replicas,
                devices=components.devices,
                datasets=tuple(self._datasets),
                notes=(*handle.slot.notes, handle.slot.predict_note),
            )

    def status(self) -> list[VersionStatus]:
        """Return the state of every version discovered, newest first."""
        return self._components.version_monitor.statuses(serving=self.serving_step)

    def is_caught_up(self, since: float) -> bool:
        """Return whether a poll after ``since``, on the `time.monotonic` clock, found nothing left to evaluate."""
        return self._components.watcher.is_caught_up(since)

    @property
    def last_sequence(self) -> int:
        """The sequence number of the newest entry of the ledger, 0 if there is none."""
        return self._components.records.ledger.last_sequence

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return the checkpoints that can be requested, by ascending step."""
        return self._components.store.checkpoints()

    @property
    def decision(self) -> ServingDecision | None:
        """Which checkpoint is serving, with the number of the decision, also of an earlier process; None at first."""
        return self._components.decisions.current

    def on_decision(self, listener: OnDecision) -> None:
        """Call back with each later decision, on a thread of the evaluator; it must be quick and must not raise."""
        self._components.decisions.listen(listener)

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
    def ledger(self) -> Ledger:
        """The ledger of every evaluation. Open from `start` to `close`."""
        return self._components.records.ledger

    def life_of(self, step: int) -> list[LifeRecord]:
        """Return what happened to the checkpoints of one step, by ascending time, besides what the ledger records."""
        return self._components.records.life.of_step(step)

    @property
    def outbox(self) -> Outbox | None:
        """The events that wait to be delivered; None without subscriptions. Open from `start` to `close`."""
        return self._components.records.outbox

    @property
    def serving_step(self) -> int | None:
        """The serving step, or None before the first."""
        serving = self._serving()
        return None if serving is None else serving.step

    @property
    def latest_step(self) -> int | None:
        """The newest step that was ever loaded, or None before the first."""
        return self._components.version_monitor.latest_step

    @property
    def best_step(self) -> int | None:
        """The step with the best value of the monitored metric, or None before the first result."""
        return self._components.records.ranking.best()

    @property
    def monitor(self) -> Monitor | None:
        """The metric that ranks the checkpoints; None if there is no dataset to score."""
        return self._components.records.ranking.monitor

    def monitored_value(self, step: int) -> float | None:
        """Return the monitored value of a step, or None if it has none."""
        return self._components.records.ranking.value(step)

    @property
    def pinned_step(self) -> int | None:
        """The step pinned at run time, or None."""
        return self._components.controller.pinned_step

    @property
    def previous_step(self) -> int | None:
        """The step that `roll_back` serves, or None if nothing was serving before."""
        return self._components.manager.predecessor_step

    def step_without_pin(self) -> int | None:
        """Return the step that `unpin` serves, or None if that keeps the serving one."""
        return self._components.controller.target_without_pin()

    @property
    def dataset_names(self) -> tuple[str, ...]:
        """The names of the datasets that are known to the evaluator, in their order."""
        return tuple(self._datasets)

    @property
    def replicas(self) -> int:
        """The number of replicas that a batch is split over."""
        return self._components.replicas

    def checkpoint_age_seconds(self) -> float | None:
        """Return the age of the serving checkpoint, or None if there is none."""
        serving = self._serving()
        return None if serving is None else max(0.0, time.time() - serving.created_at)

    def checkpoints_waiting(self) -> int:
        """Return how many checkpoints wait to be scored or are being scored."""
        return len(self._components.backlog)

    def device_memory(self) -> Mapping[tuple[str, MemoryKind], int]:
        """Return bytes by device and kind (``current``, ``peak``); ``CPU`` stands for the whole process."""
        from understudy.evaluator.model.devices import device_memory

        return device_memory()

    def gpu_readings(self) -> Mapping[str, GpuReading]:
        """Return NVML's readings of each GPU in use, by name; empty without GPUs or NVML."""
        from understudy.evaluator.model.devices import gpu_readings

        return gpu_readings()

    def wait_ready(self, timeout_seconds: float) -> bool:
        """Wait until a servable is serving; return False on timeout."""
        return self._ready.wait(timeout_seconds)

    def on_ready(self, callback: Callable[[int], None]) -> None:
        """Call back once, with the step, when the first servable is serving; at once if one already is.

        The callback runs on a thread of the evaluator or on the calling thread, must be quick and must not raise.
        """
        self._ready.call(callback)

    def on_device_state(self, listener: DeviceListener) -> None:
        """Call back when the devices begin to fail, when they recover, and when they fail permanently.

        Replaces the previous listener. It runs on a thread of the evaluator, must be quick and must not raise.
        """
        self._device_listener = listener

    def try_devices(self) -> Future[None]:
        """Queue a run of the serving version on generated data; the listener is called if the device state changes.

        The future's exception is the error of the run, or NotReadyError.

        Raises:
            OverloadedError: Too many examples wait.
            DrainingError: The evaluator is being closed.
        """
        components = self._started_components()

        def work() -> None:
            with components.manager.borrow(None) as handle:
                handle.slot.try_out()

        return components.engine.run(work, examples=1)

    def _disown(self) -> None:
        self._owns = False
        self._lock.release()

    def _tell_device_state(self, state: DeviceState, error: str) -> None:
        self._device_listener(state, error)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _components(self) -> Components:
        if self._running is None:
            raise NotReadyError("the evaluator was not started")
        return self._running

    def _started_components(self) -> Components:
        if self._closing:
            raise DrainingError("the evaluator is shutting down and takes no new work; ask another one")
        return self._components

    def dataset(self, name: str) -> EvaluationDataset:
        """Return a dataset that is known to the evaluator; raise DatasetNotFoundError if there is none of the name."""
        if name not in self._datasets:
            raise DatasetNotFoundError(f"there is no dataset {name!r}; there are {list(self._datasets)}")
        return self._datasets[name]

    def _scored_dataset(self, name: str) -> str:
        """Return the name of a dataset that exists or existed; that of the first one if it is empty."""
        if not name and self._datasets:
            return next(iter(self._datasets))
        if name not in self._datasets and not self.ledger.scored(name):
            raise DatasetNotFoundError(f"there is no dataset {name!r}; there are {list(self._datasets)}")
        return name

    def _slot_like(self, step: int) -> ModelSlot:
        """Return the slot of a step if it is loaded, else that of the serving version."""
        manager = self._components.manager
        try:
            return manager.servable(step).slot
        except VersionNotFoundError:
            return manager.servable(None).slot

    def _batches_of(self, dataset: str) -> ReplayableBatches:
        from understudy.evaluator.evaluation.comparison import DatasetBatches

        return DatasetBatches(self.dataset(dataset), batch_size=self._settings.evaluation_batch_size)

    def _serving(self) -> Servable | None:
        return self._components.manager.serving

    def _resolve(self, version: Version) -> int:
        """Return the step that a version currently stands for."""
        return version if isinstance(version, int) else self._components.controller.resolve(version)

    def _check_inputs(self, slot: ModelSlot, inputs: Arrays) -> None:
        """Check the inputs against the signature, which later checkpoints in the slot share."""
        try:
            slot.check_inputs(inputs)
        except InvalidInputError:
            self._observer.rejected("invalid")
            raise

    def _remaining_seconds(self) -> float:
        """Return how long a component may take to close."""
        return min(max(0.0, self._close_by - time.monotonic()), CLOSE_SECONDS)
