"""One training, from building its model to its last step. The caller decides what to do after each advance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import keras
import tensorflow as tf

from understudy.experiments import Experiment
from understudy.experiments.experiment_data import training_data
from understudy.trainer.batches import distribute, global_batches
from understudy.trainer.cluster import any_task, check_agreement, wait_for_all
from understudy.trainer.data import DataPlan, plan_of
from understudy.trainer.loop import call_sizes, make_loop
from understudy.trainer.model import build_model, prepare_for_replicas
from understudy.trainer.replica_state import ReplicaState
from understudy.trainer.settings import TrainSettings
from understudy.trainer.snapshot import Array, Snapshot
from understudy.trainer.step_errors import step_watched
from understudy.trainer.tensorboard_files import boundaries


@dataclass(frozen=True, kw_only=True)
class ProgressEvent:
    """Progress: some steps were done.

    Attributes:
        step: Steps done.
        metrics: Over all replicas, since the last checkpoint was due.
        due: Whether a checkpoint is due now.
        stopping: Whether any task is asked to stop; the same in all tasks.
        seconds: Duration of these steps.
        input_wait_seconds: Of these, the wait for batches; the mean of the workers in asynchronous training.
    """

    step: int
    metrics: Mapping[str, float]
    due: bool
    stopping: bool
    seconds: float
    input_wait_seconds: float


class Job(Protocol):
    """A training in progress, under any strategy. In a cluster, all training tasks call each method."""

    plan: DataPlan

    @property
    def replicas(self) -> int:
        """Number of models trained in step, over all workers."""

    def capture(self, step: int) -> Snapshot:
        """Return the current values of all variables, after ``step`` steps."""

    def restore(self, snapshot: Snapshot) -> None:
        """Assign the values that `capture` returned to all variables."""

    def run(self, first_step: int, *, asked_to_stop: Callable[[], bool]) -> Iterator[ProgressEvent]:
        """Train; yield progress from time to time, and at each due checkpoint."""

    def check_agreement(self, first_step: int) -> None:
        """Raise ClusterError if another task would continue from another step."""

    def any_task(self, answer: bool) -> bool:  # noqa: FBT001 - a question with two answers
        """Return whether any task answers yes, once every task has called this."""

    def wait_for_all(self) -> None:
        """Return when every task has called this."""


class TrainingJob:
    """A model under a synchronous strategy, its training data, and its progress.

    In a cluster, all tasks call each method together. One thread uses it.

    Args:
        experiment: The model and data to train.
        settings: The settings.
        strategy: The strategy, made from the same settings.

    Raises:
        ExperimentError: The user's code raised.
        ModelError: The loop cannot train this model.
        DataError: The loop cannot train on this data.
    """

    def __init__(self, experiment: Experiment, settings: TrainSettings, strategy: tf.distribute.Strategy) -> None:
        self._settings = settings
        self._strategy = strategy
        self._data = training_data(experiment)
        self.plan: DataPlan = plan_of(self._data, experiment, settings, replicas=strategy.num_replicas_in_sync)
        with strategy.scope():
            self._model = build_model(experiment, seed=settings.seed)
        element_spec = global_batches(self._data, self.plan, first_step=0).element_spec
        prepare_for_replicas(self._model, strategy, element_spec)
        self._replica_state = ReplicaState(strategy, self._model.non_trainable_variables)
        self._replica_state.seed_replicas()
        self._run_steps = make_loop(self._model, strategy)
        self._batches: Iterator[object] = iter(())

    @property
    def replicas(self) -> int:
        """Number of models trained in step, over all workers."""
        return int(self._strategy.num_replicas_in_sync)

    def check_agreement(self, first_step: int) -> None:
        """Raise ClusterError if another task would continue from another step."""
        check_agreement(self._strategy, first_step=first_step)

    def any_task(self, answer: bool) -> bool:  # noqa: FBT001 - a question with two answers
        """Return whether any task answers yes, once every task has called this."""
        return any_task(self._strategy, answer)

    def wait_for_all(self) -> None:
        """Return when every task has called this."""
        wait_for_all(self._strategy)

    def capture(self, step: int) -> Snapshot:
        """Return the current values of all variables, after ``step`` steps."""
        return Snapshot.of(
            self._model,
            step=step,
            facts=self.plan.facts(replicas=self.replicas),
            replica=self._replica_state.read(),
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Assign the values that `capture` returned to all variables."""
        _assign(self._model.trainable_variables, snapshot.trained)
        _assign(self._model.optimizer.variables, snapshot.optimizer)
        self._replica_state.write(snapshot.replica)

    def run(self, first_step: int, *, asked_to_stop: Callable[[], bool] = lambda: False) -> Iterator[ProgressEvent]:
        """Train; yield progress after each call of the graph.

        Args:
            first_step: Steps done before.
            asked_to_stop: Whether this task is asked to stop; all tasks learn of it with the next advance.
        """
        settings = self._settings
        batches = distribute(self._strategy, self._data, self.plan, first_step=first_step)
        # Kept as long as this object: releasing the pipeline can take a minute.
        self._batches = batches
        step = first_step
        self._model.reset_metrics()
        for size in call_sizes(
            first_step=first_step,
            steps=settings.steps,
            checkpoint_every=settings.checkpoint_every,
            steps_per_call=settings.steps_per_call,
            also_at=boundaries(settings.profile_range),
        ):
            with step_watched(step):
                call = self._run_steps(batches, size, asked_to_stop())
            step += size
            due = step % settings.checkpoint_every == 0 or step == settings.steps
            yield ProgressEvent(
                step=step,
                metrics=call.metrics,
                due=due,
                stopping=call.stopping,
                seconds=call.seconds,
                input_wait_seconds=call.input_wait_seconds,
            )
            if due:
                self._model.reset_metrics()


def _assign(variables: Iterable[keras.Variable], values: Iterable[Array]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
