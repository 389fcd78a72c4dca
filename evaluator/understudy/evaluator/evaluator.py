"""The evaluator: follows checkpoints, scores them, serves one, and answers predictions and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Self

from understudy.evaluator.observer import Observer
from understudy.evaluator.settings import EvaluatorSettings
from understudy.evaluator.types import (
    Arrays,
    CheckpointInfo,
    EvaluationRecord,
    MetricSpec,
    ModelDescription,
    Prediction,
    StageChange,
    Version,
    VersionStatus,
)

if TYPE_CHECKING:
    from understudy.checkpoints.source import CheckpointSource
    from understudy.evaluator.datasets import EvaluationDataset
    from understudy.evaluator.records.ledger import Ledger
    from understudy.evaluator.stream import EvaluationStream

Progress = Callable[[int, int | None], None]
"""Told the rows scored so far and the rows of the dataset (None if unknown), on a thread of the evaluator."""


class Evaluator:
    """Scores and serves the checkpoints of one source. Thread-safe; a context manager that starts and closes it.

    Methods that return a `concurrent.futures.Future` do not block: what is wrong with the arguments is raised at once,
    what goes wrong later is the future's exception. A ``deadline`` is a value of `time.monotonic`, or None for none.
    Cancelling a future before its work has begun takes the work back.

    Args:
        settings: What the operator chose.
        source: Where checkpoints come from.
        datasets: What each checkpoint is scored on, in this order; names are unique.
        observer: Told of batches, loads and records as they happen.
    """

    def __init__(
        self,
        settings: EvaluatorSettings,
        *,
        source: CheckpointSource,
        datasets: Sequence[EvaluationDataset] = (),
        observer: Observer,
    ) -> None: ...

    def start(self) -> None:
        """Lock the state folder, open the ledger, build the replicas and begin to follow the source.

        Raises:
            ConfigurationError: The monitored metric or a device does not exist.
            LedgerError: The ledger cannot be read.
            understudy.checkpoints.errors.LockedError: Another evaluator uses the state folder.
        """

    def close(self, timeout_seconds: float = 30.0) -> None:
        """Refuse new work, finish what waits, end every thread and give the state folder free. Idempotent."""

    def predict(
        self, inputs: Arrays, *, version: Version = "serving", deadline: float | None = None
    ) -> Future[Prediction]:
        """Run one loaded version on rows ``[rows, ...]`` by input name, merged into batches with other requests.

        Raises:
            InvalidInputError: The inputs do not fit the model's signature, or are more rows than the queue holds.
            NotReadyError: Nothing is on stage yet.
            VersionNotFoundError: The version does not exist or is not loaded; also as the future's exception.
            OverloadedError: The queue is full.
            DrainingError: The evaluator is being closed.

        The future's exception may also be DeadlineExceededError.
        """
        raise NotImplementedError

    def open_stream(
        self, *, version: Version = "serving", metrics: Sequence[MetricSpec] = (), deadline: float | None = None
    ) -> Future[EvaluationStream]:
        """Open a stream of batches to be scored on one version, which is loaded as a guest if need be.

        The stream must be closed by the caller. The future's exception may be InvalidInputError (no such metric),
        NotEvaluableError, OverloadedError (the deadline passed while waiting in line for a slot) or LoadError.

        Raises:
            NotReadyError: Nothing is on stage yet, and the version is ``serving``.
            VersionNotFoundError: There is no such checkpoint.
            DrainingError: The evaluator is being closed.
        """
        raise NotImplementedError

    def score_dataset(
        self,
        dataset: str,
        *,
        version: Version = "serving",
        deadline: float | None = None,
        progress: Progress | None = None,
    ) -> Future[EvaluationRecord]:
        """Score one version on a dataset known to the evaluator, and record the result.

        A result that the ledger already holds for the same checkpoint and data is returned without computing. The
        future's exceptions are those of `open_stream`, and DeadlineExceededError.

        Raises:
            VersionNotFoundError: There is no such dataset or checkpoint.
        """
        raise NotImplementedError

    def pin(self, version: Version, *, deadline: float | None = None) -> Future[StageChange]:
        """Put a version on stage, loading it if need be, and keep it there until `unpin`, also after a restart."""
        raise NotImplementedError

    def unpin(self, *, deadline: float | None = None) -> Future[StageChange]:
        """Take the pin back and follow the serving policy again. Without a pin, nothing changes."""
        raise NotImplementedError

    def roll_back(self, *, deadline: float | None = None) -> Future[StageChange]:
        """Put the version that was on stage before the present one there again, and pin it.

        Raises:
            VersionNotFoundError: Nothing was on stage before.
        """
        raise NotImplementedError

    def metadata(self, version: Version = "serving") -> ModelDescription:
        """Describe one loaded version.

        Raises:
            NotReadyError: Nothing is on stage yet.
            VersionNotFoundError: The version does not exist or is not loaded.
        """
        raise NotImplementedError

    def status(self) -> list[VersionStatus]:
        """Return the state of every version taken up, newest first."""
        raise NotImplementedError

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return the checkpoints that can be asked for, by ascending step."""
        raise NotImplementedError

    @property
    def ledger(self) -> Ledger:
        """The record of every evaluation. Open from `start` to `close`."""
        raise NotImplementedError

    @property
    def serving_step(self) -> int | None:
        """The step on stage, or None before the first."""
        raise NotImplementedError

    @property
    def latest_step(self) -> int | None:
        """The newest step that has been loaded, or None before the first."""
        raise NotImplementedError

    @property
    def best_step(self) -> int | None:
        """The step with the best value of the monitored metric, or None before the first result."""
        raise NotImplementedError

    @property
    def pinned_step(self) -> int | None:
        """The step pinned at run time, or None."""
        raise NotImplementedError

    @property
    def replicas(self) -> int:
        """The number of replicas that a batch is split over."""
        raise NotImplementedError

    def checkpoint_age_seconds(self) -> float | None:
        """Return how long ago the checkpoint on stage was written, or None if none is."""
        raise NotImplementedError

    def device_memory(self) -> Mapping[tuple[str, str], int]:
        """Return bytes by device and kind (``current``, ``peak``); empty where the devices do not tell."""
        raise NotImplementedError

    def wait_ready(self, timeout_seconds: float) -> bool:
        """Wait until a servable is on stage; return whether one is."""
        raise NotImplementedError

    def on_ready(self, callback: Callable[[int], None]) -> None:
        """Call back once with the step when the first servable is on stage; at once if one is.

        The callback runs on a thread of the evaluator, must be quick and must not raise.
        """

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
