"""The chief's own tasks: locking the run folder, the journal, summaries, a profile, and checkpoints.

A checkpoint is a regular model that loads anywhere, and the exact state for resuming.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import keras

from understudy.checkpoints import CheckpointPublisher, DirectoryLock, LockHeldError, RunDir, TrainingJournal
from understudy.checkpoints.keras_signature import signature_of
from understudy.checkpoints.layout import MODEL_FILE
from understudy.checkpoints.training import TrainingProgress
from understudy.trainer.progress import ProgressUpdate
from understudy.trainer.replica_state import average
from understudy.trainer.settings import TrainSettings
from understudy.trainer.snapshot import Snapshot, write_snapshot
from understudy.trainer.tensorboard_files import StepProfiler, TrainingSummaries
from understudy.trainer.trainer_errors import MENDED_BY_RESTART, PublishError

_LOCK_POLL_SECONDS = 0.5

_log = logging.getLogger(__name__)


class Chief:
    """Owns the run folder during the whole training, and signs its checkpoints. A context manager for one thread.

    Creating it raises KeyFileError if the key for signing cannot be used.

    Entering raises LockHeldError if another trainer uses the folder. Leaving writes how training ended. Both raise
    PublishError if the folder is not writable; leaving with an exception does not, since that one says more.

    Args:
        settings: The settings of the training.
        lock_seconds: How long entering waits for another trainer to leave the folder: shared storage holds the lock of
            a machine that was lost for a while.
        while_waiting: Called periodically meanwhile; may raise to end the wait.
    """

    def __init__(
        self, settings: TrainSettings, *, lock_seconds: float = 0.0, while_waiting: Callable[[], None] = lambda: None
    ) -> None:
        self._settings = settings
        self._lock_seconds = lock_seconds
        self._while_waiting = while_waiting
        self._signer = settings.signer()
        self._run_dir = RunDir(settings.run_dir)
        self._journal = TrainingJournal(self._run_dir, mended_by_restart=MENDED_BY_RESTART)
        self._summaries: TrainingSummaries | None = None
        self._profiler: StepProfiler | None = None
        self._publisher: ModelPublisher | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            try:
                stack.callback(self._locked().release)
                stack.enter_context(self._journal)
            except OSError as error:
                raise PublishError(f"{self._settings.run_dir} cannot be written to: {error}") from error
            self._stack = stack.pop_all()
        return self

    def _locked(self) -> DirectoryLock:
        lock = DirectoryLock(self._settings.run_dir, alternative="give another folder with --run-dir")
        deadline = time.monotonic() + self._lock_seconds
        logged = False
        while True:
            try:
                lock.acquire()
            except LockHeldError as error:
                if time.monotonic() >= deadline:
                    raise
                if not logged:
                    _log.warning("%s; waiting up to %g s for its end", error, self._lock_seconds)
                logged = True
            else:
                return lock
            self._while_waiting()
            time.sleep(_LOCK_POLL_SECONDS)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._stack.__exit__(exc_type, exc, traceback)
        except OSError as error:
            how = f"how training ended could not be written to {self._run_dir.training_json}: {error}"
            if exc is None:
                raise PublishError(how) from error
            _log.warning("%s", how)

    def prepare(self, model: keras.Model, *, first_step: int) -> None:
        """Prepare for publishing.

        Args:
            model: The model to publish with a snapshot's values; built outside the strategy's scope.
            first_step: Steps done by earlier starts.
        """
        self._journal.record_step(first_step)
        publisher = CheckpointPublisher(self._run_dir, keep=self._settings.keep_checkpoints, signer=self._signer)
        self._publisher = ModelPublisher(publisher, model)
        if self._settings.tensorboard:
            # Not earlier: it uses TensorFlow, which fixes its devices on first use.
            self._summaries = self._stack.enter_context(TrainingSummaries(self._settings.run_dir))
        steps = self._settings.profile_range
        if steps is not None:
            profiler = StepProfiler(self._settings.run_dir, steps, first_step=first_step)
            self._profiler = self._stack.enter_context(profiler)

    def advanced(self, update: ProgressUpdate) -> None:
        """Record the progress of the training."""
        self._journal.record_step(
            update.step,
            TrainingProgress(
                steps=update.steps,
                metrics=update.metrics,
                examples_per_second=update.examples_per_second or None,
                input_wait_share=update.input_wait_share,
                remaining_seconds=update.remaining_seconds,
            ),
        )
        if self._summaries is not None:
            self._summaries.write(update)
        if self._profiler is not None:
            self._profiler.reached(update.step)

    def publish(self, snapshot: Snapshot, update: ProgressUpdate, *, final: bool) -> None:
        """Publish a checkpoint. When this returns it is committed.

        Raises:
            CheckpointError: From the publisher.
            PublishError: Writing failed, for example on a full disk.
        """
        if self._publisher is None:
            raise RuntimeError("call prepare() before publish()")
        try:
            self._publisher.publish(
                snapshot,
                epoch=int(update.epoch),
                final=final,
                metrics=update.metrics,
            )
        except OSError as error:
            raise PublishError(
                f"step {snapshot.step} could not be published: {error}; earlier checkpoints remain; once there "
                "is space, start again to resume from the newest",
            ) from error


class ModelPublisher:
    """Publishes snapshots as checkpoints.

    Args:
        publisher: Writes into the run folder.
        model: A copy of the trained model, built outside any strategy's scope. The publisher owns it and overwrites its
            variables with every checkpoint.
    """

    def __init__(self, publisher: CheckpointPublisher, model: keras.Model) -> None:
        self._publisher = publisher
        self._model = model
        self._signature = signature_of(model)

    def publish(self, snapshot: Snapshot, *, epoch: int, final: bool, metrics: Mapping[str, float]) -> None:
        """Publish one checkpoint. When this returns it is committed.

        Raises:
            CheckpointError: From the publisher.
            OSError: Writing failed, for example on a full disk. Earlier checkpoints remain.
        """
        self._assign(snapshot)

        def write(folder: Path) -> None:
            self._model.save(folder / MODEL_FILE)
            write_snapshot(folder, snapshot)

        self._publisher.publish(
            snapshot.step,
            write,
            epoch=epoch,
            final=final,
            metrics=metrics,
            signature=self._signature,
        )

    def _assign(self, snapshot: Snapshot) -> None:
        for variable, value in zip(self._model.trainable_variables, snapshot.trained, strict=True):
            variable.assign(value)
        for variable, value in zip(self._model.optimizer.variables, snapshot.optimizer, strict=True):
            variable.assign(value)
        for variable, values in zip(self._model.non_trainable_variables, snapshot.replica, strict=True):
            variable.assign(average(variable, values))
