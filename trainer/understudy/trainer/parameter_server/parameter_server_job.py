"""The chief's part of asynchronous training.

Each step runs on one worker: it reads the variables, computes the gradients of one batch of ``global_batch_size`` and
applies them, while other workers do the same. So a gradient may be older than the weights it is added to, and no two
runs are alike. Every update is added on the parameter server, so none is lost. For state that Keras overwrites
(BatchNorm's statistics, momentum's velocity, dropout's seeds) the last writer wins. The optimizer's count of updates is
that of the steps: a worker that dies between two counts would let them differ for good.

Keras reads, adds and overwrites a metric's state, so workers that shared one would lose updates. Instead each step
begins with a fresh state and returns it to the chief, which adds up the states of all steps, as a synchronous strategy
adds up those of its replicas.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from understudy.compat import compiled_metrics, worker_count
from understudy.experiments import Experiment
from understudy.experiments.arrays import IndexedExamples
from understudy.experiments.experiment_data import training_data
from understudy.trainer.batches import global_batches
from understudy.trainer.data import DataPlan, plan_of
from understudy.trainer.job import ProgressEvent
from understudy.trainer.loop import call_sizes, scalars, timed_next
from understudy.trainer.model import build_model, prepare_for_replicas
from understudy.trainer.settings import TrainSettings
from understudy.trainer.snapshot import Snapshot
from understudy.trainer.step_errors import step_watched
from understudy.trainer.trainer_errors import DataError, ModelError, PeerLostError, StrategyError

Array = npt.NDArray[Any]


class StepMetrics:
    """The loss and the compiled metrics since the last reset, over the steps of all workers.

    Args:
        model: Compiled, and its metrics built, but not updated yet.
    """

    def __init__(self, model: keras.Model) -> None:
        self._metric = compiled_metrics(model)
        variables = () if self._metric is None else self._metric.variables
        self._fresh: list[Array] = [np.asarray(variable) for variable in variables]
        self.reset()

    def state_after(self, y: Any, y_pred: Any, sample_weight: Any) -> list[tf.Tensor]:
        """Return, in a worker's graph, the state after these examples alone."""
        if self._metric is None:
            return []
        return list(self._metric.stateless_update_state(self._fresh, y, y_pred, sample_weight))

    def add(self, loss: npt.ArrayLike, state: Sequence[Array]) -> None:
        """Add a step's loss and its state."""
        self._losses.append(float(np.asarray(loss)))
        for index, (value, fresh) in enumerate(zip(state, self._fresh, strict=True)):
            self._totals[index] = self._totals[index] + (np.asarray(value, np.float64) - fresh)

    def results(self) -> dict[str, float]:
        """Return the results; there was at least one step."""
        metrics = {"loss": sum(self._losses) / len(self._losses)}
        if self._metric is not None:
            state = [tf.constant(total, fresh.dtype) for total, fresh in zip(self._totals, self._fresh, strict=True)]
            metrics |= scalars(self._metric.stateless_result(state))
        return metrics

    def reset(self) -> None:
        """Reset."""
        self._losses: list[float] = []
        self._totals = [fresh.astype(np.float64) for fresh in self._fresh]


_POLL_SECONDS = 0.005
_PROGRESS_POLL_SECONDS = 1.0


