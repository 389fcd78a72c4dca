"""Keras callbacks for a user's own ``fit``, and a function for custom training loops."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from understudy.checkpoints import CheckpointPublisher, DirectoryLock, Manifest, RunDir, TrainingJournal
from understudy.checkpoints.keras_signature import signature_of
from understudy.checkpoints.layout import MODEL_FILE
from understudy.checkpoints.signing import Signer, SigningKey
from understudy.checkpoints.signing import run_name as name_of_run
from understudy.checkpoints.training import TrainingProgress
from understudy.trainer.model import has_variables
from understudy.trainer.replica_state import ReplicaState, average
from understudy.trainer.stopping import ResultsWatch, StopMode, stop_rule
from understudy.trainer.trainer_errors import ModelError, ResumeError, StrategyError


def publish_model(
    model: keras.Model,
    run_dir: Path | str,
    *,
    step: int,
    epoch: int | None = None,
    metrics: Mapping[str, float] | None = None,
    final: bool = False,
    keep: int = 5,
    sign_key: Path | str | None = None,
    run_name: str | None = None,
) -> Manifest:
    """Publish a model as a committed checkpoint. When this returns, an evaluator can read the whole checkpoint.

    Under MirroredStrategy the published model holds the mean of each replica's own state, such as BatchNorm's
    statistics; the model itself is unchanged. Call it on the training thread, between two steps.

    Args:
        model: Built; compiled, if the evaluator is to score it with its own loss and metrics.
        run_dir: The run folder; created if missing.
        step: Training steps done.
        epoch: Epochs completed.
        metrics: Training metrics by name.
        final: Whether it is the last checkpoint of the training.
        keep: How many of the newest checkpoints to keep.
        sign_key: A private key of ``understudy keygen`` to sign the checkpoint with.
        run_name: The name of the run to sign it for; by default that of the run folder.

    Raises:
        KeyFileError: The private key cannot be used.
        ModelError: The model is not built.
        StrategyError: Several workers train the model, or it trains asynchronously; use `understudy.trainer.train`.
        AlreadyPublishedError: This step is already published.
        ResumeError: A later step is already published: the folder is that of another training.
        OSError: Writing failed, for example on a full disk. Earlier checkpoints remain.
    """
    if not has_variables(model):
        raise ModelError(
            "the model has no variables yet; give it an Input, or call it on an example, before publishing"
        )
    _check_newest(RunDir(Path(run_dir)), step, f"this is step {step}")
    publisher = CheckpointPublisher(RunDir(Path(run_dir)), keep=keep, signer=_signer(sign_key, run_name, Path(run_dir)))

    def write(folder: Path) -> None:
        with _averaged(model):
            model.save(folder / MODEL_FILE)

    return publisher.publish(
        step,
        write,
        epoch=epoch,
        final=final,
        metrics={name: float(value) for name, value in (metrics or {}).items()},
        signature=signature_of(model),
    )


def newest_model(run_dir: Path | str) -> Path | None:
    """Return the model of the newest checkpoint, for `keras.models.load_model`; None if there is no checkpoint.

    A script that is started again goes on from it.

    Args:
        run_dir: The run folder; it need not exist.
    """
    run = RunDir(Path(run_dir))
    steps = run.committed_steps()
    return run.checkpoint(steps[-1]) / MODEL_FILE if steps else None


class PublishCheckpoint(keras.callbacks.Callback):
    """Publishes committed checkpoints from ``fit``, on one device or under MirroredStrategy, and writes the journal.

    The step is the optimizer's. Put this callback last, so that it sees whether another one ends training. If training
    ends without an exception, the last step is always published.

    Args:
        run_dir: The run folder. This callback owns it from the beginning of ``fit`` to its end.
        save_freq: ``"epoch"``, or a number of steps.
        keep: How many of the newest checkpoints to keep.
        sign_key: A private key of ``understudy keygen`` to sign the checkpoints with.
        run_name: The name of the run to sign them for; by default that of the run folder.

    Raises:
        KeyFileError: The private key cannot be used.
        ValueError: ``save_freq`` is neither.
        LockHeldError: From ``fit``: another training uses the run folder.
        ResumeError: From ``fit``: the run folder has checkpoints of later steps, those of another training.
        StrategyError: From ``fit``: Keras' ``fit`` does not train correctly under the model's strategy.
    """

    def __init__(
        self,
        run_dir: Path | str,
        *,
        save_freq: int | str = "epoch",
        keep: int = 5,
        sign_key: Path | str | None = None,
        run_name: str | None = None,
    ) -> None:
        super().__init__()
        if save_freq != "epoch" and not (isinstance(save_freq, int) and save_freq > 0):
            raise ValueError(f"save_freq is 'epoch' or a number of steps, not {save_freq!r}")
        self._run_dir = RunDir(Path(run_dir))
        self._save_freq = save_freq
        self._keep = keep
        _signer(sign_key, run_name, self._run_dir.root)  # An unusable key is found before the training.
        self._sign_key = sign_key
        self._run_name = run_name
        self._published = 0
        self._epoch = 0
        self._logs: Mapping[str, Any] = {}
        self._journal: TrainingJournal | None = None
        self._end: weakref.finalize[..., Any] | None = None

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Lock the run folder, and record that training is running."""
        del logs
        _check_strategy(self.model)
        self._end_as_failed()
        self._journal = TrainingJournal(self._run_dir)
        self._published = self._step
        with ExitStack() as stack:
            stack.enter_context(DirectoryLock(self._run_dir.root))
            _check_newest(self._run_dir, self._step, f"this training begins at step {self._step}")
            stack.enter_context(self._journal)
            self._journal.record_step(self._step)
            # Keras does not call on_train_end when fit raises; this finalizer runs at the latest when Python exits.
            self._end = weakref.finalize(self, _fail, stack.pop_all())

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Publish if ``save_freq`` is a number of steps that is reached."""
        del batch
        step = self._step
        self._logs = logs or {}
        if self._journal is not None:
            self._journal.record_step(step, TrainingProgress(metrics=self._training_metrics()))
        if isinstance(self._save_freq, int) and step // self._save_freq > self._published // self._save_freq:
            self._publish(final=False)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Publish if ``save_freq`` is ``"epoch"``."""
        self._epoch = epoch + 1
        self._logs = logs or {}
        is_last = self._epoch == (self.params or {}).get("epochs") or self.model.stop_training
        if self._save_freq == "epoch":
            self._publish(final=bool(is_last))

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Publish the last step unless it is published, and record that training has finished."""
        self._logs = logs or self._logs
        self._publish(final=True)
        if self._end is not None and (detached := self._end.detach()) is not None:
            _, _, (stack,), _ = detached
            stack.close()

    @property
    def _step(self) -> int:
        return int(self.model.optimizer.iterations.numpy())

    def _publish(self, *, final: bool) -> None:
        step = self._step
        if step == self._published:
            return
        publish_model(
            self.model,
            self._run_dir.root,
            step=step,
            epoch=self._epoch,
            metrics=self._training_metrics(),
            final=final,
            keep=self._keep,
            sign_key=self._sign_key,
            run_name=self._run_name,
        )
        self._published = step

    def _training_metrics(self) -> dict[str, Any]:
        return {name: value for name, value in self._logs.items() if not name.startswith("val_")}

    def _end_as_failed(self) -> None:
        if self._end is not None:
            self._end()


class EvaluationStopping(keras.callbacks.Callback):
    """Stops ``fit`` at the end of an epoch when an evaluator's score has not improved for ``patience`` evaluations.

    It works like `keras.callbacks.EarlyStopping`, but on the scores of an evaluator that runs beside the training, so
    validation costs the training nothing. The evaluator lags by the duration of an evaluation, so ``fit`` stops that
    much later.

    Args:
        monitor: ``DATASET/METRIC``, such as ``validation/loss``.
        patience: Number of evaluations without an improvement after which to stop, at least 1.
        state_dir: The evaluator's state folder: ``RUN/evaluator``, or the value of ``understudy serve --state-dir``.
        mode: ``min`` or ``max``, whether less or more of the metric is better; optional for a loss.

    Attributes:
        reason: Why it stopped ``fit``, or None if it did not.

    Raises:
        ValueError: An argument is invalid, or ``mode`` is missing.
    """

    def __init__(self, monitor: str, *, patience: int, state_dir: str | Path, mode: StopMode | None = None) -> None:
        super().__init__()
        self._watch = ResultsWatch(stop_rule(monitor, patience=patience, mode=mode), Path(state_dir))
        self.reason: str | None = None

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Reset the reason."""
        del logs
        self.reason = None

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Stop if the rule says so; raise StopRuleError if the evaluator does not score the rule's metric."""
        del epoch, logs
        self.reason = self._watch.reason_to_stop(int(self.model.optimizer.iterations.numpy()))
        if self.reason is not None:
            self.model.stop_training = True


