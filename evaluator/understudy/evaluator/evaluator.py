"""The evaluator: watches checkpoints, scores them, serves one, and answers predictions and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from understudy.checkpoints.signature import TensorSpec
from understudy.checkpoints.signing import AcceptedKeys
from understudy.checkpoints.source import CheckpointSource
from understudy.evaluator.assembly.evaluator_inputs import EvaluatorInputs
from understudy.evaluator.datasets.dataset import EvaluationDataset
from understudy.evaluator.evaluator_errors import ConfigurationError, InvalidInputError, ModelChangedError
from understudy.evaluator.evaluator_state import EvaluatorState
from understudy.evaluator.observer import Observer
from understudy.evaluator.records.outbox import Subscription
from understudy.evaluator.serving.servable import Handle
from understudy.evaluator.settings import EvaluatorSettings
from understudy.evaluator.types import (
    ArrayForm,
    Arrays,
    CallerKey,
    EvaluationRecord,
    FutureSink,
    MetricSpec,
    ModelDescription,
    Prediction,
    Progress,
    ResultSink,
    ServingChange,
    Version,
    this_process,
)

if TYPE_CHECKING:
    from understudy.evaluator.evaluation.breakdown import BreakdownOptions
    from understudy.evaluator.evaluation.comparison import BootstrapOptions, Comparison, ReplayableBatches
    from understudy.evaluator.evaluation.evaluation_stream import EvaluationStream
    from understudy.evaluator.evaluation.replay_stream import ReplayStream
    from understudy.evaluator.serving.following import NetworkFollowing
    from understudy.evaluator.sharding.cluster_scoring import Cluster
    from understudy.evaluator.tuning.tuning_file import TuningStart

_FUTURES = FutureSink()

_Token = TypeVar("_Token")


class Evaluator(EvaluatorState):
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
        cluster: What computes the evaluations of checkpoints; None for this machine.
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
        cluster: Cluster | None = None,
        tuning: TuningStart | None = None,
        observer: Observer,
        subscriptions: Sequence[Subscription] = (),
    ) -> None:
        if settings.require_signature and accepted is None:
            raise ConfigurationError("require_signature is set, and no keys are given")
        super().__init__(
            EvaluatorInputs(
                settings=settings,
                source=source,
                datasets=tuple(datasets),
                build_model=build_model,
                accepted=accepted,
                following=following,
                cluster=cluster,
                tuning=tuning,
                observer=observer,
                subscriptions=tuple(subscriptions),
            )
        )

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
        caller: CallerKey = this_process,
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
            caller: Who asks. If the queue is full, those that have little waiting are still admitted.
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
        components = self._open or self._started_components()
        step = None if version == "serving" else self._resolve(version)
        servable = components.manager.servable(step)
        try:
            servable.slot.check_inputs(inputs)
        except InvalidInputError:
            self._inputs.observer.rejected("invalid")
            raise
        architecture = servable.slot.architecture
        components.engine.submit(
            inputs,
            borrow=partial(_borrow_checked, components.manager.borrow, step, inputs, servable.step, architecture),
            key=(step, architecture),
            deadline=deadline,
            token=token,
            sink=sink,
            caller=caller,
            dispatch=dispatch,
        )

    def check_admission(self, deadline: float | None, *, caller: CallerKey) -> None:
        """Raise as `predict_for` does for overload, the deadline or shutdown, independent of the request.

        An admission check before the request is parsed.
        """
        (self._open or self._started_components()).engine.check_admission(deadline, caller=caller)

    def check_forms(self, forms: Mapping[str, ArrayForm], *, version: Version = "serving") -> None:
        """Raise as `predict_for` does for the names, dtypes and shapes of the inputs, the version, and overload.

        A check before the arrays are built.
        """
        components = self._open or self._started_components()
        step = None if version == "serving" else self._resolve(version)
        examples = components.manager.servable(step).slot.check_forms(forms)
        components.engine.check_admission(None, examples=examples)

    @property
    def max_batch_size(self) -> int:
        """The most examples of one call on each replica at present."""
        return self._components.engine.settings.max_batch_size // self.replicas

    def dispatch(self) -> None:
        """Run the queued requests if the devices are idle."""
        (self._open or self._components).engine.dispatch()

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

    def open_replay(self, *, version: Version = "serving", deadline: float | None = None) -> Future[ReplayStream]:
        """Open a stream of batches for one version to answer, which is loaded on demand if necessary.

        The caller must close the stream. Errors are as in `open_stream`.
        """
        return self._started_components().on_demand.open_replay(self._resolve(version), deadline=deadline)

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
        progress: Progress | None = None,
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
            progress: Called after each batch, with the examples that all versions together have scored, and of how
                many if that is known.

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
            progress=progress,
        )

    def pin(self, version: Version, *, deadline: float | None = None) -> Future[ServingChange]:
        """Serve a version, loading it if necessary, and keep serving it until `unpin`, also after a restart."""
        return self._started_components().controller.pin(self._resolve(version), deadline=deadline)

    def unpin(self, *, deadline: float | None = None) -> Future[ServingChange]:
        """Remove the pin and follow the version policy again. Without a pin, nothing changes."""
        return self._started_components().controller.unpin(deadline=deadline)

    def roll_back(self, *, deadline: float | None = None) -> Future[ServingChange]:
        """Serve the version that served before, and pin it; another rollback goes further back.

        Raises:
            NoEarlierVersionError: There is none.
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
                output_tasks=handle.slot.output_tasks,
            )

    def _batches_of(self, dataset: str) -> ReplayableBatches:
        from understudy.evaluator.evaluation.comparison import DatasetBatches

        return DatasetBatches(self.dataset(dataset), batch_size=self._inputs.settings.evaluation_batch_size)


def _borrow_checked(
    borrow: Callable[[int | None], Handle],
    step: int | None,
    inputs: Arrays,
    checked_step: int,
    checked_architecture: str,
) -> Handle:
    """Borrow a loaded servable, checking the inputs again if it is of another architecture. Does not block.

    Args:
        borrow: Borrows the servable of a step.
        step: The step; None stands for the serving version.
        inputs: Every input by name, ``[examples, ...]``.
        checked_step: The step of the servable that the inputs were checked against.
        checked_architecture: The architecture of that servable.

    Raises:
        ModelChangedError: The inputs do not fit it.
        NotReadyError: Nothing is serving yet.
        VersionNotFoundError: The step is not loaded.
    """
    handle = borrow(step)
    if handle.slot.architecture == checked_architecture:
        return handle
    try:
        handle.slot.check_inputs(inputs)
    except InvalidInputError as error:
        takes = ", ".join(map(_described, handle.slot.signature.inputs))
        handle.release()
        raise ModelChangedError(
            f"the serving model changed from step {checked_step} to step {handle.step} while the request waited, and "
            f"now takes {takes}: {error}"
        ) from error
    except BaseException:
        handle.release()
        raise
    return handle


def _described(spec: TensorSpec) -> str:
    lengths = ["examples", *("any" if length is None else str(length) for length in spec.shape[1:])]
    return f"{spec.name!r} {spec.dtype} [{', '.join(lengths)}]"