class ParameterServerJob:
    """A model on parameter servers, trained by workers that do not wait for each other. Only the chief has this job.

    Raises:
        ExperimentError: The user's code raised.
        ModelError: The model cannot be trained asynchronously.
        DataError: The loop cannot train on this data.
        StrategyError: A worker has more than one GPU.
    """

    def __init__(self, experiment: Experiment, settings: TrainSettings, strategy: tf.distribute.Strategy) -> None:
        if strategy.num_replicas_in_sync > 1:
            raise StrategyError(
                f"each worker has {strategy.num_replicas_in_sync} GPUs, and under parameter_server it trains on one; "
                "start one worker for each GPU, with CUDA_VISIBLE_DEVICES",
            )
        self._settings = settings
        self._strategy = strategy
        self._experiment = experiment
        self._data = training_data(experiment)
        if isinstance(self._data, IndexedExamples):
            raise DataError(
                "training_data() reads arrays in Python, which the workers of parameter_server cannot run; use "
                "record_examples, or another strategy",
            )
        self.plan: DataPlan = plan_of(self._data, experiment, settings, replicas=1)
        with strategy.scope():
            self._model = build_model(experiment, seed=settings.seed)
        _check(self._model)
        prepare_for_replicas(self._model, strategy, global_batches(self._data, self.plan, first_step=0).element_spec)
        _count_every_update(self._model.optimizer)
        self._not_steps = self._updates()
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._metrics = StepMetrics(self._model)
        self._train_step = _make_step(self._model, strategy, self._metrics)

    @property
    def replicas(self) -> int:
        """One: no two models are trained in step."""
        return 1

    def check_agreement(self, first_step: int) -> None:
        """Do nothing: the chief alone decides."""

    def any_task(self, answer: bool) -> bool:  # noqa: FBT001 - a question with two answers
        """Return the answer: the chief alone decides."""
        return answer

    def wait_for_all(self) -> None:
        """Do nothing: the others wait for the chief."""

    def capture(self, step: int) -> Snapshot:
        """Return the current values of all variables, after ``step`` updates, while no worker runs."""
        return Snapshot.of(
            self._model,
            step=step,
            facts=self.plan.facts(replicas=self.replicas),
            replica=[variable.numpy()[None] for variable in self._model.non_trainable_variables],
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Assign the values that `capture` returned to all variables."""
        values = (*snapshot.trained, *snapshot.optimizer, *(rows[0] for rows in snapshot.replica))
        model = self._model
        variables = (*model.trainable_variables, *model.optimizer.variables, *model.non_trainable_variables)
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        self._not_steps = self._updates() - snapshot.step

    def _updates(self) -> int:
        return int(self._model.optimizer.iterations.numpy())

    def _steps(self) -> int:
        """Return the steps done. A model may come with updates of an earlier training, which are none."""
        return self._updates() - self._not_steps

    def run(self, first_step: int, *, asked_to_stop: Callable[[], bool] = lambda: False) -> Iterator[ProgressEvent]:
        """Train; yield progress whenever the workers have done some steps.

        A worker that was killed and has restarted receives work again. Its last step may then run twice, so the total
        may exceed the requested steps by a few; steps are counted as they are applied.

        Raises:
            PeerLostError: The workers made no progress for as long as a restart may take.
        """
        settings = self._settings
        batches = iter(self._coordinator.create_per_worker_dataset(self._per_worker_batches(first_step)))
        step = first_step
        self._metrics.reset()
        workers = worker_count(self._strategy)
        while step < settings.steps:
            size = next(
                call_sizes(
                    first_step=step,
                    steps=settings.steps,
                    checkpoint_every=settings.checkpoint_every,
                    steps_per_call=settings.steps_per_call,
                ),
            )
            began = time.monotonic()
            results = [self._coordinator.schedule(self._train_step, args=(batches,)) for _ in range(size)]
            with step_watched(step):
                self._join()
                fetched = [result.fetch() for result in results]
            for _, loss, state in fetched:
                self._metrics.add(loss, state)
            before, step = step, self._steps()
            due = step // settings.checkpoint_every > before // settings.checkpoint_every or step >= settings.steps
            yield ProgressEvent(
                step=step,
                metrics=self._metrics.results(),
                due=due,
                stopping=asked_to_stop(),
                seconds=time.monotonic() - began,
                input_wait_seconds=sum(float(waited) for waited, _, _ in fetched) / workers,
            )
            if due:
                self._metrics.reset()

    def _per_worker_batches(self, first_step: int) -> Callable[[], Any]:
        def batches_of_this_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
            del context
            worker = tf.distribute.coordinator.experimental_get_current_worker_index()
            # A new dataset, as the chief's would stay on the chief.
            is_dataset = isinstance(self._data, tf.data.Dataset)
            data = training_data(self._experiment) if is_dataset else self._data
            return global_batches(data, self.plan, first_step=first_step, worker=worker)

        return tf.function(  # type: ignore[no-any-return]
            functools.partial(self._strategy.distribute_datasets_from_function, batches_of_this_worker)
        )

    def _join(self) -> None:
        """Wait for the scheduled steps while there is progress. TensorFlow's own wait is unbounded."""
        patience = self._settings.cluster_timeout_seconds
        applied, progressed_at = -1, time.monotonic()
        looked_at = progressed_at
        while not self._coordinator.done():
            time.sleep(_POLL_SECONDS)
            now = time.monotonic()
            if now - looked_at < _PROGRESS_POLL_SECONDS:
                continue
            looked_at = now
            before, applied = applied, self._steps()
            if applied != before:
                progressed_at = now
            elif now - progressed_at > patience:
                raise PeerLostError(f"no worker has done a step for {patience:g} s; start every task again")
        self._coordinator.join()


def _make_step(model: keras.Model, strategy: tf.distribute.Strategy, metrics: StepMetrics) -> Any:
    variables = model.trainable_variables

    def train_on(batch: Any) -> tuple[tf.Tensor, list[tf.Tensor]]:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            y_pred = model(x, training=True)
            loss = model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        model.optimizer.apply(gradients, variables)
        return loss, metrics.state_after(y, y_pred, sample_weight)

    @tf.function
    def train_step(batches: Iterator[object]) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        batch, waited = timed_next(batches)
        loss, state = strategy.run(train_on, args=(batch,))
        return waited, loss, state

    return train_step


def _check(model: keras.Model) -> None:
    if type(model).train_step is not keras.Model.train_step:
        raise ModelError("the model overrides train_step(), which the workers cannot run; choose another strategy")
    optimizer = model.optimizer
    if hasattr(optimizer, "inner_optimizer") or getattr(optimizer, "gradient_accumulation_steps", None):
        raise ModelError(
            "the optimizer scales the loss or accumulates gradients, which workers that do not wait for each other "
            "would mix up; leave that out, or choose another strategy",
        )


def _count_every_update(optimizer: keras.optimizers.Optimizer) -> None:
    """Make the optimizer count on the parameter server; Keras would read, add and overwrite, and lose updates."""
    counter = optimizer.iterations
    counter.assign_add = lambda value: counter.value.assign_add(tf.cast(value, counter.dtype))