def _check_newest(run_dir: RunDir, step: int, this: str) -> None:
    """Raise ResumeError if a later step is published. An evaluator would take what follows for its predecessors."""
    newest = max(run_dir.committed_steps(), default=0)
    if newest > step:
        raise ResumeError(
            f"{run_dir.root} holds checkpoints up to step {newest}, and {this}; go on from the newest with "
            f"keras.models.load_model(newest_model({str(run_dir.root)!r})), choose another run_dir, or delete the "
            "folder to begin anew"
        )


def _signer(sign_key: Path | str | None, run: str | None, run_dir: Path) -> Signer | None:
    if sign_key is None:
        return None
    return Signer(key=SigningKey.read(Path(sign_key)), run=run or name_of_run(run_dir))


def _fail(stack: ExitStack) -> None:
    error = RuntimeError("fit did not finish")
    stack.__exit__(RuntimeError, error, None)


def _check_strategy(model: keras.Model) -> None:
    strategy = model.distribute_strategy
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy | tf.distribute.ParameterServerStrategy):
        raise StrategyError(
            f"the model is trained under {type(strategy).__name__}, which Keras' fit does not train correctly; use "
            "`understudy train`, which publishes by itself",
        )


@contextmanager
def _averaged(model: keras.Model) -> Iterator[None]:
    """Give every replica the mean of all while the block runs, then restore its own values."""
    _check_strategy(model)
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync == 1:
        yield
        return
    variables = model.non_trainable_variables
    state = ReplicaState(strategy, variables)
    own = state.read()
    means = [average(variable, rows)[None] for variable, rows in zip(variables, own, strict=True)]
    state.write([mean.repeat(len(rows), axis=0) for mean, rows in zip(means, own, strict=True)])
    try:
        yield
    finally:
        state.write(own)
